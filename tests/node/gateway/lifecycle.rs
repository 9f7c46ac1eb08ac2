//! Checks what a gateway keeps and reports when its table is deleted, its process ends or its API server is down.

use clustermesh_agent_core::numbers::NFT_TABLE;
use clustermesh_lab::wait_until;
use clustermesh_tests::traffic::TcpConnection;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use super::testbed::{GATEWAY, Gateway, HOST_PORT, SQL_PORT, TIMEOUT, Testbed, backend, hostile, socket_addr};

/// Deletes the table five times, each time as soon as it is restored, even before the gateway has verified its own write.
pub(super) async fn deleted_table_is_restored(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    // A restored table does not prove a repair, because the periodic renewal restores it too. So the test reads the count of repairs.
    let repairs = || {
        let metrics = testbed
            .gateway_pod
            .run("curl", &["-sS", "http://127.0.0.1:9587/metrics"]);
        let mut lines = metrics
            .lines()
            .filter(|line| line.contains("repairs_total{part=\"firewall\"}"));
        lines.next().and_then(|line| line.rsplit_once(' ')?.1.parse().ok())
    };
    assert_eq!(repairs(), None::<u32>);
    let mut deleted = 0;
    wait_until("the table to be restored each time", TIMEOUT, async || {
        while deleted < 5 {
            let output = testbed
                .gateway_pod
                .output("nft", &["delete", "table", "inet", NFT_TABLE]);
            if !output.status.success() {
                return Err(format!("gone after {deleted} deletions"));
            }
            deleted += 1;
        }
        Ok(())
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    a.wait_for_answer_from(socket_addr(GATEWAY[0], SQL_PORT), "db").await;
    assert!(repairs() >= Some(1), "{:?}", repairs());
}

pub(super) async fn restarted_gateway_keeps_identity_and_connections(
    testbed: &Testbed,
    gateway: &mut Gateway,
    arguments: &[&str],
) {
    let [a, _] = &testbed.sandboxes;
    let before = testbed.status().await;
    let mut connection = TcpConnection::open(&a.ns, socket_addr(GATEWAY[0], SQL_PORT));
    connection.request();
    kill(Pid::from_raw(gateway.running.pid().cast_signed()), Signal::SIGKILL).expect("kill the gateway");
    gateway.running.wait(TIMEOUT);
    // Without a process the userspace device drops packets; the kernel's tunnel continues.
    if backend() == "kernel" {
        a.tcp_reply(socket_addr(GATEWAY[0], SQL_PORT));
    } else {
        assert_eq!(a.try_tcp_reply(socket_addr(GATEWAY[0], SQL_PORT)), None);
    }
    // Drop the handshake initiations of the sandbox's node (148 bytes and the UDP header). So the tunnel works again only if the new
    // process initiates a handshake itself. The node would initiate one after 15 s without a reply, and so hide that the new
    // process initiates none.
    a.ns.nft("table inet mute { chain out { type filter hook output priority 0; udp length 156 drop; }; }\n");
    *gateway = testbed.gateway(arguments);
    a.wait_for_answer_from(socket_addr(GATEWAY[0], SQL_PORT), "db").await;
    a.ns.nft("delete table inet mute");
    testbed.wait_until_ready().await;
    // The earlier connection continues.
    connection.request();
    let identity = |status: &Value| {
        [
            status["publicKey"].clone(),
            status["wireguardIPs"].clone(),
            status["endpoints"].clone(),
        ]
    };
    assert_eq!(identity(&testbed.status().await), identity(&before));
}

// threat: gateway-api-away
pub(super) async fn grants_expire_without_an_api_server(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    // Expired grants must also stop the packets of connections that are in the conntrack table, in both directions. The forged entry
    // has the source port 7100, and 50100 after masquerading.
    let forged = hostile::ForgedEntry::of_udp_grant(testbed, 0, 7100, 50100);
    testbed.cluster().kill_api().expect("kill the API server");
    // Grants do not expire at once.
    a.tcp_reply(socket_addr(GATEWAY[0], SQL_PORT));
    // The gateway runs with --grant-timeout=60s. When the element of this set is not renewed, it times out.
    wait_until("the grants to expire", TIMEOUT, async || {
        let alive = testbed
            .gateway_pod
            .run("nft", &["list", "set", "inet", NFT_TABLE, "alive"]);
        if alive.contains("elements") { Err(alive) } else { Ok(()) }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(a.try_tcp_reply(socket_addr(GATEWAY[0], SQL_PORT)), None);
    let (requests, replies) = forged.counters(testbed);
    forged.send_request(testbed);
    forged.send_reply(testbed);
    testbed.cluster().start_api().await.expect("start the API server");
    a.wait_for_answer_from(socket_addr(GATEWAY[0], SQL_PORT), "db").await;
    // The TCP reply proves that the gateway has also processed the two forged packets before it.
    assert_eq!((requests.packets(), replies.packets()), (0, 0));
    wait_until("packets of both directions", TIMEOUT, async || {
        forged.send_request(testbed);
        forged.send_reply(testbed);
        match (requests.packets(), replies.packets()) {
            (1.., 1..) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
}

pub(super) async fn terminating_gateway_is_unready_but_still_serves(testbed: &Testbed, gateway: &mut Gateway) {
    let [a, _] = &testbed.sandboxes;
    testbed.wait_until_ready().await;
    kill(Pid::from_raw(gateway.running.pid().cast_signed()), Signal::SIGTERM).expect("terminate the gateway");
    wait_until(
        "the gateway to report that it terminates",
        TIMEOUT,
        async || match testbed.readyz() {
            (code, text) if code == "503" && text.contains("ending after a signal") => Ok(()),
            other => Err(format!("{other:?}")),
        },
    )
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    // A terminating gateway still serves.
    a.tcp_reply(socket_addr(GATEWAY[0], SQL_PORT));
    assert!(gateway.running.wait(TIMEOUT).success());
}

/// The new gateway generates a key, for which no sandbox has a Peer yet.
pub(super) async fn new_gateway_waits_for_all_sandboxes(testbed: &Testbed, arguments: &[&str]) {
    std::fs::remove_file(testbed.file("key")).expect("remove the key");
    let before = testbed.status().await["publicKey"].clone();
    let _gateway = testbed.gateway(arguments);
    let status = testbed.wait_for_status("the new gateway to publish its key", |status| {
        status["publicKey"] != before
    });
    let key = status.await["publicKey"]
        .as_str()
        .and_then(|key| key.parse().ok())
        .expect("a key");
    let waits_for = async |names: &str| {
        let line = format!("no node of {names} has connected to this new gateway");
        wait_until(
            format!("the gateway to wait for {names}"),
            TIMEOUT,
            async || match testbed.readyz() {
                (code, text) if code == "503" && text.contains(&line) => Ok(()),
                other => Err(format!("{other:?}")),
            },
        )
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    };
    let [a, b] = &testbed.sandboxes;
    waits_for("m--a, m--b").await;
    a.tunnel.set_peer(key, socket_addr("172.30.1.11", HOST_PORT));
    waits_for("m--b").await;
    b.tunnel.set_peer(key, socket_addr("172.30.1.11", HOST_PORT));
    testbed.wait_until_ready().await;
    a.wait_for_answer_from(socket_addr(GATEWAY[0], SQL_PORT), "db").await;
}
