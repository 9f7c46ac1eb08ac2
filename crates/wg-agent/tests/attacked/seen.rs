//! What witnesses have seen, and what of it is granted.

use std::collections::BTreeSet;

use super::{
    ASKING, ATTACKER, DB, FLOOD, MEMBER, MEMBER_ASKING, MEMBERS_FLOOD, OTHER, SPARE, SPARE_FLOOD, TCP_PORT, UDP_PORT,
};
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
    /// Who answered the attacker, and the member: sources and their ports.
    pub(super) came: BTreeSet<String>,
    pub(super) members: BTreeSet<String>,
}

impl Seen {
    /// All that may be seen.
    pub(super) fn granted(moved: bool) -> Self {
        let mut out = Self::default();
        for (from, to) in ATTACKER.iter().zip(DB) {
            let [udp, tcp, fragments] = FLOOD;
            // Its own kernel tells the granted pod that nobody listens for the answers to its flood; where it has no peer, the
            // target's own device says so in its name.
            for key in [
                format!("destination-unreachable -> {to}"),
                format!("udp {udp} -> {to}:{UDP_PORT}"),
                format!("udp {fragments} -> {to}:{UDP_PORT}"),
                format!("udp {ASKING} -> {to}:{UDP_PORT}"),
                format!("tcp {tcp} -> {to}:{TCP_PORT}"),
                format!("tcp new -> {to}:{TCP_PORT}"),
                format!("tcp client -> {to}:{TCP_PORT}"),
            ] {
                out.arrived.insert(format!("{from} {key}"), 0);
            }
            out.came
                .extend([format!("{to} udp {UDP_PORT}"), format!("{to} tcp {TCP_PORT}")]);
        }
        for (from, to) in ATTACKER.iter().zip(SPARE).filter(|_| moved) {
            let [udp, tcp] = SPARE_FLOOD;
            out.arrived.insert(format!("{from} udp {udp} -> {to}:{UDP_PORT}"), 0);
            out.arrived.insert(format!("{from} tcp {tcp} -> {to}:{TCP_PORT}"), 0);
            out.arrived.insert(format!("{from} destination-unreachable -> {to}"), 0);
            out.came
                .extend([format!("{to} udp {UDP_PORT}"), format!("{to} tcp {TCP_PORT}")]);
        }
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

    fn only_keys(&self) -> [BTreeSet<String>; 4] {
        let Self {
            arrived,
            passed,
            came,
            members,
        } = self;
        [keys(arrived), keys(passed), came.clone(), members.clone()]
    }

    pub(super) fn beyond(&self, granted: &Self) -> BTreeSet<String> {
        let (mine, granted) = (self.only_keys(), granted.only_keys());
        let more = mine.iter().zip(&granted).flat_map(|(mine, granted)| mine - granted);
        more.collect()
    }

    pub(super) fn add(&mut self, more: Self) {
        for (all, more) in [(&mut self.arrived, more.arrived), (&mut self.passed, more.passed)] {
            for (key, count) in more {
                *all.entry(key).or_default() += count;
            }
        }
        self.came.extend(more.came);
        self.members.extend(more.members);
    }

    pub(super) fn print(&self, what: &str, granted: &Self, flood: &Flood) {
        let sum = |counts: &Counts| counts.values().sum::<u64>();
        let (arrived, passed, beyond) = (sum(&self.arrived), sum(&self.passed), self.beyond(granted).len());
        let (rounds, kinds) = (flood.rounds(), flood.shots());
        println!(
            "{:6.1} s {what}: {arrived} packets in pods, {passed} past the node, {beyond} beyond the grants; {rounds} rounds of {kinds}",
            flood.began().elapsed().as_secs_f64()
        );
    }
}
