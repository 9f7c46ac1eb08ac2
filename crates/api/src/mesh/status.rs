//! The status of a `ClusterMesh`: what the controller writes of it.
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

/// What the controller saw and did. Written by it alone.
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
    /// Members whose API server answers, of all entries, as `2/3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub members: Option<String>,
    /// Nodes registered in other members, all entries together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registered_peers: Option<i64>,
    /// One row for each entry of spec.clusters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = schema::MAX_CLUSTERS))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub clusters: Vec<ClusterStatus>,
    /// Clusters that spec.clusters no longer names and where objects of this mesh may still be. A row goes when they are removed,
    /// or when the annotation kilo-clustermesh.io/force-cleanup names it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = schema::MAX_CLUSTERS))]
    pub removed_clusters: Vec<RemovedCluster>,
    /// Pairs of members between which some node pairs have no working tunnel, as their nodes say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub broken_links: Vec<BrokenLink>,
    /// How each imported Service stands.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    pub egress: Vec<EgressStatus>,
}

/// How one member stands.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClusterStatus {
    /// The entry of spec.clusters.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// The Secret with the member's kubeconfig; none for the cluster this object lives in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubeconfig_secret_ref: Option<KubeconfigSecretRef>,
    /// UID of the member's kube-system namespace, as it says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub uid: Option<String>,
    /// The networks that this entry holds; a later claim of another entry on them is refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::accepted_networks")]
    pub accepted_networks: Vec<String>,
    /// The networks of this member that belong to no single node, and which nodes carry them. Where the entry has no
    /// `anchoredNetworks`, a network in this list stays anchored: a Node that claims a part of it later is left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = schema::MAX_NETWORKS))]
    pub anchored: Vec<AnchoredNetwork>,
    /// Nodes of this member that are registered in the others.
    #[serde(default)]
    pub registered_peers: i64,
    /// Gateways of this member that sandboxes have a Peer of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateways: Option<i64>,
    /// Nodes of this member that are left out.
    #[serde(default)]
    pub skipped_nodes: i64,
    /// The first 20 nodes that are left out, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub skipped: Vec<SkippedNode>,
    /// The first 20 podCIDRs of registered nodes that are not meshed, since they lie outside allowedNetworks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub uncovered: Vec<UncoveredNetwork>,
    /// Its API server answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reachable: Option<bool>,
    /// When everything this member should have was last known to be there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_sync: Option<Time>,
    /// Version of its API server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub kubernetes_version: Option<String>,
    /// What serves WireGuard on its nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agents: Option<AgentCounts>,
}

/// A cluster that the spec no longer names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RemovedCluster {
    /// The name of its entry.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// The Secret with its kubeconfig; none for the cluster this object lives in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubeconfig_secret_ref: Option<KubeconfigSecretRef>,
    /// UID of its kube-system namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub uid: Option<String>,
    /// When the controller found the entry removed.
    pub since: Time,
    /// Why objects are still there and what to do.
    #[serde(default)]
    #[schemars(length(max = 1024))]
    pub message: String,
}

/// A node that is left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SkippedNode {
    /// Its name.
    #[schemars(length(max = 253))]
    pub node: String,
    /// One word.
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
    /// One of `anchoredNetworks`; without these, one of `allowedNetworks`.
    #[schemars(length(max = 64))]
    pub network: String,
    /// The nodes whose Peers in the other members carry it; where `anchors` is more than 1, each carries a part. Empty = it is
    /// not reached now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 253)))]
    pub nodes: Vec<String>,
}

/// A network of a registered node that is not meshed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UncoveredNetwork {
    /// The node.
    #[schemars(length(max = 253))]
    pub node: String,
    /// As in its spec.podCIDRs.
    #[schemars(length(max = 64))]
    pub network: String,
}

/// Nodes of a member by what serves WireGuard on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentCounts {
    /// All nodes.
    #[serde(default)]
    pub total: i64,
    /// wg-agent with a device of its own.
    #[serde(default)]
    pub full: i64,
    /// wg-agent beside Kilo, firewall only.
    #[serde(default)]
    pub policy: i64,
    /// Kilo alone.
    #[serde(default)]
    pub kilo: i64,
    /// wg-agent of another version than the controller's.
    #[serde(default)]
    pub outdated: i64,
}

/// Two members between which tunnels are down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BrokenLink {
    /// The member whose nodes say so.
    #[schemars(length(max = 63))]
    pub from: String,
    /// The member at the other end.
    #[schemars(length(max = 63))]
    pub to: String,
    /// Tunnels that are up, on the nodes of `from` that have one down.
    pub up: i64,
    /// All tunnels to `to` on those nodes.
    pub total: i64,
}

/// How an imported Service stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EgressStatus {
    /// The member that imports it.
    #[serde(default)]
    #[schemars(length(max = 63))]
    pub cluster: String,
    /// The Service, where it is.
    pub service: ServiceRef,
    /// It is there, is granted, and has at least one endpoint that can be reached.
    #[serde(default)]
    pub ready: bool,
    /// Endpoints that are offered.
    #[serde(default)]
    pub endpoints: i64,
    /// What is wrong and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub message: Option<String>,
}
