//! Tests of the device: listen port, fwmark, external changes, ICMP errors, foreign interfaces, closing.

use super::*;

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

pub fn free_port_is_opened_and_port_in_use_changes_nothing(backend: Backend) {
    let [mut a, b] = connected_pair(backend);
    let _other_socket = a.ns.enter(|| UdpSocket::bind("0.0.0.0:51998")).expect("bind");
    let with_port = |port| Configuration {
        listen_port: port,
        ..a.configuration.clone()
    };
    let (port_in_use, free_port) = (with_port(51998), with_port(51999));
    let error = a.configure(&port_in_use).expect_err("the port is in use");
    assert!(matches!(error, DeviceError::Listen { port: 51998, .. }), "{error}");
    assert!(a.reaches_patiently(2) && b.reaches_patiently(1));
    assert_eq!(
        (a.observe().listen_port, a.wg_device()),
        (PORT, ["51820", "off"].map(ToOwned::to_owned))
    );
    a.configure(&free_port).expect("a free port");
    wait_until("a ping from the new port", TIMEOUT, || a.reaches(2) && b.reaches(1));
    assert_eq!(
        b.peer(1).stats.endpoint,
        Some("192.0.2.1:51999".parse().expect("an endpoint"))
    );
    assert_eq!((a.observe().listen_port, a.wg_device()[0].as_str()), (51999, "51999"));
}

pub fn outer_packets_carry_the_current_fwmark(backend: Backend) {
    let [mut a, b] = connected_pair(backend);
    a.ns.sh(
        "nft 'add table inet t { chain out { type filter hook output priority 0; udp dport 51820 meta mark 0x00100000 counter; \
         udp dport 51820 meta mark 0 counter; udp dport 51820 meta mark 7 counter; }; }'",
    );
    for (rule, fwmark) in [(0, 0x0010_0000), (2, 7)] {
        let configuration = Configuration {
            fwmark,
            ..a.configuration.clone()
        };
        a.configure(&configuration).expect("configure");
        let before = counters(&a.ns);
        assert!(a.reaches_patiently(2) && b.reaches_patiently(1));
        let after = counters(&a.ns);
        assert!(after[rule] > before[rule], "{before:?} {after:?}");
        assert!(
            before
                .iter()
                .zip(&after)
                .enumerate()
                .all(|(index, (before, after))| index == rule || after == before),
            "{before:?} {after:?}"
        );
    }
}

pub fn deleted_device_is_reported_and_can_be_reopened(backend: Backend) {
    let [mut a, b] = connected_pair(backend);
    a.ns.ip(&format!("link del {}", a.interface));
    let gone = a.device.take().expect("an open device");
    wait_until("the device to report its deletion", TIMEOUT, || {
        matches!(gone.observe(), Err(DeviceError::Gone(_)))
    });
    drop(gone);
    a.open(backend);
    a.add_addresses();
    a.add(2, Some("192.0.2.2:51820"));
    wait_until("a ping", TIMEOUT, || b.reaches(1));
}

pub fn external_device_changes_are_reported_and_repaired(backend: Backend) {
    let [mut a, b] = connected_pair(backend);
    let altered_parts = |a: &mut Node| {
        let device = a.device.as_deref_mut().expect("an open device");
        a.ns.enter(move || device.observe()).expect("observe").altered
    };
    let link = |a: &Node| {
        let link = &a.ns.ip_json(&format!("link show {}", a.interface))[0];
        (link["mtu"].clone(), link["flags"].clone())
    };
    let (link_before, wg_before) = (link(&a), a.wg_device());
    assert_eq!(altered_parts(&mut a), [].into());
    let mut altered = BTreeSet::from([Altered::Mtu, Altered::Down]);
    // `wg` cannot change a userspace device, because its control socket is read-only.
    if backend == Backend::Kernel {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let (key, interface) = (file.path().display(), &a.interface);
        a.ns.sh(&format!(
            "wg genkey > {key}; wg set {interface} listen-port 5555 fwmark 7 private-key {key}"
        ));
        altered.extend([Altered::ListenPort, Altered::Fwmark, Altered::PrivateKey]);
    }
    a.ns.ip(&format!("link set {} mtu 1300 down", a.interface));
    assert_eq!(altered_parts(&mut a), altered);
    let device = a.device.as_deref_mut().expect("an open device");
    a.ns.enter(|| device.repair(&altered)).expect("repair");
    assert_eq!(altered_parts(&mut a), [].into());
    assert_eq!((link(&a), a.wg_device()), (link_before, wg_before));
    wait_until("a ping", TIMEOUT, || a.reaches(2) && b.reaches(1));
}

pub fn unroutable_inner_packet_gets_an_icmp_error(backend: Backend) {
    let mut node = Node::new(1, backend);
    // A peer without endpoint, and an address without a peer.
    node.add(2, None);
    for [v4, v6] in [["10.9.0.2", "fd09::2"], ["10.9.0.3", "fd09::3"]] {
        for (address, words) in [(v4, "Destination Host Unreachable"), (v6, "Address unreachable")] {
            let output = node.ns.output("ping", &["-n", "-c1", "-W30", address]);
            let stdout = String::from_utf8_lossy(&output.stdout);
            assert!(stdout.contains(words), "{address}: {output:?}");
        }
    }
}

pub fn foreign_interface_and_invalid_name_are_refused(backend: Backend) {
    let ns = NetNs::new("foreign interfaces");
    ns.ip("link add foreign-veth type veth peer name other");
    ns.ip("tuntap add dev foreign-tun mode tun");
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
    for name in ["foreign-tun", "foreign-veth"] {
        let before = ns.ip_json(&format!("-d link show {name}"));
        let error = open(name).expect_err("a foreign interface");
        assert!(
            matches!(&error, DeviceError::Exists(exists) if exists == name),
            "{error}"
        );
        assert_eq!(ns.ip_json(&format!("-d link show {name}")), before);
    }
    for name in ["", "much-too-long-name", "a/b", "with space"] {
        assert!(matches!(open(name), Err(DeviceError::Name(_))), "{name:?}");
    }
    assert_eq!(links(&ns), ["foreign-tun", "foreign-veth", "lo", "other"]);
}

pub fn closed_device_leaves_nothing(backend: Backend) {
    let [mut a, _b] = connected_pair(backend);
    let device = a.device.take().expect("an open device");
    a.ns.enter(|| device.close()).expect("close");
    assert_eq!(links(&a.ns), ["eth0", "lo"]);
    assert!(!std::path::Path::new(&format!("/var/run/wireguard/{}.sock", a.interface)).exists());
    a.open(backend);
    assert_eq!(a.observe().peers.len(), 0);
}
