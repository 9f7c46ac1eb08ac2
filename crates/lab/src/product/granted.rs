//! What a sandbox reaches through the hub's gateways, read from the objects of both clusters.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use serde_json::Value;

use super::{GATEWAYS, MESH, Product};
use crate::{Cluster, Error, Result};

/// A gateway, as its SandboxGateway shows it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gateway {
    /// Name of the SandboxGateway and its pod.
    pub name: String,
    /// Name of its Peer in the sandbox.
    pub peer: String,
    /// Where the sandbox dials it: the endpoint of that Peer.
    pub endpoint: SocketAddr,
    /// Address of its pod.
    pub pod: IpAddr,
    /// Its address in the tunnel.
    pub wireguard: IpAddr,
}

/// What a sandbox is granted: the same ports of each gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// By name.
    pub gateways: Vec<Gateway>,
    /// Ports of TCP.
    pub tcp: BTreeSet<u16>,
    /// Ports of UDP.
    pub udp: BTreeSet<u16>,
}

impl Granted {
    /// Its sockets of TCP.
    #[must_use]
    pub fn tcp(&self) -> BTreeSet<SocketAddr> {
        self.at(&self.tcp)
    }

    /// Its sockets of UDP.
    #[must_use]
    pub fn udp(&self) -> BTreeSet<SocketAddr> {
        self.at(&self.udp)
    }

    fn at(&self, ports: &BTreeSet<u16>) -> BTreeSet<SocketAddr> {
        let of = |gateway: &Gateway| {
            let ip = gateway.wireguard;
            ports.iter().map(move |port| SocketAddr::new(ip, *port))
        };
        self.gateways.iter().flat_map(of).collect()
    }

    /// What of it one gateway serves.
    #[must_use]
    pub fn through(&self, gateway: &Gateway) -> Self {
        Self {
            gateways: vec![gateway.clone()],
            ..self.clone()
        }
    }

    /// Adds every gateway's address in the tunnel, at each port of these sockets and each granted one.
    pub fn add_to(&self, all: &mut BTreeMap<SocketAddr, String>) {
        let mut ports: BTreeSet<u16> = all.keys().map(SocketAddr::port).collect();
        ports.extend(self.tcp.union(&self.udp));
        for gateway in &self.gateways {
            let sockets = ports.iter().map(|port| SocketAddr::new(gateway.wireguard, *port));
            all.extend(sockets.map(|socket| (socket, format!("gateway {}", gateway.name))));
        }
    }
}

impl Product<'_> {
    /// What a sandbox of the mesh is granted now: the ports of its SandboxAccess in the hub, at the gateways it has Peers for.
    ///
    /// # Errors
    /// When an object is not there, or is incomplete.
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
            gateways.push(gateway.ok_or_else(|| Error::Plan(format!("no gateway of {sandbox} yet: {object}")))?);
        }
        gateways.sort();
        let ports = |protocol: &str| {
            let grants = list(&access["spec"]["grants"]).filter(|grant| grant["protocol"] == protocol);
            let ports = grants.filter_map(|grant| u16::try_from(grant["gatewayPort"].as_u64()?).ok());
            ports.collect()
        };
        Ok(Granted {
            gateways,
            tcp: ports("TCP"),
            udp: ports("UDP"),
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
    serde_json::from_str(&printed).map_err(|error| Error::Plan(format!("{error}: {printed}")))
}
