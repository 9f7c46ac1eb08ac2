//! Tests that pods reach each other again after the deletion of an agent's pod, and that a flow continues during an upgrade of the
//! agents and a key rotation. Prints for how long there is no reply.

use super::*;

pub(super) async fn pods_communicate_again_after_agent_restart(mesh: &Mesh<'_>) {
    let (near, far) = (&mesh.member_webs[0], &mesh.hub_webs[0]);
    let agent = mesh.product.agent_pod(crate::setup::MEMBER, &near.node).await.unwrap();
    let node = mesh.lab.node(&near.node);
    let pid = node.pids_of("wg-agent").unwrap();
    let delete = ["-n", AGENT_NAMESPACE, "delete", "pod", &agent, "--wait=true"];
    mesh.member.kubectl(delete).await.unwrap();
    let gone = Instant::now();
    let answer = wait_until("the next agent to forward packets", PATIENCE, async || {
        let now = node.pids_of("wg-agent").map_err(|error| error.to_string())?;
        if now.is_empty() || now == pid {
            return Err(format!("agent {now:?}"));
        }
        let response = mesh.lab.http_get(&pod(near), &url(far.ip, 8080)).await;
        response.map_err(|error| error.to_string())?
    })
    .await
    .unwrap();
    assert_eq!(answer, mesh.expected_answer(far, near.ip));
    println!(
        "packets again {:.2} s after the agent's pod was deleted",
        gone.elapsed().as_secs_f64()
    );
    let answer = mesh.wait_for_answer(&pod(far), &url(near.ip, 8080)).await;
    assert_eq!(answer, mesh.expected_answer(near, far.ip));
}

/// The longest time without a reply in the output of `ping -D`, and the time of the last reply.
fn longest_silence_and_last_reply(log: &str) -> (f64, f64) {
    let replies = log.lines().filter(|line| line.contains("bytes from"));
    let times = replies.filter_map(|line| line.strip_prefix('[')?.split_once(']')?.0.parse::<f64>().ok());
    let times: Vec<f64> = times.collect();
    let longest = times.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max);
    (longest, times.last().copied().unwrap_or_default())
}

/// How many of the packets that `ping` sent up to the last reply got no reply, and how many it sent.
fn unanswered(log: &str) -> (usize, usize) {
    let replies = log.lines().filter(|line| line.contains("bytes from"));
    let numbers = replies.filter_map(|line| line.split_once("icmp_seq=")?.1.split(' ').next()?.parse().ok());
    let numbers: BTreeSet<usize> = numbers.collect();
    let sent = numbers.last().copied().unwrap_or_default();
    (sent - numbers.len(), sent)
}

/// The WireGuard address that a node has published.
pub(super) async fn wireguard_address(cluster: &Cluster<'_>, node: &str) -> String {
    let node = json(cluster, &["get", "node", node]).await;
    let address = node["metadata"]["annotations"]["kilo.squat.ai/wireguard-ip"]
        .as_str()
        .unwrap();
    address.split_once('/').unwrap().0.to_owned()
}

/// The public key that the agent of a node has published.
pub(super) async fn published_key(cluster: &Cluster<'_>, node: &str) -> String {
    let node = json(cluster, &["get", "node", node]).await;
    node["metadata"]["annotations"]["kilo.squat.ai/key"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

/// Waits for a further reply to `ping`, which sends 20 packets a second. Prints the longest time without a reply.
pub(super) async fn continues(flow: &clustermesh_lab::Running, what: &str) {
    let before = longest_silence_and_last_reply(&flow.log()).1;
    wait_until(
        "the flow to continue",
        PATIENCE,
        async || match longest_silence_and_last_reply(&flow.log()) {
            (_, last) if last > before => Ok(()),
            (_, last) => Err(format!("last reply at {last}")),
        },
    )
    .await
    .unwrap();
    let (longest, _) = longest_silence_and_last_reply(&flow.log());
    let (lost, sent) = unanswered(&flow.log());
    println!(
        "{what}: at most {longest:.2} s without a reply, at 20 packets a second; {lost} of {sent} packets without one"
    );
}

pub(super) async fn flow_survives_agent_upgrade_and_key_rotation(mesh: &Mesh<'_>) {
    let (from, to) = (&mesh.member_webs[0], &mesh.hub_webs[0]);
    let (node, remote) = (mesh.lab.node(&from.node), mesh.lab.node(&to.node));
    let ping = ["ping", "-n", "-D", "-i", "0.05", &to.ip.to_string()];
    let flow = |name| node.pod_spawn(name, from.ip, ping);

    // A new agent pod on every node of the member, one after another, as with a new image. While a node has no agent, no packet for the
    // mesh leaves outside the tunnel.
    let capture = mesh.lab.capture("upgrade", "ip").await.unwrap();
    let mut pings = flow("ping-upgrade").unwrap();
    pings.wait_for_log("icmp_seq=20 ", PATIENCE).await.unwrap();
    let before = (
        NodeState::of(&node).await,
        published_key(&mesh.member, &from.node).await,
    );
    let old = node.pids_of("wg-agent").unwrap();
    let restart = ["-n", AGENT_NAMESPACE, "rollout", "restart", "daemonset/wg-agent"];
    mesh.member.kubectl(restart).await.unwrap();
    mesh.member
        .wait_for_rollout(AGENT_NAMESPACE, "daemonset/wg-agent")
        .await
        .unwrap();
    continues(&pings, "an upgrade of the member's agents").await;
    let captured = capture.stop().await.unwrap();
    assert!(
        mesh.count_wireguard_packets(&captured).await > 0,
        "the capture contains WireGuard packets"
    );
    assert_eq!(mesh.unencrypted(&captured).await, Vec::<String>::new());
    let now = node.pids_of("wg-agent").unwrap();
    assert!(now.len() == 1 && now != old, "{old:?} {now:?}");
    let after = (
        NodeState::of(&node).await,
        published_key(&mesh.member, &from.node).await,
    );
    assert_eq!(after, before, "kernel state and key of the node are unchanged");
    drop(pings);

    // Rotate the key as docs/operations/key-change.md describes.
    let mut pings = flow("ping-key").unwrap();
    pings.wait_for_log("icmp_seq=20 ", PATIENCE).await.unwrap();
    let agent = mesh.product.agent_pod(crate::setup::MEMBER, &from.node).await.unwrap();
    let rotate = ["-n", AGENT_NAMESPACE, "exec", &agent, "--", "/wg-agent", "rotate-key"];
    mesh.member.kubectl(rotate).await.unwrap();
    let new = wait_until("a handshake with the new key", PATIENCE, async || {
        let new = published_key(&mesh.member, &from.node).await;
        let args = ["wg", "show", "kilo0", "latest-handshakes"];
        let printed = remote.exec(args).await.map_err(|error| error.to_string())?.stdout;
        let line = printed.lines().find(|line| line.starts_with(&new));
        let pending = node
            .try_exec(["test", "-e", "/var/lib/kilo/key.next"])
            .await
            .map_err(|error| error.to_string())?;
        match line {
            Some(line) if new != before.1 && !line.ends_with("\t0") && !pending.status.success() => Ok(new.clone()),
            _ => Err(format!("{new}: {printed}")),
        }
    })
    .await
    .unwrap();
    continues(&pings, "a new key").await;
    drop(pings);
    mesh.product.wait_until_ready().await.unwrap();
    assert_eq!(published_key(&mesh.member, &from.node).await, new);
    assert_eq!(NodeState::of(&node).await, before.0);
    let answer = mesh.wait_for_answer(&pod(to), &url(from.ip, 8080)).await;
    assert_eq!(answer, mesh.expected_answer(from, to.ip));
}
