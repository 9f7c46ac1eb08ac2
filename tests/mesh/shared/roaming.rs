//! An exported pod that moves to another node with its address, as with kube-ovn. The lab's CNI cannot do this, so both nodes have a
//! network namespace with the address and a web server that names its node, and the test writes the Pod object.

use std::{net::IpAddr, time::Instant};

use clustermesh_lab::{Lab, Running, RunningPod, wait_until};
use serde_json::json;

use crate::setup::{HUB, MEMBER, PATIENCE, json, pod, url};

/// In the hub's pod range, and outside the podCIDRs of its two nodes.
const ADDRESS: &str = "10.10.200.7";
const POD: &str = "roaming";

pub(super) struct Roaming<'a> {
    lab: &'a Lab,
    _servers: Vec<Running>,
}

impl<'a> Roaming<'a> {
    /// Starts the servers. Stops the hub's kubelets, because they would start containers for the Pod object, which names one of
    /// their nodes.
    pub(super) async fn start(lab: &'a Lab) -> Self {
        let make = format!(
            "ip netns add {POD} && ip link add roam0 type veth peer name eth0 netns {POD} && ip link set roam0 up && \
             echo 1 > /proc/sys/net/ipv4/conf/roam0/proxy_arp && ip route add {ADDRESS} dev roam0 && \
             ip -n {POD} addr add {ADDRESS}/32 dev eth0 && ip -n {POD} link set eth0 up && \
             ip -n {POD} route add default via 169.254.1.1 dev eth0 onlink && kill -STOP $(pidof kubelet)"
        );
        let probe = lab.directory().join("roaming-probe");
        std::fs::copy(clustermesh_lab::workspace_program("lab-probe").unwrap(), &probe).unwrap();
        let mut servers = Vec::new();
        for node in lab.cluster(HUB).nodes() {
            node.exec(["sh", "-c", &make]).await.unwrap();
            let name = format!("NODE={}", node.name());
            let serve = ["env", &name, &probe.display().to_string(), "serve", ":8080"];
            let mut server = node.pod_spawn(POD, ADDRESS.parse().unwrap(), serve).unwrap();
            server.wait_for_log("serving on", PATIENCE).await.unwrap();
            servers.push(server);
        }
        Self { lab, _servers: servers }
    }

    /// Continues the kubelets.
    pub(super) async fn end(self) {
        for node in self.lab.cluster(HUB).nodes() {
            node.exec(["sh", "-c", "kill -CONT $(pidof kubelet)"]).await.unwrap();
        }
    }

    async fn delete_pod(&self) {
        let delete = [
            "delete",
            "pod",
            POD,
            "--force",
            "--grace-period=0",
            "--ignore-not-found",
        ];
        self.lab.cluster(HUB).kubectl(delete).await.unwrap();
    }

    /// Replaces the Pod object by one on `node`. Returns the time at which the new object has its address.
    async fn place(&self, node: &str) -> Instant {
        self.delete_pod().await;
        let hub = self.lab.cluster(HUB);
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": POD, "namespace": "default", "labels": {"app": "web"}},
            "spec": {"nodeName": node, "serviceAccountName": "web", "containers": [{"name": "web", "image": "lab.local/box:1"}]},
        });
        hub.apply(&pod.to_string()).await.unwrap();
        let status = json!({"status": {"phase": "Running", "podIP": ADDRESS, "podIPs": [{"ip": ADDRESS}]}});
        let status = status.to_string();
        let patch = [
            "patch",
            "pod",
            POD,
            "--subresource=status",
            "--type=merge",
            "-p",
            &status,
        ];
        hub.kubectl(patch).await.unwrap();
        Instant::now()
    }

    /// Waits until the address is an allowed IP of the Peers of exactly these nodes, in the member.
    async fn wait_for_peers(&self, nodes: &[&str]) {
        let member = self.lab.cluster(MEMBER);
        let want: Vec<String> = nodes.iter().map(|node| format!("demo--{HUB}--{node}")).collect();
        wait_until(
            format!("{ADDRESS}/32 in the Peers of {nodes:?}"),
            PATIENCE,
            async || {
                let peers = json(&member, &["get", "peers"]).await;
                let peers = peers["items"].as_array().unwrap().iter();
                let exported = peers.filter(|peer| {
                    let mut allowed_ips = peer["spec"]["allowedIPs"].as_array().unwrap().iter();
                    allowed_ips.any(|net| *net == format!("{ADDRESS}/32"))
                });
                let names: Vec<String> = exported
                    .map(|peer| peer["metadata"]["name"].as_str().unwrap().to_owned())
                    .collect();
                if names == want {
                    Ok(())
                } else {
                    Err(format!("{names:?}"))
                }
            },
        )
        .await
        .unwrap();
    }

    /// Waits until this node answers the client, and returns the source address that the node's server sees.
    async fn wait_for_answer(&self, from: &RunningPod, node: &str) -> IpAddr {
        let url = url(ADDRESS, 8080);
        wait_until(format!("{node} to answer at {ADDRESS}"), PATIENCE, async || match self
            .lab
            .http_get(&pod(from), &url)
            .await
            .map_err(|error| error.to_string())?
        {
            Ok(answer) if answer.node == node => Ok(answer.client_ip),
            other => Err(format!("{other:?}")),
        })
        .await
        .unwrap()
    }

    /// The pod starts on the anchor and moves to the other node. Then the member's packets go to that node and not to the anchor. When
    /// the pod is gone, they go to the anchor again.
    pub(super) async fn address_follows_pod_and_bypasses_anchor(&self, from: &RunningPod, anchor: &str, other: &str) {
        let placed = self.place(anchor).await;
        self.wait_for_peers(&[anchor]).await;
        self.wait_for_answer(from, anchor).await;
        println!(
            "exported pod: answered {} ms after its address",
            placed.elapsed().as_millis()
        );

        let moved = self.place(other).await;
        self.wait_for_answer(from, other).await;
        println!(
            "moved pod: the new node answered {} ms after its address",
            moved.elapsed().as_millis()
        );
        self.wait_for_peers(&[other]).await;
        println!(
            "moved pod: Peers complete {} ms after its address",
            moved.elapsed().as_millis()
        );

        let anchor_node = self.lab.node(anchor);
        let filter = format!("host {ADDRESS}");
        let capture = anchor_node
            .capture_on_all_links("roaming-bypass", &filter)
            .await
            .unwrap();
        for _ in 0..5 {
            // The node of an exported pod masquerades packets to it (docs/design/flows.md, flow 7).
            let source = self.wait_for_answer(from, other).await;
            assert_eq!(source, self.lab.node(other).address());
        }
        let captured = capture.stop().await.unwrap();
        assert_eq!(
            captured.packets("").await.unwrap(),
            Vec::<String>::new(),
            "packets on the anchor"
        );

        // A positive control: without the Pod, packets to its address go to the anchor, as to every
        // address of the shared pod network that no exported pod has.
        let capture = anchor_node
            .capture_on_all_links("roaming-anchor", &filter)
            .await
            .unwrap();
        self.delete_pod().await;
        self.wait_for_peers(&[]).await;
        self.wait_for_answer(from, anchor).await;
        let captured = capture.stop().await.unwrap();
        let requests = captured.packets("tcp dst port 8080").await.unwrap();
        assert!(!requests.is_empty(), "the capture on the anchor contains requests");
    }
}
