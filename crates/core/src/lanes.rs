//! Splits the steps for one member by source, so that the writer can rate limit each source separately. Sources share a group if a
//! prefix or a key moves between them, because then the order matters across sources.
//!
//! Each group has two lanes, which are lists of steps. `revoking` is written before `rest`, so that other steps do not delay steps that
//! revoke something. In each lane the steps have the order of [`crate::diff::diff`].

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ipnet::IpNet;

use crate::{
    diff::{Action, Item, PeerOrder, Step, desired_spec, existing_spec, gained_prefixes, lost_prefixes},
    key::PublicKey,
    mesh::MeshId,
    observe::{Member, ObservedPeer, Rows},
};

/// The source of a step: a mesh and the name of an entry in it.
pub type Source = (MeshId, String);

/// The two lanes of one group of sources.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Lanes {
    /// Steps that may revoke something:
    /// - creates and updates of PeerPolicies, also those that revoke nothing, because no Peer may be written before them
    /// - all steps of SandboxAccesses
    /// - updates of Peers that lose prefixes, gain none and keep their key
    /// - deletes of Peers, Services and EndpointSlices
    ///
    /// Exception: if a prefix moves from a Peer to another one, the step of the Peer that loses it is in `rest`, unless that Peer is
    /// renamed (another step creates a Peer with its key).
    pub revoking: Vec<Arc<Step>>,
    /// All other steps.
    pub rest: Vec<Arc<Step>>,
}

/// The source of a step.
#[must_use]
pub fn source_of(step: &Step) -> Source {
    (step.mesh.clone(), step.owner.source_cluster.clone().unwrap_or_default())
}

/// Splits `steps`, the result of the diff for `member`. In the result, each group is listed under the smallest of its sources.
#[must_use]
pub fn split_by_source(steps: Vec<Arc<Step>>, member: &Member) -> BTreeMap<Source, Lanes> {
    let none = Rows::default();
    let existing = member.peers.as_ref().unwrap_or(&none);
    let order = PeerOrder::of(&steps, existing);
    let mut groups = SourceGroups::default();
    let mut first: BTreeMap<Moved, Source> = BTreeMap::new();
    for step in &steps {
        for moved in find_moved(step, &order, existing) {
            match first.get(&moved) {
                Some(other) => groups.join(&source_of(step), other),
                None => drop(first.insert(moved, source_of(step))),
            }
        }
    }
    let mut lanes_by_group: BTreeMap<Source, Lanes> = BTreeMap::new();
    for step in steps {
        let lanes = lanes_by_group.entry(groups.find(&source_of(&step))).or_default();
        if is_revoking(&step, &order, existing) {
            lanes.revoking.push(step);
        } else {
            lanes.rest.push(step);
        }
    }
    lanes_by_group
}

/// Whether the step belongs to [`Lanes::revoking`]. The delete of a policy does not: it follows the delete of the last Peer that
/// the policy limits.
fn is_revoking(step: &Step, order: &PeerOrder, existing: &Rows<ObservedPeer>) -> bool {
    // A prefix that moves is added to its new Peer before it is removed from the old one, so the removal must not go first.
    // A renamed Peer is the exception: it is deleted before the new one is created, because a key has only one Peer (design rule 2).
    let must_wait_for_gain = || {
        lost_prefixes(step, existing).any(|net| order.moving_prefixes.contains(&net))
            && !order.is_renamed(step, existing)
    };
    match (&step.item, step.action) {
        (Item::Policy(_, spec), _) => spec.is_some(),
        (Item::Access(..), _) => true,
        (Item::Service(..) | Item::Slice(..), action) => action == Action::Delete,
        (Item::Peer(..), Action::Delete) => !must_wait_for_gain(),
        (Item::Peer(..), Action::Update) => {
            let key = |spec: Option<&crate::observe::PeerSpec>| spec.map(|spec| spec.public_key);
            key(existing_spec(step, existing)) == key(desired_spec(step))
                && gained_prefixes(step, existing).is_empty()
                && lost_prefixes(step, existing).next().is_some()
                && !must_wait_for_gain()
        }
        (Item::Peer(..), Action::Create) => false,
    }
}

/// A prefix that moves from one Peer to another, or the key of a Peer that a step creates. If an existing Peer has that key, the
/// steps rename it.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Moved {
    Prefix(IpNet),
    Key(PublicKey),
}

fn find_moved(step: &Step, order: &PeerOrder, existing: &Rows<ObservedPeer>) -> BTreeSet<Moved> {
    if !matches!(step.item, Item::Peer(..)) {
        return BTreeSet::new();
    }
    let prefixes = gained_prefixes(step, existing)
        .into_iter()
        .chain(lost_prefixes(step, existing));
    let prefixes = prefixes
        .filter(|net| order.moving_prefixes.contains(net))
        .map(Moved::Prefix);
    let keys = [existing_spec(step, existing), desired_spec(step)]
        .into_iter()
        .flatten();
    let keys = keys
        .map(|spec| spec.public_key)
        .filter(|key| order.created_keys.contains(key));
    prefixes.chain(keys.map(Moved::Key)).collect()
}

/// Groups of sources, as a union-find structure: each source points to a smaller one of its group; the smallest points to none.
#[derive(Default)]
struct SourceGroups(BTreeMap<Source, Source>);

impl SourceGroups {
    fn find(&self, source: &Source) -> Source {
        let mut found = source;
        while let Some(smaller) = self.0.get(found) {
            found = smaller;
        }
        found.clone()
    }

    fn join(&mut self, a: &Source, b: &Source) {
        let (a, b) = (self.find(a), self.find(b));
        if a != b {
            self.0.insert(a.clone().max(b.clone()), a.min(b));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::{Owner, PeerRole, PeerSpec};

    fn owner(source: &str) -> Owner {
        Owner {
            mesh: Some("m".into()),
            mesh_namespace: Some("ns".into()),
            hub: Some("hub".into()),
            source_cluster: Some(source.into()),
        }
    }

    fn spec(key: u8, networks: &[&str]) -> PeerSpec {
        PeerSpec {
            public_key: PublicKey::new([key; 32]),
            allowed_ips: networks.iter().map(|net| net.parse().expect("a network")).collect(),
            endpoint: None,
            candidates: vec![],
            persistent_keepalive: 0,
            role: PeerRole::Node,
        }
    }

    fn step(source: &str, action: Action, item: Item) -> Arc<Step> {
        Arc::new(Step {
            mesh: MeshId {
                namespace: "ns".into(),
                name: "m".into(),
            },
            action,
            item,
            owner: owner(source).into(),
            fields: vec![],
        })
    }

    fn member(peers: &[(&str, &str, PeerSpec)]) -> Member {
        let peers = peers.iter().map(|(name, source, spec)| {
            let peer = ObservedPeer {
                owner: owner(source),
                spec: Ok(spec.clone()),
            };
            ((*name).to_owned(), peer)
        });
        Member {
            peers: Some(peers.collect()),
            ..Member::default()
        }
    }

    /// For each group: (source, names in `revoking`, names in `rest`).
    fn split(steps: Vec<Arc<Step>>, member: &Member) -> Vec<(String, Vec<String>, Vec<String>)> {
        let names = |steps: Vec<Arc<Step>>| steps.iter().map(|step| step.item.name()).collect();
        let groups = split_by_source(steps, member).into_iter();
        groups
            .map(|((_, source), lanes)| (source, names(lanes.revoking), names(lanes.rest)))
            .collect()
    }

    fn group(source: &str, revoking: &[&str], rest: &[&str]) -> (String, Vec<String>, Vec<String>) {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        (source.to_owned(), names(revoking), names(rest))
    }

    #[test]
    fn policy_updates_peer_deletes_and_lost_prefixes_are_revoking() {
        let member = member(&[
            ("gone", "a", spec(1, &["10.1.0.0/24"])),
            ("narrower", "a", spec(2, &["10.2.0.0/24", "10.2.1.0/24"])),
            ("wider", "a", spec(3, &["10.3.0.0/24"])),
            ("rekeyed", "a", spec(4, &["10.4.0.0/24", "10.4.1.0/24"])),
        ]);
        let steps = vec![
            step("a", Action::Update, Item::Policy("policy".into(), Some(Box::default()))),
            step("a", Action::Delete, Item::Peer("gone".into(), None)),
            step(
                "a",
                Action::Update,
                Item::Peer("narrower".into(), Some(spec(2, &["10.2.0.0/24"]).into())),
            ),
            step(
                "a",
                Action::Update,
                Item::Peer("wider".into(), Some(spec(3, &["10.3.0.0/23"]).into())),
            ),
            step(
                "a",
                Action::Update,
                Item::Peer("rekeyed".into(), Some(spec(5, &["10.4.0.0/24"]).into())),
            ),
            step(
                "b",
                Action::Create,
                Item::Peer("new".into(), Some(spec(6, &["10.6.0.0/24"]).into())),
            ),
            // The delete of a policy is not revoking.
            step("b", Action::Delete, Item::Policy("last".into(), None)),
        ];
        let want = [
            group("a", &["policy", "gone", "narrower"], &["wider", "rekeyed"]),
            group("b", &[], &["new", "last"]),
        ];
        assert_eq!(split(steps, &member), want);
    }

    #[test]
    fn delete_that_loses_a_moving_prefix_is_not_revoking() {
        let member = member(&[("loses", "a", spec(1, &["10.1.0.0/24"])), ("gains", "a", spec(2, &[]))]);
        let steps = vec![
            step(
                "a",
                Action::Update,
                Item::Peer("gains".into(), Some(spec(2, &["10.1.0.0/24"]).into())),
            ),
            step("a", Action::Delete, Item::Peer("loses".into(), None)),
        ];
        assert_eq!(split(steps, &member), [group("a", &[], &["gains", "loses"])]);
    }

    #[test]
    fn sources_with_a_moving_key_and_prefix_share_a_group() {
        let member = member(&[
            ("old", "a", spec(1, &["10.1.0.0/24"])),
            ("other", "c", spec(3, &["10.3.0.0/24"])),
        ]);
        let steps = vec![
            step("a", Action::Delete, Item::Peer("old".into(), None)),
            step(
                "b",
                Action::Create,
                Item::Peer("new".into(), Some(spec(1, &["10.1.0.0/24"]).into())),
            ),
            step("c", Action::Delete, Item::Peer("other".into(), None)),
        ];
        // `old` is renamed to `new`, so its delete is revoking although its prefix moves.
        let want = [group("a", &["old"], &["new"]), group("c", &["other"], &[])];
        assert_eq!(split(steps, &member), want);
    }
}
