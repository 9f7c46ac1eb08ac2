//! Derives the conditions of a mesh from its plan, failed writes, and broken links.

use std::collections::BTreeMap;

use crate::{links::BrokenTunnels, plan::MeshPlan};

mod causes;

pub use causes::{Cause, describe_broken_link};

/// One condition, without `lastTransitionTime`, which the writer of the status adds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// `Ready`, `NetworksOverlap`, `Degraded`, `PolicyEnforced`, `EgressResolved`, `VersionsCompatible` or `Paused`.
    pub kind: &'static str,
    /// `True` or `False`.
    pub status: bool,
    /// One word in CamelCase, for programs.
    pub reason: &'static str,
    /// The message for people.
    pub message: String,
}

/// Finds what is wrong with a mesh, except the causes of `PolicyEnforced` ([`crate::enforcement::causes`]) and `VersionsCompatible`
/// ([`crate::versions::condition`]).
///
/// - `unwritten`: members, by entry name, into which something could not be written, with the reason.
/// - `leftovers`: clusters that were removed from the spec, with the reason why the mesh's objects there are not deleted yet.
/// - `broken`: links with tunnels that are down.
/// - `outstanding`: the number of objects that differ from the plan, by (target entry, source entry).
#[must_use]
pub fn causes(
    plan: &MeshPlan,
    unwritten: &BTreeMap<String, String>,
    leftovers: &BTreeMap<String, String>,
    broken: &[BrokenTunnels],
    outstanding: &BTreeMap<(String, String), usize>,
) -> Vec<Cause> {
    let mut found = causes::of_ready(plan, unwritten, leftovers, outstanding);
    found.extend(causes::of_overlap(plan));
    found.extend(causes::of_degraded(plan, leftovers, broken));
    found.extend(causes::of_egress(plan));
    found
}

/// Derives the conditions of a mesh, except `PolicyEnforced` ([`crate::enforcement::condition`]) and `VersionsCompatible`
/// ([`crate::versions::condition`]). For the parameters see [`causes`].
#[must_use]
pub fn conditions(
    plan: &MeshPlan,
    unwritten: &BTreeMap<String, String>,
    leftovers: &BTreeMap<String, String>,
    broken: &[BrokenTunnels],
    outstanding: &BTreeMap<(String, String), usize>,
) -> Vec<Condition> {
    conditions_from(plan, &causes(plan, unwritten, leftovers, broken, outstanding))
}

/// Derives the same conditions as [`conditions`] from the result of [`causes`].
#[must_use]
pub fn conditions_from(plan: &MeshPlan, causes: &[Cause]) -> Vec<Condition> {
    let nodes: usize = plan.clusters.values().map(|report| report.registered).sum();
    let gateways = match plan.clusters.values().map(|report| report.gateways).sum::<usize>() {
        0 => String::new(),
        gateways => format!(" and {gateways} gateways"),
    };
    let meshed = format!("{nodes} nodes{gateways} of {} clusters are meshed", plan.clusters.len());
    let disjoint = "networks of different clusters are disjoint".to_owned();
    let served = "every node has its Peer, and no tunnel is known to be down".to_owned();
    let mut conditions = vec![
        condition("Ready", true, ("Meshed", meshed), causes),
        condition("NetworksOverlap", false, ("NoOverlap", disjoint), causes),
        condition("Degraded", false, ("AllServed", served), causes),
    ];
    if !plan.egress.is_empty() {
        let mirrored = format!("{} Service(s) are mirrored", plan.egress.len());
        conditions.push(condition("EgressResolved", true, ("Resolved", mirrored), causes));
    }
    if plan.paused {
        let message =
            "nothing is written and nothing is deleted: spec.paused or the annotation cluster.x-k8s.io/paused is set, \
                       or clusterctl is moving the ClusterMesh to another hub"
                .into();
        conditions.push(Condition {
            kind: "Paused",
            status: true,
            reason: "Paused",
            message,
        });
    }
    conditions
}

/// Builds one condition from its causes. Without any, it has the status, reason and message of its good state.
fn condition(kind: &'static str, good: bool, (reason, message): (&'static str, String), causes: &[Cause]) -> Condition {
    let mut of_kind = causes.iter().filter(|cause| cause.kind == kind).peekable();
    match of_kind.peek().map(|first| first.reason) {
        None => Condition {
            kind,
            status: good,
            reason,
            message,
        },
        Some(reason) => Condition {
            kind,
            status: !good,
            reason,
            message: join_first_five(of_kind.map(|cause| &cause.message)),
        },
    }
}

/// Joins the first five messages and counts the others, because the API server limits a condition's message to 32 KiB.
pub(crate) fn join_first_five<'a>(messages: impl Iterator<Item = &'a String>) -> String {
    let all: Vec<&str> = messages.map(String::as_str).collect();
    let shown = all.len().min(5);
    let mut text = all[..shown].join("; ");
    if all.len() > shown {
        text.push_str(&format!("; and {} more", all.len() - shown));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(counts: &[(&str, &str, usize)]) -> BTreeMap<(String, String), usize> {
        let counts = counts.iter();
        counts
            .map(|(target, source, count)| (((*target).to_owned(), (*source).to_owned()), *count))
            .collect()
    }

    fn ready_of(
        plan: &MeshPlan,
        unwritten: &[&str],
        outstanding: &[(&str, &str, usize)],
    ) -> (bool, &'static str, String) {
        let unwritten = unwritten
            .iter()
            .map(|entry| ((*entry).to_owned(), "403".to_owned()))
            .collect();
        let ready = conditions(plan, &unwritten, &BTreeMap::new(), &[], &counts(outstanding)).remove(0);
        assert_eq!(ready.kind, "Ready");
        (ready.status, ready.reason, ready.message)
    }

    #[test]
    fn outstanding_object_or_failed_write_prevents_ready() {
        let plan = MeshPlan::default();
        let meshed = "0 nodes of 0 clusters are meshed".to_owned();
        assert_eq!(ready_of(&plan, &[], &[]), (true, "Meshed", meshed));
        let converging =
            "7 objects are still to be written or deleted; 4 of them in cluster \"b\" for cluster \"a\"".to_owned();
        let outstanding = [("a", "b", 3), ("b", "a", 4)];
        assert_eq!(ready_of(&plan, &[], &outstanding), (false, "Converging", converging));
        // A failed write is reported instead of the outstanding objects of that member.
        let write_failed = "cluster \"b\": 403; 3 objects are still to be written or deleted; 3 of them in cluster \"a\" for cluster \"b\"";
        assert_eq!(
            ready_of(&plan, &["b"], &outstanding),
            (false, "WriteFailed", write_failed.to_owned())
        );
    }

    #[test]
    fn paused_mesh_is_ready_only_when_nothing_is_outstanding() {
        let plan = MeshPlan {
            paused: true,
            ..MeshPlan::default()
        };
        let paused =
            "2 objects are not as planned, and the mesh is paused; 2 of them in cluster \"a\" for cluster \"b\"";
        assert_eq!(
            ready_of(&plan, &[], &[("a", "b", 2)]),
            (false, "Paused", paused.to_owned())
        );
        assert!(ready_of(&plan, &[], &[]).0);
    }
}
