//! Computes the addresses of a cluster's API server, DNS and nodes from its ranges.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use super::{ClusterPlan, NodeNetwork, PlanV6, PodNetwork, ProxyMode};

/// The network to which one node is connected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Uplink {
    /// The underlay's bridge.
    #[default]
    Underlay,
    /// The pod network of another cluster.
    Pods {
        /// The host node.
        of: HostNode,
        /// The workers' range. Its first address is the default gateway.
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
    pub address: IpAddr,
}

/// The name, addresses and uplink of one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodePlan {
    /// `<cluster>-<n>`, also the Node object's name and the machine's hostname.
    pub name: String,
    /// Name of the cluster. Empty for a bare host.
    pub cluster: String,
    /// The first InternalIP, in the network of [`Self::uplink`]. IPv6 only if the node has no IPv4 address.
    pub address: IpAddr,
    /// The network to which the node is connected.
    #[serde(default)]
    pub uplink: Uplink,
    /// The IPv6 InternalIP. It equals [`Self::address`] if the node has no IPv4 address.
    #[serde(default)]
    pub address_v6: Option<Ipv6Addr>,
}

impl NodePlan {
    /// The IPv4 InternalIP.
    pub(crate) fn address_v4(&self) -> Option<Ipv4Addr> {
        match self.address {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        }
    }

    /// All InternalIPs, the first family first.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        let v6 = self.address_v6.map(IpAddr::from);
        self.address_v4().map(IpAddr::from).into_iter().chain(v6).collect()
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
            pod_network: PodNetwork::HostGateway,
            api_node: None,
        }
    }

    /// The IPv6 ranges of a cluster without IPv4.
    fn only_v6(&self) -> Option<&PlanV6> {
        self.v6.as_ref().filter(|v6| v6.is_only_family)
    }

    /// The values of the families that the cluster has, IPv4 first.
    fn families<T>(&self, v4: impl Into<T>, v6: impl Fn(&PlanV6) -> T) -> Vec<T> {
        let v4 = self.only_v6().is_none().then(|| v4.into());
        v4.into_iter().chain(self.v6.as_ref().map(v6)).collect()
    }

    /// The Pod ranges of the cluster's families, the first family first.
    pub fn pod_cidrs(&self) -> Vec<IpNet> {
        self.families(self.pod_cidr, |v6| v6.pod_cidr.into())
    }

    /// The Service ranges of the cluster's families, the first family first.
    pub fn service_cidrs(&self) -> Vec<IpNet> {
        self.families(self.service_cidr, |v6| v6.service_cidr.into())
    }

    /// The endpoint of the Service `default/kubernetes` (port 6443). All pods use this Service, also those in the host network.
    pub(crate) fn advertised_api(&self) -> IpAddr {
        match self.api_node {
            Some(n) => self.node(n).address,
            None => self.api_for_nodes(),
        }
    }

    /// The address at which kubelets, kube-proxy and the CNI reach the API server (port 6443).
    pub(crate) fn api_for_nodes(&self) -> IpAddr {
        match self.node_network {
            NodeNetwork::Underlay | NodeNetwork::Nat { .. } => self.api_address(),
            NodeNetwork::Pods { api, .. } => api.into(),
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
    pub fn api_address(&self) -> IpAddr {
        match self.only_v6() {
            Some(v6) => nth_v6(v6.underlay, 1).into(),
            None => nth(self.underlay, 1).into(),
        }
    }

    /// The ClusterIP of `default/kubernetes`.
    pub fn api_service_ip(&self) -> IpAddr {
        self.service_ip(1)
    }

    /// The ClusterIP of the cluster's DNS.
    pub fn dns_ip(&self) -> IpAddr {
        self.service_ip(10)
    }

    /// Address number `n` of the Service range of the first family.
    fn service_ip(&self, n: u8) -> IpAddr {
        match self.only_v6() {
            Some(v6) => nth_v6(v6.service_cidr, n.into()).into(),
            None => nth(self.service_cidr, n.into()).into(),
        }
    }

    /// The load balancer addresses on the underlay, one of each family.
    pub(crate) fn load_balancer_ips(&self) -> Vec<IpAddr> {
        self.families(nth(self.underlay, 240), |v6| nth_v6(v6.underlay, 240).into())
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
        let address_v6 = self.v6.as_ref().map(|v6| nth_v6(v6.underlay, 10 + u128::from(n)));
        NodePlan {
            name: format!("{}-{n}", self.name),
            cluster: self.name.clone(),
            address: match (self.only_v6(), address_v6) {
                (Some(_), Some(address_v6)) => address_v6.into(),
                _ => address.into(),
            },
            uplink,
            address_v6,
        }
    }

    /// The IPv6 default gateway of the nodes.
    pub(crate) fn default_gateway_v6(&self) -> Option<Ipv6Addr> {
        self.v6.as_ref().map(|v6| nth_v6(v6.underlay, 1))
    }

    /// Worker number `n`, from 1, on a node of the host cluster.
    pub(crate) fn node_in_pods(&self, n: u8, of: &NodePlan, range: Ipv4Net) -> NodePlan {
        let of = HostNode {
            name: of.name.clone(),
            address: of.address,
        };
        NodePlan {
            address: nth(range, 10 + u32::from(n)).into(),
            uplink: Uplink::Pods { of, range },
            address_v6: None,
            ..self.node(n)
        }
    }
}

pub(super) fn nth(net: Ipv4Net, n: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(net.network()) + n)
}

fn nth_v6(net: Ipv6Net, n: u128) -> Ipv6Addr {
    Ipv6Addr::from(u128::from(net.network()) + n)
}

/// Joins ranges or addresses to the value of a flag of Kubernetes.
pub(crate) fn comma_separated<T: ToString>(values: &[T]) -> String {
    values.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}
