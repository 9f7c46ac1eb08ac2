#!/bin/bash
# Runs as pid 1 after init.sh. The guest's root shows the host's files at the same paths; writes stay in the guest's memory.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
m=/run/machine b=/run/machine/busybox
mkdir -p /dev/pts /dev/shm /dev/mqueue /dev/net /run/netns /run/lock
[ -e /dev/net/tun ] || mknod -m 666 /dev/net/tun c 10 200
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
ln -sfn /proc/self/fd /dev/fd
for i in 0:stdin 1:stdout 2:stderr; do ln -sfn "fd/${i%:*}" "/dev/${i#*:}"; done
mount -t cgroup2 none /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
release=$(</proc/sys/kernel/osrelease)
mkdir -p "/lib/modules/$release"
mount --bind "$(<$m/run/modules)/lib/modules/$release" "/lib/modules/$release"
# The kernel would load these modules on demand one by one, which costs seconds.
modprobe -a nf_tables nft_ct nft_chain_nat nft_masq nft_nat nft_fib_inet nft_reject_inet nft_limit nft_log nf_conntrack_netlink wireguard veth tun
echo vm >/proc/sys/kernel/hostname
ip link set lo up
for port in /sys/class/virtio-ports/*; do
  read -r name <"$port/name"
  case $name in out) out=/dev/${port##*/} ;; err) err=/dev/${port##*/} ;; esac
done
# The command writes to pipes. A port can be opened only once: if it were the command's stderr, opening /dev/stderr would fail.
mkfifo $m/out $m/err
cat <$m/out >"$out" & copies=$!
cat <$m/err >"$err" & copies="$copies $!"
setsid /bin/bash $m/run/command </dev/null >$m/out 2>$m/err
code=$?
# Wait for both copies, at most 2 s: a background process of the command may keep the pipes open.
for ((i = 0; i < 40; i++)); do kill -0 $copies 2>/dev/null || break; sleep .05; done
echo $code >$m/run/code
exec $b poweroff -f
