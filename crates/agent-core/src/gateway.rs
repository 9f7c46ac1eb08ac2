//! A gateway of sandboxes: from SandboxAccess objects and the endpoints of granted Services to the peers and the firewall
//! table of one pod. Values only; telling the kernel and the API server is the program's.
//!
//! A grant is (sandbox, protocol, port of the gateway) -> an endpoint of one port of one Service. Its id stands in the mark of
//! each connection. Every packet of a connection is matched, in both directions, against what stands now: the grant by sandbox,
//! protocol, port and id, the endpoint by id and address. So taking an element away ends what it allowed, and a port that gets
//! another grant serves no connection of the former one.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use clustermesh_core::{key::PublicKey, mesh::ObjectName};
use ipnet::IpNet;

use crate::{device::Peers, interface::InterfaceName, policy::Protocol};

mod compile;
mod connection_limits;
mod endpoints;
mod id;
mod render;
mod table;

pub use compile::compile;
pub use id::{GrantId, SandboxId};
pub use table::{Balancer, Frame, Grant, Table, alive, update};

/// What a gateway knows.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// What it was started with.
    pub settings: Settings,
    /// Every SandboxAccess.
    pub accesses: Vec<Access>,
    /// Granted Services, as far as they were seen.
    pub services: BTreeMap<ObjectName, Service>,
}

/// What a gateway was started with.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The WireGuard device.
    pub interface: InterfaceName,
    /// UDP port of the tunnel.
    pub listen_port: u16,
    /// TCP port of `/metrics` and `/readyz`.
    pub admin_port: u16,
    /// WireGuard addresses of this gateway.
    pub addresses: BTreeSet<IpAddr>,
    /// Where endpoints may lie: pod networks of the cluster.
    pub endpoint_networks: BTreeSet<IpNet>,
    /// Addresses that no sandbox may have: of this pod, its API server, every gateway.
    pub reserved: BTreeSet<IpNet>,
    /// Sandboxes that are served; empty = every one.
    pub serves: BTreeSet<String>,
    /// New connections a second of a sandbox, where its SandboxAccess does not say.
    pub new_connections: u32,
    /// Connections of a sandbox; 0 = any number.
    pub sandbox_connections: u32,
    /// Connections of one grant to one endpoint; 0 = any number.
    pub endpoint_connections: u32,
}

/// A SandboxAccess. What did not parse is told in words.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Access {
    /// Name of the object.
    pub name: String,
    /// `metadata.creationTimestamp`, Unix seconds.
    pub created: i64,
    /// What tells the sandbox from others: two objects may speak of one.
    pub identity: String,
    /// Name of the sandbox.
    pub sandbox: String,
    /// Its networks.
    pub networks: Vec<Result<IpNet, String>>,
    /// Its nodes.
    pub nodes: Vec<Node>,
    /// What it may reach.
    pub grants: Vec<Granted>,
    /// New connections a second.
    pub new_connections: Option<u32>,
}

/// A node of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its key.
    pub public_key: Result<PublicKey, String>,
    /// Its WireGuard addresses.
    pub addresses: Vec<Result<IpAddr, String>>,
}

/// A port of a Service that is granted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Granted {
    /// The Service.
    pub service: ObjectName,
    /// Name of its port.
    pub port: String,
    /// Protocol.
    pub protocol: Protocol,
    /// Where the sandbox reaches it.
    pub gateway_port: u16,
}

/// A Service of this cluster and its EndpointSlices.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Service {
    /// Nothing is known yet, or not allowed to be: why.
    Unknown(String),
    /// There is none.
    Absent,
    /// This is known.
    Seen(Facts),
}

/// What is known of a Service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Facts {
    /// It has a selector: the cluster itself writes its EndpointSlices.
    pub selector: bool,
    /// Type ExternalName.
    pub external_name: bool,
    /// It is our own mirror of another member's.
    pub mirror: bool,
    /// `sessionAffinity: ClientIP`.
    pub sticky: bool,
    /// Protocol and name of each port.
    pub ports: BTreeSet<(Protocol, String)>,
    /// Endpoints by protocol and name of their port.
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
    /// Number of the port there.
    pub port: u16,
    /// Takes new connections.
    pub ready: bool,
    /// Answers those it has.
    pub serving: bool,
}

/// What they come to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// The nodes of all sandboxes.
    pub peers: Peers,
    /// Networks that are routed into the device.
    pub routes: BTreeSet<IpNet>,
    /// The firewall table.
    pub table: Table,
    /// Names of SandboxAccesses that are served, as far as not refused.
    pub served: BTreeSet<String>,
    /// What is left out.
    pub refused: BTreeSet<Refused>,
}

/// A part of a SandboxAccess that is not served.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Refused {
    /// Name of the SandboxAccess.
    pub access: String,
    /// Path of the field.
    pub field: String,
    /// The grant that is not served, by protocol and port at the gateway; `None` = another part.
    pub grant: Option<(Protocol, u16)>,
    /// One word.
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
    /// A network that is none, too wide, another sandbox's or reserved.
    NetworkInvalid,
    /// Two SandboxAccesses have this network.
    NetworkOverlap,
    /// A key that is none.
    PublicKeyInvalid,
    /// Two nodes have this key.
    PublicKeyDuplicate,
    /// An address that is none or lies outside the sandbox's networks.
    AddressInvalid,
    /// Two nodes have this address.
    AddressDuplicate,
    /// Two grants have this port.
    PortDuplicate,
    /// SCTP.
    ProtocolNotServed,
    /// The Service is not there, or has no such port.
    ServiceMissing,
    /// The Service is not known.
    ServiceUnknown,
    /// A Service that no sandbox may reach.
    ServiceNotServed,
    /// Endpoints that no sandbox may reach.
    EndpointForbidden,
}

impl Reason {
    /// As the status and metrics have it.
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
