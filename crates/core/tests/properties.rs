//! The rules of the planner over hostile input: small pools of names, keys, addresses and labels, so that everything
//! collides with everything.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use clustermesh_core::{
    diff::{Action, Item, Step, diff},
    key::PublicKey,
    mesh::{Addressing, Cluster, ClusterIdentity, Grant, Mesh, MeshId, ObjectName, PodNetwork, Profile, Protocol},
    observe::{
        Claim, Endpoint, Granularity, Member, Node, Observation, Observations, ObservedPeer, ObservedPolicy, Owner,
        PeerSpec, Server, Service, ServicePort, Slice, SliceEndpoint,
    },
    ownership::{self, Ownership},
    plan::{Naming, Plan, Settings, plan},
};
use ipnet::IpNet;
use proptest::{collection, option, prelude::*, sample::select};

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

    fn slice(&self, mesh: &MeshId, service: &ObjectName, v6: bool, index: usize) -> String {
        format!(
            "{}-{}-{}-{}-{index}",
            service.name,
            mesh.namespace,
            mesh.name,
            if v6 { 6 } else { 4 }
        )
    }
}

const NETS: &[&str] = &[
    "0.0.0.0/0",
    "10.0.0.0/8",
    "10.1.0.0/16",
    "10.1.1.0/24",
    "10.1.2.0/24",
    "10.2.0.0/16",
    "10.2.1.0/24",
    "10.2.2.0/24",
    "10.3.0.0/16",
    "10.96.0.0/16",
    "100.66.1.0/24",
    "100.66.2.0/24",
    "100.66.0.0/16",
    "172.30.0.0/16",
    "172.30.1.1/32",
    "fd00:1::/48",
    "fd00:1:0:1::/64",
    "fd00:2::/48",
    "::/0",
];
const IPS: &[&str] = &[
    "10.1.1.1",
    "10.1.2.1",
    "10.2.1.1",
    "100.66.1.1",
    "100.66.1.2",
    "100.66.2.1",
    "100.66.2.2",
    "172.30.1.1",
    "172.30.1.2",
    "192.0.2.1",
    "127.0.0.1",
    "169.254.1.1",
    "224.0.0.1",
    "0.0.0.0",
    "fd00:1::1",
    "fe80::1",
    "::ffff:10.1.1.1",
    "10.96.0.1",
];

fn net() -> impl Strategy<Value = IpNet> + Clone {
    select(NETS).prop_map(|text| text.parse().unwrap())
}

fn ip() -> impl Strategy<Value = IpAddr> + Clone {
    select(IPS).prop_map(|text| text.parse().unwrap())
}

fn key() -> impl Strategy<Value = PublicKey> + Clone {
    (1u8..8).prop_map(|n| PublicKey::new([n; 32]))
}

fn claim<T: std::fmt::Debug + Clone>(
    value: impl Strategy<Value = T> + Clone + 'static,
) -> impl Strategy<Value = Claim<T>> {
    prop_oneof![1 => Just(Claim::Absent), 1 => Just(Claim::Invalid("x".into())), 8 => value.prop_map(Claim::Is)]
}

fn endpoint() -> impl Strategy<Value = Endpoint> + Clone {
    prop_oneof![
        4 => (ip(), select(&[0u16, 51820, 7][..])).prop_map(|(ip, port)| Endpoint::Ip((ip, port).into())),
        1 => select(&["a.example", "b.example"][..]).prop_map(|host| Endpoint::Dns(host.into(), 51820)),
    ]
}

fn node() -> impl Strategy<Value = Node> {
    let identity = (
        collection::vec(claim(net()), 0..3),
        claim((ip(), 16u8..=32).prop_map(|(ip, length)| IpNet::new(ip, length).unwrap())),
        claim(key()),
        0i64..3,
        any::<bool>(),
        any::<bool>(),
    );
    let whereabouts = (
        prop_oneof![6 => Just(Claim::Absent), 1 => claim(endpoint())],
        prop_oneof![6 => Just(Claim::Absent), 1 => claim(endpoint())],
        claim(endpoint()),
        collection::vec(ip(), 0..2),
        collection::vec(ip(), 0..3),
    );
    let kilo = (
        option::of(select(
            &[Granularity::Full, Granularity::Location, Granularity::Cross][..],
        )),
        option::of(ip()),
        select(&["", "east", "west"][..]),
        select(&[Server::Kilo, Server::Agent, Server::AgentPolicy][..]),
        option::of((0u64..600).prop_map(Duration::from_secs)),
        select(&[0u16, 25][..]),
        collection::vec(net(), 0..2),
    );
    (identity, whereabouts, kilo).prop_map(|(identity, whereabouts, kilo)| Node {
        pod_cidrs: identity.0,
        wireguard_ip: identity.1,
        public_key: identity.2,
        created: identity.3,
        ready: identity.4,
        deleting: identity.5,
        clustermesh_endpoint: whereabouts.0,
        force_endpoint: whereabouts.1,
        kilo_endpoint: whereabouts.2,
        external_ips: whereabouts.3,
        internal_ips: whereabouts.4,
        granularity: kilo.0,
        kilo_internal_ip: kilo.1,
        location: kilo.2.into(),
        server: kilo.3,
        held_for: kilo.4,
        persistent_keepalive: kilo.5,
        allowed_location_ips: kilo.6,
        discovered: BTreeMap::new(),
    })
}

fn owner() -> impl Strategy<Value = Owner> {
    let word = |words: &'static [&'static str]| option::of(select(words).prop_map(str::to_owned));
    (
        word(&["m", "n"]),
        word(&["one", "two"]),
        word(&["hub", "other-hub"]),
        word(&["c0", "c1", "c2"]),
    )
        .prop_map(|(mesh, mesh_namespace, hub, source_cluster)| Owner {
            mesh,
            mesh_namespace,
            hub,
            source_cluster,
        })
}

fn peer_spec() -> impl Strategy<Value = PeerSpec> {
    (
        key(),
        collection::btree_set(net(), 0..3),
        option::of(endpoint()),
        select(&[0u16, 25][..]),
    )
        .prop_map(|(public_key, allowed_ips, endpoint, persistent_keepalive)| PeerSpec {
            public_key,
            allowed_ips,
            endpoint,
            candidates: vec![],
            persistent_keepalive,
        })
}

fn peers() -> impl Strategy<Value = BTreeMap<String, ObservedPeer>> {
    let name = (
        select(&["m", "n"][..]),
        select(&["c0", "c1", "c2"][..]),
        select(&["a", "b", "c"][..]),
        any::<bool>(),
    )
        .prop_map(|(m, c, n, taken)| format!("{m}--{c}--{n}{}", if taken { "-one" } else { "" }));
    let spec = prop_oneof![8 => peer_spec().prop_map(Ok), 1 => Just(Err("does not parse".to_owned()))];
    let peer = (owner(), spec).prop_map(|(owner, spec)| ObservedPeer { owner, spec });
    collection::btree_map(name, peer, 0..5)
}

fn services() -> impl Strategy<Value = (BTreeMap<ObjectName, Service>, BTreeMap<ObjectName, Slice>)> {
    let name = || {
        select(&["s", "t"][..]).prop_map(|n| ObjectName {
            namespace: "ns".into(),
            name: n.into(),
        })
    };
    let port = || {
        select(&[80u16, 443][..]).prop_map(|port| ServicePort {
            name: "p".into(),
            port,
            protocol: Protocol::Tcp,
        })
    };
    let service = (option::of(owner()), any::<bool>(), collection::vec(port(), 0..2)).prop_map(
        |(managed, external_name, ports)| Service {
            managed,
            external_name,
            selectorless: false,
            ports,
        },
    );
    let endpoint = (ip(), any::<bool>()).prop_map(|(address, ready)| SliceEndpoint {
        address,
        ready,
        serving: ready,
        terminating: false,
    });
    let slice = (
        option::of(owner()),
        select(&["s", "t"][..]),
        collection::vec(port(), 0..2),
        collection::vec(endpoint, 0..4),
    )
        .prop_map(|(managed, service, ports, endpoints)| Slice {
            managed,
            service: service.into(),
            v6: false,
            ports,
            endpoints,
        });
    (
        collection::btree_map(name(), service, 0..2),
        collection::btree_map(name(), slice, 0..2),
    )
}

fn member() -> impl Strategy<Value = Member> {
    let nodes = collection::btree_map(select(&["a", "b", "c", "d"][..]).prop_map(str::to_owned), node(), 0..5);
    let policies = collection::btree_map(
        select(&["m--c0", "m--c1", "n--c2"][..]).prop_map(str::to_owned),
        owner().prop_map(|owner| ObservedPolicy {
            owner,
            spec: Err("does not parse".into()),
        }),
        0..2,
    );
    (
        nodes,
        option::weighted(0.9, peers()),
        option::weighted(0.8, policies),
        services(),
    )
        .prop_map(|(nodes, peers, policies, (services, slices))| Member {
            nodes,
            peers,
            policies,
            services,
            slices,
            ..Member::default()
        })
}

fn identity(n: usize) -> ClusterIdentity {
    if n == 0 {
        return ClusterIdentity::Local;
    }
    let name = format!("s{n}");
    ClusterIdentity::Secret {
        namespace: "one".into(),
        name,
        key: "value".into(),
        context: None,
    }
}

fn cluster(n: usize) -> impl Strategy<Value = Cluster> {
    let shape = (
        select(
            &[
                Profile::ClusterMeshed,
                Profile::ClusterMeshed,
                Profile::ClusterMeshed,
                Profile::Sandbox,
                Profile::Standard,
            ][..],
        ),
        select(&[Addressing::Routed, Addressing::Routed, Addressing::Masqueraded][..]),
        collection::vec(net(), 1..4),
        option::weighted(0.3, collection::vec(net(), 0..2)),
        0u16..4,
        select(&[PodNetwork::PerNode, PodNetwork::PerNode, PodNetwork::Shared][..]),
        collection::vec(net(), 0..2),
    );
    let grant = (0usize..3, select(&["s", "t"][..])).prop_map(|(cluster, name)| Grant {
        cluster: format!("c{cluster}"),
        service: ObjectName {
            namespace: "ns".into(),
            name: name.into(),
        },
        ports: vec![],
        local: ObjectName {
            namespace: "ns".into(),
            name: name.into(),
        },
    });
    (
        shape,
        collection::vec(grant, 0..2),
        select(&[1usize, 2, 5000][..]),
        select(&[0u16, 15][..]),
    )
        .prop_map(move |(shape, egress, max_nodes, persistent_keepalive)| Cluster {
            name: format!("c{n}"),
            identity: identity(n),
            profile: shape.0,
            addressing: shape.1,
            allowed: shape.2,
            anchored: shape.3,
            anchors: shape.4,
            pod_network: shape.5,
            exports: vec![],
            wireguard_port: 51820,
            persistent_keepalive,
            endpoint_networks: shape.6,
            egress,
            quarantine: false,
            max_nodes,
        })
}

fn mesh() -> impl Strategy<Value = Mesh> {
    let accepted = collection::btree_map(
        select(&["c0", "c1", "c2"][..]).prop_map(str::to_owned),
        collection::vec(net(), 0..3),
        0..3,
    );
    (
        (select(&["one", "two"][..]), select(&["m", "n"][..])),
        0i64..3,
        prop_oneof![9 => Just(false), 1 => Just(true)],
        prop_oneof![9 => Just(false), 1 => Just(true)],
        (cluster(0), cluster(1), cluster(2)),
        accepted,
    )
        .prop_map(
            |((namespace, name), created, paused, deleting, (a, b, c), accepted)| Mesh {
                id: MeshId {
                    namespace: namespace.into(),
                    name: name.into(),
                },
                created,
                paused,
                deleting,
                adopt_hub: None,
                clusters: vec![a, b, c],
                accepted,
            },
        )
}

#[derive(Debug, Clone)]
struct World {
    meshes: Vec<Mesh>,
    seen: Observations,
}

fn world() -> impl Strategy<Value = World> {
    let observation = prop_oneof![
        8 => member().prop_map(Observation::Fresh),
        1 => member().prop_map(|member| Observation::Stale(member, "watch broken".into())),
        1 => Just(Observation::Unreachable("refused".into())),
        1 => Just(Observation::Missing("no Secret".into())),
    ];
    (collection::vec(mesh(), 1..4), collection::vec(observation, 3)).prop_map(|(mut meshes, members)| {
        let mut ids = BTreeSet::new();
        meshes.retain(|mesh| ids.insert(mesh.id.clone()));
        let members = members
            .into_iter()
            .enumerate()
            .map(|(n, member)| (identity(n), member))
            .collect();
        let resolved = BTreeMap::from([("a.example".to_owned(), "192.0.2.7".parse().unwrap())]);
        World {
            meshes,
            seen: Observations {
                members,
                hub: "hub".into(),
                resolved,
            },
        }
    })
}

fn planned(world: &World) -> Plan {
    plan(&world.meshes, &world.seen, &Settings::default(), &Plain)
}

fn steps(plan: &Plan, world: &World) -> BTreeMap<ClusterIdentity, Vec<Step>> {
    let fresh = world
        .seen
        .members
        .iter()
        .filter_map(|(identity, member)| Some((identity, member.fresh()?)));
    fresh
        .map(|(identity, member)| (identity.clone(), diff(plan, identity, member)))
        .collect()
}

fn write(member: &mut Member, step: &Step) {
    let owner = step.owner.clone();
    match step.item.clone() {
        Item::Peer(name, spec) => {
            let peers = member
                .peers
                .as_mut()
                .expect("no Peer is written where the CRD is missing");
            match spec {
                Some(spec) => drop(peers.insert(name, ObservedPeer { owner, spec: Ok(spec) })),
                None => drop(peers.remove(&name)),
            }
        }
        Item::Policy(name, spec) => {
            let policies = member
                .policies
                .as_mut()
                .expect("no PeerPolicy is written where the CRD is missing");
            match spec {
                Some(spec) => drop(policies.insert(name, ObservedPolicy { owner, spec: Ok(spec) })),
                None => drop(policies.remove(&name)),
            }
        }
        Item::Service(name, Some(ports)) => {
            let service = Service {
                managed: Some(owner),
                selectorless: true,
                ports,
                ..Service::default()
            };
            member.services.insert(name, service);
        }
        Item::Service(name, None) => drop(member.services.remove(&name)),
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
        Item::Slice(name, None) => drop(member.slices.remove(&name)),
    }
}

/// Writes the steps, and the accepted networks into the status of each mesh, as the controller does.
fn applied(world: &World) -> World {
    let plan = planned(world);
    let steps = steps(&plan, world);
    let mut after = world.clone();
    for (identity, steps) in steps {
        if let Some(Observation::Fresh(member)) = after.seen.members.get_mut(&identity) {
            steps.iter().for_each(|step| write(member, step));
        }
    }
    for mesh in after.meshes.iter_mut().filter(|mesh| !mesh.deleting) {
        let report = &plan.meshes[&mesh.id].clusters;
        mesh.accepted = report
            .iter()
            .map(|(name, report)| (name.clone(), report.accepted.clone()))
            .collect();
    }
    after
}

fn ours<'a>(plan: &'a Plan, owner: &Owner) -> Ownership<'a> {
    ownership::of(owner, &plan.hub, &plan.claimants)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_outside_allowed_networks_is_ever_planned(world in world()) {
        let plan = planned(&world);
        for mesh in &world.meshes {
            let planned = &plan.meshes[&mesh.id];
            for target in planned.targets.values() {
                for peer in target.peers.values() {
                    let accepted = &planned.clusters[&peer.source].accepted;
                    let entry = mesh.clusters.iter().find(|c| c.name == peer.source).unwrap();
                    let granted = mesh.accepted.get(&peer.source).into_iter().flatten().chain(&entry.allowed);
                    let granted: Vec<IpNet> = granted.copied().collect();
                    for net in &peer.spec.allowed_ips {
                        prop_assert!(accepted.iter().any(|a| a.contains(net)), "{net} of {peer:?} outside {accepted:?}");
                        prop_assert!(granted.iter().any(|a| a.contains(net)));
                    }
                }
                for service in target.services.values() {
                    let accepted = &planned.clusters[&service.source].accepted;
                    for endpoint in service.slices.values().flat_map(|slice| &slice.endpoints) {
                        prop_assert!(accepted.iter().any(|a| a.contains(&endpoint.address)));
                    }
                }
            }
        }
    }

    #[test]
    fn a_key_and_a_prefix_have_one_owner_in_a_target(world in world()) {
        let plan = planned(&world);
        for n in 0..3 {
            let mut keys = BTreeSet::new();
            let mut prefixes = BTreeSet::new();
            let standing = world.seen.members[&identity(n)].last().and_then(|m| m.peers.clone()).unwrap_or_default();
            for peer in standing.values() {
                // Others' Peers keep what they have, and so do those of a member that is not seen.
                let kept = match ours(&plan, &peer.owner) {
                    Ownership::Foreign => true,
                    Ownership::Mesh(id) => {
                        let mesh = &plan.meshes[id];
                        let source = peer.owner.source_cluster.clone().unwrap_or_default();
                        let target = mesh.targets.get(&format!("c{n}"));
                        let unseen = mesh.identities.get(&source).is_some_and(|i| world.seen.members[i].last().is_none());
                        // Two meshes of one target may hold one key already: that is settled by what is planned.
                        plan.meshes.len() == 1 && unseen && target.is_some_and(|target| target.retained.contains(&source))
                    }
                    Ownership::Orphan => false,
                };
                if let (true, Ok(spec)) = (kept, &peer.spec) {
                    keys.insert(spec.public_key);
                    prefixes.extend(spec.allowed_ips.iter().copied());
                }
            }
            for mesh in plan.meshes.values() {
                for peer in mesh.targets[&format!("c{n}")].peers.values() {
                    prop_assert!(keys.insert(peer.spec.public_key), "second owner of a key: {peer:?}");
                    for net in &peer.spec.allowed_ips {
                        prop_assert!(prefixes.insert(*net), "second owner of {net}: {peer:?}");
                        prop_assert_eq!(net.trunc(), *net);
                    }
                }
            }
        }
    }

    #[test]
    fn accepted_networks_of_different_clusters_are_disjoint(world in world()) {
        let plan = planned(&world);
        let mut held: Vec<(ClusterIdentity, IpNet)> = Vec::new();
        for mesh in plan.meshes.values() {
            for (name, report) in &mesh.clusters {
                held.extend(report.accepted.iter().map(|net| (mesh.identities[name].clone(), *net)));
            }
        }
        for (a, net_a) in &held {
            for (b, net_b) in held.iter().filter(|(b, _)| b != a) {
                prop_assert!(!net_a.contains(net_b), "{net_a} of {a} holds {net_b} of {b}");
            }
        }
    }

    #[test]
    fn the_order_of_no_input_matters(world in world(), shuffled in any::<prop::sample::Index>()) {
        let plan = planned(&world);
        let mut other = world.clone();
        let turn = shuffled.index(other.meshes.len());
        other.meshes.rotate_left(turn);
        for mesh in &mut other.meshes {
            mesh.clusters.iter_mut().for_each(|cluster| cluster.allowed.reverse());
            mesh.accepted.values_mut().for_each(|list| list.reverse());
        }
        for member in other.seen.members.values_mut() {
            if let Observation::Fresh(member) | Observation::Stale(member, _) = member {
                for node in member.nodes.values_mut() {
                    node.allowed_location_ips.reverse();
                }
                member.slices.values_mut().for_each(|slice| slice.endpoints.reverse());
            }
        }
        prop_assert_eq!(planned(&other), plan);
    }

    #[test]
    fn a_bad_node_changes_no_other_nodes_peers(world in world(), mut bad in node(), n in 0usize..3, how in 0u8..4) {
        bad.held_for = Some(Duration::from_secs(600));
        bad.granularity = Some(Granularity::Full);
        bad.discovered.clear();
        // Nothing it says of NAT counts against the others either; that it is there does, for keepalive.
        bad.persistent_keepalive = 0;
        bad.internal_ips = vec!["192.0.2.99".parse().unwrap()];
        match how {
            0 => bad.public_key = Claim::Invalid("x".into()),
            1 => bad.wireguard_ip = Claim::Is("203.0.113.1/32".parse().unwrap()),
            2 => bad.force_endpoint = Claim::Invalid("x".into()),
            _ => bad.public_key = Claim::Absent,
        }
        bad.created = 1_000_000;
        if bad.public_key.value().is_some() {
            bad.public_key = Claim::Is(PublicKey::new([200; 32]));
        }
        // A network that holds everything would take even the bad address in.
        let mut world = world;
        for mesh in &mut world.meshes {
            mesh.clusters.iter_mut().for_each(|cluster| cluster.allowed.retain(|net| net.prefix_len() > 0));
            mesh.accepted.values_mut().for_each(|list| list.retain(|net| net.prefix_len() > 0));
        }
        let mut worse = world.clone();
        let Some(Observation::Fresh(member)) = worse.seen.members.get_mut(&identity(n)) else { return Ok(()) };
        member.nodes.insert("zz-bad".into(), bad);
        let (before, after) = (planned(&world), planned(&worse));
        for (id, mesh) in &before.meshes {
            for (target, held) in &mesh.targets {
                let after = &after.meshes[id].targets[target].peers;
                let mut changed = held.peers.clone();
                // The target's own nodes decide the keepalive of the Peers in it.
                let mut after = after.clone();
                changed.values_mut().chain(after.values_mut()).for_each(|peer| peer.spec.persistent_keepalive = 0);
                prop_assert_eq!(&after, &changed, "target {} of {}", target, id);
            }
        }
    }

    #[test]
    fn the_plan_of_a_plans_result_is_empty(world in world()) {
        // What one plan frees another may take, and a Node held for its last Peer loses it: a few rounds settle all.
        let mut world = world;
        for _ in 0..4 {
            world = applied(&world);
        }
        let plan = planned(&world);
        for (identity, steps) in steps(&plan, &world) {
            prop_assert_eq!(steps, vec![], "in {}", identity);
        }
    }

    #[test]
    fn what_was_not_observed_is_never_deleted_and_what_is_not_ours_never_touched(world in world()) {
        let plan = planned(&world);
        for (identity_of, steps) in steps(&plan, &world) {
            let member = world.seen.members[&identity_of].fresh().unwrap();
            for step in steps {
                if step.action == Action::Create {
                    continue;
                }
                let standing = match &step.item {
                    Item::Peer(name, _) => member.peers.as_ref().unwrap()[name].owner.clone(),
                    Item::Policy(name, _) => member.policies.as_ref().unwrap()[name].owner.clone(),
                    Item::Service(name, _) => member.services[name].managed.clone().unwrap(),
                    Item::Slice(name, _) => member.slices[name].managed.clone().unwrap(),
                };
                prop_assert_ne!(ours(&plan, &standing), Ownership::Foreign);
                let Ownership::Mesh(id) = ours(&plan, &standing) else { continue };
                let mesh = &plan.meshes[id];
                prop_assert!(!mesh.paused);
                if step.action == Action::Delete && !mesh.deleting && matches!(step.item, Item::Peer(..)) {
                    let source = standing.source_cluster.unwrap_or_default();
                    let Some(source_identity) = mesh.identities.get(&source) else { continue };
                    let entry = world.meshes.iter().find(|m| m.id == *id).unwrap();
                    let meshed = |name: &str| {
                        let cluster = entry.clusters.iter().find(|c| c.name == name).unwrap();
                        let everywhere = world.meshes.iter().filter(|m| !m.deleting).flat_map(|m| &m.clusters);
                        let tight = everywhere
                            .filter(|c| c.identity == cluster.identity)
                            .any(|c| c.profile != Profile::ClusterMeshed);
                        !tight && !mesh.clusters[name].accepted.is_empty()
                    };
                    let target = mesh.identities.iter().find(|(_, i)| **i == identity_of).unwrap().0.clone();
                    if meshed(&source) && meshed(&target) && source != target {
                        let observed = world.seen.members[source_identity].fresh().is_some();
                        prop_assert!(observed, "{step:?} follows from nothing that was seen");
                    }
                }
            }
        }
    }

    #[test]
    fn no_peer_carries_an_endpoint_that_can_be_none_or_lies_in_the_target(world in world()) {
        let plan = planned(&world);
        for mesh in &world.meshes {
            let planned = &plan.meshes[&mesh.id];
            for (target, held) in &planned.targets {
                for peer in held.peers.values() {
                    let standing = world.seen.members[&planned.identities[target]].last().and_then(|m| m.peers.as_ref());
                    let held_as_it_was = planned.clusters[&peer.source].held.contains_key(&peer.node) && standing.is_some();
                    let Some(Endpoint::Ip(endpoint)) = &peer.spec.endpoint else {
                        prop_assert!(held_as_it_was || peer.spec.endpoint.is_none());
                        prop_assert!(held_as_it_was || peer.spec.persistent_keepalive > 0);
                        continue;
                    };
                    if held_as_it_was {
                        continue;
                    }
                    prop_assert!(!endpoint.ip().is_loopback() && !endpoint.ip().is_multicast() && !endpoint.ip().is_unspecified());
                    let entry = mesh.clusters.iter().find(|c| c.name == peer.source).unwrap();
                    let inside = planned.clusters[target].accepted.iter().any(|net| net.contains(&endpoint.ip()));
                    prop_assert!(!inside || entry.endpoint_networks.iter().any(|net| net.contains(&endpoint.ip())));
                }
            }
        }
    }
}
