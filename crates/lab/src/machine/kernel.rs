//! Provides the kernel of the virtual machine (the guest): unpacks it, and the modules that network tests need, from one
//! pinned Debian package into the cache.
//!
//! The pin is a version and its hash. Debian's archive keeps a version for months, and its snapshot archive keeps it
//! forever, so an old checkout still finds its kernel. To upgrade, change [`PACKAGE`], [`SHA256`], [`RELEASE`] and the date
//! in [`ARCHIVES`].

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::fcntl::{Flock, FlockArg};
use sha2::{Digest, Sha256};

use super::{find, image};
use crate::{Error, Result, lab_home};

/// The backported long-term kernel of Debian 12 with all drivers (the cloud kernel lacks 9p).
const PACKAGE: &str = "linux-image-6.12.117+deb12-amd64_6.12.117-1~deb12u1_amd64.deb";
const SHA256: &str = "803d36a7cda13355ae8152122470288b2636f19f1cb58162dd9d8b408af9b1b4";
const RELEASE: &str = "6.12.117+deb12-amd64";
/// URLs of directories that contain the package, in the order in which they are tried.
const ARCHIVES: [&str; 2] = [
    "https://deb.debian.org/debian-security/pool/updates/main/l/linux-signed-6.12-amd64",
    "https://snapshot.debian.org/archive/debian-security/20261121T000000Z/pool/updates/main/l/linux-signed-6.12-amd64",
];

/// Modules that the guest loads on demand; their dependencies are added. All modules of the package would need 400 MB.
const MODULES: &str = "wireguard veth bridge br_netfilter tun dummy vxlan ifb vrf macvlan ip_gre ip6_gre ipip sit \
    nlmon nf_tables nft_chain_nat nft_nat nft_masq nft_redir nft_ct nft_fib_inet nft_fib_ipv4 nft_fib_ipv6 \
    nft_reject_inet ipt_REJECT ip6t_REJECT nft_reject_ipv4 nft_reject_ipv6 nft_limit nft_log nft_numgen nft_hash \
    nft_quota nft_connlimit nft_tproxy nft_socket nft_compat nft_flow_offload nft_synproxy nft_queue nf_conntrack \
    nf_conntrack_netlink nf_log_syslog nfnetlink_log xt_TCPMSS xt_MASQUERADE xt_conntrack xt_mark xt_comment \
    xt_addrtype xt_tcpudp xt_nat xt_statistic xt_set xt_ipvs ip_set_bitmap_port ip_set_hash_ip ip_set_hash_ipport \
    ip_set_hash_ipportip ip_set_hash_ipportnet ip_set_hash_net ip_vs ip_vs_rr ip_vs_sh ip_vs_wrr iptable_nat \
    iptable_filter iptable_mangle iptable_raw ip6table_filter ip6table_nat ip6table_mangle sch_netem sch_htb sch_tbf \
    sch_fq sch_fq_codel sch_ingress cls_u32 cls_bpf cls_matchall act_mirred act_police overlay 9p 9pnet_virtio \
    virtio_pci virtio_console virtio-rng af_packet tcp_bbr inet_diag tcp_diag udp_diag";
/// Modules that the guest needs before it mounts the host's root, in load order.
const BOOT: [&str; 6] = [
    "virtio_pci",
    "virtio_console",
    "virtio-rng",
    "overlay",
    "9pnet_virtio",
    "9p",
];

/// The files of a bootable kernel.
#[derive(Debug, Clone)]
pub(super) struct Kernel {
    pub(super) vmlinux: PathBuf,
    pub(super) initramfs: PathBuf,
    /// The directory that contains `lib/modules/RELEASE`.
    pub(super) modules: PathBuf,
}

/// Returns the kernel in the cache, and downloads it first if it is not there.
pub(super) fn ensure(progress: &dyn Fn(&str)) -> Result<Kernel> {
    if std::env::consts::ARCH != "x86_64" {
        return Err(Error::Missing {
            what: format!("a kernel package for {}", std::env::consts::ARCH),
            remedy: "the virtual machine supports only x86_64: run its tests on such a machine".into(),
        });
    }
    let programs = [
        "qemu-system-x86_64",
        "setpriv",
        "curl",
        "dpkg-deb",
        "xz",
        "zstd",
        "depmod",
        "modprobe",
        "busybox",
        "bash",
    ];
    let missing: Vec<_> = programs.into_iter().filter(|program| find(program).is_none()).collect();
    if !missing.is_empty() {
        return Err(Error::Missing {
            what: format!("a program that the virtual machine needs ({})", missing.join(", ")),
            remedy: "on Debian and Ubuntu `cargo xtask prereq` installs qemu-system-x86, kmod, xz-utils, zstd, busybox-static and \
                     curl; dpkg-deb is in the package dpkg of any distribution"
                .into(),
        });
    }
    let home = lab_home()?;
    let directory = home.join(format!("machine-{}", cache_key()));
    let kernel = Kernel {
        vmlinux: directory.join("vmlinux"),
        initramfs: directory.join("initramfs"),
        modules: directory.clone(),
    };
    if directory.exists() {
        return Ok(kernel);
    }
    std::fs::create_dir_all(&home).map_err(Error::io(format!("create {}", home.display())))?;
    let lock = home.join("machine.lock");
    let file = std::fs::File::create(&lock).map_err(Error::io(format!("open {}", lock.display())))?;
    let _lock = Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, errno)| Error::errno(format!("lock {}", lock.display()))(errno))?;
    // Another process may have created the directory while this one waited for the lock.
    if !directory.exists() {
        make(&home, &directory, progress)?;
    }
    Ok(kernel)
}

/// Twelve hex digits of a hash over the package's hash, the module lists and the scripts. The host's busybox, which the initramfs
/// contains, is not hashed.
fn cache_key() -> String {
    let mut hash = Sha256::new();
    for part in [SHA256, MODULES, &BOOT.join(" "), image::INIT, image::STAGE2] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize()
        .iter()
        .take(6)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn make(home: &Path, directory: &Path, progress: &dyn Fn(&str)) -> Result<()> {
    let package = home.join(PACKAGE);
    if !package.exists() {
        download(&package, progress)?;
    }
    progress(&format!("unpacking Linux {RELEASE} into the cache"));
    let unfinished = home.join("machine.unfinished");
    let io = |doing: &str| Error::io(format!("{doing} {}", unfinished.display()));
    if unfinished.exists() {
        std::fs::remove_dir_all(&unfinished).map_err(io("remove"))?;
    }
    let (unpacked, result) = (unfinished.join("unpacked"), unfinished.join("result"));
    std::fs::create_dir_all(&result).map_err(io("write into"))?;
    run("dpkg-deb", [Path::new("-x"), &package, &unpacked])?;
    let vmlinuz = unpacked.join(format!("boot/vmlinuz-{RELEASE}"));
    std::fs::write(result.join("vmlinux"), vmlinux(&vmlinuz)?).map_err(io("write into"))?;

    run("depmod", ["-b".as_ref(), unpacked.as_os_str(), RELEASE.as_ref()])?;
    let tree = |root: &Path| root.join("lib/modules").join(RELEASE);
    for module in MODULES.split_whitespace() {
        for file in module_files(&unpacked, module)? {
            let inside = file.strip_prefix(tree(&unpacked)).unwrap_or(&file).with_extension("");
            let target = tree(&result).join(inside);
            std::fs::create_dir_all(target.parent().unwrap_or(&result)).map_err(io("write into"))?;
            // Modules are stored uncompressed, because the guest is slow to decompress them.
            std::fs::write(
                &target,
                unpack(&std::fs::read(&file).map_err(Error::io(format!("read {}", file.display())))?)?,
            )
            .map_err(io("write into"))?;
        }
    }
    for name in ["modules.builtin", "modules.builtin.modinfo", "modules.order"] {
        std::fs::copy(tree(&unpacked).join(name), tree(&result).join(name)).map_err(io("write into"))?;
    }
    run("depmod", ["-b".as_ref(), result.as_os_str(), RELEASE.as_ref()])?;

    let mut boot: Vec<PathBuf> = Vec::new();
    for module in BOOT {
        for file in module_files(&result, module)? {
            if !boot.contains(&file) {
                boot.push(file);
            }
        }
    }
    std::fs::write(result.join("initramfs"), image::initramfs(&boot)?).map_err(io("write into"))?;
    std::fs::rename(&result, directory).map_err(Error::io(format!("rename to {}", directory.display())))?;
    // Remove intermediate files, and the directories and packages that other versions of this file have left in the cache.
    let _ = std::fs::remove_dir_all(&unfinished);
    for entry in std::fs::read_dir(home).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_old_directory = name.starts_with("machine-") && entry.path() != directory;
        let is_old_package = name.starts_with("linux-image-") && name != PACKAGE;
        if is_old_directory || is_old_package {
            let _ = std::fs::remove_dir_all(entry.path()).or_else(|_| std::fs::remove_file(entry.path()));
        }
    }
    Ok(())
}

fn download(package: &Path, progress: &dyn Fn(&str)) -> Result<()> {
    let unfinished = package.with_extension("unfinished");
    let mut failures = Vec::new();
    for archive in ARCHIVES {
        let url = format!("{archive}/{PACKAGE}");
        progress(&format!("downloading {url} (102 MiB)"));
        let mut curl = Command::new("curl");
        curl.args(["-sSfL", "--retry", "2", "--connect-timeout", "20", "-o"])
            .arg(&unfinished)
            .arg(&url);
        let output = curl.stdin(Stdio::null()).output().map_err(Error::io("start curl"))?;
        if !output.status.success() {
            failures.push(String::from_utf8_lossy(&output.stderr).trim().to_owned());
            continue;
        }
        let read = Error::io(format!("read {}", unfinished.display()));
        let bytes = std::fs::read(&unfinished).map_err(read)?;
        let hash: String = Sha256::digest(&bytes)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        if hash == SHA256 {
            return std::fs::rename(&unfinished, package)
                .map_err(Error::io(format!("rename to {}", package.display())));
        }
        failures.push(format!("{url} has the hash {hash}, not {SHA256}"));
    }
    let _ = std::fs::remove_file(&unfinished);
    Err(Error::Missing {
        what: format!("the kernel package {PACKAGE} ({})", failures.join("; ")),
        remedy: format!(
            "download the file to {} by hand, or change the pin in crates/lab/src/machine/kernel.rs to a version that Debian has",
            package.display()
        ),
    })
}

/// Extracts the uncompressed kernel from a bzImage (Documentation/arch/x86/boot.rst, header fields 0x1f1, 0x248 and
/// 0x24c). QEMU boots the uncompressed kernel, because the guest would need seconds to decompress it.
fn vmlinux(vmlinuz: &Path) -> Result<Vec<u8>> {
    let bytes = std::fs::read(vmlinuz).map_err(Error::io(format!("read {}", vmlinuz.display())))?;
    let word = |at: usize| {
        bytes
            .get(at..at + 4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize)
    };
    let payload = || {
        let setup = (usize::from(*bytes.get(0x1f1)?) + 1) * 512;
        let (offset, length) = (word(0x248)?, word(0x24c)?);
        bytes.get(setup + offset..setup + offset + length)
    };
    let payload = payload().ok_or_else(|| Error::Other(format!("{} is not a bzImage", vmlinuz.display())))?;
    let kernel = unpack(payload)?;
    if !kernel.starts_with(b"\x7fELF") {
        return Err(Error::Other(format!(
            "{} does not contain an ELF kernel",
            vmlinuz.display()
        )));
    }
    Ok(kernel)
}

/// Decompresses the first xz or zstd stream. In a bzImage, the uncompressed size follows it: zstd then fails after it has written the
/// whole stream, so only empty output is an error.
fn unpack(packed: &[u8]) -> Result<Vec<u8>> {
    let mut file = tempfile::tempfile().map_err(Error::io("make a temporary file"))?;
    std::io::Write::write_all(&mut file, packed)
        .and_then(|()| std::io::Seek::rewind(&mut file))
        .map_err(Error::io("write a temporary file"))?;
    let (program, words) = match packed {
        [0xfd, b'7', b'z', b'X', b'Z', ..] => ("xz", ["-dc", "--single-stream"]),
        _ => ("zstd", ["-dc", "-q"]),
    };
    let mut command = Command::new(program);
    command.args(words).stdin(file);
    let output = command.output().map_err(Error::io(format!("start {program}")))?;
    if output.stdout.is_empty() {
        return Err(Error::Command {
            command: format!("{command:?}"),
            status: output.status.to_string(),
            output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        });
    }
    Ok(output.stdout)
}

/// The files of a module and its dependencies, in load order. Empty for a module that is built in.
fn module_files(root: &Path, module: &str) -> Result<Vec<PathBuf>> {
    let words = [
        "-S".as_ref(),
        RELEASE.as_ref(),
        "--show-depends".as_ref(),
        module.as_ref(),
    ];
    let output = run("modprobe", ["-d".as_ref(), root.as_os_str()].into_iter().chain(words))?;
    let files = output.lines().filter_map(|line| line.strip_prefix("insmod "));
    // Options of the module may follow the file name.
    let file = |line: &str| line.split_whitespace().next().map(PathBuf::from);
    Ok(files.filter_map(file).collect())
}

fn run<S: AsRef<std::ffi::OsStr>>(program: &str, words: impl IntoIterator<Item = S>) -> Result<String> {
    let path = find(program).unwrap_or_else(|| program.into());
    let mut command = Command::new(path);
    command.args(words).stdin(Stdio::null());
    let output = command.output().map_err(Error::io(format!("start {program}")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(Error::Command {
        command: format!("{command:?}"),
        status: output.status.to_string(),
        output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}
