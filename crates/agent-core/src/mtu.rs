//! How large the packets inside the tunnel may be, from what the ways to the peers' endpoints carry; reading or setting an
//! interface's MTU is not done here.
//!
//! The device gets the most that any peer can take; routes to the peers that take less say so. So a peer behind a narrow
//! link, or one that makes a router claim so, costs nobody else a byte. What leaves by a route without a size of its own is
//! still carried: the outer packets are allowed to be fragmented (RFC 791, and by the sender RFC 8200 §5).
//!
//! Padding: WireGuard rounds packets up to 16 bytes, but not beyond the device's MTU (paper §5.4.6). A route's size is
//! therefore a multiple of 16, or a packet that just fits would be padded to one that does not.

use std::collections::BTreeMap;

use clustermesh_core::key::PublicKey;

use crate::prefixes::Family;

/// The least MTU IPv6 works on (RFC 8200 §5), and the least the device gets. Over an underlay of 1280 the outer packets of
/// such IPv6 packets are fragmented.
pub const MINIMUM: u16 = 1280;
/// The least a route says: no IPv4 host has to take more (RFC 791 §3.1), so whoever claims less is mistaken or worse.
pub const LEAST: u16 = 576;
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

/// The way to a peer's endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// Bytes of the largest outer packet.
    pub mtu: u16,
    /// Of the endpoint.
    pub outer: Family,
}

impl Path {
    /// The largest packet that fits inside.
    #[must_use]
    pub const fn inside(self) -> u16 {
        self.mtu.saturating_sub(overhead(self.outer))
    }
}

/// How large packets may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    /// The device's MTU.
    pub device: u16,
    /// The peers that take less than that, with what they take: a multiple of 16, at least [`LEAST`].
    pub narrow: BTreeMap<PublicKey, u16>,
}

/// For `--mtu auto`, from the MTU of the interface that outer packets leave by and the ways to the peers, as far as they
/// are known. Without any, for a way over IPv6.
#[must_use]
pub fn auto(underlay: u16, paths: &BTreeMap<PublicKey, Path>) -> Sizes {
    let outer = Family::V6;
    let unknown = Path { mtu: underlay, outer }.inside();
    let widest = paths.values().map(|path| path.inside()).max();
    let device = widest.unwrap_or(unknown).max(MINIMUM);
    let narrow = paths
        .iter()
        .filter(|(_, path)| path.inside() < device)
        .map(|(key, path)| (*key, (path.inside() / PADDING * PADDING).max(LEAST)))
        .collect();
    Sizes { device, narrow }
}

/// What a route of a family says of a size, if it has to say something: IPv6 has no less than [`MINIMUM`].
#[must_use]
pub fn of_route(device: u16, size: u16, inner: Family) -> Option<u16> {
    let size = match inner {
        Family::V4 => size,
        Family::V6 => size.max(MINIMUM),
    };
    (size < device).then_some(size)
}

/// The largest TCP segment that fits a packet of `mtu` bytes: 20 bytes of TCP header, and 20 or 40 of IP.
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
    fn the_tunnel_leaves_room_for_its_own_headers() {
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
    fn nobody_known_counts_as_a_way_over_ipv6() {
        let alone = |mtu| auto(mtu, &BTreeMap::new());
        assert_eq!([1500, 1300].map(|mtu| alone(mtu).device), [1420, 1280]);
        assert_eq!(alone(1300).narrow, BTreeMap::new());
    }

    #[test]
    fn who_takes_less_costs_the_others_nothing() {
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
        let narrow = [(1, 1408), (2, 1328), (3, 1200), (4, 576)];
        let want = Sizes {
            device: 1440,
            narrow: narrow.map(|(n, size)| (PublicKey::new([n; 32]), size)).into(),
        };
        assert_eq!(got, want);
    }

    #[test]
    fn a_route_of_ipv6_is_never_too_small_for_ipv6() {
        let of = |device, size| Family::BOTH.map(|family| of_route(device, size, family));
        assert_eq!(of(1440, 1328), [Some(1328), Some(1328)]);
        assert_eq!(of(1440, 1200), [Some(1200), Some(1280)]);
        assert_eq!(of(1280, 1216), [Some(1216), None]);
    }

    #[test]
    fn a_segment_leaves_room_for_its_headers() {
        assert_eq!(Family::BOTH.map(|f| segment(1420, f)), [1380, 1360]);
    }

    proptest! {
        #[test]
        fn a_padded_packet_of_a_routes_size_fits_the_way(
            ways in proptest::collection::vec((1280u16..=9000, proptest::bool::ANY), 1..5), length in 1u16..9000,
        ) {
            let ways: Vec<_> = ways.iter().map(|(m, six)| (*m, if *six { Family::V6 } else { Family::V4 })).collect();
            let paths = paths(&ways);
            let sizes = auto(1500, &paths);
            for (key, path) in &paths {
                let size = sizes.narrow.get(key).copied().unwrap_or(sizes.device);
                let length = length.min(size);
                let padded = length.next_multiple_of(PADDING).min(sizes.device);
                // But for a device that is no smaller only because IPv6 would not work on it.
                prop_assert!(padded + overhead(path.outer) <= path.mtu || size == MINIMUM);
            }
        }
    }
}
