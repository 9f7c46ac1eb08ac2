//! PeerPolicy as plain values: what one source member may reach in this cluster.

use std::collections::BTreeSet;

use clustermesh_core::mesh::Protocol;
use ipnet::IpNet;

/// What one source member may reach here. Everything that no `allow` rule names is denied; `deny` wins over `allow`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Policy {
    /// Name of the PeerPolicy object.
    pub name: String,
    /// Source addresses that the member's Peers may use.
    pub sources: BTreeSet<IpNet>,
    /// The member's networks. They are routed to its Peers; parts without a Peer are `unreachable`.
    pub networks: BTreeSet<IpNet>,
    /// What the sources may reach. For a cluster-meshed member these are this cluster's own allowedNetworks.
    pub allow: Vec<Rule>,
    /// Exceptions from `allow`.
    pub deny: Vec<Rule>,
    /// Ports closed on the addresses of this cluster's nodes: every address of this node, the addresses in the other Node objects,
    /// and the other nodes' pod CIDRs, which contain the CNI's gateway addresses. In pod CIDRs they stay open through a Service.
    pub infrastructure_ports: BTreeSet<Port>,
    /// Networks of this cluster that no node owns. Packets to them arrive at an anchor, and no address in them is published.
    pub anchored: BTreeSet<IpNet>,
    /// The member is no longer cluster-meshed: every packet from it or to it is dropped, whatever `allow` contains, until its Peers are
    /// removed.
    pub closed: bool,
}

/// Destinations and ports.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rule {
    /// Destinations, after this node's own address translation.
    pub to: BTreeSet<IpNet>,
    /// Ports; empty = every port and every protocol.
    pub ports: BTreeSet<Port>,
}

/// One port of one transport protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Port {
    /// The transport protocol.
    pub protocol: Protocol,
    /// The port number.
    pub port: u16,
}

impl Policy {
    /// Every destination in the `allow` rules in force.
    pub fn served(&self) -> impl Iterator<Item = &IpNet> {
        self.allowed().iter().flat_map(|rule| &rule.to)
    }

    /// The `allow` rules in force: none for a closed member.
    #[must_use]
    pub const fn allowed(&self) -> &[Rule] {
        if self.closed { &[] } else { self.allow.as_slice() }
    }
}
