//! Creates NAT routers: each connects the private network of a cluster's nodes to the underlay.

use std::net::Ipv4Addr;

use super::{Lab, Node, UNDERLAY};
use crate::command::{self, argv};
use crate::plan::UNDERLAY_PREFIX;
use crate::supervisor::Request;
use crate::{ClusterPlan, Error, NatKind, NodeNetwork, NodePlan, Result};

/// The source port to which the rules of the endpoint-dependent and endpoint-independent kinds apply. Packets from other ports are
/// masqueraded, with the same port if it is free. A one-to-one NAT maps all ports.
const WIREGUARD_PORT: u16 = 51820;
/// The interface of a router toward another private network.
const SITE: &str = "site";

impl Lab {
    /// If the cluster's nodes are behind a NAT, creates the router.
    pub(super) async fn make_nat_router(&self, cluster: &ClusterPlan) -> Result<()> {
        let NodeNetwork::Nat { lan, kind } = &cluster.node_network else {
            return Ok(());
        };
        let (router, public) = (cluster.nat_router(), cluster.nat_address());
        self.run.request(&Request::AddNamespace { name: router.clone() })?;
        let bridge_port = format!("n{}", public.octets()[2]);
        let cable = format!(
            "link add {bridge_port} type veth peer name wan netns {netns}\nlink set {bridge_port} master br0 up\n",
            netns = self.namespace(&router).display(),
        );
        self.ip_batch(UNDERLAY, &cable).await?;
        let gateway = ClusterPlan::lan_gateway(*lan);
        let inside = format!(
            "link set lo up\naddr add {public}/{UNDERLAY_PREFIX} dev wan\nlink set wan up\nlink add lan type bridge\n\
             addr add {gateway}/{} dev lan\nlink set lan up\n",
            lan.prefix_len()
        );
        self.ip_batch(&router, &inside).await?;
        // By this route the cluster's API server reaches its kubelets. Nodes of other clusters have no route to the private network.
        let kubelet_route = format!("route replace {lan} via {public} src {}\n", cluster.api_address());
        self.ip_batch(UNDERLAY, &kubelet_route).await?;
        // A UDP mapping without traffic lives for 30 s, as in many routers. Linux's default is 120 s if there were replies.
        let sysctls = "cd /proc/sys/net; echo 1 > ipv4/ip_forward; echo 0 > ipv4/conf/all/send_redirects; \
                       echo 0 > ipv4/conf/lan/send_redirects; echo 30 > netfilter/nf_conntrack_udp_timeout; \
                       echo 30 > netfilter/nf_conntrack_udp_timeout_stream";
        self.router_exec(&router, &["sh", "-c", sysctls], None).await?;
        self.set_nat(&cluster.name, *kind).await
    }

    /// Changes the kind of the NAT in front of a cluster's nodes, and removes all its mappings. The public addresses of a one-to-one NAT
    /// stay on the router, without use.
    ///
    /// # Errors
    /// When the cluster's nodes are not behind a NAT.
    pub async fn set_nat(&self, cluster: &str, kind: NatKind) -> Result<()> {
        let plan = self.cluster(cluster).plan().clone();
        let (router, table) = (plan.nat_router(), table(&plan, kind)?);
        if kind == NatKind::OneToOne {
            let add = |n: u8| {
                format!(
                    "addr replace {}/{UNDERLAY_PREFIX} dev wan\n",
                    plan.one_to_one_address(n)
                )
            };
            self.ip_batch(&router, &(1..=MAX_NODES).map(add).collect::<String>())
                .await?;
        }
        self.router_exec(&router, &["nft", "-f", "-"], Some(&table)).await?;
        self.router_exec(&router, &["conntrack", "-F"], None).await
    }

    /// Connects the private networks of two clusters by a cable between their NAT routers, which forward over it without translation.
    ///
    /// # Errors
    /// When the nodes of one of the clusters are not behind a NAT.
    pub async fn join_private_networks(&self, clusters: [&str; 2]) -> Result<()> {
        let [one, other] = clusters.map(|name| self.cluster(name));
        let (one, other) = (one.plan(), other.plan());
        let netns = self.namespace(&other.nat_router()).display().to_string();
        let cable = format!("link add {SITE} type veth peer name {SITE} netns {netns}\n");
        self.ip_batch(&one.nat_router(), &cable).await?;
        for (number, router, remote) in [(1, one, other), (2, other, one)] {
            let NodeNetwork::Nat { lan, .. } = &remote.node_network else {
                return Err(not_behind_nat(remote));
            };
            let inside = format!(
                "addr add 10.255.255.{number}/24 dev {SITE}\nlink set {SITE} up\nroute add {lan} via 10.255.255.{} dev {SITE}\n",
                3 - number
            );
            self.ip_batch(&router.nat_router(), &inside).await?;
        }
        Ok(())
    }

    /// Removes the cable of [`Self::join_private_networks`].
    ///
    /// # Errors
    /// When there is none.
    pub async fn separate_private_networks(&self, clusters: [&str; 2]) -> Result<()> {
        let router = self.cluster(clusters[0]).plan().nat_router();
        self.ip_batch(&router, &format!("link del {SITE}\n")).await
    }

    /// Adds a host (a bare network namespace without Kubernetes) behind the NAT of a cluster, with the address of node `n`. `name` is
    /// a unique DNS label.
    ///
    /// # Errors
    /// When the cluster's nodes are not behind a NAT, or the name is already used.
    pub async fn add_host_behind_nat(&self, name: &str, cluster: &str, n: u8) -> Result<Node<'_>> {
        let plan = self.cluster(cluster).plan().clone();
        let NodeNetwork::Nat { .. } = plan.node_network else {
            return Err(not_behind_nat(&plan));
        };
        let host = NodePlan {
            name: name.into(),
            cluster: String::new(),
            ..plan.node(n)
        };
        self.connect(&host).await?;
        self.state().nodes.push(host);
        self.save()?;
        Ok(self.node(name))
    }

    /// Connects a node to the private network behind its cluster's router.
    pub(super) async fn connect_behind_nat(&self, node: &NodePlan, lan: ipnet::Ipv4Net, router: &str) -> Result<()> {
        let (address, bridge_port) = (node.address, super::underlay::port(node.address));
        let cable = format!(
            "link add {bridge_port} type veth peer name eth0 netns {}\nlink set {bridge_port} master lan up\n",
            self.namespace(&node.name).display()
        );
        self.ip_batch(router, &cable).await?;
        let (length, gateway) = (lan.prefix_len(), ClusterPlan::lan_gateway(lan));
        let inside = format!(
            "link set lo up\naddr add {address}/{length} dev eth0\nlink set eth0 up\nroute add default via {gateway}\n"
        );
        self.ip_batch(&node.name, &inside).await
    }

    async fn router_exec(&self, router: &str, words: &[&str], stdin: Option<&str>) -> Result<()> {
        let netns = format!("--net={}", self.namespace(router).display());
        let all = [&["nsenter", &netns], words].concat();
        command::run(&argv(all), stdin.map(str::as_bytes)).await.map(drop)
    }
}

/// The largest number of nodes behind one router.
const MAX_NODES: u8 = 9;

fn not_behind_nat(cluster: &ClusterPlan) -> Error {
    Error::Other(format!("the nodes of {} are not behind a NAT", cluster.name))
}

/// The nftables table of a router. Its chains drop unexpected packets from outside, except to the addresses of a one-to-one NAT, before
/// conntrack confirms an entry for them. A confirmed entry would occupy the mapped port for the outside sender: a later packet of the
/// node to this sender would get another port.
fn table(cluster: &ClusterPlan, kind: NatKind) -> Result<String> {
    let NodeNetwork::Nat { lan, .. } = &cluster.node_network else {
        return Err(not_behind_nat(cluster));
    };
    let nodes: Vec<(u8, Ipv4Addr)> = (1..=MAX_NODES)
        .map(|n| (n, cluster.address_behind_nat(*lan, n)))
        .collect();
    let rule = |(n, private): &(u8, Ipv4Addr)| {
        let wireguard = format!("oifname wan ip saddr {private} udp sport {WIREGUARD_PORT}");
        match kind {
            NatKind::EndpointIndependent { first_port } => {
                format!("{wireguard} masquerade to :{}", first_port + u16::from(*n) - 1)
            }
            NatKind::EndpointDependent => format!("{wireguard} masquerade random,fully-random"),
            NatKind::OneToOne => format!(
                "oifname wan ip saddr {private} snat to {}",
                cluster.one_to_one_address(*n)
            ),
        }
    };
    let translate: Vec<String> = nodes.iter().map(rule).collect();
    let inbound: Vec<String> = match kind {
        NatKind::OneToOne => nodes
            .iter()
            .map(|(n, private)| {
                format!(
                    "iifname wan ip daddr {} dnat to {private}",
                    cluster.one_to_one_address(*n)
                )
            })
            .collect(),
        _ => vec![],
    };
    Ok(format!(
        "table ip router
delete table ip router
table ip router {{
  chain input {{
    type filter hook input priority filter; policy drop
    iifname lan accept
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop
    ct state established,related accept
    ct status dnat accept
    iifname {{ lan, {SITE} }} accept
    ip saddr {api} accept comment \"the cluster's API server\"
  }}
  chain prerouting {{
    type nat hook prerouting priority dstnat
    {inbound}
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat
    {translate}
    oifname wan ip saddr {lan} masquerade
  }}
}}
",
        api = cluster.api_address(),
        inbound = inbound.join("\n    "),
        translate = translate.join("\n    "),
    ))
}
