//! Checks the gateway's limits on connections, that it applies thousands of grants and nodes, and that ICMP errors reach a sandbox.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Instant,
};

use clustermesh_agent_core::numbers::NFT_TABLE;
use clustermesh_lab::wait_until;
use clustermesh_tests::{
    attacker::{BackgroundThread, RawSender, packets, public},
    traffic::{Counter, MUTE_PORT, TcpConnection, UdpFlow},
};
use serde_json::json;
use x25519_dalek::StaticSecret;

use super::{
    ENDPOINT_CONNECTIONS, GATEWAY, Gateway, LOG_PORT, SANDBOX_CONNECTIONS, SQL_PORT, Sandbox, TIMEOUT, Testbed, grant,
    ip, socket_addr,
};

/// Writes thousands of grants for three sandboxes that have no node in the testbed. The gateway has to split them: for a
/// single nft transaction, nft would need more memory than the testbed allows it.
pub(crate) async fn thousands_of_grants_are_written_and_removed(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    let access_of_sandbox = |number: u8, count: u16| {
        let grants: Vec<_> = (0..count)
            .map(|port| grant("db", "sql", "TCP", SQL_PORT + port))
            .collect();
        let key = StaticSecret::from([100 + number; 32]);
        let third_octet = 32 + 16 * number;
        json!({
            "sandbox": format!("c{number}"), "networks": [format!("100.80.{third_octet}.0/20")], "grants": grants,
            "nodes": [{"name": "c-1", "publicKey": public(&key).to_string(), "wireguardIPs": [format!("100.80.{third_octet}.7")]}],
        })
    };
    let grants = [grant("db", "sql", "TCP", SQL_PORT), grant("db", "log", "UDP", LOG_PORT)];
    testbed.apply_access("m--a", a.access(&grants)).await;
    let mut connection = TcpConnection::open(&a.ns, socket_addr(GATEWAY[0], SQL_PORT));
    for count in [2000, 0] {
        // All three are written before the test waits, so the gateway gets their grants at about the same time.
        for number in 0..3 {
            testbed
                .write_access(&format!("m--c{number}"), access_of_sandbox(number, count))
                .await;
        }
        for number in 0..3 {
            testbed
                .apply_access(&format!("m--c{number}"), access_of_sandbox(number, count))
                .await;
        }
        let table = testbed
            .gateway_pod
            .run("nft", &["list", "set", "inet", NFT_TABLE, "open"]);
        let elements = table.matches(" . tcp . ").count();
        // The set also has the few grants of the testbed's own sandboxes.
        assert!(
            (3 * usize::from(count)..3 * usize::from(count) + 10).contains(&elements),
            "{elements}"
        );
        // The earlier connection stays open.
        connection.request();
    }
    let delete = ["delete", "sandboxaccesses.kilo.squat.ai", "m--c0", "m--c1", "m--c2"];
    testbed
        .cluster()
        .kubectl(delete)
        .await
        .expect("delete the SandboxAccesses");
}

// threat: gateway-connection-flood
pub(crate) async fn new_connections_per_second_are_limited(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    let [from, to] = [a.addresses[0], GATEWAY[0]].map(ip);
    let grants = [
        grant("db", "sql", "TCP", SQL_PORT),
        grant("db", "mute", "UDP", LOG_PORT),
    ];
    testbed.apply_access("m--a", a.access(&grants)).await;
    let got = Counter::new(&testbed.endpoint_pods[0], &format!("udp dport {MUTE_PORT}"));
    let flow = UdpFlow::open(&a.ns, socket_addr(GATEWAY[0], LOG_PORT));
    wait_until("the pod to get a datagram", TIMEOUT, async || {
        flow.send();
        match got.packets() {
            0 => Err("none".to_owned()),
            _ => Ok(()),
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    let mut connection = TcpConnection::open(&a.ns, socket_addr(GATEWAY[0], SQL_PORT));
    connection.request();
    let mut slow = a.access(&grants);
    slow["newConnectionsPerSecond"] = json!(1);
    testbed.apply_access("m--a", slow).await;
    // Far more new connections than the limit and its burst.
    let raw = RawSender::open(&a.ns, &a.tunnel.interface);
    let before = got.packets();
    for port in 30000..30200 {
        let sent = raw.send(to, &packets::udp(from, to, (port, LOG_PORT)));
        sent.expect("send a packet");
    }
    // This request is sent last, so its reply shows that the gateway has processed all these packets.
    connection.request();
    let new = got.packets() - before;
    assert!((1..20).contains(&new), "{new} of 200 new connections admitted at once");
    // Packets of an existing connection are not limited, even if it never got a reply. At one packet a second only 120
    // datagrams would pass until the timeout.
    let before = got.packets();
    wait_until("the pod to get all datagrams of the flow", TIMEOUT, async || {
        (0..100).for_each(|_| flow.send());
        match got.packets() - before {
            600.. => Ok(()),
            some => Err(format!("{some} datagrams")),
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    let grants = [grant("db", "sql", "TCP", SQL_PORT), grant("db", "log", "UDP", LOG_PORT)];
    testbed.apply_access("m--a", a.access(&grants)).await;
}

/// Opens up to `count` connections, until the gateway refuses one. An attempt without a connection is repeated after an earlier
/// connection has got a reply, so that a slow machine is not taken for a refusal.
fn open_until_refused(from: &Sandbox, to: SocketAddr, count: usize, connections: &mut Vec<TcpConnection>) {
    for _ in 0..count {
        let next = match connections.last_mut() {
            None => Some(TcpConnection::open(&from.ns, to)),
            Some(earlier) => TcpConnection::try_open(&from.ns, to).or_else(|| {
                earlier.request();
                TcpConnection::try_open(&from.ns, to)
            }),
        };
        let Some(next) = next else { return };
        connections.push(next);
    }
}

// threat: gateway-connection-flood
pub(crate) async fn connections_to_an_endpoint_are_limited(testbed: &Testbed) {
    let [a, b] = &testbed.sandboxes;
    for gateway in GATEWAY {
        let to = socket_addr(gateway, SQL_PORT);
        a.wait_for_answer_from(to, "db").await;
        let mut connections = Vec::new();
        open_until_refused(a, to, 2 * ENDPOINT_CONNECTIONS, &mut connections);
        // Connections that have just closed may still count.
        assert!(
            (ENDPOINT_CONNECTIONS / 2..=ENDPOINT_CONNECTIONS).contains(&connections.len()),
            "{} connections to {to}",
            connections.len()
        );
        for connection in &mut connections {
            connection.request();
        }
        // The grant of the other sandbox leads to another endpoint, and has its own limit.
        b.wait_for_answer_from(to, "other").await;
        connections.truncate(connections.len() / 2);
        a.wait_for_answer_from(to, "db").await;
    }
}

pub(crate) async fn endpoint_icmp_error_reaches_the_sandbox(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    let sql = grant("db", "sql", "TCP", SQL_PORT);
    let to_closed_port = [sql.clone(), grant("db", "shut", "UDP", LOG_PORT)];
    testbed.apply_access("m--a", a.access(&to_closed_port)).await;
    for gateway in GATEWAY {
        let flow = UdpFlow::open(&a.ns, socket_addr(gateway, LOG_PORT));
        wait_until("the port to be unreachable", TIMEOUT, async || match flow.error() {
            Some(ErrorKind::ConnectionRefused) => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    }
    let to_log_port = [sql, grant("db", "log", "UDP", LOG_PORT)];
    testbed.apply_access("m--a", a.access(&to_log_port)).await;
}

/// The limit counts the connections of a sandbox through all its grants to all endpoints. The limit of another sandbox is separate.
// threat: gateway-connection-flood
pub(crate) async fn connections_of_a_sandbox_are_limited(testbed: &Testbed) {
    let [a, b] = &testbed.sandboxes;
    let mut connections: Vec<TcpConnection> = Vec::new();
    for gateway in GATEWAY {
        let to = socket_addr(gateway, SQL_PORT);
        a.wait_for_answer_from(to, "db").await;
        open_until_refused(a, to, ENDPOINT_CONNECTIONS, &mut connections);
    }
    assert!(
        connections.len() > ENDPOINT_CONNECTIONS,
        "{} connections",
        connections.len()
    );
    // The limit for one endpoint would admit all these datagrams; the rest of the sandbox's limit admits fewer.
    // Datagrams to LOG_PORT of the gateway arrive at port 5000 (`UDP_PORT`) of the pod `db`.
    let got = Counter::new(&testbed.endpoint_pods[0], "udp dport 5000");
    let raw = RawSender::open(&a.ns, &a.tunnel.interface);
    let [from, to] = [a.addresses[0], GATEWAY[0]].map(ip);
    for port in 31000..31000 + ENDPOINT_CONNECTIONS as u16 {
        let sent = raw.send(to, &packets::udp(from, to, (port, LOG_PORT)));
        sent.expect("send a packet");
    }
    // These requests are sent last, so their replies show that the gateway has processed all these packets.
    for connection in &mut connections {
        connection.request();
    }
    let left = SANDBOX_CONNECTIONS - connections.len();
    assert!(
        (1..=left as u64).contains(&got.packets()),
        "{} of {left}",
        got.packets()
    );
    assert!(testbed.dropped("count", "too many connections of a sandbox") > 0);
    b.wait_for_answer_from(socket_addr(GATEWAY[0], SQL_PORT), "other").await;
    drop(connections);
    testbed
        .gateway_pod
        .run("conntrack", &["-D", "-p", "udp", "--orig-src", a.addresses[0]]);
    a.wait_for_answer_from(socket_addr(GATEWAY[0], SQL_PORT), "db").await;
}

/// Packets of the flood in [`flood_of_one_sandbox_spares_connections_of_another`]; most open a new connection.
const FLOOD: u64 = 100_000;
/// Number of connections that [`time_connections`] opens.
const SAMPLES: usize = 100;

/// Root on the node of one sandbox sends datagrams and SYNs to granted ports as fast as it can, from 60,000 source ports
/// in turn.
// threat: gateway-connection-flood
pub(crate) async fn flood_of_one_sandbox_spares_connections_of_another(testbed: &Testbed) {
    let [a, b] = &testbed.sandboxes;
    let to = socket_addr(GATEWAY[0], SQL_PORT);
    b.wait_for_answer_from(to, "other").await;
    println!(
        "connections while the other sandbox is idle: {}",
        time_connections(b, to)
    );
    let sent = std::sync::Arc::<AtomicU64>::default();
    let (counted, raw) = (sent.clone(), RawSender::open(&a.ns, &a.tunnel.interface));
    let [from, gateway] = [a.addresses[0], GATEWAY[0]].map(ip);
    let flood = BackgroundThread::start(&a.ns, move |stop| flood(&raw, from, gateway, &counted, stop));
    wait_until("the flood", TIMEOUT, async || match sent.load(Ordering::Acquire) {
        1000.. => Ok(()),
        sent => Err(format!("{sent} packets")),
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    let began = (Instant::now(), sent.load(Ordering::Acquire));
    let during_flood = time_connections(b, to);
    let rate = (sent.load(Ordering::Acquire) - began.1) as f64 / began.0.elapsed().as_secs_f64();
    println!("connections while the other sandbox sends {rate:.0} packets a second: {during_flood}");
    assert!(rate > 0.0, "the flood has ended");
    drop(flood);
    assert!(testbed.dropped("enter", "too many new connections") > 0);
    testbed
        .gateway_pod
        .run("conntrack", &["-D", "--orig-src", a.addresses[0]]);
}

fn flood(raw: &RawSender, from: IpAddr, gateway: IpAddr, sent: &AtomicU64, stop: &AtomicBool) {
    for number in 0..FLOOD {
        if stop.load(Ordering::Acquire) {
            return;
        }
        let port = 1024 + u16::try_from(number % 60_000).expect("a port");
        let packet = if number % 2 == 0 {
            packets::udp(from, gateway, (port, LOG_PORT))
        } else {
            packets::syn(from, gateway, (port, SQL_PORT))
        };
        // The transmit queue of the sandbox's own interface may be full.
        let _ = raw.send(gateway, &packet);
        sent.fetch_add(1, Ordering::Release);
    }
}

/// Opens connections one after the other; each must be answered. Returns the median and the longest time until the answer, as text.
fn time_connections(from: &Sandbox, to: SocketAddr) -> String {
    let mut times: Vec<_> = (0..SAMPLES)
        .map(|_| {
            let began = Instant::now();
            from.tcp_reply(to);
            began.elapsed()
        })
        .collect();
    times.sort();
    format!("p50 {:.1?}, longest {:.1?}", times[SAMPLES / 2], times[SAMPLES - 1])
}

/// A SandboxAccess with 5,000 nodes, the maximum. A sandbox's API server could invent so many Nodes. A gateway's memory
/// limit is 256 MiB.
// threat: oversized-access
pub(crate) async fn largest_sandbox_access_fits_into_the_memory_limit(testbed: &Testbed, gateway: &Gateway) {
    let [a, b] = &testbed.sandboxes;
    let node = |number: u32| {
        let mut key = [7; 32];
        key[..4].copy_from_slice(&number.to_be_bytes());
        let address = format!("100.81.{}.{}", number / 250, 1 + number % 250);
        json!({"name": format!("n{number}"), "publicKey": public(&StaticSecret::from(key)).to_string(), "wireguardIPs": [address]})
    };
    let mut spec = json!({
        "sandbox": "large", "networks": ["100.81.0.0/19"],
        "grants": [grant("db", "sql", "TCP", SQL_PORT)], "nodes": [],
    });
    let mut connection = TcpConnection::open(&a.ns, socket_addr(GATEWAY[0], SQL_PORT));
    for count in [5000, 0] {
        spec["nodes"] = (0..count).map(node).collect();
        let began = Instant::now();
        testbed.apply_access("m--large", spec.clone()).await;
        let memory = gateway.resident_kilobytes();
        println!(
            "{count} nodes applied after {:.1?}, VmRSS {} kB",
            began.elapsed(),
            memory
        );
        assert!(memory < 256 << 10, "{memory} kB");
        // The earlier connection stays open.
        connection.request();
        b.wait_for_answer_from(socket_addr(GATEWAY[0], SQL_PORT), "other").await;
    }
    let delete = ["delete", "sandboxaccesses.kilo.squat.ai", "m--large"];
    testbed
        .cluster()
        .kubectl(delete)
        .await
        .expect("delete the SandboxAccess");
}
