//! Defines the address plan: the clusters and nodes of a lab and their addresses.

mod addresses;
mod pods;
mod validate;

use std::net::Ipv4Addr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

pub(crate) use addresses::comma_separated;
pub use addresses::{HostNode, NodePlan, Uplink};
pub(crate) use pods::VXLAN_OVERHEAD;

/// The port of every API server.
pub(crate) const API_PORT: u16 = 6443;
/// Prefix length of the whole underlay, one link that connects all API servers, NAT routers and nodes of [`NodeNetwork::Underlay`]. Each
/// cluster has a /24 of it.
pub(crate) const UNDERLAY_PREFIX: u8 = 16;
/// Prefix length of the underlay in IPv6. Each cluster has a /64 of it.
pub(crate) const UNDERLAY_PREFIX_V6: u8 = 48;

/// The clusters of a lab. Without clusters, the lab is only an underlay, for bare hosts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LabPlan {
    /// The clusters, in order; names are unique.
    pub clusters: Vec<ClusterPlan>,
}

/// One cluster. Clusters may have equal Pod and Service ranges, because the underlay does not route them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterPlan {
    /// Name, a DNS label of at most 40 characters. Nodes are called `<name>-<n>`, n from 1.
    pub name: String,
    /// Number of nodes at the start. More nodes may join later.
    pub nodes: u8,
    /// Whether controller-manager, scheduler and CoreDNS run. `false` = only an API server runs.
    pub controllers: bool,
    /// Pod range. The controller-manager gives each node a /24 of it.
    pub pod_cidr: Ipv4Net,
    /// Service range. The first address is the ClusterIP of the API server, the tenth that of the cluster DNS.
    pub service_cidr: Ipv4Net,
    /// A range for WireGuard addresses, a /24 or a /112. Only [`crate::Product`] uses it.
    pub wireguard_cidr: IpNet,
    /// The cluster's /24 of the underlay. `.1` = API server, `.240` = load balancer, and with [`NodeNetwork::Underlay`] `.10 + n` = node n.
    pub underlay: Ipv4Net,
    /// The network to which the nodes are connected.
    #[serde(default)]
    pub node_network: NodeNetwork,
    /// For [`NodeNetwork::Nat`]: nodes with this number or a higher one are on the underlay. `None` = all nodes are in `node_network`.
    #[serde(default)]
    pub first_underlay_node: Option<u8>,
    /// The IPv6 ranges. The first family of a dual-stack cluster is IPv4. If the cluster has IPv6 only, the IPv4 ranges are unused.
    #[serde(default)]
    pub v6: Option<PlanV6>,
    /// The mode of kube-proxy.
    #[serde(default)]
    pub proxy: ProxyMode,
    /// Whether the nodes enforce NetworkPolicies. By default they do not, as with many CNIs.
    #[serde(default)]
    pub policies: bool,
    /// How pods reach pods of other nodes.
    #[serde(default)]
    pub pod_network: PodNetwork,
    /// The number of a node: the Service `default/kubernetes` leads to this node's address, as if the API server ran on the node.
    /// `None` = the Service leads to the address at which the API server listens.
    #[serde(default)]
    pub api_node: Option<u8>,
}

/// The IPv6 ranges of a cluster. The API server and the DNS of a dual-stack cluster have IPv4 addresses only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanV6 {
    /// Pod range. The controller-manager gives each node a /64 of it.
    pub pod_cidr: Ipv6Net,
    /// Service range.
    pub service_cidr: Ipv6Net,
    /// Addresses of nodes: a /64 of the underlay. `::1` = default gateway, and the API server of a cluster of IPv6 only; `::a` + n =
    /// node n, `::f0` = load balancer.
    pub underlay: Ipv6Net,
    /// Whether the cluster has no IPv4 addresses: neither its nodes, pods and Services nor its API server and DNS.
    #[serde(default)]
    pub is_only_family: bool,
}

/// The mode of kube-proxy, which implements Services.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProxyMode {
    /// nftables.
    #[default]
    Nftables,
    /// iptables, in this machine's variant (legacy or nft).
    Iptables,
}

impl ProxyMode {
    /// The value of `mode` in kube-proxy's configuration.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
        }
    }
}

/// How the CNI delivers packets to pods of other nodes of the cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PodNetwork {
    /// Routes via the nodes' addresses. The nodes must be on one link.
    #[default]
    HostGateway,
    /// VXLAN between the nodes' addresses, as with many overlays. IPv4 only.
    Vxlan,
    /// flannel with its backend `vxlan`. In the lab it carries IPv4 only.
    Flannel,
}

/// The network to which a cluster's nodes are connected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeNetwork {
    /// The underlay: each node is a separate machine there.
    #[default]
    Underlay,
    /// The pod network of another cluster, the host cluster, as for virtual machines of KubeVirt. The API server still listens
    /// on the underlay, but nodes and pods reach it at a ClusterIP of the host cluster.
    Pods {
        /// Name of the host cluster. Its own nodes are on the underlay.
        of: String,
        /// Numbers of the host nodes, from 1. Worker n starts on the n-th of them; after the last one, the first follows.
        nodes: Vec<u8>,
        /// The workers' addresses, a /24 of the host cluster's pod range. `.1` = default gateway, `.10 + n` = worker n.
        range: Ipv4Net,
        /// The ClusterIP of this cluster's API server in the host cluster, port 6443.
        api: Ipv4Addr,
    },
    /// A private network behind a NAT router, which is `.2` of the cluster's underlay. The API server is on the underlay.
    Nat {
        /// The private network. `.1` = the router, `.10 + n` = node n.
        lan: Ipv4Net,
        /// The kind of NAT at the start; [`crate::Lab::set_nat`] changes it.
        kind: NatKind,
    },
}

/// How a NAT router maps the WireGuard port of the nodes behind it. Terms of RFC 4787.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NatKind {
    /// Endpoint-independent mapping: a node has the same public port for all destinations, `first_port + n - 1` for node n.
    /// Address and port-dependent filtering: only destinations to which the node has sent may reply.
    EndpointIndependent {
        /// The port of the first node.
        first_port: u16,
    },
    /// Address and port-dependent mapping ("symmetric"): a random public port for each destination. Filtering as above.
    EndpointDependent,
    /// Each node has a public address of its own, `.100 + n` of the underlay. All ports are forwarded to the node, and packets from
    /// outside reach it even if it has sent nothing. The node does not know this address.
    OneToOne,
}

impl LabPlan {
    /// A plan of API servers only, one for each name.
    pub fn control_planes(names: &[&str]) -> Self {
        let plan = |(index, name): (usize, &&str)| ClusterPlan {
            controllers: false,
            ..ClusterPlan::with_default_ranges(index, name, 0)
        };
        Self {
            clusters: names.iter().enumerate().map(plan).collect(),
        }
    }

    /// A plan of clusters with all components of the control plane: `(name, number of nodes)`.
    pub fn clusters(clusters: &[(&str, u8)]) -> Self {
        let plan = |(index, (name, nodes)): (usize, &(&str, u8))| ClusterPlan::with_default_ranges(index, name, *nodes);
        Self {
            clusters: clusters.iter().enumerate().map(plan).collect(),
        }
    }

    /// Adds IPv6 ranges to every cluster: pods fd00:10:N0::/48, Services fd00:10:N1::/112, underlay fd00:172:30:N::/64. N is the
    /// third octet of the cluster's underlay range, in decimal digits. [`ClusterPlan::with_default_ranges`] has the same N.
    ///
    /// # Panics
    /// Never: the texts are networks for every N up to 255.
    #[must_use]
    pub fn dual_stack(mut self) -> Self {
        for cluster in &mut self.clusters {
            let n = u16::from(cluster.underlay.network().octets()[2]);
            // For example, fd00:10:20::/48 is for the cluster with 10.20.0.0/16.
            let net = |text: String| text.parse().expect("a network of the default plan");
            cluster.v6 = Some(PlanV6 {
                pod_cidr: net(format!("fd00:10:{}::/48", 10 * n)),
                service_cidr: net(format!("fd00:10:{}::/112", 10 * n + 1)),
                underlay: net(format!("fd00:172:30:{n}::/64")),
                is_only_family: false,
            });
        }
        self
    }

    /// Removes IPv4 from a cluster of a plan with [`Self::dual_stack`], and gives it the WireGuard range of
    /// [`Self::with_wireguard_v6`].
    ///
    /// # Panics
    /// When the cluster is not in the plan or has no IPv6 ranges.
    #[must_use]
    pub fn ipv6_only(self, cluster: &str) -> Self {
        let mut plan = self.with_wireguard_v6(cluster);
        let v6 = plan.clusters.iter_mut().find(|one| one.name == cluster);
        let v6 = v6.and_then(|one| one.v6.as_mut());
        v6.expect("a cluster with IPv6 ranges").is_only_family = true;
        plan
    }

    /// Gives a cluster an IPv6 range for WireGuard addresses: fd00:66:N::/112, where N is its number in the plan, from 1.
    ///
    /// # Panics
    /// When the cluster is not in the plan.
    #[must_use]
    pub fn with_wireguard_v6(mut self, cluster: &str) -> Self {
        let position = self.clusters.iter().position(|one| one.name == cluster);
        let position = position.unwrap_or_else(|| panic!("the plan has no cluster {cluster:?}"));
        let range = format!("fd00:66:{}::/112", position + 1);
        self.clusters[position].wireguard_cidr = range.parse().expect("a network");
        self
    }

    /// Gives a cluster the Pod and Service ranges of another cluster, in both families.
    ///
    /// # Panics
    /// When one of the clusters is not in the plan.
    #[must_use]
    pub fn with_ranges_of(mut self, cluster: &str, other: &str) -> Self {
        let position = |name: &str| self.clusters.iter().position(|one| one.name == name);
        let (Some(to), Some(from)) = (position(cluster), position(other)) else {
            panic!("the plan has no cluster {cluster:?} or no {other:?}");
        };
        let from = self.clusters[from].clone();
        let to = &mut self.clusters[to];
        (to.pod_cidr, to.service_cidr) = (from.pod_cidr, from.service_cidr);
        if let (Some(to), Some(from)) = (&mut to.v6, from.v6) {
            (to.pod_cidr, to.service_cidr) = (from.pod_cidr, from.service_cidr);
        }
        self
    }

    /// Sets the mode of kube-proxy in every cluster.
    #[must_use]
    pub fn with_proxy(mut self, proxy: ProxyMode) -> Self {
        for cluster in &mut self.clusters {
            cluster.proxy = proxy;
        }
        self
    }

    /// Makes the nodes of a cluster enforce NetworkPolicies.
    ///
    /// # Panics
    /// When the cluster is not in the plan.
    #[must_use]
    pub fn with_policies(mut self, cluster: &str) -> Self {
        let found = self.clusters.iter_mut().find(|one| one.name == cluster);
        found
            .unwrap_or_else(|| panic!("the plan has no cluster {cluster:?}"))
            .policies = true;
        self
    }

    /// Gives the Service `default/kubernetes` of a cluster the address of node `n`, as if the API server ran on this node: a
    /// process on the node forwards connections to the API server. Kubelets and the CNI do not use this address.
    ///
    /// # Panics
    /// When the cluster is not in the plan.
    #[must_use]
    pub fn with_api_on_node(mut self, cluster: &str, n: u8) -> Self {
        let found = self.clusters.iter_mut().find(|one| one.name == cluster);
        found
            .unwrap_or_else(|| panic!("the plan has no cluster {cluster:?}"))
            .api_node = Some(n);
        self
    }

    /// Connects the nodes of a cluster to a private network behind a NAT router. `lan` is a /24 that no other cluster has.
    ///
    /// # Panics
    /// When the cluster is not in the plan, or `lan` is not a network.
    #[must_use]
    pub fn with_nat(mut self, cluster: &str, lan: &str, kind: NatKind) -> Self {
        let found = self.clusters.iter_mut().find(|one| one.name == cluster);
        let found = found.unwrap_or_else(|| panic!("the plan has no cluster {cluster:?}"));
        let lan = lan.parse().expect("an IPv4 network");
        found.node_network = NodeNetwork::Nat { lan, kind };
        self
    }

    /// Does the same as [`Self::with_nat`] for the first `nodes` nodes of the cluster. The others are on the underlay.
    ///
    /// # Panics
    /// As [`Self::with_nat`].
    #[must_use]
    pub fn with_nat_for(self, nodes: u8, cluster: &str, lan: &str, kind: NatKind) -> Self {
        let mut plan = self.with_nat(cluster, lan, kind);
        for one in plan.clusters.iter_mut().filter(|one| one.name == cluster) {
            one.first_underlay_node = Some(nodes + 1);
        }
        plan
    }
}

#[cfg(test)]
mod tests;
