//! The observed state of each member cluster (Nodes, Peers, Services, ...), and how current it is.
//!
//! Nothing here parses text. A value that the API layer could not parse arrives as [`Claim::Invalid`], a spec as `Err`, with the reason.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{
    enforcement::Bypass,
    key::PublicKey,
    mesh::{ClusterIdentity, ObjectName, Protocol},
};

mod gateways;
mod rows;

pub use gateways::{AccessNode, AccessSpec, Gateway, GrantedPort};
pub use rows::{ChangedRow, Iter as RowsIter, Rows, Values as RowsValues};

/// An observed value and how current it is. **No delete is ever derived from a value that is not `Fresh`.**
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observation<T> {
    /// Listed completely, and the watches are running. Kinds and namespaces that the controller has no right to read are left out.
    /// Without the right to read Nodes or Peers, the value is not fresh.
    Fresh(T),
    /// Was listed completely, but now the API server does not answer, or a list or watch fails or exceeds its limits. The last value,
    /// and the reason.
    Stale(T, String),
    /// Not listed completely since the session with the member started. The reason is safe to show to users.
    Unreachable(String),
    /// There are no credentials: the Secret is missing or its kubeconfig is unusable. The reason names the field.
    Missing(String),
}

impl<T> Observation<T> {
    /// The last value, fresh or stale.
    #[must_use]
    pub const fn last(&self) -> Option<&T> {
        match self {
            Self::Fresh(value) | Self::Stale(value, _) => Some(value),
            Self::Unreachable(_) | Self::Missing(_) => None,
        }
    }

    /// The value if it is fresh.
    #[must_use]
    pub const fn fresh(&self) -> Option<&T> {
        match self {
            Self::Fresh(value) => Some(value),
            _ => None,
        }
    }

    /// Why the value is not fresh; `None` = it is fresh.
    #[must_use]
    pub fn not_fresh_reason(&self) -> Option<&str> {
        match self {
            Self::Fresh(_) => None,
            Self::Stale(_, why) | Self::Unreachable(why) | Self::Missing(why) => Some(why),
        }
    }

    /// The name of the state: `Fresh`, `Stale`, `Unreachable` or `Missing`.
    #[must_use]
    pub const fn state_name(&self) -> &'static str {
        match self {
            Self::Fresh(_) => "Fresh",
            Self::Stale(..) => "Stale",
            Self::Unreachable(_) => "Unreachable",
            Self::Missing(_) => "Missing",
        }
    }
}

/// All observed state that the planner reads.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Observations {
    /// Members by identity; an absent member counts as [`Observation::Missing`].
    pub members: BTreeMap<ClusterIdentity, Observation<Member>>,
    /// This hub's id (`--hub-id`), the value of the label `kilo-clustermesh.io/hub` on our objects.
    pub hub: String,
    /// Resolved names of DNS endpoints. A name that is absent has no known address.
    pub resolved: BTreeMap<String, IpAddr>,
}

/// The observed state of one member cluster.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Member {
    /// UID of the kube-system namespace. A hostile API server can claim any UID, so a UID may only be a reason to refuse something.
    pub uid: Option<String>,
    /// Nodes by name.
    pub nodes: Rows<Node>,
    /// All Peers by name, including those that this controller does not manage. `None` = the Peer CRD is not installed.
    pub peers: Option<Rows<ObservedPeer>>,
    /// All PeerPolicies by name, also those of other hubs. `None` = the PeerPolicy CRD is not installed (a member that only kg serves), or
    /// the controller lacks the right to read PeerPolicies.
    pub policies: Option<BTreeMap<String, ObservedPolicy>>,
    /// All SandboxAccesses by name, also those of other hubs. `None` = the SandboxAccess CRD is not installed, or the controller lacks the
    /// right to read SandboxAccesses.
    pub accesses: Option<BTreeMap<String, ObservedAccess>>,
    /// Gateways, by the name of their SandboxGateway. A gateway that has published no public key is left out.
    pub gateways: BTreeMap<ObjectName, Gateway>,
    /// Granted Services, Services with the name of a planned mirror, and all with the controller's managed-by label.
    pub services: BTreeMap<ObjectName, Service>,
    /// EndpointSlices of Services that a grant names, and all with the managed-by label, by the name of the slice.
    pub slices: BTreeMap<ObjectName, Slice>,
    /// Pods in namespaces that an export names.
    pub pods: BTreeMap<ObjectName, Pod>,
    /// Namespaces of granted Services, mirrored Services and exports, if the objects in these namespaces are unknown.
    pub unlisted: Unlisted,
    /// Addresses and ports of the member's API server (endpoints of `default/kubernetes`).
    pub api_endpoints: BTreeSet<SocketAddr>,
}

/// Namespaces that were not listed yet, or that the controller has no right to read now, with the reason. [`Member`] contains none of
/// their objects, even if some exist. So objects that earlier plans derived from such a namespace are kept until it can be read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Unlisted {
    /// Namespaces whose Services and EndpointSlices were not listed, with the reason.
    pub services: BTreeMap<String, String>,
    /// Namespaces whose Pods were not listed, with the reason.
    pub pods: BTreeMap<String, String>,
}

/// A value that a Node publishes about itself, usually in an annotation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Claim<T> {
    /// Not published.
    #[default]
    Absent,
    /// Published, but it does not parse; the error message.
    Invalid(String),
    /// Published and parsed. The planner decides whether the Node may claim the value.
    Valid(T),
}

impl<T> Claim<T> {
    /// The parsed value.
    #[must_use]
    pub const fn value(&self) -> Option<&T> {
        match self {
            Self::Valid(value) => Some(value),
            _ => None,
        }
    }
}

/// A WireGuard endpoint: an address or host name, and a UDP port.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Endpoint {
    /// `192.0.2.1:51820`, `[2001:db8::1]:51820`.
    Ip(SocketAddr),
    /// `node.example.org:51820`.
    Dns(String, u16),
}

impl Endpoint {
    /// The UDP port.
    #[must_use]
    pub const fn port(&self) -> u16 {
        match self {
            Self::Ip(address) => address.port(),
            Self::Dns(_, port) => *port,
        }
    }
}

/// Kilo's mesh granularity as the Node publishes it (`kg --mesh-granularity`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Granularity {
    /// Every node is a separate segment (Kilo's term): one Peer per node.
    Full,
    /// One Peer per location, for its leader, with the prefixes of all nodes of the location.
    Location,
    /// Like `Full` as seen from other clusters.
    Cross,
}

/// The program that owns the WireGuard device of a node, and whether wg-agent enforces policies there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Server {
    /// Kilo's kg: the Node has no annotation of wg-agent.
    #[default]
    Kilo,
    /// wg-agent, which owns the WireGuard device.
    Agent,
    /// kg owns the WireGuard device, and wg-agent with `--mode=policy` the firewall table.
    AgentPolicy,
}

/// The fields of a Node that the planner reads.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Node {
    /// `metadata.creationTimestamp`, Unix seconds.
    pub created: i64,
    /// The condition Ready is True.
    pub ready: bool,
    /// `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// The node will probably be removed soon: it is cordoned (`spec.unschedulable`), or an autoscaler has tainted it.
    pub leaving: bool,
    /// `spec.podCIDRs` (else `spec.podCIDR`), in order.
    pub pod_cidrs: Vec<Claim<IpNet>>,
    /// `kilo.squat.ai/wireguard-ip`: the host address with the prefix length as written.
    pub wireguard_ip: Claim<IpNet>,
    /// `kilo.squat.ai/key`.
    pub public_key: Claim<PublicKey>,
    /// `kilo.squat.ai/clustermesh-endpoint`.
    pub clustermesh_endpoint: Claim<Endpoint>,
    /// `kilo.squat.ai/force-endpoint`.
    pub force_endpoint: Claim<Endpoint>,
    /// `kilo.squat.ai/endpoint`.
    pub kilo_endpoint: Claim<Endpoint>,
    /// `status.addresses` of type ExternalIP.
    pub external_ips: Vec<IpAddr>,
    /// `status.addresses` of type InternalIP.
    pub internal_ips: Vec<IpAddr>,
    /// Host part of `kilo.squat.ai/internal-ip`. `None` = other nodes of the location reach this node only through
    /// the tunnel, or kg is restarting.
    pub kilo_internal_ip: Option<IpAddr>,
    /// `kilo.squat.ai/persistent-keepalive`, seconds; 0 = none. Nodes behind NAT have it.
    pub persistent_keepalive: u16,
    /// `kilo.squat.ai/location`, else the topology label, else empty.
    pub location: String,
    /// `kilo.squat.ai/granularity`; `None` = not published at the moment (kg removes it at each restart).
    pub granularity: Option<Granularity>,
    /// `kilo.squat.ai/leader` exists, with any value: kg prefers the node as the leader of its location.
    pub is_preferred_leader: bool,
    /// kg has stopped checking in for this node ([`crate::checkin`]). Also true if wg-agent has replaced kg, so the planner uses
    /// [`Self::is_silent`]. The times of check-ins are not in the planner's input, because each check-in would change it.
    pub silent: bool,
    /// `kilo.squat.ai/allowed-location-ips`.
    pub allowed_location_ips: Vec<IpNet>,
    /// `kilo.squat.ai/discovered-endpoints`: the endpoints at which this node sees its WireGuard peers, by key.
    pub discovered: BTreeMap<PublicKey, SocketAddr>,
    /// The program that serves this node.
    pub server: Server,
    /// How packets bypass the PeerPolicies on this node, as its agent reports; `None` = no known bypass.
    pub bypassed: Option<Bypass>,
    /// How long ago a plan began to hold this node ([`crate::plan::ClusterReport::held`]). When this reaches
    /// [`crate::plan::HOLD`], the node is skipped until the reason for the hold is gone. `None` = not held.
    pub held_for: Option<Duration>,
}

impl Node {
    /// Whether kg serves the node and has stopped checking in. A node with wg-agent in full mode is never silent, because kg
    /// does not serve it.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.silent && self.server != Server::Agent
    }
}

/// A Peer that exists in a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedPeer {
    /// Its ownership labels.
    pub owner: Owner,
    /// Its parsed spec, or the error. A managed Peer that does not parse is rewritten.
    pub spec: Result<PeerSpec, String>,
}

/// The ownership labels of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Owner {
    /// `kilo-clustermesh.io/mesh`.
    pub mesh: Option<String>,
    /// `kilo-clustermesh.io/mesh-namespace`; the predecessor wrote none.
    pub mesh_namespace: Option<String>,
    /// `kilo-clustermesh.io/hub`; the predecessor wrote none.
    pub hub: Option<String>,
    /// `kilo-clustermesh.io/source-cluster`.
    pub source_cluster: Option<String>,
}

/// The spec of a Peer, with the annotations that wg-agent reads. A Peer is written if this value differs from the desired one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PeerSpec {
    /// The public key of the node or gateway that the Peer describes.
    pub public_key: PublicKey,
    /// Allowed IPs, without host bits.
    pub allowed_ips: BTreeSet<IpNet>,
    /// The endpoint of the node or gateway; `None` = no usable one is known, so only the node itself can initiate handshakes.
    pub endpoint: Option<Endpoint>,
    /// All endpoint candidates, best first (`kilo-clustermesh.io/endpoints`); empty if there is only one.
    pub candidates: Vec<SocketAddr>,
    /// Keepalive interval in seconds; 0 = no keepalives.
    pub persistent_keepalive: u16,
    /// What it describes.
    pub role: PeerRole,
}

/// What a Peer describes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PeerRole {
    /// A node of another member.
    #[default]
    Node,
    /// A node of the target's own cluster, in this location (`kilo-clustermesh.io/location`). Only the cluster's nodes in other
    /// locations add the Peer to their device. The node itself reads from the Peer which of its addresses those nodes accept as
    /// sources.
    OwnNode(String),
    /// A gateway of another member (`kilo-clustermesh.io/gateway`), which accepts only the WireGuard addresses of the target's nodes as
    /// sources.
    Gateway,
}

/// A PeerPolicy that exists in a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedPolicy {
    /// Its ownership labels.
    pub owner: Owner,
    /// Its parsed spec, or the error.
    pub spec: Result<PolicySpec, String>,
}

/// What one source member may reach in a target. The default is deny, and `deny` wins over `allow`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PolicySpec {
    /// The source addresses to which the policy applies.
    pub sources: BTreeSet<IpNet>,
    /// The source's networks. The agent installs `unreachable` routes for them, so that packets to a part without a Peer never
    /// follow the default route.
    pub networks: BTreeSet<IpNet>,
    /// Destinations that may be reached, on every port except those that `deny` and `infrastructure_ports` block. Matched after the
    /// target node's own DNAT. For a cluster-meshed source these are the target's own networks: its accepted networks
    /// without those of gateways, or the WireGuard networks of its nodes if the target is masqueraded.
    pub allow: BTreeSet<IpNet>,
    /// TCP destinations that must not be reached, even if `allow` contains them.
    pub deny: BTreeSet<SocketAddr>,
    /// Ports that are blocked on the addresses of the target's nodes: every address of the agent's own node, the addresses in the
    /// other Node objects, and the other nodes' pod CIDRs, which contain the CNI's gateway addresses. Exception: a connection to a
    /// Service may still reach such a port at an address in a pod CIDR.
    pub infrastructure_ports: BTreeSet<(Protocol, u16)>,
    /// The target's anchored networks. The agent on the anchor masquerades tunnel traffic to them. A node's address in an
    /// anchored network is not a published source, unless it is the WireGuard address.
    pub anchored: BTreeSet<IpNet>,
    /// No packet may pass from or to the source: it is quarantined, or it is not cluster-meshed and its Peers are being
    /// deleted.
    pub closed: bool,
}

impl PolicySpec {
    /// The destinations that may be reached: none while the policy is closed.
    pub fn allowed(&self) -> impl Iterator<Item = &IpNet> {
        self.allow.iter().filter(|_| !self.closed)
    }
}

/// A SandboxAccess that exists in a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedAccess {
    /// Its ownership labels.
    pub owner: Owner,
    /// Its `metadata.generation`.
    pub generation: i64,
    /// Its parsed spec, or the error.
    pub spec: Result<AccessSpec, String>,
}

/// A Service.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Service {
    /// Its ownership labels, if it has our managed-by label.
    pub managed: Option<Owner>,
    /// The type is ExternalName: the Service has no endpoints.
    pub external_name: bool,
    /// The Service has no selector, so its EndpointSlices may list any address.
    pub selectorless: bool,
    /// Its ports.
    pub ports: Vec<ServicePort>,
    /// The IP families. A Service with a dual-stack `ipFamilyPolicy` counts as having both, even if its cluster supports only one.
    /// Otherwise every pass would plan an update, which cannot add a family that the cluster lacks.
    pub families: Families,
    /// Hub namespaces whose confined meshes may grant this Service although it is in another namespace
    /// (`kilo-clustermesh.io/allowed-from`).
    pub allowed_from: BTreeSet<String>,
}

/// A set of IP families.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Families {
    /// IPv4.
    pub v4: bool,
    /// IPv6.
    pub v6: bool,
}

impl Families {
    /// Both families.
    pub const BOTH: Self = Self { v4: true, v6: true };

    /// Whether this set contains all families of `other`.
    #[must_use]
    pub const fn cover(self, other: Self) -> bool {
        (self.v4 || !other.v4) && (self.v6 || !other.v6)
    }
}

/// The desired state of a mirrored Service without its endpoints.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mirror {
    /// The granted ports, with the numbers of the original Service.
    pub ports: Vec<ServicePort>,
    /// The IP families of its endpoints. An existing Service with more families keeps them.
    pub families: Families,
}

/// One port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServicePort {
    /// May be empty if the Service has a single port.
    pub name: String,
    /// The port number.
    pub port: u16,
    /// Protocol.
    pub protocol: Protocol,
}

/// An EndpointSlice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// Its ownership labels, if it has our managed-by label.
    pub managed: Option<Owner>,
    /// Name of the Service that it belongs to, in the same namespace.
    pub service: String,
    /// Its addresses are IPv6 addresses.
    pub v6: bool,
    /// Ports of the endpoints; each corresponds to the Service port of the same name.
    pub ports: Vec<ServicePort>,
    /// The endpoints.
    pub endpoints: Vec<SliceEndpoint>,
}

/// One endpoint of an EndpointSlice.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SliceEndpoint {
    /// Its address.
    pub address: IpAddr,
    /// The Node of the endpoint, if the slice names one. Mirrored slices name none, because other members need not know it.
    pub node: Option<String>,
    /// The endpoint accepts new connections.
    pub ready: bool,
    /// The endpoint still serves its existing connections.
    pub serving: bool,
    /// The endpoint is being terminated.
    pub terminating: bool,
}

/// The fields of a Pod that the planner needs for exports.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pod {
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// The node that runs the pod.
    pub node: String,
    /// Its addresses; empty for a host-network pod.
    pub addresses: Vec<IpAddr>,
}
