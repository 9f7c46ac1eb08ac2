//! Kilo's `location` granularity: one leader carries the ranges of all nodes of its location (KILO.md §7a).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::observe::{Claim, Endpoint, Granularity, Member, Node, Server};

/// Which node stands for which others.
#[derive(Debug, Default)]
pub(super) struct Segments<'a> {
    /// Leader -> the nodes whose ranges it carries, itself not among them.
    pub(super) followers: BTreeMap<&'a str, Vec<&'a str>>,
    /// Nodes that have no Peer because a leader stands for them.
    pub(super) led: BTreeSet<&'a str>,
}

/// Groups the nodes as kg does. `is_held` = the node publishes nothing at the moment and keeps its last Peer.
///
/// Which nodes kg tunnels is decided by what kg publishes: an agent in policy mode beside it changes nothing. Granularity
/// is a setting of the whole cluster, and kg removes the annotation at each restart, so a node that publishes none follows
/// the others.
pub(super) fn segments<'a>(member: &'a Member, is_held: &dyn Fn(&str, &Node) -> bool) -> Segments<'a> {
    let mut found = Segments::default();
    let published: BTreeSet<Granularity> = member.nodes.values().filter_map(|node| node.granularity).collect();
    // Where no node publishes one, all kg restart at once.
    if !published.is_empty() && !published.contains(&Granularity::Location) {
        return found;
    }
    let mut locations: BTreeMap<&str, Vec<(&str, &Node)>> = BTreeMap::new();
    for (name, node) in &member.nodes {
        let follows = matches!(node.granularity, None | Some(Granularity::Location)) && node.server != Server::Agent;
        // A node without a private address is a segment of its own: no other node can reach it but through the tunnel.
        // During a restart the annotation is gone too, and then the Node's own status says whether it has one.
        let private = node.kilo_internal_ip.is_some() || (node.granularity.is_none() && !node.internal_ips.is_empty());
        if follows && private {
            locations.entry(&node.location).or_default().push((name, node));
        }
    }
    let by_location = !published.is_empty();
    for nodes in locations.into_values() {
        // kg writes wireguard-ip "" on non-leaders. Two claim one while a leader that died, or that was one, still publishes
        // it: of those that check in, the one that kg itself would choose. One that restarts comes before one that died.
        let claims = |node: &Node| node.wireguard_ip.value().is_some();
        let claiming = || nodes.iter().filter(|(_, node)| by_location && claims(node));
        let choice = |(name, node): &&(&'a str, &'a Node)| (!node.ready, !node.leader, !is_public(node), *name);
        let living = claiming().filter(|(_, node)| !node.is_silent()).min_by_key(choice);
        let held = || nodes.iter().find(|(name, node)| !claims(node) && is_held(name, node));
        let dead = || claiming().min_by_key(choice);
        let Some(&(leader, _)) = living.or_else(held).or_else(dead) else {
            continue;
        };
        // Where no granularity is published, a node with a Peer of its own may be a segment.
        let follows = |name: &str, node: &Node| by_location || !(claims(node) || is_held(name, node));
        let others = nodes
            .iter()
            .filter(|(name, node)| *name != leader && follows(name, node));
        let followers: Vec<&str> = others.map(|(name, _)| *name).collect();
        found.led.extend(&followers);
        found.followers.insert(leader, followers);
    }
    found
}

/// Whether its endpoint is public in the eyes of kg: anything outside RFC 1918 and fd00::/16, shared address space
/// (RFC 6598) among it.
fn is_public(node: &Node) -> bool {
    match &node.kilo_endpoint {
        Claim::Valid(Endpoint::Ip(address)) => match address.ip().to_canonical() {
            IpAddr::V4(v4) => !v4.is_private(),
            IpAddr::V6(v6) => v6.segments()[0] != 0xfd00,
        },
        _ => false,
    }
}
