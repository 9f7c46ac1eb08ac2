//! The result of [`super::RegistryBuilder`]: the nodes of one member that are registered, and why the others are not.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, OnceLock},
};

use ipnet::IpNet;

use crate::{
    key::PublicKey,
    observe::Node,
    plan::{Fact, PlannedPeer, Reason, Skipped, Uncovered, location::Segments},
};

/// A registered node: a Node that gets Peers, or entries in SandboxAccesses, in other members.
#[derive(Debug)]
pub(in crate::plan) struct RegisteredNode<'a> {
    pub(in crate::plan) node: &'a str,
    pub(in crate::plan) observed: &'a Node,
    pub(in crate::plan) key: PublicKey,
    /// The allowed IPs of its Peers in other members, without anchored networks. All of them lie inside allowedNetworks.
    pub(in crate::plan) prefixes: BTreeSet<IpNet>,
    /// Its WireGuard address.
    pub(in crate::plan) wireguard: IpNet,
    /// The name of its Peers by the naming rule, without a hash.
    pub(in crate::plan) peer_name: String,
    /// The Peer that was planned last for this node, in any target. If the next target needs an equal Peer, it shares this one.
    pub(in crate::plan) shared_peer: Mutex<Option<Arc<PlannedPeer>>>,
}

/// The outcome for each Node of a member: registered, skipped, held, or a follower of another node.
#[derive(Debug, Default)]
pub(in crate::plan) struct NodeRegistry<'a> {
    /// The registered nodes, sorted by age.
    pub(in crate::plan) registered: Vec<RegisteredNode<'a>>,
    /// [`Self::sorted_by_name`].
    by_name: OnceLock<Vec<usize>>,
    pub(in crate::plan) skipped: Vec<Skipped>,
    /// Held nodes (docs/glossary.md), with the reason why they are not registered.
    pub(in crate::plan) held: BTreeMap<&'a str, Reason>,
    /// The podCIDRs of registered nodes, and of their followers, that are left out of the Peers. Sorted by the age of the
    /// registered nodes.
    pub(in crate::plan) uncovered: Vec<Uncovered>,
    /// The leaders of Kilo's locations and their followers.
    pub(in crate::plan) segments: Segments<'a>,
    /// Prefixes that belong to some Node, with or without a Peer. A network that contains one of them is not anchored by
    /// default, unless an earlier plan anchored it.
    pub(in crate::plan) owned: BTreeSet<IpNet>,
    /// [`crate::plan::anchor::anchored_networks`] of the member.
    pub(in crate::plan) anchored: Vec<IpNet>,
    pub(in crate::plan) facts: BTreeSet<Fact>,
}

impl<'a> NodeRegistry<'a> {
    pub(super) fn new(segments: Segments<'a>) -> Self {
        Self {
            segments,
            ..Self::default()
        }
    }

    /// Whether a Node is skipped because another one has its key.
    pub(in crate::plan) fn has_duplicate_key(&self) -> bool {
        let mut skipped = self.skipped.iter();
        skipped.any(|skipped| skipped.reason == Reason::PublicKeyDuplicate)
    }

    /// Positions in `registered`, sorted by the names of the nodes. Called after [`Self::registered`] is complete.
    pub(in crate::plan) fn sorted_by_name(&self) -> &[usize] {
        self.by_name.get_or_init(|| {
            let mut positions: Vec<usize> = (0..self.registered.len()).collect();
            positions.sort_unstable_by_key(|position| self.registered[*position].node);
            positions
        })
    }
}
