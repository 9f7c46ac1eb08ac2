//! The sets of the table and their elements. A set has one type, so each name ends in the address family.

use std::{borrow::Cow, collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use super::{Firewall, Sets};
use crate::prefixes::Family;

/// A set of the table, in the syntax of nft.
pub(super) struct Set {
    pub(super) name: &'static str,
    /// Its `type` and `flags`.
    pub(super) kind: Cow<'static, str>,
    pub(super) elements: BTreeSet<String>,
    /// Rules drop what is in this set, whatever another set allows.
    pub(super) is_deny: bool,
}

/// Every set of the table in the order of declaration, deny sets first.
///
/// Concatenated range sets (nft_set_pipapo) get their new elements only at the end of a transaction, after its rules are in place,
/// and one set after the other. With an allow set first, denied packets would pass for a moment.
pub(super) fn sets(firewall: &Firewall) -> Vec<Set> {
    let mut out = Vec::new();
    for (family, sets) in [(Family::V4, &firewall.v4), (Family::V6, &firewall.v6)] {
        out.extend(family_sets(family, sets));
    }
    let elements = firewall
        .infrastructure
        .iter()
        .map(|(protocol, port)| format!("{} . {port}", protocol.lowercase()))
        .collect();
    out.push(Set {
        name: "infrastructure",
        kind: "type inet_proto . inet_service;".into(),
        elements,
        is_deny: true,
    });
    out.sort_by_key(|set| !set.is_deny);
    out
}

fn family_sets(family: Family, sets: &Sets) -> [Set; 13] {
    const NAMES: [[&str; 13]; 2] = [
        [
            "mesh4",
            "throw4",
            "published4",
            "served4",
            "listeners4",
            "pairs4",
            "allow4",
            "deny4",
            "deny_ports4",
            "api4",
            "nodes4",
            "pods_elsewhere4",
            "closed4",
        ],
        [
            "mesh6",
            "throw6",
            "published6",
            "served6",
            "listeners6",
            "pairs6",
            "allow6",
            "deny6",
            "deny_ports6",
            "api6",
            "nodes6",
            "pods_elsewhere6",
            "closed6",
        ],
    ];
    const KINDS: [[&str; 5]; 2] = [
        [
            "type ipv4_addr; flags interval;",
            "type ipv4_addr . ipv4_addr; flags interval;",
            "type ipv4_addr . ipv4_addr . inet_proto . inet_service; flags interval;",
            "type ipv4_addr . inet_service;",
            "type ipv4_addr;",
        ],
        [
            "type ipv6_addr; flags interval;",
            "type ipv6_addr . ipv6_addr; flags interval;",
            "type ipv6_addr . ipv6_addr . inet_proto . inet_service; flags interval;",
            "type ipv6_addr . inet_service;",
            "type ipv6_addr;",
        ],
    ];
    let index = usize::from(family == Family::V6);
    let [net, pair, port, socket, address] = KINDS[index];
    let values = [
        (net, nets(&sets.mesh)),
        (net, nets(&sets.throw)),
        (net, nets(&sets.published)),
        (net, nets(&sets.served)),
        (net, nets(&sets.listeners)),
        (pair, pairs(&sets.pairs)),
        (pair, pairs(&sets.allow)),
        (pair, pairs(&sets.deny)),
        (port, ports(&sets.deny_ports)),
        (socket, sockets(&sets.api)),
        (address, sets.nodes.iter().map(ToString::to_string).collect()),
        (net, nets(&sets.pods_elsewhere)),
        (net, nets(&sets.closed)),
    ];
    let mut names = NAMES[index].into_iter();
    values.map(|(kind, elements)| {
        let name = names.next().unwrap_or_default();
        Set {
            name,
            kind: kind.into(),
            elements,
            is_deny: matches!(
                name.trim_end_matches(['4', '6']),
                "deny" | "deny_ports" | "api" | "nodes" | "pods_elsewhere" | "closed"
            ),
        }
    })
}

fn nets(nets: &BTreeSet<IpNet>) -> BTreeSet<String> {
    nets.iter().map(ToString::to_string).collect()
}

fn pairs(pairs: &BTreeSet<(IpNet, IpNet)>) -> BTreeSet<String> {
    pairs.iter().map(|(a, b)| format!("{a} . {b}")).collect()
}

fn ports(ports: &BTreeSet<(IpNet, IpNet, u16)>) -> BTreeSet<String> {
    let ports = ports.iter();
    ports.map(|(a, b, port)| format!("{a} . {b} . tcp . {port}")).collect()
}

fn sockets(sockets: &BTreeSet<(IpAddr, u16)>) -> BTreeSet<String> {
    sockets.iter().map(|(a, p)| format!("{a} . {p}")).collect()
}
