//! Tests that the status stores anchored networks, and that Nodes cannot claim a part of one. Exceptions: the InternalIP of a Node if
//! exactly its /32 is anchored, exported pods, and a member whose `anchoredNetworks` is an empty list.

use super::*;

const SERVICES: &str = "10.97.0.0/16";

fn services() -> IpNet {
    SERVICES.parse().unwrap()
}

/// A mesh of two clusters. The tenant has the nodes `x` and `y`, and a Service network in allowedNetworks.
fn anchored_tenant() -> (Mesh, Observations) {
    let (mut mesh, mut seen) = (two_clusters(), seen());
    mesh.clusters[1].allowed.push(services());
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.insert("y".into(), node(2, 2));
    });
    (mesh, seen)
}

/// The tenant's nodes whose planned Peers in the hub contain the Service network.
fn carriers(mesh_plan: &MeshPlan) -> Vec<&str> {
    let peers = mesh_plan.targets["mgmt"].peers.values();
    let carrying = peers.filter(|peer| peer.spec.allowed_ips.contains(&services()));
    carrying.map(|peer| peer.node.as_str()).collect()
}

/// The anchored networks that the status lists for a member, each with its anchors.
fn anchored(mesh_plan: &MeshPlan, entry: &str) -> Vec<(String, Vec<String>)> {
    let anchored = mesh_plan.clusters[entry].anchored.iter();
    anchored
        .map(|(net, nodes)| (net.to_string(), nodes.iter().cloned().collect()))
        .collect()
}

fn skipped(mesh_plan: &MeshPlan) -> Vec<(&str, Reason, &str)> {
    let skipped = mesh_plan.clusters["tenant"].skipped.iter();
    skipped
        .map(|skipped| (skipped.node.as_str(), skipped.reason, skipped.message.as_str()))
        .collect()
}

fn insert_node(seen: &mut Observations, name: &str, node: Node) {
    edit(seen, &secret("tenant"), |m| {
        m.nodes.insert(name.into(), node);
    });
}

/// A new node of the tenant with the podCIDR `net`.
fn node_with_pod_cidr(net: &str) -> Node {
    Node {
        pod_cidrs: vec![Claim::Valid(net.parse().unwrap())],
        ..node(2, 9)
    }
}

#[test]
fn status_lists_anchored_networks_and_their_anchors() {
    let (mut mesh, mut seen) = anchored_tenant();
    write_plan(&mesh, &mut seen);
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    let [node] = carriers(&mesh_plan)[..] else { panic!() };
    let row = |net: &str, nodes: &[&str]| (net.to_owned(), nodes.iter().map(|n| (*n).to_owned()).collect());
    assert_eq!(anchored(&mesh_plan, "tenant"), vec![row(SERVICES, &[node])]);
    store_anchors(&mut mesh, &seen);
    assert_eq!(
        plan_mesh(&mesh, &seen).1,
        mesh_plan,
        "the stored status changes nothing"
    );

    // With two anchors, each has a part of the network.
    let mut spread = mesh.clone();
    spread.clusters[1].anchors = 2;
    assert_eq!(
        anchored(&plan_mesh(&spread, &seen).1, "tenant"),
        vec![row(SERVICES, &["x", "y"])]
    );

    // A network without an anchor stays in the status if an earlier plan anchored it.
    let mut down = seen.clone();
    edit(&mut down, &secret("tenant"), |m| {
        m.nodes.values_mut().for_each(|node| node.ready = false);
    });
    assert_eq!(anchored(&plan_mesh(&mesh, &down).1, "tenant"), vec![row(SERVICES, &[])]);
    assert_eq!(anchored(&plan_mesh(&anchored_tenant().0, &down).1, "tenant"), vec![]);

    // The status is unchanged while the member itself, or the target with its Peers, is not observed.
    for identity in [ClusterIdentity::Local, secret("tenant")] {
        let mut unobserved = seen.clone();
        unobserved
            .members
            .insert(identity, Observation::Unreachable("refused".into()));
        assert_eq!(
            anchored(&plan_mesh(&mesh, &unobserved).1, "tenant"),
            anchored(&mesh_plan, "tenant")
        );
    }
    // A masqueraded member has no anchored networks, not even those of an earlier plan.
    mesh.clusters[1].addressing = Addressing::Masqueraded;
    assert_eq!(anchored(&plan_mesh(&mesh, &seen).1, "tenant"), vec![]);
}

// threat: anchored-range-claimed
#[test]
fn node_that_claims_anchored_network_is_skipped() {
    let (mut mesh, mut seen) = anchored_tenant();
    write_plan(&mesh, &mut seen);
    store_anchors(&mut mesh, &seen);
    let before = plan_mesh(&mesh, &seen).1.targets;
    let node_with_address = |net: &str| Node {
        wireguard_ip: Claim::Valid(net.parse().unwrap()),
        ..node(2, 9)
    };
    let cases = [
        (
            node_with_pod_cidr("10.97.1.0/24"),
            Reason::NodePodCIDROutOfRange,
            "podCIDR 10.97.1.0/24",
        ),
        (
            node_with_pod_cidr("10.97.0.0/16"),
            Reason::NodePodCIDROutOfRange,
            "podCIDR 10.97.0.0/16",
        ),
        (
            node_with_address("10.97.0.10/16"),
            Reason::WGIPOutOfRange,
            "WireGuard address 10.97.0.10",
        ),
    ];
    for (claiming, reason, claim) in cases {
        let mut seen = seen.clone();
        insert_node(&mut seen, "claiming", claiming);
        let (_, mesh_plan) = plan_mesh(&mesh, &seen);
        let message = format!(
            "{claim} overlaps 10.97.0.0/16 of cluster \"tenant\", which is anchored (status.clusters[].anchored). If Nodes own this \
             network, set anchoredNetworks of the cluster's entry to a list without it; an empty list lets Nodes claim all of \
             allowedNetworks"
        );
        assert_eq!(skipped(&mesh_plan), [("claiming", reason, &*message)]);
        assert_eq!(mesh_plan.targets, before, "{claim}");
    }
    // An InternalIP, an allowed location IP or a second podCIDR inside the anchored network is left out. The Node keeps its Peer.
    let mut claiming = node(2, 9);
    claiming.internal_ips.push("10.97.0.10".parse().unwrap());
    claiming.allowed_location_ips = nets(&["10.97.2.0/24", SERVICES]);
    claiming.pod_cidrs.push(Claim::Valid("10.97.1.0/24".parse().unwrap()));
    insert_node(&mut seen, "claiming", claiming);
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    let own = net_set(&["10.2.9.0/24", "100.66.2.9/32"]);
    assert_eq!(*allowed(&mesh_plan, "mgmt", "m--tenant--claiming"), own);
    let mut others = mesh_plan.targets.clone();
    others.get_mut("mgmt").unwrap().peers.remove("m--tenant--claiming");
    assert_eq!(others, before);
    let uncovered = mesh_plan.facts.iter().any(|fact| {
        matches!(fact, Fact::PodCIDRNotCovered { message, .. }
            if message.starts_with("podCIDR 10.97.1.0/24 of Node claiming overlaps 10.97.0.0/16"))
    });
    assert!(uncovered, "{:?}", mesh_plan.facts);
}

// threat: anchored-range-claimed
#[test]
fn anchored_network_moves_from_deleted_node_despite_claim() {
    let (mut mesh, mut seen) = anchored_tenant();
    write_plan(&mesh, &mut seen);
    store_anchors(&mut mesh, &seen);
    let before = plan_mesh(&mesh, &seen).1;
    let [first] = carriers(&before)[..] else { panic!() };
    let second = if first == "x" { "y" } else { "x" };
    insert_node(&mut seen, "claiming", node_with_pod_cidr(SERVICES));
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.remove(first);
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!(carriers(&mesh_plan), [second]);
    assert_eq!(skipped(&mesh_plan)[0].0, "claiming");
}

#[test]
fn empty_anchored_networks_allow_every_node_claim() {
    let (mut mesh, mut seen) = anchored_tenant();
    write_plan(&mesh, &mut seen);
    store_anchors(&mut mesh, &seen);
    insert_node(&mut seen, "new", node_with_pod_cidr("10.97.1.0/24"));
    assert_eq!(skipped(&plan_mesh(&mesh, &seen).1).len(), 1);
    mesh.clusters[1].anchored = Some(vec![]);
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!(skipped(&mesh_plan), []);
    assert!(allowed(&mesh_plan, "mgmt", "m--tenant--new").contains(&"10.97.1.0/24".parse().unwrap()));
    assert_eq!((carriers(&mesh_plan), anchored(&mesh_plan, "tenant")), (vec![], vec![]));
    // If the list is removed again, the Node keeps the network.
    store_anchors(&mut mesh, &seen);
    mesh.clusters[1].anchored = None;
    assert_eq!(skipped(&plan_mesh(&mesh, &seen).1), []);
}

#[test]
fn anchored_network_moves_off_a_node_that_is_leaving() {
    let (mesh, mut seen) = anchored_tenant();
    write_plan(&mesh, &mut seen);
    let anchor = |seen: &Observations| carriers(&plan_mesh(&mesh, seen).1)[0].to_owned();
    let set_leaving = |seen: &mut Observations, name: &str, leaving: bool| {
        edit(seen, &secret("tenant"), |member| {
            member.nodes.get_mut(name).unwrap().leaving = leaving;
        });
    };
    let first = anchor(&seen);
    let other = if first == "x" { "y" } else { "x" };
    set_leaving(&mut seen, &first, true);
    assert_eq!(anchor(&seen), other);
    write_plan(&mesh, &mut seen);
    set_leaving(&mut seen, &first, false);
    assert_eq!(anchor(&seen), other, "it does not move back");
    set_leaving(&mut seen, &first, true);
    set_leaving(&mut seen, other, true);
    assert_eq!(anchor(&seen), other, "a leaving node is better than none");
}

#[test]
fn network_of_an_invalid_node_is_not_anchored() {
    let (mut mesh, mut seen) = (two_clusters(), seen());
    mesh.clusters[1].allowed = nets(&["10.2.1.0/24", "10.2.2.0/24", "100.66.2.1/32", "100.66.2.2/32"]);
    insert_node(&mut seen, "y", node(2, 2));
    let changes: [fn(&mut Node); 3] = [
        |x| x.public_key = Claim::Invalid("no key".into()),
        |x| x.wireguard_ip = Claim::Valid("203.0.113.1/24".parse().unwrap()),
        |x| x.force_endpoint = Claim::Invalid("no endpoint".into()),
    ];
    for make_invalid in changes {
        let mut seen = seen.clone();
        edit(&mut seen, &secret("tenant"), |m| {
            make_invalid(m.nodes.get_mut("x").unwrap())
        });
        let (_, mesh_plan) = plan_mesh(&mesh, &seen);
        assert_eq!(skipped(&mesh_plan)[0].0, "x");
        let of_y = allowed(&mesh_plan, "mgmt", "m--tenant--y");
        assert!(!of_y.contains(&"10.2.1.0/24".parse().unwrap()), "{of_y:?}");
        // In the second case 100.66.2.1/32 is anchored, because no node has this WireGuard address. So only pod networks count here.
        assert_eq!(
            anchored(&mesh_plan, "tenant")
                .iter()
                .filter(|(net, _)| net.starts_with("10."))
                .count(),
            0
        );
    }
}

/// If the status stored networks without an anchor here, the Nodes could not claim their podCIDRs later.
#[test]
fn member_without_nodes_stores_no_anchored_networks() {
    let (mut mesh, mut seen) = anchored_tenant();
    let nodes = seen.members[&secret("tenant")].last().unwrap().nodes.clone();
    edit(&mut seen, &secret("tenant"), |m| m.nodes = Rows::default());
    write_plan(&mesh, &mut seen);
    store_anchors(&mut mesh, &seen);
    edit(&mut seen, &secret("tenant"), |m| m.nodes = nodes);
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!((skipped(&mesh_plan), carriers(&mesh_plan).len()), (vec![], 1));
}

/// An operator may list a Node's InternalIP in allowedNetworks before the Node joins.
#[test]
fn anchored_internal_ip_moves_to_node_that_joins_later() {
    let (mut mesh, mut seen) = anchored_tenant();
    mesh.clusters[1].allowed.extend(nets(&["172.30.2.9/32"]));
    write_plan(&mesh, &mut seen);
    store_anchors(&mut mesh, &seen);
    assert_eq!(mesh.clusters[1].previous_anchors.len(), 2);
    insert_node(&mut seen, "late", node(2, 9));
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    let own = net_set(&["10.2.9.0/24", "100.66.2.9/32", "172.30.2.9/32"]);
    assert_eq!(*allowed(&mesh_plan, "mgmt", "m--tenant--late"), own);
    assert_eq!(anchored(&mesh_plan, "tenant").len(), 1);
}

#[test]
fn exported_pod_in_anchored_network_is_in_peer_of_its_node() {
    let (mut mesh, mut seen) = (two_clusters(), seen());
    mesh.clusters[0].pod_network = PodNetwork::Shared;
    mesh.clusters[0].exports = vec![Export {
        namespace: "rook-ceph".into(),
        selector: vec![],
    }];
    write_plan(&mesh, &mut seen);
    store_anchors(&mut mesh, &seen);
    let shared: IpNet = "10.1.0.0/16".parse().unwrap();
    assert!(mesh.clusters[0].previous_anchors.contains_key(&shared));
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        let pod = Pod {
            node: "b".into(),
            addresses: vec!["10.1.77.1".parse().unwrap()],
            ..Pod::default()
        };
        let name = ObjectName {
            namespace: "rook-ceph".into(),
            name: "osd-0".into(),
        };
        m.pods.insert(name, pod);
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert!(allowed(&mesh_plan, "tenant", "m--mgmt--b").contains(&"10.1.77.1/32".parse().unwrap()));
    assert!(mesh_plan.clusters["mgmt"].anchored.contains_key(&shared));
}
