//! Connects workers (nodes) that are pods of another cluster, as with KubeVirt, and creates the Service by which they
//! reach their API server. They run the same programs as any other node.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use ipnet::Ipv4Net;

use super::{Cluster, Lab, Node, UNDERLAY};
use crate::plan::{HostNode, VXLAN_OVERHEAD};
use crate::{ClusterPlan, Error, NodeNetwork, NodePlan, PodNetwork, Result, Uplink, command, wait_until};

/// The MAC address of every worker's port on its host node.
const PORT_MAC: &str = "0a:00:00:00:00:01";

impl Lab {
    /// The plan of node number `n` of a cluster at its first boot.
    pub(super) fn plan_node(&self, cluster: &ClusterPlan, n: u8) -> NodePlan {
        let NodeNetwork::Pods { of, nodes, range, .. } = &cluster.node_network else {
            return cluster.node(n);
        };
        let host_node = nodes[usize::from(n - 1) % nodes.len()];
        cluster.node_in_pods(n, &self.cluster(of).plan().node(host_node), *range)
    }

    /// The address of the resolver that a cluster's nodes use: for workers in pods, the DNS of the host cluster.
    pub(super) fn resolver(&self, cluster: &ClusterPlan) -> Option<IpAddr> {
        let NodeNetwork::Pods { of, .. } = &cluster.node_network else {
            return None;
        };
        Some(self.cluster(of).plan().dns_ip())
    }

    /// If the cluster's workers are pods, creates the Service of its API server in the host cluster.
    pub(super) async fn publish_api_to_pods(&self, cluster: &ClusterPlan) -> Result<()> {
        let NodeNetwork::Pods { of, api, .. } = &cluster.node_network else {
            return Ok(());
        };
        let (name, address) = (format!("{}-api", cluster.name), cluster.api_address());
        let manifest = format!(
            "apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: kube-public}}
spec: {{clusterIP: {api}, ports: [{{name: https, port: 6443}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {name}, namespace: kube-public, labels: {{kubernetes.io/service-name: {name}}}}}
addressType: IPv4
ports: [{{name: https, port: 6443}}]
endpoints: [{{addresses: [{address}]}}]
"
        );
        let host = self.cluster(of);
        // The control plane creates the namespace some time after its API server answers.
        wait_until(
            format!("the Service {name} in {of}"),
            Duration::from_secs(60),
            async || host.apply(&manifest).await.map_err(|error| error.to_string()),
        )
        .await
    }

    /// If the node is a worker, creates the pod that represents it in the host cluster, like KubeVirt's virt-launcher, so that
    /// NetworkPolicies can select it. No kubelet runs this pod, so this function writes its status.
    pub(super) async fn publish_worker_pod(&self, worker: &NodePlan) -> Result<()> {
        let Uplink::Pods { of: host_node, .. } = &worker.uplink else {
            return Ok(());
        };
        let cluster = self.cluster(&worker.cluster);
        let NodeNetwork::Pods { of: host_cluster, .. } = &cluster.plan().node_network else {
            return Ok(());
        };
        let (namespace, pod) = (
            worker_namespace(cluster.plan()),
            format!("virt-launcher-{}", worker.name),
        );
        let manifest = format!(
            "apiVersion: v1
kind: Namespace
metadata: {{name: {namespace}}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {{name: default, namespace: {namespace}}}
---
apiVersion: v1
kind: Pod
metadata:
  name: {pod}
  namespace: {namespace}
  labels: {{kubevirt.io: virt-launcher, cluster.x-k8s.io/cluster-name: kubernetes-{}}}
spec:
  schedulerName: nobody
  automountServiceAccountToken: false
  containers: [{{name: compute, image: 'lab.local/box:1'}}]
",
            worker.cluster
        );
        let status = serde_json::json!({"status": {
            "phase": "Running",
            "hostIP": host_node.address, "hostIPs": [{"ip": host_node.address}],
            "podIP": worker.address, "podIPs": [{"ip": worker.address}],
        }})
        .to_string();
        let host = self.cluster(host_cluster);
        wait_until(
            format!("the pod {namespace}/{pod} of {}", worker.name),
            Duration::from_secs(60),
            async || {
                host.apply(&manifest).await.map_err(|error| error.to_string())?;
                let words = [
                    "-n",
                    &namespace,
                    "patch",
                    "pod",
                    &pod,
                    "--subresource=status",
                    "--type=merge",
                    "-p",
                    &status,
                ];
                host.kubectl(words).await.map(drop).map_err(|error| error.to_string())
            },
        )
        .await
    }

    /// Connects a worker to its host node with a veth pair.
    pub(super) async fn connect_in_pods(&self, worker: &NodePlan, host_node: &HostNode, range: Ipv4Net) -> Result<()> {
        let (name, address) = (&worker.name, address_of(worker)?);
        let mtu = self.host_cluster(worker)?.plan().pod_mtu();
        let cable = format!(
            "link add {port} mtu {mtu} type veth peer name eth0 address {mac} mtu {mtu} netns {netns}\n",
            port = port(worker.address),
            mac = mac(address),
            netns = self.namespace(name).display()
        );
        self.ip_batch(&host_node.name, &cable).await?;
        let gateway = Ipv4Addr::from(u32::from(range.network()) + 1);
        // A virtual machine sees no loss of carrier during a live migration, but this link loses its carrier. The kernel then deletes all
        // neighbour entries but permanent ones, and would ask for the gateway again only after a second.
        let inside = format!(
            "link set lo up\naddr add {address}/{} dev eth0\nlink set eth0 up\n\
             neigh replace {gateway} lladdr {PORT_MAC} dev eth0 nud permanent\nroute add default via {gateway}\n",
            range.prefix_len()
        );
        self.ip_batch(name, &inside).await?;
        self.route_to_worker(worker, host_node).await
    }

    /// Sets up the worker's port on its host node, and the routes to the worker: on its host node, on the other nodes of the host
    /// cluster that run now, and on the underlay. The host node answers ARP requests for all addresses. Every port has the same
    /// MAC address, so the worker's neighbour entries stay valid when the port moves, as with the logical router of an overlay.
    async fn route_to_worker(&self, worker: &NodePlan, host_node: &HostNode) -> Result<()> {
        let (address, port) = (address_of(worker)?, port(worker.address));
        let at_port = format!(
            "echo 1 > /proc/sys/net/ipv4/conf/{port}/proxy_arp\n\
             echo 0 > /proc/sys/net/ipv4/neigh/{port}/proxy_delay\n\
             ip -batch - <<E\nlink set {port} address {PORT_MAC} up\n\
             neigh replace {address} lladdr {mac} dev {port} nud permanent\n\
             route replace {address} dev {port} src {source}\nE",
            mac = mac(address),
            source = host_node.address,
        );
        let netns = format!("--net={}", self.namespace(&host_node.name).display());
        command::run(&command::argv(["nsenter", &netns, "sh", "-c", &at_port]), None).await?;
        let host_cluster = self.host_cluster(worker)?;
        let device = match host_cluster.plan().pod_network {
            // The plan's checks exclude flannel.
            PodNetwork::HostGateway | PodNetwork::Flannel => "",
            PodNetwork::Vxlan => "dev vx onlink",
        };
        for other in host_cluster.nodes().iter().filter(|node| node.is_up()) {
            if other.name() != host_node.name {
                let route = format!("route replace {address} via {} {device}\n", host_node.address);
                self.ip_batch(other.name(), &route).await?;
            }
        }
        // The underlay's bridge has the addresses of all API servers. `src` makes packets to the worker come from the address of the
        // worker's API server.
        let api = self.cluster(&worker.cluster).plan().api_address();
        let back = format!("route replace {address} via {} src {api}\n", host_node.address);
        self.ip_batch(UNDERLAY, &back).await
    }

    /// Moves a worker to another node of the host cluster, as KubeVirt's live migration does: the worker continues to run, its address and
    /// its link stay the same, and the routes to it change. Its carrier is off for a moment. Handles of the node become outdated.
    ///
    /// # Errors
    /// When the worker is not a pod or has no power, or `to` is not a node of the host cluster.
    pub async fn migrate(&self, worker: &str, to: &str) -> Result<()> {
        let before = self.node(worker).plan().clone();
        let Uplink::Pods { of: from, range } = &before.uplink else {
            return Err(not_in_pods(&before));
        };
        let target = HostNode {
            name: to.to_owned(),
            address: self.node(to).address(),
        };
        let uplink = Uplink::Pods {
            of: target.clone(),
            range: *range,
        };
        let after = NodePlan {
            uplink,
            ..before.clone()
        };
        self.publish_worker_pod(&after).await?;
        let (port, netns) = (port(after.address), self.namespace(to));
        let moved = format!("link set {port} netns {}\n", netns.display());
        self.ip_batch(&from.name, &moved).await?;
        self.route_to_worker(&after, &target).await?;
        self.record(after)
    }

    /// Gives a worker without power another address of its range, as a new pod of the same virtual machine can have. The next boot uses it.
    /// Handles of the node become outdated.
    ///
    /// # Errors
    /// When the worker is not a pod.
    pub async fn set_worker_address(&self, worker: &str, address: Ipv4Addr) -> Result<()> {
        let mut plan = self.node(worker).plan().clone();
        let host_cluster = self.host_cluster(&plan)?;
        let hosts = host_cluster.nodes();
        for namespace in hosts
            .iter()
            .filter(|node| node.is_up())
            .map(Node::name)
            .chain([UNDERLAY])
        {
            // The route on the host node is already deleted with the port.
            let netns = format!("--net={}", self.namespace(namespace).display());
            let old = plan.address.to_string();
            command::output(&command::argv(["nsenter", &netns, "ip", "route", "del", &old]), None).await?;
        }
        plan.address = address.into();
        self.record(plan)
    }

    /// Sets the MTU of a cluster's pod network on the links of its overlay and of the workers in it.
    ///
    /// # Errors
    /// When the cluster's pod network is not a VXLAN.
    pub async fn set_pod_mtu(&self, cluster: &str, mtu: u16) -> Result<()> {
        let host_cluster = self.cluster(cluster);
        for node in host_cluster.nodes().iter().filter(|node| node.is_up()) {
            self.ip_batch(node.name(), &format!("link set vx mtu {mtu}\n")).await?;
        }
        let workers = self.state().nodes.clone();
        for worker in workers {
            let Uplink::Pods { of, .. } = &worker.uplink else {
                continue;
            };
            if self.host_cluster(&worker)?.plan().name == cluster && self.node(&worker.name).is_up() {
                let at_port = format!("link set {} mtu {mtu}\n", port(worker.address));
                self.ip_batch(&of.name, &at_port).await?;
                let inside = format!("link set eth0 mtu {mtu}\nlink set vx mtu {}\n", mtu - VXLAN_OVERHEAD);
                self.ip_batch(&worker.name, &inside).await?;
            }
        }
        Ok(())
    }

    /// Turns masquerading on or off for packets from workers in pods to addresses outside the pod range of the host cluster, such
    /// as those of its nodes. Many CNIs do the same for all pods. Affects only nodes of the host cluster that run now.
    /// WireGuard's flows change with their next packet, other open connections keep their source.
    ///
    /// # Errors
    /// When a program fails.
    pub async fn masquerade_workers(&self, cluster: &str, masquerade: bool) -> Result<()> {
        let host_cluster = self.cluster(cluster);
        let mut table = String::from("table ip workers\ndelete table ip workers\n");
        if masquerade {
            table += &format!(
                "table ip workers {{\n chain postrouting {{\n  type nat hook postrouting priority 100; policy accept;\n  \
                 iifname \"vm*\" ip daddr != {} counter masquerade\n }}\n}}\n",
                host_cluster.plan().pod_cidr
            );
        }
        for node in host_cluster.nodes().iter().filter(|node| node.is_up()) {
            node.exec_with_stdin(["nft", "-f", "-"], &table).await?;
            node.forget_wireguard_flows().await?;
        }
        Ok(())
    }

    fn host_cluster(&self, worker: &NodePlan) -> Result<Cluster<'_>> {
        match &self.cluster(&worker.cluster).plan().node_network {
            NodeNetwork::Pods { of, .. } => Ok(self.cluster(of)),
            _ => Err(not_in_pods(worker)),
        }
    }
}

impl Node<'_> {
    /// Deletes the conntrack entries of WireGuard packets on this node, so that the next packet of each flow decides about its NAT.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub async fn forget_wireguard_flows(&self) -> Result<()> {
        // The exit status is 1 if there is no such entry.
        let words = ["conntrack", "-D", "-p", "udp", "--dport", "51820"];
        self.try_exec(words).await.map(drop)
    }
}

/// The address of a worker. Workers in pods have no IPv6 address.
fn address_of(worker: &NodePlan) -> Result<Ipv4Addr> {
    worker.address_v4().ok_or_else(|| not_in_pods(worker))
}

fn not_in_pods(node: &NodePlan) -> Error {
    Error::Other(format!("{} is not a pod of another cluster", node.name))
}

/// The namespace of a cluster's worker pods in the host cluster, named as in Cozystack.
pub(crate) fn worker_namespace(cluster: &ClusterPlan) -> String {
    format!("tenant-{}", cluster.name)
}

/// The name of a worker's port on its host node.
pub(super) fn port(address: IpAddr) -> String {
    match address {
        IpAddr::V4(address) => {
            let [_, _, c, d] = address.octets();
            format!("vm{c}.{d}")
        }
        IpAddr::V6(address) => format!("vm{:x}", address.segments()[7]),
    }
}

/// The MAC address of a worker's eth0.
fn mac(address: Ipv4Addr) -> String {
    let [a, b, c, d] = address.octets();
    format!("0a:01:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
}
