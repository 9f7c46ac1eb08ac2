//! Worlds out of small pools of names, keys, addresses and labels, so that everything collides with everything; and what
//! writing a plan makes of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use clustermesh_core::{
    diff::{Item, Step, diff},
    key::PublicKey,
    mesh::{Addressing, Cluster, ClusterIdentity, Grant, Mesh, MeshId, ObjectName, PodNetwork, Profile, Protocol},
    observe::{
        Claim, Endpoint, Families, Granularity, Member, Node, Observation, Observations, ObservedPeer, ObservedPolicy,
        Owner, PeerSpec, Server, Service, ServicePort, Slice, SliceEndpoint,
    },
    ownership::{self, Ownership},
    plan::{Naming, Plan, Settings, plan},
};
use ipnet::IpNet;
use proptest::{collection, option, prelude::*, sample::select};

mod applied;

pub(crate) use applied::applied;

pub(crate) struct Plain;

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

    fn policy_revision(&self, cluster: &str, spec: &clustermesh_core::observe::PolicySpec) -> String {
        // Of everything it says, as the real one is.
        format!("{cluster} {spec:?}")
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

pub(crate) fn ip() -> impl Strategy<Value = IpAddr> + Clone {
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

pub(crate) fn node() -> impl Strategy<Value = Node> {
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
        0u8..4,
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
        leader: kilo.7 & 1 == 1,
        silent: kilo.7 & 2 == 2,
        kilo_internal_ip: kilo.1,
        location: kilo.2.into(),
        server: kilo.3,
        held_for: kilo.4,
        persistent_keepalive: kilo.5,
        allowed_location_ips: kilo.6,
        discovered: BTreeMap::new(),
        bypassed: None,
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
            requires_policy: None,
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
    let shape = select(
        &[
            (false, false),
            (false, false),
            (false, false),
            (true, true),
            (false, true),
        ][..],
    );
    let service = (option::weighted(0.3, owner()), shape, collection::vec(port(), 0..3)).prop_map(
        |(managed, (external_name, selectorless), ports)| Service {
            managed,
            external_name,
            selectorless,
            ports,
            families: Families::default(),
            allowed_from: BTreeSet::new(),
        },
    );
    let host = option::of(select(&["a", "b", "c"][..]).prop_map(str::to_owned));
    let endpoint = (ip(), host, any::<bool>()).prop_map(|(address, node, ready)| SliceEndpoint {
        address,
        node,
        ready,
        serving: ready,
        terminating: false,
    });
    let slice = (
        option::weighted(0.3, owner()),
        select(&["s", "t"][..]),
        collection::vec(port(), 0..3),
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

pub(crate) fn member() -> impl Strategy<Value = Member> {
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

pub(crate) fn identity(n: usize) -> ClusterIdentity {
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
            carriers: BTreeMap::new(),
            anchors: shape.4,
            pod_network: shape.5,
            exports: vec![],
            wireguard_port: 51820,
            persistent_keepalive,
            endpoint_networks: shape.6,
            egress,
            quarantine: false,
            confined_to: None,
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
pub(crate) struct World {
    pub(crate) meshes: Vec<Mesh>,
    pub(crate) seen: Observations,
}

pub(crate) fn world() -> impl Strategy<Value = World> {
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

pub(crate) fn planned(world: &World) -> Plan {
    plan(&world.meshes, &world.seen, &Settings::default(), &Plain)
}

pub(crate) fn steps(plan: &Plan, world: &World) -> BTreeMap<ClusterIdentity, Vec<Step>> {
    let fresh = world
        .seen
        .members
        .iter()
        .filter_map(|(identity, member)| Some((identity, member.fresh()?)));
    fresh
        .map(|(identity, member)| (identity.clone(), diff(plan, identity, member)))
        .collect()
}

pub(crate) fn ours<'a>(plan: &'a Plan, owner: &Owner) -> Ownership<'a> {
    ownership::of(owner, &plan.hub, &plan.claimants)
}
