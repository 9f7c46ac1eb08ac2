//! What a node's kernel should hold of ours where another program owns the tunnel (kg): the firewall table alone.
//!
//! That program programs every Peer by itself. What is left to do here is what it does not: to let a member's addresses
//! reach what the PeerPolicies allow and nothing else, and to keep the sources that the other members know.

use std::collections::BTreeSet;

use ipnet::IpNet;

use super::{Inputs, Refused, refuse};
use crate::{
    firewall::{self, Firewall, Frame, Scope},
    policy::Policy,
    prefixes::aggregate,
};

/// What [`beside`] comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beside {
    /// The nftables table.
    pub firewall: Firewall,
    /// Every range that is a mesh's now.
    pub meshed: BTreeSet<IpNet>,
    /// What was left out, and why: sorted, without repetition.
    pub refused: Vec<Refused>,
}

/// Compiles. Of the inputs neither keys, endpoints, MTU nor WireGuard addresses are looked at; of Peers, which are to be those
/// of meshes alone, only the ranges: what comes from them without a PeerPolicy is dropped.
///
/// `before`: ranges that were a mesh's. The other program may let go of a Peer later than we hear that it is gone, or never,
/// and a source of no mesh is that program's own business: these stay closed.
#[must_use]
pub fn beside(inputs: &Inputs, before: &BTreeSet<IpNet>) -> Beside {
    let node = &inputs.node;
    let mut refused = Vec::new();
    let policies: Vec<Policy> = inputs
        .policies
        .iter()
        .map(|policy| refuse::clean_policy(node, policy, &mut refused))
        .collect();
    let mut mesh: BTreeSet<_> = policies
        .iter()
        .flat_map(|p| &p.networks)
        .chain(policies.iter().flat_map(|p| &p.sources))
        .copied()
        .collect();
    for peer in &inputs.peers {
        let ranges = peer.allowed_ips.iter().map(IpNet::trunc);
        mesh.extend(ranges.filter(|net| net.prefix_len() > 0 && !super::touches_pods(node, net)));
    }
    let now = mesh.clone();
    mesh.extend(before);
    let mesh = aggregate(&mesh);
    let anchored = aggregate(policies.iter().flat_map(|policy| &policy.anchored));
    let pods_elsewhere = inputs.pods_elsewhere.iter().copied();
    let pods_elsewhere = pods_elsewhere
        .filter(|net| !crate::prefixes::covered(net, &anchored))
        .collect();
    let published = super::published(node, &policies);
    let firewall = firewall::desired(&firewall::Plan {
        frame: Frame {
            scope: Scope::Mesh,
            device: node.device.clone(),
            listen_port: 0,
            mtu: 0,
            wireguard_v4: None,
            wireguard_v6: None,
        },
        mesh: &mesh,
        throw: &BTreeSet::new(),
        published: &published,
        policies: &policies,
        internal_ips: &node.addresses,
        api_servers: &inputs.api_servers,
        nodes: &inputs.nodes,
        pods_elsewhere: &pods_elsewhere,
    });
    refused.sort();
    refused.dedup();
    Beside {
        firewall,
        meshed: now,
        refused,
    }
}
