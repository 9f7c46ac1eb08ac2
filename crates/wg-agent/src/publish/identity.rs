//! Computes this node's desired annotations.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use clustermesh_api::{
    annotations::{AgentStatus, NodeIdentity},
    names::{
        KILO_DISCOVERED_ENDPOINTS, KILO_ENDPOINT, KILO_GRANULARITY, KILO_INTERNAL_IP, KILO_KEY, KILO_WIREGUARD_IP,
        NODE_AGENT,
    },
};
use clustermesh_core::{key::PublicKey, observe::Endpoint};
use ipnet::IpNet;

use super::{Annotations, DesiredAnnotations, Turn};
use crate::source::objects::ParsedNode;

/// Every annotation that the agent writes in full mode. In policy mode it writes only [`NODE_AGENT`].
pub const KEYS: [&str; 7] = [
    KILO_KEY,
    KILO_WIREGUARD_IP,
    KILO_ENDPOINT,
    KILO_INTERNAL_IP,
    KILO_GRANULARITY,
    KILO_DISCOVERED_ENDPOINTS,
    NODE_AGENT,
];

/// The values from which the annotations are computed.
#[derive(Debug, Clone)]
pub struct AnnotationInputs<'a> {
    /// The node's public key.
    pub public_key: PublicKey,
    /// Its WireGuard address, with the prefix length of `--wireguard-cidr`.
    pub wireguard_ip: IpNet,
    /// The device's UDP port.
    pub port: u16,
    /// This node's Node.
    pub node: &'a ParsedNode,
    /// Addresses of the underlay's interface with their prefix lengths.
    pub underlay: &'a BTreeMap<IpAddr, u8>,
    /// The discovered endpoints to publish: where this node sees the peer with each key.
    pub discovered: BTreeMap<PublicKey, SocketAddr>,
    /// The value of the annotation [`NODE_AGENT`].
    pub agent: AgentStatus,
    /// When this node may write the annotations in [`DesiredAnnotations::status`].
    pub turn: Turn,
}

/// Computes the desired annotations. Also returns the annotations that the Node has now (`seen`).
#[must_use]
pub fn desired(inputs: AnnotationInputs<'_>) -> DesiredAnnotations {
    let AnnotationInputs {
        public_key,
        wireguard_ip,
        port,
        node,
        underlay,
        discovered,
        agent,
        turn,
    } = inputs;
    let own = node.own.clone().unwrap_or_default();
    let internal = node.internal_ips.first().copied();
    let prefix_length = |ip: &IpAddr| underlay.get(ip).copied().unwrap_or(if ip.is_ipv4() { 32 } else { 128 });
    let address = own.external_ips.first().copied().or(internal);
    let identity = NodeIdentity {
        public_key,
        wireguard_ip,
        endpoint: address.map(|ip| SocketAddr::new(ip, port)),
        internal_ip: internal.map(|ip| IpNet::new_assert(ip, prefix_length(&ip))),
        discovered,
        agent,
    };
    let mut identity: Annotations = identity.annotations();
    // As in kg, an endpoint that a person set takes precedence; a host name is published unresolved.
    match own.force_endpoint {
        Some(Endpoint::Ip(address)) => drop(identity.insert(KILO_ENDPOINT, Some(address.to_string()))),
        Some(Endpoint::Dns(name, port)) => drop(identity.insert(KILO_ENDPOINT, Some(format!("{name}:{port}")))),
        None => {}
    }
    let status = [NODE_AGENT, KILO_DISCOVERED_ENDPOINTS]
        .into_iter()
        .filter_map(|key| identity.remove_entry(key))
        .collect();
    DesiredAnnotations {
        identity,
        status,
        seen: own.published,
        turn,
    }
}

/// All annotations of the agent with the value `None`, which removes them.
#[must_use]
pub fn removal() -> Annotations {
    KEYS.iter().map(|key| (*key, None)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::objects::OwnNode;

    fn published(node: &ParsedNode) -> Annotations {
        let underlay = [("192.0.2.7".parse().unwrap(), 24)].into();
        desired(AnnotationInputs {
            public_key: "F5rh5BOUkcQ1QCw92IwcjvpXs1h3Bi+HFNTJul+WkBU=".parse().unwrap(),
            wireguard_ip: "100.66.0.9/16".parse().unwrap(),
            port: 51821,
            node,
            underlay: &underlay,
            discovered: BTreeMap::new(),
            agent: AgentStatus::default(),
            turn: Turn::default(),
        })
        .identity
    }

    fn node(own: OwnNode) -> ParsedNode {
        ParsedNode {
            internal_ips: vec!["192.0.2.7".parse().unwrap()],
            own: Some(own),
            ..ParsedNode::default()
        }
    }

    #[test]
    fn desired_annotations_have_kilos_formats() {
        let some = |text: &str| Some(text.to_owned());
        let want: Annotations = [
            (
                "kilo.squat.ai/key",
                some("F5rh5BOUkcQ1QCw92IwcjvpXs1h3Bi+HFNTJul+WkBU="),
            ),
            ("kilo.squat.ai/wireguard-ip", some("100.66.0.9/16")),
            ("kilo.squat.ai/endpoint", some("192.0.2.7:51821")),
            ("kilo.squat.ai/internal-ip", some("192.0.2.7/24")),
            ("kilo.squat.ai/granularity", some("full")),
        ]
        .into();
        assert_eq!(published(&node(OwnNode::default())), want);
    }

    #[test]
    fn forced_endpoint_precedes_external_address() {
        let endpoint = |own| published(&node(own))["kilo.squat.ai/endpoint"].clone().unwrap();
        let external = OwnNode {
            external_ips: vec!["2001:db8::7".parse().unwrap()],
            ..OwnNode::default()
        };
        assert_eq!(endpoint(external.clone()), "[2001:db8::7]:51821");
        let forced = OwnNode {
            force_endpoint: Some(Endpoint::Dns("n.example.org".into(), 7)),
            ..external
        };
        assert_eq!(endpoint(forced), "n.example.org:7");
    }
}
