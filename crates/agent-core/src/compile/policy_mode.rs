//! Compiles the firewall table of policy mode, in which another program (kg) owns the tunnel and configures its peers.
//!
//! The agent then writes only this table. The table drops packets of other members that no PeerPolicy allows, and exempts packets
//! with published sources from masquerading.

use std::collections::BTreeSet;

use ipnet::IpNet;

use super::{Inputs, Refused, refuse};
use crate::{
    firewall::{self, Firewall, RuleParameters, Scope},
    prefixes::aggregate,
};

/// The desired state in policy mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyMode {
    /// The nftables table.
    pub firewall: Firewall,
    /// The networks and sources of the PeerPolicies and the allowed IPs of the Peers, except those that were left out. Does not contain
    /// the `before` of [`compile_policy_mode`].
    pub mesh_networks: BTreeSet<IpNet>,
    /// The parts that were left out, with reasons: sorted, without duplicates.
    pub refused: Vec<Refused>,
}

/// Compiles the table of policy mode.
///
/// `inputs.peers` must contain only Peers of meshes. Packets from their allowed IPs are dropped if no PeerPolicy allows them. Allowed IPs
/// that are `/0` or overlap this node's pod CIDRs are ignored, as are keys, endpoints and the MTU.
///
/// `before` are earlier mesh networks. They stay in the table's set of mesh networks, because the table does not filter packets with
/// sources outside this set, and the other program may keep the peer of a deleted Peer on the device.
#[must_use]
pub fn compile_policy_mode(inputs: &Inputs, before: &BTreeSet<IpNet>) -> PolicyMode {
    let node = &inputs.node;
    let mut refused = Vec::new();
    let policies = refuse::clean_policies(inputs, &mut refused);
    let mut mesh_networks: BTreeSet<_> = policies
        .iter()
        .flat_map(|p| &p.networks)
        .chain(policies.iter().flat_map(|p| &p.sources))
        .copied()
        .collect();
    for peer in &inputs.peers {
        let allowed_ips = peer.allowed_ips.iter().map(IpNet::trunc);
        mesh_networks.extend(allowed_ips.filter(|net| net.prefix_len() > 0 && !super::overlaps_own_pods(node, net)));
    }
    let mesh = aggregate(mesh_networks.iter().chain(before));
    // In a shared pod network, the pod CIDR of another node may contain pods of this node, so the pod CIDRs in such a network are
    // left out here. The inputs do not name this cluster's shared pod network, but it is one of the cluster's anchored networks.
    let anchored = aggregate(policies.iter().flat_map(|policy| &policy.anchored));
    let pod_cidrs_of_other_nodes = inputs.pod_cidrs_of_other_nodes.iter().copied();
    let pod_cidrs_of_other_nodes = pod_cidrs_of_other_nodes
        .filter(|net| !crate::prefixes::covered(net, &anchored))
        .collect();
    let published = super::published(node, &policies);
    let firewall = firewall::desired(&firewall::Plan {
        parameters: RuleParameters {
            scope: Scope::Mesh,
            device: node.device.clone(),
            listen_port: 0,
            mtu: 0,
            wireguard_v4: None,
            wireguard_v6: None,
        },
        // kg connects the locations of its cluster itself.
        own_cluster: &BTreeSet::new(),
        gateways: &BTreeSet::new(),
        own_sources: &BTreeSet::new(),
        own_pods: &BTreeSet::new(),
        mesh: &mesh,
        throw: &BTreeSet::new(),
        published: &published,
        policies: &policies,
        internal_ips: &node.internal_ips,
        api_servers: &inputs.api_servers,
        nodes: &inputs.all_node_addresses,
        pod_cidrs_of_other_nodes: &pod_cidrs_of_other_nodes,
    });
    refused.sort();
    refused.dedup();
    PolicyMode {
        firewall,
        mesh_networks,
        refused,
    }
}
