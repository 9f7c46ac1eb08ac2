//! Property tests over arbitrary inputs, including hostile ones.

use clustermesh_core::mesh::Protocol;
use proptest::{
    collection::{btree_map, vec},
    option,
    prelude::*,
    sample::select,
};

use super::{tests::hub_node, *};
use crate::{
    device,
    firewall::{Update, render, update},
    numbers::TABLE,
    routes::{Kind, diff},
};

fn address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        4 => (prop_oneof![Just(10u8), Just(100), Just(172), any::<u8>()], 0u8..4, 0u8..4, 0u8..12)
            .prop_map(|(a, b, c, d)| IpAddr::from([a, b, c, d])),
        1 => (0u16..3, 0u16..3).prop_map(|(a, b)| IpAddr::from([0xfd00, a, 0, 0, 0, 0, 0, b])),
        // The InternalIP of the node in `hub_node`.
        1 => Just("172.29.0.111".parse().unwrap()),
    ]
}

fn net() -> impl Strategy<Value = IpNet> {
    (address(), prop_oneof![3 => 16u8..=32, 1 => 0u8..=32])
        .prop_map(|(a, l)| IpNet::new(a, if a.is_ipv4() { l.min(32) } else { l * 4 }).unwrap())
}

fn socket() -> impl Strategy<Value = SocketAddr> {
    (address(), 1u16..4).prop_map(SocketAddr::from)
}

fn port() -> impl Strategy<Value = (Protocol, u16)> {
    (prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)], 1u16..4)
}

const NAMES: [&str; 3] = ["p", "q", "p\"; flush ruleset"];

fn policy() -> impl Strategy<Value = PolicySpec> {
    (
        vec(net(), 0..4),
        vec(net(), 0..4),
        vec(net(), 0..8),
        vec(socket(), 0..4),
        vec(port(), 0..3),
        vec(net(), 0..2),
        any::<bool>(),
    )
        .prop_map(|(sources, networks, allow, deny, ports, anchored, closed)| PolicySpec {
            sources: sources.into_iter().collect(),
            networks: networks.into_iter().collect(),
            allow: allow.into_iter().collect(),
            deny: deny.into_iter().collect(),
            infrastructure_ports: ports.into_iter().collect(),
            anchored: anchored.into_iter().collect(),
            closed,
        })
}

fn peer() -> impl Strategy<Value = Peer> {
    (
        0u8..6,
        0u64..4,
        option::of(address()),
        vec(net(), 0..5),
        select(vec![
            PeerRole::Node,
            PeerRole::OwnNode("elsewhere".to_owned()),
            PeerRole::Gateway,
        ]),
    )
        .prop_map(|(k, revision, endpoint, allowed_ips, role)| Peer {
            name: format!("peer-{k}-{revision}"),
            revision,
            public_key: PublicKey::new([k; 32]),
            preshared_key: None,
            endpoint: endpoint.map(|ip| SocketAddr::new(ip, 51820)),
            candidates: vec![],
            keepalive: None,
            allowed_ips,
            role,
        })
}

fn inputs() -> impl Strategy<Value = Inputs> {
    (
        vec(peer(), 0..6),
        btree_map(select(&NAMES[..]).prop_map(str::to_owned), policy(), 0..3),
        vec(net(), 0..4),
        vec(address(), 0..2),
        vec(address(), 0..4),
        vec(net(), 0..4),
    )
        .prop_map(
            |(mut peers, policies, throw, underlay, nodes, pod_cidrs_of_other_nodes)| {
                // The names of a cluster's Peers are unique.
                let mut names = BTreeSet::new();
                peers.retain(|peer| names.insert(peer.name.clone()));
                let mut inputs = Inputs {
                    all_node_addresses: nodes.into_iter().collect(),
                    pod_cidrs_of_other_nodes: pod_cidrs_of_other_nodes.into_iter().collect(),
                    own_sources: BTreeSet::new(),
                    peers,
                    policies,
                    throw: throw.into_iter().collect(),
                    ..hub_node()
                };
                inputs.node.underlay_addresses.extend(underlay);
                inputs
            },
        )
}

proptest! {
    /// The test also checks that a device without peers needs changes exactly if some peer is desired.
    #[test]
    fn route_diff_converges_and_firewall_update_is_minimal(a in inputs(), b in inputs()) {
        let (a, b) = (compile(&a), compile(&b));
        let mut routes = a.routes.clone();
        for change in diff(&a.routes, &b.routes).unwrap_or_default() {
            routes.apply(&change);
        }
        prop_assert_eq!(&routes, &b.routes);
        prop_assert_eq!(diff(&routes, &b.routes), None);
        prop_assert_eq!(update(Some(&b.firewall), &b.firewall), None);
        // An update changes only elements, unless the rule parameters differ, or elements of sets that drop packets are both added and
        // removed.
        let whole = matches!(update(Some(&a.firewall), &b.firewall), Some(Update::Whole { .. }));
        let removes_deny = |old: &Firewall, new: &Firewall| {
            let removes_ports = !old.infrastructure.is_subset(&new.infrastructure);
            removes_ports || [(&old.v4, &new.v4), (&old.v6, &new.v6)].iter().any(|(old, new)| {
                !old.deny.is_subset(&new.deny)
                    || !old.deny_ports.is_subset(&new.deny_ports)
                    || !old.api.is_subset(&new.api)
                    || !old.nodes.is_subset(&new.nodes)
                    || !old.pod_cidrs_of_other_nodes.is_subset(&new.pod_cidrs_of_other_nodes)
                    || !old.closed.is_subset(&new.closed)
            })
        };
        let both = removes_deny(&a.firewall, &b.firewall) && removes_deny(&b.firewall, &a.firewall);
        prop_assert_eq!(whole, both || a.firewall.parameters != b.firewall.parameters);
        prop_assert_eq!(device::diff(&device::ObservedPeers::new(), &b.peers).is_none(), b.peers.is_empty());
    }

    // threat: closed-member-continues
    #[test]
    fn every_network_of_a_closed_member_is_closed(inputs in inputs()) {
        let got = compile(&inputs);
        let policies = refuse::clean_policies(&inputs, &mut Vec::new());
        for policy in policies.iter().filter(|policy| policy.closed) {
            for net in policy.sources.iter().chain(&policy.networks) {
                let sets = if net.addr().is_ipv4() { &got.firewall.v4 } else { &got.firewall.v6 };
                prop_assert!(covered(net, &sets.closed), "{net} of {policy:?}");
            }
        }
    }

    /// If two peers had the same allowed IP, each diff would move it from one peer to the other.
    #[test]
    fn allowed_ip_has_one_owner_which_is_the_newest_peer(
        inputs in inputs(), shared in vec((1u8..3, 16u8..=32), 1..4)
    ) {
        let mut inputs = inputs;
        // Every Peer gets the same valid allowed IPs. All that are shorter than /32 have host bits set.
        let shared: Vec<IpNet> =
            shared.iter().map(|(n, l)| IpNet::new_assert(IpAddr::from([198, 18, 4 * n, 9]), *l)).collect();
        for (n, peer) in inputs.peers.iter_mut().enumerate() {
            peer.public_key = PublicKey::new([n as u8 + 20; 32]);
            peer.allowed_ips.extend(&shared);
        }
        let got = compile(&inputs);
        let mut owners: BTreeMap<IpNet, Vec<&str>> = BTreeMap::new();
        for (key, peer) in &got.peers {
            for net in &peer.allowed_ips {
                prop_assert_eq!(*net, net.trunc());
                owners.entry(*net).or_default().push(&got.names[key]);
            }
        }
        for (net, names) in &owners {
            prop_assert_eq!(names.len(), 1, "{} is an allowed IP of {:?}", net, names);
        }
        let programmed = inputs.peers.iter().filter(|p| got.names.contains_key(&p.public_key));
        if let Some(newest) = programmed.max_by_key(|p| (p.revision, &p.name)) {
            for net in &shared {
                prop_assert_eq!(&owners[&net.trunc()], &vec![newest.name.as_str()]);
            }
        }
    }

    /// Checks the routes in [`TABLE`]. Also, none of them is a default route, and only throw routes overlap the node's pod CIDRs.
    #[test]
    fn peer_routes_are_allowed_ips_and_table_routes_have_fallback(inputs in inputs()) {
        let got = compile(&inputs);
        let allowed_ips: BTreeSet<IpNet> = got.peers.values().flat_map(|p| p.allowed_ips.clone()).collect();
        let unreachable: BTreeSet<IpNet> =
            got.routes.routes.iter().filter(|r| r.kind == Kind::Unreachable).map(|r| r.prefix).collect();
        for route in &got.routes.routes {
            if route.metric == crate::numbers::METRIC_PEER && route.table == TABLE {
                prop_assert!(allowed_ips.contains(&route.prefix), "{route} is no Peer's allowed IP");
            }
            if route.table == TABLE {
                prop_assert!(covered(&route.prefix, &unreachable), "{route} has no unreachable route as fallback");
                prop_assert!(route.prefix.prefix_len() > 0);
                prop_assert!(!overlaps_own_pods(&inputs.node, &route.prefix) || route.kind == Kind::Throw, "{route}");
            }
        }
    }

    // threat: script-injection
    #[test]
    fn rules_drop_by_default_and_contain_no_text_from_objects(inputs in inputs()) {
        let text = render(&compile(&inputs).firewall);
        prop_assert!(!text.contains("flush"));
        for hook in ["input", "forward"] {
            let chain = text.split(&format!("chain policy_{hook} {{")).nth(1).unwrap().split('}').next().unwrap();
            prop_assert!(chain.contains("iifname \"kilo0\" goto from_mesh"));
            prop_assert!(!chain.contains(" accept comment"));
        }
        let from_mesh = text.split("chain from_mesh {").nth(1).unwrap().split("\n  }").next().unwrap();
        let last = from_mesh.trim_end().lines().last().unwrap().trim();
        prop_assert!(last.starts_with("counter drop"), "{last}");
    }
}
