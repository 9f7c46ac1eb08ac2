//! The same worlds with sandboxes in them: what a sandbox's own side, which is hostile throughout, may move.

use std::{collections::BTreeSet, net::IpAddr};

use clustermesh_core::{
    key::PublicKey,
    mesh::{Addressing, Cluster, ClusterIdentity, Grant, Mesh, ObjectName, Profile, Protocol},
    observe::{
        Claim, Endpoint, Member, Node, Observation, PolicySpec, Server, Service, ServicePort, Slice, SliceEndpoint,
    },
    plan::{MeshPlan, Naming},
};
use ipnet::IpNet;
use proptest::prelude::*;

use crate::world::{Plain, World, identity, member, planned, world};

/// The profile that holds: the tightest of all meshes that are not being deleted.
fn profile(world: &World, identity: &ClusterIdentity) -> Profile {
    let meshes = world.meshes.iter().filter(|mesh| !mesh.deleting);
    let entries = meshes.flat_map(|mesh| &mesh.clusters);
    let same = entries.filter(|cluster| cluster.identity == *identity);
    same.map(|cluster| cluster.profile).max().unwrap_or(Profile::Standard)
}

fn entry<'a>(mesh: &'a Mesh, name: &str) -> &'a Cluster {
    mesh.clusters.iter().find(|cluster| cluster.name == name).unwrap()
}

fn is_host(net: &IpNet) -> bool {
    net.prefix_len() == net.max_prefix_len()
}

fn nets(list: &[&str]) -> Vec<IpNet> {
    list.iter().map(|net| net.parse().unwrap()).collect()
}

/// Where a sandbox is more than a rare accident: `c2` is one in every mesh, its entry and its grant toward `c0` are in order,
/// and so are a node of each and the Service that is granted. Whatever else there is stays as wild as it was.
pub(crate) fn sandboxed() -> impl Strategy<Value = World> {
    (world(), member(0), member(2)).prop_map(|(mut world, hub, sandbox)| {
        for mesh in &mut world.meshes {
            mesh.accepted.clear();
            mesh.clusters.iter_mut().for_each(|cluster| cluster.carriers.clear());
            mesh.clusters[2].profile = Profile::Sandbox;
            mesh.clusters[2].allowed = nets(&["100.66.2.0/24"]);
            mesh.clusters[2].max_nodes = 5000;
            mesh.clusters[2].egress.push(Grant {
                cluster: "c0".into(),
                service: granted(),
                ports: vec![],
                local: granted(),
            });
            for (cluster, allowed) in mesh.clusters[..2].iter_mut().zip(["10.1.0.0/16", "10.2.0.0/16"]) {
                cluster.profile = Profile::ClusterMeshed;
                cluster.allowed = nets(&[allowed]);
            }
            mesh.clusters[0].addressing = Addressing::Routed;
            mesh.clusters[0].allowed.extend(nets(&["100.66.1.0/24"]));
        }
        for (n, mut member) in [(0, hub), (2, sandbox)] {
            member.policies.get_or_insert_default();
            member.peers.get_or_insert_default();
            member.nodes.values_mut().for_each(|node| node.server = Server::Agent);
            let good = Node {
                created: -1,
                pod_cidrs: vec![Claim::Is("10.1.9.0/24".parse().unwrap())],
                wireguard_ip: Claim::Is(format!("100.66.{}.9/24", if n == 0 { 1 } else { 2 }).parse().unwrap()),
                public_key: Claim::Is(PublicKey::new([50 + n; 32])),
                kilo_endpoint: Claim::Is(Endpoint::Ip("192.0.2.9:51820".parse().unwrap())),
                server: Server::Agent,
                ..Node::default()
            };
            member.nodes.insert("good".into(), good);
            let port = ServicePort {
                name: "p".into(),
                port: 80,
                protocol: Protocol::Tcp,
            };
            let service = Service {
                ports: vec![port.clone()],
                ..Service::default()
            };
            member.services.insert(granted(), service);
            let backend = SliceEndpoint {
                address: "10.1.9.7".parse().unwrap(),
                node: Some("good".into()),
                ready: true,
                serving: true,
                terminating: false,
            };
            let slice = Slice {
                managed: None,
                service: granted().name,
                v6: false,
                ports: vec![port],
                endpoints: vec![backend],
            };
            member.slices.insert(granted(), slice);
            world
                .seen
                .members
                .insert(identity(n.into()), Observation::Fresh(member));
        }
        world
    })
}

fn granted() -> ObjectName {
    ObjectName {
        namespace: "ns".into(),
        name: "granted".into(),
    }
}

/// The addresses of the endpoints that `mesh` grants the sandbox `to` of the member `from`, on one node, and that node's own.
fn reach(world: &World, mesh: &Mesh, to: &str, from: &str, node: &str) -> BTreeSet<IpAddr> {
    let Some(member) = world.seen.members[&entry(mesh, from).identity].last() else {
        return BTreeSet::new();
    };
    let grants = entry(mesh, to).egress.iter().filter(|grant| grant.cluster == from);
    let slices = grants.flat_map(|grant| {
        let ours = member.slices.iter().filter(|(name, slice)| {
            slice.managed.is_none() && name.namespace == grant.service.namespace && slice.service == grant.service.name
        });
        ours.map(|(_, slice)| slice)
    });
    let endpoints = slices
        .flat_map(|slice| &slice.endpoints)
        .filter(|endpoint| endpoint.node.as_deref() == Some(node));
    let wireguard = member.nodes.get(node).and_then(|node| node.wireguard_ip.value());
    endpoints
        .map(|endpoint| endpoint.address)
        .chain(wireguard.map(IpNet::addr))
        .collect()
}

/// What a plan says of everybody but the nodes of `sandbox`.
pub(crate) fn settled(mesh: &MeshPlan, sandbox: &str) -> Vec<String> {
    let mut said = Vec::new();
    for (target, held) in mesh.targets.iter().filter(|(target, _)| *target != sandbox) {
        let peers = held.peers.iter().filter(|(_, peer)| peer.source != sandbox);
        said.extend(peers.map(|(name, peer)| format!("{target} {name} {peer:?}")));
        said.extend(
            held.policies
                .iter()
                .map(|(name, policy)| format!("{target} {name} {policy:?}")),
        );
        said.extend(
            held.services
                .iter()
                .map(|(name, service)| format!("{target} {name} {service:?}")),
        );
    }
    let egress = mesh.egress.iter().filter(|grant| grant.cluster != sandbox);
    said.extend(egress.map(|grant| format!("{grant:?}")));
    said
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_sandboxs_peer_is_single_addresses_of_its_own_and_waits_for_the_policy_beside_it(
        world in prop_oneof![world(), sandboxed()],
    ) {
        let plan = planned(&world);
        for mesh in plan.meshes.values() {
            for target in mesh.targets.values() {
                for peer in target.peers.values() {
                    if profile(&world, &mesh.identities[&peer.source]) != Profile::Sandbox {
                        prop_assert_eq!(&peer.spec.requires_policy, &None);
                        continue;
                    }
                    let accepted = &mesh.clusters[&peer.source].accepted;
                    for net in &peer.spec.allowed_ips {
                        prop_assert!(is_host(net), "{net} of {peer:?}");
                        prop_assert!(accepted.iter().any(|a| a.contains(net)), "{net} of {peer:?}");
                    }
                    prop_assert!(peer.spec.endpoint.is_none() && peer.spec.candidates.is_empty());
                    prop_assert_eq!(peer.spec.persistent_keepalive, 0);
                    let policies = target.policies.iter().filter(|(_, policy)| policy.source == peer.source);
                    let named = policies
                        .clone()
                        .map(|(name, policy)| format!("{name}@{}", Plain.policy_revision(&policy.source, &policy.spec)));
                    prop_assert!(named.clone().any(|name| peer.spec.requires_policy == Some(name)));
                    for (_, policy) in policies {
                        let PolicySpec { sources, networks, allow, sandbox, .. } = &policy.spec;
                        prop_assert!(*sandbox && allow.is_empty() && sources == networks);
                        prop_assert!(sources.iter().all(|net| accepted.iter().any(|a| a.contains(net))));
                        prop_assert!(peer.spec.allowed_ips.iter().all(|ip| sources.iter().any(|net| net.contains(ip))));
                    }
                }
            }
        }
    }

    #[test]
    fn in_a_sandbox_stand_granted_endpoints_and_their_nodes_alone(world in prop_oneof![world(), sandboxed()]) {
        let plan = planned(&world);
        for mesh in &world.meshes {
            let planned = &plan.meshes[&mesh.id];
            for (name, target) in &planned.targets {
                let of = profile(&world, &planned.identities[name]);
                for peer in target.peers.values() {
                    let source = profile(&world, &planned.identities[&peer.source]);
                    // Two sandboxes never meet, and nobody meets what is standard.
                    prop_assert!(of == Profile::ClusterMeshed || source == Profile::ClusterMeshed);
                    prop_assert!(of != Profile::Standard && source != Profile::Standard);
                    if of == Profile::Sandbox {
                        let reach = reach(&world, mesh, name, &peer.source, &peer.node);
                        for net in &peer.spec.allowed_ips {
                            prop_assert!(is_host(net) && reach.contains(&net.addr()), "{net} of {peer:?} not in {reach:?}");
                        }
                    }
                }
                if of == Profile::Sandbox {
                    for policy in target.policies.values() {
                        prop_assert!(policy.spec.allow.is_empty() && policy.spec.grants.is_empty());
                        prop_assert!(policy.spec.sources.iter().all(is_host));
                    }
                }
            }
        }
    }

    #[test]
    fn nothing_seen_of_a_sandbox_moves_what_others_hold_but_its_own_peers(
        world in sandboxed(),
        mut hostile in member(2),
    ) {
        let sandbox = identity(2);
        let mut world = world;
        // Whoever copies another's key is settled elsewhere: by who has the Peer.
        let own_keys = |member: &mut Member| {
            for (n, node) in member.nodes.values_mut().enumerate() {
                if let Claim::Is(key) = &mut node.public_key {
                    *key = PublicKey::new([100 + u8::try_from(n).unwrap(); 32]);
                }
            }
        };
        own_keys(&mut hostile);
        let mut quiet = Member { peers: Some([].into()), policies: Some([].into()), ..Member::default() };
        quiet.nodes.insert("a".into(), Node::default());
        world.seen.members.insert(sandbox.clone(), Observation::Fresh(quiet));
        let mut other = world.clone();
        other.seen.members.insert(sandbox, Observation::Fresh(hostile));
        let (before, after) = (planned(&world), planned(&other));
        for (id, mesh) in &before.meshes {
            prop_assert_eq!(settled(mesh, "c2"), settled(&after.meshes[id], "c2"), "mesh {}", id);
        }
    }
}
