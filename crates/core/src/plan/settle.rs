//! What only all meshes together decide: one owner for each key and prefix of a target, and the counts.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::{Fact, MAX_PEERS_PER_TARGET, MeshPlan, Plan, target};
use crate::{
    key::PublicKey,
    mesh::{ClusterIdentity, MeshId},
    observe::{Observation, Observations},
    ownership::{self, Ownership},
};

/// One key in two meshes of one target is one Peer: of one in which it is no sandbox's, else of the mesh that has it already,
/// else of the older one (rule 2).
pub(super) fn one_peer_per_key(plan: &mut Plan, seen: &Observations) {
    // (is a sandbox's, has no Peer yet, age of the mesh, mesh, target, name of the Peer): the smallest wins.
    type Place = (bool, bool, usize, MeshId, String, String);
    let mut places: BTreeMap<(ClusterIdentity, PublicKey), Vec<Place>> = BTreeMap::new();
    for (age, claimant) in plan.claimants.iter().enumerate() {
        let Some(planned) = plan.meshes.get(&claimant.mesh) else {
            continue;
        };
        for (target, held) in &planned.targets {
            let Some(identity) = planned.identities.get(target) else {
                continue;
            };
            let standing = seen
                .members
                .get(identity)
                .and_then(Observation::last)
                .and_then(|member| member.peers.as_ref());
            for (name, peer) in &held.peers {
                let stands = standing.and_then(|peers| peers.get(name)).is_some_and(|peer_there| {
                    peer_there
                        .spec
                        .as_ref()
                        .is_ok_and(|spec| spec.public_key == peer.spec.public_key)
                        && ownership::of(&peer_there.owner, &plan.hub, &plan.claimants)
                            == Ownership::Mesh(&claimant.mesh)
                });
                let sandbox = peer.spec.requires_policy.is_some();
                let place = (
                    sandbox,
                    !stands,
                    age,
                    claimant.mesh.clone(),
                    target.clone(),
                    name.clone(),
                );
                places
                    .entry((target::one_cluster(identity), peer.spec.public_key))
                    .or_default()
                    .push(place);
            }
        }
    }
    for mut claims in places.into_values().filter(|claims| claims.len() > 1) {
        claims.sort();
        for (_, _, _, mesh, target, name) in claims.into_iter().skip(1) {
            if let Some(held) = plan
                .meshes
                .get_mut(&mesh)
                .and_then(|planned| planned.targets.get_mut(&target))
            {
                held.peers.remove(&name);
            }
        }
    }
    one_owner_per_prefix(plan);
}

/// Two meshes of one target may share a source, and then each has chosen its anchors for itself: the older one's stand.
fn one_owner_per_prefix(plan: &mut Plan) {
    let mut owned: BTreeMap<ClusterIdentity, BTreeSet<IpNet>> = BTreeMap::new();
    for claimant in &plan.claimants {
        let Some(planned) = plan.meshes.get_mut(&claimant.mesh) else {
            continue;
        };
        for (target, held) in &mut planned.targets {
            let Some(identity) = planned.identities.get(target) else {
                continue;
            };
            let owned = owned.entry(target::one_cluster(identity)).or_default();
            for peer in held.peers.values_mut() {
                peer.spec.allowed_ips.retain(|net| owned.insert(*net));
            }
        }
    }
}

/// Counts the nodes that have a Peer somewhere, and the Peers a target's nodes have to carry.
pub(super) fn count(planned: &mut MeshPlan) {
    let mut registered: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (target, held) in &planned.targets {
        for peer in held.peers.values() {
            registered.entry(&peer.source).or_default().insert(&peer.node);
        }
        if held.peers.len() > MAX_PEERS_PER_TARGET {
            planned.facts.insert(Fact::MeshTooLarge {
                cluster: target.clone(),
                peers: held.peers.len(),
            });
        }
    }
    for (cluster, nodes) in registered {
        planned.clusters.entry(cluster.to_owned()).or_default().registered = nodes.len();
    }
}
