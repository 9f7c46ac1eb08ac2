//! Finalizers of meshes, as a state machine over passes: a mesh is served only once it carries ours, and loses it once nothing
//! of it is left in any member. And the end of sessions that no mesh needs.

use std::{collections::BTreeSet, time::Duration};

use clustermesh_api::names::FORCE_CLEANUP;
use clustermesh_core::{
    diff::Action,
    mesh::ClusterIdentity,
    observe::{Member, Observation, Owner},
    ownership::{self, Ownership},
};

use super::{Pass, Reconciler, meshes::Known};
use crate::hub_writer::Finalizer;

/// For so long the session of a removed entry is kept, so that its objects can still be removed.
const LEAVING: Duration = Duration::from_secs(3600);

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

    /// Whether nothing of a mesh is left in any member, or what is left was given up.
    fn is_removed(&self, pass: &Pass, known: &Known) -> bool {
        let id = &known.mesh.id;
        let Some(object) = &known.object else { return false };
        let forced = object
            .metadata
            .annotations
            .as_ref()
            .is_some_and(|a| a.get(FORCE_CLEANUP).is_some_and(|v| v != "false"));
        let entries: BTreeSet<&ClusterIdentity> = known.mesh.clusters.iter().map(|cluster| &cluster.identity).collect();
        let unseen = !known.lost.is_empty()
            || entries
                .iter()
                .any(|i| pass.seen.members.get(i).is_none_or(|seen| seen.fresh().is_none()));
        let left = self.members.iter().any(|(identity, member)| {
            // What is in flight may be of before the deletion.
            if member.writer.is_writing(id) {
                return true;
            }
            let Some(seen) = pass.seen.members.get(identity).and_then(Observation::fresh) else {
                return false;
            };
            let stuck = forced && member.writer.trouble(id).is_some();
            !stuck
                && owners(seen).any(|o| ownership::of(o, &pass.plan.hub, &pass.plan.claimants) == Ownership::Mesh(id))
        });
        !left && (!unseen || forced)
    }

    /// Ends the sessions of members that no mesh names, once nothing of ours is left there or hope is given up.
    pub(super) fn disconnect(&mut self, pass: &Pass) {
        self.members.retain(|identity, member| {
            let Some(since) = member.left else { return true };
            let observation = pass.seen.members.get(identity);
            let clean = observation.and_then(Observation::fresh).is_some_and(|seen| {
                let of = |owner| ownership::of(owner, &pass.plan.hub, &pass.plan.claimants);
                owners(seen).all(|owner| matches!(of(owner), Ownership::Foreign | Ownership::Unlabelled))
            });
            let hopeless = matches!(observation, Some(Observation::Missing(_)));
            let late = since.elapsed() > LEAVING;
            if clean || hopeless || late {
                tracing::info!(member = %identity, clean, "session ends: no mesh names it any more");
                member.writer.clear();
                return false;
            }
            true
        });
    }
}

/// Whose the objects of a member are, as far as they say.
fn owners(seen: &Member) -> impl Iterator<Item = &Owner> {
    let peers = seen.peers.iter().flatten().map(|(_, peer)| &peer.owner);
    let policies = seen.policies.iter().flatten().map(|(_, policy)| &policy.owner);
    let services = seen.services.values().filter_map(|service| service.managed.as_ref());
    let slices = seen.slices.values().filter_map(|slice| slice.managed.as_ref());
    peers.chain(policies).chain(services).chain(slices)
}
