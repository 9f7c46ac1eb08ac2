//! Compiles Peers, PeerPolicies and the properties of this node into the desired state of its kernel.
//!
//! Leaves out invalid Peers, invalid networks of PeerPolicies, and invalid allowed IPs of Peers that describe this cluster's own nodes.
//! Reports each of these as a [`Refused`].

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use clustermesh_core::{
    key::PublicKey,
    observe::{PeerRole, PolicySpec},
};
use ipnet::IpNet;

use crate::{
    device::{PeerSpec, Peers},
    firewall::{self, Firewall, RuleParameters, Scope},
    interface::InterfaceName,
    key::PresharedKey,
    mtu,
    prefixes::{Family, aggregate, covered, host, overlap},
    routes::{self, Routes},
    sysctl::{self, Sysctl},
};

mod policy_mode;
mod refuse;

pub use policy_mode::{PolicyMode, compile_policy_mode};
pub use refuse::{Object, Reason, Refused};

/// Properties of this node.
#[derive(Debug, Clone)]
pub struct Node {
    /// Name of the Node object.
    pub name: String,
    /// Its own WireGuard key.
    pub public_key: PublicKey,
    /// Its WireGuard addresses, at most one for each family.
    pub wireguard_ips: BTreeSet<IpAddr>,
    /// The device.
    pub device: InterfaceName,
    /// The device's UDP port.
    pub listen_port: u16,
    /// The device's MTU.
    pub mtu: u16,
    /// The interface by which the outer packets leave.
    pub underlay: InterfaceName,
    /// Addresses on `underlay`. One that lies in a mesh network becomes the source of mesh routes.
    pub underlay_addresses: BTreeSet<IpAddr>,
    /// The InternalIPs of its Node object.
    pub internal_ips: BTreeSet<IpAddr>,
    /// The node's own pod CIDRs.
    pub pod_cidrs: BTreeSet<IpNet>,
}

/// A Peer object with parsed fields.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Name of the Peer object.
    pub name: String,
    /// The resourceVersion as a number. Of two Peers with the same key or allowed IP, the one with the greater revision wins; if the
    /// revisions are equal, the one whose name sorts later.
    pub revision: u64,
    /// `spec.publicKey`.
    pub public_key: PublicKey,
    /// `spec.presharedKey`. wg-agent passes no Peer that has one.
    pub preshared_key: Option<PresharedKey>,
    /// `spec.endpoint`, resolved.
    pub endpoint: Option<SocketAddr>,
    /// All endpoints to try, in order, from `kilo-clustermesh.io/endpoints`; empty if `endpoint` is the only one. [`compile`] drops
    /// unusable and duplicate ones.
    pub candidates: Vec<SocketAddr>,
    /// `spec.persistentKeepalive`.
    pub keepalive: Option<NonZeroU16>,
    /// `spec.allowedIPs`.
    pub allowed_ips: Vec<IpNet>,
    /// What the Peer describes. [`PeerRole::OwnNode`] = a node of this cluster in another location than this node: Peers for nodes of this
    /// node's location are not passed.
    pub role: PeerRole,
}

/// Input of [`compile`].
#[derive(Debug, Clone)]
pub struct Inputs {
    /// This node.
    pub node: Node,
    /// Destinations to keep on the underlay even if they lie in a mesh network: next hops outside the other nodes' pod CIDRs,
    /// resolvers, the other nodes' InternalIPs, `--bypass-cidr`. They get `throw` routes, and so do the addresses of `api_servers`.
    /// Destinations outside the mesh networks, and those that are an allowed IP of an own node's Peer, have no effect.
    pub throw: BTreeSet<IpNet>,
    /// The API server: its ClusterIP and its endpoints.
    pub api_servers: BTreeSet<SocketAddr>,
    /// InternalIPs and WireGuard addresses of this cluster's nodes.
    pub all_node_addresses: BTreeSet<IpAddr>,
    /// Pod CIDRs of the other nodes. Each also contains an address of its node that no object lists (the pods' default gateway).
    pub pod_cidrs_of_other_nodes: BTreeSet<IpNet>,
    /// Allowed IPs of the Peer that describes this node in its own cluster; empty if there is none. Nodes in other locations accept these
    /// sources from this node.
    pub own_sources: BTreeSet<IpNet>,
    /// Peers of this cluster.
    pub peers: Vec<Peer>,
    /// PeerPolicies of this cluster, by name.
    pub policies: BTreeMap<String, PolicySpec>,
    /// The largest inner packet for each peer whose path does not allow the device's MTU ([`crate::mtu::auto`]).
    pub peer_mtus: BTreeMap<PublicKey, u16>,
}

/// The desired state of this node's kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// The device's peers. `endpoint` is the first of [`Self::endpoints`].
    pub peers: Peers,
    /// The endpoints to try for each peer, in order.
    pub endpoints: BTreeMap<PublicKey, Vec<SocketAddr>>,
    /// The name of each peer's Peer object.
    pub names: BTreeMap<PublicKey, String>,
    /// Addresses, routes and policy routing rules.
    pub routes: Routes,
    /// The nftables table.
    pub firewall: Firewall,
    /// Kernel settings that the data path needs.
    pub sysctls: Vec<Sysctl>,
    /// The parts that were left out, with reasons: sorted, without duplicates.
    pub refused: Vec<Refused>,
}

/// Compiles the desired state of a node. Any inputs give a state that the kernel accepts.
#[must_use]
pub fn compile(inputs: &Inputs) -> Compiled {
    let node = &inputs.node;
    let mut refused = Vec::new();
    let policies = refuse::clean_policies(inputs, &mut refused);
    let networks = aggregate(policies.iter().flat_map(|p| &p.networks));
    let peers = accept_peers(inputs, &networks, &mut refused);

    let mesh = aggregate(networks.iter().chain(peers.iter().flat_map(|p| &p.allowed_ips)));
    let api = inputs.api_servers.iter().map(|a| host(a.ip().to_canonical()));
    // `inputs.throw` contains the InternalIPs of all other nodes. Nodes in other locations are reached through the tunnel nevertheless.
    let own_nodes = peers.iter().filter(|p| matches!(p.peer.role, PeerRole::OwnNode(_)));
    let own_nodes: BTreeSet<IpNet> = own_nodes.flat_map(|p| &p.allowed_ips).copied().collect();
    let throw: BTreeSet<IpNet> = inputs
        .throw
        .iter()
        .map(IpNet::trunc)
        .filter(|net| !own_nodes.contains(net))
        .chain(api)
        .filter(|net| covered(net, &mesh))
        .collect();
    let underlay = node
        .underlay_addresses
        .iter()
        .copied()
        .filter(|a| covered(&host(*a), &mesh))
        .collect();

    let mtus = peers.iter().filter_map(|p| {
        let peer_mtu = *inputs.peer_mtus.get(&p.peer.public_key)?;
        Some(p.allowed_ips.iter().filter_map(move |net| {
            let route_mtu = mtu::of_route(node.mtu, peer_mtu, Family::of(net))?;
            Some((*net, route_mtu))
        }))
    });
    let routes = routes::desired(&routes::Plan {
        mtus: mtus.flatten().collect(),
        addresses: node.wireguard_ips.clone(),
        peers: peers.iter().flat_map(|p| &p.allowed_ips).copied().collect(),
        mesh: mesh.clone(),
        throw: throw.clone(),
        underlay,
    });
    let parameters = RuleParameters {
        scope: Scope::Tunnel,
        device: node.device.clone(),
        listen_port: node.listen_port,
        mtu: node.mtu,
        wireguard_v4: node
            .wireguard_ips
            .iter()
            .find_map(|a| if let IpAddr::V4(a) = a { Some(*a) } else { None }),
        wireguard_v6: node
            .wireguard_ips
            .iter()
            .find_map(|a| if let IpAddr::V6(a) = a { Some(*a) } else { None }),
    };
    // The addresses of a shared pod network are not bound to nodes: the pod CIDR of another node may contain pods of this node, so
    // such a CIDR is left out here. A shared pod network is recognized by being anchored.
    let anchored = aggregate(policies.iter().flat_map(|policy| &policy.anchored));
    let pod_cidrs_of_other_nodes = inputs.pod_cidrs_of_other_nodes.iter().copied();
    let pod_cidrs_of_other_nodes = pod_cidrs_of_other_nodes
        .filter(|net| !covered(net, &anchored))
        .collect();
    let own_cluster = own_cluster_networks(&peers);
    let gateways = peers.iter().filter(|p| p.peer.role == PeerRole::Gateway);
    let gateways = aggregate(gateways.flat_map(|p| &p.allowed_ips));
    let firewall = firewall::desired(&firewall::Plan {
        parameters,
        own_cluster: &own_cluster,
        gateways: &gateways,
        own_sources: &inputs.own_sources,
        own_pods: &node.pod_cidrs.iter().map(IpNet::trunc).collect(),
        mesh: &mesh,
        throw: &throw,
        published: &published(node, &policies),
        policies: &policies,
        internal_ips: &node.internal_ips,
        api_servers: &inputs.api_servers,
        nodes: &inputs.all_node_addresses,
        pod_cidrs_of_other_nodes: &pod_cidrs_of_other_nodes,
    });
    let sysctls = sysctl::desired(&node.device, &node.underlay, &routes);
    refused.sort();
    refused.dedup();
    Compiled {
        endpoints: peers.iter().map(|p| (p.peer.public_key, p.endpoints.clone())).collect(),
        names: peers.iter().map(|p| (p.peer.public_key, p.peer.name.clone())).collect(),
        peers: peers.into_iter().map(|p| (p.peer.public_key, p.spec())).collect(),
        routes,
        firewall,
        sysctls,
        refused,
    }
}

/// Computes the published sources of this node: its WireGuard addresses, and each of its pod CIDRs and InternalIPs that lies inside
/// its own cluster's allowedNetworks and outside anchored networks. The node's Peers in other members have all these among their
/// allowed IPs.
///
/// No object gives an agent the allowedNetworks of its own cluster, but `allow` of the PeerPolicy of a cluster-meshed source contains
/// them. In a Masqueraded cluster `allow` contains only WireGuard networks, so every other source address is translated to the
/// device's address (SNAT). Addresses of pods in a shared pod network, which is anchored, are translated too. Before the first policy
/// exists, the agent does not know allowedNetworks, so only the WireGuard addresses count as published.
#[must_use]
pub fn published(node: &Node, policies: &[PolicySpec]) -> BTreeSet<IpNet> {
    let allowed = aggregate(policies.iter().flat_map(PolicySpec::allowed));
    let anchored = aggregate(policies.iter().flat_map(|policy| &policy.anchored));
    let pods = node.pod_cidrs.iter().map(IpNet::trunc);
    let own = pods.chain(node.internal_ips.iter().copied().map(host));
    let mut out: BTreeSet<IpNet> = own
        .filter(|net| covered(net, &allowed) && !covered(net, &anchored))
        .collect();
    out.extend(node.wireguard_ips.iter().copied().map(host));
    out
}

/// A Peer to program, without the allowed IPs that are refused or that a newer Peer has.
struct Accepted<'a> {
    peer: &'a Peer,
    allowed_ips: BTreeSet<IpNet>,
    endpoints: Vec<SocketAddr>,
}

impl Accepted<'_> {
    fn spec(&self) -> PeerSpec {
        PeerSpec {
            endpoint: self.endpoints.first().copied(),
            keepalive: self.peer.keepalive,
            preshared_key: self.peer.preshared_key.clone(),
            allowed_ips: self.allowed_ips.clone(),
        }
    }
}

/// Selects the Peers to program, with one owner for each key and each allowed IP.
///
/// When an anchored network moves to another anchor, the controller first updates the new anchor's Peer, then the old anchor's. So of
/// two Peers with the same allowed IP the newer one gets it, and the older one keeps its other allowed IPs. Of two Peers with the same key,
/// the older one is left out.
fn accept_peers<'a>(inputs: &'a Inputs, networks: &BTreeSet<IpNet>, refused: &mut Vec<Refused>) -> Vec<Accepted<'a>> {
    let mut order: Vec<&Peer> = inputs.peers.iter().collect();
    order.sort_by(|a, b| (b.revision, &b.name).cmp(&(a.revision, &a.name)));
    let mut keys: BTreeMap<PublicKey, &str> = BTreeMap::new();
    let mut claimed_networks: BTreeSet<IpNet> = BTreeSet::new();
    let mut out = Vec::new();
    for peer in order {
        let is_own_node = matches!(peer.role, PeerRole::OwnNode(_));
        if let Some((reason, message)) = refuse::peer_refusal(inputs, networks, peer) {
            refused.push(Refused {
                object: Object::Peer(peer.name.clone()),
                reason,
                message,
            });
            continue;
        }
        if let Some(winner) = keys.get(&peer.public_key) {
            refused.push(refuse::duplicate_key_refusal(peer, winner));
            continue;
        }
        keys.insert(peer.public_key, &peer.name);
        let allowed_ips: BTreeSet<IpNet> = peer
            .allowed_ips
            .iter()
            .map(IpNet::trunc)
            .filter(|net| !is_own_node || refuse::own_node_may_have(inputs, networks, peer, net, refused))
            .filter(|net| claimed_networks.insert(*net))
            .collect();
        let mut endpoints: Vec<SocketAddr> = Vec::new();
        for endpoint in peer
            .endpoint
            .iter()
            .chain(&peer.candidates)
            .copied()
            .map(refuse::canonical)
        {
            let is_usable =
                refuse::invalid_endpoint(endpoint).is_none() && !refuse::is_own_endpoint(&inputs.node, endpoint);
            if is_usable && !endpoints.contains(&endpoint) {
                endpoints.push(endpoint);
            }
        }
        out.push(Accepted {
            peer,
            allowed_ips,
            endpoints,
        });
    }
    out
}

/// Allowed IPs of the Peers that describe nodes of this cluster, aggregated. WireGuard binds a source to the peer with the longest prefix,
/// so a network that contains an allowed IP of another member is left out: packets from that network may be from that member.
fn own_cluster_networks(peers: &[Accepted<'_>]) -> BTreeSet<IpNet> {
    let (own, others): (Vec<_>, Vec<_>) = peers.iter().partition(|p| matches!(p.peer.role, PeerRole::OwnNode(_)));
    let others: BTreeSet<IpNet> = others.iter().flat_map(|p| &p.allowed_ips).copied().collect();
    // `IpNet` sorts a network directly before the networks inside it.
    let contains_other = |net: &IpNet| others.range(*net..).next().is_some_and(|other| net.contains(other));
    let own = own.iter().flat_map(|p| &p.allowed_ips);
    aggregate(own.filter(|net| !contains_other(net)))
}

/// Whether `net` overlaps this node's pod CIDRs. A route to such a network would take traffic away from the node's own pods.
fn overlaps_own_pods(node: &Node, net: &IpNet) -> bool {
    node.pod_cidrs.iter().any(|pods| overlap(pods, net))
}

#[cfg(test)]
mod properties;
#[cfg(test)]
pub(crate) mod tests;
