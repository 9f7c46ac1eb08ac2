//! Tests which addresses of a Node become endpoints and allowed IPs. A Peer's allowed IPs contain neither networks outside
//! allowedNetworks nor podCIDRs of other nodes. A newer Node is skipped if its podCIDR or WireGuard address overlaps one of an older Node.

use super::*;

fn sockets(list: &[&str]) -> Vec<std::net::SocketAddr> {
    list.iter().map(|address| address.parse().unwrap()).collect()
}

/// The endpoint candidates of the Peer for `x` in `mgmt`. `x` is a cloud VM with addresses of both families; the two nodes of
/// `mgmt` have the addresses `mgmt_addresses`.
fn candidates_for(mgmt_addresses: [&[&str]; 2], explicit: Option<&str>) -> Vec<std::net::SocketAddr> {
    let mut seen = seen();
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        for (name, addresses) in ["a", "b"].into_iter().zip(mgmt_addresses) {
            let node = m.nodes.get_mut(name).unwrap();
            node.internal_ips = ips(addresses);
            node.kilo_endpoint = Claim::Absent;
        }
    });
    edit(&mut seen, &secret("tenant"), |m| {
        let x = m.nodes.get_mut("x").unwrap();
        x.external_ips = ips(&["2001:db8::7", "198.51.100.7"]);
        x.kilo_endpoint = Claim::Absent;
        if let Some(explicit) = explicit {
            x.force_endpoint = Claim::Valid(Endpoint::Ip(explicit.parse().unwrap()));
        }
    });
    let spec = plan_mesh(&two_clusters(), &seen).1.targets["mgmt"].peers["m--tenant--x"]
        .spec
        .clone();
    let first = spec.candidates.first().copied().map(Endpoint::Ip);
    assert_eq!(spec.endpoint, first, "kg reads only this endpoint, not the candidates");
    spec.candidates.clone()
}

#[test]
fn first_endpoint_has_a_family_of_the_target() {
    let v6_first = sockets(&["[2001:db8::7]:51820", "198.51.100.7:51820", "172.30.2.1:51820"]);
    let v4_first = sockets(&["198.51.100.7:51820", "172.30.2.1:51820", "[2001:db8::7]:51820"]);
    assert_eq!(candidates_for([&["10.9.0.1"], &["10.9.0.2"]], None), v4_first);
    assert_eq!(candidates_for([&["2001:db8::1"], &["2001:db8::2"]], None), v6_first);
    let dual: &[&str] = &["10.9.0.1", "2001:db8::1"];
    assert_eq!(
        candidates_for([dual, dual], None),
        v6_first,
        "the order of the Node's addresses is kept"
    );
    assert_eq!(
        candidates_for([dual, &["10.9.0.2"]], None),
        v4_first,
        "one node of the target has only IPv4"
    );
    assert_eq!(
        candidates_for([&[], &[]], None),
        v6_first,
        "nodes without addresses are ignored"
    );
    assert_eq!(candidates_for([dual, &[]], None), v6_first);
}

#[test]
fn explicit_endpoint_comes_first_whatever_its_family() {
    assert_eq!(
        candidates_for([&["10.9.0.1"], &["10.9.0.2"]], Some("[2001:db8::99]:4500")),
        sockets(&[
            "[2001:db8::99]:4500",
            "198.51.100.7:51820",
            "172.30.2.1:51820",
            "[2001:db8::7]:51820"
        ])
    );
}

#[test]
fn node_without_underlay_address_changes_no_other_peer() {
    let mesh = two_clusters();
    let mut seen = seen();
    let before = plan_mesh(&mesh, &seen).1.targets;
    let mut new = Node {
        created: 99,
        ..Node::default()
    };
    let mut join = |new: &Node| {
        edit(&mut seen, &ClusterIdentity::Local, |m| {
            m.nodes.insert("new".into(), new.clone());
        });
        plan_mesh(&mesh, &seen).1.targets
    };
    assert_eq!(
        join(&new),
        before,
        "the cloud provider has not added the new Node's addresses yet"
    );

    // The agent may publish its key before the Node has an underlay address. The Peer then has no endpoint, but a keepalive.
    new.public_key = Claim::Valid(key(99));
    new.wireguard_ip = Claim::Valid("100.66.1.99/24".parse().unwrap());
    new.pod_cidrs = vec![Claim::Valid("10.1.99.0/24".parse().unwrap())];
    let mut joined = join(&new);
    let peer = joined.get_mut("tenant").unwrap().peers.remove("m--mgmt--new").unwrap();
    assert_eq!((&peer.spec.endpoint, peer.spec.persistent_keepalive), (&None, 25));
    assert_eq!(joined, before);
}

#[test]
fn uncovered_pod_cidr_is_reported_and_left_out() {
    let mesh = two_clusters();
    let mut seen = seen();
    let before = plan_mesh(&mesh, &seen).1.targets;
    edit(&mut seen, &secret("tenant"), |m| {
        let x = m.nodes.get_mut("x").unwrap();
        x.pod_cidrs.push(Claim::Valid("10.9.1.0/24".parse().unwrap()));
        let mut y = node(2, 2);
        y.pod_cidrs.push(Claim::Valid("10.9.2.0/24".parse().unwrap()));
        m.nodes.insert("y".into(), y);
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!(
        mesh_plan.targets["mgmt"].peers["m--tenant--x"],
        before["mgmt"].peers["m--tenant--x"]
    );
    let report = &mesh_plan.clusters["tenant"];
    assert_eq!((report.registered, &report.skipped), (2, &vec![]));
    let uncovered = |node: &str, net: &str| Uncovered {
        node: node.into(),
        network: net.parse().unwrap(),
    };
    assert_eq!(
        report.uncovered,
        [uncovered("x", "10.9.1.0/24"), uncovered("y", "10.9.2.0/24")]
    );
    let named: Vec<_> = mesh_plan
        .facts
        .iter()
        .filter_map(|fact| match fact {
            Fact::PodCIDRNotCovered { cluster, message } => Some((cluster.as_str(), message.as_str())),
            _ => None,
        })
        .collect();
    let [("tenant", message)] = named[..] else {
        panic!("expected one fact for the member: {named:?}")
    };
    assert!(
        message.starts_with("podCIDR 10.9.1.0/24 of Node x lies outside allowedNetworks"),
        "{message}"
    );
}

/// The allowedNetworks of the member contain no network of the podCIDR's IP family.
#[test]
fn uncovered_pod_cidr_of_family_without_network_adds_no_fact() {
    let mesh = two_clusters();
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |m| {
        let x = m.nodes.get_mut("x").unwrap();
        x.pod_cidrs.push(Claim::Valid("fd00:2::/64".parse().unwrap()));
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!(mesh_plan.facts, BTreeSet::new());
    let uncovered = &mesh_plan.clusters["tenant"].uncovered;
    assert_eq!(
        (uncovered.len(), uncovered[0].network),
        (1, "fd00:2::/64".parse().unwrap())
    );
}

#[test]
fn newer_node_with_overlapping_claim_is_skipped() {
    let mesh = two_clusters();
    type Change = fn(&mut Node);
    let cases: [(&str, Change, Reason); 4] = [
        (
            "a podCIDR that contains another Node's podCIDR",
            |node| node.pod_cidrs = vec![Claim::Valid("10.2.0.0/20".parse().unwrap())],
            Reason::PodCIDRDuplicate,
        ),
        (
            "a podCIDR inside another Node's podCIDR",
            |node| node.pod_cidrs = vec![Claim::Valid("10.2.1.128/25".parse().unwrap())],
            Reason::PodCIDRDuplicate,
        ),
        (
            "a WireGuard address inside another Node's podCIDR",
            |node| node.wireguard_ip = Claim::Valid("10.2.1.7/16".parse().unwrap()),
            Reason::WGIPDuplicate,
        ),
        (
            "a podCIDR that contains another Node's WireGuard address",
            |node| node.pod_cidrs = vec![Claim::Valid("100.66.2.0/25".parse().unwrap())],
            Reason::PodCIDRDuplicate,
        ),
    ];
    let before = plan_mesh(&mesh, &seen()).1.targets;
    for (name, change, reason) in cases {
        let mut seen = seen();
        edit(&mut seen, &secret("tenant"), |m| {
            let mut overlapping = node(2, 9);
            change(&mut overlapping);
            m.nodes.insert("overlapping".into(), overlapping);
        });
        let (_, mesh_plan) = plan_mesh(&mesh, &seen);
        let skipped = &mesh_plan.clusters["tenant"].skipped;
        assert_eq!(
            skipped.iter().map(|s| (s.node.as_str(), s.reason)).collect::<Vec<_>>(),
            [("overlapping", reason)],
            "{name}"
        );
        assert_eq!(mesh_plan.targets, before, "{name}");
    }
}

#[test]
fn internal_ip_inside_another_nodes_pod_cidr_is_left_out() {
    let mesh = two_clusters();
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |m| {
        let mut y = node(2, 2);
        y.internal_ips = ips(&["10.2.1.7"]);
        m.nodes.insert("y".into(), y);
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!(
        *allowed(&mesh_plan, "mgmt", "m--tenant--y"),
        net_set(&["10.2.2.0/24", "100.66.2.2/32"])
    );
    let shared = Fact::AddressShared {
        cluster: "tenant".into(),
        message: "10.2.1.7/32 of Node y lies in 10.2.1.0/24 of Node x, which keeps it".into(),
    };
    assert_eq!(mesh_plan.facts, BTreeSet::from([shared]));
}

#[test]
fn allowed_location_ips_exclude_pod_cidrs_of_other_nodes() {
    let mut mesh = two_clusters();
    mesh.clusters[1].allowed.extend(nets(&["172.30.0.0/16"]));
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |m| {
        let mut y = node(2, 2);
        y.allowed_location_ips = nets(&["172.30.0.0/16", "10.2.1.128/25"]);
        m.nodes.insert("y".into(), y);
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!(
        *allowed(&mesh_plan, "mgmt", "m--tenant--y"),
        net_set(&["10.2.2.0/24", "100.66.2.2/32", "172.30.2.2/32", "172.30.0.0/16"]),
        "10.2.1.128/25 is part of x's podCIDR and left out; 172.30.0.0/16 may contain x's InternalIP"
    );
}
