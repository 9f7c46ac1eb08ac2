//! What is said of a mesh: conditions derived from its plan and from what could not be written.

use std::collections::BTreeMap;

use crate::{
    links::Broken,
    plan::{Fact, MeshPlan},
};

/// One condition, without the times that its reporter keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// `Ready`, `NetworksOverlap`, `Degraded`, `PolicyEnforced`, `EgressResolved` or `Paused`.
    pub kind: &'static str,
    /// `True` or `False`.
    pub status: bool,
    /// One word, CamelCase.
    pub reason: &'static str,
    /// For a person.
    pub message: String,
}

/// The conditions of a mesh. `unwritten` = members, by entry name, into which the plan could not be written, and why;
/// `broken` = between which members tunnels are down.
#[must_use]
pub fn conditions(plan: &MeshPlan, unwritten: &BTreeMap<String, String>, broken: &[Broken]) -> Vec<Condition> {
    let mut conditions = vec![ready(plan, unwritten), overlap(plan), degraded(plan, broken)];
    if !plan.egress.is_empty() {
        conditions.push(egress(plan));
    }
    if plan.paused {
        let message =
            "nothing is written and nothing is deleted until spec.paused and the paused annotation are gone".into();
        conditions.push(Condition {
            kind: "Paused",
            status: true,
            reason: "Paused",
            message,
        });
    }
    conditions
}

fn ready(plan: &MeshPlan, unwritten: &BTreeMap<String, String>) -> Condition {
    let mut troubles: Vec<(&'static str, String)> = Vec::new();
    if plan.deleting {
        troubles.push(("Deleting", "the ClusterMesh is being deleted".to_owned()));
    }
    for fact in &plan.facts {
        match fact {
            Fact::NetworksOverlap {
                message, lost: true, ..
            } => troubles.push(("NetworksOverlap", message.clone())),
            Fact::TargetCannotEnforce { message, .. } => troubles.push(("TargetCannotEnforce", message.clone())),
            Fact::ProfileConflict { message, .. } => troubles.push(("ProfileConflict", message.clone())),
            Fact::MemberNotFresh {
                cluster,
                state,
                message,
            } => {
                let reason = match *state {
                    "Stale" => "MemberStale",
                    "Missing" => "MemberMissing",
                    _ => "MemberUnreachable",
                };
                troubles.push((reason, format!("cluster {cluster:?}: {message}")));
            }
            Fact::PeerCRDMissing { cluster } => troubles.push((
                "PeerCRDMissing",
                format!("cluster {cluster:?} has no CRD peers.kilo.squat.ai; install the agent's manifests there"),
            )),
            _ => {}
        }
    }
    troubles.extend(
        unwritten
            .iter()
            .map(|(cluster, why)| ("WriteFailed", format!("cluster {cluster:?}: {why}"))),
    );
    for (name, report) in plan
        .clusters
        .iter()
        .filter(|(_, report)| report.registered == 0 && report.linked)
    {
        if troubles.is_empty() && !report.accepted.is_empty() {
            troubles.push(("NoNodes", format!("no Node of cluster {name:?} has a Peer yet")));
        }
    }
    match troubles.first() {
        None => {
            let nodes: usize = plan.clusters.values().map(|report| report.registered).sum();
            let message = format!("{nodes} nodes of {} clusters are meshed", plan.clusters.len());
            Condition {
                kind: "Ready",
                status: true,
                reason: "Meshed",
                message,
            }
        }
        Some((reason, _)) => Condition {
            kind: "Ready",
            status: false,
            reason,
            message: list(troubles.iter().map(|(_, m)| m)),
        },
    }
}

fn overlap(plan: &MeshPlan) -> Condition {
    let overlaps: Vec<&String> = plan
        .facts
        .iter()
        .filter_map(|fact| match fact {
            Fact::NetworksOverlap { message, .. } => Some(message),
            _ => None,
        })
        .collect();
    if overlaps.is_empty() {
        let message = "networks of different clusters are disjoint".to_owned();
        return Condition {
            kind: "NetworksOverlap",
            status: false,
            reason: "NoOverlap",
            message,
        };
    }
    Condition {
        kind: "NetworksOverlap",
        status: true,
        reason: "CIDROverlap",
        message: list(overlaps.into_iter()),
    }
}

/// What is said of a link: whose tunnels, how many, and where to look.
#[must_use]
pub fn down(link: &Broken) -> String {
    let Broken {
        from,
        to,
        up: _,
        down,
        total,
    } = link;
    format!(
        "{down} of {total} tunnels from nodes of cluster {from:?} to cluster {to:?} are down; `wg-agent status` there names \
         them. Most likely UDP is blocked on the way, an endpoint is wrong, or a node does not run"
    )
}

fn degraded(plan: &MeshPlan, broken: &[Broken]) -> Condition {
    let mut troubles: Vec<(&'static str, String)> = Vec::new();
    for (name, report) in plan.clusters.iter().filter(|(_, report)| !report.skipped.is_empty()) {
        let first = &report.skipped[0];
        troubles.push((
            "NodesSkipped",
            format!(
                "{} node(s) of cluster {name:?} have no Peer, first {}: {} ({})",
                report.skipped.len(),
                first.node,
                first.reason,
                first.message
            ),
        ));
    }
    for fact in &plan.facts {
        let (reason, message) = match fact {
            Fact::NoAnchor { cluster, message } => ("NoAnchor", format!("cluster {cluster:?}: {message}")),
            Fact::AddressShared { cluster, message } => ("AddressShared", format!("cluster {cluster:?}: {message}")),
            Fact::InternalIPNotCovered { cluster, nodes } => (
                "InternalIPNotCovered",
                format!(
                    "InternalIPs of {} in cluster {cluster:?} lie outside allowedNetworks: what their host network sends is not \
                     accepted elsewhere",
                    nodes.join(", ")
                ),
            ),
            Fact::Quarantined { message, .. } => ("Quarantined", message.clone()),
            Fact::MeshTooLarge { cluster, peers } => (
                "MeshTooLarge",
                format!(
                    "cluster {cluster:?} would hold {peers} Peers; 5000 are tested. One mesh per tenant scales further"
                ),
            ),
            Fact::EndpointUnresolved { cluster, node, host } => (
                "EndpointUnresolved",
                format!("endpoint {host:?} of Node {node} of cluster {cluster:?} has no address in DNS"),
            ),
            _ => continue,
        };
        troubles.push((reason, message));
    }
    troubles.extend(broken.iter().map(|link| ("TunnelsDown", down(link))));
    match troubles.first() {
        None => Condition {
            kind: "Degraded",
            status: false,
            reason: "AllServed",
            message: "every node has its Peer, and no tunnel is known to be down".to_owned(),
        },
        Some((reason, _)) => Condition {
            kind: "Degraded",
            status: true,
            reason,
            message: list(troubles.iter().map(|(_, message)| message)),
        },
    }
}

fn egress(plan: &MeshPlan) -> Condition {
    let open: Vec<String> = plan
        .egress
        .iter()
        .filter(|grant| !grant.message.is_empty())
        .map(|grant| format!("{} in cluster {:?}: {}", grant.service, grant.cluster, grant.message))
        .collect();
    if open.is_empty() {
        let message = format!("{} Service(s) are mirrored", plan.egress.len());
        return Condition {
            kind: "EgressResolved",
            status: true,
            reason: "Resolved",
            message,
        };
    }
    Condition {
        kind: "EgressResolved",
        status: false,
        reason: "Unresolved",
        message: list(open.iter()),
    }
}

/// Joins messages, as many as a person reads and the API's limit of 32 KiB bears.
fn list<'a>(messages: impl Iterator<Item = &'a String>) -> String {
    let all: Vec<&str> = messages.map(String::as_str).collect();
    let shown = all.len().min(5);
    let mut text = all[..shown].join("; ");
    if all.len() > shown {
        text.push_str(&format!("; and {} more", all.len() - shown));
    }
    text
}
