//! Compares the answer of each socket with the plan ([`crate::explanation`]), and finds out whether the packets use the tunnel or
//! the underlay.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use clustermesh_core::mesh::{ClusterIdentity, Protocol};

use super::{
    ProbeSource,
    jobs::{Answer, Answers},
    sockets::Socket,
};
use crate::explanation::{Destination, Explainer, Explanation, Rule, Source, Verdict};

/// The path that packets of a connection use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    /// Through the mesh's WireGuard device.
    Tunnel,
    /// Outside the mesh: through another interface, or the node has no route.
    Underlay,
    /// The node's route is unknown.
    Unknown,
}

impl Path {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Tunnel => "tunnel",
            Self::Underlay => "underlay",
            Self::Unknown => "unknown",
        }
    }
}

/// The result for one socket.
#[derive(Debug)]
pub(super) struct Finding {
    pub(super) socket: SocketAddr,
    pub(super) description: String,
    pub(super) path: Path,
    pub(super) interface: Option<String>,
    pub(super) rule: String,
    /// The reason for the plan's verdict, or a hint for troubleshooting.
    pub(super) message: String,
}

/// The results of the probes from one source toward one cluster.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) from: ProbeSource,
    pub(super) to: String,
    pub(super) probed: usize,
    /// Sockets that the plan allows and that answer. The output calls allowed sockets "granted".
    pub(super) open: Vec<Finding>,
    /// Sockets that the plan allows and that should answer but do not.
    pub(super) unanswered: Vec<Finding>,
    /// Sockets that the plan denies and that answer, except those of `on_underlay`.
    pub(super) violations: Vec<Finding>,
    /// Sockets that the plan denies and that answer on the underlay, if [`Classifier::is_underlay_checked`] is false.
    pub(super) on_underlay: Vec<Finding>,
    /// Sockets that the plan denies and that refuse the connection: no process listens, or a firewall rejects the packets.
    /// If [`Classifier::is_underlay_checked`] is false, sockets that refuse on the underlay are left out.
    pub(super) refused: Vec<Finding>,
    /// Sockets that answer and for which the plan gives no verdict.
    pub(super) unknown: Vec<Finding>,
}

/// The interface through which each node reaches each address, by cluster and node (see [`Answer::interface`]).
pub(super) type InterfacesByNode = BTreeMap<(String, String), BTreeMap<IpAddr, Option<String>>>;

/// Collects the interfaces from the Jobs in the host network of each node.
pub(super) fn interfaces_by_node(answers: &[Result<Answers, String>]) -> InterfacesByNode {
    let mut interfaces = InterfacesByNode::new();
    for answers in answers.iter().flatten().filter(|answers| answers.source.is_host) {
        let ProbeSource { cluster, node, .. } = &answers.source;
        let of_node = interfaces.entry((cluster.clone(), node.clone())).or_default();
        of_node.extend(
            answers
                .by_socket
                .iter()
                .map(|(socket, answer)| (socket.ip(), answer.interface.clone())),
        );
    }
    interfaces
}

/// Classifies the answers that one probe source received.
pub(super) struct Classifier<'a> {
    pub(super) explainer: &'a Explainer<'a>,
    pub(super) source: &'a ProbeSource,
    pub(super) from: &'a ClusterIdentity,
    /// Whether denied sockets on the underlay are treated like those in the mesh ([`Row::violations`], [`Row::refused`]). False if the
    /// source's cluster is cluster-meshed in every mesh and not quarantined.
    pub(super) is_underlay_checked: bool,
    /// The mesh's WireGuard device.
    pub(super) device: &'a str,
    pub(super) answers: &'a Answers,
    /// The interface through which the source's node reaches each address ([`InterfacesByNode`]).
    pub(super) interfaces: Option<&'a BTreeMap<IpAddr, Option<String>>>,
}

impl Classifier<'_> {
    /// Classifies the answers of `sockets`, which are in the cluster with the name `to`.
    pub(super) fn classify(
        &self,
        to: &str,
        to_identity: &ClusterIdentity,
        sockets: &BTreeMap<SocketAddr, &Socket>,
    ) -> Row {
        let mut row = Row {
            from: self.source.clone(),
            to: to.to_owned(),
            probed: sockets.len(),
            open: Vec::new(),
            unanswered: Vec::new(),
            violations: Vec::new(),
            on_underlay: Vec::new(),
            refused: Vec::new(),
            unknown: Vec::new(),
        };
        let planned = self.explanations(to_identity, sockets);
        for ((address, socket), planned) in sockets.iter().zip(planned) {
            let Some(answer) = self.answers.by_socket.get(address) else {
                continue;
            };
            let (path, interface) = self.path(*address, socket);
            let finding = |message: String| Finding {
                socket: *address,
                description: socket.description.clone(),
                path,
                interface: interface.clone(),
                rule: planned.rule.to_string(),
                message,
            };
            match (&*answer.outcome, planned.verdict()) {
                ("open", Verdict::Allowed) => row.open.push(finding(planned.message.clone())),
                ("open", Verdict::Unknown) => row.unknown.push(finding(planned.message.clone())),
                ("open", Verdict::Denied) if path == Path::Underlay && !self.is_underlay_checked => {
                    row.on_underlay.push(finding(planned.message.clone()));
                }
                ("open", Verdict::Denied) => row.violations.push(finding(planned.message.clone())),
                (_, Verdict::Allowed) if socket.should_answer => {
                    row.unanswered
                        .push(finding(self.hint(answer, path, interface.as_deref(), &planned)));
                }
                ("refused", Verdict::Denied) if path != Path::Underlay || self.is_underlay_checked => {
                    row.refused.push(finding(planned.message.clone()));
                }
                _ => {}
            }
        }
        row
    }

    /// Returns the explanation of each socket, in the same order.
    fn explanations(&self, to_identity: &ClusterIdentity, sockets: &BTreeMap<SocketAddr, &Socket>) -> Vec<Explanation> {
        let explain = |address: IpAddr, node: Option<String>, port| {
            let mut source_addresses = self.answers.addresses.iter();
            let source = Source {
                cluster: self.from.clone(),
                node: Some(self.source.node.clone()),
                address: source_addresses
                    .find(|source| source.is_ipv4() == address.is_ipv4())
                    .copied(),
            };
            let destination = Destination {
                cluster: to_identity.clone(),
                node,
                address,
                port: Some(port),
            };
            self.explainer.explain(&source, &destination)
        };
        let explain_socket = |(address, socket): (&SocketAddr, &&Socket)| {
            // The ClusterIP of a mirrored Service is in the probing cluster, so only its backends are explained.
            let own = (!socket.is_local_mirror)
                .then(|| explain(address.ip(), socket.node.clone(), (Protocol::Tcp, address.port())));
            let backends = socket.backends.iter();
            let backends = backends.map(|b| explain(b.address, b.node.clone(), b.port));
            combine(own.into_iter().chain(backends).collect(), socket)
        };
        sockets.iter().map(explain_socket).collect()
    }

    fn path(&self, address: SocketAddr, socket: &Socket) -> (Path, Option<String>) {
        let interface = |address: &IpAddr| self.interfaces.and_then(|known| known.get(address)).cloned();
        let found = if socket.is_local_mirror {
            socket.backends.iter().find_map(|backend| interface(&backend.address))
        } else {
            interface(&address.ip())
        };
        match found {
            None => (Path::Unknown, None),
            Some(Some(interface)) if interface == self.device => (Path::Tunnel, Some(interface)),
            Some(interface) => (Path::Underlay, interface),
        }
    }

    /// Returns a hint for troubleshooting an allowed socket that does not answer.
    fn hint(&self, answer: &Answer, path: Path, interface: Option<&str>, planned: &Explanation) -> String {
        let ProbeSource { cluster, node, .. } = self.source;
        if let Some(route) = &planned.route {
            let missing = [(&route.out, "in this cluster"), (&route.back, "in the other cluster")]
                .into_iter()
                .find(|(hop, _)| !hop.written);
            if let Some((hop, side)) = missing {
                return format!(
                    "Peer {} is not written yet {side}: see the conditions of the ClusterMesh and the controller's log",
                    hop.peer
                );
            }
            if let Some((policy, false)) = &route.policy {
                return format!(
                    "PeerPolicy {policy} is not written yet in the other cluster: see the conditions of the ClusterMesh"
                );
            }
        }
        match (&*answer.outcome, path) {
            ("refused", _) => {
                "the connection is refused: no process listens, the Service has no ready endpoint, or a NetworkPolicy of that \
                 cluster rejects the connection"
                    .to_owned()
            }
            (_, Path::Underlay) => match interface {
                Some(interface) => format!(
                    "Node {node} sends the packets through {interface} and not into the tunnel: does wg-agent run on this Node, and does \
                     it accept the Peer? See `wg-agent status` on the Node"
                ),
                None => format!(
                    "Node {node} has no route to the address: wg-agent blocks it or refused the Peer; see `wg-agent status` on the Node"
                ),
            },
            // An allowed connection without a route in the plan is that of a sandbox: its packets go through a gateway.
            (_, Path::Tunnel | Path::Unknown) if planned.route.is_none() => format!(
                "no answer ({}): is the tunnel between Node {node} of {cluster:?} and the gateway up \
                 (`wg-agent status` on the Node)? Is the SandboxAccess applied, without refused grants (kubectl get \
                 sandboxgateways -A -o wide)? Does a NetworkPolicy block traffic from the gateways to the Service?",
                answer.outcome
            ),
            (_, Path::Tunnel | Path::Unknown) => format!(
                "no answer ({}): is the tunnel between Node {node} of {cluster:?} and the destination's node up \
                 (`wg-agent status` on both)? Does a NetworkPolicy block the packets? Has wg-agent on the destination's node applied \
                 the PeerPolicy?",
                answer.outcome
            ),
        }
    }
}

/// Combines the explanations of a socket and of its backends. A socket with backends is allowed if its address and
/// at least one backend are allowed; without backends, its address decides. For a mirror ([`Socket::is_local_mirror`]) `parts` has only
/// backends, and one allowed backend is enough.
fn combine(mut parts: Vec<Explanation>, socket: &Socket) -> Explanation {
    // `Allowed` is the smallest verdict.
    let take_best = |parts: &mut Vec<Explanation>| {
        let best = parts.iter().enumerate().min_by_key(|(_, part)| part.verdict());
        let index = best.map_or(0, |(index, _)| index);
        parts.swap_remove(index)
    };
    if socket.is_local_mirror && parts.is_empty() {
        return Explanation {
            rule: Rule::DestinationNotGranted,
            message: "the Service has no endpoint".to_owned(),
            mesh: None,
            route: None,
            notes: Vec::new(),
        };
    }
    if socket.is_local_mirror {
        return take_best(&mut parts);
    }
    let own = parts.remove(0);
    if parts.is_empty() || own.verdict() != Verdict::Allowed {
        return own;
    }
    let backend = take_best(&mut parts);
    if backend.verdict() == Verdict::Allowed {
        own
    } else {
        backend
    }
}
