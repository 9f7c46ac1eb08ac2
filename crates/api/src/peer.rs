//! Defines `Peer` as in Kilo's own CRD. That CRD checks only types and required fields, so any text may be malformed and any number
//! out of range. [`crate::convert::peer`] validates the values.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A WireGuard peer of this cluster's nodes.
#[derive(CustomResource, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kilo.squat.ai",
    version = "v1alpha1",
    kind = "Peer",
    plural = "peers",
    derive = "PartialEq",
    doc = "Peer is a WireGuard peer that the nodes of this cluster connect to. The schema is Kilo's."
)]
#[serde(rename_all = "camelCase")]
pub struct PeerSpec {
    /// Networks that are reached through the peer, and the only sources that its packets may have.
    #[serde(rename = "allowedIPs")]
    pub allowed_ips: Vec<String>,
    /// The initial endpoint of the peer. Without it the peer has to initiate the connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<PeerEndpoint>,
    /// Seconds between keepalive packets; 0 or absent = none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_keepalive: Option<i64>,
    /// An optional symmetric key, base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preshared_key: Option<String>,
    /// The peer's WireGuard public key, base64.
    pub public_key: String,
}

/// The endpoint of a peer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PeerEndpoint {
    /// A name or an address. If both are set, Kilo uses the name.
    #[serde(rename = "dnsOrIP")]
    pub dns_or_ip: DnsOrIp,
    /// UDP port.
    pub port: i32,
}

/// A name or an address.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DnsOrIp {
    /// An RFC 1123 name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns: Option<String>,
    /// An IPv4 or IPv6 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip: Option<String>,
}
