//! The table as text for `nft -f`: sets and chains. What the values mean is told beside them in [`super`].
//!
//! Names of sets end in the family, since a set has one type. nft 1.0.6 wants a newline or `;` before every `}`.

use std::{
    borrow::Cow,
    collections::BTreeSet,
    fmt::{Display, Write},
    net::IpAddr,
};

use ipnet::IpNet;

use super::{
    Firewall, Frame, Scope, Sets,
    ways::{leave, path},
};
use crate::{
    mtu::segment,
    numbers::{CONNECTION_MASK, MARK_MASK, NFT_TABLE},
    policy::Port,
    prefixes::Family,
};

/// One set: its name, its type, and its elements as nft takes them.
pub(super) struct Set {
    pub(super) name: &'static str,
    pub(super) kind: Cow<'static, str>,
    pub(super) elements: BTreeSet<String>,
    /// What it holds is closed, whatever another one opens.
    pub(super) closes: bool,
}

/// Every set of the table, in the order in which they are declared: what closes first. A set of ranges in several parts
/// (nft_set_pipapo) has its new elements only at the end of a transaction, when its rules are there already, and these sets get
/// theirs one after the other: what is open would be so for a moment without what closes.
pub(super) fn sets(firewall: &Firewall) -> Vec<Set> {
    let mut out = Vec::new();
    for (family, sets) in [(Family::V4, &firewall.v4), (Family::V6, &firewall.v6)] {
        out.extend(family_sets(family, sets));
    }
    let elements = firewall
        .infrastructure
        .iter()
        .map(|p| format!("{} . {}", p.protocol, p.port))
        .collect();
    out.push(Set {
        name: "infrastructure",
        kind: "type inet_proto . inet_service;".into(),
        elements,
        closes: true,
    });
    out.sort_by_key(|set| !set.closes);
    out
}

fn family_sets(family: Family, sets: &Sets) -> [Set; 14] {
    const NAMES: [[&str; 14]; 2] = [
        [
            "mesh4",
            "throw4",
            "published4",
            "served4",
            "listeners4",
            "pairs4",
            "allow4",
            "allow_ports4",
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
            "allow_ports6",
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
        (port, ports(&sets.allow_ports)),
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
            closes: matches!(
                name.trim_end_matches(['4', '6']),
                "deny" | "deny_ports" | "api" | "nodes" | "pods_elsewhere" | "closed"
            ),
        }
    })
}

pub(super) fn nets(nets: &BTreeSet<IpNet>) -> BTreeSet<String> {
    nets.iter().map(ToString::to_string).collect()
}

pub(super) fn pairs<T: Display>(pairs: &BTreeSet<(T, T)>) -> BTreeSet<String> {
    pairs.iter().map(|(a, b)| format!("{a} . {b}")).collect()
}

pub(super) fn ports<T: Display>(ports: &BTreeSet<(T, T, Port)>) -> BTreeSet<String> {
    ports
        .iter()
        .map(|(a, b, p)| format!("{a} . {b} . {} . {}", p.protocol, p.port))
        .collect()
}

fn sockets(sockets: &BTreeSet<(IpAddr, u16)>) -> BTreeSet<String> {
    sockets.iter().map(|(a, p)| format!("{a} . {p}")).collect()
}

/// The transaction that makes the kernel's table this one, whatever was there: all of it or, on an error, nothing.
/// The first line creates the table where there is none, so that the second cannot fail.
#[must_use]
pub fn render(firewall: &Firewall) -> String {
    let mut out = format!("table inet {NFT_TABLE}\ndelete table inet {NFT_TABLE}\ntable inet {NFT_TABLE} {{\n");
    for Set {
        name, kind, elements, ..
    } in sets(firewall)
    {
        let elements = match elements.is_empty() {
            true => String::new(), // an empty list of elements is a syntax error
            false => format!(" elements = {{ {} }};", join(&elements)),
        };
        let _ = writeln!(out, "  set {name} {{ {kind}{elements} }}");
    }
    out.push_str(&chains(&firewall.frame));
    out.push_str("}\n");
    out
}

pub(super) fn join(elements: &BTreeSet<String>) -> String {
    elements.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// A statement that sets one of our two bits, of a packet (`meta`) or a connection (`ct`), and keeps every bit that is not
/// ours.
pub(super) fn set_mark(bits: u32, which: &str) -> String {
    format!("{which} mark set {which} mark & {:#010x} | {bits:#010x}", !mask(which))
}

/// A condition on our two bits.
pub(super) fn is_mark(bits: u32, which: &str) -> String {
    format!("{which} mark & {:#010x} == {bits:#010x}", mask(which))
}

fn mask(which: &str) -> u32 {
    if which == "ct" { CONNECTION_MASK } else { MARK_MASK }
}

/// The same rule for both families: `ip` and `4` become `ip6` and `6`.
pub(super) fn both(out: &mut String, rule: &str) {
    let _ = writeln!(out, "    {}", rule.replace("{ip}", "ip").replace("{n}", "4"));
    let _ = writeln!(out, "    {}", rule.replace("{ip}", "ip6").replace("{n}", "6"));
}

fn chains(frame: &Frame) -> String {
    match frame.scope {
        Scope::Tunnel => [path(frame), policy(frame), addresses_and_sizes(frame), leave(frame)].concat(),
        Scope::Mesh => [own_addresses_beside(frame), policy_beside(frame), kept(frame)].concat(),
    }
}

/// Why what has options is not sent on.
const OPTIONS: &str = "    # Options of IPv4 may name another way (source routes), which a kernel that is told to takes behind these rules: the
    # destination that they see is not yet the last.
";

/// Condition on a new connection to an address of this node itself. Broadcast and multicast are delivered here as well.
/// Looked at before DNAT: behind it a NodePort or hostPort looks like the pod it leads to.
pub(super) const TO_THIS_NODE: &str =
    "ct direction original fib daddr type { local, broadcast, anycast, multicast } goto to_this_node";

/// Programs that listen on every address of the node are meant for its own cluster. Other members reach them at node
/// addresses that were listed in allowedNetworks, not at the WireGuard address or the CNI's gateway, which lie in networks
/// that are listed for another reason.
pub(super) fn to_this_node() -> String {
    let mut out = String::from("\n  chain to_this_node {\n");
    both(&mut out, "{ip} daddr @listeners{n} accept");
    out.push_str(
        "    icmp type echo-request accept
    icmpv6 type echo-request accept
    meta l4proto { icmp, icmpv6 } ct state related accept
    counter drop
  }
",
    );
    out
}

fn own_addresses_beside(frame: &Frame) -> String {
    let device = &frame.device;
    let mut out = String::from(
        "
  chain own_addresses {
    type filter hook prerouting priority mangle; policy accept;
",
    );
    both(
        &mut out,
        &format!("iifname \"{device}\" {{ip}} saddr @mesh{{n}} {TO_THIS_NODE}"),
    );
    out + "  }\n" + &to_this_node()
}

/// What a tunnel of another program's may bring in from the mesh. WireGuard binds the source to the peer, so a packet with
/// a mesh source is that member's, and one without is the owner's own.
fn policy_beside(frame: &Frame) -> String {
    let device = &frame.device;
    let mut out = String::from(
        "
  chain policy_input {
    type filter hook input priority filter - 10; policy accept;
",
    );
    let from_mesh = format!("iifname \"{device}\" {{ip}} saddr @mesh{{n}} goto from_mesh");
    both(&mut out, &from_mesh);
    out.push_str(
        "  }

  # From a member to another one never; on to a node of this cluster, as a leader of Kilo's does, as the policy says.
  chain policy_forward {
    type filter hook forward priority filter - 10; policy accept;
",
    );
    let through = format!("iifname \"{device}\" oifname \"{device}\" {{ip}} saddr @mesh{{n}} {{ip}} daddr @mesh{{n}}");
    both(&mut out, &format!("{through} counter drop"));
    out.push_str(OPTIONS);
    let _ = writeln!(
        out,
        "    iifname \"{device}\" ip saddr @mesh4 ip hdrlength != 5 counter drop"
    );
    both(&mut out, &from_mesh);
    out.push_str("  }\n");
    out + &from_mesh_chains()
}

/// Published sources are kept from whoever masquerades what leaves the cluster's pod network.
fn kept(frame: &Frame) -> String {
    let device = &frame.device;
    let mut out = String::from(
        "
  # Before the CNI's own (100). `accept` would not keep a later nat chain from masquerading; an identity mapping does.
  chain nat {
    type nat hook postrouting priority srcnat - 10; policy accept;
",
    );
    let published = format!("oifname \"{device}\" {{ip}} daddr @mesh{{n}} {{ip}} saddr @published{{n}}");
    both(&mut out, &format!("{published} counter snat {{ip}} to {{ip}} saddr"));
    out + "  }\n"
}

/// What the tunnel may bring in: after kube-proxy's DNAT (-100), before everyone's filters (0).
fn policy(frame: &Frame) -> String {
    let device = &frame.device;
    format!(
        "
  chain policy_input {{
    type filter hook input priority filter - 10; policy accept;
    iifname \"{device}\" goto from_mesh
  }}

  chain policy_forward {{
    type filter hook forward priority filter - 10; policy accept;
    iifname \"{device}\" oifname \"{device}\" counter drop
{OPTIONS}    iifname \"{device}\" ip hdrlength != 5 counter drop
    iifname \"{device}\" goto from_mesh
  }}
"
    ) + &from_mesh_chains()
}

/// What is closed to every member, whatever is allowed to it.
pub(super) fn closed(out: &mut String) {
    out.push_str("    meta l4proto . th dport @infrastructure jump infrastructure\n");
    both(out, "meta l4proto tcp {ip} daddr . th dport @api{n} counter drop");
    both(out, "{ip} saddr . {ip} daddr @deny{n} counter drop");
    // conntrack's word for the protocol, which every packet that comes so far has: for `meta l4proto` between ranges nft 1.0
    // writes a byteorder expression of one byte, which Linux 6.12.117 refuses, and with it the whole table.
    both(
        out,
        "{ip} saddr . {ip} daddr . ct protocol . th dport @deny_ports{n} counter drop",
    );
}

/// Of what conntrack calls related, the errors of IP itself.
pub(super) const ERRORS_ONLY: &str = "    meta nfproto ipv4 meta l4proto != icmp counter drop
    meta nfproto ipv6 meta l4proto != icmpv6 counter drop
    icmp type != { destination-unreachable, time-exceeded } counter drop
    icmpv6 type != { destination-unreachable, packet-too-big, time-exceeded } counter drop
";

fn from_mesh_chains() -> String {
    let mut out = String::from(
        "
  # Original-direction packets are matched on every packet, so that taking an element away closes what it allowed.
  chain from_mesh {
",
    );
    both(&mut out, "{ip} saddr @closed{n} counter drop");
    out.push_str(
        "    ct direction reply ct state established accept
    ct state invalid,related,untracked goto unusual
    ct direction reply counter drop
",
    );
    both(&mut out, "{ip} saddr . {ip} daddr @allow{n} goto allowed");
    both(
        &mut out,
        "{ip} saddr . {ip} daddr . ct protocol . th dport @allow_ports{n} goto allowed",
    );
    out.push_str(
        "    counter drop
  }

  # Asked last, as it is written first: whoever has found a new element above finds those of the same transaction here.
  chain allowed {
",
    );
    closed(&mut out);
    out.push_str(
        "    accept
  }

  chain unusual {
    ct state related goto icmp_in
    counter drop
  }

  # Every node's, not this one's alone: masqueraded here, a packet for another is that node's neighbour's to it. A node's
  # addresses among its pods (the CNI's gateway) are named nowhere; a pod that listens on such a port is reached by its
  # own node's tunnel, or by a Service.
  chain infrastructure {
    fib daddr type local counter drop
",
    );
    both(&mut out, "{ip} daddr @nodes{n} counter drop");
    both(
        &mut out,
        "ct status & dnat == 0 {ip} daddr @pods_elsewhere{n} counter drop",
    );
    out.push_str(
        "  }

  # Errors only, and only about a flow of the same member. Other related packets (conntrack helpers) are nobody's.
  chain icmp_in {
",
    );
    out.push_str(ERRORS_ONLY);
    both(&mut out, "{ip} saddr . ct original {ip} saddr @pairs{n} counter accept");
    both(&mut out, "{ip} saddr . ct reply {ip} saddr @pairs{n} counter accept");
    out.push_str("    counter drop\n  }\n");
    out
}

/// Source addresses and segment sizes of what goes in and out of the tunnel.
fn addresses_and_sizes(frame: &Frame) -> String {
    let Frame {
        device,
        mtu,
        wireguard_v4,
        wireguard_v6,
        ..
    } = frame;
    let mut out = String::from(
        "
  # Before the CNI's own (100). `accept` would not keep a later nat chain from masquerading; an identity mapping does.
  chain nat {
    type nat hook postrouting priority srcnat - 10; policy accept;
",
    );
    both(
        &mut out,
        &format!("oifname \"{device}\" {{ip}} saddr @published{{n}} counter snat {{ip}} to {{ip}} saddr"),
    );
    if let Some(address) = wireguard_v4 {
        let _ = writeln!(
            out,
            "    oifname \"{device}\" meta nfproto ipv4 counter snat ip to {address}"
        );
    }
    if let Some(address) = wireguard_v6 {
        let _ = writeln!(
            out,
            "    oifname \"{device}\" meta nfproto ipv6 counter snat ip6 to {address}"
        );
    }
    out.push_str(
        "    # As an anchor: the other members' Peers for this node carry more than its own prefixes. The reply has to come back
    # through here.
",
    );
    let anchored = "ct original {ip} daddr @served{n} ct original {ip} daddr != @published{n}";
    both(
        &mut out,
        &format!("iifname \"{device}\" oifname != \"{device}\" {anchored} counter masquerade"),
    );
    let _ = writeln!(
        out,
        "  }}

  # Both ways: what leaves by the tunnel, and what a peer with a larger device sends. `rt mtu` is the lesser of the routes
  # to the packet's destination and to its source, so a peer whose routes carry less has it taken from either end.
  chain mss {{
    type filter hook forward priority mangle; policy accept;
    oifname \"{device}\" tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
    iifname \"{device}\" tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu"
    );
    for (family, name) in [(Family::V4, "ipv4"), (Family::V6, "ipv6")] {
        let size = segment(*mtu, family);
        let _ = writeln!(
            out,
            "    iifname \"{device}\" meta nfproto {name} tcp flags & (syn | rst) == syn tcp option maxseg size > {size} tcp option maxseg size set {size}"
        );
    }
    out.push_str("  }\n");
    out
}
