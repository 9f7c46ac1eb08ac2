//! Renders the gateway's table as text for `nft -f`. Only numbers, addresses and validated names are written, never text from an
//! object. Every rule has a comment, which `nft list table` shows; nft allows 128 bytes.

use std::{
    fmt::Write,
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    ops::RangeInclusive,
};

use clustermesh_core::mesh::Protocol;
use ipnet::IpNet;

use super::{GrantId, RuleParameters, SandboxId, connection_limits::ConnectionLimits};
use crate::{numbers::NFT_TABLE, prefixes::Family};

/// A part of the table that can be added and removed separately. Pieces are added in the order of the variants: a chain before the
/// element that refers to it, and a grant's endpoints before `Open` and `Grant`, which let its connections in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Piece {
    /// The named limit of a sandbox's new connections.
    Limit(SandboxId),
    /// The map element from the sandbox to its limit.
    LimitElement(SandboxId),
    /// A chain that chooses an endpoint.
    Chooser(Chooser),
    /// The map element from a grant and an index to an endpoint of one family.
    Backend(GrantId, Family, usize),
    /// The map element from a grant to the chooser of one family.
    Service(GrantId, Family),
    /// The set element that accepts packets of a grant's connections to this endpoint, and the replies.
    Endpoint(GrantId, SocketAddr),
    /// The set element that accepts ICMP errors about the grant's connections to this address.
    Host(GrantId, IpAddr),
    /// The map element from a network to its sandbox.
    Sandbox(IpNet),
    /// The set element that accepts packets of this grant's connections from the sandbox.
    Open((SandboxId, Protocol, u16), GrantId),
    /// The map element that sets the mark of a new connection to its grant.
    Grant((SandboxId, Protocol, u16)),
}

/// A chain that chooses an endpoint for all grants with these properties.
///
/// With these chains, a grant consists only of elements. If each grant had its own rule, the rule would need its own map of endpoints. The
/// kernel compares the name of a new map with the names of all others: 10,000 maps took 17 s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Chooser {
    pub(super) family: Family,
    pub(super) count: usize,
    pub(super) sticky: bool,
}

impl Chooser {
    pub(super) fn name(self) -> String {
        let Self { family, count, sticky } = self;
        let by = if sticky { "-by-address" } else { "" };
        format!("choose{}-{count}{by}", family_digit(family))
    }

    /// The first rule sets the packet's mark to the index of an endpoint, the second translates the destination to that endpoint.
    fn rules(self) -> [String; 2] {
        let Self { family, count, sticky } = self;
        let ip = ip_keyword(family);
        let choice = if sticky {
            // Without a seed the kernel draws a new one whenever the rule is written, and clients would get another endpoint although
            // the endpoints are the same.
            format!("jhash {ip} saddr mod {count} seed 0x1")
        } else {
            format!("numgen random mod {count}")
        };
        [
            format!("meta mark set {choice} comment \"number of the endpoint\""),
            format!(
                "meta l4proto {{ tcp, udp }} dnat {ip} to ct mark . meta mark map @backends{} comment \"translate to that endpoint\"",
                family_digit(family)
            ),
        ]
    }
}

/// Formats a number as nft prints marks.
pub(super) fn mark(number: u32) -> String {
    format!("{number:#010x}")
}

/// The definition of a named limit: `rate` packets per second, with bursts of twice as many.
pub(super) fn rate(rate: NonZeroU32) -> String {
    format!("rate over {rate}/second burst {} packets", rate.get().saturating_mul(2))
}

pub(super) const fn family_digit(family: Family) -> char {
    match family {
        Family::V4 => '4',
        Family::V6 => '6',
    }
}

pub(super) const fn ip_keyword(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}

fn family_of(address: IpAddr) -> Family {
    Family::of(&IpNet::from(address))
}

impl Piece {
    /// The set or map that contains this piece as an element, and the element's key. `None` = the piece is a limit or a chain.
    fn element(&self) -> Option<(&'static str, String)> {
        let granted_port = |(sandbox, protocol, port): &(SandboxId, Protocol, u16)| {
            format!("{} . {} . {port}", mark(sandbox.0), protocol.lowercase())
        };
        let by_family = |family, names: [&'static str; 2]| names[usize::from(family == Family::V6)];
        Some(match self {
            Self::Limit(_) | Self::Chooser(_) => return None,
            Self::LimitElement(sandbox) => ("limits", mark(sandbox.0)),
            Self::Backend(id, family, index) => (
                by_family(*family, ["backends4", "backends6"]),
                format!("{} . {index:#010x}", mark(id.0)),
            ),
            Self::Service(id, family) => (by_family(*family, ["services4", "services6"]), mark(id.0)),
            Self::Endpoint(id, socket) => (
                by_family(family_of(socket.ip()), ["endpoints4", "endpoints6"]),
                format!("{} . {} . {}", mark(id.0), socket.ip(), socket.port()),
            ),
            Self::Host(id, address) => (
                by_family(family_of(*address), ["hosts4", "hosts6"]),
                format!("{} . {address}", mark(id.0)),
            ),
            Self::Sandbox(network) => (
                by_family(Family::of(network), ["sandboxes4", "sandboxes6"]),
                network.to_string(),
            ),
            Self::Open(port, id) => ("open", format!("{} . {}", granted_port(port), mark(id.0))),
            Self::Grant(port) => ("grants", granted_port(port)),
        })
    }

    /// The data part of the element; empty for a set.
    fn data(&self, value: &str) -> String {
        match self {
            Self::LimitElement(sandbox) => format!(" : \"{}\"", limit(*sandbox)),
            Self::Service(..) => format!(" : goto {value}"),
            Self::Backend(..) | Self::Sandbox(_) | Self::Grant(_) => format!(" : {value}"),
            _ => String::new(),
        }
    }

    /// Adds a limit or a chain.
    fn add(&self, value: &str, out: &mut String) {
        let _ = match self {
            Self::Limit(sandbox) => writeln!(out, "add limit inet {NFT_TABLE} {} {value}", limit(*sandbox)),
            Self::Chooser(chooser) => {
                let name = chooser.name();
                let [first, second] = chooser.rules();
                writeln!(
                    out,
                    "add chain inet {NFT_TABLE} {name}\nadd rule inet {NFT_TABLE} {name} {first}\nadd rule inet {NFT_TABLE} {name} {second}"
                )
            }
            _ => Ok(()),
        };
    }

    /// Removes a limit or a chain.
    fn remove(&self, out: &mut String) {
        let _ = match self {
            Self::Limit(sandbox) => writeln!(out, "delete limit inet {NFT_TABLE} {}", limit(*sandbox)),
            Self::Chooser(chooser) => {
                let name = chooser.name();
                writeln!(
                    out,
                    "flush chain inet {NFT_TABLE} {name}\ndelete chain inet {NFT_TABLE} {name}"
                )
            }
            _ => Ok(()),
        };
    }
}

/// Maximum number of elements in one statement. With one statement for each element, nft takes twice the memory.
const BATCH: usize = 100;

/// Elements that are not written yet, by set. All belong to one set, or to the two sets of one kind, such as `hosts4` and
/// `hosts6`. The pieces of the two families alternate: if only one set were collected at a time, each statement would have
/// few elements.
#[derive(Default)]
struct Elements(Vec<(&'static str, Vec<String>)>);

impl Elements {
    fn push(&mut self, verb: &str, set: &'static str, element: String, out: &mut String) {
        let kind = |set: &'static str| set.trim_end_matches(['4', '6']);
        if self.0.first().is_some_and(|(other, _)| kind(other) != kind(set)) {
            self.write(verb, out);
        }
        match self.0.iter_mut().find(|(other, _)| *other == set) {
            Some((_, elements)) => elements.push(element),
            None => self.0.push((set, vec![element])),
        }
    }

    fn write(&mut self, verb: &str, out: &mut String) {
        for (set, elements) in std::mem::take(&mut self.0) {
            for batch in elements.chunks(BATCH) {
                let _ = writeln!(out, "{verb} element inet {NFT_TABLE} {set} {{ {} }}", batch.join(", "));
            }
        }
    }
}

/// Renders the commands that add the pieces, in the order of `pieces`.
pub(super) fn add<'a>(pieces: impl Iterator<Item = (&'a Piece, &'a String)>, out: &mut String) {
    let mut elements = Elements::default();
    for (piece, value) in pieces {
        if let Some((set, key)) = piece.element() {
            elements.push("add", set, key + &piece.data(value), out);
        } else {
            elements.write("add", out);
            piece.add(value, out);
        }
    }
    elements.write("add", out);
}

/// Renders the commands that remove the pieces, in the order of `pieces`.
pub(super) fn remove<'a>(pieces: impl Iterator<Item = &'a Piece>, out: &mut String) {
    let mut elements = Elements::default();
    for piece in pieces {
        if let Some((set, key)) = piece.element() {
            elements.push("delete", set, key, out);
        } else {
            elements.write("delete", out);
            piece.remove(out);
        }
    }
    elements.write("delete", out);
}

fn limit(sandbox: SandboxId) -> String {
    format!("sandbox-{:08x}", sandbox.0)
}

/// Chooses the range of source ports for connections to endpoints: the widest range without the pod's own listen ports, and without
/// ports below 1024, which some servers trust. Packets to a listen port are not tracked: if a connection had that source port,
/// the endpoint's replies would not be translated back.
fn source_ports(own: [u16; 2]) -> RangeInclusive<u32> {
    let mut cuts = own.map(|port| u32::from(port).max(1023));
    cuts.sort_unstable();
    let [low, high] = cuts;
    let ranges = [1024..=low - 1, low + 1..=high.saturating_sub(1), high + 1..=65535];
    let width = |range: &RangeInclusive<u32>| (range.end() + 1).saturating_sub(*range.start());
    ranges.into_iter().max_by_key(width).unwrap_or(1024..=65535)
}

/// Appends a rule with its comment.
pub(super) fn add_rule(out: &mut String, rule: &str, comment: &str) {
    let _ = writeln!(out, "    {rule} comment \"{comment}\"");
}

/// Renders the table without sandboxes and grants.
pub(super) fn base_table(parameters: &RuleParameters) -> String {
    let RuleParameters {
        interface,
        listen_port,
        admin_port,
        addresses,
        sandbox_connections,
        endpoint_connections,
    } = parameters;
    let other_destinations = |family: Family| {
        let own = addresses.iter().filter(|address| family_of(**address) == family);
        let own: Vec<String> = own.map(ToString::to_string).collect();
        let ip = ip_keyword(family);
        if own.is_empty() {
            return format!(
                "    meta nfproto ipv{} counter drop comment \"a family without an address here\"",
                family_digit(family)
            );
        }
        let own = own.join(", ");
        format!("    {ip} daddr != {{ {own} }} counter drop comment \"to another address than this gateway's\"")
    };
    let ports = source_ports([*listen_port, *admin_port]);
    let ports = format!("{}-{}", ports.start(), ports.end());
    let mut out = format!("table inet {NFT_TABLE}\ndelete table inet {NFT_TABLE}\n");
    let _ = write!(
        out,
        r#"table inet {NFT_TABLE} {{
  map sandboxes4 {{ type ipv4_addr : mark; flags interval; comment "network: its sandbox"; }}
  map sandboxes6 {{ type ipv6_addr : mark; flags interval; comment "network: its sandbox"; }}
  map grants {{ type mark . inet_proto . inet_service : mark; comment "sandbox, protocol, gateway port: the grant"; }}
  set open {{ type mark . inet_proto . inet_service . mark; comment "sandbox, protocol, gateway port and grant, matched for every packet"; }}
  set endpoints4 {{ type mark . ipv4_addr . inet_service; comment "grant and endpoint that its connections may have"; }}
  set endpoints6 {{ type mark . ipv6_addr . inet_service; comment "grant and endpoint that its connections may have"; }}
  set hosts4 {{ type mark . ipv4_addr; comment "grant and address of an endpoint, for ICMP errors"; }}
  set hosts6 {{ type mark . ipv6_addr; comment "grant and address of an endpoint, for ICMP errors"; }}
  map services4 {{ type mark : verdict; comment "grant: the chain that chooses an endpoint"; }}
  map services6 {{ type mark : verdict; comment "grant: the chain that chooses an endpoint"; }}
  map backends4 {{ type mark . mark : ipv4_addr . inet_service; comment "grant and number: the endpoint"; }}
  map backends6 {{ type mark . mark : ipv6_addr . inet_service; comment "grant and number: the endpoint"; }}
  map limits {{ type mark : limit; comment "sandbox: the limit of its new connections"; }}
  set alive {{ type ifname; flags timeout; comment "empty = not renewed: every packet of the tunnel is dropped"; }}
"#
    );
    let limits = ConnectionLimits {
        sandbox: *sandbox_connections,
        endpoint: *endpoint_connections,
    };
    limits.add_sets(&mut out);
    let _ = write!(
        out,
        r#"
  # Runs before fragments are reassembled and before the conntrack lookup. Packets from outside the tunnel are addressed to this pod,
  # including the replies of endpoints, because connections to endpoints have this pod's address as their source.
  chain first {{
    type filter hook prerouting priority -450; policy accept;
    iifname "lo" accept comment "loopback"
    iifname != "{interface}" fib daddr . iif type {{ local, broadcast, multicast }} accept comment "for this pod"
    iifname != "{interface}" counter drop comment "not addressed to this pod"
    iifname != @alive counter drop comment "the table was not renewed"
    ip frag-off & 0x3fff != 0 counter drop comment "a fragment"
    ip hdrlength != 5 counter drop comment "IPv4 options"
    ip protocol != {{ tcp, udp }} counter drop comment "neither TCP nor UDP, for example ICMP"
    ip6 nexthdr != {{ tcp, udp }} counter drop comment "IPv6: neither TCP nor UDP, or with extension headers"
{}
{}
  }}

  # Senders on the underlay can forge sources and would fill the conntrack table. So packets that any sender may send are not tracked.
  chain outer_in {{
    type filter hook prerouting priority raw; policy accept;
    iifname "{interface}" accept comment "inner packets are tracked"
    udp dport {listen_port} notrack comment "outer packets of the tunnel"
    tcp dport {admin_port} notrack comment "admin endpoint"
    icmp type echo-request notrack comment "ping"
    icmpv6 type echo-request notrack comment "ping"
  }}
  chain outer_out {{
    type filter hook output priority raw; policy accept;
    oifname "{interface}" accept comment "inner packets are tracked"
    udp sport {listen_port} notrack comment "outer packets of the tunnel"
    tcp sport {admin_port} notrack comment "admin endpoint"
    icmp type echo-reply notrack comment "ping"
    icmpv6 type echo-reply notrack comment "ping"
  }}

  # Every packet from the tunnel has to belong to a current grant. Only within this chain, the packet's mark is the sandbox. The
  # connection's mark is set only while it is 0, because a connection without replies stays in
  # state new, and its next packet must not move it to a newer grant.
  chain enter {{
    type filter hook prerouting priority mangle; policy accept;
    iifname != "{interface}" accept comment "not from the tunnel"
    meta mark set 0 comment "no sandbox"
    meta mark set ip saddr map @sandboxes4 comment "the sandbox"
    meta mark set ip6 saddr map @sandboxes6 comment "the sandbox"
    ct state new ct mark 0 limit name meta mark map @limits counter drop comment "too many new connections"
    ct state new ct mark 0 ct mark set meta mark . meta l4proto . th dport map @grants comment "the grant of a new connection"
    ct direction original meta mark . meta l4proto . th dport . ct mark @open meta mark set 0 accept comment "the grant is in force"
    counter drop comment "no grant"
  }}

  # By default conntrack takes a TCP packet of an unknown connection for a new connection. Then a connection whose grant was removed
  # would continue when the grant returns. So only SYN is translated; other packets go to this pod itself, which sends a reset.
  chain translate {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname "{interface}" tcp flags & (fin | syn | rst | ack) != syn accept comment "no known connection: not translated"
    iifname "{interface}" meta nfproto ipv4 ct mark vmap @services4 comment "choose an endpoint"
    iifname "{interface}" meta nfproto ipv6 ct mark vmap @services6 comment "choose an endpoint"
  }}

  chain forward {{
    type filter hook forward priority filter; policy drop;
    tcp flags syn / syn,rst tcp option maxseg size set rt mtu comment "segments fit the routes in both directions"
    oifname "{interface}" goto to_sandbox comment "into the tunnel"
    iifname != "{interface}" counter drop comment "neither from nor into the tunnel"
    ct status & dnat == 0 counter drop comment "no endpoint was chosen"
"#,
        other_destinations(Family::V4),
        other_destinations(Family::V6),
    );
    if limits.has_any() {
        add_rule(
            &mut out,
            "ct status & confirmed == 0 jump count",
            "count a new connection",
        );
    }
    let _ = write!(
        out,
        r#"    ct mark . ip daddr . th dport @endpoints4 accept comment "endpoint of the grant"
    ct mark . ip6 daddr . th dport @endpoints6 accept comment "endpoint of the grant"
    counter drop comment "no endpoint of its grant"
  }}

{}
  # Accepts only replies of the grant's endpoints, and ICMP errors about the grant's connections.
  chain to_sandbox {{
    oifname != @alive counter drop comment "the table was not renewed"
    ct direction original counter drop comment "no connection is opened to a sandbox"
    meta l4proto {{ tcp, udp }} ct mark . ip saddr . th sport @endpoints4 accept comment "reply of an endpoint of the grant"
    meta l4proto {{ tcp, udp }} ct mark . ip6 saddr . th sport @endpoints6 accept comment "reply of an endpoint of the grant"
    meta l4proto icmp ct state related ct mark . ct reply ip saddr @hosts4 accept comment "ICMP error about a connection of the grant"
    meta l4proto icmpv6 ct state related ct mark . ct reply ip6 saddr @hosts6 accept comment "ICMP error about a connection of the grant"
    counter drop comment "no grant"
  }}

  # This pod itself sends a sandbox only ICMP errors and TCP resets of granted ports.
  chain output {{
    type filter hook output priority filter; policy accept;
    oifname != "{interface}" accept comment "not into the tunnel"
    ct mark != 0 ct direction reply tcp flags & (fin | syn | rst) == rst accept comment "TCP reset of a granted port"
    meta l4proto != {{ icmp, icmpv6 }} counter drop comment "this pod sends a sandbox nothing else"
    goto to_sandbox comment "ICMP error of this pod"
  }}
  chain input {{
    type filter hook input priority filter; policy drop;
    iifname "lo" accept comment "loopback"
    iifname "{interface}" ct mark != 0 meta l4proto tcp counter reject with tcp reset comment "a granted port: no endpoint, or no known connection"
    iifname "{interface}" counter drop comment "a sandbox does not reach this pod itself"
    udp dport {listen_port} accept comment "outer packets of the tunnel"
    ct state established,related accept comment "replies to this pod"
    tcp dport {admin_port} accept comment "admin endpoint"
    icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert, nd-router-advert }} accept comment "IPv6 neighbour discovery"
    icmpv6 type packet-too-big accept comment "path MTU of the tunnel's outer packets, which are not tracked"
    icmp type echo-request accept comment "ping"
    icmpv6 type echo-request accept comment "ping"
    counter drop comment "not for this pod"
  }}

  chain source {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname != "{interface}" ct mark != 0 ct status dnat meta l4proto {{ tcp, udp }} masquerade to :{ports} comment "endpoints see this pod as the source"
  }}
}}
"#,
        limits.chain(),
    );
    out
}
