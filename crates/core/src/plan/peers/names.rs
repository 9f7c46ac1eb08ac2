//! Chooses the names of Peers: an existing Peer keeps its name, and one that lost its mesh label is adopted (design rule 2).

use std::{borrow::Cow, sync::Arc};

use super::{AddedPeer, Holder, OwnNames, PeerPlanner, RegisteredNode};
use crate::{
    ownership::{self, Ownership},
    plan::PlannedPeer,
};

impl<'a> PeerPlanner<'a, '_> {
    /// Adopts a Peer of this hub that lost its mesh label, if its name, key and remaining labels show that it describes this node.
    /// Its key and prefixes become free for the planned Peer.
    pub(super) fn readopt(&mut self, source: &str, node: &RegisteredNode<'a>) {
        if !self.existing.has_unlabelled {
            return;
        }
        let mesh = self.inputs.mesh;
        let names = [false, true].map(|is_taken| self.inputs.naming.peer(mesh, source, node.node, is_taken));
        let unlabelled = names.into_iter().find(|name| {
            self.existing.get(name).is_some_and(|peer| {
                let ownership = ownership::of(&peer.owner, &self.inputs.seen.hub, self.inputs.claimants);
                ownership == Ownership::Unlabelled
                    && ownership::can_readopt(&peer.owner, mesh, source)
                    && peer.spec.as_ref().is_ok_and(|spec| spec.public_key == node.key)
            })
        });
        let Some(name) = unlabelled else { return };
        let owner = Holder::Peer(name.as_str().into());
        if self.taken_keys.get(&node.key) == Some(&owner) {
            self.taken_keys.remove(&node.key);
            self.taken_prefixes.retain(|_, other| *other != owner);
            self.readopted.insert(node.key, name);
        }
    }

    /// What to do about a Peer of this hub that lost its mesh label and is not adopted, for the end of a message. Empty for other holders.
    pub(super) fn remedy(&self, holder: &Holder) -> &'static str {
        let existing = match holder {
            Holder::Peer(peer) => self.existing.get(peer),
            Holder::Node(_) => None,
        };
        let hub = &self.inputs.seen.hub;
        let ownership = existing.map(|existing| ownership::of(&existing.owner, hub, self.inputs.claimants));
        match ownership {
            Some(Ownership::Unlabelled) => {
                ". This Peer has lost its label kilo-clustermesh.io/mesh: delete it, and the controller writes the Node's Peer"
            }
            _ => "",
        }
    }

    /// Chooses the name of a Peer and adds the Peer to the plan. If an existing Peer of this mesh and `peer.source` has the same
    /// key, its name is kept even if the naming rule gives another name: deleting one Peer and creating another makes kg lose the
    /// key for minutes. `own_names` are the names that the rule gives to the nodes (or gateways) of `peer.source`. An existing
    /// Peer does not keep its name if the rule gives that name to another node.
    ///
    /// `readable` is the name that the rule gives to the node, without a hash. Returns the position of the Peer in `peers`.
    pub(super) fn add_named_peer(
        &mut self,
        readable: Cow<'_, str>,
        peer: Arc<PlannedPeer>,
        own_names: &OwnNames<'_>,
    ) -> usize {
        let key = &peer.spec.public_key;
        let kept = self.existing.with_key(key).find(|existing| {
            let can_keep = existing.name == readable || !own_names.contains(existing.name);
            can_keep && existing.is_ours_of(&peer.source)
        });
        let existing = kept.map(|existing| existing.peer);
        let kept = kept.map(|existing| Cow::Borrowed(existing.name));
        let kept = kept.or_else(|| self.readopted.remove(key).map(Cow::Owned));
        let is_free = |name: &str| {
            let foreign = self
                .existing
                .get(name)
                .is_some_and(|existing| !self.inputs.is_ours(&existing.owner));
            let used = self.inputs.used_names(self.target).peers.contains(name);
            !(foreign || used || self.taken_names.contains(name))
        };
        let name = match kept {
            Some(kept) if kept == readable => kept.into_owned(),
            Some(kept) => {
                self.irregular.insert(kept.to_string());
                kept.into_owned()
            }
            None if is_free(&readable) => readable.into_owned(),
            None => {
                let hashed = self
                    .inputs
                    .naming
                    .peer(self.inputs.mesh, &peer.source, &peer.node, true);
                let further = (1u32..).map(|number| format!("{hashed}-{number}"));
                let mut names = std::iter::once(hashed.clone()).chain(further);
                let name = names.find(|name| is_free(name)).unwrap_or_default();
                self.irregular.insert(name.clone());
                name
            }
        };
        self.take_claims(&name, &peer);
        let existing = existing.or_else(|| self.existing.get(&name));
        self.peers.push(AddedPeer { name, peer, existing });
        self.peers.len() - 1
    }

    /// Records the key, the prefixes and the name of a planned Peer as taken, if another planned Peer may have the same.
    pub(super) fn take_claims(&mut self, name: &str, peer: &PlannedPeer) {
        if !self.has_shared_claims {
            return;
        }
        let holder = Holder::Peer(name.into());
        let prefixes = peer.spec.allowed_ips.iter();
        self.taken_prefixes.extend(prefixes.map(|net| (*net, holder.clone())));
        self.taken_keys.insert(peer.spec.public_key, holder);
        self.taken_names.insert(name.to_owned());
    }
}
