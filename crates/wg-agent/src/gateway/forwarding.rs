//! Whether this pod forwards packets. IPv4 can be switched on for each interface with NET_ADMIN alone; IPv6 only in `/proc/sys`,
//! which is read-only here: that is the init container's part.

use std::collections::BTreeSet;

use clustermesh_agent_core::{
    interface::InterfaceName,
    sysctl::{Name, Sysctl},
};
use ipnet::IpNet;

use crate::{route::sysctl, status::Trouble};

/// Switches on what can be, and says what is missing.
pub(super) async fn ensure(device: &InterfaceName, networks: &BTreeSet<IpNet>) -> Vec<Trouble> {
    let mut interfaces = interfaces_beside(device);
    interfaces.push(device.clone());
    let wanted = wanted(interfaces, networks.iter().any(|net| net.addr().is_ipv6()));
    let missing = sysctl::ensure(&wanted).await;
    missing
        .iter()
        .map(|missing| Trouble::new("forwarding", missing))
        .collect()
}

/// What `wg-agent prepare --mode=gateway` writes: the new device and the pod's own inherit it.
pub(crate) fn of_the_pod(v6: bool) -> Vec<Sysctl> {
    let mut out = vec![setting(Name::Global("ipv4/ip_forward"))];
    if v6 {
        out.push(setting(Name::Global("ipv6/conf/all/forwarding")));
    }
    out
}

fn wanted(interfaces: Vec<InterfaceName>, v6: bool) -> Vec<Sysctl> {
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
        why: "without it nothing passes this gateway; its init container (wg-agent prepare --mode=gateway) sets it",
    }
}

/// The pod's interfaces without its loopback and this one.
pub(super) fn interfaces_beside(device: &InterfaceName) -> Vec<InterfaceName> {
    let names = nix::net::if_::if_nameindex().ok();
    let names = names
        .iter()
        .flatten()
        .filter_map(|interface| interface.name().to_str().ok());
    let others = names.filter(|name| *name != "lo" && *name != device.as_str());
    others.filter_map(|name| name.parse().ok()).collect()
}
