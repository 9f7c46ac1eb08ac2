//! Collects the Peers of new nodes for members that kg serves. With each changed Peer, kg configures its WireGuard device anew, which resets
//! all sessions of the node: each peer sends into a dead session for up to 15 s. So nodes that join one after the other are announced
//! together.
//!
//! Only the creation of a Peer waits, and only if its key and its networks are in no existing Peer, no new endpoint of a Service may need
//! it, and it is not a gateway. Everything else is written at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use clustermesh_core::{
    diff::{Action, Item, Step},
    lanes::{Lanes, Source},
    mesh::overlap,
    observe::{Member, PeerRole, PeerSpec},
};

/// The shortest time between two announcements. It is shorter than the time for which a report waits for outstanding objects
/// ([`super::status`]), and than the time after which an agent reports a new tunnel as down: so a waiting Peer changes no condition.
const INTERVAL: Duration = Duration::from_secs(8);

/// The announcements in one member.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// When Peers were last announced.
    announced: Option<Instant>,
    /// Announced Peers that do not exist yet. They never wait again, so the writer reports and repeats a failed write.
    creating: BTreeSet<String>,
}

impl Pace {
    /// Removes the steps that have to wait from `groups`. Returns the time of the next announcement; `None` = no step waits.
    pub(super) fn withhold(
        &mut self,
        groups: &mut BTreeMap<Source, Lanes>,
        seen: &Member,
        now: Instant,
    ) -> Option<Instant> {
        let new_of = |lanes: &Lanes| -> BTreeSet<String> {
            let names = lanes.rest.iter().filter_map(|step| new_peer(step, seen));
            names.collect()
        };
        let new: BTreeSet<String> = groups.values().flat_map(new_of).collect();
        self.creating.retain(|name| new.contains(name));
        if new.is_subset(&self.creating) {
            return None;
        }
        let is_needed = |lanes: &Lanes| !new_of(lanes).is_empty() && lanes.rest.iter().any(publishes_endpoints);
        let next = self.announced.map(|announced| announced + INTERVAL);
        let Some(next) = next.filter(|next| now < *next && !groups.values().any(is_needed)) else {
            self.announced = Some(now);
            self.creating = new;
            return None;
        };
        for lanes in groups.values_mut() {
            let waits = |name: &str| new.contains(name) && !self.creating.contains(name);
            lanes.rest.retain(|step| !waits(&step.item.name()) || !is_peer(step));
        }
        Some(next)
    }
}

/// The name of the Peer that the step creates, if it may wait.
fn new_peer(step: &Step, seen: &Member) -> Option<String> {
    let Item::Peer(name, Some(spec)) = &step.item else {
        return None;
    };
    let existing = || {
        seen.peers
            .iter()
            .flatten()
            .filter_map(|(_, peer)| peer.spec.as_ref().ok())
    };
    let is_new = !existing().any(|other| shares_key_or_network(spec, other));
    (step.action == Action::Create && spec.role == PeerRole::Node && is_new).then(|| name.clone())
}

/// Whether one of the Peers replaces the other, or a network moves between them.
fn shares_key_or_network(one: &PeerSpec, other: &PeerSpec) -> bool {
    let mut nets = one.allowed_ips.iter();
    one.public_key == other.public_key || nets.any(|net| other.allowed_ips.iter().any(|other| overlap(*net, *other)))
}

/// Whether the step may publish an endpoint on a new node.
fn publishes_endpoints(step: &Step) -> bool {
    matches!(step.item, Item::Service(_, Some(_)) | Item::Slice(_, Some(_)))
}

fn is_peer(step: &Step) -> bool {
    matches!(step.item, Item::Peer(..))
}

#[cfg(test)]
mod tests {
    use clustermesh_core::{
        key::PublicKey,
        mesh::{MeshId, ObjectName},
        observe::{Mirror, ObservedPeer, Owner},
    };

    use super::*;

    fn mesh() -> MeshId {
        MeshId {
            namespace: "ns".into(),
            name: "m".into(),
        }
    }

    fn owner() -> Owner {
        Owner {
            mesh: Some("m".into()),
            mesh_namespace: Some("ns".into()),
            hub: Some("hub".into()),
            source_cluster: Some("a".into()),
        }
    }

    fn step(action: Action, item: Item) -> Step {
        Step {
            mesh: mesh(),
            action,
            item,
            owner: owner(),
            fields: vec![],
        }
    }

    /// The spec of node `n`.
    fn spec(n: u8) -> PeerSpec {
        PeerSpec {
            public_key: PublicKey::new([n; 32]),
            allowed_ips: [format!("10.0.{n}.0/24").parse().unwrap()].into(),
            endpoint: None,
            candidates: vec![],
            persistent_keepalive: 0,
            role: PeerRole::Node,
        }
    }

    fn create(n: u8) -> Step {
        step(Action::Create, Item::Peer(format!("p{n}"), Some(spec(n))))
    }

    fn member(peers: &[u8]) -> Member {
        let peer = |n: &u8| {
            let peer = ObservedPeer {
                owner: owner(),
                spec: Ok(spec(*n)),
            };
            (format!("p{n}"), peer)
        };
        Member {
            peers: Some(peers.iter().map(peer).collect()),
            ..Member::default()
        }
    }

    struct Fixture {
        pace: Pace,
        start: Instant,
    }

    impl Fixture {
        fn new() -> Self {
            Self {
                pace: Pace::default(),
                start: Instant::now(),
            }
        }

        /// The names of the objects that are written in a pass at `seconds`, and the time of the next announcement.
        fn pass(&mut self, seconds: u64, rest: Vec<Step>, seen: &Member) -> (Vec<String>, Option<u64>) {
            let mut groups = BTreeMap::from([((mesh(), "a".to_owned()), Lanes { revoking: vec![], rest })]);
            let now = self.start + Duration::from_secs(seconds);
            let next = self.pace.withhold(&mut groups, seen, now);
            let steps = groups.into_values().flat_map(|lanes| lanes.rest);
            let names = steps.map(|step| step.item.name()).collect();
            (names, next.map(|next| (next - self.start).as_secs()))
        }
    }

    fn written(names: &[&str], next: Option<u64>) -> (Vec<String>, Option<u64>) {
        (names.iter().map(|name| (*name).to_owned()).collect(), next)
    }

    #[test]
    fn new_peers_are_announced_together() {
        let mut fixture = Fixture::new();
        let none = member(&[]);
        assert_eq!(fixture.pass(0, vec![create(1)], &none), written(&["p1"], None));
        let one = member(&[1]);
        assert_eq!(fixture.pass(1, vec![create(2)], &one), written(&[], Some(8)));
        assert_eq!(fixture.pass(5, vec![create(2), create(3)], &one), written(&[], Some(8)));
        let both = fixture.pass(8, vec![create(2), create(3)], &one);
        assert_eq!(both, written(&["p2", "p3"], None));
        let three = member(&[1, 2, 3]);
        assert_eq!(fixture.pass(15, vec![create(4)], &three), written(&[], Some(16)));
    }

    #[test]
    fn peer_that_was_announced_never_waits_again() {
        let mut fixture = Fixture::new();
        let none = member(&[]);
        fixture.pass(0, vec![create(1)], &none);
        // The member refuses it. Another node joins.
        let other = fixture.pass(3, vec![create(1), create(2)], &none);
        assert_eq!(other, written(&["p1"], Some(8)));
        let later = fixture.pass(9, vec![create(1), create(2)], &none);
        assert_eq!(later, written(&["p1", "p2"], None));
        // The refused Peer does not start an announcement of its own.
        assert_eq!(fixture.pass(30, vec![create(1)], &member(&[2])), written(&["p1"], None));
        let after_pause = fixture.pass(31, vec![create(1), create(3)], &member(&[2]));
        assert_eq!(after_pause, written(&["p1", "p3"], None));
    }

    #[test]
    fn only_creations_of_new_nodes_wait() {
        let name = |name: &str| ObjectName {
            namespace: "default".into(),
            name: name.into(),
        };
        let update = step(Action::Update, Item::Peer("p1".into(), Some(spec(1))));
        let delete = step(Action::Delete, Item::Peer("p1".into(), None));
        let policy = step(Action::Delete, Item::Policy("policy".into(), None));
        let service = step(Action::Delete, Item::Service(name("gone"), None));
        let mut gateway = spec(5);
        gateway.role = PeerRole::Gateway;
        let gateway = step(Action::Create, Item::Peer("gateway".into(), Some(gateway)));
        // Node 1 under another name, and a node that takes over a network of node 1.
        let renamed = step(Action::Create, Item::Peer("renamed".into(), Some(spec(1))));
        let mut moved = spec(6);
        moved.allowed_ips.extend(spec(1).allowed_ips);
        let moved = step(Action::Create, Item::Peer("moved".into(), Some(moved)));
        let at_once = [update, delete, policy, service, gateway, renamed, moved];
        let names: Vec<String> = at_once.iter().map(|step| step.item.name()).collect();

        let mut fixture = Fixture::new();
        let seen = member(&[1]);
        fixture.pass(0, vec![create(2)], &seen);
        let rest = at_once.into_iter().chain([create(3)]).collect();
        assert_eq!(fixture.pass(1, rest, &seen), (names, Some(8)));

        // A Service may have an endpoint on the new node.
        let mirror = Mirror {
            ports: vec![],
            families: Default::default(),
        };
        let service = step(Action::Create, Item::Service(name("web"), Some(mirror)));
        let with_service = fixture.pass(2, vec![create(3), service], &seen);
        assert_eq!(with_service, written(&["p3", "default/web"], None));
    }
}
