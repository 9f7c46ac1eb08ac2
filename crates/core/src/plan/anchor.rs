//! Assigns each anchored network to nodes, whose Peers then contain it (design rule 6).

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash, Hasher},
};

use ipnet::IpNet;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use super::{MeshPlan, TargetPlan, nodes::NodeRegistry};
use crate::{
    mesh::{Addressing, Cluster, Mesh},
    observe::{Member, Node, Observation, Observations},
};

/// The networks that an earlier plan anchored and that stay anchored; none if the member has anchoredNetworks or is masqueraded. A later
/// claim of a Node must not take such a network, or a part of it, away from its anchor. Exception: [`unanchor_node_addresses`].
fn previously_anchored(cluster: &Cluster) -> impl Iterator<Item = IpNet> {
    let applies = cluster.anchored.is_none() && cluster.effective_addressing() == Addressing::Routed;
    let networks = cluster.previous_anchors.keys().copied();
    networks.filter(move |net| applies && cluster.allowed.contains(net))
}

/// Removes InternalIPs of Nodes from the previously anchored networks. An operator may add the address of a Node to allowedNetworks
/// before that Node joins. Until then another node is the anchor of the address; if it stayed the anchor, it would get the packets
/// for the new Node.
pub(super) fn unanchor_node_addresses(cluster: &mut Cluster, member: &Member) {
    let internal_ips = member.nodes.values().flat_map(|node| &node.internal_ips);
    for network in internal_ips.map(|address| IpNet::from(address.to_canonical())) {
        cluster.previous_anchors.remove(&network);
    }
}

/// The anchored network (in anchoredNetworks, or anchored by an earlier plan) that overlaps `net`. No Node may claim a part of it.
pub(super) fn find_reserved_overlap(cluster: &Cluster, net: IpNet) -> Option<IpNet> {
    let listed = cluster.anchored.iter().flatten().copied();
    let mut reserved = listed.chain(previously_anchored(cluster));
    reserved.find(|anchored| anchored.contains(&net) || net.contains(anchored))
}

/// Returns the anchored networks of a member: its anchoredNetworks. Without that field, they are the allowedNetworks that an earlier
/// plan anchored, and those that contain no prefix of a Node. A Node without a Peer counts too, because kg removes the Node's
/// annotations for a few seconds when kg restarts. `registry` = `None` if the member was never observed.
pub(super) fn anchored_networks(cluster: &Cluster, registry: Option<&NodeRegistry<'_>>) -> Vec<IpNet> {
    if let Some(anchored) = &cluster.anchored {
        return anchored
            .iter()
            .map(IpNet::trunc)
            .filter(|net| cluster.allows(*net))
            .collect();
    }
    let owned = registry.into_iter().flat_map(|registry| &registry.owned);
    let allowed = cluster.allowed.iter().copied();
    let previously_anchored: BTreeSet<IpNet> = previously_anchored(cluster).collect();
    allowed
        .filter(|net| previously_anchored.contains(net) || !owned.clone().any(|prefix| net.contains(prefix)))
        .collect()
}

/// The largest number of parts into which a network is split.
const MAX_ANCHORS: u16 = 64;

/// Splits each anchored network into one part for each requested anchor (the number is rounded up to a power of two). A network with
/// fewer addresses is split into single addresses.
pub(super) fn split_anchored_networks(cluster: &Cluster, registry: &NodeRegistry<'_>) -> Vec<IpNet> {
    let networks = registry.anchored.iter().copied();
    networks.flat_map(|net| split(net, cluster.anchors)).collect()
}

fn split(net: IpNet, anchor_count: u16) -> Vec<IpNet> {
    let bits = u16::BITS - (anchor_count.clamp(1, MAX_ANCHORS) - 1).leading_zeros();
    let length = net
        .prefix_len()
        .saturating_add(u8::try_from(bits).unwrap_or(u8::MAX))
        .min(net.max_prefix_len());
    net.subnets(length).map_or_else(|_| vec![net], Iterator::collect)
}

/// The nodes whose Peers contain a part of an anchored network, by entry name and network.
type Carriers<'m> = BTreeMap<(&'m str, IpNet), BTreeSet<String>>;

/// Finds the nodes whose Peers contain a part of an anchored network.
pub(super) fn carriers<'m>(mesh: &'m Mesh, planned: &MeshPlan) -> Carriers<'m> {
    let mut parts: BTreeMap<&str, BTreeMap<IpNet, IpNet>> = BTreeMap::new();
    for cluster in &mesh.clusters {
        let networks = planned.clusters.get(&cluster.name).into_iter();
        let networks = networks.flat_map(|report| report.anchored.keys());
        let split = networks.flat_map(|net| split(*net, cluster.anchors).into_iter().map(|part| (part, *net)));
        parts.insert(&cluster.name, split.collect());
    }
    let in_targets: Vec<_> = planned
        .targets
        .par_iter()
        .map(|(_, target)| carriers_in(target, &parts))
        .collect();
    let mut carriers = Carriers::new();
    for (source, net, node) in in_targets.into_iter().flatten() {
        carriers.entry((source, net)).or_default().insert(node.to_owned());
    }
    carriers
}

/// Adds the carriers to the reports of their members. Removes the networks of which no Peer contains a part, because all networks of a
/// member look anchored while none of its nodes is registered. Networks that an earlier plan anchored stay.
pub(super) fn report<'m>(mesh: &'m Mesh, planned: &mut MeshPlan, seen: &Observations, mut carriers: Carriers<'m>) {
    let member = |identity| seen.members.get(identity).and_then(Observation::last);
    for cluster in &mesh.clusters {
        let Some(report) = planned.clusters.get_mut(&cluster.name) else {
            continue;
        };
        let Some(source) = member(&cluster.identity).filter(|_| !planned.paused) else {
            // The mesh is paused or the member was never observed, so the member's anchors in the status stay as they are.
            report.anchored = cluster.previous_anchors.clone();
            continue;
        };
        // The existing Peers in a target that was never observed are not known, and stay unchanged. So as long as there is such a target,
        // all previous anchors that are still Nodes stay in the status.
        let mut others = mesh.clusters.iter().filter(|other| other.name != cluster.name);
        let has_unobserved_target = others.any(|other| member(&other.identity).is_none());
        for (net, nodes) in &mut report.anchored {
            nodes.extend(carriers.remove(&(&*cluster.name, *net)).unwrap_or_default());
            let previous = cluster.previous_anchors.get(net).into_iter().flatten();
            let kept = previous.filter(|node| has_unobserved_target && source.nodes.contains_key(node));
            nodes.extend(kept.cloned());
        }
        let is_reported =
            |net: &IpNet, nodes: &mut BTreeSet<String>| !nodes.is_empty() || cluster.previous_anchors.contains_key(net);
        report.anchored.retain(is_reported);
    }
}

/// Returns the source, anchored network and node of each Peer of the target that contains a part of an anchored network.
/// `parts` = by source, each part with its network.
fn carriers_in<'m, 'p>(
    target: &'p TargetPlan,
    parts: &BTreeMap<&'m str, BTreeMap<IpNet, IpNet>>,
) -> Vec<(&'m str, IpNet, &'p str)> {
    let mut carriers = Vec::new();
    for peer in target.peers.values() {
        if let Some((source, parts)) = parts
            .get_key_value(&*peer.source)
            .filter(|(_, parts)| !parts.is_empty())
        {
            let networks = peer.spec.allowed_ips.iter().filter_map(|net| parts.get(net));
            carriers.extend(networks.map(|net| (*source, *net, &*peer.node)));
        }
    }
    carriers
}

/// Assigns each part to a node. A part stays with its current anchor while that node is eligible. Each other part goes to the node
/// that has the fewest parts, out of a pool of `anchor_count` eligible nodes. `current` = for each prefix, the node whose existing
/// Peer in this target contains it.
pub(super) fn assign(
    parts: &[IpNet],
    anchor_count: u16,
    eligible: &BTreeSet<&str>,
    current: &BTreeMap<IpNet, &str>,
) -> BTreeMap<IpNet, String> {
    let current_anchor = |part: &IpNet| current.get(part).copied().filter(|node| eligible.contains(node));
    let mut assigned: BTreeMap<IpNet, String> = parts
        .iter()
        .filter_map(|part| current_anchor(part).map(|node| (*part, node.to_owned())))
        .collect();

    if assigned.len() == parts.len() {
        return assigned;
    }
    // The pool: current anchors first, then the nodes with the highest weights.
    let mut pool: Vec<&str> = eligible.iter().copied().collect();
    pool.sort_by_cached_key(|node| {
        (
            !assigned.values().any(|carrier| carrier == node),
            Reverse(weight(node)),
            *node,
        )
    });
    pool.truncate(usize::from(anchor_count.clamp(1, MAX_ANCHORS)));
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

/// How suitable a node is as an anchor; the smallest value is best. Nodes that will stay come first, then nodes that are about to leave,
/// then silent ones. Silent ones are eligible, too, if there are no others: their WireGuard tunnels work without kg.
pub(super) fn rank(node: &Node) -> (bool, bool) {
    (node.is_silent(), node.leaving)
}

/// The weight of a node: a hash of its name. The standard hasher with fixed keys gives the same value in every run of one build. That is
/// enough, because an existing assignment is kept, even if the weights change with the next build.
fn weight(node: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    node.hash(&mut hasher);
    hasher.finish()
}
