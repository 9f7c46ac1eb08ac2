//! Tests the Peer of a node in other members (addresses, endpoint, granularity), and the PeerPolicy of a masqueraded member.

use std::net::SocketAddr;

use super::*;

#[test]
fn peer_has_pod_cidr_wireguard_ip_and_endpoint_of_node() {
    let (_, plan) = plan_mesh(&two_clusters(), &seen());
    let peer = &plan.targets["mgmt"].peers["m--tenant--x"];
    assert_eq!(
        *peer.spec,
        PeerSpec {
            public_key: key(33),
            allowed_ips: net_set(&["10.2.1.0/24", "100.66.2.1/32"]),
            endpoint: Some(Endpoint::Ip("172.30.2.1:51820".parse().unwrap())),
            candidates: vec![],
            persistent_keepalive: 0,
            role: PeerRole::Node,
        }
    );
    assert_eq!(plan.clusters["mgmt"].registered, 2);
    assert_eq!(plan.clusters["tenant"].registered, 1);
}

// threat: foreign-network
#[test]
fn node_with_invalid_or_missing_claim_is_skipped_with_reason() {
    let mesh = two_clusters();
    type MakeInvalid = fn(&mut Node);
    let table: [(Reason, MakeInvalid); 8] = [
        (Reason::NodePodCIDROutOfRange, |n| {
            n.pod_cidrs = vec![Claim::Valid("0.0.0.0/0".parse().unwrap())]
        }),
        (Reason::NodeNoPodCIDR, |n| n.pod_cidrs.clear()),
        (Reason::WGIPOutOfRange, |n| {
            n.wireguard_ip = Claim::Valid("100.66.1.7/24".parse().unwrap())
        }),
        (Reason::NodeNoWireguardIP, |n| n.wireguard_ip = Claim::Absent),
        (Reason::WGIPInvalid, |n| n.wireguard_ip = Claim::Invalid("x".into())),
        (Reason::PublicKeyInvalid, |n| n.public_key = Claim::Invalid("x".into())),
        (Reason::NodeEndpointInvalid, |n| {
            n.force_endpoint = Claim::Invalid("x".into())
        }),
        (Reason::EndpointForbidden, |n| {
            n.force_endpoint = Claim::Valid(Endpoint::Ip("127.0.0.1:51820".parse().unwrap()));
        }),
    ];
    for (reason, make_invalid) in table {
        let mut seen = seen();
        edit(&mut seen, &secret("tenant"), |m| {
            let mut bad = node(2, 2);
            make_invalid(&mut bad);
            m.nodes.insert("bad".into(), bad);
        });
        let (_, mesh_plan) = plan_mesh(&mesh, &seen);
        let skipped: Vec<_> = mesh_plan.clusters["tenant"]
            .skipped
            .iter()
            .map(|s| (s.node.as_str(), s.reason))
            .collect();
        assert_eq!(skipped, vec![("bad", reason)]);
        assert_eq!(
            mesh_plan.targets["mgmt"].peers.keys().collect::<Vec<_>>(),
            vec!["m--tenant--x"]
        );
    }
}

// threat: forbidden-endpoint
#[test]
fn unusable_addresses_are_left_out_and_reported() {
    let mut mesh = two_clusters();
    let endpoint_and_facts = |mesh: &Mesh, change: &dyn Fn(&mut Node)| -> (Option<Endpoint>, BTreeSet<Fact>) {
        let mut seen = seen();
        edit(&mut seen, &secret("tenant"), |m| change(m.nodes.get_mut("x").unwrap()));
        let (_, mesh_plan) = plan_mesh(mesh, &seen);
        let peer = &mesh_plan.targets["mgmt"].peers["m--tenant--x"];
        (peer.spec.endpoint.clone(), mesh_plan.facts)
    };
    let fact = |message: &str| {
        BTreeSet::from([Fact::AddressLeftOut {
            cluster: "tenant".into(),
            message: format!("{message}. Other Nodes may have the same problem"),
        }])
    };
    for (address, what) in [
        ("127.0.0.1", "a loopback address"),
        ("::1", "a loopback address"),
        ("169.254.1.1", "a link-local address"),
        ("fe80::1", "a link-local address"),
        ("224.0.0.1", "a multicast address"),
        ("ff02::1", "a multicast address"),
        ("0.0.0.0", "the unspecified address"),
    ] {
        let message = |kind: &str| {
            fact(&format!(
                "{kind} {address} of Node x is no endpoint of its Peer: it is {what}"
            ))
        };
        let by_status = endpoint_and_facts(&mesh, &|node| node.external_ips = ips(&[address]));
        let other = Endpoint::Ip("172.30.2.1:51820".parse().unwrap());
        assert_eq!(by_status, (Some(other.clone()), message("ExternalIP")));
        let by_kilo = endpoint_and_facts(&mesh, &|node| {
            let address = SocketAddr::new(address.parse().unwrap(), 51820);
            node.kilo_endpoint = Claim::Valid(Endpoint::Ip(address));
        });
        assert_eq!(by_kilo, (Some(other), message("annotation endpoint")));
    }
    let foreign = |node: &mut Node| node.allowed_location_ips = nets(&["10.1.4.0/24"]);
    let (_, facts) = endpoint_and_facts(&mesh, &foreign);
    let message = "10.1.4.0/24 of annotation allowed-location-ips of Node x lies outside allowedNetworks of cluster \"tenant\" \
                   (10.2.0.0/16, 100.66.2.0/24), and its Peer leaves it out";
    assert_eq!(facts, fact(message));
    // A masqueraded member publishes no location IPs at all.
    mesh.clusters[1].addressing = Addressing::Masqueraded;
    assert_eq!(endpoint_and_facts(&mesh, &foreign).1, BTreeSet::new());
}

#[test]
fn nodes_of_one_member_with_one_endpoint_are_reported() {
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |m| {
        let mut y = node(2, 2);
        y.internal_ips = ips(&["172.30.2.1"]);
        m.nodes.insert("y".into(), y);
    });
    let (_, mesh_plan) = plan_mesh(&two_clusters(), &seen);
    let fact = Fact::AddressShared {
        cluster: "tenant".into(),
        message: "Nodes x and y both have the endpoint 172.30.2.1:51820, where at most one of them answers".into(),
    };
    assert_eq!(mesh_plan.facts, BTreeSet::from([fact]));
    // Nodes of different members may have the same private address.
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.remove("y");
        m.nodes.get_mut("x").unwrap().internal_ips = ips(&["172.30.1.1"]);
    });
    let (_, mesh_plan) = plan_mesh(&two_clusters(), &seen);
    assert_eq!(mesh_plan.facts, BTreeSet::new());
}

// threat: forbidden-endpoint
#[test]
fn endpoint_in_target_networks_needs_endpoint_networks() {
    let mut mesh = two_clusters();
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |m| {
        let x = m.nodes.get_mut("x").unwrap();
        x.kilo_endpoint = Claim::Absent;
        x.internal_ips = vec!["10.1.1.77".parse().unwrap()];
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    let spec = &mesh_plan.targets["mgmt"].peers["m--tenant--x"].spec;
    assert_eq!((spec.endpoint.clone(), spec.persistent_keepalive), (None, 25));
    let reverse = &mesh_plan.targets["tenant"].peers["m--mgmt--a"].spec;
    assert_eq!(
        reverse.persistent_keepalive, 25,
        "a node without an endpoint must keep its NAT binding alive"
    );

    mesh.clusters[1].endpoint_networks = nets(&["10.1.0.0/16"]);
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    let spec = &mesh_plan.targets["mgmt"].peers["m--tenant--x"].spec;
    assert_eq!(spec.endpoint, Some(Endpoint::Ip("10.1.1.77:51820".parse().unwrap())));
}

#[test]
fn peer_for_kg_omits_internal_ip_that_is_its_endpoint() {
    let mut mesh = two_clusters();
    mesh.clusters[1].allowed.extend(nets(&["172.30.2.1/32"]));
    let mut seen = seen();
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    let with_internal_ip = net_set(&["10.2.1.0/24", "100.66.2.1/32", "172.30.2.1/32"]);
    assert_eq!(*allowed(&mesh_plan, "mgmt", "m--tenant--x"), with_internal_ip);
    // A Node that has just joined and publishes nothing yet does not count as served by kg.
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.nodes.insert(
            "new".into(),
            Node {
                ready: true,
                ..Node::default()
            },
        );
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!(*allowed(&mesh_plan, "mgmt", "m--tenant--x"), with_internal_ip);
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.nodes.values_mut().for_each(|node| node.server = Server::Kilo)
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!(
        *allowed(&mesh_plan, "mgmt", "m--tenant--x"),
        net_set(&["10.2.1.0/24", "100.66.2.1/32"])
    );
}

#[test]
fn location_leader_peer_contains_prefixes_of_followers() {
    let mesh = two_clusters();
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |m| {
        for n in 1..=3 {
            let mut kg = node(2, n);
            kg.server = Server::Kilo;
            kg.granularity = Some(Granularity::Location);
            kg.kilo_internal_ip = kg.internal_ips.first().copied();
            if n > 1 {
                kg.wireguard_ip = Claim::Absent;
            }
            m.nodes.insert(format!("k{n}"), kg);
        }
        m.nodes.remove("x");
        // While the kg of a follower restarts, the follower's annotations are missing for half a second.
        let restarting = m.nodes.get_mut("k3").unwrap();
        restarting.granularity = None;
        restarting.kilo_internal_ip = None;
        restarting.public_key = Claim::Absent;
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!(mesh_plan.clusters["tenant"].skipped, vec![]);
    assert_eq!(
        mesh_plan.targets["mgmt"].peers.keys().collect::<Vec<_>>(),
        vec!["m--tenant--k1"]
    );
    let expected = net_set(&["10.2.1.0/24", "10.2.2.0/24", "10.2.3.0/24", "100.66.2.1/32"]);
    assert_eq!(*allowed(&mesh_plan, "mgmt", "m--tenant--k1"), expected);
}

#[test]
fn masqueraded_member_exposes_only_wireguard_addresses() {
    let mut mesh = two_clusters();
    mesh.clusters[1].addressing = Addressing::Masqueraded;
    mesh.clusters[1].allowed = nets(&["100.66.2.0/24"]);
    let (_, mesh_plan) = plan_mesh(&mesh, &seen());
    assert_eq!(
        *allowed(&mesh_plan, "mgmt", "m--tenant--x"),
        net_set(&["100.66.2.1/32"])
    );
    assert_eq!(
        mesh_plan.targets["mgmt"].policies["m--tenant"].spec.sources,
        net_set(&["100.66.2.0/24"])
    );
}

#[test]
fn policy_of_masqueraded_member_keeps_unobserved_sources() {
    let mut mesh = two_clusters();
    mesh.clusters[1].addressing = Addressing::Masqueraded;
    let mut seen = seen();
    write_plan(&mesh, &mut seen);
    let policy = |seen: &Observations| {
        plan_mesh(&mesh, seen).1.targets["mgmt"].policies["m--tenant"]
            .spec
            .clone()
    };
    let before = policy(&seen);
    assert_eq!(before.sources, net_set(&["100.66.2.0/24"]));
    let mut blank = seen.clone();
    edit(&mut blank, &secret("tenant"), |m| {
        m.nodes.get_mut("x").unwrap().wireguard_ip = Claim::Absent
    });
    assert_eq!(
        policy(&blank),
        before,
        "the Node's annotations are missing, and the Node is held"
    );
    seen.members
        .insert(secret("tenant"), Observation::Unreachable("starting".into()));
    assert_eq!(
        policy(&seen),
        before,
        "the member was not observed since the controller started"
    );
}
