//! A sandbox gets the Services named for it and nothing else: what stands in the target, and what in the sandbox.

use super::*;
use crate::enforcement::Bypass;

mod announced;
mod changes;
mod gateways;
mod grants;
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

pub(super) fn grant(service: ObjectName, ports: &[u16], local: &str) -> Grant {
    let ports = ports.iter().map(|port| GrantPort {
        port: PortRef::Number(*port),
        protocol: Protocol::Tcp,
    });
    Grant {
        cluster: "mgmt".into(),
        service,
        ports: ports.collect(),
        local: object("default", local),
    }
}

fn granted(ports: &[&str]) -> BTreeSet<ServiceGrant> {
    [ServiceGrant {
        service: postgres(),
        ports: ports.iter().map(|name| (Protocol::Tcp, (*name).to_owned())).collect(),
        within: of_mgmt(),
    }]
    .into()
}

/// What `mgmt` has in the mesh.
fn of_mgmt() -> BTreeSet<IpNet> {
    net_set(&["10.1.0.0/16", "100.66.1.0/24", "10.96.0.0/16"])
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

/// `mgmt` and `tenant` are cluster-meshed; the sandbox `nb` may reach port 5432 of `team-x/postgres`, which runs on `b`.
pub(super) fn three() -> (Mesh, Observations) {
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
    });
    edit(&mut seen, &secret("nb"), |m| {
        m.api_endpoints = ["172.30.3.9:6443".parse().unwrap()].into();
    });
    (mesh, seen)
}

fn closed(grants: BTreeSet<ServiceGrant>) -> PolicySpec {
    PolicySpec {
        sources: net_set(&["100.66.3.0/24"]),
        networks: net_set(&["100.66.3.0/24"]),
        deny: ["172.30.1.9:6443".parse().unwrap()].into(),
        infrastructure_ports: Settings::default().infrastructure_ports,
        sandbox: true,
        grants,
        ..PolicySpec::default()
    }
}

fn requires(policy: &PolicySpec) -> Option<String> {
    Some(format!("m--nb@{}", Plain.policy_revision("nb", policy)))
}

fn sources<'a>(plan: &'a MeshPlan, target: &str) -> Vec<&'a str> {
    let peers = plan.targets[target].peers.values();
    peers.map(|peer| &*peer.source).collect()
}

fn message(plan: &MeshPlan) -> &str {
    &plan.egress[0].message
}

#[test]
fn a_target_holds_a_sandboxs_wireguard_addresses_and_its_grants_and_dials_nobody() {
    let (mesh, seen) = three();
    let (_, plan) = run(&mesh, &seen);
    let target = &plan.targets["mgmt"];
    let policy = closed(granted(&["pg"]));
    assert_eq!(target.policies["m--nb"].spec, policy);
    assert_eq!(
        target.peers["m--nb--s"].spec,
        PeerSpec {
            public_key: key(49),
            allowed_ips: net_set(&["100.66.3.1/32"]),
            endpoint: None,
            candidates: vec![],
            persistent_keepalive: 0,
            requires_policy: requires(&policy),
        }
    );
    // A member toward which nothing was granted hears nothing of it.
    assert_eq!(sources(&plan, "tenant"), ["mgmt", "mgmt"]);
    assert_eq!(plan.targets["tenant"].policies.keys().collect::<Vec<_>>(), ["m--mgmt"]);
    assert_eq!(plan.facts, BTreeSet::new());
}

#[test]
fn a_sandbox_holds_the_granted_endpoints_and_the_nodes_that_run_them() {
    let (mesh, seen) = three();
    let (_, plan) = run(&mesh, &seen);
    let target = &plan.targets["nb"];
    let networks = net_set(&["10.1.2.9/32", "100.66.1.2/32"]);
    assert_eq!(
        target
            .peers
            .iter()
            .map(|(name, peer)| (&**name, &peer.spec))
            .collect::<Vec<_>>(),
        [(
            "m--mgmt--b",
            &PeerSpec {
                public_key: key(18),
                allowed_ips: networks.clone(),
                endpoint: Some(Endpoint::Ip("172.30.1.2:51820".parse().unwrap())),
                candidates: vec![],
                persistent_keepalive: 0,
                requires_policy: None,
            }
        )]
    );
    assert_eq!(
        target.policies["m--mgmt"].spec,
        PolicySpec {
            sources: networks.clone(),
            networks,
            deny: ["172.30.3.9:6443".parse().unwrap()].into(),
            infrastructure_ports: Settings::default().infrastructure_ports,
            ..PolicySpec::default()
        }
    );
    let mirrored = &target.services[&object("default", "postgres")];
    let slices: Vec<_> = mirrored.slices.values().flat_map(|slice| &slice.endpoints).collect();
    assert_eq!(slices, [&backend("10.1.2.9", "")]);
}

#[test]
fn a_backend_in_the_host_network_is_its_nodes_own_address() {
    let (mut mesh, mut seen) = three();
    mesh.clusters[0].allowed.extend(nets(&["172.30.1.0/24"]));
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        let slice = slice("postgres", vec![backend("172.30.1.1", "a")]);
        m.slices.insert(object("team-x", "postgres-1"), slice);
    });
    let (_, plan) = run(&mesh, &seen);
    assert_eq!(sources(&plan, "nb"), ["mgmt"]);
    assert_eq!(
        allowed(&plan, "nb", "m--mgmt--a"),
        &net_set(&["100.66.1.1/32", "172.30.1.1/32"])
    );
}

#[test]
fn two_sandboxes_and_what_is_standard_never_meet() {
    let (mut mesh, mut seen) = three();
    let mut other = mesh.clusters[2].clone();
    other.name = "nb2".into();
    other.identity = secret("nb2");
    other.allowed = nets(&["100.66.4.0/24"]);
    // Each names a Service of the other one.
    other.egress[0].cluster = "nb".into();
    mesh.clusters[2].egress[0].cluster = "nb2".into();
    mesh.clusters.push(other);
    seen.members
        .insert(secret("nb2"), Observation::Fresh(member(&[("t", node(4, 1))])));
    let (_, plan) = run(&mesh, &seen);
    for target in ["nb", "nb2"] {
        assert_eq!(plan.targets[target], TargetPlan::default());
    }
    assert!(
        message(&plan).contains("isolationProfile sandbox"),
        "{}",
        message(&plan)
    );

    mesh.clusters[3].profile = Profile::Standard;
    let (_, plan) = run(&mesh, &seen);
    assert_eq!(plan.targets["nb"], TargetPlan::default());
    assert!(
        message(&plan).contains("isolationProfile standard"),
        "{}",
        message(&plan)
    );
}

#[test]
fn a_target_with_a_node_that_enforces_nothing_takes_no_sandbox_and_says_which() {
    type Change = fn(&mut Node);
    let cases: [(&str, Change); 4] = [
        ("Node a of cluster \"mgmt\" without wg-agent", |n| {
            n.server = Server::Kilo
        }),
        ("Node a of cluster \"mgmt\" without wg-agent", |n| {
            n.server = Server::AgentPolicy
        }),
        (
            "on Node a of cluster \"mgmt\" the CNI leads packets past netfilter",
            |n| n.bypassed = Some(Bypass::Netfilter),
        ),
        (
            "on Node a of cluster \"mgmt\" kube-proxy in mode ipvs translates packets after the policies looked at them, so a \
             sandbox would not be held to its grants: set mode: nftables",
            |n| n.bypassed = Some(Bypass::Ipvs),
        ),
    ];
    for (why, change) in cases {
        let (mesh, mut seen) = three();
        settle(&mesh, &mut seen);
        edit(&mut seen, &ClusterIdentity::Local, |m| {
            change(m.nodes.get_mut("a").unwrap())
        });
        let (plan, of_mesh) = run(&mesh, &seen);
        assert_eq!(sources(&of_mesh, "mgmt"), ["tenant"]);
        assert_eq!(of_mesh.targets["nb"], TargetPlan::default());
        let fact = of_mesh.facts.iter().find_map(|fact| match fact {
            Fact::TargetCannotEnforce { cluster, message } if cluster == "mgmt" => Some(message.clone()),
            _ => None,
        });
        assert!(fact.as_ref().is_some_and(|fact| fact.contains(why)), "{fact:?}");
        assert!(message(&of_mesh).contains(why), "{}", message(&of_mesh));
        let member = seen.members[&ClusterIdentity::Local].fresh().unwrap();
        let steps = names(&diff(&plan, &ClusterIdentity::Local, member));
        assert!(steps.contains(&(Action::Delete, "m--nb--s".to_owned())), "{steps:?}");
    }
    // One that has just joined and published nothing has no tunnel yet.
    let (mesh, mut seen) = three();
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        drop(m.nodes.insert("new".into(), Node::default()))
    });
    let (_, plan) = run(&mesh, &seen);
    assert_eq!(plan.facts, BTreeSet::new());
    // Without the CRD there is nothing to hold anybody to.
    edit(&mut seen, &ClusterIdentity::Local, |m| m.policies = None);
    let (_, plan) = run(&mesh, &seen);
    assert_eq!(sources(&plan, "mgmt"), ["tenant"]);
    assert!(
        message(&plan).contains("peerpolicies.kilo.squat.ai"),
        "{}",
        message(&plan)
    );
}

#[test]
fn a_key_that_two_claim_is_a_meshed_members_before_a_sandboxs() {
    let (mut mesh, mut seen) = three();
    // The sandbox stands first in the mesh, and its Node is the older one.
    mesh.clusters.swap(1, 2);
    edit(&mut seen, &secret("nb"), |m| {
        let node = m.nodes.get_mut("s").unwrap();
        node.public_key = Claim::Is(key(33));
        node.created = -1;
    });
    let forged = ObservedPeer {
        owner: Owner {
            mesh: Some("m".into()),
            mesh_namespace: Some("meshes".into()),
            hub: Some("hub".into()),
            source_cluster: Some("nb".into()),
        },
        spec: Ok(PeerSpec {
            public_key: key(33),
            allowed_ips: net_set(&["100.66.3.1/32"]),
            endpoint: None,
            candidates: vec![],
            persistent_keepalive: 0,
            requires_policy: None,
        }),
    };
    // Whoever owns its API server makes a Peer stand there.
    edit(&mut seen, &secret("nb"), |m| {
        m.peers.as_mut().unwrap().insert("m--nb--s".into(), forged);
    });
    let (_, plan) = run(&mesh, &seen);
    assert_eq!(sources(&plan, "mgmt"), ["tenant"]);
    assert_eq!(plan.clusters["nb"].skipped[0].reason, Reason::PublicKeyDuplicate);

    // Nor is it the sandbox's for good where its owner's Node said nothing for a moment.
    let mut silent = seen.clone();
    edit(&mut silent, &secret("tenant"), |m| {
        m.nodes.values_mut().for_each(|node| node.public_key = Claim::Absent);
    });
    let (_, taken) = run(&mesh, &silent);
    assert_eq!(sources(&taken, "mgmt"), ["nb"]);
    let theirs = &taken.targets["mgmt"].peers["m--nb--s"];
    let standing = ObservedPeer {
        owner: Owner {
            mesh: Some("m".into()),
            mesh_namespace: Some("meshes".into()),
            hub: Some("hub".into()),
            source_cluster: Some("nb".into()),
        },
        spec: Ok(theirs.spec.clone()),
    };
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.peers.as_mut().unwrap().insert("m--nb--s".into(), standing);
    });
    let (_, plan) = run(&mesh, &seen);
    assert_eq!(sources(&plan, "mgmt"), ["tenant"]);
}
