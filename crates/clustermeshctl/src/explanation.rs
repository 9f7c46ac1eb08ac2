//! Explains whether the plan allows a connection, which rule decides, and which Peers the packets pass. `explain` and `verify`
//! show the answers.
//!
//! [`connectivity`] uses the planner's decision whether and how the two members are connected. [`packet`] then follows the
//! connection through the planned Peers and PeerPolicies. So the answer always agrees with the plan.

use std::{fmt, net::IpAddr};

use clustermesh_core::{
    mesh::{Cluster, ClusterIdentity, Mesh, MeshId, Protocol},
    observe::{Member, Observation, Observations},
    plan::{MeshMembers, Naming, Plan, Settings, members},
};
use ipnet::IpNet;

mod backend;
mod connectivity;
mod locations;
mod packet;
#[cfg(test)]
mod tests;

pub(crate) use backend::{Backend, backends};

/// The client of the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) cluster: ClusterIdentity,
    /// Its Node, if known.
    pub(crate) node: Option<String>,
    /// Its address; `None` = the Node itself, or a pod in the host network.
    pub(crate) address: Option<IpAddr>,
}

/// The server of the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Destination {
    pub(crate) cluster: ClusterIdentity,
    /// Its Node, if known.
    pub(crate) node: Option<String>,
    pub(crate) address: IpAddr,
    /// `None` = any port.
    pub(crate) port: Option<(Protocol, u16)>,
}

/// Whether a connection is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    /// Allowed, once the plan is written.
    Allowed,
    /// A member was not observed, or the connection does not use the mesh.
    Unknown,
    Denied,
}

/// The rule that decides. Users see the name of the variant; `docs/operations/clustermeshctl.md` explains each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Rule {
    Meshed,
    Granted,
    /// The destination's cluster has no PeerPolicy CRD, so its nodes accept all packets from its Peers.
    NoPolicyHere,
    /// Both ends are in different locations of one cluster that connects its locations.
    BetweenLocations,
    SameCluster,
    MemberUnseen,
    NotInOneMesh,
    Deleting,
    NetworksOverlap,
    Standard,
    TwoSandboxes,
    TowardSandbox,
    /// The sandbox has no grant for the destination's member.
    NoGrantForMember,
    /// The source is a sandbox that has a grant for the destination's member, but not for this address and port. Or the
    /// destination is a mirrored Service without endpoints; then the source can have any profile.
    DestinationNotGranted,
    Quarantined,
    NoGateway,
    PeerCRDMissing,
    NodeSkipped,
    NoAnchor,
    NoPeer,
    OutsideAllowedNetworks,
    InfrastructurePort,
    WireguardAddress,
    ApiServer,
    /// The destination's cluster has the PeerPolicy CRD, but no planned PeerPolicy for the source's member has the source address
    /// among its sources, so packets are dropped.
    PolicyMissing,
}

impl Verdict {
    /// The verdict as text in a sentence.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Unknown => "cannot tell",
            Self::Denied => "denied",
        }
    }
}

impl Rule {
    /// Whether a connection to which this rule applies is allowed.
    pub(crate) const fn verdict(self) -> Verdict {
        match self {
            Self::Meshed | Self::Granted | Self::NoPolicyHere | Self::BetweenLocations => Verdict::Allowed,
            Self::SameCluster | Self::MemberUnseen => Verdict::Unknown,
            _ => Verdict::Denied,
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A Peer through which packets of the connection pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hop {
    pub(crate) peer: String,
    /// The remote node that the Peer describes.
    pub(crate) node: String,
    /// The longest of the Peer's allowed IPs that contains the destination (in [`Route::out`]) or `seen_as` (in [`Route::back`]).
    pub(crate) prefix: IpNet,
    /// Whether the Peer exists as planned.
    pub(crate) written: bool,
}

/// The Peers and the policy that the connection uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Route {
    /// The Peer in the source's cluster whose allowed IPs contain the destination.
    pub(crate) out: Hop,
    /// Whether the node of that Peer is the anchor of the destination's network. If so, the server sees the address of the anchor
    /// or of another node of its cluster as the source.
    pub(crate) anchored: bool,
    /// The Peer in the destination's cluster whose allowed IPs contain `seen_as`: it sends the packets and receives the replies.
    pub(crate) back: Hop,
    /// The source address with which packets arrive in the destination's cluster.
    pub(crate) seen_as: IpAddr,
    /// Whether `seen_as` is the WireGuard address of the source's node instead of the client's own address. `None` = this depends
    /// on the CNI, because kg serves the node without wg-agent.
    pub(crate) masqueraded: Option<bool>,
    /// The PeerPolicy for the source in the destination's cluster, and whether it exists there as planned.
    pub(crate) policy: Option<(String, bool)>,
}

/// The answer: the deciding rule, and details.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Explanation {
    pub(crate) rule: Rule,
    /// The meaning of the rule for this connection, and the remedy.
    pub(crate) message: String,
    /// The mesh that decides.
    pub(crate) mesh: Option<MeshId>,
    /// The Peers and the policy, if the connection uses any.
    pub(crate) route: Option<Route>,
    /// Other facts that the user should know.
    pub(crate) notes: Vec<String>,
}

impl Explanation {
    fn new(rule: Rule, message: impl Into<String>) -> Self {
        Self {
            rule,
            message: message.into(),
            mesh: None,
            route: None,
            notes: Vec::new(),
        }
    }

    pub(crate) const fn verdict(&self) -> Verdict {
        self.rule.verdict()
    }
}

/// Explains the connections of one plan.
pub(crate) struct Explainer<'a> {
    observations: &'a Observations,
    plan: &'a Plan,
    /// The members of all meshes of the hub.
    meshes: Vec<MeshMembers<'a>>,
}

impl<'a> Explainer<'a> {
    /// `plan` = the result of [`clustermesh_core::plan::plan`] for the other arguments.
    pub(crate) fn new(
        meshes: &'a [Mesh],
        observations: &'a Observations,
        settings: &Settings,
        naming: &dyn Naming,
        plan: &'a Plan,
    ) -> Self {
        Self {
            observations,
            plan,
            meshes: members(meshes, observations, settings, naming),
        }
    }

    /// Explains whether one connection is allowed, and by which rule.
    pub(crate) fn explain(&self, from: &Source, to: &Destination) -> Explanation {
        if from.cluster.same_cluster(&to.cluster) {
            return self.explain_inside(from, to);
        }
        let answers = self.meshes.iter().filter_map(|mesh| self.explain_in(mesh, from, to));
        // One mesh that allows the connection is enough. Otherwise, one mesh with an unknown answer makes the answer unknown.
        answers.min_by_key(Explanation::verdict).unwrap_or_else(|| {
            Explanation::new(
                Rule::NotInOneMesh,
                "no ClusterMesh contains both clusters: add one of the clusters to a mesh of the other",
            )
        })
    }

    /// The answer of one mesh; `None` = the mesh does not contain both clusters.
    fn explain_in(&self, members: &MeshMembers<'_>, from: &Source, to: &Destination) -> Option<Explanation> {
        let mesh = members.mesh();
        let find_entry = |identity: &ClusterIdentity| {
            let entry = mesh
                .clusters
                .iter()
                .find(|entry| entry.identity.same_cluster(identity))?;
            Some((&*entry.name, members.get(&entry.name)?))
        };
        let (source, source_member) = find_entry(&from.cluster)?;
        let (destination, destination_member) = find_entry(&to.cluster)?;
        let query = connectivity::Query {
            observations: self.observations,
            plan: self.plan,
            mesh,
            source,
            destination,
            source_member,
            destination_member,
            from,
            to,
        };
        let mut answer = query.answer();
        answer.mesh = Some(mesh.id.clone());
        if mesh.paused {
            answer.notes.push(format!(
                "ClusterMesh {} is paused: the plan is not written, and the existing objects may differ from it",
                mesh.id
            ));
        }
        Some(answer)
    }
}

/// The last observed state of a member.
fn last_observed<'a>(observations: &'a Observations, identity: &ClusterIdentity) -> Option<&'a Member> {
    observations.members.get(identity).and_then(Observation::last)
}

/// Formats a port as `5432/TCP`.
fn port_text((protocol, port): (Protocol, u16)) -> String {
    format!("{port}/{}", protocol.as_str())
}

/// The `allowedNetworks` of an entry, for a message.
fn allowed_networks_text(cluster: &Cluster) -> String {
    let networks: Vec<String> = cluster.allowed.iter().map(ToString::to_string).collect();
    networks.join(", ")
}
