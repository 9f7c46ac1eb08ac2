//! Decides when a ClusterMesh gets our finalizer and when it loses it.
//!
//! A mesh is served only once it has the finalizer. The finalizer is removed when no object of the mesh is left in any member,
//! or when an annotation of the ClusterMesh allows leaving its objects behind.

use clustermesh_core::{
    diff::Action,
    mesh::{ClusterIdentity, MeshId},
    observe::{Member, Observation, Owner},
    ownership::{self, Ownership},
};

use super::{Pass, Reconciler, meshes::LoadedMesh, removed::may_be_left_behind};
use crate::hub_writer::FinalizerChange;

/// Drops the steps for meshes without our finalizer. Without it, a ClusterMesh could be deleted before its objects are removed.
/// An orphaned object has no ClusterMesh and so no finalizer; it is only ever deleted.
pub(super) fn drop_unfinalized_steps(pass: &mut Pass) {
    for steps in pass.steps.values_mut() {
        steps.retain(|step| {
            pass.meshes
                .get(&step.mesh)
                .map_or(step.action == Action::Delete, LoadedMesh::is_finalized)
        });
    }
}

impl Reconciler {
    /// Returns the change of our finalizer that a mesh needs.
    pub(super) fn finalizer_change(&self, pass: &Pass, loaded: &LoadedMesh) -> Option<FinalizerChange> {
        if loaded.mesh.deleting {
            let is_removable = loaded.is_finalized() && !loaded.mesh.paused && self.is_removed(pass, loaded);
            return is_removable.then_some(FinalizerChange::Remove);
        }
        let planned = pass.plan.meshes.get(&loaded.mesh.id);
        let is_served = planned.is_some_and(|plan| !plan.paused) && loaded.refused.is_none();
        (is_served && !loaded.is_finalized()).then_some(FinalizerChange::Add)
    }

    /// Whether no object of a mesh is left in any member, except objects that may be left behind.
    fn is_removed(&self, pass: &Pass, loaded: &LoadedMesh) -> bool {
        let id = &loaded.mesh.id;
        let Some(object) = loaded.object.as_deref() else {
            return false;
        };
        let is_writing =
            |identity: &ClusterIdentity| self.members.get(identity).is_some_and(|m| m.writer.is_writing(id));
        let entries_removed = loaded.mesh.clusters.iter().all(|entry| {
            let may_be_left_behind = may_be_left_behind(object, &entry.name);
            // Objects may be left behind only in a member that cannot be written now. Elsewhere they are removed first.
            let is_writable = pass
                .seen
                .members
                .get(&entry.identity)
                .and_then(Observation::fresh)
                .is_some()
                && self
                    .members
                    .get(&entry.identity)
                    .is_some_and(|m| m.writer.problem(id).is_none());
            self.is_clean(pass, &entry.identity, id)
                || (may_be_left_behind && !is_writable && !is_writing(&entry.identity))
        });
        entries_removed
            && self.meshes.removed.is_empty(id)
            && loaded.unlocatable.iter().all(|entry| may_be_left_behind(object, entry))
    }

    /// Whether a fresh observation of a member shows no object of a mesh, and no write for the mesh is in flight there.
    pub(super) fn is_clean(&self, pass: &Pass, identity: &ClusterIdentity, mesh: &MeshId) -> bool {
        let Some(member) = self.members.get(identity) else {
            return false;
        };
        let seen = pass.seen.members.get(identity).and_then(Observation::fresh);
        let is_ours = |owner| ownership::of(owner, &pass.plan.hub, &pass.plan.claimants) == Ownership::Mesh(mesh);
        !member.writer.is_writing(mesh) && seen.is_some_and(|seen| !owners(seen).any(is_ours))
    }
}

/// The owners in the labels of all objects of a member.
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
    fn sandbox_access_alone_has_an_owner() {
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
