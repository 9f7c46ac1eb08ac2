//! What is said of a mesh: its status and its Events, from its plan and from what was seen and written. Pure; the conditions
//! themselves are derived in `clustermesh_core::status`.

use std::collections::{BTreeMap, BTreeSet};

use clustermesh_api::{
    convert::Finding,
    mesh::{
        AgentCounts, BrokenLink, ClusterMesh, ClusterMeshStatus, ClusterStatus, EgressStatus, ServiceRef, SkippedNode,
    },
};
use clustermesh_core::{
    enforcement,
    links::Broken,
    mesh::Mesh,
    pending::Pending,
    plan::MeshPlan,
    status::{self, Condition},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;

use crate::events::{Saying, TUNNELS_DOWN, cut, link_topic, node_topic};

/// Skipped nodes that the status lists.
const LISTED: usize = 20;
/// The longest message of a row (CRD).
const MESSAGE: usize = 1024;
/// The longest message of a condition (Kubernetes).
const CONDITION: usize = 32 * 1024;

/// What is known of one member apart from its plan.
#[derive(Debug, Clone, Default)]
pub(crate) struct Facts {
    /// Its API server answers and everything is current.
    pub(crate) fresh: bool,
    pub(crate) uid: Option<String>,
    pub(crate) version: Option<String>,
    /// `None` = its Nodes were never read.
    pub(crate) agents: Option<AgentCounts>,
    /// On which of its nodes PeerPolicies are not enforced.
    pub(crate) unenforced: enforcement::Unenforced,
    /// When it last came to hold all it should.
    pub(crate) last_sync: Option<meta::Time>,
}

/// Everything a report is made from.
pub(crate) struct Subject<'a> {
    /// The object as it stands.
    pub(crate) object: &'a ClusterMesh,
    /// The same as values; hollow when it is refused.
    pub(crate) mesh: &'a Mesh,
    /// Its plan.
    pub(crate) plan: &'a MeshPlan,
    /// Why it is not served at all: one word, and the message.
    pub(crate) refused: Option<&'a (&'static str, String)>,
    /// Values that were taken, but not as they were written.
    pub(crate) warnings: &'a [Finding],
    /// By entry: what could not be written, and why.
    pub(crate) unwritten: &'a BTreeMap<String, String>,
    /// By entry.
    pub(crate) facts: &'a BTreeMap<String, Facts>,
    /// Between which entries tunnels are down.
    pub(crate) broken: &'a [Broken],
    /// What was closed and is not yet where it should be.
    pub(crate) pending: &'a BTreeSet<Pending>,
}

/// The status to be written, and everything that is to be said.
pub(crate) fn report(subject: &Subject<'_>, now: &meta::Time) -> (ClusterMeshStatus, Vec<Saying>) {
    // What is being deleted is waited for, whatever its spec says.
    let conditions = match subject.refused.filter(|_| !subject.plan.deleting) {
        Some((reason, message)) => {
            vec![Condition {
                kind: "Ready",
                status: false,
                reason,
                message: message.clone(),
            }]
        }
        None => {
            let mut conditions = status::conditions(subject.plan, subject.unwritten, subject.broken);
            let members = subject.facts.iter();
            let members = members.map(|(entry, facts)| (entry.clone(), facts.unenforced.clone()));
            conditions.push(enforcement::condition(
                &members.collect(),
                &subject.plan.facts,
                subject.pending,
            ));
            conditions
        }
    };
    let sayings = sayings(subject, &conditions);
    let before = subject.object.status.clone().unwrap_or_default();
    if subject.refused.is_some() {
        // Nothing is known anew: what stands stays, and so do the networks that were accepted.
        let conditions = stamp(subject, conditions, &before.conditions, now);
        return (
            ClusterMeshStatus {
                observed_generation: subject.object.metadata.generation,
                conditions,
                ..before
            },
            sayings,
        );
    }
    let entries = &subject.mesh.clusters;
    let fresh = entries
        .iter()
        .filter(|entry| subject.facts.get(&entry.name).is_some_and(|facts| facts.fresh))
        .count();
    let registered: usize = subject.plan.clusters.values().map(|report| report.registered).sum();
    let status = ClusterMeshStatus {
        observed_generation: subject.object.metadata.generation,
        conditions: stamp(subject, conditions, &before.conditions, now),
        members: Some(format!("{fresh}/{}", entries.len())),
        registered_peers: Some(count(registered)),
        clusters: entries.iter().map(|entry| row(subject, &entry.name)).collect(),
        broken_links: subject.broken.iter().map(broken_link).collect(),
        egress: egress(subject),
    };
    (status, sayings)
}

fn row(subject: &Subject<'_>, entry: &str) -> ClusterStatus {
    let report = subject.plan.clusters.get(entry).cloned().unwrap_or_default();
    let facts = subject.facts.get(entry).cloned().unwrap_or_default();
    let before = subject.object.status.iter().flat_map(|status| &status.clusters);
    // Asked for again on every connection; until it answers, what it said last.
    let uid_before = before.filter(|row| row.name == entry).find_map(|row| row.uid.clone());
    ClusterStatus {
        name: entry.to_owned(),
        uid: facts.uid.map(|uid| cut(&uid, 64)).or(uid_before),
        accepted_networks: report.accepted.iter().map(ToString::to_string).collect(),
        registered_peers: count(report.registered),
        skipped_nodes: count(report.skipped.len()),
        skipped: report
            .skipped
            .iter()
            .take(LISTED)
            .map(|skipped| SkippedNode {
                node: cut(&skipped.node, 253),
                reason: skipped.reason.to_string(),
                message: cut(&skipped.message, MESSAGE),
            })
            .collect(),
        reachable: Some(facts.fresh),
        last_sync: facts.last_sync,
        kubernetes_version: facts.version.map(|version| cut(&version, 64)),
        agents: facts.agents,
    }
}

fn broken_link(link: &Broken) -> BrokenLink {
    let Broken {
        from,
        to,
        up,
        down: _,
        total,
    } = link;
    BrokenLink {
        from: from.clone(),
        to: to.clone(),
        up: count(*up),
        total: count(*total),
    }
}

fn egress(subject: &Subject<'_>) -> Vec<EgressStatus> {
    let source = |cluster: &str, local| {
        let entry = subject.mesh.clusters.iter().find(|entry| entry.name == cluster)?;
        let grant = entry.egress.iter().find(|grant| grant.local == local)?;
        Some(ServiceRef {
            cluster: grant.cluster.clone(),
            namespace: grant.service.namespace.clone(),
            name: grant.service.name.clone(),
        })
    };
    subject
        .plan
        .egress
        .iter()
        .take(1024)
        .filter_map(|grant| {
            Some(EgressStatus {
                cluster: grant.cluster.clone(),
                service: source(&grant.cluster, grant.service.clone())?,
                ready: grant.ready,
                endpoints: count(grant.endpoints),
                message: Some(cut(&grant.message, MESSAGE)).filter(|message| !message.is_empty()),
            })
        })
        .collect()
}

/// Gives conditions their times: the time of the last change of `status` is kept.
fn stamp(
    subject: &Subject<'_>,
    conditions: Vec<Condition>,
    before: &[meta::Condition],
    now: &meta::Time,
) -> Vec<meta::Condition> {
    conditions
        .into_iter()
        .map(|condition| {
            let status = if condition.status { "True" } else { "False" };
            let stands = before.iter().find(|b| b.type_ == condition.kind && b.status == status);
            meta::Condition {
                type_: condition.kind.to_owned(),
                status: status.to_owned(),
                reason: condition.reason.to_owned(),
                message: cut(&condition.message, CONDITION),
                observed_generation: subject.object.metadata.generation,
                last_transition_time: stands.map_or_else(|| now.clone(), |b| b.last_transition_time.clone()),
            }
        })
        .collect()
}

fn sayings(subject: &Subject<'_>, conditions: &[Condition]) -> Vec<Saying> {
    let mut sayings = Vec::new();
    for condition in conditions {
        // Good news is said of Ready alone; that nodes are skipped, or links down, is said of each.
        let warning = match condition.kind {
            "Ready" => !condition.status,
            "NetworksOverlap" | "Degraded"
                if condition.status && !["NodesSkipped", "TunnelsDown"].contains(&condition.reason) =>
            {
                true
            }
            "EgressResolved" | "PolicyEnforced" if !condition.status => true,
            _ => continue,
        };
        sayings.push(Saying {
            topic: condition.kind.to_owned(),
            reason: condition.reason.to_owned(),
            message: condition.message.clone(),
            warning,
            action: "Reconcile",
            node: None,
        });
    }
    for finding in subject.warnings {
        sayings.push(Saying {
            topic: format!("field {}", finding.field),
            reason: "SpecAdjusted".to_owned(),
            message: format!("{}: {}", finding.field, finding.message),
            warning: true,
            action: "ReadSpec",
            node: None,
        });
    }
    for (entry, report) in &subject.plan.clusters {
        for skipped in &report.skipped {
            sayings.push(Saying {
                topic: node_topic(entry, &skipped.node),
                reason: skipped.reason.to_string(),
                message: format!(
                    "Node {} of cluster {entry:?} is left out: {}",
                    skipped.node, skipped.message
                ),
                warning: true,
                action: "SkipNode",
                node: Some((entry.clone(), skipped.node.clone())),
            });
        }
    }
    for link in subject.broken {
        sayings.push(Saying {
            topic: link_topic(&link.from, &link.to),
            reason: TUNNELS_DOWN.to_owned(),
            message: status::down(link),
            warning: true,
            action: "LookAtLinks",
            node: None,
        });
    }
    sayings
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn condition(kind: &'static str, status: bool) -> Condition {
        Condition {
            kind,
            status,
            reason: "Word",
            message: String::new(),
        }
    }

    #[test]
    fn the_time_of_a_condition_is_that_of_its_last_change() {
        let time = |second| meta::Time(k8s_openapi::jiff::Timestamp::from_second(second).expect("a time"));
        let object = ClusterMesh::new(
            "m",
            clustermesh_api::mesh::ClusterMeshSpec {
                paused: false,
                clusters: vec![],
            },
        );
        let (mesh, plan) = (hollow(), MeshPlan::default());
        let (unwritten, facts) = (BTreeMap::new(), BTreeMap::new());
        let subject = Subject {
            object: &object,
            mesh: &mesh,
            plan: &plan,
            refused: None,
            warnings: &[],
            unwritten: &unwritten,
            facts: &facts,
            broken: &[],
            pending: &BTreeSet::new(),
        };
        let first = stamp(
            &subject,
            vec![condition("Ready", false), condition("Degraded", true)],
            &[],
            &time(1),
        );
        let second = stamp(
            &subject,
            vec![condition("Ready", true), condition("Degraded", true)],
            &first,
            &time(2),
        );
        let times: Vec<_> = second
            .iter()
            .map(|c| (&*c.type_, &*c.status, c.last_transition_time.clone()))
            .collect();
        assert_eq!(times, [("Ready", "True", time(2)), ("Degraded", "True", time(1))]);
    }

    fn hollow() -> Mesh {
        Mesh {
            id: clustermesh_core::mesh::MeshId {
                namespace: "ns".into(),
                name: "m".into(),
            },
            created: 0,
            paused: false,
            deleting: false,
            adopt_hub: None,
            clusters: vec![],
            accepted: BTreeMap::new(),
        }
    }
}
