//! Explains whether the plan allows one connection, by which rule, and which Peers the packets take. `explain` and `verify` show
//! the answers.
//!
//! [`connectivity`] uses the planner's own decision whether and how the two members are connected. [`packet`] then follows the
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
mod packet;
#[cfg(test)]
mod tests;

pub(crate) use backend::{Backend, backends};

/// The client of the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    /// Its cluster.
    pub(crate) cluster: ClusterIdentity,
    /// Its Node, if known.
    pub(crate) node: Option<String>,
    /// Its address; `None` = the Node itself, or a pod in the host network.
    pub(crate) address: Option<IpAddr>,
}

/// The server of the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Destination {
    /// Its cluster.
    pub(crate) cluster: ClusterIdentity,
    /// Its Node, if known.
    pub(crate) node: Option<String>,
    /// Its address.
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
    /// Not allowed.
    Denied,
}

/// The rule that decides. The name of the variant is shown to users.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Rule {
    Meshed,
    Granted,
    NoPolicyHere,
    SameCluster,
    MemberUnseen,
    NotInOneMesh,
    Deleting,
    NetworksOverlap,
    Standard,
    TwoSandboxes,
    TowardSandbox,
    NoGrant,
    NotGranted,
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
    PolicyMissing,
}

impl Verdict {
    /// As text in a sentence.
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
            Self::Meshed | Self::Granted | Self::NoPolicyHere => Verdict::Allowed,
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

/// A Peer that carries packets of the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hop {
    /// Its name, in the cluster where it exists.
    pub(crate) peer: String,
    /// The node it describes.
    pub(crate) node: String,
    /// Its allowed IP that contains the address.
    pub(crate) prefix: IpNet,
    /// It exists there as planned.
    pub(crate) written: bool,
}

/// The Peers and the policy that the connection uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Route {
    /// The Peer in the source's cluster that contains the destination.
    pub(crate) out: Hop,
    /// The node of that Peer is the anchor of the network: the server sees this node's address, or that of another node of its
    /// cluster.
    pub(crate) anchored: bool,
    /// The Peer in the destination's cluster that contains the source address, for incoming packets and for replies.
    pub(crate) back: Hop,
    /// The source address of packets that arrive at the destination's cluster.
    pub(crate) seen_as: IpAddr,
    /// `seen_as` is the WireGuard address of the source's node instead of the client's own address. `None` = this depends on the
    /// CNI, because kg serves the node without an agent.
    pub(crate) masqueraded: Option<bool>,
    /// The PeerPolicy for the source in the destination's cluster, and whether it exists there as planned.
    pub(crate) policy: Option<(String, bool)>,
}

/// The answer: the deciding rule, and details.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Explanation {
    /// The rule that decides.
    pub(crate) rule: Rule,
    /// What the rule means for this connection, and the remedy.
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

    /// Whether the connection is allowed.
    pub(crate) const fn verdict(&self) -> Verdict {
        self.rule.verdict()
    }
}

/// Explains the connections of one plan.
pub(crate) struct Explainer<'a> {
    seen: &'a Observations,
    plan: &'a Plan,
    /// The members of all meshes of the hub.
    meshes: Vec<MeshMembers<'a>>,
}

impl<'a> Explainer<'a> {
    /// `plan` = the result of [`clustermesh_core::plan::plan`] for the other inputs.
    pub(crate) fn new(
        meshes: &'a [Mesh],
        seen: &'a Observations,
        settings: &Settings,
        naming: &dyn Naming,
        plan: &'a Plan,
    ) -> Self {
        Self {
            seen,
            plan,
            meshes: members(meshes, seen, settings, naming),
        }
    }

    /// Explains whether one connection is allowed, and by which rule.
    pub(crate) fn explain(&self, from: &Source, to: &Destination) -> Explanation {
        if from.cluster.same_cluster(&to.cluster) {
            return Explanation::new(
                Rule::SameCluster,
                "both are in the same cluster: packets between them do not use the mesh",
            );
        }
        let answers = self.meshes.iter().filter_map(|mesh| self.explain_in(mesh, from, to));
        // Allowed by one mesh is allowed. Otherwise, one mesh that does not know makes the answer unknown.
        answers.min_by_key(Explanation::verdict).unwrap_or_else(|| {
            Explanation::new(
                Rule::NotInOneMesh,
                "no ClusterMesh contains both clusters: add one of them to a mesh of the other",
            )
        })
    }

    /// The answer of one mesh; `None` = it does not contain both clusters.
    fn explain_in(&self, members: &MeshMembers<'_>, from: &Source, to: &Destination) -> Option<Explanation> {
        let mesh = members.mesh();
        let named = |identity: &ClusterIdentity| {
            let entry = mesh
                .clusters
                .iter()
                .find(|entry| entry.identity.same_cluster(identity))?;
            Some((&*entry.name, members.get(&entry.name)?))
        };
        let (source, source_member) = named(&from.cluster)?;
        let (target, target_member) = named(&to.cluster)?;
        let query = connectivity::Query {
            seen: self.seen,
            plan: self.plan,
            mesh,
            source,
            target,
            source_member,
            target_member,
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
fn member<'a>(seen: &'a Observations, identity: &ClusterIdentity) -> Option<&'a Member> {
    seen.members.get(identity).and_then(Observation::last)
}

/// `5432/TCP`.
fn port_text((protocol, port): (Protocol, u16)) -> String {
    format!("{port}/{}", protocol.as_str())
}

/// The networks of an entry, for a message.
fn bounds(cluster: &Cluster) -> String {
    let networks: Vec<String> = cluster.allowed.iter().map(ToString::to_string).collect();
    networks.join(", ")
}
