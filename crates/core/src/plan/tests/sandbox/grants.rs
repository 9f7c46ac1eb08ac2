//! Tests which Services can be granted, why other Services are refused, and which endpoints are mirrored.

use std::ops::Range;

use super::*;

// threat: grant-across-namespaces
#[test]
fn confined_mesh_needs_permission_in_other_namespaces() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    // The granted Service is in the namespace team-x of the hub.
    mesh.clusters[0].confined_to = Some("team-x".into());
    assert_eq!(granted(&mesh, &seen), [postgres_grant("pg")]);
    mesh.clusters[0].confined_to = Some("lab".into());
    assert_eq!(granted(&mesh, &seen), []);
    let (_, plan) = plan_mesh(&mesh, &seen);
    let refused = "Service team-x/postgres of cluster \"mgmt\" may not be granted by a mesh in namespace lab: the owner of the \
                   Service can allow it with the annotation kilo-clustermesh.io/allowed-from: lab on the Service";
    assert_eq!(message(&plan), refused);
    assert!(plan.targets["nb"].services.is_empty() && plan.targets["nb"].peers.is_empty());
    // The message does not reveal whether the Service exists.
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        drop(m.services.remove(&postgres()))
    });
    assert_eq!(message(&plan_mesh(&mesh, &seen).1), refused);
    let (_, mut seen) = mesh_with_sandbox();
    for (namespace, open) in [("lab", true), ("other", false)] {
        edit(&mut seen, &ClusterIdentity::Local, |m| {
            m.services.get_mut(&postgres()).unwrap().allowed_from = [namespace.to_owned(), "more".to_owned()].into();
        });
        assert_eq!(!granted(&mesh, &seen).is_empty(), open, "{namespace}");
    }
}

// threat: sandbox-to-sandbox
#[test]
fn service_of_a_sandbox_is_not_mirrored() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
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
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert_eq!(plan.targets["mgmt"].services, BTreeMap::new());
    assert_eq!(
        message(&plan),
        "cluster \"nb\" has isolationProfile sandbox: its pods have no address in the mesh, so its Services cannot be granted"
    );
}

// threat: granted-slice-redirected
#[test]
fn unresolved_grant_is_reported_and_affects_no_other_grant() {
    type Change = fn(&mut Member);
    let cases: [(&str, Change); 5] = [
        ("does not exist", |m| drop(m.services.remove(&postgres()))),
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
        let (mut mesh, mut seen) = mesh_with_sandbox();
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
        let (_, plan) = plan_mesh(&mesh, &seen);
        assert!(message(&plan).contains(why), "{}", message(&plan));
        let redis = GrantedPort {
            service: object("team-x", "redis"),
            port: String::new(),
        };
        assert_eq!(granted(&mesh, &seen), [redis], "{why}");
    }
}

#[test]
fn endpoints_that_importer_cannot_reach_are_left_out() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    mesh.clusters[1].egress = mesh.clusters[2].egress.clone();
    let set_endpoints = |seen: &mut Observations, addresses: &[&str]| {
        let endpoints = addresses.iter().map(|address| backend(address, "b")).collect();
        edit(seen, &ClusterIdentity::Local, |m| {
            m.slices
                .insert(object("team-x", "postgres-1"), slice("postgres", endpoints));
        });
    };
    let report = |seen: &Observations| {
        let (_, plan) = plan_mesh(&mesh, seen);
        let mut reports = plan.egress.into_iter().filter(|report| report.cluster == "tenant");
        let report = reports.next().unwrap();
        (report.endpoints, report.message)
    };
    set_endpoints(&mut seen, &["10.1.2.9", "192.0.2.9"]);
    let (found, message) = report(&seen);
    assert_eq!(found, 1);
    assert!(message.contains("(192.0.2.9)"), "{message}");
    // The tenant has only IPv4. An IPv6 endpoint usually belongs to a pod that also has an IPv4 endpoint, so leaving it out needs no
    // message.
    set_endpoints(&mut seen, &["10.1.2.9", "fd00:1:0:2::9"]);
    assert_eq!(report(&seen), (1, String::new()));
    set_endpoints(&mut seen, &["fd00:1:0:2::9"]);
    let none = "Service team-x/postgres of cluster \"mgmt\" has no endpoint of an IP family that cluster \"tenant\" has in its \
                allowedNetworks";
    assert_eq!(report(&seen), (0, none.to_owned()));
}

#[test]
fn grant_of_service_in_shared_pod_network_is_ready() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    mesh.clusters[0].pod_network = PodNetwork::Shared;
    write_plan(&mesh, &mut seen);
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert!(plan.egress[0].ready, "{}", message(&plan));
}

#[test]
fn grant_without_free_gateway_port_is_reported() {
    let (mesh, mut seen) = mesh_with_sandbox();
    write_plan(&mesh, &mut seen);
    let existing = planned_access(&mesh, &seen);
    let mut set_other_grants = |ports: Range<u16>| {
        let other = GrantedPort {
            service: object("team-y", "redis"),
            port: String::new(),
        };
        edit(&mut seen, &ClusterIdentity::Local, |m| {
            let access = m.accesses.as_mut().unwrap().get_mut("m--nb").unwrap();
            access.spec = Ok(AccessSpec {
                grants: ports.map(|port| ((Protocol::Tcp, port), other.clone())).collect(),
                ..existing.clone()
            });
        });
        let (_, plan) = plan_mesh(&mesh, &seen);
        (granted(&mesh, &seen), message(&plan).to_owned())
    };
    let no_port = "port 5432 of Service team-x/postgres has no port at the gateways of cluster \"mgmt\": other grants of this \
                   cluster use all 10000 for TCP; remove some of them";
    assert_eq!(set_other_grants(20_000..30_000), (vec![], no_port.to_owned()));
    let not_yet = "the SandboxAccess in cluster \"mgmt\" does not contain this grant yet";
    assert_eq!(
        set_other_grants(20_000..29_999),
        (vec![postgres_grant("pg")], not_yet.to_owned())
    );
}

#[test]
fn two_grants_of_one_service_grant_each_port_once() {
    let (mut mesh, seen) = mesh_with_sandbox();
    mesh.clusters[2]
        .egress
        .push(grant(postgres(), &[9187], "metrics-mirror"));
    let both = [postgres_grant("metrics"), postgres_grant("pg")];
    assert_eq!(granted(&mesh, &seen), both);
    mesh.clusters[2].egress.push(grant(postgres(), &[], "whole-mirror"));
    assert_eq!(granted(&mesh, &seen), both);
}
