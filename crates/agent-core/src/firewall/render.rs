//! Renders the table as text for `nft -f`, with the chains for policies, NAT and segment sizes.
//! [`super::Sets`] documents the sets, and [`RuleParameters`] the numbers and names.
//!
//! nft 1.0.6 needs a newline or `;` before every `}`. Every rule has a comment, which `nft list table` shows; nft allows 128 bytes.

use std::{collections::BTreeSet, fmt::Write};

use super::{
    Firewall, RuleParameters, Scope,
    routing::{leave_chains, path_chains},
    sets::{Set, sets},
};
use crate::{
    mtu::segment,
    numbers::{CONNECTION_MASK, MARK_MASK, NFT_TABLE},
    prefixes::Family,
};

/// Renders the transaction that replaces the table in the kernel. If it fails, the kernel's table is unchanged.
///
/// The first line creates the table if it does not exist, so that `delete table` cannot fail.
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
    out.push_str(&chains(&firewall.parameters));
    out.push_str("}\n");
    out
}

pub(super) fn join(elements: &BTreeSet<String>) -> String {
    elements.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// Returns an nft statement that sets the bits of [`mask`] in the mark of a packet (`meta`) or connection (`ct`) to `bits`, and keeps all
/// bits outside the mask.
pub(super) fn set_mark(bits: u32, which: &str) -> String {
    format!("{which} mark set {which} mark & {:#010x} | {bits:#010x}", !mask(which))
}

/// Returns an nft condition: the bits of [`mask`] in the mark of a packet (`meta`) or connection (`ct`) equal `bits`.
pub(super) fn match_mark(bits: u32, which: &str) -> String {
    format!("{which} mark & {:#010x} == {bits:#010x}", mask(which))
}

fn mask(which: &str) -> u32 {
    if which == "ct" { CONNECTION_MASK } else { MARK_MASK }
}

/// Appends a rule with its comment.
pub(super) fn add_rule(out: &mut String, rule: &str, comment: &str) {
    let _ = writeln!(out, "    {rule} comment \"{comment}\"");
}

/// Appends a rule once for each family: `{ip}` becomes `ip` and `ip6`, `{n}` becomes `4` and `6`.
pub(super) fn add_rule_pair(out: &mut String, rule: &str, comment: &str) {
    for (ip, number) in [("ip", "4"), ("ip6", "6")] {
        add_rule(out, &rule.replace("{ip}", ip).replace("{n}", number), comment);
    }
}

fn chains(parameters: &RuleParameters) -> String {
    match parameters.scope {
        Scope::Tunnel => [
            path_chains(parameters),
            policy_chains(parameters),
            nat_and_mss_chains(parameters),
            leave_chains(parameters),
        ]
        .concat(),
        Scope::Mesh => [
            own_addresses_chains_of_policy_mode(parameters),
            policy_chains_of_policy_mode(parameters),
            nat_chain_of_policy_mode(parameters),
        ]
        .concat(),
    }
}

/// Comment of the rules that drop forwarded packets with IPv4 options. One of these options is the source route: a kernel that accepts
/// source routes changes the packet's destination after the chains of this table have checked the packet.
const OPTIONS: &str = "IPv4 options: a source route would change the destination later";

/// Condition and verdict for a connection to an address of this node, including broadcast and multicast addresses. The rule must be
/// in a chain before DNAT, because after DNAT the destination of a NodePort or hostPort packet is a pod.
pub(super) const TO_THIS_NODE: &str =
    "ct direction original fib daddr type { local, broadcast, anycast, multicast } goto to_this_node";

/// Renders the chain for connections to addresses of this node itself.
///
/// Programs that listen on every address of the node are meant for its own cluster. Other members may reach them only at listener
/// addresses. The WireGuard address and the pods' default gateway are listener addresses only if an anchored network contains them;
/// that they lie in allowedNetworks is not enough.
pub(super) fn to_this_node_chain() -> String {
    let mut out = String::from("\n  chain to_this_node {\n");
    add_rule_pair(
        &mut out,
        "{ip} daddr @listeners{n} accept",
        "InternalIP or anchored network: the policies decide",
    );
    add_rule(&mut out, "icmp type echo-request accept", "ping: the policies decide");
    add_rule(&mut out, "icmpv6 type echo-request accept", "ping: the policies decide");
    add_rule(
        &mut out,
        "meta l4proto { icmp, icmpv6 } ct state related accept",
        "ICMP error: the policies decide",
    );
    add_rule(
        &mut out,
        "counter drop",
        "other addresses of this node are closed to other members",
    );
    out.push_str("  }\n");
    out
}

fn own_addresses_chains_of_policy_mode(parameters: &RuleParameters) -> String {
    let device = &parameters.device;
    let mut out = String::from(
        "
  chain own_addresses {
    type filter hook prerouting priority mangle; policy accept;
",
    );
    add_rule_pair(
        &mut out,
        &format!("iifname \"{device}\" {{ip}} saddr @mesh{{n}} {TO_THIS_NODE}"),
        "from the mesh to an address of this node",
    );
    out + "  }\n" + &to_this_node_chain()
}

/// Renders the policy chains for policy mode, in which another program owns the tunnel. WireGuard binds the inner source to the peer,
/// so a packet with a mesh source is from the member that has this source. Packets with other sources are left to the program that
/// owns the tunnel.
fn policy_chains_of_policy_mode(parameters: &RuleParameters) -> String {
    let device = &parameters.device;
    let mut out = String::from(
        "
  chain policy_input {
    type filter hook input priority filter - 10; policy accept;
",
    );
    let from_mesh = format!("iifname \"{device}\" {{ip}} saddr @mesh{{n}} goto from_mesh");
    add_rule_pair(&mut out, &from_mesh, FROM_MESH);
    out.push_str(
        "  }

  # A leader of Kilo may forward from members to other nodes of this cluster, as the policies allow, but not between members.
  chain policy_forward {
    type filter hook forward priority filter - 10; policy accept;
",
    );
    let through = format!("iifname \"{device}\" oifname \"{device}\" {{ip}} saddr @mesh{{n}} {{ip}} daddr @mesh{{n}}");
    add_rule_pair(&mut out, &format!("{through} counter drop"), TRANSIT);
    add_rule(
        &mut out,
        &format!("iifname \"{device}\" ip saddr @mesh4 ip hdrlength != 5 counter drop"),
        OPTIONS,
    );
    add_rule_pair(&mut out, &from_mesh, FROM_MESH);
    out.push_str("  }\n");
    out + &from_mesh_chains()
}

// Comments of rules that more than one mode or chain has.
const FROM_MESH: &str = "from the mesh: check the policies";
const TRANSIT: &str = "no transit from member to member";
const KEEP_SOURCE: &str = "published source: keep it from a later masquerade";

/// Condition for packets to nodes of this cluster in other locations, with a source that those nodes accept from this node.
pub(super) const OWN_CLUSTER_OUT: &str = "{ip} saddr @own_sources{n} {ip} daddr @own_cluster{n}";

/// The head of the nat chain.
const NAT_CHAIN: &str = "
  # Before the CNI's nat chain (priority 100). `accept` does not stop a later nat chain from masquerading; translating a source to
  # itself does.
  chain nat {
    type nat hook postrouting priority srcnat - 10; policy accept;
";

fn nat_chain_of_policy_mode(parameters: &RuleParameters) -> String {
    let device = &parameters.device;
    let mut out = String::from(NAT_CHAIN);
    let published = format!("oifname \"{device}\" {{ip}} daddr @mesh{{n}} {{ip}} saddr @published{{n}}");
    add_rule_pair(
        &mut out,
        &format!("{published} counter snat {{ip}} to {{ip}} saddr"),
        KEEP_SOURCE,
    );
    out + "  }\n"
}

/// Renders the policy chains. They run after kube-proxy's DNAT (-100) and before filter chains of the usual priority (0).
fn policy_chains(parameters: &RuleParameters) -> String {
    let device = &parameters.device;
    let mut out = String::from(
        "
  chain policy_input {
    type filter hook input priority filter - 10; policy accept;
",
    );
    let from_mesh = format!("iifname \"{device}\" goto from_mesh");
    add_rule(&mut out, &from_mesh, FROM_MESH);
    out.push_str(
        "  }

  chain policy_forward {
    type filter hook forward priority filter - 10; policy accept;
",
    );
    add_rule(
        &mut out,
        &format!("iifname \"{device}\" oifname \"{device}\" counter drop"),
        TRANSIT,
    );
    add_rule(
        &mut out,
        &format!("iifname \"{device}\" ip hdrlength != 5 counter drop"),
        OPTIONS,
    );
    add_rule(&mut out, &from_mesh, FROM_MESH);
    out.push_str("  }\n");
    out + &from_mesh_chains()
}

/// Appends the rules that drop denied packets. Only packets that match an allow set reach these rules.
fn add_deny_rules(out: &mut String) {
    add_rule(
        out,
        "meta l4proto . th dport @infrastructure jump infrastructure",
        "port of Kubernetes itself",
    );
    add_rule_pair(
        out,
        "meta l4proto tcp {ip} daddr . th dport @api{n} counter drop",
        "endpoint of the API server",
    );
    add_rule_pair(
        out,
        "{ip} saddr . {ip} daddr @deny{n} counter drop",
        "denied on every port",
    );
    // `ct protocol` instead of `meta l4proto`: `deny_ports` is an interval set, and to look up `meta l4proto` in a concatenation of
    // such a set, nft 1.0 adds a byteorder expression of one byte. Linux 6.12.117 refuses this expression and so the whole table.
    // Every packet in this chain is in conntrack.
    add_rule_pair(
        out,
        "{ip} saddr . {ip} daddr . ct protocol . th dport @deny_ports{n} counter drop",
        "denied on this port",
    );
}

/// Appends the rules that drop related packets (`ct state related`) except ICMP errors.
fn add_error_only_rules(out: &mut String) {
    for rule in [
        "meta nfproto ipv4 meta l4proto != icmp counter drop",
        "meta nfproto ipv6 meta l4proto != icmpv6 counter drop",
        "icmp type != { destination-unreachable, time-exceeded } counter drop",
        "icmpv6 type != { destination-unreachable, packet-too-big, time-exceeded } counter drop",
    ] {
        add_rule(out, rule, "related, but not an ICMP error");
    }
}

fn from_mesh_chains() -> String {
    let mut out = String::from(
        "
  # Every packet of the original direction is matched, so deleting an element also stops open connections.
  chain from_mesh {
",
    );
    add_rule_pair(
        &mut out,
        "{ip} saddr @own_cluster{n} accept",
        "from another location of this cluster",
    );
    add_rule_pair(
        &mut out,
        "{ip} saddr @closed{n} counter drop",
        "from a member that is closed",
    );
    add_rule(
        &mut out,
        "ct direction reply ct state established accept",
        "reply to a connection from this side",
    );
    add_rule(
        &mut out,
        "ct state invalid,related,untracked goto unusual",
        "not part of a connection: perhaps an ICMP error",
    );
    add_rule(
        &mut out,
        "ct direction reply counter drop",
        "reply without an established connection",
    );
    add_rule_pair(
        &mut out,
        "{ip} saddr . {ip} daddr @allow{n} goto allowed",
        "allowed on every port",
    );
    add_rule(&mut out, "counter drop", "no PeerPolicy allows it");
    out.push_str(
        "  }

  # Deny sets are filled first and matched last, because set updates within a transaction are not atomic: a packet that matches a
  # new allow element also sees the deny elements of that transaction.
  chain allowed {
",
    );
    add_deny_rules(&mut out);
    add_rule(&mut out, "accept", "allowed and not denied");
    out.push_str("  }\n\n  chain unusual {\n");
    add_rule(
        &mut out,
        "ct state related goto icmp_in",
        "related: check for an ICMP error",
    );
    add_rule(&mut out, "counter drop", "invalid or untracked");
    out.push_str(
        "  }

  # Closes the ports on all nodes, not only on this one: the CNI may masquerade a packet that this node forwards to another node,
  # which then takes this node for the source. No object lists the nodes' addresses in pod CIDRs (the pods' default gateways), so
  # the ports are closed in whole pod CIDRs of other nodes. A pod is still reached at such a port through the
  # tunnel of its own node, or through a Service.
  chain infrastructure {
",
    );
    add_rule(&mut out, "fib daddr type local counter drop", "on this node");
    add_rule_pair(
        &mut out,
        "{ip} daddr @nodes{n} counter drop",
        "on a node of this cluster",
    );
    add_rule_pair(
        &mut out,
        "ct status & dnat == 0 {ip} daddr @pod_cidrs_of_other_nodes{n} counter drop",
        "in another node's pod CIDR, not through a Service",
    );
    out.push_str(
        "  }

  # ICMP errors about a flow of the member that sends the error. Packets that conntrack helpers call related are dropped.
  chain icmp_in {
",
    );
    add_error_only_rules(&mut out);
    add_rule_pair(
        &mut out,
        "{ip} saddr . ct original {ip} saddr @pairs{n} counter accept",
        "error about a flow from the same member",
    );
    add_rule_pair(
        &mut out,
        "{ip} saddr . ct reply {ip} saddr @pairs{n} counter accept",
        "error about a flow to the same member",
    );
    add_rule(&mut out, "counter drop", "error about a flow of another member");
    out.push_str("  }\n");
    out
}

/// Renders the chains that set sources and segment sizes of packets that enter or leave the tunnel.
fn nat_and_mss_chains(parameters: &RuleParameters) -> String {
    let RuleParameters {
        device,
        mtu,
        wireguard_v4,
        wireguard_v6,
        ..
    } = parameters;
    let mut out = String::from(NAT_CHAIN);
    add_rule_pair(
        &mut out,
        &format!("oifname \"{device}\" {OWN_CLUSTER_OUT} counter snat {{ip}} to {{ip}} saddr"),
        "to another location of this cluster: keep the source from a later masquerade",
    );
    add_rule_pair(
        &mut out,
        &format!(
            "oifname \"{device}\" {{ip}} saddr @published{{n}} {{ip}} daddr != @gateways{{n}} counter snat {{ip}} to {{ip}} saddr"
        ),
        KEEP_SOURCE,
    );
    let masquerade = "unpublished source: use the WireGuard address";
    if let Some(address) = wireguard_v4 {
        add_rule(
            &mut out,
            &format!("oifname \"{device}\" meta nfproto ipv4 counter snat ip to {address}"),
            masquerade,
        );
    }
    if let Some(address) = wireguard_v6 {
        add_rule(
            &mut out,
            &format!("oifname \"{device}\" meta nfproto ipv6 counter snat ip6 to {address}"),
            masquerade,
        );
    }
    out.push_str(
        "    # An anchor also receives packets for anchored networks, which are in the allowed IPs of its Peers in other members.\n",
    );
    let anchored = "ct original {ip} daddr @served{n} ct original {ip} daddr != @published{n}";
    add_rule_pair(
        &mut out,
        &format!("iifname \"{device}\" oifname != \"{device}\" {anchored} counter masquerade"),
        "anchor: the reply has to return through this node",
    );
    out.push_str(
        "  }

  # Clamps in both directions, because the device of a peer may have a larger MTU. `rt mtu` is the smaller MTU of the routes to the
  # packet's destination and to its source, so the MTU of a peer's route applies to connections from either side.
  chain mss {
    type filter hook forward priority mangle; policy accept;
",
    );
    let clamp = "tcp flags & (syn | rst) == syn tcp option maxseg size";
    for (interface, comment) in [
        ("oifname", "into the tunnel: segments fit the routes"),
        ("iifname", "from the tunnel: segments fit the routes"),
    ] {
        add_rule(
            &mut out,
            &format!("{interface} \"{device}\" {clamp} set rt mtu"),
            comment,
        );
    }
    for (family, name) in [(Family::V4, "ipv4"), (Family::V6, "ipv6")] {
        let size = segment(*mtu, family);
        add_rule(
            &mut out,
            &format!("iifname \"{device}\" meta nfproto {name} {clamp} > {size} tcp option maxseg size set {size}"),
            "from the tunnel: segments fit the device's MTU",
        );
    }
    out.push_str("  }\n");
    out
}
