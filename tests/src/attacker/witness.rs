//! Counts packets in a network namespace by source, protocol, ports and destination, with an nftables table: those that
//! arrive, or those that pass all filters.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::netns::NetNs;

/// The first ephemeral source port.
const EPHEMERAL: u64 = 32_768;
/// Source ports of [`FloodPacket::NewConnection`](super::FloodPacket).
pub const NEW_PORTS: std::ops::Range<u16> = 20_000..20_256;

/// The hooks at which packets are counted.
#[derive(Debug, Clone, Copy)]
pub enum CountingPoint {
    /// In prerouting with priority raw: before conntrack and all filters.
    Arrival,
    /// In input and forward, after all filters: packets that the node accepts or forwards.
    AfterFilters,
}

/// Packet counts by `SOURCE PROTOCOL PORT -> DESTINATION:PORT` (TCP and UDP), `SOURCE TYPE CODE -> DESTINATION` (ICMP) or
/// `SOURCE PROTOCOL -> DESTINATION` (others). The functions `key` and `icmp_key` describe the exceptions.
pub type Counts = BTreeMap<String, u64>;

/// The table of a [`Witness`], for `nft -f`. If the table exists, its counts are kept and the rules are added once more. Then all
/// packets except ICMP count twice. An ICMP packet counts once, because the first rule that counts it also accepts it.
pub fn rules(at: CountingPoint, interface: &str) -> String {
    let mut out = String::from("table inet witness {\n");
    for (n, family) in [(4, "ipv4_addr"), (6, "ipv6_addr")] {
        out += &format!(
            "set seen{n} {{ type {family} . {family} . inet_proto . inet_service . inet_service; size 65535; flags dynamic; }}
             set other{n} {{ type {family} . {family} . inet_proto; size 65535; flags dynamic; }}\n"
        );
    }
    out += "set icmp4 { type ipv4_addr . ipv4_addr . icmp_type . icmp_code; size 65535; flags dynamic; }
            set icmp6 { type ipv6_addr . ipv6_addr . icmpv6_type . icmpv6_code; size 65535; flags dynamic; }\n";
    // At arrival, neighbour discovery and multicast listener discovery are not counted. Neither are fragments other than the
    // first, because they have no ports. `AfterFilters` sees no fragments, because conntrack has reassembled the packets.
    let uncounted = match at {
        CountingPoint::Arrival => {
            "icmpv6 type { 130, 131, 132, 133, 134, 135, 136, 143 } ip6 saddr fe80::/10 accept
             icmpv6 type { 135, 136 } ip6 hoplimit 255 accept
             ip frag-off & 0x1fff != 0 accept
             frag frag-off != 0 accept"
        }
        CountingPoint::AfterFilters => "",
    };
    let body = format!(
        "iifname != \"{interface}\" accept
         {uncounted}
         meta l4proto {{ tcp, udp }} add @seen4 {{ ip saddr . ip daddr . meta l4proto . th sport . th dport counter }}
         meta l4proto {{ tcp, udp }} add @seen6 {{ ip6 saddr . ip6 daddr . meta l4proto . th sport . th dport counter }}
         icmp type 0-255 add @icmp4 {{ ip saddr . ip daddr . icmp type . icmp code counter }} accept
         icmpv6 type 0-255 add @icmp6 {{ ip6 saddr . ip6 daddr . icmpv6 type . icmpv6 code counter }} accept
         meta l4proto != {{ tcp, udp }} add @other4 {{ ip saddr . ip daddr . meta l4proto counter }}
         meta l4proto != {{ tcp, udp }} add @other6 {{ ip6 saddr . ip6 daddr . meta l4proto counter }}
        "
    );
    let hooks: &[_] = match at {
        CountingPoint::Arrival => &[("prerouting", "raw")],
        CountingPoint::AfterFilters => &[("input", "filter + 10"), ("forward", "filter + 10")],
    };
    for (hook, priority) in hooks {
        out += &format!("chain {hook} {{ type filter hook {hook} priority {priority}; policy accept;\n{body}\n}}\n");
    }
    out + "}\n"
}

/// A network namespace whose packets are counted.
pub struct Witness {
    pub name: &'static str,
    ns: NetNs,
    before: Counts,
    /// The handle of the nftables table. It changes when the table is created again, which resets all counts.
    table: u64,
}

impl Witness {
    /// Starts to count packets that arrive on `interface`.
    pub fn new(name: &'static str, ns: NetNs, at: CountingPoint, interface: &str) -> Self {
        ns.nft(&rules(at, interface));
        Self {
            name,
            ns,
            before: Counts::new(),
            table: 0,
        }
    }

    /// The counts since the last call.
    pub fn new_counts(&mut self) -> Counts {
        let (table, now) = self.list();
        if table != self.table {
            self.before.clear();
            self.table = table;
        }
        let before = |key: &String| self.before.get(key).copied().unwrap_or(0);
        let increased = now.iter().filter(|(key, count)| **count > before(key));
        let new_counts = increased
            .map(|(key, count)| (key.clone(), count - before(key)))
            .collect();
        // Old counts are kept, because a listing may lack elements while a set grows.
        self.before.extend(now);
        new_counts
    }

    /// All counts of the table, and its handle.
    ///
    /// The kernel lists a set in parts, and continues each part at a position in the hash table. If a packet has added an
    /// element before that position, the last element of the previous part is listed again. The larger count is used.
    fn list(&self) -> (u64, Counts) {
        let mut elements = BTreeMap::<(String, String), u64>::new();
        let text = self.ns.run("nft", &["-j", "list", "table", "inet", "witness"]);
        let json: Value = serde_json::from_str(&text).expect("nft -j prints JSON");
        let objects = || json["nftables"].as_array().expect("a list").iter();
        let table = objects().find_map(|object| object["table"]["handle"].as_u64());
        for set in objects().filter_map(|object| object.get("set")) {
            let name = set["name"].as_str().expect("a name");
            for element in set["elem"].as_array().into_iter().flatten() {
                let parts = &element["elem"]["val"]["concat"];
                let count = element["elem"]["counter"]["packets"].as_u64().expect("a counter");
                let counted = elements.entry((name.to_owned(), parts.to_string())).or_default();
                *counted = count.max(*counted);
            }
        }
        let mut out = Counts::new();
        for ((set, parts), count) in elements {
            let parts: Vec<Value> = serde_json::from_str(&parts).expect("a key");
            let key = if set.starts_with("icmp") {
                icmp_key(&parts)
            } else {
                key(&parts)
            };
            *out.entry(key).or_default() += count;
        }
        (table.expect("a table"), out)
    }
}

fn text(part: &Value) -> String {
    part.as_str().map_or_else(|| part.to_string(), str::to_owned)
}

/// The key of an ICMP packet: `SOURCE TYPE CODE -> DESTINATION`. Errors of the type destination-unreachable are counted together,
/// without CODE. The CODE of another ICMPv6 type has a misleading name, because nft names the codes of all types like those of
/// destination-unreachable: 0 is `no-route`.
fn icmp_key(parts: &[Value]) -> String {
    let [from, to, kind, code] = [0, 1, 2, 3].map(|at| text(&parts[at]));
    match kind.as_str() {
        "destination-unreachable" => format!("{from} {kind} -> {to}"),
        _ => format!("{from} {kind} {code} -> {to}"),
    }
}

/// The key of a packet that is not ICMP. An ephemeral source port becomes `client`; a port in [`NEW_PORTS`] becomes `new`.
fn key(parts: &[Value]) -> String {
    let [from, to, protocol] = [0, 1, 2].map(|at| text(&parts[at]));
    let [Some(port), Some(to_port)] = [3, 4].map(|at| parts.get(at)) else {
        return format!("{from} {protocol} -> {to}");
    };
    let to_port = text(to_port);
    let port = match port.as_u64() {
        Some(port) if port >= EPHEMERAL => "client".to_owned(),
        Some(port) if u64::from(NEW_PORTS.start) <= port && port < u64::from(NEW_PORTS.end) => "new".to_owned(),
        _ => text(port),
    };
    format!("{from} {protocol} {port} -> {to}:{to_port}")
}

/// The keys of the counts.
pub fn keys(counts: &Counts) -> BTreeSet<String> {
    counts.keys().cloned().collect()
}
