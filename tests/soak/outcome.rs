//! Checks the members and the audit logs after the faults.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context, bail};
use clustermesh_api::{names, peer::Peer};
use clustermesh_lab::{AuditedWrite, wait_until};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use crate::{
    clusters::{CLUSTERS, Clusters},
    ledger::{Judged, Violation},
};

/// How long the members may take to become as planned. A pause of a backoff lasts up to a minute, and a node without its key keeps its
/// Peer for five minutes.
const PATIENCE: Duration = Duration::from_secs(600);
/// The time at the end in which nothing may be written.
const QUIET: Duration = Duration::from_secs(30);

/// Waits until the members are as planned, and judges all writes of the run.
pub(crate) async fn check(clusters: &Clusters) -> (Judged, Vec<Violation>) {
    let mut violations = Vec::new();
    let mut record = |why, result: Result<(), String>| {
        if let Err(write) = result {
            // These violations concern no single member. `write` contains the error, or all late writes.
            let member = "the mesh".to_owned();
            violations.push(Violation { member, write, why });
        }
    };
    let restored = restore(clusters).await;
    record("cannot end the faults", restored.map_err(|error| format!("{error:#}")));
    let settled = wait_until("all members to be as planned", PATIENCE, async || {
        is_settled(clusters).await.map_err(|error| format!("{error:#}"))
    });
    record("not as planned", settled.await.map_err(|error| error.to_string()));
    let before = peer_and_policy_writes(clusters);
    tokio::time::sleep(QUIET).await;
    let after = peer_and_policy_writes(clusters);
    let late: Vec<String> = after.difference(&before).cloned().collect();
    let late = if late.is_empty() { Ok(()) } else { Err(late.join("; ")) };
    record("written although nothing changed", late);

    let mut judged = Judged::default();
    for cluster in CLUSTERS {
        let writes = writes(clusters, cluster);
        let (counts, found) = clusters.ledger().judge(cluster, &writes);
        judged.writes += counts.writes;
        judged.deletes += counts.deletes;
        violations.extend(found);
    }
    (judged, violations)
}

/// Deletes the foreign Peers that a fault has created and could not delete.
async fn restore(clusters: &Clusters) -> anyhow::Result<()> {
    for cluster in CLUSTERS {
        clusters.delete_foreign_peers(cluster).await?;
    }
    Ok(())
}

async fn is_settled(clusters: &Clusters) -> anyhow::Result<()> {
    let mut nodes = Vec::new();
    for cluster in CLUSTERS {
        nodes.push((cluster, clusters.nodes(cluster).await?));
    }
    for cluster in CLUSTERS {
        let others = nodes.iter().filter(|(source, _)| *source != cluster);
        let wanted: BTreeSet<[String; 2]> = others.flat_map(|(_, nodes)| nodes.iter().map(of_node)).collect();
        let peers = clusters.peers(cluster).await?;
        let found: BTreeSet<[String; 2]> = peers.iter().map(of_peer).collect();
        if found != wanted || found.len() != peers.len() {
            let (more, less) = (found.difference(&wanted), wanted.difference(&found));
            bail!(
                "{cluster} has {:?} and lacks {:?}",
                more.collect::<Vec<_>>(),
                less.collect::<Vec<_>>()
            );
        }
    }
    clusters.check_plan().await.context("clustermeshctl plan")?;
    match clusters.env.condition("Ready").await {
        Some((state, _)) if state == "True/Meshed" => Ok(()),
        other => bail!("Ready: {other:?}"),
    }
}

/// Key and endpoint of a Node.
fn of_node(node: &Node) -> [String; 2] {
    let annotation = |name| node.annotations().get(name).cloned().unwrap_or_default();
    [names::KILO_KEY, names::KILO_ENDPOINT].map(annotation)
}

/// Key and endpoint of a Peer.
fn of_peer(peer: &Peer) -> [String; 2] {
    let endpoint = peer.spec.endpoint.as_ref().map(|endpoint| {
        let ip = endpoint.dns_or_ip.ip.as_deref().unwrap_or_default();
        format!("{ip}:{}", endpoint.port)
    });
    [peer.spec.public_key.clone(), endpoint.unwrap_or_default()]
}

/// The writes into a cluster, except Leases.
fn writes(clusters: &Clusters, cluster: &str) -> Vec<AuditedWrite> {
    let mut writes = clusters.env.lab.cluster(cluster).audited_writes().unwrap_or_default();
    writes.retain(|write| !write.is_of_lease());
    writes
}

/// All writes of Peers and PeerPolicies, in all clusters.
fn peer_and_policy_writes(clusters: &Clusters) -> BTreeSet<String> {
    let all = CLUSTERS.iter().flat_map(|cluster| {
        let writes = writes(clusters, cluster);
        writes
            .into_iter()
            .map(move |write| format!("{cluster}: {} {}", write.received, write.request))
    });
    all.filter(|text| text.contains(" peers/") || text.contains(" peerpolicies/"))
        .collect()
}
