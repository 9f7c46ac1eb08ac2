//! Tests connections as a Ceph client keeps them: one open connection by pod IP to each of nine daemons on three nodes of another
//! member. Agents restart, a key is rotated, an anchor moves, the controller and an API server are away, and a node is lost. Only
//! the connections to the lost node break. The test prints the longest gap (time between two echoes) in each
//! disturbance.

use std::time::Duration;

use clustermesh_lab::{
    AGENT_NAMESPACE, Cluster, EchoWatch, Lab, LabPlan, NAMESPACE, Product, RunningPod, Tunnel, wait_until,
};

use crate::setup::{HUB, MEMBER, PATIENCE, anchors_of, json, pod, unix_millis};

/// Three daemons on each of three nodes.
const DAEMONS: &str = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: osd, namespace: default}
spec:
  replicas: 9
  selector: {matchLabels: {app: osd}}
  template:
    metadata: {labels: {app: osd}}
    spec:
      terminationGracePeriodSeconds: 1
      topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {app: osd}}}
      containers:
      - name: osd
        image: lab.local/box:1
        imagePullPolicy: IfNotPresent
        command: [/bin/probe, stream-serve, ':6800']
        readinessProbe: {tcpSocket: {port: 6800}, periodSeconds: 1}
";
const PORT: u16 = 6800;
/// The limit for the gap of a connection that must not break. A restarted userspace agent needs a new handshake, TCP's retransmission
/// timer can double the time without a tunnel, and a loaded machine can stop a process for many seconds.
const MAX_GAP: Duration = Duration::from_secs(60);

/// A connection that is used all the time.
struct Connection {
    daemon: RunningPod,
    echoes: EchoWatch,
}

struct TestEnv<'a> {
    lab: &'a Lab,
    product: Product<'a>,
    hub: Cluster<'a>,
    member: Cluster<'a>,
    connections: Vec<Connection>,
}

#[tokio::test]
async fn open_connections_break_only_if_their_node_is_lost() {
    let lab = Lab::start(LabPlan::clusters(&[(HUB, 3), (MEMBER, 2)])).await.unwrap();
    let product = Product::install(&lab, &[HUB, MEMBER], Tunnel::Userspace, &|_| {})
        .await
        .unwrap();
    let (hub, member) = (lab.cluster(HUB), lab.cluster(MEMBER));
    hub.apply(DAEMONS).await.unwrap();
    hub.wait_for_rollout("default", "deployment/osd").await.unwrap();
    let clients = member.run_web().await.unwrap();
    product.mesh_up(&product.mesh(&[])).await.unwrap();
    let daemons = hub.pods_of_app("osd").await.unwrap();
    for n in 1..=3 {
        let node = format!("{HUB}-{n}");
        assert_eq!(
            daemons.iter().filter(|daemon| daemon.node == node).count(),
            3,
            "{daemons:?}"
        );
    }
    let client = pod(&clients[0]);
    // A mesh is Ready when its objects are written, and the agents need a moment more to apply them. A connection
    // is opened only once.
    let sockets = daemons.iter().map(|daemon| (daemon.ip, PORT).into()).collect();
    lab.wait_for_open_sockets(&client, &sockets).await.unwrap();
    let mut connections = vec![];
    for daemon in daemons {
        let echoes = lab.watch_stream(&client, (daemon.ip, PORT).into()).unwrap();
        echoes.wait_for_echo_after(0).await.unwrap();
        connections.push(Connection { daemon, echoes });
    }
    let env = TestEnv {
        lab: &lab,
        product,
        hub,
        member,
        connections,
    };

    env.disturb("restart of the hub's agents", async || {
        env.restart_agents(&env.hub).await
    })
    .await;
    env.disturb("restart of the client's agents", async || {
        env.restart_agents(&env.member).await
    })
    .await;
    env.disturb("new key of a node with daemons", async || env.rotate_key().await)
        .await;
    env.disturb("move of the anchor", async || env.move_anchor().await)
        .await;
    env.disturb("controller away", async || env.stop_and_start_controller().await)
        .await;
    env.disturb("hub's API server away", async || env.stop_and_start_api_server().await)
        .await;
    env.lose_node().await;
}

impl TestEnv<'_> {
    /// Runs `action`. Every connection must continue after it. Prints the longest gap.
    async fn disturb(&self, what: &str, action: impl AsyncFnOnce()) {
        let start = unix_millis();
        action().await;
        let gap = self.longest_gap(start, |_| true).await;
        println!("{what}: {} connections, longest gap {gap:.2?}", self.connections.len());
        assert!(gap < MAX_GAP, "{what}: {gap:?}");
    }

    /// The longest gap since `start` among the connections to the daemons that `filter` selects. Each must have an echo after this call
    /// began.
    async fn longest_gap(&self, start: u128, filter: impl Fn(&RunningPod) -> bool) -> Duration {
        let end = unix_millis();
        let mut longest = 0;
        for Connection { daemon, echoes } in self.connections.iter().filter(|one| filter(&one.daemon)) {
            if let Err(error) = echoes.wait_for_echo_after(end).await {
                panic!("the connection to {} on {} broke: {error}", daemon.ip, daemon.node);
            }
            let times = echoes.echo_times();
            let pairs = times.windows(2).filter(|pair| pair[1] > start);
            longest = longest.max(pairs.map(|pair| pair[1] - pair[0]).max().unwrap_or(0));
        }
        Duration::from_millis(u64::try_from(longest).unwrap())
    }

    async fn restart_agents(&self, cluster: &Cluster<'_>) {
        let restart = ["-n", AGENT_NAMESPACE, "rollout", "restart", "daemonset/wg-agent"];
        cluster.kubectl(restart).await.unwrap();
        cluster
            .wait_for_rollout(AGENT_NAMESPACE, "daemonset/wg-agent")
            .await
            .unwrap();
    }

    async fn rotate_key(&self) {
        let node = &self.connections[0].daemon.node;
        let published = async || {
            let node = json(&self.hub, &["get", "node", node]).await;
            node["metadata"]["annotations"]["kilo.squat.ai/key"].clone()
        };
        let before = published().await;
        let agent = self.product.agent_pod(HUB, node).await.unwrap();
        let rotate = ["-n", AGENT_NAMESPACE, "exec", &agent, "--", "/wg-agent", "rotate-key"];
        self.hub.kubectl(rotate).await.unwrap();
        wait_until("the new key to be in use", PATIENCE, async || {
            let next = self
                .lab
                .node(node)
                .try_exec(["test", "-e", "/var/lib/kilo/key.next"])
                .await;
            let is_pending = next.map_err(|error| error.to_string())?.status.success();
            if published().await != before && !is_pending {
                Ok(())
            } else {
                Err("not yet".to_owned())
            }
        })
        .await
        .unwrap();
    }

    /// Cordons the anchor, so that the Service network moves to another node. The connections go to pod IPs, which do not move.
    async fn move_anchor(&self) {
        let network = self.hub.plan().service_cidr.to_string();
        let anchors = async || anchors_of(&network, &self.member).await;
        let [before] = &anchors().await[..] else {
            panic!("one anchor")
        };
        self.hub.kubectl(["cordon", before]).await.unwrap();
        wait_until("another anchor", PATIENCE, async || match &anchors().await[..] {
            [now] if now != before => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await
        .unwrap();
        self.hub.kubectl(["uncordon", before]).await.unwrap();
    }

    async fn stop_and_start_controller(&self) {
        for replicas in ["--replicas=0", "--replicas=1"] {
            let scale = ["-n", NAMESPACE, "scale", "deployment/clustermesh-controller", replicas];
            self.hub.kubectl(scale).await.unwrap();
            self.hub
                .wait_for_rollout(NAMESPACE, "deployment/clustermesh-controller")
                .await
                .unwrap();
        }
        self.product.wait_until_ready().await.unwrap();
    }

    async fn stop_and_start_api_server(&self) {
        self.hub.kill_api().unwrap();
        tokio::time::sleep(Duration::from_secs(10)).await;
        self.hub.start_api().await.unwrap();
        self.product.wait_until_ready().await.unwrap();
    }

    /// The power of a node fails. Connections to its daemons get no more echoes, and all others continue.
    async fn lose_node(&self) {
        let lost = format!("{HUB}-3");
        let start = unix_millis();
        self.lab.node(&lost).power_cut().await.unwrap();
        for Connection { daemon, echoes } in self.connections.iter().filter(|one| one.daemon.node == lost) {
            let last = echoes.wait_for_silence(Duration::from_secs(3)).await.unwrap();
            let after = last.unwrap_or(start).saturating_sub(start);
            println!(
                "connection to {} on {lost}: last echo {after} ms after the power cut began",
                daemon.ip
            );
        }
        let gap = self.longest_gap(start, |daemon| daemon.node != lost).await;
        println!("loss of a node: longest gap of the others {gap:.2?}");
        assert!(gap < MAX_GAP, "{gap:?}");
    }
}
