//! Defines the status of a `ClusterMesh`, which the controller writes.
#![allow(
    unreachable_pub,
    reason = "KubeSchema writes a `pub` copy of each struct into a private scope"
)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{KubeconfigSecretRef, ServiceRef};
use crate::schema;

/// The observed state of a ClusterMesh. Only the controller writes it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClusterMeshStatus {
    /// `metadata.generation` of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Ready, NetworksOverlap, Degraded, PolicyEnforced, EgressResolved, VersionsCompatible, Paused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// What is wrong and since when, at most 256 problems: first those for which `Ready` is False, then those of PolicyEnforced,
    /// NetworksOverlap, Degraded and EgressResolved. `clustermeshctl status` shows them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub problems: Vec<MeshProblem>,
    /// Number of members with a reachable API server and number of all members, such as `2/3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub members: Option<String>,
    /// Number of nodes that are registered in other members, all entries together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registered_peers: Option<i64>,
    /// One row for each entry of spec.clusters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = schema::MAX_CLUSTERS))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub clusters: Vec<ClusterStatus>,
    /// Clusters that spec.clusters no longer lists and that may still have objects of this mesh. A row is removed together with these
    /// objects, or when the annotation kilo-clustermesh.io/force-cleanup lists the cluster.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = schema::MAX_CLUSTERS))]
    pub removed_clusters: Vec<RemovedCluster>,
    /// Pairs of members between which some nodes report tunnels that do not work.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub broken_links: Vec<BrokenLink>,
    /// The state of each mirrored Service.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    pub egress: Vec<EgressStatus>,
}

/// One cause for which a condition is not in its good state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MeshProblem {
    /// Type of the condition.
    #[schemars(length(min = 1, max = 64))]
    pub condition: String,
    /// The cause as one word. A condition has the reason of its first cause.
    #[schemars(length(max = 64))]
    pub reason: String,
    /// The member that has the problem. None = the whole mesh.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub cluster: Option<String>,
    /// If tunnels are down: the member to which these tunnels lead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub to: Option<String>,
    /// When the controller first reported a problem with this condition, reason, `cluster` and `to`. It stays when the message changes.
    pub since: Time,
    /// What is wrong and what to do.
    #[serde(default)]
    #[schemars(length(max = 1024))]
    pub message: String,
}

/// The state of one member.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClusterStatus {
    /// Name of the entry in spec.clusters.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// The Secret with the member's kubeconfig; none for the cluster that stores this object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubeconfig_secret_ref: Option<KubeconfigSecretRef>,
    /// UID of the member's kube-system namespace, as its API server reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub uid: Option<String>,
    /// The networks that are assigned to this entry. Later claims of other entries on them are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::accepted_networks")]
    pub accepted_networks: Vec<String>,
    /// The networks of this member that no single node owns, and their anchor nodes. If the entry has no `anchoredNetworks`, these are the
    /// allowedNetworks in which no Node had an address at first, and they stay anchored: a Node that claims a part of one later is left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = schema::MAX_NETWORKS))]
    pub anchored: Vec<AnchoredNetwork>,
    /// Number of nodes of this member that are registered in other members.
    #[serde(default)]
    pub registered_peers: i64,
    /// Number of gateways of this member for which sandboxes have a Peer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateways: Option<i64>,
    /// Number of nodes of this member that are left out.
    #[serde(default)]
    pub skipped_nodes: i64,
    /// The first 20 nodes that are left out, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub skipped: Vec<SkippedNode>,
    /// The first 20 podCIDRs of registered nodes that are not connected, because they lie outside allowedNetworks or are anchored.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub uncovered: Vec<UncoveredNetwork>,
    /// Whether its API server is reachable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reachable: Option<bool>,
    /// When the token or client certificate in its kubeconfig expires. Missing if neither contains an expiry date.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials_expire: Option<Time>,
    /// The last time at which an object of this member differed from the plan. While an object differs, the controller keeps setting this to the current time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_sync: Option<Time>,
    /// Version of its API server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub kubernetes_version: Option<String>,
    /// Numbers of its nodes, by the agents that run on them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agents: Option<AgentCounts>,
}

/// A cluster that the spec no longer lists.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RemovedCluster {
    /// The name of its entry.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// The Secret with its kubeconfig; none for the cluster that stores this object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubeconfig_secret_ref: Option<KubeconfigSecretRef>,
    /// UID of its kube-system namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub uid: Option<String>,
    /// When the controller detected that the entry was removed.
    pub since: Time,
    /// Why its objects still exist and what to do.
    #[serde(default)]
    #[schemars(length(max = 1024))]
    pub message: String,
}

/// A node that is left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SkippedNode {
    /// Name of the Node.
    #[schemars(length(max = 253))]
    pub node: String,
    /// Why the node is left out, as one word.
    #[schemars(length(max = 64))]
    pub reason: String,
    /// What is wrong and what to do.
    #[serde(default)]
    #[schemars(length(max = 1024))]
    pub message: String,
}

/// A network that is reached through anchor nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AnchoredNetwork {
    /// One of `anchoredNetworks`; if the entry has none, one of `allowedNetworks`.
    #[schemars(length(max = 64))]
    pub network: String,
    /// The nodes whose Peers in the other members contain the network. If `anchors` is more than 1, each Peer contains a part. Empty =
    /// the network cannot be reached now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 253)))]
    pub nodes: Vec<String>,
}

/// A podCIDR of a registered node that is not connected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UncoveredNetwork {
    /// Name of the Node.
    #[schemars(length(max = 253))]
    pub node: String,
    /// The podCIDR, as in spec.podCIDRs of the Node.
    #[schemars(length(max = 64))]
    pub network: String,
}

/// Numbers of the nodes of a member, by the agents that run on them: wg-agent, `kg`, or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentCounts {
    /// All nodes.
    #[serde(default)]
    pub total: i64,
    /// Nodes with wg-agent in full mode.
    #[serde(default)]
    pub full: i64,
    /// Nodes with Kilo, and wg-agent in policy mode (only the firewall).
    #[serde(default)]
    pub policy: i64,
    /// Nodes with only Kilo.
    #[serde(default)]
    pub kilo: i64,
    /// Nodes with a wg-agent of another version than the controller.
    #[serde(default)]
    pub outdated: i64,
}

/// Two members between which tunnels are down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BrokenLink {
    /// The member whose nodes report the broken tunnels.
    #[schemars(length(max = 63))]
    pub from: String,
    /// The member to which the tunnels lead.
    #[schemars(length(max = 63))]
    pub to: String,
    /// Number of working tunnels to `to`, on those nodes of `from` that report a broken tunnel.
    pub up: i64,
    /// Number of all tunnels to `to`, on the same nodes as for `up`.
    pub total: i64,
}

/// The state of a mirrored Service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EgressStatus {
    /// The member that contains the mirrored Service.
    #[serde(default)]
    #[schemars(length(max = 63))]
    pub cluster: String,
    /// The Service in the other member.
    pub service: ServiceRef,
    /// Whether the Service exists, is granted, and has at least one endpoint that can be reached.
    #[serde(default)]
    pub ready: bool,
    /// Number of endpoints of the mirrored Service.
    #[serde(default)]
    pub endpoints: i64,
    /// What is wrong and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub message: Option<String>,
}
