//! Decides which allowedNetworks of each entry are accepted (design rule 10), so that the networks of different clusters are
//! disjoint within a mesh and across all meshes.
//!
//! Networks that an earlier plan accepted win over new ones. So an edit of one ClusterMesh never takes addresses from another.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::Fact;
use crate::mesh::{Cluster, ClusterIdentity, Mesh, MeshId, overlap};

/// The accepted networks of each entry, and the conflicts to report.
#[derive(Debug, Default)]
pub(super) struct Accepted {
    /// The networks by mesh and entry name. A refused entry has an empty list, or the networks that it had before.
    pub(super) networks: BTreeMap<(MeshId, String), Vec<IpNet>>,
    /// The entries whose newer claim is refused, so that they keep the networks that they had before.
    pub(super) kept_former: BTreeSet<(MeshId, String)>,
    /// The conflicts by mesh.
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
    owner: Entry<'a>,
    owned: IpNet,
    claimed: IpNet,
}

#[derive(Default)]
struct NetworkOwners<'a> {
    owned: Vec<(Entry<'a>, IpNet)>,
    facts: BTreeMap<MeshId, BTreeSet<Fact>>,
}

impl<'a> NetworkOwners<'a> {
    /// The first network of another cluster that one of `networks` overlaps.
    fn find_conflict(&self, entry: Entry<'a>, networks: &[IpNet]) -> Option<Conflict<'a>> {
        networks.iter().find_map(|&claimed| {
            self.owned
                .iter()
                .find(|(owner, owned)| {
                    !owner.cluster.identity.same_cluster(&entry.cluster.identity) && overlap(*owned, claimed)
                })
                .map(|&(owner, owned)| Conflict { owner, owned, claimed })
        })
    }

    /// Reports the conflict on both entries.
    fn report(&mut self, loser: Entry<'a>, Conflict { owner, owned, claimed }: &Conflict<'a>, outcome: &str) {
        let describe = |entry: &Entry<'_>| format!("cluster {:?} of ClusterMesh {}", entry.cluster.name, entry.mesh.id);
        let message = format!(
            "{claimed} of cluster {:?} overlaps {owned}, which {} holds; {outcome}. Change one of the two.",
            loser.cluster.name,
            describe(owner)
        );
        let fact = Fact::NetworksOverlap {
            cluster: loser.cluster.name.clone(),
            message,
            lost: true,
        };
        self.facts.entry(loser.mesh.id.clone()).or_default().insert(fact);
        let message = format!(
            "{owned} of cluster {:?} is also claimed, as {claimed}, by {}; it stays here.",
            owner.cluster.name,
            describe(&loser)
        );
        let fact = Fact::NetworksOverlap {
            cluster: owner.cluster.name.clone(),
            message,
            lost: false,
        };
        self.facts.entry(owner.mesh.id.clone()).or_default().insert(fact);
    }

    fn add(&mut self, entry: Entry<'a>, networks: &[IpNet]) {
        self.owned.extend(networks.iter().map(|&network| (entry, network)));
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
    let mut owners = NetworkOwners::default();

    // 1. Networks that an earlier plan accepted, even if the entry lists others: if the new claim is refused, the mesh keeps
    //    working with these. They are read from the meshes' statuses. If a forged status makes them overlap, the first entry wins.
    let mut previous: BTreeMap<(MeshId, String), Vec<IpNet>> = BTreeMap::new();
    for &entry in &entries {
        let accepted = canonical(
            entry
                .mesh
                .accepted
                .get(&entry.cluster.name)
                .map_or(&[][..], Vec::as_slice),
        );
        if !accepted.is_empty() && owners.find_conflict(entry, &accepted).is_none() {
            owners.add(entry, &accepted);
            previous.insert(entry.key(), accepted);
        }
    }
    // 2. New claims: each entry is accepted or refused as a whole. If a mesh has no accepted networks yet and loses
    //    to another mesh, older or newer, all its entries are refused, so nothing is written for it. Networks that an entry
    //    gives up stay its own in this plan and become free in the next one, so that a network never has two owners in one plan.
    let meshes_accepted_before: BTreeSet<MeshId> = previous.keys().map(|(mesh, _)| mesh.clone()).collect();
    let mut networks: BTreeMap<(MeshId, String), Vec<IpNet>> = BTreeMap::new();
    let mut kept_former = BTreeSet::new();
    for mesh_entries in entries.chunk_by(|one, next| one.mesh.id == next.mesh.id) {
        let loses_to_other_mesh = |entry: &Entry<'_>| {
            let conflict = owners.find_conflict(*entry, &canonical(&entry.cluster.allowed));
            conflict.is_some_and(|conflict| conflict.owner.mesh.id != entry.mesh.id)
        };
        let is_new = |entry: &Entry<'_>| !meshes_accepted_before.contains(&entry.mesh.id);
        let is_mesh_refused = mesh_entries
            .iter()
            .any(|entry| is_new(entry) && loses_to_other_mesh(entry));
        for &entry in mesh_entries {
            let before = previous.remove(&entry.key()).unwrap_or_default();
            let claimed = canonical(&entry.cluster.allowed);
            if claimed != before
                && let Some(conflict) = owners.find_conflict(entry, &claimed)
            {
                let outcome = if !before.is_empty() {
                    kept_former.insert(entry.key());
                    "this cluster keeps the networks that it had"
                } else if is_mesh_refused {
                    "this ClusterMesh has no accepted networks yet, so it writes nothing"
                } else {
                    "this cluster is left out"
                };
                owners.report(entry, &conflict, outcome);
                networks.insert(entry.key(), before);
            } else if is_mesh_refused {
                networks.insert(entry.key(), Vec::new());
            } else {
                owners.add(entry, &claimed);
                networks.insert(entry.key(), claimed);
            }
        }
    }
    Accepted {
        networks,
        kept_former,
        facts: owners.facts,
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
