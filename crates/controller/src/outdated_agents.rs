//! Finds the agents that have reported the same outdated revision of their cluster's PeerPolicies for at least [`agents_grace`].
//!
//! `clustermesh_core::enforcement` defines which revision is outdated. This module measures the time.
//!
//! A second instance of [`OutdatedAgents`] finds gateways that enforce outdated SandboxAccesses. It gets gateways instead of nodes.
//! Instead of a revision it gets the list of a gateway's outdated SandboxAccesses, or `enforcement::APPLIED` if there are none
//! (`enforcement::outdated_accesses`). So the current revision of a gateway is always `APPLIED`.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use clustermesh_core::{
    enforcement::{GRACE, is_outdated, report_interval},
    mesh::ClusterIdentity,
};

/// How long an agent of a member with this number of Nodes may report an outdated revision.
pub(crate) fn agents_grace(nodes: usize) -> Duration {
    GRACE + report_interval(nodes)
}

/// The nodes with an outdated agent, by member and name.
#[derive(Debug, Default)]
pub(crate) struct OutdatedAgents(BTreeMap<ClusterIdentity, BTreeMap<String, Outdated>>);

/// An agent whose last reported revision is outdated.
#[derive(Debug)]
struct Outdated {
    /// The revision that the agent last reported. A new revision restarts the time even if it is outdated, too, because the change
    /// proves that the agent applies policies.
    revision: String,
    overdue_at: Instant,
    /// Whether `overdue_at` has passed.
    is_overdue: bool,
}

impl OutdatedAgents {
    /// Forgets the members for which `exists` is false.
    pub(crate) fn keep(&mut self, exists: impl Fn(&ClusterIdentity) -> bool) {
        self.0.retain(|identity, _| exists(identity));
    }

    /// Returns the nodes of a member whose agent has reported the same outdated revision for at least `grace`.
    ///
    /// `current` is the revision of the objects in the cluster, and `enforced` is the revision that each node reports. If `current` is
    /// `None`, because the objects cannot be read now, the last result is returned again.
    pub(crate) fn update(
        &mut self,
        identity: &ClusterIdentity,
        current: Option<&str>,
        enforced: BTreeMap<String, String>,
        grace: Duration,
        now: Instant,
    ) -> BTreeSet<String> {
        if let Some(current) = current {
            let mut before = self.0.remove(identity).unwrap_or_default();
            let outdated_nodes = enforced
                .into_iter()
                .filter(|(_, revision)| is_outdated(revision, current));
            let nodes: BTreeMap<String, Outdated> = outdated_nodes
                .map(|(name, revision)| {
                    let mut node = before
                        .remove(&name)
                        .filter(|before| before.revision == revision)
                        .unwrap_or(Outdated {
                            revision,
                            overdue_at: now + grace,
                            is_overdue: false,
                        });
                    node.is_overdue |= now >= node.overdue_at;
                    (name, node)
                })
                .collect();
            if !nodes.is_empty() {
                self.0.insert(identity.clone(), nodes);
            }
        }
        let nodes = self.0.get(identity).into_iter().flatten();
        nodes
            .filter(|(_, node)| node.is_overdue)
            .map(|(name, _)| name.clone())
            .collect()
    }

    /// The next time after `now` at which a node becomes overdue.
    pub(crate) fn due(&self, now: Instant) -> Option<Instant> {
        let waiting = self
            .0
            .values()
            .flat_map(BTreeMap::values)
            .filter(|node| !node.is_overdue);
        waiting.map(|node| node.overdue_at).filter(|at| *at > now).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_of_many_nodes_have_more_time_to_report() {
        assert_eq!(agents_grace(5), Duration::from_millis(15_500));
        assert_eq!(agents_grace(1000), Duration::from_secs(115));
    }

    // threat: outdated-agent
    #[test]
    fn agent_with_unchanged_old_revision_is_overdue_after_grace() {
        let (mut agents, start) = (OutdatedAgents::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut update = |second, current: Option<&str>, enforced: &[(&str, &str)]| {
            let enforced = enforced
                .iter()
                .map(|(node, revision)| ((*node).to_owned(), (*revision).to_owned()));
            let outdated = agents.update(&ClusterIdentity::Local, current, enforced.collect(), GRACE, at(second));
            let outdated: Vec<String> = outdated.into_iter().collect();
            (outdated.join(" "), agents.due(at(second)))
        };
        let none = String::new;
        // `GRACE` is 15 s. Node `old` reports no revision, so it never counts as outdated.
        let a = || "a".to_owned();
        assert_eq!(
            update(0, Some("1"), &[("a", "1"), ("b", "1"), ("old", "")]),
            (none(), None)
        );
        assert_eq!(update(1, Some("2"), &[("a", "1"), ("b", "1")]), (none(), Some(at(16))));
        assert_eq!(update(9, Some("3"), &[("a", "1"), ("b", "2")]), (none(), Some(at(16))));
        assert_eq!(update(15, None, &[]), (none(), Some(at(16))));
        assert_eq!(update(16, Some("3"), &[("a", "1"), ("b", "2")]), (a(), Some(at(24))));
        assert_eq!(update(17, Some("3"), &[("a", "1"), ("b", "3")]), (a(), None));
        assert_eq!(update(90, None, &[]), (a(), None), "the last result stays");
        assert_eq!(update(91, Some("3"), &[("a", "3"), ("b", "3")]), (none(), None));
    }
}
