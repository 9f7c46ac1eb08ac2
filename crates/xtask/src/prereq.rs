//! `cargo xtask prereq`: checks that this machine has what the lab and the tests need. On Debian and Ubuntu it installs missing packages;
//! elsewhere it lists everything that is missing.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The options of `cargo xtask prereq`, and of the commands that begin with it.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Prereq {
    /// Install nothing; only list what is missing.
    #[arg(long)]
    pub no_install: bool,
}

/// A program that the project runs, and its Debian package.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    name: &'static str,
    package: &'static str,
    why: &'static str,
}

const fn program(name: &'static str, package: &'static str, why: &'static str) -> Program {
    Program { name, package, why }
}

const PROGRAMS: [Program; 30] = [
    program("nft", "nftables", "firewall tables of agents and CNI"),
    program(
        "iptables-nft-restore",
        "iptables",
        "rules as kube-proxy and CNIs write them",
    ),
    program("iptables-legacy-restore", "iptables", "the same, as older ones do"),
    program("ipset", "ipset", "the sets that Calico's rules name"),
    program("ip", "iproute2", "links, addresses, routes"),
    program("bridge", "iproute2", "cutting a node's cable"),
    program("ping", "iputils-ping", "test traffic"),
    program("ethtool", "ethtool", "measuring with and without the offload of links"),
    program("curl", "curl", "test traffic"),
    program("iperf3", "iperf3", "throughput"),
    program("tcpdump", "tcpdump", "captures"),
    program("conntrack", "conntrack", "reading connections back"),
    program("wg", "wireguard-tools", "reading devices back, keys"),
    program("busybox", "busybox-static", "the test image"),
    program("nsenter", "util-linux", "stepping into namespaces"),
    program("unshare", "util-linux", "making namespaces"),
    program("setpriv", "util-linux", "ending programs with their parent"),
    program("setsid", "util-linux", "a session for each node"),
    program("gcc", "gcc", "building runc"),
    program("g++", "g++", "building libFuzzer"),
    program("ldd", "libc-bin", "packing images"),
    program("buildah", "buildah", "building the images of agent and controller"),
    program("mmdebstrap", "mmdebstrap", "the base of these images in the tests"),
    program("pkg-config", "pkg-config", "building runc"),
    program("git", "git", "versions in builds"),
    program(
        "qemu-system-x86_64",
        "qemu-system-x86",
        "a machine with a kernel that has WireGuard",
    ),
    program("modprobe", "kmod", "that kernel's modules"),
    program("xz", "xz-utils", "unpacking that kernel"),
    program("zstd", "zstd", "unpacking that kernel"),
    program("dpkg-deb", "dpkg", "unpacking that kernel"),
];

/// The oldest Go that downloads the toolchain version that a go.mod requires.
const OLDEST_GO: (u32, u32) = (1, 21);

/// `cargo xtask prereq`.
pub fn run(args: &Prereq) -> Result<()> {
    ensure(args)?;
    println!("prereq: nothing is missing");
    Ok(())
}

/// Installs missing packages where possible. Fails with a list of everything that is still missing.
pub fn ensure(args: &Prereq) -> Result<()> {
    let mut missing = missing_programs(&search_path());
    // No program indicates libc.a and libc's headers, without which gcc cannot link runc.
    let mut packages: Vec<_> = missing.iter().map(|program| program.package).collect();
    if !has_static_libc() {
        packages.push("libc6-dev");
    }
    packages.sort_unstable();
    packages.dedup();
    let root = is_root();
    let mut problems = vec![];
    if !root {
        problems.push(
            "not root: namespaces, mounts and nftables need it. Run it with `sudo -E env PATH=\"$PATH\"`".to_owned(),
        );
    }
    if !packages.is_empty() && root && !args.no_install && has_apt() {
        install(&packages)?;
        missing = missing_programs(&search_path());
        packages.clear();
    }
    for program in &missing {
        let Program { name, package, why } = program;
        problems.push(format!(
            "{name} ({why}): Debian and Ubuntu have it in the package {package}"
        ));
    }
    if packages.contains(&"libc6-dev") {
        problems.push("libc.a (building runc): Debian and Ubuntu have it in the package libc6-dev".into());
    }
    problems.extend(go_problem());
    // The checks run the programs above; without these, a failure would have another cause than the kernel.
    problems.extend(kernel_problems(root && missing.is_empty()));
    if problems.is_empty() {
        return Ok(());
    }
    bail!("this machine lacks:\n  - {}", problems.join("\n  - "))
}

/// PATH, and the directories of system programs that a user's PATH may lack.
fn search_path() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut directories: Vec<_> = std::env::split_paths(&path).collect();
    directories.extend(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from));
    directories
}

fn missing_programs(directories: &[PathBuf]) -> Vec<&'static Program> {
    let there = |program: &&Program| {
        directories
            .iter()
            .any(|directory| directory.join(program.name).is_file())
    };
    PROGRAMS.iter().filter(|program| !there(program)).collect()
}

fn has_apt() -> bool {
    search_path()
        .iter()
        .any(|directory| directory.join("apt-get").is_file())
}

fn has_static_libc() -> bool {
    let found = Command::new("gcc").arg("-print-file-name=libc.a").output();
    // gcc prints the bare name if there is no such file. A missing gcc is reported elsewhere.
    found.map_or(true, |output| {
        String::from_utf8_lossy(&output.stdout).trim() != "libc.a"
    })
}

fn install(packages: &[&str]) -> Result<()> {
    println!(
        "prereq: installing with apt-get (--no-install forbids it): {}",
        packages.join(" ")
    );
    let apt = |words: &[&str]| {
        let mut command = Command::new("apt-get");
        command
            // Another apt-get (unattended upgrades) may hold the lock for minutes.
            .args(["-o", "DPkg::Lock::Timeout=300"])
            .args(words)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .status()
            .context("run apt-get")
    };
    // Without recommended packages: wireguard-tools would install a kernel.
    let wanted = [&["install", "-y", "-q", "--no-install-recommends"], packages].concat();
    if apt(&wanted)?.success() {
        return Ok(());
    }
    println!("prereq: apt-get failed; once more with fresh package lists");
    if apt(&["update", "-q"])?.success() && apt(&wanted)?.success() {
        return Ok(());
    }
    bail!(
        "apt-get could not install {}; see its messages above",
        packages.join(" ")
    )
}

fn go_problem() -> Option<String> {
    let remedy = "install Go 1.26 from https://go.dev/dl/ and put it into PATH";
    match Command::new("go").args(["env", "GOVERSION"]).current_dir("/").output() {
        Err(_) => Some(format!("go (building Kubernetes and the node's programs): {remedy}")),
        Ok(output) => {
            let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            (parse_go(&version).unwrap_or_default() < OLDEST_GO)
                .then(|| format!("go is {version:?}, too old: {remedy}"))
        }
    }
}

/// `go1.26.3` -> (1, 26).
fn parse_go(version: &str) -> Option<(u32, u32)> {
    let (major, rest) = version.strip_prefix("go")?.split_once('.')?;
    let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn kernel_problems(can_try: bool) -> Vec<String> {
    let mut problems = vec![];
    if !Path::new("/dev/net/tun").exists() {
        problems.push(
            "/dev/net/tun: load the module (`modprobe tun`); in a container, pass the device in (--device /dev/net/tun)"
                .into(),
        );
    }
    let works = |program: &str, words: &[&OsStr]| {
        Command::new(program)
            .args(words)
            .output()
            .is_ok_and(|o| o.status.success())
    };
    let plain = |words: &[&'static str]| words.iter().map(|word| OsStr::new(*word)).collect::<Vec<_>>();
    if can_try && !works("unshare", &plain(&["--net", "--mount", "--pid", "--fork", "true"])) {
        problems.push("the right to make namespaces: in a container, run it privileged".into());
    }
    if can_try && !works("unshare", &plain(&["--net", "nft", "list", "ruleset"])) {
        problems.push("nftables in the kernel: load the module (`modprobe nf_tables`)".into());
    }
    let overlay = std::fs::read_to_string("/proc/filesystems").is_ok_and(|text| text.contains("overlay"));
    if can_try && !overlay && !works("modprobe", &plain(&["overlay"])) {
        problems.push("the overlay file system in the kernel: load the module (`modprobe overlay`)".into());
    }
    problems
}

/// Reads /proc, so that this crate needs no system call crate for one number.
fn is_root() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    uids.and_then(|uids| uids.split_whitespace().nth(1)) == Some("0")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn program_in_no_directory_is_missing_with_its_package() {
        let directory = tempfile_with(&["nft", "ip", "bridge"]);
        let missing = missing_programs(std::slice::from_ref(&directory));
        std::fs::remove_dir_all(&directory).unwrap();
        assert_eq!(missing.len(), PROGRAMS.len() - 3);
        assert!(missing.contains(&&program("ping", "iputils-ping", "test traffic")));
        assert!(
            missing
                .iter()
                .all(|program| !["nftables", "iproute2"].contains(&program.package))
        );
    }

    #[test]
    fn contributing_lists_the_packages_that_are_installed() {
        let page = std::fs::read_to_string(crate::programs::root().join("CONTRIBUTING.md")).unwrap();
        let (_, rest) = page.split_once("with `apt-get` and say so: ").unwrap();
        let (listed, _) = rest.split_once(". ").unwrap();
        let listed = listed.replace("and for the virtual machine ", "");
        let listed: BTreeSet<_> = listed.split(", ").collect();
        let mut installed: BTreeSet<_> = PROGRAMS.iter().map(|program| program.package).collect();
        installed.insert("libc6-dev");
        // Every Debian and Ubuntu has these.
        installed.remove("dpkg");
        installed.remove("libc-bin");
        assert_eq!(listed, installed);
    }

    #[test]
    fn versions_of_go_are_read_as_numbers() {
        assert_eq!(parse_go("go1.26.3"), Some((1, 26)));
        assert_eq!(parse_go("go1.9"), Some((1, 9)));
        assert_eq!(parse_go("go1.27rc1"), Some((1, 27)));
        assert_eq!(parse_go("devel"), None);
    }

    fn tempfile_with(names: &[&str]) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("xtask-prereq-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        for name in names {
            std::fs::write(directory.join(name), "").unwrap();
        }
        directory
    }
}
