//! Defines the flags of `--mode=gateway` and derives the gateway's configuration from them.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use clap::Args;
use clustermesh_agent_core::interface::InterfaceName;
use ipnet::IpNet;

use super::values::{Mtu, parse_duration, parse_grant_timeout};
use crate::device::Backend;

/// Flags for a gateway only.
#[derive(Debug, Args)]
pub(crate) struct GatewayFlags {
    /// Gateway: range of the gateways' WireGuard addresses, such as 100.66.255.0/28; one for each IP family. The pod
    /// with ordinal N has address N + 1 of this range.
    #[arg(long, value_delimiter = ',', global = true)]
    pub(super) gateway_cidr: Vec<IpNet>,
    /// Gateway: a pod network of this cluster. Endpoints outside these networks are not served. Required;
    /// may be repeated.
    #[arg(long, value_delimiter = ',', global = true)]
    pub(super) endpoint_network: Vec<IpNet>,
    /// Gateway: name of a sandbox to serve. May be repeated; without it all sandboxes are served.
    #[arg(long, value_delimiter = ',', global = true)]
    pub(super) serves: Vec<String>,
    /// Gateway: how long grants stay open while the API server does not answer, or after this process exits, such as 15m
    /// or 90s; at least 10s.
    #[arg(long, default_value = "15m", value_parser = parse_grant_timeout, global = true)]
    pub(super) grant_timeout: Duration,
    /// Gateway: new connections a second that each sandbox may open, in bursts of twice as many; 0 = no limit. The limit
    /// keeps a sandbox from filling the conntrack table that all sandboxes share.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(..=1_000_000), global = true)]
    pub(super) sandbox_new_flows: u32,
    /// Gateway: connections that each sandbox may have at once; 0 = no limit. The conntrack table
    /// (net.netfilter.nf_conntrack_max) must be large enough for all sandboxes.
    #[arg(long, default_value_t = 16_000, global = true)]
    pub(super) sandbox_connections: u32,
    /// Gateway: connections of one grant to one endpoint; 0 = no limit. A pod has about 42,000 source ports for its
    /// connections to one endpoint.
    #[arg(long, default_value_t = 4000, global = true)]
    pub(super) endpoint_connections: u32,
    /// Gateway: how long the process keeps running after a signal, so that sandboxes learn that it stops, such as 5s.
    #[arg(long, default_value = "5s", value_parser = parse_duration, global = true)]
    pub(super) drain: Duration,
    /// Gateway: name of this pod, and of its SandboxGateway; it ends in an ordinal.
    #[arg(long, env = "POD_NAME", global = true)]
    pub(super) pod_name: Option<String>,
    /// Gateway: namespace of this pod.
    #[arg(long, env = "POD_NAMESPACE", global = true)]
    pub(super) pod_namespace: Option<String>,
    /// Gateway: UID of this pod.
    #[arg(long, env = "POD_UID", default_value = "", global = true)]
    pub(super) pod_uid: String,
    /// Gateway: addresses of this pod.
    #[arg(long, env = "POD_IPS", value_delimiter = ',', global = true)]
    pub(super) pod_ips: Vec<IpAddr>,
    /// Gateway: addresses of the node that runs this pod.
    #[arg(long, env = "NODE_IPS", value_delimiter = ',', global = true)]
    pub(super) node_ips: Vec<IpAddr>,
}

/// Namespace and name of this pod's SandboxGateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayName {
    /// Its namespace.
    pub namespace: String,
    /// Its name, which is the name of the pod.
    pub name: String,
}

impl fmt::Display for GatewayName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The checked configuration of gateway mode.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// The SandboxGateway of this pod.
    pub gateway: GatewayName,
    /// UID of the pod.
    pub pod_uid: String,
    /// Addresses of the pod.
    pub pod_ips: Vec<IpAddr>,
    /// Addresses of the node that runs the pod.
    pub node_ips: Vec<IpAddr>,
    /// Kubeconfig file; `None` = the Pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// Implementation of WireGuard.
    pub backend: Backend,
    /// Name of the device.
    pub interface: InterfaceName,
    /// UDP port of the tunnel.
    pub port: u16,
    /// The gateway's WireGuard addresses.
    pub addresses: BTreeSet<IpAddr>,
    /// The ranges of all gateways' WireGuard addresses.
    pub gateway_cidrs: BTreeSet<IpNet>,
    /// Networks in which endpoints may lie.
    pub endpoint_networks: BTreeSet<IpNet>,
    /// Sandboxes to serve; empty = all.
    pub serves: BTreeSet<String>,
    /// The private key's file.
    pub key_file: PathBuf,
    /// How long grants stay open while the API server does not answer, or after this process exits.
    pub grant_timeout: Duration,
    /// New connections a second of each sandbox; 0 = no limit.
    pub sandbox_new_flows: u32,
    /// Connections of each sandbox; 0 = no limit.
    pub sandbox_connections: u32,
    /// Connections of one grant to one endpoint; 0 = no limit.
    pub endpoint_connections: u32,
    /// MTU of the device; `None` = from the pod's interface.
    pub mtu: Option<u16>,
    /// How long the process keeps running after a signal.
    pub drain: Duration,
    /// Address and admin port to listen on.
    pub listen: SocketAddr,
}

/// Why the gateway flags are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GatewayArgsError {
    /// The pod's name or namespace is missing.
    #[error(
        "--pod-name and --pod-namespace are not set: set POD_NAME and POD_NAMESPACE from the Pod's metadata (deploy/gateway.yaml)"
    )]
    NoName,
    /// The pod's name has no ordinal.
    #[error(
        "--pod-name: {0:?} does not end in a number: a gateway is a pod of a StatefulSet, whose ordinal gives it its address"
    )]
    NoOrdinal(String),
    /// The pod's addresses are missing.
    #[error("--pod-ips is not set: set POD_IPS from the Pod's status.podIPs (deploy/gateway.yaml)")]
    NoPodIps,
    /// The range of the gateways' WireGuard addresses is missing.
    #[error(
        "--gateway-cidr is not set: set it to the range of the gateways' WireGuard addresses, for example \
         --gateway-cidr=100.66.255.0/28; it has to lie inside this member's allowedNetworks in the ClusterMesh and outside \
         --wireguard-cidr of its nodes"
    )]
    NoRange,
    /// Two ranges have the same address family.
    #[error("--gateway-cidr is given more than once for one address family: keep one")]
    TwoRanges,
    /// The range is too small for the pod's ordinal.
    #[error("--gateway-cidr: {0} has no address for ordinal {1}: take a larger range")]
    RangeFull(IpNet, u32),
    /// The pod networks are missing.
    #[error(
        "--endpoint-network is not set: name the pod networks of this cluster, for example --endpoint-network=10.244.0.0/16; \
         endpoints outside are not served"
    )]
    NoNetworks,
}

impl GatewayFlags {
    /// Address N + 1 of the range for `ordinal` N; in an IPv4 /31 or /32, address N. Address 0 is the network address. `hosts` leaves
    /// it out in larger IPv4 ranges, but not in IPv6 ranges.
    fn address(range: &IpNet, ordinal: u32) -> Option<IpAddr> {
        range.hosts().nth(
            usize::try_from(ordinal)
                .ok()?
                .checked_add(usize::from(range.addr().is_ipv6()))?,
        )
    }

    pub(super) fn addresses(&self, ordinal: u32) -> Result<BTreeSet<IpAddr>, GatewayArgsError> {
        let families: BTreeSet<bool> = self.gateway_cidr.iter().map(|range| range.addr().is_ipv4()).collect();
        if families.is_empty() {
            return Err(GatewayArgsError::NoRange);
        }
        if families.len() < self.gateway_cidr.len() {
            return Err(GatewayArgsError::TwoRanges);
        }
        let ranges = self.gateway_cidr.iter();
        ranges
            .map(|range| Self::address(&range.trunc(), ordinal).ok_or(GatewayArgsError::RangeFull(*range, ordinal)))
            .collect()
    }

    /// The number after the last hyphen of a pod name.
    pub(super) fn ordinal(name: &str) -> Result<u32, GatewayArgsError> {
        let ordinal = name.rsplit_once('-').and_then(|(_, number)| number.parse().ok());
        ordinal.ok_or_else(|| GatewayArgsError::NoOrdinal(name.to_owned()))
    }
}

/// The fixed MTU; `None` = automatic.
pub(super) const fn fixed_mtu(mtu: Mtu) -> Option<u16> {
    match mtu {
        Mtu::Auto => None,
        Mtu::Fixed(bytes) => Some(bytes),
    }
}
