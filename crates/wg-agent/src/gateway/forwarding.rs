//! Enables IP forwarding in this pod. For IPv4, NET_ADMIN suffices to enable it on each interface over rtnetlink. For IPv6 it can
//! only be enabled in `/proc/sys`, which is read-only in this container, so the init container does that.

use std::collections::BTreeSet;

use clustermesh_agent_core::{
    interface::InterfaceName,
    sysctl::{Name, Sysctl},
};
use ipnet::IpNet;

use crate::{route::sysctl, status::Trouble};

/// Enables IPv4 forwarding on each interface except loopback. Reports each forwarding setting that is still wrong after that; the one
/// for IPv6 only if one of `networks`, the networks of the sandboxes, is IPv6.
pub(super) async fn ensure(device: &InterfaceName, networks: &BTreeSet<IpNet>) -> Vec<Trouble> {
    let mut interfaces = interfaces_except(device);
    interfaces.push(device.clone());
    let desired = desired_settings(interfaces, networks.iter().any(|net| net.addr().is_ipv6()));
    let wrong = sysctl::ensure(&desired).await;
    wrong
        .iter()
        .map(|setting| Trouble::new("forwarding", setting))
        .collect()
}

/// The forwarding settings that `wg-agent prepare --mode=gateway` writes. The kernel applies them to the pod's existing interfaces and
/// to the device that the gateway creates later.
pub(crate) fn pod_settings(v6: bool) -> Vec<Sysctl> {
    let mut out = vec![setting(Name::Global("ipv4/ip_forward"))];
    if v6 {
        out.push(setting(Name::Global("ipv6/conf/all/forwarding")));
    }
    out
}

fn desired_settings(interfaces: Vec<InterfaceName>, v6: bool) -> Vec<Sysctl> {
    let each = interfaces
        .into_iter()
        .map(|interface| setting(Name::Interface(interface, "forwarding")));
    let v6 = v6.then(|| setting(Name::Global("ipv6/conf/all/forwarding")));
    each.chain(v6).collect()
}

fn setting(name: Name) -> Sysctl {
    Sysctl {
        name,
        value: 1,
        accept: [1].into(),
        write: true,
        why: "without it this gateway forwards no packets; its init container (wg-agent prepare --mode=gateway) sets it",
    }
}

/// The pod's interfaces except loopback and `device`.
pub(super) fn interfaces_except(device: &InterfaceName) -> Vec<InterfaceName> {
    let names = nix::net::if_::if_nameindex().ok();
    let names = names
        .iter()
        .flatten()
        .filter_map(|interface| interface.name().to_str().ok());
    let others = names.filter(|name| *name != "lo" && *name != device.as_str());
    others.filter_map(|name| name.parse().ok()).collect()
}
