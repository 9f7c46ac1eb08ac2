//! Explains whether the plan allows one connection, by which rule, and which Peers the packets take. `clustermeshctl explain`
//! parses the question and shows the answer.
//!
//! [`connectivity`] uses the planner's own decision whether and how the two members are connected. [`packet`] then follows the
//! connection through the planned Peers and PeerPolicies. So the answer always agrees with the plan.

use std::{collections::BTreeSet, fmt, net::IpAddr};

use ipnet::IpNet;

use super::{Naming, Plan, Settings, by_age, claims, mesh, result::MeshPlan};
use crate::{
    mesh::{Cluster, ClusterIdentity, Mesh, MeshId, ObjectName, Protocol},
    observe::{Member, Observation, Observations},
};

mod connectivity;
mod packet;

/// The client of the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Its cluster.
    pub cluster: ClusterIdentity,
    /// Its Node, if known.
    pub node: Option<String>,
    /// Its address; `None` = the Node itself, or a pod in the host network.
    pub address: Option<IpAddr>,
}

/// The server of the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// Its cluster.
    pub cluster: ClusterIdentity,
    /// Its Node, if known.
    pub node: Option<String>,
    /// Its address.
    pub address: IpAddr,
    /// `None` = any port.
    pub port: Option<(Protocol, u16)>,
}

/// Whether a connection is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// Allowed, once the plan is written.
    Allowed,
    /// A member was not observed, or the connection does not use the mesh.
    Unknown,
    /// Not allowed.
    Denied,
}

/// The rule that decides. The name of the variant is shown to users.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names are the documentation; `message` has the details")]
pub enum Rule {
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
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Unknown => "cannot tell",
            Self::Denied => "denied",
        }
    }
}

impl Rule {
    /// Whether a connection to which this rule applies is allowed.
    #[must_use]
    pub const fn verdict(self) -> Verdict {
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
pub struct Hop {
    /// Its name, in the cluster where it exists.
    pub peer: String,
    /// The node it describes.
    pub node: String,
    /// Its allowed IP that contains the address.
    pub prefix: IpNet,
    /// It exists there as planned.
    pub written: bool,
}

/// The Peers and the policy that the connection uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The Peer in the source's cluster that contains the destination.
    pub out: Hop,
    /// The node of that Peer is the anchor of the network: the server sees this node's address, or that of another node of its
    /// cluster.
    pub anchored: bool,
    /// The Peer in the destination's cluster that contains the source address, for incoming packets and for replies.
    pub back: Hop,
    /// The source address of packets that arrive at the destination's cluster.
    pub seen_as: IpAddr,
    /// `seen_as` is the WireGuard address of the source's node instead of the client's own address. `None` = this depends on the
    /// CNI, because kg serves the node without an agent.
    pub masqueraded: Option<bool>,
    /// The PeerPolicy for the source in the destination's cluster, and whether it exists there as planned.
    pub policy: Option<(String, bool)>,
}

/// The answer: the deciding rule, and details.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The rule that decides.
    pub rule: Rule,
    /// What the rule means for this connection, and the remedy.
    pub message: String,
    /// The mesh that decides.
    pub mesh: Option<MeshId>,
    /// The Peers and the policy, if the connection uses any.
    pub route: Option<Route>,
    /// Other facts that the user should know.
    pub notes: Vec<String>,
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
    #[must_use]
    pub const fn verdict(&self) -> Verdict {
        self.rule.verdict()
    }
}

/// The inputs of the plan, and the plan.
#[derive(Clone, Copy)]
pub struct ExplainInputs<'a> {
    /// All meshes of the hub.
    pub meshes: &'a [Mesh],
    /// The observed state.
    pub seen: &'a Observations,
    /// The settings.
    pub settings: &'a Settings,
    /// Makes the names of objects.
    pub naming: &'a dyn Naming,
    /// The result of [`super::plan`] for these inputs.
    pub plan: &'a Plan,
}

/// Explains whether one connection is allowed, and by which rule.
#[must_use]
pub fn explain(inputs: &ExplainInputs<'_>, from: &Source, to: &Destination) -> Explanation {
    let mut answers = explain_each(inputs, from, std::slice::from_ref(to));
    answers.pop().expect("one question has one answer")
}

/// Like [`explain`] for many destinations, in their order. Each mesh is evaluated only once.
#[must_use]
pub fn explain_each(inputs: &ExplainInputs<'_>, from: &Source, to: &[Destination]) -> Vec<Explanation> {
    let by_age = by_age(inputs.meshes);
    let accepted = claims::accept(&by_age);
    let mut answers: Vec<Vec<Explanation>> = to.iter().map(|_| Vec::new()).collect();
    for mesh in &by_age {
        let named = |identity: &ClusterIdentity| mesh.clusters.iter().find(|c| c.identity.same_cluster(identity));
        let Some(source) = named(&from.cluster) else { continue };
        let planner = mesh::MeshPlanner {
            mesh,
            all: &by_age,
            accepted: &accepted,
            seen: inputs.seen,
            settings: inputs.settings,
            naming: inputs.naming,
            claimants: &inputs.plan.claimants,
            used: &Default::default(),
        };
        let mut planned = MeshPlan::default();
        let prepared = planner.prepare(&mut planned);
        for (to, answers) in to.iter().zip(&mut answers) {
            let Some(target) = named(&to.cluster).filter(|_| !from.cluster.same_cluster(&to.cluster)) else {
                continue;
            };
            let query = connectivity::Query {
                inputs,
                mesh,
                prepared: &prepared,
                source: &source.name,
                target: &target.name,
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
            answers.push(answer);
        }
    }
    to.iter()
        .zip(answers)
        .map(|(to, answers)| combine_answers(from, to, answers))
        .collect()
}

/// Combines the answers of all meshes for one destination.
fn combine_answers(from: &Source, to: &Destination, mut answers: Vec<Explanation>) -> Explanation {
    if from.cluster.same_cluster(&to.cluster) {
        return Explanation::new(
            Rule::SameCluster,
            "both are in the same cluster: packets between them do not use the mesh",
        );
    }
    // Allowed by one mesh is allowed. Otherwise, one mesh that does not know makes the answer unknown.
    answers.sort_by_key(Explanation::verdict);
    answers.into_iter().next().unwrap_or_else(|| {
        Explanation::new(
            Rule::NotInOneMesh,
            "no ClusterMesh contains both clusters: add one of them to a mesh of the other",
        )
    })
}

/// One endpoint of a Service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Backend {
    /// Its address.
    pub address: IpAddr,
    /// The Node that runs it, if its EndpointSlice names one.
    pub node: Option<String>,
    /// Its protocol and port.
    pub port: (Protocol, u16),
    /// It accepts new connections.
    pub ready: bool,
}

/// The endpoints of a Service, from its EndpointSlices. `port` = one of the Service's ports; `None` = all of them.
#[must_use]
pub fn backends(member: &Member, service: &ObjectName, port: Option<(Protocol, u16)>) -> BTreeSet<Backend> {
    let ports = member.services.get(service).map_or(&[][..], |service| &service.ports);
    let query = |name: &str, protocol: Protocol| {
        let mut ports = ports.iter();
        ports.any(|own| {
            let one = port.is_none_or(|port| port == (own.protocol, own.port));
            one && own.name == name && own.protocol == protocol
        })
    };
    let mut found = BTreeSet::new();
    let slices = member.slices.iter();
    for (_, slice) in
        slices.filter(|(name, slice)| name.namespace == service.namespace && slice.service == service.name)
    {
        for port in slice.ports.iter().filter(|port| query(&port.name, port.protocol)) {
            found.extend(slice.endpoints.iter().map(|endpoint| Backend {
                address: endpoint.address,
                node: endpoint.node.clone(),
                port: (port.protocol, port.port),
                ready: endpoint.ready && !endpoint.terminating,
            }));
        }
    }
    found
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
