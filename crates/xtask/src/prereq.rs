//! `cargo xtask prereq`: checks the prerequisites of the lab and the tests on this machine. As root on Debian and Ubuntu it
//! installs missing packages. It lists everything that it cannot install.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The options of `cargo xtask prereq`, and of the commands that first check the prerequisites.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Prereq {
    /// Install nothing; only list what is missing.
    #[arg(long)]
    pub no_install: bool,
}

/// A program that the project runs, its Debian package, and its use.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    name: &'static str,
    package: &'static str,
    why: &'static str,
}

const fn program(name: &'static str, package: &'static str, why: &'static str) -> Program {
    Program { name, package, why }
}

const PROGRAMS: [Program; 31] = [
    program("nft", "nftables", "firewall tables of agents and CNI"),
    program(
        "iptables-nft-restore",
        "iptables",
        "rules of kube-proxy and CNIs in the tests",
    ),
    program("iptables-legacy-restore", "iptables", "older rules in the tests"),
    program("ipset", "ipset", "the IP sets in Calico's rules"),
    program("ip", "iproute2", "links, addresses, routes"),
    program("bridge", "iproute2", "disconnecting nodes"),
    program("ping", "iputils-ping", "test traffic"),
    program("ethtool", "ethtool", "measurements with and without offload"),
    program("curl", "curl", "test traffic"),
    program("iperf3", "iperf3", "throughput"),
    program("tcpdump", "tcpdump", "captures"),
    program("conntrack", "conntrack", "reading conntrack entries"),
    program("wg", "wireguard-tools", "reading WireGuard devices, creating keys"),
    program("sysctl", "procps", "wg-quick in the tests"),
    program("busybox", "busybox-static", "the test image"),
    program("nsenter", "util-linux", "entering namespaces"),
    program("unshare", "util-linux", "creating namespaces"),
    program("setpriv", "util-linux", "killing programs with their parent"),
    program("setsid", "util-linux", "a process session for each node"),
    program("gcc", "gcc", "building runc"),
    program("g++", "g++", "building libFuzzer"),
    program("ldd", "libc-bin", "finding libraries for images"),
    program("buildah", "buildah", "building the images of agent and controller"),
    program("mmdebstrap", "mmdebstrap", "the base image in the tests"),
    program("pkg-config", "pkg-config", "building runc"),
    program("git", "git", "fetching source code"),
    program(
        "qemu-system-x86_64",
        "qemu-system-x86",
        "a virtual machine whose kernel has WireGuard",
    ),
    program("modprobe", "kmod", "modules of the virtual machine's kernel"),
    program("xz", "xz-utils", "unpacking the virtual machine's kernel"),
    program("zstd", "zstd", "unpacking the virtual machine's kernel"),
    program("dpkg-deb", "dpkg", "unpacking the virtual machine's kernel"),
];

/// The oldest Go version that downloads the toolchain which a go.mod requires.
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
    // Linking runc needs libc.a. Its package contains no program, so libc.a is checked separately.
    let mut lacks_libc = !has_static_libc();
    let mut packages: Vec<_> = missing.iter().map(|program| program.package).collect();
    packages.extend(lacks_libc.then_some("libc6-dev"));
    packages.sort_unstable();
    packages.dedup();
    let root = is_root();
    let mut problems = vec![];
    if !root {
        problems.push(
            "not root: namespaces, mounts and nftables need root. Run it with `sudo -E env PATH=\"$PATH\"`".to_owned(),
        );
    }
    if !packages.is_empty() && root && !args.no_install && has_apt() {
        install(&packages)?;
        missing = missing_programs(&search_path());
        lacks_libc = !has_static_libc();
    }
    for program in &missing {
        let Program { name, package, why } = program;
        problems.push(format!(
            "{name} ({why}): Debian and Ubuntu have it in the package {package}"
        ));
    }
    if lacks_libc {
        problems.push("libc.a (building runc): Debian and Ubuntu have it in the package libc6-dev".into());
    }
    problems.extend(go_problem());
    // Most of these checks run programs as root. Without root or without a program, a failure says nothing about the kernel.
    problems.extend(kernel_problems(root && missing.is_empty()));
    if problems.is_empty() {
        return Ok(());
    }
    bail!("this machine lacks:\n  - {}", problems.join("\n  - "))
}

/// PATH, and directories of system programs that may not be in a user's PATH.
fn search_path() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut directories: Vec<_> = std::env::split_paths(&path).collect();
    directories.extend(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from));
    directories
}

fn missing_programs(directories: &[PathBuf]) -> Vec<&'static Program> {
    let is_installed = |program: &&Program| {
        directories
            .iter()
            .any(|directory| directory.join(program.name).is_file())
    };
    PROGRAMS.iter().filter(|program| !is_installed(program)).collect()
}

fn has_apt() -> bool {
    search_path()
        .iter()
        .any(|directory| directory.join("apt-get").is_file())
}

fn has_static_libc() -> bool {
    let found = Command::new("gcc").arg("-print-file-name=libc.a").output();
    // gcc prints only the name if the file does not exist. A missing gcc is reported elsewhere.
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
    println!("prereq: apt-get failed; trying again with new package lists");
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
        Err(_) => Some(format!("go (building Kubernetes and the programs of nodes): {remedy}")),
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
    let works = |program: &str, words: &[&str]| {
        Command::new(program)
            .args(words)
            .output()
            .is_ok_and(|o| o.status.success())
    };
    if can_try && !works("unshare", &["--net", "--mount", "--pid", "--fork", "true"]) {
        problems.push("the privilege to create namespaces: run a container with --privileged".into());
    }
    if can_try && !works("unshare", &["--net", "nft", "list", "ruleset"]) {
        problems.push("nftables in the kernel: load the module (`modprobe nf_tables`)".into());
    }
    let overlay = std::fs::read_to_string("/proc/filesystems").is_ok_and(|text| text.contains("overlay"));
    if can_try && !overlay && !works("modprobe", &["overlay"]) {
        problems.push("the overlay file system in the kernel: load the module (`modprobe overlay`)".into());
    }
    problems
}

/// Whether the effective user is root.
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
    fn missing_program_is_reported_with_its_package() {
        let directory = directory_with(&["nft", "ip", "bridge"]);
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
    fn contributing_md_lists_the_installed_packages() {
        let page = std::fs::read_to_string(crate::programs::root().join("CONTRIBUTING.md")).unwrap();
        let (_, rest) = page.split_once("with `apt-get` and say so: ").unwrap();
        let (listed, _) = rest.split_once(". ").unwrap();
        let listed = listed.replace("and for the virtual machine ", "");
        let listed: BTreeSet<_> = listed.split(", ").collect();
        let mut installed: BTreeSet<_> = PROGRAMS.iter().map(|program| program.package).collect();
        installed.insert("libc6-dev");
        // Every Debian and Ubuntu system has these packages.
        installed.remove("dpkg");
        installed.remove("libc-bin");
        assert_eq!(listed, installed);
    }

    #[test]
    fn go_versions_are_parsed_as_numbers() {
        assert_eq!(parse_go("go1.26.3"), Some((1, 26)));
        assert_eq!(parse_go("go1.9"), Some((1, 9)));
        assert_eq!(parse_go("go1.27rc1"), Some((1, 27)));
        assert_eq!(parse_go("devel"), None);
    }

    fn directory_with(names: &[&str]) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("xtask-prereq-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        for name in names {
            std::fs::write(directory.join(name), "").unwrap();
        }
        directory
    }
}
