//! Endpoints at which nodes see the nodes of other members (`kilo.squat.ai/discovered-endpoints`). Behind a NAT a node does not
//! know its own public endpoint, but each node to which it sends sees one.
//!
//! If the NAT maps a port independently of the destination (RFC 4787 §4.1), this endpoint works for other nodes too, as soon as
//! the node behind the NAT has sent to them. If the mapping depends on the destination, the endpoints that are seen differ.
//!
//! An annotation may be false. A false endpoint cannot answer a handshake: it costs an agent an attempt. So among the candidates of a
//! Peer, the endpoints that other members report come last. Endpoints that the nodes of the Peer's own target report come before
//! InternalIPs of the same IP family. A false report also makes the reported node's cluster send keepalives, which is cheap.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use super::{endpoint, target::MeshMember};
use crate::{
    key::PublicKey,
    mesh::{Cluster, ClusterIdentity, Profile},
    observe::{Member, Node},
};

/// The limit for each key, once for the endpoints that the target's own nodes report, and once for those that other members report.
const MAX_ENDPOINTS: usize = 2;

/// Endpoints by key, best first.
pub(super) type Discovered = BTreeMap<PublicKey, Vec<SocketAddr>>;

/// Returns, for each key, at most [`MAX_ENDPOINTS`] endpoints that nodes of a member report. The nodes must be Ready, and not being
/// deleted. An endpoint that more of them report comes first.
pub(super) fn by_member(member: Option<&Member>) -> Discovered {
    let mut seen: BTreeMap<PublicKey, BTreeMap<SocketAddr, usize>> = BTreeMap::new();
    let nodes = member.into_iter().flat_map(|member| member.nodes.values());
    for node in nodes.filter(|node| node.ready && !node.deleting) {
        let usable = node
            .discovered
            .iter()
            .filter(|(_, endpoint)| endpoint::unusable_reason(endpoint.ip().to_canonical()).is_none());
        for (key, endpoint) in usable {
            *seen.entry(*key).or_default().entry(*endpoint).or_default() += 1;
        }
    }
    seen.into_iter()
        .map(|(key, endpoints)| {
            let mut endpoints: Vec<(SocketAddr, usize)> = endpoints.into_iter().collect();
            endpoints.sort_by_key(|(endpoint, nodes)| (Reverse(*nodes), *endpoint));
            let endpoints = endpoints.into_iter().map(|(endpoint, _)| endpoint);
            (key, endpoints.take(MAX_ENDPOINTS).collect())
        })
        .collect()
}

/// Returns, for each key, at most [`MAX_ENDPOINTS`] endpoints that members other than `target` report. Reports of members that are
/// quarantined or not cluster-meshed do not count. The members take turns, the hub first, so that one member cannot use up the limit.
pub(super) fn by_others(mesh_members: &BTreeMap<String, MeshMember<'_>>, target: &str) -> Discovered {
    let is_accepted = |cluster: &Cluster| cluster.profile == Profile::ClusterMeshed && !cluster.quarantine;
    let mut members: Vec<&MeshMember<'_>> = mesh_members
        .iter()
        .filter(|(name, member)| *name != target && is_accepted(&member.cluster))
        .map(|(_, member)| member)
        .collect();
    members.sort_by_key(|member| member.cluster.identity != ClusterIdentity::Local);
    let mut all = Discovered::new();
    for turn in 0..MAX_ENDPOINTS {
        for (key, endpoints) in members.iter().flat_map(|member| &member.discovered) {
            let Some(endpoint) = endpoints.get(turn) else { continue };
            let kept = all.entry(*key).or_default();
            if kept.len() < MAX_ENDPOINTS && !kept.contains(endpoint) {
                kept.push(*endpoint);
            }
        }
    }
    all
}

/// Whether the node was seen at an address that it does not publish.
pub(super) fn is_behind_nat(node: &Node, seen: &Discovered) -> bool {
    let seen_at = node.public_key.value().and_then(|key| seen.get(key));
    let is_published = |ip: IpAddr| endpoint::node_addresses(node).any(|address| address == ip.to_canonical());
    seen_at
        .into_iter()
        .flatten()
        .any(|endpoint| !is_published(endpoint.ip()))
}

/// Returns the first node of a member that other members see at an address which it does not publish.
pub(super) fn find_node_behind_nat(mesh_members: &BTreeMap<String, MeshMember<'_>>, name: &str) -> Option<String> {
    let nodes = &mesh_members.get(name)?.last_observed()?.nodes;
    let seen = by_others(mesh_members, name);
    let mut nodes = nodes.iter().filter(|(_, node)| is_behind_nat(node, &seen));
    nodes.next().map(|(node, _)| node.to_owned())
}
