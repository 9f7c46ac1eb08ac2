//! What was seen of each member: Nodes, Peers, Services, and how far the seeing can be trusted.
//!
//! Nothing here parses text: a claim that does not parse arrives as [`Claim::Invalid`] with its reason.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use ipnet::IpNet;

use crate::{
    enforcement::Bypass,
    key::PublicKey,
    mesh::{ClusterIdentity, ObjectName, Protocol},
};

/// How far something observed can be trusted. **No delete is ever derived from what is not `Fresh`.**
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observation<T> {
    /// Listed whole, and the watch stands.
    Fresh(T),
    /// Was fresh; the watch is broken or over its budget. The last value, and why.
    Stale(T, String),
    /// Never listed since this controller started; the reason in words that are safe to show.
    Unreachable(String),
    /// There is nothing to observe with: no Secret, an unusable kubeconfig. The reason names the field.
    Missing(String),
}

impl<T> Observation<T> {
    /// The value, fresh or last known.
    #[must_use]
    pub const fn last(&self) -> Option<&T> {
        match self {
            Self::Fresh(value) | Self::Stale(value, _) => Some(value),
            Self::Unreachable(_) | Self::Missing(_) => None,
        }
    }

    /// The value, only if nothing newer can have been missed.
    #[must_use]
    pub const fn fresh(&self) -> Option<&T> {
        match self {
            Self::Fresh(value) => Some(value),
            _ => None,
        }
    }

    /// Why it is not fresh.
    #[must_use]
    pub fn trouble(&self) -> Option<&str> {
        match self {
            Self::Fresh(_) => None,
            Self::Stale(_, why) | Self::Unreachable(why) | Self::Missing(why) => Some(why),
        }
    }

    /// `Fresh`, `Stale`, `Unreachable` or `Missing`.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Fresh(_) => "Fresh",
            Self::Stale(..) => "Stale",
            Self::Unreachable(_) => "Unreachable",
            Self::Missing(_) => "Missing",
        }
    }
}

/// Everything the planner is told about the world.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Observations {
    /// By identity; a member that is not listed counts as [`Observation::Missing`].
    pub members: BTreeMap<ClusterIdentity, Observation<Member>>,
    /// This hub's id (`--hub-id`): what `kilo-clustermesh.io/hub` holds on our Peers.
    pub hub: String,
    /// Names that were resolved for DNS endpoints. A name that is not here has no address now.
    pub resolved: BTreeMap<String, IpAddr>,
}

/// One member cluster.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Member {
    /// UID of its kube-system namespace; may only ever refuse.
    pub uid: Option<String>,
    /// Nodes by name.
    pub nodes: BTreeMap<String, Node>,
    /// All Peers by name, ours and others'. `None` = the Peer CRD is not there.
    pub peers: Option<BTreeMap<String, ObservedPeer>>,
    /// Our PeerPolicies by name. `None` = the PeerPolicy CRD is not there (a member that kg runs).
    pub policies: Option<BTreeMap<String, ObservedPolicy>>,
    /// Our SandboxAccesses by name. `None` = the SandboxAccess CRD is not there.
    pub accesses: Option<BTreeMap<String, ObservedAccess>>,
    /// Gateways of sandboxes that have published who they are.
    pub gateways: BTreeMap<ObjectName, Gateway>,
    /// Services that some grant names, and all that carry our managed-by label.
    pub services: BTreeMap<ObjectName, Service>,
    /// EndpointSlices of those Services, by their own name.
    pub slices: BTreeMap<ObjectName, Slice>,
    /// Pods that some export may select.
    pub pods: BTreeMap<ObjectName, Pod>,
    /// Namespaces of granted Services and exported Pods that were never listed.
    pub unlisted: Unlisted,
    /// Addresses and ports of its API server (endpoints of `default/kubernetes`).
    pub api_endpoints: BTreeSet<SocketAddr>,
}

/// Namespaces of which nothing is known, and why: what [`Member`] has of them is not an empty list. What was made of them
/// before stands until they are listed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Unlisted {
    /// Services and their EndpointSlices, as far as grants name them.
    pub services: BTreeMap<String, String>,
    /// Pods, as far as exports may select them.
    pub pods: BTreeMap<String, String>,
}

/// Something a Node says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Claim<T> {
    /// It says nothing.
    #[default]
    Absent,
    /// It says something that does not parse; what is wrong with it, in words.
    Invalid(String),
    /// It says this.
    Valid(T),
}

impl<T> Claim<T> {
    /// The value, if there is a valid one.
    #[must_use]
    pub const fn value(&self) -> Option<&T> {
        match self {
            Self::Valid(value) => Some(value),
            _ => None,
        }
    }
}

/// Where UDP for a node goes: an address or a name, and a port.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Endpoint {
    /// `192.0.2.1:51820`, `[2001:db8::1]:51820`.
    Ip(SocketAddr),
    /// `node.example.org:51820`.
    Dns(String, u16),
}

impl Endpoint {
    /// Its port.
    #[must_use]
    pub const fn port(&self) -> u16 {
        match self {
            Self::Ip(address) => address.port(),
            Self::Dns(_, port) => *port,
        }
    }
}

/// Kilo's mesh granularity as the Node publishes it (KILO.md §4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Granularity {
    /// Every node is a segment: one Peer a node.
    Full,
    /// One leader a location carries the ranges of all its nodes.
    Location,
    /// As `Full` toward other clusters.
    Cross,
}

/// Which program serves WireGuard on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Server {
    /// Kilo's kg (no annotation of ours).
    #[default]
    Kilo,
    /// wg-agent with its own device.
    Agent,
    /// kg owns the tunnel, wg-agent the firewall.
    AgentPolicy,
}

/// One Node, as far as the planner reads it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Node {
    /// `metadata.creationTimestamp`, Unix seconds.
    pub created: i64,
    /// Condition Ready is True.
    pub ready: bool,
    /// `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// `spec.podCIDRs` (else `spec.podCIDR`), in order.
    pub pod_cidrs: Vec<Claim<IpNet>>,
    /// `kilo.squat.ai/wireguard-ip`: the host, and the prefix length written behind it.
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
    /// `kilo.squat.ai/internal-ip`, host part: which nodes of a location reach each other privately.
    pub kilo_internal_ip: Option<IpAddr>,
    /// `kilo.squat.ai/persistent-keepalive`, seconds: the node is behind NAT.
    pub persistent_keepalive: u16,
    /// `kilo.squat.ai/location`, else the topology label, else empty.
    pub location: String,
    /// `kilo.squat.ai/granularity`; `None` = not published now (kg removes it at each restart).
    pub granularity: Option<Granularity>,
    /// `kilo.squat.ai/leader` is there, whatever it holds: kg prefers it as the leader of its location.
    pub leader: bool,
    /// kg has stopped checking in for this node ([`crate::checkin`]). The observer says so, and by that time alone its
    /// check-ins have a part in a plan.
    pub silent: bool,
    /// `kilo.squat.ai/allowed-location-ips`.
    pub allowed_location_ips: Vec<IpNet>,
    /// `kilo.squat.ai/discovered-endpoints`: where this node saw other keys.
    pub discovered: BTreeMap<PublicKey, SocketAddr>,
    /// Which program serves WireGuard here.
    pub server: Server,
    /// What leads packets past its PeerPolicies, as its agent says; `None` = nothing that is known.
    pub bypassed: Option<Bypass>,
    /// For how long an earlier plan has been holding this node's last Peer (see [`crate::plan::ClusterReport::held`]);
    /// `None` = not held.
    pub held_for: Option<Duration>,
}

impl Node {
    /// kg serves it, by all that is known, and has stopped checking in. Beside a full agent nobody serves by kg.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.silent && self.server != Server::Agent
    }
}

/// A Peer that stands in a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedPeer {
    /// Who says it is theirs.
    pub owner: Owner,
    /// Its spec, parsed; `Err` = what is wrong with it. A managed Peer that does not parse is rewritten.
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

/// What a Peer says, in values. Equality is what a write is decided by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerSpec {
    /// Identity of the node it describes.
    pub public_key: PublicKey,
    /// Canonical.
    pub allowed_ips: BTreeSet<IpNet>,
    /// Where it is; `None` = it dials us.
    pub endpoint: Option<Endpoint>,
    /// Further candidates, in order (`kilo-clustermesh.io/endpoints`).
    pub candidates: Vec<SocketAddr>,
    /// Seconds; 0 = none.
    pub persistent_keepalive: u16,
}

/// A PeerPolicy that stands in a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedPolicy {
    /// Who says it is theirs.
    pub owner: Owner,
    /// Its spec, parsed; `Err` = what is wrong with it.
    pub spec: Result<PolicySpec, String>,
}

/// What one source member may reach in a target. Whatever is not allowed is denied, deny wins.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PolicySpec {
    /// Source addresses it speaks of.
    pub sources: BTreeSet<IpNet>,
    /// What the agent keeps off the default route.
    pub networks: BTreeSet<IpNet>,
    /// Destinations that may be reached.
    pub allow: BTreeSet<IpNet>,
    /// Destinations that may not, whatever `allow` says.
    pub deny: BTreeSet<SocketAddr>,
    /// Ports closed on every address of a node itself.
    pub infrastructure_ports: BTreeSet<(Protocol, u16)>,
    /// Networks of this cluster that its own nodes carry as anchors (so an anchor knows what to translate).
    pub anchored: BTreeSet<IpNet>,
    /// No packet passes from the source or to it: it is no cluster-meshed member any more, and its Peers are taken away.
    pub closed: bool,
}

/// A SandboxAccess that stands in a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedAccess {
    /// Who says it is theirs.
    pub owner: Owner,
    /// Its `metadata.generation`.
    pub generation: i64,
    /// Its spec, parsed; `Err` = what is wrong with it.
    pub spec: Result<AccessSpec, String>,
}

/// What one sandbox may reach through the gateways of a member.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AccessSpec {
    /// Name of the sandbox's entry.
    pub sandbox: String,
    /// Tells it from the hub's other sandboxes.
    pub id: String,
    /// Its networks.
    pub networks: BTreeSet<IpNet>,
    /// Its nodes.
    pub nodes: BTreeMap<PublicKey, AccessNode>,
    /// What it reaches at which port of a gateway.
    pub grants: BTreeMap<(Protocol, u16), GrantedPort>,
}

/// A node of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AccessNode {
    /// Its name.
    pub name: String,
    /// Its WireGuard addresses.
    pub addresses: BTreeSet<IpAddr>,
}

/// A port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GrantedPort {
    /// The Service.
    pub service: ObjectName,
    /// Name of its port; empty where it has one only.
    pub port: String,
}

/// A pod through which sandboxes enter a member, as it says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gateway {
    /// Its key.
    pub public_key: PublicKey,
    /// Its WireGuard addresses.
    pub addresses: BTreeSet<IpAddr>,
    /// Where it is dialled, best first.
    pub endpoints: Vec<SocketAddr>,
    /// Sandboxes that it serves, by their entries' names; empty = every one.
    pub serves: BTreeSet<String>,
    /// Its pod is the one that published this, and is Ready.
    pub ready: bool,
    /// The pod that published this exists, Ready or not.
    pub exists: bool,
    /// The generation of each SandboxAccess, by name, that is in force there.
    pub applied: BTreeMap<String, i64>,
    /// Grants that it does not serve, and why: by name of the SandboxAccess, protocol and port at the gateway.
    pub refused: BTreeMap<(String, Protocol, u16), String>,
}

impl Gateway {
    /// Whether it lets this sandbox in.
    #[must_use]
    pub fn serves(&self, sandbox: &str) -> bool {
        self.serves.is_empty() || self.serves.contains(sandbox)
    }
}

/// A Service.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Service {
    /// It carries our managed-by label; whose it is.
    pub managed: Option<Owner>,
    /// Type ExternalName: it has no endpoints of its own.
    pub external_name: bool,
    /// No selector: whoever may write its EndpointSlices chooses the addresses.
    pub selectorless: bool,
    /// Its ports.
    pub ports: Vec<ServicePort>,
    /// What it has addresses of, as far as its cluster has these families.
    pub families: Families,
    /// Namespaces whose meshes may give it away although they are confined to their own
    /// (`kilo-clustermesh.io/allowed-from`).
    pub allowed_from: BTreeSet<String>,
}

/// Address families.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Families {
    /// IPv4.
    pub v4: bool,
    /// IPv6.
    pub v6: bool,
}

impl Families {
    /// Both.
    pub const BOTH: Self = Self { v4: true, v6: true };

    /// Whether it has all that `other` has.
    #[must_use]
    pub const fn cover(self, other: Self) -> bool {
        (self.v4 || !other.v4) && (self.v6 || !other.v6)
    }
}

/// A mirrored Service apart from its endpoints.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mirror {
    /// Ports as in the source, those that were granted.
    pub ports: Vec<ServicePort>,
    /// What it has backends of. A Service that stands with more keeps it.
    pub families: Families,
}

/// One port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServicePort {
    /// Empty where the Service has one port only.
    pub name: String,
    /// The Service's port.
    pub port: u16,
    /// Protocol.
    pub protocol: Protocol,
}

/// An EndpointSlice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// It carries our managed-by label; whose it is.
    pub managed: Option<Owner>,
    /// The Service it belongs to (same namespace).
    pub service: String,
    /// Family of its addresses.
    pub v6: bool,
    /// Ports of the backends; the name ties them to the Service's ports.
    pub ports: Vec<ServicePort>,
    /// Backends.
    pub endpoints: Vec<SliceEndpoint>,
}

/// One backend.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SliceEndpoint {
    /// Its address.
    pub address: IpAddr,
    /// The Node that runs it, where the slice says so. A mirrored slice never does: it is nobody's business there.
    pub node: Option<String>,
    /// Takes new connections.
    pub ready: bool,
    /// Still answers the ones it has.
    pub serving: bool,
    /// On its way out.
    pub terminating: bool,
}

/// A pod, as far as exports need it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pod {
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// The node that runs it.
    pub node: String,
    /// Its addresses; empty for a host-network pod.
    pub addresses: Vec<IpAddr>,
}
