//! The same worlds with sandboxes in them: what a sandbox's own side, which is hostile throughout, may move.

use std::collections::{BTreeMap, BTreeSet};

use clustermesh_core::{
    key::PublicKey,
    mesh::{Addressing, ClusterIdentity, Grant, ObjectName, Profile, Protocol},
    observe::{
        Claim, Endpoint, Gateway, Member, Node, Observation, PolicySpec, Server, Service, ServicePort, Slice,
        SliceEndpoint,
    },
    plan::MeshPlan,
};
use ipnet::IpNet;
use proptest::prelude::*;

use crate::world::{World, identity, member, of_gateways, planned, world};

/// The profile that holds: the tightest of all meshes that are not being deleted.
fn profile(world: &World, identity: &ClusterIdentity) -> Profile {
    let meshes = world.meshes.iter().filter(|mesh| !mesh.deleting);
    let entries = meshes.flat_map(|mesh| &mesh.clusters);
    let same = entries.filter(|cluster| cluster.identity == *identity);
    same.map(|cluster| cluster.profile).max().unwrap_or(Profile::Standard)
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
                pod_cidrs: vec![Claim::Valid("10.1.9.0/24".parse().unwrap())],
                wireguard_ip: Claim::Valid(format!("100.66.{}.9/24", if n == 0 { 1 } else { 2 }).parse().unwrap()),
                public_key: Claim::Valid(PublicKey::new([50 + n; 32])),
                kilo_endpoint: Claim::Valid(Endpoint::Ip("192.0.2.9:51820".parse().unwrap())),
                server: Server::Agent,
                ..Node::default()
            };
            member.nodes.insert("good".into(), good);
            member.accesses.get_or_insert_default();
            if n == 0 {
                let gateway = Gateway {
                    public_key: PublicKey::new([49; 32]),
                    addresses: ["100.66.1.10".parse().unwrap()].into(),
                    endpoints: vec!["192.0.2.10:51821".parse().unwrap()],
                    serves: BTreeSet::new(),
                    ready: true,
                    exists: true,
                    applied: BTreeMap::new(),
                    refused: BTreeMap::new(),
                };
                member.gateways = [(of_gateways("good"), gateway)].into();
            }
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
        // Its own nodes are a sandbox's to say.
        let accesses = held.accesses.iter().map(|(name, access)| {
            let nodes = (access.source != sandbox).then_some(&access.spec.nodes);
            format!(
                "{target} {name} {:?} {:?} {nodes:?}",
                access.spec.networks, access.spec.grants
            )
        });
        said.extend(accesses);
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
    fn a_target_holds_no_peer_of_a_sandbox_and_lets_its_own_addresses_in_alone(
        world in prop_oneof![world(), sandboxed()],
    ) {
        let plan = planned(&world);
        for mesh in plan.meshes.values() {
            for (name, target) in &mesh.targets {
                let of = profile(&world, &mesh.identities[name]);
                for peer in target.peers.values() {
                    prop_assert_ne!(profile(&world, &mesh.identities[&peer.source]), Profile::Sandbox);
                    prop_assert!(of != Profile::Standard);
                }
                for policy in target.policies.values() {
                    let PolicySpec { sources, networks, allow, closed, .. } = &policy.spec;
                    if profile(&world, &mesh.identities[&policy.source]) == Profile::Sandbox {
                        prop_assert!(*closed && allow.is_empty() && sources == networks);
                    }
                }
                for access in target.accesses.values() {
                    // Two sandboxes never meet.
                    prop_assert_eq!((of, profile(&world, &mesh.identities[&access.source])), (Profile::ClusterMeshed, Profile::Sandbox));
                    let accepted = &mesh.clusters[&access.source].accepted;
                    let addresses = access.spec.nodes.values().flat_map(|node| &node.addresses);
                    for address in addresses {
                        prop_assert!(accepted.iter().any(|net| net.contains(address)), "{address} of {access:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn in_a_sandbox_stand_gateways_alone(world in prop_oneof![world(), sandboxed()]) {
        let plan = planned(&world);
        for mesh in plan.meshes.values() {
            for (_, target) in mesh.targets.iter().filter(|(name, _)| profile(&world, &mesh.identities[*name]) == Profile::Sandbox) {
                for peer in target.peers.values() {
                    let of = world.seen.members[&mesh.identities[&peer.source]].last().unwrap();
                    let gateway = of.gateways.values().find(|gateway| gateway.public_key == peer.spec.public_key).unwrap();
                    for net in &peer.spec.allowed_ips {
                        prop_assert!(is_host(net) && gateway.addresses.contains(&net.addr()), "{net} of {peer:?}");
                    }
                    prop_assert!(peer.spec.endpoint.is_some());
                }
                for policy in target.policies.values() {
                    prop_assert!(policy.spec.allow.is_empty() && policy.spec.sources.iter().all(is_host));
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
                if let Claim::Valid(key) = &mut node.public_key {
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
