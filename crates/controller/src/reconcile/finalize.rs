//! Finalizers of meshes, as a state machine over passes: a mesh is served only once it carries ours, and loses it once nothing
//! of it is left in any member.

use clustermesh_core::{
    diff::Action,
    mesh::{ClusterIdentity, MeshId},
    observe::{Member, Observation, Owner},
    ownership::{self, Ownership},
};

use super::{Pass, Reconciler, meshes::Known, removed::is_left_behind};
use crate::hub_writer::Finalizer;

/// Drops the steps for meshes that do not carry our finalizer yet: what is written for them might be left behind. An orphaned
/// object has no ClusterMesh and so no finalizer; it is only ever deleted.
pub(super) fn hold_unfinalized(pass: &mut Pass) {
    for steps in pass.steps.values_mut() {
        steps.retain(|step| {
            pass.known
                .get(&step.mesh)
                .map_or(step.action == Action::Delete, Known::finalized)
        });
    }
}

impl Reconciler {
    /// The change of our finalizer that a mesh needs.
    pub(super) fn finalizer(&self, pass: &Pass, known: &Known) -> Option<Finalizer> {
        if known.mesh.deleting {
            let removable = known.finalized() && !known.mesh.paused && self.is_removed(pass, known);
            return removable.then_some(Finalizer::Remove);
        }
        let planned = pass.plan.meshes.get(&known.mesh.id);
        let served = planned.is_some_and(|plan| !plan.paused) && known.refused.is_none();
        (served && !known.finalized()).then_some(Finalizer::Add)
    }

    /// Whether nothing of a mesh is left in any member, or what is left may be left behind.
    fn is_removed(&self, pass: &Pass, known: &Known) -> bool {
        let id = &known.mesh.id;
        let Some(object) = known.object.as_deref() else {
            return false;
        };
        let writing = |identity: &ClusterIdentity| self.members.get(identity).is_some_and(|m| m.writer.is_writing(id));
        let entries = known.mesh.clusters.iter().all(|entry| {
            let left_behind = is_left_behind(object, &entry.name);
            // An object that can be removed is, also where others would be left behind.
            let removable = pass
                .seen
                .members
                .get(&entry.identity)
                .and_then(Observation::fresh)
                .is_some()
                && self
                    .members
                    .get(&entry.identity)
                    .is_some_and(|m| m.writer.trouble(id).is_none());
            self.is_clean(pass, &entry.identity, id) || (left_behind && !removable && !writing(&entry.identity))
        });
        entries && self.removed.is_empty(id) && known.lost.iter().all(|entry| is_left_behind(object, entry))
    }

    /// Whether nothing of a mesh is left in a member, as far as is seen, nor is on its way there.
    pub(super) fn is_clean(&self, pass: &Pass, identity: &ClusterIdentity, mesh: &MeshId) -> bool {
        let Some(member) = self.members.get(identity) else {
            return false;
        };
        let seen = pass.seen.members.get(identity).and_then(Observation::fresh);
        let is_ours = |owner| ownership::of(owner, &pass.plan.hub, &pass.plan.claimants) == Ownership::Mesh(mesh);
        !member.writer.is_writing(mesh) && seen.is_some_and(|seen| !owners(seen).any(is_ours))
    }
}

/// Whose the objects of a member are, as far as they say.
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
