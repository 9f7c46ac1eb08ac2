//! Decides when our finalizer is added to a ClusterMesh and when it is removed.
//!
//! Nothing is written for a mesh before it has the finalizer. The finalizer is removed from a ClusterMesh that is being deleted and is
//! not paused, when no object of the mesh is left in any member, except objects that may be left behind according to an annotation of
//! the ClusterMesh.

use clustermesh_core::{
    diff::Action,
    mesh::{ClusterIdentity, MeshId},
    observe::{Member, Observation, Owner},
    ownership::{self, Ownership},
};

use super::{
    Pass, Reconciler,
    meshes::LoadedMesh,
    removed::{describe_cluster, may_be_left_behind},
};
use crate::hub_writer::FinalizerChange;

/// Drops the steps for meshes without our finalizer. Without it, a ClusterMesh could be deleted before its objects are removed. The
/// deletes of orphans are kept: an orphan has no ClusterMesh, so there is nothing that could have a finalizer.
pub(super) fn drop_steps_without_finalizer(pass: &mut Pass) {
    for steps in pass.steps.values_mut() {
        steps.retain(|step| {
            pass.meshes
                .get(&step.mesh)
                .map_or(step.action == Action::Delete, LoadedMesh::has_finalizer)
        });
    }
}

impl Reconciler {
    /// Returns the change of our finalizer that a mesh needs. `None` = no change.
    pub(super) fn finalizer_change(&self, pass: &Pass, loaded: &LoadedMesh) -> Option<FinalizerChange> {
        if loaded.mesh.deleting {
            let is_removable = loaded.has_finalizer() && !loaded.mesh.paused && self.are_objects_removed(pass, loaded);
            return is_removable.then(|| FinalizerChange::Remove {
                left_behind: self.left_behind(pass, loaded),
            });
        }
        let planned = pass.plan.meshes.get(&loaded.mesh.id);
        let is_active = planned.is_some_and(|plan| !plan.paused) && loaded.refused.is_none();
        (is_active && !loaded.has_finalizer()).then_some(FinalizerChange::Add)
    }

    /// Whether no object of a mesh is left in any member, except objects that may be left behind.
    fn are_objects_removed(&self, pass: &Pass, loaded: &LoadedMesh) -> bool {
        let id = &loaded.mesh.id;
        let Some(object) = loaded.object.as_deref() else {
            return false;
        };
        let is_writing =
            |identity: &ClusterIdentity| self.members.get(identity).is_some_and(|m| m.writer.is_writing(id));
        let are_entries_clean = loaded.mesh.clusters.iter().all(|entry| {
            let may_be_left_behind = may_be_left_behind(object, &entry.name);
            // Objects may be left behind only in a member to which nothing can be written now. In all others they are deleted.
            let is_writable = pass
                .seen
                .members
                .get(&entry.identity)
                .and_then(Observation::fresh)
                .is_some()
                && self
                    .members
                    .get(&entry.identity)
                    .is_some_and(|m| m.write_problem(id).is_none());
            self.is_clean(pass, &entry.identity, id)
                || (may_be_left_behind && !is_writable && !is_writing(&entry.identity))
        });
        // `meshes.removed` contains the clusters that were removed from the mesh and still have objects of it, `unlocatable` the
        // removed entries whose cluster is not known.
        are_entries_clean
            && self.meshes.removed.is_empty(id)
            && loaded.unlocatable.iter().all(|entry| may_be_left_behind(object, entry))
    }

    /// The clusters in which objects of a mesh may be left when its finalizer is removed.
    fn left_behind(&self, pass: &Pass, loaded: &LoadedMesh) -> Vec<String> {
        let id = &loaded.mesh.id;
        let entries = loaded.mesh.clusters.iter();
        let left = entries.filter(|entry| !self.is_clean(pass, &entry.identity, id));
        let left = left.map(|entry| describe_cluster(&entry.name, &entry.identity));
        let unlocatable = loaded.unlocatable.iter().map(|entry| format!("{entry:?}"));
        left.chain(unlocatable)
            .chain(self.meshes.removed.given_up(id))
            .collect()
    }

    /// Whether the observation of a member is fresh and contains no object of a mesh, and no write for the mesh can be in flight.
    pub(super) fn is_clean(&self, pass: &Pass, identity: &ClusterIdentity, mesh: &MeshId) -> bool {
        let Some(member) = self.members.get(identity) else {
            return false;
        };
        let seen = pass.seen.members.get(identity).and_then(Observation::fresh);
        let is_ours = |owner| ownership::of(owner, &pass.plan.hub, &pass.plan.claimants) == Ownership::Mesh(mesh);
        let write_may_be_in_flight = member.writer.is_writing(mesh) || !self.hub.election.has_ended_earlier_writes();
        !write_may_be_in_flight && seen.is_some_and(|seen| !owners(seen).any(is_ours))
    }
}

/// Returns the owners of all objects of a member, as their labels state.
fn owners(seen: &Member) -> impl Iterator<Item = &Owner> {
    let peers = seen.peers.iter().flatten().map(|(_, peer)| &peer.owner);
    let policies = seen.policies.iter().flatten().map(|(_, policy)| &policy.owner);
    let accesses = seen.accesses.iter().flatten().map(|(_, access)| &access.owner);
    let services = seen.services.values().filter_map(|service| service.managed.as_ref());
    let slices = seen.slices.values().filter_map(|slice| slice.managed.as_ref());
    peers.chain(policies).chain(accesses).chain(services).chain(slices)
}

#[cfg(test)]
mod tests {
    use clustermesh_core::observe::ObservedAccess;

    use super::*;

    #[test]
    fn owners_include_those_of_sandbox_accesses() {
        let owner = Owner {
            mesh: Some("m".into()),
            ..Owner::default()
        };
        let access = ObservedAccess {
            owner: owner.clone(),
            generation: 1,
            spec: Err("not read here".into()),
        };
        let seen = Member {
            accesses: Some([("m--a".to_owned(), access)].into()),
            ..Member::default()
        };
        assert_eq!(owners(&seen).collect::<Vec<_>>(), [&owner]);
    }
}
