//! What `explain` answers against the objects that are planned: the packet's way is followed here a second time, by whoever
//! reads Peers, policies and EndpointSlices and knows no rule of the planner.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use clustermesh_core::{
    key::PublicKey,
    mesh::{Addressing, ClusterIdentity, PodNetwork, Protocol},
    observe::{Claim, Member, Observation, PolicySpec, Server},
    plan::{
        Plan, Settings, TargetPlan,
        explain::{self, Destination, Source, Verdict, explain},
    },
};
use ipnet::IpNet;
use proptest::{option, prelude::*, sample::select};

use crate::{
    sandbox::sandboxed,
    world::{Plain, World, identity, ip, planned, world},
};

/// What one member should hold, by every mesh, with whom each source's name there means.
fn held<'p>(
    plan: &'p Plan,
    cluster: &'p ClusterIdentity,
) -> impl Iterator<Item = (&'p TargetPlan, impl Fn(&str) -> Option<&'p ClusterIdentity>)> {
    plan.meshes.values().flat_map(move |mesh| {
        let entries = mesh.identities.iter().filter(move |(_, identity)| *identity == cluster);
        entries.map(move |(name, _)| (&mesh.targets[name], move |source: &str| mesh.identities.get(source)))
    })
}

/// Nodes whose Peers in `holder` carry an address of `source`.
fn carriers(
    world: &World,
    plan: &Plan,
    holder: &ClusterIdentity,
    source: &ClusterIdentity,
    address: IpAddr,
) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    if world.seen.members[holder]
        .last()
        .is_some_and(|member| member.peers.is_none())
    {
        // What is planned there cannot be written.
        return found;
    }
    for (target, of) in held(plan, holder) {
        let peers = target.peers.values().filter(|peer| of(&peer.source) == Some(source));
        let carry = peers.filter(|peer| peer.spec.allowed_ips.iter().any(|net| net.contains(&address)));
        found.extend(carry.map(|peer| peer.node.clone()));
    }
    found
}

fn specs<'p>(plan: &'p Plan, holder: &'p ClusterIdentity, source: &ClusterIdentity) -> Vec<&'p PolicySpec> {
    let mut found = Vec::new();
    for (target, of) in held(plan, holder) {
        let policies = target
            .policies
            .values()
            .filter(|policy| of(&policy.source) == Some(source));
        found.extend(policies.map(|policy| &policy.spec));
    }
    found
}

fn addresses(member: &Member) -> BTreeSet<IpAddr> {
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

/// Whether a sandbox reaches the port through a gateway: a SandboxAccess grants it, and a Peer carries the gateway's address as soon
/// as that stands.
fn enters(plan: &Plan, member: &Member, from: &Source, to: &Destination, port: (Protocol, u16)) -> bool {
    let accesses = || {
        held(plan, &to.cluster).flat_map(|(target, of)| {
            let of_source = target
                .accesses
                .values()
                .filter(move |access| of(&access.source) == Some(&from.cluster));
            of_source.map(|access| &access.spec)
        })
    };
    let stands = accesses().any(|planned| {
        let mut standing = member.accesses.iter().flat_map(|standing| standing.values());
        standing.any(|access| access.spec.as_ref().is_ok_and(|spec| spec.id == planned.id))
    });
    let peers = held(plan, &from.cluster).flat_map(|(target, _)| target.peers.values());
    let carried = peers
        .into_iter()
        .any(|peer| peer.spec.allowed_ips.contains(&to.address.into()));
    let here = member
        .gateways
        .values()
        .any(|gateway| gateway.addresses.contains(&to.address));
    here && accesses().any(|access| access.grants.contains_key(&port)) && (carried || !stands)
}

/// Whether a packet with one of these sources reaches its destination by what is planned.
fn opens(
    world: &World,
    plan: &Plan,
    sources: &BTreeSet<IpAddr>,
    from: &Source,
    to: &Destination,
    port: (Protocol, u16),
) -> bool {
    let nodes = carriers(world, plan, &from.cluster, &to.cluster, to.address);
    let shut = specs(plan, &from.cluster, &to.cluster)
        .into_iter()
        .any(|spec| spec.closed && spec.networks.iter().any(|net| net.contains(&to.address)));
    let Some(member) = world.seen.members[&to.cluster].last() else {
        return false;
    };
    if nodes.is_empty() || shut {
        return enters(plan, member, from, to, port);
    }
    sources.iter().any(|source| {
        if member.policies.is_none() {
            return true;
        }
        let of_source = |spec: &&PolicySpec| spec.sources.iter().any(|net| net.contains(source));
        let specs: Vec<&PolicySpec> = specs(plan, &to.cluster, &from.cluster)
            .into_iter()
            .filter(of_source)
            .collect();
        let any = |says: &dyn Fn(&PolicySpec) -> bool| specs.iter().any(|spec| says(spec));
        if port.0 == Protocol::Tcp && any(&|spec| spec.deny.contains(&(to.address, port.1).into())) {
            return false;
        }
        if any(&|spec| spec.infrastructure_ports.contains(&port)) && addresses(member).contains(&to.address) {
            return false;
        }
        if any(&|spec| spec.closed) {
            return false;
        }
        !tunnel_address(member, to.address) && any(&|spec| spec.allow.iter().any(|net| net.contains(&to.address)))
    })
}

/// A node's WireGuard address, and no address of its own: no port of the node is open there.
fn tunnel_address(member: &Member, address: IpAddr) -> bool {
    let mut nodes = member.nodes.values();
    let wireguard = nodes.any(|node| node.wireguard_ip.value().is_some_and(|net| net.addr() == address));
    let mut nodes = member.nodes.values();
    let own = nodes.any(|node| node.internal_ips.iter().any(|ip| ip.to_canonical() == address));
    wireguard && !own
}

/// The addresses by which packets of `from` come in: its own where a Peer of its node has it, else its node's WireGuard
/// address.
fn arrivals(world: &World, plan: &Plan, from: &Source, to: &Destination) -> BTreeSet<IpAddr> {
    let on_own = |address: &IpAddr| {
        let nodes = carriers(world, plan, &to.cluster, &from.cluster, *address);
        from.node
            .as_ref()
            .map_or(!nodes.is_empty(), |node| nodes.contains(node))
    };
    if let Some(address) = from.address.filter(on_own) {
        return [address].into();
    }
    let member = world.seen.members[&from.cluster].last();
    let node = from.node.as_ref().and_then(|node| member?.nodes.get(node));
    let wireguard = node.and_then(|node| node.wireguard_ip.value()).map(|net| net.addr());
    wireguard
        .filter(|address| on_own(address) && address.is_ipv4() == to.address.is_ipv4())
        .into_iter()
        .collect()
}

/// Where much is open: the hub and `c1` have a node each that is in order, an anchored network and an API server whose address
/// is in the mesh; now and then somebody is quarantined, or has no CRD for policies.
fn connected() -> impl Strategy<Value = World> {
    let closed = option::weighted(0.3, 0usize..3);
    (sandboxed(), closed, any::<bool>(), option::weighted(0.2, 0usize..2)).prop_map(
        |(mut world, closed, standing, bare)| {
            for mesh in &mut world.meshes {
                mesh.deleting = false;
                for (cluster, more) in mesh.clusters.iter_mut().zip([["10.96.0.0/16"], ["100.66.3.0/24"]]) {
                    cluster.allowed.extend(more.map(|net| net.parse::<IpNet>().unwrap()));
                    cluster.max_nodes = 5000;
                    cluster.pod_network = PodNetwork::PerNode;
                    cluster.anchored = None;
                }
                mesh.clusters[1].addressing = Addressing::Routed;
                closed.into_iter().for_each(|n| mesh.clusters[n].quarantine = true);
            }
            let hub = world.seen.members[&identity(0)].last().unwrap().clone();
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
                member.policies = (bare != Some(n)).then(BTreeMap::new);
                if !standing {
                    member.peers = Some(BTreeMap::new());
                }
                world.seen.members.insert(identity(n), Observation::Fresh(member));
            }
            world
        },
    )
}

const IN_ORDER: &[&str] = &[
    "10.1.9.7",
    "100.66.1.9",
    "100.66.2.9",
    "100.66.3.9",
    "10.2.9.7",
    "10.96.0.1",
    "10.1.200.1",
    "100.66.1.10",
];
const PORTS: &[u16] = &[80, 443, 6443, 10250];

fn question() -> impl Strategy<Value = (Source, Destination)> {
    let node = || option::of(select(&["a", "b", "c", "good"][..]).prop_map(str::to_owned));
    let address = || prop_oneof![ip(), select(IN_ORDER).prop_map(|ip| ip.parse().unwrap())];
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

/// One that has a chance.
fn likely() -> impl Strategy<Value = (Source, Destination)> {
    let to = select(&["10.1.9.7", "10.2.9.7", "100.66.1.9", "100.66.3.9", "10.96.0.1"][..]);
    let own = select(&[None, Some("10.1.9.5"), Some("10.2.9.5"), Some("172.16.0.1")][..]);
    (question(), select(&[(0, 1), (1, 0), (2, 0)][..]), own, to).prop_map(|((_, to), (a, b), own, address)| {
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

fn asked(world: &World, plan: &Plan, from: &Source, to: &Destination) -> explain::Explanation {
    let world = explain::ExplainInputs {
        meshes: &world.meshes,
        seen: &world.seen,
        settings: &Settings::default(),
        naming: &Plain,
        plan,
    };
    explain(&world, from, to)
}

/// `from` rides on another node of its location, where kg serves both: which one is the planner's affair.
fn led(world: &World, plan: &Plan, from: &Source, to: &Destination) -> bool {
    let Some(address) = from.address else { return false };
    let nodes = world.seen.members[&from.cluster].last().map(|member| &member.nodes);
    let located = nodes.is_some_and(|nodes| nodes.values().any(|node| node.granularity.is_some()));
    let elsewhere = carriers(world, plan, &to.cluster, &from.cluster, address);
    located && from.node.as_ref().is_some_and(|node| !elsewhere.contains(node))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_explain_denies_no_planned_object_opens_and_what_it_allows_they_do(
        world in prop_oneof![world(), sandboxed(), connected()],
        questions in prop::collection::vec(prop_oneof![question(), likely()], 24),
    ) {
        let plan = planned(&world);
        for (from, to) in &questions {
            let answer = asked(&world, &plan, from, to);
            // Where the CRD is missing, no planned Peer is written.
            let has_crd = |cluster| world.seen.members[cluster].last().is_none_or(|member| member.peers.is_some());
            let opens = has_crd(&from.cluster)
                && has_crd(&to.cluster)
                && opens(&world, &plan, &arrivals(&world, &plan, from, to), from, to, to.port.unwrap());
            match answer.verdict() {
                Verdict::Allowed if led(&world, &plan, from, to) => {}
                Verdict::Allowed => prop_assert!(opens, "nothing opens {from:?} -> {to:?}: {answer:?}"),
                Verdict::Denied => prop_assert!(!opens, "open all the same: {from:?} -> {to:?}: {answer:?}"),
                Verdict::Unknown => {
                    let unseen = [&from.cluster, &to.cluster].iter().any(|c| world.seen.members[*c].last().is_none());
                    prop_assert!(unseen, "{answer:?}");
                }
            }
        }
    }

    #[test]
    fn without_a_port_the_answer_is_that_of_some_port(
        world in prop_oneof![world(), sandboxed(), connected()],
        (from, to) in prop_oneof![question(), likely()],
    ) {
        // Without a port ping counts, which a node's WireGuard address answers.
        let tunnel = world.seen.members[&to.cluster].last().is_some_and(|member| tunnel_address(member, to.address));
        prop_assume!(!tunnel);
        let plan = planned(&world);
        let any = asked(&world, &plan, &from, &Destination { port: None, ..to.clone() }).verdict();
        let with = |port: u16| asked(&world, &plan, &from, &Destination { port: Some((Protocol::Tcp, port)), ..to.clone() }).verdict();
        prop_assert_eq!(any, PORTS.iter().map(|port| with(*port)).min().unwrap());
    }
}
