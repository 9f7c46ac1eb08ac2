//! How many connections a sandbox may open, and what it hears of errors.

use std::io::ErrorKind;

use clustermesh_agent_core::numbers::NFT_TABLE;
use clustermesh_lab::wait_until;
use serde_json::json;
use x25519_dalek::StaticSecret;

use super::{CONNECTIONS, Call, Counter, GATEWAY, LOG, MUTE, SOON, SQL, Stage, Stream, at, grant, ip};
use crate::attacker::{Raw, packets, public};

/// Of other sandboxes, in one moment: a single transaction would take nft more memory than it gets.
pub(crate) async fn thousands_of_grants_at_once_are_written_and_removed(stage: &Stage) {
    let [a, _] = &stage.sandboxes;
    let other = |number: u8, count: u16| {
        let grants: Vec<_> = (0..count).map(|port| grant("db", "sql", "TCP", SQL + port)).collect();
        let key = StaticSecret::from([100 + number; 32]);
        let third = 32 + 16 * number;
        json!({
            "sandbox": format!("c{number}"), "networks": [format!("100.80.{third}.0/20")], "grants": grants,
            "nodes": [{"name": "c-1", "publicKey": public(&key).to_string(), "wireguardIPs": [format!("100.80.{third}.7")]}],
        })
    };
    let grants = [grant("db", "sql", "TCP", SQL), grant("db", "log", "UDP", LOG)];
    stage.in_force("m--a", a.access(&grants)).await;
    let mut call = Call::open(&a.ns, at(GATEWAY[0], SQL)).expect("a connection");
    for count in [2000, 0] {
        for number in 0..3 {
            stage.grants(&format!("m--c{number}"), other(number, count)).await;
        }
        for number in 0..3 {
            stage.in_force(&format!("m--c{number}"), other(number, count)).await;
        }
        let table = stage.pod.run("nft", &["list", "set", "inet", NFT_TABLE, "open"]);
        let elements = table.matches(" . tcp . ").count();
        assert!(
            (3 * usize::from(count)..3 * usize::from(count) + 10).contains(&elements),
            "{elements}"
        );
        assert!(call.ask().is_some(), "a connection from before");
    }
}

pub(crate) async fn a_sandbox_opens_only_so_many_connections_a_second(stage: &Stage) {
    let [a, _] = &stage.sandboxes;
    let [from, to] = [a.addresses[0], GATEWAY[0]].map(ip);
    let grants = [grant("db", "sql", "TCP", SQL), grant("db", "mute", "UDP", LOG)];
    stage.in_force("m--a", a.access(&grants)).await;
    let got = Counter::new(&stage.pods[0], &format!("udp dport {MUTE}"));
    let stream = Stream::open(&a.ns, at(GATEWAY[0], LOG));
    wait_until("the pod to get a datagram", SOON, async || {
        stream.send();
        match got.packets() {
            0 => Err("none".to_owned()),
            _ => Ok(()),
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    let mut call = Call::open(&a.ns, at(GATEWAY[0], SQL)).expect("a connection");
    assert!(call.ask().is_some());
    let mut slow = a.access(&grants);
    slow["newConnectionsPerSecond"] = json!(1);
    stage.in_force("m--a", slow).await;
    // New connections: far more than the limit and its burst. The call is answered after the last of them.
    let raw = Raw::open(&a.ns, &a.tunnel.interface);
    let before = got.packets();
    for port in 30000..30200 {
        let sent = raw.send(to, &packets::udp(from, to, (port, LOG)));
        sent.expect("send a packet");
    }
    assert!(call.ask().is_some());
    let new = got.packets() - before;
    assert!((1..20).contains(&new), "{new} of 200 new connections in a moment");
    // A connection that stands, though never answered, is no new one. At one packet a second, this would take a minute.
    let before = got.packets();
    wait_until("the pod to get a whole stream", SOON, async || {
        (0..10).for_each(|_| stream.send());
        match got.packets() - before {
            60.. => Ok(()),
            some => Err(format!("{some} datagrams")),
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    let grants = [grant("db", "sql", "TCP", SQL), grant("db", "log", "UDP", LOG)];
    stage.in_force("m--a", a.access(&grants)).await;
}

pub(crate) async fn an_endpoint_gets_only_so_many_connections(stage: &Stage) {
    let [a, b] = &stage.sandboxes;
    for gateway in GATEWAY {
        let to = at(gateway, SQL);
        a.hears(to, "db").await;
        let mut calls: Vec<Call> = (0..2 * CONNECTIONS).map_while(|_| Call::open(&a.ns, to)).collect();
        // Connections that have just ended may count for a moment.
        assert!(
            (CONNECTIONS / 2..=CONNECTIONS).contains(&calls.len()),
            "{} connections to {to}",
            calls.len()
        );
        assert!(calls.iter_mut().all(|call| call.ask().is_some()));
        // Another grant has its own number of them.
        b.hears(to, "other").await;
        calls.truncate(calls.len() / 2);
        a.hears(to, "db").await;
    }
}

pub(crate) async fn an_error_of_an_endpoint_reaches_the_sandbox(stage: &Stage) {
    let [a, _] = &stage.sandboxes;
    let sql = grant("db", "sql", "TCP", SQL);
    let shut = [sql.clone(), grant("db", "shut", "UDP", LOG)];
    stage.in_force("m--a", a.access(&shut)).await;
    for gateway in GATEWAY {
        let stream = Stream::open(&a.ns, at(gateway, LOG));
        wait_until("the port to be unreachable", SOON, async || match stream.error() {
            Some(ErrorKind::ConnectionRefused) => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    }
    let log = [sql, grant("db", "log", "UDP", LOG)];
    stage.in_force("m--a", a.access(&log)).await;
}
