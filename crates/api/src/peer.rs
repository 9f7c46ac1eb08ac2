//! Kilo's `Peer`, as Kilo's own CRD has it (KILO.md §1): it checks types and required fields and nothing else, so every
//! text in here may be garbage and every number out of range. What the values mean is in [`crate::convert`].

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
    /// Networks that are reached through the peer, and the only sources it may have.
    #[serde(rename = "allowedIPs")]
    pub allowed_ips: Vec<String>,
    /// Where the peer is at first; without it the peer has to connect to us.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<PeerEndpoint>,
    /// Seconds between keepalive packets; 0 or nothing = none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_keepalive: Option<i64>,
    /// A further symmetric key, base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preshared_key: Option<String>,
    /// The peer's WireGuard public key, base64.
    pub public_key: String,
}

/// Where a peer is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PeerEndpoint {
    /// A name or an address; of both, the name wins in Kilo.
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
