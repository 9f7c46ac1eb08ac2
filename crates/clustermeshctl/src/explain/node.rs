//! `clustermeshctl explain node CLUSTER/NODE`: shows which objects the plan has for a node in each target, or why it has none.

use std::io::{Read, Write};

use clustermesh_core::{
    diff::{Action, Item, Step},
    key::PublicKey,
    mesh::MeshId,
    observe::{Claim, Node},
    plan::{MeshPlan, PlannedPeer, TargetPlan},
};
use serde::Serialize;

use super::is_table;
use crate::{
    args::{ExplainArgs, Output},
    page,
    plan::{PlanResult, describe_peer, print},
    problem::Problem,
};

/// The first argument of `explain node CLUSTER/NODE`. Any other first argument is the source in `explain SRC DST`.
pub(super) const WORD: &str = "node";

/// Everything about a node in the meshes that contain its cluster. JSON and YAML have these fields: a field may be
/// added, but never renamed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeAnswer {
    cluster: String,
    node: String,
    meshes: Vec<MeshAnswer>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct MeshAnswer {
    mesh: String,
    /// The reasons for which the node is left out of all targets, or of one.
    left_out: Vec<LeftOut>,
    /// The reason for which the node would be left out, if its last Peers were not kept for a while.
    #[serde(skip_serializing_if = "Option::is_none")]
    held: Option<String>,
    /// podCIDRs that are in no Peer, because they lie outside allowedNetworks or in an anchored network.
    pod_cidrs_left_out: Vec<String>,
    targets: Vec<Target>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct LeftOut {
    reason: String,
    /// Names the target, if there is one.
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
}

/// The object in a target by which the node is known there.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Target {
    cluster: String,
    /// `Peer` or `SandboxAccess`.
    kind: &'static str,
    name: String,
    /// If the object is the Peer of another node, such as the leader of the node's Kilo location: that node.
    #[serde(skip_serializing_if = "Option::is_none")]
    peer_of: Option<String>,
    /// `upToDate`, `notWritten` or `outdated`.
    state: &'static str,
    /// The content of a Peer.
    content: Vec<String>,
}

/// Runs the command. Exit code: 0 = every mesh has an object that describes the node, 1 = at least one mesh has none.
///
/// # Errors
/// All errors in the input, and an unknown cluster or node.
pub(super) async fn run(
    args: &ExplainArgs,
    stdin: &mut dyn Read,
    stdout: &mut dyn Write,
    stderr: &mut dyn Write,
) -> Result<u8, Vec<Problem>> {
    let problem = |why: String| vec![Problem::other(why)];
    let Some((cluster, node)) = args.to.split_once('/').filter(|(_, node)| !node.contains('/')) else {
        return Err(problem(format!(
            "node {:?}: write CLUSTER/NODE, such as tenant-a/w1",
            args.to
        )));
    };
    let outcome = PlanResult::read(&args.input, stdin, stderr).await?;
    let meshes = outcome.plan.meshes.iter();
    let mut meshes = meshes
        .filter(|(_, mesh)| mesh.identities.contains_key(cluster))
        .peekable();
    if meshes.peek().is_none() {
        return Err(problem(format!("no ClusterMesh has an entry {cluster:?}")));
    }
    let mut answer = NodeAnswer {
        cluster: cluster.to_owned(),
        node: node.to_owned(),
        meshes: Vec::new(),
    };
    let mut is_known = false;
    for (id, mesh) in meshes {
        let read = outcome.cluster(mesh, cluster);
        let observed = read.and_then(|read| read.member.nodes.get(node));
        is_known |= observed.is_some();
        answer
            .meshes
            .push(explain(&outcome, id, mesh, (cluster, node), observed));
    }
    if !is_known && answer.meshes.iter().all(|mesh| mesh.targets.is_empty()) {
        return Err(problem(format!(
            "cluster {cluster:?} has no Node {node:?}, or its Nodes were not read (see the notes above)"
        )));
    }
    print(stdout, &render(&answer, args.output)?)?;
    Ok(u8::from(answer.meshes.iter().any(|mesh| mesh.targets.is_empty())))
}

fn explain(
    outcome: &PlanResult,
    id: &MeshId,
    mesh: &MeshPlan,
    (cluster, node): (&str, &str),
    observed: Option<&Node>,
) -> MeshAnswer {
    let mut answer = MeshAnswer {
        mesh: id.to_string(),
        left_out: Vec::new(),
        held: None,
        pod_cidrs_left_out: Vec::new(),
        targets: Vec::new(),
    };
    if let Some(report) = mesh.clusters.get(cluster) {
        let skipped = report.skipped.iter().filter(|skipped| skipped.node == node);
        answer.left_out.extend(skipped.map(|skipped| LeftOut {
            reason: skipped.reason.to_string(),
            message: skipped.message.clone(),
            target: skipped.target.clone(),
        }));
        answer.held = report.held.get(node).map(ToString::to_string);
        let uncovered = report.uncovered.iter().filter(|uncovered| uncovered.node == node);
        answer
            .pod_cidrs_left_out
            .extend(uncovered.map(|uncovered| uncovered.network.to_string()));
    }
    for (entry, target) in &mesh.targets {
        let steps = outcome.changes(id, mesh, entry).unwrap_or_default();
        if let Some((name, peer)) = find_peer(target, cluster, node, observed.filter(|_| answer.left_out.is_empty())) {
            answer.targets.push(Target {
                cluster: entry.clone(),
                kind: "Peer",
                name: name.to_owned(),
                peer_of: (peer.node != node).then(|| peer.node.clone()),
                state: state(&steps, |item| matches!(item, Item::Peer(other, _) if other == name)),
                content: describe_peer(&peer.spec),
            });
        }
        let key = observed.and_then(|observed| observed.public_key.value());
        for (name, _) in target
            .accesses
            .iter()
            .filter(|(_, access)| access.source == cluster && has_key(&access.spec.nodes, key))
        {
            answer.targets.push(Target {
                cluster: entry.clone(),
                kind: "SandboxAccess",
                name: name.clone(),
                peer_of: None,
                state: state(&steps, |item| matches!(item, Item::Access(other, _) if other == name)),
                content: Vec::new(),
            });
        }
    }
    answer
}

fn has_key<T>(nodes: &std::collections::BTreeMap<PublicKey, T>, key: Option<&PublicKey>) -> bool {
    key.is_some_and(|key| nodes.contains_key(key))
}

/// The Peer of the node. If there is none and the node is not left out: a Peer of the same cluster whose allowed IPs contain one
/// of the node's podCIDRs.
fn find_peer<'p>(
    target: &'p TargetPlan,
    cluster: &str,
    node: &str,
    observed: Option<&Node>,
) -> Option<(&'p str, &'p PlannedPeer)> {
    let peers = || target.peers.iter().filter(|(_, peer)| peer.source == cluster);
    let own = peers().find(|(_, peer)| peer.node == node);
    let pods = || {
        observed
            .into_iter()
            .flat_map(|node| &node.pod_cidrs)
            .filter_map(Claim::value)
    };
    let of_location = || peers().find(|(_, peer)| pods().any(|pods| peer.spec.allowed_ips.contains(pods)));
    own.or_else(of_location).map(|(name, peer)| (&**name, &**peer))
}

fn state(steps: &[&Step], is_object: impl Fn(&Item) -> bool) -> &'static str {
    let step = steps.iter().find(|step| is_object(&step.item));
    match step.map(|step| step.action) {
        None => "upToDate",
        Some(Action::Create) => "notWritten",
        Some(_) => "outdated",
    }
}

fn render(answer: &NodeAnswer, output: Output) -> Result<String, Vec<Problem>> {
    if is_table(output) {
        return Ok(render_table(answer));
    }
    let failed = |error: &dyn std::fmt::Display| vec![Problem::other(format!("the answer cannot be written: {error}"))];
    match output {
        Output::Yaml => serde_saphyr::to_string(answer).map_err(|error| failed(&error)),
        // `Table` has returned above.
        Output::Json | Output::Table => serde_json::to_string_pretty(answer)
            .map(|json| json + "\n")
            .map_err(|error| failed(&error)),
    }
}

fn render_table(answer: &NodeAnswer) -> String {
    let mut text = String::new();
    let NodeAnswer { cluster, node, meshes } = answer;
    for mesh in meshes {
        page::write_line(
            &mut text,
            0,
            2,
            &format!("Node {node} of {cluster} in ClusterMesh {}", mesh.mesh),
        );
        for left_out in &mesh.left_out {
            let line = format!("left out: {}: {}", left_out.reason, left_out.message);
            page::write_line(&mut text, 2, 4, &line);
        }
        if let Some(reason) = &mesh.held {
            let held = format!("keeps its last Peers for up to 5 minutes and is then left out: {reason}");
            page::write_line(&mut text, 2, 4, &held);
        }
        if !mesh.pod_cidrs_left_out.is_empty() {
            let networks = mesh.pod_cidrs_left_out.join(", ");
            let line = format!("in no Peer, outside allowedNetworks or in an anchored network: podCIDR {networks}");
            page::write_line(&mut text, 2, 4, &line);
        }
        for target in &mesh.targets {
            let of = target
                .peer_of
                .as_ref()
                .map_or_else(String::new, |other| format!(" of Node {other}"));
            let state = match target.state {
                "upToDate" => "written",
                "notWritten" => "not written yet",
                _ => "to be updated",
            };
            let line = format!("in {}: {} {}{of} ({state})", target.cluster, target.kind, target.name);
            page::write_line(&mut text, 2, 4, &line);
            for content in &target.content {
                page::write_line(&mut text, 4, 6, content);
            }
        }
        if mesh.targets.is_empty() && mesh.left_out.is_empty() {
            let line = "no object of another cluster describes it: the members are not connected (`clustermeshctl plan` shows why)";
            page::write_line(&mut text, 2, 4, line);
        }
    }
    text
}
