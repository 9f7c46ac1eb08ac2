//! Property tests: the answers agree with a second, independent evaluation. It reads the planned Peers, policies and
//! SandboxAccesses, and the observed members. It uses none of the planner's rules.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use clustermesh_core::{
    key::PublicKey,
    mesh::{Addressing, ClusterIdentity, Locations, PodNetwork, Protocol},
    observe::{Claim, Member, Observation, PeerRole, PolicySpec, Server},
    plan::{Plan, Settings, TargetPlan},
};
use clustermesh_scenarios::{Scenario, TestNaming, identity, ip, planned, sandboxed, scenario};
use ipnet::IpNet;
use proptest::{option, prelude::*, sample::select};

use super::{Destination, Explainer, Explanation, Rule, Source, Verdict};

/// The plans of all meshes for a cluster, each with a function that resolves the names of sources in that mesh.
fn target_plans<'p>(
    plan: &'p Plan,
    cluster: &'p ClusterIdentity,
) -> impl Iterator<Item = (&'p TargetPlan, impl Fn(&str) -> Option<&'p ClusterIdentity>)> {
    plan.meshes.values().flat_map(move |mesh| {
        let entries = mesh.identities.iter().filter(move |(_, identity)| *identity == cluster);
        entries.map(move |(name, _)| (&mesh.targets[name], move |source: &str| mesh.identities.get(source)))
    })
}

/// The nodes of `source` whose planned Peers in `cluster` contain an address.
fn nodes_with_address(
    scenario: &Scenario,
    plan: &Plan,
    cluster: &ClusterIdentity,
    source: &ClusterIdentity,
    address: IpAddr,
) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    if scenario.seen.members[cluster]
        .last()
        .is_some_and(|member| member.peers.is_none())
    {
        // The cluster has no Peer CRD, so no Peer can be written into it.
        return found;
    }
    for (target, resolve) in target_plans(plan, cluster) {
        let peers = target
            .peers
            .values()
            .filter(|peer| resolve(&peer.source) == Some(source));
        let containing = peers.filter(|peer| peer.spec.allowed_ips.iter().any(|net| net.contains(&address)));
        found.extend(containing.map(|peer| peer.node.clone()));
    }
    found
}

fn planned_policies<'p>(plan: &'p Plan, cluster: &'p ClusterIdentity, source: &ClusterIdentity) -> Vec<&'p PolicySpec> {
    let mut found = Vec::new();
    for (target, resolve) in target_plans(plan, cluster) {
        let policies = target
            .policies
            .values()
            .filter(|policy| resolve(&policy.source) == Some(source));
        found.extend(policies.map(|policy| &policy.spec));
    }
    found
}

fn node_addresses(member: &Member) -> BTreeSet<IpAddr> {
    let nodes = || member.nodes.values();
    let own = nodes().flat_map(|node| {
        node.internal_ips
            .iter()
            .chain(&node.external_ips)
            .map(IpAddr::to_canonical)
    });
    own.chain(nodes().filter_map(|node| node.wireguard_ip.value().map(|net| net.addr())))
        .collect()
}

/// Whether a sandbox reaches the port through a gateway: a planned SandboxAccess grants it, and a planned Peer contains the gateway's
/// address. The planner plans this Peer only after the SandboxAccess was written; before, the planned grant alone counts.
fn enters_through_gateway(
    plan: &Plan,
    member: &Member,
    from: &Source,
    to: &Destination,
    port: (Protocol, u16),
) -> bool {
    let accesses = || {
        target_plans(plan, &to.cluster).flat_map(|(target, resolve)| {
            let of_source = target
                .accesses
                .values()
                .filter(move |access| resolve(&access.source) == Some(&from.cluster));
            of_source.map(|access| &access.spec)
        })
    };
    let access_exists = accesses().any(|planned| {
        let mut existing = member.accesses.iter().flat_map(|existing| existing.values());
        existing.any(|access| access.spec.as_ref().is_ok_and(|spec| spec.id == planned.id))
    });
    let peers = target_plans(plan, &from.cluster).flat_map(|(target, _)| target.peers.values());
    let has_peer = peers
        .into_iter()
        .any(|peer| peer.spec.allowed_ips.contains(&to.address.into()));
    let is_gateway = member
        .gateways
        .values()
        .any(|gateway| gateway.addresses.contains(&to.address));
    is_gateway && accesses().any(|access| access.grants.contains_key(&port)) && (has_peer || !access_exists)
}

/// Whether the planned objects allow a packet with one of these source addresses to reach its destination.
fn is_open(
    scenario: &Scenario,
    plan: &Plan,
    sources: &BTreeSet<IpAddr>,
    from: &Source,
    to: &Destination,
    port: (Protocol, u16),
) -> bool {
    let nodes = nodes_with_address(scenario, plan, &from.cluster, &to.cluster, to.address);
    let is_closed = planned_policies(plan, &from.cluster, &to.cluster)
        .into_iter()
        .any(|spec| spec.closed && spec.networks.iter().any(|net| net.contains(&to.address)));
    let Some(member) = scenario.seen.members[&to.cluster].last() else {
        return false;
    };
    if nodes.is_empty() || is_closed {
        return enters_through_gateway(plan, member, from, to, port);
    }
    sources.iter().any(|source| {
        if member.policies.is_none() {
            return true;
        }
        let of_source = |spec: &&PolicySpec| spec.sources.iter().any(|net| net.contains(source));
        let specs: Vec<&PolicySpec> = planned_policies(plan, &to.cluster, &from.cluster)
            .into_iter()
            .filter(of_source)
            .collect();
        let any = |matches: &dyn Fn(&PolicySpec) -> bool| specs.iter().any(|spec| matches(spec));
        if port.0 == Protocol::Tcp && any(&|spec| spec.deny.contains(&(to.address, port.1).into())) {
            return false;
        }
        if any(&|spec| spec.infrastructure_ports.contains(&port)) && node_addresses(member).contains(&to.address) {
            return false;
        }
        if any(&|spec| spec.closed) {
            return false;
        }
        !is_wireguard_only(member, to.address) && any(&|spec| spec.allow.iter().any(|net| net.contains(&to.address)))
    })
}

/// Whether an address is the WireGuard address of a node, and no InternalIP. All ports are closed at such an address.
fn is_wireguard_only(member: &Member, address: IpAddr) -> bool {
    let mut nodes = member.nodes.values();
    let is_wireguard = nodes.any(|node| node.wireguard_ip.value().is_some_and(|net| net.addr() == address));
    let mut nodes = member.nodes.values();
    let is_internal = nodes.any(|node| node.internal_ips.iter().any(|ip| ip.to_canonical() == address));
    is_wireguard && !is_internal
}

/// The source address with which packets of `from` arrive; empty if they do not arrive. First choice: the address of `from`, if the Peer of
/// the node (any Peer, if the node is unknown) contains that address. Second choice: the node's WireGuard address, if the Peer of the node
/// contains that address, and the destination has the same family.
fn arriving_sources(scenario: &Scenario, plan: &Plan, from: &Source, to: &Destination) -> BTreeSet<IpAddr> {
    let is_in_own_peer = |address: &IpAddr| {
        let nodes = nodes_with_address(scenario, plan, &to.cluster, &from.cluster, *address);
        from.node
            .as_ref()
            .map_or(!nodes.is_empty(), |node| nodes.contains(node))
    };
    if let Some(address) = from.address.filter(is_in_own_peer) {
        return [address].into();
    }
    let member = scenario.seen.members[&from.cluster].last();
    let node = from.node.as_ref().and_then(|node| member?.nodes.get(node));
    let wireguard = node.and_then(|node| node.wireguard_ip.value()).map(|net| net.addr());
    wireguard
        .filter(|address| is_in_own_peer(address) && address.is_ipv4() == to.address.is_ipv4())
        .into_iter()
        .collect()
}

/// A scenario in which many connections are allowed: the hub and `c1` each have a valid node and an API server whose address is in
/// the mesh; 10.96.0.0/16 is an anchored network of the hub. Sometimes one member is quarantined, one has no PeerPolicy CRD, or both have
/// no Peers yet.
fn connected() -> impl Strategy<Value = Scenario> {
    let quarantined = option::weighted(0.3, 0usize..3);
    (
        sandboxed(),
        quarantined,
        any::<bool>(),
        option::weighted(0.2, 0usize..2),
    )
        .prop_map(|(mut scenario, quarantined, has_peers, without_crd)| {
            for mesh in &mut scenario.meshes {
                mesh.deleting = false;
                for (cluster, more) in mesh.clusters.iter_mut().zip([["10.96.0.0/16"], ["100.66.3.0/24"]]) {
                    cluster.allowed.extend(more.map(|net| net.parse::<IpNet>().unwrap()));
                    cluster.max_nodes = 5000;
                    cluster.pod_network = PodNetwork::PerNode;
                    // `None`: each network of `allowed` in which no Node has a prefix is anchored, so 10.96.0.0/16 is.
                    cluster.anchored = None;
                }
                mesh.clusters[1].addressing = Addressing::Routed;
                quarantined.into_iter().for_each(|n| mesh.clusters[n].quarantine = true);
            }
            let hub = scenario.seen.members[&identity(0)].last().unwrap().clone();
            for n in [0, 1] {
                let mut member = hub.clone();
                if n == 1 {
                    member.nodes.retain(|name, _| name == "good");
                    let node = member.nodes.get_mut("good").unwrap();
                    node.pod_cidrs = vec![Claim::Valid("10.2.9.0/24".parse().unwrap())];
                    node.wireguard_ip = Claim::Valid("100.66.3.9/24".parse().unwrap());
                    node.public_key = Claim::Valid(PublicKey::new([60; 32]));
                }
                let node = member.nodes.get_mut("good").unwrap();
                (node.ready, node.server) = (true, Server::Agent);
                member.api_endpoints = ["10.1.9.7:6443".parse().unwrap()].into();
                member.policies = (without_crd != Some(n)).then(BTreeMap::new);
                if !has_peers {
                    member.peers = Some([].into());
                }
                scenario.seen.members.insert(identity(n), Observation::Fresh(member));
            }
            scenario
        })
}

/// Addresses of pods, nodes, gateways and anchored networks in the scenarios of [`connected`].
const MESH_ADDRESSES: &[&str] = &[
    "10.1.9.7",
    "100.66.1.9",
    "100.66.2.9",
    "100.66.3.9",
    "10.2.9.7",
    "10.96.0.1",
    "10.1.200.1",
    "100.66.1.10",
];
/// Destination ports of the queries. Gateway ports begin at 20000, so no query has one, and [`enters_through_gateway`] is always false.
/// The function only completes the model.
const PORTS: &[u16] = &[80, 443, 6443, 10250];

fn query() -> impl Strategy<Value = (Source, Destination)> {
    let node = || option::of(select(&["a", "b", "c", "good"][..]).prop_map(str::to_owned));
    let address = || prop_oneof![ip(), select(MESH_ADDRESSES).prop_map(|ip| ip.parse().unwrap())];
    let clusters = select(&[(0, 1), (1, 0), (2, 0), (2, 0), (2, 1), (0, 2)][..]);
    (clusters, node(), option::of(address()), address(), select(PORTS)).prop_map(|((a, b), node, source, to, port)| {
        let from = Source {
            cluster: identity(a),
            node,
            address: source,
        };
        let to = Destination {
            cluster: identity(b),
            node: None,
            address: to,
            port: Some((Protocol::Tcp, port)),
        };
        (from, to)
    })
}

/// A query whose answer is often "allowed".
fn likely_query() -> impl Strategy<Value = (Source, Destination)> {
    let to = select(&["10.1.9.7", "10.2.9.7", "100.66.1.9", "100.66.3.9", "10.96.0.1"][..]);
    let own = select(&[None, Some("10.1.9.5"), Some("10.2.9.5"), Some("172.16.0.1")][..]);
    (query(), select(&[(0, 1), (1, 0), (2, 0)][..]), own, to).prop_map(|((_, to), (a, b), own, address)| {
        let from = Source {
            cluster: identity(a),
            node: Some("good".into()),
            address: own.map(|own| own.parse().unwrap()),
        };
        let to = Destination {
            cluster: identity(b),
            address: address.parse().unwrap(),
            ..to
        };
        (from, to)
    })
}

fn explain_in(scenario: &Scenario, plan: &Plan, from: &Source, to: &Destination) -> Explanation {
    let Scenario { meshes, seen } = scenario;
    Explainer::new(meshes, seen, &Settings::default(), &TestNaming, plan).explain(from, to)
}

/// Whether packets of `from` may pass through the leader of its location (kg with granularity `location`): the Peer of its node does not
/// contain its address. The planner chooses the leader, so this model cannot check such an answer.
fn is_behind_leader(scenario: &Scenario, plan: &Plan, from: &Source, to: &Destination) -> bool {
    let Some(address) = from.address else { return false };
    let nodes = scenario.seen.members[&from.cluster].last().map(|member| &member.nodes);
    let has_locations = nodes.is_some_and(|nodes| nodes.values().any(|node| node.granularity.is_some()));
    let owners = nodes_with_address(scenario, plan, &to.cluster, &from.cluster, address);
    has_locations && from.node.as_ref().is_some_and(|node| !owners.contains(node))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn explain_agrees_with_the_planned_objects(
        scenario in prop_oneof![scenario(), sandboxed(), connected()],
        queries in prop::collection::vec(prop_oneof![query(), likely_query()], 24),
    ) {
        let plan = planned(&scenario);
        for (from, to) in &queries {
            let answer = explain_in(&scenario, &plan, from, to);
            // If the Peer CRD is missing, no planned Peer is written.
            let has_crd = |cluster| scenario.seen.members[cluster].last().is_none_or(|member| member.peers.is_some());
            let is_allowed = has_crd(&from.cluster)
                && has_crd(&to.cluster)
                && is_open(&scenario, &plan, &arriving_sources(&scenario, &plan, from, to), from, to, to.port.unwrap());
            match answer.verdict() {
                Verdict::Allowed if is_behind_leader(&scenario, &plan, from, to) => {}
                Verdict::Allowed => prop_assert!(is_allowed, "no object allows {from:?} -> {to:?}: {answer:?}"),
                Verdict::Denied => prop_assert!(!is_allowed, "the objects allow {from:?} -> {to:?}: {answer:?}"),
                Verdict::Unknown => {
                    let mut clusters = [&from.cluster, &to.cluster].into_iter();
                    let is_unobserved = clusters.any(|cluster| scenario.seen.members[cluster].last().is_none());
                    prop_assert!(is_unobserved, "{answer:?}");
                }
            }
        }
    }

    #[test]
    fn connection_inside_a_cluster_uses_a_tunnel_between_locations(mut scenario in scenario()) {
        for cluster in scenario.meshes.iter_mut().flat_map(|mesh| &mut mesh.clusters) {
            cluster.locations = Locations::Connected;
        }
        for member in scenario.seen.members.values_mut() {
            let Observation::Fresh(member) = member else { continue };
            for (node, location) in member.nodes.values_mut().zip(["east", "west"].into_iter().cycle()) {
                (node.server, node.location) = (Server::Agent, location.into());
            }
        }
        let plan = planned(&scenario);
        for cluster in (0..3).map(identity) {
            let own: Vec<_> = target_plans(&plan, &cluster)
                .flat_map(|(target, _)| target.peers.values())
                .filter_map(|peer| match &peer.spec.role {
                    PeerRole::OwnNode(location) => Some((peer, location)),
                    _ => None,
                })
                .collect();
            for ((source, here), (destination, there)) in own.iter().flat_map(|source| own.iter().map(move |destination| (source, destination))) {
                let from = Source { cluster: cluster.clone(), node: Some(source.node.clone()), address: None };
                // The WireGuard address of a node is in no other Peer.
                let wireguard = destination.spec.allowed_ips.iter().find(|net| net.to_string().starts_with("100.66."));
                let Some(address) = wireguard.map(IpNet::addr) else { continue };
                let to = Destination { cluster: cluster.clone(), node: None, address, port: None };
                let rule = if here == there { Rule::SameCluster } else { Rule::BetweenLocations };
                let answer = explain_in(&scenario, &plan, &from, &to);
                prop_assert_eq!(answer.rule, rule, "{}", answer.message);
            }
        }
    }

    #[test]
    fn explain_without_port_gives_best_verdict_of_all_ports(
        scenario in prop_oneof![scenario(), sandboxed(), connected()],
        (from, to) in prop_oneof![query(), likely_query()],
    ) {
        // Without a port, the verdict includes ping, which a node's WireGuard address answers.
        let member = scenario.seen.members[&to.cluster].last();
        prop_assume!(!member.is_some_and(|member| is_wireguard_only(member, to.address)));
        let plan = planned(&scenario);
        let any = explain_in(&scenario, &plan, &from, &Destination { port: None, ..to.clone() }).verdict();
        let with_port = |port: &u16| {
            let to = Destination { port: Some((Protocol::Tcp, *port)), ..to.clone() };
            explain_in(&scenario, &plan, &from, &to).verdict()
        };
        // `Allowed` is the smallest verdict.
        prop_assert_eq!(any, PORTS.iter().map(with_port).min().unwrap());
    }
}
