//! The address plan: which clusters and nodes a lab has and where their addresses lie. Values only.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The whole underlay: one flat segment, a /24 of it per cluster. It joins nodes, and forwards nothing.
pub(crate) const UNDERLAY_PREFIX: u8 = 16;

/// What a lab shall contain. Empty `clusters` is allowed: an underlay with plain hosts only.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LabPlan {
    /// The clusters, in order; names are unique.
    pub clusters: Vec<ClusterPlan>,
}

/// One cluster. Pod and Service ranges of different clusters may be equal: nothing outside a cluster routes them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterPlan {
    /// Name; nodes are called `<name>-<n>`, n from 1. At most 40 characters of a DNS label.
    pub name: String,
    /// Number of nodes at start. More may join later.
    pub nodes: u8,
    /// Whether controller-manager, scheduler and CoreDNS run. False = an API server alone.
    pub controllers: bool,
    /// Pods; each node gets a /24 of it, chosen by the controller-manager.
    pub pod_cidr: Ipv4Net,
    /// Services. The API server's is the first address, the cluster DNS the tenth.
    pub service_cidr: Ipv4Net,
    /// A /24 free for WireGuard addresses; the lab itself does not use it.
    pub wireguard_cidr: Ipv4Net,
    /// Nodes' and API server's addresses: a /24 inside the lab's /16. `.1` = API server, `.10 + n` = node n.
    pub underlay: Ipv4Net,
}

/// One node as its machine sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodePlan {
    /// `<cluster>-<n>`, also the Node object's name and the machine's hostname.
    pub name: String,
    /// Name of its cluster.
    pub cluster: String,
    /// Its InternalIP on the underlay.
    pub address: Ipv4Addr,
}

impl LabPlan {
    /// API servers alone, one per name.
    pub fn control_planes(names: &[&str]) -> Self {
        let plan = |(index, name): (usize, &&str)| ClusterPlan {
            controllers: false,
            ..ClusterPlan::numbered(index, name, 0)
        };
        Self {
            clusters: names.iter().enumerate().map(plan).collect(),
        }
    }

    /// Whole clusters: `(name, number of nodes)`.
    pub fn clusters(clusters: &[(&str, u8)]) -> Self {
        let plan = |(index, (name, nodes)): (usize, &(&str, u8))| ClusterPlan::numbered(index, name, *nodes);
        Self {
            clusters: clusters.iter().enumerate().map(plan).collect(),
        }
    }

    /// Checks what the rest of the lab relies on.
    pub(crate) fn validate(&self) -> Result<()> {
        let mut names = std::collections::BTreeSet::new();
        let mut underlays = std::collections::BTreeSet::new();
        for cluster in &self.clusters {
            let name = &cluster.name;
            let letters = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            if name.is_empty() || name.len() > 40 || !name.chars().all(letters) || name.starts_with('-') {
                return Err(Error::Plan(format!(
                    "cluster name {name:?}: want 1-40 of a-z, 0-9 and '-'"
                )));
            }
            // The others are directories beside the clusters' own.
            let reserved = ["underlay", "nodes", "log", "ns", "images", "etcd"];
            if reserved.contains(&name.as_str()) || !names.insert(name) {
                return Err(Error::Plan(format!("cluster name {name:?} is taken")));
            }
            if cluster.underlay.prefix_len() != 24 || !underlays.insert(cluster.underlay) {
                return Err(Error::Plan(format!(
                    "underlay {} of {name}: want a /24 of its own",
                    cluster.underlay
                )));
            }
            if cluster.nodes > 200 {
                return Err(Error::Plan(format!("{name}: at most 200 nodes fit its underlay")));
            }
        }
        Ok(())
    }
}

impl ClusterPlan {
    /// The default ranges of cluster number `index` (from 0): underlay 172.30.N.0/24, pods 10.N0.0.0/16, Services
    /// 10.N1.0.0/16, WireGuard 100.66.N.0/24, where N = index + 1. At most 24 clusters.
    ///
    /// # Panics
    /// When `index` is above 23: the ranges would leave 10.0.0.0/8.
    pub fn numbered(index: usize, name: &str, nodes: u8) -> Self {
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
            wireguard_cidr: net(100, 66, n, 24),
            underlay: net(172, 30, n, 24),
        }
    }

    /// Where the API server listens on the underlay (port 6443).
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

    /// Node number `n`, from 1.
    pub fn node(&self, n: u8) -> NodePlan {
        NodePlan {
            name: format!("{}-{n}", self.name),
            cluster: self.name.clone(),
            address: nth(self.underlay, 10 + u32::from(n)),
        }
    }
}

fn nth(net: Ipv4Net, n: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(net.network()) + n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_plan_gives_every_cluster_its_own_ranges() {
        let plan = LabPlan::clusters(&[("mgmt", 2), ("tenant-a", 1)]);
        let tenant = &plan.clusters[1];
        assert_eq!(
            *tenant,
            ClusterPlan {
                name: "tenant-a".into(),
                nodes: 1,
                controllers: true,
                pod_cidr: "10.20.0.0/16".parse().unwrap(),
                service_cidr: "10.21.0.0/16".parse().unwrap(),
                wireguard_cidr: "100.66.2.0/24".parse().unwrap(),
                underlay: "172.30.2.0/24".parse().unwrap(),
            }
        );
        assert_eq!(tenant.api_address(), Ipv4Addr::new(172, 30, 2, 1));
        assert_eq!(tenant.api_service_ip(), Ipv4Addr::new(10, 21, 0, 1));
        assert_eq!(tenant.dns_ip(), Ipv4Addr::new(10, 21, 0, 10));
        assert_eq!(
            tenant.node(1),
            NodePlan {
                name: "tenant-a-1".into(),
                cluster: "tenant-a".into(),
                address: Ipv4Addr::new(172, 30, 2, 11)
            }
        );
        plan.validate().unwrap();
    }

    #[test]
    fn two_clusters_of_one_name_are_refused() {
        let error = LabPlan::control_planes(&["a", "a"]).validate().unwrap_err();
        assert_eq!(error.to_string(), "cluster name \"a\" is taken");
    }
}
