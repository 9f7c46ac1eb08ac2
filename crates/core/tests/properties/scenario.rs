//! Generates scenarios for the property tests: meshes and the observed state of their members.
//!
//! Most values are the cluster's own (networks, keys), so that Peers are planned. Others come from small shared pools, so that
//! names, keys, addresses and labels of different clusters collide.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use clustermesh_core::{
    diff::{Item, Step, diff},
    key::PublicKey,
    mesh::{Addressing, Cluster, ClusterIdentity, Grant, Mesh, MeshId, ObjectName, PodNetwork, Profile, Protocol},
    observe::{
        Claim, Endpoint, Families, Gateway, Granularity, Member, Node, Observation, Observations, ObservedAccess,
        ObservedPeer, ObservedPolicy, Owner, PeerSpec, Server, Service, ServicePort, Slice, SliceEndpoint,
    },
    ownership::{self, Ownership},
    plan::{Naming, Plan, Settings, plan},
};
use ipnet::IpNet;
use proptest::{
    collection, option,
    prelude::*,
    sample::{self, select},
};

mod applied;

pub(crate) use applied::apply_plan;

pub(crate) struct TestNaming;

impl Naming for TestNaming {
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

    fn sandbox(&self, identity: &ClusterIdentity) -> String {
        identity.to_string()
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

/// The shared pool of networks, from which different clusters may claim the same.
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
/// The shared pool of addresses; some can never be an endpoint.
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
    prop_oneof![1 => Just(Claim::Absent), 1 => Just(Claim::Invalid("x".into())), 8 => value.prop_map(Claim::Valid)]
}

fn endpoint() -> impl Strategy<Value = Endpoint> + Clone {
    prop_oneof![
        4 => socket_address().prop_map(Endpoint::Ip),
        1 => select(&["a.example", "b.example"][..]).prop_map(|host| Endpoint::Dns(host.into(), 51820)),
    ]
}

/// An endpoint at which a node sees another one.
fn socket_address() -> impl Strategy<Value = SocketAddr> + Clone {
    (ip(), select(&[0u16, 51820, 7][..])).prop_map(SocketAddr::from)
}

/// The third byte of the WireGuard addresses of cluster `n`.
const WIREGUARD: [u8; 3] = [1, 3, 2];

fn parse<T: std::str::FromStr<Err: std::fmt::Debug>>(text: String) -> T {
    text.parse().unwrap()
}

fn own_pods(n: usize, k: u8) -> IpNet {
    parse(format!("10.{}.{k}.0/24", n + 1))
}

fn own_wireguard(n: usize, k: u8) -> IpNet {
    parse(format!("100.66.{}.{k}/24", WIREGUARD[n]))
}

fn own_address(n: usize, k: u8) -> IpAddr {
    parse(format!("172.30.{}.{k}", n + 1))
}

fn own_key(n: usize, k: u8) -> PublicKey {
    PublicKey::new([u8::try_from(n * 16).unwrap() + k + 10; 32])
}

/// The `k`-th node of cluster `n`. This strategy and those below are boxed, because their nested types would overflow the stack.
pub(crate) fn node(n: usize, k: u8) -> BoxedStrategy<Node> {
    let own_claims = Just(vec![Claim::Valid(own_pods(n, k))]);
    let greedy = claim(net()).prop_map(move |more| vec![Claim::Valid(own_pods(n, k)), more]);
    let identity = (
        prop_oneof![12 => own_claims, 1 => greedy, 1 => collection::vec(claim(net()), 0..3)],
        prop_oneof![
            12 => Just(Claim::Valid(own_wireguard(n, k))),
            1 => claim((ip(), 16u8..=32).prop_map(|(ip, length)| IpNet::new(ip, length).unwrap())),
        ],
        prop_oneof![12 => Just(Claim::Valid(own_key(n, k))), 1 => claim(key())],
        0i64..3,
        prop::bool::weighted(0.8),
        prop::bool::weighted(0.1),
    );
    let own = own_address(n, k);
    let endpoints = (
        prop_oneof![12 => Just(Claim::Absent), 1 => claim(endpoint())],
        prop_oneof![12 => Just(Claim::Absent), 1 => claim(endpoint())],
        prop_oneof![4 => Just(Claim::Valid(Endpoint::Ip((own, 51820).into()))), 1 => claim(endpoint())],
        collection::vec(ip(), 0..2),
        prop_oneof![4 => Just(vec![own]), 1 => collection::vec(ip(), 0..3)],
    );
    let kilo = (
        option::weighted(
            0.3,
            select(&[Granularity::Full, Granularity::Location, Granularity::Cross][..]),
        ),
        option::of(ip()),
        select(&["", "east", "west"][..]),
        select(&[Server::Kilo, Server::Agent, Server::AgentPolicy][..]),
        option::weighted(0.2, (0u64..600).prop_map(Duration::from_secs)),
        select(&[0u16, 25][..]),
        prop_oneof![4 => Just(vec![]), 1 => collection::vec(net(), 1..2)],
        0u8..4,
        collection::btree_map(
            (0usize..3, 1u8..5).prop_map(|(n, k)| own_key(n, k)),
            socket_address(),
            0..2,
        ),
    );
    let node = (identity, endpoints, kilo).prop_map(|(identity, endpoints, kilo)| Node {
        pod_cidrs: identity.0,
        wireguard_ip: identity.1,
        public_key: identity.2,
        created: identity.3,
        ready: identity.4,
        deleting: identity.5,
        clustermesh_endpoint: endpoints.0,
        force_endpoint: endpoints.1,
        kilo_endpoint: endpoints.2,
        external_ips: endpoints.3,
        internal_ips: endpoints.4,
        granularity: kilo.0,
        leader: kilo.7 & 1 == 1,
        silent: kilo.7 & 2 == 2,
        kilo_internal_ip: kilo.1,
        location: kilo.2.into(),
        server: kilo.3,
        held_for: kilo.4,
        persistent_keepalive: kilo.5,
        allowed_location_ips: kilo.6,
        discovered: kilo.8,
        bypassed: None,
    });
    node.boxed()
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
        (select(&["m", "n"][..]), any::<bool>()),
        0usize..3,
        0usize..4,
        select(&["one", "two"][..]),
    );
    let spec_or_error = prop_oneof![8 => peer_spec().prop_map(Ok), 1 => Just(Err("does not parse".to_owned()))];
    // Half of the Peers look like those that a plan writes.
    let peer = (name, any::<bool>(), owner(), spec_or_error).prop_map(|(name, is_random, owner, spec)| {
        let ((mesh, taken), n, k, namespace) = name;
        let tail = if taken { "-one" } else { "" };
        let name = format!("{mesh}--c{n}--{}{tail}", NODES[k]);
        if is_random {
            return (name, ObservedPeer { owner, spec });
        }
        let k = u8::try_from(k).unwrap() + 1;
        let wireguard = own_wireguard(n, k).addr();
        let spec = PeerSpec {
            public_key: own_key(n, k),
            allowed_ips: [own_pods(n, k), wireguard.into()].into(),
            endpoint: Some(Endpoint::Ip((own_address(n, k), 51820).into())),
            candidates: vec![],
            persistent_keepalive: 0,
        };
        let owner = Owner {
            mesh: Some(mesh.into()),
            mesh_namespace: Some(namespace.into()),
            hub: Some("hub".into()),
            source_cluster: Some(format!("c{n}")),
        };
        (name, ObservedPeer { owner, spec: Ok(spec) })
    });
    collection::vec(peer, 0..5).prop_map(|peers| peers.into_iter().collect())
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
        collection::btree_map(name(), service, 0..3),
        collection::btree_map(name(), slice, 0..3),
    )
}

/// Names of nodes: the `k`-th has the `k`-th address of its cluster.
const NODES: [&str; 4] = ["a", "b", "c", "d"];

pub(crate) fn gateway_name(name: &str) -> ObjectName {
    ObjectName {
        namespace: "gateways".into(),
        name: name.into(),
    }
}

/// A gateway of cluster `n`.
fn gateway(n: usize) -> impl Strategy<Value = Gateway> {
    let address = prop_oneof![8 => (6u8..9).prop_map(move |k| own_wireguard(n, k).addr()), 1 => ip()];
    (
        6u8..9,
        address,
        collection::vec(socket_address(), 0..3),
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(move |(k, address, endpoints, others, ready)| Gateway {
            public_key: own_key(n, k),
            addresses: [address].into(),
            endpoints,
            serves: others.then(|| "c1".to_owned()).into_iter().collect(),
            ready,
            exists: true,
            applied: BTreeMap::new(),
            refused: BTreeMap::new(),
        })
}

/// The observed state of cluster `n`.
pub(crate) fn member(n: usize) -> BoxedStrategy<Member> {
    let maybe = |k| option::weighted(0.7, node(n, k));
    // In a member with a kg node, policies are not enforced, so most members have only agents.
    let agents = prop::bool::weighted(0.6);
    let nodes = (agents, (maybe(1), maybe(2), maybe(3), maybe(4))).prop_map(|(agents, (a, b, c, d))| {
        let nodes = NODES.into_iter().zip([a, b, c, d]);
        let mut nodes: BTreeMap<String, Node> = nodes
            .filter_map(|(name, node)| Some((name.to_owned(), node?)))
            .collect();
        if agents {
            nodes.values_mut().for_each(|node| node.server = Server::Agent);
        }
        nodes
    });
    let policies = collection::btree_map(
        select(&["m--c0", "m--c1", "n--c2"][..]).prop_map(str::to_owned),
        owner().prop_map(|owner| ObservedPolicy {
            owner,
            spec: Err("does not parse".into()),
        }),
        0..2,
    );
    let parts = (
        nodes,
        option::weighted(0.9, peers()),
        option::weighted(0.8, policies),
        services(),
        option::weighted(0.8, Just(BTreeMap::new())),
        collection::btree_map(select(&["g-0", "g-1"][..]), gateway(n), 0..3),
    );
    let member = parts.prop_map(
        |(nodes, peers, policies, (services, slices), accesses, gateways)| Member {
            accesses,
            gateways: gateways
                .into_iter()
                .map(|(name, gateway)| (gateway_name(name), gateway))
                .collect(),
            nodes,
            peers,
            policies,
            services,
            slices,
            ..Member::default()
        },
    );
    member.boxed()
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
    let pods = format!("10.{}.0.0/16", n + 1);
    let services = format!("10.{}.0.0/16", 96 + n);
    let wireguard = own_wireguard(n, 0).trunc();
    let hosts = [
        format!("172.30.{}.0/24", n + 1),
        format!("172.30.{}.1/32", n + 1),
        format!("fd00:{}::/48", n + 1),
    ];
    let more: Vec<IpNet> = [services].into_iter().chain(hosts).map(parse).collect();
    let own = sample::subsequence(more, 0..=3).prop_map(move |mut own| {
        own.extend([parse(pods.clone()), wireguard]);
        own
    });
    let shape = (
        prop_oneof![
            8 => Just(Profile::ClusterMeshed),
            1 => Just(Profile::Sandbox),
            1 => Just(Profile::Standard),
        ],
        prop_oneof![4 => Just(Addressing::Routed), 1 => Just(Addressing::Masqueraded)],
        prop_oneof![20 => own, 1 => collection::vec(net(), 1..4)],
        option::weighted(0.2, collection::vec(net(), 0..2)),
        0u16..4,
        prop_oneof![4 => Just(PodNetwork::PerNode), 1 => Just(PodNetwork::Shared)],
        collection::vec(net(), 0..2),
        prop::bool::weighted(0.1),
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
        collection::vec(grant, 0..3),
        prop_oneof![4 => Just(5000), 1 => 1usize..3],
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
            quarantine: shape.7,
            confined_to: None,
            max_nodes,
        })
}

fn mesh() -> BoxedStrategy<Mesh> {
    let accepted = collection::btree_map(
        select(&["c0", "c1", "c2"][..]).prop_map(str::to_owned),
        collection::vec(net(), 0..3),
        0..3,
    );
    let accepted = prop_oneof![9 => Just(BTreeMap::new()), 1 => accepted];
    let parts = (
        (select(&["one", "two"][..]), select(&["m", "n"][..])),
        0i64..3,
        prop_oneof![9 => Just(false), 1 => Just(true)],
        prop_oneof![9 => Just(false), 1 => Just(true)],
        (cluster(0), cluster(1), cluster(2)),
        accepted,
    );
    let mesh = parts.prop_map(
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
    );
    mesh.boxed()
}

#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) meshes: Vec<Mesh>,
    pub(crate) seen: Observations,
}

/// An initial scenario, or one in which plans were written and some nodes then publish nothing, as while kg restarts.
pub(crate) fn scenario() -> BoxedStrategy<Scenario> {
    let stopped = option::of(collection::vec((0usize..3, select(&NODES[..])), 0..5));
    let scenario = (initial(), stopped).prop_map(|(scenario, stopped)| {
        let Some(stopped) = stopped else { return scenario };
        let mut scenario = after_writes(scenario);
        for (n, name) in stopped {
            let Some(Observation::Fresh(member)) = scenario.seen.members.get_mut(&identity(n)) else {
                continue;
            };
            if let Some(node) = member.nodes.get_mut(name) {
                (node.public_key, node.wireguard_ip) = (Claim::Absent, Claim::Absent);
                (node.kilo_endpoint, node.kilo_internal_ip, node.granularity) = (Claim::Absent, None, None);
            }
        }
        scenario
    });
    scenario.boxed()
}

/// The scenario after four plans were written. It takes several plans until nothing changes: a later plan may use what an earlier
/// one freed, and a held Node may lose its Peer.
pub(crate) fn after_writes(scenario: Scenario) -> Scenario {
    (0..4).fold(scenario, |scenario, _| apply_plan(&scenario))
}

fn initial() -> impl Strategy<Value = Scenario> {
    let observed = |n| {
        prop_oneof![
            12 => member(n).prop_map(Observation::Fresh),
            1 => member(n).prop_map(|member| Observation::Stale(member, "watch broken".into())),
            1 => Just(Observation::Unreachable("refused".into())),
            1 => Just(Observation::Missing("no Secret".into())),
        ]
    };
    let members = (observed(0), observed(1), observed(2));
    (collection::vec(mesh(), 1..4), members).prop_map(|(mut meshes, (a, b, c))| {
        let mut ids = BTreeSet::new();
        meshes.retain(|mesh| ids.insert(mesh.id.clone()));
        let members = (0..).zip([a, b, c]).map(|(n, member)| (identity(n), member));
        let resolved = BTreeMap::from([("a.example".to_owned(), "192.0.2.7".parse().unwrap())]);
        Scenario {
            meshes,
            seen: Observations {
                members: members.collect(),
                hub: "hub".into(),
                resolved,
            },
        }
    })
}

pub(crate) fn planned(scenario: &Scenario) -> Plan {
    plan(&scenario.meshes, &scenario.seen, &Settings::default(), &TestNaming)
}

pub(crate) fn steps(plan: &Plan, scenario: &Scenario) -> BTreeMap<ClusterIdentity, Vec<Step>> {
    let fresh = scenario
        .seen
        .members
        .iter()
        .filter_map(|(identity, member)| Some((identity, member.fresh()?)));
    fresh
        .map(|(identity, member)| (identity.clone(), diff(plan, identity, member)))
        .collect()
}

pub(crate) fn ownership_of<'a>(plan: &'a Plan, owner: &Owner) -> Ownership<'a> {
    ownership::of(owner, &plan.hub, &plan.claimants)
}
