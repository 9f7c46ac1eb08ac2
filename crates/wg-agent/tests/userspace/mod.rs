//! What a userspace device must do whatever the kernel takes off it, read back by `ping`, TCP, UDP, `ip`, `wg` and `nft`.

use std::{
    net::SocketAddr,
    num::NonZeroU16,
    time::{Duration, Instant},
};

use crate::{
    OPTIONS,
    netns::{NetNs, transfer, unique_name, veth, wait_until},
};
use clustermesh_agent_core::{
    device::{PeerChange, PeerSpec, PeerUpdate},
    key::PresharedKey,
};
use clustermesh_core::key::PublicKey;
use wg_agent::device::{
    Configuration, Device, DeviceError,
    userspace::{Userspace, remove_interface},
};
use x25519_dalek::StaticSecret;

const PORT: u16 = 51820;
const SOON: Duration = Duration::from_secs(10);

/// A node: a namespace with a device in it. Node `n` has the inner addresses 10.9.0.n and fd09::n.
struct Node {
    number: u8,
    ns: NetNs,
    device: Option<Box<Userspace>>,
    configuration: Configuration,
    interface: String,
}

fn secret(number: u8) -> StaticSecret {
    StaticSecret::from([number; 32])
}

fn public(number: u8) -> PublicKey {
    PublicKey::new(x25519_dalek::PublicKey::from(&secret(number)).to_bytes())
}

impl Node {
    fn new(number: u8) -> Self {
        let configuration = Configuration {
            private_key: secret(number),
            listen_port: PORT,
            fwmark: 0,
            mtu: 1420,
        };
        let interface = unique_name("wd");
        let mut node = Self {
            number,
            ns: NetNs::new(&format!("node {number}")),
            device: None,
            configuration,
            interface,
        };
        node.open();
        node
    }

    fn open(&mut self) {
        let device = self
            .ns
            .enter(|| Userspace::open_with(&self.interface, &self.configuration, OPTIONS))
            .expect("open a device");
        self.device = Some(Box::new(device));
        self.ns
            .ip(&format!("addr add 10.9.0.{}/24 dev {}", self.number, self.interface));
        self.ns.ip(&format!(
            "addr add fd09::{}/64 dev {} nodad",
            self.number, self.interface
        ));
    }

    fn device(&mut self) -> &mut Userspace {
        self.device.as_mut().expect("an open device")
    }

    fn apply(&mut self, changes: &[PeerChange]) {
        self.device().apply(changes).expect("apply changes");
    }

    fn configure(&mut self, configuration: &Configuration) {
        let device = self.device.as_mut().expect("an open device");
        self.ns.enter(|| device.configure(configuration)).expect("configure");
    }

    fn add(&mut self, other: u8, endpoint: Option<&str>) {
        self.apply(&[PeerChange::Add(public(other), spec(other, endpoint))]);
    }

    fn stats(&self, other: u8) -> clustermesh_agent_core::device::PeerStats {
        self.observe()
            .peers
            .get(&public(other))
            .expect("the peer")
            .stats
            .clone()
    }

    fn observe(&self) -> wg_agent::device::Observed {
        self.device
            .as_ref()
            .expect("an open device")
            .observe()
            .expect("observe")
    }

    fn reaches(&self, other: u8) -> bool {
        self.ns.pings(&format!("10.9.0.{other}"))
    }
}

fn spec(number: u8, endpoint: Option<&str>) -> PeerSpec {
    PeerSpec {
        endpoint: endpoint.map(|endpoint| endpoint.parse().expect("an endpoint")),
        allowed_ips: [format!("10.9.0.{number}/32"), format!("fd09::{number}/128")]
            .map(|range| range.parse().expect("a range"))
            .into(),
        ..PeerSpec::default()
    }
}

/// Two nodes on one wire, 192.0.2.1 and 192.0.2.2, that know each other.
fn two() -> [Node; 2] {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    veth(
        &a.ns,
        "eth0",
        &["192.0.2.1/24", "2001:db8::1/64"],
        &b.ns,
        "eth0",
        &["192.0.2.2/24", "2001:db8::2/64"],
    );
    a.add(2, Some("192.0.2.2:51820"));
    b.add(1, Some("192.0.2.1:51820"));
    [a, b]
}

#[test]
fn two_devices_carry_ping_and_tcp_both_ways_and_wg_reads_them() {
    let [mut a, b] = two();
    wait_until("the first ping", SOON, || a.reaches(2));
    assert!(b.reaches(1));
    assert!(a.ns.pings("fd09::2") && b.ns.pings("fd09::1"));
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
    let refused =
        a.ns.output("wg", &["set", &a.interface, "peer", &public(2).to_string(), "remove"]);
    assert!(!refused.status.success() && a.observe().peers.contains_key(&public(2)));
}

#[test]
fn the_outer_packets_may_be_ipv6() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    veth(&a.ns, "eth0", &["2001:db8::1/64"], &b.ns, "eth0", &["2001:db8::2/64"]);
    a.add(2, Some("[2001:db8::2]:51820"));
    b.add(1, None);
    wait_until("a ping over IPv6", SOON, || a.reaches(2));
    transfer(&b.ns, &a.ns, "10.9.0.1:5000", 1_000_000);
    assert_eq!(
        b.stats(1).endpoint,
        Some("[2001:db8::1]:51820".parse().expect("an endpoint"))
    );
}

#[test]
fn what_happens_to_one_peer_leaves_the_session_and_the_flow_of_another_alone() {
    let [mut a, b] = two();
    let c = {
        let mut c = Node::new(3);
        veth(&a.ns, "eth1", &["198.51.100.1/24"], &c.ns, "eth0", &["198.51.100.3/24"]);
        c.add(1, Some("198.51.100.1:51820"));
        c
    };
    wait_until("the first ping", SOON, || a.reaches(2));
    let began = Instant::now();
    let age = a.stats(2).handshake_age.expect("a handshake");
    let (a_ns, b_ns) = (NetNsRef(&a.ns), NetNsRef(&b.ns));
    let mut rounds = 0_u16;
    let device = a.device.as_mut().expect("an open device");
    std::thread::scope(|scope| {
        let flow = scope.spawn(|| {
            transfer(a_ns.0, b_ns.0, "10.9.0.2:5000", 60_000_000);
            transfer(b_ns.0, a_ns.0, "10.9.0.1:5001", 60_000_000);
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
                add_allowed_ips: [format!("10.77.{}.0/24", rounds % 256).parse().expect("a range")].into(),
                ..PeerUpdate::default()
            };
            for changes in [
                vec![PeerChange::Add(public(3), spec(3, Some("198.51.100.3:51820")))],
                vec![PeerChange::Update(public(3), moved)],
                // And to the peer of the flow itself: what costs no session.
                vec![PeerChange::Update(
                    public(2),
                    PeerUpdate {
                        endpoint: Some("192.0.2.2:51820".parse().expect("an endpoint")),
                        keepalive: Some(NonZeroU16::new(1 + rounds % 9)),
                        add_allowed_ips: [format!("10.78.{}.0/24", rounds % 256).parse().expect("a range")].into(),
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
    // The same handshake as before, only older.
    let now = a.stats(2).handshake_age.expect("a handshake");
    let expected = age + began.elapsed();
    assert!(
        now + Duration::from_millis(200) > expected && now <= expected,
        "{now:?}, expected {expected:?}"
    );
    a.add(3, Some("198.51.100.3:51820"));
    wait_until("the changed peer, added again", SOON, || c.reaches(1));
}

/// A namespace lent to a thread.
#[derive(Clone, Copy)]
struct NetNsRef<'a>(&'a NetNs);

#[test]
fn a_removed_peer_is_deaf_and_its_range_has_no_owner() {
    let [mut a, b] = two();
    wait_until("the first ping", SOON, || b.reaches(1));
    a.apply(&[PeerChange::Remove(public(2))]);
    assert!(!b.reaches(1) && !a.reaches(2));
    let observed = a.observe();
    assert!(observed.peers.is_empty());
    assert!(
        observed.drops["unknown_peer"] > 0 && observed.drops["no_peer"] > 0,
        "{:?}",
        observed.drops
    );
}

#[test]
fn a_sender_to_nobody_is_told_so() {
    let mut node = Node::new(1);
    // A peer that nobody knows the place of, and an address that no peer has.
    node.add(2, None);
    for [v4, v6] in [["10.9.0.2", "fd09::2"], ["10.9.0.3", "fd09::3"]] {
        let told = |address: &str, words: &str| {
            let output = node.ns.output("ping", &["-n", "-c1", "-W5", address]);
            let output = String::from_utf8_lossy(&output.stdout);
            assert!(output.contains(words), "{address}: {output}");
        };
        told(v4, "Destination Host Unreachable");
        told(v6, "Address unreachable");
    }
    assert_eq!(node.observe().drops["no_endpoint"], 2);
}

#[test]
fn a_range_that_moves_to_another_peer_takes_its_traffic_along() {
    let [mut a, b] = two();
    wait_until("the first ping", SOON, || a.reaches(2));
    let stranger = PeerSpec {
        allowed_ips: ["10.9.0.2/32".parse().expect("a range")].into(),
        ..PeerSpec::default()
    };
    a.apply(&[PeerChange::Add(public(9), stranger)]);
    assert!(!a.reaches(2), "the range is another's");
    assert!(a.ns.pings("fd09::2"), "the rest is still its own");
    let back = PeerUpdate {
        add_allowed_ips: ["10.9.0.2/32".parse().expect("a range")].into(),
        ..PeerUpdate::default()
    };
    a.apply(&[PeerChange::Update(public(2), back)]);
    wait_until("the range came back", SOON, || a.reaches(2));
    assert!(b.reaches(1));
}

#[test]
fn the_endpoint_follows_a_peer_that_moves() {
    let [a, b] = two();
    wait_until("the first ping", SOON, || a.reaches(2));
    b.ns.sh("ip addr add 192.0.2.77/24 dev eth0; ip addr del 192.0.2.2/24 dev eth0; ip addr add 192.0.2.77/24 dev eth0 || true");
    wait_until("a ping from the new address", SOON, || b.reaches(1));
    assert_eq!(
        a.stats(2).endpoint,
        Some("192.0.2.77:51820".parse().expect("an endpoint"))
    );
    assert!(a.reaches(2));
    assert_eq!(
        a.observe().peers[&public(2)].configured.endpoint,
        Some("192.0.2.2:51820".parse().expect("an endpoint"))
    );
}

#[test]
fn after_a_restart_of_one_side_data_flows_within_five_seconds() {
    let [mut a, b] = two();
    wait_until("the first ping", SOON, || b.reaches(1));
    for round in 0..5 {
        let device = a.device.take().expect("an open device");
        a.ns.enter(|| device.close()).expect("close");
        assert_eq!(
            a.ns.output("ip", &["link", "show", &a.interface]).status.code(),
            Some(1),
            "the interface is gone"
        );
        assert!(!std::path::Path::new(&format!("/var/run/wireguard/{}.sock", a.interface)).exists());
        a.open();
        let began = Instant::now();
        a.add(2, Some("192.0.2.2:51820"));
        // From the side that still has a session of before.
        wait_until("a ping after the restart", Duration::from_secs(5), || b.reaches(1));
        println!("round {round}: {:?}", began.elapsed());
    }
}

#[test]
fn an_inner_source_outside_a_peers_ranges_is_dropped_and_counted() {
    let [a, b] = two();
    wait_until("the first ping", SOON, || b.reaches(1));
    assert_eq!(a.observe().drops["foreign_source"], 0);
    b.ns.ip("addr add 10.66.0.1/32 dev lo");
    a.ns.sh(
        "nft 'add table inet t { chain in { type filter hook prerouting priority -300; ip saddr 10.66.0.1 counter; \
         ip saddr 10.9.0.2 counter; }; }'",
    );
    let output =
        b.ns.output("ping", &["-n", "-c3", "-i0.2", "-W1", "-I", "10.66.0.1", "10.9.0.1"]);
    assert!(!output.status.success());
    assert_eq!(a.observe().drops["foreign_source"], 3);
    assert!(b.reaches(1));
    assert_eq!(
        counters(&a.ns),
        [0, 1],
        "the kernel saw only the packet from its own address"
    );
}

/// The packet counters of the rules of table `inet t`, in order.
fn counters(ns: &NetNs) -> Vec<u64> {
    let listing = ns.run("nft", &["-j", "list", "table", "inet", "t"]);
    let listing: serde_json::Value = serde_json::from_str(&listing).expect("JSON");
    let items = listing["nftables"].as_array().expect("a list").iter();
    items
        .filter_map(|item| item["rule"]["expr"].as_array())
        .filter_map(|rule| {
            rule.iter()
                .find_map(|expression| expression["counter"]["packets"].as_u64())
        })
        .collect()
}

#[test]
fn every_outer_packet_carries_the_firewall_mark_also_after_it_changes() {
    let [mut a, b] = two();
    a.ns.sh(
        "nft 'add table inet t { chain out { type filter hook output priority 0; udp dport 51820 meta mark 0x00100000 counter; \
         udp dport 51820 meta mark 0 counter; udp dport 51820 meta mark 7 counter; }; }'",
    );
    let mut configuration = a.configuration.clone();
    configuration.fwmark = 0x0010_0000;
    a.configure(&configuration);
    let before = counters(&a.ns);
    wait_until("a ping", SOON, || a.reaches(2));
    let after = counters(&a.ns);
    assert!(after[0] > before[0] && after[1] == before[1], "{before:?} {after:?}");
    configuration.fwmark = 7;
    configuration.listen_port = 51999;
    a.configure(&configuration);
    wait_until("a ping from the new port", SOON, || a.reaches(2));
    let last = counters(&a.ns);
    assert!(last[2] > 0 && last[1] == after[1], "{last:?}");
    assert_eq!(
        b.stats(1).endpoint,
        Some("192.0.2.1:51999".parse().expect("an endpoint"))
    );
    assert_eq!(a.observe().listen_port, 51999);
}

#[test]
fn a_new_key_for_the_device_makes_new_sessions_with_those_who_know_it() {
    let [mut a, mut b] = two();
    wait_until("the first ping", SOON, || a.reaches(2));
    let configuration = Configuration {
        private_key: secret(11),
        ..a.configuration.clone()
    };
    b.apply(&[
        PeerChange::Remove(public(1)),
        PeerChange::Add(public(11), spec(1, None)),
    ]);
    a.configure(&configuration);
    wait_until("a ping with the new key", Duration::from_secs(5), || a.reaches(2));
    assert!(b.reaches(1));
}

#[test]
fn a_preshared_key_must_be_the_same_on_both_sides() {
    let [mut a, mut b] = two();
    wait_until("the first ping", SOON, || a.reaches(2));
    let keyed = |number| PeerUpdate {
        preshared_key: Some(PresharedKey::new([number; 32])),
        ..PeerUpdate::default()
    };
    a.apply(&[PeerChange::Update(public(2), keyed(1))]);
    assert!(!a.reaches(2));
    b.apply(&[PeerChange::Update(public(1), keyed(1))]);
    wait_until("a ping with the preshared key", SOON, || a.reaches(2));
}

#[test]
fn what_is_not_ours_is_left_alone_and_the_error_says_what_to_do() {
    let ns = NetNs::new("errors");
    let open = |interface: &str, port| {
        let configuration = Configuration {
            private_key: secret(1),
            listen_port: port,
            fwmark: 0,
            mtu: 1420,
        };
        ns.enter(|| Userspace::open_with(interface, &configuration, OPTIONS))
            .map(drop)
    };
    let first = unique_name("wd");
    let configuration = Configuration {
        private_key: secret(1),
        listen_port: PORT,
        fwmark: 0,
        mtu: 1420,
    };
    let _device = ns
        .enter(|| Userspace::open_with(&first, &configuration, OPTIONS))
        .expect("open a device");
    let busy = open(&first, 1).expect_err("our own, still open");
    assert!(matches!(&busy, DeviceError::Exists(name) if *name == first), "{busy}");
    ns.ip("link add foreign type veth peer name other");
    ns.ip("tuntap add dev kept mode tun");
    for interface in ["foreign", "kept"] {
        let error = open(interface, 1).expect_err("someone else's");
        assert!(
            error
                .to_string()
                .starts_with(&format!("interface {interface} exists already")),
            "{error}"
        );
        ns.ip(&format!("link show {interface}"));
    }
    let other = unique_name("wd");
    let taken = open(&other, PORT).expect_err("the port is taken");
    assert!(matches!(taken, DeviceError::Listen { port: PORT, .. }), "{taken}");
    assert_eq!(
        ns.output("ip", &["link", "show", &other]).status.code(),
        Some(1),
        "nothing is left behind"
    );
    for name in ["", "much-too-long-name", "a/b", "with space"] {
        assert!(matches!(open(name, 1), Err(DeviceError::Name(_))), "{name:?}");
    }
}

#[test]
fn an_interface_deleted_by_someone_else_is_said_and_can_be_opened_again() {
    let [mut a, b] = two();
    wait_until("the first ping", SOON, || b.reaches(1));
    a.ns.ip(&format!("link del {}", a.interface));
    let device = a.device.take().expect("an open device");
    wait_until("the device to notice", SOON, || {
        matches!(device.observe(), Err(DeviceError::Gone(_)))
    });
    drop(device);
    a.open();
    a.add(2, Some("192.0.2.2:51820"));
    wait_until("a ping", SOON, || b.reaches(1));
}

#[test]
fn a_peer_found_nowhere_is_asked_at_once_where_it_is_said_to_be_next() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    veth(&a.ns, "eth0", &["192.0.2.1/24"], &b.ns, "eth0", &["192.0.2.2/24"]);
    b.add(1, None);
    a.add(2, Some("192.0.2.99:51820"));
    assert!(!a.reaches(2));
    let elsewhere = PeerUpdate {
        endpoint: Some("192.0.2.2:51820".parse().expect("an endpoint")),
        ..PeerUpdate::default()
    };
    let began = Instant::now();
    a.apply(&[PeerChange::Update(public(2), elsewhere)]);
    wait_until("a handshake", SOON, || a.stats(2).handshake_age.is_some());
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert!(a.reaches(2) && b.reaches(1));
}

#[test]
fn garbage_from_anyone_changes_nothing() {
    let [a, b] = two();
    wait_until("the first ping", SOON, || b.reaches(1));
    let before = a.stats(2);
    let mut noise = 0x9e37_79b9_u32;
    let mut next = move || {
        noise ^= noise << 13;
        noise ^= noise >> 17;
        noise ^= noise << 5;
        noise
    };
    b.ns.enter(|| {
        let socket = std::net::UdpSocket::bind("192.0.2.2:0").expect("bind");
        for round in 0..20_000_u32 {
            // Of each message type its right length, its neighbours, and anything.
            let length = [0, 1, 3, 4, 31, 32, 33, 64, 92, 148, 149, next() as usize % 1500][round as usize % 12];
            let mut datagram: Vec<u8> = (0..length).map(|_| next() as u8).collect();
            for (byte, value) in datagram.iter_mut().zip([(round % 6) as u8, 0, 0, 0]) {
                *byte = value;
            }
            // A full queue is no failure of this test.
            let _ = socket.send_to(&datagram, "192.0.2.1:51820");
        }
    });
    wait_until("the flood to be read", SOON, || {
        let drops = a.observe().drops;
        drops["invalid"] + drops["unknown_peer"] + drops["under_load"] > 5_000
    });
    let after = a.stats(2);
    assert_eq!((after.endpoint, after.rx_bytes), (before.endpoint, before.rx_bytes));
    assert!(a.reaches(2) && b.reaches(1));
}

#[test]
fn thousands_of_peers_are_added_at_once_and_one_is_changed_in_no_time() {
    let mut a = Node::new(1);
    let key = |number: u32| {
        let mut bytes = [7; 32];
        bytes[4..8].copy_from_slice(&number.to_le_bytes());
        PublicKey::new(x25519_dalek::PublicKey::from(&StaticSecret::from(bytes)).to_bytes())
    };
    let changes: Vec<PeerChange> = (0..5_000_u32)
        .map(|number| {
            let range = ipnet::Ipv4Net::new((0x0a80_0000 + number * 256).into(), 24).expect("a range");
            PeerChange::Add(
                key(number),
                PeerSpec {
                    allowed_ips: [range.into()].into(),
                    ..PeerSpec::default()
                },
            )
        })
        .collect();
    let began = Instant::now();
    a.apply(&changes);
    let all = began.elapsed();
    let began = Instant::now();
    a.apply(&[PeerChange::Remove(key(17))]);
    let one = began.elapsed();
    println!("5,000 peers in {all:?}, one change in {one:?}");
    assert_eq!(a.observe().peers.len(), 4_999);
    assert!(
        all < Duration::from_secs(20) && one < Duration::from_secs(1),
        "{all:?} {one:?}"
    );
}

#[test]
fn large_datagrams_arrive_whole_and_in_order_in_both_families() {
    let [a, b] = two();
    wait_until("the first ping", SOON, || a.reaches(2) && a.ns.pings("fd09::2"));
    for (to, from) in [("10.9.0.2:7000", "10.9.0.1:0"), ("[fd09::2]:7000", "[fd09::1]:0")] {
        let receiver = b.ns.enter(|| std::net::UdpSocket::bind(to)).expect("bind");
        receiver.set_read_timeout(Some(SOON)).expect("a time limit");
        let sender = a.ns.enter(|| std::net::UdpSocket::bind(from)).expect("bind");
        // One run of equal datagrams, which the kernel may hand over as one packet, and every length about it.
        for length in [1_u16, 63, 64, 65, 1000, 1372, 1392, 1400, 4000, 60_000] {
            // No more than the receiver's socket keeps.
            let count = if length > 1500 { 2 } else { 16 };
            let datagrams: Vec<Vec<u8>> = (0..count).map(|number: u8| vec![number; usize::from(length)]).collect();
            for datagram in &datagrams {
                sender.send_to(datagram, to).expect("send");
            }
            let mut buffer = vec![0; 65_536];
            for datagram in &datagrams {
                let length = receiver.recv(&mut buffer).expect("a datagram in time");
                assert!(buffer[..length] == *datagram, "{length} of {} bytes", datagram.len());
            }
        }
    }
}

#[test]
fn the_interface_outlives_its_process_drops_what_comes_meanwhile_and_is_taken_over() {
    let [mut a, b] = two();
    wait_until("the first ping", SOON, || a.reaches(2) && b.reaches(1));
    a.ns.ip(&format!("route add 10.50.0.0/16 dev {}", a.interface));
    let shown = |a: &Node| {
        let link = a.ns.ip_json(&format!("link show {}", a.interface));
        let routes = a.ns.ip_json(&format!("route show dev {}", a.interface));
        let destinations: Vec<_> = routes
            .as_array()
            .expect("routes")
            .iter()
            .map(|route| route["dst"].clone())
            .collect();
        (link[0]["ifindex"].clone(), link[0]["ifalias"].clone(), destinations)
    };
    let before = shown(&a);
    assert_eq!(before.1, "clustermesh wg-agent");
    // As if the process had ended.
    drop(a.device.take());
    assert_eq!(shown(&a), before);
    assert!(!a.reaches(2) && !a.ns.pings("10.50.0.1"), "nobody is there to carry it");
    a.ns.sh("nft 'add table inet t { chain out { type filter hook output priority 0; ip daddr 10.9.0.0/24 oifname eth0 counter; }; }'");
    assert!(!a.reaches(2));
    assert_eq!(counters(&a.ns), [0], "nothing leaves elsewhere");
    let device =
        a.ns.enter(|| Userspace::open_with(&a.interface, &a.configuration, OPTIONS));
    a.device = Some(Box::new(device.expect("taken over")));
    a.add(2, Some("192.0.2.2:51820"));
    wait_until("a ping after the restart", Duration::from_secs(5), || b.reaches(1));
    assert_eq!(shown(&a), before);
    // What is held cannot be removed as left over; what is not, is.
    let held = a.ns.enter(|| remove_interface(&a.interface)).expect_err("it is held");
    assert!(matches!(held, DeviceError::Exists(_)), "{held}");
    drop(a.device.take());
    assert!(a.ns.enter(|| remove_interface(&a.interface)).expect("removed"));
    assert_eq!(
        a.ns.output("ip", &["link", "show", &a.interface]).status.code(),
        Some(1)
    );
    a.ns.ip(&format!("tuntap add dev {} mode tun", a.interface));
    assert!(!a.ns.enter(|| remove_interface(&a.interface)).expect("left alone"));
}

#[test]
fn an_interface_that_an_older_version_made_with_other_flags_is_made_anew() {
    let [mut a, b] = two();
    drop(a.device.take());
    assert!(a.ns.enter(|| remove_interface(&a.interface)).expect("removed"));
    a.ns.sh(&format!(
        "ip tuntap add dev {0} mode tun; ip link set {0} alias 'clustermesh wg-agent'",
        a.interface
    ));
    a.open();
    a.add(2, Some("192.0.2.2:51820"));
    wait_until("a ping", SOON, || b.reaches(1));
}

#[test]
fn many_flows_to_one_peer_share_it_without_waiting_for_each_other_for_ever() {
    let [mut a, b] = two();
    wait_until("the first ping", SOON, || a.reaches(2) && b.reaches(1));
    let ns = &a.ns;
    std::thread::scope(|scope| {
        for number in 0..16_u16 {
            scope.spawn(move || {
                let socket = ns.enter(|| std::net::UdpSocket::bind("10.9.0.1:0")).expect("bind");
                for _ in 0..4_000 {
                    // A full queue is no failure of this test; nobody has to listen.
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
    let (device, peers) = finished.recv_timeout(SOON).expect("the device answers");
    a.device = Some(device);
    assert_eq!(peers, 1);
    wait_until("a ping each way", SOON, || a.reaches(2) && b.reaches(1));
}
