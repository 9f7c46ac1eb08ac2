//! Checks that a plan meets the constraints on which the lab relies.

use std::collections::BTreeSet;

use super::{ClusterPlan, LabPlan, NodeNetwork, PodNetwork, Uplink};
use crate::{Error, Result};

impl LabPlan {
    /// Checks the constraints on which the lab relies.
    pub(crate) fn validate(&self) -> Result<()> {
        let mut names = BTreeSet::new();
        let mut underlays = BTreeSet::new();
        for cluster in &self.clusters {
            let name = &cluster.name;
            let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            if name.is_empty() || name.len() > 40 || !name.chars().all(is_allowed) || name.starts_with('-') {
                return Err(Error::Other(format!(
                    "cluster name {name:?}: want 1-40 of a-z, 0-9 and '-'"
                )));
            }
            // Each cluster has a directory in the run directory; these names are already used there.
            let reserved = ["underlay", "nodes", "log", "ns", "images", "etcd"];
            if reserved.contains(&name.as_str()) || !names.insert(name) {
                return Err(Error::Other(format!("cluster name {name:?} is taken")));
            }
            if cluster.underlay.prefix_len() != 24 || !underlays.insert(cluster.underlay) {
                return Err(Error::Other(format!(
                    "underlay {} of {name}: want a /24 of its own",
                    cluster.underlay
                )));
            }
            if cluster.nodes > 200 {
                return Err(Error::Other(format!("{name}: at most 200 nodes fit into its underlay")));
            }
            let is_ipv6_only = cluster.v6.as_ref().is_some_and(|v6| v6.is_only_family);
            if is_ipv6_only && cluster.node_network != NodeNetwork::Underlay {
                return Err(Error::Other(format!("{name}: nodes in pods or behind a NAT have IPv4")));
            }
            self.validate_workers_in_pods(cluster)?;
            if cluster.pod_network != PodNetwork::HostGateway && cluster.v6.is_some() {
                return Err(Error::Other(format!("{name}: the lab's VXLANs carry IPv4 only")));
            }
            // The node `api_node` forwards connections to the API server, so it must exist and be on the underlay. A cluster
            // without controllers has no pods, so nothing would use `api_node`.
            let is_on_underlay =
                |n: &u8| (1..=cluster.nodes).contains(n) && cluster.node(*n).uplink == Uplink::Underlay;
            let is_in_pods = matches!(cluster.node_network, NodeNetwork::Pods { .. });
            if let Some(n) = cluster
                .api_node
                .filter(|n| is_in_pods || !cluster.controllers || !is_on_underlay(n))
            {
                return Err(Error::Other(format!(
                    "{name}: its API server cannot have the address of node {n}, which is not on the underlay"
                )));
            }
            // On nodes with flannel, the lab cannot add routes to workers in pods, and cannot change the MTU of flannel's VXLAN.
            if cluster.pod_network == PodNetwork::Flannel && (is_in_pods || self.has_workers_in_pods_of(name)) {
                return Err(Error::Other(format!(
                    "{name}: nodes in pods need the lab's own pod network"
                )));
            }
        }
        let lans = self.clusters.iter().filter_map(|cluster| match cluster.node_network {
            NodeNetwork::Nat { lan, .. } => Some(lan),
            _ => None,
        });
        let mut distinct = BTreeSet::new();
        for lan in lans {
            // The API servers share one network namespace, and have a route to each private network.
            if lan.prefix_len() != 24 || !distinct.insert(lan) {
                return Err(Error::Other(format!("private network {lan}: want a /24 of its own")));
            }
        }
        Ok(())
    }

    fn has_workers_in_pods_of(&self, name: &str) -> bool {
        let is_in = |cluster: &ClusterPlan| matches!(&cluster.node_network, NodeNetwork::Pods { of, .. } if of == name);
        self.clusters.iter().any(is_in)
    }

    fn validate_workers_in_pods(&self, cluster: &ClusterPlan) -> Result<()> {
        let NodeNetwork::Pods { of, nodes, .. } = &cluster.node_network else {
            return Ok(());
        };
        let can_host = |host: &ClusterPlan| {
            host.name == *of
                && host.controllers
                && host.v6.as_ref().is_none_or(|v6| !v6.is_only_family)
                && host.node_network == NodeNetwork::Underlay
                && nodes.iter().all(|node| (1..=host.nodes).contains(node))
        };
        if nodes.is_empty() || !cluster.controllers || !self.clusters.iter().any(can_host) {
            return Err(Error::Other(format!(
                "{}: its nodes cannot be pods on the nodes {nodes:?} of {of}: there is no such node on the underlay, or one of \
                 the two clusters has only an API server",
                cluster.name
            )));
        }
        Ok(())
    }
}
