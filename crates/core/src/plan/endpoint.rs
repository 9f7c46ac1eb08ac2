//! Where the nodes of one target send UDP for a node of another member (rule 8).

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use ipnet::IpNet;

use super::Reason;
use crate::{
    key::PublicKey,
    mesh::Cluster,
    observe::{Claim, Endpoint, Node},
};

/// A member's nodes must not make an agent try for ever.
const MAX_CANDIDATES: usize = 8;

/// Why an address can never be an endpoint; `None` = it can.
fn never(address: IpAddr) -> Option<&'static str> {
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    if address.is_unspecified() {
        Some("the unspecified address")
    } else if address.is_loopback() {
        Some("a loopback address")
    } else if link_local {
        Some("a link-local address")
    } else if address.is_multicast() {
        Some("a multicast address")
    } else if address == IpAddr::V4(Ipv4Addr::BROADCAST) {
        Some("the broadcast address")
    } else {
        None
    }
}

/// Private as Kilo means it, and shared address space (RFC 6598), which Kilo takes for public: neither is reachable from
/// another site as a rule, so an ExternalIP comes first.
fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_private() || (v4.octets()[0] == 100 && v4.octets()[1] & 0xc0 == 64),
        IpAddr::V6(v6) => v6.is_unique_local(),
    }
}

/// The annotations by which a person says where a node is, in the order of their weight.
fn explicit(node: &Node) -> [(&'static str, &Claim<Endpoint>); 2] {
    [
        ("clustermesh-endpoint", &node.clustermesh_endpoint),
        ("force-endpoint", &node.force_endpoint),
    ]
}

/// Refuses a Node whose winning explicit annotation is malformed, or names what no endpoint can be, whatever the target.
pub(super) fn check(node: &Node) -> Result<(), (Reason, String)> {
    for (name, claim) in explicit(node) {
        match claim {
            Claim::Absent => {}
            Claim::Invalid(why) => {
                return Err((
                    Reason::NodeEndpointInvalid,
                    format!("annotation {name}: {why}; write host:port"),
                ));
            }
            Claim::Is(Endpoint::Ip(address)) => {
                return match never(address.ip().to_canonical()) {
                    None => Ok(()),
                    Some(what) => Err((
                        Reason::EndpointForbidden,
                        format!("annotation {name} is {address}, {what}; name an address that the other members reach"),
                    )),
                };
            }
            Claim::Is(Endpoint::Dns(..)) => return Ok(()),
        }
    }
    Ok(())
}

/// The candidates of one node toward one target, best first.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    pub(super) addresses: Vec<SocketAddr>,
    /// Host names that have no address now.
    pub(super) unresolved: Vec<String>,
}

/// What the choice depends on beside the node.
pub(super) struct Toward<'a> {
    pub(super) source: &'a Cluster,
    /// The target's networks: an endpoint in there would let a member choose where inside the target its nodes send.
    pub(super) target_networks: &'a [IpNet],
    /// Where the target's nodes saw other keys.
    pub(super) discovered: &'a BTreeMap<PublicKey, Vec<SocketAddr>>,
    pub(super) resolved: &'a BTreeMap<String, IpAddr>,
}

impl Toward<'_> {
    pub(super) fn admits(&self, address: IpAddr) -> bool {
        never(address).is_none()
            && (!self.target_networks.iter().any(|network| network.contains(&address))
                || self
                    .source
                    .endpoint_networks
                    .iter()
                    .any(|network| network.contains(&address)))
    }

    fn resolve(&self, endpoint: &Endpoint, unresolved: &mut Vec<String>) -> Option<SocketAddr> {
        let address = match endpoint {
            Endpoint::Ip(address) => *address,
            Endpoint::Dns(host, port) => match self.resolved.get(host) {
                Some(address) => SocketAddr::new(*address, *port),
                None => {
                    unresolved.push(host.clone());
                    return None;
                }
            },
        };
        Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
    }
}

/// Ordered candidates. An explicit annotation that points where this target must not send refuses the Node there.
pub(super) fn choose(node: &Node, toward: &Toward<'_>) -> Result<Candidates, (Reason, String)> {
    let mut unresolved = Vec::new();
    let mut addresses = Vec::new();
    for (name, claim) in explicit(node) {
        let Some(address) = claim
            .value()
            .and_then(|endpoint| toward.resolve(endpoint, &mut unresolved))
        else {
            continue;
        };
        if !toward.admits(address.ip()) {
            return Err((
                Reason::EndpointForbidden,
                format!(
                    "annotation {name} leads to {address}, which lies inside the target's own networks or can be no \
                     endpoint; if it is meant, list its network in endpointNetworks of cluster {:?}",
                    toward.source.name
                ),
            ));
        }
        addresses.push(address);
    }
    let published = node
        .kilo_endpoint
        .value()
        .and_then(|endpoint| toward.resolve(endpoint, &mut unresolved));
    addresses.extend(published.filter(|address| !is_private(address.ip())));
    let port = node
        .kilo_endpoint
        .value()
        .map_or(toward.source.wireguard_port, Endpoint::port);
    addresses.extend(node.external_ips.iter().map(|ip| SocketAddr::new(*ip, port)));
    // Several nodes of the target may have seen it at several addresses (one NAT binding each): all are candidates.
    let seen_at = node.public_key.value().and_then(|key| toward.discovered.get(key));
    addresses.extend(seen_at.into_iter().flatten().copied());
    addresses.extend(node.internal_ips.iter().map(|ip| SocketAddr::new(*ip, port)));

    let mut kept: Vec<SocketAddr> = Vec::new();
    for address in addresses {
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        if address.port() != 0 && toward.admits(address.ip()) && !kept.contains(&address) && kept.len() < MAX_CANDIDATES
        {
            kept.push(address);
        }
    }
    Ok(Candidates {
        addresses: kept,
        unresolved,
    })
}
