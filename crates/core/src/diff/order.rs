//! In which order the Peers of one member are written: a prefix or a key that moves is gained before it is lost.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::{Action, Item, Step};
use crate::{
    key::PublicKey,
    observe::{ObservedPeer, PeerSpec},
};

/// What decides when a Peer is written.
pub(crate) struct PeerOrder {
    /// Prefixes that leave one Peer and come to another.
    pub(crate) moving: BTreeSet<IpNet>,
    /// Keys that come under a new name.
    pub(crate) coming: BTreeSet<PublicKey>,
}

pub(crate) fn before<'a>(step: &Step, standing: &'a BTreeMap<String, ObservedPeer>) -> Option<&'a PeerSpec> {
    standing.get(&step.item.name()).and_then(|peer| peer.spec.as_ref().ok())
}

pub(crate) fn after(step: &Step) -> Option<&PeerSpec> {
    match &step.item {
        Item::Peer(_, spec) => spec.as_ref(),
        _ => None,
    }
}

pub(crate) fn gained(step: &Step, standing: &BTreeMap<String, ObservedPeer>) -> BTreeSet<IpNet> {
    let old = before(step, standing)
        .map(|spec| spec.allowed_ips.clone())
        .unwrap_or_default();
    after(step)
        .into_iter()
        .flat_map(|spec| spec.allowed_ips.iter().copied())
        .filter(|net| !old.contains(net))
        .collect()
}

/// Networks that the Peer of a step has and will not have.
pub(crate) fn lost<'a>(
    step: &'a Step,
    standing: &'a BTreeMap<String, ObservedPeer>,
) -> impl Iterator<Item = IpNet> + 'a {
    let kept = after(step).map(|spec| &spec.allowed_ips);
    let old = before(step, standing).into_iter().flat_map(|spec| &spec.allowed_ips);
    old.filter(move |net| kept.is_none_or(|kept| !kept.contains(net)))
        .copied()
}

impl PeerOrder {
    /// Of steps other than of Peers nothing is read.
    pub(crate) fn of<'a>(steps: impl Iterator<Item = &'a Step>, standing: &BTreeMap<String, ObservedPeer>) -> Self {
        let steps: Vec<&Step> = steps.filter(|step| matches!(step.item, Item::Peer(..))).collect();
        let gained: BTreeSet<IpNet> = steps.iter().flat_map(|step| gained(step, standing)).collect();
        let lost = steps.iter().flat_map(|step| lost(step, standing));
        let created = steps.iter().copied().filter(|step| step.action == Action::Create);
        Self {
            moving: lost.filter(|net| gained.contains(net)).collect(),
            coming: created.filter_map(after).map(|spec| spec.public_key).collect(),
        }
    }

    /// Whether the step's Peer has a key that comes under a new name.
    pub(crate) fn renames(&self, step: &Step, standing: &BTreeMap<String, ObservedPeer>) -> bool {
        before(step, standing).is_some_and(|spec| self.coming.contains(&spec.public_key))
    }

    pub(super) fn phase(&self, step: &Step, standing: &BTreeMap<String, ObservedPeer>) -> u8 {
        match step.action {
            Action::Delete if self.renames(step, standing) => 1,
            _ if gained(step, standing).iter().any(|net| self.moving.contains(net)) => 2,
            Action::Delete => 3,
            Action::Update => 4,
            Action::Create => 5,
        }
    }
}
