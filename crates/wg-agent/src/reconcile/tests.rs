use std::time::Duration;

use clustermesh_core::observe::{Endpoint, PeerSpec};

use super::*;
use crate::source::{
    objects::{OwnNode, PeerSeen},
    watch::Seen,
};

mod kg;

fn listed<V>(objects: impl IntoIterator<Item = (&'static str, V)>) -> Seen<V> {
    Seen::Listed(
        objects
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
    )
}

fn world() -> World {
    World {
        peers: listed([]),
        policies: Seen::Absent,
        nodes: listed([(
            "a",
            NodeSeen {
                own: Some(OwnNode::default()),
                ..NodeSeen::default()
            },
        )]),
        api_servers: listed([("kubernetes", ["192.0.2.1:6443".parse().unwrap()].into())]),
        ..World::default()
    }
}

fn underlay() -> Underlay {
    Underlay {
        interface: "eth0".parse().unwrap(),
        mtu: 1500,
        addresses: [("192.0.2.7".parse().unwrap(), 24)].into(),
        next_hops: ["192.0.2.254".parse().unwrap()].into(),
    }
}

fn gathered(world: &World) -> Gathered {
    gather(
        world,
        &NodeSeen::default(),
        &Local {
            name: "a",
            public_key: PublicKey::new([9; 32]),
            wireguard_ip: "100.66.0.9".parse().unwrap(),
            device: &"kilo0".parse().unwrap(),
            port: 51820,
            underlay: &underlay(),
            resolvers: &["10.95.0.10".parse().unwrap()].into(),
            bypass: &["10.0.0.0/24".parse().unwrap()],
            servers: &["10.95.0.1:443".parse().unwrap()].into(),
        },
    )
}

fn peer(endpoint: Option<Endpoint>) -> PeerSeen {
    let spec = PeerSpec {
        public_key: PublicKey::new([7; 32]),
        allowed_ips: ["10.5.0.0/24".parse().unwrap()].into(),
        endpoint,
        candidates: Vec::new(),
        persistent_keepalive: 0,
    };
    PeerSeen {
        cluster: "mgmt".into(),
        mesh: ("ns".into(), "prod".into()),
        revision: 5,
        spec: Ok(spec),
    }
}

#[test]
fn nothing_is_done_before_everything_was_read_once() {
    assert_eq!(waiting(&world()), Ok(()));
    let mut some = World {
        nodes: world().nodes,
        api_servers: world().api_servers,
        ..World::default()
    };
    some.errors.insert("Peer", "connection refused".into());
    assert_eq!(
        waiting(&some).unwrap_err().message,
        "waiting for the first list of: Peer (connection refused), PeerPolicy"
    );
}

#[test]
fn a_cache_is_harmless_while_the_api_server_is_away_and_not_where_it_refuses() {
    let mut some = world();
    let told = |world: &World| from_cache(world, Path::new("/c"), Stamp::default());
    assert_eq!(told(&some), None);
    assert!(some.current());
    some.policies = Seen::Remembered(BTreeMap::new());
    let away = Trouble::harmless(
        "cache",
        "the API server has not told yet, since this agent's start: PeerPolicy; these are taken as the API server confirmed \
         them last, at 1970-01-01T00:00:00Z (/c); see to the API server, or to --kubeconfig",
    );
    assert_eq!(told(&some), Some(away.clone()));
    some.refused.insert("Peer");
    assert_eq!(told(&some), Some(away), "Peers were listed before");
    some.refused.insert("PeerPolicy");
    some.errors.insert("PeerPolicy", "Unauthorized".into());
    let refused = Trouble::new(
        "cache",
        "the API server answers and refuses to show: PeerPolicy (Unauthorized); these are taken as the API server confirmed \
         them last, at 1970-01-01T00:00:00Z (/c), and nothing new is learnt; see to this \
         agent's account (ClusterRole and binding in deploy/agent.yaml) or to --kubeconfig",
    );
    assert_eq!(told(&some), Some(refused));
    assert!(!some.current());
}

#[test]
fn a_missing_node_is_named() {
    assert!(own_node(&world(), "a").is_ok());
    assert!(
        own_node(&world(), "b")
            .unwrap_err()
            .message
            .starts_with("there is no Node b in this cluster")
    );
}

#[test]
fn a_kg_that_lives_is_not_joined_and_one_that_is_gone_does_not_matter() {
    let seen = |kg_seen| NodeSeen {
        own: Some(OwnNode {
            kg_seen,
            ..OwnNode::default()
        }),
        ..NodeSeen::default()
    };
    let now = std::time::UNIX_EPOCH + Duration::from_secs(1000);
    assert_eq!(
        [None, Some(940), Some(1)].map(|at| KgWatch::default().check(&seen(at), now).is_ok()),
        [true; 3]
    );
    for alive in [941, 1000, 1030] {
        let message = KgWatch::default().check(&seen(Some(alive)), now).unwrap_err().message;
        assert!(message.contains("take kg off it"), "{message}");
    }
}

#[test]
fn kg_that_stopped_for_a_moment_is_waited_for() {
    let seen = |kg_seen| NodeSeen {
        own: Some(OwnNode {
            kg_seen,
            ..OwnNode::default()
        }),
        ..NodeSeen::default()
    };
    let at = |seconds| std::time::UNIX_EPOCH + Duration::from_secs(seconds);
    let mut kg = KgWatch::default();
    let mut free = |kg_seen, now| kg.check(&seen(kg_seen), at(now)).is_ok();
    assert_eq!(
        [
            free(Some(990), 1000),
            // SIGTERM: kg removes the annotation.
            free(None, 1001),
            free(None, 1299),
            // It is back, and ends once more; the annotation of one that was killed stays.
            free(Some(1300), 1310),
            free(None, 1311),
            free(Some(1300), 1609),
            free(None, 1610),
        ],
        [false, false, false, false, false, false, true]
    );
}

#[test]
fn what_the_underlay_needs_is_gathered_from_everywhere() {
    let mut world = world();
    let other = |n: u8| NodeSeen {
        internal_ips: vec![IpAddr::from([192, 0, 2, n])],
        wireguard_ip: Some(IpAddr::from([100, 66, 0, n])),
        pod_cidrs: [format!("10.5.{n}.0/24").parse().unwrap()].into(),
        ..NodeSeen::default()
    };
    world.nodes = listed([("a", other(7)), ("b", other(8))]);
    let inputs = gathered(&world).inputs;
    let throw: Vec<String> = inputs.throw.iter().map(ToString::to_string).collect();
    assert_eq!(
        throw,
        ["10.0.0.0/24", "10.95.0.10/32", "192.0.2.8/32", "192.0.2.254/32"]
    );
    assert_eq!(
        inputs.api_servers,
        ["10.95.0.1:443", "192.0.2.1:6443"].map(|a| a.parse().unwrap()).into()
    );
    // And what is closed on every node: this one's own new address, too, before its Node says it.
    let addresses = ["100.66.0.7", "100.66.0.8", "100.66.0.9", "192.0.2.7", "192.0.2.8"];
    assert_eq!(inputs.nodes, addresses.map(|a| a.parse().unwrap()).into());
    assert_eq!(inputs.pods_elsewhere, ["10.5.8.0/24".parse().unwrap()].into());
}

#[test]
fn a_peer_that_cannot_be_read_costs_that_peer_and_a_name_waits_for_its_address() {
    let mut world = world();
    let named = peer(Some(Endpoint::Dns("n.example.org".into(), 7)));
    let wrong = PeerSeen {
        spec: Err("spec.publicKey: no".into()),
        ..peer(None)
    };
    world.peers = listed([("good", named), ("wrong", wrong)]);
    let before = gathered(&world);
    assert_eq!(before.names, ["n.example.org".to_owned()].into());
    assert_eq!(
        before.unreadable,
        [("Peer wrong".to_owned(), "spec.publicKey: no".to_owned())].into()
    );
    assert_eq!(
        before
            .inputs
            .peers
            .iter()
            .map(|p| (p.name.as_str(), p.endpoint))
            .collect::<Vec<_>>(),
        [("good", None)]
    );
    world
        .addresses
        .insert("n.example.org".into(), "192.0.2.9".parse().unwrap());
    assert_eq!(
        gathered(&world).inputs.peers[0].endpoint,
        Some("192.0.2.9:7".parse().unwrap())
    );
    let member = Member {
        mesh: ("ns".into(), "prod".into()),
        cluster: "mgmt".into(),
    };
    assert_eq!(before.members, [(PublicKey::new([7; 32]), member)].into());
}
