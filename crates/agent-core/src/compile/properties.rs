//! What holds for any inputs, hostile ones too.

use proptest::{collection::vec, option, prelude::*, sample::select, strategy::ValueTree, test_runner::TestRunner};

use super::{tests::hub_node, *};
use crate::{
    device,
    firewall::{Update, render, update},
    numbers::TABLE,
    policy::{Port, Protocol, Rule},
    routes::{Kind, diff},
};

fn address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        4 => (prop_oneof![Just(10u8), Just(100), Just(172), any::<u8>()], 0u8..4, 0u8..4, 0u8..12)
            .prop_map(|(a, b, c, d)| IpAddr::from([a, b, c, d])),
        1 => (0u16..3, 0u16..3).prop_map(|(a, b)| IpAddr::from([0xfd00, a, 0, 0, 0, 0, 0, b])),
        1 => Just("172.29.0.111".parse().unwrap()),
    ]
}

fn net() -> impl Strategy<Value = IpNet> {
    (address(), prop_oneof![3 => 16u8..=32, 1 => 0u8..=32])
        .prop_map(|(a, l)| IpNet::new(a, if a.is_ipv4() { l.min(32) } else { l * 4 }).unwrap())
}

fn port() -> impl Strategy<Value = Port> {
    (prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)], 1u16..4)
        .prop_map(|(protocol, port)| Port { protocol, port })
}

fn rule() -> impl Strategy<Value = Rule> {
    (vec(net(), 0..4), vec(port(), 0..3)).prop_map(|(to, ports)| Rule {
        to: to.into_iter().collect(),
        ports: ports.into_iter().collect(),
    })
}

/// Policies and the Peers that require them have their names from here, so that they meet.
const NAMES: [&str; 3] = ["p", "q", "p\"; flush ruleset"];
const REVISIONS: [&str; 3] = ["1", "2", ""];

fn policy() -> impl Strategy<Value = Policy> {
    let endpoints = || vec((address(), port()), 0..3);
    (
        (select(&NAMES[..]), select(&REVISIONS[..])),
        vec(net(), 0..4),
        vec(net(), 0..4),
        vec(rule(), 0..3),
        vec(rule(), 0..2),
        vec(port(), 0..3),
        any::<bool>(),
        endpoints(),
        endpoints(),
    )
        .prop_map(
            |((name, revision), sources, networks, allow, deny, ports, sandbox, granted, draining)| Policy {
                name: name.to_owned(),
                sources: sources.into_iter().collect(),
                networks: networks.into_iter().collect(),
                allow,
                deny,
                infrastructure_ports: ports.into_iter().collect(),
                sandbox,
                granted: granted.into_iter().collect(),
                draining: draining.into_iter().collect(),
                revision: revision.to_owned(),
                ..Policy::default()
            },
        )
}

fn peer() -> impl Strategy<Value = Peer> {
    (
        0u8..6,
        0u64..4,
        option::of(address()),
        vec(net(), 0..5),
        option::weighted(0.2, (select(&NAMES[..]), select(&REVISIONS[..]))),
    )
        .prop_map(|(k, revision, endpoint, allowed_ips, required)| Peer {
            name: format!("peer-{k}-{revision}"),
            revision,
            public_key: PublicKey::new([k; 32]),
            preshared_key: None,
            endpoint: endpoint.map(|ip| SocketAddr::new(ip, 51820)),
            candidates: vec![],
            keepalive: None,
            allowed_ips,
            requires_policy: required.map(|(name, revision)| format!("{name}@{revision}")),
        })
}

/// A sandbox as the controller writes it: a policy, and Peers of single addresses inside it, some of which name another revision
/// of it than the one that stands; and whether that other one was seen.
fn sandbox() -> impl Strategy<Value = (Policy, Vec<Peer>, bool)> {
    let network = select(&["100.80.16.0/20", "10.3.0.0/16", "fd00:3::/32"][..]);
    let node = (6u8..10, 1u8..6, prop::bool::weighted(0.3));
    (policy(), network, vec(node, 1..4), any::<bool>()).prop_map(|(policy, network, nodes, seen)| {
        let network: IpNet = network.parse().unwrap();
        let policy = Policy {
            sources: [network].into(),
            networks: [network].into(),
            sandbox: true,
            revision: "1".to_owned(),
            ..policy
        };
        let peers = nodes.into_iter().map(|(k, n, changed)| Peer {
            name: format!("sandbox-{k}-{n}"),
            revision: 1,
            public_key: PublicKey::new([k; 32]),
            preshared_key: None,
            endpoint: None,
            candidates: vec![],
            keepalive: None,
            allowed_ips: vec![IpNet::from(match network.addr() {
                IpAddr::V4(a) => IpAddr::from((u32::from(a) + u32::from(n)).to_be_bytes()),
                IpAddr::V6(a) => IpAddr::from((u128::from(a) + u128::from(n)).to_be_bytes()),
            })],
            requires_policy: Some(format!("{}@{}", policy.name, if changed { "2" } else { "1" })),
        });
        let peers = peers.collect();
        (policy, peers, seen)
    })
}

fn inputs() -> impl Strategy<Value = Inputs> {
    (
        vec(peer(), 0..6),
        vec(policy(), 0..3),
        vec(net(), 0..4),
        vec(address(), 0..2),
        vec(address(), 0..4),
        vec(net(), 0..4),
        option::of(sandbox()),
    )
        .prop_map(
            |(mut peers, mut policies, throw, underlay, nodes, pods_elsewhere, sandbox)| {
                let mut earlier = Earlier::default();
                if let Some((policy, nodes, seen)) = sandbox {
                    if seen {
                        let granted = policy.granted.iter().copied().take(1).collect();
                        let before = Policy {
                            granted,
                            revision: "2".to_owned(),
                            ..policy.clone()
                        };
                        earlier.insert(format!("{}@2", policy.name), before);
                    }
                    policies.insert(0, policy);
                    peers.extend(nodes);
                }
                // Objects of one kind have different names.
                let mut names = BTreeSet::new();
                policies.retain(|policy| names.insert(policy.name.clone()));
                peers.retain(|peer| names.insert(peer.name.clone()));
                let mut inputs = Inputs {
                    nodes: nodes.into_iter().collect(),
                    pods_elsewhere: pods_elsewhere.into_iter().collect(),
                    peers,
                    policies,
                    earlier,
                    throw: throw.into_iter().collect(),
                    ..hub_node()
                };
                inputs.node.underlay_addresses.extend(underlay);
                inputs
            },
        )
}

/// The properties below say something of sandboxes only where the inputs hold Peers that are let in.
#[test]
fn generated_inputs_reach_every_state_of_a_sandbox() {
    let mut runner = TestRunner::deterministic();
    let [
        mut open,
        mut narrowed,
        mut closed,
        mut mismatched,
        mut missing,
        mut grants,
    ] = [0; 6];
    for _ in 0..256 {
        let inputs = inputs().new_tree(&mut runner).unwrap().current();
        let got = compile(&inputs);
        let refused = |reason| got.refused.iter().any(|refused| refused.reason == reason);
        let changed = refused(Reason::PolicyChanged);
        open += u32::from(!got.gated.is_empty() && !changed);
        narrowed += u32::from(changed && !inputs.earlier.is_empty());
        closed += u32::from(changed && inputs.earlier.is_empty());
        mismatched += u32::from(refused(Reason::PolicyMismatch));
        missing += u32::from(refused(Reason::PolicyMissing));
        grants += u32::from(
            [&got.firewall.v4, &got.firewall.v6]
                .iter()
                .any(|sets| !sets.grants.is_empty()),
        );
    }
    let reached = [open, narrowed, closed, mismatched, missing, grants];
    assert!(reached.iter().all(|count| *count >= 16), "of 256: {reached:?}");
}

proptest! {
    #[test]
    fn any_inputs_converge_and_the_second_pass_does_nothing(a in inputs(), b in inputs()) {
        let (a, b) = (compile(&a), compile(&b));
        let mut there = a.routes.clone();
        for change in diff(&a.routes, &b.routes).unwrap_or_default() {
            there.step(&change);
        }
        prop_assert_eq!(&there, &b.routes);
        prop_assert_eq!(diff(&there, &b.routes), None);
        prop_assert_eq!(update(Some(&b.firewall), &b.firewall), None);
        // But for the first sandbox and the last, or where something is closed and something else is not any more, only
        // elements differ.
        let whole = matches!(update(Some(&a.firewall), &b.firewall), Some(Update::Whole { .. }));
        let beyond = |a: &Firewall, b: &Firewall| {
            let ports = !a.infrastructure.is_subset(&b.infrastructure);
            ports || [(&a.v4, &b.v4), (&a.v6, &b.v6)].iter().any(|(a, b)| {
                !a.deny.is_subset(&b.deny)
                    || !a.deny_ports.is_subset(&b.deny_ports)
                    || !a.api.is_subset(&b.api)
                    || !a.nodes.is_subset(&b.nodes)
                    || !a.pods_elsewhere.is_subset(&b.pods_elsewhere)
            })
        };
        let both = beyond(&a.firewall, &b.firewall) && beyond(&b.firewall, &a.firewall);
        prop_assert_eq!(whole, both || a.firewall.frame != b.firewall.frame);
        prop_assert_eq!(device::diff(&device::ObservedPeers::new(), &b.peers).is_none(), b.peers.is_empty());
    }

    /// DESIGN §4 rule 7, whatever the objects say.
    #[test]
    fn a_sandbox_has_single_addresses_of_its_own_no_endpoint_and_reaches_its_grants_alone(inputs in inputs()) {
        let got = compile(&inputs);
        let clean = |policy| refuse::clean_policy(&inputs.node, policy, &mut Vec::new());
        let sandboxes: Vec<Policy> = inputs.policies.iter().filter(|policy| policy.sandbox).map(clean).collect();
        let theirs = |net: &IpNet| sandboxes.iter().any(|policy| policy.sources.iter().any(|source| overlap(source, net)));
        for (key, spec) in &got.peers {
            if got.gated.contains_key(key) {
                prop_assert_eq!(spec.endpoint, None);
                prop_assert!(spec.allowed_ips.iter().all(|net| net.prefix_len() == net.max_prefix_len() && theirs(net)));
            } else {
                prop_assert!(!spec.allowed_ips.iter().any(theirs), "{:?}", spec);
            }
        }
        for (source, to, port) in [&got.firewall.v4, &got.firewall.v6].into_iter().flat_map(|sets| &sets.grants) {
            let granted = |policy: &Policy| {
                policy.sources.iter().any(|net| net.contains(source)) && policy.granted.contains(&(*to, *port))
            };
            prop_assert!(sandboxes.iter().any(granted), "{source} {to} {port:?}");
            let host = IpNet::from(*source);
            let peer = |key: &PublicKey| got.peers.get(key).is_some_and(|spec| spec.allowed_ips.contains(&host));
            prop_assert!(got.gated.keys().any(peer), "{source} has no Peer");
        }
    }

    /// Without the firewall table's mark routing leads nobody to a sandbox, whatever else lies around its networks.
    #[test]
    fn no_route_of_the_mesh_leads_to_a_sandbox(inputs in inputs()) {
        let got = compile(&inputs);
        let clean = |policy| refuse::clean_policy(&inputs.node, policy, &mut Vec::new());
        let sandboxes = inputs.policies.iter().filter(|policy| policy.sandbox).map(clean);
        let nets: Vec<IpNet> = sandboxes.flat_map(|policy| policy.networks.into_iter().chain(policy.sources)).collect();
        let table: Vec<_> = got.routes.routes.iter().filter(|route| route.table == TABLE).collect();
        // A way changes only where a prefix begins or ends.
        for net in nets.iter().copied().chain(table.iter().map(|route| route.prefix)) {
            for address in [net.network(), net.broadcast()].into_iter().filter(|a| nets.iter().any(|net| net.contains(a))) {
                let holds = table.iter().filter(|route| route.prefix.contains(&address));
                let best = holds.max_by_key(|route| (route.prefix.prefix_len(), std::cmp::Reverse(route.metric)));
                prop_assert!(!best.is_some_and(|route| matches!(route.kind, Kind::Device { .. })), "{address}: {best:?}");
            }
        }
    }

    /// A device moves a range from peer to peer: with two that want it, a diff would never come to rest.
    #[test]
    fn no_two_peers_are_given_one_range_and_the_newest_that_wants_it_has_it(
        first in inputs(), shared in vec((1u8..3, 16u8..=32), 1..4)
    ) {
        let mut inputs = first;
        // Ranges that nothing forbids, with host bits, asked for by every Peer.
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
            prop_assert_eq!(names.len(), 1, "{} is given to {:?}", net, names);
        }
        let newest = got.names.keys().filter_map(|key| inputs.peers.iter().find(|p| p.public_key == *key));
        if let Some(newest) = newest.max_by_key(|p| (p.revision, &p.name)) {
            for net in &shared {
                prop_assert_eq!(&owners[&net.trunc()], &vec![newest.name.as_str()]);
            }
        }
    }

    #[test]
    fn a_route_into_the_device_is_a_peers_and_stands_before_a_closed_door(inputs in inputs()) {
        let got = compile(&inputs);
        let ranges: BTreeSet<IpNet> = got.peers.values().flat_map(|p| p.allowed_ips.clone()).collect();
        let closed: BTreeSet<IpNet> =
            got.routes.routes.iter().filter(|r| r.kind == Kind::Unreachable).map(|r| r.prefix).collect();
        for route in &got.routes.routes {
            if route.metric == crate::numbers::METRIC_PEER && route.table == TABLE {
                prop_assert!(ranges.contains(&route.prefix), "{route} is no Peer's");
            }
            if route.table == TABLE {
                prop_assert!(covered(&route.prefix, &closed), "{route} has no closed door behind it");
                prop_assert!(route.prefix.prefix_len() > 0);
                prop_assert!(!touches_pods(&inputs.node, &route.prefix) || route.kind == Kind::Throw, "{route}");
            }
        }
        for (key, name) in &got.names {
            let peer = inputs.peers.iter().find(|peer| peer.name == *name).unwrap();
            prop_assert_eq!(peer.requires_policy.is_some(), got.gated.contains_key(key), "{:?}", peer);
        }
    }

    #[test]
    fn a_rendered_table_decides_before_it_lets_in_and_holds_no_text_of_objects(inputs in inputs()) {
        let text = render(&compile(&inputs).firewall);
        prop_assert!(!text.contains("flush"));
        for hook in ["input", "forward"] {
            let chain = text.split(&format!("chain policy_{hook} {{")).nth(1).unwrap().split('}').next().unwrap();
            prop_assert!(chain.contains("iifname \"kilo0\" goto from_mesh"));
            prop_assert!(!chain.contains(" accept\n"));
        }
        let from_mesh = text.split("chain from_mesh {").nth(1).unwrap().split("\n  }").next().unwrap();
        prop_assert!(from_mesh.trim_end().ends_with("counter drop"));
    }
}
