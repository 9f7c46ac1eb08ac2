//! Decides which Peers, which allowed IPs of own nodes, and which networks and sources of PeerPolicies are left out. A [`Refused`] names
//! the object; its message names the field and what to do.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, SocketAddr},
};

use clustermesh_core::{
    mesh::{WIDEST, is_too_wide},
    observe::{PeerRole, PolicySpec},
};
use ipnet::IpNet;

use super::{Inputs, Node, Peer, overlaps_own_pods};
use crate::{
    numbers::MAX_ALLOWED_IPS,
    prefixes::{covered, host},
};

/// The object with the invalid part.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Object {
    /// A Peer, by name.
    Peer(String),
    /// A PeerPolicy, by name.
    PeerPolicy(String),
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Peer(name) => write!(f, "Peer {name}"),
            Self::PeerPolicy(name) => write!(f, "PeerPolicy {name}"),
        }
    }
}

/// Why a part is refused, as one word for logs, `/debug/state` and the metric's label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The endpoint cannot be that of a node.
    EndpointInvalid,
    /// The Peer has more than [`MAX_ALLOWED_IPS`] allowedIPs.
    TooManyAllowedIPs,
    /// A network is 0.0.0.0/0 or ::/0.
    DefaultRoute,
    /// A network is wider than /8 (IPv4) or /7 (IPv6).
    NetworkTooWide,
    /// A network contains an address of this node. Exception: a network that is wider than /32 or /128, is covered by the
    /// networks of the PeerPolicies, and contains no WireGuard address of this node.
    OwnNodeAddress,
    /// A network is an address of the API server (/32 or /128), or contains one and is not covered by the networks of the
    /// PeerPolicies.
    ApiServerAddress,
    /// A network overlaps this node's own pod CIDR.
    OwnPodCIDR,
    /// The key is this node's own.
    OwnPublicKey,
    /// A newer Peer has the key.
    PublicKeyDuplicate,
}

impl Reason {
    /// The reason as one word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::EndpointInvalid => "EndpointInvalid",
            Self::TooManyAllowedIPs => "TooManyAllowedIPs",
            Self::DefaultRoute => "DefaultRoute",
            Self::NetworkTooWide => "NetworkTooWide",
            Self::OwnNodeAddress => "OwnNodeAddress",
            Self::ApiServerAddress => "ApiServerAddress",
            Self::OwnPodCIDR => "OwnPodCIDR",
            Self::OwnPublicKey => "OwnPublicKey",
            Self::PublicKeyDuplicate => "PublicKeyDuplicate",
        }
    }
}

/// A part of an object that was left out.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Refused {
    /// Which object.
    pub object: Object,
    /// Why, in one word.
    pub reason: Reason,
    /// Why, and what to do about it.
    pub message: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.object, self.reason.as_str(), self.message)
    }
}

/// Converts an IPv4-mapped IPv6 address to the IPv4 address.
pub(super) fn canonical(endpoint: SocketAddr) -> SocketAddr {
    SocketAddr::new(endpoint.ip().to_canonical(), endpoint.port())
}

/// Whether an endpoint is an address and the port of this node. This is no fault of the Peer, because a node behind another NAT may
/// have the same private address.
pub(super) fn is_own_endpoint(node: &Node, endpoint: SocketAddr) -> bool {
    let ip = endpoint.ip().to_canonical();
    endpoint.port() == node.listen_port && (node.internal_ips.contains(&ip) || node.underlay_addresses.contains(&ip))
}

/// Returns why an endpoint cannot be that of any node; `None` = it can.
pub(super) fn invalid_endpoint(endpoint: SocketAddr) -> Option<&'static str> {
    let ip = endpoint.ip().to_canonical();
    match () {
        () if endpoint.port() == 0 => Some("has port 0"),
        () if ip.is_unspecified() => Some("is the unspecified address"),
        () if ip.is_loopback() => Some("is a loopback address"),
        () if ip.is_multicast() => Some("is a multicast address"),
        () if ip == std::net::Ipv4Addr::BROADCAST => Some("is the broadcast address"),
        () => None,
    }
}

/// Returns why this Peer is refused; `None` = it is programmed. `networks` are the networks of all policies, aggregated.
pub(super) fn peer_refusal(inputs: &Inputs, networks: &BTreeSet<IpNet>, peer: &Peer) -> Option<(Reason, String)> {
    let node = &inputs.node;
    if peer.public_key == node.public_key {
        let key = peer.public_key;
        return Some((
            Reason::OwnPublicKey,
            format!("spec.publicKey {key} is this node's own: two nodes share a key file, make a new one on the other"),
        ));
    }
    if let Some(at) = peer.endpoint
        && let Some(fault) = invalid_endpoint(at)
    {
        return Some((
            Reason::EndpointInvalid,
            format!("spec.endpoint {at} {fault}; correct the annotation that gives the source node its endpoint"),
        ));
    }
    let count = peer.allowed_ips.len();
    if count > MAX_ALLOWED_IPS {
        return Some((
            Reason::TooManyAllowedIPs,
            format!(
                "spec.allowedIPs has {count} entries, at most {MAX_ALLOWED_IPS} are accepted; write wider networks"
            ),
        ));
    }
    // A Peer that describes a node of this cluster is not refused for an invalid network, because private networks of different
    // locations may be equal. `own_node_may_have` decides about each of its networks, and only an invalid one is left out.
    let mut checked = peer
        .allowed_ips
        .iter()
        .filter(|_| !matches!(peer.role, PeerRole::OwnNode(_)));
    checked.find_map(|net| allowed_ip_refusal(inputs, networks, &net.trunc()))
}

/// Whether a Peer that describes a node of this cluster may have `net` among its allowed IPs. If not, reports it.
pub(super) fn own_node_may_have(
    inputs: &Inputs,
    networks: &BTreeSet<IpNet>,
    peer: &Peer,
    net: &IpNet,
    refused: &mut Vec<Refused>,
) -> bool {
    let Some((reason, message)) = allowed_ip_refusal(inputs, networks, net) else {
        return true;
    };
    let object = Object::Peer(peer.name.clone());
    refused.push(Refused {
        object,
        reason,
        message,
    });
    false
}

/// Returns why a Peer may not have `net` among its allowed IPs; `None` = it may.
///
/// A network that contains a WireGuard address of this node is always refused. A network that contains an InternalIP or underlay address
/// of this node, or the API server's address, is accepted only if it is wider than this address (no /32 or /128) and `networks` (those of
/// all PeerPolicies) cover it. If this node is a virtual machine in a pod of the source cluster, that cluster's networks contain the node's
/// underlay address; `throw` routes then keep destinations of the underlay outside the tunnel.
fn allowed_ip_refusal(inputs: &Inputs, networks: &BTreeSet<IpNet>, net: &IpNet) -> Option<(Reason, String)> {
    let node = &inputs.node;
    if net.prefix_len() == 0 {
        return Some((
            Reason::DefaultRoute,
            format!("spec.allowedIPs holds {net}: a mesh never takes the default route; name the networks"),
        ));
    }
    if is_too_wide(net) {
        return Some((
            Reason::NetworkTooWide,
            format!("spec.allowedIPs holds {net}, which is wider than {WIDEST}; name the networks"),
        ));
    }
    if overlaps_own_pods(node, net) {
        return Some((
            Reason::OwnPodCIDR,
            format!(
                "spec.allowedIPs holds {net}, which overlaps this node's own pod CIDR; give the clusters different pod networks, or set addressing: Masqueraded for the source cluster"
            ),
        ));
    }
    let may_contain = |address: IpAddr| *net != host(address) && covered(net, networks);
    let wireguard = node.wireguard_ips.iter().copied().find(|a| net.contains(a));
    let own = node.internal_ips.iter().chain(&node.underlay_addresses).copied();
    let own = wireguard.or_else(|| own.into_iter().find(|a| net.contains(a) && !may_contain(*a)));
    if let Some(own) = own {
        return Some((
            Reason::OwnNodeAddress,
            format!(
                "spec.allowedIPs holds {net}, and {own} is this node's own address; remove the network from the source cluster's allowedNetworks or narrow it"
            ),
        ));
    }
    let mut api = inputs.api_servers.iter().map(|a| a.ip().to_canonical());
    if let Some(api) = api.find(|a| net.contains(a) && !may_contain(*a)) {
        return Some((
            Reason::ApiServerAddress,
            format!(
                "spec.allowedIPs holds {net}, and {api} is this cluster's API server; remove the network from the source cluster's allowedNetworks or narrow it"
            ),
        ));
    }
    None
}

/// Builds the refusal of a Peer that has the same key as `winner`, a newer Peer.
pub(super) fn duplicate_key_refusal(peer: &Peer, winner: &str) -> Refused {
    let key = peer.public_key;
    Refused {
        object: Object::Peer(peer.name.clone()),
        reason: Reason::PublicKeyDuplicate,
        message: format!("spec.publicKey {key} is also that of Peer {winner}, which was written later; delete one"),
    }
}

/// Returns the policies with truncated prefixes, without networks and sources that are too wide or overlap this node's own pods.
/// An `unreachable` route for a network that overlaps these pods would cut them off. A source that overlaps them would match their packets.
pub(super) fn clean_policies(inputs: &Inputs, refused: &mut Vec<Refused>) -> Vec<PolicySpec> {
    let policies = inputs.policies.iter();
    policies
        .map(|(name, policy)| clean_policy(&inputs.node, name, policy, refused))
        .collect()
}

fn clean_policy(node: &Node, name: &str, policy: &PolicySpec, refused: &mut Vec<Refused>) -> PolicySpec {
    let mut clean = policy.clone();
    for (field, nets) in [("networks", &mut clean.networks), ("sources", &mut clean.sources)] {
        let all = std::mem::take(nets);
        nets.extend(all.iter().map(IpNet::trunc).filter(|net| {
            let (reason, message) = if net.prefix_len() == 0 {
                (Reason::DefaultRoute, format!("spec.{field} holds {net}: name the member's networks"))
            } else if is_too_wide(net) {
                (
                    Reason::NetworkTooWide,
                    format!(
                        "spec.{field} holds {net}, which is wider than {WIDEST}; narrow the source cluster's allowedNetworks"
                    ),
                )
            } else if overlaps_own_pods(node, net) {
                (
                    Reason::OwnPodCIDR,
                    format!(
                        "spec.{field} holds {net}, which overlaps this node's own pod CIDR; give the clusters different pod networks, or set addressing: Masqueraded for the source cluster"
                    ),
                )
            } else {
                return true;
            };
            refused.push(Refused { object: Object::PeerPolicy(name.to_owned()), reason, message });
            false
        }));
    }
    clean
}
