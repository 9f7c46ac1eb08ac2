//! The table as text for `nft -f`. Only numbers, addresses and checked names are written, never text of an object.

use std::{
    fmt::Write,
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    ops::RangeInclusive,
};

use ipnet::IpNet;

use super::{Frame, GrantId, SandboxId, counts::Counts};
use crate::{numbers::NFT_TABLE, policy::Protocol, prefixes::Family};

/// A part of the table that comes and goes by itself. The order is that in which they are added: a chain before what leads to
/// it, an endpoint before the grant that opens the way to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Piece {
    /// A named limit.
    Limit(SandboxId),
    /// What leads to it.
    Limited(SandboxId),
    /// A chain that chooses an endpoint.
    Chooser(Chooser),
    /// The endpoint with this number, of one family of a grant.
    Backend(GrantId, Family, usize),
    /// What leads a grant's connections of a family to its chooser.
    Service(GrantId, Family),
    /// A connection to this endpoint may stand.
    Endpoint(GrantId, SocketAddr),
    /// Errors about such a connection pass.
    Host(GrantId, IpAddr),
    /// Whose network it is.
    Sandbox(IpNet),
    /// Packets of this grant's connections pass.
    Open((SandboxId, Protocol, u16), GrantId),
    /// A new connection gets this grant's mark.
    Grant((SandboxId, Protocol, u16)),
}

/// A chain for all grants that have as many endpoints. So a grant is elements alone: the kernel gives each map inside a rule a
/// name for which it looks at all others, and 10,000 of those took it 17 s.
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
        format!("choose{}-{count}{by}", number(family))
    }

    /// The packet's mark holds the number of the endpoint from here on.
    fn rules(self) -> [String; 2] {
        let Self { family, count, sticky } = self;
        let ip = word(family);
        // Without a seed the kernel draws one for each rule that is written: clients would change their endpoint with every
        // rewrite of the chain, although the endpoints of their family are the same.
        let choice = if sticky {
            format!("jhash {ip} saddr mod {count} seed 0x1")
        } else {
            format!("numgen random mod {count}")
        };
        [
            format!("meta mark set {choice}"),
            format!(
                "meta l4proto {{ tcp, udp }} dnat {ip} to ct mark . meta mark map @backends{}",
                number(family)
            ),
        ]
    }
}

/// As nft prints them.
pub(super) fn mark(number: u32) -> String {
    format!("{number:#010x}")
}

pub(super) fn rate(rate: NonZeroU32) -> String {
    format!("rate over {rate}/second burst {} packets", rate.get().saturating_mul(2))
}

pub(super) const fn number(family: Family) -> char {
    match family {
        Family::V4 => '4',
        Family::V6 => '6',
    }
}

pub(super) const fn word(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}

fn of(address: IpAddr) -> Family {
    Family::of(&IpNet::from(address))
}

impl Piece {
    /// The set or map it is an element of, and its key.
    fn element(&self) -> Option<(&'static str, String)> {
        let place = |(sandbox, protocol, port): &(SandboxId, Protocol, u16)| {
            format!("{} . {protocol} . {port}", mark(sandbox.0))
        };
        let either = |family, names: [&'static str; 2]| names[usize::from(family == Family::V6)];
        Some(match self {
            Self::Limit(_) | Self::Chooser(_) => return None,
            Self::Limited(sandbox) => ("limits", mark(sandbox.0)),
            Self::Backend(id, family, at) => (
                either(*family, ["backends4", "backends6"]),
                format!("{} . {at:#010x}", mark(id.0)),
            ),
            Self::Service(id, family) => (either(*family, ["services4", "services6"]), mark(id.0)),
            Self::Endpoint(id, socket) => (
                either(of(socket.ip()), ["endpoints4", "endpoints6"]),
                format!("{} . {} . {}", mark(id.0), socket.ip(), socket.port()),
            ),
            Self::Host(id, address) => (
                either(of(*address), ["hosts4", "hosts6"]),
                format!("{} . {address}", mark(id.0)),
            ),
            Self::Sandbox(network) => (
                either(Family::of(network), ["sandboxes4", "sandboxes6"]),
                network.to_string(),
            ),
            Self::Open(at, id) => ("open", format!("{} . {}", place(at), mark(id.0))),
            Self::Grant(at) => ("grants", place(at)),
        })
    }

    /// What a map has for it.
    fn data(&self, value: &str) -> String {
        match self {
            Self::Limited(sandbox) => format!(" : \"{}\"", limit(*sandbox)),
            Self::Service(..) => format!(" : goto {value}"),
            Self::Backend(..) | Self::Sandbox(_) | Self::Grant(_) => format!(" : {value}"),
            _ => String::new(),
        }
    }

    /// Of one that is no element.
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

    /// Of one that is no element.
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

/// Elements that one statement names: each statement of its own would take nft twice the memory.
const TOGETHER: usize = 100;

/// Elements of one kind, by set.
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
            for some in elements.chunks(TOGETHER) {
                let _ = writeln!(out, "{verb} element inet {NFT_TABLE} {set} {{ {} }}", some.join(", "));
            }
        }
    }
}

/// Adds them in this order.
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

/// Takes them away in this order.
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

/// Source ports toward endpoints: the widest range without the pod's own ports, which would get the answers, and without those
/// below 1024, which some servers trust.
fn source_ports(own: [u16; 2]) -> RangeInclusive<u32> {
    let mut cuts = own.map(|port| u32::from(port).max(1023));
    cuts.sort_unstable();
    let [low, high] = cuts;
    let ranges = [1024..=low - 1, low + 1..=high.saturating_sub(1), high + 1..=65535];
    let width = |range: &RangeInclusive<u32>| (range.end() + 1).saturating_sub(*range.start());
    ranges.into_iter().max_by_key(width).unwrap_or(1024..=65535)
}

/// The table without grants.
pub(super) fn frame(frame: &Frame) -> String {
    let Frame {
        interface,
        listen_port,
        admin_port,
        addresses,
        sandbox_connections,
        endpoint_connections,
    } = frame;
    let own = |family: Family| {
        let own = addresses.iter().filter(|address| of(**address) == family);
        let own: Vec<String> = own.map(ToString::to_string).collect();
        let ip = word(family);
        if own.is_empty() {
            return format!(
                "    meta nfproto ipv{} counter drop comment \"a family without an address here\"",
                number(family)
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
  map sandboxes4 {{ type ipv4_addr : mark; flags interval; comment "whose network it is"; }}
  map sandboxes6 {{ type ipv6_addr : mark; flags interval; }}
  map grants {{ type mark . inet_proto . inet_service : mark; comment "sandbox, protocol, port here: the grant"; }}
  set open {{ type mark . inet_proto . inet_service . mark; comment "the same with the grant, for every packet"; }}
  set endpoints4 {{ type mark . ipv4_addr . inet_service; comment "grant and endpoint of connections that may stand"; }}
  set endpoints6 {{ type mark . ipv6_addr . inet_service; }}
  set hosts4 {{ type mark . ipv4_addr; comment "the same without ports, for errors"; }}
  set hosts6 {{ type mark . ipv6_addr; }}
  map services4 {{ type mark : verdict; comment "grant: the chain that chooses an endpoint"; }}
  map services6 {{ type mark : verdict; }}
  map backends4 {{ type mark . mark : ipv4_addr . inet_service; comment "grant and number: the endpoint"; }}
  map backends6 {{ type mark . mark : ipv6_addr . inet_service; }}
  map limits {{ type mark : limit; comment "new connections of a sandbox"; }}
  set alive {{ type ifname; flags timeout; comment "empty = not renewed: every packet of the tunnel is dropped"; }}
"#
    );
    let counts = Counts {
        sandbox: *sandbox_connections,
        endpoint: *endpoint_connections,
    };
    counts.sets(&mut out);
    let _ = write!(
        out,
        r#"
  # Before fragments are put together and before a connection is looked for. What comes from elsewhere is for this pod itself:
  # answers of endpoints are, too, since it asks them in its own name.
  chain first {{
    type filter hook prerouting priority -450; policy accept;
    iifname "lo" accept
    iifname != "{interface}" fib daddr . iif type {{ local, broadcast, multicast }} accept
    iifname != "{interface}" counter drop comment "not addressed to this pod"
    iifname != @alive counter drop comment "the table was not renewed"
    ip frag-off & 0x3fff != 0 counter drop comment "a fragment"
    ip hdrlength != 5 counter drop comment "options"
    ip protocol != {{ tcp, udp }} counter drop comment "neither TCP nor UDP, ICMP among them"
    ip6 nexthdr != {{ tcp, udp }} counter drop comment "the same, and extension headers"
{}
{}
  }}

  # What anyone on the underlay can send with forged sources is not to fill the connection table: packets of the tunnel, of the admin
  # endpoint, and pings.
  chain outer_in {{
    type filter hook prerouting priority raw; policy accept;
    iifname "{interface}" accept
    udp dport {listen_port} notrack
    tcp dport {admin_port} notrack
    icmp type echo-request notrack
    icmpv6 type echo-request notrack
  }}
  chain outer_out {{
    type filter hook output priority raw; policy accept;
    oifname "{interface}" accept
    udp sport {listen_port} notrack
    tcp sport {admin_port} notrack
    icmp type echo-reply notrack
    icmpv6 type echo-reply notrack
  }}

  # Every packet from the tunnel belongs to a grant that stands. The packet's mark holds the sandbox within this chain alone. The
  # connection's mark is set once: a connection without replies stays in state new.
  chain enter {{
    type filter hook prerouting priority mangle; policy accept;
    iifname != "{interface}" accept
    meta mark set 0
    meta mark set ip saddr map @sandboxes4
    meta mark set ip6 saddr map @sandboxes6
    ct state new ct mark 0 limit name meta mark map @limits counter drop comment "too many new connections"
    ct state new ct mark 0 ct mark set meta mark . meta l4proto . th dport map @grants
    ct direction original meta mark . meta l4proto . th dport . ct mark @open meta mark set 0 accept
    counter drop comment "no grant"
  }}

  # By default conntrack takes a TCP packet of an unknown connection for a new one: a connection that was ended with its grant
  # would go on when the grant comes back. Its packets are for this pod instead, which resets it.
  chain translate {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname "{interface}" tcp flags & (fin | syn | rst | ack) != syn accept
    iifname "{interface}" meta nfproto ipv4 ct mark vmap @services4
    iifname "{interface}" meta nfproto ipv6 ct mark vmap @services6
  }}

  chain forward {{
    type filter hook forward priority filter; policy drop;
    tcp flags syn / syn,rst tcp option maxseg size set rt mtu comment "what fits both ways"
    oifname "{interface}" goto to_sandbox
    iifname != "{interface}" counter drop
    ct status & dnat == 0 counter drop comment "nothing chose an endpoint"
"#,
        own(Family::V4),
        own(Family::V6),
    );
    if counts.any() {
        out.push_str("    ct status & confirmed == 0 jump count\n");
    }
    let _ = write!(
        out,
        r#"    ct mark . ip daddr . th dport @endpoints4 accept
    ct mark . ip6 daddr . th dport @endpoints6 accept
    counter drop comment "no endpoint of its grant"
  }}

{}
  # Answers of endpoints of the grant, and errors about such a connection.
  chain to_sandbox {{
    oifname != @alive counter drop comment "the table was not renewed"
    ct direction original counter drop comment "a sandbox is never called"
    meta l4proto {{ tcp, udp }} ct mark . ip saddr . th sport @endpoints4 accept
    meta l4proto {{ tcp, udp }} ct mark . ip6 saddr . th sport @endpoints6 accept
    meta l4proto icmp ct state related ct mark . ct reply ip saddr @hosts4 accept
    meta l4proto icmpv6 ct state related ct mark . ct reply ip6 saddr @hosts6 accept
    counter drop comment "no grant"
  }}

  # Of this pod's own packets, only ICMP errors and TCP resets for granted ports reach a sandbox.
  chain output {{
    type filter hook output priority filter; policy accept;
    oifname != "{interface}" accept
    ct mark != 0 ct direction reply tcp flags & (fin | syn | rst) == rst accept
    meta l4proto != {{ icmp, icmpv6 }} counter drop
    goto to_sandbox
  }}
  chain input {{
    type filter hook input priority filter; policy drop;
    iifname "lo" accept
    iifname "{interface}" ct mark != 0 meta l4proto tcp counter reject with tcp reset comment "a granted port: no endpoint, or no known connection"
    iifname "{interface}" counter drop
    udp dport {listen_port} accept
    ct state established,related accept
    tcp dport {admin_port} accept
    icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert, nd-router-advert }} accept
    icmpv6 type packet-too-big accept comment "about the tunnel's packets, which are not tracked; IPv6 has no other way to fit a path"
    icmp type echo-request accept
    icmpv6 type echo-request accept
    counter drop
  }}

  # Pods see this pod.
  chain source {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname != "{interface}" ct mark != 0 ct status dnat meta l4proto {{ tcp, udp }} masquerade to :{ports}
  }}
}}
"#,
        counts.chain(),
    );
    out
}
