//! Converts Kilo's [`Peer`] to and from [`observe::PeerSpec`].

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use clustermesh_core::observe::{self, Endpoint, ObservedPeer, Owner, PeerRole};
use ipnet::IpNet;
use kube::ResourceExt;

use super::{excerpt, owner, parse_network, set_labels};
use crate::{
    annotations::endpoint_host,
    names::{PEER_ENDPOINTS, PEER_GATEWAY, PEER_LOCATION},
    peer::{DnsOrIp, Peer, PeerEndpoint, PeerSpec},
};

/// Converts an observed Peer.
///
/// A Peer with a mesh label must have the form that the controller writes, with canonical networks. Otherwise its spec is an error, so
/// that the controller rewrites it. This also repairs networks with host bits, which make kg reset all sessions every 30 s. A Peer
/// without a mesh label needs only a valid key. Its annotations (candidates and role) are ignored, and so is every value of its spec that
/// cannot be parsed.
#[must_use]
pub fn to_core(peer: &Peer) -> ObservedPeer {
    let owner = owner(peer.metadata.labels.as_ref());
    let spec = if owner.mesh.is_some() {
        parse_strictly(peer)
    } else {
        parse_leniently(&peer.spec)
    };
    ObservedPeer { owner, spec }
}

/// Converts a Peer strictly. wg-agent programs only Peers that this function accepts.
///
/// # Errors
/// The Peer cannot be programmed. The message names the field and the problem.
pub fn parse_strictly(peer: &Peer) -> Result<observe::PeerSpec, String> {
    let spec = &peer.spec;
    let mut allowed_ips = BTreeSet::new();
    for (index, text) in spec.allowed_ips.iter().enumerate() {
        let (net, host_bits) = parse_network(text).map_err(|why| format!("spec.allowedIPs[{index}]: {why}"))?;
        if host_bits {
            return Err(format!("spec.allowedIPs[{index}]: {text} has host bits: write {net}"));
        }
        if !allowed_ips.insert(net) {
            return Err(format!("spec.allowedIPs[{index}]: {net} is listed twice"));
        }
    }
    if spec.preshared_key.as_ref().is_some_and(|key| !key.is_empty()) {
        return Err("spec.presharedKey: is not used in a mesh: take it out".to_owned());
    }
    Ok(observe::PeerSpec {
        public_key: parse_key(spec)?,
        allowed_ips,
        endpoint: spec.endpoint.as_ref().map(parse_endpoint).transpose()?,
        candidates: parse_candidates(peer)?,
        persistent_keepalive: parse_keepalive(spec)?,
        role: role(peer),
    })
}

fn parse_key(spec: &PeerSpec) -> Result<clustermesh_core::key::PublicKey, String> {
    spec.public_key
        .parse()
        .map_err(|error| format!("spec.publicKey: {error}"))
}

fn parse_keepalive(spec: &PeerSpec) -> Result<u16, String> {
    let seconds = spec.persistent_keepalive.unwrap_or_default();
    u16::try_from(seconds)
        .map_err(|_| format!("spec.persistentKeepalive: {seconds} is not a number of seconds between 0 and 65535"))
}

fn parse_endpoint(written: &PeerEndpoint) -> Result<Endpoint, String> {
    let port = u16::try_from(written.port)
        .ok()
        .filter(|port| *port > 0)
        .ok_or_else(|| format!("spec.endpoint.port: {} is not a UDP port, 1 to 65535", written.port))?;
    let text = |field: &Option<String>| field.clone().filter(|text| !text.is_empty());
    match (text(&written.dns_or_ip.dns), text(&written.dns_or_ip.ip)) {
        (None, Some(ip)) => match ip.parse::<IpAddr>() {
            Ok(address) => Ok(Endpoint::Ip(SocketAddr::new(address.to_canonical(), port))),
            Err(_) => Err(format!(
                "spec.endpoint.dnsOrIP.ip: {:?} is not an address",
                excerpt(&ip)
            )),
        },
        (Some(name), None) => match endpoint_host(&name, port) {
            Some(Endpoint::Dns(name, port)) => Ok(Endpoint::Dns(name, port)),
            _ => Err(format!(
                "spec.endpoint.dnsOrIP.dns: {:?} is not a DNS name",
                excerpt(&name)
            )),
        },
        (Some(_), Some(_)) => Err("spec.endpoint.dnsOrIP: has both `dns` and `ip`: write one".to_owned()),
        (None, None) => {
            Err("spec.endpoint.dnsOrIP: has neither `ip` nor `dns`: write one, or leave the endpoint out".to_owned())
        }
    }
}

/// Parses the endpoint candidates. They must be addresses, so that a node resolves at most one host name for a Peer: that of
/// `spec.endpoint`.
fn parse_candidates(peer: &Peer) -> Result<Vec<SocketAddr>, String> {
    let text = annotation(peer, PEER_ENDPOINTS).unwrap_or_default();
    text.split(',')
        .filter(|part| !part.is_empty())
        .map(|part| {
            part.parse::<SocketAddr>()
                .ok()
                .filter(|address| address.port() > 0)
                .ok_or_else(|| format!("annotation {PEER_ENDPOINTS}: {:?} is not ip:port", excerpt(part)))
        })
        .collect()
}

fn role(peer: &Peer) -> PeerRole {
    match (annotation(peer, PEER_GATEWAY), annotation(peer, PEER_LOCATION)) {
        (Some("true"), _) => PeerRole::Gateway,
        (_, Some(location)) => PeerRole::OwnNode(location.to_owned()),
        _ => PeerRole::Node,
    }
}

fn annotation<'a>(peer: &'a Peer, key: &str) -> Option<&'a str> {
    peer.annotations().get(key).map(String::as_str)
}

fn parse_leniently(spec: &PeerSpec) -> Result<observe::PeerSpec, String> {
    Ok(observe::PeerSpec {
        public_key: parse_key(spec)?,
        allowed_ips: spec
            .allowed_ips
            .iter()
            .filter_map(|text| parse_network(text).ok())
            .map(|(net, _)| net)
            .collect(),
        endpoint: spec.endpoint.as_ref().and_then(|written| parse_endpoint(written).ok()),
        candidates: Vec::new(),
        persistent_keepalive: parse_keepalive(spec).unwrap_or_default(),
        role: PeerRole::Node,
    })
}

/// Makes a new Peer with `spec` and the labels of `owner`.
#[must_use]
pub fn from_core(name: &str, spec: &observe::PeerSpec, owner: &Owner) -> Peer {
    let mut peer = Peer::new(name, PeerSpec::default());
    update(&mut peer, spec, owner);
    peer
}

/// Replaces an existing Peer's spec, the labels of `owner` and the annotations of endpoint candidates and role. The rest of the metadata
/// stays, including the resourceVersion. The spec is replaced completely, so no field that the predecessor wrote remains.
pub fn update(peer: &mut Peer, spec: &observe::PeerSpec, owner: &Owner) {
    set_labels(peer.labels_mut(), owner);
    let candidates: Vec<String> = spec.candidates.iter().map(ToString::to_string).collect();
    let candidates = (!candidates.is_empty()).then(|| candidates.join(","));
    let (location, gateway) = match &spec.role {
        PeerRole::Node => (None, None),
        PeerRole::OwnNode(location) => (Some(location.clone()), None),
        PeerRole::Gateway => (None, Some("true".to_owned())),
    };
    let annotations = [
        (PEER_ENDPOINTS, candidates),
        (PEER_LOCATION, location),
        (PEER_GATEWAY, gateway),
    ];
    for (key, value) in annotations {
        if let Some(value) = value {
            peer.annotations_mut().insert(key.to_owned(), value);
        } else if let Some(annotations) = &mut peer.metadata.annotations {
            annotations.remove(key);
        }
    }
    peer.spec = PeerSpec {
        allowed_ips: spec.allowed_ips.iter().map(IpNet::to_string).collect(),
        endpoint: spec.endpoint.as_ref().map(|endpoint| match endpoint {
            Endpoint::Ip(address) => PeerEndpoint {
                dns_or_ip: DnsOrIp {
                    ip: Some(address.ip().to_string()),
                    dns: None,
                },
                port: address.port().into(),
            },
            Endpoint::Dns(name, port) => PeerEndpoint {
                dns_or_ip: DnsOrIp {
                    ip: None,
                    dns: Some(name.clone()),
                },
                port: (*port).into(),
            },
        }),
        persistent_keepalive: (spec.persistent_keepalive > 0).then(|| spec.persistent_keepalive.into()),
        preshared_key: None,
        public_key: spec.public_key.to_string(),
    };
}

#[cfg(test)]
mod tests;
