//! Tests that traffic arrives completely and in order, also while peers change.

use std::{
    net::SocketAddr,
    num::NonZeroU16,
    time::{Duration, Instant},
};

use clustermesh_agent_core::{
    device::{PeerChange, PeerUpdate},
    key::PresharedKey,
};
use clustermesh_tests::netns::{transfer, veth, wait_for, wait_until};
use wg_agent::device::Device;

use super::{Node, Options, TIMEOUT, node_pair, public, spec};

pub(super) fn traffic_passes_and_wg_can_show_but_not_change_peers(options: Options) {
    let [mut a, b] = node_pair(options);
    wait_until("the first ping", TIMEOUT, || a.reaches(2));
    assert!(b.reaches_patiently(1));
    assert!(a.ns.pings_patiently("fd09::2") && b.ns.pings_patiently("fd09::1"));
    transfer(&a.ns, &b.ns, "10.9.0.2:5000", 20_000_000);
    transfer(&b.ns, &a.ns, "[fd09::1]:5000", 20_000_000);

    let link = a.ns.ip_json(&format!("link show {}", a.interface));
    assert_eq!((&link[0]["mtu"], &link[0]["link_type"]), (&1420.into(), &"none".into()));
    a.apply(&[PeerChange::Update(
        public(2),
        PeerUpdate {
            keepalive: Some(NonZeroU16::new(25)),
            ..PeerUpdate::default()
        },
    )]);
    let dump = a.ns.run("wg", &["show", &a.interface, "dump"]);
    let lines: Vec<Vec<&str>> = dump.lines().map(|line| line.split('\t').collect()).collect();
    assert_eq!(lines[0], ["(none)", "(none)", "51820", "off"]);
    let stats = a.stats(2);
    assert_eq!(
        lines[1][..4],
        [
            &public(2).to_string(),
            "(none)",
            "192.0.2.2:51820",
            "10.9.0.2/32,fd09::2/128"
        ]
    );
    assert_eq!(lines[1][7], "25");
    assert!(stats.tx_bytes > 20_000_000 && stats.rx_bytes > 20_000_000, "{stats:?}");
    // Only the program that opened the device may change it.
    let refused =
        a.ns.output("wg", &["set", &a.interface, "peer", &public(2).to_string(), "remove"]);
    assert!(!refused.status.success() && a.observe().peers.contains_key(&public(2)));
}

pub(super) fn tunnel_works_over_an_ipv6_underlay(options: Options) {
    let (mut a, mut b) = (Node::new(1, options), Node::new(2, options));
    veth(&a.ns, "eth0", &["2001:db8::1/64"], &b.ns, "eth0", &["2001:db8::2/64"]);
    a.add(2, Some("[2001:db8::2]:51820"));
    b.add(1, None);
    wait_until("a ping over IPv6", TIMEOUT, || a.reaches(2));
    transfer(&b.ns, &a.ns, "10.9.0.1:5000", 1_000_000);
    assert_eq!(
        b.stats(1).endpoint,
        Some("[2001:db8::1]:51820".parse().expect("an endpoint"))
    );
}

pub(super) fn session_survives_changes_of_its_own_and_another_peer(options: Options) {
    let [mut a, b] = node_pair(options);
    let c = {
        let mut c = Node::new(3, options);
        veth(&a.ns, "eth1", &["198.51.100.1/24"], &c.ns, "eth0", &["198.51.100.3/24"]);
        c.add(1, Some("198.51.100.1:51820"));
        c
    };
    wait_until("the first ping", TIMEOUT, || a.reaches(2));
    let before = time_of_handshake(&a);
    let (a_ns, b_ns) = (&a.ns, &b.ns);
    let mut rounds = 0_u16;
    let device = a.device.as_mut().expect("an open device");
    std::thread::scope(|scope| {
        let flow = scope.spawn(|| {
            transfer(a_ns, b_ns, "10.9.0.2:5000", 60_000_000);
            transfer(b_ns, a_ns, "10.9.0.1:5001", 60_000_000);
        });
        while !flow.is_finished() {
            rounds += 1;
            let moved = PeerUpdate {
                endpoint: Some(SocketAddr::new(
                    "198.51.100.3".parse().expect("an address"),
                    40000 + rounds % 100,
                )),
                keepalive: Some(NonZeroU16::new(rounds % 7)),
                preshared_key: Some(PresharedKey::new([rounds as u8; 32])),
                add_allowed_ips: [format!("10.77.{}.0/24", rounds % 256).parse().expect("a prefix")].into(),
                ..PeerUpdate::default()
            };
            for changes in [
                vec![PeerChange::Add(public(3), spec(3, Some("198.51.100.3:51820")))],
                vec![PeerChange::Update(public(3), moved)],
                // Changes of peer 2, the other end of the flow, whose session must survive.
                vec![PeerChange::Update(
                    public(2),
                    PeerUpdate {
                        endpoint: Some("192.0.2.2:51820".parse().expect("an endpoint")),
                        keepalive: Some(NonZeroU16::new(1 + rounds % 9)),
                        add_allowed_ips: [format!("10.78.{}.0/24", rounds % 256).parse().expect("a prefix")].into(),
                        ..PeerUpdate::default()
                    },
                )],
                vec![PeerChange::Remove(public(3))],
            ] {
                device.apply(&changes).expect("apply changes");
                std::thread::yield_now();
            }
        }
    });
    assert!(rounds > 20, "only {rounds} rounds of changes during the flow");
    // The time of the last handshake shows that there was no new one, unless WireGuard's own after 120 s.
    let after = time_of_handshake(&a);
    assert!(
        after[0] <= before[1] || after[1] >= before[0] + Duration::from_secs(120),
        "{before:?} {after:?}"
    );
    a.add(3, Some("198.51.100.3:51820"));
    wait_until("a ping from the peer that was added again", TIMEOUT, || c.reaches(1));
}

/// The earliest and the latest time that the last handshake with peer 2 may have, less than 200 ms apart.
fn time_of_handshake(node: &Node) -> [Instant; 2] {
    wait_for("the age of the handshake", TIMEOUT, || {
        let began = Instant::now();
        let age = node.stats(2).handshake_age.expect("a handshake");
        let times = [began - age, Instant::now() - age];
        (times[1] - times[0] < Duration::from_millis(200)).then_some(times)
    })
}

pub(super) fn large_datagrams_arrive_whole_and_in_order_in_both_families(options: Options) {
    let [a, b] = node_pair(options);
    wait_until("the first ping", TIMEOUT, || a.reaches(2) && a.ns.pings("fd09::2"));
    for (to, from) in [("10.9.0.2:7000", "10.9.0.1:0"), ("[fd09::2]:7000", "[fd09::1]:0")] {
        let receiver = b.ns.enter(|| std::net::UdpSocket::bind(to)).expect("bind");
        receiver.set_read_timeout(Some(TIMEOUT)).expect("a time limit");
        let sender = a.ns.enter(|| std::net::UdpSocket::bind(from)).expect("bind");
        // Datagrams of equal length, which the kernel may pass to the device as one packet. Lengths: around 64 bytes, around the MTU of
        // 1420 bytes minus UDP and IPv6 headers (1372) or UDP and IPv4 headers (1392), and above the MTU.
        for length in [1_u16, 63, 64, 65, 1000, 1372, 1392, 1400, 4000, 60_000] {
            // No more datagrams than fit into the receiver's socket buffer.
            let count = if length > 1500 { 2 } else { 16 };
            let datagrams: Vec<Vec<u8>> = (0..count).map(|number: u8| vec![number; usize::from(length)]).collect();
            for datagram in &datagrams {
                sender.send_to(datagram, to).expect("send");
            }
            let mut buffer = vec![0; 65_536];
            for datagram in &datagrams {
                let received = receiver.recv(&mut buffer).expect("a datagram in time");
                assert!(
                    buffer[..received] == *datagram,
                    "{received} of {} bytes",
                    datagram.len()
                );
            }
        }
    }
}

pub(super) fn many_flows_to_one_peer_cause_no_deadlock(options: Options) {
    let [mut a, b] = node_pair(options);
    wait_until("the first ping", TIMEOUT, || a.reaches(2) && b.reaches(1));
    let ns = &a.ns;
    std::thread::scope(|scope| {
        for number in 0..16_u16 {
            scope.spawn(move || {
                let socket = ns.enter(|| std::net::UdpSocket::bind("10.9.0.1:0")).expect("bind");
                for _ in 0..4_000 {
                    // Errors of a full queue and ICMP errors (no socket listens) are ignored.
                    let _ = socket.send_to(&[7; 600], ("10.9.0.2", 7100 + number));
                }
            });
        }
    });
    let (done, finished) = std::sync::mpsc::channel();
    let device = a.device.take().expect("an open device");
    std::thread::spawn(move || {
        let peers = device.observe().expect("observe").peers.len();
        let _ = done.send((device, peers));
    });
    let (device, peers) = finished.recv_timeout(TIMEOUT).expect("the device answers");
    a.device = Some(device);
    assert_eq!(peers, 1);
    wait_until("a ping in each direction", TIMEOUT, || a.reaches(2) && b.reaches(1));
}
