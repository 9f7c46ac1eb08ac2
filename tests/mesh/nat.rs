//! Tests nodes behind NATs on whole clusters. The hub's nodes have public addresses. The nodes of each tenant are behind a NAT router;
//! the second tenant's private network is in the shared address space of carrier-grade NATs (RFC 6598). The tenants reach the hub because
//! they send first, and each other at the endpoints that the hub's nodes see.

use std::{
    slice::from_ref,
    time::{Duration, Instant},
};

use clustermesh_lab::{Cluster, Lab, LabPlan, NatKind, Product, RunningPod, Tunnel, wait_until};
use futures::future::join_all;
use nix::sys::signal::Signal;
use serde_json::{Map, Value, json};

use crate::setup::{self, HUB, PATIENCE, pod, unix_millis, url};

const TENANTS: [&str; 2] = ["tenant-a", "tenant-b"];
const PORTS_FROM_40001: NatKind = NatKind::EndpointIndependent { first_port: 40001 };
const PORTS_FROM_41001: NatKind = NatKind::EndpointIndependent { first_port: 41001 };
/// The UDP port of the echo servers in pods.
const ECHO_PORT: u16 = 9091;
/// The longest wait until two nodes are connected: the hub must have seen the public endpoints of both, and both must try the right one.
const CONNECT: Duration = Duration::from_secs(300);
/// After this time without a packet, a mapping is gone. The routers remove it after 30 s, but the kernel's timer may be late.
const MAPPING_IS_GONE_AFTER: Duration = Duration::from_secs(40);

struct TestEnv<'a> {
    lab: &'a Lab,
    hub: Cluster<'a>,
    tenants: [Cluster<'a>; 2],
    hub_webs: Vec<RunningPod>,
    tenant_webs: [Vec<RunningPod>; 2],
}

#[tokio::test]
async fn nodes_behind_nats_reach_hub_and_each_other() {
    let plan = LabPlan::clusters(&[(HUB, 2), (TENANTS[0], 2), (TENANTS[1], 2)])
        .with_nat(TENANTS[0], "192.168.1.0/24", PORTS_FROM_40001)
        .with_nat(TENANTS[1], "100.64.1.0/24", PORTS_FROM_40001);
    let lab = Lab::start(plan).await.unwrap();
    let product = Product::install(&lab, &[HUB, TENANTS[0], TENANTS[1]], Tunnel::Userspace, &|_| {})
        .await
        .unwrap();
    let [hub, a, b] = [HUB, TENANTS[0], TENANTS[1]].map(|name| lab.cluster(name));
    let env = TestEnv {
        lab: &lab,
        hub_webs: hub.run_web().await.unwrap(),
        tenant_webs: [a.run_web().await.unwrap(), b.run_web().await.unwrap()],
        hub,
        tenants: [a, b],
    };
    product.mesh_up(&product.mesh(&[])).await.unwrap();

    let [a_webs, b_webs] = &env.tenant_webs;
    for tenant in &env.tenant_webs {
        env.assert_reach_each_other(tenant, &env.hub_webs).await;
    }
    env.wait_for_public_endpoints([40001, 40001]).await;
    env.assert_keepalives().await;
    env.assert_reach_each_other(a_webs, b_webs).await;
    env.forged_report_redirects_nothing().await;
    env.changed_mapping_is_followed().await;
    env.endpoint_dependent_mapping_reaches_only_public_nodes().await;
    env.nodes_in_one_private_network_use_private_addresses().await;
    env.nodes_behind_one_to_one_nat_are_reached().await;
}

impl TestEnv<'_> {
    async fn assert_reach_each_other(&self, ours: &[RunningPod], theirs: &[RunningPod]) {
        for one in ours {
            for other in theirs {
                for (from, to) in [(one, other), (other, one)] {
                    let what = format!("an answer of {} on {} to {}", to.name, to.node, from.node);
                    let answer = wait_until(what, CONNECT, async || {
                        let answer = self.lab.http_get(&pod(from), &url(to.ip, 8080)).await;
                        answer.map_err(|error| error.to_string())?
                    })
                    .await
                    .unwrap();
                    assert_eq!((&answer.pod, answer.client_ip), (&to.name, from.ip));
                }
            }
        }
    }

    /// All endpoints that nodes report in their annotations. A node does not report an endpoint that its Peer object already contains. So
    /// the hub's nodes report the endpoints first, but if one of them restarts, a node of a tenant may report an endpoint instead.
    async fn reported(&self) -> Vec<String> {
        let mut nodes = Vec::new();
        for cluster in [&self.hub].into_iter().chain(&self.tenants) {
            let list = setup::json(cluster, &["get", "nodes"]).await;
            nodes.extend(list["items"].as_array().unwrap().clone());
        }
        let annotations = nodes.iter().map(|node| &node["metadata"]["annotations"]);
        let texts = annotations.filter_map(|all| all["kilo.squat.ai/discovered-endpoints"].as_str());
        let mut reported: Vec<String> = texts
            .flat_map(|text| serde_json::from_str::<Map<String, Value>>(text).unwrap())
            .map(|(_, endpoint)| format!("{}:{}", endpoint["IP"].as_str().unwrap(), endpoint["Port"]))
            .collect();
        reported.sort();
        reported.dedup();
        reported
    }

    /// Waits until nodes report the public endpoints of all nodes of the tenants, and no others.
    async fn wait_for_public_endpoints(&self, first_ports: [u16; 2]) {
        let public = |(tenant, first): (&Cluster<'_>, u16)| {
            let address = tenant.plan().nat_address();
            [first, first + 1].map(|port| format!("{address}:{port}"))
        };
        let mut wanted: Vec<String> = self.tenants.iter().zip(first_ports).flat_map(public).collect();
        wanted.sort();
        wait_until("nodes to report the endpoints", PATIENCE, async || {
            let reported = self.reported().await;
            if reported == wanted {
                Ok(())
            } else {
                Err(format!("{reported:?}, not {wanted:?}"))
            }
        })
        .await
        .unwrap();
    }

    /// All Peers in the tenants have a keepalive of 25 s, those in the hub have none.
    async fn assert_keepalives(&self) {
        for (cluster, wanted) in [(&self.hub, 0), (&self.tenants[0], 25), (&self.tenants[1], 25)] {
            let what = format!("keepalives of {wanted} s in {}", cluster.plan().name);
            wait_until(what, PATIENCE, async || {
                let peers = setup::json(cluster, &["get", "peers"]).await;
                let peers = peers["items"].as_array().unwrap();
                let keepalive = |peer: &Value| peer["spec"]["persistentKeepalive"].as_u64().unwrap_or(0);
                if peers.iter().all(|peer| keepalive(peer) == wanted) {
                    Ok(())
                } else {
                    Err(format!("{:?}", peers.iter().map(keepalive).collect::<Vec<_>>()))
                }
            })
            .await
            .unwrap();
        }
    }

    /// A Node of tenant B reports that it sees the nodes of tenant A at an address of B. The hub tries this endpoint after all
    /// others: the report moves no tunnel, and new tunnels find the true endpoint.
    async fn forged_report_redirects_nothing(&self) {
        let [a, b] = &self.tenants;
        let forged = format!("{}:51820", b.plan().nat_address());
        let nodes = setup::json(a, &["get", "nodes"]).await;
        let nodes = nodes["items"].as_array().unwrap().iter();
        let keys = nodes.map(|node| node["metadata"]["annotations"]["kilo.squat.ai/key"].as_str().unwrap());
        let endpoint = json!({"IP": b.plan().nat_address(), "Port": 51820, "Zone": ""});
        let report: Map<String, Value> = keys.map(|key| (key.to_owned(), endpoint.clone())).collect();
        let annotations = json!({"kilo.squat.ai/discovered-endpoints": Value::from(report).to_string()});
        let node =
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "forger", "annotations": annotations}});
        b.apply(&node.to_string()).await.unwrap();
        let ready = r#"{"status":{"conditions":[{"type":"Ready","status":"True"}]}}"#;
        let patch = [
            "patch",
            "node",
            "forger",
            "--subresource=status",
            "--type=merge",
            "-p",
            ready,
        ];
        b.kubectl(patch).await.unwrap();

        let hub_node = &self.hub_webs[0].node;
        let used = endpoints_in_use(&self.peers_of_agent(hub_node, TENANTS[0]).await);
        assert_eq!(used.len(), 2, "{used:?}");
        self.wait_for_candidate(hub_node, TENANTS[0], &forged, |candidates| candidates.last())
            .await;
        self.assert_endpoints_stay(hub_node, TENANTS[0], &used).await;
        let began = Instant::now();
        self.lab.node(hub_node).signal("wg-agent", Signal::SIGKILL).unwrap();
        self.assert_reach_each_other(&self.tenant_webs[0], from_ref(&self.hub_webs[0]))
            .await;
        println!(
            "agent killed while a report is forged: every tunnel answers after {:.1} s",
            began.elapsed().as_secs_f64()
        );
        b.kubectl(["delete", "node", "forger"]).await.unwrap();
    }

    /// The router of a tenant maps its nodes to other ports while a flow runs to the other tenant and one to the hub.
    async fn changed_mapping_is_followed(&self) {
        let probe = self.lab.probe_program().unwrap();
        let (from, targets) = (&self.tenant_webs[0][0], [&self.tenant_webs[1][0], &self.hub_webs[0]]);
        let mut echoes = vec![];
        let mut watches = vec![];
        for target in targets {
            let node = self.lab.node(&target.node);
            echoes.push(
                node.pod_spawn("echo", target.ip, [&*probe, "udp-echo", &format!(":{ECHO_PORT}")])
                    .unwrap(),
            );
            let watch = self.lab.watch_udp(&pod(from), (target.ip, ECHO_PORT).into()).unwrap();
            watch.wait_for_echo_after(0).await.unwrap();
            watches.push(watch);
        }
        let changed = unix_millis();
        self.lab.set_nat(TENANTS[0], PORTS_FROM_41001).await.unwrap();
        for (watch, target) in watches.iter().zip(targets) {
            // Echoes of packets that were on their way do not count.
            let next = wait_until("an echo after the change", CONNECT, async || {
                let later = watch.echo_times().into_iter().find(|at| *at > changed + 500);
                later.ok_or_else(|| "no echo".to_owned())
            })
            .await
            .unwrap();
            println!(
                "flow from {} to {} after a changed mapping: silent for {} ms",
                from.node,
                target.node,
                next - changed
            );
        }
        self.wait_for_public_endpoints([41001, 40001]).await;
    }

    /// The NAT of tenant A uses another public port for each destination. The NAT of tenant B drops the packets from these ports: no node
    /// of B has sent to them. Meanwhile only keepalives pass between the hub and B. They keep the mappings, which a router otherwise
    /// removes.
    async fn endpoint_dependent_mapping_reaches_only_public_nodes(&self) {
        let idle_since = Instant::now();
        self.lab.set_nat(TENANTS[0], NatKind::EndpointDependent).await.unwrap();
        let [a, b] = &self.tenant_webs;
        self.assert_reach_each_other(a, &self.hub_webs).await;
        wait_until(
            "the mesh to report the tunnels between the tenants",
            PATIENCE,
            async || {
                let mesh = setup::json(&self.hub, &["-n", "clustermesh", "get", "clustermesh", "demo"]).await;
                let conditions = mesh["status"]["conditions"].as_array().unwrap().clone();
                let degraded = conditions.iter().find(|one| one["type"] == "Degraded").unwrap();
                let message = degraded["message"].as_str().unwrap_or_default();
                if degraded["reason"] == "TunnelsDown" && message.contains("behind NATs") {
                    println!("{message}");
                    Ok(())
                } else {
                    Err(degraded.to_string())
                }
            },
        )
        .await
        .unwrap();
        let answer = self.lab.http_get(&pod(&a[0]), &url(b[0].ip, 8080)).await.unwrap();
        assert!(answer.is_err(), "{answer:?}");
        tokio::time::sleep(MAPPING_IS_GONE_AFTER.saturating_sub(idle_since.elapsed())).await;
        for web in b {
            let from = pod(&self.hub_webs[0]);
            let answer = self.lab.http_get_until_answered(&from, &url(web.ip, 8080)).await;
            assert_eq!(
                answer.unwrap().pod,
                web.name,
                "after {:.0?} without traffic",
                idle_since.elapsed()
            );
        }
    }

    /// A cable connects both private networks, while the NATs still drop the packets that each tenant sends to the public
    /// addresses of the other. This simulates nodes behind one router that does not forward packets to its own public address. A
    /// new first candidate that does not answer changes no endpoint.
    async fn nodes_in_one_private_network_use_private_addresses(&self) {
        let [a, b] = &self.tenant_webs;
        self.lab.join_private_networks(TENANTS).await.unwrap();
        let began = Instant::now();
        self.assert_reach_each_other(a, b).await;
        println!(
            "from silent public to private endpoints: {:.1} s",
            began.elapsed().as_secs_f64()
        );
        let private: Vec<String> = (1..=2)
            .map(|n| format!("{}:51820", self.tenants[1].plan().node(n).address))
            .collect();
        wait_until("the private endpoints", PATIENCE, async || {
            let used = endpoints_in_use(&self.peers_of_agent(&a[0].node, TENANTS[1]).await);
            if used == private {
                Ok(())
            } else {
                Err(format!("{used:?}"))
            }
        })
        .await
        .unwrap();

        let nodes = ["annotate", "nodes", "--all", "--overwrite"];
        let silent = "203.0.113.9:51820";
        let annotation = format!("kilo.squat.ai/clustermesh-endpoint={silent}");
        self.tenants[1]
            .kubectl(nodes.iter().chain([&&*annotation]))
            .await
            .unwrap();
        self.wait_for_candidate(&a[0].node, TENANTS[1], silent, |candidates| candidates.first())
            .await;
        self.assert_endpoints_stay(&a[0].node, TENANTS[1], &private).await;
        self.assert_reach_each_other(a, b).await;
        let no_endpoint = "kilo.squat.ai/clustermesh-endpoint-";
        self.tenants[1]
            .kubectl(nodes.iter().chain([&no_endpoint]))
            .await
            .unwrap();
        self.lab.separate_private_networks(TENANTS).await.unwrap();
    }

    /// Waits until the agent on a node has this address among the candidates of both peers of a cluster, at the position that
    /// `select` picks.
    async fn wait_for_candidate(
        &self,
        node: &str,
        cluster: &str,
        address: &str,
        select: impl Fn(&[Value]) -> Option<&Value>,
    ) {
        wait_until(format!("the candidate {address} on {node}"), PATIENCE, async || {
            let peers = self.peers_of_agent(node, cluster).await;
            let has_address = |peer: &&Value| select(peer["candidates"].as_array().unwrap()) == Some(&json!(address));
            if peers.iter().filter(has_address).count() == 2 {
                Ok(())
            } else {
                Err(format!("{peers:?}"))
            }
        })
        .await
        .unwrap();
    }

    /// Asserts for 7 s that the agent on a node uses these endpoints. In this time the agent polls its device at least once.
    async fn assert_endpoints_stay(&self, node: &str, cluster: &str, endpoints: &[String]) {
        for _ in 0..7 {
            assert_eq!(endpoints_in_use(&self.peers_of_agent(node, cluster).await), endpoints);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// The peers of a cluster's nodes, as the agent on a node shows them.
    async fn peers_of_agent(&self, node: &str, cluster: &str) -> Vec<Value> {
        let node = self.lab.node(node);
        let page = node.exec(["curl", "-sS", "http://127.0.0.1:9587/debug/state"]).await;
        let state: Value = serde_json::from_str(&page.unwrap().stdout).unwrap();
        let peers = state["peers"].as_object().unwrap().values();
        peers.filter(|peer| peer["cluster"] == cluster).cloned().collect()
    }

    /// A cloud's one-to-one NAT: the node does not know its public address. Packets from outside reach the node even if it
    /// has sent none.
    async fn nodes_behind_one_to_one_nat_are_reached(&self) {
        self.lab.set_nat(TENANTS[0], NatKind::OneToOne).await.unwrap();
        let [a, b] = &self.tenant_webs;
        self.assert_reach_each_other(a, &self.hub_webs).await;
        // All nodes send, so all notice within 20 s that the private addresses no longer answer.
        let began = Instant::now();
        let pairs = a.iter().flat_map(|one| b.iter().map(move |other| (one, other)));
        let both = pairs.flat_map(|(one, other)| [(one, other), (other, one)]);
        let waits = both.map(|(from, to)| self.assert_reach_each_other(from_ref(from), from_ref(to)));
        join_all(waits).await;
        println!(
            "from private to public endpoints: {:.1} s",
            began.elapsed().as_secs_f64()
        );
    }
}

/// The endpoints of these peers, as the agent's last poll of the device found them.
fn endpoints_in_use(peers: &[Value]) -> Vec<String> {
    let endpoint = |peer: &Value| peer["liveEndpoint"].as_str().unwrap_or_default().to_owned();
    let mut used: Vec<String> = peers.iter().map(endpoint).collect();
    used.sort();
    used
}
