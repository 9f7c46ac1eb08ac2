//! Tests a member whose nodes run kg, with agents in policy mode: location leaders, restarts of kg, and nodes on which kg
//! has died. The test annotates the Nodes as kg does.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use clustermesh_api::names;
use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::test_env::{LATER, SOON, TestEnv, key};
use k8s_openapi::{api::core::v1::Node, jiff::Timestamp};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use crate::writes::{audit, until_passes};

/// The Peer of the first leader in the east.
const LEADER: &str = "prod--tenant-a--tenant-a-1";
/// The Peer of the other node in the east, which is elected when the leader's kg dies.
const ELECTED: &str = "prod--tenant-a--tenant-a-2";
/// The Peer of the only node in the west.
const WEST: &str = "prod--tenant-a--tenant-a-3";

/// A node that kg serves.
struct KgNode {
    cluster: &'static str,
    /// The number of the cluster. The node's address is 198.51.m.n, its pod network 10.m.n.0/24.
    m: u8,
    /// The number of the node.
    n: u8,
    granularity: &'static str,
    region: &'static str,
    /// Empty if another node is the leader of its location.
    wireguard_ip: &'static str,
    /// Whether an agent in policy mode also runs on the node.
    has_agent: bool,
}

impl KgNode {
    fn name(&self) -> String {
        format!("{}-{}", self.cluster, self.n)
    }

    fn address(&self) -> String {
        format!("198.51.{}.{}", self.m, self.n)
    }

    /// The annotations that kg writes, and removes on SIGTERM.
    fn annotations(&self) -> Value {
        let address = self.address();
        json!({
            names::KILO_ENDPOINT: format!("{address}:51820"),
            names::KILO_GRANULARITY: self.granularity,
            names::KILO_INTERNAL_IP: format!("{address}/24"),
            names::KILO_KEY: key(self.m, self.n),
            names::KILO_LAST_SEEN: Timestamp::now().as_second().to_string(),
            names::KILO_WIREGUARD_IP: self.wireguard_ip,
            names::KILO_DISCOVERED_ENDPOINTS: "{}",
        })
    }

    async fn annotate(&self, client: &Client, annotations: &Value) {
        let patch = Patch::Merge(json!({"metadata": {"annotations": annotations}}));
        let nodes: Api<Node> = Api::all(client.clone());
        nodes
            .patch(&self.name(), &PatchParams::default(), &patch)
            .await
            .unwrap();
    }

    async fn create(&self, client: &Client) {
        let nodes: Api<Node> = Api::all(client.clone());
        let pods = format!("10.{}.{}.0/24", self.m, self.n);
        let mut annotations = json!({"kilo.squat.ai/cni-compatibility-ip": ""});
        if self.has_agent {
            let agent = json!({"version": env!("CARGO_PKG_VERSION"), "mode": "policy"});
            annotations[names::NODE_AGENT] = json!(agent.to_string());
        }
        let node = json!({
            "metadata": {
                "name": self.name(), "annotations": annotations, "labels": {names::LABEL_REGION: self.region},
            },
            "spec": {"podCIDR": pods, "podCIDRs": [pods]},
        });
        let node = serde_json::from_value(node).unwrap();
        nodes.create(&PostParams::default(), &node).await.unwrap();
        let status = json!({"status": {
            "addresses": [{"type": "InternalIP", "address": self.address()}],
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": null, "lastTransitionTime": null}],
        }});
        nodes
            .patch_status(&self.name(), &PatchParams::default(), &Patch::Merge(&status))
            .await
            .unwrap();
    }
}

/// The nodes of both clusters.
struct Fleet {
    nodes: Vec<Arc<KgNode>>,
    /// A client of each cluster.
    clients: BTreeMap<&'static str, Client>,
    /// The names of the nodes on which kg runs now.
    checking_in: Arc<Mutex<BTreeSet<String>>>,
}

impl Fleet {
    async fn start(env: &TestEnv) -> Self {
        let kg = |cluster, m, n, granularity, region, wireguard_ip, has_agent| {
            Arc::new(KgNode {
                cluster,
                m,
                n,
                granularity,
                region,
                wireguard_ip,
                has_agent,
            })
        };
        let nodes = vec![
            kg("mgmt", 1, 1, "full", "", "100.64.1.1/24", false),
            kg("mgmt", 1, 2, "full", "", "100.64.1.2/24", false),
            kg("tenant-a", 2, 1, "location", "east", "100.64.2.1/24", true),
            kg("tenant-a", 2, 2, "location", "east", "", true),
            kg("tenant-a", 2, 3, "location", "west", "100.64.2.3/24", true),
        ];
        let mut clients = BTreeMap::new();
        for cluster in ["mgmt", "tenant-a"] {
            clients.insert(cluster, env.client(cluster).await);
        }
        let fleet = Self {
            nodes,
            clients,
            checking_in: Arc::default(),
        };
        for kg in &fleet.nodes {
            kg.create(&fleet.clients[kg.cluster]).await;
            fleet.start_kg(&kg.name()).await;
        }
        fleet.check_in();
        fleet
    }

    fn kg(&self, name: &str) -> &Arc<KgNode> {
        self.nodes.iter().find(|kg| kg.name() == name).unwrap()
    }

    /// Starts a task that checks in for each node on which kg runs. kg checks in every 30 s; the task does so every 5 s, so that no
    /// node becomes silent on a loaded machine.
    fn check_in(&self) {
        let (nodes, clients) = (self.nodes.clone(), self.clients.clone());
        let checking_in = Arc::clone(&self.checking_in);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_secs(5)).await;
                let running = checking_in.lock().unwrap().clone();
                for kg in nodes.iter().filter(|kg| running.contains(&kg.name())) {
                    let now = json!({names::KILO_LAST_SEEN: Timestamp::now().as_second().to_string()});
                    kg.annotate(&clients[kg.cluster], &now).await;
                }
            }
        });
    }

    async fn start_kg(&self, name: &str) {
        let kg = self.kg(name);
        kg.annotate(&self.clients[kg.cluster], &kg.annotations()).await;
        self.checking_in.lock().unwrap().insert(kg.name());
    }

    /// Simulates SIGKILL: the process is gone, its annotations remain.
    fn kill_kg(&self, name: &str) {
        self.checking_in.lock().unwrap().remove(name);
    }

    /// Simulates SIGTERM: kg removes its annotations.
    async fn stop_kg(&self, name: &str) {
        self.kill_kg(name);
        let kg = self.kg(name);
        let mut gone = kg.annotations();
        let values = gone.as_object_mut().unwrap().values_mut();
        values.for_each(|value| *value = Value::Null);
        kg.annotate(&self.clients[kg.cluster], &gone).await;
    }
}

/// Waits until exactly these nodes are held.
async fn until_held(env: &TestEnv, want: &[&str]) {
    wait_until(format!("{want:?} to be held"), SOON, async || {
        let state = env.page("/debug/state").await;
        let state: Value = serde_json::from_str(&state).map_err(|error| error.to_string())?;
        let clusters = state["meshes"][format!("{NAMESPACE}/prod")]["clusters"].as_object();
        let held = clusters
            .into_iter()
            .flatten()
            .flat_map(|(_, row)| row["held"].as_array());
        let held: Vec<&str> = held
            .flatten()
            .filter_map(|held| held.as_str()?.split(':').next())
            .collect();
        if held == want {
            Ok(())
        } else {
            Err(format!("{held:?} in {state}"))
        }
    })
    .await
    .unwrap();
}

async fn allowed_ips_of(env: &TestEnv, peer: &str) -> Vec<String> {
    let mut peers = env.peers("mgmt").await;
    peers.remove(peer).map(|peer| peer.spec.allowed_ips).unwrap_or_default()
}

#[tokio::test]
async fn kg_restart_writes_nothing_and_dead_leader_is_replaced() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    let fleet = Fleet::start(&env).await;
    let mut mesh = env.mesh();
    let hosts = [1, 2, 3].map(|n| format!("198.51.2.{n}/32"));
    let networks = ["10.2.0.0/16".to_owned(), "100.64.2.0/24".to_owned()];
    mesh["spec"]["clusters"][1]["allowedNetworks"] = json!([&networks[..], &hosts[..]].concat());
    let _controller = env.start_controller().await;
    env.apply_mesh(&mesh).await;

    // Step 1: agents in policy mode do not own the tunnel, so the leader's Peer has the allowed IPs of its whole location. In a member that
    // kg serves, a Peer does not contain the InternalIP that is also its endpoint. The status reports the nodes with such an InternalIP.
    env.until_peers("mgmt", &[LEADER, WEST], SOON).await;
    let of_leader = ["10.2.1.0/24", "10.2.2.0/24", "100.64.2.1/32", "198.51.2.2/32"];
    let of_west = ["10.2.3.0/24", "100.64.2.3/32"];
    env.until_condition("Ready", "True/Meshed", SOON).await;
    assert_eq!(allowed_ips_of(&env, LEADER).await, of_leader);
    assert_eq!(allowed_ips_of(&env, WEST).await, of_west);
    let message = env.until_condition("Degraded", "True/HostNetworkNotServed", SOON).await;
    let unserved = "in cluster \"mgmt\" Nodes tenant-a-1, tenant-a-3 of cluster \"tenant-a\"";
    assert!(message.contains(unserved), "{message}");
    let status = env.get_mesh().await.unwrap().status.unwrap();
    assert_eq!(status.clusters[1].anchored, []);

    // Step 2: kg restarts on three nodes, among them both leaders of tenant-a. Neither the stop nor the start causes a write.
    let restarting = ["mgmt-1", "tenant-a-1", "tenant-a-3"];
    until_passes(&env, 2).await;
    let status = async || env.get_mesh().await.unwrap().status;
    let before = (status().await, audit(&env));
    for name in restarting {
        fleet.stop_kg(name).await;
    }
    until_held(&env, &restarting).await;
    until_passes(&env, 3).await;
    assert_eq!((status().await, audit(&env)), before);
    for name in restarting {
        fleet.start_kg(name).await;
    }
    until_held(&env, &[]).await;
    until_passes(&env, 3).await;
    assert_eq!((status().await, audit(&env)), before);

    // Step 3: kg stops on tenant-a-3. The status reports it after half a minute. The allowed IPs stay as they are: no other Peer gets
    // the InternalIP of this node. kg is also killed on tenant-a-1: step 4 waits until that node is silent.
    fleet.stop_kg("tenant-a-3").await;
    fleet.kill_kg("tenant-a-1");
    until_held(&env, &["tenant-a-3"]).await;
    let message = env.until_condition("Degraded", "True/NodesHeld", LATER).await;
    assert!(
        message.contains("Node tenant-a-3 of cluster \"tenant-a\": NodeNoPublicKey"),
        "{message}"
    );
    assert_eq!(allowed_ips_of(&env, LEADER).await, of_leader);
    assert_eq!(allowed_ips_of(&env, WEST).await, of_west);

    // Step 4: kg is dead on the leader, tenant-a-1. The other node of its location is elected and publishes the leader's WireGuard address.
    // After 65 seconds without a check-in, the Peer of the elected node replaces that of the leader. The status reports the silent node.
    env.annotate(
        "tenant-a",
        "tenant-a-2",
        names::KILO_WIREGUARD_IP,
        Some("100.64.2.1/24"),
    )
    .await;
    env.until_peers("mgmt", &[ELECTED, WEST], LATER).await;
    let of_elected = ["10.2.1.0/24", "10.2.2.0/24", "100.64.2.1/32", "198.51.2.1/32"];
    assert_eq!(allowed_ips_of(&env, ELECTED).await, of_elected);
    assert_eq!(allowed_ips_of(&env, WEST).await, of_west);
    let silent = "kg has not checked in for 65 seconds for Node tenant-a-1 of cluster \"tenant-a\"";
    wait_until("the silent node in the status", SOON, async || {
        match env.condition("Degraded").await {
            Some((_, message)) if message.contains(silent) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();

    // Step 5: kg starts again on tenant-a-3 and on tenant-a-1, the former leader. The elected node remains the leader.
    fleet.start_kg("tenant-a-3").await;
    let returned = json!({
        names::KILO_LAST_SEEN: Timestamp::now().as_second().to_string(),
        names::KILO_WIREGUARD_IP: "",
    });
    fleet
        .kg("tenant-a-1")
        .annotate(&fleet.clients["tenant-a"], &returned)
        .await;
    fleet.checking_in.lock().unwrap().insert("tenant-a-1".to_owned());
    wait_until("no silent node in the status", SOON, async || {
        match env.condition("Degraded").await {
            Some((state, message)) if state == "True/HostNetworkNotServed" && !message.contains("checked in") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
    assert_eq!(allowed_ips_of(&env, ELECTED).await, of_elected);
}
