//! Kilo's `location` granularity: one leader carries the ranges of all nodes of its location (KILO.md §7a).

use std::collections::{BTreeMap, BTreeSet};

use crate::observe::{Granularity, Member, Node, Server};

/// Which node stands for which others.
#[derive(Debug, Default)]
pub(super) struct Segments<'a> {
    /// Leader -> the nodes whose ranges it carries, itself not among them.
    pub(super) followers: BTreeMap<&'a str, Vec<&'a str>>,
    /// Nodes that have no Peer because a leader stands for them.
    pub(super) led: BTreeSet<&'a str>,
}

/// Groups the nodes as kg does. Granularity is a setting of the whole cluster, and kg removes the annotation at each
/// restart, so a node that publishes none follows the others.
pub(super) fn segments(member: &Member) -> Segments<'_> {
    let mut found = Segments::default();
    if !member
        .nodes
        .values()
        .any(|node| node.granularity == Some(Granularity::Location))
    {
        return found;
    }
    let mut locations: BTreeMap<&str, Vec<(&str, &Node)>> = BTreeMap::new();
    for (name, node) in &member.nodes {
        let follows = matches!(node.granularity, None | Some(Granularity::Location)) && node.server == Server::Kilo;
        // A node without a private address is a segment of its own: no other node can reach it but through the tunnel.
        // During a restart the annotation is gone too, and then the Node's own status says whether it has one.
        let private = node.kilo_internal_ip.is_some() || (node.granularity.is_none() && !node.internal_ips.is_empty());
        if follows && private {
            locations.entry(&node.location).or_default().push((name, node));
        }
    }
    for nodes in locations.into_values() {
        // kg writes wireguard-ip "" on non-leaders. After a change of leaders two may claim it for a while.
        let leader = nodes
            .iter()
            .filter(|(_, node)| node.wireguard_ip.value().is_some())
            .min_by_key(|(name, node)| (!node.ready, node.created, *name));
        let Some(&(leader, _)) = leader else { continue };
        let followers: Vec<&str> = nodes
            .iter()
            .map(|(name, _)| *name)
            .filter(|name| *name != leader)
            .collect();
        found.led.extend(&followers);
        found.followers.insert(leader, followers);
    }
    found
}
