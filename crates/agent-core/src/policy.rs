//! PeerPolicy as plain values: what one source member may reach in this cluster. Kubernetes types are not known here.

use std::{collections::BTreeSet, fmt};

use ipnet::IpNet;

/// What one source member may reach here. Whatever no `allow` rule names is denied; `deny` wins over `allow`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Policy {
    /// Name of the PeerPolicy object.
    pub name: String,
    /// Source addresses the member's Peers may use.
    pub sources: BTreeSet<IpNet>,
    /// The member's networks: routed to its Peers or, where no Peer has them, nowhere.
    pub networks: BTreeSet<IpNet>,
    /// What the sources may reach. For a cluster-meshed member: this cluster's own allowedNetworks.
    pub allow: Vec<Rule>,
    /// What they may not reach although it is allowed.
    pub deny: Vec<Rule>,
    /// Ports closed on the addresses of this cluster's nodes: every address of this node, those that the other nodes' Node
    /// objects name, and, but for what a Service led there, the other nodes' pod CIDRs (which hold the CNI's gateway).
    pub infrastructure_ports: BTreeSet<Port>,
    /// Networks of this cluster that no node owns: they arrive at an anchor, and nothing in them is published.
    pub anchored: BTreeSet<IpNet>,
    /// The member is no cluster-meshed one any more: no packet passes from it or to it, whatever `allow` says, while its Peers
    /// are taken away.
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

/// The transport protocols that Kubernetes Services have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        })
    }
}

impl Policy {
    /// Every destination that some `allow` rule names.
    pub fn served(&self) -> impl Iterator<Item = &IpNet> {
        self.allowed().iter().flat_map(|rule| &rule.to)
    }

    /// The `allow` rules that count: of a closed member none.
    #[must_use]
    pub const fn allowed(&self) -> &[Rule] {
        if self.closed { &[] } else { self.allow.as_slice() }
    }
}
