//! Tests an API server with the address of a node: nodes in other locations never need a tunnel to reach it.

use std::{net::IpAddr, time::Instant};

use clustermesh_lab::{EchoWatch, Running, wait_until};
use nix::sys::signal::Signal;

use super::{ECHO_PORT, TestEnv};
use crate::setup::{PATIENCE, curl, host, json, pod, unix_millis};

/// The node in cloud A, whose address the API server has.
pub(super) const API_NODE: &str = "tenant-a-3";
const OTHER_NODES: [&str; 3] = ["tenant-a-1", "tenant-a-2", "tenant-a-4"];

/// Flows from nodes in other locations to the address of [`API_NODE`], open since before the mesh.
pub(super) struct OpenFlows {
    _echo: Running,
    watches: Vec<(&'static str, EchoWatch)>,
}

fn address(env: &TestEnv<'_>) -> IpAddr {
    env.lab.node(API_NODE).address()
}

pub(super) async fn open_flows(env: &TestEnv<'_>) -> OpenFlows {
    let endpoints = json(&env.member, &["get", "endpointslices", "kubernetes"]).await;
    assert_eq!(endpoints["endpoints"][0]["addresses"][0], address(env).to_string());
    let probe = env.lab.probe_program().unwrap();
    let at = (address(env), ECHO_PORT).into();
    let args = [&*probe, "udp-echo", &format!("{}:{ECHO_PORT}", address(env))];
    let mut echo = env.lab.node(API_NODE).spawn("echo", args).unwrap();
    echo.wait_for_log("echoing on", PATIENCE).await.unwrap();
    let mut watches = vec![];
    for node in OTHER_NODES {
        let watch = env.lab.watch_udp(&host(node), at).unwrap();
        watch.wait_for_echo_after(0).await.unwrap();
        watches.push((node, watch));
    }
    OpenFlows { _echo: echo, watches }
}

/// The flows continue although the nodes have tunnels now.
pub(super) async fn open_flows_continue(flows: OpenFlows) {
    let now = unix_millis();
    for (node, watch) in &flows.watches {
        watch.wait_for_echo_after(now).await.unwrap();
        let times = watch.echo_times();
        let longest = times.windows(2).map(|pair| pair[1] - pair[0]).max();
        println!("{node} -> {API_NODE}: longest gap between echoes {longest:?} ms");
    }
}

/// While the agent on [`API_NODE`] is stopped, and the node's tunnels with it, all nodes and their pods reach the API server.
pub(super) async fn is_reached_without_tunnels(env: &TestEnv<'_>) {
    let web = env.web(API_NODE);
    for node in OTHER_NODES {
        for (to, device) in [(address(env), "eth0"), (web.ip, "kilo0")] {
            assert_eq!(env.device_to(node, to).await, device, "{node} -> {to}");
        }
    }
    let node = env.lab.node(API_NODE);
    node.signal("wg-agent", Signal::SIGSTOP).unwrap();
    let service = env.member.plan().api_service_ip();
    for from in env.webs.iter().filter(|from| from.node != API_NODE) {
        for client in [pod(from), host(&from.node)] {
            for url in [
                format!("https://{}:6443/readyz", address(env)),
                format!("https://{service}/readyz"),
            ] {
                assert_eq!(curl(env.lab, &client, &[&url]).await, "ok", "{client} -> {url}");
            }
        }
    }
    let answered = env.lab.ping(&pod(env.web("tenant-a-1")), web.ip).await.unwrap();
    node.signal("wg-agent", Signal::SIGCONT).unwrap();
    assert!(!answered, "a stopped agent forwards packets");
}

/// The agents of all nodes are killed at once. Without a tunnel, each reads the objects again and becomes ready.
pub(super) async fn killed_agents_become_ready(env: &TestEnv<'_>) {
    let mut killed = vec![];
    for node in env.member.nodes() {
        killed.push((node.pids_of("wg-agent").unwrap(), node));
    }
    let start = Instant::now();
    for (_, node) in &killed {
        node.signal("wg-agent", Signal::SIGKILL).unwrap();
    }
    for (before, node) in &killed {
        wait_until(
            format!("the agent on {} to be ready", node.name()),
            PATIENCE,
            async || {
                let now = node.pids_of("wg-agent").map_err(|error| error.to_string())?;
                let ready = node.try_exec(["curl", "-sS", "http://127.0.0.1:9587/readyz"]).await;
                let ready = ready.map_err(|error| error.to_string())?;
                match &*ready.stdout {
                    "ok\n" if !now.is_empty() && now != *before => Ok(()),
                    other => Err(format!("{now:?}: {other}{}", ready.stderr)),
                }
            },
        )
        .await
        .unwrap();
    }
    println!(
        "all agents ready {:.1} s after they were killed",
        start.elapsed().as_secs_f64()
    );
    env.pods_reach_pods_with_their_own_address().await;
}

/// [`API_NODE`] boots with another key. The other agents learn this key only from the API server.
pub(super) async fn node_of_the_api_server_reboots(env: &mut TestEnv<'_>) {
    let node = env.lab.node(API_NODE);
    let key = public_key(env).await;
    node.power_cut().await.unwrap();
    let on = Instant::now();
    node.power_on().await.unwrap();
    println!("{API_NODE} Ready again: {:.1} s", on.elapsed().as_secs_f64());
    env.webs = wait_until("the web server to run again", PATIENCE, async || {
        let webs = env.member.web_pods().await.map_err(|error| error.to_string())?;
        let web = webs.iter().find(|web| web.node == API_NODE).ok_or("it does not run")?;
        let output = node.pod_exec(web.ip, ["true"]).await;
        match output {
            Ok(output) if output.status.success() && webs.len() == 4 => Ok(webs),
            other => Err(format!("{webs:?}: {other:?}")),
        }
    })
    .await
    .unwrap();
    env.every_node_uses_its_tunnels().await;
    env.pods_reach_pods_with_their_own_address().await;
    println!("pods reach pods {:.1} s after power on", on.elapsed().as_secs_f64());
    assert_ne!(public_key(env).await, key);
}

async fn public_key(env: &TestEnv<'_>) -> String {
    let node = json(&env.member, &["get", "node", API_NODE]).await;
    let key = node["metadata"]["annotations"]["kilo.squat.ai/key"].as_str();
    key.unwrap().to_owned()
}
