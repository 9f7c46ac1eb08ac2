//! Resolves conflicts between the plans of several meshes for one target, so that each key and each prefix has one owner
//! (design rule 2), and counts the planned nodes and gateways.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet, btree_map::Entry},
    sync::Arc,
};

use ipnet::IpNet;

use super::{Fact, MeshPlan, Plan, PlannedPeer, Reason, Skipped, TargetPlan, target};
use crate::{
    key::PublicKey,
    mesh::{ClusterIdentity, MeshId},
    observe::{Observation, Observations, ObservedPeer, PeerRole, PeerSpec, Rows},
    ownership::{self, Ownership},
};

/// Gives each key and each prefix of a target to one mesh (rule 2). Paused meshes are ignored: their plans are not written, and
/// [`super::peers`] already keeps the keys and prefixes of their existing Peers out of the other plans.
pub(super) fn resolve_conflicts(plan: &mut Plan, seen: &Observations) {
    let mut entries: BTreeMap<ClusterIdentity, usize> = BTreeMap::new();
    for planned in plan.meshes.values().filter(|planned| !planned.paused) {
        for identity in planned
            .targets
            .keys()
            .filter_map(|target| planned.identities.get(target))
        {
            *entries.entry(target::canonical_identity(identity)).or_default() += 1;
        }
    }
    // A cluster that is the target of only one entry has no conflicts.
    for cluster in entries
        .into_iter()
        .filter_map(|(cluster, count)| (count > 1).then_some(cluster))
    {
        keep_one_peer_per_key(plan, seen, &cluster);
        keep_one_owner_per_prefix(plan, seen, &cluster);
    }
}

/// The entries of one cluster in all meshes that are not paused, oldest mesh first: (rank of the mesh by age, 0 = oldest;
/// mesh; entry name; plan; existing Peers).
fn active_targets<'p>(
    plan: &'p Plan,
    seen: &'p Observations,
    cluster: &'p ClusterIdentity,
) -> impl Iterator<Item = (usize, &'p MeshId, &'p str, &'p TargetPlan, ExistingPeers<'p>)> {
    let meshes = plan.claimants.iter().enumerate();
    let meshes = meshes.filter_map(|(rank, claimant)| Some((rank, &claimant.mesh, plan.meshes.get(&claimant.mesh)?)));
    let meshes = meshes.filter(|(_, _, planned)| !planned.paused);
    meshes.flat_map(move |(rank, mesh, planned)| {
        planned.targets.iter().filter_map(move |(target, target_plan)| {
            let identity = planned
                .identities
                .get(target)
                .filter(|identity| identity.same_cluster(cluster))?;
            let member = seen.members.get(identity).and_then(Observation::last);
            let existing = ExistingPeers {
                plan,
                mesh,
                peers: member.and_then(|member| member.peers.as_ref()),
            };
            Some((rank, mesh, &**target, target_plan, existing))
        })
    })
}

/// The existing Peers of one mesh in a target.
struct ExistingPeers<'p> {
    plan: &'p Plan,
    mesh: &'p MeshId,
    /// All Peers in the target, of any owner.
    peers: Option<&'p Rows<ObservedPeer>>,
}

impl<'p> ExistingPeers<'p> {
    /// The spec of `peer`, if it is valid and the Peer belongs to the mesh.
    fn spec(&self, peer: &'p ObservedPeer) -> Option<&'p PeerSpec> {
        let ours = ownership::of(&peer.owner, &self.plan.hub, &self.plan.claimants) == Ownership::Mesh(self.mesh);
        peer.spec.as_ref().ok().filter(|_| ours)
    }

    fn has_key(&self, name: &str, key: &PublicKey) -> bool {
        let peer = self.peers.and_then(|peers| peers.get(name));
        peer.and_then(|peer| self.spec(peer))
            .is_some_and(|spec| spec.public_key == *key)
    }

    fn prefixes(&self) -> BTreeSet<IpNet> {
        let peers = self.peers.into_iter().flat_map(Rows::values);
        peers
            .filter_map(|peer| self.spec(peer))
            .flat_map(|spec| spec.allowed_ips.iter().copied())
            .collect()
    }
}

/// If two meshes plan a Peer with the same key for one target, keeps the Peer that exists already, else the Peer of the older mesh.
/// If the removed Peer and the kept one describe Nodes of different clusters, the Node of the removed Peer is reported as skipped.
fn keep_one_peer_per_key(plan: &mut Plan, seen: &Observations, cluster: &ClusterIdentity) {
    // (does not exist yet, rank of the mesh, mesh, target, name of the Peer): the smallest claim wins.
    type PeerClaim = (bool, usize, MeshId, String, String);
    let mut counts: BTreeMap<PublicKey, usize> = BTreeMap::new();
    for (_, _, _, target_plan, _) in active_targets(plan, seen, cluster) {
        for peer in target_plan.peers.values() {
            *counts.entry(peer.spec.public_key).or_default() += 1;
        }
    }
    let mut claims: BTreeMap<PublicKey, Vec<PeerClaim>> = BTreeMap::new();
    for (rank, mesh, target, target_plan, existing) in active_targets(plan, seen, cluster) {
        for (name, peer) in &target_plan.peers {
            let key = peer.spec.public_key;
            if counts.get(&key) == Some(&1) {
                continue;
            }
            let exists = existing.has_key(name, &key);
            let claim = (!exists, rank, mesh.clone(), target.to_owned(), name.clone());
            claims.entry(key).or_default().push(claim);
        }
    }
    let source_of = |plan: &Plan, mesh: &MeshId, target: &str, name: &str| {
        let planned = plan.meshes.get(mesh)?;
        let peer = planned.targets.get(target)?.peers.get(name)?;
        planned.identities.get(&peer.source).cloned()
    };
    for (key, mut claims) in claims {
        claims.sort();
        let mut claims = claims.into_iter();
        let Some((_, _, winner, winning_target, winning_peer)) = claims.next() else {
            continue;
        };
        let winning_source = source_of(plan, &winner, &winning_target, &winning_peer);
        for (_, _, mesh, target, name) in claims {
            let source = source_of(plan, &mesh, &target, &name);
            let same_cluster = source
                .zip(winning_source.as_ref())
                .is_some_and(|(source, winning)| source.same_cluster(winning));
            let Some(planned) = plan.meshes.get_mut(&mesh) else {
                continue;
            };
            let removed = planned
                .targets
                .get_mut(&target)
                .and_then(|target_plan| target_plan.peers.remove(&name));
            let Some(skipped_peer) = removed.filter(|_| !same_cluster) else {
                continue;
            };
            let message = format!(
                "toward cluster {target:?}: key {key} belongs to Peer {winning_peer} of ClusterMesh {winner} there"
            );
            let skipped = &mut planned.clusters.entry(skipped_peer.source.clone()).or_default().skipped;
            skipped.push(Skipped {
                node: skipped_peer.node.clone(),
                reason: Reason::PublicKeyDuplicate,
                message,
                target: Some(target),
            });
            skipped.sort();
        }
    }
}

/// If two meshes plan the same prefix for one target, keeps it in the mesh that plans it for a node of the target itself, else in the
/// mesh whose existing Peers contain it, else in the older mesh. Two meshes with the same source can plan the same anchored network,
/// because each mesh chooses its anchors independently.
fn keep_one_owner_per_prefix(plan: &mut Plan, seen: &Observations, cluster: &ClusterIdentity) {
    // (not a node of the target itself, does not exist yet, rank of the mesh, target): the smallest claim wins.
    let mut owners: BTreeMap<IpNet, (bool, bool, usize, String)> = BTreeMap::new();
    let mut conflicts = BTreeSet::new();
    for (rank, _, target, target_plan, existing) in active_targets(plan, seen, cluster) {
        let existing = existing.prefixes();
        let peers = target_plan.peers.values();
        for (peer, net) in peers.flat_map(|peer| peer.spec.allowed_ips.iter().map(move |net| (peer, net))) {
            let is_own = matches!(peer.spec.role, PeerRole::OwnNode(_));
            let claim = (!is_own, !existing.contains(net), rank, target.to_owned());
            match owners.entry(*net) {
                Entry::Vacant(owner) => drop(owner.insert(claim)),
                Entry::Occupied(mut owner) => {
                    conflicts.insert(*net);
                    if claim < *owner.get() {
                        owner.insert(claim);
                    }
                }
            }
        }
    }
    for (rank, claimant) in plan.claimants.iter().enumerate() {
        let planned = plan.meshes.get_mut(&claimant.mesh).filter(|planned| !planned.paused);
        let Some(planned) = planned else { continue };
        for (target, target_plan) in &mut planned.targets {
            let identity = planned.identities.get(target);
            if !identity.is_some_and(|identity| identity.same_cluster(cluster)) {
                continue;
            }
            let is_lost = |net: &IpNet| {
                let owner = owners.get(net).filter(|_| conflicts.contains(net));
                owner.is_some_and(|(_, _, owner_rank, owner_target)| *owner_rank != rank || owner_target != target)
            };
            for peer in target_plan.peers.values_mut() {
                if peer.spec.allowed_ips.iter().any(is_lost) {
                    peer.spec_mut().allowed_ips.retain(|net| !is_lost(net));
                }
            }
        }
    }
}

/// Numbers of planned nodes and gateways, by entry name.
pub(super) struct Counts {
    /// The nodes of each member that have a Peer or an entry in a SandboxAccess.
    registered: BTreeMap<String, usize>,
    /// The gateways of each member that have a Peer in another member.
    gateways: BTreeMap<String, usize>,
}

/// Counts the nodes and gateways of each member.
pub(super) fn count_nodes_and_gateways(planned: &MeshPlan) -> Counts {
    let mut registered: BTreeMap<&str, HashSet<&str>> = BTreeMap::new();
    let mut gateways: BTreeMap<&str, HashSet<&str>> = BTreeMap::new();
    // Most targets share the Peer of a node.
    let mut counted_peers: HashSet<*const PlannedPeer> = HashSet::new();
    for target_plan in planned.targets.values() {
        for peer in target_plan.peers.values() {
            if !counted_peers.insert(Arc::as_ptr(peer)) {
                continue;
            }
            let counted = match peer.spec.role {
                PeerRole::Node => &mut registered,
                PeerRole::Gateway => &mut gateways,
                PeerRole::OwnNode(_) => continue,
            };
            counted.entry(&peer.source).or_default().insert(&peer.node);
        }
        for access in target_plan.accesses.values() {
            let nodes = access.spec.nodes.values().map(|node| &*node.name);
            registered.entry(&access.source).or_default().extend(nodes);
        }
    }
    let numbers = |names: BTreeMap<&str, HashSet<&str>>| {
        let numbers = names
            .into_iter()
            .map(|(cluster, names)| (cluster.to_owned(), names.len()));
        numbers.collect()
    };
    Counts {
        registered: numbers(registered),
        gateways: numbers(gateways),
    }
}

/// Adds the numbers to the reports of the members, and reports targets with too many Peers.
pub(super) fn report(planned: &mut MeshPlan, counts: Counts) {
    for (cluster, number) in counts.registered {
        planned.clusters.entry(cluster).or_default().registered = number;
    }
    for (cluster, number) in counts.gateways {
        planned.clusters.entry(cluster).or_default().gateways = number;
    }
    for (target, target_plan) in &planned.targets {
        planned
            .facts
            .extend(Fact::mesh_too_large(target, target_plan.peers.len()));
    }
}
