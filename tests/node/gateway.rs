//! Runs a gateway against a real API server. Two sandboxes must reach their grants and nothing else, even while grants
//! and endpoints change. The gateway's process has only the privileges of its container in deploy/gateway.yaml. The test needs
//! root.

mod lifecycle;
mod testbed;

use std::{collections::BTreeSet, io::ErrorKind, time::Duration};

use clustermesh_lab::wait_until;
use clustermesh_tests::{
    attacker::{RawSender, packets},
    netns,
    traffic::{TCP_PORT, TcpConnection, UdpFlow},
};
use serde_json::json;

use testbed::{
    DB, ENDPOINT_CONNECTIONS, GATEWAY, GATEWAY_POD, HOST_PORT, LOG_PORT, OTHER_POD, SANDBOX_CONNECTIONS, SQL_PORT,
    TIMEOUT, Testbed, grant, hostile, ip, limits, refusals, socket_addr,
};

// threat: gateway-ungranted
#[tokio::test]
async fn sandbox_reaches_only_its_grants_through_a_gateway() {
    let testbed = Testbed::start().await;
    let arguments = [
        "--grant-timeout=60s".to_owned(),
        format!("--sandbox-connections={SANDBOX_CONNECTIONS}"),
        format!("--endpoint-connections={ENDPOINT_CONNECTIONS}"),
    ];
    let arguments = arguments.each_ref().map(String::as_str);
    let mut gateway = testbed.gateway(&arguments);
    gateway_publishes_its_endpoints(&testbed).await;
    namespace_without_rolebinding_is_refused(&testbed).await;
    grants_are_reached_in_both_families(&testbed).await;
    masqueraded_source_port_differs_from_tunnel_port(&testbed).await;
    ungranted_destinations_are_unreachable(&testbed);
    endpoint_changes_are_followed(&testbed).await;
    terminating_endpoint_keeps_connections_until_removed(&testbed).await;
    grant_without_endpoints_refuses_connections(&testbed).await;
    sandboxes_have_separate_grants(&testbed).await;
    gateway_port_moved_to_other_service_ends_connections(&testbed).await;
    unanswered_flow_follows_its_grant_to_a_new_port(&testbed).await;
    revoked_grant_ends_its_connections_at_once(&testbed).await;
    hostile::packets_outside_tunnel_create_no_conntrack_entry(&testbed);
    hostile::fragments_options_and_extension_headers_are_dropped(&testbed).await;
    hostile::packets_of_a_stale_connection_are_dropped(&testbed).await;
    limits::new_connections_per_second_are_limited(&testbed).await;
    limits::connections_to_an_endpoint_are_limited(&testbed).await;
    limits::connections_of_a_sandbox_are_limited(&testbed).await;
    limits::flood_of_one_sandbox_spares_connections_of_another(&testbed).await;
    limits::endpoint_icmp_error_reaches_the_sandbox(&testbed).await;
    refusals::only_invalid_parts_are_refused(&testbed).await;
    refusals::refused_sandbox_access_is_not_applied(&testbed).await;
    refusals::stolen_gateway_token_gives_no_other_rights(&testbed).await;
    limits::thousands_of_grants_are_written_and_removed(&testbed).await;
    limits::largest_sandbox_access_fits_into_the_memory_limit(&testbed, &gateway).await;
    lifecycle::deleted_table_is_restored(&testbed).await;
    lifecycle::restarted_gateway_keeps_identity_and_connections(&testbed, &mut gateway, &arguments).await;
    lifecycle::grants_expire_without_an_api_server(&testbed).await;
    lifecycle::terminating_gateway_is_unready_but_still_serves(&testbed, &mut gateway).await;
    drop(gateway);
    lifecycle::new_gateway_waits_for_all_sandboxes(&testbed, &arguments).await;
}

async fn gateway_publishes_its_endpoints(testbed: &Testbed) {
    let status = testbed
        .wait_for_status("the gateway to publish its key", |status| {
            status["publicKey"].is_string()
        })
        .await;
    assert_eq!(status["wireguardIPs"], json!(GATEWAY));
    let [v4, v6] = GATEWAY_POD;
    // The last endpoint is the node's address with `spec.nodePort` of the SandboxGateway in deploy/gateway.yaml. The sandboxes use
    // HOST_PORT, which the testbed forwards to the gateway.
    assert_eq!(
        status["endpoints"],
        json!([format!("{v4}:51820"), format!("[{v6}]:51820"), "172.30.1.11:51821"])
    );
    assert_eq!(status["backend"], testbed::backend());
    let key = status["publicKey"].as_str().expect("a key").parse().expect("a key");
    for sandbox in &testbed.sandboxes {
        sandbox.tunnel.set_peer(key, socket_addr("172.30.1.11", HOST_PORT));
    }
    testbed.wait_until_ready().await;
}

// threat: stolen-gateway-token
async fn namespace_without_rolebinding_is_refused(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    let grants = [grant("db", "sql", "TCP", SQL_PORT), grant("db", "log", "UDP", LOG_PORT)];
    testbed.write_access("m--a", a.access(&grants)).await;
    let status = testbed.wait_for_status("the namespace to be refused", |status| {
        status["refused"][0]["reason"] == "ServiceUnknown"
            && status["refused"][0]["message"].to_string().contains("may not read")
    });
    let remedy = "kubectl create rolebinding clustermesh-gateway --namespace team --clusterrole=clustermesh-gateway-reads \
                  --serviceaccount=clustermesh-gateway:clustermesh-gateway";
    let status = status.await;
    // The message column of `kubectl get` shows this refusal, too.
    let column = status["message"].to_string();
    assert!(
        column.contains("2 left out") && column.contains("may not read"),
        "{column}"
    );
    let message = status["refused"][0]["message"].to_string();
    assert!(message.contains(remedy), "{message}");
    assert_eq!(a.try_tcp_reply(socket_addr(GATEWAY[0], SQL_PORT)), None);
    let words: Vec<&str> = remedy.split_whitespace().skip(1).collect();
    testbed.cluster().kubectl(words).await.expect("bind the role");
    testbed.apply_access("m--a", a.access(&grants)).await;
}

async fn grants_are_reached_in_both_families(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    for (gateway, gateway_pod) in GATEWAY.into_iter().zip(GATEWAY_POD) {
        a.wait_for_answer_from(socket_addr(gateway, SQL_PORT), "db").await;
        // Pods see the gateway as the source.
        let seen = format!("db {gateway_pod}");
        assert_eq!(a.tcp_reply(socket_addr(gateway, SQL_PORT)), seen);
        assert_eq!(a.udp_reply(socket_addr(gateway, LOG_PORT)), seen);
    }
}

/// A masqueraded connection must not get the tunnel's listen port as its source port. Its replies would go to the
/// tunnel.
async fn masqueraded_source_port_differs_from_tunnel_port(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    let db = &testbed.endpoint_pods[0];
    db.nft(
        "table inet ports { chain in { type filter hook input priority filter; policy accept;
             udp dport 5000 udp sport 51820 counter
             udp dport 5000 counter
         }\n }\n",
    );
    let raw = RawSender::open(&a.ns, &a.tunnel.interface);
    wait_until("the pod to get a datagram", TIMEOUT, async || {
        for (from, to) in a.addresses.map(ip).into_iter().zip(GATEWAY.map(ip)) {
            raw.send(to, &packets::udp(from, to, (51820, LOG_PORT)))
                .map_err(|error| error.to_string())?;
        }
        let counters = db.run("nft", &["list", "chain", "inet", "ports", "in"]);
        let are_both_zero = counters.matches("counter packets 0 ").count() == 2;
        if are_both_zero { Err(counters) } else { Ok(()) }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    let counters = db.run("nft", &["list", "chain", "inet", "ports", "in"]);
    assert!(
        counters.contains("udp sport 51820 udp dport 5000 counter packets 0 "),
        "{counters}"
    );
}

// threat: gateway-ungranted
fn ungranted_destinations_are_unreachable(testbed: &Testbed) {
    let [a, b] = &testbed.sandboxes;
    let ungranted = [
        (GATEWAY[0], LOG_PORT),
        (GATEWAY[1], LOG_PORT),
        (GATEWAY[0], 9587),
        (GATEWAY[1], 9587),
        (GATEWAY_POD[0], 9587),
        (DB[0], TCP_PORT),
        (DB[1], TCP_PORT),
        (OTHER_POD[0], TCP_PORT),
        // The gateway and these pods both serve this port.
        (DB[0], SQL_PORT),
        (DB[1], SQL_PORT),
        (OTHER_POD[1], SQL_PORT),
        ("10.10.1.1", 22),
    ];
    for (address, port) in ungranted {
        assert_eq!(a.try_tcp_reply(socket_addr(address, port)), None, "{address} {port}");
    }
    assert_eq!(a.try_udp_reply(socket_addr(GATEWAY[0], SQL_PORT)), None);
    let before = testbed.dropped("first", "neither TCP nor UDP");
    assert!(!a.ns.pings(GATEWAY[0]) && !a.ns.pings(DB[0]));
    // The chain `first` must drop the pings, before the conntrack lookup. Only its counter shows that, because a later chain would drop
    // them, too.
    netns::wait_until("the pings to be dropped", TIMEOUT, || {
        testbed.dropped("first", "neither TCP nor UDP") > before
    });
    // A pod, the gateway's own pod, the node and the other sandbox cannot connect to a sandbox.
    let listener =
        a.ns.enter(|| std::net::TcpListener::bind((ip(a.addresses[0]), 7000)))
            .expect("listen");
    let to = listener.local_addr().expect("an address");
    for ns in [&testbed.endpoint_pods[0], &testbed.gateway_pod, &testbed.node] {
        assert!(TcpConnection::try_open(ns, to).is_none(), "from {}", ns.name);
    }
    assert_eq!(b.try_tcp_reply(to), None);
    // The other sandbox has no grant yet.
    assert_eq!(b.try_tcp_reply(socket_addr(GATEWAY[0], SQL_PORT)), None);
}

async fn endpoint_changes_are_followed(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    let flow = UdpFlow::open(&a.ns, socket_addr(GATEWAY[0], LOG_PORT));
    assert!(flow.request().starts_with("db"));
    testbed.write_endpoints("db", &[OTHER_POD]).await;
    a.wait_for_answer_from(socket_addr(GATEWAY[0], SQL_PORT), "other").await;
    // By itself, conntrack would keep a UDP flow at the removed endpoint.
    wait_until("the flow to reach the other endpoint", TIMEOUT, async || {
        match flow.try_request() {
            Some(answer) if answer.starts_with("other") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    // New connections are spread over all endpoints.
    testbed.write_endpoints("db", &[DB, OTHER_POD]).await;
    let mut seen = BTreeSet::new();
    wait_until("both endpoints to answer", TIMEOUT, async || {
        seen.extend(a.try_tcp_reply(socket_addr(GATEWAY[1], SQL_PORT)));
        if seen.len() == 2 {
            Ok(())
        } else {
            Err(format!("{seen:?}"))
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    testbed
        .write_service("db", json!({"selector": {"app": "db"}, "sessionAffinity": "ClientIP"}))
        .await;
    wait_until("only one endpoint to answer", TIMEOUT, async || {
        let all: BTreeSet<_> = (0..12)
            .map(|_| a.tcp_reply(socket_addr(GATEWAY[0], SQL_PORT)))
            .collect();
        if all.len() == 1 {
            Ok(())
        } else {
            Err(format!("{all:?}"))
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    testbed
        .write_service("db", json!({"selector": {"app": "db"}, "sessionAffinity": "None"}))
        .await;
    testbed.write_endpoints("db", &[DB]).await;
    // Both endpoints may answer until the last change is applied.
    a.wait_for_answers_only_from(socket_addr(GATEWAY[0], SQL_PORT), "db")
        .await;
}

// threat: gateway-revoked-connection
async fn terminating_endpoint_keeps_connections_until_removed(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    let mut connection = TcpConnection::open(&a.ns, socket_addr(GATEWAY[0], SQL_PORT));
    assert!(connection.request().starts_with("db"));
    let ready = json!({"ready": true, "serving": true, "terminating": false});
    let terminating = json!({"ready": false, "serving": true, "terminating": true});
    testbed
        .write_endpoints_with("db", &[(DB, terminating), (OTHER_POD, ready)])
        .await;
    a.wait_for_answers_only_from(socket_addr(GATEWAY[0], SQL_PORT), "other")
        .await;
    assert!(connection.request().starts_with("db"), "the old connection");
    testbed.write_endpoints("db", &[OTHER_POD]).await;
    wait_until("the old connection to end", TIMEOUT, async || {
        let first = connection.try_request();
        // A new connection is answered, so the old one is not only slow.
        assert!(a.tcp_reply(socket_addr(GATEWAY[0], SQL_PORT)).starts_with("other"));
        match (first, connection.try_request()) {
            (None, None) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    testbed.write_endpoints("db", &[DB]).await;
    a.wait_for_answer_from(socket_addr(GATEWAY[0], SQL_PORT), "db").await;
}

async fn grant_without_endpoints_refuses_connections(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    let mut connection = TcpConnection::open(&a.ns, socket_addr(GATEWAY[0], SQL_PORT));
    connection.request();
    testbed.write_endpoints("db", &[]).await;
    wait_until("connections to be refused", TIMEOUT, async || {
        let connect =
            || std::net::TcpStream::connect_timeout(&socket_addr(GATEWAY[0], SQL_PORT), Duration::from_secs(5));
        match a.ns.enter(connect).map_err(|error| error.kind()) {
            Err(ErrorKind::ConnectionRefused) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    for (address, port) in [
        (DB[0], SQL_PORT),
        (DB[1], SQL_PORT),
        (DB[0], LOG_PORT),
        (DB[0], TCP_PORT),
    ] {
        assert_eq!(
            (
                a.try_tcp_reply(socket_addr(address, port)),
                a.try_udp_reply(socket_addr(address, port))
            ),
            (None, None),
            "{address} {port}"
        );
    }
    assert_eq!(connection.try_request(), None);
    testbed.write_endpoints("db", &[DB]).await;
    a.wait_for_answer_from(socket_addr(GATEWAY[0], SQL_PORT), "db").await;
}

// threat: gateway-revoked-connection
async fn unanswered_flow_follows_its_grant_to_a_new_port(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    let unanswered_datagrams = || testbed.unanswered_datagrams.load(std::sync::atomic::Ordering::Acquire);
    let granted = |port| [grant("db", "sql", "TCP", SQL_PORT), grant("db", port, "UDP", LOG_PORT)];
    testbed.apply_access("m--a", a.access(&granted("mute"))).await;
    let flow = UdpFlow::open(&a.ns, socket_addr(GATEWAY[0], LOG_PORT));
    let before = unanswered_datagrams();
    wait_until("the pod to get datagrams", TIMEOUT, async || {
        flow.send();
        if unanswered_datagrams() > before {
            Ok(())
        } else {
            Err("none".to_owned())
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    // The grant moves to another port of the same pod; its gateway port stays. Packets of the flow must not reach the
    // old port.
    testbed.apply_access("m--a", a.access(&granted("log"))).await;
    let before = unanswered_datagrams();
    wait_until("the flow to reach the new port", TIMEOUT, async || {
        match flow.try_request() {
            Some(answer) if answer.starts_with("db") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(unanswered_datagrams(), before);
}

// threat: gateway-ungranted
async fn sandboxes_have_separate_grants(testbed: &Testbed) {
    let [a, b] = &testbed.sandboxes;
    // Sandbox b gets the gateway port that sandbox a uses, for another Service.
    testbed
        .apply_access("m--b", b.access(&[grant("web", "sql", "TCP", SQL_PORT)]))
        .await;
    b.wait_for_answer_from(socket_addr(GATEWAY[0], SQL_PORT), "other").await;
    assert!(a.tcp_reply(socket_addr(GATEWAY[0], SQL_PORT)).starts_with("db"));
    assert_eq!(b.try_udp_reply(socket_addr(GATEWAY[0], LOG_PORT)), None);
}

// threat: gateway-revoked-connection
async fn gateway_port_moved_to_other_service_ends_connections(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    let mut connection = TcpConnection::open(&a.ns, socket_addr(GATEWAY[0], SQL_PORT));
    assert!(connection.request().starts_with("db"));
    testbed
        .apply_access(
            "m--a",
            a.access(&[
                grant("web", "sql", "TCP", SQL_PORT),
                grant("db", "log", "UDP", LOG_PORT),
            ]),
        )
        .await;
    a.wait_for_answer_from(socket_addr(GATEWAY[0], SQL_PORT), "other").await;
    assert_eq!(connection.try_request(), None, "the old connection");
}

// threat: gateway-revoked-connection
async fn revoked_grant_ends_its_connections_at_once(testbed: &Testbed) {
    let [a, b] = &testbed.sandboxes;
    let flow = UdpFlow::open(&a.ns, socket_addr(GATEWAY[0], LOG_PORT));
    flow.request();
    let mut connection = TcpConnection::open(&a.ns, socket_addr(GATEWAY[1], SQL_PORT));
    connection.request();
    // These connections send again after the grant is restored, and the gateway must reset them. A faulty gateway would translate their
    // packets again. With a new source port, the database would reset the connection, so the fault would not show. With the old source
    // port, the connection would continue. Of eight connections, most likely at least one would get its old port and show the fault.
    let mut others = [0; 8].map(|_| TcpConnection::open(&a.ns, socket_addr(GATEWAY[0], SQL_PORT)));
    testbed.apply_access("m--a", a.access(&[])).await;
    assert_eq!((flow.try_request(), connection.try_request()), (None, None));
    assert_eq!(a.try_tcp_reply(socket_addr(GATEWAY[0], SQL_PORT)), None);
    b.tcp_reply(socket_addr(GATEWAY[0], SQL_PORT));
    // For a sandbox without nodes the gateway has no peer.
    let mut spec = b.access(&[grant("web", "sql", "TCP", SQL_PORT)]);
    spec["nodes"] = json!([]);
    testbed.apply_access("m--b", spec).await;
    assert_eq!(b.try_tcp_reply(socket_addr(GATEWAY[0], SQL_PORT)), None);
    testbed
        .apply_access("m--b", b.access(&[grant("web", "sql", "TCP", SQL_PORT)]))
        .await;
    testbed
        .apply_access(
            "m--a",
            a.access(&[grant("db", "sql", "TCP", SQL_PORT), grant("db", "log", "UDP", LOG_PORT)]),
        )
        .await;
    b.tunnel.restart_session();
    b.wait_for_answer_from(socket_addr(GATEWAY[0], SQL_PORT), "other").await;
    a.wait_for_answer_from(socket_addr(GATEWAY[0], SQL_PORT), "db").await;
    // The grant is restored, but earlier connections get a reset.
    let errors: Vec<_> = others.iter_mut().map(TcpConnection::error).collect();
    assert_eq!(errors, vec![Some(ErrorKind::ConnectionReset); others.len()]);
}
