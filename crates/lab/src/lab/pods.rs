//! Connects workers (nodes) that are pods of another cluster, as with KubeVirt, and creates the Service by which they
//! reach their API server. They run the same programs as any other node.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use ipnet::Ipv4Net;
use k8s_openapi::api::core::v1::Node;
use kube::api::Api;

use super::{Lab, TIMEOUT, UNDERLAY};
use crate::plan::HostNode;
use crate::{ClusterPlan, NodeNetwork, NodePlan, Result, Uplink, command, wait_until};

impl Lab {
    /// The plan of node number `n` of a cluster. For a worker in a pod, waits until the host node has a podCIDR.
    pub(super) async fn plan_node(&self, cluster: &ClusterPlan, n: u8) -> Result<NodePlan> {
        let NodeNetwork::Pods { of, node, .. } = &cluster.node_network else {
            return Ok(cluster.node(n));
        };
        let host = self.cluster(of);
        let host_node = host.plan().node(*node);
        let nodes: Api<Node> = Api::all(host.client().await?);
        let pod_cidr = wait_until(format!("the podCIDR of {}", host_node.name), TIMEOUT, async || {
            let node = nodes.get(&host_node.name).await.map_err(|error| error.to_string())?;
            let pod_cidr = node.spec.and_then(|spec| spec.pod_cidr).unwrap_or_default();
            pod_cidr.parse().map_err(|_| format!("spec.podCIDR is {pod_cidr:?}"))
        })
        .await?;
        Ok(cluster.node_in_pods(n, &host_node, pod_cidr))
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
            async || host.apply(&manifest).await.map(drop).map_err(|error| error.to_string()),
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

    /// Connects the worker's network namespace with a veth pair to the pods' bridge of the host node. The host node is
    /// the worker's default gateway, and forwards packets from the API server on the underlay to the worker.
    pub(super) async fn connect_in_pods(
        &self,
        name: &str,
        address: IpAddr,
        api: IpAddr,
        (host_node, pod_cidr): (&HostNode, Ipv4Net),
    ) -> Result<()> {
        let gateway = Ipv4Addr::from(u32::from(pod_cidr.network()) + 1);
        let length = pod_cidr.prefix_len();
        let port = port(address);
        // The CNI creates this bridge with the node's first pod, or uses an existing one.
        let cable = format!(
            "ip link show cni0 >/dev/null 2>&1 || {{ ip link add cni0 address 0a:00:00:00:00:01 type bridge && \
             ip addr add {gateway}/{length} dev cni0 && ip link set cni0 up; }} || exit 1\n\
             ip link add {port} type veth peer name eth0 netns {} && ip link set {port} master cni0 up",
            self.namespace(name).display()
        );
        let host_netns = format!("--net={}", self.namespace(&host_node.name).display());
        command::run(&command::argv(["nsenter", &host_netns, "sh", "-c", &cable]), None).await?;
        let inside = format!(
            "link set lo up\naddr add {address}/{length} dev eth0\nlink set eth0 up\nroute add default via {gateway}\n"
        );
        self.ip_batch(name, &inside).await?;
        // The underlay's bridge has the addresses of all API servers. `src` makes packets to the worker come from the address of the
        // worker's API server.
        let back = format!("route replace {address} via {} src {api}\n", host_node.address);
        self.ip_batch(UNDERLAY, &back).await
    }
}

/// The namespace of a cluster's worker pods in the host cluster, named as in Cozystack.
pub(crate) fn worker_namespace(cluster: &ClusterPlan) -> String {
    format!("tenant-{}", cluster.name)
}

/// The name of the bridge port on the host node for a worker's link.
pub(super) fn port(address: IpAddr) -> String {
    match address {
        IpAddr::V4(address) => format!("vm{}", address.octets()[3]),
        IpAddr::V6(address) => format!("vm{:x}", address.segments()[7]),
    }
}
