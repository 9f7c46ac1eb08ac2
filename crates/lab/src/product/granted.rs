//! Lists the sockets at the hub's gateways that a sandbox may reach. Reads them from objects in the hub and in the sandbox.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use serde_json::Value;

use super::{GATEWAYS, MESH, Product};
use crate::{Cluster, Error, Result};

/// A gateway, as its SandboxGateway and its Peer in the sandbox describe it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gateway {
    /// Name of the SandboxGateway and of the gateway's pod.
    pub name: String,
    /// Name of the gateway's Peer in the sandbox.
    pub peer: String,
    /// The WireGuard endpoint in that Peer.
    pub endpoint: SocketAddr,
    /// The gateway pod's address.
    pub pod: IpAddr,
    /// The gateway's WireGuard address.
    pub wireguard: IpAddr,
}

/// The grants of a sandbox. Every gateway has the same gateway ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// The gateways, sorted by name.
    pub gateways: Vec<Gateway>,
    /// Gateway ports of the TCP grants.
    pub tcp_ports: BTreeSet<u16>,
    /// Gateway ports of the UDP grants.
    pub udp_ports: BTreeSet<u16>,
}

impl Granted {
    /// The TCP gateway ports at the WireGuard addresses of all gateways.
    #[must_use]
    pub fn tcp_sockets(&self) -> BTreeSet<SocketAddr> {
        self.sockets(&self.tcp_ports)
    }

    /// The UDP gateway ports at the WireGuard addresses of all gateways.
    #[must_use]
    pub fn udp_sockets(&self) -> BTreeSet<SocketAddr> {
        self.sockets(&self.udp_ports)
    }

    fn sockets(&self, ports: &BTreeSet<u16>) -> BTreeSet<SocketAddr> {
        let sockets = |gateway: &Gateway| {
            let ip = gateway.wireguard;
            ports.iter().map(move |port| SocketAddr::new(ip, *port))
        };
        self.gateways.iter().flat_map(sockets).collect()
    }

    /// The same grants at one gateway only.
    #[must_use]
    pub fn through(&self, gateway: &Gateway) -> Self {
        Self {
            gateways: vec![gateway.clone()],
            ..self.clone()
        }
    }

    /// Adds sockets to `all`, which contains the sockets of a scan and their labels. At every gateway's WireGuard address, it adds
    /// the gateway ports and every port that `all` already contains at any address.
    pub fn add_gateway_sockets(&self, all: &mut BTreeMap<SocketAddr, String>) {
        let mut ports: BTreeSet<u16> = all.keys().map(SocketAddr::port).collect();
        ports.extend(self.tcp_ports.union(&self.udp_ports));
        for gateway in &self.gateways {
            let sockets = ports.iter().map(|port| SocketAddr::new(gateway.wireguard, *port));
            all.extend(sockets.map(|socket| (socket, format!("gateway {}", gateway.name))));
        }
    }
}

impl Product<'_> {
    /// The current grants of a sandbox: the ports of its SandboxAccess in the hub, at all gateways.
    ///
    /// # Errors
    /// When an object does not exist or is incomplete, or the sandbox has no Peer of a gateway.
    pub async fn granted(&self, sandbox: &str) -> Result<Granted> {
        let hub = self.hub();
        let access = format!("{MESH}--{sandbox}");
        let access = json(&hub, &["get", "sandboxaccess", &access]).await?;
        let objects = json(&hub, &["-n", GATEWAYS, "get", "sandboxgateways"]).await?;
        let peers = json(&self.lab.cluster(sandbox), &["get", "peers"]).await?;
        let mut gateways = Vec::new();
        for object in list(&objects["items"]) {
            let peer = list(&peers["items"]).find(|peer| peer["spec"]["publicKey"] == object["status"]["publicKey"]);
            let gateway = peer.and_then(|peer| gateway(object, peer));
            gateways.push(gateway.ok_or_else(|| Error::Other(format!("{sandbox} has no Peer of {object}")))?);
        }
        gateways.sort();
        let ports = |protocol: &str| {
            let grants = list(&access["spec"]["grants"]).filter(|grant| grant["protocol"] == protocol);
            let ports = grants.filter_map(|grant| u16::try_from(grant["gatewayPort"].as_u64()?).ok());
            ports.collect()
        };
        Ok(Granted {
            gateways,
            tcp_ports: ports("TCP"),
            udp_ports: ports("UDP"),
        })
    }
}

fn gateway(object: &Value, peer: &Value) -> Option<Gateway> {
    let status = &object["status"];
    let endpoint = &peer["spec"]["endpoint"];
    let ip = endpoint["dnsOrIP"]["ip"].as_str()?.parse().ok()?;
    Some(Gateway {
        name: object["metadata"]["name"].as_str()?.to_owned(),
        peer: peer["metadata"]["name"].as_str()?.to_owned(),
        endpoint: SocketAddr::new(ip, u16::try_from(endpoint["port"].as_u64()?).ok()?),
        pod: status["endpoints"][0].as_str()?.parse::<SocketAddr>().ok()?.ip(),
        wireguard: status["wireguardIPs"][0].as_str()?.parse().ok()?,
    })
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

async fn json(cluster: &Cluster<'_>, words: &[&str]) -> Result<Value> {
    let printed = cluster.kubectl([words, &["-o", "json"]].concat()).await?.stdout;
    serde_json::from_str(&printed).map_err(|error| Error::Other(format!("{error}: {printed}")))
}
