//! Attacks a node with packets from hosts that are no peers and from a compromised peer, and with packets of the node itself to
//! peers that are unreachable or slow. The device must count the drops, use bounded memory, and not stall another peer, the friend
//! ([`Conversation`]). Needs root.

mod testbed;

use std::{
    net::{Ipv4Addr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use clustermesh_tests::netns::{NetNs, wait_until};
use wg_agent::device::Device;

use testbed::{
    ATTACKER, Conversation, FRIEND, MAX_MEMORY_GROWTH, Outer, PORT, RawPeer, TIMEOUT, Testbed, V4, V6, VICTIM, open,
    peer, public, resident_memory, secret, udp,
};

/// Number of source addresses of the handshake flood.
const SOURCES: u32 = 10_000;
/// Maximum number of staged packets of a peer (`wg-userspace/src/staged.rs`).
const STAGED_PACKETS: u64 = 128;

/// Runs each test over IPv4 with devices of one worker (a thread for each direction), and over IPv6 with two.
macro_rules! both {
    ($($name:ident)*) => {
        mod over_ipv4_with_one_worker {
            $(#[test] fn $name() {
                super::testbed::run_in_own_process(concat!(module_path!(), "::", stringify!($name)), || super::$name(&super::V4));
            })*
        }
        mod over_ipv6_with_two_workers {
            $(#[test] fn $name() {
                super::testbed::run_in_own_process(concat!(module_path!(), "::", stringify!($name)), || super::$name(&super::V6));
            })*
        }
    };
}

both! {
    handshake_flood_stalls_no_peer_and_blocks_no_new_one
    replayed_or_altered_messages_are_dropped_without_roaming
    compromised_peer_cannot_use_another_source
    flood_to_unreachable_peer_uses_bounded_memory
    stalled_interface_counts_drops_and_recovers
    stalled_underlay_counts_drops_in_bounded_memory
}

/// The messages of the handshake flood: initiations with a valid mac1, which cost the victim most, and malformed messages of each
/// type.
fn messages(testbed: &Testbed) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for number in 50..250_u8 {
        // The victim detects an unknown key only after a Diffie-Hellman operation and a decryption. The key of the newcomer, the
        // peer that connects during the flood, is not used: with this key an attacker could block the newcomer by a timestamp in
        // the future.
        all.push(RawPeer::new(testbed, secret(number)).initiation());
    }
    for (kind, length) in [
        (1, 148),
        (2, 92),
        (3, 64),
        (4, 32),
        (4, 1452),
        (1, 147),
        (2, 93),
        (5, 148),
    ] {
        let mut garbage = vec![0x5a; length];
        garbage[..4].copy_from_slice(&[kind, 0, 0, 0]);
        all.push(garbage);
    }
    all.push(Vec::new());
    all
}

/// Ends a flood when this value goes out of scope, also when the test panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

// threat: handshake-flood
fn handshake_flood_stalls_no_peer_and_blocks_no_new_one(outer: &'static Outer) {
    let mut testbed = Testbed::new(outer);
    // The attacker has every address of the range, and the victim routes replies to it.
    testbed.attacker.ip(&format!("route add local {} dev lo", outer.range));
    testbed.attacker.set_sysctl("net/ipv6/ip_nonlocal_bind", "1");
    // The attacker cannot send a neighbour solicitation from such an address. A ping from its own address first
    // creates its neighbour entry for the victim.
    assert!(testbed.attacker.pings_patiently(&outer.victim.to_string()));
    testbed
        .victim
        .ip(&format!("route add {} via {}", outer.range, outer.attacker));
    let newcomer = 4;
    testbed.device.apply(&[peer(newcomer, None)]).expect("add a peer");
    let newcomer_ns = NetNs::new("newcomer");
    outer.add_link(2, &testbed.victim, &newcomer_ns);
    let victim_endpoint = testbed.victim_endpoint();
    let messages = messages(&testbed);
    let before = resident_memory();
    let conversation = Conversation::start(&testbed);
    let (stop, sockets) = (AtomicBool::new(false), AtomicU64::new(0));
    let attacker = &testbed.attacker;
    let flood = || {
        let mut next = messages.iter().cycle();
        for number in (0..SOURCES).cycle() {
            let socket = UdpSocket::bind(((outer.nth)(number), 0)).expect("bind one of the sources");
            for message in next.by_ref().take(5) {
                // Errors of a full queue are ignored.
                let _ = socket.send_to(message, victim_endpoint);
            }
            if sockets.fetch_add(1, Ordering::Relaxed) >= SOURCES.into() {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                // The first round runs at full speed: established sessions must survive it. Later rounds send about 5,000 messages a
                // second, most of them initiations. Above 1,000 initiations a second, the device requires a cookie. At a higher rate
                // than 5,000, the kernel would drop some messages before the device reads and counts them.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| attacker.enter(flood));
        let _stop = Stop(&stop);
        wait_until("a message from every source", Duration::from_secs(60), || {
            sockets.load(Ordering::Relaxed) >= SOURCES.into()
        });
        println!("first round: {:?}", testbed.device.observe().expect("observe").drops);
        // A configured peer connects for the first time. Under load it needs a cookie.
        let (_, _device) = open(
            outer,
            &newcomer_ns,
            newcomer,
            &[peer(VICTIM, Some((outer.links[2][0], PORT).into()))],
        );
        wait_until(
            "a ping from the newcomer during the flood",
            Duration::from_secs(60),
            || newcomer_ns.pings("10.9.0.1"),
        );
    });
    conversation.finish();
    let grown = resident_memory().saturating_sub(before);
    println!(
        "{} sources, {:?}, {grown} bytes",
        sockets.load(Ordering::Relaxed),
        testbed.device.observe().expect("observe").drops
    );
    assert!(sockets.load(Ordering::Relaxed) >= SOURCES.into());
    assert!(testbed.dropped(&["under_load"]) > 1_000 && testbed.dropped(&["invalid"]) > 100);
    assert!(grown < MAX_MEMORY_GROWTH, "{grown} bytes more");
}

// threat: replayed-message
fn replayed_or_altered_messages_are_dropped_without_roaming(outer: &'static Outer) {
    let testbed = Testbed::new(outer);
    let inner = testbed.inner_socket(9);
    let mut raw_peer = RawPeer::new(&testbed, secret(ATTACKER));
    let initiation = raw_peer.handshake();
    let conversation = Conversation::start(&testbed);
    let mut buffer = [0; 2048];
    let mut received = |what: &str| {
        let length = inner
            .recv(&mut buffer)
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    let hello = udp([10, 9, 0, ATTACKER], 9, b"hello");

    let once = raw_peer.seal(&hello);
    raw_peer.socket.send(&once).expect("send");
    assert_eq!(received("the first message"), "hello");
    let endpoint = testbed.endpoint(ATTACKER);
    assert_eq!(endpoint, raw_peer.socket.local_addr().ok());
    let elsewhere = RawPeer::new(&testbed, secret(ATTACKER)).socket;
    let replayed = testbed.dropped(&["replayed"]);
    for _ in 0..500 {
        raw_peer.socket.send(&once).expect("send");
        elsewhere.send(&once).expect("send");
    }
    wait_until("every replay to be counted", TIMEOUT, || {
        testbed.dropped(&["replayed"]) == replayed + 1_000
    });

    // A replayed initiation, from the same and from another address, gets no response and does not affect the session. The device
    // accepts at most one initiation of a peer every 20 ms and counts the others as `under_load`, before it checks for a replay.
    let refused = || testbed.dropped(&["replayed", "under_load"]);
    let before = refused();
    for _ in 0..10 {
        raw_peer.socket.send(&initiation).expect("send");
        elsewhere.send(&initiation).expect("send");
    }
    wait_until("every replayed handshake to be counted", TIMEOUT, || {
        refused() == before + 20
    });
    for socket in [&raw_peer.socket, &elsewhere] {
        socket.set_nonblocking(true).expect("a socket that does not wait");
        let error = socket
            .recv(&mut [0; 2048])
            .expect_err("a response to a replayed handshake");
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    }

    // Truncated and altered copies of a message. The intact message is accepted after them, so they did not use its
    // counter.
    let fresh = raw_peer.seal(&udp([10, 9, 0, ATTACKER], 9, b"whole"));
    let counted = ["invalid", "unknown_peer", "replayed"];
    let before = testbed.dropped(&counted);
    let mut sent = 0;
    for length in 0..fresh.len() {
        elsewhere.send(&fresh[..length]).expect("send");
        sent += 1;
    }
    for offset in 0..fresh.len() {
        let mut changed = fresh.clone();
        changed[offset] ^= 0x10;
        elsewhere.send(&changed).expect("send");
        sent += 1;
    }
    wait_until("every broken message to be counted", TIMEOUT, || {
        testbed.dropped(&counted) == before + sent
    });
    assert_eq!(
        testbed.endpoint(ATTACKER),
        endpoint,
        "only a new authentic message changes the endpoint"
    );
    raw_peer.socket.send(&fresh).expect("send");
    assert_eq!(received("the intact message"), "whole");
    conversation.finish();
}

// threat: compromised-peer
fn compromised_peer_cannot_use_another_source(outer: &'static Outer) {
    let testbed = Testbed::new(outer);
    let inner = testbed.inner_socket(9);
    let mut raw_peer = RawPeer::new(&testbed, secret(ATTACKER));
    raw_peer.handshake();
    let conversation = Conversation::start(&testbed);
    let own = [10, 9, 0, ATTACKER];
    let counted = ["foreign_source", "invalid", "interface"];
    let before = testbed.dropped(&counted);
    let mut sent = 0;
    let mut send = |raw_peer: &mut RawPeer, packet: &[u8]| {
        let message = raw_peer.seal(packet);
        raw_peer.socket.send(&message).expect("send");
        sent += 1;
    };
    for source in [
        [10, 9, 0, FRIEND],
        [10, 9, 0, VICTIM],
        [127, 0, 0, 1],
        [198, 51, 100, 3],
        [0; 4],
        [255; 4],
        [224, 0, 0, 1],
    ] {
        send(&mut raw_peer, &udp(source, 9, b"forged"));
    }
    // The friend's IPv6 address and its IPv4-mapped address; invalid versions; truncated headers; wrong lengths.
    let mut v6 = vec![0x60, 0, 0, 0, 0, 8, 17, 64];
    v6.extend([
        0xfd, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0xfd, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1,
    ]);
    v6.extend([0x30, 0x39, 0, 9, 0, 8, 0, 0]);
    send(&mut raw_peer, &v6);
    v6[8..24].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, FRIEND]);
    send(&mut raw_peer, &v6);
    let good = udp(own, 9, b"text");
    for version in [0x05, 0x15, 0x55, 0x75, 0xf5] {
        let mut packet = good.clone();
        packet[0] = version;
        send(&mut raw_peer, &packet);
    }
    for length in [1, 4, 19] {
        send(&mut raw_peer, &good[..length]);
    }
    for length in [0_u16, 1, 19, 2_000] {
        let mut packet = good.clone();
        packet[2..4].copy_from_slice(&length.to_be_bytes());
        send(&mut raw_peer, &packet);
    }
    wait_until("every packet to be counted", TIMEOUT, || {
        let now = testbed.dropped(&counted) - before;
        assert!(now <= sent, "{now} drops of {sent} packets");
        now == sent
    });
    let honest = raw_peer.seal(&udp(own, 9, b"honest"));
    raw_peer.socket.send(&honest).expect("send");
    let mut buffer = [0; 64];
    let length = inner.recv(&mut buffer).expect("the packet with the right source");
    assert_eq!(&buffer[..length], b"honest", "the first accepted packet");
    conversation.finish();
}

// threat: silent-peer-flood
fn flood_to_unreachable_peer_uses_bounded_memory(outer: &'static Outer) {
    let mut testbed = Testbed::new(outer);
    // This peer never responds to an initiation, so the device stages the newest packets to it and drops the others.
    let unreachable = 5;
    testbed
        .device
        .apply(&[peer(unreachable, Some((outer.attacker, 9).into()))])
        .expect("add a peer");
    let conversation = Conversation::start(&testbed);
    let before = resident_memory();
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let victim = &testbed.victim;
    let flood = || {
        let socket = UdpSocket::bind("10.9.0.1:0").expect("bind");
        while !stop.load(Ordering::Acquire) {
            for _ in 0..300 {
                if socket
                    .send_to(&[0; 1_392], (Ipv4Addr::new(10, 9, 0, unreachable), 9))
                    .is_ok()
                {
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            }
            // All senders share the interface's queue, which drops the newest packets. The pause leaves room for the replies
            // of the conversation.
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| victim.enter(flood));
        scope.spawn(|| victim.enter(flood));
        let _stop = Stop(&stop);
        conversation.wait_for_answers();
        wait_until("twice the memory limit to be sent", Duration::from_secs(60), || {
            sent.load(Ordering::Relaxed) * 1_392 > 2 * MAX_MEMORY_GROWTH
        });
        conversation.wait_for_answers();
    });
    let grown = resident_memory().saturating_sub(before);
    conversation.finish();
    let sent = sent.into_inner();
    println!(
        "{grown} bytes; {sent} sent, {:?}",
        testbed.device.observe().expect("observe").drops
    );
    assert!(grown < MAX_MEMORY_GROWTH, "{grown} bytes more");
    wait_until("the drops of all packets that are not queued", TIMEOUT, || {
        testbed.dropped(&["no_session", "interface_queue"]) + STAGED_PACKETS >= sent
    });
    assert!(testbed.dropped(&["no_session"]) > STAGED_PACKETS);
    assert_eq!(
        testbed.device.observe().expect("observe").peers[&public(unreachable)]
            .stats
            .handshake_age,
        None
    );
}

// threat: stalled-interface
fn stalled_interface_counts_drops_and_recovers(outer: &'static Outer) {
    let testbed = Testbed::new(outer);
    let mut raw_peer = RawPeer::new(&testbed, secret(ATTACKER));
    raw_peer.handshake();
    let conversation = Conversation::start(&testbed);
    let before = resident_memory();
    // The test never reads from this socket, so the kernel queues packets until the socket's buffer is full.
    let inner = testbed.inner_socket(9);
    let packet = udp([10, 9, 0, ATTACKER], 9, &[7; 1_200]);
    let mut flood = |packets: u64| {
        for _ in 0..packets {
            let message = raw_peer.seal(&packet);
            raw_peer.socket.send(&message).expect("send");
        }
    };
    flood(10_000);
    conversation.wait_for_answers();
    let counted = ["interface", "socket_queue"];
    let (interface, before_down) = (&testbed.interface, testbed.dropped(&counted));
    testbed.victim.ip(&format!("link set {interface} down"));
    flood(10_000);
    wait_until("a drop for every packet to the disabled interface", TIMEOUT, || {
        testbed.dropped(&counted) >= before_down + 10_000
    });
    testbed.victim.ip(&format!("link set {interface} up"));
    conversation.wait_for_answers();
    let grown = resident_memory().saturating_sub(before);
    println!("{grown} bytes, {:?}", testbed.device.observe().expect("observe").drops);
    conversation.finish();
    assert!(grown < MAX_MEMORY_GROWTH, "{grown} bytes more");
    assert!(testbed.dropped(&["interface"]) > 0);
    drop(inner);
}

// threat: stalled-interface
fn stalled_underlay_counts_drops_in_bounded_memory(outer: &'static Outer) {
    let testbed = Testbed::new(outer);
    let mut raw_peer = RawPeer::new(&testbed, secret(ATTACKER));
    raw_peer.handshake();
    // The link to the attacker is limited to about ten packets a second, and its queue is larger than a socket's send buffer.
    let tc = |line: &str| testbed.victim.run("tc", &line.split(' ').collect::<Vec<_>>());
    tc("qdisc replace dev eth1 root tbf rate 100kbit burst 3000 limit 64mb");
    let before = resident_memory();
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let victim = &testbed.victim;
    let flood = || {
        let socket = UdpSocket::bind("10.9.0.1:0").expect("bind");
        while !stop.load(Ordering::Acquire) {
            for _ in 0..300 {
                let result = socket.send_to(&[0; 1_392], (Ipv4Addr::new(10, 9, 0, ATTACKER), 9));
                sent.fetch_add(u64::from(result.is_ok()), Ordering::Relaxed);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let counted = ["network", "interface_queue"];
    std::thread::scope(|scope| {
        scope.spawn(|| victim.enter(flood));
        let _stop = Stop(&stop);
        wait_until(
            "more packets than fit into the send buffer",
            Duration::from_secs(60),
            || sent.load(Ordering::Relaxed) * 1_392 > 2 * MAX_MEMORY_GROWTH && testbed.dropped(&["network"]) > 0,
        );
    });
    let grown = resident_memory().saturating_sub(before);
    let sent = sent.into_inner();
    println!(
        "{grown} bytes; {sent} sent, {:?}",
        testbed.device.observe().expect("observe").drops
    );
    assert!(grown < MAX_MEMORY_GROWTH, "{grown} bytes more");
    // Queued packets are not counted as dropped: up to 8 MiB in the socket and 500 packets in each interface queue,
    // together less than 16 MiB.
    wait_until("the drops of all packets that are not queued", TIMEOUT, || {
        testbed.dropped(&counted) * 1_392 + (16 << 20) >= sent * 1_392
    });
    tc("qdisc del dev eth1 root");
    wait_until("a ping from the friend", TIMEOUT, || testbed.friend.pings("10.9.0.1"));
    Conversation::start(&testbed).finish();
}
