//! Implements `wg-agent prepare`: writes the kernel settings of the node that need more privileges than NET_ADMIN. The
//! DaemonSet's privileged init container runs it. `clustermesh_agent_core::sysctl` defines the settings; the agent
//! itself writes those of single interfaces. With `--mode=gateway`, the command prepares a gateway's pod instead.

use std::{fs, path::Path};

use anyhow::Context;

use clustermesh_agent_core::{
    interface::InterfaceName,
    prefixes::Family,
    routes::{Routes, rules},
    sysctl::{Name, Sysctl, desired},
};

use crate::{conntrack, gateway::forwarding, preflight, route::sysctl::ensure, run::bullet_list};

/// The file with the ports that the kernel never chooses as ephemeral ports, such as `5000,6000-6999`.
const RESERVED_PORTS_FILE: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

/// Writes the settings, or reports which could not be written and how to set them by hand. `port` is the tunnel's listen
/// port; `connections` is the minimum size of the conntrack table.
pub(crate) async fn run(port: u16, connections: u64) -> anyhow::Result<()> {
    let wanted = settings(Path::new("/proc/sys/net/ipv6").exists());
    let missing = ensure(&wanted).await;
    anyhow::ensure!(
        missing.is_empty(),
        "this container may not prepare the node (securityContext.privileged is needed); where no such container is \
         allowed, set these on the host:\n{}\n\n{}",
        bullet_list(&missing),
        preflight::host_setup(&[], &missing).for_all_systems()
    );
    for sysctl in &wanted {
        tracing::info!("{} = {}", sysctl.name, sysctl.value);
    }
    reserve_port(port).with_context(|| format!("cannot add the tunnel's port {port} to {RESERVED_PORTS_FILE}"))?;
    match conntrack::raise_limit(connections) {
        Ok(None) => {}
        Ok(Some(before)) => tracing::info!("net.netfilter.nf_conntrack_max = {connections}, was {before}"),
        // If the node itself is a container, as in kind, only its host can change the limit.
        Err(error) => tracing::warn!(
            "the conntrack table has room for fewer than {connections} entries, and this container cannot raise the limit ({error}); set it on the host: \
             sysctl -w net.netfilter.nf_conntrack_max={connections}"
        ),
    }
    Ok(())
}

/// Prepares a gateway's pod: enables forwarding, and shortens the conntrack timeouts of TCP connections that
/// are unanswered, closing or idle, since all sandboxes share its conntrack table.
pub(crate) async fn prepare_pod() -> anyhow::Result<()> {
    let wanted = forwarding::pod_settings(Path::new("/proc/sys/net/ipv6").exists());
    let missing = ensure(&wanted).await;
    anyhow::ensure!(
        missing.is_empty(),
        "this container may not prepare the pod (securityContext.privileged is needed):\n{}",
        bullet_list(&missing)
    );
    for (name, seconds) in CONNTRACK_TIMEOUTS {
        let path = format!("/proc/sys/net/netfilter/nf_conntrack_{name}");
        match fs::write(&path, seconds.to_string()) {
            Ok(()) => tracing::info!("net.netfilter.nf_conntrack_{name} = {seconds}"),
            // The kernel has this setting only in the initial network namespace, or does not track TCP.
            Err(error) => tracing::warn!("{path} cannot be written: {error}"),
        }
    }
    Ok(())
}

/// The timeouts of a gateway's conntrack table in seconds; the kernel's defaults are 120, 60, 120, 60 and 432,000
/// (Documentation/networking/nf_conntrack-sysctl.rst). 7,500 s is more than 7,200 s, after which Linux sends the first TCP
/// keepalive, so idle connections with keepalives stay.
const CONNTRACK_TIMEOUTS: [(&str, u32); 5] = [
    ("tcp_timeout_syn_sent", 15),
    ("tcp_timeout_syn_recv", 15),
    ("tcp_timeout_time_wait", 10),
    ("tcp_timeout_close_wait", 30),
    ("tcp_timeout_established", 7500),
];

/// Reserves the tunnel's port. Otherwise another program could get it as an ephemeral port while no agent runs.
fn reserve_port(port: u16) -> std::io::Result<()> {
    let reserved = fs::read_to_string(RESERVED_PORTS_FILE)?;
    if let Some(reserved) = add_port(&reserved, port) {
        fs::write(RESERVED_PORTS_FILE, &reserved)?;
        tracing::info!("net.ipv4.ip_local_reserved_ports = {reserved}");
    }
    Ok(())
}

/// The list with this port added; `None` = the list already contains the port.
fn add_port(reserved: &str, port: u16) -> Option<String> {
    let reserved = reserved.trim();
    let contains_port = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let bound = |text: &str| text.trim().parse::<u16>().ok();
        bound(first) <= Some(port) && Some(port) <= bound(last)
    };
    let own = port.to_string();
    match reserved {
        "" => Some(own),
        _ if reserved.split(',').any(contains_port) => None,
        _ => Some(format!("{reserved},{own}")),
    }
}

/// The settings of the whole node. They enable IPv4 forwarding, because a node with IPv4 pods needs it anyway, but not
/// IPv6 forwarding: a host that gets its routes from router advertisements would lose these routes.
pub(crate) fn settings(ipv6: bool) -> Vec<Sysctl> {
    // `desired` needs interfaces. Any name will do, because the settings of single interfaces are left out below.
    let Ok(any_interface) = "lo".parse::<InterfaceName>() else {
        return Vec::new();
    };
    // `desired` returns the IPv6 settings only if there are IPv6 rules. These settings are left out below if `ipv6` is false.
    let routes = Routes {
        rules: rules(Family::V6).into(),
        ..Routes::default()
    };
    let all = desired(&any_interface, &any_interface, &routes).into_iter();
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
    fn port_is_added_to_the_reserved_ports_once() {
        for (before, after) in [
            ("\n", Some("51820")),
            ("51820\n", None),
            ("8080,51000-52000\n", None),
            ("8080,51821-52000\n", Some("8080,51821-52000,51820")),
            ("80,51000-51819", Some("80,51000-51819,51820")),
        ] {
            assert_eq!(add_port(before, 51820).as_deref(), after, "{before:?}");
        }
    }

    #[test]
    fn prepare_writes_only_settings_of_the_whole_node() {
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
