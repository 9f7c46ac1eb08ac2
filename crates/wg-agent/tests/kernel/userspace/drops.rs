//! Tests dropped packets: they have no effect and are counted. If a local packet has no peer or no endpoint, its sender gets an ICMP
//! error.

use clustermesh_agent_core::device::PeerChange;
use clustermesh_tests::netns::wait_until;

use super::{Node, Options, TIMEOUT, counters, node_pair, public};

// threat: deleted-peer
pub(super) fn packets_from_and_to_a_removed_peer_are_dropped(options: Options) {
    let [mut a, b] = node_pair(options);
    wait_until("the first ping", TIMEOUT, || b.reaches(1));
    a.apply(&[PeerChange::Remove(public(2))]);
    assert!(!b.reaches(1) && !a.reaches(2));
    assert!(a.observe().peers.is_empty());
    wait_until("both drops to be counted", TIMEOUT, || {
        let drops = a.observe().drops;
        drops["unknown_peer"] > 0 && drops["no_peer"] > 0
    });
}

pub(super) fn packet_without_peer_or_endpoint_gets_an_icmp_error(options: Options) {
    let mut node = Node::new(1, options);
    // The addresses that end in 2 belong to a peer without endpoint, those that end in 3 to no peer.
    node.add(2, None);
    for [v4, v6] in [["10.9.0.2", "fd09::2"], ["10.9.0.3", "fd09::3"]] {
        let assert_ping_reports = |address: &str, error: &str| {
            let output = node.ns.output("ping", &["-n", "-c1", "-W30", address]);
            let output = String::from_utf8_lossy(&output.stdout);
            assert!(output.contains(error), "{address}: {output}");
        };
        assert_ping_reports(v4, "Destination Host Unreachable");
        assert_ping_reports(v6, "Address unreachable");
    }
    assert_eq!(node.observe().drops["no_endpoint"], 2);
}

// threat: forged-inner-source
pub(super) fn inner_source_outside_allowed_ips_is_dropped(options: Options) {
    let [a, b] = node_pair(options);
    wait_until("the first ping", TIMEOUT, || b.reaches(1));
    assert_eq!(a.observe().drops["foreign_source"], 0);
    b.ns.ip("addr add 10.66.0.1/32 dev lo");
    a.ns.sh(
        "nft 'add table inet t { chain in { type filter hook prerouting priority -300; ip saddr 10.66.0.1 counter; \
         ip saddr 10.9.0.2 counter; }; }'",
    );
    let output =
        b.ns.output("ping", &["-n", "-c3", "-i0.2", "-W1", "-I", "10.66.0.1", "10.9.0.1"]);
    assert!(!output.status.success());
    wait_until("all pings to be dropped", TIMEOUT, || {
        a.observe().drops["foreign_source"] == 3
    });
    assert!(b.reaches_patiently(1));
    assert_eq!(
        counters(&a.ns),
        [0, 1],
        "the interface receives only the packet from the allowed address"
    );
}

// threat: garbage-datagram
pub(super) fn garbage_datagrams_change_nothing(options: Options) {
    let [a, b] = node_pair(options);
    wait_until("the first ping", TIMEOUT, || b.reaches(1));
    let before = a.stats(2);
    // A xorshift random number generator.
    let mut random = 0x9e37_79b9_u32;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        random
    };
    let socket = b.ns.enter(|| std::net::UdpSocket::bind("192.0.2.2:0")).expect("bind");
    let mut flood = || {
        for round in 0..20_000_u32 {
            // The first byte is the message type: 1 to 4 are valid, 0 and 5 are not. Each type comes with each length.
            let length = [0, 1, 3, 4, 31, 32, 33, 64, 92, 148, 149, next() as usize % 1500][round as usize % 12];
            let mut datagram: Vec<u8> = (0..length).map(|_| next() as u8).collect();
            for (byte, value) in datagram.iter_mut().zip([(round / 12 % 6) as u8, 0, 0, 0]) {
                *byte = value;
            }
            // An error of a full send queue is ignored.
            let _ = socket.send_to(&datagram, "192.0.2.1:51820");
        }
    };
    // The kernel drops the datagrams that do not fit into the receive queue, so the flood is repeated until enough are counted.
    wait_until("the flood to be read", TIMEOUT, || {
        flood();
        let drops = a.observe().drops;
        drops["invalid"] + drops["unknown_peer"] + drops["under_load"] > 5_000
    });
    let after = a.stats(2);
    assert_eq!(after.endpoint, before.endpoint);
    // Only a keepalive and a handshake of WireGuard itself may be received.
    assert!(after.rx_bytes - before.rx_bytes <= 300, "{before:?} {after:?}");
    wait_until("a ping after the flood", TIMEOUT, || a.reaches(2) && b.reaches(1));
}
