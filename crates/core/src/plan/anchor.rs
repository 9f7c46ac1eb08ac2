//! Which node carries the networks that no node owns (rule 6).

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash, Hasher},
};

use ipnet::IpNet;

use super::nodes::Roll;
use crate::mesh::Cluster;

/// The networks of a member that ride on an anchor: as the entry says, else those of its allowedNetworks in which nothing
/// lies that belongs to a Node. Whether that Node has a Peer now plays no part: what kg removes at a restart is back in a
/// second. `None` = nothing was seen of its Nodes.
pub(super) fn anchored(cluster: &Cluster, roll: Option<&Roll<'_>>) -> Vec<IpNet> {
    if let Some(anchored) = &cluster.anchored {
        return anchored
            .iter()
            .map(IpNet::trunc)
            .filter(|net| cluster.allows(*net))
            .collect();
    }
    let owned = roll.into_iter().flat_map(|roll| &roll.owned);
    let allowed = cluster.allowed.iter().copied();
    allowed
        .filter(|net| !owned.clone().any(|prefix| net.contains(prefix)))
        .collect()
}

/// More parts than this help nobody.
const MAX_ANCHORS: u16 = 64;

/// Splits each anchored network over as many parts as there are anchors asked for, rounded up to a power of two.
pub(super) fn parts(cluster: &Cluster, roll: &Roll<'_>) -> Vec<IpNet> {
    let bits = u16::BITS - (cluster.anchors.clamp(1, MAX_ANCHORS) - 1).leading_zeros();
    anchored(cluster, Some(roll))
        .into_iter()
        .flat_map(|net| {
            let length = net
                .prefix_len()
                .saturating_add(u8::try_from(bits).unwrap_or(u8::MAX))
                .min(net.max_prefix_len());
            net.subnets(length).map_or_else(|_| vec![net], Iterator::collect)
        })
        .collect()
}

/// Gives each part to a node: the one that has it now, while it is eligible, else one of `anchors` nodes that are chosen by
/// rendezvous hash. `now` = who carries a prefix in this target at present.
pub(super) fn assign(
    parts: &[IpNet],
    anchors: u16,
    eligible: &BTreeSet<&str>,
    now: &BTreeMap<IpNet, String>,
) -> BTreeMap<IpNet, String> {
    let stays = |part: &IpNet| now.get(part).filter(|node| eligible.contains(node.as_str()));
    let mut assigned: BTreeMap<IpNet, String> = parts
        .iter()
        .filter_map(|part| stays(part).map(|node| (*part, node.clone())))
        .collect();

    // Those that carry something already come first; the pool is filled up with the heaviest of the rest.
    let mut pool: Vec<&str> = eligible.iter().copied().collect();
    pool.sort_by_key(|node| {
        (
            !assigned.values().any(|carrier| carrier == node),
            Reverse(weight(node)),
            *node,
        )
    });
    pool.truncate(usize::from(anchors.clamp(1, MAX_ANCHORS)));
    for part in parts {
        if assigned.contains_key(part) {
            continue;
        }
        let load = |node: &str| assigned.values().filter(|carrier| *carrier == node).count();
        if let Some(node) = pool.iter().copied().min_by_key(|node| load(node)) {
            assigned.insert(*part, node.to_owned());
        }
    }
    assigned
}

/// Rendezvous weight. The standard hasher with its fixed keys: the same in every run of one build, which is all that is
/// needed, since a standing assignment is kept whatever the weights say.
fn weight(node: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    node.hash(&mut hasher);
    hasher.finish()
}
