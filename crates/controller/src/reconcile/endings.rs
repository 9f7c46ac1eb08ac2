//! How meshes and members are let go: finalizers of meshes that have nothing left anywhere, sessions that no mesh needs.

use std::{collections::BTreeSet, time::Duration};

use clustermesh_api::names::FORCE_CLEANUP;
use clustermesh_core::{
    mesh::ClusterIdentity,
    observe::{Member, Observation, Owner},
    ownership::{self, Ownership},
};

use super::{Pass, Reconciler, write_back};

/// For so long the session of a removed entry is kept, so that its objects can still be removed.
const LEAVING: Duration = Duration::from_secs(3600);

impl Reconciler {
    /// Releases meshes that are being deleted and have nothing left anywhere.
    pub(super) async fn let_go(&mut self, pass: &Pass) {
        for known in pass
            .known
            .values()
            .filter(|known| known.mesh.deleting && known.finalized())
        {
            let id = &known.mesh.id;
            let Some(object) = &known.object else { continue };
            if known.mesh.paused || self.hub_silent {
                continue;
            }
            let forced = object
                .metadata
                .annotations
                .as_ref()
                .is_some_and(|a| a.get(FORCE_CLEANUP).is_some_and(|v| v != "false"));
            let entries: BTreeSet<&ClusterIdentity> =
                known.mesh.clusters.iter().map(|cluster| &cluster.identity).collect();
            let unseen = !known.lost.is_empty()
                || entries
                    .iter()
                    .any(|i| pass.seen.members.get(i).is_none_or(|seen| seen.fresh().is_none()));
            let left = self.members.iter().any(|(identity, member)| {
                let Some(seen) = pass.seen.members.get(identity).and_then(Observation::fresh) else {
                    return false;
                };
                let stuck = forced && member.writer.trouble(id).is_some();
                !stuck
                    && owners(seen)
                        .any(|o| ownership::of(o, &pass.plan.hub, &pass.plan.claimants) == Ownership::Mesh(id))
            });
            if left || (unseen && !forced) {
                continue;
            }
            match write_back::remove_finalizer(&self.hub.client, object).await {
                Ok(()) => tracing::info!(mesh = %id, forced, "let go: nothing of it is left"),
                Err(error) => {
                    tracing::warn!(mesh = %id, error = &error as &dyn std::error::Error, "finalizer stays");
                    self.hub_silent = write_back::unanswered(&error);
                }
            }
        }
    }

    /// Ends the sessions of members that no mesh names, once nothing of ours is left there or hope is given up.
    pub(super) fn leave(&mut self, pass: &Pass) {
        self.members.retain(|identity, member| {
            let Some(since) = member.left else { return true };
            let observation = pass.seen.members.get(identity);
            let clean = observation.and_then(Observation::fresh).is_some_and(|seen| {
                owners(seen).all(|o| ownership::of(o, &pass.plan.hub, &pass.plan.claimants) == Ownership::Foreign)
            });
            let hopeless = matches!(observation, Some(Observation::Missing(_)));
            let late = since.elapsed() > LEAVING;
            if clean || hopeless || late {
                tracing::info!(member = %identity, clean, "session ends: no mesh names it any more");
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
