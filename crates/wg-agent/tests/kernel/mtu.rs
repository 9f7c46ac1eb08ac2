//! Sends packets of every size through real userspace devices, over underlays with several MTUs and both families. Each
//! packet must arrive or cause an error at its sender. Needs root, nft, tcpdump and iproute2.

use std::{net::IpAddr, time::Duration};

use clustermesh_agent_core::prefixes::Family::{self, V4, V6};
use clustermesh_tests::{
    netns::{self, transfer, wait_until},
    path::{
        self, Capture, policy_of,
        real::{Star, key, pod, probe_sizes, router_address, underlay},
    },
};
use ipnet::IpNet;

/// Checks packets between pods of node 1 and another node. `largest` are the sizes of the largest IPv4 and IPv6 packets
/// that pass; every smaller packet must pass. TCP must transfer a megabyte in each direction.
fn check_sizes(star: &Star, other: u8, largest: [u16; 2]) {
    let (here, there) = (&star.sites[0], &star.sites[usize::from(other) - 1]);
    for (family, largest) in [V4, V6].into_iter().zip(largest) {
        for (from, to, at) in [
            (&here.pod, &there.pod, pod(other, family)),
            (&there.pod, &here.pod, pod(1, family)),
        ] {
            assert_eq!(
                probe_sizes(from, at, 64..=largest + 1),
                Some(64..=largest),
                "{} -> {at}",
                from.name
            );
            for (size, passes) in [(largest, true), (largest + 1, false)] {
                assert_eq!(pings(from, at, size), passes, "{} -> {at}: {size} bytes", from.name);
            }
            transfer(from, to, &std::net::SocketAddr::new(at, 9000).to_string(), 1 << 20);
        }
        // From the node itself, with fewer sizes.
        let at = pod(other, family);
        let some = (64..=largest + 1).filter(|size| size % 61 == 0 || size + 3 > largest);
        let least = 64_u16.next_multiple_of(61);
        assert_eq!(probe_sizes(&here.ns, at, some), Some(least..=largest), "node -> {at}");
        transfer(
            &here.ns,
            &there.pod,
            &std::net::SocketAddr::new(at, 9001).to_string(),
            1 << 20,
        );
    }
}

/// Whether a ping with the DF bit and a packet of `size` bytes in total is answered.
fn pings(from: &netns::NetNs, to: IpAddr, size: u16) -> bool {
    let headers = if to.is_ipv4() { 28 } else { 48 };
    let length = (size - headers).to_string();
    let args = ["-n", "-c1", "-W30", "-M", "do", "-s", &length, &to.to_string()];
    from.output("ping", &args).status.success()
}

fn check_underlay(mtu: u16, outer: Family, largest: [u16; 2]) {
    let star = Star::connected(&[mtu, mtu], |_, _| outer);
    check_sizes(&star, 2, largest);
    // The device's MTU is at least 1280, the minimum for IPv6. So on an underlay with MTU 1280, the outer packets that contain
    // large inner IPv6 packets are fragmented. The routes for inner IPv4 packets have a smaller MTU, which fits the path.
    if mtu > 1280 {
        assert_eq!(
            star.sites.iter().map(|s| s.fragments()).sum::<u64>(),
            0,
            "something was fragmented"
        );
    }
}

/// Defines two tests for each underlay MTU, with IPv4 and with IPv6 as the outer family. Each array contains the sizes of
/// the largest inner IPv4 and IPv6 packets that pass.
macro_rules! underlays {
    ($($name:ident $mtu:literal: $v4:expr, $v6:expr;)*) => {
        mod over_ipv4 { $(#[test] fn $name() { super::check_underlay($mtu, super::V4, $v4) })* }
        mod over_ipv6 { $(#[test] fn $name() { super::check_underlay($mtu, super::V6, $v6) })* }
    };
}

underlays! {
    every_size_passes_or_is_refused_on_a_1500_underlay 1500: [1440, 1440], [1420, 1420];
    every_size_passes_or_is_refused_on_a_1450_underlay 1450: [1390, 1390], [1370, 1370];
    every_size_passes_or_is_refused_on_a_1400_underlay 1400: [1340, 1340], [1320, 1320];
    every_size_passes_or_is_refused_on_a_1280_underlay 1280: [1216, 1280], [1200, 1280];
}

/// Nodes 1 and 2 have a smaller path MTU to node 3, as after a forged ICMP error. This path MTU must not reduce the size of
/// packets between nodes 1 and 2.
// threat: forged-path-mtu
#[test]
fn peers_of_different_path_mtu_share_one_device() {
    // Outer packets are IPv4 between nodes 1 and 2, and IPv6 from and to node 3.
    let outer = |a, b| if a + b == 3 { V4 } else { V6 };
    let mut star = Star::new(&[1500, 1500, 1400], outer);
    for (from, to) in [(1, 3), (2, 3)] {
        let (to, via) = (underlay(to, V6), router_address(from, V6));
        star.sites[usize::from(from) - 1]
            .ns
            .ip(&format!("-6 route add {to} via {via} mtu 1400"));
    }
    star.reconcile();
    star.wait_until_connected();
    let sizes = |node: usize| star.sites[node - 1].sizes();
    // `sizes` computes the MTUs again, as `reconcile` did.
    // The path from node 1 to node 3 carries inner packets of 1320 bytes. WireGuard pads packets to a multiple of 16 bytes, but not beyond
    // the device's MTU. So a peer's MTU is a multiple of 16, and a device's MTU need not be.
    assert_eq!((sizes(1).device, sizes(1).peer_mtus), (1440, [(key(3), 1312)].into()));
    assert_eq!((sizes(3).device, sizes(3).peer_mtus), (1320, [].into()));
    check_sizes(&star, 2, [1440, 1440]);
    let assert_no_fragments = |what: &str| {
        let fragments: Vec<u64> = star.sites.iter().map(path::real::Site::fragments).collect();
        assert_eq!(fragments, [0, 0, 0], "{what}: something was fragmented");
    };
    assert_no_fragments("between 1 and 2");
    let ends = |family| [pod(1, family), pod(3, family)];
    for [one, three] in [V4, V6].map(ends) {
        assert_eq!(probe_sizes(&star.sites[0].pod, three, 64..=1320), Some(64..=1312));
        assert_no_fragments("from 1 to 3");
        for (from, to, at) in [(0, 2, three), (2, 0, one)] {
            let at = std::net::SocketAddr::new(at, 9002);
            transfer(&star.sites[from].pod, &star.sites[to].pod, &at.to_string(), 1 << 20);
            assert_no_fragments("TCP between 1 and 3");
        }
    }
    // Node 3 sends packets up to its own device's MTU. Echoes of more than 1312 bytes are fragmented before node 1 encrypts them.
    for [one, _] in [V4, V6].map(ends) {
        assert_eq!(probe_sizes(&star.sites[2].pod, one, 64..=1321), Some(64..=1320));
    }
}

#[test]
fn smaller_path_mtu_is_learned_and_applied() {
    let mut star = Star::connected(&[1500, 1500], |_, _| V6);
    check_ipv4_sizes(&star, 1420);
    star.router.ip("link set r2 mtu 1400");
    star.sites[1].ns.ip("link set eth0 mtu 1400");
    // Before the next pass, the sender fragments outer packets as soon as it receives the router's ICMP error.
    check_ipv4_sizes(&star, 1420);
    wait_until("the kernel to learn the path MTU", Duration::from_secs(60), || {
        check_ipv4_sizes(&star, 1420);
        // The MTU that the next pass will set, from the path MTUs that the kernel knows. The device still has 1420.
        star.sites[0].sizes().device == 1320
    });
    star.reconcile();
    let before: u64 = star.sites.iter().map(|s| s.fragments()).sum();
    check_ipv4_sizes(&star, 1320);
    assert_eq!(
        star.sites.iter().map(|s| s.fragments()).sum::<u64>(),
        before,
        "something was fragmented"
    );
}

#[test]
fn packets_pass_a_link_with_small_mtu_and_no_icmp() {
    let star = Star::connected(&[1500, 1500], |_, _| V4);
    for (number, link) in [(1, "r1"), (2, "r2")] {
        star.router
            .ip(&format!("route change 172.30.{number}.0/24 dev {link} mtu 1300"));
    }
    star.router
        .sh("nft 'table ip quiet { chain out { type filter hook output priority 0; meta l4proto icmp drop; }; }'");
    // Outer packets must not have the DF bit, so that the router can fragment them.
    let capture = Capture::start(&star.router, "r1", "udp port 51820 and ip[6] & 0x40 != 0");
    check_ipv4_sizes(&star, 1440);
    let seen = capture.finish(
        &star.sites[0].ns,
        &underlay(1, V4).to_string(),
        &router_address(1, V4).to_string(),
    );
    assert_eq!(seen, Vec::<String>::new(), "outer packets with the DF bit");
}

/// Checks IPv4 packets from the pod of node 1 to the pod of node 2: fewer sizes than [`check_sizes`], and a TCP transfer.
fn check_ipv4_sizes(star: &Star, largest: u16) {
    let (here, there) = (&star.sites[0], &star.sites[1]);
    let at = pod(2, V4);
    let some = (64..=largest + 1).filter(|size| size % 100 == 0 || size + 3 > largest);
    assert_eq!(probe_sizes(&here.pod, at, some), Some(100..=largest));
    transfer(&here.pod, &there.pod, &format!("{at}:9003"), 1 << 20);
}

fn endpoint_in_allowed_ips_is_reached_through_the_tunnel(outer: Family) {
    let mut star = Star::new(&[1500, 1500], |_, _| outer);
    for (site, other) in star.sites.iter_mut().zip([2, 1]) {
        // The strict reverse path filter must not drop packets between addresses that are also reached over the underlay.
        for which in ["all", "default", "eth0"] {
            site.ns.set_sysctl(&format!("net/ipv4/conf/{which}/rp_filter"), "1");
        }
        let theirs: [IpNet; 2] = [V4, V6].map(|f| underlay(other, f).into());
        site.inputs.peers[0].allowed_ips.extend(theirs);
        let policy = policy_of(&mut site.inputs);
        policy.sources.extend(theirs);
        policy.networks.extend(theirs);
        let own: [IpNet; 2] = [V4, V6].map(|f| underlay(site.number, f).into());
        policy.allow.extend(own);
    }
    star.reconcile();
    star.wait_until_connected();
    let node = &star.sites[0].ns;
    let unencrypted = Capture::start(node, "eth0", "icmp[0] == 8 or (icmp6 and ip6[40] == 128)");
    let encrypted = Capture::start(node, "eth0", "udp port 51820");
    for family in [V4, V6] {
        for from in [node, &star.sites[0].pod] {
            let to = underlay(2, family).to_string();
            let output = from.output("ping", &["-n", "-c5", "-i0.05", "-W30", &to]);
            assert!(output.status.success(), "{} -> {to}: {output:?}", from.name);
        }
    }
    let (here, next) = (underlay(1, V4).to_string(), router_address(1, V4).to_string());
    assert_eq!(unencrypted.finish(node, &here, &next), Vec::<String>::new());
    let seen = encrypted.finish(node, &here, &next);
    // 20 requests and 20 replies, some of them coalesced, and handshake messages. A routing loop would cause thousands of
    // packets.
    assert!(
        (20..60).contains(&seen.len()),
        "{} outer packets: {seen:#?}",
        seen.len()
    );
}

mod ipv4 {
    #[test]
    fn endpoint_in_allowed_ips_is_reached_through_the_tunnel() {
        super::endpoint_in_allowed_ips_is_reached_through_the_tunnel(super::V4);
    }
}

mod ipv6 {
    #[test]
    fn endpoint_in_allowed_ips_is_reached_through_the_tunnel() {
        super::endpoint_in_allowed_ips_is_reached_through_the_tunnel(super::V6);
    }
}
