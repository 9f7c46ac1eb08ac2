//! The chains that decide which way a packet goes, and what may leave at all. What may come in is in [`super::render`].

use std::fmt::Write;

use super::{
    Frame,
    render::{TO_THIS_NODE, both, is_mark, set_mark, to_this_node},
};
use crate::numbers::{CONNECTION_MASK, MARK_MASK, MARK_TUNNEL, MARK_UNDERLAY};

/// Which way a packet goes: spoofed sources, and answers on the path their connection came by.
pub(super) fn path(frame: &Frame) -> String {
    let Frame {
        device, listen_port, ..
    } = frame;
    let (ct_tunnel, ct_underlay) = (set_mark(MARK_TUNNEL, "ct"), set_mark(MARK_UNDERLAY, "ct"));
    let (meta_tunnel, meta_underlay) = (set_mark(MARK_TUNNEL, "meta"), set_mark(MARK_UNDERLAY, "meta"));
    let (came_by_tunnel, came_by_underlay) = (is_mark(MARK_TUNNEL, "ct"), is_mark(MARK_UNDERLAY, "ct"));
    let mut out = String::new();
    let _ = writeln!(
        out,
        "
  # A connection is answered on the path it came by.
  chain path_in {{
    type filter hook prerouting priority mangle; policy accept;
    iifname \"{device}\" goto path_from_tunnel
    # The tunnel's own outer packets, and below what came by the underlay: for a strict rp_filter, which looks the source
    # up with this mark (src_valid_mark).
    udp dport {listen_port} fib daddr type local {meta_underlay} accept
    # A mesh source that did not come by the tunnel may reach this node itself (a worker whose own address lies in a mesh
    # network), never be forwarded."
    );
    both(&mut out, "{ip} saddr @mesh{n} fib daddr type unicast counter drop");
    let by_underlay = format!("ct state new {{ip}} saddr @mesh{{n}} counter {ct_underlay}");
    both(&mut out, &by_underlay);
    let _ = writeln!(
        out,
        "    ct direction original {came_by_underlay} {meta_underlay}
    # What pods, and peers behind a translation, answer.
    ct direction reply {came_by_underlay} {meta_underlay}"
    );
    let thrown = format!("ct direction reply {came_by_tunnel} {{ip}} daddr @throw{{n}} counter {meta_tunnel}");
    both(&mut out, &thrown);
    let _ = writeln!(
        out,
        "  }}

  chain path_from_tunnel {{
    ct state new {ct_tunnel}
    ct direction reply {came_by_underlay} {meta_underlay}"
    );
    let _ = writeln!(out, "    {TO_THIS_NODE}\n  }}");
    out.push_str(&to_this_node());
    let underlay = is_mark(MARK_UNDERLAY, "meta");
    let keep = format!("meta mark set meta mark & {:#010x}", !MARK_MASK);
    out.push_str(
        "
  # A connection that came by the underlay and was translated into the mesh (NodePort here, endpoint there) goes on by
  # the tunnel; with the mark kept it would leave in clear.
  chain path_dnat {
    type filter hook prerouting priority dstnat + 1; policy accept;
    ct status & dnat == 0 accept
",
    );
    both(
        &mut out,
        &format!("ct direction original {underlay} {{ip}} daddr @mesh{{n}} counter {keep}"),
    );
    let _ = writeln!(
        out,
        "  }}

  chain path_out {{
    type route hook output priority mangle; policy accept;
    ct direction original accept
    ct direction reply {came_by_underlay} counter {meta_underlay}"
    );
    // Not for every answer: this node's own errors about what it sends into the tunnel (too big, unreachable) are answers in
    // conntrack's eyes, and they are for its own pods.
    both(&mut out, &thrown);
    out.push_str("  }\n");
    out
}

/// Nothing in clear, nothing unpublished: after every nat chain.
pub(super) fn leave(frame: &Frame) -> String {
    let Frame {
        device, listen_port, ..
    } = frame;
    let came_by_underlay = is_mark(MARK_UNDERLAY, "ct");
    let came_by_tunnel = is_mark(MARK_TUNNEL, "ct");
    let mut out = format!(
        "
  chain leave {{
    type filter hook postrouting priority srcnat + 10; policy accept;
    oifname \"{device}\" goto into_tunnel
    oifname \"lo\" accept
    # The tunnel's outer packets, told by our two bits alone: Cilium adds its own to what the host sends, in filter output.
    meta mark & {CONNECTION_MASK:#010x} == {MARK_UNDERLAY:#010x} udp sport {listen_port} fib saddr type local accept
    ct direction reply {came_by_underlay} accept
    # A neighbour on the underlay's own link whose address lies in the mesh, as hub pods are to a worker in the hub. ARP's
    # part in IPv6: never forwarded, and answered without a look at routes.
    icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
"
    );
    out.push_str(
        "    # This node's own errors about a flow through the tunnel, to the end that is here: too big, unreachable.
",
    );
    let error = format!("fib saddr type local ct state related {came_by_tunnel}");
    for (direction, far) in [("reply", "ct reply {ip} saddr"), ("original", "ct original {ip} saddr")] {
        both(
            &mut out,
            &format!("{error} ct direction {direction} {far} @mesh{{n}} {{ip}} daddr != @mesh{{n}} accept"),
        );
    }
    let _ = writeln!(
        out,
        "    # What the tunnel carried does not go on in clear when its prefix is no longer the mesh's: conntrack would keep
    # the published source, and what was said in confidence would be said aloud.
    iifname != \"{device}\" {came_by_tunnel} counter drop"
    );
    both(&mut out, "{ip} daddr @throw{n} accept");
    both(&mut out, "{ip} daddr @mesh{n} counter drop");
    out.push_str(
        "  }

  chain into_tunnel {
    ct state untracked counter drop
",
    );
    both(&mut out, "{ip} daddr @closed{n} counter drop");
    out.push_str(
        "    # An anchor answers with the address that was asked, which is its ClusterIP again already.
",
    );
    both(
        &mut out,
        &format!("ct direction reply {came_by_tunnel} {{ip}} saddr @served{{n}} accept"),
    );
    both(&mut out, "{ip} saddr != @published{n} counter drop");
    let (unmarked, ct_tunnel) = (is_mark(0, "ct"), set_mark(MARK_TUNNEL, "ct"));
    let _ = writeln!(out, "    ct state new {unmarked} {ct_tunnel}\n  }}");
    out
}
