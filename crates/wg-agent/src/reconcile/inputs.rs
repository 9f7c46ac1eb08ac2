//! From what was seen to what the compiler works from; values only.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use clustermesh_agent_core::{
    compile::{Inputs, Node, Peer},
    interface::InterfaceName,
    mtu,
    prefixes::host,
};
use clustermesh_core::{key::PublicKey, observe::Endpoint};
use ipnet::IpNet;

use crate::source::{objects::NodeSeen, store::World, underlay::Underlay};

/// What is known of this node besides the cluster's objects.
#[derive(Debug, Clone)]
pub(super) struct Local<'a> {
    pub(super) name: &'a str,
    pub(super) public_key: PublicKey,
    pub(super) wireguard_ip: IpAddr,
    pub(super) device: &'a InterfaceName,
    pub(super) port: u16,
    pub(super) underlay: &'a Underlay,
    pub(super) resolvers: &'a BTreeSet<IpAddr>,
    pub(super) bypass: &'a [IpNet],
    /// The API server as this process is told to reach it.
    pub(super) servers: &'a BTreeSet<SocketAddr>,
}

/// The member whose node a Peer is: an entry of a ClusterMesh. Empty where nobody says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Member {
    /// Namespace and name of the ClusterMesh.
    pub(super) mesh: (String, String),
    /// The entry.
    pub(super) cluster: String,
}

/// What [`inputs`] makes of what was seen.
#[derive(Debug, Clone)]
pub(super) struct Gathered {
    /// For the compiler.
    pub(super) inputs: Inputs,
    /// Names whose addresses are needed.
    pub(super) names: BTreeSet<String>,
    /// The member of each key.
    pub(super) members: BTreeMap<PublicKey, Member>,
    /// Objects that cannot even be read: what, and why.
    pub(super) unreadable: BTreeMap<String, String>,
}

/// Gathers, but for sizes. `own` is this node's object.
pub(super) fn gather(world: &World, own: &NodeSeen, local: &Local<'_>) -> Gathered {
    let mut names = BTreeSet::new();
    let mut members = BTreeMap::new();
    let mut unreadable = BTreeMap::new();
    let mut peers = Vec::new();
    for (name, seen) in world.peers.known() {
        let spec = match &seen.spec {
            Ok(spec) => spec,
            Err(problem) => {
                unreadable.insert(format!("Peer {name}"), problem.clone());
                continue;
            }
        };
        let endpoint = match &spec.endpoint {
            None => None,
            Some(Endpoint::Ip(at)) => Some(*at),
            Some(Endpoint::Dns(name, port)) => {
                names.insert(name.clone());
                world.addresses.get(name).map(|ip| SocketAddr::new(*ip, *port))
            }
        };
        let member = Member {
            mesh: seen.mesh.clone(),
            cluster: seen.cluster.clone(),
        };
        members.insert(spec.public_key, member);
        peers.push(Peer {
            name: name.to_owned(),
            revision: seen.revision,
            public_key: spec.public_key,
            preshared_key: None,
            endpoint,
            candidates: spec.candidates.clone(),
            keepalive: NonZeroU16::new(spec.persistent_keepalive),
            allowed_ips: spec.allowed_ips.iter().copied().collect(),
        });
    }
    let node = Node {
        name: local.name.to_owned(),
        public_key: local.public_key,
        wireguard_ips: [local.wireguard_ip].into(),
        device: local.device.clone(),
        listen_port: local.port,
        // Until the ways to the peers are known, which the peers themselves decide.
        mtu: mtu::MINIMUM,
        underlay: local.underlay.interface.clone(),
        underlay_addresses: local.underlay.addresses.keys().copied().collect(),
        addresses: own.internal_ips.iter().copied().collect(),
        pod_cidrs: own.pod_cidrs.clone(),
    };
    let mut policies = Vec::new();
    for (name, seen) in world.policies.known() {
        policies.push(seen.policy.clone());
        if let Some(problem) = &seen.problem {
            unreadable.insert(format!("PeerPolicy {name}"), problem.clone());
        }
    }
    let api_servers: BTreeSet<SocketAddr> = world
        .api_servers
        .known()
        .flat_map(|(_, sockets)| sockets)
        .chain(local.servers)
        .copied()
        .collect();
    let others = || world.nodes.known().filter(|(name, _)| *name != local.name);
    let throw = others()
        .flat_map(|(_, node)| &node.internal_ips)
        .chain(&local.underlay.next_hops)
        .chain(local.resolvers)
        .map(|ip| host(ip.to_canonical()))
        .chain(local.bypass.iter().copied())
        .collect();
    let nodes = world
        .nodes
        .known()
        .flat_map(|(_, node)| node.internal_ips.iter().chain(&node.wireguard_ip));
    let nodes = nodes.chain([&local.wireguard_ip]).map(IpAddr::to_canonical).collect();
    let pods_elsewhere = others().flat_map(|(_, node)| &node.pod_cidrs).copied().collect();
    Gathered {
        inputs: Inputs {
            node,
            throw,
            api_servers,
            nodes,
            pods_elsewhere,
            peers,
            policies,
            narrow: BTreeMap::new(),
        },
        names,
        members,
        unreadable,
    }
}
