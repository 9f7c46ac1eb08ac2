//! What anyone, and what a peer that turned, may send to a node: nothing but counted drops, bounded memory, and no stall for another
//! peer, who is asked all the while. Needs root.

mod hostile;
mod netns;

use std::{
    net::{Ipv4Addr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use hostile::{
    Conversation, FRIEND, MEMORY, Mouth, Outer, PORT, SOON, STRANGER, Stage, V4, V6, VICTIM, open, peer, public,
    resident, secret, udp,
};
use netns::{NetNs, wait_until};
use wg_agent::device::Device;

const SOURCES: u32 = 10_000;
/// What one peer's packets may wait in (`userspace/staged.rs`).
const HELD: u64 = 128;

macro_rules! both {
    ($($name:ident)*) => {
        mod over_ipv4_with_one_worker {
            $(#[test] fn $name() {
                crate::hostile::alone(concat!(module_path!(), "::", stringify!($name)), || super::$name(&super::V4));
            })*
        }
        mod over_ipv6_with_two_workers {
            $(#[test] fn $name() {
                crate::hostile::alone(concat!(module_path!(), "::", stringify!($name)), || super::$name(&super::V6));
            })*
        }
    };
}

both! {
    handshake_flood_stalls_no_peer_and_blocks_no_new_one
    replayed_or_altered_messages_are_dropped_without_roaming
    compromised_peer_cannot_use_another_source
    flood_to_a_silent_peer_costs_bounded_memory
    stalled_interface_counts_drops_and_recovers
    stalled_underlay_counts_drops_in_bounded_memory
}

/// Of every kind of message what costs the victim most: an initiation with a true MAC for its key, and broken ones of each type.
fn messages(stage: &Stage) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for number in 50..250_u8 {
        // Keys that are nobody's: the victim finds that out after two of its costly steps. (Not the newcomer's: whoever has that may
        // keep it out, with a time that lies in the future.)
        all.push(Mouth::new(stage, secret(number)).initiation());
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

/// Ends a flood, also when what is waited for meanwhile does not come.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

// threat: handshake-flood
fn handshake_flood_stalls_no_peer_and_blocks_no_new_one(outer: &'static Outer) {
    let mut stage = Stage::new(outer);
    // Every address of the range is the stranger's own, and the victim answers there.
    stage.stranger.ip(&format!("route add local {} dev lo", outer.range));
    stage.stranger.set_sysctl("net/ipv6/ip_nonlocal_bind", "1");
    // In IPv6 nobody asks for a neighbour in the name of such an address: it is known before.
    assert!(stage.stranger.pings(&outer.victim.to_string()));
    stage
        .victim
        .ip(&format!("route add {} via {}", outer.range, outer.stranger));
    let newcomer = 4;
    stage.device.apply(&[peer(newcomer, None)]).expect("add a peer");
    let arrived = NetNs::new("newcomer");
    outer.wire(2, &stage.victim, &arrived);
    let victim_at = stage.victim_at();
    let messages = messages(&stage);
    let before = resident();
    let conversation = Conversation::start(&stage);
    let (stop, sources) = (AtomicBool::new(false), AtomicU64::new(0));
    let stranger = &stage.stranger;
    let flood = || {
        let mut next = messages.iter().cycle();
        for number in (0..SOURCES).cycle() {
            let socket = UdpSocket::bind(((outer.nth)(number), 0)).expect("bind one of the sources");
            for message in next.by_ref().take(5) {
                // A full queue is no failure of this test.
                let _ = socket.send_to(message, victim_at);
            }
            if sources.fetch_add(1, Ordering::Relaxed) >= SOURCES.into() {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                // First as fast as it goes: what counts is that those who are in session go on. Then some 5,000 a second, still more
                // than are answered without a cookie, but no more than this machine can look at: the kernel drops the rest unseen.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| stranger.enter(flood));
        let _stop = Stop(&stop);
        wait_until("a message from every source", Duration::from_secs(60), || {
            sources.load(Ordering::Relaxed) >= SOURCES.into()
        });
        println!("the fast part: {:?}", stage.device.observe().expect("observe").drops);
        // Someone whom the victim knows comes for the first time: it needs a cookie to be heard.
        let (_, _device) = open(
            outer,
            &arrived,
            newcomer,
            &[peer(VICTIM, Some((outer.wires[2][0], PORT).into()))],
        );
        wait_until("the newcomer, through the flood", Duration::from_secs(60), || {
            arrived.pings("10.9.0.1")
        });
    });
    conversation.went_on();
    let grown = resident().saturating_sub(before);
    println!(
        "{} sources, {:?}, {grown} bytes",
        sources.load(Ordering::Relaxed),
        stage.device.observe().expect("observe").drops
    );
    assert!(sources.load(Ordering::Relaxed) >= SOURCES.into());
    assert!(stage.dropped(&["under_load"]) > 1_000 && stage.dropped(&["invalid"]) > 100);
    assert!(grown < MEMORY, "{grown} bytes more");
}

// threat: replayed-message
fn replayed_or_altered_messages_are_dropped_without_roaming(outer: &'static Outer) {
    let stage = Stage::new(outer);
    let inner = stage.inner_socket(9);
    let mut mouth = Mouth::new(&stage, secret(STRANGER));
    let initiation = mouth.shake_hands();
    let conversation = Conversation::start(&stage);
    let mut buffer = [0; 2048];
    let mut heard = |what: &str| {
        let length = inner
            .recv(&mut buffer)
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    let hello = udp([10, 9, 0, STRANGER], 9, b"hello");

    let once = mouth.seal(&hello);
    mouth.socket.send(&once).expect("send");
    assert_eq!(heard("the first"), "hello");
    let home = stage.endpoint(STRANGER);
    assert_eq!(home, mouth.socket.local_addr().ok());
    let elsewhere = Mouth::new(&stage, secret(STRANGER)).socket;
    let replayed = stage.dropped(&["replayed"]);
    for _ in 0..500 {
        mouth.socket.send(&once).expect("send");
        elsewhere.send(&once).expect("send");
    }
    wait_until("every replay to be counted", SOON, || {
        stage.dropped(&["replayed"]) == replayed + 1_000
    });

    // The first word of a session, from there and from elsewhere: nobody is answered, and the session stays.
    // One within 20 ms of the handshake is dropped before it is opened.
    let refused = || stage.dropped(&["replayed", "under_load"]);
    let before = refused();
    for _ in 0..10 {
        mouth.socket.send(&initiation).expect("send");
        elsewhere.send(&initiation).expect("send");
    }
    wait_until("every replayed handshake to be counted", SOON, || {
        refused() == before + 20
    });
    for socket in [&mouth.socket, &elsewhere] {
        socket.set_nonblocking(true).expect("a socket that does not wait");
        let silence = socket
            .recv(&mut [0; 2048])
            .expect_err("an answer to a replayed handshake");
        assert_eq!(silence.kind(), std::io::ErrorKind::WouldBlock);
    }

    // All that comes of a message that is cut or changed; the true one after it shows that its number was not used up.
    let fresh = mouth.seal(&udp([10, 9, 0, STRANGER], 9, b"whole"));
    let broken = ["invalid", "unknown_peer", "replayed"];
    let before = stage.dropped(&broken);
    let mut sent = 0;
    for length in 0..fresh.len() {
        elsewhere.send(&fresh[..length]).expect("send");
        sent += 1;
    }
    for at in 0..fresh.len() {
        let mut changed = fresh.clone();
        changed[at] ^= 0x10;
        elsewhere.send(&changed).expect("send");
        sent += 1;
    }
    wait_until("every broken message to be counted", SOON, || {
        stage.dropped(&broken) == before + sent
    });
    assert_eq!(
        stage.endpoint(STRANGER),
        home,
        "nothing but a new message of its own moves a peer"
    );
    mouth.socket.send(&fresh).expect("send");
    assert_eq!(heard("the true one"), "whole");
    conversation.went_on();
}

// threat: compromised-peer
fn compromised_peer_cannot_use_another_source(outer: &'static Outer) {
    let stage = Stage::new(outer);
    let inner = stage.inner_socket(9);
    let mut mouth = Mouth::new(&stage, secret(STRANGER));
    mouth.shake_hands();
    let conversation = Conversation::start(&stage);
    let own = [10, 9, 0, STRANGER];
    let counted = ["foreign_source", "invalid", "interface"];
    let before = stage.dropped(&counted);
    let mut sent = 0;
    let mut say = |mouth: &mut Mouth, packet: &[u8]| {
        let message = mouth.seal(packet);
        mouth.socket.send(&message).expect("send");
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
        say(&mut mouth, &udp(source, 9, b"forged"));
    }
    // IPv6 of the friend, in an IPv4 coat and without; no version; headers that are cut; lengths that lie.
    let mut v6 = vec![0x60, 0, 0, 0, 0, 8, 17, 64];
    v6.extend([
        0xfd, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0xfd, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1,
    ]);
    v6.extend([0x30, 0x39, 0, 9, 0, 8, 0, 0]);
    say(&mut mouth, &v6);
    v6[8..24].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, FRIEND]);
    say(&mut mouth, &v6);
    let good = udp(own, 9, b"text");
    for version in [0x05, 0x15, 0x55, 0x75, 0xf5] {
        let mut packet = good.clone();
        packet[0] = version;
        say(&mut mouth, &packet);
    }
    for length in [1, 4, 19] {
        say(&mut mouth, &good[..length]);
    }
    for length in [0_u16, 1, 19, 2_000] {
        let mut lying = good.clone();
        lying[2..4].copy_from_slice(&length.to_be_bytes());
        say(&mut mouth, &lying);
    }
    wait_until("every packet to be counted", SOON, || {
        let now = stage.dropped(&counted) - before;
        assert!(now <= sent, "{now} drops of {sent} packets");
        now == sent
    });
    let honest = mouth.seal(&udp(own, 9, b"honest"));
    mouth.socket.send(&honest).expect("send");
    let mut buffer = [0; 64];
    let length = inner.recv(&mut buffer).expect("the honest one");
    assert_eq!(&buffer[..length], b"honest", "the first that was let through");
    conversation.went_on();
}

// threat: silent-peer-flood
fn flood_to_a_silent_peer_costs_bounded_memory(outer: &'static Outer) {
    let mut stage = Stage::new(outer);
    // Nobody answers there: all that is sent waits for a session that never comes.
    let silent = 5;
    stage
        .device
        .apply(&[peer(silent, Some((outer.stranger, 9).into()))])
        .expect("add a peer");
    let conversation = Conversation::start(&stage);
    let before = resident();
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let victim = &stage.victim;
    let flood = || {
        let socket = UdpSocket::bind("10.9.0.1:0").expect("bind");
        while !stop.load(Ordering::Acquire) {
            for _ in 0..300 {
                if socket
                    .send_to(&[0; 1_392], (Ipv4Addr::new(10, 9, 0, silent), 9))
                    .is_ok()
                {
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            }
            // Room for others in the interface's queue, which is shared by all and drops what comes last.
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| victim.enter(flood));
        scope.spawn(|| victim.enter(flood));
        let _stop = Stop(&stop);
        conversation.goes_on();
        // Twice what the bound on memory would hold.
        wait_until("the flood", Duration::from_secs(60), || {
            sent.load(Ordering::Relaxed) * 1_392 > 2 * MEMORY
        });
        conversation.goes_on();
    });
    let grown = resident().saturating_sub(before);
    conversation.went_on();
    let sent = sent.into_inner();
    println!(
        "{grown} bytes; {sent} sent, {:?}",
        stage.device.observe().expect("observe").drops
    );
    assert!(grown < MEMORY, "{grown} bytes more");
    wait_until("every packet that does not wait to be counted", SOON, || {
        stage.dropped(&["no_session", "interface_queue"]) + HELD >= sent
    });
    assert!(stage.dropped(&["no_session"]) > HELD);
    assert_eq!(
        stage.device.observe().expect("observe").peers[&public(silent)]
            .stats
            .handshake_age,
        None
    );
}

// threat: stalled-interface
fn stalled_interface_counts_drops_and_recovers(outer: &'static Outer) {
    let stage = Stage::new(outer);
    let mut mouth = Mouth::new(&stage, secret(STRANGER));
    mouth.shake_hands();
    let conversation = Conversation::start(&stage);
    let before = resident();
    // Nobody reads what comes to this socket: the kernel keeps what it has room for.
    let inner = stage.inner_socket(9);
    let packet = udp([10, 9, 0, STRANGER], 9, &[7; 1_200]);
    let mut flood = |packets: u64| {
        for _ in 0..packets {
            let message = mouth.seal(&packet);
            mouth.socket.send(&message).expect("send");
        }
    };
    flood(10_000);
    conversation.goes_on();
    let counted = ["interface", "socket_queue"];
    let (link, took) = (&stage.interface, stage.dropped(&counted));
    stage.victim.ip(&format!("link set {link} down"));
    flood(10_000);
    wait_until("what the interface does not take to be counted", SOON, || {
        stage.dropped(&counted) >= took + 10_000
    });
    stage.victim.ip(&format!("link set {link} up"));
    conversation.goes_on();
    let grown = resident().saturating_sub(before);
    println!("{grown} bytes, {:?}", stage.device.observe().expect("observe").drops);
    conversation.went_on();
    assert!(grown < MEMORY, "{grown} bytes more");
    assert!(stage.dropped(&["interface"]) > 0);
    drop(inner);
}

// threat: stalled-interface
fn stalled_underlay_counts_drops_in_bounded_memory(outer: &'static Outer) {
    let stage = Stage::new(outer);
    let mut mouth = Mouth::new(&stage, secret(STRANGER));
    mouth.shake_hands();
    // Ten packets a second leave by this wire, and more may wait for it than a socket may have under way.
    let tc = |line: &str| stage.victim.run("tc", &line.split(' ').collect::<Vec<_>>());
    tc("qdisc replace dev eth1 root tbf rate 100kbit burst 3000 limit 64mb");
    let before = resident();
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let victim = &stage.victim;
    let flood = || {
        let socket = UdpSocket::bind("10.9.0.1:0").expect("bind");
        while !stop.load(Ordering::Acquire) {
            for _ in 0..300 {
                let taken = socket.send_to(&[0; 1_392], (Ipv4Addr::new(10, 9, 0, STRANGER), 9));
                sent.fetch_add(u64::from(taken.is_ok()), Ordering::Relaxed);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let counted = ["network", "interface_queue"];
    std::thread::scope(|scope| {
        scope.spawn(|| victim.enter(flood));
        let _stop = Stop(&stop);
        wait_until("packets beyond what may be under way", Duration::from_secs(60), || {
            sent.load(Ordering::Relaxed) * 1_392 > 2 * MEMORY && stage.dropped(&["network"]) > 0
        });
    });
    let grown = resident().saturating_sub(before);
    let sent = sent.into_inner();
    println!(
        "{grown} bytes; {sent} sent, {:?}",
        stage.device.observe().expect("observe").drops
    );
    assert!(grown < MEMORY, "{grown} bytes more");
    // What the queues hold is not lost yet: of the socket 8 MiB, of the interface 500 packets (more where it has more queues).
    wait_until("every packet that does not wait to be counted", SOON, || {
        stage.dropped(&counted) * 1_392 + (16 << 20) >= sent * 1_392
    });
    tc("qdisc del dev eth1 root");
    wait_until("the friend", SOON, || stage.friend.pings("10.9.0.1"));
    Conversation::start(&stage).went_on();
}
