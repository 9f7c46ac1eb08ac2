//! Property tests for a hostile sandbox: its Nodes claim keys, addresses and prefixes of other members, its API server claims the UID of
//! another cluster, or it has ten thousand Nodes. Objects in other members do not change, except the nodes in the
//! sandbox's SandboxAccesses: these have only keys that no other member has, and addresses in the networks of the sandbox's entry.

use std::net::IpAddr;

use clustermesh_core::{
    key::PublicKey,
    mesh::{Addressing, PodNetwork, Profile},
    observe::{Claim, Endpoint, Member, Node, Observation, Server},
    plan::{Plan, Reason},
};
use clustermesh_scenarios::{Scenario, apply_plan, identity, planned, sandboxed};
use ipnet::IpNet;
use proptest::{collection, option, prelude::*, sample::select};

use crate::sandbox::plan_without;

/// A Node of the sandbox that claims values of other members or valid values of its own.
#[derive(Debug, Clone)]
struct ForgedNode {
    /// The index of the Node's key in the list of keys.
    key: prop::sample::Index,
    wireguard: IpAddr,
    pods: Option<IpNet>,
    internal: Option<IpAddr>,
    created: i64,
    endpoint: Option<IpAddr>,
}

fn forged_node() -> impl Strategy<Value = ForgedNode> {
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
        .prop_map(|(key, wireguard, pods, internal, created, endpoint)| ForgedNode {
            key,
            wireguard,
            pods: pods.map(|net| net.parse().unwrap()),
            internal,
            created,
            endpoint,
        })
}

impl ForgedNode {
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

/// A scenario in which the hub and `c1` each have a valid Node, the sandbox's only Node publishes nothing, and four plans were applied.
fn healthy() -> impl Strategy<Value = Scenario> {
    sandboxed().prop_map(|mut scenario| {
        for mesh in &mut scenario.meshes {
            (mesh.paused, mesh.deleting) = (false, false);
            mesh.clusters[1].allowed.push("100.66.3.0/24".parse().unwrap());
            for cluster in &mut mesh.clusters[..2] {
                cluster.addressing = Addressing::Routed;
                cluster.pod_network = PodNetwork::PerNode;
                // `None`: the networks of `allowed` in which no Node has a prefix are anchored.
                cluster.anchored = None;
                cluster.max_nodes = 5000;
            }
        }
        let hub = scenario.seen.members[&identity(0)].last().unwrap().clone();
        // `c1` starts as a copy of the hub, with addresses and a key of its own.
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
            scenario
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
        scenario.seen.members.insert(identity(2), Observation::Fresh(quiet));
        (0..4).fold(scenario, |scenario, _| apply_plan(&scenario))
    })
}

fn sandbox(scenario: &mut Scenario) -> &mut Member {
    match scenario.seen.members.get_mut(&identity(2)) {
        Some(Observation::Fresh(member)) => member,
        other => panic!("{other:?}"),
    }
}

/// The results of [`plan_without`] for the sandbox `c2`, of all meshes.
fn plans_without_sandbox(plan: &Plan) -> Vec<String> {
    plan.meshes.values().flat_map(|mesh| plan_without(mesh, "c2")).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    // threat: sandbox-claims-identity
    #[test]
    fn sandbox_claims_do_not_change_other_members(
        scenario in healthy(),
        nodes in collection::vec(forged_node(), 1..6),
        uid in select(&["uid-0", "uid-1", "uid-2"][..]),
    ) {
        let before = plans_without_sandbox(&planned(&scenario));
        // The keys of the hub's node and of the node of `c1`, and a key that only the sandbox has.
        let keys = [PublicKey::new([50; 32]), PublicKey::new([60; 32]), PublicKey::new([200; 32])];
        let mut attacked = scenario;
        let member = sandbox(&mut attacked);
        member.uid = Some(uid.to_owned());
        for (n, forged) in nodes.into_iter().enumerate() {
            member.nodes.insert(format!("n{n}"), forged.node(&keys));
        }
        for _ in 0..3 {
            let plan = planned(&attacked);
            prop_assert_eq!(&plans_without_sandbox(&plan), &before);
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
            // Repeat with the state after this plan was written.
            attacked = apply_plan(&attacked);
        }
    }

    // threat: sandbox-claims-identity
    #[test]
    fn cluster_uid_of_a_member_does_not_change_the_plan(scenario in healthy(), n in 0usize..3, uid in option::of("uid-[0-3]")) {
        let before = planned(&scenario);
        let mut other = scenario;
        if let Some(Observation::Fresh(member)) = other.seen.members.get_mut(&identity(n)) {
            member.uid = uid;
        }
        prop_assert_eq!(planned(&other), before);
    }
}

// threat: many-nodes
#[test]
fn ten_thousand_sandbox_nodes_do_not_affect_others() {
    use proptest::{strategy::ValueTree, test_runner::TestRunner};
    // A single mesh is enough, whichever it is.
    let mut scenario = healthy().new_tree(&mut TestRunner::deterministic()).unwrap().current();
    scenario.meshes.truncate(1);
    for mesh in &mut scenario.meshes {
        mesh.clusters[2].allowed = vec!["100.70.0.0/16".parse().unwrap()];
        mesh.accepted.clear();
        assert_eq!(mesh.clusters[2].profile, Profile::Sandbox);
    }
    let scenario = apply_plan(&scenario);
    let before = plans_without_sandbox(&planned(&scenario));
    let mut attacked = scenario.clone();
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
    assert_eq!(plans_without_sandbox(&plan), before);
    let mesh = plan.meshes.values().next().unwrap();
    let mut accesses = mesh.targets["c0"].accesses.values();
    let used = accesses.find(|access| access.source == "c2").unwrap().spec.nodes.len();
    let skipped = &mesh.clusters["c2"].skipped;
    let too_many = skipped.iter().filter(|skipped| skipped.reason == Reason::TooManyNodes);
    // Only the oldest 5,000 Nodes are considered (`max_nodes`, set by `sandboxed`). One of these is "a", which publishes nothing.
    assert_eq!((used, too_many.count()), (4_999, 5_001));
}
