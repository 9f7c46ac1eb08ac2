//! What the plan must be, by example; the rules over hostile input are in `tests/properties.rs`.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::*;
use crate::{
    diff::{Action, Item, Step, diff},
    key::PublicKey,
    mesh::{Addressing, Cluster, Export, Grant, GrantPort, PodNetwork, PortRef, Profile},
    observe::{
        Claim, Endpoint, Granularity, Member, Node, Observation, ObservedPeer, ObservedPolicy, Owner, PeerSpec, Pod,
        Server, Service, ServicePort, Slice, SliceEndpoint,
    },
};

struct Plain;

impl Naming for Plain {
    fn peer(&self, mesh: &MeshId, cluster: &str, node: &str, taken: bool) -> String {
        let tail = if taken {
            format!("-{}", mesh.namespace)
        } else {
            String::new()
        };
        format!("{}--{cluster}--{node}{tail}", mesh.name)
    }

    fn policy(&self, mesh: &MeshId, cluster: &str, taken: bool) -> String {
        let tail = if taken {
            format!("-{}", mesh.namespace)
        } else {
            String::new()
        };
        format!("{}--{cluster}{tail}", mesh.name)
    }

    fn slice(&self, _mesh: &MeshId, service: &ObjectName, v6: bool, index: usize) -> String {
        format!("{}-{}-{index}", service.name, if v6 { 6 } else { 4 })
    }
}

fn nets(list: &[&str]) -> Vec<IpNet> {
    list.iter().map(|net| net.parse().unwrap()).collect()
}

fn net_set(list: &[&str]) -> BTreeSet<IpNet> {
    nets(list).into_iter().collect()
}

fn secret(name: &str) -> ClusterIdentity {
    ClusterIdentity::Secret {
        namespace: "meshes".into(),
        name: name.into(),
        key: "value".into(),
        context: None,
    }
}

fn entry(name: &str, identity: ClusterIdentity, allowed: &[&str]) -> Cluster {
    Cluster {
        name: name.into(),
        identity,
        profile: Profile::ClusterMeshed,
        addressing: Addressing::Routed,
        allowed: nets(allowed),
        anchored: None,
        anchors: 1,
        pod_network: PodNetwork::PerNode,
        exports: vec![],
        wireguard_port: 51820,
        persistent_keepalive: 0,
        endpoint_networks: vec![],
        egress: vec![],
        quarantine: false,
        max_nodes: 5000,
    }
}

fn id() -> MeshId {
    MeshId {
        namespace: "meshes".into(),
        name: "m".into(),
    }
}

fn two_clusters() -> Mesh {
    Mesh {
        id: id(),
        created: 1,
        paused: false,
        deleting: false,
        adopt_hub: None,
        clusters: vec![
            entry(
                "mgmt",
                ClusterIdentity::Local,
                &["10.1.0.0/16", "100.66.1.0/24", "10.96.0.0/16"],
            ),
            entry("tenant", secret("tenant"), &["10.2.0.0/16", "100.66.2.0/24"]),
        ],
        accepted: BTreeMap::new(),
    }
}

fn key(n: u8) -> PublicKey {
    PublicKey::new([n; 32])
}

fn node(cluster: u8, n: u8) -> Node {
    Node {
        created: i64::from(n),
        ready: true,
        pod_cidrs: vec![Claim::Is(format!("10.{cluster}.{n}.0/24").parse().unwrap())],
        wireguard_ip: Claim::Is(format!("100.66.{cluster}.{n}/24").parse().unwrap()),
        public_key: Claim::Is(key(cluster * 16 + n)),
        kilo_endpoint: Claim::Is(Endpoint::Ip(format!("172.30.{cluster}.{n}:51820").parse().unwrap())),
        internal_ips: vec![format!("172.30.{cluster}.{n}").parse().unwrap()],
        server: Server::Agent,
        ..Node::default()
    }
}

fn member(nodes: &[(&str, Node)]) -> Member {
    Member {
        nodes: nodes
            .iter()
            .map(|(name, node)| ((*name).to_owned(), node.clone()))
            .collect(),
        peers: Some(BTreeMap::new()),
        policies: Some(BTreeMap::new()),
        ..Member::default()
    }
}

fn seen() -> Observations {
    Observations {
        members: BTreeMap::from([
            (
                ClusterIdentity::Local,
                Observation::Fresh(member(&[("a", node(1, 1)), ("b", node(1, 2))])),
            ),
            (secret("tenant"), Observation::Fresh(member(&[("x", node(2, 1))]))),
        ]),
        hub: "hub".into(),
        resolved: BTreeMap::new(),
    }
}

fn edit(seen: &mut Observations, identity: &ClusterIdentity, change: impl FnOnce(&mut Member)) {
    if let Some(Observation::Fresh(member)) = seen.members.get_mut(identity) {
        change(member);
    }
}

fn run(mesh: &Mesh, seen: &Observations) -> (Plan, MeshPlan) {
    let plan = plan(std::slice::from_ref(mesh), seen, &Settings::default(), &Plain);
    let of_mesh = plan.meshes[&mesh.id].clone();
    (plan, of_mesh)
}

fn allowed<'a>(plan: &'a MeshPlan, target: &str, peer: &str) -> &'a BTreeSet<IpNet> {
    &plan.targets[target].peers[peer].spec.allowed_ips
}

/// Writes the steps as an API server would hold them.
fn apply(member: &mut Member, steps: &[Step]) {
    for step in steps {
        let owner = step.owner.clone();
        match step.item.clone() {
            Item::Peer(name, Some(spec)) => {
                let peer = ObservedPeer { owner, spec: Ok(spec) };
                member.peers.as_mut().unwrap().insert(name, peer);
            }
            Item::Peer(name, None) => {
                member.peers.as_mut().unwrap().remove(&name);
            }
            Item::Policy(name, Some(spec)) => {
                let policy = ObservedPolicy { owner, spec: Ok(spec) };
                member.policies.as_mut().unwrap().insert(name, policy);
            }
            Item::Policy(name, None) => {
                member.policies.as_mut().unwrap().remove(&name);
            }
            Item::Service(name, Some(ports)) => {
                member.services.insert(
                    name,
                    Service {
                        managed: Some(owner),
                        selectorless: true,
                        ports,
                        ..Service::default()
                    },
                );
            }
            Item::Service(name, None) => {
                member.services.remove(&name);
            }
            Item::Slice(name, Some((service, slice))) => {
                let slice = Slice {
                    managed: Some(owner),
                    service,
                    v6: slice.v6,
                    ports: slice.ports,
                    endpoints: slice.endpoints,
                };
                member.slices.insert(name, slice);
            }
            Item::Slice(name, None) => {
                member.slices.remove(&name);
            }
        }
    }
}

fn settle(mesh: &Mesh, seen: &mut Observations) {
    let (plan, _) = run(mesh, seen);
    for (identity, observation) in &mut seen.members {
        if let Observation::Fresh(member) = observation {
            let steps = diff(&plan, identity, member);
            apply(member, &steps);
        }
    }
}

fn names(steps: &[Step]) -> Vec<(Action, String)> {
    steps.iter().map(|step| (step.action, step.item.name())).collect()
}

#[test]
fn a_node_appears_with_its_pods_its_wireguard_address_and_its_endpoint() {
    let (_, plan) = run(&two_clusters(), &seen());
    let peer = &plan.targets["mgmt"].peers["m--tenant--x"];
    assert_eq!(
        peer.spec,
        PeerSpec {
            public_key: key(33),
            allowed_ips: net_set(&["10.2.1.0/24", "100.66.2.1/32"]),
            endpoint: Some(Endpoint::Ip("172.30.2.1:51820".parse().unwrap())),
            candidates: vec![],
            persistent_keepalive: 0,
        }
    );
    assert_eq!(plan.clusters["mgmt"].registered, 2);
    assert_eq!(plan.clusters["tenant"].registered, 1);
}

#[test]
fn a_network_no_node_owns_rides_on_one_anchor_and_moves_only_when_that_is_not_eligible() {
    let mesh = two_clusters();
    let mut seen = seen();
    settle(&mesh, &mut seen);
    let service: IpNet = "10.96.0.0/16".parse().unwrap();
    let carriers = |seen: &Observations| -> Vec<String> {
        let peers = seen.members[&secret("tenant")].fresh().unwrap().peers.clone().unwrap();
        peers
            .iter()
            .filter(|(_, p)| p.spec.as_ref().unwrap().allowed_ips.contains(&service))
            .map(|(n, _)| n.clone())
            .collect()
    };
    let first = carriers(&seen);
    assert_eq!(first.len(), 1);

    let mut later = seen.clone();
    edit(&mut later, &ClusterIdentity::Local, |m| {
        m.nodes.insert(
            "0-older".into(),
            Node {
                created: 0,
                ..node(1, 3)
            },
        );
    });
    settle(&mesh, &mut later);
    assert_eq!(carriers(&later), first, "a node that joins does not take the anchor");

    let anchor = first[0].rsplit("--").next().unwrap().to_owned();
    edit(&mut later, &ClusterIdentity::Local, |m| {
        m.nodes.get_mut(&anchor).unwrap().ready = false
    });
    let (plan, _) = run(&mesh, &later);
    let steps = diff(
        &plan,
        &secret("tenant"),
        later.members[&secret("tenant")].fresh().unwrap(),
    );
    assert_eq!(steps.len(), 2);
    assert_eq!(
        steps[1].item.name(),
        first[0],
        "the new carrier gains before the old one loses"
    );
    assert_eq!(
        steps.iter().map(|s| s.fields.clone()).collect::<Vec<_>>(),
        vec![vec!["spec.allowedIPs"]; 2]
    );
}

#[test]
fn a_member_that_is_not_seen_costs_nothing() {
    let mesh = two_clusters();
    let mut seen = seen();
    settle(&mesh, &mut seen);
    for lost in [
        Observation::Unreachable("connection refused".into()),
        Observation::Missing("no Secret".into()),
        Observation::Stale(Member::default(), "watch broken".into()),
    ] {
        let mut later = seen.clone();
        later.members.insert(secret("tenant"), lost);
        let (plan, of_mesh) = run(&mesh, &later);
        assert_eq!(
            diff(
                &plan,
                &ClusterIdentity::Local,
                later.members[&ClusterIdentity::Local].fresh().unwrap()
            ),
            vec![]
        );
        assert!(
            of_mesh
                .facts
                .iter()
                .any(|fact| matches!(fact, Fact::MemberNotFresh { cluster, .. } if cluster == "tenant"))
        );
    }
}

#[test]
fn a_node_whose_annotations_vanish_keeps_its_peer_for_five_minutes() {
    let mesh = two_clusters();
    let mut seen = seen();
    settle(&mesh, &mut seen);
    let mut blank = node(2, 1);
    blank.public_key = Claim::Absent;
    blank.wireguard_ip = Claim::Absent;
    blank.kilo_endpoint = Claim::Absent;
    let write = |seen: &mut Observations, held_for| {
        let blank = Node {
            held_for,
            ..blank.clone()
        };
        edit(seen, &secret("tenant"), |m| {
            m.nodes.insert("x".into(), blank);
        });
    };
    for age in [None, Some(Duration::from_secs(299))] {
        write(&mut seen, age);
        let (plan, of_mesh) = run(&mesh, &seen);
        assert_eq!(
            diff(
                &plan,
                &ClusterIdentity::Local,
                seen.members[&ClusterIdentity::Local].fresh().unwrap()
            ),
            vec![]
        );
        assert_eq!(
            of_mesh.clusters["tenant"].held,
            BTreeMap::from([("x".to_owned(), Reason::NodeNoPublicKey)])
        );
    }
    write(&mut seen, Some(HOLD));
    let (plan, of_mesh) = run(&mesh, &seen);
    let steps = diff(
        &plan,
        &ClusterIdentity::Local,
        seen.members[&ClusterIdentity::Local].fresh().unwrap(),
    );
    assert_eq!(names(&steps), vec![(Action::Delete, "m--tenant--x".to_owned())]);
    assert_eq!(of_mesh.clusters["tenant"].skipped[0].reason, Reason::NodeNoPublicKey);
}

#[test]
fn the_predecessors_peers_are_adopted_with_new_labels_and_an_unchanged_spec() {
    let mesh = two_clusters();
    let mut seen = seen();
    settle(&mesh, &mut seen);
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        for peer in m.peers.as_mut().unwrap().values_mut() {
            peer.owner.hub = None;
            peer.owner.mesh_namespace = None;
        }
    });
    let (plan, _) = run(&mesh, &seen);
    let steps = diff(
        &plan,
        &ClusterIdentity::Local,
        seen.members[&ClusterIdentity::Local].fresh().unwrap(),
    );
    assert_eq!(names(&steps), vec![(Action::Update, "m--tenant--x".to_owned())]);
    assert_eq!(steps[0].fields, vec!["metadata.labels"]);
}

#[test]
fn a_peer_of_someone_else_keeps_its_name_its_key_and_its_addresses() {
    let mesh = two_clusters();
    let mut seen = seen();
    let theirs = |n: u8, net: &str| ObservedPeer {
        owner: Owner::default(),
        spec: Ok(PeerSpec {
            public_key: key(n),
            allowed_ips: net_set(&[net]),
            endpoint: None,
            candidates: vec![],
            persistent_keepalive: 25,
        }),
    };
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.nodes.clear();
        m.peers
            .as_mut()
            .unwrap()
            .insert("m--tenant--x".into(), theirs(99, "10.2.1.0/24"));
    });
    let (plan, _) = run(&mesh, &seen);
    let steps = diff(
        &plan,
        &ClusterIdentity::Local,
        seen.members[&ClusterIdentity::Local].fresh().unwrap(),
    );
    let peers: Vec<_> = steps.iter().filter(|step| step.item.kind() == "Peer").collect();
    assert_eq!(peers.len(), 1);
    assert_eq!(peers[0].item.name(), "m--tenant--x-meshes");
    let Item::Peer(_, Some(spec)) = &peers[0].item else {
        panic!("a Peer")
    };
    assert_eq!(spec.allowed_ips, net_set(&["100.66.2.1/32"]));

    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.peers
            .as_mut()
            .unwrap()
            .insert("laptop".into(), theirs(33, "192.0.2.1/32"));
    });
    let (_, of_mesh) = run(&mesh, &seen);
    assert_eq!(of_mesh.clusters["tenant"].skipped[0].reason, Reason::PublicKeyDuplicate);
}

#[test]
fn a_key_copied_by_another_member_stays_with_the_local_cluster() {
    let mesh = two_clusters();
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.get_mut("x").unwrap().public_key = Claim::Is(key(17));
        m.nodes.get_mut("x").unwrap().created = -1_000;
    });
    let (_, of_mesh) = run(&mesh, &seen);
    assert_eq!(of_mesh.targets["mgmt"].peers, BTreeMap::new());
    assert_eq!(of_mesh.clusters["tenant"].skipped[0].reason, Reason::PublicKeyDuplicate);
    assert_eq!(
        of_mesh.clusters["mgmt"].registered, 1,
        "the tenant's own node has that key: no Peer of it there, all others"
    );
}

#[test]
fn what_lies_outside_allowed_networks_is_refused_with_its_reason() {
    let mesh = two_clusters();
    type Spoil = fn(&mut Node);
    let table: [(Reason, Spoil); 8] = [
        (Reason::NodePodCIDROutOfRange, |n| {
            n.pod_cidrs = vec![Claim::Is("0.0.0.0/0".parse().unwrap())]
        }),
        (Reason::NodeNoPodCIDR, |n| n.pod_cidrs.clear()),
        (Reason::WGIPOutOfRange, |n| {
            n.wireguard_ip = Claim::Is("100.66.1.7/24".parse().unwrap())
        }),
        (Reason::NodeNoWireguardIP, |n| n.wireguard_ip = Claim::Absent),
        (Reason::WGIPInvalid, |n| n.wireguard_ip = Claim::Invalid("x".into())),
        (Reason::PublicKeyInvalid, |n| n.public_key = Claim::Invalid("x".into())),
        (Reason::NodeEndpointInvalid, |n| {
            n.force_endpoint = Claim::Invalid("x".into())
        }),
        (Reason::EndpointForbidden, |n| {
            n.force_endpoint = Claim::Is(Endpoint::Ip("127.0.0.1:51820".parse().unwrap()));
        }),
    ];
    for (reason, spoil) in table {
        let mut seen = seen();
        edit(&mut seen, &secret("tenant"), |m| {
            let mut bad = node(2, 2);
            spoil(&mut bad);
            m.nodes.insert("bad".into(), bad);
        });
        let (_, of_mesh) = run(&mesh, &seen);
        let skipped: Vec<_> = of_mesh.clusters["tenant"]
            .skipped
            .iter()
            .map(|s| (s.node.as_str(), s.reason))
            .collect();
        assert_eq!(skipped, vec![("bad", reason)]);
        assert_eq!(
            of_mesh.targets["mgmt"].peers.keys().collect::<Vec<_>>(),
            vec!["m--tenant--x"]
        );
    }
}

#[test]
fn an_endpoint_inside_the_targets_own_networks_is_none_unless_the_entry_lists_it() {
    let mut mesh = two_clusters();
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |m| {
        let x = m.nodes.get_mut("x").unwrap();
        x.kilo_endpoint = Claim::Absent;
        x.internal_ips = vec!["10.1.1.77".parse().unwrap()];
    });
    let (_, of_mesh) = run(&mesh, &seen);
    let spec = &of_mesh.targets["mgmt"].peers["m--tenant--x"].spec;
    assert_eq!((spec.endpoint.clone(), spec.persistent_keepalive), (None, 25));
    let back = &of_mesh.targets["tenant"].peers["m--mgmt--a"].spec;
    assert_eq!(
        back.persistent_keepalive, 25,
        "who cannot be dialled keeps its binding open"
    );

    mesh.clusters[1].endpoint_networks = nets(&["10.1.0.0/16"]);
    let (_, of_mesh) = run(&mesh, &seen);
    let spec = &of_mesh.targets["mgmt"].peers["m--tenant--x"].spec;
    assert_eq!(spec.endpoint, Some(Endpoint::Ip("10.1.1.77:51820".parse().unwrap())));
}

#[test]
fn toward_kilo_the_internal_ip_is_left_out_where_it_is_the_endpoint() {
    let mut mesh = two_clusters();
    mesh.clusters[1].allowed.extend(nets(&["172.30.2.1/32"]));
    let mut seen = seen();
    let (_, of_mesh) = run(&mesh, &seen);
    let whole = net_set(&["10.2.1.0/24", "100.66.2.1/32", "172.30.2.1/32"]);
    assert_eq!(*allowed(&of_mesh, "mgmt", "m--tenant--x"), whole);
    // A Node that has just joined publishes nothing yet: that does not make it kg's.
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.nodes.insert(
            "new".into(),
            Node {
                ready: true,
                ..Node::default()
            },
        );
    });
    let (_, of_mesh) = run(&mesh, &seen);
    assert_eq!(*allowed(&of_mesh, "mgmt", "m--tenant--x"), whole);
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.nodes.values_mut().for_each(|node| node.server = Server::Kilo)
    });
    let (_, of_mesh) = run(&mesh, &seen);
    assert_eq!(
        *allowed(&of_mesh, "mgmt", "m--tenant--x"),
        net_set(&["10.2.1.0/24", "100.66.2.1/32"])
    );
}

#[test]
fn with_location_granularity_the_leader_carries_its_followers() {
    let mesh = two_clusters();
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |m| {
        for n in 1..=3 {
            let mut kg = node(2, n);
            kg.server = Server::Kilo;
            kg.granularity = Some(Granularity::Location);
            kg.kilo_internal_ip = kg.internal_ips.first().copied();
            if n > 1 {
                kg.wireguard_ip = Claim::Absent;
            }
            m.nodes.insert(format!("k{n}"), kg);
        }
        m.nodes.remove("x");
        // A follower whose kg restarts has no annotations for half a second.
        let restarting = m.nodes.get_mut("k3").unwrap();
        restarting.granularity = None;
        restarting.kilo_internal_ip = None;
        restarting.public_key = Claim::Absent;
    });
    let (_, of_mesh) = run(&mesh, &seen);
    assert_eq!(of_mesh.clusters["tenant"].skipped, vec![]);
    assert_eq!(
        of_mesh.targets["mgmt"].peers.keys().collect::<Vec<_>>(),
        vec!["m--tenant--k1"]
    );
    let carried = net_set(&["10.2.1.0/24", "10.2.2.0/24", "10.2.3.0/24", "100.66.2.1/32"]);
    assert_eq!(*allowed(&of_mesh, "mgmt", "m--tenant--k1"), carried);
}

#[test]
fn a_masqueraded_member_shows_only_its_wireguard_addresses() {
    let mut mesh = two_clusters();
    mesh.clusters[1].addressing = Addressing::Masqueraded;
    mesh.clusters[1].allowed = nets(&["100.66.2.0/24"]);
    let (_, of_mesh) = run(&mesh, &seen());
    assert_eq!(*allowed(&of_mesh, "mgmt", "m--tenant--x"), net_set(&["100.66.2.1/32"]));
    assert_eq!(
        of_mesh.targets["mgmt"].policies["m--tenant"].spec.sources,
        net_set(&["100.66.2.0/24"])
    );
}

#[test]
fn profiles_that_are_not_served_are_connected_to_nothing_and_said() {
    for (profile, quarantine) in [(Profile::Sandbox, false), (Profile::ClusterMeshed, true)] {
        let mut mesh = two_clusters();
        let mut seen = seen();
        settle(&mesh, &mut seen);
        mesh.clusters[1].profile = profile;
        mesh.clusters[1].quarantine = quarantine;
        let (plan, of_mesh) = run(&mesh, &seen);
        assert!(
            of_mesh
                .facts
                .iter()
                .any(|fact| matches!(fact, Fact::NotServed { cluster, .. } if cluster == "tenant"))
        );
        let steps = diff(
            &plan,
            &ClusterIdentity::Local,
            seen.members[&ClusterIdentity::Local].fresh().unwrap(),
        );
        assert_eq!(
            names(&steps),
            vec![
                (Action::Delete, "m--tenant--x".to_owned()),
                (Action::Delete, "m--tenant".to_owned())
            ]
        );
    }
}

#[test]
fn networks_of_two_clusters_are_disjoint_and_an_accepted_claim_wins() {
    let mut older = two_clusters();
    older.accepted = BTreeMap::from([("tenant".into(), older.clusters[1].allowed.clone())]);
    let mut newer = two_clusters();
    newer.id.name = "n".into();
    newer.created = 2;
    newer.clusters[1] = entry("other", secret("other"), &["10.2.128.0/17"]);
    for meshes in [[older.clone(), newer.clone()], [newer.clone(), older.clone()]] {
        let plan = plan(&meshes, &seen(), &Settings::default(), &Plain);
        let newer_plan = &plan.meshes[&newer.id];
        assert_eq!(
            newer_plan
                .clusters
                .values()
                .map(|c| c.accepted.len())
                .collect::<Vec<_>>(),
            vec![0, 0]
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
    // The holder may not grow into what the other has, and keeps what it had.
    newer.clusters[1].allowed = nets(&["10.3.0.0/16"]);
    newer.accepted = BTreeMap::from([("other".into(), nets(&["10.3.0.0/16"]))]);
    older.clusters[1].allowed = nets(&["10.2.0.0/15", "100.66.2.0/24"]);
    let plan = plan(&[older.clone(), newer], &seen(), &Settings::default(), &Plain);
    assert_eq!(
        plan.meshes[&older.id].clusters["tenant"].accepted,
        nets(&["10.2.0.0/16", "100.66.2.0/24"])
    );
}

#[test]
fn a_granted_service_is_mirrored_with_the_endpoints_that_lie_in_the_mesh() {
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
    let (_, of_mesh) = run(&mesh, &seen);
    let mirrored = &of_mesh.targets["tenant"].services[&local];
    assert_eq!(mirrored.ports, vec![port("pg", 5432)]);
    assert_eq!(
        mirrored
            .slices
            .values()
            .map(|s| (s.ports.clone(), s.endpoints.len()))
            .collect::<Vec<_>>(),
        vec![(vec![port("pg", 15432)], 100), (vec![port("pg", 15432)], 30)]
    );
    assert!(of_mesh.egress[0].ready);
    assert!(
        of_mesh.egress[0].message.contains("192.0.2.9"),
        "{}",
        of_mesh.egress[0].message
    );

    edit(&mut seen, &secret("tenant"), |m| {
        m.services.insert(
            local.clone(),
            Service {
                ports: vec![port("", 1)],
                ..Service::default()
            },
        );
    });
    let (_, of_mesh) = run(&mesh, &seen);
    assert_eq!(of_mesh.targets["tenant"].services, BTreeMap::new());
    assert!(
        of_mesh.egress[0].message.contains("not ours"),
        "{}",
        of_mesh.egress[0].message
    );
}

#[test]
fn a_deleted_mesh_and_a_removed_entry_leave_nothing_behind() {
    let mesh = two_clusters();
    let mut seen = seen();
    settle(&mesh, &mut seen);
    let here = |seen: &Observations, mesh: &Mesh| {
        let (plan, _) = run(mesh, seen);
        names(&diff(
            &plan,
            &ClusterIdentity::Local,
            seen.members[&ClusterIdentity::Local].fresh().unwrap(),
        ))
    };
    let all_gone = vec![
        (Action::Delete, "m--tenant--x".to_owned()),
        (Action::Delete, "m--tenant".to_owned()),
    ];
    assert_eq!(
        here(
            &seen,
            &Mesh {
                deleting: true,
                ..mesh.clone()
            }
        ),
        all_gone
    );
    assert_eq!(
        here(
            &seen,
            &Mesh {
                deleting: true,
                paused: true,
                ..mesh.clone()
            }
        ),
        vec![]
    );
    let mut shrunk = mesh.clone();
    shrunk.clusters.truncate(1);
    assert_eq!(here(&seen, &shrunk), all_gone);
    let plan_of_none = plan(&[], &seen, &Settings::default(), &Plain);
    let orphans = diff(
        &plan_of_none,
        &ClusterIdentity::Local,
        seen.members[&ClusterIdentity::Local].fresh().unwrap(),
    );
    assert_eq!(
        names(&orphans),
        all_gone,
        "the mesh was deleted by force: what carries our hub label goes"
    );
}

#[test]
fn two_meshes_of_the_same_clusters_give_one_peer_a_key_and_a_prefix() {
    let older = two_clusters();
    let mut newer = two_clusters();
    newer.id.name = "n".into();
    newer.created = 2;
    let owners = |seen: &Observations| -> BTreeMap<String, String> {
        let plan = plan(&[newer.clone(), older.clone()], seen, &Settings::default(), &Plain);
        let meshes = plan.meshes.iter();
        let peers = meshes.flat_map(|(id, mesh)| {
            mesh.targets["tenant"]
                .peers
                .values()
                .map(|peer| (peer.node.clone(), id.name.clone()))
                .collect::<Vec<_>>()
        });
        let mut owners = BTreeMap::new();
        for (node, mesh) in peers {
            assert_eq!(owners.insert(node, mesh), None, "one key, one Peer");
        }
        let carriers = plan
            .meshes
            .values()
            .flat_map(|mesh| mesh.targets["tenant"].peers.values());
        let service: IpNet = "10.96.0.0/16".parse().unwrap();
        assert_eq!(
            carriers.filter(|peer| peer.spec.allowed_ips.contains(&service)).count(),
            1,
            "one carrier"
        );
        owners
    };
    let mut seen = seen();
    assert_eq!(
        owners(&seen),
        BTreeMap::from([("a".into(), "m".into()), ("b".into(), "m".into())])
    );
    // Whoever has the Peer already keeps it, younger or not: `a` here, with the anchored network on it.
    let spec = run(&newer, &seen).1.targets["tenant"].peers["n--mgmt--a"].spec.clone();
    edit(&mut seen, &secret("tenant"), |m| {
        let owner = Owner {
            mesh: Some("n".into()),
            mesh_namespace: Some("meshes".into()),
            hub: Some("hub".into()),
            source_cluster: Some("mgmt".into()),
        };
        let mut spec = spec;
        spec.allowed_ips.insert("10.96.0.0/16".parse().unwrap());
        m.peers
            .as_mut()
            .unwrap()
            .insert("n--mgmt--a".into(), ObservedPeer { owner, spec: Ok(spec) });
    });
    assert_eq!(
        owners(&seen),
        BTreeMap::from([("a".into(), "n".into()), ("b".into(), "m".into())])
    );
}

#[test]
fn the_objects_of_another_hub_are_not_ours() {
    let mesh = two_clusters();
    let mut seen = seen();
    settle(&mesh, &mut seen);
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.nodes.clear();
        m.peers
            .as_mut()
            .unwrap()
            .values_mut()
            .for_each(|peer| peer.owner.hub = Some("other-hub".into()));
    });
    let touched = |mesh: &Mesh| {
        let (plan, _) = run(mesh, &seen);
        let steps = diff(
            &plan,
            &ClusterIdentity::Local,
            seen.members[&ClusterIdentity::Local].fresh().unwrap(),
        );
        steps
            .into_iter()
            .filter(|s| s.item.kind() == "Peer")
            .map(|s| (s.action, s.item.name(), s.fields))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        touched(&mesh),
        vec![],
        "its key is taken, so there is nothing to create either"
    );
    assert_eq!(
        touched(&Mesh {
            deleting: true,
            ..mesh.clone()
        }),
        vec![]
    );
    let adopting = Mesh {
        adopt_hub: Some("other-hub".into()),
        ..mesh
    };
    assert_eq!(
        touched(&adopting),
        vec![(Action::Update, "m--tenant--x".to_owned(), vec!["metadata.labels"])]
    );
}

#[test]
fn a_key_copied_while_its_owner_is_not_seen_stays_with_its_owner() {
    let mut mesh = two_clusters();
    mesh.clusters
        .insert(1, entry("evil", secret("evil"), &["10.3.0.0/16", "100.66.3.0/24"]));
    let mut seen = seen();
    seen.members.insert(secret("evil"), Observation::Fresh(member(&[])));
    settle(&mesh, &mut seen);
    let copy = Node {
        public_key: Claim::Is(key(33)),
        ..node(3, 1)
    };
    edit(&mut seen, &secret("evil"), |m| {
        m.nodes.insert("e".into(), copy);
    });
    // The controller restarts, and the victim's API server does not answer yet.
    let victim = seen
        .members
        .insert(secret("tenant"), Observation::Unreachable("starting".into()))
        .unwrap();
    let before = seen.members[&ClusterIdentity::Local].fresh().unwrap().peers.clone();
    settle(&mesh, &mut seen);
    assert_eq!(seen.members[&ClusterIdentity::Local].fresh().unwrap().peers, before);
    seen.members.insert(secret("tenant"), victim);
    settle(&mesh, &mut seen);
    assert_eq!(seen.members[&ClusterIdentity::Local].fresh().unwrap().peers, before);
    let (_, of_mesh) = run(&mesh, &seen);
    let skipped: Vec<_> = of_mesh.clusters["evil"]
        .skipped
        .iter()
        .map(|s| (s.node.as_str(), s.reason))
        .collect();
    assert_eq!(skipped, vec![("e", Reason::PublicKeyDuplicate)]);
    assert_eq!(of_mesh.clusters["tenant"].registered, 1);
}

#[test]
fn a_name_that_does_not_resolve_now_keeps_the_endpoint_and_the_anchor() {
    let mesh = two_clusters();
    let mut seen = seen();
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        for node in m.nodes.values_mut() {
            node.force_endpoint = Claim::Is(Endpoint::Dns("hub.example".into(), 51820));
            node.internal_ips.clear();
        }
    });
    seen.resolved.insert("hub.example".into(), "192.0.2.5".parse().unwrap());
    settle(&mesh, &mut seen);
    seen.resolved.clear();
    let (plan, of_mesh) = run(&mesh, &seen);
    assert_eq!(
        diff(
            &plan,
            &secret("tenant"),
            seen.members[&secret("tenant")].fresh().unwrap()
        ),
        vec![]
    );
    assert!(
        of_mesh
            .facts
            .iter()
            .any(|fact| matches!(fact, Fact::EndpointUnresolved { node, .. } if node == "a"))
    );
}

#[test]
fn the_policy_of_a_masqueraded_member_does_not_shrink_with_what_is_seen_of_it() {
    let mut mesh = two_clusters();
    mesh.clusters[1].addressing = Addressing::Masqueraded;
    let mut seen = seen();
    settle(&mesh, &mut seen);
    let policy = |seen: &Observations| run(&mesh, seen).1.targets["mgmt"].policies["m--tenant"].spec.clone();
    let before = policy(&seen);
    assert_eq!(before.sources, net_set(&["100.66.2.0/24"]));
    let mut blank = seen.clone();
    edit(&mut blank, &secret("tenant"), |m| {
        m.nodes.get_mut("x").unwrap().wireguard_ip = Claim::Absent
    });
    assert_eq!(policy(&blank), before, "its annotations vanished, its Peer is held");
    seen.members
        .insert(secret("tenant"), Observation::Unreachable("starting".into()));
    assert_eq!(
        policy(&seen),
        before,
        "it has not been seen since the controller started"
    );
}

#[test]
fn exported_pods_ride_on_their_node_and_the_rest_of_a_shared_network_on_the_anchor() {
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
    let (_, of_mesh) = run(&mesh, &seen);
    let of = |node: &str| allowed(&of_mesh, "tenant", &format!("m--mgmt--{node}"));
    let shared: IpNet = "10.1.0.0/16".parse().unwrap();
    let carriers: Vec<&str> = ["a", "b"]
        .into_iter()
        .filter(|node| of(node).contains(&shared))
        .collect();
    assert_eq!(carriers.len(), 1, "podCIDRs mean nothing here: the range is anchored");
    let own: BTreeSet<IpNet> = of("b").iter().copied().filter(|net| net.prefix_len() == 32).collect();
    assert_eq!(own, net_set(&["10.1.77.1/32", "100.66.1.2/32"]));
    assert!(
        of_mesh.targets["mgmt"].policies["m--tenant"]
            .spec
            .anchored
            .contains(&shared)
    );
}

#[test]
fn a_key_that_stands_for_a_member_not_seen_is_not_written_a_second_time() {
    let mut mesh = two_clusters();
    mesh.clusters
        .push(entry("third", secret("third"), &["10.3.0.0/16", "100.66.3.0/24"]));
    let mut seen = seen();
    seen.members
        .insert(secret("third"), Observation::Fresh(member(&[("t", node(3, 1))])));
    settle(&mesh, &mut seen);
    seen.members
        .insert(secret("tenant"), Observation::Unreachable("starting".into()));
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        m.nodes.get_mut("a").unwrap().public_key = Claim::Is(key(33));
    });
    let (_, of_mesh) = run(&mesh, &seen);
    let third = &of_mesh.targets["third"].peers;
    assert_eq!(
        third.keys().collect::<Vec<_>>(),
        vec!["m--mgmt--b"],
        "the standing Peer of x has that key"
    );
}
