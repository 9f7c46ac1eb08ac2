use std::time::Duration;

use clustermesh_core::observe::{Endpoint, PeerRole, PeerSpec};
use clustermesh_daemon::Readiness;

use super::*;
use crate::{
    args::Mtu,
    device::Backend as ChosenBackend,
    firewall, identity,
    metrics::Metrics,
    route::Memory as MemoryRouting,
    source::{
        objects::{OwnNode, ParsedPeer},
        watch::WatchedKind,
    },
    status::Dump,
};

mod failed_device;
mod kg;

type Agent = Reconciler<MemoryRouting, firewall::Memory>;

/// Returns an agent with backends in memory, its published annotations, and its directory.
fn agent(open: Opener) -> (Agent, watch::Receiver<DesiredAnnotations>, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    let (publish, published) = watch::channel(DesiredAnnotations::default());
    let agent = Reconciler::new(Dependencies {
        key: identity::key::load_or_create(&file("key")).unwrap(),
        cluster: ClusterView {
            server: Server {
                host: Ok("192.0.2.1".parse().unwrap()),
                port: 6443,
            },
            store: Store::default(),
            host_names: watch::channel(BTreeSet::new()).0,
            datapath_problem: watch::channel(None).1,
        },
        kernel: Kernel {
            routing: MemoryRouting::default(),
            firewall: FirewallManager::new(firewall::Memory::default()),
            open,
        },
        cache: CacheWriter {
            content: watch::channel(CacheContent::default()).0,
            confirmed: UnixTime::default(),
            max_lag: Duration::from_secs(60),
        },
        publish,
        report: PassReporter::new(Readiness::new(), Metrics::default(), Dump::default()),
        config: Config {
            node_name: "a".to_owned(),
            kubeconfig: None,
            backend: ChosenBackend::Auto,
            interface: "kilo0".parse().unwrap(),
            port: 51820,
            range: identity::address::Range::new("100.66.0.0/16".parse().unwrap()).unwrap(),
            key_file: file("key"),
            cache_file: file("cache"),
            cache_max_age: Duration::from_secs(3600),
            mtu: Mtu::Fixed(1380),
            offload: true,
            bypass: Vec::new(),
            listen: "127.0.0.1:0".parse().unwrap(),
            metrics_per_peer: false,
        },
    });
    (agent, published, directory)
}

fn listed<V>(objects: impl IntoIterator<Item = (&'static str, V)>) -> WatchedKind<V> {
    WatchedKind::Listed(
        objects
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
    )
}

fn snapshot() -> ClusterSnapshot {
    ClusterSnapshot {
        peers: listed([]),
        policies: WatchedKind::CrdMissing,
        nodes: listed([(
            "a",
            ParsedNode {
                own: Some(OwnNode::default()),
                ..ParsedNode::default()
            },
        )]),
        api_servers: listed([("kubernetes", ["192.0.2.1:6443".parse().unwrap()].into())]),
        ..ClusterSnapshot::default()
    }
}

fn underlay() -> Underlay {
    Underlay {
        interface: "eth0".parse().unwrap(),
        mtu: 1500,
        addresses: [("192.0.2.7".parse().unwrap(), 24)].into(),
        next_hops: ["192.0.2.254", "10.5.8.0"].map(|a| a.parse().unwrap()).into(),
    }
}

fn gathered(snapshot: &ClusterSnapshot) -> GatheredInputs {
    gathered_for(snapshot, &ParsedNode::default())
}

fn gathered_for(snapshot: &ClusterSnapshot, own: &ParsedNode) -> GatheredInputs {
    gather_inputs(
        snapshot,
        own,
        &LocalFacts {
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

fn peer(endpoint: Option<Endpoint>) -> ParsedPeer {
    let spec = PeerSpec {
        public_key: PublicKey::new([7; 32]),
        allowed_ips: ["10.5.0.0/24".parse().unwrap()].into(),
        endpoint,
        candidates: Vec::new(),
        persistent_keepalive: 0,
        role: PeerRole::Node,
    };
    ParsedPeer {
        cluster: "mgmt".into(),
        mesh: ("ns".into(), "prod".into()),
        revision: 5,
        spec: Ok(spec),
    }
}

#[test]
fn pass_waits_for_the_first_list_of_every_kind() {
    assert_eq!(check_first_lists(&snapshot()), Ok(()));
    let mut partial = ClusterSnapshot {
        nodes: snapshot().nodes,
        api_servers: snapshot().api_servers,
        ..ClusterSnapshot::default()
    };
    partial.errors.insert("Peer", "connection refused".into());
    assert_eq!(
        check_first_lists(&partial).unwrap_err().message,
        "waiting for the first list of: Peer (connection refused), PeerPolicy"
    );
}

#[test]
fn cache_is_harmless_unless_the_api_server_refuses() {
    let mut cluster = snapshot();
    let trouble = |snapshot: &ClusterSnapshot| cache_trouble(snapshot, Path::new("/c"), UnixTime::default());
    assert_eq!(trouble(&cluster), None);
    assert!(cluster.is_confirmed());
    cluster.policies = WatchedKind::Cached(BTreeMap::new());
    let unanswered = Trouble::harmless(
        "cache",
        "the API server has not listed these kinds since this agent started: PeerPolicy; their objects come from the cache, which \
         the API server last confirmed at 1970-01-01T00:00:00Z (/c); check the API server and --kubeconfig",
    );
    assert_eq!(trouble(&cluster), Some(unanswered.clone()));
    cluster.forbidden_kinds.insert("Peer");
    assert_eq!(trouble(&cluster), Some(unanswered), "only a kind from the cache counts");
    cluster.forbidden_kinds.insert("PeerPolicy");
    cluster.errors.insert("PeerPolicy", "Unauthorized".into());
    let forbidden = Trouble::new(
        "cache",
        "the API server answers but refuses to list: PeerPolicy (Unauthorized); their objects come from the cache, which the API \
         server last confirmed at 1970-01-01T00:00:00Z (/c), and no changes arrive; check this \
         agent's account (ClusterRole and binding in deploy/agent.yaml) or --kubeconfig",
    );
    assert_eq!(trouble(&cluster), Some(forbidden));
    assert!(!cluster.is_confirmed());
}

#[test]
fn missing_node_is_named_in_the_error() {
    assert!(find_own_node(&snapshot(), "a").is_ok());
    assert!(
        find_own_node(&snapshot(), "b")
            .unwrap_err()
            .message
            .starts_with("there is no Node b in this cluster")
    );
}

#[test]
fn pass_is_refused_while_last_seen_is_recent() {
    let seen = |kg_seen| ParsedNode {
        own: Some(OwnNode {
            kg_seen,
            ..OwnNode::default()
        }),
        ..ParsedNode::default()
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
fn agent_waits_five_minutes_after_kg_stopped() {
    let seen = |kg_seen| ParsedNode {
        own: Some(OwnNode {
            kg_seen,
            ..OwnNode::default()
        }),
        ..ParsedNode::default()
    };
    let at = |seconds| std::time::UNIX_EPOCH + Duration::from_secs(seconds);
    let mut kg = KgWatch::default();
    let mut may_begin = |kg_seen, now| kg.check(&seen(kg_seen), at(now)).is_ok();
    assert_eq!(
        [
            may_begin(Some(990), 1000),
            // SIGTERM: kg removes the annotation.
            may_begin(None, 1001),
            may_begin(None, 1299),
            // kg restarts: the five minutes begin again at 1310.
            may_begin(Some(1300), 1310),
            may_begin(None, 1311),
            // An old `last-seen` value does not count as alive, so it does not prolong the wait.
            may_begin(Some(1300), 1609),
            may_begin(None, 1610),
        ],
        [false, false, false, false, false, false, true]
    );
}

#[test]
fn addresses_of_node_and_cluster_are_gathered() {
    let mut snapshot = snapshot();
    let node = |n: u8| ParsedNode {
        internal_ips: vec![IpAddr::from([192, 0, 2, n])],
        wireguard_ip: Some(IpAddr::from([100, 66, 0, n])),
        pod_cidrs: [format!("10.5.{n}.0/24").parse().unwrap()].into(),
        ..ParsedNode::default()
    };
    snapshot.nodes = listed([("a", node(7)), ("b", node(8))]);
    let inputs = gathered(&snapshot).inputs;
    // Without the next hop 10.5.8.0, which is in the pod CIDR of b.
    let throw: Vec<String> = inputs.throw.iter().map(ToString::to_string).collect();
    assert_eq!(
        throw,
        ["10.0.0.0/24", "10.95.0.10/32", "192.0.2.8/32", "192.0.2.254/32"]
    );
    assert_eq!(
        inputs.api_servers,
        ["10.95.0.1:443", "192.0.2.1:6443"].map(|a| a.parse().unwrap()).into()
    );
    // 100.66.0.9 is the agent's new WireGuard address. Its Node still has the old one, 100.66.0.7.
    let addresses = ["100.66.0.7", "100.66.0.8", "100.66.0.9", "192.0.2.7", "192.0.2.8"];
    assert_eq!(inputs.all_node_addresses, addresses.map(|a| a.parse().unwrap()).into());
    assert_eq!(inputs.pod_cidrs_of_other_nodes, ["10.5.8.0/24".parse().unwrap()].into());
}

#[test]
fn unreadable_peer_is_left_out_and_host_name_is_resolved() {
    let mut snapshot = snapshot();
    let named = peer(Some(Endpoint::Dns("n.example.org".into(), 7)));
    let wrong = ParsedPeer {
        spec: Err("spec.publicKey: no".into()),
        ..peer(None)
    };
    snapshot.peers = listed([("good", named), ("wrong", wrong)]);
    let before = gathered(&snapshot);
    assert_eq!(before.host_names, ["n.example.org".to_owned()].into());
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
    snapshot
        .addresses
        .insert("n.example.org".into(), "192.0.2.9".parse().unwrap());
    assert_eq!(
        gathered(&snapshot).inputs.peers[0].endpoint,
        Some("192.0.2.9:7".parse().unwrap())
    );
    let member = Member {
        mesh: ("ns".into(), "prod".into()),
        cluster: "mgmt".into(),
    };
    assert_eq!(before.members, [(PublicKey::new([7; 32]), member)].into());
}

#[test]
fn nodes_of_the_same_location_are_not_peers() {
    let inputs_in = |own_location: &str, has_own_peer: bool| {
        let own_node = |public_key: u8, address: &str, location: &str| {
            let mut peer = peer(None);
            let spec = peer.spec.as_mut().unwrap();
            spec.public_key = PublicKey::new([public_key; 32]);
            spec.allowed_ips = [format!("{address}/32").parse().unwrap()].into();
            spec.role = PeerRole::OwnNode(location.into());
            peer
        };
        let other_node = |address: &str| ParsedNode {
            internal_ips: vec![address.parse().unwrap()],
            ..ParsedNode::default()
        };
        let cluster = ClusterSnapshot {
            peers: listed([
                ("of-another-member", peer(None)),
                ("a", own_node(9, "100.66.0.9", own_location)),
                ("b", own_node(1, "192.0.2.8", "east")),
                ("c", own_node(2, "192.0.2.9", "west")),
            ]),
            nodes: listed([("b", other_node("192.0.2.8")), ("c", other_node("192.0.2.9"))]),
            ..snapshot()
        };
        let mut cluster = cluster;
        if let WatchedKind::Listed(peers) = &mut cluster.peers
            && !has_own_peer
        {
            peers.remove("a");
        }
        let own = ParsedNode {
            own: Some(OwnNode {
                location: own_location.into(),
                ..OwnNode::default()
            }),
            ..ParsedNode::default()
        };
        gathered_for(&cluster, &own).inputs
    };
    for (own_location, expected) in [
        ("east", &["c", "of-another-member"][..]),
        ("west", &["b", "of-another-member"]),
        ("north", &["b", "c", "of-another-member"]),
    ] {
        let inputs = inputs_in(own_location, true);
        let mut names: Vec<&str> = inputs.peers.iter().map(|peer| &*peer.name).collect();
        names.sort_unstable();
        assert_eq!(names, expected, "in {own_location:?}");
        assert_eq!(inputs.own_sources, ["100.66.0.9/32".parse().unwrap()].into());
    }
    // This node has no Peer, so nodes in other locations have no tunnel to it, and it uses none of their Peers.
    let inputs = inputs_in("east", false);
    let names: Vec<&str> = inputs.peers.iter().map(|peer| &*peer.name).collect();
    assert_eq!((names, inputs.own_sources), (vec!["of-another-member"], [].into()));
}
