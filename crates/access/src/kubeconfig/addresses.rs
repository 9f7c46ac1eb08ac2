//! Finds the IPv4 addresses to which a packet for an IPv6 address may be translated or tunnelled.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Returns the address itself (an IPv4-mapped address as IPv4), and every IPv4 address to which a translator or tunnel would convert
/// it: NAT64 (RFC 6052: `64:ff9b::/96`; RFC 8215: `64:ff9b:1::/48` with each prefix length of RFC 6052 that fits), IPv4-compatible
/// and IPv4-translated addresses, 6to4, Teredo, ISATAP.
///
/// A network may also have its own NAT64 prefix, which is unknown here. It usually has length /96: then the IPv4 address is in the last
/// 32 bits, and bits 64 to 71 are zero (RFC 6052 §2.2). If such an address ends in a loopback or link-local IPv4 address, that is
/// returned too. Other addresses rarely have this form by chance.
pub(super) fn translated_addresses(address: IpAddr) -> Vec<IpAddr> {
    let v6 = match address.to_canonical() {
        v4 @ IpAddr::V4(_) => return vec![v4],
        IpAddr::V6(v6) => v6,
    };
    let mut found = vec![IpAddr::V6(v6)];
    if !v6.is_loopback() && !v6.is_unspecified() {
        found.extend(embedded(v6).into_iter().map(IpAddr::V4));
    }
    found
}

fn embedded(v6: Ipv6Addr) -> Vec<Ipv4Addr> {
    let (segments, bytes) = (v6.segments(), v6.octets());
    let v4 = |at: [usize; 4]| Ipv4Addr::from(at.map(|index| bytes[index]));
    let last = v4([12, 13, 14, 15]);
    match segments {
        [0x64, 0xff9b, 0, 0, 0, 0, ..] | [0, 0, 0, 0, 0, 0, ..] | [0, 0, 0, 0, 0xffff, 0, ..] => vec![last],
        // Byte 8 is skipped, and the bytes after the IPv4 address are zero (RFC 6052 §2.2).
        [0x64, 0xff9b, 1, ..] => [
            ([6, 7, 9, 10], 11),
            ([7, 9, 10, 11], 12),
            ([9, 10, 11, 12], 13),
            ([12, 13, 14, 15], 16),
        ]
        .into_iter()
        .filter(|(_, end)| bytes[*end..].iter().all(|byte| *byte == 0))
        .map(|(at, _)| v4(at))
        // The prefix length is unknown, so each one is tried. No host has an address in 0.0.0.0/8 or from 224.0.0.0 up.
        .filter(|v4| !matches!(v4.octets()[0], 0 | 224..))
        .collect(),
        // 6to4.
        [0x2002, ..] => vec![v4([2, 3, 4, 5])],
        // The Teredo server, and the client with all bits inverted (RFC 4380 §4).
        [0x2001, 0, ..] => vec![v4([4, 5, 6, 7]), Ipv4Addr::from(!u32::from(last))],
        // ISATAP.
        [_, _, _, _, 0 | 0x200, 0x5efe, ..] => vec![last],
        // A network's own NAT64 prefix of length /96.
        [.., fifth, _, _, _] if fifth >> 8 == 0 && (last.is_loopback() || last.is_link_local()) => vec![last],
        _ => vec![],
    }
}
