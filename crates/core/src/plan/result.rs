//! The types of a plan: the desired objects of every target, the skipped nodes, and the facts to report.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use ipnet::IpNet;

use crate::{
    mesh::{ClusterIdentity, MeshId, ObjectName},
    observe::{AccessSpec, Families, Member, Mirror, Observation, PeerSpec, PolicySpec, ServicePort, SliceEndpoint},
    ownership::Claimant,
    plan::MAX_PEERS_PER_TARGET,
};

/// The reason why one target or all have no Peer of a Node or gateway, or no entry for a Node in a SandboxAccess (rule 3 of
/// docs/design/planner.md). The name of the variant is shown in Events, conditions, metrics and `skipped`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names are the documentation; `message` has the details")]
pub enum Reason {
    NodeNoPodCIDR,
    NodePodCIDROutOfRange,
    PodCIDRDuplicate,
    NodeNoWireguardIP,
    WGIPInvalid,
    WGIPOutOfRange,
    WGIPDuplicate,
    NodeNoPublicKey,
    PublicKeyInvalid,
    PublicKeyDuplicate,
    NodeEndpointInvalid,
    EndpointForbidden,
    TooManyNodes,
    NodeNoLocation,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A Node or gateway that is left out of one target or of all, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Skipped {
    /// `metadata.name` of the Node, or `gateway NAMESPACE/NAME`.
    pub node: String,
    /// The reason, for programs.
    pub reason: Reason,
    /// The invalid value and the remedy, for people.
    pub message: String,
    /// The target that the Node or gateway is left out of. `None` = all targets.
    pub target: Option<String>,
}

/// A fact about a mesh, from which [`crate::status`] derives the conditions.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fact {
    /// The allowedNetworks of two entries overlap.
    NetworksOverlap {
        /// Entry of this mesh.
        cluster: String,
        /// Names both entries.
        message: String,
        /// `true` = this entry was refused, and keeps only the networks that it had before. `false` = this entry keeps its
        /// networks, and the other one was refused.
        lost: bool,
    },
    /// A member has different profiles in meshes of this hub; the most restrictive one applies.
    ProfileConflict {
        /// Entry of this mesh.
        cluster: String,
        /// Names both meshes.
        message: String,
    },
    /// A member has no gateway, so no sandbox can reach it; if it is masqueraded, no member can use its Services.
    NoGateway {
        /// Entry of this mesh.
        cluster: String,
        /// Names the member and the remedy.
        message: String,
    },
    /// A member is quarantined: all traffic from and to it is denied. Its objects are kept, except its Peers in members that do not
    /// enforce PeerPolicies.
    Quarantined {
        /// Entry of this mesh.
        cluster: String,
        /// Names the mesh that quarantines the member.
        message: String,
    },
    /// The observation of a member is not fresh. Data that is missing in the observation is no reason to delete an object.
    MemberNotFresh {
        /// Entry of this mesh.
        cluster: String,
        /// `Stale`, `Unreachable` or `Missing`.
        state: &'static str,
        /// The reason.
        message: String,
    },
    /// The Peer CRD is not installed in a member.
    PeerCRDMissing {
        /// Entry of this mesh.
        cluster: String,
    },
    /// InternalIPs of these kg nodes are not in their Peers (outside allowedNetworks, or inside an anchored network), so
    /// packets with these source addresses are dropped.
    InternalIPNotCovered {
        /// Entry of this mesh.
        cluster: String,
        /// The first few such nodes.
        nodes: Vec<String>,
    },
    /// podCIDRs of registered nodes lie outside allowedNetworks or in an anchored network, although allowedNetworks has networks of
    /// their IP family: most likely a mistake.
    PodCIDRNotCovered {
        /// Entry of this mesh.
        cluster: String,
        /// Names the first podCIDR, its Node and the remedy.
        message: String,
    },
    /// Nodes that have been held for longer than a restart takes. Their last Peers are still kept.
    NodesHeld {
        /// Entry of this mesh.
        cluster: String,
        /// Each node, with the reason for which it will be skipped after [`super::HOLD`].
        nodes: BTreeMap<String, Reason>,
    },
    /// The InternalIPs of these nodes are also their endpoints. Peers for a target that kg serves leave these InternalIPs out,
    /// because kg would route the tunnel's own packets into the tunnel.
    HostNetworkNotServed {
        /// Entry of this mesh that has the nodes.
        cluster: String,
        /// Entry of this mesh whose nodes kg serves.
        target: String,
        /// All such nodes.
        nodes: BTreeSet<String>,
    },
    /// kg has stopped checking in for these nodes.
    KgSilent {
        /// Entry of this mesh.
        cluster: String,
        /// All such nodes.
        nodes: BTreeSet<String>,
    },
    /// Either a node's Peer leaves out a prefix, because an older node or another Peer has it; or two nodes of a member have the same
    /// endpoint.
    AddressShared {
        /// Entry of this mesh.
        cluster: String,
        /// Names the prefix, and the node or Peer that keeps it, or the endpoint and both nodes.
        message: String,
    },
    /// Registered nodes publish an address that can never be an endpoint, or have a network in their annotation
    /// `kilo.squat.ai/allowed-location-ips` that is outside the networks of their entry. Their Peers leave it out.
    AddressLeftOut {
        /// Entry of this mesh.
        cluster: String,
        /// Names the first such node, the value and the reason.
        message: String,
    },
    /// Nodes of another member have addresses in a network of this entry, or kg on them routes this network into its own interface.
    NetworkInUse {
        /// Entry of this mesh that lists the network.
        cluster: String,
        /// Names the other member, the network, and the first such Node with its address or WireGuard network.
        message: String,
    },
    /// An anchored network has no anchor, at least in one target.
    NoAnchor {
        /// Entry of this mesh.
        cluster: String,
        /// What makes a node eligible, or why the network is left out.
        message: String,
    },
    /// A grant that cannot be mirrored, or can be mirrored only in part.
    EgressUnresolved {
        /// Entry of the importing member.
        cluster: String,
        /// Name of the mirrored Service.
        service: ObjectName,
        /// The reason and the remedy.
        message: String,
    },
    /// A target has more Peers than [`super::MAX_PEERS_PER_TARGET`].
    MeshTooLarge {
        /// Entry of the target.
        cluster: String,
        /// The number of its Peers.
        peers: usize,
    },
    /// A member whose entry has `locations: Connected` gets no tunnels between its locations.
    LocationsNotConnected {
        /// Entry of this mesh.
        cluster: String,
        /// The reason and the remedy.
        message: String,
    },
    /// An endpoint annotation of a Node has a host name that does not resolve at the moment.
    EndpointUnresolved {
        /// Entry of this mesh.
        cluster: String,
        /// Name of the Node.
        node: String,
        /// The host name.
        host: String,
    },
}

/// A podCIDR of a registered node that its Peers leave out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uncovered {
    /// The node.
    pub node: String,
    /// The podCIDR as in the Node.
    pub network: IpNet,
}

impl Fact {
    /// Reports a member whose observation is not fresh. `None` as `observed` = it was not observed yet.
    pub(super) fn member_not_fresh(entry: &str, observed: Option<&Observation<Member>>) -> Option<Self> {
        let (state, reason) = observed.map_or(("Missing", Some("it was not observed yet")), |observed| {
            (observed.state_name(), observed.not_fresh_reason())
        });
        Some(Self::MemberNotFresh {
            cluster: entry.to_owned(),
            state,
            message: reason?.to_owned(),
        })
    }

    /// Reports a target with more Peers than were tested.
    pub(super) fn mesh_too_large(target: &str, peers: usize) -> Option<Self> {
        (peers > MAX_PEERS_PER_TARGET).then(|| Self::MeshTooLarge {
            cluster: target.to_owned(),
            peers,
        })
    }
}

/// A Peer that should exist in a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedPeer {
    /// The member that has the node, by its entry's name.
    pub source: String,
    /// The node, or the gateway as NAMESPACE/NAME.
    pub node: String,
    /// The desired spec.
    pub spec: Arc<PeerSpec>,
}

impl PlannedPeer {
    /// The spec of a Peer that several targets may share, to change it for one of them.
    pub fn spec_mut(self: &mut Arc<Self>) -> &mut PeerSpec {
        Arc::make_mut(&mut Arc::make_mut(self).spec)
    }
}

/// A PeerPolicy that should exist in a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedPolicy {
    /// The member whose packets it limits, by its entry's name.
    pub source: String,
    /// The desired spec.
    pub spec: PolicySpec,
}

/// A SandboxAccess that should exist in a target. It is named like a PeerPolicy of the same source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedAccess {
    /// The sandbox, by its entry's name.
    pub source: String,
    /// The desired spec.
    pub spec: AccessSpec,
}

/// A mirrored Service. It has no selector, so that kube-proxy or Cilium of the importing member uses the planned EndpointSlices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedService {
    /// The exporting member, by its entry's name.
    pub source: String,
    /// The granted ports, with the numbers of the original Service.
    pub ports: Vec<ServicePort>,
    /// Its EndpointSlices by name, at most 100 endpoints each.
    pub slices: BTreeMap<String, PlannedSlice>,
}

impl PlannedService {
    /// The desired Service object, without its endpoints.
    #[must_use]
    pub fn mirror(&self) -> Mirror {
        let has = |v6| self.slices.values().any(|slice| slice.v6 == v6);
        Mirror {
            ports: self.ports.clone(),
            families: Families {
                v4: has(false),
                v6: has(true),
            },
        }
    }
}

/// One EndpointSlice of a mirrored Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedSlice {
    /// Its addresses are IPv6 addresses.
    pub v6: bool,
    /// Ports of the endpoints.
    pub ports: Vec<ServicePort>,
    /// The endpoints, sorted by address.
    pub endpoints: Vec<SliceEndpoint>,
}

/// The desired objects of one mesh in one member.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TargetPlan {
    /// Peers by name. Targets share the Peer of a node if it is the same in all of them, as it usually is.
    pub peers: BTreeMap<String, Arc<PlannedPeer>>,
    /// PeerPolicies by name.
    pub policies: BTreeMap<String, PlannedPolicy>,
    /// SandboxAccesses by name.
    pub accesses: BTreeMap<String, PlannedAccess>,
    /// Mirrored Services.
    pub services: BTreeMap<ObjectName, PlannedService>,
    /// The accepted networks of the sources that are connected to this target.
    pub source_networks: BTreeSet<IpNet>,
    /// Connected sources, except sandboxes, that are not [`crate::observe::Observation::Fresh`]: their objects in this target may be
    /// updated, but not deleted.
    pub sources_not_fresh: BTreeSet<String>,
    /// Mirrored Services that cannot be planned, because the state that decides them was not observed: existing objects with these names
    /// are neither updated nor deleted.
    pub kept_services: BTreeSet<ObjectName>,
}

/// The status of one entry.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClusterReport {
    /// The accepted allowedNetworks (rule 10 of docs/design/planner.md).
    pub accepted: Vec<IpNet>,
    /// Its anchored networks, with the nodes whose Peers contain them in the other members. The caller stores them and passes
    /// them to the next plan as [`crate::mesh::Cluster::previous_anchors`].
    pub anchored: BTreeMap<IpNet, BTreeSet<String>>,
    /// How many of its nodes have a Peer, or an entry in a SandboxAccess, in some other member.
    pub registered: usize,
    /// How many of its gateways have a Peer in some other member.
    pub gateways: usize,
    /// The nodes and gateways that are left out of one target or of all, sorted by name.
    pub skipped: Vec<Skipped>,
    /// podCIDRs that the Peers of registered nodes leave out, because they lie outside allowedNetworks or in an anchored
    /// network. [`Fact::PodCIDRNotCovered`] reports only those of an IP family that allowedNetworks has. Sorted by the age of the nodes.
    pub uncovered: Vec<Uncovered>,
    /// The profile that applies is sandbox.
    pub sandbox: bool,
    /// The nodes need Peers, or entries in a SandboxAccess, in some other member. False, for example, for a sandbox without grants.
    /// Also false for a member that is connected only to sandboxes, because a sandbox gets Peers of the member's gateways and not of
    /// its nodes.
    pub needs_registration: bool,
    /// Held nodes, which keep their last Peer, with the reason for which they would be skipped. The caller remembers since when
    /// each node is held, and passes the age to the next plan as [`crate::observe::Node::held_for`].
    pub held: BTreeMap<String, Reason>,
    /// The first of its nodes that is behind a NAT: other members see it at an address that it does not publish.
    pub behind_nat: Option<String>,
}

/// The status of one grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressReport {
    /// The importing member, by its entry's name.
    pub cluster: String,
    /// Name of the mirrored Service in that member.
    pub service: ObjectName,
    /// A mirrored Service is planned, with an endpoint that accepts connections.
    pub ready: bool,
    /// The number of its endpoints.
    pub endpoints: usize,
    /// The problem and the remedy; empty = no problem.
    pub message: String,
}

/// The plan of one mesh.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MeshPlan {
    /// Nothing is written or deleted for the mesh.
    pub paused: bool,
    /// The ClusterMesh is being deleted, and with it everything it owns.
    pub deleting: bool,
    /// The status of each entry, by entry name.
    pub clusters: BTreeMap<String, ClusterReport>,
    /// The desired objects of every member, by entry name.
    pub targets: BTreeMap<String, TargetPlan>,
    /// The cluster of each entry, by entry name.
    pub identities: BTreeMap<String, ClusterIdentity>,
    /// The facts to report, sorted.
    pub facts: BTreeSet<Fact>,
    /// The status of the grants, in the order of the entries.
    pub egress: Vec<EgressReport>,
}

/// The plan of all meshes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// The plan of each mesh.
    pub meshes: BTreeMap<MeshId, MeshPlan>,
    /// All meshes, oldest first: the input of [`crate::ownership::of`].
    pub claimants: Vec<Claimant>,
    /// This hub's id.
    pub hub: String,
}
