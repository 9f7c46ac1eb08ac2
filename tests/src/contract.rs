//! The tests that every device backend must pass. Each test is a function with the backend as its parameter, and checks the device
//! with `wg`, `ip`, `nft` and `ping`.

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

mod devices;
mod peers;

pub use self::{devices::*, peers::*};

/// Invokes the macro `$case` with the names of all tests.
#[macro_export]
macro_rules! each_device_test {
    ($case:ident) => {
        $case! {
            two_devices_carry_both_families_and_wg_reads_every_attribute
            new_peer_with_endpoint_gets_a_handshake_without_traffic
            peer_changes_keep_session_and_counters
            preshared_key_applies_at_once_and_must_match
            removed_peer_is_unreachable
            roamed_endpoint_survives_other_changes
            replies_come_from_the_contacted_address
            new_private_key_makes_new_sessions
            allowed_ips_move_between_peers_without_a_gap
            free_port_is_opened_and_port_in_use_changes_nothing
            outer_packets_carry_the_current_fwmark
            deleted_device_is_reported_and_can_be_reopened
            external_device_changes_are_reported_and_repaired
            unroutable_inner_packet_gets_an_icmp_error
            foreign_interface_and_invalid_name_are_refused
            change_of_one_of_5000_peers_keeps_all_others
            closed_device_leaves_nothing
        }
    };
}

const PORT: u16 = 51820;
/// Time limit of every wait. An emulated machine is slow, and WireGuard retries a handshake after five seconds.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// A network namespace with a device. Node `n` has the inner addresses 10.9.0.n and fd09::n.
pub struct Node {
    number: u8,
    pub ns: NetNs,
    pub device: Option<Box<dyn Device>>,
    pub configuration: Configuration,
    pub interface: String,
}

fn secret(number: u8) -> StaticSecret {
    StaticSecret::from([number; 32])
}

pub fn public(number: u8) -> PublicKey {
    PublicKey::new(x25519_dalek::PublicKey::from(&secret(number)).to_bytes())
}

impl Node {
    pub fn new(number: u8, backend: Backend) -> Self {
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
        node.add_addresses();
        node
    }

    /// Opens the device without its addresses.
    pub fn open(&mut self, backend: Backend) {
        let opened = self
            .ns
            .enter(|| device::open(backend, &self.interface, &self.configuration, Default::default()));
        self.device = Some(opened.expect("open a device").device);
    }

    /// Adds the inner addresses to the interface.
    pub fn add_addresses(&self) {
        let Self { number, interface, .. } = self;
        self.ns.ip(&format!("addr add 10.9.0.{number}/24 dev {interface}"));
        self.ns.ip(&format!("addr add fd09::{number}/64 dev {interface} nodad"));
    }

    pub fn apply(&mut self, changes: &[PeerChange]) {
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

    pub fn add(&mut self, other: u8, endpoint: Option<&str>) {
        self.apply(&[PeerChange::Add(public(other), spec(other, endpoint))]);
    }

    pub fn observe(&self) -> Observed {
        let device = self.device.as_deref().expect("an open device");
        device.observe().expect("observe")
    }

    pub fn peer(&self, other: u8) -> clustermesh_agent_core::device::ObservedPeer {
        self.observe().peers.remove(&public(other)).expect("the peer")
    }

    pub fn reaches(&self, other: u8) -> bool {
        self.ns.pings(&format!("10.9.0.{other}"))
    }

    /// Like [`Self::reaches`], for a ping that must be answered.
    pub fn reaches_patiently(&self, other: u8) -> bool {
        self.ns.pings_patiently(&format!("10.9.0.{other}"))
    }

    /// The peers by key, as `wg` shows them: preshared key, endpoint, sorted allowed IPs, keepalive.
    fn wg_peers(&self) -> BTreeMap<String, [String; 4]> {
        let dump = self.ns.run("wg", &["show", &self.interface, "dump"]);
        let peers = dump.lines().skip(1).map(|line| {
            let fields: Vec<&str> = line.split('\t').collect();
            let mut allowed_ips: Vec<&str> = fields[3].split(',').collect();
            allowed_ips.sort_unstable();
            let rest = [fields[1], fields[2], &allowed_ips.join(","), fields[7]].map(ToOwned::to_owned);
            (fields[0].to_owned(), rest)
        });
        peers.collect()
    }

    /// Listen port and fwmark, as `wg` shows them.
    fn wg_device(&self) -> [String; 2] {
        let dump = self.ns.run("wg", &["show", &self.interface, "dump"]);
        let fields: Vec<&str> = dump.lines().next().expect("a line").split('\t').collect();
        [fields[2], fields[3]].map(ToOwned::to_owned)
    }

    /// Unix time of the latest handshake with the only peer.
    pub fn handshake(&self) -> u64 {
        let text = self.ns.run("wg", &["show", &self.interface, "latest-handshakes"]);
        text.split_whitespace()
            .nth(1)
            .expect("a time")
            .parse()
            .expect("a number")
    }
}

pub fn spec(number: u8, endpoint: Option<&str>) -> PeerSpec {
    PeerSpec {
        endpoint: endpoint.map(|endpoint| endpoint.parse().expect("an endpoint")),
        allowed_ips: prefixes(&[&format!("10.9.0.{number}/32"), &format!("fd09::{number}/128")]),
        ..PeerSpec::default()
    }
}

fn prefixes<R: FromIterator<IpNet>>(texts: &[&str]) -> R {
    texts.iter().map(|text| text.parse().expect("a prefix")).collect()
}

/// Two nodes with a link between them (192.0.2.1 and 192.0.2.2) that are peers of each other.
pub fn node_pair(backends: [Backend; 2]) -> [Node; 2] {
    let (mut a, mut b) = (Node::new(1, backends[0]), Node::new(2, backends[1]));
    connect(&a.ns, &b.ns);
    a.add(2, Some("192.0.2.2:51820"));
    b.add(1, Some("192.0.2.1:51820"));
    [a, b]
}

fn connect(a: &NetNs, b: &NetNs) {
    let (left, right) = (["192.0.2.1/24", "2001:db8::1/64"], ["192.0.2.2/24", "2001:db8::2/64"]);
    veth(a, "eth0", &left, b, "eth0", &right);
}

/// A [`node_pair`] whose nodes already reach each other through the tunnel.
fn connected_pair(backend: Backend) -> [Node; 2] {
    let [a, b] = node_pair([backend, backend]);
    wait_until("the first ping", TIMEOUT, || a.reaches(2) && b.reaches(1));
    [a, b]
}

/// The names of all interfaces, sorted.
pub fn links(ns: &NetNs) -> Vec<String> {
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
