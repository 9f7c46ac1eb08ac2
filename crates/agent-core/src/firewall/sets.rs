//! The sets of the table and their elements.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use super::{Firewall, Sets};
use crate::prefixes::Family;

/// A set of the table, in the syntax of nft.
pub(super) struct Set {
    /// The name ends in 4 or 6 if the elements contain addresses, because a set has only one address type.
    pub(super) name: String,
    /// Its `type` and `flags`.
    pub(super) kind: String,
    pub(super) elements: BTreeSet<String>,
    /// A rule with this set drops packets, also some that the rules with the other sets would accept.
    pub(super) is_deny: bool,
}

/// Every set of the table in the order of declaration, deny sets first.
///
/// The kernel activates new elements of concatenated range sets (nft_set_pipapo) at the end of a transaction, after its rules, and
/// one set after the other. If a deny set came after `allow`, denied packets would pass for a moment.
pub(super) fn sets(firewall: &Firewall) -> Vec<Set> {
    let Firewall {
        parameters: _,
        v4,
        v6,
        infrastructure,
    } = firewall;
    let mut out: Vec<Set> = [(Family::V4, v4), (Family::V6, v6)]
        .into_iter()
        .flat_map(|(family, sets)| family_sets(family, sets))
        .collect();
    out.push(Set {
        name: "infrastructure".to_owned(),
        kind: "type inet_proto . inet_service;".to_owned(),
        elements: texts(infrastructure, |(protocol, port)| {
            format!("{} . {port}", protocol.lowercase())
        }),
        is_deny: true,
    });
    out.sort_by_key(|set| !set.is_deny);
    out
}

/// The elements of a set with one address family. The variant determines the type of the set.
enum Elements<'a> {
    Networks(&'a BTreeSet<IpNet>),
    Pairs(&'a BTreeSet<(IpNet, IpNet)>),
    PairPorts(&'a BTreeSet<(IpNet, IpNet, u16)>),
    Sockets(&'a BTreeSet<(IpAddr, u16)>),
    Addresses(&'a BTreeSet<IpAddr>),
}

fn family_sets(family: Family, sets: &Sets) -> impl Iterator<Item = Set> {
    use Elements::{Addresses, Networks, PairPorts, Pairs, Sockets};
    let Sets {
        mesh,
        throw,
        published,
        own_cluster,
        own_sources,
        own_pods,
        gateways,
        served,
        listeners,
        pairs,
        allow,
        deny,
        deny_ports,
        api,
        nodes,
        pod_cidrs_of_other_nodes,
        closed,
    } = sets;
    // (name, is_deny, elements)
    let rows = [
        ("mesh", false, Networks(mesh)),
        ("throw", false, Networks(throw)),
        ("published", false, Networks(published)),
        ("own_cluster", false, Networks(own_cluster)),
        ("own_sources", false, Networks(own_sources)),
        ("own_pods", false, Networks(own_pods)),
        ("gateways", false, Networks(gateways)),
        ("served", false, Networks(served)),
        ("listeners", false, Networks(listeners)),
        ("pairs", false, Pairs(pairs)),
        ("allow", false, Pairs(allow)),
        ("deny", true, Pairs(deny)),
        ("deny_ports", true, PairPorts(deny_ports)),
        ("api", true, Sockets(api)),
        ("nodes", true, Addresses(nodes)),
        ("pod_cidrs_of_other_nodes", true, Networks(pod_cidrs_of_other_nodes)),
        ("closed", true, Networks(closed)),
    ];
    let (address, number) = match family {
        Family::V4 => ("ipv4_addr", 4),
        Family::V6 => ("ipv6_addr", 6),
    };
    rows.into_iter().map(move |(name, is_deny, elements)| Set {
        name: format!("{name}{number}"),
        kind: elements.kind(address),
        elements: elements.texts(),
        is_deny,
    })
}

impl Elements<'_> {
    /// Returns the `type` and `flags` of the set. `address` is nft's address type.
    fn kind(&self, address: &str) -> String {
        match self {
            Self::Networks(_) => format!("type {address}; flags interval;"),
            Self::Pairs(_) => format!("type {address} . {address}; flags interval;"),
            Self::PairPorts(_) => {
                format!("type {address} . {address} . inet_proto . inet_service; flags interval;")
            }
            Self::Sockets(_) => format!("type {address} . inet_service;"),
            Self::Addresses(_) => format!("type {address};"),
        }
    }

    fn texts(&self) -> BTreeSet<String> {
        match self {
            Self::Networks(networks) => texts(networks, IpNet::to_string),
            Self::Pairs(pairs) => texts(pairs, |(from, to)| format!("{from} . {to}")),
            Self::PairPorts(pairs) => texts(pairs, |(from, to, port)| format!("{from} . {to} . tcp . {port}")),
            Self::Sockets(sockets) => texts(sockets, |(address, port)| format!("{address} . {port}")),
            Self::Addresses(addresses) => texts(addresses, IpAddr::to_string),
        }
    }
}

fn texts<T>(elements: &BTreeSet<T>, text: impl Fn(&T) -> String) -> BTreeSet<String> {
    elements.iter().map(text).collect()
}
