//! Decides which allowedNetworks of each entry are accepted (design rule 10), so that the networks of different clusters are
//! disjoint within a mesh and across all meshes.
//!
//! Networks that were accepted before win over new ones. So an edit of one ClusterMesh never takes addresses from another.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::Fact;
use crate::mesh::{Cluster, ClusterIdentity, Mesh, MeshId, overlap};

/// The accepted networks of each entry, and the conflicts to report.
#[derive(Debug, Default)]
pub(super) struct Accepted {
    /// By mesh and entry name. A refused entry has an empty list, or the networks that it had before.
    pub(super) networks: BTreeMap<(MeshId, String), Vec<IpNet>>,
    /// By mesh.
    pub(super) facts: BTreeMap<MeshId, BTreeSet<Fact>>,
}

#[derive(Clone, Copy)]
struct Entry<'a> {
    mesh: &'a Mesh,
    cluster: &'a Cluster,
}

impl Entry<'_> {
    fn key(&self) -> (MeshId, String) {
        (self.mesh.id.clone(), self.cluster.name.clone())
    }
}

struct Conflict<'a> {
    holder: Entry<'a>,
    held: IpNet,
    query: IpNet,
}

#[derive(Default)]
struct Ledger<'a> {
    granted: Vec<(Entry<'a>, IpNet)>,
    facts: BTreeMap<MeshId, BTreeSet<Fact>>,
}

impl<'a> Ledger<'a> {
    /// The first claim of another cluster that one of `networks` overlaps.
    fn conflict(&self, entry: Entry<'a>, networks: &[IpNet]) -> Option<Conflict<'a>> {
        networks.iter().find_map(|&query| {
            self.granted
                .iter()
                .find(|(holder, held)| {
                    !holder.cluster.identity.same_cluster(&entry.cluster.identity) && overlap(*held, query)
                })
                .map(|&(holder, held)| Conflict { holder, held, query })
        })
    }

    /// Reports the conflict on both entries.
    fn refuse(&mut self, loser: Entry<'a>, Conflict { holder, held, query }: &Conflict<'a>, left_with: &str) {
        let describe = |entry: &Entry<'_>| format!("cluster {:?} of ClusterMesh {}", entry.cluster.name, entry.mesh.id);
        let message = format!(
            "{query} of cluster {:?} overlaps {held}, which {} holds; {left_with}. Change one of the two.",
            loser.cluster.name,
            describe(holder)
        );
        let fact = Fact::NetworksOverlap {
            cluster: loser.cluster.name.clone(),
            message,
            lost: true,
        };
        self.facts.entry(loser.mesh.id.clone()).or_default().insert(fact);
        let message = format!(
            "{held} of cluster {:?} is also claimed, as {query}, by {}; it stays here.",
            holder.cluster.name,
            describe(&loser)
        );
        let fact = Fact::NetworksOverlap {
            cluster: holder.cluster.name.clone(),
            message,
            lost: false,
        };
        self.facts.entry(holder.mesh.id.clone()).or_default().insert(fact);
    }

    fn grant(&mut self, entry: Entry<'a>, networks: &[IpNet]) {
        self.granted.extend(networks.iter().map(|&network| (entry, network)));
    }
}

/// All entries, sorted by the age of their mesh, and the local entry of each mesh first. A mesh that is being deleted claims
/// nothing.
fn sorted_entries<'a>(meshes: &[&'a Mesh]) -> Vec<Entry<'a>> {
    let mut meshes: Vec<_> = meshes.iter().copied().filter(|mesh| !mesh.deleting).collect();
    meshes.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
    let mut entries = Vec::new();
    for mesh in meshes {
        let (local, others): (Vec<_>, Vec<_>) = mesh
            .clusters
            .iter()
            .partition(|cluster| cluster.identity == ClusterIdentity::Local);
        entries.extend(local.into_iter().chain(others).map(|cluster| Entry { mesh, cluster }));
    }
    entries
}

/// Decides all claims. The result does not depend on the order of `meshes`.
pub(super) fn accept(meshes: &[&Mesh]) -> Accepted {
    let entries = sorted_entries(meshes);
    let mut ledger = Ledger::default();

    // 1. Networks that were accepted before, even if the entry now lists others: if the new claim is refused, the mesh keeps
    //    working with these. A forged status that contradicts itself is resolved by the same order.
    let mut previous: BTreeMap<(MeshId, String), Vec<IpNet>> = BTreeMap::new();
    for &entry in &entries {
        let accepted = canonical(
            entry
                .mesh
                .accepted
                .get(&entry.cluster.name)
                .map_or(&[][..], Vec::as_slice),
        );
        if !accepted.is_empty() && ledger.conflict(entry, &accepted).is_none() {
            ledger.grant(entry, &accepted);
            previous.insert(entry.key(), accepted);
        }
    }
    // 2. New claims; each entry is accepted or refused as a whole. A mesh without accepted networks that conflicts with an
    //    older mesh is not started. Networks that an entry gives up become free in the next plan: within one plan a network
    //    never has two owners.
    let started: BTreeSet<MeshId> = previous.keys().map(|(mesh, _)| mesh.clone()).collect();
    let mut not_started: BTreeSet<MeshId> = BTreeSet::new();
    let mut networks: BTreeMap<(MeshId, String), Vec<IpNet>> = BTreeMap::new();
    for &entry in &entries {
        let before = previous.remove(&entry.key()).unwrap_or_default();
        let query = canonical(&entry.cluster.allowed);
        if query != before
            && let Some(conflict) = ledger.conflict(entry, &query)
        {
            let foreign = conflict.holder.mesh.id != entry.mesh.id;
            let left_with = if !before.is_empty() {
                "it runs on with the networks it had"
            } else if foreign && !started.contains(&entry.mesh.id) {
                not_started.insert(entry.mesh.id.clone());
                "the newer ClusterMesh writes nothing"
            } else {
                "it is left out"
            };
            ledger.refuse(entry, &conflict, left_with);
            networks.insert(entry.key(), before);
        } else {
            ledger.grant(entry, &query);
            networks.insert(entry.key(), query);
        }
    }
    for ((mesh, _), granted) in &mut networks {
        if not_started.contains(mesh) {
            granted.clear();
        }
    }
    Accepted {
        networks,
        facts: ledger.facts,
    }
}

/// Sorts the networks, clears their host bits, and removes those that another one contains.
fn canonical(networks: &[IpNet]) -> Vec<IpNet> {
    let sorted: BTreeSet<IpNet> = networks.iter().map(IpNet::trunc).collect();
    sorted
        .iter()
        .copied()
        .filter(|n| !sorted.iter().any(|other| other != n && other.contains(n)))
        .collect()
}
