//! The report on a mesh, its status and the notices for its Events, from its plan and from what was seen and written. Pure;
//! the conditions themselves are derived in `clustermesh_core::status`.

use std::collections::{BTreeMap, BTreeSet};

use clustermesh_api::{
    convert::Finding,
    mesh::{
        AgentCounts, AnchoredNetwork, BrokenLink, ClusterMesh, ClusterMeshStatus, ClusterStatus, EgressStatus,
        KubeconfigSecretRef, RemovedCluster, ServiceRef, SkippedNode, UncoveredNetwork,
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

use crate::events::{Notice, SPEC_ADJUSTED, TUNNELS_DOWN, cut, link_topic, node_topic};
use crate::reconcile::RemovedRow;

/// Skipped nodes of a member that the status lists, and that have Events.
const LISTED: usize = 20;
/// Removed clusters that the status lists.
const REMOVED: usize = 64;
/// Anchored networks of a member, and nodes of each, that the status lists (CRD).
const ANCHORED: usize = 64;
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
    /// Clusters that the spec no longer names and where objects are left.
    pub(crate) removed: &'a [RemovedRow],
    /// By entry and source: how many objects there are not as planned.
    pub(crate) outstanding: &'a BTreeMap<(String, String), usize>,
    /// By entry.
    pub(crate) facts: &'a BTreeMap<String, Facts>,
    /// Between which entries tunnels are down.
    pub(crate) broken: &'a [Broken],
    /// What was closed and is not yet where it should be.
    pub(crate) pending: &'a BTreeSet<Pending>,
}

/// The report on one mesh.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Report {
    /// Without conditions.
    status: ClusterMeshStatus,
    conditions: Vec<Condition>,
    /// What has an Event when it changes.
    pub(crate) notices: Vec<Notice>,
}

impl Report {
    /// One of conditions and notices alone.
    #[cfg(test)]
    pub(crate) fn of(conditions: Vec<Condition>, notices: Vec<Notice>) -> Self {
        Self {
            status: ClusterMeshStatus::default(),
            conditions,
            notices,
        }
    }

    /// The status to write over `before`: the time of a condition is that of the last change of its `status`.
    pub(crate) fn status(&self, before: Option<&ClusterMeshStatus>, now: &meta::Time) -> ClusterMeshStatus {
        let conditions = self.conditions.iter().map(|condition| {
            let status = if condition.status { "True" } else { "False" };
            let mut all = before.iter().flat_map(|before| &before.conditions);
            let unchanged = all.find(|b| b.type_ == condition.kind && b.status == status);
            meta::Condition {
                type_: condition.kind.to_owned(),
                status: status.to_owned(),
                reason: condition.reason.to_owned(),
                message: cut(&condition.message, CONDITION),
                observed_generation: self.status.observed_generation,
                last_transition_time: unchanged.map_or_else(|| now.clone(), |b| b.last_transition_time.clone()),
            }
        });
        ClusterMeshStatus {
            conditions: conditions.collect(),
            ..self.status.clone()
        }
    }
}

/// Makes the report.
pub(crate) fn report(subject: &Subject<'_>) -> Report {
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
            let left = subject.removed.iter();
            let left = left.filter_map(|removed| Some((removed.row.name.clone(), removed.trouble.clone()?)));
            let mut conditions = status::conditions(
                subject.plan,
                subject.unwritten,
                &left.collect(),
                subject.broken,
                subject.outstanding,
            );
            let members = subject.facts.iter();
            let members = members.map(|(entry, facts)| (entry.clone(), facts.unenforced.clone()));
            conditions.push(enforcement::condition(&members.collect(), subject.pending));
            conditions
        }
    };
    let notices = notices(subject, &conditions);
    let observed_generation = subject.object.metadata.generation;
    let status = if subject.refused.is_some() {
        // Keep the previous status, and with it the accepted networks.
        ClusterMeshStatus {
            observed_generation,
            conditions: vec![],
            removed_clusters: removed(subject),
            ..subject.object.status.clone().unwrap_or_default()
        }
    } else {
        let entries = &subject.mesh.clusters;
        let fresh = entries
            .iter()
            .filter(|entry| subject.facts.get(&entry.name).is_some_and(|facts| facts.fresh))
            .count();
        let registered: usize = subject.plan.clusters.values().map(|report| report.registered).sum();
        ClusterMeshStatus {
            observed_generation,
            conditions: vec![],
            members: Some(format!("{fresh}/{}", entries.len())),
            registered_peers: Some(count(registered)),
            clusters: entries.iter().map(|entry| row(subject, &entry.name)).collect(),
            removed_clusters: removed(subject),
            broken_links: subject.broken.iter().map(broken_link).collect(),
            egress: egress(subject),
        }
    };
    Report {
        status,
        conditions,
        notices,
    }
}

fn removed(subject: &Subject<'_>) -> Vec<RemovedCluster> {
    let rows = subject.removed.iter().map(|removed| &removed.row).take(REMOVED);
    rows.map(|row| RemovedCluster {
        message: cut(&row.message, MESSAGE),
        ..row.clone()
    })
    .collect()
}

fn row(subject: &Subject<'_>, entry: &str) -> ClusterStatus {
    let report = subject.plan.clusters.get(entry).cloned().unwrap_or_default();
    let facts = subject.facts.get(entry).cloned().unwrap_or_default();
    let mut before = subject.object.status.iter().flat_map(|status| &status.clusters);
    // What is not known yet, after a restart or on a new connection, stays as it was reported last.
    let before = before.find(|row| row.name == entry).cloned().unwrap_or_default();
    ClusterStatus {
        name: entry.to_owned(),
        kubeconfig_secret_ref: secret(subject, entry),
        uid: facts.uid.map(|uid| cut(&uid, 64)).or(before.uid),
        accepted_networks: report.accepted.iter().map(ToString::to_string).collect(),
        anchored: report
            .anchored
            .iter()
            .take(ANCHORED)
            .map(|(network, nodes)| AnchoredNetwork {
                network: network.to_string(),
                nodes: nodes.iter().take(ANCHORED).map(|node| cut(node, 253)).collect(),
            })
            .collect(),
        registered_peers: count(report.registered),
        gateways: Some(count(report.gateways)).filter(|gateways| *gateways > 0),
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
        uncovered: report
            .uncovered
            .iter()
            .take(LISTED)
            .map(|uncovered| UncoveredNetwork {
                node: cut(&uncovered.node, 253),
                network: uncovered.network.to_string(),
            })
            .collect(),
        reachable: Some(facts.fresh),
        last_sync: facts.last_sync.or(before.last_sync),
        kubernetes_version: facts
            .version
            .map(|version| cut(&version, 64))
            .or(before.kubernetes_version),
        agents: facts.agents.or(before.agents),
    }
}

/// The Secret of an entry, as the spec names it.
fn secret(subject: &Subject<'_>, entry: &str) -> Option<KubeconfigSecretRef> {
    let mut entries = subject.object.spec.clusters.iter();
    let entry = entries.find(|row| row.name == entry && !row.local)?;
    entry.kubeconfig_secret_ref.clone()
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

fn notices(subject: &Subject<'_>, conditions: &[Condition]) -> Vec<Notice> {
    let mut notices = Vec::new();
    for condition in conditions {
        // Good news has an Event for Ready alone; skipped nodes and broken links have one each.
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
        notices.push(Notice {
            topic: condition.kind.to_owned(),
            reason: condition.reason.to_owned(),
            message: condition.message.clone(),
            warning,
            action: "Reconcile",
            node: None,
        });
    }
    for finding in subject.warnings {
        notices.push(Notice {
            topic: format!("field {}", finding.field),
            reason: SPEC_ADJUSTED.to_owned(),
            message: format!("{}: {}", finding.field, finding.message),
            warning: true,
            action: "ReadSpec",
            node: None,
        });
    }
    for (entry, report) in &subject.plan.clusters {
        for skipped in report.skipped.iter().take(LISTED) {
            notices.push(Notice {
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
        notices.push(Notice {
            topic: link_topic(&link.from, &link.to),
            reason: TUNNELS_DOWN.to_owned(),
            message: status::describe_broken_link(link),
            warning: true,
            action: "LookAtLinks",
            node: None,
        });
    }
    notices
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
    fn time_of_a_condition_is_that_of_its_last_change() {
        let time = |second| meta::Time(k8s_openapi::jiff::Timestamp::from_second(second).expect("a time"));
        let report = |conditions| Report::of(conditions, vec![]);
        let first = report(vec![condition("Ready", false), condition("Degraded", true)]).status(None, &time(1));
        let second = report(vec![condition("Ready", true), condition("Degraded", true)]).status(Some(&first), &time(2));
        let times: Vec<_> = second
            .conditions
            .iter()
            .map(|c| (&*c.type_, &*c.status, c.last_transition_time.clone()))
            .collect();
        assert_eq!(times, [("Ready", "True", time(2)), ("Degraded", "True", time(1))]);
    }

    /// As after a restart: of a member that does not answer nothing is known but what its row says.
    #[test]
    fn row_of_an_unseen_member_keeps_what_was_reported() {
        let row = serde_json::json!({
            "name": "a", "uid": "u", "lastSync": "2026-01-01T00:00:00Z", "kubernetesVersion": "v1.36.3", "reachable": false,
            "agents": {"total": 2, "full": 2},
        });
        let object: ClusterMesh = serde_json::from_value(serde_json::json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh", "metadata": {"name": "m", "namespace": "ns"},
            "spec": {"clusters": []}, "status": {"clusters": [row]},
        }))
        .expect("a ClusterMesh");
        let (plan, none, facts) = (MeshPlan::default(), BTreeMap::new(), BTreeMap::new());
        let mesh = Mesh {
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
        };
        let subject = Subject {
            object: &object,
            mesh: &mesh,
            plan: &plan,
            refused: None,
            warnings: &[],
            unwritten: &none,
            removed: &[],
            outstanding: &BTreeMap::new(),
            facts: &facts,
            broken: &[],
            pending: &BTreeSet::new(),
        };
        let before = object.status.clone().expect("a status").clusters.remove(0);
        assert_eq!(super::row(&subject, "a"), before);
    }
}
