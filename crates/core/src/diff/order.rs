//! Orders the writes of one member's Peers. A prefix that moves to another Peer is added to that Peer before the old Peer loses it, with
//! two exceptions:
//! - a renamed Peer: the Peer with the old name is deleted before the one with the new name is created
//! - a Peer that gains one moving prefix and loses another, in one write: the lost prefix may be in no Peer until the next write

use std::{collections::BTreeSet, sync::Arc};

use ipnet::IpNet;

use super::{Action, Item, Step};
use crate::{
    key::PublicKey,
    observe::{ObservedPeer, PeerSpec, Rows},
};

/// The prefixes and keys that decide the order of the writes.
pub(crate) struct PeerOrder {
    /// Prefixes that one Peer loses and another gains.
    pub(crate) moving_prefixes: BTreeSet<IpNet>,
    /// Public keys of Peers that are created. If a step deletes an existing Peer with such a key, the Peer is renamed.
    pub(crate) created_keys: BTreeSet<PublicKey>,
}

pub(crate) fn existing_spec<'a>(step: &Step, existing: &'a Rows<ObservedPeer>) -> Option<&'a PeerSpec> {
    existing.get(&step.item.name()).and_then(|peer| peer.spec.as_ref().ok())
}

pub(crate) fn desired_spec(step: &Step) -> Option<&PeerSpec> {
    match &step.item {
        Item::Peer(_, spec) => spec.as_deref(),
        _ => None,
    }
}

pub(crate) fn gained_prefixes(step: &Step, existing: &Rows<ObservedPeer>) -> BTreeSet<IpNet> {
    let old = existing_spec(step, existing)
        .map(|spec| spec.allowed_ips.clone())
        .unwrap_or_default();
    desired_spec(step)
        .into_iter()
        .flat_map(|spec| spec.allowed_ips.iter().copied())
        .filter(|net| !old.contains(net))
        .collect()
}

/// The allowed IPs that the existing Peer of a step has and the desired one does not.
pub(crate) fn lost_prefixes<'a>(step: &'a Step, existing: &'a Rows<ObservedPeer>) -> impl Iterator<Item = IpNet> + 'a {
    let kept = desired_spec(step).map(|spec| &spec.allowed_ips);
    let old = existing_spec(step, existing)
        .into_iter()
        .flat_map(|spec| &spec.allowed_ips);
    old.filter(move |net| kept.is_none_or(|kept| !kept.contains(net)))
        .copied()
}

impl PeerOrder {
    /// Collects the moving prefixes and the keys of created Peers; steps of other kinds are ignored.
    pub(crate) fn of(steps: &[Arc<Step>], existing: &Rows<ObservedPeer>) -> Self {
        let is_peer = |step: &&Step| matches!(step.item, Item::Peer(..));
        let steps: Vec<&Step> = steps.iter().map(|step| &**step).filter(is_peer).collect();
        let mut moving_prefixes: BTreeSet<IpNet> =
            steps.iter().flat_map(|step| lost_prefixes(step, existing)).collect();
        // Usually no Peer loses a prefix.
        if !moving_prefixes.is_empty() {
            let gained_prefixes: BTreeSet<IpNet> =
                steps.iter().flat_map(|step| gained_prefixes(step, existing)).collect();
            moving_prefixes.retain(|net| gained_prefixes.contains(net));
        }
        let created = steps.iter().copied().filter(|step| step.action == Action::Create);
        Self {
            moving_prefixes,
            created_keys: created.filter_map(desired_spec).map(|spec| spec.public_key).collect(),
        }
    }

    /// Whether the step's existing Peer is renamed: another step creates a Peer with its key.
    pub(crate) fn is_renamed(&self, step: &Step, existing: &Rows<ObservedPeer>) -> bool {
        existing_spec(step, existing).is_some_and(|spec| self.created_keys.contains(&spec.public_key))
    }

    fn gains_moving_prefix(&self, step: &Step, existing: &Rows<ObservedPeer>) -> bool {
        let moving = &self.moving_prefixes;
        !moving.is_empty() && gained_prefixes(step, existing).iter().any(|net| moving.contains(net))
    }

    /// The phase of a Peer's step: steps of a lower phase are written first (design rule 13). `steps` in `diff.rs` lists the phases of the
    /// other kinds.
    pub(super) fn phase(&self, step: &Step, existing: &Rows<ObservedPeer>) -> u8 {
        match step.action {
            Action::Delete if self.is_renamed(step, existing) => 1,
            _ if self.gains_moving_prefix(step, existing) => 2,
            Action::Delete => 3,
            Action::Update => 4,
            Action::Create => 5,
        }
    }
}
