#!/busybox sh
# First process of the guest. It mounts the guest's root: the host's files, read-only, under a writable layer in memory.
B=/busybox
say() { echo "init: $*" >/dev/console; }
$B mount -t devtmpfs dev /dev
$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
for module in /modules/*; do $B insmod "$module" || say "cannot load $module"; done
options=trans=virtio,version=9p2000.L,msize=524288
# With `cache=loose` the guest may miss later changes of these files on the host. It needs no such change.
$B mount -t 9p -o $options,cache=loose,ro host /host || say "cannot mount the host's files"
$B mount -t tmpfs -o mode=755,size=75% upper /upper
$B mkdir /upper/files /upper/work
$B mount -t overlay -o lowerdir=/host,upperdir=/upper/files,workdir=/upper/work root /root || say "cannot mount the root"
for directory in proc sys dev; do $B mount --move /$directory /root/$directory; done
$B mount -t tmpfs -o mode=755 run /root/run
$B mkdir -p /root/run/machine/run
$B mount -t 9p -o $options,cache=none run /root/run/machine/run || say "cannot mount the run directory"
$B cp /busybox /stage2 /root/run/machine/
exec $B switch_root /root /bin/bash /run/machine/stage2
