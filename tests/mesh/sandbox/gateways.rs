//! Reads the hub's gateways from their SandboxGateways. Lists the sockets that the sandbox may reach, and all that it scans.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use clustermesh_lab::{ALWAYS_SCANNED_PORTS, GATEWAYS, MESH, RunningPod, wait_until};
use serde_json::Value;

use super::{SANDBOX, TestEnv};
use crate::setup::{PATIENCE, json};

/// A gateway of the hub.
#[derive(Debug)]
pub(super) struct Gateway {
    pub(super) pod: RunningPod,
    pub(super) key: String,
    /// The first of the gateway's WireGuard addresses.
    pub(super) address: IpAddr,
}

/// Name of the sandbox's SandboxAccess.
pub(super) fn access_name() -> String {
    format!("{MESH}--{SANDBOX}")
}

impl TestEnv<'_> {
    /// The gateways whose pods run.
    pub(super) async fn gateways(&self) -> Vec<Gateway> {
        let pods = self
            .hub
            .pods(GATEWAYS, "app.kubernetes.io/name=clustermesh-gateway")
            .await
            .unwrap();
        let mut gateways = Vec::new();
        for pod in pods {
            let object = json(&self.hub, &["-n", GATEWAYS, "get", "sandboxgateway", &pod.name]).await;
            let status = &object["status"];
            gateways.push(Gateway {
                key: status["publicKey"].as_str().unwrap().to_owned(),
                address: status["wireguardIPs"][0].as_str().unwrap().parse().unwrap(),
                pod,
            });
        }
        gateways
    }

    /// The gateway that a Peer of the sandbox describes.
    pub(super) async fn gateway_of(&self, peer_name: &str) -> Gateway {
        let peer = json(&self.sandbox, &["get", "peer", peer_name]).await;
        let gateways = self.gateways().await;
        let has_key = |gateway: &Gateway| peer["spec"]["publicKey"] == *gateway.key;
        gateways.into_iter().find(has_key).unwrap()
    }

    /// The sandbox's SandboxAccess.
    pub(super) async fn access(&self) -> Value {
        json(&self.hub, &["get", "sandboxaccess", &access_name()]).await
    }

    /// The socket of the granted Service at each gateway.
    pub(super) async fn granted(&self) -> BTreeSet<SocketAddr> {
        let access = self.access().await;
        let grants = access["spec"]["grants"].as_array().unwrap();
        assert_eq!(grants.len(), 1, "{access:#}");
        let port = u16::try_from(grants[0]["gatewayPort"].as_u64().unwrap()).unwrap();
        let gateways = self.gateways().await;
        gateways
            .iter()
            .map(|gateway| SocketAddr::new(gateway.address, port))
            .collect()
    }

    /// The sockets of the hub and the member, each with the name of its owner, except sockets at addresses that the sandbox's
    /// cluster uses itself. Adds sockets at the WireGuard address of each gateway: one for each port of all these sockets and of
    /// the grant, one for each of [`ALWAYS_SCANNED_PORTS`], and one for WireGuard's port.
    pub(super) async fn all_sockets(&self) -> BTreeMap<SocketAddr, String> {
        let granted = self.granted().await;
        let clusters = [&self.hub, &self.member];
        let mut all = self.sandbox.foreign_sockets(&clusters, &granted).await.unwrap();
        let ports: BTreeSet<u16> = all
            .keys()
            .chain(&granted)
            .map(SocketAddr::port)
            .chain(ALWAYS_SCANNED_PORTS)
            .chain([51820])
            .collect();
        for gateway in self.gateways().await {
            let sockets = ports.iter().map(|port| SocketAddr::new(gateway.address, *port));
            all.extend(sockets.map(|socket| (socket, format!("gateway {}", gateway.pod.name))));
        }
        all
    }

    /// Waits until the hub has no SandboxAccess.
    pub(super) async fn wait_for_no_access(&self) {
        wait_until("the SandboxAccess to be deleted", PATIENCE, async || {
            let left = self.hub.kubectl(["get", "sandboxaccesses", "-o", "name"]).await;
            let left = left.map_err(|error| error.to_string())?.stdout;
            if left.is_empty() { Ok(()) } else { Err(left) }
        })
        .await
        .unwrap();
    }
}
