//! Sends packets of many sizes through two nodes with the kernel's WireGuard, firewall and routes. Each packet must arrive
//! or cause an error at its sender. Because the processor is emulated, these tests check only every 97th size and the five
//! around the largest, with underlay MTUs of 1400 and 1280. `machine/device.rs` checks an underlay MTU of 1500 between a kernel
//! device and a userspace device. `kernel/mtu.rs` checks every size with userspace devices and more underlay MTUs.

use std::net::SocketAddr;

use clustermesh_agent_core::prefixes::Family;
use clustermesh_tests::{
    netns::transfer,
    path::real::{Site, Star, pod, probe_sizes},
};
use wg_agent::device::Backend;

use crate::virtual_machine::run_in_machine;

/// Checks that the largest IPv4 and IPv6 packets that pass have exactly the sizes `largest`, and that TCP transfers a
/// megabyte in each direction.
fn check_sizes(underlay_mtu: u16, outer: Family, largest: [u16; 2]) {
    let mut star = Star::with_backends(&[underlay_mtu, underlay_mtu], |_| Backend::Kernel, |_, _| outer);
    star.reconcile();
    star.wait_until_connected();
    let [one, two] = &star.sites[..] else {
        panic!("two nodes")
    };
    for (family, largest) in Family::BOTH.into_iter().zip(largest) {
        for (from, to, at) in [(one, two, pod(2, family)), (two, one, pod(1, family))] {
            let sizes = (64..largest - 3).step_by(97).chain(largest - 3..=largest + 1);
            assert_eq!(probe_sizes(&from.pod, at, sizes), Some(64..=largest), "to {at}");
            transfer(&from.pod, &to.pod, &SocketAddr::new(at, 9002).to_string(), 1 << 20);
        }
    }
    // With an underlay MTU of 1280 the device's MTU is also 1280, the least for IPv6, so outer packets of large IPv6 packets are
    // fragmented.
    if underlay_mtu > 1280 {
        let fragments: u64 = star.sites.iter().map(Site::fragments).sum();
        assert_eq!(fragments, 0, "something was fragmented");
    }
}

#[test]
fn sampled_sizes_pass_or_are_refused_over_ipv4_at_1400() {
    run_in_machine!();
    check_sizes(1400, Family::V4, [1340, 1340]);
}

#[test]
fn sampled_sizes_pass_or_are_refused_over_ipv6_at_1280() {
    run_in_machine!();
    // The MTU of the IPv4 route fits the underlay. The least MTU for IPv6 does not: outer packets of large IPv6 packets are
    // fragmented.
    check_sizes(1280, Family::V6, [1200, 1280]);
}
