//! Tests the objects by which a sandbox uses gateways: the SandboxAccess in the gateways' cluster, and the gateways' Peers in the
//! sandbox.

use super::*;
use crate::observe::AccessNode;

fn access(seen: &Observations) -> AccessSpec {
    let member = seen.members[&ClusterIdentity::Local].last().unwrap();
    member.accesses.as_ref().unwrap()["m--nb"].spec.clone().unwrap()
}

/// The gateway port of the grant of postgres.
fn postgres_gateway_port(access: &AccessSpec) -> u16 {
    let is_postgres = |granted: &GrantedPort| *granted == postgres_grant("pg");
    let mut grants = access.grants.iter().filter(|(_, granted)| is_postgres(granted));
    let ((_, gateway_port), _) = grants.next().unwrap();
    *gateway_port
}

// threat: sandbox-forged-endpoint
#[test]
fn sandbox_and_target_connect_only_through_gateways() {
    let (mesh, mut seen) = mesh_with_sandbox();
    let (_, planned) = plan_mesh(&mesh, &seen);
    let target = &planned.targets["mgmt"];
    assert!(target.peers.values().all(|peer| peer.source != "nb"));
    assert!(target.policies.values().all(|policy| policy.source != "nb"));
    // The sandbox has no grant for a Service of `tenant`, so `tenant` gets no object of the sandbox.
    assert_eq!(peer_sources(&planned, "tenant"), ["mgmt", "mgmt"]);
    assert_eq!(
        planned.targets["tenant"].policies.keys().collect::<Vec<_>>(),
        ["m--mgmt"]
    );
    assert_eq!(
        planned
            .facts
            .iter()
            .filter(|fact| !matches!(fact, Fact::EgressUnresolved { .. }))
            .count(),
        0
    );
    // Before the SandboxAccess exists, the sandbox has no Peer for a gateway.
    assert_eq!(planned.targets["nb"].peers.len(), 0);
    assert!(!planned.egress[0].ready);
    write_plan(&mesh, &mut seen);
    let access = access(&seen);
    let node = AccessNode {
        name: "s".into(),
        addresses: ["100.66.3.1".parse().unwrap()].into(),
    };
    assert_eq!(access.networks, net_set(&["100.66.3.0/24"]));
    assert_eq!(access.nodes.values().collect::<Vec<_>>(), [&node]);
    assert_eq!(access.grants.values().collect::<Vec<_>>(), [&postgres_grant("pg")]);

    let (_, planned) = plan_mesh(&mesh, &seen);
    let sandbox = &planned.targets["nb"];
    let allowed: Vec<_> = sandbox
        .peers
        .values()
        .map(|peer| peer.spec.allowed_ips.clone())
        .collect();
    assert_eq!(allowed, [net_set(&["100.66.1.240/32"]), net_set(&["100.66.1.241/32"])]);
    // The gateways' pod address is no endpoint: it lies in the networks of mgmt, which this sandbox cannot reach without the mesh.
    assert!(sandbox.peers.values().all(|peer| {
        matches!(&peer.spec.endpoint, Some(Endpoint::Ip(at)) if at.port() == 51821) && peer.spec.candidates.is_empty()
    }));
    let gateways = net_set(&["100.66.1.240/32", "100.66.1.241/32"]);
    assert_eq!(
        sandbox.policies["m--mgmt"].spec,
        PolicySpec {
            sources: gateways.clone(),
            networks: gateways,
            deny: ["172.30.3.9:6443".parse().unwrap()].into(),
            infrastructure_ports: Settings::default().infrastructure_ports,
            ..PolicySpec::default()
        }
    );
    let service = &sandbox.services[&object("default", "postgres")];
    assert_eq!(service.ports, [port("pg", 5432)]);
    let slice = service.slices.values().next().unwrap();
    assert_eq!(slice.ports, [port("pg", postgres_gateway_port(&access))]);
    let endpoints: Vec<_> = slice
        .endpoints
        .iter()
        .map(|endpoint| endpoint.address.to_string())
        .collect();
    assert_eq!(endpoints, ["100.66.1.240", "100.66.1.241"]);
    assert!(planned.egress[0].ready, "{}", planned.egress[0].message);
    write_plan(&mesh, &mut seen);
    let (plan, _) = plan_mesh(&mesh, &seen);
    for (identity, member) in &seen.members {
        assert_eq!(diff(&plan, identity, member.last().unwrap()), [], "{identity}");
    }
}

// threat: oversized-access
#[test]
fn long_node_names_are_shortened_in_sandbox_access() {
    let names = ["n".repeat(253), "n".repeat(252), "n".repeat(40), "ä".repeat(20)];
    let cut = names.each_ref().map(|name| crate::plan::gateways::short_name(name));
    assert_eq!(cut[2], names[2]);
    assert!(cut.iter().all(|name| name.is_ascii() && name.len() <= 40), "{cut:?}");
    assert_eq!(BTreeSet::from(cut.clone()).len(), 4, "{cut:?}");
    let (mesh, mut seen) = mesh_with_sandbox();
    write_plan(&mesh, &mut seen);
    let node = access(&seen).nodes.into_values().next().unwrap();
    edit(&mut seen, &secret("nb"), |m| {
        let node = m.nodes.values().next().unwrap().clone();
        m.nodes = [(names[0].clone(), node)].into();
    });
    write_plan(&mesh, &mut seen);
    let renamed = access(&seen).nodes.into_values().next().unwrap();
    assert_eq!((&*node.name, &renamed.name), ("s", &cut[0]));
}

#[test]
fn unready_gateway_keeps_its_peer_but_is_no_endpoint() {
    let (mesh, mut seen) = mesh_with_sandbox();
    write_plan(&mesh, &mut seen);
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.gateways.extend([gateway(0, false)]);
    });
    let (_, planned) = plan_mesh(&mesh, &seen);
    let sandbox = &planned.targets["nb"];
    assert_eq!(sandbox.peers.len(), 2);
    let slices = || sandbox.services.values().flat_map(|service| service.slices.values());
    let endpoints: Vec<_> = slices()
        .flat_map(|slice| &slice.endpoints)
        .map(|e| e.address.to_string())
        .collect();
    assert_eq!(endpoints, ["100.66.1.241"]);
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.gateways.extend([gateway(1, false)]);
    });
    let (_, planned) = plan_mesh(&mesh, &seen);
    assert!(
        planned.egress[0].message.contains("no gateway of cluster \"mgmt\""),
        "{}",
        planned.egress[0].message
    );
    assert!(!planned.egress[0].ready);
}

#[test]
fn grant_refused_by_gateway_is_reported_with_reason() {
    let (mesh, mut seen) = mesh_with_sandbox();
    write_plan(&mesh, &mut seen);
    assert_eq!(plan_mesh(&mesh, &seen).1.egress[0].message, "");
    let port = postgres_gateway_port(&access(&seen));
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        for gateway in m.gateways.values_mut() {
            for access in ["m--nb", "other--nb"] {
                let why = format!("ServiceUnknown: of {access}");
                gateway.refused.insert((access.to_owned(), Protocol::Tcp, port), why);
            }
        }
    });
    let (_, planned) = plan_mesh(&mesh, &seen);
    assert_eq!(
        planned.egress[0].message,
        "gateway gateways/g-0, gateways/g-1 of cluster \"mgmt\" does not serve port \"pg\" of Service team-x/postgres: ServiceUnknown: \
         of m--nb"
    );
}

#[test]
fn gateway_that_does_not_serve_a_sandbox_is_ignored() {
    let (mesh, mut seen) = mesh_with_sandbox();
    write_plan(&mesh, &mut seen);
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        for gateway in m.gateways.values_mut() {
            gateway.serves = ["other".to_owned()].into();
        }
    });
    let (_, planned) = plan_mesh(&mesh, &seen);
    assert_eq!(planned.targets["nb"].peers.len(), 0);
    assert!(
        planned.egress[0].message.contains("no gateway"),
        "{}",
        planned.egress[0].message
    );
}

#[test]
fn peer_crd_is_required_only_for_peers() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    let missing = Fact::PeerCRDMissing { cluster: "mgmt".into() };
    edit(&mut seen, &ClusterIdentity::Local, |m| m.peers = None);
    assert!(plan_mesh(&mesh, &seen).1.facts.contains(&missing));
    mesh.clusters.retain(|cluster| cluster.name != "tenant");
    let (_, planned) = plan_mesh(&mesh, &seen);
    assert!(!planned.facts.contains(&missing), "{:?}", planned.facts);
    assert!(planned.targets["mgmt"].accesses.contains_key("m--nb"));
    edit(&mut seen, &secret("nb"), |m| m.peers = None);
    let of_sandbox = Fact::PeerCRDMissing { cluster: "nb".into() };
    assert!(plan_mesh(&mesh, &seen).1.facts.contains(&of_sandbox));
}

#[test]
fn nodes_are_not_skipped_when_only_sandboxes_connect() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.nodes.values_mut().for_each(|node| node.public_key = Claim::Absent);
    });
    assert_eq!(plan_mesh(&mesh, &seen).1.clusters["mgmt"].skipped.len(), 2);
    mesh.clusters.retain(|cluster| cluster.name != "tenant");
    let (_, planned) = plan_mesh(&mesh, &seen);
    assert_eq!(planned.clusters["mgmt"].skipped, []);
    assert!(planned.targets["mgmt"].accesses.contains_key("m--nb"));
}

#[test]
fn sandbox_on_pod_network_uses_the_pod_endpoint() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    mesh.clusters[2].endpoint_networks = vec!["10.1.0.0/16".parse().unwrap()];
    write_plan(&mesh, &mut seen);
    let (_, planned) = plan_mesh(&mesh, &seen);
    let peer = planned.targets["nb"].peers.values().next().unwrap();
    assert_eq!(
        peer.spec.endpoint,
        Some(Endpoint::Ip("10.1.9.9:51820".parse().unwrap()))
    );
    assert_eq!(peer.spec.candidates.len(), 2);
}

#[test]
fn unusable_gateways_are_left_out_with_reason() {
    let (mesh, mut seen) = mesh_with_sandbox();
    write_plan(&mesh, &mut seen);
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        let mut gateways = m.gateways.values_mut();
        gateways.next().unwrap().endpoints = vec!["10.1.9.9:51820".parse().unwrap()];
        gateways.next().unwrap().addresses = ["192.0.2.7".parse().unwrap()].into();
    });
    let (_, planned) = plan_mesh(&mesh, &seen);
    assert_eq!(planned.targets["nb"].peers.len(), 0);
    let skipped = planned.clusters["mgmt"]
        .skipped
        .iter()
        .map(|skipped| skipped.reason)
        .collect::<Vec<_>>();
    assert_eq!(skipped, [Reason::EndpointForbidden, Reason::WGIPOutOfRange]);
    let egress = &planned.egress[0];
    assert!(
        !egress.ready && egress.message.contains("can be reached from this cluster"),
        "{}",
        egress.message
    );
    // The address of a node is a usable endpoint even inside the member's networks.
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.nodes.get_mut("a").unwrap().internal_ips = vec!["10.1.9.9".parse().unwrap()];
    });
    let (_, planned) = plan_mesh(&mesh, &seen);
    assert_eq!(planned.targets["nb"].peers.len(), 1);
}

#[test]
fn gateway_network_is_not_routed_to_other_members() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    let range: IpNet = "100.127.255.0/28".parse().unwrap();
    mesh.clusters[0].allowed.push(range);
    edit(&mut seen, &ClusterIdentity::Local, |m| m.gateways.clear());
    // Whether `tenant` has the range in a Peer, and whether a policy in `mgmt` has it in `allow` or `anchored`.
    let routed_and_open = |plan: &MeshPlan| {
        let peers = plan.targets["tenant"].peers.values();
        let mut nets = peers.flat_map(|peer| &peer.spec.allowed_ips);
        let policies = plan.targets["mgmt"].policies.values();
        let mut open = policies.flat_map(|policy| policy.spec.allow.iter().chain(&policy.spec.anchored));
        (nets.any(|net| *net == range), open.any(|net| *net == range))
    };
    // Without gateways, the range is an anchored network like any other, and the status lists it.
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert_eq!(routed_and_open(&plan), (true, true));
    mesh.clusters[0].previous_anchors = plan.clusters["mgmt"].anchored.clone();
    for (number, address) in ["100.127.255.1", "100.127.255.2"].into_iter().enumerate() {
        let (name, mut gateway) = gateway(u8::try_from(number).unwrap(), true);
        gateway.addresses = [address.parse().unwrap()].into();
        edit(&mut seen, &ClusterIdentity::Local, |m| {
            drop(m.gateways.insert(name, gateway))
        });
    }
    write_plan(&mesh, &mut seen);
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert_eq!(routed_and_open(&plan), (false, false));
    assert!(plan.clusters["mgmt"].accepted.contains(&range) && !plan.clusters["mgmt"].anchored.contains_key(&range));
    assert_eq!(peer_sources(&plan, "nb"), ["mgmt", "mgmt"]);
    // A gateway that publishes an address of the Service network does not remove that network from other members.
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        let gateway = m.gateways.values_mut().next().unwrap();
        gateway.addresses = ["10.96.0.10".parse().unwrap()].into();
    });
    let (_, after) = plan_mesh(&mesh, &seen);
    assert_eq!(after.targets["tenant"].peers, plan.targets["tenant"].peers);
}

#[test]
fn gateway_port_of_a_grant_is_stable() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    write_plan(&mesh, &mut seen);
    let first = postgres_gateway_port(&access(&seen));
    // Another grant is added before the first one.
    mesh.clusters[2]
        .egress
        .insert(0, grant(postgres(), &[9187], "metrics-mirror"));
    write_plan(&mesh, &mut seen);
    assert_eq!(
        (postgres_gateway_port(&access(&seen)), access(&seen).grants.len()),
        (first, 2)
    );
    // The SandboxAccess was deleted, or the mesh moved to another hub.
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.accesses = Some(BTreeMap::new())
    });
    write_plan(&mesh, &mut seen);
    assert_eq!(postgres_gateway_port(&access(&seen)), first);
    // The other grant is removed again.
    mesh.clusters[2].egress.remove(0);
    write_plan(&mesh, &mut seen);
    assert_eq!(
        access(&seen).grants.keys().map(|(_, port)| *port).collect::<Vec<_>>(),
        [first]
    );
}

#[test]
fn quarantine_removes_grants_and_keeps_nodes() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    write_plan(&mesh, &mut seen);
    let before = access(&seen);
    mesh.clusters[2].quarantine = true;
    write_plan(&mesh, &mut seen);
    let quarantined = access(&seen);
    assert_eq!((quarantined.grants.len(), &quarantined.nodes), (0, &before.nodes));
    mesh.clusters[2].quarantine = false;
    write_plan(&mesh, &mut seen);
    assert_eq!(access(&seen), before);
}

#[test]
fn unobserved_sandbox_keeps_nodes_in_sandbox_access() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    write_plan(&mesh, &mut seen);
    let before = access(&seen);
    let member = seen.members[&secret("nb")].last().unwrap().clone();
    seen.members
        .insert(secret("nb"), Observation::Unreachable("gone".into()));
    write_plan(&mesh, &mut seen);
    assert_eq!(access(&seen), before);
    // Grants follow the ClusterMesh even if the sandbox is not observed.
    mesh.clusters[2].egress[0].ports[0].port = PortRef::Number(9187);
    write_plan(&mesh, &mut seen);
    assert_eq!(access(&seen).nodes, before.nodes);
    assert_eq!(
        access(&seen).grants.values().collect::<Vec<_>>(),
        [&postgres_grant("metrics")]
    );
    let mut empty = member;
    empty.nodes = Rows::default();
    seen.members.insert(secret("nb"), Observation::Fresh(empty));
    write_plan(&mesh, &mut seen);
    assert_eq!(access(&seen).nodes.len(), 0);
}

#[test]
fn selectorless_service_and_sctp_port_are_not_granted() {
    let (mesh, mut seen) = mesh_with_sandbox();
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.services.get_mut(&postgres()).unwrap().selectorless = true;
    });
    write_plan(&mesh, &mut seen);
    assert_eq!(access(&seen).grants, BTreeMap::new());
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        let service = m.services.get_mut(&postgres()).unwrap();
        service.selectorless = false;
        service.ports[0].protocol = Protocol::Sctp;
    });
    let (_, planned) = plan_mesh(&mesh, &seen);
    assert!(!planned.egress[0].ready);
    assert_eq!(planned.targets["mgmt"].accesses["m--nb"].spec.grants, BTreeMap::new());
}

#[test]
fn two_meshes_of_one_sandbox_share_gateway_ports() {
    let (mesh, mut seen) = mesh_with_sandbox();
    let mut younger = mesh.clone();
    younger.id.name = "n".into();
    younger.created += 1;
    younger.clusters[2].egress = vec![
        grant(postgres(), &[5432], "postgres-mirror"),
        grant(postgres(), &[9187], "metrics-mirror"),
    ];
    let meshes = [mesh, younger];
    let plan_both = |seen: &Observations| plan(&meshes, seen, &Settings::default(), &TestNaming);
    for _ in 0..3 {
        let plan = plan_both(&seen);
        edit(&mut seen, &ClusterIdentity::Local, |m| {
            let steps = diff(&plan, &ClusterIdentity::Local, m);
            apply(m, &steps);
        });
    }
    let member = seen.members[&ClusterIdentity::Local].last().unwrap();
    let all: Vec<_> = member
        .accesses
        .iter()
        .flatten()
        .map(|(_, access)| access.spec.clone().unwrap())
        .collect();
    assert_eq!((all.len(), &all[0].id), (2, &all[1].id));
    assert_eq!(postgres_gateway_port(&all[0]), postgres_gateway_port(&all[1]));
    let ports: BTreeSet<_> = all.iter().flat_map(|access| access.grants.keys()).collect();
    assert_eq!(ports.len(), 2);
}

// threat: profile-tightened
#[test]
fn old_sandbox_peers_are_denied_and_then_deleted() {
    for is_observed in [true, false] {
        let (mesh, mut seen) = mesh_with_sandbox();
        // A Peer from the time when `nb` was cluster-meshed.
        let old = ObservedPeer {
            owner: Owner {
                mesh: Some("m".into()),
                mesh_namespace: Some("meshes".into()),
                hub: Some("hub".into()),
                source_cluster: Some("nb".into()),
            },
            spec: Ok(PeerSpec {
                public_key: key(49),
                allowed_ips: net_set(&["100.66.3.1/32"]),
                endpoint: None,
                candidates: vec![],
                persistent_keepalive: 0,
                role: PeerRole::Node,
            }),
        };
        edit(&mut seen, &ClusterIdentity::Local, |m| {
            m.peers.as_mut().unwrap().insert("m--nb--s".into(), old);
        });
        if !is_observed {
            seen.members
                .insert(secret("nb"), Observation::Unreachable("refused".into()));
        }
        // While the Peer exists, a closed policy denies its traffic.
        let (_, planned) = plan_mesh(&mesh, &seen);
        assert_eq!(planned.targets["mgmt"].policies["m--nb"].spec, closed_policy());
        // Several passes, because the policy is deleted only after the Peer.
        for _ in 0..3 {
            write_plan(&mesh, &mut seen);
        }
        let member = seen.members[&ClusterIdentity::Local].last().unwrap();
        assert!(!member.peers.as_ref().unwrap().contains_key("m--nb--s"));
        assert!(!member.policies.as_ref().unwrap().contains_key("m--nb"));
        assert_eq!(access(&seen).grants.len(), 1);
    }
}
