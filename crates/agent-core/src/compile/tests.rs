use clustermesh_core::mesh::Protocol;

use super::*;
use crate::routes::Route;

mod policies;

pub(crate) fn nets(texts: &[&str]) -> BTreeSet<IpNet> {
    texts.iter().map(|t| t.parse().unwrap()).collect()
}

fn ips(texts: &[&str]) -> BTreeSet<IpAddr> {
    texts.iter().map(|t| t.parse().unwrap()).collect()
}

fn key(n: u8) -> PublicKey {
    PublicKey::new([n; 32])
}

fn peer(n: u8, name: &str, endpoint: &str, allowed: &[&str]) -> Peer {
    Peer {
        name: name.to_owned(),
        revision: u64::from(n),
        public_key: key(n),
        preshared_key: None,
        endpoint: Some(endpoint.parse().unwrap()),
        candidates: vec![],
        keepalive: None,
        allowed_ips: allowed.iter().map(|t| t.parse().unwrap()).collect(),
        role: PeerRole::Node,
    }
}

/// A node of the hub. The only other member is Routed and has two nodes, with IPv4 and IPv6 addresses.
pub(crate) fn hub_node() -> Inputs {
    Inputs {
        node: Node {
            name: "c1n1".to_owned(),
            public_key: key(1),
            wireguard_ips: ips(&["100.66.1.1", "fd00:66:1::1"]),
            device: "kilo0".parse().unwrap(),
            listen_port: 51820,
            mtu: 1420,
            underlay: "eth0".parse().unwrap(),
            underlay_addresses: ips(&["172.29.0.111"]),
            internal_ips: ips(&["172.29.0.111"]),
            pod_cidrs: nets(&["10.101.0.0/24", "fd00:101::/64"]),
        },
        throw: nets(&["172.29.0.1/32"]),
        api_servers: [
            "172.29.0.11:6443".parse().unwrap(),
            "[fd00:29::11]:6443".parse().unwrap(),
        ]
        .into(),
        all_node_addresses: ips(&[
            "172.29.0.111",
            "172.29.0.112",
            "100.66.1.1",
            "100.66.1.2",
            "fd00:66:1::2",
        ]),
        pod_cidrs_of_other_nodes: nets(&["10.101.1.0/24", "fd00:101:0:1::/64"]),
        own_sources: BTreeSet::new(),
        peers: vec![
            peer(
                21,
                "mesh--c2--n1",
                "172.29.0.121:51820",
                &["10.243.0.0/24", "100.66.2.1/32", "fd00:243::/64"],
            ),
            peer(
                22,
                "mesh--c2--n2",
                "172.29.0.122:51820",
                &["10.243.1.0/24", "100.66.2.2/32", "fd00:243:0:1::/64"],
            ),
        ],
        policies: named(
            "c2",
            PolicySpec {
                sources: nets(&["10.243.0.0/16", "100.66.2.0/24", "fd00:243::/48"]),
                networks: nets(&["10.243.0.0/16", "100.66.2.0/24", "fd00:243::/48"]),
                allow: nets(&[
                    "10.101.0.0/16",
                    "10.111.0.0/16",
                    "100.66.1.0/24",
                    "172.29.0.111/32",
                    "fd00:101::/48",
                ]),
                deny: ["10.101.0.9:22".parse().unwrap()].into(),
                infrastructure_ports: [(Protocol::Tcp, 6443), (Protocol::Tcp, 10250)].into(),
                ..PolicySpec::default()
            },
        ),
        peer_mtus: BTreeMap::new(),
    }
}

fn named(name: &str, policy: PolicySpec) -> BTreeMap<String, PolicySpec> {
    [(name.to_owned(), policy)].into()
}

/// The only policy of [`hub_node`] or [`worker`].
pub(crate) fn policy_of(inputs: &mut Inputs) -> &mut PolicySpec {
    inputs.policies.first_entry().unwrap().into_mut()
}

/// A node of another member that is a virtual machine in the hub (a KubeVirt worker). So the node's underlay address and its API server
/// lie in the hub's networks.
pub(crate) fn worker() -> Inputs {
    let hub = nets(&["10.101.0.0/16", "10.111.0.0/16", "100.66.1.0/24"]);
    Inputs {
        node: Node {
            name: "c9n1".to_owned(),
            public_key: key(9),
            wireguard_ips: ips(&["100.66.9.1"]),
            underlay_addresses: ips(&["10.101.0.200"]),
            internal_ips: ips(&["10.101.0.200"]),
            pod_cidrs: nets(&["10.77.0.0/24"]),
            ..hub_node().node
        },
        throw: nets(&["10.101.0.1/32", "10.111.0.10/32"]),
        api_servers: ["10.111.176.135:443".parse().unwrap()].into(),
        all_node_addresses: ips(&["10.101.0.200"]),
        pod_cidrs_of_other_nodes: BTreeSet::new(),
        own_sources: BTreeSet::new(),
        peers: vec![peer(
            1,
            "mesh--c1--n1",
            "172.29.0.111:51820",
            &["10.101.0.0/24", "100.66.1.1/32", "10.111.0.0/16"],
        )],
        policies: named(
            "c1",
            PolicySpec {
                sources: hub.clone(),
                networks: hub,
                allow: nets(&["10.77.0.0/24", "100.66.9.0/24"]),
                ..PolicySpec::default()
            },
        ),
        peer_mtus: BTreeMap::new(),
    }
}

/// Compiles with one more Peer, which must be refused, and returns the refusals.
fn refused_with(peer: Peer) -> Vec<(Object, Reason)> {
    let mut inputs = hub_node();
    let name = peer.name.clone();
    inputs.peers.push(peer);
    let compiled = compile(&inputs);
    assert!(!compiled.names.values().any(|n| *n == name), "{name} was programmed");
    assert_eq!(
        compiled.routes,
        compile(&hub_node()).routes,
        "a refused Peer changed the routes"
    );
    compiled.refused.into_iter().map(|r| (r.object, r.reason)).collect()
}

#[test]
fn invalid_endpoint_has_a_fault_and_valid_one_has_none() {
    let fault = |text: &str| refuse::invalid_endpoint(text.parse().unwrap());
    let cases = [
        ("192.0.2.9:51820", None),
        ("192.0.2.9:0", Some("has port 0")),
        ("0.0.0.0:51820", Some("is the unspecified address")),
        ("[::]:51820", Some("is the unspecified address")),
        ("[::ffff:0.0.0.0]:51820", Some("is the unspecified address")),
        ("[::1]:51820", Some("is a loopback address")),
        ("224.0.0.1:51820", Some("is a multicast address")),
        ("[ff02::1]:51820", Some("is a multicast address")),
        ("255.255.255.255:51820", Some("is the broadcast address")),
    ];
    assert_eq!(cases.map(|(text, _)| (text, fault(text))), cases);
}

// threat: peer-claims-node
#[test]
fn invalid_peer_is_refused_with_its_reason() {
    let good = || peer(99, "bad", "192.0.2.9:51820", &["10.9.0.0/24"]);
    let with_endpoint = |e: &str| Peer {
        endpoint: Some(e.parse().unwrap()),
        ..good()
    };
    let with_network = |r: &str| Peer {
        allowed_ips: vec!["10.9.0.0/24".parse().unwrap(), r.parse().unwrap()],
        ..good()
    };
    let many = (0..10_000u32)
        .map(|i| host(IpAddr::from((0x0a09_0000 + i).to_be_bytes())))
        .collect();
    let cases = [
        (with_endpoint("0.0.0.0:51820"), Reason::EndpointInvalid),
        (with_endpoint("[::]:51820"), Reason::EndpointInvalid),
        (with_endpoint("224.0.0.1:51820"), Reason::EndpointInvalid),
        (with_endpoint("127.0.0.1:51820"), Reason::EndpointInvalid),
        (with_endpoint("[::ffff:127.0.0.1]:51820"), Reason::EndpointInvalid),
        (with_endpoint("192.0.2.9:0"), Reason::EndpointInvalid),
        (
            Peer {
                allowed_ips: many,
                ..good()
            },
            Reason::TooManyAllowedIPs,
        ),
        (with_network("0.0.0.0/0"), Reason::DefaultRoute),
        (with_network("::/0"), Reason::DefaultRoute),
        (with_network("128.0.0.0/1"), Reason::NetworkTooWide),
        (with_network("8000::/1"), Reason::NetworkTooWide),
        (with_network("172.29.0.111/32"), Reason::OwnNodeAddress),
        (with_network("172.16.0.0/12"), Reason::OwnNodeAddress),
        (with_network("100.66.1.1/32"), Reason::OwnNodeAddress),
        (with_network("172.29.0.11/32"), Reason::ApiServerAddress),
        (with_network("172.29.0.8/29"), Reason::ApiServerAddress),
        (with_network("fd00:29::/64"), Reason::ApiServerAddress),
        (with_network("10.101.0.0/24"), Reason::OwnPodCIDR),
        (with_network("10.101.0.5/32"), Reason::OwnPodCIDR),
        (with_network("10.0.0.0/8"), Reason::OwnPodCIDR),
        (
            Peer {
                public_key: key(1),
                ..good()
            },
            Reason::OwnPublicKey,
        ),
    ];
    for (peer, reason) in cases {
        assert_eq!(
            refused_with(peer.clone()),
            [(Object::Peer("bad".to_owned()), reason)],
            "{peer:?}"
        );
    }
}

#[test]
fn refusal_names_the_field_and_what_to_do() {
    let mut inputs = hub_node();
    inputs
        .peers
        .push(peer(99, "bad", "192.0.2.9:51820", &["172.16.0.0/12"]));
    let got: Vec<String> = compile(&inputs).refused.iter().map(ToString::to_string).collect();
    assert_eq!(
        got,
        [
            "Peer bad: OwnNodeAddress: spec.allowedIPs holds 172.16.0.0/12, and 172.29.0.111 is this node's own address; remove the network from the source cluster's allowedNetworks or narrow it"
        ]
    );
}

#[test]
fn worker_in_the_hub_accepts_peers_that_cover_its_address() {
    // A Peer's network may contain the node's underlay address if the `networks` of a PeerPolicy cover that network, as in `worker`.
    let got = compile(&worker());
    assert_eq!(got.refused, []);
    let routes: Vec<String> = got.routes.routes.iter().map(Route::to_string).collect();
    assert_eq!(
        routes,
        [
            "10.101.0.0/16 dev <device> src 10.101.0.200 table 5182 metric 4095",
            "unreachable 10.101.0.0/16 table 5182 metric 4096",
            "10.101.0.0/24 dev <device> src 10.101.0.200 table 5182 metric 20",
            "throw 10.101.0.1/32 table 5182 metric 10",
            "10.111.0.0/16 dev <device> src 10.101.0.200 table 5182 metric 20",
            "10.111.0.0/16 dev <device> src 10.101.0.200 table 5182 metric 4095",
            "unreachable 10.111.0.0/16 table 5182 metric 4096",
            "throw 10.111.0.10/32 table 5182 metric 10",
            "throw 10.111.176.135/32 table 5182 metric 10",
            "100.66.1.0/24 dev <device> src 10.101.0.200 table 5182 metric 4095",
            "unreachable 100.66.1.0/24 table 5182 metric 4096",
            "100.66.1.1/32 dev <device> src 10.101.0.200 table 5182 metric 20",
            "0.0.0.0/0 dev <device> table 5183 metric 20",
        ]
    );
    assert_eq!(got.firewall.v4.published, nets(&["10.77.0.0/24", "100.66.9.1/32"]));
}

#[test]
fn moving_anchored_network_belongs_to_the_newer_peer() {
    let mut inputs = hub_node();
    inputs.peers[0].allowed_ips.push("10.243.99.0/24".parse().unwrap());
    inputs.peers[1].allowed_ips.push("10.243.99.0/24".parse().unwrap());
    let owner = |inputs: &Inputs| -> Vec<String> {
        let got = compile(inputs);
        assert_eq!(got.refused, []);
        let has = got
            .peers
            .iter()
            .filter(|(_, p)| p.allowed_ips.contains(&"10.243.99.0/24".parse().unwrap()));
        has.map(|(k, _)| got.names[k].clone()).collect()
    };
    assert_eq!(owner(&inputs), ["mesh--c2--n2"]);
    inputs.peers[0].revision = 23;
    assert_eq!(owner(&inputs), ["mesh--c2--n1"]);
    inputs.peers[1].allowed_ips.pop();
    assert_eq!(owner(&inputs), ["mesh--c2--n1"]);
}

#[test]
fn newer_of_two_peers_with_one_key_is_programmed() {
    let mut inputs = hub_node();
    inputs.peers.push(Peer {
        name: "old".to_owned(),
        revision: 1,
        ..inputs.peers[0].clone()
    });
    let got = compile(&inputs);
    assert_eq!((got.names.clone(), got.peers.clone()), {
        let without = compile(&hub_node());
        (without.names, without.peers)
    });
    assert_eq!(
        got.refused
            .iter()
            .map(|r| (r.object.clone(), r.reason))
            .collect::<Vec<_>>(),
        [(Object::Peer("old".to_owned()), Reason::PublicKeyDuplicate)]
    );
}

#[test]
fn order_of_the_peers_does_not_matter() {
    let mut inputs = hub_node();
    inputs.peers.push(Peer {
        name: "old".to_owned(),
        revision: 1,
        ..inputs.peers[0].clone()
    });
    let forward = compile(&inputs);
    inputs.peers.reverse();
    assert_eq!(compile(&inputs), forward);
}

#[test]
fn unusable_and_duplicate_candidates_are_left_out() {
    let mut inputs = hub_node();
    inputs.peers[0].candidates = [
        "172.29.0.121:51820",
        "0.0.0.0:1",
        "198.51.100.7:51820",
        "[::ffff:198.51.100.7]:51820",
    ]
    .map(|e| e.parse().unwrap())
    .into();
    let got = compile(&inputs);
    let want: Vec<SocketAddr> = vec![
        "172.29.0.121:51820".parse().unwrap(),
        "198.51.100.7:51820".parse().unwrap(),
    ];
    assert_eq!(got.peers[&key(21)].endpoint, Some(want[0]));
    assert_eq!(got.endpoints[&key(21)], want);
    assert_eq!(got.refused, []);
    // An endpoint with this node's own address and port is left out. The Peer is not refused, because a node behind another NAT may have
    // the same private address.
    inputs.peers[0].endpoint = Some("172.29.0.111:51820".parse().unwrap());
    let got = compile(&inputs);
    assert_eq!((&*got.endpoints[&key(21)], &*got.refused), (&*want, &[][..]));
    inputs.peers[0].candidates.clear();
    let got = compile(&inputs);
    assert_eq!((got.peers[&key(21)].endpoint, &*got.refused), (None, &[][..]));
}

#[test]
fn node_without_peers_gets_addresses_and_no_routes() {
    let got = compile(&Inputs {
        peers: vec![],
        policies: BTreeMap::new(),
        ..hub_node()
    });
    let want = Routes {
        addresses: ips(&["100.66.1.1", "fd00:66:1::1"]),
        ..Routes::default()
    };
    assert_eq!((got.peers, got.routes, got.refused), (Peers::new(), want, vec![]));
    assert_eq!(got.firewall.v4.allow, BTreeSet::new());
}

#[test]
fn largest_mesh_has_three_routes_per_peer_and_few_elements() {
    let mut inputs = hub_node();
    inputs.peers = (0..5000u16)
        .map(|i| {
            let [a, b] = i.to_be_bytes();
            let mut key = [7; 32];
            key[..2].copy_from_slice(&[a, b]);
            let mut peer = peer(0, &format!("peer-{i}"), "192.0.2.1:51820", &[]);
            peer.public_key = PublicKey::new(key);
            peer.allowed_ips = vec![
                IpNet::new(IpAddr::from([10, 128 + a, b, 0]), 24).unwrap(),
                host(IpAddr::from([100, 70, a, b])),
                IpNet::new(IpAddr::from([0xfd00, 0x243, i, 0, 0, 0, 0, 0]), 64).unwrap(),
            ];
            peer
        })
        .collect();
    let wide = nets(&["10.128.0.0/11", "100.70.0.0/16", "fd00:243::/32"]);
    policy_of(&mut inputs).sources = wide.clone();
    policy_of(&mut inputs).networks = wide;
    let got = compile(&inputs);
    let by_metric = |metric| got.routes.routes.iter().filter(|r| r.metric == metric).count();
    assert_eq!((got.peers.len(), got.refused), (5000, vec![]));
    // One route for each allowed IP, and a default route of the tunnel table for each family; one unreachable route for each
    // network of the policy.
    assert_eq!(
        (
            by_metric(crate::numbers::METRIC_PEER),
            by_metric(crate::numbers::METRIC_UNREACHABLE)
        ),
        (15_002, 3)
    );
    // `mesh` has the 2 IPv4 networks, `pairs` each of them with itself and with the other, and `allow` each of them with each of the 4
    // allowed IPv4 networks.
    assert_eq!(
        got.firewall.v4.mesh.len() + got.firewall.v4.pairs.len() + got.firewall.v4.allow.len(),
        2 + 4 + 8
    );
}

#[test]
fn node_in_another_location_is_accepted_without_a_policy() {
    let mut inputs = worker();
    let own = peer(
        7,
        "mesh--worker--n2",
        "192.0.2.7:51820",
        &["10.77.2.0/24", "100.66.9.2/32", "10.101.0.201/32"],
    );
    inputs.peers.push(Peer {
        role: PeerRole::OwnNode("elsewhere".to_owned()),
        ..own
    });
    inputs.own_sources = nets(&["10.77.0.0/24", "100.66.9.1/32"]);
    // The agent passes the InternalIPs of all other nodes in `throw`. `compile` leaves out those in the allowed IPs of an
    // `OwnNode` Peer.
    inputs.throw.insert("10.101.0.201/32".parse().unwrap());
    assert!(
        !compile(&inputs)
            .firewall
            .v4
            .throw
            .contains(&"10.101.0.201/32".parse().unwrap())
    );
    let sets = compile(&inputs).firewall.v4;
    assert_eq!(
        sets.own_cluster,
        nets(&["10.77.2.0/24", "100.66.9.2/32", "10.101.0.201/32"])
    );
    assert_eq!(sets.own_sources, nets(&["10.77.0.0/24", "100.66.9.1/32"]));
    assert!(
        sets.mesh
            .iter()
            .any(|net| net.contains(&"10.77.2.1".parse::<IpAddr>().unwrap()))
    );

    // WireGuard accepts 10.77.2.9 as a source only from the other member's peer. `own_cluster` omits the whole 10.77.2.0/24, so the
    // policies decide about packets from this network.
    inputs
        .peers
        .push(peer(8, "mesh--c1--n2", "172.29.0.112:51820", &["10.77.2.9/32"]));
    let sets = compile(&inputs).firewall.v4;
    assert_eq!(sets.own_cluster, nets(&["100.66.9.2/32", "10.101.0.201/32"]));
}

#[test]
fn address_of_this_node_is_left_out_of_the_peer_of_another_location() {
    let mut inputs = worker();
    let own = peer(
        7,
        "mesh--worker--n2",
        "192.0.2.7:51820",
        &["10.77.2.0/24", "10.101.0.200/32"],
    );
    inputs.peers.push(Peer {
        role: PeerRole::OwnNode("elsewhere".to_owned()),
        ..own
    });
    // Only 10.101.0.200/32, the address of this node, is left out: the Peer's other network is used. `refused` names the Peer.
    let compiled = compile(&inputs);
    assert_eq!(compiled.firewall.v4.own_cluster, nets(&["10.77.2.0/24"]));
    let refused: Vec<_> = compiled.refused.into_iter().map(|r| (r.object, r.reason)).collect();
    assert_eq!(
        refused,
        [(Object::Peer("mesh--worker--n2".into()), Reason::OwnNodeAddress)]
    );
}
