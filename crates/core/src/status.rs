//! What is said of a mesh: conditions derived from its plan and from what could not be written.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    enforcement::named,
    links::Broken,
    plan::{Fact, HOLD, MeshPlan},
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

/// The conditions of a mesh. `unwritten` = members, by entry name, into which the plan could not be written, and why; `left` =
/// clusters that the spec no longer names, whose objects cannot be removed now, and why; `broken` = between which members tunnels are down; `outstanding` = how many objects are not as planned, by the entry where
/// they are and the entry they describe.
#[must_use]
pub fn conditions(
    plan: &MeshPlan,
    unwritten: &BTreeMap<String, String>,
    left: &BTreeMap<String, String>,
    broken: &[Broken],
    outstanding: &BTreeMap<(String, String), usize>,
) -> Vec<Condition> {
    let mut conditions = vec![
        ready(plan, unwritten, left, outstanding),
        overlap(plan),
        degraded(plan, left, broken),
    ];
    if !plan.egress.is_empty() {
        conditions.push(egress(plan));
    }
    if plan.paused {
        let message = "nothing is written and nothing is deleted: spec.paused or the annotation cluster.x-k8s.io/paused says so, \
                       or clusterctl moves it to another hub"
            .into();
        conditions.push(Condition {
            kind: "Paused",
            status: true,
            reason: "Paused",
            message,
        });
    }
    conditions
}

fn ready(
    plan: &MeshPlan,
    unwritten: &BTreeMap<String, String>,
    left: &BTreeMap<String, String>,
    outstanding: &BTreeMap<(String, String), usize>,
) -> Condition {
    let mut troubles: Vec<(&'static str, String)> = Vec::new();
    if plan.deleting {
        troubles.push(("Deleting", "the ClusterMesh is being deleted".to_owned()));
    }
    for fact in &plan.facts {
        match fact {
            Fact::NetworksOverlap {
                message, lost: true, ..
            } => troubles.push(("NetworksOverlap", message.clone())),
            Fact::NoGateway { message, .. } => troubles.push(("NoGateway", message.clone())),
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
    // A mesh that works is ready, also where it left something behind; one that is being deleted waits for it.
    if plan.deleting {
        troubles.extend(
            left.iter()
                .map(|(cluster, why)| ("ObjectsLeft", objects_left(cluster, why))),
        );
    }
    let pending = outstanding
        .iter()
        .filter(|((target, _), _)| !unwritten.contains_key(target));
    troubles.extend(converging(plan, pending).filter(|_| !plan.deleting));
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
            let gateways = match plan.clusters.values().map(|report| report.gateways).sum::<usize>() {
                0 => String::new(),
                gateways => format!(" and {gateways} gateways"),
            };
            let message = format!("{nodes} nodes{gateways} of {} clusters are meshed", plan.clusters.len());
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

fn objects_left(cluster: &str, why: &str) -> String {
    format!("objects of this mesh are left in cluster {cluster:?}, which the spec no longer names: {why}")
}

/// How far what exists in the members is from the plan, if it is.
fn converging<'a>(
    plan: &MeshPlan,
    outstanding: impl Iterator<Item = (&'a (String, String), &'a usize)> + Clone,
) -> Option<(&'static str, String)> {
    let total: usize = outstanding.clone().map(|(_, count)| count).sum();
    // Of equal ones the first.
    let ((target, source), most) = outstanding
        .filter(|(_, count)| **count > 0)
        .min_by_key(|(_, count)| usize::MAX - **count)?;
    let state = if plan.paused {
        ("Paused", "are not as planned, and the mesh is paused")
    } else {
        ("Converging", "are still to be written or deleted")
    };
    let (reason, state) = state;
    Some((
        reason,
        format!("{total} objects {state}; {most} of them in cluster {target:?} for cluster {source:?}"),
    ))
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
pub fn describe_broken_link(link: &Broken) -> String {
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

fn degraded(plan: &MeshPlan, left: &BTreeMap<String, String>, broken: &[Broken]) -> Condition {
    let mut troubles: Vec<(&'static str, String)> = Vec::new();
    troubles.extend(
        left.iter()
            .map(|(cluster, why)| ("ObjectsLeft", objects_left(cluster, why))),
    );
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
            Fact::NetworkInUse { cluster, message } => ("NetworkInUse", format!("cluster {cluster:?}: {message}")),
            Fact::AddressShared { cluster, message } => ("AddressShared", format!("cluster {cluster:?}: {message}")),
            Fact::PodCIDRNotCovered { cluster, message } => {
                ("PodCIDRNotCovered", format!("cluster {cluster:?}: {message}"))
            }
            Fact::InternalIPNotCovered { cluster, nodes } => (
                "InternalIPNotCovered",
                format!(
                    "InternalIPs of {} in cluster {cluster:?} lie outside allowedNetworks or in an anchored network: what kg sends from these addresses is \
                     not accepted elsewhere. That is the host network and, where the CNI masquerades, what pods send through \
                     another node of their location. List each InternalIP as a /32",
                    nodes.join(", ")
                ),
            ),
            Fact::NodesHeld { cluster, nodes } => {
                let reasons: BTreeSet<String> = nodes.values().map(ToString::to_string).collect();
                let reasons: Vec<String> = reasons.into_iter().collect();
                (
                    "NodesHeld",
                    format!(
                        "{} of cluster {cluster:?}: {}. The last Peers stand for {} minutes, then they are removed. Look at wg-agent \
                         or kg on these nodes",
                        named(nodes.keys().collect::<Vec<_>>().into_iter()),
                        reasons.join(", "),
                        HOLD.as_secs() / 60
                    ),
                )
            }
            Fact::HostNetworkNotServed { cluster, target, nodes } => (
                "HostNetworkNotServed",
                format!(
                    "the InternalIP of {} of cluster {cluster:?} is the endpoint too, so the Peers in cluster {target:?}, which kg \
                     serves, leave it out (kg would send the tunnel's own packets into the tunnel): these nodes are not reached \
                     at their InternalIPs from there, and what kg sends from their host network is dropped there. Give the \
                     nodes another address as endpoint (annotation kilo.squat.ai/force-endpoint)",
                    named(nodes.iter())
                ),
            ),
            Fact::KgSilent { cluster, nodes } => (
                "KgSilent",
                format!(
                    "kg has not checked in for a minute for {} of cluster {cluster:?} (annotation kilo.squat.ai/last-seen): what \
                     is published there may be out of date, and changed Peers are not taken up. Look at kg on these nodes; \
                     where it does not run any more, remove its annotations",
                    named(nodes.iter())
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
    troubles.extend(broken.iter().map(|link| ("TunnelsDown", describe_broken_link(link))));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(counts: &[(&str, &str, usize)]) -> BTreeMap<(String, String), usize> {
        let counts = counts.iter();
        counts
            .map(|(target, source, count)| (((*target).to_owned(), (*source).to_owned()), *count))
            .collect()
    }

    fn ready_of(
        plan: &MeshPlan,
        unwritten: &[&str],
        outstanding: &[(&str, &str, usize)],
    ) -> (bool, &'static str, String) {
        let unwritten = unwritten
            .iter()
            .map(|entry| ((*entry).to_owned(), "403".to_owned()))
            .collect();
        let ready = conditions(plan, &unwritten, &BTreeMap::new(), &[], &counts(outstanding)).remove(0);
        assert_eq!(ready.kind, "Ready");
        (ready.status, ready.reason, ready.message)
    }

    #[test]
    fn mesh_is_ready_when_nothing_is_outstanding() {
        let plan = MeshPlan::default();
        let meshed = "0 nodes of 0 clusters are meshed".to_owned();
        assert_eq!(ready_of(&plan, &[], &[]), (true, "Meshed", meshed));
        let converging =
            "7 objects are still to be written or deleted; 4 of them in cluster \"b\" for cluster \"a\"".to_owned();
        let outstanding = [("a", "b", 3), ("b", "a", 4)];
        assert_eq!(ready_of(&plan, &[], &outstanding), (false, "Converging", converging));
        // What is refused has its own words.
        let refused = "cluster \"b\": 403; 3 objects are still to be written or deleted; 3 of them in cluster \"a\" for cluster \"b\"";
        assert_eq!(
            ready_of(&plan, &["b"], &outstanding),
            (false, "WriteFailed", refused.to_owned())
        );
    }

    #[test]
    fn mesh_paused_before_its_first_write_is_not_ready() {
        let plan = MeshPlan {
            paused: true,
            ..MeshPlan::default()
        };
        let paused =
            "2 objects are not as planned, and the mesh is paused; 2 of them in cluster \"a\" for cluster \"b\"";
        assert_eq!(
            ready_of(&plan, &[], &[("a", "b", 2)]),
            (false, "Paused", paused.to_owned())
        );
        assert!(ready_of(&plan, &[], &[]).0);
    }
}
