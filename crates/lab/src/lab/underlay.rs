//! Creates the underlay, which connects the nodes: a bridge in a network namespace without IP forwarding, and a veth
//! pair for each node. `pods.rs` connects nodes that are pods of another cluster, and `nat.rs` those behind a NAT router.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{Lab, Node, UNDERLAY};
use crate::command::{self, argv};
use crate::plan::{UNDERLAY_PREFIX, UNDERLAY_PREFIX_V6};
use crate::supervisor::Request;
use crate::{NodePlan, Output, Result, Uplink};

impl Lab {
    pub(super) async fn make_underlay(&self) -> Result<()> {
        self.run.request(&Request::AddNamespace { name: UNDERLAY.into() })?;
        // The MAC address is fixed. By default a bridge uses the lowest MAC address of its ports. A simulated power cut
        // deletes a node's port, so the bridge's MAC address could change, and the other nodes would send to the API
        // servers at the old one for half a minute.
        let mut batch =
            String::from("link set lo up\nlink add br0 address 02:00:00:00:00:01 type bridge\nlink set br0 up\n");
        for cluster in &self.plan().clusters {
            if let IpAddr::V4(api) = cluster.api_address() {
                batch += &format!("addr add {api}/{UNDERLAY_PREFIX} dev br0\n");
            }
            if let Some(gateway) = cluster.default_gateway_v6() {
                batch += &format!("addr add {gateway}/{UNDERLAY_PREFIX_V6} dev br0 nodad\n");
            }
        }
        self.ip_batch(UNDERLAY, &batch).await?;
        // With forwarding, clusters would reach each other without any mesh, and tests of connections would prove nothing.
        // With ICMP redirects, nodes would send to other clusters without the gateway.
        let off = "for f in ipv4/ip_forward ipv4/conf/all/send_redirects ipv4/conf/br0/send_redirects ipv6/conf/all/forwarding; \
                   do [ ! -e /proc/sys/net/$f ] || echo 0 > /proc/sys/net/$f; done";
        self.underlay_exec(["sh", "-c", off]).await?;
        Ok(())
    }

    /// Creates a node's network namespace and connects it to its uplink.
    pub(super) async fn connect(&self, node: &NodePlan) -> Result<()> {
        let (name, address) = (&node.name, node.address);
        self.run.request(&Request::AddNamespace { name: name.clone() })?;
        if let Uplink::Pods { of, range } = &node.uplink {
            return self.connect_in_pods(node, of, *range).await;
        }
        if let Uplink::Nat { lan, router } = &node.uplink {
            return self.connect_behind_nat(node, *lan, router).await;
        }
        // The port's name contains numbers of the address, because a node's name can exceed the limit for link names.
        let port = port(address);
        let netns = self.namespace(name);
        let cable = format!(
            "link add {port} type veth peer name eth0 netns {netns}\nlink set {port} master br0 up\n",
            netns = netns.display()
        );
        self.ip_batch(UNDERLAY, &cable).await?;
        // The default gateways forward nothing, but a packet to a ClusterIP needs a route before DNAT.
        let mut inside = String::from("link set lo up\nlink set eth0 up\n");
        if let Some(address) = node.address_v4() {
            let gateway = self.default_gateway(address);
            inside += &format!("addr add {address}/{UNDERLAY_PREFIX} dev eth0\nroute add default via {gateway}\n");
        }
        if let Some(address) = node.address_v6 {
            let [a, b, c, d, ..] = address.segments();
            let gateway = Ipv6Addr::new(a, b, c, d, 0, 0, 0, 1);
            inside += &format!(
                "addr add {address}/{UNDERLAY_PREFIX_V6} dev eth0 nodad\nroute add ::/0 via {gateway} dev eth0\n"
            );
        }
        self.ip_batch(name, &inside).await
    }

    /// The default gateway of an address: .1 of its /24. For a cluster's nodes this is the address of their API server.
    fn default_gateway(&self, address: Ipv4Addr) -> Ipv4Addr {
        let [a, b, c, _] = address.octets();
        Ipv4Addr::new(a, b, c, 1)
    }

    /// Deletes a node's uplink and its network namespace.
    pub(super) async fn disconnect(&self, node: &NodePlan) -> Result<()> {
        let (namespace, port) = uplink_port(node);
        self.ip_batch(namespace, &format!("link del {port}\n")).await?;
        let name = node.name.clone();
        self.run.request(&Request::DropNamespace { name })?;
        Ok(())
    }

    /// Adds a host (a bare network namespace without Kubernetes) to the underlay. `name` is a unique DNS label. The
    /// address is in the lab's 172.30.0.0/16; the default gateway is .1 of its /24.
    ///
    /// # Errors
    /// When the name is already used.
    pub async fn add_host(&self, name: &str, address: Ipv4Addr) -> Result<Node<'_>> {
        let plan = NodePlan {
            name: name.into(),
            cluster: String::new(),
            address: address.into(),
            uplink: Uplink::Underlay,
            address_v6: None,
        };
        self.connect(&plan).await?;
        self.state().nodes.push(plan);
        self.save()?;
        Ok(self.node(name))
    }

    /// Runs a host program in the underlay's network namespace (bridge `br0`, API servers).
    ///
    /// # Errors
    /// When the program fails. The error quotes the last lines of its output.
    pub async fn underlay_exec<S: AsRef<std::ffi::OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Result<Output> {
        command::run(&self.in_underlay(argv(words)), None).await
    }

    pub(crate) fn in_underlay(&self, argv: Vec<String>) -> Vec<String> {
        [
            vec![
                "nsenter".into(),
                format!("--net={}", self.namespace(UNDERLAY).display()),
                "--".into(),
            ],
            argv,
        ]
        .concat()
    }

    pub(super) async fn ip_batch(&self, namespace: &str, batch: &str) -> Result<()> {
        let path = self.namespace(namespace).display().to_string();
        let words = ["nsenter", &format!("--net={path}"), "ip", "-batch", "-"];
        command::run(&argv(words), Some(batch.as_bytes())).await.map(drop)
    }
}

/// The network namespace and name of the other end of a node's `eth0`: on the underlay, on the host node (if the node is a pod), or on the
/// node's NAT router.
pub(super) fn uplink_port(node: &NodePlan) -> (&str, String) {
    match &node.uplink {
        Uplink::Underlay => (UNDERLAY, port(node.address)),
        Uplink::Pods { of, .. } => (&of.name, super::pods::port(node.address)),
        Uplink::Nat { router, .. } => (router, port(node.address)),
    }
}

/// The name of the bridge port for a node's link, from two numbers of the node's address: the third and fourth of IPv4, the fourth and
/// eighth of IPv6. In the default ranges the first of the two is different for each cluster.
pub(super) fn port(address: IpAddr) -> String {
    match address {
        IpAddr::V4(address) => {
            let [_, _, c, d] = address.octets();
            format!("p{c}.{d}")
        }
        IpAddr::V6(address) => {
            let [_, _, _, cluster, .., node] = address.segments();
            format!("p{cluster:x}.{node:x}")
        }
    }
}
