//! Tests endpoints, listen port, fwmark and MTU after restarts and changes.

use std::time::{Duration, Instant};

use clustermesh_agent_core::device::{PeerChange, PeerUpdate};
use clustermesh_tests::netns::{veth, wait_until};
use wg_agent::device::Device;

use super::{Node, Options, TIMEOUT, counters, node_pair, public};

pub(super) fn restarted_side_starts_a_handshake_and_data_resumes(options: Options) {
    let [mut a, b] = node_pair(options);
    wait_until("the first ping", TIMEOUT, || b.reaches(1));
    // Drops the other side's initiations (148 bytes and the UDP header): after 15 s without a reply, it would start a handshake itself.
    b.ns.nft("table inet mute { chain out { type filter hook output priority 0; udp length 156 drop; }; }\n");
    for round in 0..5 {
        // A device ignores an initiation within 20 ms of the peer's last one, and the peer would repeat it only after 5 s.
        wait_until("the last handshake to be older", TIMEOUT, || {
            b.stats(1)
                .handshake_age
                .is_some_and(|age| age > Duration::from_millis(50))
        });
        let device = a.device.take().expect("an open device");
        a.ns.enter(|| device.close()).expect("close");
        assert_eq!(
            a.ns.output("ip", &["link", "show", &a.interface]).status.code(),
            Some(1),
            "the interface still exists"
        );
        assert!(!std::path::Path::new(&format!("/var/run/wireguard/{}.sock", a.interface)).exists());
        a.open();
        let began = Instant::now();
        a.add(2, Some("192.0.2.2:51820"));
        // The ping comes from the side that still has the old session.
        wait_until("a ping after the restart", TIMEOUT, || b.reaches(1));
        println!("round {round}: {:?}", began.elapsed());
    }
}

pub(super) fn changed_endpoint_of_unreachable_peer_is_tried_at_once(options: Options) {
    // Without an initiation to the new endpoint, the next retry would come about 4 s later. A stall of the machine may delay one attempt.
    let limit = Duration::from_secs(2);
    assert!((0..3).any(|_| time_to_handshake_at_new_endpoint(options) < limit));
}

fn time_to_handshake_at_new_endpoint(options: Options) -> Duration {
    let (mut a, mut b) = (Node::new(1, options), Node::new(2, options));
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
    wait_until("a handshake", TIMEOUT, || a.stats(2).handshake_age.is_some());
    let time = began.elapsed();
    println!("a handshake after {time:?}");
    assert!(a.reaches_patiently(2) && b.reaches_patiently(1));
    time
}

pub(super) fn outer_packets_carry_the_current_fwmark(options: Options) {
    let [mut a, b] = node_pair(options);
    a.ns.sh(
        "nft 'add table inet t { chain out { type filter hook output priority 0; udp dport 51820 meta mark 0x00100000 counter; \
         udp dport 51820 meta mark 0 counter; udp dport 51820 meta mark 7 counter; }; }'",
    );
    let [with_first_mark, unmarked, with_second_mark] = [0, 1, 2];
    let mut configuration = a.configuration.clone();
    configuration.fwmark = 0x0010_0000;
    a.configure(&configuration);
    let before = counters(&a.ns);
    wait_until("a ping", TIMEOUT, || a.reaches(2));
    let after = counters(&a.ns);
    assert!(
        after[with_first_mark] > before[with_first_mark] && after[unmarked] == before[unmarked],
        "{before:?} {after:?}"
    );
    configuration.fwmark = 7;
    configuration.listen_port = 51999;
    a.configure(&configuration);
    wait_until("a ping from the new port", TIMEOUT, || a.reaches(2));
    let last = counters(&a.ns);
    assert!(
        last[with_second_mark] > 0 && last[unmarked] == after[unmarked],
        "{last:?}"
    );
    assert_eq!(
        b.stats(1).endpoint,
        Some("192.0.2.1:51999".parse().expect("an endpoint"))
    );
    assert_eq!(a.observe().listen_port, 51999);
}

pub(super) fn failed_mtu_change_does_not_block_a_second_attempt(options: Options) {
    let [mut a, _b] = node_pair(options);
    // A handshake in progress would lose its response with the old port, and the next one starts only after 5 s.
    wait_until("a ping", TIMEOUT, || a.reaches(2));
    let mut configuration = a.configuration.clone();
    configuration.listen_port = 51998;
    configuration.mtu = 30;
    let device = a.device.as_mut().expect("an open device");
    let error =
        a.ns.enter(|| device.configure(&configuration))
            .expect_err("the kernel refuses this MTU");
    assert!(error.to_string().contains("MTU of 30"), "{error}");
    configuration.mtu = 1400;
    a.configure(&configuration);
    assert_eq!(a.observe().listen_port, 51998);
    wait_until("a ping from the new port", TIMEOUT, || a.reaches(2));
}
