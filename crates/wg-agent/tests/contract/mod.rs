//! What every backend of a device promises, as tests that take the backend; `wg`, `ip`, `nft` and `ping` are the readers. What only one
//! of them does stands in that one's own tests.
#![allow(dead_code, reason = "each test binary uses its own part of this module")]

use std::{
    collections::{BTreeMap, BTreeSet},
    net::UdpSocket,
    num::NonZeroU16,
    time::{Duration, Instant},
};

use clustermesh_agent_core::{
    device::{PeerChange, PeerSpec, PeerUpdate},
    key::PresharedKey,
};
use clustermesh_core::key::PublicKey;
use ipnet::IpNet;
use wg_agent::device::{self, Altered, Backend, Configuration, Device, DeviceError, Observed};
use x25519_dalek::StaticSecret;

use crate::netns::{NetNs, unique_name, veth, wait_until};

/// Expands `$case!` with the name of every test.
macro_rules! each {
    ($case:ident) => {
        $case! {
            two_devices_carry_both_families_and_wg_reads_every_attribute
            a_new_peer_with_an_endpoint_is_greeted_without_any_traffic
            a_change_of_attributes_keeps_the_session_and_the_counters
            a_preshared_key_counts_at_once_and_must_be_the_same_on_both_sides
            a_removed_peer_is_deaf_and_its_ranges_have_no_owner
            a_peer_that_roamed_stays_where_it_is_whatever_else_changes
            answers_come_from_the_address_that_was_called
            a_new_private_key_makes_new_sessions_with_those_who_know_it
            ranges_move_and_go_without_a_gap_for_the_others
            a_new_port_is_used_and_a_taken_one_changes_nothing
            every_outer_packet_carries_the_firewall_mark_also_after_it_changes
            a_device_deleted_by_someone_else_is_said_and_can_be_opened_again
            what_another_hand_changed_of_a_device_is_said_and_put_back
            a_sender_whose_packet_has_no_peer_or_nowhere_to_go_is_told_so
            an_interface_that_is_not_ours_is_left_alone
            of_five_thousand_peers_the_one_that_changes_is_the_only_one_touched
            a_closed_device_leaves_nothing
        }
    };
}
pub(crate) use each;

const PORT: u16 = 51820;
/// Anything that takes longer is broken; an emulated machine is slow, and WireGuard waits five seconds between two attempts.
pub(crate) const SOON: Duration = Duration::from_secs(30);

/// A node: a namespace with a device in it. Node `n` has the inner addresses 10.9.0.n and fd09::n.
pub(crate) struct Node {
    number: u8,
    pub(crate) ns: NetNs,
    pub(crate) device: Option<Box<dyn Device>>,
    pub(crate) configuration: Configuration,
    pub(crate) interface: String,
}

fn secret(number: u8) -> StaticSecret {
    StaticSecret::from([number; 32])
}

pub(crate) fn public(number: u8) -> PublicKey {
    PublicKey::new(x25519_dalek::PublicKey::from(&secret(number)).to_bytes())
}

impl Node {
    pub(crate) fn new(number: u8, backend: Backend) -> Self {
        let configuration = Configuration {
            private_key: secret(number),
            listen_port: PORT,
            fwmark: 0,
            mtu: 1420,
        };
        let mut node = Self {
            number,
            ns: NetNs::new(&format!("node {number}")),
            device: None,
            configuration,
            interface: unique_name("wc"),
        };
        node.open(backend);
        node.address();
        node
    }

    /// Opens the device; addresses are another matter.
    pub(crate) fn open(&mut self, backend: Backend) {
        let opened = self
            .ns
            .enter(|| device::open(backend, &self.interface, &self.configuration, Default::default()));
        self.device = Some(opened.expect("open a device").0);
    }

    pub(crate) fn address(&self) {
        let Self { number, interface, .. } = self;
        self.ns.ip(&format!("addr add 10.9.0.{number}/24 dev {interface}"));
        self.ns.ip(&format!("addr add fd09::{number}/64 dev {interface} nodad"));
    }

    fn device(&mut self) -> &mut dyn Device {
        self.device.as_deref_mut().expect("an open device")
    }

    pub(crate) fn apply(&mut self, changes: &[PeerChange]) {
        let device = self.device.as_deref_mut().expect("an open device");
        self.ns.enter(|| device.apply(changes)).expect("apply changes");
    }

    fn update(&mut self, other: u8, update: PeerUpdate) {
        self.apply(&[PeerChange::Update(public(other), update)]);
    }

    fn configure(&mut self, configuration: &Configuration) -> Result<(), DeviceError> {
        let device = self.device.as_deref_mut().expect("an open device");
        self.ns.enter(|| device.configure(configuration))
    }

    pub(crate) fn add(&mut self, other: u8, endpoint: Option<&str>) {
        self.apply(&[PeerChange::Add(public(other), spec(other, endpoint))]);
    }

    pub(crate) fn observe(&self) -> Observed {
        let device = self.device.as_deref().expect("an open device");
        device.observe().expect("observe")
    }

    pub(crate) fn peer(&self, other: u8) -> clustermesh_agent_core::device::ObservedPeer {
        self.observe().peers.remove(&public(other)).expect("the peer")
    }

    pub(crate) fn reaches(&self, other: u8) -> bool {
        self.ns.pings(&format!("10.9.0.{other}"))
    }

    /// What `wg` says of the peers: by key preshared key, endpoint, ranges in order, keepalive.
    fn shown(&self) -> BTreeMap<String, [String; 4]> {
        let dump = self.ns.run("wg", &["show", &self.interface, "dump"]);
        let peers = dump.lines().skip(1).map(|line| {
            let fields: Vec<&str> = line.split('\t').collect();
            let mut ranges: Vec<&str> = fields[3].split(',').collect();
            ranges.sort_unstable();
            let rest = [fields[1], fields[2], &ranges.join(","), fields[7]].map(ToOwned::to_owned);
            (fields[0].to_owned(), rest)
        });
        peers.collect()
    }

    /// What `wg` says of the device: port and firewall mark.
    fn device_shown(&self) -> [String; 2] {
        let dump = self.ns.run("wg", &["show", &self.interface, "dump"]);
        let fields: Vec<&str> = dump.lines().next().expect("a line").split('\t').collect();
        [fields[2], fields[3]].map(ToOwned::to_owned)
    }

    /// Seconds since 1970 of the last handshake with the one peer.
    pub(crate) fn handshake(&self) -> u64 {
        let text = self.ns.run("wg", &["show", &self.interface, "latest-handshakes"]);
        text.split_whitespace()
            .nth(1)
            .expect("a time")
            .parse()
            .expect("a number")
    }
}

pub(crate) fn spec(number: u8, endpoint: Option<&str>) -> PeerSpec {
    PeerSpec {
        endpoint: endpoint.map(|endpoint| endpoint.parse().expect("an endpoint")),
        allowed_ips: ranges(&[&format!("10.9.0.{number}/32"), &format!("fd09::{number}/128")]),
        ..PeerSpec::default()
    }
}

fn ranges<R: FromIterator<IpNet>>(texts: &[&str]) -> R {
    texts.iter().map(|text| text.parse().expect("a range")).collect()
}

/// Two nodes on one wire, 192.0.2.1 and 192.0.2.2, that know each other.
pub(crate) fn two(backends: [Backend; 2]) -> [Node; 2] {
    let (mut a, mut b) = (Node::new(1, backends[0]), Node::new(2, backends[1]));
    wire(&a.ns, &b.ns);
    a.add(2, Some("192.0.2.2:51820"));
    b.add(1, Some("192.0.2.1:51820"));
    [a, b]
}

fn wire(a: &NetNs, b: &NetNs) {
    let (left, right) = (["192.0.2.1/24", "2001:db8::1/64"], ["192.0.2.2/24", "2001:db8::2/64"]);
    veth(a, "eth0", &left, b, "eth0", &right);
}

fn joined(backend: Backend) -> [Node; 2] {
    let [a, b] = two([backend, backend]);
    wait_until("the first ping", SOON, || a.reaches(2) && b.reaches(1));
    [a, b]
}

pub(crate) fn two_devices_carry_both_families_and_wg_reads_every_attribute(backend: Backend) {
    let [mut a, b] = joined(backend);
    assert!(a.ns.pings("fd09::2") && b.ns.pings("fd09::1"));
    a.update(
        2,
        PeerUpdate {
            keepalive: Some(NonZeroU16::new(25)),
            ..PeerUpdate::default()
        },
    );
    let configuration = Configuration {
        fwmark: 0x0010_0000,
        mtu: 1380,
        ..a.configuration.clone()
    };
    a.configure(&configuration).expect("configure");
    let line = ["(none)", "192.0.2.2:51820", "10.9.0.2/32,fd09::2/128", "25"].map(ToOwned::to_owned);
    assert_eq!(a.shown(), [(public(2).to_string(), line)].into());
    assert_eq!(a.device_shown(), ["51820", "0x100000"]);
    let link = a.ns.ip_json(&format!("link show {}", a.interface));
    let flags: Vec<&str> = link[0]["flags"]
        .as_array()
        .expect("flags")
        .iter()
        .filter_map(|f| f.as_str())
        .collect();
    assert_eq!((&link[0]["mtu"], flags.contains(&"UP")), (&1380.into(), true));
    // And the same through our own eyes.
    let peer = a.peer(2);
    let want = PeerSpec {
        keepalive: NonZeroU16::new(25),
        ..spec(2, Some("192.0.2.2:51820"))
    };
    assert_eq!(peer.configured, want);
    assert!(peer.stats.handshake_age.is_some() && peer.stats.rx_bytes > 0 && peer.stats.tx_bytes > 0);
}

pub(crate) fn a_new_peer_with_an_endpoint_is_greeted_without_any_traffic(backend: Backend) {
    let (mut a, mut b) = (Node::new(1, backend), Node::new(2, backend));
    wire(&a.ns, &b.ns);
    b.add(1, None);
    a.add(2, Some("192.0.2.2:51820"));
    wait_until("a handshake", SOON, || b.peer(1).stats.handshake_age.is_some());
    assert_eq!(
        a.peer(2).configured,
        spec(2, Some("192.0.2.2:51820")),
        "no keepalive is left of it"
    );
    assert_eq!(a.shown()[&public(2).to_string()][3], "off");
}

pub(crate) fn a_change_of_attributes_keeps_the_session_and_the_counters(backend: Backend) {
    let [mut a, b] = joined(backend);
    let (handshake, before) = (a.handshake(), a.peer(2).stats);
    for round in 1..=5_u16 {
        let range = format!("10.7{round}.0.0/16");
        let gained = PeerUpdate {
            keepalive: Some(NonZeroU16::new(10 + round)),
            add_allowed_ips: ranges(&[&range]),
            ..PeerUpdate::default()
        };
        a.update(2, gained);
        let lost = PeerUpdate {
            keepalive: Some(None),
            remove_allowed_ips: ranges(&[&range]),
            ..PeerUpdate::default()
        };
        a.update(2, lost);
        a.add(9, Some("192.0.2.99:1"));
        a.apply(&[PeerChange::Remove(public(9))]);
    }
    assert_eq!(a.peer(2).configured, spec(2, Some("192.0.2.2:51820")));
    let after = a.peer(2).stats;
    assert!(
        after.rx_bytes >= before.rx_bytes && after.tx_bytes >= before.tx_bytes,
        "{before:?} {after:?}"
    );
    assert!(a.reaches(2) && b.reaches(1));
    assert_eq!(a.handshake(), handshake, "the session of before");
}

pub(crate) fn a_preshared_key_counts_at_once_and_must_be_the_same_on_both_sides(backend: Backend) {
    let [mut a, mut b] = joined(backend);
    let keyed = |number| PeerUpdate {
        preshared_key: Some(PresharedKey::new([number; 32])),
        ..PeerUpdate::default()
    };
    a.update(2, keyed(1));
    assert!(!a.reaches(2));
    b.update(1, keyed(1));
    wait_until("a ping with the preshared key", SOON, || a.reaches(2) && b.reaches(1));
    let want = PeerSpec {
        preshared_key: PresharedKey::new([1; 32]),
        ..spec(2, Some("192.0.2.2:51820"))
    };
    assert_eq!(a.peer(2).configured, want);
}

pub(crate) fn a_removed_peer_is_deaf_and_its_ranges_have_no_owner(backend: Backend) {
    let [mut a, b] = joined(backend);
    a.apply(&[PeerChange::Remove(public(2))]);
    assert!(!b.reaches(1) && !a.reaches(2));
    assert_eq!((a.observe().peers.len(), a.shown().len()), (0, 0));
}

pub(crate) fn a_peer_that_roamed_stays_where_it_is_whatever_else_changes(backend: Backend) {
    let [mut a, b] = joined(backend);
    b.ns.sh("ip addr add 192.0.2.77/24 dev eth0; ip addr del 192.0.2.2/24 dev eth0; ip addr add 192.0.2.77/24 dev eth0 || true");
    let moved = Some("192.0.2.77:51820".parse().expect("an endpoint"));
    wait_until("the new address", SOON, || {
        b.reaches(1) && a.peer(2).stats.endpoint == moved
    });
    let update = PeerUpdate {
        keepalive: Some(NonZeroU16::new(7)),
        add_allowed_ips: ranges(&["10.77.0.0/16"]),
        ..PeerUpdate::default()
    };
    a.update(2, update);
    let peer = a.peer(2);
    assert_eq!(peer.stats.endpoint, moved);
    assert_eq!(
        peer.configured.endpoint,
        spec(2, Some("192.0.2.2:51820")).endpoint,
        "what we set, not where it is"
    );
    assert_eq!(a.shown()[&public(2).to_string()][1], "192.0.2.77:51820");
    assert!(a.reaches(2));
}

pub(crate) fn answers_come_from_the_address_that_was_called(backend: Backend) {
    let [mut a, mut b] = joined(backend);
    // Neither is the one that the kernel would choose.
    a.ns.sh("ip addr add 192.0.2.77/24 dev eth0; ip addr add 2001:db8::77/64 dev eth0 nodad preferred_lft 0");
    for called in ["192.0.2.77:51820", "[2001:db8::77]:51820"] {
        a.apply(&[PeerChange::Remove(public(2))]);
        b.apply(&[PeerChange::Remove(public(1))]);
        a.add(2, None);
        b.add(1, Some(called));
        wait_until("a ping", SOON, || b.reaches(1) && a.reaches(2));
        let endpoint = b.peer(1).stats.endpoint;
        assert_eq!(endpoint, Some(called.parse().expect("an endpoint")));
    }
}

pub(crate) fn a_new_private_key_makes_new_sessions_with_those_who_know_it(backend: Backend) {
    let [mut a, mut b] = joined(backend);
    b.apply(&[
        PeerChange::Remove(public(1)),
        PeerChange::Add(public(11), spec(1, None)),
    ]);
    let configuration = Configuration {
        private_key: secret(11),
        ..a.configuration.clone()
    };
    a.configure(&configuration).expect("configure");
    wait_until("a ping with the new key", SOON, || a.reaches(2) && b.reaches(1));
    assert!(b.peer(11).stats.handshake_age.is_some());
}

pub(crate) fn ranges_move_and_go_without_a_gap_for_the_others(backend: Backend) {
    let [mut a, b] = joined(backend);
    let mut c = Node::new(3, backend);
    veth(&a.ns, "eth1", &["198.51.100.1/24"], &c.ns, "eth0", &["198.51.100.3/24"]);
    c.add(1, Some("198.51.100.1:51820"));
    a.add(3, Some("198.51.100.3:51820"));
    wait_until("the third node", SOON, || a.reaches(3) && c.reaches(1));
    let moving = PeerUpdate {
        add_allowed_ips: ranges(&["10.7.0.1/32"]),
        ..PeerUpdate::default()
    };
    a.update(2, moving.clone());
    a.ns.ip(&format!("route add 10.7.0.1/32 dev {}", a.interface));
    // Sockets and no counters of nft, which see datagrams that were joined on the way as one packet.
    let receivers = [&b, &c].map(|node| {
        node.ns.ip("addr add 10.7.0.1/32 dev lo");
        let socket = node.ns.enter(|| UdpSocket::bind("10.7.0.1:9")).expect("bind");
        socket.set_nonblocking(true).expect("non-blocking");
        socket
    });
    let socket = a.ns.enter(|| UdpSocket::bind("10.9.0.1:0")).expect("bind");
    let (mut sent, mut got) = (0, [0; 2]);
    for round in 0..60 {
        // Between two changes and, on its own thread, during them.
        let device = a.device.as_deref_mut().expect("an open device");
        let other = PeerUpdate {
            add_allowed_ips: ranges(&["10.8.0.0/16"]),
            ..PeerUpdate::default()
        };
        let back = PeerUpdate {
            remove_allowed_ips: ranges(&["10.8.0.0/16"]),
            ..PeerUpdate::default()
        };
        let owner = public(2 + (round + 1) % 2);
        std::thread::scope(|scope| {
            let flow = scope.spawn(|| {
                for _ in 0..20 {
                    socket.send_to(b"here", "10.7.0.1:9").expect("send");
                }
            });
            for update in [other, moving.clone(), back] {
                device.apply(&[PeerChange::Update(owner, update)]).expect("apply");
            }
            flow.join().expect("the flow");
        });
        sent += 20;
        // A queue that runs over would look like a gap.
        if sent % 100 == 0 {
            wait_until("every datagram at one of the two", SOON, || {
                for (receiver, got) in receivers.iter().zip(&mut got) {
                    *got += std::iter::from_fn(|| receiver.recv(&mut [0; 16]).ok()).count();
                }
                got.iter().sum::<usize>() >= sent
            });
        }
    }
    assert_eq!(got.iter().sum::<usize>(), sent);
    assert!(got.iter().all(|got| *got > 0), "{got:?}");
    assert_eq!(
        a.peer(3).configured,
        spec(3, Some("198.51.100.3:51820")),
        "the last move was to the other"
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

pub(crate) fn a_new_port_is_used_and_a_taken_one_changes_nothing(backend: Backend) {
    let [mut a, b] = joined(backend);
    let _taken = a.ns.enter(|| UdpSocket::bind("0.0.0.0:51998")).expect("bind");
    let on = |port| Configuration {
        listen_port: port,
        ..a.configuration.clone()
    };
    let (taken, free) = (on(51998), on(51999));
    let error = a.configure(&taken).expect_err("the port is taken");
    assert!(matches!(error, DeviceError::Listen { port: 51998, .. }), "{error}");
    assert!(a.reaches(2) && b.reaches(1));
    assert_eq!(
        (a.observe().listen_port, a.device_shown()),
        (PORT, ["51820", "off"].map(ToOwned::to_owned))
    );
    a.configure(&free).expect("a free port");
    wait_until("a ping from the new port", SOON, || a.reaches(2) && b.reaches(1));
    assert_eq!(
        b.peer(1).stats.endpoint,
        Some("192.0.2.1:51999".parse().expect("an endpoint"))
    );
    assert_eq!(
        (a.observe().listen_port, a.device_shown()[0].as_str()),
        (51999, "51999")
    );
}

pub(crate) fn every_outer_packet_carries_the_firewall_mark_also_after_it_changes(backend: Backend) {
    let [mut a, b] = joined(backend);
    a.ns.sh(
        "nft 'add table inet t { chain out { type filter hook output priority 0; udp dport 51820 meta mark 0x00100000 counter; \
         udp dport 51820 meta mark 0 counter; udp dport 51820 meta mark 7 counter; }; }'",
    );
    for (at, fwmark) in [(0, 0x0010_0000), (2, 7)] {
        let configuration = Configuration {
            fwmark,
            ..a.configuration.clone()
        };
        a.configure(&configuration).expect("configure");
        let before = counters(&a.ns);
        assert!(a.reaches(2) && b.reaches(1));
        let after = counters(&a.ns);
        assert!(after[at] > before[at], "{before:?} {after:?}");
        assert!(
            before
                .iter()
                .zip(&after)
                .enumerate()
                .all(|(n, (b, a))| n == at || a == b),
            "{before:?} {after:?}"
        );
    }
}

pub(crate) fn a_device_deleted_by_someone_else_is_said_and_can_be_opened_again(backend: Backend) {
    let [mut a, b] = joined(backend);
    a.ns.ip(&format!("link del {}", a.interface));
    let gone = a.device.take().expect("an open device");
    wait_until("the device to notice", SOON, || {
        matches!(gone.observe(), Err(DeviceError::Gone(_)))
    });
    drop(gone);
    a.open(backend);
    a.address();
    a.add(2, Some("192.0.2.2:51820"));
    wait_until("a ping", SOON, || b.reaches(1));
}

pub(crate) fn what_another_hand_changed_of_a_device_is_said_and_put_back(backend: Backend) {
    let [mut a, b] = joined(backend);
    let look = |a: &mut Node| {
        let device = a.device.as_deref_mut().expect("an open device");
        a.ns.enter(move || device.observe()).expect("observe").altered
    };
    let link = |a: &Node| {
        let link = &a.ns.ip_json(&format!("link show {}", a.interface))[0];
        (link["mtu"].clone(), link["flags"].clone())
    };
    let (whole, shown) = (link(&a), a.device_shown());
    assert_eq!(look(&mut a), [].into());
    let mut altered = BTreeSet::from([Altered::Mtu, Altered::Down]);
    if backend == Backend::Kernel {
        // The userspace device is told by its agent alone.
        let file = tempfile::NamedTempFile::new().expect("a file");
        let (key, interface) = (file.path().display(), &a.interface);
        a.ns.sh(&format!(
            "wg genkey > {key}; wg set {interface} listen-port 5555 fwmark 7 private-key {key}"
        ));
        altered.extend([Altered::ListenPort, Altered::Fwmark, Altered::PrivateKey]);
    }
    a.ns.ip(&format!("link set {} mtu 1300 down", a.interface));
    assert_eq!(look(&mut a), altered);
    let device = a.device.as_deref_mut().expect("an open device");
    a.ns.enter(|| device.mend(&altered)).expect("mend");
    assert_eq!(look(&mut a), [].into());
    assert_eq!((link(&a), a.device_shown()), (whole, shown));
    wait_until("a ping", SOON, || a.reaches(2) && b.reaches(1));
}

pub(crate) fn a_sender_whose_packet_has_no_peer_or_nowhere_to_go_is_told_so(backend: Backend) {
    let mut node = Node::new(1, backend);
    // A peer that nobody knows the place of, and an address that no peer has.
    node.add(2, None);
    for [v4, v6] in [["10.9.0.2", "fd09::2"], ["10.9.0.3", "fd09::3"]] {
        for (address, words) in [(v4, "Destination Host Unreachable"), (v6, "Address unreachable")] {
            let output = node.ns.output("ping", &["-n", "-c1", "-W5", address]);
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(said.contains(words), "{address}: {output:?}");
        }
    }
}

pub(crate) fn an_interface_that_is_not_ours_is_left_alone(backend: Backend) {
    let ns = NetNs::new("not ours");
    ns.ip("link add foreign type veth peer name other");
    ns.ip("tuntap add dev kept mode tun");
    let configuration = Configuration {
        private_key: secret(1),
        listen_port: PORT,
        fwmark: 0,
        mtu: 1420,
    };
    let open = |name: &str| {
        ns.enter(|| device::open(backend, name, &configuration, Default::default()))
            .map(drop)
    };
    for name in ["foreign", "kept"] {
        let before = ns.ip_json(&format!("-d link show {name}"));
        let error = open(name).expect_err("someone else's");
        assert!(
            matches!(&error, DeviceError::Exists(exists) if exists == name),
            "{error}"
        );
        assert_eq!(ns.ip_json(&format!("-d link show {name}")), before);
    }
    for name in ["", "much-too-long-name", "a/b", "with space"] {
        assert!(matches!(open(name), Err(DeviceError::Name(_))), "{name:?}");
    }
    assert_eq!(links(&ns), ["foreign", "kept", "lo", "other"]);
}

/// The names of all interfaces, in order.
pub(crate) fn links(ns: &NetNs) -> Vec<String> {
    let all = ns.ip_json("link show");
    let names = all
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|link| link["ifname"].as_str());
    let mut names: Vec<_> = names.map(ToOwned::to_owned).collect();
    names.sort();
    names
}

pub(crate) fn of_five_thousand_peers_the_one_that_changes_is_the_only_one_touched(backend: Backend) {
    let [mut a, b] = joined(backend);
    let key = |number: u32| {
        let mut bytes = [7; 32];
        bytes[4..8].copy_from_slice(&number.to_le_bytes());
        PublicKey::new(bytes)
    };
    let range = |number: u32| IpNet::V4(ipnet::Ipv4Net::new((0x0a80_0000 + number * 256).into(), 24).expect("a range"));
    let changes: Vec<PeerChange> = (0..5_000)
        .map(|number| {
            let spec = PeerSpec {
                allowed_ips: [range(number)].into(),
                ..PeerSpec::default()
            };
            PeerChange::Add(key(number), spec)
        })
        .collect();
    let began = Instant::now();
    a.apply(&changes);
    let all = began.elapsed();
    let (mut before, handshake) = (a.shown(), a.handshake_of(2));
    assert_eq!(before.len(), 5_001);

    let update = PeerUpdate {
        keepalive: Some(NonZeroU16::new(21)),
        add_allowed_ips: ranges(&["10.66.0.0/16"]),
        remove_allowed_ips: [range(17)].into(),
        ..PeerUpdate::default()
    };
    let began = Instant::now();
    a.update_key(key(17), update);
    let one = began.elapsed();
    println!("5,000 peers in {all:?}, one changed in {one:?}");
    let changed = ["(none)", "(none)", "10.66.0.0/16", "21"].map(ToOwned::to_owned);
    before.insert(key(17).to_string(), changed);
    assert!(a.shown() == before, "something else differs");
    assert_eq!(a.observe().peers.len(), 5_001);
    assert_eq!(a.handshake_of(2), handshake);
    assert!(a.reaches(2) && b.reaches(1));
}

impl Node {
    fn update_key(&mut self, key: PublicKey, update: PeerUpdate) {
        self.apply(&[PeerChange::Update(key, update)]);
    }

    fn handshake_of(&self, other: u8) -> String {
        let text = self.ns.run("wg", &["show", &self.interface, "latest-handshakes"]);
        let key = public(other).to_string();
        let line = text.lines().find(|line| line.starts_with(&key));
        line.expect("the peer").to_owned()
    }
}

pub(crate) fn a_closed_device_leaves_nothing(backend: Backend) {
    let [mut a, _b] = joined(backend);
    let device = a.device.take().expect("an open device");
    a.ns.enter(|| device.close()).expect("close");
    assert_eq!(links(&a.ns), ["eth0", "lo"]);
    assert!(!std::path::Path::new(&format!("/var/run/wireguard/{}.sock", a.interface)).exists());
    a.open(backend);
    assert_eq!(a.observe().peers.len(), 0);
}
