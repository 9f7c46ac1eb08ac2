//! `wg-agent prepare`: writes the kernel settings of the node that a process with NET_ADMIN alone may not; run by the
//! DaemonSet's privileged init container. Which they are is `clustermesh_agent_core::sysctl`'s; those of single
//! interfaces the agent writes itself.

use std::path::Path;

use clustermesh_agent_core::{
    interface::InterfaceName,
    prefixes::Family,
    routes::{Routes, rules},
    sysctl::{Name, Sysctl, desired},
};

use crate::{preflight, route::sysctl::ensure, run::lines};

/// Writes them, or says which could not be written and how else to set them.
pub async fn run() -> anyhow::Result<()> {
    let wanted = settings(Path::new("/proc/sys/net/ipv6").exists());
    let missing = ensure(&wanted).await;
    for sysctl in &wanted {
        tracing::info!("{} = {}", sysctl.name, sysctl.value);
    }
    anyhow::ensure!(
        missing.is_empty(),
        "this container may not prepare the node (securityContext.privileged is needed); where no such container is \
         allowed, set these on the host:\n{}\n\n{}",
        lines(&missing),
        preflight::host(&[], &missing).everywhere()
    );
    Ok(())
}

/// The settings of the whole node. IPv4 forwarding is switched on where it is off: a node whose pods have IPv4 has it on
/// anyway. IPv6 forwarding is not: a host that learns its own routes from router advertisements would lose them.
pub(crate) fn settings(ipv6: bool) -> Vec<Sysctl> {
    let Ok(anywhere) = "lo".parse::<InterfaceName>() else {
        return Vec::new();
    };
    let routes = Routes {
        rules: rules(Family::V6).into(),
        ..Routes::default()
    };
    let all = desired(&anywhere, &anywhere, &routes).into_iter();
    all.filter(|sysctl| match sysctl.name {
        Name::Global("ipv6/conf/all/forwarding") | Name::Interface(..) => false,
        Name::Global(path) => ipv6 || !path.starts_with("ipv6/"),
    })
    .map(|sysctl| Sysctl { write: true, ..sysctl })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_belongs_to_the_whole_node_is_written() {
        let names = |ipv6| settings(ipv6).iter().map(|s| s.name.to_string()).collect::<Vec<_>>();
        let v4 = [
            "net.ipv4.ip_forward",
            "net.ipv4.tcp_fwmark_accept",
            "net.ipv4.fwmark_reflect",
        ];
        assert_eq!(names(false), v4);
        let v6 = [
            "net.ipv6.fwmark_reflect",
            "net.ipv6.conf.default.ignore_routes_with_linkdown",
        ];
        assert_eq!(names(true), [&v4[..], &v6].concat());
        assert!(settings(true).iter().all(|s| s.write && s.value == 1));
    }
}
