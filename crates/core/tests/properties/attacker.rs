//! Who owns a sandbox's API server claims what others have: keys, addresses, prefixes, the API server's own, a cluster's UID,
//! ten thousand Nodes. What the others hold stays as it stood, and what of the sandbox they hold stays within its entry.

use std::net::IpAddr;

use clustermesh_core::{
    key::PublicKey,
    mesh::{Addressing, PodNetwork, Profile},
    observe::{Claim, Endpoint, Member, Node, Observation, Server},
    plan::{Plan, Reason},
};
use ipnet::IpNet;
use proptest::{collection, option, prelude::*, sample::select};

use crate::{
    sandbox::{sandboxed, settled},
    world::{World, applied, identity, planned},
};

/// One Node of the attacker's, made of what others have.
#[derive(Debug, Clone)]
struct Forged {
    /// Of whose Nodes' keys, and which.
    key: prop::sample::Index,
    wireguard: IpAddr,
    pods: Option<IpNet>,
    internal: Option<IpAddr>,
    created: i64,
    endpoint: Option<IpAddr>,
}

fn forged() -> impl Strategy<Value = Forged> {
    let address = |list: &'static [&'static str]| select(list).prop_map(|text| text.parse::<IpAddr>().unwrap());
    (
        any::<prop::sample::Index>(),
        address(&["100.66.1.9", "100.66.3.9", "100.66.2.1", "100.66.2.2", "10.1.9.7"]),
        option::of(select(
            &["0.0.0.0/0", "::/0", "10.1.9.0/24", "10.96.0.0/16", "100.66.2.0/24"][..],
        )),
        option::of(address(&["10.1.9.7", "100.66.1.9", "198.51.100.1"])),
        -10i64..3,
        option::of(address(&["10.1.9.7", "127.0.0.1", "192.0.2.66"])),
    )
        .prop_map(|(key, wireguard, pods, internal, created, endpoint)| Forged {
            key,
            wireguard,
            pods: pods.map(|net| net.parse().unwrap()),
            internal,
            created,
            endpoint,
        })
}

impl Forged {
    fn node(self, keys: &[PublicKey]) -> Node {
        let Self {
            key,
            wireguard,
            pods,
            internal,
            created,
            endpoint,
        } = self;
        Node {
            created,
            ready: true,
            public_key: Claim::Valid(keys[key.index(keys.len())]),
            wireguard_ip: Claim::Valid(IpNet::new(wireguard, 24).unwrap()),
            pod_cidrs: pods.into_iter().map(Claim::Valid).collect(),
            allowed_location_ips: pods.into_iter().collect(),
            internal_ips: internal.into_iter().collect(),
            force_endpoint: endpoint.map_or(Claim::Absent, |ip| Claim::Valid(Endpoint::Ip((ip, 51820).into()))),
            server: Server::Agent,
            discovered: keys.iter().map(|key| (*key, (wireguard, 666).into())).collect(),
            ..Node::default()
        }
    }
}

/// The hub and `c1` are in order and hold what one plan after another wrote; the sandbox has no Node yet.
fn standing() -> impl Strategy<Value = World> {
    sandboxed().prop_map(|mut world| {
        for mesh in &mut world.meshes {
            (mesh.paused, mesh.deleting) = (false, false);
            mesh.clusters[1].allowed.push("100.66.3.0/24".parse().unwrap());
            for cluster in &mut mesh.clusters[..2] {
                cluster.addressing = Addressing::Routed;
                cluster.pod_network = PodNetwork::PerNode;
                cluster.anchored = None;
                cluster.max_nodes = 5000;
            }
        }
        let hub = world.seen.members[&identity(0)].last().unwrap().clone();
        for n in [0u8, 1] {
            let mut member = hub.clone();
            member.nodes.retain(|name, _| name == "good");
            member.peers = Some([].into());
            member.policies = Some([].into());
            member.accesses = Some([].into());
            let node = member.nodes.get_mut("good").unwrap();
            node.ready = true;
            if n == 1 {
                node.pod_cidrs = vec![Claim::Valid("10.2.9.0/24".parse().unwrap())];
                node.wireguard_ip = Claim::Valid("100.66.3.9/24".parse().unwrap());
                node.public_key = Claim::Valid(PublicKey::new([60; 32]));
            }
            member.uid = Some(format!("uid-{n}"));
            world
                .seen
                .members
                .insert(identity(n.into()), Observation::Fresh(member));
        }
        let quiet = Member {
            peers: Some([].into()),
            policies: Some([].into()),
            uid: Some("uid-2".into()),
            nodes: [("a".to_owned(), Node::default())].into(),
            ..Member::default()
        };
        world.seen.members.insert(identity(2), Observation::Fresh(quiet));
        (0..4).fold(world, |world, _| applied(&world))
    })
}

fn sandbox(world: &mut World) -> &mut Member {
    match world.seen.members.get_mut(&identity(2)) {
        Some(Observation::Fresh(member)) => member,
        other => panic!("{other:?}"),
    }
}

/// What others than the sandbox hold of others than the sandbox, in all meshes.
fn others(plan: &Plan) -> Vec<String> {
    plan.meshes.values().flat_map(|mesh| settled(mesh, "c2")).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_sandbox_claims_of_others_they_keep_it(
        world in standing(),
        nodes in collection::vec(forged(), 1..6),
        uid in select(&["uid-0", "uid-1", "uid-2"][..]),
    ) {
        let before = others(&planned(&world));
        // Those of the two members that are in order, and one of its own.
        let keys = [PublicKey::new([50; 32]), PublicKey::new([60; 32]), PublicKey::new([200; 32])];
        let mut attacked = world;
        let member = sandbox(&mut attacked);
        member.uid = Some(uid.to_owned());
        for (n, forged) in nodes.into_iter().enumerate() {
            member.nodes.insert(format!("n{n}"), forged.node(&keys));
        }
        for _ in 0..3 {
            let plan = planned(&attacked);
            prop_assert_eq!(&others(&plan), &before);
            for mesh in plan.meshes.values() {
                for (name, target) in mesh.targets.iter().filter(|(name, _)| *name != "c2") {
                    prop_assert!(target.peers.values().all(|peer| peer.source != "c2"));
                    let accesses = target.accesses.values().filter(|access| access.source == "c2");
                    for (key, node) in accesses.flat_map(|access| &access.spec.nodes) {
                        prop_assert_eq!(*key, keys[2], "in {}", name);
                        let own: IpNet = "100.66.2.0/24".parse().unwrap();
                        prop_assert!(node.addresses.iter().all(|address| own.contains(address)));
                    }
                }
            }
            // And again with what that made of the world.
            attacked = applied(&attacked);
        }
    }

    #[test]
    fn no_uid_that_a_member_says_it_has_moves_a_plan(world in standing(), n in 0usize..3, uid in option::of("uid-[0-3]")) {
        let before = planned(&world);
        let mut other = world;
        if let Some(Observation::Fresh(member)) = other.seen.members.get_mut(&identity(n)) {
            member.uid = uid;
        }
        prop_assert_eq!(planned(&other), before);
    }
}

#[test]
fn ten_thousand_nodes_of_a_sandbox_cost_what_its_entry_bounds_and_nobody_else() {
    use proptest::{strategy::ValueTree, test_runner::TestRunner};
    // One mesh of those worlds; which one does not matter.
    let mut world = standing().new_tree(&mut TestRunner::deterministic()).unwrap().current();
    world.meshes.truncate(1);
    for mesh in &mut world.meshes {
        mesh.clusters[2].allowed = vec!["100.70.0.0/16".parse().unwrap()];
        mesh.accepted.clear();
        assert_eq!(mesh.clusters[2].profile, Profile::Sandbox);
    }
    let world = applied(&world);
    let before = others(&planned(&world));
    let mut attacked = world.clone();
    let member = sandbox(&mut attacked);
    for n in 0u32..10_000 {
        let mut key = [7; 32];
        key[..4].copy_from_slice(&n.to_be_bytes());
        let [.., high, low] = n.to_be_bytes();
        let node = Node {
            created: i64::from(n),
            public_key: Claim::Valid(PublicKey::new(key)),
            wireguard_ip: Claim::Valid(IpNet::new([100, 70, high, low].into(), 16).unwrap()),
            server: Server::Agent,
            ..Node::default()
        };
        member.nodes.insert(format!("n{n:05}"), node);
    }
    let plan = planned(&attacked);
    assert_eq!(others(&plan), before);
    let mesh = plan.meshes.values().next().unwrap();
    let mut held = mesh.targets["c0"].accesses.values();
    let held = held.find(|access| access.source == "c2").unwrap().spec.nodes.len();
    let skipped = &mesh.clusters["c2"].skipped;
    let many = skipped.iter().filter(|skipped| skipped.reason == Reason::TooManyNodes);
    // 5,000 Nodes are looked at, the oldest: "a", which says nothing, is among them.
    assert_eq!((held, many.count()), (4_999, 5_001));
}
