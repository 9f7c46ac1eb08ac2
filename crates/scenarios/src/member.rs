//! Generates the observed state of a member: its nodes, gateways, Services and existing objects.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use clustermesh_core::{
    mesh::{ObjectName, Protocol},
    observe::{
        Claim, Endpoint, Families, Gateway, Granularity, Member, Node, ObservedPeer, ObservedPolicy, Owner, PeerRole,
        PeerSpec, Server, Service, ServicePort, Slice, SliceEndpoint,
    },
};
use ipnet::IpNet;
use proptest::{collection, option, prelude::*, sample::select};

use crate::values::{claim, endpoint, ip, key, net, own_address, own_key, own_pods, own_wireguard, socket_address};

/// The `k`-th node of cluster `n`. Most of its values are valid and its own, so that most nodes get Peers; the other values are arbitrary.
/// This strategy and [`member`] are boxed, because their nested types would overflow the stack.
pub fn node(n: usize, k: u8) -> BoxedStrategy<Node> {
    let own_claims = Just(vec![Claim::Valid(own_pods(n, k))]);
    let additional = claim(net()).prop_map(move |more| vec![Claim::Valid(own_pods(n, k)), more]);
    let identity = (
        prop_oneof![12 => own_claims, 1 => additional, 1 => collection::vec(claim(net()), 0..3)],
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
        0u8..8,
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
        is_preferred_leader: kilo.7 & 1 == 1,
        silent: kilo.7 & 2 == 2,
        leaving: kilo.7 & 4 == 4,
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
            role: PeerRole::Node,
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
    // Half of the Peers look like those that a plan writes; the others have a random owner and spec. The suffix is the one that
    // `TestNaming` adds for a mesh in the namespace `one` if the plain name is taken.
    let peer = (name, any::<bool>(), owner(), spec_or_error).prop_map(|(name, has_random_content, owner, spec)| {
        let ((mesh, is_taken), n, k, namespace) = name;
        let suffix = if is_taken { "-one" } else { "" };
        let name = format!("{mesh}--c{n}--{}{suffix}", NODE_NAMES[k]);
        if has_random_content {
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
            role: PeerRole::Node,
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
    // (external_name, selectorless)
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

/// Names of nodes. `NODE_NAMES[k - 1]` is the name of the `k`-th [`node`] of each cluster.
pub(crate) const NODE_NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// The name of a SandboxGateway.
pub fn gateway_name(name: &str) -> ObjectName {
    ObjectName {
        namespace: "gateways".into(),
        name: name.into(),
    }
}

/// A gateway of cluster `n`. Its key, and mostly its address, is one that a node with a number from 6 to 8 would have; the nodes have
/// the numbers 1 to 4.
fn gateway(n: usize) -> impl Strategy<Value = Gateway> {
    let address = prop_oneof![8 => (6u8..9).prop_map(move |k| own_wireguard(n, k).addr()), 1 => ip()];
    (
        6u8..9,
        address,
        collection::vec(socket_address(), 0..3),
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(move |(k, address, endpoints, serves_only_c1, ready)| Gateway {
            public_key: own_key(n, k),
            addresses: [address].into(),
            endpoints,
            serves: serves_only_c1.then(|| "c1".to_owned()).into_iter().collect(),
            ready,
            exists: true,
            applied: BTreeMap::new(),
            refused: BTreeMap::new(),
        })
}

/// The observed state of cluster `n`.
pub fn member(n: usize) -> BoxedStrategy<Member> {
    let maybe = |k| option::weighted(0.7, node(n, k));
    // A member with a node that runs only kg does not enforce policies, so most members have only nodes of wg-agent.
    let only_agents = prop::bool::weighted(0.6);
    let nodes = (only_agents, (maybe(1), maybe(2), maybe(3), maybe(4))).prop_map(|(only_agents, (a, b, c, d))| {
        let nodes = NODE_NAMES.into_iter().zip([a, b, c, d]);
        let mut nodes: BTreeMap<String, Node> = nodes
            .filter_map(|(name, node)| Some((name.to_owned(), node?)))
            .collect();
        if only_agents {
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
            nodes: nodes.into(),
            peers: peers.map(Into::into),
            policies,
            services,
            slices,
            ..Member::default()
        },
    );
    member.boxed()
}
