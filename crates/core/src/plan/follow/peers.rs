//! Decides whether changes of existing Peers change the plan. Usually the controller itself made these changes.

use ipnet::IpNet;

use super::{MeshChanges, MeshFollower, NotFollowed, Patch};
use crate::{
    key::PublicKey,
    observe::{ChangedRow, ObservedPeer, PeerSpec},
    ownership::{self, Ownership},
    plan::{PlannedPeer, link::Link, peers::keepalive::nat_keepalive},
};

impl MeshFollower<'_> {
    /// Checks that the changed existing Peers do not change the plan.
    ///
    /// The planner reads an existing Peer of its own mesh and of a connected source for these purposes:
    /// - The Peer of a node keeps its name.
    /// - An anchored network stays with its anchor.
    /// - A keepalive for NATs may stay.
    /// - An endpoint stays while its host name does not resolve. A held node keeps its Peer. Of two nodes with the same key,
    ///   the one that has a Peer wins. These three cases are not checked here: a mesh with one of them is not followed
    ///   ([`super::Kept::of`]).
    ///
    /// # Errors
    /// The changed Peers may change the plan.
    pub(super) fn check_peers(&self, changes: &MeshChanges<'_>, patch: &Patch) -> Result<(), NotFollowed> {
        for (target, changes) in changes {
            // Keeps the result for the last source: the rows are sorted by name, so Peers of one source are usually adjacent.
            let mut last_source: Option<(&str, bool)> = None;
            for row in &changes.peers {
                for peer in [row.before, row.after].into_iter().flatten() {
                    let source = self.source(peer).ok_or("a Peer of another owner changed")?;
                    let is_meshed = match last_source {
                        Some((last, is_meshed)) if last == source => is_meshed,
                        _ => self.link(target, source) == Some(Link::Meshed),
                    };
                    last_source = Some((source, is_meshed));
                    if !is_meshed {
                        return Err("a Peer changed whose source is not connected");
                    }
                }
                self.check_peer(target, row, patch)?;
            }
        }
        Ok(())
    }

    /// The source in the label of a Peer that belongs to this mesh and has a valid spec.
    fn source<'o>(&self, peer: &'o ObservedPeer) -> Option<&'o str> {
        let planner = &self.after;
        let owner = ownership::of(&peer.owner, &planner.seen.hub, planner.claimants);
        let is_ours = peer.spec.is_ok() && owner == Ownership::Mesh(&planner.mesh.id);
        peer.owner.source_cluster.as_deref().filter(|_| is_ours)
    }

    fn check_peer(&self, target: &str, row: &ChangedRow<'_, ObservedPeer>, patch: &Patch) -> Result<(), NotFollowed> {
        let planned = self.planned_peer(target, row.name, patch);
        let spec = |peer: Option<&ObservedPeer>| peer.and_then(|peer| peer.spec.as_ref().ok()).cloned();
        let (before, after) = (spec(row.before), spec(row.after));
        let naming = |planned: &PlannedPeer| {
            let id = &self.after.mesh.id;
            self.after.naming.peer(id, &planned.source, &planned.node, false)
        };
        let has_planned_key = match (planned, row.after) {
            (None, Some(_)) => return Err("a Peer that is not planned was created or changed"),
            (Some(planned), Some(after)) => {
                let key = after.spec.as_ref().ok().map(|spec| spec.public_key);
                key == Some(planned.spec.public_key)
            }
            (_, None) => false,
        };
        let is_of_source =
            |peer: &ObservedPeer, planned: &PlannedPeer| peer.owner.source_cluster.as_deref() == Some(&*planned.source);
        let mut existing = [row.before, row.after].into_iter().flatten();
        if planned.is_some_and(|planned| !existing.all(|peer| is_of_source(peer, planned))) {
            return Err("a Peer has the name of another source's Peer");
        }
        // If no existing Peer has a node's key, the naming rule decides the name of the node's Peer.
        if planned.is_some_and(|planned| !has_planned_key && naming(planned) != row.name) {
            return Err("a Peer whose name differs from the naming rule was deleted or got another key");
        }
        for spec in [&before, &after].into_iter().flatten() {
            let key = spec.public_key;
            if planned.is_none_or(|planned| planned.spec.public_key != key) && self.is_planned(target, &key, patch) {
                return Err("the key of a changed Peer is planned under another name");
            }
        }
        self.check_anchored(before.as_ref(), after.as_ref(), row)?;
        self.check_keepalive(before.as_ref(), after.as_ref(), planned)
    }

    /// Checks that no part of an anchored network was added to the existing Peer, or removed from it.
    fn check_anchored(
        &self,
        before: Option<&PeerSpec>,
        after: Option<&PeerSpec>,
        row: &ChangedRow<'_, ObservedPeer>,
    ) -> Result<(), NotFollowed> {
        let sources = [row.before, row.after].into_iter().flatten();
        let sources =
            sources.filter_map(|peer| Some(self.kept.anchored_in_peers(peer.owner.source_cluster.as_deref()?)));
        let anchored: Vec<_> = sources.flatten().collect();
        let has = |spec: Option<&PeerSpec>, net: &IpNet| spec.is_some_and(|spec| spec.allowed_ips.contains(net));
        let mut nets = [before, after].into_iter().flatten().flat_map(|spec| &spec.allowed_ips);
        let is_moved = |net: &&IpNet| {
            has(before, net) != has(after, net) && anchored.iter().any(|anchored| anchored.contains(*net))
        };
        match nets.find(is_moved) {
            Some(_) => Err("a part of an anchored network was added to a Peer or removed from it"),
            None => Ok(()),
        }
    }

    /// The planner keeps the keepalive for NATs if an existing Peer has it (`has_nat_keepalive`). If a Peer gains the keepalive that is
    /// planned for it, nothing changes.
    fn check_keepalive(
        &self,
        before: Option<&PeerSpec>,
        after: Option<&PeerSpec>,
        planned: Option<&PlannedPeer>,
    ) -> Result<(), NotFollowed> {
        let keepalives = self
            .kept
            .traits
            .values()
            .map(|traits| traits.cluster.persistent_keepalive);
        let configured = keepalives.max().unwrap_or(0);
        let nat = nat_keepalive(configured);
        let has = |spec: &PeerSpec| spec.endpoint.is_some() && spec.persistent_keepalive == nat;
        let (had, has_now) = (before.is_some_and(has), after.is_some_and(has));
        let is_planned = planned.is_some_and(|planned| has(&planned.spec));
        if nat != configured && (had && !has_now || has_now && !had && !is_planned) {
            return Err("the keepalive for NATs of a Peer changed");
        }
        Ok(())
    }

    /// The planned Peer with this name, as the patch changes it.
    fn planned_peer<'p>(&'p self, target: &str, name: &str, patch: &'p Patch) -> Option<&'p PlannedPeer> {
        if let Some(patched) = patch.peers.get(target).and_then(|peers| peers.get(name)) {
            return patched.as_deref();
        }
        self.planned.targets.get(target)?.peers.get(name).map(|peer| &**peer)
    }

    /// Whether a Peer with this key is planned.
    fn is_planned(&self, target: &str, key: &PublicKey, patch: &Patch) -> bool {
        let patched = patch.peers.get(target);
        let new = patched.into_iter().flatten().filter_map(|(_, peer)| peer.as_ref());
        let kept = self
            .planned
            .targets
            .get(target)
            .into_iter()
            .flat_map(|plan| &plan.peers);
        let kept = kept.filter(|(name, _)| patched.is_none_or(|patched| !patched.contains_key(*name)));
        let mut all = new.chain(kept.map(|(_, peer)| peer));
        all.any(|peer| peer.spec.public_key == *key)
    }
}
