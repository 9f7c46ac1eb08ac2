//! From what was seen to what the compiler works from; values only.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    time::Duration,
};

use clustermesh_agent_core::{
    compile::{Earlier, Inputs, Node, Peer},
    grants::{Resolved, resolve},
    interface::InterfaceName,
    mtu,
    policy::Policy,
    prefixes::host,
};
use clustermesh_core::{key::PublicKey, mesh::ObjectName, observe::Endpoint};
use ipnet::IpNet;

use crate::source::{
    grants::KIND,
    objects::{NodeSeen, PolicySeen, protocol},
    store::World,
    underlay::Underlay,
    watch::Seen,
};

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
    pub(super) grant_timeout: Duration,
    pub(super) new_flows: u32,
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
    /// Services whose EndpointSlices are needed.
    pub(super) granted: BTreeSet<ObjectName>,
    /// What of a sandbox's grants is closed here although the policy names it: which, and why.
    pub(super) closed: BTreeSet<String>,
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
            requires_policy: seen.requires_policy.clone(),
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
    let (mut granted, mut closed) = (BTreeSet::new(), BTreeSet::new());
    for (name, seen) in world.policies.known() {
        policies.push(reached(world, &node, seen, &mut closed));
        granted.extend(seen.grants.iter().map(|grant| grant.service.clone()));
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
            earlier: Earlier::new(),
            narrow: BTreeMap::new(),
            grant_timeout: local.grant_timeout,
            new_flows: local.new_flows,
        },
        names,
        members,
        unreadable,
        granted,
        closed,
    }
}

/// A policy with what its grants come to on this node. What was not listed yet is closed.
fn reached(world: &World, node: &Node, seen: &PolicySeen, closed: &mut BTreeSet<String>) -> Policy {
    let mut policy = seen.policy.clone();
    let mut resolved = Resolved::default();
    for grant in &seen.grants {
        let service = &grant.service;
        let ports = grant.ports.iter().map(|(kind, name)| (protocol(*kind), name.clone()));
        if let Some(Seen::Listed(slices)) = world.granted.get(service) {
            resolve(node, &ports.collect(), &grant.within, slices.values(), &mut resolved);
        } else {
            let why = world.errors.get(KIND).map_or("not listed yet", String::as_str);
            closed.insert(format!(
                "PeerPolicy {}: GrantClosed: the EndpointSlices of Service {service} cannot be read: {why}",
                policy.name
            ));
        }
    }
    let Resolved {
        granted,
        draining,
        refused,
    } = resolved;
    policy.granted = granted;
    policy.draining = draining;
    closed.extend(refused.iter().map(|(address, why)| {
        format!(
            "PeerPolicy {}: GrantClosed: endpoint {address} on this node {why}",
            policy.name
        )
    }));
    policy
}
