//! How large the packets inside the tunnel may be; reading or setting an interface's MTU is not done here.

/// Bytes WireGuard adds to a packet at most: outer IPv6 header 40, UDP 8, message header and tag 32
/// (wireguard.com/papers/wireguard.pdf §5.4.6). Taken for IPv4 too, since a peer's endpoint may change family.
pub const OVERHEAD: u16 = 80;
/// The least MTU IPv6 works on (RFC 8200 §5), and the least we choose.
pub const MINIMUM: u16 = 1280;

/// The device's MTU for `--mtu auto`, from the MTU of the interface its outer packets leave by.
#[must_use]
pub const fn auto(underlay: u16) -> u16 {
    let mtu = underlay.saturating_sub(OVERHEAD);
    if mtu < MINIMUM { MINIMUM } else { mtu }
}

/// The largest TCP segment that fits a packet of `mtu` bytes: 20 bytes of TCP header, and 20 or 40 of IP.
#[must_use]
pub const fn segment(mtu: u16, family: crate::prefixes::Family) -> u16 {
    mtu.saturating_sub(match family {
        crate::prefixes::Family::V4 => 40,
        crate::prefixes::Family::V6 => 60,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefixes::Family;

    #[test]
    fn the_tunnel_leaves_room_for_its_own_headers() {
        assert_eq!(
            [1500, 1450, 9000, 1300, 0, u16::MAX].map(auto),
            [1420, 1370, 8920, 1280, 1280, 65455]
        );
    }

    #[test]
    fn a_segment_leaves_room_for_its_headers() {
        assert_eq!(Family::BOTH.map(|f| segment(1420, f)), [1380, 1360]);
    }
}
