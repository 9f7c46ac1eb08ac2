//! Tests that fifty nodes can join a member and leave again, as with an autoscaler, while a flow between two other nodes
//! loses no packet. API servers, controller and agents are real; each node is a network namespace.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::fs::MetadataExt,
    path::PathBuf,
    time::Instant,
};

use clustermesh_api::{annotations::AgentStatus, names::NODE_AGENT, policy::PeerPolicy};
use clustermesh_lab::{Running, wait_until};
use clustermesh_tests::{
    agent::{AS_AGENT, agent_program},
    test_env::{LATER, SOON, TestEnv},
};
use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use nix::sys::signal::Signal;
use serde_json::json;

const CLUSTERS: [&str; 2] = ["mgmt", "tenant-a"];
/// The number of nodes that join and leave.
const JOINING: u8 = 50;
/// The number in the name of the first of these nodes.
const FIRST: u8 = 101;
/// How many nodes are started at the same time.
const CONCURRENCY: usize = 8;

/// A node with a running agent.
struct AgentNode {
    cluster: &'static str,
    name: String,
    /// An address in its pod network, from which the test pings.
    pod: String,
    agent: Running,
    interface: String,
    /// The agent's lock and sockets, in a directory that all namespaces share.
    shared_files: [String; 3],
}

impl Drop for AgentNode {
    fn drop(&mut self) {
        for file in &self.shared_files {
            let _ = std::fs::remove_file(file);
        }
    }
}

struct Nodes<'a> {
    env: &'a TestEnv,
    files: tempfile::TempDir,
}

#[tokio::test]
async fn fifty_nodes_join_and_leave_without_loss_for_others() {
    let env = TestEnv::start(&CLUSTERS).await;
    let nodes = Nodes {
        env: &env,
        files: tempfile::tempdir().expect("a directory"),
    };
    let (hub, member) = (nodes.start(0, 1).await, nodes.start(1, 1).await);
    let _controller = env.start_controller().await;
    env.apply_mesh(&env.mesh()).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;
    let reached = async || {
        let words = ["ping", "-n", "-c1", "-W5", "-I", &hub.pod, &member.pod];
        let output = env
            .lab
            .node(&hub.name)
            .try_exec(words)
            .await
            .map_err(|error| error.to_string())?;
        output.status.success().then_some(()).ok_or(output.stdout)
    };
    wait_until("the two nodes to reach each other", SOON, reached)
        .await
        .expect("a reply");

    // A queue of 500 packets, as a TUN device has, holds the packets of 25 s, during which a loaded machine may stop an agent.
    let words = ["ping", "-n", "-i", "0.05", "-I", &hub.pod, &member.pod];
    let mut flow = env.lab.node(&hub.name).spawn("flow", words).expect("ping");
    flow.wait_for_log("icmp_seq=10 ", SOON).await.expect("ten replies");

    let began = Instant::now();
    let joining = stream::iter(FIRST..FIRST + JOINING).map(|n| nodes.start(1, n));
    let joined: Vec<AgentNode> = joining.buffer_unordered(CONCURRENCY).collect().await;
    println!("{JOINING} nodes started in {:.1} s", began.elapsed().as_secs_f64());
    let all = usize::from(JOINING) + 1;
    nodes.wait_for_handshakes(&hub, all).await;
    println!(
        "each has a tunnel to the hub's node after {:.1} s",
        began.elapsed().as_secs_f64()
    );

    nodes.print_rate_of_reports(CLUSTERS[1], all).await;

    let began = Instant::now();
    for node in &joined {
        env.remove_node(node.cluster, &node.name).await;
    }
    nodes.wait_for_handshakes(&hub, 1).await;
    println!("all left after {:.1} s", began.elapsed().as_secs_f64());
    drop(joined);

    flow.signal(Signal::SIGINT).expect("ping runs");
    flow.wait_for_exit(SOON).await.expect("ping ends");
    let log = flow.log();
    // An ICMP error has the number of its packet too, but is no reply. Replies may be on their way when ping ends.
    let replies = log.lines().filter(|line| line.contains("bytes from"));
    let numbers = replies.filter_map(|line| line.split_once("icmp_seq=")?.1.split(' ').next()?.parse().ok());
    let numbers: BTreeSet<u32> = numbers.collect();
    let last = *numbers.last().expect("a reply");
    let missing: Vec<u32> = (1..=last).filter(|number| !numbers.contains(number)).collect();
    println!("the flow between the other nodes: {last} replies");
    assert_eq!(missing, Vec::<u32>::new(), "packets without a reply");
}

impl Nodes<'_> {
    /// Adds node `n` of a cluster, with a running agent. `m` is the cluster's position.
    async fn start(&self, m: usize, n: u8) -> AgentNode {
        let (cluster, m) = (CLUSTERS[m], m + 1);
        let (name, address) = (format!("{cluster}-{n}"), format!("172.30.{m}.{}", n + 10));
        let (pods, pod) = (format!("10.{m}.{n}.0/24"), format!("10.{m}.{n}.5"));
        let host = self
            .env
            .lab
            .add_host(&name, address.parse().expect("an address"))
            .await
            .expect("a host");
        host.exec([agent_program(), "prepare"]).await.expect("prepare the node");
        let words = ["ip", "addr", "add", &format!("{pod}/32"), "dev", "lo"];
        host.exec(words).await.expect("an address");
        self.create_node(cluster, &name, &address, &pods).await;

        let kubeconfig = self.file(&format!("{name}.kubeconfig"));
        let inside = self.env.lab.cluster(cluster).inside_kubeconfig().expect("a kubeconfig");
        std::fs::write(&kubeconfig, inside).expect("write a kubeconfig");
        let netns = std::fs::metadata(host.netns()).expect("the namespace").ino();
        let interface = format!("k{m}x{n}p{}", std::process::id());
        let shared_files = [
            format!("{interface}.sock"),
            format!("wg-agent-{netns}.lock"),
            format!("wg-agent-{netns}.status"),
        ];
        let flags = [
            ("--node-name", name.clone()),
            ("--kubeconfig", kubeconfig.display().to_string()),
            ("--interface", interface.clone()),
            ("--backend", "userspace".to_owned()),
            ("--wireguard-cidr", format!("100.64.{m}.0/24")),
            ("--key-file", self.file(&name).join("key").display().to_string()),
        ];
        let mut words: Vec<String> = AS_AGENT.map(str::to_owned).into();
        words.push(agent_program().to_owned());
        words.extend(flags.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]));
        let agent = host.spawn("agent", words).expect("start the agent");
        AgentNode {
            cluster,
            name,
            pod,
            agent,
            interface,
            shared_files: shared_files.map(|file| format!("/var/run/wireguard/{file}")),
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    async fn create_node(&self, cluster: &str, name: &str, address: &str, pods: &str) {
        let nodes: Api<Node> = Api::all(self.env.client(cluster).await);
        let node = json!({"metadata": {"name": name}, "spec": {"podCIDR": pods, "podCIDRs": [pods]}});
        let node = serde_json::from_value(node).expect("a Node");
        nodes
            .create(&PostParams::default(), &node)
            .await
            .expect("create a Node");
        let status = json!({"status": {
            "addresses": [{"type": "InternalIP", "address": address}],
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": null, "lastTransitionTime": null}],
        }});
        let patch = Patch::Merge(&status);
        nodes
            .patch_status(name, &PatchParams::default(), &patch)
            .await
            .expect("the Node's status");
    }

    /// Changes the policies of a cluster, so that each agent reports a new revision, and prints the largest number of
    /// reports within one second.
    async fn print_rate_of_reports(&self, cluster: &str, agents: usize) {
        let before = self.reports(cluster).await;
        assert_eq!(before.len(), agents, "{before:?}");
        let policy: PeerPolicy = serde_json::from_value(json!({
            "metadata": {"name": "further"}, "spec": {"source": "further", "sources": [], "networks": [], "allow": []},
        }))
        .expect("a PeerPolicy");
        let policies: Api<PeerPolicy> = Api::all(self.env.client(cluster).await);
        let created = policies.create(&PostParams::default(), &policy).await;
        created.expect("create the PeerPolicy");
        let changed = Instant::now();
        let mut reported: BTreeMap<String, f64> = BTreeMap::new();
        wait_until("all agents to report the new policies", LATER, async || {
            for (node, revision) in self.reports(cluster).await {
                if before.get(&node) != Some(&revision) {
                    reported.entry(node).or_insert(changed.elapsed().as_secs_f64());
                }
            }
            let count = reported.len();
            (count == agents).then_some(()).ok_or(format!("{count} of {agents}"))
        })
        .await
        .expect("the reports");
        let times: Vec<f64> = reported.into_values().collect();
        let within_a_second = |from: &f64| times.iter().filter(|at| (*from..from + 1.0).contains(*at)).count();
        println!(
            "{agents} agents reported within {:.1} s, at most {} in a second",
            times.iter().copied().fold(0.0, f64::max),
            times.iter().map(within_a_second).max().unwrap_or_default()
        );
    }

    /// The revision of the policies that each agent of a cluster reports.
    async fn reports(&self, cluster: &str) -> BTreeMap<String, String> {
        let nodes: Api<Node> = Api::all(self.env.client(cluster).await);
        let nodes = nodes.list(&ListParams::default()).await.expect("the Nodes");
        let report = |node: Node| {
            let status = AgentStatus::parse(node.annotations().get(NODE_AGENT)?).ok()?;
            Some((node.name_any(), status.policy_revision))
        };
        nodes.items.into_iter().filter_map(report).collect()
    }

    /// Waits until the node has this number of peers, and a handshake with each.
    async fn wait_for_handshakes(&self, node: &AgentNode, want: usize) {
        wait_until(format!("{want} peers with a handshake"), LATER, async || {
            let words = ["wg", "show", &node.interface, "latest-handshakes"];
            let shown = self
                .env
                .lab
                .node(&node.name)
                .exec(words)
                .await
                .map_err(|error| error.to_string())?;
            let peers = shown.stdout.lines().filter_map(|line| line.split_once('\t'));
            // The time of the latest handshake by public key; 0 = none yet.
            let peers: BTreeMap<&str, &str> = peers.collect();
            let connected = peers.values().filter(|time| **time != "0").count();
            if peers.len() == want && connected == want {
                Ok(())
            } else {
                Err(format!(
                    "{} peers, {connected} with a handshake; {}",
                    peers.len(),
                    node.agent.log()
                ))
            }
        })
        .await
        .expect("the peers");
    }
}
