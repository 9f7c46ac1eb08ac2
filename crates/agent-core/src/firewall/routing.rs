//! Renders the chains that drop spoofed sources and mark packets for policy routing, so that replies take the path of their
//! connection (tunnel or underlay), and the chains that drop packets which must not leave this node. [`super::render`] has the other
//! chains. [`super::Sets`] documents the sets, and [`crate::numbers`] the marks.

use super::{
    RuleParameters,
    render::{OWN_CLUSTER_OUT, TO_THIS_NODE, add_rule, add_rule_pair, match_mark, set_mark, to_this_node_chain},
};
use crate::numbers::{CONNECTION_MASK, MARK_MASK, MARK_TUNNEL, MARK_UNDERLAY};

const REPLY_BY_TUNNEL: &str = "reply to the tunnel although its destination has a throw route";

/// Renders the chains that drop spoofed sources, and that mark packets so that replies take the path of their connection.
pub(super) fn path_chains(parameters: &RuleParameters) -> String {
    let RuleParameters {
        device, listen_port, ..
    } = parameters;
    let (ct_tunnel, ct_underlay) = (set_mark(MARK_TUNNEL, "ct"), set_mark(MARK_UNDERLAY, "ct"));
    let (meta_tunnel, meta_underlay) = (set_mark(MARK_TUNNEL, "meta"), set_mark(MARK_UNDERLAY, "meta"));
    let (from_tunnel, from_underlay) = (match_mark(MARK_TUNNEL, "ct"), match_mark(MARK_UNDERLAY, "ct"));
    let mut out = String::from(
        "
  # Replies take the path of their connection (tunnel or underlay): the packet mark selects the routing table. A strict rp_filter
  # also looks up the source with the underlay mark (src_valid_mark). This chain runs after the chains of other programs that restore
  # the mark of a connection, such as wg-quick's, which sets the whole mark of received UDP packets.
  chain path_in {
    type filter hook prerouting priority mangle + 1; policy accept;
",
    );
    add_rule(
        &mut out,
        &format!("iifname \"{device}\" goto path_from_tunnel"),
        "packets from the tunnel",
    );
    add_rule(
        &mut out,
        &format!("udp dport {listen_port} fib daddr type local {meta_underlay} accept"),
        "outer packets of the tunnel: use the underlay",
    );
    out.push_str(
        "    # A node whose own address lies in a mesh network receives packets with mesh sources by the underlay, but never forwards them.\n",
    );
    add_rule_pair(
        &mut out,
        "{ip} saddr @mesh{n} fib daddr type unicast counter drop",
        "spoofed: a mesh source from outside the tunnel is not forwarded",
    );
    add_rule_pair(
        &mut out,
        &format!("ct state new {{ip}} saddr @mesh{{n}} counter {ct_underlay}"),
        "connection from a mesh source by the underlay",
    );
    out.push_str(
        "    # A connection may be older than the Peer whose allowed IPs contain its source, such as a connection to the API server on this node.
    # Its replies have its destination as their source. If peers do not accept that source, the replies would be lost in the tunnel, so
    # the connection stays on the underlay. Any other connection moves into the tunnel.
",
    );
    add_rule_pair(
        &mut out,
        &format!(
            "ct direction original {} {{ip}} saddr @mesh{{n}} {{ip}} daddr != @own_sources{{n}} {{ip}} daddr != @published{{n}} counter {ct_underlay}",
            match_mark(0, "ct")
        ),
        "older connection from a mesh source by the underlay",
    );
    add_rule(
        &mut out,
        &format!("ct direction original {from_underlay} {meta_underlay}"),
        "underlay connection: rp_filter looks up its source in the underlay",
    );
    add_rule(
        &mut out,
        &format!("ct direction reply {from_underlay} {meta_underlay}"),
        "reply of a pod, or of a translated destination: use the underlay",
    );
    let reply_by_tunnel = format!("ct direction reply {from_tunnel} {{ip}} daddr @throw{{n}} counter {meta_tunnel}");
    add_rule_pair(&mut out, &reply_by_tunnel, REPLY_BY_TUNNEL);
    out.push_str("  }\n\n  chain path_from_tunnel {\n");
    add_rule(
        &mut out,
        &format!("{} {}", match_mark(MARK_TUNNEL, "meta"), clear_mark()),
        "restored by another program: would return to the tunnel",
    );
    add_rule(
        &mut out,
        &format!("ct state new {ct_tunnel}"),
        "connection by the tunnel",
    );
    add_rule(
        &mut out,
        &format!("ct direction reply {from_underlay} {meta_underlay}"),
        "reply of a mesh endpoint to an underlay connection: use the underlay",
    );
    add_rule_pair(
        &mut out,
        "{ip} saddr @own_cluster{n} accept",
        "from another location of this cluster",
    );
    add_rule(&mut out, TO_THIS_NODE, "to an address of this node");
    out.push_str("  }\n");
    out.push_str(&to_this_node_chain());
    out.push_str(
        "
  # A connection from the underlay whose destination is translated to a mesh address (a NodePort with an endpoint in another member)
  # enters the tunnel. With the underlay mark it would leave unencrypted.
  chain path_dnat {
    type filter hook prerouting priority dstnat + 1; policy accept;
",
    );
    add_rule(&mut out, "ct status & dnat == 0 accept", "not translated");
    let underlay = match_mark(MARK_UNDERLAY, "meta");
    add_rule_pair(
        &mut out,
        &format!(
            "ct direction original {underlay} {{ip}} daddr @mesh{{n}} counter {}",
            clear_mark()
        ),
        "translated into the mesh: use the tunnel",
    );
    out.push_str(
        "  }

  chain path_out {
    type route hook output priority mangle; policy accept;
",
    );
    add_rule(
        &mut out,
        "ct direction original accept",
        "this node's own connections follow the routes",
    );
    add_rule(
        &mut out,
        &format!("ct direction reply {from_underlay} counter {meta_underlay}"),
        "reply to an underlay connection: use the underlay",
    );
    // Only replies to destinations with a throw route get the tunnel mark. Conntrack also counts this node's own ICMP errors about
    // packets that its pods send into the tunnel (too big, unreachable) as replies. With the mark, they would enter the tunnel and not
    // reach the pods.
    add_rule_pair(&mut out, &reply_by_tunnel, REPLY_BY_TUNNEL);
    out.push_str("  }\n");
    out
}

/// Returns an nft statement that clears all bits of [`MARK_MASK`], which include ours, in the mark of a packet.
fn clear_mark() -> String {
    format!("meta mark set meta mark & {:#010x}", !MARK_MASK)
}

/// Renders the chains that drop packets that would leave unencrypted or must not enter the tunnel: to a closed member, untracked, ICMP
/// errors about packets that no policy accepted, or with an unpublished source (except replies of an anchor). They run after every nat
/// chain.
pub(super) fn leave_chains(parameters: &RuleParameters) -> String {
    let RuleParameters {
        device, listen_port, ..
    } = parameters;
    let (from_tunnel, from_underlay) = (match_mark(MARK_TUNNEL, "ct"), match_mark(MARK_UNDERLAY, "ct"));
    let mut out = String::from(
        "
  chain leave {
    type filter hook postrouting priority srcnat + 10; policy accept;
",
    );
    add_rule(
        &mut out,
        &format!("oifname \"{device}\" goto into_tunnel"),
        "into the tunnel",
    );
    add_rule(&mut out, "oifname \"lo\" accept", "loopback");
    out.push_str("    # Matches only our two mark bits: Cilium sets other bits in the mark of packets from the host, in filter output.\n");
    add_rule(
        &mut out,
        &format!(
            "meta mark & {CONNECTION_MASK:#010x} == {MARK_UNDERLAY:#010x} udp sport {listen_port} fib saddr type local accept"
        ),
        "outer packets of the tunnel",
    );
    add_rule(
        &mut out,
        &format!("ct direction reply {from_underlay} accept"),
        "reply to an underlay connection",
    );
    out.push_str(
        "    # A neighbour on the underlay's link may have a mesh address: if this node is a virtual machine in the hub, pods of the hub are
    # such neighbours. Neighbour discovery is never forwarded, and the kernel looks up no route for its answers.
",
    );
    add_rule(
        &mut out,
        "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept",
        "IPv6 neighbour discovery",
    );
    // This node's own ICMP errors about a tunnel flow go to the flow's local end, whose packet caused them. Conntrack gives an
    // error the opposite direction of that packet. So if the error has the direction `reply`, the local end opened the
    // connection, and the remote end is the source of the replies. If the error has the direction `original`, the remote
    // end is the source of the original direction.
    let error = format!("fib saddr type local ct state related {from_tunnel}");
    for (direction, remote_end) in [("reply", "ct reply {ip} saddr"), ("original", "ct original {ip} saddr")] {
        add_rule_pair(
            &mut out,
            &format!("{error} ct direction {direction} {remote_end} @mesh{{n}} {{ip}} daddr != @mesh{{n}} accept"),
            "own ICMP error about a tunnel flow, to the local end",
        );
    }
    out.push_str(
        "    # Connections with another node of this cluster leave the tunnel when the nodes get the same location.\n",
    );
    for set in ["pod_cidrs_of_other_nodes", "nodes"] {
        add_rule_pair(
            &mut out,
            &format!("{{ip}} daddr @{set}{{n}} {{ip}} daddr != @mesh{{n}} accept"),
            "to another node of this cluster, by the cluster's own network",
        );
    }
    add_rule_pair(
        &mut out,
        "{ip} saddr != @mesh{n} {ip} daddr @own_pods{n} accept",
        "to a pod of this node, by the cluster's own network",
    );
    out.push_str(
        "    # After a prefix is removed from the mesh, conntrack still has its connections, translated to a published source.\n",
    );
    add_rule(
        &mut out,
        &format!("iifname != \"{device}\" {from_tunnel} counter drop"),
        "connection of the tunnel would continue unencrypted",
    );
    add_rule_pair(&mut out, "{ip} daddr @throw{n} accept", "needed by the underlay");
    add_rule_pair(
        &mut out,
        "{ip} daddr @mesh{n} counter drop",
        "to the mesh would leave unencrypted",
    );
    out.push_str("  }\n\n  chain into_tunnel {\n");
    add_rule(
        &mut out,
        "ct state untracked counter drop",
        "untracked: not translated, so the source is unchecked",
    );
    // The kernel answers a packet without a route before its forward hook, so no policy has accepted the packet and its conntrack
    // entry is not confirmed. Without this drop a member learns from these errors which addresses of other members have a route
    // here. frag-needed has to pass, because UDP learns the path's MTU from it, and time exceeded passes for traceroute.
    for rule in [
        "icmp type destination-unreachable icmp code != frag-needed ct status & confirmed == 0 counter drop",
        "icmpv6 type destination-unreachable ct status & confirmed == 0 counter drop",
    ] {
        add_rule(&mut out, rule, "ICMP error about a packet that no policy has accepted");
    }
    let (unmarked, ct_tunnel) = (match_mark(0, "ct"), set_mark(MARK_TUNNEL, "ct"));
    add_rule_pair(
        &mut out,
        &format!("{OWN_CLUSTER_OUT} ct state new {unmarked} {ct_tunnel}"),
        "connection to another location of this cluster",
    );
    add_rule_pair(
        &mut out,
        &format!("{OWN_CLUSTER_OUT} accept"),
        "to another location of this cluster",
    );
    add_rule_pair(
        &mut out,
        "{ip} daddr @closed{n} counter drop",
        "to a member that is closed",
    );
    add_rule_pair(
        &mut out,
        &format!("ct direction reply {from_tunnel} {{ip}} saddr @served{{n}} accept"),
        "reply of an anchor: conntrack has restored the ClusterIP as its source",
    );
    add_rule_pair(
        &mut out,
        "{ip} saddr != @published{n} counter drop",
        "source is not published for this node",
    );
    add_rule(
        &mut out,
        &format!("ct state new {unmarked} {ct_tunnel}"),
        "connection through the tunnel",
    );
    out.push_str("  }\n");
    out
}
