//! What an answer means: as planned, not planned, or missing; by the tunnel or beside it. What is planned is the planner's word
//! ([`explain`]).

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use clustermesh_core::{
    mesh::{ClusterIdentity, Protocol},
    plan::explain::{self, Destination, Explanation, Source, Verdict},
};

use super::{
    Place,
    jobs::{Answer, Answers},
    sockets::Socket,
};
use crate::{plan::Outcome, world};

/// On which way something was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    /// Through the mesh's device.
    Tunnel,
    /// By another interface: the mesh has no part in it.
    Underlay,
    /// The node was not asked.
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

/// One socket that is told of.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) socket: SocketAddr,
    pub(super) what: String,
    pub(super) path: Path,
    pub(super) interface: Option<String>,
    pub(super) rule: String,
    /// Why it is as it is, or what to look at.
    pub(super) message: String,
}

/// What was found from one place of one cluster.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) from: Place,
    pub(super) to: String,
    pub(super) tried: usize,
    /// Granted, and answers.
    pub(super) open: Vec<Item>,
    /// Granted, should answer, and does not.
    pub(super) unanswered: Vec<Item>,
    /// Answers, and nothing grants it.
    pub(super) violations: Vec<Item>,
    /// Answers beside the mesh, to a member that is trusted.
    pub(super) beside: Vec<Item>,
    /// Not granted, and refused by somebody: a host on which nobody listens, or a firewall that says so.
    pub(super) refused: Vec<Item>,
    /// Answers, and the planner cannot tell.
    pub(super) unknown: Vec<Item>,
}

/// Interfaces by which each node reaches addresses, from what was tried on the node itself: by cluster and node.
pub(super) type Ways = BTreeMap<(String, String), BTreeMap<IpAddr, Option<String>>>;

/// Collects them.
pub(super) fn ways(answers: &[Result<Answers, String>]) -> Ways {
    let mut ways = Ways::new();
    for answers in answers.iter().flatten().filter(|answers| answers.place.host) {
        let Place { cluster, node, host: _ } = &answers.place;
        let of_node = ways.entry((cluster.clone(), node.clone())).or_default();
        of_node.extend(
            answers
                .by_socket
                .iter()
                .map(|(socket, answer)| (socket.ip(), answer.way.clone())),
        );
    }
    ways
}

pub(super) struct Judge<'a> {
    pub(super) outcome: &'a Outcome,
    pub(super) place: &'a Place,
    pub(super) from: &'a ClusterIdentity,
    /// Nothing but what is granted may be open to it.
    pub(super) confined: bool,
    /// The mesh's device.
    pub(super) device: &'a str,
    pub(super) answers: &'a Answers,
    pub(super) ways: Option<&'a BTreeMap<IpAddr, Option<String>>>,
}

impl Judge<'_> {
    pub(super) fn row(&self, to: &str, target: &ClusterIdentity, sockets: &BTreeMap<SocketAddr, &Socket>) -> Row {
        let mut row = Row {
            from: self.place.clone(),
            to: to.to_owned(),
            tried: sockets.len(),
            open: Vec::new(),
            unanswered: Vec::new(),
            violations: Vec::new(),
            beside: Vec::new(),
            refused: Vec::new(),
            unknown: Vec::new(),
        };
        let planned = self.planned(target, sockets);
        for ((socket, what), planned) in sockets.iter().zip(planned) {
            let Some(answer) = self.answers.by_socket.get(socket) else {
                continue;
            };
            let (path, interface) = self.path(*socket, what);
            let item = |message: String| Item {
                socket: *socket,
                what: what.what.clone(),
                path,
                interface: interface.clone(),
                rule: planned.rule.to_string(),
                message,
            };
            match (&*answer.answer, planned.verdict()) {
                ("open", Verdict::Allowed) => row.open.push(item(planned.message.clone())),
                ("open", Verdict::Unknown) => row.unknown.push(item(planned.message.clone())),
                ("open", Verdict::Denied) if path == Path::Underlay && !self.confined => {
                    row.beside.push(item(planned.message.clone()));
                }
                ("open", Verdict::Denied) => row.violations.push(item(planned.message.clone())),
                (_, Verdict::Allowed) if what.serving => {
                    row.unanswered
                        .push(item(self.cause(answer, path, interface.as_deref(), &planned)));
                }
                ("refused", Verdict::Denied) if path != Path::Underlay || self.confined => {
                    row.refused.push(item(planned.message.clone()));
                }
                _ => {}
            }
        }
        row
    }

    /// What the planner says of each, in their order.
    fn planned(&self, target: &ClusterIdentity, sockets: &BTreeMap<SocketAddr, &Socket>) -> Vec<Explanation> {
        let naming = world::naming(&self.outcome.world.observations.hub);
        let world = explain::ExplainInputs {
            meshes: &self.outcome.meshes,
            seen: &self.outcome.world.observations,
            settings: &self.outcome.settings,
            naming: &naming,
            plan: &self.outcome.plan,
        };
        // Of each socket itself and of whoever answers in its place; a mirror is its backends alone.
        let mut asked: Vec<Destination> = Vec::new();
        let mut owners: Vec<usize> = Vec::new();
        for (number, (socket, what)) in sockets.iter().enumerate() {
            let own = (!what.mirror).then(|| (socket.ip(), what.node.clone(), (Protocol::Tcp, socket.port())));
            let behind = what.backends.iter().map(|b| (b.address, b.node.clone(), b.port));
            for (address, node, port) in own.into_iter().chain(behind) {
                owners.push(number);
                asked.push(Destination {
                    cluster: target.clone(),
                    node,
                    address,
                    port: Some(port),
                });
            }
        }
        let mut explained: Vec<Option<Explanation>> = asked.iter().map(|_| None).collect();
        for v4 in [true, false] {
            let of_family = |destination: &Destination| destination.address.is_ipv4() == v4;
            let own = self.answers.addresses.iter().find(|address| address.is_ipv4() == v4);
            let source = Source {
                cluster: self.from.clone(),
                node: Some(self.place.node.clone()),
                address: own.copied(),
            };
            let questions: Vec<Destination> = asked.iter().filter(|to| of_family(to)).cloned().collect();
            let mut answers = explain::explain_each(&world, &source, &questions).into_iter();
            for (slot, _) in explained.iter_mut().zip(&asked).filter(|(_, to)| of_family(to)) {
                *slot = answers.next();
            }
        }
        let mut parts: Vec<Vec<Explanation>> = sockets.values().map(|_| Vec::new()).collect();
        for (owner, answer) in owners.into_iter().zip(explained) {
            parts[owner].extend(answer);
        }
        let whole = parts.into_iter().zip(sockets.values());
        whole.map(|(parts, what)| translated(parts, what)).collect()
    }

    fn path(&self, socket: SocketAddr, what: &Socket) -> (Path, Option<String>) {
        let way = |address: &IpAddr| self.ways.and_then(|ways| ways.get(address)).cloned();
        let found = if what.mirror {
            what.backends.iter().find_map(|backend| way(&backend.address))
        } else {
            way(&socket.ip())
        };
        match found {
            None => (Path::Unknown, None),
            Some(Some(interface)) if interface == self.device => (Path::Tunnel, Some(interface)),
            Some(interface) => (Path::Underlay, interface),
        }
    }

    /// What to look at where something that is granted does not answer.
    fn cause(&self, answer: &Answer, path: Path, interface: Option<&str>, planned: &Explanation) -> String {
        let Place { cluster, node, host: _ } = self.place;
        if let Some(route) = &planned.route {
            let missing = [(&route.out, "here"), (&route.back, "there")]
                .into_iter()
                .find(|(hop, _)| !hop.written);
            if let Some((hop, side)) = missing {
                return format!(
                    "Peer {} is not written yet {side}: see the conditions of the ClusterMesh and the controller's log",
                    hop.peer
                );
            }
            if let Some((policy, false)) = &route.policy {
                return format!("PeerPolicy {policy} is not written yet there: see the conditions of the ClusterMesh");
            }
        }
        match (&*answer.answer, path) {
            ("refused", _) => {
                "it is refused: nobody listens there, its Service has no ready endpoint, or a NetworkPolicy of \
                               its cluster refuses it"
                    .to_owned()
            }
            (_, Path::Underlay) => match interface {
                Some(interface) => format!(
                    "Node {node} sends it out by {interface} and not into the tunnel: does wg-agent run there, and take the \
                     Peer? See `wg-agent status` on it"
                ),
                None => format!(
                    "Node {node} has no route to it: wg-agent there keeps it closed or refused the Peer; see `wg-agent status` \
                     on it"
                ),
            },
            (_, Path::Tunnel | Path::Unknown) if planned.route.is_none() => format!(
                "no answer out of the tunnel ({}): is the tunnel between Node {node} of {cluster:?} and the gateway there up \
                 (`wg-agent status` on the Node)? Is the SandboxAccess applied and nothing of it refused (kubectl get \
                 sandboxgateways -A -o wide)? Does a NetworkPolicy close the way from gateways to the Service?",
                answer.answer
            ),
            (_, Path::Tunnel | Path::Unknown) => format!(
                "no answer out of the tunnel ({}): is the tunnel between Node {node} of {cluster:?} and the node there up \
                 (`wg-agent status` on both)? Does a NetworkPolicy close it? Has the agent there enforced the PeerPolicy?",
                answer.answer
            ),
        }
    }
}

/// An address that is translated lets in what one of its endpoints lets in, if it is reached at all.
fn translated(mut parts: Vec<Explanation>, what: &Socket) -> Explanation {
    let best = |parts: &mut Vec<Explanation>| {
        let best = parts.iter().enumerate().min_by_key(|(_, part)| part.verdict());
        let index = best.map_or(0, |(index, _)| index);
        parts.swap_remove(index)
    };
    if what.mirror && parts.is_empty() {
        return Explanation {
            rule: explain::Rule::NotGranted,
            message: "its Service has no endpoint".to_owned(),
            mesh: None,
            route: None,
            notes: Vec::new(),
        };
    }
    if what.mirror {
        return best(&mut parts);
    }
    let own = parts.remove(0);
    if parts.is_empty() || own.verdict() != Verdict::Allowed {
        return own;
    }
    let behind = best(&mut parts);
    if behind.verdict() == Verdict::Allowed {
        own
    } else {
        behind
    }
}
