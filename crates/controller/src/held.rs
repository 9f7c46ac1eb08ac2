//! For how long each Node's last Peer has been held (DESIGN §4 rule 9): the planner is pure and has no clock, so this is
//! its memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use clustermesh_core::{
    mesh::ClusterIdentity,
    observe::{Observation, Observations},
    plan::{HOLD, Plan},
};

/// When each held Node was first reported held.
#[derive(Debug, Default)]
pub(crate) struct Held(BTreeMap<(ClusterIdentity, String), Instant>);

impl Held {
    /// Tells the planner the ages.
    pub(crate) fn hand_back(&self, seen: &mut Observations, now: Instant) {
        for ((identity, name), since) in &self.0 {
            let Some(Observation::Fresh(member) | Observation::Stale(member, _)) = seen.members.get_mut(identity)
            else {
                continue;
            };
            if let Some(node) = member.nodes.get_mut(name) {
                node.held_for = Some(now.saturating_duration_since(*since));
            }
        }
    }

    /// Remembers what this plan holds and forgets the rest; a Node whose time is up stays remembered as long as its
    /// annotations are gone, or it would be held anew. Returns for how long the next decision is away.
    pub(crate) fn remember(&mut self, plan: &Plan, seen: &Observations, now: Instant) -> Option<Duration> {
        let mut keep: BTreeSet<(ClusterIdentity, String)> = BTreeSet::new();
        for mesh in plan.meshes.values() {
            for (entry, report) in &mesh.clusters {
                let Some(identity) = mesh.identities.get(entry) else {
                    continue;
                };
                let skipped = report.skipped.iter().map(|skipped| &skipped.node);
                let expired = skipped.filter(|node| self.0.contains_key(&(identity.clone(), (*node).clone())));
                keep.extend(
                    report
                        .held
                        .keys()
                        .chain(expired)
                        .map(|node| (identity.clone(), node.clone())),
                );
            }
        }
        // A member that cannot be seen plans nothing, so says nothing of its nodes.
        self.0
            .retain(|key, _| keep.contains(key) || seen.members.get(&key.0).is_none_or(|o| o.last().is_none()));
        for key in keep {
            self.0.entry(key).or_insert(now);
        }
        self.0
            .values()
            .map(|since| HOLD.saturating_sub(now.saturating_duration_since(*since)))
            .filter(|d| !d.is_zero())
            .min()
    }
}

#[cfg(test)]
mod tests {
    use clustermesh_core::{
        mesh::MeshId,
        observe::{Member, Node},
        plan::{ClusterReport, MeshPlan, Reason, Skipped},
    };

    use super::*;

    fn seen() -> Observations {
        let member = Member {
            nodes: [("n".to_owned(), Node::default())].into(),
            ..Member::default()
        };
        Observations {
            members: [(ClusterIdentity::Local, Observation::Fresh(member))].into(),
            ..Observations::default()
        }
    }

    fn plan(report: ClusterReport) -> Plan {
        let mesh = MeshPlan {
            clusters: [("c".to_owned(), report)].into(),
            identities: [("c".to_owned(), ClusterIdentity::Local)].into(),
            ..MeshPlan::default()
        };
        let id = MeshId {
            namespace: "ns".into(),
            name: "m".into(),
        };
        Plan {
            meshes: [(id, mesh)].into(),
            ..Plan::default()
        }
    }

    fn held() -> Plan {
        plan(ClusterReport {
            held: [("n".to_owned(), Reason::NodeNoPublicKey)].into(),
            ..ClusterReport::default()
        })
    }

    fn skipped() -> Plan {
        let skipped = Skipped {
            node: "n".into(),
            reason: Reason::NodeNoPublicKey,
            message: String::new(),
        };
        plan(ClusterReport {
            skipped: vec![skipped],
            ..ClusterReport::default()
        })
    }

    fn age(memory: &Held, now: Instant) -> Option<Duration> {
        let mut seen = seen();
        memory.hand_back(&mut seen, now);
        seen.members[&ClusterIdentity::Local].last().expect("seen").nodes["n"].held_for
    }

    #[test]
    fn the_age_of_a_hold_counts_from_the_first_plan_that_reported_it() {
        let (mut memory, start) = (Held::default(), Instant::now());
        assert_eq!(age(&memory, start), None);
        assert_eq!(memory.remember(&held(), &seen(), start), Some(HOLD));
        let later = start + Duration::from_secs(100);
        assert_eq!(memory.remember(&held(), &seen(), later), Some(Duration::from_secs(200)));
        assert_eq!(age(&memory, later), Some(Duration::from_secs(100)));
        // Its time is up: skipped from now on, and not held anew.
        let end = start + HOLD;
        assert_eq!(memory.remember(&skipped(), &seen(), end), None);
        assert_eq!(age(&memory, end), Some(HOLD));
        // It is whole again.
        assert_eq!(memory.remember(&plan(ClusterReport::default()), &seen(), end), None);
        assert_eq!(age(&memory, end), None);
    }

    #[test]
    fn a_node_that_is_skipped_without_having_been_held_is_not_remembered() {
        let (mut memory, now) = (Held::default(), Instant::now());
        assert_eq!(memory.remember(&skipped(), &seen(), now), None);
        assert_eq!(age(&memory, now), None);
    }
}
