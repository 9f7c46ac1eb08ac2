//! Starts a node and runs its services. The functions are entry points of the `clustermesh-lab` program, which runs as
//! pid 1 and as some services of a node.

mod cni;
mod config;
mod flannel;
mod policies;
mod root;
mod services;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::Context;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::plan::API_PORT;
use crate::{ArtefactSet, ClusterPlan, NodePlan, PodNetwork, ProxyMode, Tools};

/// The settings of one node, written by the lab and read by the node's processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// The lab's run directory, which has the same path in the node.
    run: PathBuf,
    name: String,
    cluster: String,
    /// The addresses of one or both families. In a dual-stack cluster the IPv4 address is first.
    addresses: Vec<IpAddr>,
    /// The pod ranges of the cluster, for all its nodes.
    pod_cidrs: Vec<IpNet>,
    dns: IpAddr,
    /// The resolver in the node's /etc/resolv.conf, and in pods with `dnsPolicy: Default`. `None` = the node has this machine's
    /// file, which kubelet does not copy into such pods: they have no resolver.
    #[serde(default)]
    resolver: Option<IpAddr>,
    #[serde(default)]
    pod_network: PodNetwork,
    /// Connections to the first address, which this node has, are forwarded to the second, which is the API server's.
    #[serde(default)]
    api_forward: Option<(SocketAddr, SocketAddr)>,
    proxy: ProxyMode,
    /// The implementation of NetworkPolicies. `None` = the node does not enforce them.
    #[serde(default)]
    policies: Option<PolicyEngine>,
    /// Directories with programs, which have the same paths in the node.
    programs: Vec<PathBuf>,
}

/// An implementation of NetworkPolicies.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum PolicyEngine {
    /// The lab's own implementation (`policies.rs`).
    Own,
    /// A kube-router that was built outside this repository, at the path in `KUBE_ROUTER_BIN`.
    KubeRouter {
        program: PathBuf,
        /// The Service ranges, which kube-router needs as a flag.
        services: Vec<IpNet>,
    },
}

impl PolicyEngine {
    fn of(cluster: &ClusterPlan) -> Self {
        match std::env::var_os("KUBE_ROUTER_BIN") {
            None => Self::Own,
            Some(program) => Self::KubeRouter {
                program: program.into(),
                services: cluster.service_cidrs(),
            },
        }
    }
}

impl Settings {
    pub(crate) fn new(
        run: &Path,
        cluster: &ClusterPlan,
        node: &NodePlan,
        resolver: Option<IpAddr>,
        tools: &Tools,
    ) -> crate::Result<Self> {
        let sets = [
            ArtefactSet::Nodes,
            ArtefactSet::Runtime,
            ArtefactSet::Flannel,
            ArtefactSet::FlannelPlugin,
        ];
        let mut programs: Vec<PathBuf> = sets
            .iter()
            .filter_map(|set| tools.directory(*set).map(Path::to_owned))
            .collect();
        let policies = cluster.policies.then(|| PolicyEngine::of(cluster));
        if let Some(PolicyEngine::KubeRouter { program, services: _ }) = &policies {
            programs.extend(program.parent().map(Path::to_owned));
        }
        let forwards_api = cluster.api_node.is_some_and(|n| cluster.node(n).name == node.name);
        let api = |address| SocketAddr::new(address, API_PORT);
        Ok(Self {
            run: run.into(),
            name: node.name.clone(),
            cluster: cluster.name.clone(),
            addresses: node.addresses(),
            pod_cidrs: cluster.pod_cidrs(),
            dns: cluster.dns_ip(),
            resolver,
            pod_network: cluster.pod_network,
            api_forward: forwards_api.then(|| (api(node.address), api(cluster.api_address()))),
            proxy: cluster.proxy,
            policies,
            programs,
        })
    }

    fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
        Ok(serde_json::from_slice(&text)?)
    }

    /// This node's directory in the run directory.
    fn directory(&self) -> PathBuf {
        self.run.join("nodes").join(&self.name)
    }

    /// The directory of the node's cluster in the run directory.
    fn cluster_directory(&self) -> PathBuf {
        self.run.join(&self.cluster)
    }

    fn program(&self, name: &str) -> anyhow::Result<PathBuf> {
        let mut paths = self.programs.iter().map(|directory| directory.join(name));
        paths
            .find(|path| path.exists())
            .with_context(|| format!("no {name} in {:?}", self.programs))
    }
}

/// Runs as pid 1 of a node. Returns only on an error; the kernel then kills all processes of the node.
pub(crate) fn init(settings_path: &Path) -> anyhow::Result<()> {
    // The host's /proc is still mounted, so this is the pid in the host's pid namespace.
    let pid = std::fs::read_link("/proc/self")?;
    let settings = Settings::read(settings_path)?;
    root::enter(&settings)?;
    std::fs::write(settings.directory().join("pid"), pid.as_os_str().as_encoded_bytes())?;
    services::run(&settings, settings_path)
}

/// Runs the lab's CNI daemon on a node.
pub(crate) fn cni(settings_path: &Path) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(cni::run(&Settings::read(settings_path)?))
}

/// Enforces NetworkPolicies on a node.
pub(crate) fn policies(settings_path: &Path) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(policies::run(&Settings::read(settings_path)?))
}
