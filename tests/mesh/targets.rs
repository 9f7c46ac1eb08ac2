//! Tests on whole clusters that a sandbox reaches its grants and nothing else in a hub without wg-agent. At first the hub's
//! nodes run no agent. Later they run kg (simulated by its annotations), and packets between the hub's pods bypass netfilter.
//! The hub's pod network is Shared, and sandboxes dial the gateways at NodePorts.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use clustermesh_api::names;
use clustermesh_lab::{
    Attacker, Cluster, GATEWAYS, Gateway, Granted, Lab, LabPlan, MESH, NAMESPACE, Node, Product, RunningPod,
    TrafficClient, Tunnel, WEB, wait_until,
};
use k8s_openapi::api::core::v1 as core;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::setup::{HUB, PATIENCE, host, json, pod, url, wireguard};

const SANDBOX: &str = "notebooks";
const GRANT: &str =
    "[{service: {cluster: mgmt, namespace: default, name: web}, as: {namespace: default, name: hub-web}}]";
/// The NodePorts in docs/operations/sandboxes.md.
const NODE_PORTS: [(&str, u16); 2] = [("clustermesh-gateway-0", 31820), ("clustermesh-gateway-1", 31821)];
/// The netfilter hooks that a forwarded packet passes.
const HOOKS: [&str; 3] = ["prerouting", "forward", "postrouting"];

// threat: target-does-not-enforce
#[tokio::test]
async fn sandbox_enters_cluster_without_agents() {
    let start = Instant::now();
    let lab = Lab::start(LabPlan::clusters(&[(HUB, 2), (SANDBOX, 1)])).await.unwrap();
    let after = |step: &str| println!("{:.1} s: {step}", start.elapsed().as_secs_f64());
    after("two clusters");
    let env = TestEnv::up(&lab).await;
    after("the mesh is Ready");
    env.granted_service_answers_and_sees_gateways().await;
    after("every server answered through every gateway");
    env.mesh_conditions_are_good("nodes without any agent").await;
    let _kg = env.simulate_kg_on_nodes().await;
    env.packets_bypass_netfilter_on_nodes().await;
    after("packets bypass netfilter");
    env.replaced_gateway_is_dialled_at_same_node_port().await;
    after("the replaced gateway serves");
    env.mesh_conditions_are_good("nodes with kg").await;
    env.scan_through_each_gateway_finds_only_grants().await;
    after("everything scanned");
    env.hub_has_no_trace_of_sandbox().await;
    after("the end");
}

struct TestEnv<'a> {
    lab: &'a Lab,
    product: Product<'a>,
    hub: Cluster<'a>,
    sandbox: Cluster<'a>,
    hub_webs: Vec<RunningPod>,
    sandbox_web: RunningPod,
}

impl<'a> TestEnv<'a> {
    async fn up(lab: &'a Lab) -> Self {
        let (hub, sandbox) = (lab.cluster(HUB), lab.cluster(SANDBOX));
        let clusters = [HUB, SANDBOX];
        let mut product = Product::install_with_agents_in(lab, &clusters, &[SANDBOX], Tunnel::Userspace, &|_| {})
            .await
            .unwrap();
        product.install_gateways(&["default"]).await.unwrap();
        hub.apply(&node_ports()).await.unwrap();
        let hub_webs = hub.run_web().await.unwrap();
        // The sandbox has one node, so a second server would stay pending.
        sandbox.apply(&WEB.replace("replicas: 2", "replicas: 1")).await.unwrap();
        sandbox.wait_for_rollout("default", "deployment/web").await.unwrap();
        let sandbox_web = sandbox.web_pods().await.unwrap().remove(0);
        let mesh = product.mesh_with(&[SANDBOX], &[(SANDBOX, GRANT)]);
        let shared = mesh.replacen("local: true\n", "local: true\n    podNetwork: Shared\n", 1);
        assert_ne!(mesh, shared);
        product.mesh_up(&shared).await.unwrap();
        Self {
            lab,
            product,
            hub,
            sandbox,
            hub_webs,
            sandbox_web,
        }
    }

    fn clients(&self) -> [TrafficClient; 2] {
        [pod(&self.sandbox_web), host(&self.sandbox_web.node)]
    }

    /// The current grants, as soon as each gateway's Peer in the sandbox has the gateway's NodePort as its endpoint.
    async fn granted(&self) -> Granted {
        wait_until("Peers with the NodePorts of all gateways", PATIENCE, async || {
            let granted = self.product.granted(SANDBOX).await.map_err(|error| error.to_string())?;
            let mut expected = Vec::new();
            for gateway in &granted.gateways {
                let (_, port) = NODE_PORTS.into_iter().find(|(name, _)| gateway.name == *name).unwrap();
                expected.push(SocketAddr::new(self.node_of(gateway).await?.address(), port));
            }
            let endpoints: Vec<SocketAddr> = granted.gateways.iter().map(|gateway| gateway.endpoint).collect();
            if endpoints == expected && endpoints.len() == NODE_PORTS.len() {
                Ok(granted)
            } else {
                Err(format!("{endpoints:?}, expected {expected:?}"))
            }
        })
        .await
        .unwrap()
    }

    /// The node that runs a gateway's pod.
    async fn node_of(&self, gateway: &Gateway) -> Result<Node<'a>, String> {
        let pods = self
            .hub
            .pods(GATEWAYS, "app.kubernetes.io/name=clustermesh-gateway")
            .await;
        let pods = pods.map_err(|error| error.to_string())?;
        let running = pods
            .iter()
            .find(|pod| pod.name == gateway.name && pod.ip == gateway.pod);
        let running = running.ok_or_else(|| format!("no pod of {gateway:?} in {pods:?}"))?;
        Ok(self.lab.node(&running.node))
    }

    /// Requests the mirrored Service from pod and node, until every server has answered through every gateway.
    async fn granted_service_answers_and_sees_gateways(&self) {
        let service = self.sandbox.cluster_ip("default", "hub-web").await.unwrap();
        let gateways: BTreeSet<IpAddr> = self
            .granted()
            .await
            .gateways
            .iter()
            .map(|gateway| gateway.pod)
            .collect();
        let every = self
            .hub_webs
            .iter()
            .flat_map(|web| gateways.iter().map(|source| (web.name.clone(), *source)));
        let every: BTreeSet<(String, IpAddr)> = every.collect();
        for from in self.clients() {
            let mut missing = every.clone();
            let what = format!("every web server to answer {from} through every gateway");
            wait_until(what, PATIENCE, async || {
                let answer = self.lab.http_get_until_answered(&from, &url(service, 80)).await;
                let answer = answer.map_err(|error| error.to_string())?;
                let answer = (answer.pod, answer.client_ip);
                assert!(every.contains(&answer), "{answer:?} is none of {every:?}");
                missing.remove(&answer);
                if missing.is_empty() {
                    Ok(())
                } else {
                    Err(format!("without {missing:?}"))
                }
            })
            .await
            .unwrap();
        }
    }

    /// Installs Kilo's Peer CRD in the hub, and writes kg's annotations to its nodes. The time of the last check-in is renewed until
    /// the result is dropped.
    async fn simulate_kg_on_nodes(&self) -> JoinSet<()> {
        self.hub.install_crds(&["peers"]).await.unwrap();
        let nodes: Api<core::Node> = Api::all(self.hub.client().await.unwrap());
        let mut checking_in = JoinSet::new();
        for (number, node) in (1..).zip(self.hub.nodes()) {
            let name = node.name().to_owned();
            annotate(&nodes, &name, &kg_annotations(&self.hub, &node, number))
                .await
                .unwrap();
            let nodes = nodes.clone();
            checking_in.spawn(async move {
                loop {
                    // kg checks in every 30 s. This test checks in more often, so that a loaded machine makes no node
                    // silent.
                    tokio::time::sleep(Duration::from_secs(5)).await;
                    let annotated = annotate(&nodes, &name, &json!({names::KILO_LAST_SEEN: now()})).await;
                    annotated.unwrap_or_else(|error| println!("the check-in of {name}: {error}"));
                }
            });
        }
        checking_in
    }

    /// The sandbox requests a server through a gateway on another node than the server's. At first netfilter sees the
    /// packets between gateway and server on both nodes; with the eBPF program that redirects these packets, it sees
    /// none. The connection works in both cases.
    async fn packets_bypass_netfilter_on_nodes(&self) {
        let granted = self.granted().await;
        let gateway = &granted.gateways[0];
        let gateway_node = self.node_of(gateway).await.unwrap();
        let server = self
            .hub_webs
            .iter()
            .find(|web| web.node != gateway_node.name())
            .unwrap();
        let nodes = [gateway_node, self.lab.node(&server.node)];
        let port = granted.tcp_ports.first().unwrap();
        let request = async || {
            let url = url(gateway.wireguard, *port);
            wait_until(format!("an answer of {server:?}"), PATIENCE, async || {
                let answer = self.lab.http_get_until_answered(&pod(&self.sandbox_web), &url).await;
                match answer.map_err(|error| error.to_string())? {
                    answer if answer.pod == server.name => Ok(answer.client_ip),
                    answer => Err(format!("{answer:?}")),
                }
            })
            .await
            .unwrap()
        };
        for node in &nodes {
            node.exec_with_stdin(["nft", "-f", "-"], &count_table(gateway.pod, server.ip))
                .await
                .unwrap();
        }
        assert_eq!(request().await, gateway.pod);
        for node in &nodes {
            let seen = take_counts(node).await;
            println!("{} without the eBPF program: {seen:?}", node.name());
            assert!(seen.values().all(|packets| *packets > 0), "{}: {seen:?}", node.name());
        }
        self.hub.bypass_netfilter().await.unwrap();
        for node in &nodes {
            take_counts(node).await;
        }
        assert_eq!(request().await, gateway.pod);
        for node in &nodes {
            let seen = take_counts(node).await;
            println!("{} with the eBPF program: {seen:?}", node.name());
            assert!(seen.values().all(|packets| *packets == 0), "{}: {seen:?}", node.name());
        }
    }

    /// Deletes a gateway's pod, and waits until the sandbox reaches the new pod at the same NodePort. The sandbox's node
    /// keeps sending from one UDP port to this NodePort, so the conntrack entry for the old pod never expires by itself.
    async fn replaced_gateway_is_dialled_at_same_node_port(&self) {
        let before = self.granted().await.gateways.remove(0);
        let node = self.node_of(&before).await.unwrap();
        self.assert_node_port_leads_to(&node, &before).await;
        self.hub
            .kubectl(["-n", GATEWAYS, "delete", "pod", &before.name])
            .await
            .unwrap();
        let after = wait_until("the gateway's new pod in its Peer", PATIENCE, async || {
            let granted = self.product.granted(SANDBOX).await.map_err(|error| error.to_string())?;
            let gateway = granted.gateways.iter().find(|gateway| gateway.name == before.name);
            match gateway.filter(|gateway| gateway.pod != before.pod) {
                Some(gateway) => Ok(granted.through(gateway)),
                None => Err(format!("{granted:?}")),
            }
        })
        .await
        .unwrap();
        let gateway = &after.gateways[0];
        let gateways = self.granted().await.gateways;
        assert!(gateways.contains(gateway), "{gateway:?} is none of {gateways:?}");
        for from in self.clients() {
            self.lab
                .wait_for_open_sockets(&from, &after.tcp_sockets())
                .await
                .unwrap();
        }
        self.assert_node_port_leads_to(&self.node_of(gateway).await.unwrap(), gateway)
            .await;
        // The new pod's interface has no eBPF program yet.
        self.hub.bypass_netfilter().await.unwrap();
    }

    /// Checks that the NodePort has conntrack entries, and that all lead to the gateway's pod and have seen a reply.
    async fn assert_node_port_leads_to(&self, node: &Node<'_>, gateway: &Gateway) {
        let port = gateway.endpoint.port().to_string();
        let list = ["conntrack", "-L", "-p", "udp", "--orig-port-dst", &port];
        let entries = node.exec(list).await.unwrap().stdout;
        let to = format!("src={} ", gateway.pod);
        let leads_to_pod = |line: &str| line.contains(&to) && !line.contains("[UNREPLIED]");
        assert!(
            !entries.is_empty() && entries.lines().all(leads_to_pod),
            "{gateway:?}: {entries}"
        );
    }

    /// Checks that the hub has no Peer and not even the CRD of PeerPolicies, and that on the nodes of its gateways no kernel state
    /// contains the sandbox's name or WireGuard address.
    async fn hub_has_no_trace_of_sandbox(&self) {
        let peers = json(&self.hub, &["get", "peers"]).await;
        assert_eq!(peers["items"], json!([]));
        let kinds = ["api-resources", "-o", "name"];
        let kinds = self.hub.kubectl(kinds).await.unwrap().stdout;
        assert!(
            kinds.contains("sandboxaccesses") && !kinds.contains("peerpolicies"),
            "{kinds}"
        );
        let wireguard_address = wireguard(&self.sandbox, &self.sandbox_web.node).await.to_string();
        let kernel: [&[&str]; 6] = [
            &["ip", "address"],
            &["ip", "rule"],
            &["ip", "route", "show", "table", "all"],
            &["ip", "neighbour"],
            &["nft", "list", "ruleset"],
            &["conntrack", "-L"],
        ];
        for gateway in self.granted().await.gateways {
            let node = self.node_of(&gateway).await.unwrap();
            let mut text = String::new();
            for args in kernel {
                text += &node.exec(args).await.unwrap().stdout;
            }
            // Positive control: the output contains the addresses of the gateway's pod and of the sandbox's node on the underlay.
            let underlay_address = self.lab.node(&self.sandbox_web.node).address().to_string();
            assert!(
                text.contains(&gateway.pod.to_string()) && text.contains(&underlay_address),
                "{text}"
            );
            for word in [SANDBOX, &wireguard_address] {
                assert!(!text.contains(word), "{word} is on {}: {text}", node.name());
            }
        }
    }

    /// Scans from the pod through one gateway and from the node through the other, while the sandbox's administrator routes every
    /// address of the hub into the tunnel.
    async fn scan_through_each_gateway_finds_only_grants(&self) {
        let granted = self.granted().await;
        let mut all = self
            .sandbox
            .foreign_sockets(&[&self.hub], &granted.tcp_sockets())
            .await
            .unwrap();
        granted.add_gateway_sockets(&mut all);
        let attacker = Attacker::new(self.lab, SANDBOX, &self.sandbox_web.node).await.unwrap();
        let addresses = all.keys().map(SocketAddr::ip).collect();
        for (gateway, from) in granted.gateways.iter().zip(self.clients()) {
            let kept_on_underlay = attacker.route_through(&gateway.peer, &addresses).await.unwrap();
            assert_eq!(kept_on_underlay, BTreeSet::new());
            let granted_sockets = granted.through(gateway).tcp_sockets();
            // Establish the session first: until then, WireGuard drops some of a scan's packets.
            self.lab.wait_for_open_sockets(&from, &granted_sockets).await.unwrap();
            let open = self.lab.scan(&from, all.keys().copied()).await.unwrap();
            println!("{} sockets from {from} through {}: {open:?}", all.len(), gateway.name);
            assert_eq!(open, granted_sockets);
        }
    }

    /// Waits until Ready and EgressResolved of the ClusterMesh are True. `with` describes the hub's nodes in the error.
    async fn mesh_conditions_are_good(&self, with: &str) {
        let expected = [("Ready", "True"), ("EgressResolved", "True")];
        let what = format!("good conditions with {with}");
        wait_until(what, PATIENCE, async || {
            let mesh = ["-n", NAMESPACE, "get", "clustermesh", MESH, "-o", "json"];
            let mesh = self.hub.kubectl(mesh).await.map_err(|error| error.to_string())?.stdout;
            let mesh: Value = serde_json::from_str(&mesh).map_err(|error| error.to_string())?;
            let conditions = &mesh["status"]["conditions"];
            let is = |(kind, status): &(&str, &str)| {
                let conditions = conditions.as_array().into_iter().flatten();
                let mut of_kind = conditions.filter(|condition| condition["type"] == *kind);
                of_kind.any(|condition| condition["status"] == *status)
            };
            if expected.iter().all(is) {
                Ok(())
            } else {
                Err(format!("{conditions:#}"))
            }
        })
        .await
        .unwrap();
    }
}

/// The manifest in docs/operations/sandboxes.md, unchanged.
fn node_ports() -> String {
    let path = format!("{}/../docs/operations/sandboxes.md", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let (_, text) = text.split_once("\n## Gateways at a NodePort\n").unwrap();
    let (_, text) = text.split_once("\n```yaml\n").unwrap();
    text.split_once("\n```\n").unwrap().0.to_owned()
}

fn kg_annotations(cluster: &Cluster<'_>, node: &Node<'_>, number: u8) -> Value {
    let wireguard = cluster.plan().wireguard_cidr;
    let wireguard_address = wireguard.hosts().nth(number.into()).unwrap();
    json!({
        names::KILO_DISCOVERED_ENDPOINTS: "{}",
        names::KILO_ENDPOINT: format!("{}:51820", node.address()),
        names::KILO_GRANULARITY: "full",
        names::KILO_INTERNAL_IP: format!("{}/24", node.address()),
        names::KILO_KEY: STANDARD.encode([number; 32]),
        names::KILO_LAST_SEEN: now(),
        names::KILO_WIREGUARD_IP: format!("{wireguard_address}/{}", wireguard.prefix_len()),
    })
}

async fn annotate(nodes: &Api<core::Node>, node: &str, annotations: &Value) -> kube::Result<()> {
    let patch = Patch::Merge(json!({"metadata": {"annotations": annotations}}));
    nodes.patch(node, &PatchParams::default(), &patch).await.map(drop)
}

/// Seconds since 1970.
fn now() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    now.as_secs().to_string()
}

/// An nftables table that counts the packets between two addresses at each hook, before all other chains.
fn count_table(one: IpAddr, other: IpAddr) -> String {
    let counts = HOOKS.map(|hook| {
        format!(
            "counter {hook} {{\n}}\nchain {hook} {{\ntype filter hook {hook} priority -500;\n\
             ip saddr {{ {one}, {other} }} ip daddr {{ {one}, {other} }} counter name {hook}\n}}\n"
        )
    });
    format!("table ip hook_counters {{\n{}}}\n", counts.concat())
}

/// The packets that were counted since the last call, by hook.
async fn take_counts(node: &Node<'_>) -> BTreeMap<String, u64> {
    let args = ["nft", "-j", "reset", "counters", "table", "ip", "hook_counters"];
    let printed = node.exec(args).await.unwrap().stdout;
    let printed: Value = serde_json::from_str(&printed).unwrap();
    let counters = printed["nftables"]
        .as_array()
        .unwrap()
        .iter()
        .map(|object| &object["counter"]);
    let counters =
        counters.filter_map(|counter| Some((counter["name"].as_str()?.to_owned(), counter["packets"].as_u64()?)));
    let counted: BTreeMap<String, u64> = counters.collect();
    assert_eq!(counted.len(), HOOKS.len(), "{printed}");
    counted
}
