//! Defines the address plan: the clusters and nodes of a lab and their addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

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

/// One cluster. Clusters may have equal Pod and Service ranges, because nothing outside a cluster routes them.
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
    /// The first node that is on the underlay although the others are in `node_network`; `None` = all nodes are in `node_network`.
    #[serde(default)]
    pub first_underlay_node: Option<u8>,
    /// The IPv6 ranges of a dual-stack cluster. Its first family is IPv4.
    #[serde(default)]
    pub v6: Option<PlanV6>,
    /// The mode of kube-proxy.
    #[serde(default)]
    pub proxy: ProxyMode,
    /// Whether the nodes enforce NetworkPolicies. By default they do not, as with many CNIs.
    #[serde(default)]
    pub policies: bool,
}

/// The IPv6 ranges of a dual-stack cluster. API server and DNS have IPv4 addresses only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanV6 {
    /// Pod range. The controller-manager gives each node a /64 of it.
    pub pod_cidr: Ipv6Net,
    /// Service range.
    pub service_cidr: Ipv6Net,
    /// Addresses of nodes: a /64 of the underlay. `::1` = default gateway, `::a` + n = node n,
    /// `::f0` = load balancer.
    pub underlay: Ipv6Net,
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

/// The network to which a cluster's nodes are connected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeNetwork {
    /// The underlay: each node is a separate machine there.
    #[default]
    Underlay,
    /// The pod network of another cluster, the host cluster, as for virtual machines of KubeVirt. All nodes are pods on one
    /// node of the host cluster, the host node: their eth0 has an address from its pod range. The API server still listens
    /// on the underlay, but nodes and pods reach it at a ClusterIP of the host cluster.
    Pods {
        /// Name of the host cluster. Its own nodes are on the underlay.
        of: String,
        /// Number of the host node, from 1.
        node: u8,
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

/// The network to which one node is connected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Uplink {
    /// The underlay's bridge.
    #[default]
    Underlay,
    /// The bridge of the pods on a node of another cluster.
    Pods {
        /// The host node.
        of: HostNode,
        /// The pod range of that node. Its first address is the worker's default gateway.
        range: Ipv4Net,
    },
    /// The private network behind a NAT router.
    Nat {
        /// The private network.
        lan: Ipv4Net,
        /// The router's network namespace.
        router: String,
    },
}

/// The name and the underlay address of a node that runs workers in pods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostNode {
    /// `<cluster>-<n>`.
    pub name: String,
    /// The address on the underlay.
    pub address: Ipv4Addr,
}

/// The name, addresses and uplink of one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodePlan {
    /// `<cluster>-<n>`, also the Node object's name and the machine's hostname.
    pub name: String,
    /// Name of the cluster. Empty for a bare host.
    pub cluster: String,
    /// The InternalIP, in the network of [`Self::uplink`].
    pub address: Ipv4Addr,
    /// The network to which the node is connected.
    #[serde(default)]
    pub uplink: Uplink,
    /// The IPv6 InternalIP, in a dual-stack cluster.
    #[serde(default)]
    pub address_v6: Option<Ipv6Addr>,
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
            });
        }
        self
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

    /// Connects the nodes of `cluster` to the pod network of node number `node` of the cluster `of` (see
    /// [`NodeNetwork::Pods`]). The API server of `cluster` also gets a ClusterIP in `of`: address number 100 + `i` of the
    /// Service range of `of`, where `i` is the index of `cluster` in the plan.
    ///
    /// # Panics
    /// When one of the clusters is not in the plan.
    #[must_use]
    pub fn with_workers_in_pods(mut self, cluster: &str, of: &str, node: u8) -> Self {
        let position = |name: &str| self.clusters.iter().position(|one| one.name == name);
        let (Some(guest), Some(host)) = (position(cluster), position(of)) else {
            panic!("the plan has no cluster {cluster:?} or no {of:?}");
        };
        let number = u32::try_from(guest).unwrap_or_default();
        let api = nth(self.clusters[host].service_cidr, 100 + number);
        let of = of.to_owned();
        self.clusters[guest].node_network = NodeNetwork::Pods { of, node, api };
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

    /// Checks the constraints on which the lab relies.
    pub(crate) fn validate(&self) -> Result<()> {
        let mut names = std::collections::BTreeSet::new();
        let mut underlays = std::collections::BTreeSet::new();
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
            self.validate_workers_in_pods(cluster)?;
        }
        let lans = self.clusters.iter().filter_map(|cluster| match cluster.node_network {
            NodeNetwork::Nat { lan, .. } => Some(lan),
            _ => None,
        });
        let mut distinct = std::collections::BTreeSet::new();
        for lan in lans {
            // The API servers share one network namespace, and have a route to each private network.
            if lan.prefix_len() != 24 || !distinct.insert(lan) {
                return Err(Error::Other(format!("private network {lan}: want a /24 of its own")));
            }
        }
        Ok(())
    }

    fn validate_workers_in_pods(&self, cluster: &ClusterPlan) -> Result<()> {
        let NodeNetwork::Pods { of, node, .. } = &cluster.node_network else {
            return Ok(());
        };
        let can_host = |host: &&ClusterPlan| {
            host.name == *of
                && host.controllers
                && host.node_network == NodeNetwork::Underlay
                && (1..=host.nodes).contains(node)
        };
        let is_in_host_node =
            |network: &NodeNetwork| matches!(network, NodeNetwork::Pods { of: o, node: n, .. } if o == of && n == node);
        let uses_host_node = |one: &&ClusterPlan| is_in_host_node(&one.node_network);
        if !cluster.controllers || !self.clusters.iter().any(|one| can_host(&one)) {
            return Err(Error::Other(format!(
                "{}: its nodes cannot be pods of {of}-{node}: {of}-{node} is no node on the underlay, or one of the \
                 two clusters has only an API server",
                cluster.name
            )));
        }
        if cluster.nodes > 5 || self.clusters.iter().filter(uses_host_node).count() > 1 {
            return Err(Error::Other(format!(
                "{of}-{node} has room for at most five workers, all of one cluster"
            )));
        }
        Ok(())
    }
}

impl ClusterPlan {
    /// A cluster with the default ranges of cluster number `index` (from 0): underlay 172.30.N.0/24, pods 10.N0.0.0/16,
    /// Services 10.N1.0.0/16, WireGuard 100.66.N.0/24, where N = index + 1.
    ///
    /// # Panics
    /// When `index` is above 23.
    pub fn with_default_ranges(index: usize, name: &str, nodes: u8) -> Self {
        let n = u8::try_from(index + 1)
            .ok()
            .filter(|n| *n <= 24)
            .expect("the default plan has room for 24 clusters");
        let net = |a, b, c, length| Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, 0), length);
        Self {
            name: name.into(),
            nodes,
            controllers: true,
            pod_cidr: net(10, 10 * n, 0, 16),
            service_cidr: net(10, 10 * n + 1, 0, 16),
            wireguard_cidr: net(100, 66, n, 24).into(),
            underlay: net(172, 30, n, 24),
            node_network: NodeNetwork::Underlay,
            first_underlay_node: None,
            v6: None,
            proxy: ProxyMode::Nftables,
            policies: false,
        }
    }

    /// The address at which the cluster's nodes and pods reach the API server (port 6443).
    pub(crate) fn advertised_api(&self) -> Ipv4Addr {
        match self.node_network {
            NodeNetwork::Underlay | NodeNetwork::Nat { .. } => self.api_address(),
            NodeNetwork::Pods { api, .. } => api,
        }
    }

    /// The network namespace of the NAT router.
    pub(crate) fn nat_router(&self) -> String {
        format!("{}-router", self.name)
    }

    /// The address of the NAT router on the underlay.
    pub fn nat_address(&self) -> Ipv4Addr {
        nth(self.underlay, 2)
    }

    /// The public address of node `n` behind a one-to-one NAT.
    pub fn one_to_one_address(&self, n: u8) -> Ipv4Addr {
        nth(self.underlay, 100 + u32::from(n))
    }

    pub(crate) fn address_behind_nat(&self, lan: Ipv4Net, n: u8) -> Ipv4Addr {
        nth(lan, 10 + u32::from(n))
    }

    /// The NAT router's address in the private network.
    pub(crate) fn lan_gateway(lan: Ipv4Net) -> Ipv4Addr {
        nth(lan, 1)
    }

    /// The address on the underlay at which the API server listens (port 6443).
    pub fn api_address(&self) -> Ipv4Addr {
        nth(self.underlay, 1)
    }

    /// The ClusterIP of `default/kubernetes`.
    pub fn api_service_ip(&self) -> Ipv4Addr {
        nth(self.service_cidr, 1)
    }

    /// The ClusterIP of the cluster's DNS.
    pub fn dns_ip(&self) -> Ipv4Addr {
        nth(self.service_cidr, 10)
    }

    /// The load balancer addresses on the underlay, one of each family.
    pub(crate) fn load_balancer_ips(&self) -> Vec<IpAddr> {
        let v6 = self.v6.as_ref().map(|v6| nth_v6(v6.underlay, 240).into());
        [nth(self.underlay, 240).into()].into_iter().chain(v6).collect()
    }

    /// Node number `n`, from 1, on the underlay or behind the NAT router. For [`NodeNetwork::Pods`] see `node_in_pods`.
    pub fn node(&self, n: u8) -> NodePlan {
        let (address, uplink) = match &self.node_network {
            NodeNetwork::Nat { lan, .. } if self.first_underlay_node.is_none_or(|first| n < first) => {
                let router = self.nat_router();
                (self.address_behind_nat(*lan, n), Uplink::Nat { lan: *lan, router })
            }
            _ => (nth(self.underlay, 10 + u32::from(n)), Uplink::Underlay),
        };
        NodePlan {
            name: format!("{}-{n}", self.name),
            cluster: self.name.clone(),
            address,
            uplink,
            address_v6: self.v6.as_ref().map(|v6| nth_v6(v6.underlay, 10 + u128::from(n))),
        }
    }

    /// The IPv6 default gateway of the nodes, in a dual-stack cluster.
    pub(crate) fn default_gateway_v6(&self) -> Option<Ipv6Addr> {
        self.v6.as_ref().map(|v6| nth_v6(v6.underlay, 1))
    }

    /// Formats the ranges of one or both families, separated by a comma, for flags of Kubernetes.
    pub(crate) fn comma_separated(v4: Ipv4Net, v6: Option<Ipv6Net>) -> String {
        v6.map_or_else(|| v4.to_string(), |v6| format!("{v4},{v6}"))
    }

    /// Node number `n`, from 1, in the pod range of a node of another cluster. Its address is near the end of the range,
    /// because the IPAM plugin of that node allocates from the start and does not know this address.
    pub(crate) fn node_in_pods(&self, n: u8, of: &NodePlan, range: Ipv4Net) -> NodePlan {
        let of = HostNode {
            name: of.name.clone(),
            address: of.address,
        };
        NodePlan {
            address: nth(range, 249 + u32::from(n)),
            uplink: Uplink::Pods { of, range },
            address_v6: None,
            ..self.node(n)
        }
    }
}

fn nth(net: Ipv4Net, n: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(net.network()) + n)
}

fn nth_v6(net: Ipv6Net, n: u128) -> Ipv6Addr {
    Ipv6Addr::from(u128::from(net.network()) + n)
}

#[cfg(test)]
mod tests;
