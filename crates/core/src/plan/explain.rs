//! Whether one connection is let through, by which rule, and on which way: asked of the plan and of the planner's own
//! decisions. What is asked in words, and how an answer is shown, is the command line's.
//!
//! Two halves: [`why`] asks the planner whether and how the two members are connected, [`packet`] follows the connection
//! through the Peers and policies that are planned. A rule that is not in the plan is not told here either.

use std::{collections::BTreeSet, fmt, net::IpAddr};

use ipnet::IpNet;

use super::{Naming, Plan, Settings, by_age, claims, mesh, result::MeshPlan};
use crate::{
    mesh::{Cluster, ClusterIdentity, Mesh, MeshId, ObjectName, Protocol},
    observe::{Member, Observation, Observations},
};

mod connectivity;
mod packet;

/// Who opens the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Where it is.
    pub cluster: ClusterIdentity,
    /// On which Node, where that is known.
    pub node: Option<String>,
    /// Its address; `None` = the Node itself (or a pod in its network).
    pub address: Option<IpAddr>,
}

/// Whom it is opened to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// Where it is.
    pub cluster: ClusterIdentity,
    /// On which Node, where that is known.
    pub node: Option<String>,
    /// Its address.
    pub address: IpAddr,
    /// `None` = any.
    pub port: Option<(Protocol, u16)>,
}

/// Yes, no, or not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It is let through once what is planned is written.
    Allowed,
    /// What it would need was not seen, or the mesh has no part in it.
    Unknown,
    /// It is not let through.
    Denied,
}

/// The rule that decides. The word is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the words are the documentation; `message` says the rest")]
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
    /// In lower case, as a sentence has it.
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
    /// What it comes to.
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

/// A Peer on the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hop {
    /// Its name, in the cluster that holds it.
    pub peer: String,
    /// The node it describes.
    pub node: String,
    /// Which of its allowedIPs holds the address.
    pub prefix: IpNet,
    /// It stands there as planned.
    pub written: bool,
}

/// How the connection goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The Peer in the source's cluster that carries it.
    pub out: Hop,
    /// The network rides on that node as an anchor: the backend sees the node's address, or that of a node behind it.
    pub anchored: bool,
    /// The Peer in the destination's cluster that lets the source in and carries the replies.
    pub back: Hop,
    /// The source address that arrives.
    pub seen_as: IpAddr,
    /// That is not the address it was sent with, but its node's WireGuard address. `None` = that is up to the CNI of a node
    /// that kg serves without an agent.
    pub masqueraded: Option<bool>,
    /// The PeerPolicy that speaks of the source, in the destination's cluster, and whether it stands there as planned.
    pub policy: Option<(String, bool)>,
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The rule that decides.
    pub rule: Rule,
    /// What it means here, and the remedy.
    pub message: String,
    /// The mesh it was decided by.
    pub mesh: Option<MeshId>,
    /// How it goes, as far as it was followed.
    pub route: Option<Route>,
    /// What else a person should know.
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

    /// What it comes to.
    #[must_use]
    pub const fn verdict(&self) -> Verdict {
        self.rule.verdict()
    }
}

/// Everything the plan was made of, and the plan.
#[derive(Clone, Copy)]
pub struct ExplainInputs<'a> {
    /// All meshes of the hub.
    pub meshes: &'a [Mesh],
    /// What was seen.
    pub seen: &'a Observations,
    /// What the operator set.
    pub settings: &'a Settings,
    /// How names are made.
    pub naming: &'a dyn Naming,
    /// [`super::plan`] of these.
    pub plan: &'a Plan,
}

/// Whether the connection is let through, and by which rule. `plan` must be the plan of the same meshes and observations.
#[must_use]
pub fn explain(inputs: &ExplainInputs<'_>, from: &Source, to: &Destination) -> Explanation {
    let mut answers = explain_each(inputs, from, std::slice::from_ref(to));
    answers.pop().expect("one question has one answer")
}

/// The same for many destinations, in their order, at the price of looking at each mesh once.
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
                    "ClusterMesh {} is paused: nothing of what is planned is written, and what stands may say otherwise",
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

/// Of what each mesh says of one destination, what holds.
fn combine_answers(from: &Source, to: &Destination, mut answers: Vec<Explanation>) -> Explanation {
    if from.cluster.same_cluster(&to.cluster) {
        return Explanation::new(
            Rule::SameCluster,
            "both are in one cluster: no packet between them is the mesh's",
        );
    }
    // What one mesh opens is open, whatever another has not; what is not known is not denied.
    answers.sort_by_key(Explanation::verdict);
    answers.into_iter().next().unwrap_or_else(|| {
        Explanation::new(
            Rule::NotInOneMesh,
            "no ClusterMesh names both clusters: add the missing entry to the mesh of the other",
        )
    })
}

/// One backend of a Service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Backend {
    /// Its address.
    pub address: IpAddr,
    /// The Node that runs it, where its EndpointSlice says so.
    pub node: Option<String>,
    /// Protocol and number of the port it serves on.
    pub port: (Protocol, u16),
    /// It takes new connections.
    pub ready: bool,
}

/// The backends of a Service, as its EndpointSlices have them. `port` = one of the Service's own ports; `None` = every one.
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

/// Last known value of a member.
fn member<'a>(seen: &'a Observations, identity: &ClusterIdentity) -> Option<&'a Member> {
    seen.members.get(identity).and_then(Observation::last)
}

/// `5432/TCP`.
fn port_text((protocol, port): (Protocol, u16)) -> String {
    format!("{port}/{}", protocol.as_str())
}

/// Networks of an entry, for a message.
fn bounds(cluster: &Cluster) -> String {
    let networks: Vec<String> = cluster.allowed.iter().map(ToString::to_string).collect();
    networks.join(", ")
}
