//! Runs the tests that every device backend must pass (`clustermesh_tests::contract`) with the kernel's WireGuard, and further tests of
//! this backend.

use std::{
    io::Read,
    process::{Command, Stdio},
    time::Duration,
};

use clustermesh_agent_core::{device::PeerChange, prefixes::Family};
use clustermesh_tests::{
    contract::{self, Node, TIMEOUT, links, node_pair, public, spec},
    netns::{transfer, wait_until},
    path::real::{Star, pod, probe_sizes},
    sessions::check_handshake_kept,
};
use wg_agent::device::{Backend, DeviceError, userspace};

use crate::virtual_machine::run_in_machine;

macro_rules! case {
    ($($name:ident)*) => { $(
        #[test]
        fn $name() {
            run_in_machine!();
            contract::$name(Backend::Kernel);
        }
    )* };
}
clustermesh_tests::each_device_test!(case);

#[test]
fn reopened_device_loses_no_packet_and_no_session() {
    run_in_machine!();
    let [mut a, b] = node_pair([Backend::Kernel, Backend::Kernel]);
    wait_until("the first ping", TIMEOUT, || a.reaches(2) && b.reaches(1));
    let (handshake, before) = (a.handshake(), a.peer(2));
    let words = ["-n", "-q", "-c", "200", "-i", "0.05", "-W", "30", "10.9.0.2"];
    let mut ping =
        a.ns.spawn_command(Command::new("ping").args(words).stdout(Stdio::piped()));
    for _ in 0..20 {
        // As in a restart of the agent, the device is dropped without `close`.
        drop(a.device.take());
        a.open(Backend::Auto);
        let peer = a.peer(2);
        assert_eq!(
            (&peer.configured, peer.stats.endpoint),
            (&before.configured, before.stats.endpoint)
        );
        assert!(peer.stats.tx_bytes >= before.stats.tx_bytes, "the counters were reset");
    }
    ping.wait(Duration::from_secs(300));
    let mut text = String::new();
    let mut output = ping.child().stdout.take().expect("its output");
    output.read_to_string(&mut text).expect("read");
    assert!(text.contains("200 packets transmitted, 200 received"), "{text}");
    check_handshake_kept("node 2", handshake, a.handshake());
}

#[test]
fn backend_switch_leaves_nothing_of_old_device() {
    run_in_machine!();
    let [mut a, b] = node_pair([Backend::Kernel, Backend::Userspace]);
    wait_until("the first ping", TIMEOUT, || a.reaches(2) && b.reaches(1));
    let socket = format!("/var/run/wireguard/{}.sock", a.interface);
    for (backend, kind, has_socket) in [
        (Backend::Userspace, "tun", true),
        (Backend::Auto, "wireguard", false),
        (Backend::Userspace, "tun", true),
        (Backend::Kernel, "wireguard", false),
    ] {
        // As in a restart of the agent, the old device is dropped without `close`.
        drop(a.device.take());
        a.open(backend);
        a.add_addresses();
        a.add(2, Some("192.0.2.2:51820"));
        // After the switch to the kernel, the peer drops this node's initiations for up to 27 s, because the timestamps of
        // the userspace device are 27 s ahead (docs/decisions/0016). The peer has no packet to send, so it starts no
        // handshake itself.
        let timeout = Duration::from_secs(90);
        wait_until("a ping after the switch", timeout, || a.reaches(2) && b.reaches(1));
        let link = a.ns.ip_json(&format!("-d link show {}", a.interface));
        assert_eq!(link[0]["linkinfo"]["info_kind"], kind);
        assert_eq!(std::path::Path::new(&socket).exists(), has_socket, "{backend:?}");
        let mut want = ["eth0".to_owned(), "lo".to_owned(), a.interface.clone()];
        want.sort();
        assert_eq!(links(&a.ns), want);
    }
}

#[test]
fn foreign_wireguard_interface_is_kept() {
    run_in_machine!();
    let node = Node::new(1, Backend::Kernel);
    let (ns, ours) = (&node.ns, node.interface.clone());
    assert_eq!(
        ns.ip_json(&format!("link show {ours}"))[0]["ifalias"],
        "clustermesh wg-agent"
    );
    ns.ip("link add kilo0 type wireguard");
    let configuration = wg_agent::device::Configuration {
        private_key: [3; 32].into(),
        listen_port: 51821,
        fwmark: 0,
        mtu: 1420,
    };
    for backend in [Backend::Kernel, Backend::Auto, Backend::Userspace] {
        let error = ns
            .enter(|| wg_agent::device::open(backend, "kilo0", &configuration, Default::default()))
            .map(drop);
        assert!(matches!(error, Err(DeviceError::Exists(_))), "{backend:?}");
    }
    // `false` = the interface does not have our alias and stays. `true` = our interface is removed, or there is none of this name.
    let removed = |name: &str| ns.enter(|| userspace::remove_interface(name)).expect("an answer");
    assert_eq!(["kilo0", &ours, "missing"].map(removed), [false, true, true]);
    assert_eq!(links(ns), ["kilo0", "lo"]);
}

#[test]
fn takeover_with_a_new_key_starts_handshakes_without_traffic() {
    run_in_machine!();
    let [mut a, mut b] = node_pair([Backend::Kernel, Backend::Kernel]);
    wait_until("the first ping", TIMEOUT, || a.reaches(2) && b.reaches(1));
    // WireGuard starts a handshake by itself up to 15 s after a packet without a reply. So once the last handshake is 25 s old,
    // the earlier pings can no longer cause a new one.
    let quiet = Duration::from_secs(25);
    wait_until("the handshake to be 25 s old", TIMEOUT * 2, || {
        a.peer(2).stats.handshake_age > Some(quiet)
    });
    drop(a.device.take());
    a.configuration.private_key = [11; 32].into();
    b.apply(&[
        PeerChange::Remove(public(1)),
        PeerChange::Add(public(11), spec(1, None)),
    ]);
    a.open(Backend::Auto);
    wait_until("a handshake", TIMEOUT, || b.peer(11).stats.handshake_age.is_some());
}

/// Connects two nodes with different backends, with routes and firewall, and checks traffic of both inner families.
/// `largest` = the size of the largest inner packet that passes.
fn check_mixed_backends(outer: Family, largest: u16) {
    let backend = |number| {
        if number == 1 {
            Backend::Kernel
        } else {
            Backend::Userspace
        }
    };
    let mut star = Star::with_backends(&[1500, 1500], backend, |_, _| outer);
    star.reconcile();
    star.wait_until_connected();
    let [kernel, userspace] = &star.sites[..] else {
        panic!("two nodes")
    };
    assert_eq!(
        [kernel, userspace].map(|site| site.device.backend()),
        ["kernel", "userspace"]
    );
    for family in Family::BOTH {
        let (here, there) = (pod(1, family), pod(2, family));
        for (from, to, to_address, from_address) in [(kernel, userspace, there, here), (userspace, kernel, here, there)]
        {
            transfer(
                &from.pod,
                &to.pod,
                &std::net::SocketAddr::new(to_address, 9002).to_string(),
                1 << 20,
            );
            let sizes = (64..largest - 3).step_by(97).chain(largest - 3..=largest + 1);
            assert_eq!(
                probe_sizes(&from.pod, to_address, sizes),
                Some(64..=largest),
                "to {to_address}"
            );
            assert!(from.pod.pings_patiently(&to_address.to_string()));
            assert!(to.pod.pings_patiently(&from_address.to_string()));
        }
    }
    for site in [kernel, userspace] {
        let device = site.inputs.node.device.as_str();
        let stats = site.ns.run("wg", &["show", device, "transfer"]);
        let moved: Vec<u64> = stats
            .split_whitespace()
            .skip(1)
            .filter_map(|n| n.parse().ok())
            .collect();
        assert!(
            moved.len() == 2 && moved.iter().all(|bytes| *bytes > 2 << 20),
            "{stats}"
        );
    }
}

#[test]
fn kernel_and_userspace_carry_both_families_over_ipv4() {
    run_in_machine!();
    check_mixed_backends(Family::V4, 1440);
}

#[test]
fn kernel_and_userspace_carry_both_families_over_ipv6() {
    run_in_machine!();
    check_mixed_backends(Family::V6, 1420);
}
