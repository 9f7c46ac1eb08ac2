//! Tests a live migration: the worker moves to another node of the hub and keeps its address, while flows run.

use clustermesh_lab::{EchoWatch, TrafficClient};

use super::{ECHO_PORT, HUB, SIBLING, TestEnv, WORKER, host, pod};
use crate::setup::unix_millis;

/// Moves the worker to the other node of the hub and back.
pub(super) async fn flows_continue_on_another_node(env: &mut TestEnv<'_>) {
    let probe = env.lab.probe_program().unwrap();
    let echo_at = format!(":{ECHO_PORT}");
    let [web, hub_web, other_hub_web] = [&env.webs[0], &env.hub_webs[0], &env.hub_webs[1]];
    let mut echoes = vec![];
    for server in [web, hub_web] {
        let node = env.lab.node(&server.node);
        let mut echo = node
            .pod_spawn("echo", server.ip, [&*probe, "udp-echo", &echo_at])
            .unwrap();
        echo.wait_for_log("echoing on", super::PATIENCE).await.unwrap();
        echoes.push(echo);
    }
    let sibling_web = env.webs.iter().find(|web| web.node == SIBLING).unwrap();
    let eth0_address = env.worker.address();
    let flows = [
        (
            "hub pod on the node that the worker leaves -> pod, tunnel",
            pod(hub_web),
            web.ip,
        ),
        (
            "hub pod on the node to which it moves -> pod, tunnel",
            pod(other_hub_web),
            web.ip,
        ),
        ("pod -> hub pod, tunnel", pod(web), hub_web.ip),
        ("host -> hub pod, tunnel", host(), hub_web.ip),
        ("hub pod -> eth0", pod(other_hub_web), eth0_address),
        ("sibling -> eth0", TrafficClient::Host(SIBLING.to_owned()), eth0_address),
        ("pod of the sibling -> pod, CNI", pod(sibling_web), web.ip),
    ];
    let mut watches = vec![];
    for (name, from, to) in &flows {
        let watch = env.lab.watch_udp(from, (*to, ECHO_PORT).into()).unwrap();
        watch.wait_for_echo_after(0).await.unwrap();
        watches.push((name, watch));
    }
    let hub_nodes: Vec<String> = env
        .lab
        .cluster(HUB)
        .nodes()
        .iter()
        .map(|node| node.name().to_owned())
        .collect();
    for to in [&hub_nodes[1], &hub_nodes[0]] {
        let began = unix_millis();
        env.lab.migrate(WORKER, to).await.unwrap();
        let moved = unix_millis();
        env.worker = env.lab.node(WORKER);
        assert_eq!(env.worker.host_node().unwrap().name, *to);
        println!("{WORKER} -> {to}: the move took {} ms", moved - began);
        for (name, watch) in &watches {
            watch.wait_for_echo_after(moved + 200).await.unwrap();
            let silence = longest_silence(watch, began);
            println!("  {name}: silent for {silence} ms");
        }
    }
}

/// The longest time between two echoes since `began`, or the time from `began` to the first one, in milliseconds.
pub(super) fn longest_silence(watch: &EchoWatch, began: u128) -> u128 {
    let times: Vec<u128> = watch.echo_times().into_iter().filter(|at| *at >= began).collect();
    let first = times.first().map_or(0, |at| at - began);
    times
        .windows(2)
        .map(|pair| pair[1] - pair[0])
        .max()
        .unwrap_or(0)
        .max(first)
}
