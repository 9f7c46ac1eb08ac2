//! Tests adding, changing, removing and roaming of peers, and that other peers are not affected.

use super::*;
use crate::sessions::check_handshake_kept;

pub fn two_devices_carry_both_families_and_wg_reads_every_attribute(backend: Backend) {
    let [mut a, b] = connected_pair(backend);
    assert!(a.ns.pings_patiently("fd09::2") && b.ns.pings_patiently("fd09::1"));
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
    assert_eq!(a.wg_peers(), [(public(2).to_string(), line)].into());
    assert_eq!(a.wg_device(), ["51820", "0x100000"]);
    let link = a.ns.ip_json(&format!("link show {}", a.interface));
    let flags: Vec<&str> = link[0]["flags"]
        .as_array()
        .expect("flags")
        .iter()
        .filter_map(|f| f.as_str())
        .collect();
    assert_eq!((&link[0]["mtu"], flags.contains(&"UP")), (&1380.into(), true));
    // `Device::observe` returns the same values as `wg`.
    let peer = a.peer(2);
    let want = PeerSpec {
        keepalive: NonZeroU16::new(25),
        ..spec(2, Some("192.0.2.2:51820"))
    };
    assert_eq!(peer.configured, want);
    assert!(peer.stats.handshake_age.is_some() && peer.stats.rx_bytes > 0 && peer.stats.tx_bytes > 0);
}

pub fn new_peer_with_endpoint_gets_a_handshake_without_traffic(backend: Backend) {
    let (mut a, mut b) = (Node::new(1, backend), Node::new(2, backend));
    connect(&a.ns, &b.ns);
    b.add(1, None);
    a.add(2, Some("192.0.2.2:51820"));
    wait_until("a handshake", TIMEOUT, || b.peer(1).stats.handshake_age.is_some());
    assert_eq!(
        a.peer(2).configured,
        spec(2, Some("192.0.2.2:51820")),
        "the keepalive that started the handshake is removed"
    );
    assert_eq!(a.wg_peers()[&public(2).to_string()][3], "off");
}

pub fn peer_changes_keep_session_and_counters(backend: Backend) {
    let [mut a, b] = connected_pair(backend);
    let (handshake, before) = (a.handshake(), a.peer(2).stats);
    for round in 1..=5_u16 {
        let prefix = format!("10.7{round}.0.0/16");
        let gained = PeerUpdate {
            keepalive: Some(NonZeroU16::new(10 + round)),
            add_allowed_ips: prefixes(&[&prefix]),
            ..PeerUpdate::default()
        };
        a.update(2, gained);
        let lost = PeerUpdate {
            keepalive: Some(None),
            remove_allowed_ips: prefixes(&[&prefix]),
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
    assert!(a.reaches_patiently(2) && b.reaches_patiently(1));
    check_handshake_kept("node 2", handshake, a.handshake());
}

pub fn preshared_key_applies_at_once_and_must_match(backend: Backend) {
    let [mut a, mut b] = connected_pair(backend);
    let keyed = |number| PeerUpdate {
        preshared_key: Some(PresharedKey::new([number; 32])),
        ..PeerUpdate::default()
    };
    a.update(2, keyed(1));
    assert!(!a.reaches(2));
    b.update(1, keyed(1));
    wait_until("a ping with the preshared key", TIMEOUT, || {
        a.reaches(2) && b.reaches(1)
    });
    let want = PeerSpec {
        preshared_key: PresharedKey::new([1; 32]),
        ..spec(2, Some("192.0.2.2:51820"))
    };
    assert_eq!(a.peer(2).configured, want);
}

pub fn removed_peer_is_unreachable(backend: Backend) {
    let [mut a, b] = connected_pair(backend);
    a.apply(&[PeerChange::Remove(public(2))]);
    assert!(!b.reaches(1) && !a.reaches(2));
    assert_eq!((a.observe().peers.len(), a.wg_peers().len()), (0, 0));
}

pub fn roamed_endpoint_survives_other_changes(backend: Backend) {
    let [mut a, b] = connected_pair(backend);
    // The kernel may delete a secondary address with the primary one, so the new address is added again.
    b.ns.sh("ip addr add 192.0.2.77/24 dev eth0; ip addr del 192.0.2.2/24 dev eth0; ip addr add 192.0.2.77/24 dev eth0 || true");
    let moved = Some("192.0.2.77:51820".parse().expect("an endpoint"));
    wait_until("the new endpoint", TIMEOUT, || {
        b.reaches(1) && a.peer(2).stats.endpoint == moved
    });
    let update = PeerUpdate {
        keepalive: Some(NonZeroU16::new(7)),
        add_allowed_ips: prefixes(&["10.77.0.0/16"]),
        ..PeerUpdate::default()
    };
    a.update(2, update);
    let peer = a.peer(2);
    assert_eq!(peer.stats.endpoint, moved);
    assert_eq!(
        peer.configured.endpoint,
        spec(2, Some("192.0.2.2:51820")).endpoint,
        "the configured endpoint, not the current one"
    );
    assert_eq!(a.wg_peers()[&public(2).to_string()][1], "192.0.2.77:51820");
    assert!(a.reaches_patiently(2));
}

pub fn replies_come_from_the_contacted_address(backend: Backend) {
    let [mut a, mut b] = connected_pair(backend);
    // The kernel would choose neither of these addresses as source.
    a.ns.sh("ip addr add 192.0.2.77/24 dev eth0; ip addr add 2001:db8::77/64 dev eth0 nodad preferred_lft 0");
    for contacted in ["192.0.2.77:51820", "[2001:db8::77]:51820"] {
        a.apply(&[PeerChange::Remove(public(2))]);
        b.apply(&[PeerChange::Remove(public(1))]);
        a.add(2, None);
        b.add(1, Some(contacted));
        wait_until("a ping", TIMEOUT, || b.reaches(1) && a.reaches(2));
        let endpoint = b.peer(1).stats.endpoint;
        assert_eq!(endpoint, Some(contacted.parse().expect("an endpoint")));
    }
}

pub fn new_private_key_makes_new_sessions(backend: Backend) {
    let [mut a, mut b] = connected_pair(backend);
    b.apply(&[
        PeerChange::Remove(public(1)),
        PeerChange::Add(public(11), spec(1, None)),
    ]);
    let configuration = Configuration {
        private_key: secret(11),
        ..a.configuration.clone()
    };
    a.configure(&configuration).expect("configure");
    wait_until("a ping with the new key", TIMEOUT, || a.reaches(2) && b.reaches(1));
    assert!(b.peer(11).stats.handshake_age.is_some());
}

pub fn allowed_ips_move_between_peers_without_a_gap(backend: Backend) {
    let [mut a, b] = connected_pair(backend);
    let mut c = Node::new(3, backend);
    veth(&a.ns, "eth1", &["198.51.100.1/24"], &c.ns, "eth0", &["198.51.100.3/24"]);
    c.add(1, Some("198.51.100.1:51820"));
    a.add(3, Some("198.51.100.3:51820"));
    wait_until("the third node", TIMEOUT, || a.reaches(3) && c.reaches(1));
    let moving = PeerUpdate {
        add_allowed_ips: prefixes(&["10.7.0.1/32"]),
        ..PeerUpdate::default()
    };
    a.update(2, moving.clone());
    a.ns.ip(&format!("route add 10.7.0.1/32 dev {}", a.interface));
    // Sockets count the datagrams, because nft counters count coalesced datagrams as one packet.
    let receivers = [&b, &c].map(|node| {
        node.ns.ip("addr add 10.7.0.1/32 dev lo");
        let socket = node.ns.enter(|| UdpSocket::bind("10.7.0.1:9")).expect("bind");
        socket.set_nonblocking(true).expect("non-blocking");
        socket
    });
    let socket = a.ns.enter(|| UdpSocket::bind("10.9.0.1:0")).expect("bind");
    let (mut sent, mut got) = (0, [0; 2]);
    for round in 0..60 {
        // Sends datagrams on another thread while the allowed IP moves to another peer. That peer also gets a second allowed IP and
        // loses it again, because removing one of several allowed IPs needs a workaround before Linux 6.17
        // (docs/decisions/0029-workarounds-for-the-kernels-wireguard.md).
        let device = a.device.as_deref_mut().expect("an open device");
        let add_second = PeerUpdate {
            add_allowed_ips: prefixes(&["10.8.0.0/16"]),
            ..PeerUpdate::default()
        };
        let remove_second = PeerUpdate {
            remove_allowed_ips: prefixes(&["10.8.0.0/16"]),
            ..PeerUpdate::default()
        };
        let owner = public(2 + (round + 1) % 2);
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                for _ in 0..20 {
                    socket.send_to(b"here", "10.7.0.1:9").expect("send");
                }
            });
            for update in [add_second, moving.clone(), remove_second] {
                device.apply(&[PeerChange::Update(owner, update)]).expect("apply");
            }
            sender.join().expect("the sender");
        });
        sent += 20;
        // Empties the receive queues, because lost datagrams of a full queue would look like a gap.
        if sent % 100 == 0 {
            wait_until("every datagram to reach one of the two peers", TIMEOUT, || {
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
        "the last owner is peer 2"
    );
}

pub fn change_of_one_of_5000_peers_keeps_all_others(backend: Backend) {
    let [mut a, b] = connected_pair(backend);
    let key = |number: u32| {
        let mut bytes = [7; 32];
        bytes[4..8].copy_from_slice(&number.to_le_bytes());
        PublicKey::new(bytes)
    };
    let prefix = |number: u32| IpNet::V4(ipnet::Ipv4Net::new((0x0a80_0000 + number * 256).into(), 24).expect("a /24"));
    let changes: Vec<PeerChange> = (0..5_000)
        .map(|number| {
            let spec = PeerSpec {
                allowed_ips: [prefix(number)].into(),
                ..PeerSpec::default()
            };
            PeerChange::Add(key(number), spec)
        })
        .collect();
    let began = Instant::now();
    a.apply(&changes);
    let adding = began.elapsed();
    let (mut before, handshake) = (a.wg_peers(), a.handshake_of(2));
    assert_eq!(before.len(), 5_001);

    let update = PeerUpdate {
        keepalive: Some(NonZeroU16::new(21)),
        add_allowed_ips: prefixes(&["10.66.0.0/16"]),
        remove_allowed_ips: [prefix(17)].into(),
        ..PeerUpdate::default()
    };
    let began = Instant::now();
    a.update_by_key(key(17), update);
    let changing = began.elapsed();
    println!("5,000 peers added in {adding:?}, one changed in {changing:?}");
    let changed = ["(none)", "(none)", "10.66.0.0/16", "21"].map(ToOwned::to_owned);
    before.insert(key(17).to_string(), changed);
    assert!(a.wg_peers() == before, "another peer has changed");
    assert_eq!(a.observe().peers.len(), 5_001);
    check_handshake_kept("node 2", handshake, a.handshake_of(2));
    assert!(a.reaches_patiently(2) && b.reaches_patiently(1));
}

impl Node {
    fn update_by_key(&mut self, key: PublicKey, update: PeerUpdate) {
        self.apply(&[PeerChange::Update(key, update)]);
    }

    fn handshake_of(&self, other: u8) -> u64 {
        let text = self.ns.run("wg", &["show", &self.interface, "latest-handshakes"]);
        let key = public(other).to_string();
        let line = text.lines().find(|line| line.starts_with(&key));
        let (_, time) = line.expect("the peer").split_once('\t').expect("a time");
        time.parse().expect("a number")
    }
}
