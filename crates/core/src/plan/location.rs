//! Finds the leader of each location under Kilo's `location` granularity: its Peer contains the prefixes of all nodes of the
//! location. Kilo's word for a leader and the nodes that follow it is segment.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::observe::{Claim, Endpoint, Granularity, Member, Node, Server};

/// The leaders of a member, and the nodes whose prefixes their Peers contain.
#[derive(Debug, Default)]
pub(super) struct Segments<'a> {
    /// Leader -> the other nodes whose prefixes its Peer contains.
    pub(super) followers_by_leader: BTreeMap<&'a str, Vec<&'a str>>,
    /// Nodes that have no Peer of their own, because they follow a leader.
    pub(super) all_followers: BTreeSet<&'a str>,
}

/// Groups the nodes by location as kg does. `can_hold` = the node has a Peer that it can keep while it publishes nothing.
///
/// Only nodes on which kg owns the tunnel are grouped, with or without an agent in policy mode. Granularity is a setting of the
/// whole cluster, and kg removes its annotation at each restart, so a node without the annotation is treated like the others.
pub(super) fn segments<'a>(member: &'a Member, can_hold: &dyn Fn(&str, &Node) -> bool) -> Segments<'a> {
    let mut found = Segments::default();
    let (is_location_published, locations) = group(member);
    for nodes in locations.into_values() {
        // kg writes wireguard-ip "" on nodes that do not lead. So two nodes claim a WireGuard address only if one of them
        // is dead or has just lost the lead. The leader is the first that exists of:
        // - a node that claims an address and is not silent, chosen by kg's own order
        // - a held node, on which kg is restarting
        // - a silent node that claims an address
        // If no granularity is published, only a held node can lead.
        let claiming = || nodes.iter().filter(|(_, node)| is_location_published && claims(node));
        let kg_order =
            |(name, node): &&(&'a str, &'a Node)| (!node.ready, !node.is_preferred_leader, !is_public(node), *name);
        let active = claiming().filter(|(_, node)| !node.is_silent()).min_by_key(kg_order);
        let held = || nodes.iter().find(|(name, node)| !claims(node) && can_hold(name, node));
        let silent = || claiming().min_by_key(kg_order);
        let Some(&(leader, _)) = active.or_else(held).or_else(silent) else {
            continue;
        };
        // If no granularity is published, a node that has its own Peer may be a segment by itself, so it keeps that Peer.
        let is_follower = |name: &str, node: &Node| is_location_published || !(claims(node) || can_hold(name, node));
        let others = nodes
            .iter()
            .filter(|(name, node)| *name != leader && is_follower(name, node));
        let followers: Vec<&str> = others.map(|(name, _)| *name).collect();
        found.all_followers.extend(&followers);
        found.followers_by_leader.insert(leader, followers);
    }
    found
}

/// Whether a node of the member may be led by another one, whatever Peers exist.
pub(super) fn may_have_followers(member: &Member) -> bool {
    let (is_location_published, locations) = group(member);
    // If no granularity is published, neither the leader nor its followers claim an address.
    let can_be_grouped = |(_, node): &&(&str, &Node)| is_location_published || !claims(node);
    let mut locations = locations.values();
    locations.any(|nodes| nodes.iter().filter(can_be_grouped).count() > 1)
}

/// Nodes with their names, by location.
type NodesByLocation<'a> = BTreeMap<&'a str, Vec<(&'a str, &'a Node)>>;

/// The nodes that kg may group, by location, and whether a node publishes the granularity `location`.
fn group(member: &Member) -> (bool, NodesByLocation<'_>) {
    let published: BTreeSet<Granularity> = member.nodes.values().filter_map(|node| node.granularity).collect();
    let is_location_published = published.contains(&Granularity::Location);
    // If no node publishes a granularity, kg is restarting on all nodes at once. Then the nodes are grouped, because the granularity may be
    // `location`.
    if !is_location_published && !published.is_empty() {
        return (false, BTreeMap::new());
    }
    let mut locations = NodesByLocation::new();
    for (name, node) in &member.nodes {
        let is_grouped = matches!(node.granularity, None | Some(Granularity::Location)) && node.server != Server::Agent;
        // A node without a private address is a segment by itself, because other nodes reach it only through the tunnel.
        // kg annotates the private address, and removes the annotation while it restarts. Meanwhile the Node's InternalIPs show
        // whether the node has one.
        let has_private_address =
            node.kilo_internal_ip.is_some() || (node.granularity.is_none() && !node.internal_ips.is_empty());
        if is_grouped && has_private_address {
            locations.entry(&node.location).or_default().push((name, node));
        }
    }
    (is_location_published, locations)
}

fn claims(node: &Node) -> bool {
    node.wireguard_ip.value().is_some()
}

/// Whether kg treats the node's endpoint as public: every address outside RFC 1918 and fd00::/16, including shared address space
/// (RFC 6598). A host name is not public.
fn is_public(node: &Node) -> bool {
    match &node.kilo_endpoint {
        Claim::Valid(Endpoint::Ip(address)) => match address.ip().to_canonical() {
            IpAddr::V4(v4) => !v4.is_private(),
            IpAddr::V6(v6) => v6.segments()[0] != 0xfd00,
        },
        _ => false,
    }
}
