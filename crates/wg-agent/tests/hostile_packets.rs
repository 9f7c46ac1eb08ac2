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
    Conversation, FRIEND, MEMORY, Mouth, SOON, STRANGER, Stage, VICTIM, VICTIM_AT, open, peer, public, resident,
    secret, udp,
};
use netns::{NetNs, veth, wait_until};
use wg_agent::device::Device;
use x25519_dalek::StaticSecret;

const SOURCES: u32 = 10_000;

/// Of every kind of message what costs the victim most: an initiation with a true MAC for its key, and broken ones of each type.
fn messages(stage: &Stage) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for number in 0..200_u8 {
        // Keys that are nobody's: the victim finds that out after two of its costly steps.
        all.push(Mouth::new(stage, StaticSecret::from([100 ^ number; 32])).initiation());
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

#[test]
fn a_flood_of_handshakes_from_ten_thousand_sources_stalls_no_peer_and_keeps_no_new_one_out() {
    let mut stage = Stage::new();
    // Every address of the range is the stranger's own, and the victim answers there.
    stage.stranger.ip("route add local 198.18.0.0/15 dev lo");
    stage.victim.ip("route add 198.18.0.0/15 via 198.51.100.3");
    let newcomer = 4;
    stage.device.apply(&[peer(newcomer, None)]).expect("add a peer");
    let arrived = NetNs::new("newcomer");
    veth(
        &stage.victim,
        "eth2",
        &["203.0.113.1/24"],
        &arrived,
        "eth0",
        &["203.0.113.4/24"],
    );
    let messages = messages(&stage);
    let before = resident();
    let conversation = Conversation::start(&stage);
    let (stop, sources) = (AtomicBool::new(false), AtomicU64::new(0));
    let stranger = &stage.stranger;
    let flood = || {
        let base = u32::from(Ipv4Addr::new(198, 18, 0, 0));
        let mut next = messages.iter().cycle();
        for number in (0..SOURCES).cycle() {
            let address = Ipv4Addr::from(base + number);
            let socket = UdpSocket::bind((address, 0)).expect("bind one of the sources");
            for message in next.by_ref().take(5) {
                // A full queue is no failure of this test.
                let _ = socket.send_to(message, VICTIM_AT);
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
        let (_, _device) = open(&arrived, newcomer, &[peer(VICTIM, Some("203.0.113.1:51820"))]);
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

#[test]
fn what_is_replayed_cut_or_changed_reaches_nobody_and_moves_no_endpoint() {
    let stage = Stage::new();
    let inner = stage.inner_socket(9);
    let mut mouth = Mouth::new(&stage, secret(STRANGER));
    mouth.shake_hands();
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

#[test]
fn a_peer_that_turned_speaks_in_nobody_elses_name() {
    let stage = Stage::new();
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

#[test]
fn senders_that_flood_a_silent_peer_cost_bounded_memory_and_stall_no_other() {
    let mut stage = Stage::new();
    // Nobody answers there: all that is sent waits for a session that never comes.
    let silent = 5;
    stage
        .device
        .apply(&[peer(silent, Some("198.51.100.3:9"))])
        .expect("add a peer");
    let conversation = Conversation::start(&stage);
    let before = resident();
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let victim = &stage.victim;
    let flood = || {
        let socket = UdpSocket::bind("10.9.0.1:0").expect("bind");
        while !stop.load(Ordering::Acquire) {
            for _ in 0..300 {
                // A full queue is what this is about.
                let _ = socket.send_to(&[0; 1_392], (Ipv4Addr::new(10, 9, 0, silent), 9));
                sent.fetch_add(1, Ordering::Relaxed);
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
    let link = stage.victim.ip_json(&format!("-s link show {}", stage.interface));
    let sent = &link[0]["stats64"]["tx"];
    println!("{grown} bytes; the interface: {sent}");
    assert!(grown < MEMORY, "{grown} bytes more");
    assert_eq!(
        stage.device.observe().expect("observe").peers[&public(silent)]
            .stats
            .handshake_age,
        None
    );
}
