//! Makes the report of `status` from a [`Snapshot`]: the problems of all meshes, the worst first, and counts for each mesh. Also defines
//! the JSON and YAML output.

use std::collections::BTreeMap;

use clustermesh_api::mesh::{ClusterMesh, ClusterMeshStatus};
use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Condition, jiff::Timestamp};
use kube::ResourceExt;
use serde::Serialize;

use super::{
    live::{LiveMember, LiveMesh, LiveMeshes, NOT_READ},
    remedy::remedy,
    replicas::Replicas,
    snapshot::{Leader, Snapshot},
};

/// The conditions whose causes are in `status.problems`.
const LISTED: [&str; 5] = [
    "Ready",
    "PolicyEnforced",
    "NetworksOverlap",
    "Degraded",
    "EgressResolved",
];

/// How long the controller may take to report a changed spec.
const REPORT_SECONDS: i64 = 30;

/// The state of the hub. Programs read its JSON and YAML: fields may be added, but never renamed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    /// No mesh has a problem, except notes.
    pub(super) healthy: bool,
    /// The leader of the controller's replicas, if the Lease can be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) controller: Option<ControllerRow>,
    /// The problems of all meshes, the worst first.
    pub(super) problems: Vec<Row>,
    /// All meshes, by namespace and name.
    pub(super) meshes: Vec<MeshRow>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ControllerRow {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) holder: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) renewed: Option<Timestamp>,
    /// Whether the holder renews the Lease.
    pub(super) alive: bool,
    /// With `--live`: how many of the controller's pods are ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pods: Option<Share>,
}

/// How bad a problem is. The order is from the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Severity {
    /// A mesh is not `Ready`, or nothing updates its status.
    Down,
    /// Packets that a policy denies may pass.
    Open,
    /// A part does not work.
    Partly,
    /// A setting that an operator chose, such as a pause, or a harmless state. It does not affect `healthy` and the exit code.
    Note,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Row {
    pub(super) severity: Severity,
    /// NAMESPACE/NAME of the ClusterMesh; none = the controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) mesh: Option<String>,
    /// The member that has the problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cluster: Option<String>,
    /// If the problem is tunnels that are down: the member to which they lead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) to: Option<String>,
    pub(super) condition: String,
    pub(super) reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) since: Option<Timestamp>,
    pub(super) message: String,
    /// What to do, if `message` does not say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) remedy: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct MeshRow {
    /// NAMESPACE/NAME.
    pub(super) mesh: String,
    /// The worst severity of its problems; none = healthy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) worst: Option<Severity>,
    /// Since when the condition Ready has its status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) since: Option<Timestamp>,
    pub(super) members: Share,
    /// `working`: nodes that are registered in other members. `total`: these and the nodes that are left out.
    pub(super) nodes: Share,
    /// Grants (entries of `egress`) that work, of all.
    pub(super) services: Share,
    pub(super) clusters: Vec<ClusterRow>,
    /// With `--live`: what was read from the members themselves, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) live: BTreeMap<String, LiveMember>,
}

/// The number of things that work, and the number of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub(super) struct Share {
    pub(super) working: i64,
    pub(super) total: i64,
}

/// One member.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ClusterRow {
    pub(super) name: String,
    /// Equal for the entries of one cluster in several meshes.
    #[serde(skip)]
    pub(super) identity: String,
    pub(super) reachable: bool,
    /// As [`MeshRow::nodes`].
    pub(super) nodes: Share,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) kubernetes: Option<String>,
    /// Nodes whose wg-agent has the controller's version, of all nodes with wg-agent.
    pub(super) agents: Share,
    /// When its credentials expire, if they say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) credentials_expire: Option<Timestamp>,
}

impl Report {
    pub(super) fn new(snapshot: &Snapshot, live: Option<&LiveMeshes>) -> Self {
        let replicas = snapshot.replicas.as_ref();
        let leader = snapshot.controller.as_ref();
        let mut problems: Vec<Row> = leader
            .and_then(|leader| leader_problem(leader, replicas, live.is_some()))
            .into_iter()
            .collect();
        if problems.is_empty() {
            problems.extend(replicas.and_then(replicas_problem));
        }
        let mut meshes = Vec::new();
        for mesh in &snapshot.meshes {
            let live = live.and_then(|live| live.get(&full_name(mesh)));
            let found = problems_of(mesh, snapshot.time, live);
            meshes.push(mesh_row(mesh, &found, live));
            problems.extend(found);
        }
        // Among problems of the same severity, tunnels that are down come first. The sort is stable: the other problems stay in
        // the controller's order, in which the worse ones come first.
        problems.sort_by_key(|row| (row.severity, row.reason != "TunnelsDown"));
        Self {
            healthy: problems.iter().all(|row| row.severity == Severity::Note),
            controller: snapshot.controller.clone().map(|leader| ControllerRow {
                holder: leader.holder,
                renewed: leader.renewed,
                alive: leader.is_alive,
                pods: replicas.map(|replicas| replicas.ready),
            }),
            problems,
            meshes,
        }
    }
}

fn leader_problem(leader: &Leader, replicas: Option<&Replicas>, is_live: bool) -> Option<Row> {
    if leader.is_alive {
        return None;
    }
    let holder = match &leader.holder {
        Some(holder) => format!("{holder} does not renew"),
        None => "no replica holds".to_owned(),
    };
    let pods = replicas.map_or_else(String::new, |replicas| format!("; {}", replicas.describe()));
    let states = match is_live {
        true => "only the states read now are new",
        false => "the states below may be old: add --live",
    };
    let message = format!("{holder} the controller's Lease{pods}. No status is written, and {states}");
    Some(controller_row(Severity::Down, "NoController", leader.renewed, message))
}

/// A pod of the controller that is not ready, while another one leads.
fn replicas_problem(replicas: &Replicas) -> Option<Row> {
    replicas.problem.as_ref()?;
    Some(controller_row(
        Severity::Partly,
        "ReplicaNotReady",
        None,
        replicas.describe(),
    ))
}

fn controller_row(severity: Severity, reason: &str, since: Option<Timestamp>, message: String) -> Row {
    Row {
        severity,
        mesh: None,
        cluster: None,
        to: None,
        condition: "Lease".to_owned(),
        reason: reason.to_owned(),
        since,
        message,
        remedy: Some(CONTROLLER_REMEDY.to_owned()),
    }
}

const CONTROLLER_REMEDY: &str = "kubectl logs -n clustermesh -l app.kubernetes.io/name=clustermesh-controller";

/// The problems of one mesh, in the order of its status. With `live`, the problems that were found in the members replace those
/// that the controller reported ([`LiveMesh::replace`]).
fn problems_of(mesh: &ClusterMesh, now: Timestamp, live: Option<&LiveMesh>) -> Vec<Row> {
    let mut rows = reported_problems(mesh, now);
    if let Some(live) = live {
        live.replace(&mut rows, |cause| Row {
            severity: severity(cause.kind, cause.reason),
            mesh: Some(full_name(mesh)),
            cluster: cause.cluster.clone(),
            to: cause.to.clone(),
            condition: cause.kind.to_owned(),
            reason: cause.reason.to_owned(),
            since: None,
            message: without_prefix(cause.cluster.as_ref(), &cause.message),
            remedy: remedy(mesh, (cause.reason, &cause.message), cause.cluster.as_deref()),
        });
    }
    rows
}

/// The problems that the status of a mesh lists. A status that is missing or outdated is a problem, too.
fn reported_problems(mesh: &ClusterMesh, now: Timestamp) -> Vec<Row> {
    let name = full_name(mesh);
    let row = |severity, (condition, reason): (&str, &str), since, message: String| Row {
        severity,
        mesh: Some(name.clone()),
        cluster: None,
        to: None,
        condition: condition.to_owned(),
        reason: reason.to_owned(),
        since,
        message,
        remedy: None,
    };
    let Some(status) = mesh.status.as_ref().filter(|status| !status.conditions.is_empty()) else {
        let message = "no controller has reported on this ClusterMesh".to_owned();
        let created = mesh.metadata.creation_timestamp.as_ref().map(|time| time.0);
        return vec![Row {
            remedy: Some(CONTROLLER_REMEDY.to_owned()),
            ..row(Severity::Down, ("Ready", "NotReported"), created, message)
        }];
    };
    let mut rows = Vec::new();
    if let (Some(observed), Some(current)) = (status.observed_generation, mesh.metadata.generation) {
        let changed = spec_changed(mesh);
        let is_late = changed.is_none_or(|time| now.as_second() - time.as_second() > REPORT_SECONDS);
        if observed < current && is_late {
            let message = format!(
                "the controller has not reported on generation {current} of the spec, its last report is on {observed}"
            );
            rows.push(Row {
                remedy: Some(CONTROLLER_REMEDY.to_owned()),
                ..row(Severity::Down, ("Ready", "NotReported"), changed, message)
            });
        }
    }
    let problems = status.problems.iter().map(|problem| Row {
        cluster: problem.cluster.clone(),
        to: problem.to.clone(),
        remedy: remedy(mesh, (&problem.reason, &problem.message), problem.cluster.as_deref()),
        ..row(
            severity(&problem.condition, &problem.reason),
            (&problem.condition, &problem.reason),
            Some(problem.since.0),
            without_prefix(problem.cluster.as_ref(), &problem.message),
        )
    });
    rows.extend(problems);
    // A member that cannot be read already has a row that gives the reason, so its row with `Converging` is removed.
    let is_unreachable = |row: &Row| NOT_READ.contains(&&*row.reason);
    let unreachable: Vec<Option<String>> = rows
        .iter()
        .filter(|row| is_unreachable(row))
        .map(|row| row.cluster.clone())
        .collect();
    rows.retain(|row| row.reason != "Converging" || !unreachable.contains(&row.cluster));
    let unlisted = status.conditions.iter().filter(|condition| is_bad(condition));
    let unlisted = unlisted.filter(|condition| status.problems.is_empty() || !LISTED.contains(&&*condition.type_));
    rows.extend(unlisted.map(|condition| {
        let severity = match &*condition.type_ {
            "Ready" => Severity::Down,
            "PolicyEnforced" => Severity::Open,
            "Paused" => Severity::Note,
            _ => Severity::Partly,
        };
        let since = Some(condition.last_transition_time.0);
        Row {
            remedy: remedy(mesh, (&condition.reason, &condition.message), None),
            ..row(
                severity,
                (&condition.type_, &condition.reason),
                since,
                condition.message.clone(),
            )
        }
    }));
    rows.extend(outdated_agents(status).map(|(cluster, outdated, total)| Row {
        cluster: Some(cluster.to_owned()),
        ..row(
            Severity::Note,
            ("Agents", "AgentsOutdated"),
            None,
            format!("{outdated} of {total} nodes run another version of wg-agent than the controller"),
        )
    }));
    rows
}

fn severity(condition: &str, reason: &str) -> Severity {
    match (condition, reason) {
        (_, "Quarantined") => Severity::Note,
        ("Ready", _) => Severity::Down,
        ("PolicyEnforced", _) => Severity::Open,
        _ => Severity::Partly,
    }
}

/// The message without the name of the member, which has its own column.
fn without_prefix(cluster: Option<&String>, message: &str) -> String {
    let prefix = cluster.map(|cluster| format!("cluster {cluster:?}: "));
    let rest = prefix.and_then(|prefix| message.strip_prefix(&prefix));
    rest.unwrap_or(message).to_owned()
}

/// Whether a condition is not in its good state. All condition types except the three named below count as good when True.
fn is_bad(condition: &Condition) -> bool {
    let is_true_good = !matches!(&*condition.type_, "NetworksOverlap" | "Degraded" | "Paused");
    condition.status != if is_true_good { "True" } else { "False" }
}

/// The members with outdated agents: name, number of such nodes, number of nodes.
fn outdated_agents(status: &ClusterMeshStatus) -> impl Iterator<Item = (&str, i64, i64)> {
    let rows = status.clusters.iter();
    rows.filter_map(|row| {
        let agents = row.agents.filter(|agents| agents.outdated > 0)?;
        Some((&*row.name, agents.outdated, agents.total))
    })
}

/// The time of the last write to the object, except to its status.
fn spec_changed(mesh: &ClusterMesh) -> Option<Timestamp> {
    let fields = mesh.metadata.managed_fields.iter().flatten();
    let changes = fields.filter(|fields| fields.subresource.is_none());
    changes
        .filter_map(|fields| fields.time.as_ref())
        .map(|time| time.0)
        .max()
}

fn mesh_row(mesh: &ClusterMesh, problems: &[Row], live: Option<&LiveMesh>) -> MeshRow {
    let empty = ClusterMeshStatus::default();
    let status = mesh.status.as_ref().unwrap_or(&empty);
    let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready");
    let rows = || status.clusters.iter();
    let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    let registered: i64 = rows().map(|row| row.registered_peers).sum();
    let skipped: i64 = rows().map(|row| row.skipped_nodes).sum();
    let worst = problems.iter().map(|row| row.severity).min();
    MeshRow {
        mesh: full_name(mesh),
        worst: worst.filter(|worst| *worst != Severity::Note),
        since: ready.map(|ready| ready.last_transition_time.0),
        members: Share {
            working: count(rows().filter(|row| row.reachable == Some(true)).count()),
            total: count(mesh.spec.clusters.len()),
        },
        nodes: Share {
            working: registered,
            total: registered + skipped,
        },
        services: Share {
            working: count(status.egress.iter().filter(|row| row.ready).count()),
            total: count(status.egress.len()),
        },
        clusters: rows()
            .map(|row| {
                let agents = row.agents.unwrap_or_default();
                let with_agent = agents.full + agents.policy;
                ClusterRow {
                    name: row.name.clone(),
                    identity: identity(mesh, &row.name),
                    nodes: Share {
                        working: row.registered_peers,
                        total: row.registered_peers + row.skipped_nodes,
                    },
                    reachable: row.reachable == Some(true),
                    kubernetes: row.kubernetes_version.clone(),
                    agents: Share {
                        working: with_agent - agents.outdated,
                        total: with_agent,
                    },
                    credentials_expire: row.credentials_expire.as_ref().map(|time| time.0),
                }
            })
            .collect(),
        live: live.map(|live| live.members.clone()).unwrap_or_default(),
    }
}

/// Identifies the cluster of an entry by its Secret, as the controller does.
fn identity(mesh: &ClusterMesh, entry: &str) -> String {
    let entry = mesh.spec.clusters.iter().find(|row| row.name == entry && !row.local);
    let secret = entry.and_then(|entry| entry.kubeconfig_secret_ref.as_ref());
    secret.map_or_else(String::new, |secret| {
        format!(
            "{}/{} {:?}",
            mesh.namespace().unwrap_or_default(),
            secret.name,
            secret.context
        )
    })
}

/// NAMESPACE/NAME.
pub(crate) fn full_name(mesh: &ClusterMesh) -> String {
    format!("{}/{}", mesh.namespace().unwrap_or_default(), mesh.name_any())
}
