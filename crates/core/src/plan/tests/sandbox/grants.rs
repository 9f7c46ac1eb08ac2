//! What a grant comes to: which Services may be given, which endpoints of them are, and why the others are not.

use super::*;

#[test]
fn a_confined_mesh_gives_away_services_of_its_own_namespace_and_those_that_name_it() {
    let (mut mesh, mut seen) = three();
    let grants =
        |mesh: &Mesh, seen: &Observations| run(mesh, seen).1.targets["mgmt"].policies["m--nb"].spec.grants.clone();
    mesh.clusters[0].confined_to = Some("team-x".into());
    assert_eq!(grants(&mesh, &seen), granted(&["pg"]));
    mesh.clusters[0].confined_to = Some("lab".into());
    assert_eq!(grants(&mesh, &seen), BTreeSet::new());
    let (_, plan) = run(&mesh, &seen);
    let refused = "Service team-x/postgres of cluster \"mgmt\" is not given away by a mesh in namespace lab: whoever owns the \
                   Service there lets it with the annotation kilo-clustermesh.io/allowed-from: lab on it";
    assert_eq!(message(&plan), refused);
    assert!(plan.targets["nb"].services.is_empty() && plan.targets["nb"].peers.is_empty());
    // Whether it is there at all is not told.
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        drop(m.services.remove(&postgres()))
    });
    assert_eq!(message(&run(&mesh, &seen).1), refused);
    let (_, mut seen) = three();
    for (names, open) in [("lab", true), ("other", false)] {
        edit(&mut seen, &ClusterIdentity::Local, |m| {
            m.services.get_mut(&postgres()).unwrap().allowed_from = [names.to_owned(), "more".to_owned()].into();
        });
        assert_eq!(!grants(&mesh, &seen).is_empty(), open, "{names}");
    }
}

#[test]
fn a_member_gets_no_service_of_a_sandbox_that_it_gives_one_to() {
    let (mut mesh, mut seen) = three();
    let mut wanted = grant(object("default", "web"), &[], "web");
    wanted.cluster = "nb".into();
    mesh.clusters[0].egress = vec![wanted];
    edit(&mut seen, &secret("nb"), |m| {
        let service = Service {
            ports: vec![port("", 80)],
            ..Service::default()
        };
        m.services.insert(object("default", "web"), service);
    });
    let (_, plan) = run(&mesh, &seen);
    assert_eq!(plan.targets["mgmt"].services, BTreeMap::new());
    assert_eq!(
        message(&plan),
        "cluster \"nb\" has isolationProfile sandbox: its pods have no address in the mesh, so it has no Service to give"
    );
}

#[test]
fn a_grant_that_does_not_resolve_costs_itself_alone_and_says_why() {
    type Change = fn(&mut Member);
    let cases: [(&str, Change); 5] = [
        ("is not there", |m| drop(m.services.remove(&postgres()))),
        ("ExternalName", |m| {
            m.services.get_mut(&postgres()).unwrap().external_name = true;
        }),
        ("itself a mirror", |m| {
            m.services.get_mut(&postgres()).unwrap().managed = Some(Owner::default());
        }),
        ("has no selector", |m| {
            m.services.get_mut(&postgres()).unwrap().selectorless = true;
        }),
        ("no port 5432/TCP", |m| {
            m.services.get_mut(&postgres()).unwrap().ports = vec![port("metrics", 9187)];
        }),
    ];
    for (why, change) in cases {
        let (mut mesh, mut seen) = three();
        mesh.clusters[2]
            .egress
            .push(grant(object("team-x", "redis"), &[], "redis"));
        edit(&mut seen, &ClusterIdentity::Local, |m| {
            let service = Service {
                ports: vec![port("", 6379)],
                ..Service::default()
            };
            m.services.insert(object("team-x", "redis"), service);
            change(m);
        });
        let (_, plan) = run(&mesh, &seen);
        assert!(message(&plan).contains(why), "{}", message(&plan));
        let redis = ServiceGrant {
            service: object("team-x", "redis"),
            ports: BTreeSet::new(),
            within: of_mgmt(),
        };
        let policy = closed([redis].into());
        assert_eq!(plan.targets["mgmt"].policies["m--nb"].spec, policy, "{why}");
        assert_eq!(
            plan.targets["mgmt"].peers["m--nb--s"].spec.requires_policy,
            requires(&policy)
        );
        assert_eq!(plan.targets["nb"].peers, BTreeMap::new(), "{why}");
    }
}

#[test]
fn an_endpoint_outside_the_members_networks_or_on_no_node_with_a_peer_is_left_out() {
    let (mesh, mut seen) = three();
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        let endpoints = [
            ("10.1.2.9", "b"),
            ("192.0.2.9", "b"),
            ("10.1.1.8", "gone"),
            ("10.1.1.7", ""),
        ];
        let endpoints = endpoints.map(|(address, node)| backend(address, node)).to_vec();
        m.slices
            .insert(object("team-x", "postgres-1"), slice("postgres", endpoints));
    });
    let (_, plan) = run(&mesh, &seen);
    assert_eq!(sources(&plan, "nb"), ["mgmt"]);
    assert_eq!(
        allowed(&plan, "nb", "m--mgmt--b"),
        &net_set(&["10.1.2.9/32", "100.66.1.2/32"])
    );
    assert_eq!(plan.egress[0].endpoints, 1);
    // The nodes over there are told where they may lie.
    assert_eq!(plan.targets["mgmt"].policies["m--nb"].spec, closed(granted(&["pg"])));
    let told = message(&plan);
    assert!(
        told.contains("(192.0.2.9)")
            && told.contains("run on no node that has a Peer and are left out (10.1.1.7, 10.1.1.8)"),
        "{told}"
    );
}

#[test]
fn where_pods_are_of_no_node_a_sandbox_is_given_endpoints_in_the_host_network_alone_and_is_told_so() {
    let (mut mesh, mut seen) = three();
    mesh.clusters[0].pod_network = PodNetwork::Shared;
    mesh.clusters[0].allowed.extend(nets(&["172.30.1.0/24"]));
    let endpoints = |seen: &mut Observations, endpoints: &[(&str, &str)]| {
        let endpoints = endpoints.iter().map(|(address, node)| backend(address, node)).collect();
        edit(seen, &ClusterIdentity::Local, |m| {
            m.slices
                .insert(object("team-x", "postgres-1"), slice("postgres", endpoints));
        });
    };
    // In the podCIDR of its node, too, which means nothing there; and another node's address.
    endpoints(&mut seen, &[("10.1.2.9", "b"), ("172.30.1.1", "b")]);
    let (_, plan) = run(&mesh, &seen);
    assert_eq!((sources(&plan, "nb"), plan.egress[0].endpoints), (vec![], 0));
    let told = message(&plan);
    assert!(
        told.contains(
            "2 endpoint(s) of Service team-x/postgres of cluster \"mgmt\" lie in a pod network that its nodes share"
        ) && told.contains("hostNetwork")
            && told.contains("(10.1.2.9, 172.30.1.1)"),
        "{told}"
    );
    endpoints(&mut seen, &[("10.1.2.9", "b"), ("172.30.1.1", "a")]);
    let (_, plan) = run(&mesh, &seen);
    assert_eq!(plan.egress[0].endpoints, 1);
    assert_eq!(
        allowed(&plan, "nb", "m--mgmt--a"),
        &net_set(&["100.66.1.1/32", "172.30.1.1/32"])
    );
    // Cluster-meshed members are given them as before.
    mesh.clusters[2].profile = Profile::ClusterMeshed;
    assert_eq!(run(&mesh, &seen).1.egress[0].endpoints, 2);
}

#[test]
fn an_endpoint_of_a_family_in_which_the_sandbox_has_no_address_is_left_out_of_everything() {
    let (mut mesh, mut seen) = three();
    mesh.clusters[0].allowed.push("fd00:1::/48".parse().unwrap());
    let second = |seen: &mut Observations, alone: bool| {
        edit(seen, &ClusterIdentity::Local, |m| {
            let endpoints = vec![backend("fd00:1:0:2::9", "b")];
            let v6 = Slice {
                v6: true,
                ..slice("postgres", endpoints)
            };
            m.slices.insert(object("team-x", "postgres-2"), v6);
            if alone {
                m.slices.remove(&object("team-x", "postgres-1"));
            }
        });
    };
    second(&mut seen, false);
    let (_, plan) = run(&mesh, &seen);
    assert_eq!(
        allowed(&plan, "nb", "m--mgmt--b"),
        &net_set(&["10.1.2.9/32", "100.66.1.2/32"])
    );
    assert_eq!((plan.egress[0].endpoints, message(&plan)), (1, ""));
    second(&mut seen, true);
    let (_, plan) = run(&mesh, &seen);
    assert_eq!(plan.targets["nb"].peers, BTreeMap::new());
    assert_eq!(
        message(&plan),
        "Service team-x/postgres of cluster \"mgmt\" has no endpoint of an address family that cluster \"nb\" has in its \
         allowedNetworks"
    );
    // Where the sandbox's addresses are of that family, those are the ones.
    mesh.clusters[2].allowed = vec!["fd00:66::/64".parse().unwrap()];
    edit(&mut seen, &secret("nb"), |m| {
        m.nodes
            .values_mut()
            .for_each(|node| node.wireguard_ip = Claim::Is("fd00:66::7/64".parse().unwrap()));
    });
    let (_, plan) = run(&mesh, &seen);
    assert_eq!(
        allowed(&plan, "nb", "m--mgmt--b"),
        &net_set(&["fd00:1:0:2::9/128", "100.66.1.2/32"])
    );
    assert_eq!(allowed(&plan, "mgmt", "m--nb--s"), &net_set(&["fd00:66::7/128"]));
}

#[test]
fn two_grants_of_one_service_are_one_and_every_port_of_either_is_every_port() {
    let (mut mesh, seen) = three();
    mesh.clusters[2].egress.push(grant(postgres(), &[9187], "metrics"));
    let (_, plan) = run(&mesh, &seen);
    let grants = |plan: &MeshPlan| plan.targets["mgmt"].policies["m--nb"].spec.grants.clone();
    assert_eq!(grants(&plan), granted(&["metrics", "pg"]));
    mesh.clusters[2].egress.push(grant(postgres(), &[], "all"));
    let (_, plan) = run(&mesh, &seen);
    assert_eq!(grants(&plan), granted(&[]));
}
