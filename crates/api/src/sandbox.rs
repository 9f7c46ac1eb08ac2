//! Defines `SandboxAccess`: the Services that one sandbox may reach in the cluster that contains the object, and `SandboxGateway`: a
//! gateway of that cluster and its status.
//!
//! The controller writes SandboxAccesses and reads the status of SandboxGateways. Gateways (`wg-agent --mode=gateway`) read
//! SandboxAccesses and write that status.
#![allow(
    unreachable_pub,
    reason = "KubeSchema writes a `pub` copy of each struct into a private scope"
)]
#![allow(clippy::duplicated_attributes, reason = "two printer columns have one type")]

use clustermesh_core::mesh::Protocol;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

/// What one sandbox may reach in this cluster: only `grants`.
#[derive(CustomResource, Debug, Clone, PartialEq, Default, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "kilo.squat.ai",
    version = "v1alpha1",
    kind = "SandboxAccess",
    plural = "sandboxaccesses",
    derive = "PartialEq",
    doc = "SandboxAccess lists what one sandbox member of a ClusterMesh may reach in this cluster. Written by the clustermesh controller and enforced by the gateways here (wg-agent --mode=gateway).",
    printcolumn(
        name = "Sandbox",
        type_ = "string",
        json_path = ".spec.sandbox",
        description = "The sandbox member"
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
pub struct SandboxAccessSpec {
    /// Name of the sandbox member. Gateways that serve only some sandboxes select them by this name.
    #[schemars(length(min = 1, max = 63))]
    pub sandbox: String,
    /// Identifies the sandbox within the hub. SandboxAccesses of several meshes with the same ID describe one sandbox. Default: the
    /// object's name.
    #[serde(default, rename = "sandboxID", skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub sandbox_id: String,
    /// Networks of the sandbox. They contain the WireGuard addresses of its nodes.
    #[schemars(schema_with = "schema::networks_required")]
    pub networks: Vec<String>,
    /// The nodes of the sandbox. Empty = no node may connect.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = schema::MAX_SANDBOX_NODES))]
    pub nodes: Vec<SandboxNode>,
    /// The Services that the sandbox may reach. Empty = none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = schema::MAX_SANDBOX_GRANTS))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["gatewayPort".into(), "protocol".into()]))]
    pub grants: Vec<SandboxGrant>,
    /// Limit of new connections a second at each gateway, for all nodes of the sandbox together, with bursts of twice as many. Default:
    /// the limit of the gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::rate")]
    pub new_connections_per_second: Option<u32>,
}

/// One node of a sandbox.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxNode {
    /// Name of the Node, for display. A long name is truncated and ends in a hash.
    #[serde(default)]
    #[schemars(length(max = 63))]
    pub name: String,
    /// Its WireGuard public key, as `wg pubkey` prints it.
    #[schemars(length(min = 44, max = 44))]
    pub public_key: String,
    /// Its WireGuard addresses, at most one of each family.
    #[schemars(schema_with = "schema::wireguard_ips")]
    #[serde(rename = "wireguardIPs")]
    pub wireguard_ips: Vec<String>,
}

/// A Service of this cluster.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LocalService {
    /// Its namespace.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// Its name.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
}

/// One port of a Service that the sandbox may reach.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, KubeSchema)]
#[x_kube(
    validation = Rule::new("self.protocol != 'SCTP'")
        .message("a gateway translates only TCP and UDP: SCTP cannot be granted to a sandbox")
        .field_path(".protocol")
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxGrant {
    /// The Service.
    pub service: LocalService,
    /// Name of the Service's port, as in its EndpointSlices; empty if the Service has one port without a name.
    #[serde(default)]
    #[schemars(length(max = 63))]
    pub port: String,
    /// Transport protocol.
    #[serde(default)]
    #[schemars(schema_with = "schema::protocol")]
    pub protocol: Protocol,
    /// Port of the gateway's WireGuard address at which the sandbox reaches the Service. It is unique in this object for each protocol.
    #[schemars(schema_with = "schema::port")]
    pub gateway_port: u16,
}

/// Describes one gateway: a pod through which sandboxes enter this cluster. The object has the pod's name and is created when the gateway
/// is installed. The pod writes the status.
#[derive(CustomResource, Debug, Clone, PartialEq, Default, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "kilo.squat.ai",
    version = "v1alpha1",
    kind = "SandboxGateway",
    plural = "sandboxgateways",
    namespaced,
    status = "SandboxGatewayStatus",
    derive = "PartialEq",
    doc = "SandboxGateway is a pod through which sandboxes enter this cluster: wg-agent --mode=gateway in the pod of the same name publishes its key, address and endpoints here.",
    printcolumn(
        name = "Address",
        type_ = "string",
        json_path = ".status.wireguardIPs",
        description = "WireGuard addresses of the gateway"
    ),
    printcolumn(
        name = "Endpoints",
        type_ = "string",
        json_path = ".status.endpoints",
        description = "WireGuard endpoints of the gateway, in order of preference"
    ),
    printcolumn(name = "Sandboxes", type_ = "integer", json_path = ".status.sandboxes"),
    printcolumn(name = "Grants", type_ = "integer", json_path = ".status.grants"),
    printcolumn(name = "Version", type_ = "string", json_path = ".status.version", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.message",
        description = "What is wrong and what to do",
        priority = 1
    )
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxGatewaySpec {
    /// Additional endpoints of this gateway for sandboxes, in order of preference, such as `203.0.113.7:31820`: for example those of a
    /// load balancer, or of a router that forwards the port.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::sockets")]
    pub endpoints: Vec<String>,
    /// UDP port at the addresses of the node that runs the pod: its hostPort, or the NodePort of a Service that selects only this
    /// pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::port")]
    pub node_port: Option<u16>,
}

/// The status that a gateway publishes.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxGatewayStatus {
    /// Its WireGuard public key. A new pod makes a new key; a restarted container keeps it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 44))]
    pub public_key: String,
    /// Its WireGuard addresses.
    #[serde(default, rename = "wireguardIPs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::texts")]
    pub wireguard_ips: Vec<String>,
    /// Its WireGuard endpoints, in order of preference.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::texts")]
    pub endpoints: Vec<String>,
    /// Names of the sandboxes that it serves; empty = all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::texts")]
    pub serves: Vec<String>,
    /// UID of the pod that wrote this status.
    #[serde(default, rename = "podUID", skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub pod_uid: String,
    /// Version of wg-agent.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub version: String,
    /// `kernel` or `userspace`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub backend: String,
    /// Number of sandboxes that are served.
    #[serde(default)]
    pub sandboxes: u32,
    /// Number of grants that are served.
    #[serde(default)]
    pub grants: u32,
    /// The SandboxAccesses that the gateway applies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    pub applied: Vec<AppliedAccess>,
    /// The parts of SandboxAccesses that the gateway refuses, at most 20 of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub refused: Vec<RefusedAccess>,
    /// What is wrong and what to do; empty if nothing is wrong.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 4096))]
    pub message: String,
}

/// A SandboxAccess that the gateway applies.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AppliedAccess {
    /// Its name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Its UID.
    #[schemars(length(max = 63))]
    pub uid: String,
    /// Its `metadata.generation`.
    pub generation: i64,
}

/// A part of a SandboxAccess that is not served.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RefusedAccess {
    /// Name of the SandboxAccess.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Path of the part, such as `spec.grants[0]`.
    #[schemars(length(max = 63))]
    pub field: String,
    /// The grant, by protocol and gateway port: `TCP/20001`. Empty if the part is not a grant.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub grant: String,
    /// Why the part is not served, as one word.
    #[schemars(length(max = 63))]
    pub reason: String,
    /// What is wrong and what to do.
    #[schemars(length(max = 1024))]
    pub message: String,
}
