//! Remembers since when the planner has held each Node.
//!
//! A held Node keeps its last Peer for at most [`HOLD`]. A Node is held if it has no key or no WireGuard address for a moment:
//! for example, kg removes both annotations at each restart. A Node that kg serves is also held if another Node claims the same
//! WireGuard address, because kg may publish another address later.
//!
//! The planner is pure and has no clock, so the reconcile loop measures the time and passes it to the planner.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use clustermesh_core::{
    mesh::ClusterIdentity,
    observe::{Observation, Observations},
    plan::{HOLD, Plan},
};

/// The time at which a plan first held each Node.
#[derive(Debug, Default)]
pub(crate) struct HeldNodes(BTreeMap<(ClusterIdentity, String), Instant>);

impl HeldNodes {
    /// Sets `held_for` of each remembered Node in the planner's input.
    pub(crate) fn fill_ages(&self, seen: &mut Observations, now: Instant) {
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

    /// Adds the Nodes that `plan` holds. Returns the time until the next hold expires.
    ///
    /// Forgets the others, except remembered Nodes that the plan now skips: their hold may have expired, and if they were forgotten, the
    /// next plan would hold them again. Nodes of a member without an observation stay, too, because the plan does not say whether it holds
    /// them.
    pub(crate) fn update(&mut self, plan: &Plan, seen: &Observations, now: Instant) -> Option<Duration> {
        let mut keep: BTreeSet<(ClusterIdentity, String)> = BTreeSet::new();
        for mesh in plan.meshes.values() {
            for (entry, report) in &mesh.clusters {
                let Some(identity) = mesh.identities.get(entry) else {
                    continue;
                };
                let skipped = report.skipped.iter().map(|skipped| &skipped.node);
                let remembered = skipped.filter(|node| self.0.contains_key(&(identity.clone(), (*node).clone())));
                keep.extend(
                    report
                        .held
                        .keys()
                        .chain(remembered)
                        .map(|node| (identity.clone(), node.clone())),
                );
            }
        }
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
            target: None,
        };
        plan(ClusterReport {
            skipped: vec![skipped],
            ..ClusterReport::default()
        })
    }

    fn age(held_nodes: &HeldNodes, now: Instant) -> Option<Duration> {
        let mut seen = seen();
        held_nodes.fill_ages(&mut seen, now);
        seen.members[&ClusterIdentity::Local].last().expect("seen").nodes["n"].held_for
    }

    #[test]
    fn hold_age_counts_from_the_first_plan_with_the_hold() {
        let (mut nodes, start) = (HeldNodes::default(), Instant::now());
        assert_eq!(age(&nodes, start), None);
        assert_eq!(nodes.update(&held(), &seen(), start), Some(HOLD));
        let later = start + Duration::from_secs(100);
        assert_eq!(nodes.update(&held(), &seen(), later), Some(Duration::from_secs(200)));
        assert_eq!(age(&nodes, later), Some(Duration::from_secs(100)));
        // The hold expired. The Node is skipped from this time on and must not be held again.
        let end = start + HOLD;
        assert_eq!(nodes.update(&skipped(), &seen(), end), None);
        assert_eq!(age(&nodes, end), Some(HOLD));
        // The annotations of the Node exist again.
        assert_eq!(nodes.update(&plan(ClusterReport::default()), &seen(), end), None);
        assert_eq!(age(&nodes, end), None);
    }

    #[test]
    fn skipped_node_that_was_never_held_is_not_remembered() {
        let (mut nodes, now) = (HeldNodes::default(), Instant::now());
        assert_eq!(nodes.update(&skipped(), &seen(), now), None);
        assert_eq!(age(&nodes, now), None);
    }
}
