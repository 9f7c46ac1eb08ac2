//! Says what to do about a problem, by its reason: commands and fields with the names of this mesh. Many messages already contain the
//! remedy; their reasons have none here.

use clustermesh_api::{mesh::ClusterMesh, names::FORCE_CLEANUP};
use kube::ResourceExt;

/// Returns the remedy for a problem of a mesh with this reason and message. `cluster` = the member with the problem; `None` = the
/// problem is not in one member.
pub(super) fn remedy(mesh: &ClusterMesh, (reason, message): (&str, &str), cluster: Option<&str>) -> Option<String> {
    let (namespace, name) = (mesh.namespace().unwrap_or_default(), mesh.name_any());
    let member = cluster.unwrap_or("CLUSTER");
    let secret = cluster.and_then(|cluster| secret_of(mesh, cluster));
    let secret = secret.unwrap_or_else(|| "the controller's own account".to_owned());
    let text = match reason {
        "MemberMissing" => format!("correct {secret}; kubectl -n {namespace} describe clustermesh {name}"),
        // For 401 and 403 the message has the remedy. The texts here add the names of the Secret, the manifest and the member.
        "MemberStale" | "MemberUnreachable" if message.contains("(401)") => format!("it is {secret}"),
        "MemberStale" | "MemberUnreachable" if message.contains("(403)") => {
            format!("apply deploy/member-account.yaml in {member}")
        }
        "MemberStale" | "MemberUnreachable" => {
            format!("does {member} run? Its address is in {secret}")
        }
        "PeerCRDMissing" => format!("apply crds/peers.kilo.squat.ai.yaml and the agent's manifests in {member}"),
        "NoNodes" => format!("clustermeshctl explain node {member}/NODE; does wg-agent run in {member}?"),
        "Converging" => format!("wait; if the number does not fall, look at the API server of {member}"),
        "WriteFailed" if message.contains("403") => format!("apply deploy/member-account.yaml in {member}"),
        "NetworksOverlap" | "CIDROverlap" => {
            format!("give one of the clusters other allowedNetworks: kubectl -n {namespace} edit clustermesh {name}")
        }
        "ObjectsDiffer" => "clustermeshctl plan lists them; the controller writes them, if it runs and may".to_owned(),
        "NoGateway" => format!("apply deploy/gateway.yaml in {member}, or look why its gateway pods do not start"),
        "SpecInvalid" => format!("correct the field: kubectl -n {namespace} edit clustermesh {name}"),
        "Paused" => {
            format!("remove spec.paused, or the annotation cluster.x-k8s.io/paused, of clustermesh {namespace}/{name}")
        }
        "ObjectsLeft" => format!(
            "make it reachable, or leave them: kubectl -n {namespace} annotate clustermesh {name} {FORCE_CLEANUP}={member}"
        ),
        "NodesSkipped" => format!("clustermeshctl explain node {member}/{}", skipped_node(mesh, member)),
        "QuarantinePending" | "RevokePending" => {
            format!("make the API server of {member} reachable for the controller")
        }
        "Quarantined" => {
            format!("to open it again, set quarantine: false: kubectl -n {namespace} edit clustermesh {name}")
        }
        _ => return None,
    };
    Some(text)
}

/// Names the Secret in the entry of a member; `None` for the hub's own entry.
fn secret_of(mesh: &ClusterMesh, cluster: &str) -> Option<String> {
    let entry = mesh
        .spec
        .clusters
        .iter()
        .find(|entry| entry.name == cluster && !entry.local)?;
    let secret = entry.kubeconfig_secret_ref.as_ref()?;
    Some(format!(
        "Secret {}/{}",
        mesh.namespace().unwrap_or_default(),
        secret.name
    ))
}

/// The first skipped node of a member.
fn skipped_node<'m>(mesh: &'m ClusterMesh, cluster: &str) -> &'m str {
    let rows = mesh.status.iter().flat_map(|status| &status.clusters);
    let mut skipped = rows.filter(|row| row.name == cluster).flat_map(|row| &row.skipped);
    skipped.next().map_or("NODE", |skipped| &skipped.node)
}
