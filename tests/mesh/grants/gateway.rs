//! Reads the hub's gateways from their SandboxGateways.

use std::net::IpAddr;

use clustermesh_lab::{Cluster, GATEWAYS, Web, wait_until};
use serde_json::Value;

use super::{PATIENCE, Side, json, text};

/// A gateway, as in its SandboxGateway.
pub(super) struct Gateway {
    pub(super) key: String,
    pub(super) wireguard: Vec<IpAddr>,
    pub(super) pod: Web,
}

impl Gateway {
    /// Its WireGuard address with the IP family of the sandbox's WireGuard address.
    pub(super) fn of(&self, side: &Side<'_>) -> IpAddr {
        side.of(self.wireguard.iter().copied())
    }
}

pub(super) async fn all(hub: &Cluster<'_>) -> Vec<Gateway> {
    let pods = hub.pods(GATEWAYS, &format!("app.kubernetes.io/name={GATEWAYS}")).await;
    let pods = pods.unwrap();
    let objects = wait_until("every gateway to publish its key", PATIENCE, async || {
        let objects = json(hub, &["get", "sandboxgateways", "-n", GATEWAYS]).await;
        let objects = objects["items"].as_array().unwrap().clone();
        if objects.iter().all(|object| object["status"]["publicKey"].is_string()) {
            Ok(objects)
        } else {
            Err(format!("{objects:?}"))
        }
    })
    .await
    .unwrap();
    let one = |object: &Value| {
        let (name, status) = (text(&object["metadata"]["name"]), &object["status"]);
        let wireguard = status["wireguardIPs"].as_array().unwrap();
        Gateway {
            key: text(&status["publicKey"]),
            wireguard: wireguard.iter().map(|ip| text(ip).parse().unwrap()).collect(),
            pod: pods.iter().find(|pod| pod.name == name).unwrap().clone(),
        }
    };
    objects.iter().map(one).collect()
}
