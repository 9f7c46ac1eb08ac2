//! Why a Peer, or a network of a PeerPolicy, is left out, in words that name the object, the field and what to do.

use std::{collections::BTreeSet, fmt, net::SocketAddr};

use clustermesh_core::mesh::{WIDEST, is_too_wide};
use ipnet::IpNet;

use super::{Inputs, Node, Peer, touches_pods};
use crate::{
    numbers::MAX_ALLOWED_IPS,
    policy::{Policy, Rule},
    prefixes::{NOT_UNICAST, covered, host, overlap},
};

/// The object that is wrong.
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

/// Why, in one word: for logs, Events and the metric's label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The endpoint cannot be another node's.
    EndpointInvalid,
    /// More ranges than [`MAX_ALLOWED_IPS`].
    TooManyAllowedIPs,
    /// A range is 0.0.0.0/0 or ::/0.
    DefaultRoute,
    /// A range is wider than /8 (IPv4) or /7 (IPv6).
    NetworkTooWide,
    /// A range is or holds an address of this node.
    OwnNodeAddress,
    /// A range is or holds the API server's address.
    ApiServerAddress,
    /// A range touches this node's own pod CIDR.
    OwnPodCIDR,
    /// The key is this node's own.
    OwnPublicKey,
    /// A newer Peer has the key.
    PublicKeyDuplicate,
}

impl Reason {
    /// The word.
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

/// Something that was left out.
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

/// An IPv4 address in an IPv6 coat is the IPv4 address.
pub(super) fn canonical(endpoint: SocketAddr) -> SocketAddr {
    SocketAddr::new(endpoint.ip().to_canonical(), endpoint.port())
}

/// What is wrong with an endpoint, if anything.
pub(super) fn endpoint(node: &Node, endpoint: SocketAddr) -> Option<&'static str> {
    let endpoint = canonical(endpoint);
    let ip = endpoint.ip();
    match () {
        () if endpoint.port() == 0 => Some("has port 0"),
        () if ip.is_unspecified() => Some("is the unspecified address"),
        () if ip.is_loopback() => Some("is a loopback address"),
        () if ip.is_multicast() => Some("is a multicast address"),
        () if ip == std::net::Ipv4Addr::BROADCAST => Some("is the broadcast address"),
        () if endpoint.port() == node.listen_port
            && (node.addresses.contains(&ip) || node.underlay_addresses.contains(&ip)) =>
        {
            Some("is this node itself")
        }
        () => None,
    }
}

/// Why this Peer is not programmed, if so. `networks`: what the policies declare, an aggregate.
pub(super) fn peer(inputs: &Inputs, networks: &BTreeSet<IpNet>, peer: &Peer) -> Option<(Reason, String)> {
    let node = &inputs.node;
    if peer.public_key == node.public_key {
        let key = peer.public_key;
        return Some((
            Reason::OwnPublicKey,
            format!("spec.publicKey {key} is this node's own: two nodes share a key file, make a new one on the other"),
        ));
    }
    if let Some(at) = peer.endpoint
        && let Some(what) = endpoint(node, at)
    {
        return Some((
            Reason::EndpointInvalid,
            format!("spec.endpoint {at} {what}; correct the annotation that gives the source node its endpoint"),
        ));
    }
    let count = peer.allowed_ips.len();
    if count > MAX_ALLOWED_IPS {
        return Some((
            Reason::TooManyAllowedIPs,
            format!("spec.allowedIPs has {count} entries, at most {MAX_ALLOWED_IPS} are taken; write wider ranges"),
        ));
    }
    peer.allowed_ips
        .iter()
        .find_map(|net| range(inputs, networks, &net.trunc()))
}

/// Why a range cannot be a Peer's. A range that holds an address of this node, or the API server's, is right only where
/// a PeerPolicy declares it as the member's network: a worker that is a virtual machine in the other cluster has its own
/// address and its API server there. What the underlay needs is then thrown; the address alone is never a Peer's.
fn range(inputs: &Inputs, networks: &BTreeSet<IpNet>, net: &IpNet) -> Option<(Reason, String)> {
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
    if touches_pods(node, net) {
        return Some((
            Reason::OwnPodCIDR,
            format!(
                "spec.allowedIPs holds {net}, which overlaps this node's own pod CIDR; give the clusters different pod networks, or set addressing: Masqueraded for the source cluster"
            ),
        ));
    }
    let declared = |alone: bool| !alone && covered(net, networks);
    let wireguard = node.wireguard_ips.iter().copied().find(|a| net.contains(a));
    let own = node.addresses.iter().chain(&node.underlay_addresses).copied();
    let own = wireguard.or_else(|| own.into_iter().find(|a| net.contains(a) && !declared(*net == host(*a))));
    if let Some(own) = own {
        return Some((
            Reason::OwnNodeAddress,
            format!(
                "spec.allowedIPs holds {net}, and {own} is this node's own address; remove the range from the source cluster's allowedNetworks or narrow it"
            ),
        ));
    }
    let mut api = inputs.api_servers.iter().map(|a| a.ip().to_canonical());
    if let Some(api) = api.find(|a| net.contains(a) && !declared(*net == host(*a))) {
        return Some((
            Reason::ApiServerAddress,
            format!(
                "spec.allowedIPs holds {net}, and {api} is this cluster's API server; remove the range from the source cluster's allowedNetworks or narrow it"
            ),
        ));
    }
    None
}

/// Two Peers with one key.
pub(super) fn same_key(peer: &Peer, winner: &str) -> Refused {
    let key = peer.public_key;
    Refused {
        object: Object::Peer(peer.name.clone()),
        reason: Reason::PublicKeyDuplicate,
        message: format!("spec.publicKey {key} is also that of Peer {winner}, which was written later; delete one"),
    }
}

/// The policy without networks and sources that this node cannot serve, in canonical form. Closing a network that holds
/// this node's own pods would cut them off; a source among them would be one of our own pods' addresses. What no other
/// cluster has to do with ([`NOT_UNICAST`]) is denied where something allowed holds it.
pub(super) fn clean_policy(node: &Node, policy: &Policy, refused: &mut Vec<Refused>) -> Policy {
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
            } else if touches_pods(node, net) {
                (
                    Reason::OwnPodCIDR,
                    format!(
                        "spec.{field} holds {net}, which overlaps this node's own pod CIDR; give the clusters different pod networks, or set addressing: Masqueraded for the source cluster"
                    ),
                )
            } else {
                return true;
            };
            refused.push(Refused { object: Object::PeerPolicy(policy.name.clone()), reason, message });
            false
        }));
    }
    let allowed = |net: &&IpNet| clean.allow.iter().flat_map(|rule| &rule.to).any(|to| overlap(to, net));
    let never: BTreeSet<IpNet> = NOT_UNICAST.iter().filter(allowed).copied().collect();
    if !never.is_empty() {
        clean.deny.push(Rule {
            to: never,
            ports: BTreeSet::new(),
        });
    }
    clean
}
