//! What arrives in a network namespace, counted by the kernel: by who says to have sent it, how, and to whom. Who may is the
//! tests' business.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::netns::NetNs;

/// Source ports from here on are a program's own choice.
const EPHEMERAL: u64 = 32_768;
/// Source ports of connections that are always new.
pub(crate) const NEW: std::ops::Range<u16> = 20_000..20_256;

/// Where it stands.
#[derive(Debug, Clone, Copy)]
pub(crate) enum At {
    /// Before anything of this namespace's own can decide.
    Arrival,
    /// Behind everybody's filters: what this node takes itself or sends on, from this interface.
    Passed,
}

/// A count by `SOURCE PROTOCOL PORT -> DESTINATION:PORT`.
pub(crate) type Counts = BTreeMap<String, u64>;

/// The rules of a witness, for `nft -f`. A table that is there goes on as it is.
pub(crate) fn rules(at: At, interface: &str) -> String {
    let mut out = String::from("table inet witness {\n");
    for (n, family) in [(4, "ipv4_addr"), (6, "ipv6_addr")] {
        out += &format!(
            "set seen{n} {{ type {family} . {family} . inet_proto . inet_service . inet_service; size 65535; flags dynamic; }}
             set other{n} {{ type {family} . {family} . inet_proto; size 65535; flags dynamic; }}\n"
        );
    }
    out += "set errors4 { type ipv4_addr . ipv4_addr . icmp_type . icmp_code; size 65535; flags dynamic; }
            set errors6 { type ipv6_addr . ipv6_addr . icmpv6_type . icmpv6_code; size 65535; flags dynamic; }\n";
    // Neighbours of a link. And of what comes in pieces the first alone has ports; behind conntrack it is whole.
    let arriving = match at {
        At::Arrival => {
            "icmpv6 type { 130, 131, 132, 133, 134, 135, 136, 143 } ip6 saddr fe80::/10 accept
             icmpv6 type { 135, 136 } ip6 hoplimit 255 accept
             ip frag-off & 0x1fff != 0 accept
             frag frag-off != 0 accept"
        }
        At::Passed => "",
    };
    let body = format!(
        "iifname != \"{interface}\" accept
         {arriving}
         meta l4proto {{ tcp, udp }} add @seen4 {{ ip saddr . ip daddr . meta l4proto . th sport . th dport counter }}
         meta l4proto {{ tcp, udp }} add @seen6 {{ ip6 saddr . ip6 daddr . meta l4proto . th sport . th dport counter }}
         icmp type 0-255 add @errors4 {{ ip saddr . ip daddr . icmp type . icmp code counter }} accept
         icmpv6 type 0-255 add @errors6 {{ ip6 saddr . ip6 daddr . icmpv6 type . icmpv6 code counter }} accept
         meta l4proto != {{ tcp, udp }} add @other4 {{ ip saddr . ip daddr . meta l4proto counter }}
         meta l4proto != {{ tcp, udp }} add @other6 {{ ip6 saddr . ip6 daddr . meta l4proto counter }}
        "
    );
    let hooks: &[_] = match at {
        At::Arrival => &[("prerouting", "raw")],
        At::Passed => &[("input", "filter + 10"), ("forward", "filter + 10")],
    };
    for (hook, priority) in hooks {
        out += &format!("chain {hook} {{ type filter hook {hook} priority {priority}; policy accept;\n{body}\n}}\n");
    }
    out + "}\n"
}

/// One place that is watched.
pub(crate) struct Witness {
    pub(crate) name: &'static str,
    ns: NetNs,
    before: Counts,
    /// The table's number: one that is made anew counts from nothing.
    table: u64,
}

impl Witness {
    /// Watches `interface`.
    pub(crate) fn new(name: &'static str, ns: NetNs, at: At, interface: &str) -> Self {
        ns.nft(&rules(at, interface));
        Self {
            name,
            ns,
            before: Counts::new(),
            table: 0,
        }
    }

    /// What came since this was asked last.
    pub(crate) fn news(&mut self) -> Counts {
        let (table, now) = self.all();
        if table != self.table {
            self.before.clear();
            self.table = table;
        }
        let before = |key: &String| self.before.get(key).copied().unwrap_or(0);
        let more = now.iter().filter(|(key, count)| **count > before(key));
        let more = more.map(|(key, count)| (key.clone(), count - before(key))).collect();
        // A listing may miss what is there while a set grows: it is not forgotten.
        self.before.extend(now);
        more
    }

    /// What came since it was made, and its number.
    ///
    /// The kernel lists a set in pieces, each from the place in its hash table where the last one ended: where packets write a
    /// new element before that place meanwhile, the last element comes once more.
    fn all(&self) -> (u64, Counts) {
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
            let key = if set.starts_with("errors") {
                error(&parts)
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

/// `SOURCE TYPE CODE -> DESTINATION`, of ICMP; without the code where something cannot be reached, for whatever reason.
fn error(parts: &[Value]) -> String {
    let [from, to, kind, code] = [0, 1, 2, 3].map(|at| text(&parts[at]));
    match kind.as_str() {
        "destination-unreachable" => format!("{from} {kind} -> {to}"),
        _ => format!("{from} {kind} {code} -> {to}"),
    }
}

fn key(parts: &[Value]) -> String {
    let [from, to, protocol] = [0, 1, 2].map(|at| text(&parts[at]));
    let [Some(port), Some(to_port)] = [3, 4].map(|at| parts.get(at)) else {
        return format!("{from} {protocol} -> {to}");
    };
    let to_port = text(to_port);
    let port = match port.as_u64() {
        Some(port) if port >= EPHEMERAL => "client".to_owned(),
        Some(port) if u64::from(NEW.start) <= port && port < u64::from(NEW.end) => "new".to_owned(),
        _ => text(port),
    };
    format!("{from} {protocol} {port} -> {to}:{to_port}")
}

/// The keys alone.
pub(crate) fn keys(counts: &Counts) -> BTreeSet<String> {
    counts.keys().cloned().collect()
}
