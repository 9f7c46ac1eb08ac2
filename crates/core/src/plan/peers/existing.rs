//! Indexes the existing Peers of one target, and decides which of them stay regardless of the plan (design rule 2).

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, hash_map::Entry},
    fmt,
    sync::Arc,
};

use super::keepalive::nat_keepalive;
use crate::{
    key::PublicKey,
    mesh::{ClusterIdentity, Locations, overlap},
    observe::{ObservedPeer, PeerRole, PeerSpec, Rows},
    ownership::{self, Ownership},
    plan::{
        PlannedPeer,
        target::{KeptTarget, MeshInputs, MeshMember},
    },
};

/// What has a key or prefix in a target, for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Holder {
    /// A Peer, by name.
    Peer(Arc<str>),
    /// A Node of the target itself, by name.
    Node(Arc<str>),
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Peer(name) => write!(f, "Peer {name}"),
            Self::Node(name) => write!(f, "Node {name}"),
        }
    }
}

/// An existing Peer with a valid spec.
#[derive(Clone, Copy)]
pub(super) struct Existing<'a> {
    pub(super) name: &'a str,
    pub(super) peer: &'a ObservedPeer,
    /// The mesh that is planned owns it.
    is_ours: bool,
}

impl Existing<'_> {
    /// Whether the mesh that is planned owns the Peer, and the Peer describes this source.
    pub(super) fn is_ours_of(&self, source: &str) -> bool {
        self.is_ours && self.peer.owner.source_cluster.as_deref() == Some(source)
    }
}

/// Whether an existing Peer has the source and key of the planned Peer with its name.
pub(in crate::plan) fn is_matched(existing: &ObservedPeer, planned: &PlannedPeer) -> bool {
    let spec = existing.spec.as_ref();
    existing.owner.source_cluster.as_deref() == Some(&*planned.source)
        && spec.is_ok_and(|spec| spec.public_key == planned.spec.public_key)
}

/// The existing Peers of a target, of all owners.
pub(super) struct ExistingPeers<'a> {
    by_name: Option<&'a Rows<ObservedPeer>>,
    /// For each key, the existing Peer with this key whose name comes first.
    by_key: HashMap<PublicKey, Existing<'a>>,
    /// Further existing Peers with a key in `by_key`.
    more_by_key: BTreeMap<PublicKey, Vec<Existing<'a>>>,
    /// Keys of existing Peers that other meshes keep, with the source cluster of each.
    kept_by_other_meshes: BTreeMap<PublicKey, &'a ClusterIdentity>,
    /// Names of existing Peers that do not belong to the planned mesh, or have no valid spec.
    pub(super) foreign: BTreeSet<String>,
    /// Some Peer of this hub has no mesh label.
    pub(super) has_unlabelled: bool,
    /// The sources of which this mesh has a Peer with an endpoint and the keepalive for NATs.
    pub(super) with_nat_keepalive: BTreeSet<&'a str>,
}

impl<'a> ExistingPeers<'a> {
    /// Returns the index, and the existing Peers that stay in the target regardless of the plan: a foreign one (such as that of a laptop),
    /// one without a mesh label, one whose source was not observed, one of another mesh that is paused, and most orphans. They keep their
    /// keys and prefixes. If such a key were free, a member that copies the key could replace the Peer.
    ///
    /// `only` = index no Peers but these; `None` = all.
    pub(super) fn of(
        inputs: &MeshInputs<'a>,
        name: &str,
        target: &MeshMember<'a>,
        only: Option<&BTreeSet<String>>,
    ) -> (Self, Vec<(&'a str, &'a PeerSpec)>) {
        let by_name = target.last_observed().and_then(|member| member.peers.as_ref());
        let mut index = Self {
            by_name,
            by_key: HashMap::with_capacity(only.map_or_else(|| by_name.map_or(0, Rows::len), BTreeSet::len)),
            more_by_key: BTreeMap::new(),
            kept_by_other_meshes: BTreeMap::new(),
            foreign: BTreeSet::new(),
            has_unlabelled: false,
            with_nat_keepalive: BTreeSet::new(),
        };
        let mut kept = Vec::new();
        let source_networks = inputs.source_networks(name, target);
        let nat_keepalive = nat_keepalive(inputs.configured_keepalive());
        // The Peers of a source usually follow each other.
        let mut last_source: Option<(Option<&str>, bool)> = None;
        let chosen = by_name.zip(only).into_iter();
        let chosen = chosen.flat_map(|(rows, only)| only.iter().filter_map(|name| rows.get_key_value(name)));
        let all = by_name.filter(|_| only.is_none()).into_iter().flatten();
        for (peer_name, peer) in all.chain(chosen) {
            let ownership = ownership::of(&peer.owner, &inputs.seen.hub, inputs.claimants);
            index.has_unlabelled |= ownership == Ownership::Unlabelled;
            let is_ours = ownership == Ownership::Mesh(inputs.mesh);
            if !is_ours || peer.spec.is_err() {
                index.foreign.insert(peer_name.to_owned());
            }
            let Ok(spec) = &peer.spec else { continue };
            let source = peer.owner.source_cluster.as_deref();
            let is_kept = match ownership {
                Ownership::Foreign | Ownership::Unlabelled => true,
                Ownership::Mesh(_) if is_ours => match last_source {
                    Some((last, is_unobserved)) if last == source => is_unobserved,
                    _ => {
                        let is_unobserved = inputs.is_source_unobserved(name, target, peer);
                        last_source = Some((source, is_unobserved));
                        is_unobserved
                    }
                },
                // `kept_source`: `None` = the Peer is not kept; `Some(None)` = it is kept; its mesh has no entry for the source.
                Ownership::Mesh(mesh) => {
                    let kept_source = inputs.kept_source(mesh, peer);
                    if let Some(Some(source)) = kept_source {
                        index.kept_by_other_meshes.insert(spec.public_key, source);
                    }
                    kept_source.is_some()
                }
                // The diff deletes an orphan that is superseded: one with a network of a source of this mesh, or one that describes a node
                // of the target itself, if this mesh connects the target's locations.
                Ownership::Orphan => {
                    let superseded = |net: &ipnet::IpNet| source_networks.iter().any(|other| overlap(*other, *net));
                    let is_own_node = matches!(spec.role, PeerRole::OwnNode(_));
                    let is_own_superseded = is_own_node && target.cluster.locations == Locations::Connected;
                    !is_own_superseded && !spec.allowed_ips.iter().any(superseded)
                }
            };
            if is_kept {
                kept.push((peer_name, spec));
            }
            if let Some(source) = source.filter(|_| is_ours)
                && spec.endpoint.is_some()
                && spec.persistent_keepalive == nat_keepalive
                && !index.with_nat_keepalive.contains(source)
            {
                index.with_nat_keepalive.insert(source);
            }
            let existing = Existing {
                name: peer_name,
                peer,
                is_ours,
            };
            match index.by_key.entry(spec.public_key) {
                Entry::Vacant(entry) => drop(entry.insert(existing)),
                Entry::Occupied(_) => index.more_by_key.entry(spec.public_key).or_default().push(existing),
            }
        }
        (index, kept)
    }

    /// Adds the existing Peers that match no planned Peer to [`KeptTarget::irregular`]. If one of them has the key of a planned
    /// Peer, sets [`KeptTarget::is_entangled`].
    pub(super) fn complete(&self, mut kept: KeptTarget, planned: &BTreeMap<String, Arc<PlannedPeer>>) -> KeptTarget {
        let mut unmatched_keys = Vec::new();
        let mut planned_peers = planned.iter().peekable();
        for (name, peer) in self.by_name.into_iter().flatten() {
            while planned_peers.next_if(|(planned, _)| planned.as_str() < name).is_some() {}
            let planned = planned_peers.peek().filter(|(planned, _)| *planned == name);
            let is_matched = planned.is_some_and(|(_, planned)| is_matched(peer, planned));
            if !is_matched && !kept.foreign.contains(name) {
                kept.irregular.insert(name.to_owned());
                unmatched_keys.extend(peer.spec.as_ref().map(|spec| spec.public_key));
            }
        }
        if !unmatched_keys.is_empty() {
            let planned: HashSet<PublicKey> = planned.values().map(|peer| peer.spec.public_key).collect();
            kept.is_entangled |= unmatched_keys.iter().any(|key| planned.contains(key));
        }
        kept
    }

    pub(super) fn get(&self, name: &str) -> Option<&'a ObservedPeer> {
        self.by_name?.get(name)
    }

    /// The existing Peers with this key, sorted by name.
    pub(super) fn with_key(&self, key: &PublicKey) -> impl Iterator<Item = Existing<'a>> {
        let more = self.more_by_key.get(key).into_iter().flatten();
        self.by_key.get(key).into_iter().chain(more).copied()
    }

    /// The source of the Peer with this key that another mesh keeps.
    pub(super) fn source_kept_by_other_mesh(&self, key: &PublicKey) -> Option<&'a ClusterIdentity> {
        self.kept_by_other_meshes.get(key).copied()
    }
}
