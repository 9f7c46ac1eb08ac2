//! Tests accepted networks, anchors, shared pod networks and mirrored Services.

use super::*;

#[test]
fn anchor_is_replaced_when_unready_but_not_by_an_added_node() {
    let mesh = two_clusters();
    let mut seen = seen();
    write_plan(&mesh, &mut seen);
    let service: IpNet = "10.96.0.0/16".parse().unwrap();
    let anchors = |seen: &Observations| -> Vec<String> {
        let peers = seen.members[&secret("tenant")].fresh().unwrap().peers.clone().unwrap();
        peers
            .iter()
            .filter(|(_, p)| p.spec.as_ref().unwrap().allowed_ips.contains(&service))
            .map(|(n, _)| n.to_owned())
            .collect()
    };
    let first = anchors(&seen);
    assert_eq!(first.len(), 1);

    let mut later = seen.clone();
    // The added node is the oldest and its name sorts first, but it does not become the anchor.
    edit(&mut later, &ClusterIdentity::Local, |m| {
        m.nodes.insert(
            "0-added".into(),
            Node {
                created: 0,
                ..node(1, 3)
            },
        );
    });
    write_plan(&mesh, &mut later);
    assert_eq!(anchors(&later), first, "an added node does not replace the anchor");

    let anchor = first[0].rsplit("--").next().unwrap().to_owned();
    edit(&mut later, &ClusterIdentity::Local, |m| {
        m.nodes.get_mut(&anchor).unwrap().ready = false
    });
    let (plan, _) = plan_mesh(&mesh, &later);
    let steps = diff(
        &plan,
        &secret("tenant"),
        later.members[&secret("tenant")].fresh().unwrap(),
    );
    assert_eq!(steps.len(), 2);
    assert_eq!(
        steps[1].item.name(),
        first[0],
        "the new anchor gains the network before the old one loses it"
    );
    assert_eq!(
        steps.iter().map(|s| s.fields.clone()).collect::<Vec<_>>(),
        vec![vec!["spec.allowedIPs"]; 2]
    );
}

// threat: overlapping-mesh
#[test]
fn accepted_network_wins_over_a_new_overlapping_claim() {
    let mut older = two_clusters();
    older.accepted = BTreeMap::from([("tenant".into(), older.clusters[1].allowed.clone())]);
    let mut newer = two_clusters();
    newer.id.name = "n".into();
    newer.created = 2;
    newer.clusters[1] = entry("other", secret("other"), &["10.2.128.0/17"]);
    for meshes in [[older.clone(), newer.clone()], [newer.clone(), older.clone()]] {
        let plan = plan(&meshes, &seen(), &Settings::default(), &TestNaming);
        let newer_plan = &plan.meshes[&newer.id];
        assert!(
            newer_plan.clusters.values().all(|c| c.accepted.is_empty()),
            "a mesh without accepted networks that loses a claim gets none, not even for the hub"
        );
        assert!(
            newer_plan
                .facts
                .iter()
                .any(|f| matches!(f, Fact::NetworksOverlap { lost: true, .. }))
        );
        let older_plan = &plan.meshes[&older.id];
        assert_eq!(older_plan.clusters["tenant"].accepted, older.clusters[1].allowed);
        assert!(
            older_plan
                .facts
                .iter()
                .any(|f| matches!(f, Fact::NetworksOverlap { lost: false, .. }))
        );
    }
    // `tenant` now lists a wider network, which overlaps an accepted network of `other`: the wider one is refused, and `tenant` keeps
    // the networks that it had.
    newer.clusters[1].allowed = nets(&["10.3.0.0/16"]);
    newer.accepted = BTreeMap::from([("other".into(), nets(&["10.3.0.0/16"]))]);
    older.clusters[1].allowed = nets(&["10.2.0.0/15", "100.66.2.0/24"]);
    let plan = plan(&[older.clone(), newer], &seen(), &Settings::default(), &TestNaming);
    assert_eq!(
        plan.meshes[&older.id].clusters["tenant"].accepted,
        nets(&["10.2.0.0/16", "100.66.2.0/24"])
    );
}

#[test]
fn refused_mesh_holds_no_network_that_a_later_mesh_claims() {
    let mut oldest = two_clusters();
    oldest.accepted = BTreeMap::from([("tenant".into(), oldest.clusters[1].allowed.clone())]);
    let with = |name: &str, created: i64, clusters: Vec<Cluster>| {
        let mut mesh = Mesh {
            created,
            clusters,
            ..two_clusters()
        };
        mesh.id.name = name.into();
        mesh
    };
    let free = |name: &str| entry(name, secret(name), &["10.9.0.0/16"]);
    let taken = entry("taken", secret("taken"), &["10.2.0.0/16"]);
    let refused = with("refused", 2, vec![free("first"), taken]);
    let later = with("later", 3, vec![free("second")]);
    let meshes = [oldest, refused.clone(), later.clone()];
    let plan = plan(&meshes, &seen(), &Settings::default(), &TestNaming);
    assert_eq!(plan.meshes[&refused.id].clusters["first"].accepted, []);
    assert_eq!(
        plan.meshes[&later.id].clusters["second"].accepted,
        nets(&["10.9.0.0/16"])
    );
}

#[test]
fn refused_change_to_routed_keeps_masqueraded_peers() {
    let mut mesh = two_clusters();
    let other = entry("other", secret("other"), &["100.66.3.0/24"]);
    mesh.clusters.push(Cluster {
        addressing: Addressing::Masqueraded,
        ..other
    });
    let mut seen = seen();
    let with_pods_of_tenant = Node {
        pod_cidrs: node(2, 1).pod_cidrs,
        ..node(3, 1)
    };
    let other_member = member(&[("x", with_pods_of_tenant)]);
    seen.members.insert(secret("other"), Observation::Fresh(other_member));
    let (_, before) = plan_mesh(&mesh, &seen);
    assert_eq!(*allowed(&before, "mgmt", "m--other--x"), net_set(&["100.66.3.1/32"]));

    let accepted = |(name, report): (&String, &ClusterReport)| (name.clone(), report.accepted.clone());
    mesh.accepted = before.clusters.iter().map(accepted).collect();
    mesh.clusters[2] = entry("other", secret("other"), &["100.66.3.0/24", "10.2.0.0/16"]);
    let (_, after) = plan_mesh(&mesh, &seen);
    assert!(
        after
            .facts
            .iter()
            .any(|fact| matches!(fact, Fact::NetworksOverlap { lost: true, .. }))
    );
    assert_eq!(after.targets, before.targets);
}

#[test]
fn shared_entry_whose_claim_is_refused_stays_routed() {
    let mut mesh = two_clusters();
    mesh.clusters[1].pod_network = PodNetwork::Shared;
    let other = entry("other", secret("other"), &["10.9.0.0/16", "100.66.3.0/24"]);
    mesh.clusters.push(other);
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |member| {
        member.nodes.get_mut("x").unwrap().pod_cidrs = vec![];
    });
    let (_, before) = plan_mesh(&mesh, &seen);
    assert!(allowed(&before, "mgmt", "m--tenant--x").contains(&"10.2.0.0/16".parse().unwrap()));
    let accepted = |(name, report): (&String, &ClusterReport)| (name.clone(), report.accepted.clone());
    mesh.accepted = before.clusters.iter().map(accepted).collect();
    mesh.clusters[1].allowed.push("10.9.5.0/24".parse().unwrap());
    let (_, after) = plan_mesh(&mesh, &seen);
    assert_eq!(after.targets, before.targets);
}

#[test]
fn peers_in_masqueraded_target_leave_out_its_own_pods() {
    let mut mesh = two_clusters();
    mesh.clusters[1] = Cluster {
        addressing: Addressing::Masqueraded,
        ..entry("tenant", secret("tenant"), &["100.66.2.0/24"])
    };
    let mut seen = seen();
    // Node x of the tenant has the same pod CIDR as node a of the hub, and node y a part of the pod CIDR of node b.
    edit(&mut seen, &secret("tenant"), |member| {
        let with_pods = |n: u8, pods: &str| Node {
            pod_cidrs: vec![Claim::Valid(pods.parse().unwrap())],
            ..node(2, n)
        };
        member.nodes = Rows::from([
            ("x".to_owned(), with_pods(1, "10.1.1.0/24")),
            ("y".to_owned(), with_pods(2, "10.1.2.128/25")),
        ]);
    });
    let of_hub = |mesh: &Mesh| {
        let (_, planned) = plan_mesh(mesh, &seen);
        let peers = ["m--mgmt--a", "m--mgmt--b"].map(|name| allowed(&planned, "tenant", name).clone());
        peers.into_iter().flatten().collect::<BTreeSet<IpNet>>()
    };
    assert_eq!(
        of_hub(&mesh),
        net_set(&["10.96.0.0/16", "100.66.1.1/32", "100.66.1.2/32"])
    );

    let (_, planned) = plan_mesh(&mesh, &seen);
    let policy = &planned.targets["tenant"].policies["m--mgmt"].spec;
    assert_eq!(policy.networks, net_set(&["10.96.0.0/16", "100.66.1.0/24"]));

    // The podCIDRs of a member with a shared pod network are not used.
    mesh.clusters[1].pod_network = PodNetwork::Shared;
    assert!(of_hub(&mesh).is_superset(&net_set(&["10.1.1.0/24", "10.1.2.0/24"])));
}

#[test]
fn exported_pods_use_their_node_and_other_pods_the_anchor() {
    let mut mesh = two_clusters();
    mesh.clusters[0].pod_network = PodNetwork::Shared;
    mesh.clusters[0].exports = vec![Export {
        namespace: "rook-ceph".into(),
        selector: vec![],
    }];
    let mut seen = seen();
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        let pod = |node: &str, address: &str| Pod {
            node: node.into(),
            addresses: vec![address.parse().unwrap()],
            ..Pod::default()
        };
        let name = |namespace: &str, name: &str| ObjectName {
            namespace: namespace.into(),
            name: name.into(),
        };
        m.pods.insert(name("rook-ceph", "osd-0"), pod("b", "10.1.77.1"));
        m.pods.insert(name("rook-ceph", "far"), pod("b", "192.0.2.1"));
        m.pods.insert(name("default", "other"), pod("b", "10.1.77.2"));
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    let allowed_ips_of = |node: &str| allowed(&mesh_plan, "tenant", &format!("m--mgmt--{node}"));
    let shared: IpNet = "10.1.0.0/16".parse().unwrap();
    let anchors: Vec<&str> = ["a", "b"]
        .into_iter()
        .filter(|node| allowed_ips_of(node).contains(&shared))
        .collect();
    assert_eq!(anchors.len(), 1, "podCIDRs are not used, so the network is anchored");
    let own: BTreeSet<IpNet> = allowed_ips_of("b")
        .iter()
        .copied()
        .filter(|net| net.prefix_len() == 32)
        .collect();
    assert_eq!(own, net_set(&["10.1.77.1/32", "100.66.1.2/32"]));
    assert!(
        mesh_plan.targets["mgmt"].policies["m--tenant"]
            .spec
            .anchored
            .contains(&shared)
    );
}

#[test]
fn mirrored_service_has_only_endpoints_in_the_mesh() {
    let mut mesh = two_clusters();
    let local = ObjectName {
        namespace: "default".into(),
        name: "db".into(),
    };
    let service = ObjectName {
        namespace: "team-x".into(),
        name: "postgres".into(),
    };
    mesh.clusters[1].egress = vec![Grant {
        cluster: "mgmt".into(),
        service: service.clone(),
        ports: vec![GrantPort {
            port: PortRef::Number(5432),
            protocol: Protocol::Tcp,
        }],
        local: local.clone(),
    }];
    let mut seen = seen();
    let port = |name: &str, port| ServicePort {
        name: name.into(),
        port,
        protocol: Protocol::Tcp,
    };
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.services.insert(
            service.clone(),
            Service {
                ports: vec![port("pg", 5432), port("metrics", 9187)],
                ..Service::default()
            },
        );
        let endpoint = |address: String| SliceEndpoint {
            address: address.parse().unwrap(),
            node: None,
            ready: true,
            serving: true,
            terminating: false,
        };
        let mut endpoints: Vec<_> = (1..=130).map(|n| endpoint(format!("10.1.1.{n}"))).collect();
        endpoints.push(endpoint("192.0.2.9".into()));
        let slice = Slice {
            managed: None,
            service: "postgres".into(),
            v6: false,
            ports: vec![port("pg", 15432)],
            endpoints,
        };
        m.slices.insert(
            ObjectName {
                namespace: "team-x".into(),
                name: "postgres-1".into(),
            },
            slice,
        );
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    let mirrored = &mesh_plan.targets["tenant"].services[&local];
    assert_eq!(mirrored.ports, vec![port("pg", 5432)]);
    assert_eq!(
        mirrored
            .slices
            .values()
            .map(|s| (s.ports.clone(), s.endpoints.len()))
            .collect::<Vec<_>>(),
        vec![(vec![port("pg", 15432)], 100), (vec![port("pg", 15432)], 30)],
        "a slice has at most 100 endpoints"
    );
    assert!(mesh_plan.egress[0].ready);
    assert!(
        mesh_plan.egress[0].message.contains("192.0.2.9"),
        "{}",
        mesh_plan.egress[0].message
    );

    // The name is already in use by a Service that the controller did not write.
    edit(&mut seen, &secret("tenant"), |m| {
        m.services.insert(
            local.clone(),
            Service {
                ports: vec![port("", 1)],
                ..Service::default()
            },
        );
    });
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    assert_eq!(mesh_plan.targets["tenant"].services, BTreeMap::new());
    assert!(
        mesh_plan.egress[0].message.contains("already exists"),
        "{}",
        mesh_plan.egress[0].message
    );
}
