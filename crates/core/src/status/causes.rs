//! Finds the causes of the conditions of a mesh: each names what is wrong, and the member.

use std::collections::{BTreeMap, BTreeSet};

use super::join_first_five;
use crate::{
    enforcement::list_nodes,
    links::BrokenTunnels,
    plan::{Fact, HOLD, MeshPlan},
};

/// One cause for which a condition is not in its good state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// The condition's type, such as `Ready`.
    pub kind: &'static str,
    /// One word in CamelCase. A condition has the reason of its first cause.
    pub reason: &'static str,
    /// The member that has the problem, by entry name. `None` = the whole mesh.
    pub cluster: Option<String>,
    /// If tunnels are down: the member to which these tunnels lead. Otherwise `None`.
    pub to: Option<String>,
    /// What is wrong, and what to do.
    pub message: String,
}

impl Cause {
    /// A cause in the whole mesh.
    #[must_use]
    pub const fn of_mesh(kind: &'static str, reason: &'static str, message: String) -> Self {
        Self {
            kind,
            reason,
            cluster: None,
            to: None,
            message,
        }
    }

    /// A cause in one member.
    #[must_use]
    pub fn of_member(kind: &'static str, reason: &'static str, cluster: &str, message: String) -> Self {
        Self {
            cluster: Some(cluster.to_owned()),
            ..Self::of_mesh(kind, reason, message)
        }
    }
}

/// The causes of `Ready`. See [`super::causes`] for the parameters.
pub(super) fn of_ready(
    plan: &MeshPlan,
    unwritten: &BTreeMap<String, String>,
    leftovers: &BTreeMap<String, String>,
    outstanding: &BTreeMap<(String, String), usize>,
) -> Vec<Cause> {
    let member = |reason, cluster: &str, message| Cause::of_member("Ready", reason, cluster, message);
    let mut problems = Vec::new();
    if plan.deleting {
        let message = "the ClusterMesh is being deleted".to_owned();
        problems.push(Cause::of_mesh("Ready", "Deleting", message));
    }
    for fact in &plan.facts {
        match fact {
            Fact::NetworksOverlap {
                cluster,
                message,
                lost: true,
            } => problems.push(member("NetworksOverlap", cluster, message.clone())),
            Fact::NoGateway { cluster, message } => problems.push(member("NoGateway", cluster, message.clone())),
            Fact::ProfileConflict { cluster, message } => {
                problems.push(member("ProfileConflict", cluster, message.clone()));
            }
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
                problems.push(member(reason, cluster, format!("cluster {cluster:?}: {message}")));
            }
            Fact::PeerCRDMissing { cluster } => problems.push(member(
                "PeerCRDMissing",
                cluster,
                format!("cluster {cluster:?} has no CRD peers.kilo.squat.ai; install the agent's manifests there"),
            )),
            _ => {}
        }
    }
    problems.extend(
        unwritten
            .iter()
            .map(|(cluster, why)| member("WriteFailed", cluster, format!("cluster {cluster:?}: {why}"))),
    );
    // Objects left in a removed cluster count here only while the mesh is being deleted, because its deletion waits for them.
    if plan.deleting {
        problems.extend(
            leftovers
                .iter()
                .map(|(cluster, why)| member("ObjectsLeft", cluster, objects_left(cluster, why))),
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
            problems.push(member(
                "NoNodes",
                name,
                format!("no Node of cluster {name:?} has a Peer yet"),
            ));
        }
    }
    problems
}

fn objects_left(cluster: &str, why: &str) -> String {
    format!("objects of this mesh are left in cluster {cluster:?}, which the spec no longer names: {why}")
}

/// Reports how many objects differ from the plan, if any do.
fn converging<'a>(
    plan: &MeshPlan,
    outstanding: impl Iterator<Item = (&'a (String, String), &'a usize)> + Clone,
) -> Option<Cause> {
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
    Some(Cause::of_member(
        "Ready",
        reason,
        target,
        format!("{total} objects {state}; {most} of them in cluster {target:?} for cluster {source:?}"),
    ))
}

/// The causes of `NetworksOverlap`.
pub(super) fn of_overlap(plan: &MeshPlan) -> impl Iterator<Item = Cause> + '_ {
    plan.facts.iter().filter_map(|fact| match fact {
        Fact::NetworksOverlap { cluster, message, .. } => Some(Cause::of_member(
            "NetworksOverlap",
            "CIDROverlap",
            cluster,
            message.clone(),
        )),
        _ => None,
    })
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

/// The causes of `Degraded`. See [`super::causes`] for the parameters.
pub(super) fn of_degraded(
    plan: &MeshPlan,
    leftovers: &BTreeMap<String, String>,
    broken: &[BrokenTunnels],
) -> Vec<Cause> {
    let member = |reason, cluster: &str, message| Cause::of_member("Degraded", reason, cluster, message);
    let mut problems = Vec::new();
    problems.extend(
        leftovers
            .iter()
            .map(|(cluster, why)| member("ObjectsLeft", cluster, objects_left(cluster, why))),
    );
    for (name, report) in plan.clusters.iter().filter(|(_, report)| !report.skipped.is_empty()) {
        let first = &report.skipped[0];
        problems.push(member(
            "NodesSkipped",
            name,
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
        let (reason, cluster, message) = match fact {
            Fact::NoAnchor { cluster, message } => ("NoAnchor", cluster, format!("cluster {cluster:?}: {message}")),
            Fact::NetworkInUse { cluster, message } => {
                ("NetworkInUse", cluster, format!("cluster {cluster:?}: {message}"))
            }
            Fact::LocationsNotConnected { cluster, message } => (
                "LocationsNotConnected",
                cluster,
                format!("cluster {cluster:?}: {message}"),
            ),
            Fact::AddressShared { cluster, message } => {
                ("AddressShared", cluster, format!("cluster {cluster:?}: {message}"))
            }
            Fact::AddressLeftOut { cluster, message } => {
                ("AddressLeftOut", cluster, format!("cluster {cluster:?}: {message}"))
            }
            Fact::PodCIDRNotCovered { cluster, message } => {
                ("PodCIDRNotCovered", cluster, format!("cluster {cluster:?}: {message}"))
            }
            Fact::InternalIPNotCovered { cluster, nodes } => (
                "InternalIPNotCovered",
                cluster,
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
                    cluster,
                    format!(
                        "{} of cluster {cluster:?}: {}. Their last Peers are kept for {} minutes and then removed. Check wg-agent \
                         or kg on these nodes",
                        list_nodes(nodes.keys().collect::<Vec<_>>().into_iter()),
                        reasons.join(", "),
                        HOLD.as_secs() / 60
                    ),
                )
            }
            // One message for all of these facts, because the message is long and each pair of clusters may have such a fact.
            Fact::HostNetworkNotServed { cluster, .. } if is_first_unserved => {
                is_first_unserved = false;
                ("HostNetworkNotServed", cluster, host_network_not_served(plan))
            }
            Fact::KgSilent { cluster, nodes } => (
                "KgSilent",
                cluster,
                format!(
                    "kg has not checked in for 65 seconds for {} of cluster {cluster:?} (annotation kilo.squat.ai/last-seen): its \
                     annotations may be outdated, and changed Peers have no effect there. Check kg on these nodes; if it does not \
                     run any more, remove its annotations",
                    list_nodes(nodes.iter())
                ),
            ),
            Fact::Quarantined { cluster, message } => ("Quarantined", cluster, message.clone()),
            Fact::MeshTooLarge { cluster, peers } => (
                "MeshTooLarge",
                cluster,
                format!(
                    "cluster {cluster:?} would have {peers} Peers; 5000 are tested. One mesh per tenant scales further"
                ),
            ),
            Fact::EndpointUnresolved { cluster, node, host } => (
                "EndpointUnresolved",
                cluster,
                format!("endpoint {host:?} of Node {node} of cluster {cluster:?} has no address in DNS"),
            ),
            _ => continue,
        };
        problems.push(member(reason, cluster, message));
    }
    problems.extend(broken.iter().map(|link| Cause {
        to: Some(link.to.clone()),
        ..member("TunnelsDown", &link.from, describe_broken_link(plan, link))
    }));
    problems
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

/// The causes of `EgressResolved`: one for each grant that has a message.
pub(super) fn of_egress(plan: &MeshPlan) -> impl Iterator<Item = Cause> + '_ {
    let unresolved = plan.egress.iter().filter(|grant| !grant.message.is_empty());
    unresolved.map(|grant| {
        let message = format!("{} in cluster {:?}: {}", grant.service, grant.cluster, grant.message);
        Cause::of_member("EgressResolved", "Unresolved", &grant.cluster, message)
    })
}
