//! Gateways, and what their importers may reach through them.
//!
//! An importer of gateways is a sandbox, or a member with a grant for a Service of a masqueraded member.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;

use crate::{
    key::PublicKey,
    mesh::{ObjectName, Protocol},
};

/// What one importer may reach through the gateways of a member (the spec of a SandboxAccess).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AccessSpec {
    /// The entry name of the importer.
    pub sandbox: String,
    /// Distinguishes the importers of one hub (`sandboxID`).
    pub id: String,
    /// The accepted networks of a sandbox; for an importer that is not a sandbox, its WireGuard networks.
    pub networks: BTreeSet<IpNet>,
    /// The importer's nodes, by public key.
    pub nodes: BTreeMap<PublicKey, AccessNode>,
    /// The granted Service ports, by protocol and gateway port.
    pub grants: BTreeMap<(Protocol, u16), GrantedPort>,
}

/// A node of an importer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AccessNode {
    /// The name of the Node, shortened if it is long.
    pub name: String,
    /// The node's WireGuard addresses.
    pub addresses: BTreeSet<IpAddr>,
}

/// A port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GrantedPort {
    /// The Service.
    pub service: ObjectName,
    /// Name of the Service's port; empty if the Service has a single unnamed port.
    pub port: String,
}

/// A gateway: a pod through which importers reach Services of a member, as its SandboxGateway describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gateway {
    /// Its public key.
    pub public_key: PublicKey,
    /// Its WireGuard addresses.
    pub addresses: BTreeSet<IpAddr>,
    /// The published endpoints, best first.
    pub endpoints: Vec<SocketAddr>,
    /// The importers that may use the gateway, by entry name; empty = all.
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
    /// Whether the importer with the entry name `sandbox` may use the gateway.
    #[must_use]
    pub fn serves(&self, sandbox: &str) -> bool {
        self.serves.is_empty() || self.serves.contains(sandbox)
    }
}
