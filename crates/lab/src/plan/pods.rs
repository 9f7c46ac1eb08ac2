//! Plans clusters whose nodes (workers) are pods of another cluster.

use ipnet::Ipv4Net;

use super::addresses::nth;
use super::{ClusterPlan, LabPlan, NodeNetwork, PodNetwork};

/// MTU of the underlay.
const UNDERLAY_MTU: u16 = 1500;
/// Bytes that VXLAN over IPv4 adds to a packet: Ethernet 14, VXLAN 8, UDP 8, IP 20 (RFC 7348).
pub(crate) const VXLAN_OVERHEAD: u16 = 50;

impl LabPlan {
    /// Turns the nodes of `cluster` into workers. A worker is a pod of the cluster `host`; the pods are on the nodes of `host` with
    /// the numbers `nodes` (see [`NodeNetwork::Pods`]). Where `i` is the index of `cluster` in the plan, its workers get the subnet
    /// number 200 + `i` of the host's pod range, and its API server also gets a ClusterIP in the host: number 100 + `i` of
    /// the Service range. The cluster's own pod network becomes a VXLAN, because [`PodNetwork::HostGateway`] needs all nodes on one link, and
    /// workers may be on several.
    ///
    /// # Panics
    /// When one of the clusters is not in the plan.
    #[must_use]
    pub fn with_workers_in_pods(mut self, cluster: &str, host: &str, nodes: &[u8]) -> Self {
        let position = |name: &str| self.clusters.iter().position(|one| one.name == name);
        let (Some(guest), Some(host_index)) = (position(cluster), position(host)) else {
            panic!("the plan has no cluster {cluster:?} or no {host:?}");
        };
        let number = u32::try_from(guest).unwrap_or_default();
        let api = nth(self.clusters[host_index].service_cidr, 100 + number);
        let range = Ipv4Net::new_assert(nth(self.clusters[host_index].pod_cidr, (200 + number) * 256), 24);
        let (of, nodes) = (host.to_owned(), nodes.to_vec());
        self.clusters[guest].node_network = NodeNetwork::Pods { of, nodes, range, api };
        self.clusters[guest].pod_network = PodNetwork::Vxlan;
        self
    }

    /// Makes the pod network of a cluster a VXLAN.
    ///
    /// # Panics
    /// When the cluster is not in the plan.
    #[must_use]
    pub fn with_vxlan(self, cluster: &str) -> Self {
        self.with_pod_network(cluster, PodNetwork::Vxlan)
    }

    /// Makes flannel the CNI of a cluster.
    ///
    /// # Panics
    /// When the cluster is not in the plan.
    #[must_use]
    pub fn with_flannel(self, cluster: &str) -> Self {
        self.with_pod_network(cluster, PodNetwork::Flannel)
    }

    fn with_pod_network(mut self, cluster: &str, pod_network: PodNetwork) -> Self {
        let found = self.clusters.iter_mut().find(|one| one.name == cluster);
        let found = found.unwrap_or_else(|| panic!("the plan has no cluster {cluster:?}"));
        found.pod_network = pod_network;
        self
    }
}

impl ClusterPlan {
    /// The MTU of the cluster's pod network, if the cluster's nodes are on the underlay.
    pub(crate) fn pod_mtu(&self) -> u16 {
        match self.pod_network {
            PodNetwork::HostGateway => UNDERLAY_MTU,
            PodNetwork::Vxlan | PodNetwork::Flannel => UNDERLAY_MTU - VXLAN_OVERHEAD,
        }
    }
}
