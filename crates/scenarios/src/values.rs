//! Generates the values in scenarios: each cluster's own networks, addresses and keys, and values from small shared pools.

use std::net::{IpAddr, SocketAddr};

use clustermesh_core::{
    key::PublicKey,
    observe::{Claim, Endpoint},
};
use ipnet::IpNet;
use proptest::{prelude::*, sample::select};

/// The shared pool of networks. Different clusters may claim the same network.
const NETS: &[&str] = &[
    "0.0.0.0/0",
    "10.0.0.0/8",
    "10.1.0.0/16",
    "10.1.1.0/24",
    "10.1.2.0/24",
    "10.2.0.0/16",
    "10.2.1.0/24",
    "10.2.2.0/24",
    "10.3.0.0/16",
    "10.96.0.0/16",
    "100.66.1.0/24",
    "100.66.2.0/24",
    "100.66.0.0/16",
    "172.30.0.0/16",
    "172.30.1.1/32",
    "fd00:1::/48",
    "fd00:1:0:1::/64",
    "fd00:2::/48",
    "::/0",
];

/// The shared pool of addresses. Some of them can never be an endpoint.
const IPS: &[&str] = &[
    "10.1.1.1",
    "10.1.2.1",
    "10.2.1.1",
    "100.66.1.1",
    "100.66.1.2",
    "100.66.2.1",
    "100.66.2.2",
    "172.30.1.1",
    "172.30.1.2",
    "192.0.2.1",
    "127.0.0.1",
    "169.254.1.1",
    "224.0.0.1",
    "0.0.0.0",
    "fd00:1::1",
    "fe80::1",
    "::ffff:10.1.1.1",
    "10.96.0.1",
];

pub(crate) fn net() -> impl Strategy<Value = IpNet> + Clone {
    select(NETS).prop_map(|text| text.parse().unwrap())
}

/// An address of the pool that all clusters share.
pub fn ip() -> impl Strategy<Value = IpAddr> + Clone {
    select(IPS).prop_map(|text| text.parse().unwrap())
}

pub(crate) fn key() -> impl Strategy<Value = PublicKey> + Clone {
    (1u8..8).prop_map(|n| PublicKey::new([n; 32]))
}

pub(crate) fn claim<T: std::fmt::Debug + Clone>(
    value: impl Strategy<Value = T> + Clone + 'static,
) -> impl Strategy<Value = Claim<T>> {
    prop_oneof![1 => Just(Claim::Absent), 1 => Just(Claim::Invalid("x".into())), 8 => value.prop_map(Claim::Valid)]
}

pub(crate) fn endpoint() -> impl Strategy<Value = Endpoint> + Clone {
    prop_oneof![
        4 => socket_address().prop_map(Endpoint::Ip),
        1 => select(&["a.example", "b.example"][..]).prop_map(|host| Endpoint::Dns(host.into(), 51820)),
    ]
}

/// An address with a port, for endpoints and candidates.
pub(crate) fn socket_address() -> impl Strategy<Value = SocketAddr> + Clone {
    (ip(), select(&[0u16, 51820, 7][..])).prop_map(SocketAddr::from)
}

/// The third byte of the WireGuard addresses of cluster `n`. Clusters 0 and 2 use networks of the shared pool [`NETS`].
const WIREGUARD_THIRD_BYTE: [u8; 3] = [1, 3, 2];

pub(crate) fn parse<T: std::str::FromStr<Err: std::fmt::Debug>>(text: String) -> T {
    text.parse().unwrap()
}

/// The pod CIDR of node `k` of cluster `n`.
pub(crate) fn own_pods(n: usize, k: u8) -> IpNet {
    parse(format!("10.{}.{k}.0/24", n + 1))
}

pub(crate) fn own_wireguard(n: usize, k: u8) -> IpNet {
    parse(format!("100.66.{}.{k}/24", WIREGUARD_THIRD_BYTE[n]))
}

pub(crate) fn own_address(n: usize, k: u8) -> IpAddr {
    parse(format!("172.30.{}.{k}", n + 1))
}

pub(crate) fn own_key(n: usize, k: u8) -> PublicKey {
    PublicKey::new([u8::try_from(n * 16).unwrap() + k + 10; 32])
}
