//! What the agent shows of itself, as `/debug/state` and `wg-agent status` spell it. Read leniently: whoever asks may be of
//! another version. Made in `reconcile`; never a secret.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use clustermesh_api::annotations::Agent;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// The parts of the dump that a person is shown. `None` = nothing is known yet.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct View {
    /// As on the Node.
    pub(crate) agent: Option<Agent>,
    pub(crate) node: Option<NodeView>,
    pub(crate) device: Option<DeviceView>,
    /// By name of the Peer.
    pub(crate) peers: BTreeMap<String, PeerView>,
    /// Objects and networks that were left out, and why.
    pub(crate) refused: Vec<String>,
    pub(crate) troubles: Vec<TroubleView>,
    /// `held`, or what is missing.
    pub(crate) admission: String,
}

/// Who the node is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct NodeView {
    pub(crate) name: String,
    pub(crate) public_key: String,
    #[serde(rename = "wireguardIP")]
    pub(crate) wireguard_ip: Option<IpAddr>,
    pub(crate) underlay: UnderlayView,
}

/// Where outer packets leave.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct UnderlayView {
    pub(crate) interface: String,
    pub(crate) mtu: u32,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) next_hops: Vec<IpAddr>,
}

/// What carries the tunnels.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct DeviceView {
    pub(crate) interface: String,
    pub(crate) backend: String,
    /// Why this backend.
    pub(crate) why: String,
    /// Bytes of inner packet.
    pub(crate) mtu: u32,
    pub(crate) listen_port: u16,
    /// Packets, by reason.
    pub(crate) drops: BTreeMap<String, u64>,
}

/// One peer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PeerView {
    /// `namespace/name` of the ClusterMesh; empty = a Peer that nobody's controller wrote.
    pub(crate) mesh: String,
    pub(crate) cluster: String,
    pub(crate) key: String,
    /// `up`, `down`, `unknown`.
    pub(crate) state: String,
    #[serde(rename = "allowedIPs")]
    pub(crate) allowed_ips: BTreeSet<IpNet>,
    /// To be tried, in order.
    pub(crate) candidates: Vec<SocketAddr>,
    pub(crate) configured_endpoint: Option<SocketAddr>,
    /// Where packets go now.
    pub(crate) live_endpoint: Option<SocketAddr>,
    pub(crate) keepalive_seconds: Option<u16>,
    /// Bytes of inner packet that get to it whole.
    pub(crate) largest_packet: u16,
    /// `None` = never.
    pub(crate) handshake_age_seconds: Option<u64>,
    pub(crate) rx_bytes: u64,
    pub(crate) tx_bytes: u64,
}

/// Something that is not as it should be.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct TroubleView {
    /// Of the agent, as `firewall`.
    pub(crate) part: String,
    /// What is wrong and what to do.
    pub(crate) message: String,
    /// The node serves the mesh all the same.
    pub(crate) harmless: bool,
}

impl View {
    /// Whether there is nothing to mend.
    pub(crate) fn well(&self) -> bool {
        self.node.is_some()
            && self.refused.is_empty()
            && self.troubles.iter().all(|trouble| trouble.harmless)
            && (self.agent.as_ref()).is_none_or(|agent| agent.datapath_bypassed.is_empty())
            && self.peers.values().all(|peer| peer.state != "down")
    }

    /// Only these peers: of one cluster, or of one name.
    pub(crate) fn only(&mut self, cluster: Option<&str>, peer: Option<&str>) {
        self.peers.retain(|name, view| {
            cluster.is_none_or(|cluster| cluster == view.cluster) && peer.is_none_or(|peer| peer == name)
        });
    }
}
