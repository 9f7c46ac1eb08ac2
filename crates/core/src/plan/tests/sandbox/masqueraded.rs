//! Tests grants of a masqueraded member's Services to a routed member, which reaches them through gateways as a sandbox does.

use super::*;

/// `mgmt` is masqueraded. `tenant` is routed and imports port 5432 of the Service `team-x/postgres`.
fn mesh_with_masqueraded_exporter() -> (Mesh, Observations) {
    let (mut mesh, seen) = mesh_with_sandbox();
    mesh.clusters.truncate(2);
    mesh.clusters[0].addressing = Addressing::Masqueraded;
    mesh.clusters[0].allowed = nets(&["100.66.1.0/24"]);
    mesh.clusters[1].egress = vec![grant(postgres(), &[5432], "postgres")];
    (mesh, seen)
}

fn gateway_peers(plan: &MeshPlan) -> Vec<&PlannedPeer> {
    let peers = plan.targets["tenant"].peers.values().map(|peer| &**peer);
    peers.filter(|peer| peer.spec.role == PeerRole::Gateway).collect()
}

#[test]
fn service_of_masqueraded_member_is_reached_through_its_gateways() {
    let (mesh, mut seen) = mesh_with_masqueraded_exporter();
    let access = plan_mesh(&mesh, &seen).1.targets["mgmt"].accesses["m--tenant"]
        .spec
        .clone();
    assert_eq!(access.sandbox, "tenant");
    // Although `tenant` is routed, the access contains only the WireGuard network of `tenant`, not the pod network.
    assert_eq!(access.networks, net_set(&["100.66.2.0/24"]));
    let addresses = access.nodes.values().map(|node| node.addresses.clone());
    assert_eq!(addresses.collect::<Vec<_>>(), [["100.66.2.1".parse().unwrap()].into()]);
    assert_eq!(access.grants.into_values().collect::<Vec<_>>(), [postgres_grant("pg")]);

    write_plan(&mesh, &mut seen);
    let (_, plan) = plan_mesh(&mesh, &seen);
    let found: Vec<_> = gateway_peers(&plan)
        .into_iter()
        .map(|peer| peer.spec.allowed_ips.clone())
        .collect();
    assert_eq!(found, [net_set(&["100.66.1.240/32"]), net_set(&["100.66.1.241/32"])]);
    // The tenant still has the Peers of the nodes.
    assert_eq!(peer_sources(&plan, "tenant").len(), 4);
    let service = &plan.targets["tenant"].services[&object("default", "postgres")];
    let endpoints = service.slices.values().flat_map(|slice| &slice.endpoints);
    let endpoints: Vec<String> = endpoints.map(|endpoint| endpoint.address.to_string()).collect();
    assert_eq!(endpoints, ["100.66.1.240", "100.66.1.241"]);
    assert!(plan.egress[0].ready, "{}", message(&plan));
    assert_eq!(
        (plan.clusters["mgmt"].registered, plan.clusters["mgmt"].gateways),
        (2, 2)
    );
}

#[test]
fn masqueraded_member_without_gateway_is_reported() {
    let (mesh, mut seen) = mesh_with_masqueraded_exporter();
    edit(&mut seen, &ClusterIdentity::Local, |m| m.gateways.clear());
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert!(plan.facts.iter().any(|fact| matches!(fact, Fact::NoGateway { .. })));
    assert!(message(&plan).contains("deploy/gateway.yaml"), "{}", message(&plan));
}

#[test]
fn importer_that_kg_serves_cannot_use_gateways() {
    let (mesh, mut seen) = mesh_with_masqueraded_exporter();
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.values_mut().for_each(|node| node.server = Server::Kilo);
    });
    write_plan(&mesh, &mut seen);
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert!(
        message(&plan).contains("run wg-agent instead of kg"),
        "{}",
        message(&plan)
    );
    assert_eq!(gateway_peers(&plan), Vec::<&PlannedPeer>::new());
    assert_eq!(plan.targets["mgmt"].accesses.len(), 0);
}

// threat: sandbox-copies-key
#[test]
fn gateway_with_a_copied_key_replaces_no_node() {
    let (mut mesh, mut seen) = mesh_with_masqueraded_exporter();
    mesh.clusters
        .push(entry("other", secret("other"), &["10.3.0.0/16", "100.66.3.0/24"]));
    let other = member(&[("o", node(3, 1))]);
    let copied = other.nodes["o"].public_key.value().copied().unwrap();
    seen.members.insert(secret("other"), Observation::Fresh(other));
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.gateways.values_mut().for_each(|gateway| gateway.public_key = copied);
    });
    write_plan(&mesh, &mut seen);
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert_eq!(gateway_peers(&plan), Vec::<&PlannedPeer>::new());
    assert!(plan.targets["tenant"].peers.contains_key("m--other--o"));
}

#[test]
fn networks_of_an_unobserved_importer_stay() {
    let (mesh, mut seen) = mesh_with_masqueraded_exporter();
    write_plan(&mesh, &mut seen);
    let before = plan_mesh(&mesh, &seen).1.targets["mgmt"].accesses["m--tenant"]
        .spec
        .clone();
    seen.members
        .insert(secret("tenant"), Observation::Unreachable("refused".into()));
    let after = plan_mesh(&mesh, &seen).1.targets["mgmt"].accesses["m--tenant"]
        .spec
        .clone();
    assert_eq!(after, before);
}

// threat: quarantine
#[test]
fn quarantine_of_the_exporter_closes_its_gateways() {
    let (mut mesh, mut seen) = mesh_with_masqueraded_exporter();
    write_plan(&mesh, &mut seen);
    let policy = plan_mesh(&mesh, &seen).1.targets["tenant"].policies["m--mgmt"]
        .spec
        .clone();
    // Gateways only reply, so they add no source. The only source is the WireGuard network of mgmt, which in this test also
    // contains the addresses of the gateways.
    assert_eq!(policy.sources, net_set(&["100.66.1.0/24"]));
    assert!(
        policy
            .networks
            .is_superset(&net_set(&["100.66.1.240/32", "100.66.1.241/32"]))
    );
    mesh.clusters[0].quarantine = true;
    let policy = plan_mesh(&mesh, &seen).1.targets["tenant"].policies["m--mgmt"]
        .spec
        .clone();
    assert!(policy.closed && policy.networks.contains(&"100.66.1.240/32".parse().unwrap()));
    // A target that enforces no policies gets no Peers of a quarantined member.
    edit(&mut seen, &secret("tenant"), |m| m.policies = None);
    assert_eq!(peer_sources(&plan_mesh(&mesh, &seen).1, "tenant"), Vec::<&str>::new());
}

#[test]
fn one_node_of_kg_does_not_end_the_imports() {
    let (mesh, mut seen) = mesh_with_masqueraded_exporter();
    edit(&mut seen, &secret("tenant"), |m| {
        let kg = Node {
            server: Server::Kilo,
            ..node(2, 2)
        };
        m.nodes.insert("kg".into(), kg);
    });
    write_plan(&mesh, &mut seen);
    assert_eq!(gateway_peers(&plan_mesh(&mesh, &seen).1).len(), 2);
}

/// After a restart of the controller, an exporter may still be unobserved. Then the plan also uses `networks` and `sources`
/// of its existing PeerPolicy, in which the exporter's gateways are only among `networks`.
#[test]
fn gateways_of_an_unobserved_exporter_become_no_sources() {
    let (mut mesh, mut seen) = mesh_with_masqueraded_exporter();
    // The exporter becomes a remote member instead of the hub, because the hub is always observed.
    mesh.clusters[0].identity = secret("exporter");
    let exporter = seen.members.remove(&ClusterIdentity::Local).unwrap();
    seen.members.insert(secret("exporter"), exporter);
    write_plan(&mesh, &mut seen);
    let before = plan_mesh(&mesh, &seen).1.targets["tenant"].policies["m--mgmt"]
        .spec
        .clone();
    assert!(before.networks.contains(&"100.66.1.240/32".parse().unwrap()));
    seen.members
        .insert(secret("exporter"), Observation::Unreachable("refused".into()));
    let after = plan_mesh(&mesh, &seen).1.targets["tenant"].policies["m--mgmt"]
        .spec
        .clone();
    assert_eq!(after, before);
}
