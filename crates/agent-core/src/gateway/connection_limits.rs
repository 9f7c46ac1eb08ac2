//! Renders the limits on the number of open connections: the sets of connection lists and the chain `count`.

use std::{fmt::Write, num::NonZeroU32};

use super::render::{add_rule, family_digit, ip_keyword};
use crate::prefixes::Family;

/// A limit gets one list for each [`LIST_LENGTH`] connections, up to [`MAX_LISTS`] lists. For each new connection the kernel looks up
/// all others in its list (nf_conncount): with 15,500 connections in one list, the first packet of a connection took 4.2 ms; without
/// a limit, 0.08 ms.
const LIST_LENGTH: u32 = 64;
/// Maximum number of lists for one limit.
const MAX_LISTS: u32 = 256;
/// Maximum number of elements of a set. Each element is a list of at least one connection, so on most machines the limit of
/// nf_conntrack_max is reached before the set is full.
const SET_SIZE: u32 = 1 << 18;

/// Limits on open connections. A large limit is spread over several lists, by a hash of the client's address and port.
pub(super) struct ConnectionLimits {
    /// Limit on connections of one sandbox.
    pub(super) sandbox: Option<NonZeroU32>,
    /// Limit on connections of one grant to one endpoint.
    pub(super) endpoint: Option<NonZeroU32>,
}

/// Spreads a limit: returns the number of lists, and the limit of each. A single list has the exact limit. Several lists fill unevenly,
/// so each limit is 50 % above its share.
fn spread(limit: NonZeroU32) -> (u32, u32) {
    match (limit.get() / LIST_LENGTH).min(MAX_LISTS) {
        0 | 1 => (1, limit.get()),
        lists => (lists, (limit.get() / lists).saturating_mul(3) / 2),
    }
}

impl ConnectionLimits {
    pub(super) const fn has_any(&self) -> bool {
        self.sandbox.is_some() || self.endpoint.is_some()
    }

    pub(super) fn add_sets(&self, out: &mut String) {
        let mut set = |name: &str, key: &str| {
            let _ = writeln!(out, "  set {name} {{ typeof {key}; size {SET_SIZE}; flags dynamic; }}");
        };
        if self.sandbox.is_some() {
            set("totals", "meta mark . meta priority");
        }
        if self.endpoint.is_some() {
            set("connections4", "ct mark . ip daddr . th dport . meta mark");
            set("connections6", "ct mark . ip6 daddr . th dport . meta mark");
        }
    }

    /// Renders the chain that counts a connection when its first packet passes. The chain uses the packet's mark and priority as
    /// variables, and clears them after use. In the rules for sandboxes, the mark is the number of the sandbox, and the priority the number
    /// of the sandbox's list. In the rules for endpoints, the mark is the number of the endpoint's list. The conntrack mark is the number
    /// of the grant.
    pub(super) fn chain(&self) -> String {
        let mut out = String::new();
        if !self.has_any() {
            return out;
        }
        out.push_str("  chain count {\n");
        let hash = |field: &str, lists: u32, out: &mut String| {
            for ip in Family::BOTH.map(ip_keyword) {
                let rule = format!("{field} set jhash {ip} saddr . th sport mod {lists}");
                add_rule(out, &rule, "the list that counts this connection");
            }
        };
        let count = |set: &str, key: &str, limit: u32, comment: &str, out: &mut String| {
            let rule = format!("add @{set} {{ {key} ct count over {limit} }} counter drop");
            add_rule(out, &rule, comment);
            // If the set is full, `add` adds no element and the rule above does not match.
            add_rule(
                out,
                &format!("{key} != @{set} counter drop"),
                "the set of counters is full",
            );
        };
        if let Some(limit) = self.sandbox {
            let (lists, each) = spread(limit);
            add_rule(&mut out, "meta mark set ip saddr map @sandboxes4", "the sandbox");
            add_rule(&mut out, "meta mark set ip6 saddr map @sandboxes6", "the sandbox");
            hash("meta priority", lists, &mut out);
            let key = "meta mark . meta priority";
            count("totals", key, each, "too many connections of a sandbox", &mut out);
            add_rule(&mut out, "meta priority set none", "clear the priority");
        }
        if let Some(limit) = self.endpoint {
            let (lists, each) = spread(limit);
            hash("meta mark", lists, &mut out);
            for family in Family::BOTH {
                let (set, ip) = (format!("connections{}", family_digit(family)), ip_keyword(family));
                let key = format!("ct mark . {ip} daddr . th dport . meta mark");
                count(&set, &key, each, "too many connections to one endpoint", &mut out);
            }
        }
        add_rule(&mut out, "meta mark set 0", "clear the mark");
        out.push_str("  }\n");
        out
    }
}
