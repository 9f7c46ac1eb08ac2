//! Checks, before the agent starts, what the node must provide, and names a remedy for each missing part. Also implements
//! `wg-agent preflight`, which additionally checks the kernel settings that `prepare` writes, conntrack, Cilium and IPVS.

use std::{
    fs::{self, OpenOptions},
    path::Path,
    process::{Command, Stdio},
};

use clustermesh_api::versions::VERSIONS;
use clustermesh_core::versions::Version;

mod host;

pub use host::HostSetup;

use crate::{
    conntrack,
    device::Backend,
    prepare,
    route::sysctl,
    run::bullet_list,
    source::{client, datapath},
};

/// A missing requirement.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    /// The TUN device cannot be opened.
    #[error(
        "/dev/net/tun cannot be opened ({0}): mount it into the container (hostPath, type CharDevice); on the host: modprobe \
         tun"
    )]
    Tun(String),
    /// The process may not configure the network.
    #[error(
        "the capability NET_ADMIN is missing: add it to the container's securityContext.capabilities, or run as root on the \
         node"
    )]
    NetAdmin,
    /// The program nft cannot be run.
    #[error("the program nft cannot be run ({0}): install nftables {oldest} or newer on the node or in the image", oldest = VERSIONS.nft.oldest)]
    Nft(String),
    /// The program nft is so old that it refuses the agent's table.
    #[error(
        "nft {0} refuses the agent's table: install nftables {oldest} or newer on the node, or use the agent's image, which contains \
         it",
        oldest = VERSIONS.nft.oldest
    )]
    NftTooOld(Version),
}

/// CAP_NET_ADMIN (capability.h).
const NET_ADMIN: u32 = 12;

/// Returns all missing requirements. The TUN device is checked only for the userspace backend. Whether the kernel has WireGuard is not
/// checked, because opening the device shows that.
#[must_use]
pub fn check(backend: Backend) -> Vec<Missing> {
    let tun = OpenOptions::new()
        .read(true)
        .write(true)
        .open(Path::new("/dev/net/tun"));
    let tun = tun.err().filter(|_| backend == Backend::Userspace);
    let tun = tun.map(|error| Missing::Tun(error.to_string()));
    let admin = fs::read_to_string("/proc/self/status").is_ok_and(|status| has_capability(&status, NET_ADMIN));
    let admin = (!admin).then_some(Missing::NetAdmin);
    let nft = Command::new("nft").arg("--version").stdin(Stdio::null()).output();
    let nft = match nft {
        Ok(output) if output.status.success() => {
            find_refused_nft(&String::from_utf8_lossy(&output.stdout)).map(Missing::NftTooOld)
        }
        Ok(output) => Some(Missing::Nft(output.status.to_string())),
        Err(error) => Some(Missing::Nft(error.to_string())),
    };
    [tun, admin, nft].into_iter().flatten().collect()
}

/// The kernel modules to load and the settings to write on the host.
#[must_use]
pub fn host_setup(missing: &[Missing], wrong_settings: &[sysctl::WrongSetting]) -> HostSetup {
    let tun = missing.iter().any(|missing| matches!(missing, Missing::Tun(_)));
    HostSetup {
        modules: if tun { vec!["tun"] } else { Vec::new() },
        sysctls: (wrong_settings.iter())
            .map(|wrong| (wrong.sysctl.name.to_string(), wrong.sysctl.value))
            .collect(),
    }
}

/// Implements `wg-agent preflight`: prints how to set up the host; changes nothing. Fails with a list of the problems if the agent would
/// not start or would not work.
pub async fn run(kubeconfig: Option<&Path>) -> anyhow::Result<()> {
    let mut wanted = prepare::settings(Path::new("/proc/sys/net/ipv6").exists());
    wanted.iter_mut().for_each(|sysctl| sysctl.write = false);
    let wrong_settings = sysctl::ensure(&wanted).await;
    let is_loaded = Path::new("/sys/module/wireguard").exists();
    let missing = check(if is_loaded { Backend::Kernel } else { Backend::Userspace });
    if !is_loaded {
        println!(
            "The kernel module wireguard is not loaded. --backend=auto tries to load it and falls back to userspace; \
             --backend=kernel needs it.\n"
        );
    }
    if let Some(warning) = conntrack::warning() {
        println!("Warning: {warning}.\n");
    }
    let client = async || {
        let built = client::build(kubeconfig).await;
        built
            .map(|connection| connection.client)
            .map_err(|error| error.to_string())
    };
    let datapath = datapath::check_once(client).await.map(|found| found.to_string());
    if missing.is_empty() && wrong_settings.is_empty() && datapath.is_none() {
        println!("Nothing is missing on this node.");
        return Ok(());
    }
    println!("{}", host_setup(&missing, &wrong_settings).for_all_systems());
    let problems: Vec<String> = (missing.iter().map(ToString::to_string))
        .chain(wrong_settings.iter().map(ToString::to_string))
        .chain(datapath)
        .collect();
    anyhow::bail!("this node is not ready for wg-agent:\n{}", bullet_list(&problems))
}

/// The version in the output of `nft --version`, if it is known not to work.
fn find_refused_nft(output: &str) -> Option<Version> {
    let version = output.split_whitespace().find_map(Version::parse)?;
    VERSIONS
        .nft
        .refused
        .is_some_and(|refused| version <= refused)
        .then_some(version)
}

/// Whether a capability is effective (proc_pid_status(5), `CapEff`).
fn has_capability(status: &str, capability: u32) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> capability & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_versions_of_nft_that_do_not_work_are_refused() {
        for (output, refused) in [
            ("nftables v0.9.8 (E.D.S.)\n", Some(Version(0, 9, 8))),
            ("nftables v1.0.2 (Lester Gooch)\n", Some(Version(1, 0, 2))),
            ("nftables v1.0.6 (Lester Gooch #5)\n", None),
            ("nftables v1.1.3 (Commodore Bullmoose #4)\n", None),
            ("unknown", None),
        ] {
            assert_eq!(find_refused_nft(output), refused, "{output}");
        }
        assert_eq!(
            Missing::NftTooOld(Version(1, 0, 2)).to_string(),
            "nft 1.0.2 refuses the agent's table: install nftables 1.0.6 or newer on the node, or use the agent's image, which contains it"
        );
    }

    #[test]
    fn capability_is_read_from_the_effective_set() {
        let with = "Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t0000000000001000\n";
        let without = "CapPrm:\t0000000000001000\nCapEff:\t0000000000000000\n";
        assert_eq!(
            [with, without, ""].map(|s| has_capability(s, NET_ADMIN)),
            [true, false, false]
        );
    }
}
