//! Tests the objects that are planned for a sandbox, in the member that grants it Services and in the sandbox. A sandbox reaches only the
//! Services granted to it.

use super::*;
use crate::{
    enforcement::Bypass,
    observe::{AccessSpec, Gateway, GrantedPort},
};

mod changes;
mod gateways;
mod grants;
mod masqueraded;
mod pending;

fn object(namespace: &str, name: &str) -> ObjectName {
    ObjectName {
        namespace: namespace.into(),
        name: name.into(),
    }
}

pub(super) fn postgres() -> ObjectName {
    object("team-x", "postgres")
}

fn port(name: &str, port: u16) -> ServicePort {
    ServicePort {
        name: name.into(),
        port,
        protocol: Protocol::Tcp,
    }
}

/// A grant of a Service of `mgmt`. `mirror` is the name of the mirrored Service.
pub(super) fn grant(service: ObjectName, ports: &[u16], mirror: &str) -> Grant {
    let ports = ports.iter().map(|port| GrantPort {
        port: PortRef::Number(*port),
        protocol: Protocol::Tcp,
    });
    Grant {
        cluster: "mgmt".into(),
        service,
        ports: ports.collect(),
        local: object("default", mirror),
    }
}

fn backend(address: &str, node: &str) -> SliceEndpoint {
    SliceEndpoint {
        address: address.parse().unwrap(),
        node: Some(node.to_owned()).filter(|node| !node.is_empty()),
        ready: true,
        serving: true,
        terminating: false,
    }
}

fn slice(service: &str, endpoints: Vec<SliceEndpoint>) -> Slice {
    Slice {
        managed: None,
        service: service.into(),
        v6: false,
        ports: vec![port("pg", 15432)],
        endpoints,
    }
}

fn gateway(number: u8, ready: bool) -> (ObjectName, Gateway) {
    let gateway = Gateway {
        public_key: PublicKey::new([200 + number; 32]),
        addresses: [format!("100.66.1.{}", 240 + number).parse().unwrap()].into(),
        endpoints: [
            "10.1.9.9:51820".parse().unwrap(),
            format!("192.0.2.{number}:51821").parse().unwrap(),
        ]
        .into(),
        serves: BTreeSet::new(),
        ready,
        exists: true,
        applied: BTreeMap::new(),
        refused: BTreeMap::new(),
    };
    (object("gateways", &format!("g-{number}")), gateway)
}

/// `mgmt` and `tenant` are cluster-meshed. The sandbox `nb` may reach port 5432 of the Service `team-x/postgres`, whose pod runs on
/// node `b`, through two gateways of `mgmt`.
pub(super) fn mesh_with_sandbox() -> (Mesh, Observations) {
    let mut mesh = two_clusters();
    let mut sandbox = entry("nb", secret("nb"), &["100.66.3.0/24"]);
    sandbox.profile = Profile::Sandbox;
    sandbox.egress = vec![grant(postgres(), &[5432], "postgres")];
    mesh.clusters.push(sandbox);
    let mut seen = seen();
    seen.members
        .insert(secret("nb"), Observation::Fresh(member(&[("s", node(3, 1))])));
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        let service = Service {
            ports: vec![port("pg", 5432), port("metrics", 9187)],
            ..Service::default()
        };
        m.services.insert(postgres(), service);
        m.slices.insert(
            object("team-x", "postgres-1"),
            slice("postgres", vec![backend("10.1.2.9", "b")]),
        );
        m.api_endpoints = ["172.30.1.9:6443".parse().unwrap()].into();
        m.accesses = Some(BTreeMap::new());
        m.gateways = [gateway(0, true), gateway(1, true)].into();
    });
    edit(&mut seen, &secret("nb"), |m| {
        m.api_endpoints = ["172.30.3.9:6443".parse().unwrap()].into();
    });
    (mesh, seen)
}

/// The closed policy for `nb` in `mgmt`, which is planned until the old Peers of `nb` in `mgmt` are deleted.
fn closed_policy() -> PolicySpec {
    PolicySpec {
        sources: net_set(&["100.66.3.0/24"]),
        networks: net_set(&["100.66.3.0/24"]),
        deny: ["172.30.1.9:6443".parse().unwrap()].into(),
        infrastructure_ports: Settings::default().infrastructure_ports,
        closed: true,
        ..PolicySpec::default()
    }
}

/// The planned SandboxAccess of `nb` in `mgmt`.
fn planned_access(mesh: &Mesh, seen: &Observations) -> AccessSpec {
    plan_mesh(mesh, seen).1.targets["mgmt"].accesses["m--nb"].spec.clone()
}

/// The granted Service ports of `nb`.
fn granted(mesh: &Mesh, seen: &Observations) -> Vec<GrantedPort> {
    let mut granted: Vec<_> = planned_access(mesh, seen).grants.into_values().collect();
    granted.sort();
    granted
}

fn postgres_grant(port: &str) -> GrantedPort {
    GrantedPort {
        service: postgres(),
        port: port.into(),
    }
}

fn peer_sources<'a>(plan: &'a MeshPlan, target: &str) -> Vec<&'a str> {
    let peers = plan.targets[target].peers.values();
    peers.map(|peer| &*peer.source).collect()
}

fn message(plan: &MeshPlan) -> &str {
    &plan.egress[0].message
}

// threat: sandbox-to-sandbox
#[test]
fn sandbox_is_not_connected_to_sandbox_or_standard_member() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    let mut other = mesh.clusters[2].clone();
    other.name = "nb2".into();
    other.identity = secret("nb2");
    other.allowed = nets(&["100.66.4.0/24"]);
    // Each sandbox is granted a Service of the other one.
    other.egress[0].cluster = "nb".into();
    mesh.clusters[2].egress[0].cluster = "nb2".into();
    mesh.clusters.push(other);
    seen.members
        .insert(secret("nb2"), Observation::Fresh(member(&[("t", node(4, 1))])));
    let (_, plan) = plan_mesh(&mesh, &seen);
    for target in ["nb", "nb2"] {
        assert_eq!(plan.targets[target], TargetPlan::default());
    }
    assert!(
        message(&plan).contains("isolationProfile sandbox"),
        "{}",
        message(&plan)
    );

    mesh.clusters[3].profile = Profile::Standard;
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert_eq!(plan.targets["nb"], TargetPlan::default());
    assert!(
        message(&plan).contains("isolationProfile standard"),
        "{}",
        message(&plan)
    );
}

#[test]
fn sandbox_node_with_malformed_endpoint_keeps_access() {
    let (mesh, mut seen) = mesh_with_sandbox();
    let before = planned_access(&mesh, &seen);
    edit(&mut seen, &secret("nb"), |m| {
        m.nodes.get_mut("s").unwrap().clustermesh_endpoint = Claim::Invalid("x".into());
    });
    assert_eq!(planned_access(&mesh, &seen), before);
    assert_eq!(plan_mesh(&mesh, &seen).1.clusters["nb"].skipped, []);
}

// threat: target-does-not-enforce
#[test]
fn sandbox_needs_no_policy_enforcement_on_target_nodes() {
    let changes: [fn(&mut Member); 4] = [
        |m| m.nodes.get_mut("a").unwrap().server = Server::Kilo,
        |m| m.nodes.get_mut("a").unwrap().bypassed = Some(Bypass::Cni),
        |m| m.nodes.get_mut("a").unwrap().bypassed = Some(Bypass::Ipvs),
        |m| m.policies = None,
    ];
    for change in changes {
        let (mesh, mut seen) = mesh_with_sandbox();
        edit(&mut seen, &ClusterIdentity::Local, change);
        write_plan(&mesh, &mut seen);
        let (_, plan) = plan_mesh(&mesh, &seen);
        assert_eq!(granted(&mesh, &seen), [postgres_grant("pg")]);
        assert_eq!(peer_sources(&plan, "nb"), ["mgmt", "mgmt"]);
        assert!(plan.egress[0].ready, "{}", message(&plan));
    }
}

#[test]
fn target_without_gateway_is_reported_with_remedy() {
    let (mesh, mut seen) = mesh_with_sandbox();
    edit(&mut seen, &ClusterIdentity::Local, |m| m.gateways.clear());
    write_plan(&mesh, &mut seen);
    let (_, plan) = plan_mesh(&mesh, &seen);
    let reported = plan.facts.iter().find_map(|fact| match fact {
        Fact::NoGateway { cluster, message } if cluster == "mgmt" => Some(message.clone()),
        _ => None,
    });
    assert!(
        reported
            .as_ref()
            .is_some_and(|reported| reported.contains("deploy/gateway.yaml")),
        "{reported:?}"
    );
    assert_eq!(Some(message(&plan)), reported.as_deref());
    assert_eq!(peer_sources(&plan, "nb"), Vec::<&str>::new());
}

// threat: sandbox-copies-key
#[test]
fn duplicate_key_goes_to_meshed_member_before_sandbox() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    // The sandbox has the key of the tenant's Node. The sandbox is the earlier entry, and its Node is the older one.
    mesh.clusters.swap(1, 2);
    edit(&mut seen, &secret("nb"), |m| {
        let node = m.nodes.get_mut("s").unwrap();
        node.public_key = Claim::Valid(key(33));
        node.created = -1;
    });
    let (_, plan) = plan_mesh(&mesh, &seen);
    assert_eq!(peer_sources(&plan, "mgmt"), ["tenant"]);
    assert_eq!(planned_access(&mesh, &seen).nodes.len(), 0);
    assert_eq!(plan.clusters["nb"].skipped[0].reason, Reason::PublicKeyDuplicate);

    // While the Node that owns the key publishes no key, the sandbox gets it. The sandbox loses it when the Node publishes it again.
    let mut later = seen.clone();
    edit(&mut later, &secret("tenant"), |m| {
        m.nodes.values_mut().for_each(|node| node.public_key = Claim::Absent);
    });
    write_plan(&mesh, &mut later);
    assert_eq!(
        planned_access(&mesh, &later).nodes.keys().collect::<Vec<_>>(),
        [&key(33)]
    );
    let tenant = seen.members.remove(&secret("tenant")).unwrap();
    later.members.insert(secret("tenant"), tenant);
    let (_, plan) = plan_mesh(&mesh, &later);
    assert_eq!(peer_sources(&plan, "mgmt"), ["tenant"]);
    assert_eq!(planned_access(&mesh, &later).nodes.len(), 0);
}

#[test]
fn duplicate_key_stays_with_sandbox_that_uses_it() {
    let (mut mesh, mut seen) = mesh_with_sandbox();
    write_plan(&mesh, &mut seen);
    let own = planned_access(&mesh, &seen).nodes;
    let mut copy = mesh.clusters[2].clone();
    copy.name = "copy".into();
    copy.identity = secret("copy");
    copy.allowed = nets(&["100.66.4.0/24"]);
    // The copying sandbox is the first entry.
    mesh.clusters.insert(0, copy);
    let mut node = node(4, 1);
    node.public_key = Claim::Valid(*own.keys().next().unwrap());
    seen.members
        .insert(secret("copy"), Observation::Fresh(member(&[("s", node)])));
    // `nb` keeps its key, even while `nb` is not observed.
    for unseen in [false, true] {
        if unseen {
            seen.members
                .insert(secret("nb"), Observation::Unreachable("refused".into()));
        }
        let (_, plan) = plan_mesh(&mesh, &seen);
        assert_eq!(planned_access(&mesh, &seen).nodes, own, "{unseen}");
        assert_eq!(plan.targets["mgmt"].accesses["m--copy"].spec.nodes.len(), 0, "{unseen}");
    }
}
