//! Tests a mesh of three whole clusters: wg-agent serves the hub, and Kilo serves the two others, with the program `kg` at the
//! path in `KG_BIN`. One of Kilo's clusters has a tunnel between every two nodes (granularity `full`), the other has tunnels
//! between locations (`location`).
//!
//! `cargo xtask test` runs this module only if `KG_BIN` is set.

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use clustermesh_lab::{
    AGENT_NAMESPACE, Answer, Cluster, Granularity, Kilo, Lab, LabPlan, Product, RunningPod, Tunnel, wait_until,
};
use serde_json::Value;

use crate::setup::{HUB, json, pod, unix_millis, url};

const FULL: &str = "tenant-a";
const LOCATION: &str = "tenant-b";
/// The location of each node of the cluster with granularity `location`. `tenant-b-1` leads the first one.
const REGIONS: [(&str, &str); 3] = [("tenant-b-1", "east"), ("tenant-b-2", "east"), ("tenant-b-3", "west")];
/// The Services of other clusters that a cluster uses under another name.
const EGRESS: [(&str, &str); 3] = [
    (
        HUB,
        "[{service: {cluster: tenant-b, namespace: default, name: web}, as: {namespace: default, name: remote-web}}]",
    ),
    (
        FULL,
        "[{service: {cluster: mgmt, namespace: default, name: web}, as: {namespace: default, name: remote-web}}]",
    ),
    (
        LOCATION,
        "[{service: {cluster: tenant-a, namespace: default, name: web}, as: {namespace: default, name: remote-web}}]",
    ),
];
/// The longest wait: kg publishes a new WireGuard address up to 50 s late, and replaces a dead leader after 65 s.
const PATIENCE: Duration = Duration::from_secs(240);
/// kg publishes that it runs, and compares its state with the desired one, every 30 s.
const TWO_CHECK_INS: Duration = Duration::from_secs(65);
/// The UDP port of the echo servers in pods.
const ECHO_PORT: u16 = 9091;

struct TestEnv<'a> {
    lab: &'a Lab,
    kilo: Kilo<'a>,
    product: Product<'a>,
    hub: Cluster<'a>,
    full: Cluster<'a>,
    location: Cluster<'a>,
}

#[tokio::test]
async fn clusters_of_kg_and_of_agents_are_one_mesh() {
    let lab = Lab::start(LabPlan::clusters(&[(HUB, 2), (FULL, 2), (LOCATION, 3)]))
        .await
        .unwrap();
    let env = TestEnv::start(&lab).await;
    env.every_pod_reaches_every_pod().await;
    env.services_are_reached().await;
    env.restarted_or_idle_kg_causes_no_write().await;
    env.renumbered_nodes_are_followed().await;
    env.dead_leader_is_replaced().await;
    env.node_joins_and_leaves().await;
    env.cross_granularity_has_a_peer_for_each_node().await;
    env.policy_mode_keeps_sources_and_closes_ports().await;
    env.deletion_leaves_nothing().await;
}

impl<'a> TestEnv<'a> {
    async fn start(lab: &'a Lab) -> Self {
        let [hub, full, location] = [HUB, FULL, LOCATION].map(|name| lab.cluster(name));
        for (node, region) in REGIONS {
            set_region(&location, node, region).await;
        }
        let kilo = Kilo::new(lab).unwrap();
        kilo.install(&full, Granularity::Full).await.unwrap();
        kilo.install(&location, Granularity::Location).await.unwrap();
        let names = [HUB, FULL, LOCATION];
        let product = Product::install_with_agents_in(lab, &names, &[HUB], Tunnel::Userspace, &|_| {})
            .await
            .unwrap();
        for cluster in [&hub, &full, &location] {
            cluster.run_web_on_each_node().await.unwrap();
        }
        let mesh = product.mesh_with_kilo(&[FULL, LOCATION], &EGRESS);
        hub.apply(&mesh).await.unwrap();
        Self {
            lab,
            kilo,
            product,
            hub,
            full,
            location,
        }
    }

    fn clusters(&self) -> [&Cluster<'a>; 3] {
        [&self.hub, &self.full, &self.location]
    }

    async fn webs(&self) -> Vec<RunningPod> {
        let mut all = vec![];
        for cluster in self.clusters() {
            all.extend(cluster.web_pods().await.unwrap());
        }
        all
    }

    async fn web_on(&self, node: &str) -> RunningPod {
        self.webs().await.into_iter().find(|web| web.node == node).unwrap()
    }

    /// The source addresses that a server may see for the client `from`: the pod's own, or, because the CNI masquerades, those of
    /// the pod's node.
    async fn sources(&self, from: &RunningPod) -> BTreeSet<IpAddr> {
        let cluster = self.lab.node(&from.node).cluster();
        let node = json(&cluster, &["get", "node", &from.node]).await;
        let wireguard = node["metadata"]["annotations"]["kilo.squat.ai/wireguard-ip"].as_str();
        let wireguard = wireguard.and_then(|text| text.split_once('/')?.0.parse().ok());
        let addresses = [Some(from.ip), Some(self.lab.node(&from.node).address()), wireguard];
        addresses.into_iter().flatten().collect()
    }

    async fn every_pod_reaches_every_pod(&self) {
        let webs = self.webs().await;
        for from in &webs {
            for to in &webs {
                let answer = self.answer(from, &url(to.ip, 8080)).await;
                assert_eq!(answer.pod, to.name);
                let sources = self.sources(from).await;
                assert!(sources.contains(&answer.client_ip), "{answer:?}: none of {sources:?}");
            }
        }
    }

    /// Requests a URL until it is answered.
    async fn answer(&self, from: &RunningPod, url: &str) -> Answer {
        wait_until(format!("an answer of {url} to {}", from.node), PATIENCE, async || {
            let answer = self.lab.http_get(&pod(from), url).await;
            answer.map_err(|error| error.to_string())?
        })
        .await
        .unwrap()
    }

    /// Each cluster reaches a Service of another cluster at two addresses: at the remote ClusterIP, through the anchor, and at
    /// the ClusterIP of the mirrored Service `remote-web`.
    async fn services_are_reached(&self) {
        for (ours, theirs) in [
            (&self.hub, &self.location),
            (&self.full, &self.hub),
            (&self.location, &self.full),
        ] {
            let remote = theirs.cluster_ip("default", "web").await.unwrap();
            let mirrored = ours.cluster_ip("default", "remote-web").await.unwrap();
            for from in ours.web_pods().await.unwrap() {
                for service in [remote, mirrored] {
                    let answer = self.answer(&from, &url(service, 80)).await;
                    assert!(answer.node.starts_with(&theirs.plan().name), "{answer:?}");
                }
            }
        }
    }

    /// The controller's writes to Peers in the clusters of kg.
    fn peer_writes(&self) -> Vec<String> {
        let all = [&self.full, &self.location].map(|cluster| cluster.audit().unwrap());
        all.concat()
            .into_iter()
            .filter(|line| line.contains(" peers/"))
            .collect()
    }

    /// How often kg on each node has changed the configuration of its WireGuard device, which resets all sessions there.
    async fn reconfigurations(&self) -> Vec<(String, usize)> {
        let mut counts = vec![];
        for cluster in [&self.full, &self.location] {
            for node in cluster.nodes() {
                let pod = kilo_pod(cluster, node.name()).await;
                let log = cluster
                    .kubectl(["-n", "kube-system", "logs", &pod, "-c", "kg"])
                    .await
                    .unwrap();
                let count = log.stdout.matches("WireGuard configurations are different").count();
                counts.push((node.name().to_owned(), count));
            }
        }
        counts
    }

    /// kg removes its annotations when it stops. Neither that nor its check-ins cause the controller to write a Peer, and at rest kg does
    /// not configure its device anew.
    async fn restarted_or_idle_kg_causes_no_write(&self) {
        let before = self.peer_writes();
        let (from, to) = (self.web_on("mgmt-1").await, self.web_on("tenant-b-2").await);
        let flow = EchoFlow::start(self.lab, &from, &to).await;
        self.location
            .kubectl(["-n", "kube-system", "rollout", "restart", "daemonset/kilo"])
            .await
            .unwrap();
        self.location
            .wait_for_rollout("kube-system", "daemonset/kilo")
            .await
            .unwrap();
        for node in self.location.nodes() {
            let what = format!("kg on {} to check in", node.name());
            wait_until(what, PATIENCE, async || {
                let text = published(&self.location, node.name(), "last-seen").await;
                let seen: u128 = text.parse().map_err(|_| format!("last-seen is {text:?}"))?;
                if seen * 1000 > flow.since { Ok(()) } else { Err(text) }
            })
            .await
            .unwrap();
        }
        flow.end("kg restarted on one node after the other").await;
        self.every_pod_reaches_every_pod().await;
        let reconfigurations = self.reconfigurations().await;
        tokio::time::sleep(TWO_CHECK_INS).await;
        assert_eq!(self.reconfigurations().await, reconfigurations);
        assert_eq!(self.peer_writes(), before);
    }

    /// kg numbers its locations in alphabetic order, so a new first location changes the addresses of the others.
    async fn renumbered_nodes_are_followed(&self) {
        let before = published(&self.location, "tenant-b-3", "wireguard-ip").await;
        let (from, to) = (self.web_on("mgmt-1").await, self.web_on("tenant-b-3").await);
        let flow = EchoFlow::start(self.lab, &from, &to).await;
        set_region(&self.location, "tenant-b-3", "central").await;
        wait_until("kg to renumber the nodes", PATIENCE, async || {
            let now = published(&self.location, "tenant-b-3", "wireguard-ip").await;
            if now != before && !now.is_empty() {
                Ok(())
            } else {
                Err(now)
            }
        })
        .await
        .unwrap();
        flow.end("the node moved to another location, kg renumbered").await;
        self.every_pod_reaches_every_pod().await;
    }

    async fn dead_leader_is_replaced(&self) {
        let (from, to) = (self.web_on("mgmt-1").await, self.web_on("tenant-b-2").await);
        let flow = EchoFlow::start(self.lab, &from, &to).await;
        let leader = self.lab.node("tenant-b-1");
        leader.power_cut().await.unwrap();
        wait_until("the other node to lead the location", PATIENCE, async || {
            let address = published(&self.location, "tenant-b-2", "wireguard-ip").await;
            if address.is_empty() { Err(address) } else { Ok(()) }
        })
        .await
        .unwrap();
        flow.end("the leader of the location lost its power").await;
        self.answer(&from, &url(to.ip, 8080)).await;
        self.answer(&to, &url(from.ip, 8080)).await;
        leader.power_on().await.unwrap();
        self.location
            .wait_for_rollout("kube-system", "daemonset/kilo")
            .await
            .unwrap();
        self.location
            .wait_for_rollout("default", "deployment/web")
            .await
            .unwrap();
        self.every_pod_reaches_every_pod().await;
    }

    async fn node_joins_and_leaves(&self) {
        let node = self.full.join_node().await.unwrap();
        self.full.run_web_on_each_node().await.unwrap();
        self.every_pod_reaches_every_pod().await;
        node.power_cut().await.unwrap();
        self.full.kubectl(["delete", "node", node.name()]).await.unwrap();
        // The node's kubelet cannot confirm that its pods have ended, so their deletion is forced.
        let on_node = format!("--field-selector=spec.nodeName={}", node.name());
        let delete = ["delete", "pods", "--force", &on_node];
        self.full.kubectl(delete).await.unwrap();
        for cluster in [&self.hub, &self.location] {
            wait_until("the deletion of the node's Peers", PATIENCE, async || {
                let peers = cluster.kubectl(["get", "peers", "-o", "name"]).await.unwrap().stdout;
                if peers.contains(node.name()) {
                    Err(peers)
                } else {
                    Ok(())
                }
            })
            .await
            .unwrap();
        }
        self.full.run_web_on_each_node().await.unwrap();
        self.every_pod_reaches_every_pod().await;
    }

    /// The cluster with granularity `location` changes to `cross`.
    async fn cross_granularity_has_a_peer_for_each_node(&self) {
        if !self.kilo.knows(Granularity::Cross).await.unwrap() {
            println!("not run: granularity cross, because this kg does not have it");
            return;
        }
        self.kilo.install(&self.location, Granularity::Cross).await.unwrap();
        for cluster in [&self.hub, &self.full] {
            wait_until("a Peer for each node", PATIENCE, async || {
                let peers = cluster.kubectl(["get", "peers", "-o", "name"]).await.unwrap().stdout;
                if peers.matches("--tenant-b--").count() == REGIONS.len() {
                    Ok(())
                } else {
                    Err(peers)
                }
            })
            .await
            .unwrap();
        }
        self.every_pod_reaches_every_pod().await;
        println!("changed from granularity location to cross");
    }

    /// While kg runs alone, the hub's pods reach the kubelet of `tenant-b-3`. With wg-agent in policy mode they no longer do.
    async fn policy_mode_keeps_sources_and_closes_ports(&self) {
        let from = self.web_on("mgmt-1").await;
        let to = self.web_on("tenant-b-3").await;
        let kubelet = format!("https://{}:10250", self.lab.node("tenant-b-3").address());
        let args = [
            "curl",
            "-sSk",
            "-m",
            "3",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            &kubelet,
        ];
        let reach_kubelet = async || self.lab.run_at(&pod(&from), &args).await.unwrap().stdout;
        wait_until("the open kubelet", PATIENCE, async || {
            let answer = reach_kubelet().await;
            if answer == "000" { Err(answer) } else { Ok(()) }
        })
        .await
        .unwrap();
        self.product.install_policy_agent(&self.location).await.unwrap();
        self.location
            .wait_for_rollout(AGENT_NAMESPACE, "daemonset/wg-agent")
            .await
            .unwrap();
        wait_until("the closed kubelet", PATIENCE, async || {
            let answer = reach_kubelet().await;
            if answer == "000" { Ok(()) } else { Err(answer) }
        })
        .await
        .unwrap();
        wait_until("a pod's own address as source", PATIENCE, async || {
            let answer = self.answer(&to, &url(from.ip, 8080)).await;
            if answer.client_ip == to.ip {
                Ok(())
            } else {
                Err(format!("{answer:?}"))
            }
        })
        .await
        .unwrap();
        self.every_pod_reaches_every_pod().await;
    }

    async fn deletion_leaves_nothing(&self) {
        self.hub
            .kubectl(["-n", "clustermesh", "delete", "clustermesh", "demo"])
            .await
            .unwrap();
        for cluster in self.clusters() {
            let left = cluster.kubectl(["get", "peers", "-o", "name"]).await.unwrap().stdout;
            assert_eq!(left, "", "{}", cluster.plan().name);
        }
    }
}

/// A flow of datagrams between two pods, to measure how long it stops.
struct EchoFlow {
    echoes: clustermesh_lab::EchoWatch,
    _server: clustermesh_lab::Running,
    /// The time of the change, in milliseconds since 1970.
    since: u128,
}

impl EchoFlow {
    async fn start(lab: &Lab, from: &RunningPod, to: &RunningPod) -> Self {
        let probe = lab.probe_program().unwrap();
        let address = format!(":{ECHO_PORT}");
        let server = lab
            .node(&to.node)
            .pod_spawn("echo", to.ip, [&*probe, "udp-echo", &address])
            .unwrap();
        let echoes = lab.watch_udp(&pod(from), (to.ip, ECHO_PORT).into()).unwrap();
        echoes.wait_for_echo_after(0).await.unwrap();
        Self {
            echoes,
            _server: server,
            since: unix_millis(),
        }
    }

    /// Waits until echoes arrive again, and prints the longest pause since the change.
    async fn end(&self, what: &str) {
        let resumed = unix_millis();
        wait_until("the flow to continue", PATIENCE, async || {
            let last = self.echoes.echo_times().last().copied().unwrap_or_default();
            if last > resumed {
                Ok(())
            } else {
                Err("no echo".to_owned())
            }
        })
        .await
        .unwrap();
        let times = self.echoes.echo_times();
        let pauses = times.windows(2).filter(|pair| pair[1] > self.since);
        let longest = pauses.map(|pair| pair[1] - pair[0]).max().unwrap_or_default();
        println!("{what}: longest pause of a flow {longest} ms");
    }
}

async fn set_region(cluster: &Cluster<'_>, node: &str, region: &str) {
    let label = format!("topology.kubernetes.io/region={region}");
    cluster
        .kubectl(["label", "--overwrite", "node", node, &label])
        .await
        .unwrap();
}

/// The value of an annotation of kg; empty if there is none.
async fn published(cluster: &Cluster<'_>, node: &str, annotation: &str) -> String {
    let node = json(cluster, &["get", "node", node]).await;
    let value = &node["metadata"]["annotations"][format!("kilo.squat.ai/{annotation}")];
    value.as_str().unwrap_or_default().to_owned()
}

/// The name of Kilo's pod on a node.
async fn kilo_pod(cluster: &Cluster<'_>, node: &str) -> String {
    let field = format!("--field-selector=spec.nodeName={node}");
    let pods = json(cluster, &["-n", "kube-system", "get", "pods", "-l", "app=kilo", &field]).await;
    let pods: Vec<&Value> = pods["items"].as_array().unwrap().iter().collect();
    let [pod] = pods[..] else { panic!("{pods:?}") };
    pod["metadata"]["name"].as_str().unwrap().to_owned()
}
