//! A parsed `ClusterMesh`: the entries and grants that users wrote, and what earlier plans recorded in the status.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Whether one of the two networks contains the other.
pub(crate) fn overlap(a: IpNet, b: IpNet) -> bool {
    a.contains(&b) || b.contains(&a)
}

/// The shortest prefix lengths that a member's networks may have, as text for messages.
pub const WIDEST: &str = "/8 (IPv4) or /7 (IPv6)";

/// Whether a network is wider than [`WIDEST`]. The largest private networks are 10.0.0.0/8 and fc00::/7; anything wider
/// contains addresses outside every cluster, and two such networks can replace a default route (0.0.0.0/1 and 128.0.0.0/1).
#[must_use]
pub fn is_too_wide(network: &IpNet) -> bool {
    let shortest = match network {
        IpNet::V4(_) => 8,
        IpNet::V6(_) => 7,
    };
    network.prefix_len() < shortest
}

/// Namespace and name of a `ClusterMesh`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MeshId {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for MeshId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// One `ClusterMesh`, parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mesh {
    /// Namespace and name of the object.
    pub id: MeshId,
    /// `metadata.creationTimestamp`, Unix seconds: the older mesh wins a network that was not accepted for any mesh yet.
    pub created: i64,
    /// `spec.paused` or the `cluster.x-k8s.io/paused` annotation is set, or `clusterctl move` has created the mesh on another
    /// hub and deletes it here: write nothing, delete nothing.
    pub paused: bool,
    /// `metadata.deletionTimestamp` is set: nothing is planned for the mesh, so everything that it owns is deleted. A paused
    /// mesh keeps its objects.
    pub deleting: bool,
    /// `kilo-clustermesh.io/adopt-hub`: objects that have this value as hub label and the labels of this mesh are taken over.
    pub adopt_hub: Option<String>,
    /// `spec.clusters`, in the order they were written.
    pub clusters: Vec<Cluster>,
    /// `status.clusters[].acceptedNetworks`: the networks that an earlier plan accepted for each entry, by entry name.
    pub accepted: BTreeMap<String, Vec<IpNet>>,
}

/// Identifies the cluster of an entry (design rule 10). Neither an entry's name nor a UID
/// of an object in the cluster identifies it: a hostile API server can claim any UID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClusterIdentity {
    /// The cluster that the controller runs in (`local: true`).
    Local,
    /// The cluster that the kubeconfig in a Secret names.
    Secret {
        /// Namespace of the Secret, always the mesh's own.
        namespace: String,
        /// Name of the Secret.
        name: String,
        /// Key inside the Secret.
        key: String,
        /// Context inside the kubeconfig; `None` = its current context.
        context: Option<String>,
    },
}

impl ClusterIdentity {
    /// Whether both identify the same cluster: both are local, or both use the same Secret and context. The key inside the
    /// Secret is ignored, because Cluster API stores one cluster's kubeconfig under several keys.
    #[must_use]
    pub fn same_cluster(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Local, Self::Local) => true,
            (
                Self::Secret {
                    namespace,
                    name,
                    context,
                    ..
                },
                Self::Secret {
                    namespace: other_namespace,
                    name: other_name,
                    context: other_context,
                    ..
                },
            ) => namespace == other_namespace && name == other_name && context == other_context,
            _ => false,
        }
    }
}

impl fmt::Display for ClusterIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("the local cluster"),
            Self::Secret {
                namespace,
                name,
                key,
                context: None,
            } => write!(f, "Secret {namespace}/{name} key {key}"),
            Self::Secret {
                namespace,
                name,
                key,
                context: Some(context),
            } => {
                write!(f, "Secret {namespace}/{name} key {key} context {context}")
            }
        }
    }
}

/// How much a member may reach (`isolationProfile`), from the least to the most restrictive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Profile {
    /// Broad connectivity with every other `cluster-meshed` member.
    ClusterMeshed,
    /// Untrusted code: reaches only the Services that its entry names in `egress`.
    Sandbox,
    /// Listed, but not connected to any member.
    Standard,
}

impl Profile {
    /// The value in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ClusterMeshed => "cluster-meshed",
            Self::Sandbox => "sandbox",
            Self::Standard => "standard",
        }
    }
}

/// Which addresses of a member appear as sources in the mesh (`addressing`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Addressing {
    /// Its pods keep their own addresses.
    Routed,
    /// Only the WireGuard addresses of its nodes.
    Masqueraded,
}

/// Whether `Node.spec.podCIDRs` of a member can be used (`podNetwork`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PodNetwork {
    /// Pods of a node have addresses from its podCIDRs.
    PerNode,
    /// podCIDRs do not contain the pods' addresses (kube-ovn, Calico or Cilium pools). Pods are reached through `exports` and
    /// anchors.
    Shared,
}

/// Whether the nodes of a member have tunnels to each other (`locations`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Locations {
    /// They have none: the cluster's own network connects all its nodes.
    Ignored,
    /// Nodes of different locations have tunnels to each other.
    Connected,
}

/// One entry of `spec.clusters`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cluster {
    /// DNS-1123 label, unique in its mesh.
    pub name: String,
    /// The identity of the cluster.
    pub identity: ClusterIdentity,
    /// How much the member may reach.
    pub profile: Profile,
    /// Which addresses of the member appear as sources in the mesh. A sandbox is always masqueraded; see [`Cluster::effective_addressing`].
    pub addressing: Addressing,
    /// `allowedNetworks`, without host bits. The planner replaces them by the accepted networks (docs/glossary.md). Peers of this member
    /// in other members contain only addresses in the accepted networks.
    pub allowed: Vec<IpNet>,
    /// `anchoredNetworks`; `None` = each network of `allowed` that contains no Node's prefix, or that is in `previous_anchors`.
    pub anchored: Option<Vec<IpNet>>,
    /// `status.clusters[].anchored`: the networks that an earlier plan anchored, with the nodes whose Peers contained them.
    /// Without `anchored`, a network of `allowed` that is listed here stays anchored, even if a Node claims a part of it.
    pub previous_anchors: BTreeMap<IpNet, BTreeSet<String>>,
    /// The number of nodes over which the anchored networks are spread, at least 1.
    pub anchors: u16,
    /// Whether podCIDRs contain the pods' addresses.
    pub pod_network: PodNetwork,
    /// Whether nodes of different locations have tunnels to each other.
    pub locations: Locations,
    /// Pods whose addresses (/32 or /128) are in the allowed IPs of the node that runs them (`Shared` only).
    pub exports: Vec<Export>,
    /// UDP port of Nodes that publish no endpoint.
    pub wireguard_port: u16,
    /// Keepalive interval in seconds. The highest of the mesh's entries applies to all; if it is 0, keepalives are sent only where a NAT
    /// requires them.
    pub persistent_keepalive: u16,
    /// Networks of other members inside which this member's endpoints may lie, because its nodes are virtual machines (KubeVirt) there.
    pub endpoint_networks: Vec<IpNet>,
    /// Services of other members that are mirrored into this one.
    pub egress: Vec<Grant>,
    /// Blocks all traffic from and to this member. Its objects are kept, except its Peers in members that do not enforce PeerPolicies.
    pub quarantine: bool,
    /// The namespace of a confined mesh (docs/glossary.md), set on its local entry. Of the hub's Services, the mesh may grant only those
    /// in this namespace, and those that allow it ([`crate::observe::Service::allowed_from`]). `None` = any Service.
    pub confined_to: Option<String>,
    /// The largest number of Nodes that are used; newer ones are skipped.
    pub max_nodes: usize,
}

impl Cluster {
    /// The addressing that applies: a sandbox is masqueraded even if its entry has another value.
    #[must_use]
    pub fn effective_addressing(&self) -> Addressing {
        if self.profile == Profile::Sandbox {
            Addressing::Masqueraded
        } else {
            self.addressing
        }
    }

    /// Whether `net` lies wholly inside one of the entry's allowedNetworks.
    #[must_use]
    pub fn allows(&self, net: IpNet) -> bool {
        self.allowed.iter().any(|allowed| allowed.contains(&net))
    }
}

/// Pods of a `Shared` network whose addresses are published one by one: one namespace, selected by labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Export {
    /// The pods' namespace.
    pub namespace: String,
    /// `podSelector.matchLabels` and `matchExpressions`: all must match. Empty = every pod of the namespace.
    pub selector: Vec<Requirement>,
}

/// One requirement of a label selector (Kubernetes `LabelSelectorRequirement`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Requirement {
    /// The label has one of these values.
    In(String, Vec<String>),
    /// The label is absent or has none of these values.
    NotIn(String, Vec<String>),
    /// The label exists.
    Exists(String),
    /// The label does not exist.
    DoesNotExist(String),
}

impl Export {
    /// Whether a pod in this namespace with these labels is selected.
    #[must_use]
    pub fn selects(&self, namespace: &str, labels: &BTreeMap<String, String>) -> bool {
        namespace == self.namespace
            && self.selector.iter().all(|requirement| match requirement {
                Requirement::In(key, values) => labels.get(key).is_some_and(|v| values.contains(v)),
                Requirement::NotIn(key, values) => labels.get(key).is_none_or(|v| !values.contains(v)),
                Requirement::Exists(key) => labels.contains_key(key),
                Requirement::DoesNotExist(key) => !labels.contains_key(key),
            })
    }
}

/// One entry of `egress`: a Service of another member that is mirrored into this one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// The member that has the Service, by its entry's name.
    pub cluster: String,
    /// The Service in that member.
    pub service: ObjectName,
    /// The granted ports; empty = all ports of the Service.
    pub ports: Vec<GrantPort>,
    /// Namespace and name of the mirrored Service in this member.
    pub local: ObjectName,
}

/// Namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Transport protocol of a port, as Kubernetes spells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Protocol {
    /// TCP, the default in Kubernetes.
    #[default]
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Protocol {
    /// The value in Kubernetes.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }

    /// The name in nft(8) and `/etc/protocols`.
    #[must_use]
    pub const fn lowercase(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }
}

/// One granted port: by number or by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantPort {
    /// Number or name of the Service's port.
    pub port: PortRef,
    /// Protocol; TCP by default.
    pub protocol: Protocol,
}

/// A port of a Service, by number or by name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum PortRef {
    /// `port: 5432`.
    Number(u16),
    /// `port: postgres`.
    Name(String),
}
