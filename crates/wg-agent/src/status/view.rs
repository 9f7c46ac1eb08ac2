//! The format of the agent's state in `/debug/state` and `wg-agent status`. Parsing is lenient, because the
//! agent may have another version than the command. The state never contains a secret.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use clustermesh_api::{annotations::AgentStatus, sandbox::SandboxGatewayStatus};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// The parts of the agent's state that `wg-agent status` shows. `None` = not known yet. In policy mode, `device` stays
/// `None`; in gateway mode, `agent` and `node`; in all other modes, `gateway`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct View {
    /// The status that the agent writes into an annotation of its Node.
    pub(crate) agent: Option<AgentStatus>,
    pub(crate) node: Option<NodeView>,
    /// The status of the SandboxGateway.
    pub(crate) gateway: Option<SandboxGatewayStatus>,
    pub(crate) device: Option<DeviceView>,
    /// The peers, by the name of their Peer.
    pub(crate) peers: BTreeMap<String, PeerView>,
    /// Objects and networks that are left out, and why.
    pub(crate) refused: Vec<String>,
    pub(crate) troubles: Vec<TroubleView>,
    /// `restricted` = an admission policy restricts the agent's account; empty = not checked yet; else a message that says what is
    /// missing.
    pub(crate) admission: String,
}

/// The node's identity.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct NodeView {
    pub(crate) name: String,
    pub(crate) public_key: String,
    #[serde(rename = "wireguardIP")]
    pub(crate) wireguard_ip: Option<IpAddr>,
    pub(crate) underlay: UnderlayView,
}

/// The network by which outer packets leave.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct UnderlayView {
    pub(crate) interface: String,
    pub(crate) mtu: u32,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) next_hops: Vec<IpAddr>,
}

/// The WireGuard device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct DeviceView {
    pub(crate) interface: String,
    pub(crate) backend: String,
    /// Why this backend was chosen.
    pub(crate) why: String,
    /// The size of the largest inner packet, in bytes.
    pub(crate) mtu: u32,
    pub(crate) listen_port: u16,
    /// Dropped packets, by reason.
    pub(crate) drops: BTreeMap<String, u64>,
}

/// One peer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PeerView {
    /// `namespace/name` of the ClusterMesh; empty = no controller wrote the Peer.
    pub(crate) mesh: String,
    pub(crate) cluster: String,
    pub(crate) key: String,
    /// `up`, `down`, `unknown`.
    pub(crate) state: String,
    #[serde(rename = "allowedIPs")]
    pub(crate) allowed_ips: BTreeSet<IpNet>,
    /// Endpoints to try, in order.
    pub(crate) candidates: Vec<SocketAddr>,
    /// The endpoint that the agent wrote to the device.
    pub(crate) configured_endpoint: Option<SocketAddr>,
    /// The endpoint to which packets go.
    pub(crate) live_endpoint: Option<SocketAddr>,
    pub(crate) keepalive_seconds: Option<u16>,
    /// The largest inner packet in bytes that reaches the peer unfragmented.
    pub(crate) largest_packet: u16,
    /// `None` = never.
    pub(crate) handshake_age_seconds: Option<u64>,
    pub(crate) rx_bytes: u64,
    pub(crate) tx_bytes: u64,
}

/// A problem.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct TroubleView {
    /// The part of the agent, such as `firewall`.
    pub(crate) part: String,
    /// What is wrong and what to do.
    pub(crate) message: String,
    /// Whether the agent is ready nevertheless.
    pub(crate) harmless: bool,
}

impl View {
    /// Whether the agent is known to work without a problem. A missing admission policy does not count.
    pub(crate) fn is_healthy(&self) -> bool {
        (self.node.is_some() || self.gateway.is_some())
            && self.refused.is_empty()
            && self.troubles.iter().all(|trouble| trouble.harmless)
            && (self.agent.as_ref()).is_none_or(|agent| agent.datapath_bypassed.is_empty())
            && self.peers.values().all(|peer| peer.state != "down")
    }

    /// Keeps only the peers that have this cluster and this name; `None` = any.
    pub(crate) fn filter_peers(&mut self, cluster: Option<&str>, peer: Option<&str>) {
        self.peers.retain(|name, view| {
            cluster.is_none_or(|cluster| cluster == view.cluster) && peer.is_none_or(|peer| peer == name)
        });
    }
}
