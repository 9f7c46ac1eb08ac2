//! Defines the command line: flags, their validation, and the configuration of each mode.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Args, Parser, Subcommand};
use clustermesh_agent_core::interface::InterfaceName;
use clustermesh_daemon::LogFormat;
use ipnet::IpNet;

use crate::{device::Backend, identity::address::Range, probe::ProbeArgs, status::command::StatusArgs};

mod gateway;
mod values;

use gateway::GatewayFlags;
pub use gateway::{GatewayArgsError, GatewayConfig, GatewayName};
pub(crate) use values::BackendFlag;
use values::parse_duration;
pub use values::{ModeFlag, Mtu};

/// Turns Peers and PeerPolicies into this node's WireGuard device, routes and firewall table, and publishes the node's
/// identity. --mode names the other modes.
#[derive(Debug, Parser)]
#[command(name = "wg-agent", version)]
pub struct Cli {
    #[command(flatten)]
    pub(crate) flags: Flags,
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

/// A subcommand; without one the agent runs.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum Command {
    /// Remove all state of this agent from the node - device, routes, rules, firewall table, control socket,
    /// annotations - and report what could not be removed. The key stays: it is the node's identity.
    Cleanup,
    /// Report the kernel features and settings that this node lacks, and how to set them on Debian, Talos and Flatcar.
    /// Writes nothing.
    Preflight,
    /// Make a new key for this node. The running agent publishes the new key, and switches to it when the first peer
    /// initiates a handshake with it; until then the agent uses the old key.
    RotateKey,
    /// Show the peers and problems of this node, as its agent reports them. Exit code 0: no problem; 1: problems; 2: no
    /// agent answers.
    Status(StatusArgs),
    /// Test which of the given addresses accept a TCP connection from here, and print one JSON line for each.
    /// `clustermeshctl verify` uses it. Needs no privileges and no running agent.
    Probe(ProbeArgs),
    /// Write the node's kernel settings that need a privileged container, and exit. For an init container.
    Prepare(PrepareArgs),
}

/// The flags of `prepare`.
#[derive(Debug, Clone, Args)]
pub(crate) struct PrepareArgs {
    /// Minimum size of the conntrack table of the node and of each pod on it, gateway pods included. A larger
    /// table is kept; 0 = do not change it. A full table of the default size takes 80 MB. kube-proxy sets its own size
    /// when it starts: raise its --conntrack-min as well.
    #[arg(long, default_value_t = 262_144, value_parser = clap::value_parser!(u64).range(..=1 << 30))]
    pub(crate) conntrack_min: u64,
}

/// The flags, as typed.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// Name of this node's Node object.
    #[arg(long, env = "NODE_NAME", global = true)]
    node_name: Option<String>,
    /// Kubeconfig file; without it the Pod's service account.
    #[arg(long, global = true)]
    kubeconfig: Option<PathBuf>,
    /// Implementation of WireGuard.
    #[arg(long, value_enum, default_value_t = BackendFlag::Auto, global = true)]
    backend: BackendFlag,
    /// full: this agent owns the tunnel. policy: kg owns the tunnel, and this agent only the firewall table. gateway:
    /// sandboxes enter the cluster through this pod.
    #[arg(long, value_enum, default_value_t = ModeFlag::Full, global = true)]
    mode: ModeFlag,
    /// Name of the WireGuard device.
    #[arg(long, default_value = "kilo0", global = true)]
    interface: InterfaceName,
    /// UDP port of the tunnel, on every address of the node.
    #[arg(long, default_value_t = 51820, value_parser = clap::value_parser!(u16).range(1..), global = true)]
    port: u16,
    /// The range from which this cluster's nodes take their WireGuard addresses, such as 172.16.1.0/24. It has to lie
    /// inside the member's allowedNetworks.
    #[arg(long, global = true)]
    wireguard_cidr: Option<IpNet>,
    /// File with the node's private key; created on the first start.
    #[arg(long, default_value = "/var/lib/kilo/key", global = true)]
    key_file: PathBuf,
    /// File with the last applied objects and the endpoints of peers, for a start while the API server does not answer.
    /// Readable only by root. Default: wg-agent.cache in the directory of the key file.
    #[arg(long, global = true)]
    cache_file: Option<PathBuf>,
    /// Maximum time since the API server confirmed the cache, such as 24h or 90m. An older cache is renamed and not used.
    /// A running agent keeps its state, however long its API server does not answer. 0s = never start from a cache.
    #[arg(long, default_value = "24h", value_parser = parse_duration, global = true)]
    cache_max_age: Duration,
    /// MTU of the device: auto = the largest path MTU to a peer, minus 60 over IPv4 or 80 over IPv6. Routes to peers with
    /// a smaller path MTU get their own MTU. In gateway mode auto = the MTU of the pod's network minus 80.
    #[arg(long, default_value = "auto", global = true)]
    mtu: Mtu,
    /// Do not use the kernel's segmentation offloads: read and write packets one by one. Use it to find out whether an
    /// offload of this node causes a problem. Only for the userspace backend.
    #[arg(long, global = true)]
    no_offload: bool,
    /// A network that stays on the underlay although it lies inside a mesh network. May be repeated.
    #[arg(long, global = true)]
    bypass_cidr: Vec<IpNet>,
    /// Address of /metrics, /healthz, /readyz and /debug/state.
    #[arg(long, default_value = "[::]:9587", global = true)]
    listen: SocketAddr,
    /// Export metrics for each peer and not only for each cluster: four series per peer, for the first 1000 peers by name.
    #[arg(long, global = true)]
    metrics_per_peer: bool,
    /// Format of log lines.
    #[arg(long, value_enum, default_value_t = LogFormat::Text, global = true)]
    log_format: LogFormat,
    #[command(flatten)]
    gateway: GatewayFlags,
}

/// Why the flags are refused. Each message says what to set instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArgsError {
    /// The node name is missing.
    #[error("--node-name is not set: set it, or NODE_NAME from the Pod's spec.nodeName")]
    NoNodeName,
    /// The range for WireGuard addresses is missing.
    #[error(
        "--wireguard-cidr is not set: set it to the range this cluster's nodes take their WireGuard addresses from, for \
         example --wireguard-cidr=172.16.1.0/24; it has to lie inside this member's allowedNetworks in the ClusterMesh \
         and may overlap no other member"
    )]
    NoRange,
    /// The range contains no usable address.
    #[error("--wireguard-cidr: {0}")]
    Range(#[from] crate::identity::address::RangeError),
    /// An error in the gateway flags.
    #[error(transparent)]
    Gateway(#[from] GatewayArgsError),
}

/// The checked configuration of full mode.
#[derive(Debug, Clone)]
pub struct Config {
    /// Name of this node's Node object.
    pub node_name: String,
    /// Kubeconfig file; `None` = the Pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// Implementation of WireGuard.
    pub backend: Backend,
    /// Name of the device.
    pub interface: InterfaceName,
    /// UDP port of the tunnel.
    pub port: u16,
    /// The range of WireGuard addresses.
    pub range: Range,
    /// The private key's file.
    pub key_file: PathBuf,
    /// The cache file.
    pub cache_file: PathBuf,
    /// The maximum age of the cache since the API server confirmed it.
    pub cache_max_age: Duration,
    /// MTU of the device.
    pub mtu: Mtu,
    /// Whether the userspace device uses the kernel's offloads.
    pub offload: bool,
    /// Networks that stay on the underlay.
    pub bypass: Vec<IpNet>,
    /// Address and admin port to listen on.
    pub listen: SocketAddr,
    /// Whether metrics of each peer are exported.
    pub metrics_per_peer: bool,
}

/// The checked configuration of policy mode.
#[derive(Debug, Clone)]
pub struct PolicyConfig {
    /// Name of this node's Node object.
    pub node_name: String,
    /// Kubeconfig file; `None` = the Pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// Name of kg's device.
    pub interface: InterfaceName,
    /// Address and admin port to listen on.
    pub listen: SocketAddr,
}

/// The checked configuration of `cleanup`.
#[derive(Debug, Clone)]
pub struct CleanupConfig {
    /// Name of this node's Node object; `None` = annotations are not removed.
    pub node_name: Option<String>,
    /// Kubeconfig file; `None` = the Pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// The mode of the agent whose state is removed. In policy mode the agent has only a firewall table and one annotation.
    /// Gateway mode is refused.
    pub mode: ModeFlag,
    /// Name of the device.
    pub interface: InterfaceName,
    /// The private key's file.
    pub key_file: PathBuf,
    /// The cache file.
    pub cache_file: PathBuf,
}

/// `--cache-file`, or its default in the directory of the key, which is accessible only to root and survives restarts.
fn cache_file(given: Option<PathBuf>, key_file: &Path) -> PathBuf {
    given.unwrap_or_else(|| key_file.with_file_name("wg-agent.cache"))
}

impl Flags {
    pub(crate) const fn log_format(&self) -> LogFormat {
        self.log_format
    }

    /// The configuration of full mode.
    pub(crate) fn into_config(self) -> Result<Config, ArgsError> {
        let Self {
            node_name,
            kubeconfig,
            backend,
            mode: _, // selected this configuration
            interface,
            port,
            wireguard_cidr,
            key_file,
            cache_file: cache,
            cache_max_age,
            mtu,
            no_offload,
            bypass_cidr,
            listen,
            metrics_per_peer,
            log_format: _, // used before, so that errors are logged in this format
            gateway: _,
        } = self;
        Ok(Config {
            node_name: node_name.filter(|name| !name.is_empty()).ok_or(ArgsError::NoNodeName)?,
            kubeconfig,
            backend: backend.into(),
            interface,
            port,
            range: Range::new(wireguard_cidr.ok_or(ArgsError::NoRange)?)?,
            cache_file: cache_file(cache, &key_file),
            cache_max_age,
            key_file,
            mtu,
            offload: !no_offload,
            bypass: bypass_cidr.iter().map(IpNet::trunc).collect(),
            listen,
            metrics_per_peer,
        })
    }

    /// The key file, for `rotate-key`.
    pub(crate) fn into_key_file(self) -> PathBuf {
        self.key_file
    }

    /// The kubeconfig, for `preflight`.
    pub(crate) fn into_kubeconfig(self) -> Option<PathBuf> {
        self.kubeconfig
    }

    pub(crate) const fn mode(&self) -> ModeFlag {
        self.mode
    }

    pub(crate) const fn port(&self) -> u16 {
        self.port
    }

    /// The configuration of policy mode. Flags that only full mode needs, such as key, port and MTU, are ignored, so that the
    /// arguments of one DaemonSet fit both modes.
    pub(crate) fn into_policy_config(self) -> Result<PolicyConfig, ArgsError> {
        let Self {
            node_name,
            kubeconfig,
            interface,
            listen,
            ..
        } = self;
        Ok(PolicyConfig {
            node_name: node_name.filter(|name| !name.is_empty()).ok_or(ArgsError::NoNodeName)?,
            kubeconfig,
            interface,
            listen,
        })
    }

    /// The configuration of gateway mode.
    pub(crate) fn into_gateway_config(self) -> Result<GatewayConfig, ArgsError> {
        let gateway = self.gateway;
        let non_empty = |text: Option<String>| text.filter(|text| !text.is_empty());
        let (Some(name), Some(namespace)) = (
            non_empty(gateway.pod_name.clone()),
            non_empty(gateway.pod_namespace.clone()),
        ) else {
            return Err(GatewayArgsError::NoName.into());
        };
        let addresses = gateway.addresses(GatewayFlags::ordinal(&name)?)?;
        if gateway.pod_ips.is_empty() {
            return Err(GatewayArgsError::NoPodIps.into());
        }
        if gateway.endpoint_network.is_empty() {
            return Err(GatewayArgsError::NoNetworks.into());
        }
        Ok(GatewayConfig {
            gateway: GatewayName { namespace, name },
            pod_uid: gateway.pod_uid,
            pod_ips: gateway.pod_ips,
            node_ips: gateway.node_ips,
            kubeconfig: self.kubeconfig,
            backend: self.backend.into(),
            interface: self.interface,
            port: self.port,
            addresses,
            gateway_cidrs: gateway.gateway_cidr.iter().map(IpNet::trunc).collect(),
            endpoint_networks: gateway.endpoint_network.iter().map(IpNet::trunc).collect(),
            serves: gateway.serves.into_iter().collect(),
            key_file: self.key_file,
            grant_timeout: gateway.grant_timeout,
            sandbox_new_flows: gateway.sandbox_new_flows,
            sandbox_connections: gateway.sandbox_connections,
            endpoint_connections: gateway.endpoint_connections,
            mtu: gateway::fixed_mtu(self.mtu),
            drain: gateway.drain,
            listen: self.listen,
        })
    }

    /// The configuration of `cleanup`; flags that only the running agent needs are ignored.
    pub(crate) fn into_cleanup_config(self) -> CleanupConfig {
        let Self {
            node_name,
            kubeconfig,
            mode,
            interface,
            key_file,
            cache_file: cache,
            ..
        } = self;
        CleanupConfig {
            node_name: node_name.filter(|name| !name.is_empty()),
            kubeconfig,
            mode,
            interface,
            cache_file: cache_file(cache, &key_file),
            key_file,
        }
    }
}

#[cfg(test)]
mod tests;
