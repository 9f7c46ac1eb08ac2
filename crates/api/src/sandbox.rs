//! `SandboxAccess`: what one sandbox may reach in the cluster the object is in; and `SandboxGateway`: what a gateway there
//! says of itself. The controller writes the first and reads the second, gateways (`wg-agent --mode=gateway`) the reverse.
//! Nothing else reads either: nodes know no sandbox.
#![allow(
    unreachable_pub,
    reason = "KubeSchema writes a `pub` copy of each struct into a private scope"
)]
#![allow(clippy::duplicated_attributes, reason = "two printer columns have one type")]

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{mesh::Protocol, schema};

/// What one sandbox may reach in this cluster: nothing but `grants`.
#[derive(CustomResource, Debug, Clone, PartialEq, Default, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "kilo.squat.ai",
    version = "v1alpha1",
    kind = "SandboxAccess",
    plural = "sandboxaccesses",
    derive = "PartialEq",
    doc = "SandboxAccess says what one sandbox member of a ClusterMesh may reach in this cluster. Written by the clustermesh controller and enforced by the gateways here (wg-agent --mode=gateway).",
    printcolumn(
        name = "Sandbox",
        type_ = "string",
        json_path = ".spec.sandbox",
        description = "The member that it describes"
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
    /// Name of the sandbox member. Gateways that serve only some sandboxes choose by it.
    #[schemars(length(min = 1, max = 63))]
    pub sandbox: String,
    /// What tells this sandbox from others of the same hub: SandboxAccesses of several meshes that have the same one speak of one
    /// sandbox. Default: the object's name.
    #[serde(default, rename = "sandboxID", skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub sandbox_id: String,
    /// Networks of the sandbox: the WireGuard addresses of its nodes lie in them.
    #[schemars(schema_with = "schema::networks_required")]
    pub networks: Vec<String>,
    /// The sandbox's nodes. Empty = none may connect.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = schema::MAX_SANDBOX_NODES))]
    pub nodes: Vec<SandboxNode>,
    /// What it may reach. Empty = nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = schema::MAX_SANDBOX_GRANTS))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["gatewayPort".into(), "protocol".into()]))]
    pub grants: Vec<SandboxGrant>,
    /// New connections a second, of all the sandbox's nodes together at each gateway; twice as many at once. Default: what the
    /// gateway was started with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::rate")]
    pub new_connections_per_second: Option<u32>,
}

/// One node of a sandbox.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxNode {
    /// Name of the Node, for people. A long one is cut and ends in a hash.
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
        .message("a gateway translates TCP and UDP alone: SCTP cannot be granted to a sandbox")
        .field_path(".protocol")
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxGrant {
    /// The Service.
    pub service: LocalService,
    /// Name of the Service's port, as its EndpointSlices have it; empty where it has one port without a name.
    #[serde(default)]
    #[schemars(length(max = 63))]
    pub port: String,
    /// Transport protocol.
    #[serde(default)]
    pub protocol: Protocol,
    /// Where the sandbox reaches it: a port of the gateway's WireGuard address, which no other grant here has.
    #[schemars(schema_with = "schema::port")]
    pub gateway_port: u16,
}

/// A gateway through which sandboxes enter this cluster. Made by whoever installs the gateway, one for each of its pods, by the
/// pod's name; the pod fills in the status.
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
        description = "Where sandboxes reach it inside the tunnel"
    ),
    printcolumn(
        name = "Endpoints",
        type_ = "string",
        json_path = ".status.endpoints",
        description = "Where sandboxes dial it, best first"
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
    /// Further addresses at which sandboxes dial this gateway, best first, as `203.0.113.7:31820`: of a load balancer, of a
    /// router that forwards the port.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::sockets")]
    pub endpoints: Vec<String>,
    /// UDP port at the addresses of the node that runs the pod: its hostPort, or the NodePort of a Service that leads to this
    /// pod alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::port")]
    pub node_port: Option<u16>,
}

/// What a gateway says of itself.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxGatewayStatus {
    /// Its WireGuard public key: made anew with each pod, kept while only the container restarts.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 44))]
    pub public_key: String,
    /// Its WireGuard addresses.
    #[serde(default, rename = "wireguardIPs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::texts")]
    pub wireguard_ips: Vec<String>,
    /// Where it is dialled, best first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::texts")]
    pub endpoints: Vec<String>,
    /// Sandboxes that it serves; empty = every one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::texts")]
    pub serves: Vec<String>,
    /// UID of the pod that says this.
    #[serde(default, rename = "podUID", skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub pod_uid: String,
    /// Of wg-agent.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub version: String,
    /// `kernel` or `userspace`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub backend: String,
    /// Sandboxes that are served.
    #[serde(default)]
    pub sandboxes: u32,
    /// Grants that are served.
    #[serde(default)]
    pub grants: u32,
    /// Which state of each SandboxAccess is in force.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    pub applied: Vec<AppliedAccess>,
    /// What is left out, the first 20.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub refused: Vec<RefusedAccess>,
    /// What is wrong and what to do; empty where nothing is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 4096))]
    pub message: String,
}

/// A SandboxAccess that is in force.
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
    /// Which part: `spec.grants[0]`.
    #[schemars(length(max = 63))]
    pub field: String,
    /// Which grant, by protocol and port at the gateway: `TCP/20001`. Empty where it is another part.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub grant: String,
    /// One word.
    #[schemars(length(max = 63))]
    pub reason: String,
    /// What is wrong and what to do.
    #[schemars(length(max = 1024))]
    pub message: String,
}
