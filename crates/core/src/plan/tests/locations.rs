//! Tests the Peers of a member's nodes in their own cluster (design rule 14).

use super::*;

const X: &str = "m--tenant--x";

/// A mesh of the hub and a tenant with the nodes `x` and `y` in the east and `z` in the west.
fn mesh_with_locations() -> (Mesh, Observations) {
    let mut mesh = two_clusters();
    mesh.clusters[1].locations = Locations::Connected;
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |tenant| {
        for (n, name) in [(1, "x"), (2, "y"), (3, "z")] {
            let location = if name == "z" { "west" } else { "east" };
            let node = Node {
                location: location.into(),
                ..node(2, n)
            };
            tenant.nodes.insert(name.into(), node);
        }
    });
    (mesh, seen)
}

fn edit_node(seen: &mut Observations, name: &str, change: impl FnOnce(&mut Node)) {
    edit(seen, &secret("tenant"), |tenant| {
        change(tenant.nodes.get_mut(name).unwrap())
    });
}

/// The Peers of the tenant's own nodes in the tenant.
fn own_peers(plan: &MeshPlan) -> Vec<&str> {
    let peers = plan.targets["tenant"].peers.iter();
    let own = peers.filter(|(_, peer)| peer.source == "tenant");
    own.map(|(name, _)| &**name).collect()
}

fn not_connected(plan: &MeshPlan) -> &str {
    let messages = plan.facts.iter().filter_map(|fact| match fact {
        Fact::LocationsNotConnected { message, .. } => Some(&**message),
        _ => None,
    });
    let messages: Vec<&str> = messages.collect();
    assert_eq!(messages.len(), 1, "{:?}", plan.facts);
    messages[0]
}

#[test]
fn own_nodes_have_peers_with_all_their_addresses() {
    let (mut mesh, seen) = mesh_with_locations();
    for addressing in [Addressing::Routed, Addressing::Masqueraded] {
        mesh.clusters[1].addressing = addressing;
        mesh.clusters[1].allowed = match addressing {
            Addressing::Routed => nets(&["10.2.0.0/16", "100.66.2.0/24"]),
            Addressing::Masqueraded => nets(&["100.66.2.0/24"]),
        };
        let (_, plan) = plan_mesh(&mesh, &seen);
        assert_eq!(own_peers(&plan), [X, "m--tenant--y", "m--tenant--z"]);
        let expected = PeerSpec {
            public_key: key(33),
            allowed_ips: net_set(&["10.2.1.0/24", "100.66.2.1/32", "172.30.2.1/32"]),
            endpoint: Some(Endpoint::Ip("172.30.2.1:51820".parse().unwrap())),
            candidates: vec![],
            persistent_keepalive: 0,
            role: PeerRole::OwnNode("east".into()),
        };
        assert_eq!(*plan.targets["tenant"].peers[X].spec, expected);
        // The Peers in other members are the same as without `Locations::Connected`.
        let in_hub = &plan.targets["mgmt"].peers[X].spec;
        assert!(!in_hub.allowed_ips.contains(&"172.30.2.1/32".parse().unwrap()));
        assert_eq!(in_hub.role, PeerRole::Node);
        assert_eq!(plan.clusters["tenant"].registered, 3);
    }
    mesh.clusters[1].locations = Locations::Ignored;
    assert_eq!(own_peers(&plan_mesh(&mesh, &seen).1), Vec::<&str>::new());
}

#[test]
fn address_of_the_api_server_is_left_out() {
    let (mesh, mut seen) = mesh_with_locations();
    edit(&mut seen, &secret("tenant"), |tenant| {
        tenant.api_endpoints = ["172.30.2.1:6443".parse().unwrap()].into();
    });
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert_eq!(*allowed(&plan, "tenant", X), net_set(&["10.2.1.0/24", "100.66.2.1/32"]));
}

#[test]
fn address_that_two_nodes_have_is_left_out_of_both_peers() {
    let (mesh, mut seen) = mesh_with_locations();
    edit_node(&mut seen, "z", |z| z.internal_ips = vec!["172.30.2.1".parse().unwrap()]);
    let (_, plan) = plan_mesh(&mesh, &seen);
    for (peer, expected) in [
        (X, ["10.2.1.0/24", "100.66.2.1/32"]),
        ("m--tenant--z", ["10.2.3.0/24", "100.66.2.3/32"]),
    ] {
        assert_eq!(*allowed(&plan, "tenant", peer), net_set(&expected));
    }
    let is_reported =
        |fact: &&Fact| matches!(fact, Fact::AddressShared { message, .. } if message.contains("in other locations"));
    let shared = plan.facts.iter().filter(is_reported);
    assert_eq!(shared.count(), 2);
}

#[test]
fn node_without_location_is_skipped_in_its_own_cluster_alone() {
    let (mesh, mut seen) = mesh_with_locations();
    edit_node(&mut seen, "x", |x| x.location = String::new());
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert_eq!(own_peers(&plan), ["m--tenant--y", "m--tenant--z"]);
    assert!(plan.targets["mgmt"].peers.contains_key(X));
    let skipped = &plan.clusters["tenant"].skipped;
    assert_eq!(
        skipped
            .iter()
            .map(|s| (&*s.node, s.reason, s.target.as_deref()))
            .collect::<Vec<_>>(),
        [("x", Reason::NodeNoLocation, Some("tenant"))]
    );
}

#[test]
fn single_location_and_kg_are_reported_and_get_no_peers() {
    let (mesh, mut seen) = mesh_with_locations();
    edit_node(&mut seen, "z", |z| z.server = Server::Kilo);
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert!(
        not_connected(&plan).starts_with("kg serves Node z"),
        "{}",
        not_connected(&plan)
    );
    assert_eq!(own_peers(&plan), Vec::<&str>::new());

    let (mesh, mut seen) = mesh_with_locations();
    edit_node(&mut seen, "z", |z| z.location = "east".into());
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert!(not_connected(&plan).starts_with("every Node has the location \"east\""));
    assert_eq!(own_peers(&plan), Vec::<&str>::new());
}

#[test]
fn held_node_keeps_its_peer_in_its_own_cluster() {
    let (mut mesh, mut seen) = mesh_with_locations();
    mesh.clusters[1].addressing = Addressing::Masqueraded;
    write_plan(&mesh, &mut seen);
    let before = plan_mesh(&mesh, &seen).1.targets["tenant"].peers[X].spec.clone();
    edit_node(&mut seen, "x", |x| x.public_key = Claim::Absent);
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert_eq!(plan.targets["tenant"].peers[X].spec, before);

    // The only node of a location is held: the location still counts.
    edit_node(&mut seen, "z", |z| z.public_key = Claim::Absent);
    assert_eq!(
        own_peers(&plan_mesh(&mesh, &seen).1),
        [X, "m--tenant--y", "m--tenant--z"]
    );
}

#[test]
fn silent_kg_does_not_end_the_tunnels() {
    let (mesh, mut seen) = mesh_with_locations();
    edit(&mut seen, &secret("tenant"), |tenant| {
        let old = Node {
            server: Server::Kilo,
            silent: true,
            ..node(2, 4)
        };
        tenant.nodes.insert("old".into(), old);
    });
    assert_eq!(own_peers(&plan_mesh(&mesh, &seen).1).len(), 3);
}

#[test]
fn locations_of_a_sandbox_are_not_connected() {
    let (mut mesh, seen) = mesh_with_locations();
    mesh.clusters[1].profile = Profile::Sandbox;
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert!(not_connected(&plan).contains("sandbox"));
    assert_eq!(own_peers(&plan), Vec::<&str>::new());
}

#[test]
fn orphaned_peer_of_an_own_node_is_replaced() {
    let (mesh, mut seen) = mesh_with_locations();
    write_plan(&mesh, &mut seen);
    let mut renamed = mesh;
    renamed.id.name = "renamed".into();
    for _ in 0..2 {
        write_plan(&renamed, &mut seen);
    }
    let Some(Observation::Fresh(tenant)) = seen.members.get(&secret("tenant")) else {
        panic!("the tenant is observed");
    };
    let own = tenant.peers.iter().flatten().filter(|(_, peer)| {
        let spec = peer.spec.as_ref();
        spec.is_ok_and(|spec| matches!(spec.role, PeerRole::OwnNode(_)))
    });
    let own: Vec<&str> = own.map(|(name, _)| name).collect();
    assert_eq!(own, ["renamed--tenant--x", "renamed--tenant--y", "renamed--tenant--z"]);
}

#[test]
fn nodes_behind_nat_keep_their_mapping_toward_other_locations() {
    let (mesh, mut seen) = mesh_with_locations();
    edit_node(&mut seen, "z", |z| {
        z.discovered.insert(key(33), "198.51.100.9:40001".parse().unwrap());
    });
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert_eq!(
        plan.targets["tenant"].peers["m--tenant--z"].spec.persistent_keepalive,
        25
    );
}

#[test]
fn pods_of_own_nodes_belong_to_no_other_member() {
    let (mut mesh, mut seen) = mesh_with_locations();
    // The podCIDR of `x` is outside the tenant's allowedNetworks. Those of the hub contain one address of this podCIDR.
    mesh.clusters[1].pod_network = PodNetwork::PerNode;
    mesh.clusters[0].allowed = nets(&["10.1.0.0/16", "10.2.1.9/32", "100.66.1.0/24"]);
    mesh.clusters[1].allowed = nets(&["10.2.2.0/23", "100.66.2.0/24"]);
    edit(&mut seen, &ClusterIdentity::Local, |hub| {
        hub.nodes.get_mut("a").unwrap().internal_ips = vec!["10.2.1.9".parse().unwrap()];
    });
    let taken = "10.2.1.9/32".parse().unwrap();
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert!(!allowed(&plan, "tenant", "m--mgmt--a").contains(&taken));
    mesh.clusters[1].locations = Locations::Ignored;
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert!(allowed(&plan, "tenant", "m--mgmt--a").contains(&taken));
}

#[test]
fn other_member_cannot_take_a_prefix_of_an_own_node() {
    let (mut mesh, mut seen) = mesh_with_locations();
    mesh.clusters[1].addressing = Addressing::Masqueraded;
    mesh.clusters[1].allowed = nets(&["100.66.2.0/24"]);
    // The hub's networks contain the tenant's pods and addresses, as those of a hub that hosts the tenant's nodes do.
    mesh.clusters[0].allowed = nets(&["10.0.0.0/8", "172.30.0.0/16", "100.66.1.0/24"]);
    edit(&mut seen, &ClusterIdentity::Local, |hub| {
        hub.nodes.get_mut("a").unwrap().internal_ips = vec!["172.30.2.1".parse().unwrap()];
    });
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert!(allowed(&plan, "tenant", X).contains(&"172.30.2.1/32".parse().unwrap()));
    assert!(!allowed(&plan, "tenant", "m--mgmt--a").contains(&"172.30.2.1/32".parse().unwrap()));
}
