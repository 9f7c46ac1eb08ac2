//! What a plan says: the objects of every target, the nodes that are left out, and the facts to report.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use ipnet::IpNet;

use crate::{
    mesh::{ClusterIdentity, MeshId, ObjectName},
    observe::{AccessSpec, Families, Mirror, PeerSpec, PolicySpec, ServicePort, SliceEndpoint},
    ownership::Claimant,
};

/// Why a Node has no Peer (DESIGN §4 rule 3). The word stands in Events, conditions, metrics and `skipped`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the words are the documentation; `message` says the rest")]
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
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// One Node that has no Peer, and why.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Skipped {
    /// `metadata.name`.
    pub node: String,
    /// One word.
    pub reason: Reason,
    /// The value that is wrong and the remedy.
    pub message: String,
}

/// The kinds of condition a mesh reports; `Ready` and the rest are derived from facts in [`crate::status`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fact {
    /// Two claims overlap; the entry named here is left with what it had.
    NetworksOverlap {
        /// Entry of this mesh.
        cluster: String,
        /// Names both claims.
        message: String,
        /// This mesh's entry is the one that lost (it runs on with less); `false` = it holds, and the other is refused.
        lost: bool,
    },
    /// A member has two profiles in meshes of this hub; the tighter one holds.
    ProfileConflict {
        /// Entry of this mesh.
        cluster: String,
        /// Names both meshes.
        message: String,
    },
    /// A member has no gateway, so no sandbox enters it.
    NoGateway {
        /// Entry of this mesh.
        cluster: String,
        /// Names it and the remedy.
        message: String,
    },
    /// Everything from a member is closed, and its objects are kept.
    Quarantined {
        /// Entry of this mesh.
        cluster: String,
        /// Who asked for it.
        message: String,
    },
    /// Nothing is seen of a member, or not lately; nothing is deleted because of it.
    MemberNotFresh {
        /// Entry of this mesh.
        cluster: String,
        /// `Stale`, `Unreachable` or `Missing`.
        state: &'static str,
        /// Why.
        message: String,
    },
    /// The Peer CRD is not there.
    PeerCRDMissing {
        /// Entry of this mesh.
        cluster: String,
    },
    /// InternalIPs of these nodes of kg lie outside allowedNetworks, so nothing sent from them is accepted.
    InternalIPNotCovered {
        /// Entry of this mesh.
        cluster: String,
        /// Nodes, first few.
        nodes: Vec<String>,
    },
    /// podCIDRs of meshed nodes lie outside allowedNetworks, of a family that is listed there: most likely an oversight.
    PodCIDRNotCovered {
        /// Entry of this mesh.
        cluster: String,
        /// Names the first of them, its Node and the remedy.
        message: String,
    },
    /// Nodes that have published nothing usable for a while; their last Peers stand.
    NodesHeld {
        /// Entry of this mesh.
        cluster: String,
        /// Each with the reason it will be left out for.
        nodes: BTreeMap<String, Reason>,
    },
    /// The InternalIPs of these nodes are their endpoints too, so kg in the target cannot have them in a Peer.
    HostNetworkNotServed {
        /// Entry of this mesh that has the nodes.
        cluster: String,
        /// Entry of this mesh that kg serves.
        target: String,
        /// All of them.
        nodes: BTreeSet<String>,
    },
    /// kg has stopped checking in for these nodes.
    KgSilent {
        /// Entry of this mesh.
        cluster: String,
        /// All of them.
        nodes: BTreeSet<String>,
    },
    /// A prefix that two nodes claim stays with its first owner; the node itself has its Peer.
    AddressShared {
        /// Entry of this mesh.
        cluster: String,
        /// Names prefix, owner and loser.
        message: String,
    },
    /// Nodes of another member have addresses in a network of this one.
    NetworkInUse {
        /// Entry of this mesh whose network it is.
        cluster: String,
        /// Names the other member, the network, and the first Node with its address.
        message: String,
    },
    /// No node can carry the anchored networks.
    NoAnchor {
        /// Entry of this mesh.
        cluster: String,
        /// What would make one eligible.
        message: String,
    },
    /// A grant that does not resolve.
    EgressUnresolved {
        /// The member that imports.
        cluster: String,
        /// Name of the mirrored Service.
        service: ObjectName,
        /// Why, and the remedy.
        message: String,
    },
    /// A node of one target would have more Peers than promised.
    MeshTooLarge {
        /// Target.
        cluster: String,
        /// How many.
        peers: usize,
    },
    /// An annotation of one member's Nodes names an endpoint as a host name that does not resolve now.
    EndpointUnresolved {
        /// Entry of this mesh.
        cluster: String,
        /// Node.
        node: String,
        /// The name.
        host: String,
    },
}

/// A podCIDR that is not meshed, of a node that is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uncovered {
    /// The node.
    pub node: String,
    /// As its Node has it.
    pub network: IpNet,
}

/// A Peer that should stand in a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedPeer {
    /// The member that has the node, by its entry's name.
    pub source: String,
    /// The node, or the gateway as NAMESPACE/NAME.
    pub node: String,
    /// What it says.
    pub spec: PeerSpec,
}

/// A PeerPolicy that should stand in a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedPolicy {
    /// The member whose packets it is about, by its entry's name.
    pub source: String,
    /// What it says.
    pub spec: PolicySpec,
}

/// A SandboxAccess that should stand in a target. Its name is that of a PeerPolicy of the same source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedAccess {
    /// The sandbox, by its entry's name.
    pub source: String,
    /// What it says.
    pub spec: AccessSpec,
}

/// A mirrored Service: selector-less, so that the member's own kube-proxy or Cilium balances over our EndpointSlices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedService {
    /// The member that has the Service, by its entry's name.
    pub source: String,
    /// Ports as in the source, those that were granted.
    pub ports: Vec<ServicePort>,
    /// Its EndpointSlices by name, at most 100 endpoints each.
    pub slices: BTreeMap<String, PlannedSlice>,
}

impl PlannedService {
    /// What it is apart from its endpoints.
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
    /// Family of its addresses.
    pub v6: bool,
    /// Ports of the backends.
    pub ports: Vec<ServicePort>,
    /// Backends, sorted by address.
    pub endpoints: Vec<SliceEndpoint>,
}

/// What one member should hold for one mesh.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TargetPlan {
    /// Peers by name.
    pub peers: BTreeMap<String, PlannedPeer>,
    /// PeerPolicies by name.
    pub policies: BTreeMap<String, PlannedPolicy>,
    /// SandboxAccesses by name.
    pub accesses: BTreeMap<String, PlannedAccess>,
    /// Mirrored Services.
    pub services: BTreeMap<ObjectName, PlannedService>,
    /// Networks of the sources that are connected here.
    pub served: BTreeSet<IpNet>,
    /// Sources that were not freshly observed: their objects here are changed where the plan says so, never deleted.
    pub retained: BTreeSet<String>,
    /// Mirrored Services of which nothing is known now: what stands under these names is neither changed nor deleted.
    pub kept: BTreeSet<ObjectName>,
}

/// What is reported of one entry.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClusterReport {
    /// What of allowedNetworks was accepted (DESIGN §4 rule 10).
    pub accepted: Vec<IpNet>,
    /// The networks of it that belong to no Node, and the nodes whose Peers carry them in the other members. Handed back as
    /// [`crate::mesh::Cluster::carriers`].
    pub anchored: BTreeMap<IpNet, BTreeSet<String>>,
    /// How many of its nodes have a Peer in the other members.
    pub registered: usize,
    /// How many of its gateways have a Peer in a sandbox.
    pub gateways: usize,
    /// The nodes that have none, by name.
    pub skipped: Vec<Skipped>,
    /// podCIDRs of nodes that have a Peer which carries none of these, since they lie outside allowedNetworks. In order of the
    /// nodes' age.
    pub uncovered: Vec<Uncovered>,
    /// It is held to be a sandbox: by this mesh, or by another that is tighter.
    pub sandbox: bool,
    /// Its nodes should have Peers elsewhere; not those of a sandbox without a grant, for one.
    pub linked: bool,
    /// Nodes whose last Peer is being held, and the reason they would be skipped for. The caller notes when it first saw
    /// each and hands the age back as [`crate::observe::Node::held_for`].
    pub held: BTreeMap<String, Reason>,
}

/// Whether a grant resolves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressReport {
    /// The member that imports, by its entry's name.
    pub cluster: String,
    /// Name of the mirrored Service there.
    pub service: ObjectName,
    /// It stands and has an endpoint that takes connections.
    pub ready: bool,
    /// How many endpoints.
    pub endpoints: usize,
    /// Why not, and the remedy; empty when ready.
    pub message: String,
}

/// The plan of one mesh.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MeshPlan {
    /// Write nothing and delete nothing for it.
    pub paused: bool,
    /// It is being deleted: everything it owns goes.
    pub deleting: bool,
    /// By entry name.
    pub clusters: BTreeMap<String, ClusterReport>,
    /// What every member should hold, by entry name.
    pub targets: BTreeMap<String, TargetPlan>,
    /// Which cluster each entry is.
    pub identities: BTreeMap<String, ClusterIdentity>,
    /// What is to be said, sorted.
    pub facts: BTreeSet<Fact>,
    /// Grants in the order of the entries.
    pub egress: Vec<EgressReport>,
}

/// The plan of all meshes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// By mesh.
    pub meshes: BTreeMap<MeshId, MeshPlan>,
    /// All meshes, oldest first: what [`crate::ownership::of`] goes by.
    pub claimants: Vec<Claimant>,
    /// This hub's id.
    pub hub: String,
}
