//! Chooses the names of Peers: an existing Peer keeps its name, and one that lost its mesh label is adopted (design rule 2).

use std::collections::BTreeSet;

use super::{PeerPlanner, PeerSpec, RegisteredNode};
use crate::{
    ownership::{self, Ownership},
    plan::PlannedPeer,
};

impl<'a> PeerPlanner<'a, '_> {
    /// Adopts a Peer of this hub that lost its mesh label, if its name, key and remaining labels show that it describes this node.
    /// Its key and prefixes become free for the planned Peer.
    pub(super) fn readopt(&mut self, source: &str, node: &RegisteredNode<'a>) {
        let mesh = self.inputs.mesh;
        let names = [false, true].map(|is_taken| self.inputs.naming.peer(mesh, source, node.node, is_taken));
        let unlabelled = names.into_iter().find(|name| {
            self.existing.get(&**name).is_some_and(|peer| {
                let ownership = ownership::of(&peer.owner, &self.inputs.seen.hub, self.inputs.claimants);
                ownership == Ownership::Unlabelled
                    && ownership::can_readopt(&peer.owner, mesh, source)
                    && peer.spec.as_ref().is_ok_and(|spec| spec.public_key == node.key)
            })
        });
        let Some(name) = unlabelled else { return };
        let owner = format!("Peer {name}");
        if self.taken_keys.get(&node.key).is_some_and(|other| *other == owner) {
            self.taken_keys.remove(&node.key);
            self.taken_prefixes.retain(|_, other| *other != owner);
            self.readopted.insert(node.key, name);
        }
    }

    /// Chooses the name of a Peer and adds the Peer to the plan. If a Peer of this mesh and `source` already has this key, its name is
    /// kept even if the naming rule gives another name: deleting one Peer and creating another makes kg lose the key for minutes.
    /// `own_names` are the names that the rule gives to the nodes (or gateways) of `source`. A Peer does not keep its name if the rule
    /// gives that name to another node.
    pub(super) fn add_named_peer(
        &mut self,
        source: &str,
        node: &str,
        spec: PeerSpec,
        own_names: &BTreeSet<String>,
    ) -> String {
        let naming = self.inputs.naming;
        let readable = naming.peer(self.inputs.mesh, source, node, false);
        let kept = self.by_key.get(&spec.public_key).into_iter().flatten().find(|name| {
            let can_keep = ***name == *readable || !own_names.contains(**name);
            can_keep
                && self
                    .existing
                    .get(*name)
                    .is_some_and(|peer| self.is_our_peer_of(source, peer))
        });
        let kept = kept
            .map(|name| (*name).to_owned())
            .or_else(|| self.readopted.remove(&spec.public_key));
        let is_free = |name: &String| {
            let existing = self.existing.get(&**name);
            let foreign = existing.is_some_and(|peer| !self.inputs.is_ours(&peer.owner));
            let used = self.inputs.used_names(self.target).peers.contains(name);
            !(foreign || used || self.peers.contains_key(name))
        };
        let name = kept.unwrap_or_else(|| {
            let hashed = naming.peer(self.inputs.mesh, source, node, true);
            let further = (1u32..).map(|number| format!("{hashed}-{number}"));
            let mut names = [readable, hashed.clone()].into_iter().chain(further);
            names.find(is_free).unwrap_or_default()
        });
        self.taken_keys.insert(spec.public_key, format!("Peer {name}"));
        self.taken_prefixes
            .extend(spec.allowed_ips.iter().map(|net| (*net, format!("Peer {name}"))));
        self.peers.insert(
            name.clone(),
            PlannedPeer {
                source: source.to_owned(),
                node: node.to_owned(),
                spec,
            },
        );
        name
    }
}
