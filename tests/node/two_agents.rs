//! Tests two real agents in two clusters, each with a real API server: connectivity, failures of the API server,
//! invalid Peers, and repairs of the kernel state.

use std::time::{Duration, Instant};

use clustermesh_lab::wait_until;
use clustermesh_tests::netns::NetNs;
use kube::api::PostParams;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::two_clusters::{MGMT, TENANT, TIMEOUT, TwoClusters, peer};

/// The kernel state that the agent has created, as `ip` and `nft` show it. The agent's rules and routes have the protocol number 117.
async fn our_kernel_state(clusters: &TwoClusters, index: usize) -> Vec<String> {
    let site = clusters.site(index);
    let mut out = Vec::new();
    for words in [
        vec!["ip", "-j", "-d", "rule", "show"],
        vec!["ip", "-j", "-6", "-d", "rule", "show"],
        vec!["ip", "-j", "-d", "route", "show", "table", "all", "proto", "117"],
        vec!["ip", "-j", "-6", "-d", "route", "show", "table", "all", "proto", "117"],
        vec!["ip", "-j", "link", "show"],
        vec!["nft", "-j", "list", "tables"],
    ] {
        let text = clusters.host(site).exec(words).await.expect("run ip or nft").stdout;
        let list: Value = serde_json::from_str(if text.trim().is_empty() { "[]" } else { &text }).expect("JSON");
        let list = list.get("nftables").cloned().unwrap_or(list);
        let ours = list.as_array().into_iter().flatten().filter(|item| {
            let text = item.to_string();
            item.get("protocol").is_some_and(|p| p == "117" || p == 117)
                || text.contains("clustermesh")
                || text.contains(&site.interface)
        });
        out.extend(ours.map(ToString::to_string));
    }
    out
}

#[tokio::test]
async fn pods_reach_each_other_and_a_killed_agent_recovers() {
    let clusters = TwoClusters::start().await;
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));
    let _first = clusters.agent(mgmt, "agent-mgmt");
    let mut second = clusters.agent(tenant, "agent-tenant");
    clusters.write_all_peers().await;
    clusters.wait_until_reaches(mgmt, tenant).await;
    clusters.wait_until_reaches(tenant, mgmt).await;
    clusters.wait_until_ready(mgmt).await;
    clusters.wait_until_ready(tenant).await;
    // The capture starts only now: before the agents had the Peers and PeerPolicies of `write_all_peers`, the pings of
    // `wait_until_reaches` followed the default route.
    let capture = clusters
        .lab
        .capture("mesh", "ip or ip6")
        .await
        .expect("start a capture");

    // Sends enough TCP data for full-size segments. The server is a pod, because the node has no port open to members.
    let (pod, server) = (NetNs::new("tenant-pod"), "10.20.1.6");
    let script = format!(
        "echo 1 > /proc/sys/net/ipv4/ip_forward
        ip link add cni0 type veth peer name eth0 netns {}
        ip addr add 10.20.1.1/32 dev cni0
        ip link set cni0 up
        ip route add {server} dev cni0",
        pod.path()
    );
    clusters
        .host(tenant)
        .exec(["sh", "-ec", &script])
        .await
        .expect("set up the node");
    pod.ip(&format!("addr add {server}/24 dev eth0"));
    pod.ip("link set eth0 up");
    pod.ip("route add default via 10.20.1.1");
    let net = format!("--net={}", pod.path());
    let _server = clusters
        .host(tenant)
        .spawn("iperf3", ["nsenter", &net, "iperf3", "-s", "-B", server])
        .expect("start iperf3");
    wait_until("a TCP stream", TIMEOUT, async || {
        let words = ["iperf3", "-c", server, "-B", mgmt.pod, "-n", "4M", "-J"];
        let output = clusters.host(mgmt).try_exec(words).await.map_err(|e| e.to_string())?;
        if output.status.success() {
            Ok(())
        } else {
            Err(output.stdout)
        }
    })
    .await
    .expect("4 MB are transferred over TCP");

    // Metrics and debug state show the peer.
    wait_until("the peer to count as up", TIMEOUT, async || {
        let (_, metrics) = clusters.page(mgmt, "/metrics").await;
        let up = "wg_agent_peers{cluster=\"tenant-a\",state=\"up\"} 1";
        if metrics.lines().any(|line| line == up) {
            Ok(())
        } else {
            Err(metrics)
        }
    })
    .await
    .expect("metrics");
    let (_, state) = clusters.page(mgmt, "/debug/state").await;
    let key = std::fs::read_to_string(key_file(&clusters, MGMT)).expect("the key");
    assert!(state.contains("mesh--tenant-a--tenant-a-1"), "{state}");
    assert!(!state.contains(key.trim()), "the private key is not shown");

    // An agent that is started on a node with a running agent exits, and its log names the process of the running agent.
    let pid = second.pid().expect("the agent runs");
    let mut duplicate = clusters
        .host(tenant)
        .spawn("duplicate", clusters.command(tenant, &["--listen=127.0.0.1:0"]))
        .expect("start");
    let status = duplicate.wait_for_exit(TIMEOUT).await.expect("the agent exits");
    let log = duplicate.log();
    assert!(
        !status.success() && log.contains("another wg-agent") && log.contains(&format!("process {pid}")),
        "{log}"
    );
    // The running agent still works.
    clusters.assert_pings(mgmt, tenant).await;

    // After SIGKILL, packets are rejected with an error and do not leave unencrypted. After a restart the tunnel works again.
    second.signal(Signal::SIGKILL).expect("kill");
    second.wait_for_exit(TIMEOUT).await.expect("the agent exits");
    clusters
        .pings(tenant, mgmt)
        .await
        .expect_err("without the agent, no packet passes");
    let route = clusters
        .host(tenant)
        .try_exec(["ip", "route", "get", mgmt.pod])
        .await
        .expect("run ip");
    // The interface remains after its process has died, but without carrier: its routes are ignored, and the `unreachable`
    // routes apply.
    assert!(
        route.stderr.contains("No route to host"),
        "{}{}",
        route.stdout,
        route.stderr
    );
    // The other node's initiations (148 bytes and the UDP header) are dropped, so only one of the restarted agent can connect.
    let drop = "nft 'table inet mute { chain out { type filter hook output priority 0; udp length 156 drop; }; }'";
    clusters
        .host(mgmt)
        .exec(["sh", "-ec", drop])
        .await
        .expect("drop initiations");
    let started = Instant::now();
    let _second = clusters.agent(tenant, "agent-tenant-2");
    // Only the other node sends: a packet of the restarted node would make its device initiate a handshake.
    clusters.wait_until_reaches(mgmt, tenant).await;
    eprintln!("connected {:?} after the restart", started.elapsed());
    let delete = ["nft", "delete", "table", "inet", "mute"];
    clusters.host(mgmt).exec(delete).await.expect("pass initiations");
    clusters.wait_until_reaches(tenant, mgmt).await;

    // The underlay carried WireGuard packets and no unencrypted inner packets.
    let seen = capture.stop().await.expect("the capture ends");
    let clear = seen
        .packets("net 10.0.0.0/8 or net 100.64.0.0/10")
        .await
        .expect("read the capture");
    assert_eq!(clear, Vec::<String>::new());
    let outer = seen
        .packets("udp port 51820 and host 172.30.1.11 and host 172.30.2.11")
        .await
        .expect("read the capture");
    // The number of packets is not checked: a veth pair with segmentation offload passes up to 64 kB as one frame.
    assert!(!outer.is_empty());
}

fn key_file(clusters: &TwoClusters, index: usize) -> String {
    let words = clusters.command(clusters.site(index), &[]);
    let at = words.iter().position(|word| word == "--key-file").expect("the flag");
    words[at + 1].clone()
}

#[tokio::test]
async fn unavailable_api_server_changes_no_working_tunnel() {
    let clusters = TwoClusters::start().await;
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));
    let _first = clusters.agent(mgmt, "agent-mgmt");

    // Without an API server at the start the agent waits, reports it, and writes nothing.
    clusters
        .lab
        .cluster(tenant.cluster)
        .kill_api()
        .expect("kill the API server");
    let _second = clusters.agent(tenant, "agent-tenant");
    wait_until(
        "the agent to report that it waits for the API server",
        TIMEOUT,
        async || match clusters.page(tenant, "/readyz").await {
            (503, text) if text.contains("waiting for the first list of") => Ok(()),
            (code, text) => Err(format!("{code}: {text}")),
        },
    )
    .await
    .expect("readyz");
    assert_eq!(our_kernel_state(&clusters, TENANT).await, Vec::<String>::new());
    clusters
        .lab
        .cluster(tenant.cluster)
        .start_api()
        .await
        .expect("start the API server");
    clusters.write_all_peers().await;
    clusters.wait_until_reaches(mgmt, tenant).await;
    clusters.wait_until_reaches(tenant, mgmt).await;

    // Later failures: one API server is killed, the other frozen.
    let before = our_kernel_state(&clusters, TENANT).await;
    clusters
        .lab
        .cluster(tenant.cluster)
        .kill_api()
        .expect("kill the API server");
    clusters
        .lab
        .cluster(mgmt.cluster)
        .freeze_api()
        .expect("freeze the API server");
    for _ in 0..8 {
        clusters.assert_pings(mgmt, tenant).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert_eq!(our_kernel_state(&clusters, TENANT).await, before);
    assert_eq!(clusters.page(tenant, "/readyz").await.0, 200);
    clusters.lab.cluster(mgmt.cluster).thaw_api().expect("thaw");
    clusters
        .lab
        .cluster(tenant.cluster)
        .start_api()
        .await
        .expect("start the API server");

    // The agent applies changes again.
    clusters.delete_peer(tenant, "mesh--mgmt--mgmt-1").await;
    wait_until("the Peer's routes to be removed", TIMEOUT, async || {
        match clusters.pings(tenant, mgmt).await {
            Ok(()) => Err("the ping is still answered".to_owned()),
            Err(_) => Ok(()),
        }
    })
    .await
    .expect("the routes are removed");
}

// threat: peer-claims-node
#[tokio::test]
async fn invalid_peers_are_left_out_and_cleanup_removes_kernel_state() {
    let clusters = TwoClusters::start().await;
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));
    let before = our_kernel_state(&clusters, MGMT).await;
    assert_eq!(before, Vec::<String>::new());
    let mut first = clusters.agent(mgmt, "agent-mgmt");
    let _second = clusters.agent(tenant, "agent-tenant");
    clusters.write_all_peers().await;
    clusters.wait_until_reaches(mgmt, tenant).await;

    let good = peer(tenant, &clusters.wait_for_published(tenant).await);
    let peers = clusters.peers(mgmt).await;
    let keys: Vec<String> = (0..6).map(|n| unused_public_key(n + 1)).collect();
    let invalid = |index: usize, change: &dyn Fn(&mut clustermesh_api::peer::PeerSpec)| {
        let mut peer = good.clone();
        peer.metadata.name = Some(format!("wrong-{index}"));
        peer.spec.public_key.clone_from(&keys[index]);
        peer.spec.allowed_ips = vec![format!("10.20.{}.0/24", 100 + index)];
        change(&mut peer.spec);
        peer
    };
    let many: Vec<String> = (0..10_000)
        .map(|n| format!("10.20.{}.{}/32", n / 250 + 120, n % 250))
        .collect();
    let invalid_peers = [
        (invalid(0, &|spec| spec.public_key = "not a key".into()), "Unreadable"),
        (
            invalid(1, &|spec| spec.allowed_ips = vec!["10.20.9.0/33".into()]),
            "Unreadable",
        ),
        (
            invalid(2, &|spec| {
                spec.endpoint.as_mut().unwrap().dns_or_ip.ip = Some("0.0.0.0".into())
            }),
            "EndpointInvalid",
        ),
        (
            invalid(3, &|spec| spec.allowed_ips.clone_from(&many)),
            "TooManyAllowedIPs",
        ),
        (
            invalid(4, &|spec| spec.allowed_ips = vec!["172.30.1.0/28".into()]),
            "OwnNodeAddress",
        ),
        (
            invalid(5, &|spec| spec.allowed_ips = vec!["172.30.1.1/32".into()]),
            "ApiServerAddress",
        ),
    ];
    for (peer, _) in &invalid_peers {
        peers
            .create(&PostParams::default(), peer)
            .await
            .expect("the API server accepts the Peer");
    }
    wait_until("every refused Peer to be counted", TIMEOUT, async || {
        let (_, metrics) = clusters.page(mgmt, "/metrics").await;
        let line = |reason: &str, count: usize| format!("wg_agent_peers_refused{{reason=\"{reason}\"}} {count}");
        let missing: Vec<String> = [
            ("Unreadable", 2),
            ("EndpointInvalid", 1),
            ("TooManyAllowedIPs", 1),
            ("OwnNodeAddress", 1),
            ("ApiServerAddress", 1),
        ]
        .iter()
        .map(|(reason, count)| line(reason, *count))
        .filter(|line| !metrics.lines().any(|l| l == line))
        .collect();
        if missing.is_empty() {
            Ok(())
        } else {
            Err(format!("{missing:?}\n{}\n{metrics}", first.log()))
        }
    })
    .await
    .expect("metrics");
    let log = first.log();
    for (peer, reason) in &invalid_peers {
        let name = peer.metadata.name.as_deref().unwrap_or_default();
        let lines = log
            .lines()
            .filter(|line| line.contains(&format!("left out: Peer {name}: {reason}: ")))
            .count();
        assert_eq!(lines, 1, "{name} is logged once:\n{log}");
    }
    // The valid Peer still works.
    clusters.assert_pings(mgmt, tenant).await;
    clusters.assert_pings(tenant, mgmt).await;
    clusters.wait_until_ready(mgmt).await;
    // The agent still reaches its API server: it notices the deletions.
    for (peer, _) in &invalid_peers {
        clusters
            .delete_peer(mgmt, peer.metadata.name.as_deref().unwrap_or_default())
            .await;
    }
    wait_until("no Peer to be left out", TIMEOUT, async || {
        let (_, metrics) = clusters.page(mgmt, "/metrics").await;
        if metrics.contains("wg_agent_peers_refused{") {
            Err(metrics)
        } else {
            Ok(())
        }
    })
    .await
    .expect("metrics");

    // `cleanup` fails while an agent runs. After a successful `cleanup`, no kernel state of the agent is left.
    let cleanup = || clusters.command(mgmt, &["cleanup"]);
    let refused = clusters.host(mgmt).try_exec(cleanup()).await.expect("run");
    assert!(
        !refused.status.success() && refused.stderr.contains("another wg-agent"),
        "{}",
        refused.stderr
    );
    assert!(!our_kernel_state(&clusters, MGMT).await.is_empty());
    let status = first.terminate(TIMEOUT).await.expect("the agent exits");
    assert!(status.success(), "{}", first.log());
    assert!(
        !our_kernel_state(&clusters, MGMT).await.is_empty(),
        "the kernel state remains after a stop, so that no packet leaves unencrypted"
    );
    let done = clusters.host(mgmt).exec(cleanup()).await.expect("cleanup");
    assert_eq!(our_kernel_state(&clusters, MGMT).await, before, "{}", done.stderr);
    assert!(!std::path::Path::new(&format!("/var/run/wireguard/{}.sock", mgmt.interface)).exists());
    let annotations = clusters.annotations(mgmt).await;
    assert!(annotations.keys().all(|key| !key.contains("kilo")), "{annotations:?}");
    assert!(
        std::path::Path::new(&key_file(&clusters, MGMT)).exists(),
        "the key file is kept"
    );
}

/// A public key that no node has. Any 32 bytes are a public key, except the few points of low order.
fn unused_public_key(n: u8) -> String {
    clustermesh_core::key::PublicKey::new([n + 40; 32]).to_string()
}

// threat: foreign-change
#[tokio::test]
async fn deleted_kernel_state_is_restored() {
    let clusters = TwoClusters::start().await;
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));
    let agent = clusters.agent(mgmt, "agent-mgmt");
    let _second = clusters.agent(tenant, "agent-tenant");
    clusters.write_all_peers().await;
    clusters.wait_until_reaches(mgmt, tenant).await;
    let table = ["nft", "list", "table", "inet", "clustermesh"];
    // The preferences of the agent's rules are 1000 and 1001, its routing tables are 5182 and 5183.
    for (what, deletion) in [
        ("the firewall table", "nft delete table inet clustermesh".to_owned()),
        ("the whole ruleset", "nft flush ruleset".to_owned()),
        ("the rules", "ip rule del pref 1000; ip rule del pref 1001".to_owned()),
        (
            "the routes",
            "ip route flush table 5182; ip route flush table 5183".to_owned(),
        ),
        ("an address", format!("ip addr flush dev {}", mgmt.interface)),
        ("the device", format!("ip link del {}", mgmt.interface)),
    ] {
        let before = our_kernel_state(&clusters, MGMT).await;
        let started = Instant::now();
        clusters
            .host(mgmt)
            .exec(["sh", "-ec", &deletion])
            .await
            .expect("delete the kernel state");
        wait_until(format!("{what} to be restored"), TIMEOUT, async || {
            let now = our_kernel_state(&clusters, MGMT).await;
            // A new device has a new index, so only the number of items is compared.
            if now.len() != before.len() {
                return Err(format!("{now:#?}\n{}", agent.log()));
            }
            let listing = clusters.host(mgmt).try_exec(table).await.map_err(|e| e.to_string())?;
            if !listing.status.success() {
                return Err(listing.stderr);
            }
            clusters.pings(mgmt, tenant).await?;
            clusters.pings(tenant, mgmt).await
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
        eprintln!("{what}: restored after {:?}", started.elapsed());
    }
}
