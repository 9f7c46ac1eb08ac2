//! Gateways, and what sandboxes and other importers may reach through them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;

use crate::{
    key::PublicKey,
    mesh::{ObjectName, Protocol},
};

/// What one sandbox may reach through the gateways of a member (the spec of a SandboxAccess).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AccessSpec {
    /// The entry name of the sandbox.
    pub sandbox: String,
    /// Distinguishes the sandboxes of one hub (`sandboxID`).
    pub id: String,
    /// The sandbox's allowedNetworks.
    pub networks: BTreeSet<IpNet>,
    /// The sandbox's nodes, by public key.
    pub nodes: BTreeMap<PublicKey, AccessNode>,
    /// The granted Service ports, by the gateway's protocol and port at which the sandbox reaches them.
    pub grants: BTreeMap<(Protocol, u16), GrantedPort>,
}

/// A node of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AccessNode {
    /// The name of the Node, shortened if it is long.
    pub name: String,
    /// Its WireGuard addresses.
    pub addresses: BTreeSet<IpAddr>,
}

/// A port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GrantedPort {
    /// The Service.
    pub service: ObjectName,
    /// Name of its port; empty if the Service has a single unnamed port.
    pub port: String,
}

/// A gateway: a pod through which sandboxes enter a member, as its SandboxGateway describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gateway {
    /// Its public key.
    pub public_key: PublicKey,
    /// Its WireGuard addresses.
    pub addresses: BTreeSet<IpAddr>,
    /// The published endpoints, best first.
    pub endpoints: Vec<SocketAddr>,
    /// The sandboxes that may use the gateway, by entry name; empty = all.
    pub serves: BTreeSet<String>,
    /// Its pod is Ready, and it is the pod that published this key.
    pub ready: bool,
    /// The pod that published this key exists, Ready or not.
    pub exists: bool,
    /// The generation of each SandboxAccess, by name, that the gateway has applied.
    pub applied: BTreeMap<String, i64>,
    /// Grants that the gateway refuses, with the reason, by SandboxAccess, protocol and gateway port.
    pub refused: BTreeMap<(String, Protocol, u16), String>,
}

impl Gateway {
    /// Whether this sandbox may use the gateway.
    #[must_use]
    pub fn serves(&self, sandbox: &str) -> bool {
        self.serves.is_empty() || self.serves.contains(sandbox)
    }
}
