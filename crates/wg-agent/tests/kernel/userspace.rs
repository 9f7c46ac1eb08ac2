//! Tests the userspace device, once with offload and four workers, and once without offload and with one worker. The tests
//! send pings, TCP and UDP, and read the state with `ip`, `wg` and `nft`. The tests that the kernel
//! backend must pass as well are in `clustermesh_tests::contract`.

mod drops;
mod endpoints;
mod interface;
mod traffic;

use std::time::Duration;

use clustermesh_agent_core::device::{PeerChange, PeerSpec};
use clustermesh_core::key::PublicKey;
use clustermesh_tests::netns::{NetNs, unique_name, veth, wait_until};
use wg_agent::device::{
    Configuration, Device,
    userspace::{Options, Userspace},
};
use x25519_dalek::StaticSecret;

/// Defines a test for each function of the modules above.
macro_rules! tests {
    ($options:expr) => {
        tests! {
            $options;
            drops::packets_from_and_to_a_removed_peer_are_dropped
            drops::packet_without_peer_or_endpoint_gets_an_icmp_error
            drops::inner_source_outside_allowed_ips_is_dropped
            drops::garbage_datagrams_change_nothing
            endpoints::restarted_side_starts_a_handshake_and_data_resumes
            endpoints::changed_endpoint_of_unreachable_peer_is_tried_at_once
            endpoints::outer_packets_carry_the_current_fwmark
            endpoints::failed_mtu_change_does_not_block_a_second_attempt
            interface::open_refuses_foreign_interface_used_port_and_bad_name
            interface::interface_remains_after_process_and_is_reused
            interface::tunnel_works_despite_interface_of_older_version
            traffic::traffic_passes_and_wg_can_show_but_not_change_peers
            traffic::tunnel_works_over_an_ipv6_underlay
            traffic::session_survives_changes_of_its_own_and_another_peer
            traffic::large_datagrams_arrive_whole_and_in_order_in_both_families
            traffic::many_flows_to_one_peer_cause_no_deadlock
        }
    };
    ($options:expr; $($part:ident::$name:ident)*) => { $(
        #[test]
        fn $name() {
            super::$part::$name($options);
        }
    )* };
}

/// With the TUN device's offload (several packets in one read) and four workers (each a pair of threads, one for each
/// direction).
mod offload {
    tests!(super::Options {
        offload: true,
        workers: 4,
    });
}

/// Without offload, and with one worker.
mod plain {
    tests!(super::Options {
        offload: false,
        workers: 1,
    });
}

const PORT: u16 = 51820;
const TIMEOUT: Duration = Duration::from_secs(60);

/// A node: a network namespace with a device. Node `n` has the inner addresses 10.9.0.n and fd09::n.
struct Node {
    number: u8,
    ns: NetNs,
    device: Option<Box<Userspace>>,
    configuration: Configuration,
    options: Options,
    interface: String,
}

fn secret(number: u8) -> StaticSecret {
    StaticSecret::from([number; 32])
}

fn public(number: u8) -> PublicKey {
    PublicKey::new(x25519_dalek::PublicKey::from(&secret(number)).to_bytes())
}

impl Node {
    fn new(number: u8, options: Options) -> Self {
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
            options,
            interface,
        };
        node.open();
        node
    }

    fn open(&mut self) {
        let device = self
            .ns
            .enter(|| Userspace::open_with(&self.interface, &self.configuration, self.options))
            .expect("open a device");
        self.device = Some(Box::new(device));
        self.ns
            .ip(&format!("addr add 10.9.0.{}/24 dev {}", self.number, self.interface));
        self.ns.ip(&format!(
            "addr add fd09::{}/64 dev {} nodad",
            self.number, self.interface
        ));
        // The kernel can send from a new IPv6 address at once, but receives on it only after a kernel worker has added
        // the local route.
        wait_until("the route to the address", TIMEOUT, || {
            let address = format!("local fd09::{} ", self.number);
            self.ns.sh("ip -6 route show table local").contains(&address)
        });
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

    /// Like [`Self::reaches`], for a ping that must be answered.
    fn reaches_patiently(&self, other: u8) -> bool {
        self.ns.pings_patiently(&format!("10.9.0.{other}"))
    }
}

fn spec(number: u8, endpoint: Option<&str>) -> PeerSpec {
    PeerSpec {
        endpoint: endpoint.map(|endpoint| endpoint.parse().expect("an endpoint")),
        allowed_ips: [format!("10.9.0.{number}/32"), format!("fd09::{number}/128")]
            .map(|range| range.parse().expect("a prefix"))
            .into(),
        ..PeerSpec::default()
    }
}

/// Two nodes on one link, 192.0.2.1 and 192.0.2.2, that are peers of each other.
fn node_pair(options: Options) -> [Node; 2] {
    let (mut a, mut b) = (Node::new(1, options), Node::new(2, options));
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
