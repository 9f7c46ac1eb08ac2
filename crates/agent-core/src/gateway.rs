//! Computes the WireGuard peers and the firewall table of a gateway, from SandboxAccess objects and the endpoints of granted Services.
//!
//! A grant maps (sandbox, protocol, gateway port) to the endpoints of one port of one Service. The connection mark is the id of the
//! grant. Every packet is matched against the current table: a packet from a sandbox by (sandbox, protocol, gateway port, id) and
//! by (id, endpoint), a reply by (id, endpoint). So deleting a grant or an endpoint also stops open connections, and after a port
//! gets another grant, packets of connections of the earlier grant are dropped.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use clustermesh_core::{
    key::PublicKey,
    mesh::{ObjectName, Protocol},
};
use ipnet::IpNet;

use crate::{device::Peers, interface::InterfaceName};

mod compile;
mod connection_limits;
mod endpoints;
mod id;
mod render;
mod table;

pub use compile::compile;
pub use id::{GrantId, SandboxId};
pub use table::{Balancer, Grant, RuleParameters, Table, render_renewal, update};

/// Input of [`compile`].
#[derive(Debug, Clone)]
pub struct Inputs {
    /// Settings of the gateway.
    pub settings: Settings,
    /// Every SandboxAccess.
    pub accesses: Vec<Access>,
    /// The granted Services.
    pub services: BTreeMap<ObjectName, Service>,
}

/// Settings of a gateway, from its flags and from what it detects about its pod.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The WireGuard device.
    pub interface: InterfaceName,
    /// UDP port of the tunnel.
    pub listen_port: u16,
    /// The admin port (TCP).
    pub admin_port: u16,
    /// WireGuard addresses of this gateway.
    pub addresses: BTreeSet<IpAddr>,
    /// Networks that must contain every endpoint: the pod networks of the cluster.
    pub endpoint_networks: BTreeSet<IpNet>,
    /// Addresses that neither a sandbox nor an endpoint may have: those of this pod, its API server and every gateway.
    pub reserved: BTreeSet<IpNet>,
    /// Names of the sandboxes that this gateway serves; empty = all.
    pub serves: BTreeSet<String>,
    /// Limit on new connections of a sandbox per second, if its SandboxAccess sets none. 0 = no limit.
    pub new_connections: u32,
    /// Limit on open connections of a sandbox; 0 = no limit.
    pub sandbox_connections: u32,
    /// Limit on open connections of one grant to one endpoint; 0 = no limit.
    pub endpoint_connections: u32,
}

/// A SandboxAccess object. A value of a field that does not parse is an `Err` with the message.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Access {
    /// Name of the object.
    pub name: String,
    /// `metadata.creationTimestamp`, Unix seconds.
    pub created: i64,
    /// Identity of the sandbox. Several objects with the same identity, written for several meshes, describe one sandbox.
    pub identity: String,
    /// Name of the sandbox.
    pub sandbox: String,
    /// Its networks.
    pub networks: Vec<Result<IpNet, String>>,
    /// Its nodes.
    pub nodes: Vec<Node>,
    /// Its grants.
    pub grants: Vec<GrantSpec>,
    /// Limit on new connections per second; `None` = the default of [`Settings`].
    pub new_connections: Option<u32>,
}

/// A node of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its WireGuard key.
    pub public_key: Result<PublicKey, String>,
    /// Its WireGuard addresses.
    pub addresses: Vec<Result<IpAddr, String>>,
}

/// An entry of `spec.grants`: a granted port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GrantSpec {
    /// The Service.
    pub service: ObjectName,
    /// Name of its port.
    pub port: String,
    /// Protocol.
    pub protocol: Protocol,
    /// The gateway port.
    pub gateway_port: u16,
}

/// A Service of this cluster and its EndpointSlices.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Service {
    /// It could not be observed, with the reason: it was not read yet, or the gateway may not read it.
    Unknown(String),
    /// It does not exist.
    Absent,
    /// It was observed.
    Observed(ObservedService),
}

/// The observed properties of a Service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct ObservedService {
    /// It has a selector, so Kubernetes writes its EndpointSlices.
    pub has_selector: bool,
    /// Its type is ExternalName.
    pub is_external_name: bool,
    /// It is a mirrored Service of another member.
    pub is_mirror: bool,
    /// `sessionAffinity: ClientIP`.
    pub is_sticky: bool,
    /// Protocol and name of each port.
    pub ports: BTreeSet<(Protocol, String)>,
    /// The ports of its endpoints.
    pub endpoints: BTreeSet<Endpoint>,
}

/// One port of one endpoint.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Endpoint {
    /// Protocol.
    pub protocol: Protocol,
    /// Name of the port.
    pub port_name: String,
    /// Address of the pod.
    pub address: IpAddr,
    /// Port of the pod.
    pub port: u16,
    /// EndpointSlice condition `ready`: it gets new connections.
    pub ready: bool,
    /// EndpointSlice condition `serving`: it keeps its open connections, and gets new ones while no endpoint of its family is ready.
    pub serving: bool,
}

/// The desired state of a gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// The nodes of all sandboxes.
    pub peers: Peers,
    /// Networks that are routed into the device.
    pub routes: BTreeSet<IpNet>,
    /// The firewall table.
    pub table: Table,
    /// Names of the SandboxAccesses with at least one network that is not refused.
    pub served: BTreeSet<String>,
    /// The parts of SandboxAccesses that are left out.
    pub refused: BTreeSet<Refused>,
}

/// A part of a SandboxAccess that is not served. For [`Reason::EndpointForbidden`], the part is one or more endpoints of the
/// grant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Refused {
    /// Name of the SandboxAccess.
    pub access: String,
    /// Path of the field.
    pub field: String,
    /// Protocol and gateway port of the grant; `None` = the part is not a grant.
    pub grant: Option<(Protocol, u16)>,
    /// Why, as one word.
    pub reason: Reason,
    /// What is wrong and what to do.
    pub message: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            access,
            field,
            reason,
            message,
            ..
        } = self;
        write!(f, "SandboxAccess {access}: {field}: {}: {message}", reason.as_str())
    }
}

/// Why a part is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// A network does not parse, is too wide or is reserved.
    NetworkInvalid,
    /// A network overlaps another network of this SandboxAccess, or a network of a SandboxAccess that takes precedence. The
    /// same network in another SandboxAccess of the same sandbox is no overlap.
    NetworkOverlap,
    /// A key does not parse.
    PublicKeyInvalid,
    /// Another node has this key.
    PublicKeyDuplicate,
    /// An address does not parse or lies outside the sandbox's networks.
    AddressInvalid,
    /// Another node has this address.
    AddressDuplicate,
    /// Another grant of the sandbox has this gateway port and protocol.
    PortDuplicate,
    /// The protocol is SCTP.
    ProtocolNotServed,
    /// The Service or its port does not exist.
    ServiceMissing,
    /// The Service was not observed.
    ServiceUnknown,
    /// Sandboxes must not reach the Service.
    ServiceNotServed,
    /// Sandboxes must not reach one or more of the Service's endpoints. The grant is served at the others, if there are any.
    EndpointForbidden,
}

impl Reason {
    /// The word in the status and in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NetworkInvalid => "NetworkInvalid",
            Self::NetworkOverlap => "NetworkOverlap",
            Self::PublicKeyInvalid => "PublicKeyInvalid",
            Self::PublicKeyDuplicate => "PublicKeyDuplicate",
            Self::AddressInvalid => "AddressInvalid",
            Self::AddressDuplicate => "AddressDuplicate",
            Self::PortDuplicate => "PortDuplicate",
            Self::ProtocolNotServed => "ProtocolNotServed",
            Self::ServiceMissing => "ServiceMissing",
            Self::ServiceUnknown => "ServiceUnknown",
            Self::ServiceNotServed => "ServiceNotServed",
            Self::EndpointForbidden => "EndpointForbidden",
        }
    }
}

#[cfg(test)]
mod tests;
