//! What witnesses have seen, and what of it is open to the member.

use std::collections::BTreeSet;

use super::{MEMBER, MEMBER_ASKING, MEMBERS_FLOOD, OTHER, TCP_PORT, UDP_PORT};
use crate::attacker::{
    Flood,
    witness::{Counts, keys},
};

/// What was seen.
#[derive(Debug, Clone, Default)]
pub(super) struct Seen {
    /// In pods.
    pub(super) arrived: Counts,
    /// Of what the tunnel brought, that the node took or sent on.
    pub(super) passed: Counts,
    /// Who answered the member: sources and their ports.
    pub(super) members: BTreeSet<String>,
}

impl Seen {
    /// All that may be seen.
    pub(super) fn open() -> Self {
        let mut out = Self::default();
        let ([from, _], [to, _]) = (MEMBER, OTHER);
        let member = format!("{from} udp {MEMBER_ASKING} -> {to}:{UDP_PORT}");
        out.arrived.insert(member, 0);
        out.members.insert(format!("{to} udp {UDP_PORT}"));
        for (from, to) in MEMBER.iter().zip(OTHER) {
            let [udp, tcp] = MEMBERS_FLOOD;
            out.arrived.insert(format!("{from} udp {udp} -> {to}:{UDP_PORT}"), 0);
            out.arrived.insert(format!("{from} tcp {tcp} -> {to}:{TCP_PORT}"), 0);
            out.arrived.insert(format!("{from} destination-unreachable -> {to}"), 0);
            out.members
                .extend([format!("{to} udp {UDP_PORT}"), format!("{to} tcp {TCP_PORT}")]);
        }
        out.passed = out.arrived.clone();
        // A way that is written into a packet of IPv6 begins at the pod, which takes none.
        out.members.insert(format!("{} parameter-problem no-route", OTHER[1]));
        out
    }

    fn only_keys(&self) -> [BTreeSet<String>; 3] {
        let Self {
            arrived,
            passed,
            members,
        } = self;
        [keys(arrived), keys(passed), members.clone()]
    }

    pub(super) fn beyond(&self, open: &Self) -> BTreeSet<String> {
        let (mine, open) = (self.only_keys(), open.only_keys());
        let more = mine.iter().zip(&open).flat_map(|(mine, open)| mine - open);
        more.collect()
    }

    pub(super) fn add(&mut self, more: Self) {
        for (all, more) in [(&mut self.arrived, more.arrived), (&mut self.passed, more.passed)] {
            for (key, count) in more {
                *all.entry(key).or_default() += count;
            }
        }
        self.members.extend(more.members);
    }

    pub(super) fn print(&self, what: &str, open: &Self, flood: &Flood) {
        let sum = |counts: &Counts| counts.values().sum::<u64>();
        let (arrived, passed, beyond) = (sum(&self.arrived), sum(&self.passed), self.beyond(open).len());
        let (rounds, kinds) = (flood.rounds(), flood.shots());
        println!(
            "{:6.1} s {what}: {arrived} packets in pods, {passed} past the node, {beyond} that are not open; {rounds} rounds of {kinds}",
            flood.began().elapsed().as_secs_f64()
        );
    }
}
