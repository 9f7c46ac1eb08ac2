//! Defines `PeerPolicy`: the destinations that one source member may reach in the cluster that contains the object. The controller
//! writes it, and every wg-agent of the cluster enforces it.
#![allow(
    unreachable_pub,
    reason = "KubeSchema writes a `pub` copy of each struct into a private scope"
)]
#![allow(clippy::duplicated_attributes, reason = "two printer columns have the same type")]

use clustermesh_core::mesh::Protocol;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    mesh::{IsolationProfile, ServicePort},
    schema,
};

/// What one source member may reach in this cluster. All other destinations are denied, and `deny` takes precedence over `allow`.
#[derive(CustomResource, Debug, Clone, PartialEq, Default, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "kilo.squat.ai",
    version = "v1alpha1",
    kind = "PeerPolicy",
    plural = "peerpolicies",
    derive = "PartialEq",
    doc = "PeerPolicy limits what one source member of a ClusterMesh may reach in this cluster. Written by the clustermesh controller and enforced by wg-agent on every node.",
    printcolumn(
        name = "Source",
        type_ = "string",
        json_path = ".spec.source",
        description = "The source member"
    ),
    printcolumn(
        name = "Networks",
        type_ = "string",
        json_path = ".spec.networks",
        description = "The member's networks",
        priority = 1
    ),
    printcolumn(
        name = "Mesh",
        type_ = "string",
        json_path = ".metadata.labels.kilo-clustermesh\\.io/mesh"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct PeerPolicySpec {
    /// Name of the source member, for display only.
    #[serde(default)]
    #[schemars(length(max = 63))]
    pub source: String,
    /// The source member's profile. With any profile except `cluster-meshed`, every packet from or to the member is dropped, even if
    /// `allow` contains its destination. The controller writes such a policy before it removes the member's Peers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub isolation_profile: IsolationProfile,
    /// Source addresses that packets of this member may have.
    #[schemars(schema_with = "schema::policy_networks")]
    pub sources: Vec<String>,
    /// Networks of this member. Packets to them must not use the default route while no Peer has them among its allowed IPs.
    #[serde(default)]
    #[schemars(schema_with = "schema::policy_networks")]
    pub networks: Vec<String>,
    /// Destinations that the member may reach.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub allow: Vec<Allow>,
    /// Exceptions to `allow`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub deny: Vec<Deny>,
    /// Ports that are closed on the addresses of the nodes of this cluster, such as those of the API server, the kubelet and etcd.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub infrastructure_ports: Vec<InfrastructurePort>,
    /// Networks of this cluster that no node owns. Packets to them arrive at an anchor node, which masquerades them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::networks")]
    pub anchored: Vec<String>,
}

/// Destinations that may be reached.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Allow {
    /// Networks.
    #[schemars(schema_with = "schema::rule_networks")]
    pub to: Vec<String>,
}

/// Destinations that may not be reached.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Deny {
    /// Networks.
    #[schemars(schema_with = "schema::rule_networks")]
    pub to: Vec<String>,
    /// The denied ports. Default: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub ports: Vec<ServicePort>,
}

/// A port that is closed on nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InfrastructurePort {
    /// Its number.
    #[schemars(schema_with = "schema::port")]
    pub port: u16,
    /// Transport protocol.
    #[serde(default)]
    #[schemars(schema_with = "schema::protocol")]
    pub protocol: Protocol,
}

fn is_default(profile: &IsolationProfile) -> bool {
    *profile == IsolationProfile::default()
}
