//! From Peers, PeerPolicies and facts about one node to what its kernel should hold. Pure: what a Kubernetes object looks
//! like, and how a kernel is told, is decided elsewhere.
//!
//! A wrong Peer costs that Peer, a wrong network of a PeerPolicy costs that network; each leaves a [`Refused`].

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use clustermesh_core::key::PublicKey;
use ipnet::IpNet;

use crate::{
    device::{PeerSpec, Peers},
    firewall::{self, Firewall, Frame, Scope},
    interface::InterfaceName,
    key::PresharedKey,
    mtu,
    policy::Policy,
    prefixes::{Family, aggregate, covered, host, overlap},
    routes::{self, Routes},
    sysctl::{self, Sysctl},
};

mod beside;
mod refuse;

pub use beside::{Beside, beside};
pub use refuse::{Object, Reason, Refused};

/// What is known about this node.
#[derive(Debug, Clone)]
pub struct Node {
    /// Its name in Kubernetes.
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
    /// The interface that the outer packets leave by.
    pub underlay: InterfaceName,
    /// Addresses on `underlay`. Where one lies in a mesh network it becomes the source of mesh routes.
    pub underlay_addresses: BTreeSet<IpAddr>,
    /// The node's own addresses as others know them (InternalIPs of its Node object).
    pub addresses: BTreeSet<IpAddr>,
    /// The node's own pod CIDRs.
    pub pod_cidrs: BTreeSet<IpNet>,
}

/// A Peer, with its key and its ranges already parsed.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Name of the Peer object.
    pub name: String,
    /// Which of two Peers wrote last, where both have one key or one range: the greater wins, then the later name.
    /// The resourceVersion, as a number.
    pub revision: u64,
    /// `spec.publicKey`.
    pub public_key: PublicKey,
    /// `spec.presharedKey`.
    pub preshared_key: Option<PresharedKey>,
    /// `spec.endpoint`, resolved.
    pub endpoint: Option<SocketAddr>,
    /// Further endpoints to try, in order: of `kilo-clustermesh.io/endpoints`. Those that cannot be used are left out.
    pub candidates: Vec<SocketAddr>,
    /// `spec.persistentKeepalive`.
    pub keepalive: Option<NonZeroU16>,
    /// `spec.allowedIPs`.
    pub allowed_ips: Vec<IpNet>,
}

/// Everything [`compile`] works from.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// This node.
    pub node: Node,
    /// What the underlay needs although it may lie in a mesh network: next hops, resolvers, `--bypass-cidr`. The
    /// addresses of `api_servers` are always added. Only what lies inside a mesh prefix has an effect.
    pub throw: BTreeSet<IpNet>,
    /// The API server: its ClusterIP and its endpoints.
    pub api_servers: BTreeSet<SocketAddr>,
    /// Addresses of the nodes of this cluster, as far as their Node objects name them.
    pub nodes: BTreeSet<IpAddr>,
    /// Pod CIDRs of the other nodes: each holds addresses of its node, too, which no object names (the CNI's gateway).
    pub pods_elsewhere: BTreeSet<IpNet>,
    /// Peers of this cluster.
    pub peers: Vec<Peer>,
    /// PeerPolicies of this cluster.
    pub policies: Vec<Policy>,
    /// Peers that take smaller packets than the device, as [`crate::mtu::auto`] says.
    pub narrow: BTreeMap<PublicKey, u16>,
}

/// What this node's kernel should hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// The device's peers. `endpoint` is the first of [`Self::endpoints`].
    pub peers: Peers,
    /// For each peer the endpoints to try, in order.
    pub endpoints: BTreeMap<PublicKey, Vec<SocketAddr>>,
    /// For each peer the name of its Peer object.
    pub names: BTreeMap<PublicKey, String>,
    /// Addresses, routes, rules.
    pub routes: Routes,
    /// The nftables table.
    pub firewall: Firewall,
    /// Kernel settings that all this needs.
    pub sysctls: Vec<Sysctl>,
    /// What was left out, and why: sorted, without repetition.
    pub refused: Vec<Refused>,
}

/// Compiles. Total: any inputs give a state that a kernel takes.
#[must_use]
pub fn compile(inputs: &Inputs) -> Compiled {
    let node = &inputs.node;
    let mut refused = Vec::new();
    let policies: Vec<Policy> = inputs
        .policies
        .iter()
        .map(|p| refuse::clean_policy(node, p, &mut refused))
        .collect();
    let networks = aggregate(policies.iter().flat_map(|p| &p.networks));
    let peers = owners(inputs, &networks, &mut refused);

    let mesh = aggregate(networks.iter().chain(peers.iter().flat_map(|p| &p.ranges)));
    let api = inputs.api_servers.iter().map(|a| host(a.ip().to_canonical()));
    let throw: BTreeSet<IpNet> = inputs
        .throw
        .iter()
        .map(IpNet::trunc)
        .chain(api)
        .filter(|net| covered(net, &mesh))
        .collect();
    let underlay = node
        .underlay_addresses
        .iter()
        .copied()
        .filter(|a| covered(&host(*a), &mesh))
        .collect();

    let sizes = peers.iter().filter_map(|p| {
        let size = *inputs.narrow.get(&p.peer.public_key)?;
        Some(p.ranges.iter().filter_map(move |net| {
            let size = mtu::of_route(node.mtu, size, Family::of(net))?;
            Some((*net, size))
        }))
    });
    let routes = routes::desired(&routes::Plan {
        sizes: sizes.flatten().collect(),
        addresses: node.wireguard_ips.clone(),
        peers: peers.iter().flat_map(|p| &p.ranges).copied().collect(),
        mesh: mesh.clone(),
        throw: throw.clone(),
        underlay,
    });
    let frame = Frame {
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
    // Where the pod network is shared, a Node's podCIDR says nothing about where an address is.
    let anchored = aggregate(policies.iter().flat_map(|policy| &policy.anchored));
    let pods_elsewhere = inputs.pods_elsewhere.iter().copied();
    let pods_elsewhere = pods_elsewhere.filter(|net| !covered(net, &anchored)).collect();
    let firewall = firewall::desired(&firewall::Plan {
        frame,
        mesh: &mesh,
        throw: &throw,
        published: &published(node, &policies),
        policies: &policies,
        internal_ips: &node.addresses,
        api_servers: &inputs.api_servers,
        nodes: &inputs.nodes,
        pods_elsewhere: &pods_elsewhere,
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

/// The sources that other members' Peers for this node carry, as the planner makes them: its pod CIDRs and InternalIPs
/// that lie inside this cluster's own allowedNetworks, and its WireGuard addresses always.
///
/// An agent is not told its own cluster's allowedNetworks; but a PeerPolicy's `allow` is just that for a cluster-meshed
/// source. Of a Masqueraded member they are its WireGuard range alone, so that only the addresses of this device remain
/// and everything else is translated to them. Where the pod network is shared, its range is anchored: a Node's podCIDR means
/// nothing there, and pods are translated too. Without a policy nothing else is published, and nobody could answer.
#[must_use]
pub fn published(node: &Node, policies: &[Policy]) -> BTreeSet<IpNet> {
    let served = aggregate(policies.iter().flat_map(Policy::served));
    let own = node
        .pod_cidrs
        .iter()
        .map(IpNet::trunc)
        .chain(node.addresses.iter().copied().map(host));
    let anchored = aggregate(policies.iter().flat_map(|policy| &policy.anchored));
    let mut out: BTreeSet<IpNet> = own
        .filter(|net| covered(net, &served) && !covered(net, &anchored))
        .collect();
    out.extend(node.wireguard_ips.iter().copied().map(host));
    out
}

/// A Peer that is programmed, with what is left of it after others' claims.
struct Accepted<'a> {
    peer: &'a Peer,
    ranges: BTreeSet<IpNet>,
    endpoints: Vec<SocketAddr>,
}

impl Accepted<'_> {
    fn spec(&self) -> PeerSpec {
        PeerSpec {
            endpoint: self.endpoints.first().copied(),
            keepalive: self.peer.keepalive,
            preshared_key: self.peer.preshared_key.clone(),
            allowed_ips: self.ranges.clone(),
        }
    }
}

/// The Peers that may be programmed; one owner for each key and each range. When an anchor moves, the new owner is written
/// before the old one lets go: the newer of two claims wins, and the older Peer keeps what is left to it.
fn owners<'a>(inputs: &'a Inputs, networks: &BTreeSet<IpNet>, refused: &mut Vec<Refused>) -> Vec<Accepted<'a>> {
    let mut order: Vec<&Peer> = inputs.peers.iter().collect();
    order.sort_by(|a, b| (b.revision, &b.name).cmp(&(a.revision, &a.name)));
    let mut keys: BTreeMap<PublicKey, &str> = BTreeMap::new();
    let mut taken: BTreeSet<IpNet> = BTreeSet::new();
    let mut out = Vec::new();
    for peer in order {
        if let Some((reason, message)) = refuse::peer(inputs, networks, peer) {
            refused.push(Refused {
                object: Object::Peer(peer.name.clone()),
                reason,
                message,
            });
            continue;
        }
        if let Some(winner) = keys.get(&peer.public_key) {
            refused.push(refuse::same_key(peer, winner));
            continue;
        }
        keys.insert(peer.public_key, &peer.name);
        let ranges: BTreeSet<IpNet> = peer
            .allowed_ips
            .iter()
            .map(IpNet::trunc)
            .filter(|net| taken.insert(*net))
            .collect();
        let mut endpoints: Vec<SocketAddr> = peer.endpoint.map(refuse::canonical).into_iter().collect();
        for candidate in peer.candidates.iter().copied().map(refuse::canonical) {
            if refuse::endpoint(&inputs.node, candidate).is_none() && !endpoints.contains(&candidate) {
                endpoints.push(candidate);
            }
        }
        out.push(Accepted {
            peer,
            ranges,
            endpoints,
        });
    }
    out
}

/// Whether a range would take traffic away from this node's own pods.
fn touches_pods(node: &Node, net: &IpNet) -> bool {
    node.pod_cidrs.iter().any(|pods| overlap(pods, net))
}

#[cfg(test)]
mod properties;
#[cfg(test)]
pub(crate) mod tests;
