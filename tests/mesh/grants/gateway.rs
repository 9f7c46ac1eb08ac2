//! Reads the hub's gateways from their SandboxGateways.

use std::net::IpAddr;

use clustermesh_lab::{Cluster, GATEWAYS, RunningPod, wait_until};
use serde_json::Value;

use super::{PATIENCE, Sandbox, json, text};

/// A gateway, read from its SandboxGateway.
pub(super) struct Gateway {
    pub(super) key: String,
    pub(super) wireguard: Vec<IpAddr>,
    pub(super) pod: RunningPod,
}

impl Gateway {
    /// The gateway's WireGuard address with the IP family of the sandbox's WireGuard address.
    pub(super) fn address_for(&self, sandbox: &Sandbox<'_>) -> IpAddr {
        sandbox.pick_address(self.wireguard.iter().copied())
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
