//! What a sandbox adds to the table: its sets and its chains, in both directions. What every member has is in
//! [`super::render`].
//!
//! A sandbox opens connections to endpoints that are granted to it and nothing else, and nobody opens one to it. Both
//! directions are matched against the sets on every packet: a connection ends with its grant, also one of UDP, which its
//! other end would keep alive.

use std::time::Duration;

use super::{
    Bounds, Sets,
    render::{ERRORS_ONLY, Set, both, closed, is_mark, nets, pairs, ports, set_mark},
};
use crate::{
    numbers::{CONNECTION_MASK, MARK_CHECKED, MARK_TUNNEL},
    prefixes::Family,
};

/// What a sandbox may reach is written so that it goes by itself, unless somebody alive says it again.
pub(super) fn sets(family: Family, sets: &Sets, timeout: Duration) -> [Set; 4] {
    const NAMES: [[&str; 4]; 2] = [
        ["sandbox4", "grants4", "draining4", "reach4"],
        ["sandbox6", "grants6", "draining6", "reach6"],
    ];
    let (index, address) = match family {
        Family::V4 => (0, "ipv4_addr"),
        Family::V6 => (1, "ipv6_addr"),
    };
    let [name, grants_name, draining_name, reach_name] = NAMES[index];
    // A timeout of nothing would be none at all.
    let fades = format!("flags timeout; timeout {}s;", timeout.as_secs().max(1));
    let port = format!("type {address} . {address} . inet_proto . inet_service; {fades}");
    let fading = |name, kind: String, elements| Set {
        name,
        kind: kind.into(),
        elements,
        fades: true,
        closes: false,
    };
    [
        Set {
            name,
            kind: format!("type {address}; flags interval;").into(),
            elements: nets(&sets.sandbox),
            fades: false,
            closes: false,
        },
        fading(grants_name, port.clone(), ports(&sets.grants)),
        fading(draining_name, port, ports(&sets.draining)),
        fading(
            reach_name,
            format!("type {address} . {address}; {fades}"),
            pairs(&sets.reach),
        ),
    ]
}

/// What comes from a sandbox: decided before it is routed, and once more where it goes by then. For [`both`].
pub(super) const ENTER: &str = "{ip} saddr @sandbox{n} goto from_sandbox";

/// What pods answer, likewise. This node's own answers are found by the mark of what they answer. For [`both`].
pub(super) fn answer() -> String {
    let came_by_tunnel = is_mark(MARK_TUNNEL, "ct");
    format!("ct direction reply {came_by_tunnel} {{ip}} daddr @sandbox{{n}} goto to_sandbox")
}

/// First of what enters the tunnel. For [`both`].
pub(super) const LEAVE: &str = "{ip} daddr @sandbox{n} goto to_sandbox";

/// A rate for each, and not a number of connections that are open: to count those the kernel walks through them, and a sandbox
/// that holds 30,000 slowed every new one of its own down to 400 a second, at a whole core's cost.
fn limit(bounds: Bounds) -> Option<String> {
    let rate = (bounds.new_flows > 0).then_some(bounds.new_flows)?;
    Some(format!(
        "limit rate over {rate}/second burst {} packets",
        rate.saturating_mul(2)
    ))
}

/// Sets whose elements packets write: how much each node of a sandbox has asked for of late.
pub const WRITTEN_BY_PACKETS: [&str; 2] = ["flows4", "flows6"];

fn new_flows(bounds: Bounds) -> String {
    if limit(bounds).is_none() {
        return String::new();
    }
    let set =
        |name, address| format!("  set {name} {{ type {address}; size 65535; flags dynamic,timeout; timeout 60s; }}\n");
    let [v4, v6] = WRITTEN_BY_PACKETS;
    format!("\n{}{}", set(v4, "ipv4_addr"), set(v6, "ipv6_addr"))
}

/// The chains that these two lead to.
pub(super) fn chains(bounds: Bounds) -> String {
    let mut out = new_flows(bounds);
    let mark = set_mark(MARK_CHECKED, "meta");
    out.push_str(
        "
  # Before routing and behind it. What is granted gets the mark, and without that there is no way: where the table goes while
  # a packet is between two of its chains, that opens nothing. Behind routing it may go elsewhere than it did. A grant is an
  # endpoint: what was translated here came for a ClusterIP or a NodePort, which are nobody's grant. Options of IPv4 may name
  # another way. Answers would belong to a connection that nobody here may have opened.
  chain from_sandbox {
    ct state invalid,untracked counter drop
    ip hdrlength != 5 counter drop
    ct state related goto errors_from_sandbox
    ct direction reply counter drop
    ct status & dnat != 0 counter drop
",
    );
    closed(&mut out);
    if let Some(limit) = limit(bounds) {
        // Once for each: behind routing it has the mark.
        let first = format!("ct status & confirmed == 0 meta mark & {CONNECTION_MASK:#010x} == 0");
        let new = format!("{first} {{ip}} saddr . {{ip}} daddr . ct protocol . th dport @grants{{n}}");
        both(
            &mut out,
            &format!("{new} update @flows{{n}} {{ {{ip}} saddr {limit} }} counter drop"),
        );
    }
    for (state, set) in [("", "grants"), ("ct state established ", "draining")] {
        let granted = format!("{state}{{ip}} saddr . {{ip}} daddr . ct protocol . th dport @{set}{{n}}");
        both(&mut out, &format!("{granted} {mark} accept"));
    }
    out.push_str(
        "    counter drop
  }

  # About a flow of its own, to the endpoint of that flow, while that is still its to reach.
  chain errors_from_sandbox {
",
    );
    out.push_str(ERRORS_ONLY);
    let own = "{ip} saddr . ct original {ip} saddr @pairs{n}";
    both(
        &mut out,
        &format!("{own} ct original {{ip}} saddr . {{ip}} daddr @reach{{n}} counter {mark} accept"),
    );
    out.push_str(
        "    counter drop
  }

  # Whoever speaks, this node itself or a pod, whose answers get their way here before they are routed. What is granted here is
  # answered with its own address, which no other member need know.
  chain to_sandbox {
    ct state invalid counter drop
    ct state related goto errors_to_sandbox
    ct direction original counter drop
",
    );
    for set in ["grants", "draining"] {
        both(
            &mut out,
            &format!("{{ip}} daddr . {{ip}} saddr . ct protocol . th sport @{set}{{n}} {mark} accept"),
        );
    }
    out.push_str(
        "    counter drop
  }

  chain errors_to_sandbox {
",
    );
    out.push_str(ERRORS_ONLY);
    both(
        &mut out,
        &format!("{{ip}} daddr . ct original {{ip}} daddr @reach{{n}} counter {mark} accept"),
    );
    out.push_str("    counter drop\n  }\n");
    out
}
