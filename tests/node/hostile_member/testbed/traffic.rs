//! Collects the packets that the testbed has counted, and compares them to the allowed traffic.

use std::collections::BTreeSet;

use clustermesh_tests::attacker::{
    Flood,
    witness::{Counts, keys},
};

use super::{ALLOWED_POD, FLOOD_PORTS, MEMBER, PROBER_PORT, TCP_PORT, UDP_PORT};

/// Packets that the witnesses ([`clustermesh_tests::attacker::witness`]) have counted at three places.
#[derive(Debug, Clone, Default)]
pub(super) struct ObservedTraffic {
    /// Packets that arrived at the target's pods and at the machines around the target ([`super::neighbours`]).
    pub(super) arrived: Counts,
    /// Packets from the tunnel that the node accepted or forwarded.
    pub(super) passed: Counts,
    /// Sources and source ports of the replies to the member.
    pub(super) replies: BTreeSet<String>,
}

impl ObservedTraffic {
    /// All traffic that is allowed. Only the keys matter, so the counts are 0.
    pub(super) fn allowed() -> Self {
        let mut out = Self::default();
        let ([from, _], [to, _]) = (MEMBER, ALLOWED_POD);
        let probe = format!("{from} udp {PROBER_PORT} -> {to}:{UDP_PORT}");
        out.arrived.insert(probe, 0);
        out.replies.insert(format!("{to} udp {UDP_PORT}"));
        for (from, to) in MEMBER.iter().zip(ALLOWED_POD) {
            let [udp, tcp] = FLOOD_PORTS;
            out.arrived.insert(format!("{from} udp {udp} -> {to}:{UDP_PORT}"), 0);
            out.arrived.insert(format!("{from} tcp {tcp} -> {to}:{TCP_PORT}"), 0);
            // The member's kernel sends this error for the pod's replies to the flood, because it has no socket for them.
            out.arrived.insert(format!("{from} destination-unreachable -> {to}"), 0);
            out.replies
                .extend([format!("{to} udp {UDP_PORT}"), format!("{to} tcp {TCP_PORT}")]);
        }
        out.passed = out.arrived.clone();
        // A pod that gets an IPv6 routing header answers with this error, of code 0 (erroneous header field). nft names ICMPv6 codes as
        // in destination-unreachable, whatever the type is, so code 0 is `no-route`.
        out.replies
            .insert(format!("{} parameter-problem no-route", ALLOWED_POD[1]));
        out
    }

    fn only_keys(&self) -> [BTreeSet<String>; 3] {
        let Self {
            arrived,
            passed,
            replies,
        } = self;
        [keys(arrived), keys(passed), replies.clone()]
    }

    pub(super) fn not_in(&self, other: &Self) -> BTreeSet<String> {
        let (mine, others) = (self.only_keys(), other.only_keys());
        let more = mine.iter().zip(&others).flat_map(|(mine, others)| mine - others);
        more.collect()
    }

    pub(super) fn add(&mut self, more: Self) {
        for (all, more) in [(&mut self.arrived, more.arrived), (&mut self.passed, more.passed)] {
            for (key, count) in more {
                *all.entry(key).or_default() += count;
            }
        }
        self.replies.extend(more.replies);
    }

    pub(super) fn print(&self, what: &str, allowed: &Self, flood: &Flood) {
        let sum = |counts: &Counts| counts.values().sum::<u64>();
        let (arrived, passed, forbidden) = (sum(&self.arrived), sum(&self.passed), self.not_in(allowed).len());
        let (rounds, per_round) = (flood.rounds(), flood.flood_packets_per_round());
        println!(
            "{:6.1} s {what}: {arrived} packets arrived, {passed} accepted or forwarded by the node, \
             {forbidden} keys that are not allowed; {rounds} rounds of {per_round} flood packets",
            flood.started_at().elapsed().as_secs_f64()
        );
    }
}
