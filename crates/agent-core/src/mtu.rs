//! Computes the MTU of the device and of routes to peers, from the path MTUs to the peers' endpoints.
//!
//! The device's MTU fits the largest path MTU; routes to peers with a smaller path MTU get their own, smaller MTU. So a peer whose
//! path MTU is small, or that forges ICMP errors to make it look small, does not affect the routes to other peers. Only the default
//! route of [`crate::numbers::TABLE_TUNNEL`], which may lead to any peer, gets the smallest of these MTUs. Packets on a route whose MTU
//! is too large still arrive, because the outer packets may be fragmented (RFC 791; for IPv6 by the sender, RFC 8200 §5).
//!
//! WireGuard pads packets to a multiple of 16 bytes, but not beyond the device's MTU (paper §5.4.6). A route's MTU is therefore a
//! multiple of 16, so that a packet that just fits still fits after padding.

use std::collections::BTreeMap;

use clustermesh_core::key::PublicKey;

use crate::prefixes::Family;

/// The smallest MTU of IPv6 (RFC 8200 §5) and of the device. Over an underlay with an MTU of 1280, the outer packets of inner packets
/// of this size are fragmented.
pub const MINIMUM: u16 = 1280;
/// The smallest MTU of an IPv4 route. Every IPv4 host accepts packets of this size (RFC 791 §3.1), so a smaller claim is an error or an
/// attack.
pub const MINIMUM_IPV4_ROUTE: u16 = 576;
const PADDING: u16 = 16;

/// Bytes WireGuard adds to a packet: the outer IP header (20 or 40), UDP 8, message header and tag 32
/// (wireguard.com/papers/wireguard.pdf §5.4.6).
#[must_use]
pub const fn overhead(outer: Family) -> u16 {
    match outer {
        Family::V4 => 60,
        Family::V6 => 80,
    }
}

/// The path to a peer's endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// The largest outer packet, in bytes.
    pub mtu: u16,
    /// Address family of the endpoint.
    pub outer: Family,
}

impl Path {
    /// The largest inner packet, in bytes.
    #[must_use]
    pub const fn inner_mtu(self) -> u16 {
        self.mtu.saturating_sub(overhead(self.outer))
    }
}

/// The MTUs of the device and of peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    /// The device's MTU.
    pub device: u16,
    /// The MTUs of peers whose path does not allow the device's MTU: multiples of 16, at least [`MINIMUM_IPV4_ROUTE`].
    pub peer_mtus: BTreeMap<PublicKey, u16>,
}

/// Computes the MTUs for `--mtu auto`. `underlay_mtu` is the MTU of the interface by which outer packets leave, `paths` are the
/// known paths to peers. `underlay_mtu` is used only if no path is known; the device's MTU then fits it with IPv6 as the outer
/// family.
#[must_use]
pub fn auto(underlay_mtu: u16, paths: &BTreeMap<PublicKey, Path>) -> Sizes {
    let outer = Family::V6;
    let without_paths = Path {
        mtu: underlay_mtu,
        outer,
    }
    .inner_mtu();
    let widest = paths.values().map(|path| path.inner_mtu()).max();
    let device = widest.unwrap_or(without_paths).max(MINIMUM);
    let peer_mtus = paths
        .iter()
        .filter(|(_, path)| path.inner_mtu() < device)
        .map(|(key, path)| (*key, (path.inner_mtu() / PADDING * PADDING).max(MINIMUM_IPV4_ROUTE)))
        .collect();
    Sizes { device, peer_mtus }
}

/// The MTU of a route to a peer with the MTU `peer`; `None` = the route needs none of its own. IPv6 routes get at least [`MINIMUM`].
#[must_use]
pub fn of_route(device: u16, peer: u16, inner: Family) -> Option<u16> {
    let route = match inner {
        Family::V4 => peer,
        Family::V6 => peer.max(MINIMUM),
    };
    (route < device).then_some(route)
}

/// The largest TCP segment in a packet of `mtu` bytes: without 20 bytes of TCP header, and 20 or 40 of IP header.
#[must_use]
pub const fn segment(mtu: u16, family: Family) -> u16 {
    mtu.saturating_sub(match family {
        Family::V4 => 40,
        Family::V6 => 60,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn paths(of: &[(u16, Family)]) -> BTreeMap<PublicKey, Path> {
        let path = |(n, (mtu, outer)): (u8, &(u16, Family))| {
            let path = Path {
                mtu: *mtu,
                outer: *outer,
            };
            (PublicKey::new([n; 32]), path)
        };
        (0u8..).zip(of).map(path).collect()
    }

    #[test]
    fn device_mtu_leaves_room_for_headers_or_is_1280() {
        let device = |mtu, outer| auto(1500, &paths(&[(mtu, outer)]));
        let got = [1500, 1450, 1400, 9000, 1280, 0, u16::MAX].map(|mtu| Family::BOTH.map(|f| device(mtu, f).device));
        let want = [
            [1440, 1420],
            [1390, 1370],
            [1340, 1320],
            [8940, 8920],
            [1280, 1280],
            [1280, 1280],
            [65475, 65455],
        ];
        assert_eq!(got, want);
    }

    #[test]
    fn without_paths_the_device_fits_ipv6() {
        let alone = |mtu| auto(mtu, &BTreeMap::new());
        assert_eq!([1500, 1300].map(|mtu| alone(mtu).device), [1420, 1280]);
        assert_eq!(alone(1300).peer_mtus, BTreeMap::new());
    }

    // threat: forged-path-mtu
    #[test]
    fn peer_with_small_path_mtu_does_not_affect_others() {
        let got = auto(
            1500,
            &paths(&[
                (1500, Family::V4),
                (1500, Family::V6),
                (1400, Family::V4),
                (1280, Family::V6),
                (100, Family::V4),
            ]),
        );
        let peer_mtus = [(1, 1408), (2, 1328), (3, 1200), (4, 576)];
        let want = Sizes {
            device: 1440,
            peer_mtus: peer_mtus.map(|(n, size)| (PublicKey::new([n; 32]), size)).into(),
        };
        assert_eq!(got, want);
    }

    #[test]
    fn ipv6_route_mtu_is_at_least_1280() {
        let route_mtus = |device, size| Family::BOTH.map(|family| of_route(device, size, family));
        assert_eq!(route_mtus(1440, 1328), [Some(1328), Some(1328)]);
        assert_eq!(route_mtus(1440, 1200), [Some(1200), Some(1280)]);
        assert_eq!(route_mtus(1280, 1216), [Some(1216), None]);
    }

    #[test]
    fn segment_leaves_room_for_its_headers() {
        assert_eq!(Family::BOTH.map(|f| segment(1420, f)), [1380, 1360]);
    }

    proptest! {
        #[test]
        fn padded_packet_within_its_route_mtu_fits_the_path(
            generated in proptest::collection::vec((1280u16..=9000, proptest::bool::ANY), 1..5), length in 1u16..9000,
        ) {
            let generated: Vec<_> = generated.iter().map(|(m, six)| (*m, if *six { Family::V6 } else { Family::V4 })).collect();
            let paths = paths(&generated);
            let sizes = auto(1500, &paths);
            for (key, path) in &paths {
                let size = sizes.peer_mtus.get(key).copied().unwrap_or(sizes.device);
                let length = length.min(size);
                let padded = length.next_multiple_of(PADDING).min(sizes.device);
                // An MTU of 1280 may be too large for the path, but IPv6 needs it.
                prop_assert!(padded + overhead(path.outer) <= path.mtu || size == MINIMUM);
            }
        }
    }
}
