//! Builds the report of a mesh, which is its status and the notices for its Events, from the plan and from details about its members.
//! Pure functions. `clustermesh_core::status` derives the conditions.

use std::collections::{BTreeMap, BTreeSet};

use clustermesh_access::expiry::Expiry;
use clustermesh_api::{
    convert::Finding,
    mesh::{
        AgentCounts, AnchoredNetwork, BrokenLink, ClusterMesh, ClusterMeshStatus, ClusterStatus, EgressStatus,
        KubeconfigSecretRef, MeshProblem, RemovedCluster, ServiceRef, SkippedNode, UncoveredNetwork,
    },
    versions::VERSIONS,
};
use clustermesh_core::{
    enforcement,
    links::BrokenTunnels,
    mesh::Mesh,
    pending::PendingRevocation,
    plan::MeshPlan,
    status::{self, Cause, Condition},
    versions,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;

use crate::{
    events::{Notice, SPEC_ADJUSTED, TUNNELS_DOWN, credentials_topic, link_topic, node_topic, truncate},
    expiry,
    reconcile::RemovedRow,
};

/// The status lists at most this many skipped nodes, and uncovered podCIDRs, of a member. Only the listed nodes have Events.
const MAX_SKIPPED: usize = 20;
/// The status lists at most this many removed clusters.
const MAX_REMOVED: usize = 64;
/// The status lists at most this many anchored networks of a member, and nodes of each network. The CRD has the same limit.
const MAX_ANCHORED: usize = 64;
/// The status lists at most this many grants. The CRD has the same limit.
const MAX_EGRESS: usize = 1024;
/// The status lists at most this many problems. The CRD has the same limit.
const MAX_PROBLEMS: usize = 256;
/// The longest message of a row in the status. The CRD has the same limit.
const MAX_MESSAGE: usize = 1024;
/// The longest message of a condition. Kubernetes has the same limit.
const MAX_CONDITION_MESSAGE: usize = 32 * 1024;

/// The details about one member that its plan does not contain: the state of its API server, agents and objects.
#[derive(Debug, Clone, Default)]
pub(crate) struct MemberDetails {
    /// The observation is Fresh: the API server answers, and all watched objects are current.
    pub(crate) is_fresh: bool,
    /// UID of the member's kube-system namespace.
    pub(crate) uid: Option<String>,
    /// When the credentials expire. `None` = they do not say it.
    pub(crate) expiry: Option<Expiry>,
    /// The API server's version.
    pub(crate) version: Option<String>,
    /// `None` = the Nodes were not read yet.
    pub(crate) agents: Option<AgentCounts>,
    /// The nodes on which PeerPolicies are not enforced.
    pub(crate) unenforced: enforcement::Unenforced,
    /// The versions that the member reports.
    pub(crate) versions: versions::MemberVersions,
    /// Since when all objects of the mesh in the member are as planned: the time of the last pass that found a difference, which was
    /// corrected. If no pass since the start of this process found one: the time in the previous status, or, without one, the time
    /// of the first pass. `None` = not known yet.
    pub(crate) last_sync: Option<meta::Time>,
}

/// The input of [`build_report`].
pub(crate) struct ReportInput<'a> {
    /// The ClusterMesh as the hub contains it.
    pub(crate) object: &'a ClusterMesh,
    /// The planner's input for this mesh: from the spec of `object`, or, if this spec is refused, from the last valid one.
    pub(crate) mesh: &'a Mesh,
    pub(crate) plan: &'a MeshPlan,
    /// Reason and message of the condition `Ready` if the spec is refused.
    pub(crate) refused: Option<&'a (&'static str, String)>,
    /// Fields whose values were accepted in another form than written.
    pub(crate) warnings: &'a [Finding],
    /// By entry: why an object cannot be written into its cluster.
    pub(crate) unwritten: &'a BTreeMap<String, String>,
    /// Clusters that were removed from the spec but still contain objects.
    pub(crate) removed: &'a [RemovedRow],
    /// Removed clusters in which the controller left objects behind, as the annotation `force-cleanup` allows.
    pub(crate) given_up: &'a [String],
    /// By entry and source: the number of objects that differ from the plan.
    pub(crate) outstanding: &'a BTreeMap<(String, String), usize>,
    /// Details by entry.
    pub(crate) details: &'a BTreeMap<String, MemberDetails>,
    /// Links that have tunnels down.
    pub(crate) broken: &'a [BrokenTunnels],
    /// Revocations that do not take effect everywhere yet.
    pub(crate) pending: &'a BTreeSet<PendingRevocation>,
    pub(crate) now: &'a meta::Time,
}

/// The report of one mesh.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Report {
    /// The status without its conditions and problems.
    status: ClusterMeshStatus,
    conditions: Vec<Condition>,
    /// The causes of the conditions, the worst first.
    causes: Vec<Cause>,
    /// The states whose changes are published as Events.
    pub(crate) notices: Vec<Notice>,
}

impl Report {
    /// Creates a report with an empty status.
    #[cfg(test)]
    pub(crate) fn with(conditions: Vec<Condition>, notices: Vec<Notice>) -> Self {
        Self {
            status: ClusterMeshStatus::default(),
            conditions,
            causes: vec![],
            notices,
        }
    }

    /// Returns the status that replaces `before`. A condition whose `status` did not change keeps its `lastTransitionTime`. A
    /// problem that `before` lists keeps its `since`.
    pub(crate) fn status(&self, before: Option<&ClusterMeshStatus>, now: &meta::Time) -> ClusterMeshStatus {
        let conditions = self.conditions.iter().map(|condition| {
            let status = if condition.status { "True" } else { "False" };
            let mut all = before.iter().flat_map(|before| &before.conditions);
            let unchanged = all.find(|b| b.type_ == condition.kind && b.status == status);
            meta::Condition {
                type_: condition.kind.to_owned(),
                status: status.to_owned(),
                reason: condition.reason.to_owned(),
                message: truncate(&condition.message, MAX_CONDITION_MESSAGE),
                observed_generation: self.status.observed_generation,
                last_transition_time: unchanged.map_or_else(|| now.clone(), |b| b.last_transition_time.clone()),
            }
        });
        let before = before.map_or(&[][..], |before| &before.problems);
        let causes = self.causes.iter().take(MAX_PROBLEMS);
        ClusterMeshStatus {
            conditions: conditions.collect(),
            problems: causes.map(|cause| problem(cause, before, now)).collect(),
            ..self.status.clone()
        }
    }
}

/// Makes the row of a cause. If `before` lists the same problem, its `since` is kept.
fn problem(cause: &Cause, before: &[MeshProblem], now: &meta::Time) -> MeshProblem {
    let row = MeshProblem {
        condition: cause.kind.to_owned(),
        reason: cause.reason.to_owned(),
        cluster: cause.cluster.clone(),
        to: cause.to.clone(),
        since: now.clone(),
        message: truncate(&cause.message, MAX_MESSAGE),
    };
    let is_same = |before: &&MeshProblem| {
        (&before.condition, &before.reason, &before.cluster, &before.to)
            == (&row.condition, &row.reason, &row.cluster, &row.to)
    };
    // A member may have several problems with one reason. Their messages tell them apart, unless the messages have changed.
    let mut same = before.iter().filter(is_same);
    let same = same
        .clone()
        .find(|before| before.message == row.message)
        .or_else(|| same.next());
    MeshProblem {
        since: same.map_or(row.since, |before| before.since.clone()),
        ..row
    }
}

/// Builds the report of one mesh.
pub(crate) fn build_report(input: &ReportInput<'_>) -> Report {
    // A mesh that is being deleted reports its progress, even if its spec is refused.
    let (conditions, causes) = match input.refused.filter(|_| !input.plan.deleting) {
        Some((reason, message)) => {
            let condition = Condition {
                kind: "Ready",
                status: false,
                reason,
                message: message.clone(),
            };
            (vec![condition], vec![Cause::of_mesh("Ready", reason, message.clone())])
        }
        None => {
            let leftovers = input.removed.iter();
            let leftovers = leftovers.filter_map(|removed| Some((removed.row.name.clone(), removed.problem.clone()?)));
            let mut causes = status::causes(
                input.plan,
                input.unwritten,
                &leftovers.collect(),
                input.broken,
                input.outstanding,
            );
            // `causes` lists the causes of Degraded before those of EgressResolved. Credentials come last among the causes of
            // Degraded, because they may still be valid, while the other causes are already faults.
            let end = causes.iter().position(|cause| cause.kind == "EgressResolved");
            let end = end.unwrap_or(causes.len());
            causes.splice(end..end, expiring(input));
            let mut conditions = status::conditions_from(input.plan, &causes);
            let members = input.details.iter();
            let members = members.map(|(entry, details)| (entry.clone(), details.unenforced.clone()));
            let unenforced = enforcement::causes(&members.collect(), input.pending);
            conditions.push(enforcement::condition(&unenforced));
            let members = input.details.iter();
            let members = members.map(|(entry, details)| (entry.clone(), details.versions.clone()));
            let own = env!("CARGO_PKG_VERSION");
            conditions.push(versions::condition(&members.collect(), own, &VERSIONS.supported()));
            let (ready, others): (Vec<Cause>, Vec<Cause>) = causes.into_iter().partition(|cause| cause.kind == "Ready");
            // Refused networks are a cause of Ready and of NetworksOverlap. The problems list them only under Ready.
            let is_listed = |cause: &Cause| ready.iter().any(|ready| ready.message == cause.message);
            let others: Vec<Cause> = others.into_iter().filter(|cause| !is_listed(cause)).collect();
            (conditions, [ready, unenforced, others].concat())
        }
    };
    let notices = notices(input, &conditions);
    let observed_generation = input.object.metadata.generation;
    let status = if input.refused.is_some() {
        // Keep the other fields of the previous status, above all the accepted networks.
        ClusterMeshStatus {
            observed_generation,
            conditions: vec![],
            problems: vec![],
            removed_clusters: removed_rows(input),
            ..input.object.status.clone().unwrap_or_default()
        }
    } else {
        let entries = &input.mesh.clusters;
        let fresh = entries
            .iter()
            .filter(|entry| input.details.get(&entry.name).is_some_and(|details| details.is_fresh))
            .count();
        let registered: usize = input.plan.clusters.values().map(|report| report.registered).sum();
        ClusterMeshStatus {
            observed_generation,
            conditions: vec![],
            problems: vec![],
            members: Some(format!("{fresh}/{}", entries.len())),
            registered_peers: Some(to_i64(registered)),
            clusters: entries.iter().map(|entry| cluster_row(input, &entry.name)).collect(),
            removed_clusters: removed_rows(input),
            broken_links: input.broken.iter().map(broken_link).collect(),
            egress: egress(input),
        }
    };
    Report {
        status,
        conditions,
        causes,
        notices,
    }
}

/// The causes for credentials that expire soon or have expired.
fn expiring(input: &ReportInput<'_>) -> Vec<Cause> {
    let members = input.details.iter();
    let causes = members.filter_map(|(entry, details)| {
        let identity = input.plan.identities.get(entry)?;
        expiry::find_cause(entry, identity, details.expiry.as_ref()?, input.now.0)
    });
    causes.collect()
}

fn removed_rows(input: &ReportInput<'_>) -> Vec<RemovedCluster> {
    let rows = input.removed.iter().map(|removed| &removed.row).take(MAX_REMOVED);
    rows.map(|row| RemovedCluster {
        message: truncate(&row.message, MAX_MESSAGE),
        ..row.clone()
    })
    .collect()
}

fn cluster_row(input: &ReportInput<'_>, entry: &str) -> ClusterStatus {
    let report = input.plan.clusters.get(entry).cloned().unwrap_or_default();
    let details = input.details.get(entry).cloned().unwrap_or_default();
    let mut before = input.object.status.iter().flat_map(|status| &status.clusters);
    // Values that are unknown after a restart or on a new connection stay as in the last report.
    let before = before.find(|row| row.name == entry).cloned().unwrap_or_default();
    ClusterStatus {
        name: entry.to_owned(),
        kubeconfig_secret_ref: secret_ref(input, entry),
        uid: details.uid.map(|uid| truncate(&uid, 64)).or(before.uid),
        accepted_networks: report.accepted.iter().map(ToString::to_string).collect(),
        anchored: report
            .anchored
            .iter()
            .take(MAX_ANCHORED)
            .map(|(network, nodes)| AnchoredNetwork {
                network: network.to_string(),
                nodes: nodes
                    .iter()
                    .take(MAX_ANCHORED)
                    .map(|node| truncate(node, 253))
                    .collect(),
            })
            .collect(),
        registered_peers: to_i64(report.registered),
        gateways: Some(to_i64(report.gateways)).filter(|gateways| *gateways > 0),
        skipped_nodes: to_i64(report.skipped.len()),
        skipped: report
            .skipped
            .iter()
            .take(MAX_SKIPPED)
            .map(|skipped| SkippedNode {
                node: truncate(&skipped.node, 253),
                reason: skipped.reason.to_string(),
                message: truncate(&skipped.message, MAX_MESSAGE),
            })
            .collect(),
        uncovered: report
            .uncovered
            .iter()
            .take(MAX_SKIPPED)
            .map(|uncovered| UncoveredNetwork {
                node: truncate(&uncovered.node, 253),
                network: uncovered.network.to_string(),
            })
            .collect(),
        reachable: Some(details.is_fresh),
        credentials_expire: details.expiry.map(|expiry| meta::Time(expiry.expires)),
        last_sync: details.last_sync.or(before.last_sync),
        kubernetes_version: details
            .version
            .map(|version| truncate(&version, 64))
            .or(before.kubernetes_version),
        agents: details.agents.or(before.agents),
    }
}

/// Returns the Secret that the spec references for an entry.
fn secret_ref(input: &ReportInput<'_>, entry: &str) -> Option<KubeconfigSecretRef> {
    let mut entries = input.object.spec.clusters.iter();
    let entry = entries.find(|row| row.name == entry && !row.local)?;
    entry.kubeconfig_secret_ref.clone()
}

fn broken_link(link: &BrokenTunnels) -> BrokenLink {
    let BrokenTunnels {
        from,
        to,
        up,
        down: _,
        total,
    } = link;
    BrokenLink {
        from: from.clone(),
        to: to.clone(),
        up: to_i64(*up),
        total: to_i64(*total),
    }
}

fn egress(input: &ReportInput<'_>) -> Vec<EgressStatus> {
    // Finds the remote Service that a member's grant mirrors as the Service `local`.
    let remote_service = |member: &str, local| {
        let entry = input.mesh.clusters.iter().find(|entry| entry.name == member)?;
        let grant = entry.egress.iter().find(|grant| grant.local == local)?;
        Some(ServiceRef {
            cluster: grant.cluster.clone(),
            namespace: grant.service.namespace.clone(),
            name: grant.service.name.clone(),
        })
    };
    input
        .plan
        .egress
        .iter()
        .take(MAX_EGRESS)
        .filter_map(|planned| {
            // `planned.cluster` is the member that uses the grant, `planned.service` its mirrored Service.
            Some(EgressStatus {
                cluster: planned.cluster.clone(),
                service: remote_service(&planned.cluster, planned.service.clone())?,
                ready: planned.ready,
                endpoints: to_i64(planned.endpoints),
                message: Some(truncate(&planned.message, MAX_MESSAGE)).filter(|message| !message.is_empty()),
            })
        })
        .collect()
}

fn notices(input: &ReportInput<'_>, conditions: &[Condition]) -> Vec<Notice> {
    let mut notices = Vec::new();
    for condition in conditions {
        // Only Ready has an Event for its good state. Degraded has none for skipped nodes, broken links and credentials: these
        // have their own, see below.
        let is_warning = match condition.kind {
            "Ready" => !condition.status,
            "NetworksOverlap" | "Degraded"
                if condition.status
                    && !["NodesSkipped", "TunnelsDown", expiry::EXPIRING, expiry::EXPIRED]
                        .contains(&condition.reason) =>
            {
                true
            }
            "EgressResolved" | "PolicyEnforced" | "VersionsCompatible" if !condition.status => true,
            _ => continue,
        };
        notices.push(Notice {
            topic: condition.kind.to_owned(),
            reason: condition.reason.to_owned(),
            message: condition.message.clone(),
            is_warning,
            action: "Reconcile",
            node: None,
        });
    }
    for finding in input.warnings {
        notices.push(Notice {
            topic: format!("field {}", finding.field),
            reason: SPEC_ADJUSTED.to_owned(),
            message: format!("{}: {}", finding.field, finding.message),
            is_warning: true,
            action: "ReadSpec",
            node: None,
        });
    }
    for (entry, report) in &input.plan.clusters {
        for skipped in report.skipped.iter().take(MAX_SKIPPED) {
            notices.push(Notice {
                topic: node_topic(entry, &skipped.node),
                reason: skipped.reason.to_string(),
                message: format!(
                    "Node {} of cluster {entry:?} is left out: {}",
                    skipped.node, skipped.message
                ),
                is_warning: true,
                action: "SkipNode",
                node: Some((entry.clone(), skipped.node.clone())),
            });
        }
    }
    notices.extend(
        input
            .given_up
            .iter()
            .map(|cluster| Notice::objects_left(&input.mesh.id, cluster)),
    );
    for link in input.broken {
        notices.push(Notice {
            topic: link_topic(&link.from, &link.to),
            reason: TUNNELS_DOWN.to_owned(),
            message: status::describe_broken_link(input.plan, link),
            is_warning: true,
            action: "CheckLinks",
            node: None,
        });
    }
    for cause in expiring(input) {
        notices.push(Notice {
            topic: credentials_topic(&cause.cluster.unwrap_or_default()),
            reason: cause.reason.to_owned(),
            message: cause.message,
            is_warning: true,
            action: "CheckCredentials",
            node: None,
        });
    }
    notices
}

fn to_i64(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
