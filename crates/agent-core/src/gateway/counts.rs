//! Limits of connections, as sets and a chain of the table.

use std::{fmt::Write, num::NonZeroU32};

use super::render::{number, word};
use crate::prefixes::Family;

/// Connections that the kernel counts in one list. For each new connection it looks up all others in the list (nf_conncount): with
/// 15,500 in one, the first packet of a connection took 4.2 ms, without a count 0.08 ms.
const LIST: u32 = 64;
/// Most lists of one limit.
const LISTS: u32 = 256;
/// Elements of a set of lists. Each list has a connection, and few machines take more connections than this (nf_conntrack_max).
const COUNTED: u32 = 1 << 18;

/// Limits of connections. A large one is spread over several lists, by a hash of the client's address and port.
pub(super) struct Counts {
    /// Of a sandbox.
    pub(super) sandbox: Option<NonZeroU32>,
    /// Of one grant to one endpoint.
    pub(super) endpoint: Option<NonZeroU32>,
}

/// How a limit is spread: the number of lists, and connections in each. Lists fill unevenly, so each takes half as many again.
fn lists(limit: NonZeroU32) -> (u32, u32) {
    match (limit.get() / LIST).min(LISTS) {
        0 | 1 => (1, limit.get()),
        lists => (lists, (limit.get() / lists).saturating_mul(3) / 2),
    }
}

impl Counts {
    pub(super) const fn any(&self) -> bool {
        self.sandbox.is_some() || self.endpoint.is_some()
    }

    pub(super) fn sets(&self, out: &mut String) {
        let mut set = |name: &str, key: &str| {
            let _ = writeln!(out, "  set {name} {{ typeof {key}; size {COUNTED}; flags dynamic; }}");
        };
        if self.sandbox.is_some() {
            set("totals", "meta mark . meta priority");
        }
        if self.endpoint.is_some() {
            set("connections4", "ct mark . ip daddr . th dport . meta mark");
            set("connections6", "ct mark . ip6 daddr . th dport . meta mark");
        }
    }

    /// Counts a connection when its first packet passes. The packet's mark and priority hold the sandbox and the list within this
    /// chain alone.
    pub(super) fn chain(&self) -> String {
        let mut out = String::new();
        if !self.any() {
            return out;
        }
        out.push_str("  chain count {\n");
        let hash = |what: &str, lists: u32, out: &mut String| {
            for ip in Family::BOTH.map(word) {
                let _ = writeln!(out, "    {what} set jhash {ip} saddr . th sport mod {lists}");
            }
        };
        let count = |set: &str, key: &str, limit: u32, why: &str, out: &mut String| {
            let _ = writeln!(
                out,
                "    add @{set} {{ {key} ct count over {limit} }} counter drop comment \"{why}\""
            );
        };
        if let Some(limit) = self.sandbox {
            let (lists, each) = lists(limit);
            out.push_str("    meta mark set ip saddr map @sandboxes4\n    meta mark set ip6 saddr map @sandboxes6\n");
            hash("meta priority", lists, &mut out);
            let key = "meta mark . meta priority";
            count("totals", key, each, "too many connections of a sandbox", &mut out);
            let _ = writeln!(
                out,
                "    {key} != @totals counter drop comment \"no room to count them\""
            );
            out.push_str("    meta priority set none\n");
        }
        if let Some(limit) = self.endpoint {
            let (lists, each) = lists(limit);
            hash("meta mark", lists, &mut out);
            for family in Family::BOTH {
                let (set, ip) = (format!("connections{}", number(family)), word(family));
                let key = format!("ct mark . {ip} daddr . th dport . meta mark");
                count(&set, &key, each, "too many connections to one endpoint", &mut out);
                let _ = writeln!(
                    out,
                    "    {key} != @{set} counter drop comment \"no room to count them\""
                );
            }
        }
        out.push_str("    meta mark set 0\n  }\n");
        out
    }
}
