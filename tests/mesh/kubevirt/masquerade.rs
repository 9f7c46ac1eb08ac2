//! Tests a hub whose CNI masquerades packets from its pods to its nodes, as many do. A node of the hub then sees a worker at the address of
//! the node on which the worker runs.

use clustermesh_lab::{RunningPod, wait_until};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::{ECHO_PORT, HUB, PATIENCE, TestEnv, WORKER, migration::longest_silence, pod};
use crate::setup::{fetch_mebibyte, unix_millis};

/// The worker moves from one node of the hub to another. The new node's agent still has the old node's address as the worker's
/// endpoint, so its packets for the worker go to the old node. The old node sends them back with the new node's address as their
/// source, and the new node's kernel drops them. The worker only answers packets, but it receives none. So the flow continues when
/// the worker's WireGuard sends a packet by itself: at the latest a handshake initiation, 15 s after its first unanswered packet.
pub(super) async fn flow_continues_on_the_workers_new_node(env: &mut TestEnv<'_>) {
    env.lab.masquerade_workers(HUB, true).await.unwrap();
    let old = env.worker.host_node().unwrap().clone();
    let hub_web = env.hub_webs.iter().find(|web| web.node != old.name).unwrap().clone();
    let web = env.webs.iter().find(|web| web.node == WORKER).unwrap().clone();
    env.worker_sends_first(&web, &hub_web).await;
    wait_for_endpoint(env, &hub_web.node, &format!("{}:", old.address)).await;
    for (from, to) in [(&web, &hub_web), (&hub_web, &web)] {
        fetch_mebibyte(env.lab, from, to).await;
    }
    env.hub_pods_get_replies_on_eth0("masqueraded").await;

    let probe = env.lab.probe_program().unwrap();
    let args = [&*probe, "udp-echo", &format!(":{ECHO_PORT}")];
    let mut echo = env.worker.pod_spawn("echo", web.ip, args).unwrap();
    echo.wait_for_log("echoing on", PATIENCE).await.unwrap();
    let watch = env.lab.watch_udp(&pod(&hub_web), (web.ip, ECHO_PORT).into()).unwrap();
    watch.wait_for_echo_after(0).await.unwrap();
    let began = unix_millis();
    env.lab.migrate(WORKER, &hub_web.node).await.unwrap();
    let moved = unix_millis();
    env.worker = env.lab.node(WORKER);
    watch.wait_for_echo_after(moved + 200).await.unwrap();
    println!(
        "masqueraded, {WORKER} -> {}: silent for {} ms",
        hub_web.node,
        longest_silence(&watch, began)
    );
    wait_for_endpoint(env, &hub_web.node, &format!("{}:51820", env.worker.address())).await;

    env.lab.masquerade_workers(HUB, false).await.unwrap();
    env.lab.migrate(WORKER, &old.name).await.unwrap();
    env.worker = env.lab.node(WORKER);
    env.pods_reach_pods_with_own_address().await;
}

/// Waits until the agent on a node of the hub has the worker at an endpoint that begins with `prefix`.
async fn wait_for_endpoint(env: &TestEnv<'_>, node: &str, prefix: &str) {
    let own = format!("{}:51820", env.worker.address());
    wait_until(format!("{node} to send to {prefix}"), PATIENCE, async || {
        let page = env
            .lab
            .node(node)
            .exec(["curl", "-sS", "http://127.0.0.1:9587/debug/state"])
            .await;
        let page = page.map_err(|error| error.to_string())?.stdout;
        let state: Value = serde_json::from_str(&page).map_err(|error| error.to_string())?;
        let mut peers = state["peers"].as_object().ok_or("no peers")?.values();
        let is_worker = |peer: &&Value| {
            peer["candidates"]
                .as_array()
                .is_some_and(|all| all.contains(&Value::from(&*own)))
        };
        let endpoint = peers.find(is_worker).ok_or("no such peer")?["liveEndpoint"].clone();
        let is_wanted = endpoint.as_str().is_some_and(|endpoint| endpoint.starts_with(prefix));
        if is_wanted { Ok(()) } else { Err(endpoint.to_string()) }
    })
    .await
    .unwrap();
}

impl TestEnv<'_> {
    /// Makes the worker's packet the first one of the tunnel's flow, so that the flow is masqueraded: the agent of the hub's node is stopped
    /// meanwhile.
    async fn worker_sends_first(&self, web: &RunningPod, hub_web: &RunningPod) {
        let hub_node = self.lab.node(&hub_web.node);
        hub_node.signal("wg-agent", Signal::SIGSTOP).unwrap();
        for node in self.lab.cluster(HUB).nodes() {
            node.forget_wireguard_flows().await.unwrap();
        }
        let answered = self.lab.ping(&pod(web), hub_web.ip).await.unwrap();
        hub_node.signal("wg-agent", Signal::SIGCONT).unwrap();
        assert!(!answered, "a stopped agent forwards packets");
    }
}
