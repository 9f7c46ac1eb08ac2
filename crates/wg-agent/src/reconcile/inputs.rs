//! Turns observed objects into the compiler's inputs.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use clustermesh_agent_core::{
    compile::{Inputs, Node, Peer},
    interface::InterfaceName,
    mtu,
    prefixes::{aggregate, covered, host},
};
use clustermesh_core::{
    key::PublicKey,
    observe::{Endpoint, PeerRole},
};
use ipnet::IpNet;

use crate::source::{objects::ParsedNode, store::ClusterSnapshot, underlay::Underlay};

/// Facts about this node that are not in the cluster's objects.
#[derive(Debug, Clone)]
pub(super) struct LocalFacts<'a> {
    pub(super) name: &'a str,
    pub(super) public_key: PublicKey,
    pub(super) wireguard_ip: IpAddr,
    pub(super) device: &'a InterfaceName,
    pub(super) port: u16,
    pub(super) underlay: &'a Underlay,
    pub(super) resolvers: &'a BTreeSet<IpAddr>,
    /// Networks that stay on the underlay (`--bypass-cidr`).
    pub(super) bypass: &'a [IpNet],
    /// The addresses of the API server in this process's configuration and environment.
    pub(super) servers: &'a BTreeSet<SocketAddr>,
}

/// The member whose node a Peer describes. A field is empty if the Peer has no label for it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Member {
    /// Namespace and name of the ClusterMesh.
    pub(super) mesh: (String, String),
    /// Name of the member's entry in the ClusterMesh.
    pub(super) cluster: String,
}

/// The result of [`gather_inputs`].
#[derive(Debug, Clone)]
pub(super) struct GatheredInputs {
    /// The compiler's inputs.
    pub(super) inputs: Inputs,
    /// Host names to look up.
    pub(super) host_names: BTreeSet<String>,
    /// The member of each Peer, by the Peer's public key.
    pub(super) members: BTreeMap<PublicKey, Member>,
    /// Objects that cannot be parsed, and why. Such a Peer is left out; such a PeerPolicy is replaced by one that allows nothing.
    pub(super) unreadable: BTreeMap<String, String>,
}

/// Builds all inputs except MTUs. `own_node` is this node's Node.
pub(super) fn gather_inputs(
    snapshot: &ClusterSnapshot,
    own_node: &ParsedNode,
    local: &LocalFacts<'_>,
) -> GatheredInputs {
    let mut host_names = BTreeSet::new();
    let mut members = BTreeMap::new();
    let mut unreadable = BTreeMap::new();
    let mut peers = Vec::new();
    // `own_sources` are the allowed IPs of the Peer that describes this node itself. Without this Peer, the nodes in other locations do not
    // know this node, so the loop below leaves out all Peers of the cluster's own nodes.
    let own_address = host(local.wireguard_ip.to_canonical());
    let specs = snapshot.peers.objects().filter_map(|(_, seen)| seen.spec.as_ref().ok());
    let mut own_specs =
        specs.filter(|spec| matches!(spec.role, PeerRole::OwnNode(_)) && spec.allowed_ips.contains(&own_address));
    let own_sources = own_specs
        .next()
        .map(|spec| spec.allowed_ips.clone())
        .unwrap_or_default();
    let own_location = own_node.own.as_ref().map_or("", |own| own.location.as_str());
    for (name, seen) in snapshot.peers.objects() {
        let spec = match &seen.spec {
            Ok(spec) => spec,
            Err(problem) => {
                unreadable.insert(format!("Peer {name}"), problem.clone());
                continue;
            }
        };
        // Own nodes in the same location are reached without the tunnel.
        if let PeerRole::OwnNode(location) = &spec.role
            && (location == own_location || own_sources.is_empty())
        {
            continue;
        }
        let endpoint = match &spec.endpoint {
            None => None,
            Some(Endpoint::Ip(address)) => Some(*address),
            Some(Endpoint::Dns(host_name, port)) => {
                host_names.insert(host_name.clone());
                snapshot.addresses.get(host_name).map(|ip| SocketAddr::new(*ip, *port))
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
            // A Peer with a preshared key is among `unreadable`.
            preshared_key: None,
            endpoint,
            candidates: spec.candidates.clone(),
            keepalive: NonZeroU16::new(spec.persistent_keepalive),
            allowed_ips: spec.allowed_ips.iter().copied().collect(),
            role: spec.role.clone(),
        });
    }
    let node = Node {
        name: local.name.to_owned(),
        public_key: local.public_key,
        wireguard_ips: [local.wireguard_ip].into(),
        device: local.device.clone(),
        listen_port: local.port,
        // The caller replaces this value: the MTU depends on the path MTUs to the peers gathered here.
        mtu: mtu::MINIMUM,
        underlay: local.underlay.interface.clone(),
        underlay_addresses: local.underlay.addresses.keys().copied().collect(),
        internal_ips: own_node.internal_ips.iter().copied().collect(),
        pod_cidrs: own_node.pod_cidrs.clone(),
    };
    let mut policies = BTreeMap::new();
    for (name, seen) in snapshot.policies.objects() {
        policies.insert(name.to_owned(), seen.spec.clone());
        if let Some(problem) = &seen.problem {
            unreadable.insert(format!("PeerPolicy {name}"), problem.clone());
        }
    }
    let api_servers: BTreeSet<SocketAddr> = snapshot
        .api_servers
        .objects()
        .flat_map(|(_, sockets)| sockets)
        .chain(local.servers)
        .copied()
        .collect();
    let others = || snapshot.nodes.objects().filter(|(name, _)| *name != local.name);
    let pod_cidrs_of_other_nodes: BTreeSet<IpNet> = others().flat_map(|(_, node)| &node.pod_cidrs).copied().collect();
    // flannel's next hops are the first addresses of other nodes' pod CIDRs. They belong to those nodes, not to the underlay: a `throw`
    // route would keep packets to a node in another location outside the tunnel.
    let pods = aggregate(&pod_cidrs_of_other_nodes);
    let next_hops = local.underlay.next_hops.iter();
    let next_hops = next_hops.filter(|hop| !covered(&host(hop.to_canonical()), &pods));
    let throw = others()
        .flat_map(|(_, node)| &node.internal_ips)
        .chain(next_hops)
        .chain(local.resolvers)
        .map(|ip| host(ip.to_canonical()))
        .chain(local.bypass.iter().copied())
        .collect();
    let all_node_addresses = snapshot
        .nodes
        .objects()
        .flat_map(|(_, node)| node.internal_ips.iter().chain(&node.wireguard_ip));
    let all_node_addresses = all_node_addresses
        .chain([&local.wireguard_ip])
        .map(IpAddr::to_canonical)
        .collect();
    GatheredInputs {
        inputs: Inputs {
            node,
            throw,
            api_servers,
            all_node_addresses,
            pod_cidrs_of_other_nodes,
            own_sources,
            peers,
            policies,
            peer_mtus: BTreeMap::new(),
        },
        host_names,
        members,
        unreadable,
    }
}
