//! Derives the conditions of a mesh from its plan, failed writes, and broken links.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    enforcement::list_nodes,
    links::BrokenTunnels,
    plan::{Fact, HOLD, MeshPlan},
};

/// One condition, without `lastTransitionTime`, which the writer of the status adds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// `Ready`, `NetworksOverlap`, `Degraded`, `PolicyEnforced`, `EgressResolved`, `VersionsCompatible` or `Paused`.
    pub kind: &'static str,
    /// `True` or `False`.
    pub status: bool,
    /// One word in CamelCase, for programs.
    pub reason: &'static str,
    /// The message for people.
    pub message: String,
}

/// Derives the conditions of a mesh, except `PolicyEnforced` ([`crate::enforcement::condition`]) and `VersionsCompatible`
/// ([`crate::versions::condition`]).
///
/// - `unwritten`: members, by entry name, into which something could not be written, with the reason.
/// - `leftovers`: clusters that were removed from the spec, with the reason why the mesh's objects there are not deleted yet.
/// - `broken`: links with tunnels that are down.
/// - `outstanding`: the number of objects that differ from the plan, by (target entry, source entry).
#[must_use]
pub fn conditions(
    plan: &MeshPlan,
    unwritten: &BTreeMap<String, String>,
    leftovers: &BTreeMap<String, String>,
    broken: &[BrokenTunnels],
    outstanding: &BTreeMap<(String, String), usize>,
) -> Vec<Condition> {
    let mut conditions = vec![
        ready_condition(plan, unwritten, leftovers, outstanding),
        overlap_condition(plan),
        degraded_condition(plan, leftovers, broken),
    ];
    if !plan.egress.is_empty() {
        conditions.push(egress_condition(plan));
    }
    if plan.paused {
        let message =
            "nothing is written and nothing is deleted: spec.paused or the annotation cluster.x-k8s.io/paused is set, \
                       or clusterctl is moving the ClusterMesh to another hub"
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

fn ready_condition(
    plan: &MeshPlan,
    unwritten: &BTreeMap<String, String>,
    leftovers: &BTreeMap<String, String>,
    outstanding: &BTreeMap<(String, String), usize>,
) -> Condition {
    let mut problems: Vec<(&'static str, String)> = Vec::new();
    if plan.deleting {
        problems.push(("Deleting", "the ClusterMesh is being deleted".to_owned()));
    }
    for fact in &plan.facts {
        match fact {
            Fact::NetworksOverlap {
                message, lost: true, ..
            } => problems.push(("NetworksOverlap", message.clone())),
            Fact::NoGateway { message, .. } => problems.push(("NoGateway", message.clone())),
            Fact::ProfileConflict { message, .. } => problems.push(("ProfileConflict", message.clone())),
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
                problems.push((reason, format!("cluster {cluster:?}: {message}")));
            }
            Fact::PeerCRDMissing { cluster } => problems.push((
                "PeerCRDMissing",
                format!("cluster {cluster:?} has no CRD peers.kilo.squat.ai; install the agent's manifests there"),
            )),
            _ => {}
        }
    }
    problems.extend(
        unwritten
            .iter()
            .map(|(cluster, why)| ("WriteFailed", format!("cluster {cluster:?}: {why}"))),
    );
    // Objects left in a removed cluster count here only while the mesh is being deleted, because its deletion waits for them.
    if plan.deleting {
        problems.extend(
            leftovers
                .iter()
                .map(|(cluster, why)| ("ObjectsLeft", objects_left(cluster, why))),
        );
    }
    let outstanding = outstanding
        .iter()
        .filter(|((target, _), _)| !unwritten.contains_key(target));
    problems.extend(converging(plan, outstanding).filter(|_| !plan.deleting));
    for (name, report) in plan
        .clusters
        .iter()
        .filter(|(_, report)| report.registered == 0 && report.needs_registration)
    {
        if problems.is_empty() && !report.accepted.is_empty() {
            problems.push(("NoNodes", format!("no Node of cluster {name:?} has a Peer yet")));
        }
    }
    match problems.first() {
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
            message: join_first_five(problems.iter().map(|(_, m)| m)),
        },
    }
}

fn objects_left(cluster: &str, why: &str) -> String {
    format!("objects of this mesh are left in cluster {cluster:?}, which the spec no longer names: {why}")
}

/// Reports how many objects differ from the plan, if any do.
fn converging<'a>(
    plan: &MeshPlan,
    outstanding: impl Iterator<Item = (&'a (String, String), &'a usize)> + Clone,
) -> Option<(&'static str, String)> {
    let total: usize = outstanding.clone().map(|(_, count)| count).sum();
    // The first pair among those with the largest count. `max_by_key` would return the last one.
    let ((target, source), most) = outstanding
        .filter(|(_, count)| **count > 0)
        .min_by_key(|(_, count)| usize::MAX - **count)?;
    let (reason, state) = if plan.paused {
        ("Paused", "are not as planned, and the mesh is paused")
    } else {
        ("Converging", "are still to be written or deleted")
    };
    Some((
        reason,
        format!("{total} objects {state}; {most} of them in cluster {target:?} for cluster {source:?}"),
    ))
}

fn overlap_condition(plan: &MeshPlan) -> Condition {
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
        message: join_first_five(overlaps.into_iter()),
    }
}

/// The message about a broken link.
#[must_use]
pub fn describe_broken_link(plan: &MeshPlan, link: &BrokenTunnels) -> String {
    let BrokenTunnels {
        from,
        to,
        up: _,
        down,
        total,
    } = link;
    let node_behind_nat = |cluster: &str| plan.clusters.get(cluster)?.behind_nat.as_deref();
    let cause = match (node_behind_nat(from), node_behind_nat(to)) {
        (Some(one), Some(other)) => format!(
            "Nodes of both clusters are behind NATs ({one}, {other}): they reach each other only if both NATs give a node the same \
             public port for every destination. Else forward a UDP port to one of the nodes, and name it in the annotation \
             kilo.squat.ai/clustermesh-endpoint of this Node"
        ),
        _ => "Most likely UDP is blocked, an endpoint is wrong, or a node is down".to_owned(),
    };
    format!(
        "{down} of {total} tunnels from nodes of cluster {from:?} to cluster {to:?} are down; `wg-agent status` on \
         each node of {from:?} lists its own. {cause}"
    )
}

fn degraded_condition(plan: &MeshPlan, leftovers: &BTreeMap<String, String>, broken: &[BrokenTunnels]) -> Condition {
    let mut problems: Vec<(&'static str, String)> = Vec::new();
    problems.extend(
        leftovers
            .iter()
            .map(|(cluster, why)| ("ObjectsLeft", objects_left(cluster, why))),
    );
    for (name, report) in plan.clusters.iter().filter(|(_, report)| !report.skipped.is_empty()) {
        let first = &report.skipped[0];
        problems.push((
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
    let mut is_first_unserved = true;
    for fact in &plan.facts {
        let (reason, message) = match fact {
            Fact::NoAnchor { cluster, message } => ("NoAnchor", format!("cluster {cluster:?}: {message}")),
            Fact::NetworkInUse { cluster, message } => ("NetworkInUse", format!("cluster {cluster:?}: {message}")),
            Fact::LocationsNotConnected { cluster, message } => {
                ("LocationsNotConnected", format!("cluster {cluster:?}: {message}"))
            }
            Fact::AddressShared { cluster, message } => ("AddressShared", format!("cluster {cluster:?}: {message}")),
            Fact::AddressLeftOut { cluster, message } => ("AddressLeftOut", format!("cluster {cluster:?}: {message}")),
            Fact::PodCIDRNotCovered { cluster, message } => {
                ("PodCIDRNotCovered", format!("cluster {cluster:?}: {message}"))
            }
            Fact::InternalIPNotCovered { cluster, nodes } => (
                "InternalIPNotCovered",
                format!(
                    "InternalIPs of {} in cluster {cluster:?} lie outside allowedNetworks or in an anchored network: packets that kg sends \
                     from these addresses are dropped in other clusters. This affects the host network and, if the CNI masquerades, \
                     pods of nodes that do not lead their Kilo location. List each InternalIP as a /32",
                    nodes.join(", ")
                ),
            ),
            Fact::NodesHeld { cluster, nodes } => {
                let reasons: BTreeSet<String> = nodes.values().map(ToString::to_string).collect();
                let reasons: Vec<String> = reasons.into_iter().collect();
                (
                    "NodesHeld",
                    format!(
                        "{} of cluster {cluster:?}: {}. Their last Peers are kept for {} minutes and then removed. Check wg-agent \
                         or kg on these nodes",
                        list_nodes(nodes.keys().collect::<Vec<_>>().into_iter()),
                        reasons.join(", "),
                        HOLD.as_secs() / 60
                    ),
                )
            }
            // One message for all of these facts: it is long, and every two clusters may have such a fact.
            Fact::HostNetworkNotServed { .. } if is_first_unserved => {
                is_first_unserved = false;
                ("HostNetworkNotServed", host_network_not_served(plan))
            }
            Fact::KgSilent { cluster, nodes } => (
                "KgSilent",
                format!(
                    "kg has not checked in for 65 seconds for {} of cluster {cluster:?} (annotation kilo.squat.ai/last-seen): its \
                     annotations may be outdated, and changed Peers have no effect there. Check kg on these nodes; if it does not \
                     run any more, remove its annotations",
                    list_nodes(nodes.iter())
                ),
            ),
            Fact::Quarantined { message, .. } => ("Quarantined", message.clone()),
            Fact::MeshTooLarge { cluster, peers } => (
                "MeshTooLarge",
                format!(
                    "cluster {cluster:?} would have {peers} Peers; 5000 are tested. One mesh per tenant scales further"
                ),
            ),
            Fact::EndpointUnresolved { cluster, node, host } => (
                "EndpointUnresolved",
                format!("endpoint {host:?} of Node {node} of cluster {cluster:?} has no address in DNS"),
            ),
            _ => continue,
        };
        problems.push((reason, message));
    }
    problems.extend(
        broken
            .iter()
            .map(|link| ("TunnelsDown", describe_broken_link(plan, link))),
    );
    match problems.first() {
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
            message: join_first_five(problems.iter().map(|(_, message)| message)),
        },
    }
}

fn host_network_not_served(plan: &MeshPlan) -> String {
    let unserved = plan.facts.iter().filter_map(|fact| match fact {
        Fact::HostNetworkNotServed { cluster, target, nodes } => Some(format!(
            "in cluster {target:?} {} of cluster {cluster:?}",
            list_nodes(nodes.iter())
        )),
        _ => None,
    });
    let unserved: Vec<String> = unserved.collect();
    format!(
        "Peers in a cluster that kg serves leave out an InternalIP that is also the node's endpoint, because kg would route the tunnel's \
         own packets into the tunnel. From there these nodes cannot be reached at their InternalIPs, and there packets that kg sends from \
         their host network are dropped. Give the nodes another address as endpoint (annotation kilo.squat.ai/force-endpoint): {}",
        join_first_five(unserved.iter())
    )
}

fn egress_condition(plan: &MeshPlan) -> Condition {
    let unresolved: Vec<String> = plan
        .egress
        .iter()
        .filter(|grant| !grant.message.is_empty())
        .map(|grant| format!("{} in cluster {:?}: {}", grant.service, grant.cluster, grant.message))
        .collect();
    if unresolved.is_empty() {
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
        message: join_first_five(unresolved.iter()),
    }
}

/// Joins the first five messages and counts the others, because the API server limits a condition's message to 32 KiB.
pub(crate) fn join_first_five<'a>(messages: impl Iterator<Item = &'a String>) -> String {
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
    fn outstanding_object_or_failed_write_prevents_ready() {
        let plan = MeshPlan::default();
        let meshed = "0 nodes of 0 clusters are meshed".to_owned();
        assert_eq!(ready_of(&plan, &[], &[]), (true, "Meshed", meshed));
        let converging =
            "7 objects are still to be written or deleted; 4 of them in cluster \"b\" for cluster \"a\"".to_owned();
        let outstanding = [("a", "b", 3), ("b", "a", 4)];
        assert_eq!(ready_of(&plan, &[], &outstanding), (false, "Converging", converging));
        // A failed write is reported instead of the outstanding objects of that member.
        let write_failed = "cluster \"b\": 403; 3 objects are still to be written or deleted; 3 of them in cluster \"a\" for cluster \"b\"";
        assert_eq!(
            ready_of(&plan, &["b"], &outstanding),
            (false, "WriteFailed", write_failed.to_owned())
        );
    }

    #[test]
    fn paused_mesh_is_ready_only_when_nothing_is_outstanding() {
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
