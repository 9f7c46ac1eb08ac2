//! Workers in another cluster's pods, as KubeVirt's: where they are plugged in, and the Service by which they know their API
//! server. What they run is the same as on any node.

use std::net::Ipv4Addr;
use std::time::Duration;

use ipnet::Ipv4Net;
use k8s_openapi::api::core::v1::Node;
use kube::api::Api;

use super::{Lab, PATIENCE, UNDERLAY};
use crate::plan::NodeName;
use crate::{ClusterPlan, NodePlan, Result, Uplink, Workers, command, wait_until};

impl Lab {
    /// Where node number `n` of a cluster is plugged in. The pod ranges of the nodes that carry others are known only once
    /// these have them.
    pub(super) async fn place(&self, cluster: &ClusterPlan, n: u8) -> Result<NodePlan> {
        let Workers::Pods { of, node, .. } = &cluster.workers else {
            return Ok(cluster.node(n));
        };
        let carrier = self.cluster(of);
        let of = carrier.plan().node(*node);
        let nodes: Api<Node> = Api::all(carrier.client().await?);
        let range = wait_until(format!("the pod range of {}", of.name), PATIENCE, async || {
            let node = nodes.get(&of.name).await.map_err(|error| error.to_string())?;
            let range = node.spec.and_then(|spec| spec.pod_cidr).unwrap_or_default();
            range.parse().map_err(|_| format!("spec.podCIDR is {range:?}"))
        })
        .await?;
        Ok(cluster.node_in_pods(n, &of, range))
    }

    /// Makes the Service of the API server in the cluster whose pods the workers are. Nothing for other clusters.
    pub(super) async fn publish_api_to_pods(&self, cluster: &ClusterPlan) -> Result<()> {
        let Workers::Pods { of, api, .. } = &cluster.workers else {
            return Ok(());
        };
        let (name, at) = (format!("{}-api", cluster.name), cluster.api_address());
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
endpoints: [{{addresses: [{at}]}}]
"
        );
        let carrier = self.cluster(of);
        // Its control plane makes the namespace some time after it answers.
        wait_until(
            format!("the Service {name} in {of}"),
            Duration::from_secs(60),
            async || {
                carrier
                    .apply(&manifest)
                    .await
                    .map(drop)
                    .map_err(|error| error.to_string())
            },
        )
        .await
    }

    /// The pod that the worker is to the cluster that carries it, as KubeVirt's virt-launcher: what NetworkPolicies select.
    /// Nobody runs it, so its status is written here.
    pub(super) async fn publish_worker(&self, worker: &NodePlan) -> Result<()> {
        let Uplink::Pods { of, .. } = &worker.uplink else {
            return Ok(());
        };
        let cluster = self.cluster(&worker.cluster);
        let Workers::Pods { of: carrier, .. } = &cluster.plan().workers else {
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
            "hostIP": of.address, "hostIPs": [{"ip": of.address}],
            "podIP": worker.address, "podIPs": [{"ip": worker.address}],
        }})
        .to_string();
        let carrier = self.cluster(carrier);
        wait_until(
            format!("the pod {namespace}/{pod} of {}", worker.name),
            Duration::from_secs(60),
            async || {
                carrier.apply(&manifest).await.map_err(|error| error.to_string())?;
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
                carrier
                    .kubectl(words)
                    .await
                    .map(drop)
                    .map_err(|error| error.to_string())
            },
        )
        .await
    }

    /// The worker's cable, from its namespace to the pods' bridge of the node that carries it. That node is its gateway, and
    /// leads what comes from the underlay, from the API server that is, to it.
    pub(super) async fn connect_in_pods(
        &self,
        name: &str,
        address: Ipv4Addr,
        api: Ipv4Addr,
        (of, range): (&NodeName, Ipv4Net),
    ) -> Result<()> {
        let gateway = Ipv4Addr::from(u32::from(range.network()) + 1);
        let length = range.prefix_len();
        let port = port(address);
        // The CNI makes its bridge with the node's first pod, and takes one that it finds.
        let cable = format!(
            "ip link show cni0 >/dev/null 2>&1 || {{ ip link add cni0 address 0a:00:00:00:00:01 type bridge && \
             ip addr add {gateway}/{length} dev cni0 && ip link set cni0 up; }} || exit 1\n\
             ip link add {port} type veth peer name eth0 netns {} && ip link set {port} master cni0 up",
            self.namespace(name).display()
        );
        let carrier = format!("--net={}", self.namespace(&of.name).display());
        command::run(&command::argv(["nsenter", &carrier, "sh", "-c", &cable]), None).await?;
        let inside = format!(
            "link set lo up\naddr add {address}/{length} dev eth0\nlink set eth0 up\nroute add default via {gateway}\n"
        );
        self.ip_batch(name, &inside).await?;
        // By the API server's own address: the bridge has those of all clusters'.
        let back = format!("route replace {address} via {} src {api}\n", of.address);
        self.ip_batch(UNDERLAY, &back).await
    }
}

/// The namespace of its workers' pods in the cluster that carries them, as Cozystack calls it.
pub(crate) fn worker_namespace(cluster: &ClusterPlan) -> String {
    format!("tenant-{}", cluster.name)
}

/// The bridge port there that a worker's cable ends in.
pub(super) fn port(address: Ipv4Addr) -> String {
    format!("vm{}", address.octets()[3])
}
