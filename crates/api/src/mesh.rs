//! Defines `ClusterMesh`, the object that users write, with the validation rules that the API server checks.
#![allow(
    unreachable_pub,
    reason = "KubeSchema writes a `pub` copy of each struct into a private scope"
)]

use clustermesh_core::mesh::Protocol;
use k8s_openapi::apimachinery::pkg::{apis::meta::v1::LabelSelector, util::intstr::IntOrString};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

mod status;

pub use status::{
    AgentCounts, AnchoredNetwork, BrokenLink, ClusterMeshStatus, ClusterStatus, EgressStatus, MeshProblem,
    RemovedCluster, SkippedNode, UncoveredNetwork,
};

/// The desired connections between clusters.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "kilo.squat.ai",
    version = "v1alpha1",
    kind = "ClusterMesh",
    plural = "clustermeshes",
    shortname = "cmesh",
    namespaced,
    status = "ClusterMeshStatus",
    derive = "PartialEq",
    validation = Rule::new("self.metadata.name.size() <= 63").message("metadata.name must have at most 63 characters: it becomes the value of a label on every Peer"),
    doc = "ClusterMesh connects the pods and Services of several clusters over WireGuard, node to node. Needs Kubernetes 1.31 or newer where it is stored (CEL functions for networks).",
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "Whether every member is connected as the spec requires"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        description = "The reason of the condition Ready"
    ),
    printcolumn(
        name = "Members",
        type_ = "string",
        json_path = ".status.members",
        description = "Members with a reachable API server, of all members"
    ),
    printcolumn(
        name = "Peers",
        type_ = "integer",
        json_path = ".status.registeredPeers",
        description = "Nodes registered in other members, all entries together"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].message",
        description = "What is wrong and what to do",
        priority = 1
    )
)]
#[x_kube(
    validation = Rule::new("self.clusters.filter(c, has(c.local) && c.local).size() <= 1")
        .message("more than one entry has `local: true`: only the cluster this object lives in may")
        .field_path(".clusters"),
    validation = Rule::new(
        "[self.clusters.map(c, c.name)].all(names, self.clusters.all(c, !has(c.egress) || c.egress.all(e, e.service.cluster in names)))"
    )
        .message("egress names a cluster that is not an entry of this mesh: `service.cluster` must be the `name` of one of spec.clusters")
        .field_path(".clusters"),
)]
#[serde(rename_all = "camelCase")]
pub struct ClusterMeshSpec {
    /// Write nothing and delete nothing for this mesh while true. The annotation `cluster.x-k8s.io/paused` does the same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// The member clusters. The cluster that stores this object may be one of them. If two entries claim a
    /// network that none had before, the entry with `local: true` wins, otherwise the earlier one.
    #[schemars(length(min = 2, max = schema::MAX_CLUSTERS))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub clusters: Vec<ClusterEntry>,
}

/// One member cluster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[x_kube(
    validation = Rule::new("(has(self.local) && self.local) || has(self.kubeconfigSecretRef)")
        .message("kubeconfigSecretRef is missing: name the Secret in this namespace that holds the cluster's kubeconfig (only the entry with `local: true` needs none)")
        .field_path(".kubeconfigSecretRef"),
    validation = Rule::new(
        "!has(self.anchoredNetworks) || self.anchoredNetworks.all(a, !isCIDR(a) || self.allowedNetworks.exists(n, isCIDR(n) && cidr(n).containsCIDR(a)))"
    )
        .message("anchoredNetworks must lie inside allowedNetworks: add the network to allowedNetworks or take it out of anchoredNetworks")
        .field_path(".anchoredNetworks"),
    validation = Rule::new("!has(self.egress) || self.egress.all(e, e.service.cluster != self.name)")
        .message("egress names this very cluster: `service.cluster` must be another entry, its own Services are reached without a mesh")
        .field_path(".egress"),
)]
#[serde(rename_all = "camelCase")]
pub struct ClusterEntry {
    /// A DNS-1123 label, unique in the mesh. Part of the names of the Peers written for this cluster.
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')")
        .message("must be a DNS-1123 label: lower-case letters, digits and '-', beginning and ending with a letter or a digit"))]
    pub name: String,
    /// Whether this entry is the cluster that stores this object. Without such an entry, the mesh connects only other clusters and
    /// writes nothing into this one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub local: bool,
    /// The Secret, in the namespace of this object, with the cluster's kubeconfig. Not used if `local` is true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubeconfig_secret_ref: Option<KubeconfigSecretRef>,
    /// What this member may reach. `cluster-meshed`: every other cluster-meshed member. `sandbox`: only the Services in `egress`.
    /// `standard`: nothing, and no other member reaches it.
    #[serde(default)]
    pub isolation_profile: IsolationProfile,
    /// The addresses of this member that other members see. `Routed`: its pod addresses. `Masqueraded`: only the WireGuard addresses of
    /// its nodes, so its pod networks may be the same as those of another member. A sandbox is always masqueraded.
    #[serde(default)]
    pub addressing: Addressing,
    /// All networks in which addresses of this member may lie: pod, WireGuard, Service and node networks in one list; of a masqueraded
    /// member only its WireGuard networks. They must be disjoint from the networks of every other member, and each no wider than /8 (IPv4)
    /// or /7 (IPv6).
    #[schemars(schema_with = "schema::networks_required")]
    pub allowed_networks: Vec<String>,
    /// Networks inside `allowedNetworks` that no node owns, such as the Service network. They are reached through an anchor node,
    /// which masquerades the packets. Default: the entries of `allowedNetworks` in which no Node has a podCIDR or an address. Once the
    /// status lists such a network as anchored, no Node can claim a part of it. Exception: a network of a single address that is the
    /// InternalIP of a Node. An empty list anchors nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::anchored_networks")]
    pub anchored_networks: Option<Vec<String>>,
    /// The number of nodes over which the anchored networks are spread.
    #[serde(default = "one")]
    #[schemars(schema_with = "schema::anchors")]
    pub anchors: u16,
    /// Whether pods have addresses from `spec.podCIDRs` of their Node. `PerNode`: they do. `Shared`: they do not (kube-ovn, Calico
    /// and Cilium pools); use `exports` and anchored networks then.
    #[serde(default)]
    pub pod_network: PodNetwork,
    /// Whether nodes of this member that are in different locations get tunnels to each other. `Ignored`: they do not; the cluster's own
    /// network connects all its nodes. `Connected`: they do. A node's location is its annotation `kilo.squat.ai/location`, else its
    /// label `topology.kubernetes.io/region`.
    #[serde(default)]
    pub locations: Locations,
    /// Pods whose addresses are published one by one, in the Peer of the node that runs them. Only used if `podNetwork` is `Shared`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub exports: Vec<Export>,
    /// The UDP port of WireGuard on nodes that do not publish their own.
    #[serde(default = "default_port")]
    #[schemars(schema_with = "schema::port")]
    pub wireguard_port: u16,
    /// Seconds between keepalive packets. The highest value of all entries applies to the Peers of all nodes of the mesh. 0 = keepalives
    /// only where NAT needs them.
    #[serde(default)]
    #[schemars(schema_with = "schema::seconds")]
    pub persistent_keepalive: u16,
    /// Networks of other members in which the WireGuard endpoints of this member's nodes may lie. (Nodes in KubeVirt, for example,
    /// have addresses of the cluster that hosts them.)
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::networks")]
    pub endpoint_networks: Vec<String>,
    /// Services of other members that are mirrored into this one. A sandbox reaches only these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub egress: Vec<Egress>,
    /// If true, every other member drops all packets from and to this one at once. Its objects are kept, except its Peers in members
    /// whose nodes enforce no PeerPolicies: these are deleted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub quarantine: bool,
}

/// The Secret that contains a kubeconfig.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KubeconfigSecretRef {
    /// Name of a Secret in the namespace of the ClusterMesh.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Key of the kubeconfig in the Secret. The default is the key that Cluster API uses.
    #[serde(default = "default_key")]
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
    /// Context of the kubeconfig. Default: its current context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub context: Option<String>,
}

/// The connections of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[schemars(inline)]
pub enum IsolationProfile {
    /// It reaches every other cluster-meshed member.
    #[default]
    ClusterMeshed,
    /// It reaches only the Services in `egress`.
    Sandbox,
    /// It reaches no member, and no member reaches it.
    Standard,
}

/// The addresses of a member that other members see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum Addressing {
    /// Its own pod addresses.
    #[default]
    Routed,
    /// Only the WireGuard addresses of its nodes.
    Masqueraded,
}

/// Whether nodes of a member have tunnels to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum Locations {
    /// They have none.
    #[default]
    Ignored,
    /// Nodes of different locations have tunnels to each other.
    Connected,
}

/// Whether pods have addresses from `spec.podCIDRs` of their Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum PodNetwork {
    /// Pods have addresses from the podCIDRs of their Node.
    #[default]
    PerNode,
    /// Pods have addresses from a pool of the whole cluster.
    Shared,
}

/// Pods of one namespace whose addresses are published one by one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Export {
    /// The namespace of the pods.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// Selects the pods. Empty = every pod of the namespace.
    #[serde(default)]
    pub pod_selector: LabelSelector,
}

/// A Service of another member that is mirrored here.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Egress {
    /// The Service in the other member.
    pub service: ServiceRef,
    /// Ports of the Service to mirror. Default: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub ports: Vec<ServicePort>,
    /// Namespace and name of the mirrored Service here. Default: those of the Service.
    #[serde(default, rename = "as", skip_serializing_if = "Option::is_none")]
    pub local: Option<LocalName>,
}

/// A Service of a named member.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServiceRef {
    /// Name of the entry of spec.clusters that has the Service.
    #[schemars(length(min = 1, max = 63))]
    pub cluster: String,
    /// Namespace of the Service in that member.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// Name of the Service in that member.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
}

/// A port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServicePort {
    /// Number or name of the Service's port.
    #[schemars(schema_with = "schema::port_ref")]
    pub port: IntOrString,
    /// Transport protocol.
    #[serde(default)]
    #[schemars(schema_with = "schema::protocol")]
    pub protocol: Protocol,
}

/// Namespace and name of a mirrored Service.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LocalName {
    /// Namespace here. Default: that of the Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub namespace: Option<String>,
    /// Name here. Default: that of the Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub name: Option<String>,
}

const fn one() -> u16 {
    1
}

/// `51820`, WireGuard's usual UDP port.
const fn default_port() -> u16 {
    51820
}

/// The key of the kubeconfig in Secrets of Cluster API.
fn default_key() -> String {
    "value".to_owned()
}
