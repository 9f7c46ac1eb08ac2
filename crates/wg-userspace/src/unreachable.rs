//! Builds the ICMP error for a packet that cannot be sent to any peer. The caller decides when to send it and limits the rate.

use crate::offload::checksum::Sum;

/// Maximum size of an error in bytes; the quoted packet is truncated (RFC 1812 §4.3.2.3).
const MAX_ERROR_V4: usize = 576;
/// The same for IPv6 (RFC 4443 §2.4 c).
const MAX_ERROR_V6: usize = 1280;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
const HOP_LIMIT: u8 = 64;

/// Builds the error "destination unreachable", code host (RFC 792) or address (RFC 4443 §3.1): the type and code that kernel WireGuard
/// sends.
///
/// `None` = no error may be sent (RFC 1122 §3.2.2, RFC 4443 §2.4 e), because the packet
/// - is shorter than the fixed IP header (20 or 40 bytes, without options or extension headers), or this header is invalid,
/// - is an ICMP error, or an ICMP packet that is too short to contain the type,
/// - is an IPv4 fragment other than the first, or
/// - has a source or destination that is not a single host: unspecified, loopback, multicast, broadcast or reserved.
///
/// The source of the error is the unreachable address, because a firewall may accept errors only from the networks behind the tunnel,
/// in which this host may have no address.
#[must_use]
pub fn icmp_unreachable(packet: &[u8]) -> Option<Vec<u8>> {
    match packet.first()? >> 4 {
        4 => v4(packet),
        6 => v6(packet),
        _ => None,
    }
}

fn v4(packet: &[u8]) -> Option<Vec<u8>> {
    let header = usize::from(packet.first()? & 0x0f) * 4;
    let (source, destination) = (packet.get(12..16)?, packet.get(16..20)?);
    let is_single_host = |address: &[u8]| address[0] != 0 && address[0] != 127 && address[0] < 224;
    let is_first = u16::from_be_bytes([packet[6], packet[7]]) & 0x1fff == 0;
    // Among ICMP messages, only queries and their replies get an error.
    let is_icmp_error = packet[9] == ICMP && !matches!(packet.get(header)?, 0 | 8 | 9 | 10 | 13..=18);
    if header < 20 || !is_first || is_icmp_error || !is_single_host(source) || !is_single_host(destination) {
        return None;
    }
    let quoted = &packet[..packet.len().min(MAX_ERROR_V4 - 28)];
    let mut out = vec![0; 28];
    out[0] = 0x45;
    out[2..4].copy_from_slice(&u16::try_from(28 + quoted.len()).ok()?.to_be_bytes());
    out[8] = HOP_LIMIT;
    out[9] = ICMP;
    out[12..16].copy_from_slice(destination);
    out[16..20].copy_from_slice(source);
    let sum = Sum::default().bytes(&out[..20]).finish();
    out[10..12].copy_from_slice(&sum);
    out[20..22].copy_from_slice(&[3, 1]);
    out.extend_from_slice(quoted);
    let sum = Sum::default().bytes(&out[20..]).finish();
    out[22..24].copy_from_slice(&sum);
    Some(out)
}

fn v6(packet: &[u8]) -> Option<Vec<u8>> {
    let (source, destination) = (packet.get(8..24)?, packet.get(24..40)?);
    let is_single_host = |address: &[u8]| address[0] != 0xff && address[..15].iter().any(|byte| *byte != 0);
    // The first bit of the type is 0 for errors.
    let is_icmp_error = packet[6] == ICMPV6 && packet.get(40)? & 0x80 == 0;
    if is_icmp_error || !is_single_host(source) || !is_single_host(destination) {
        return None;
    }
    let quoted = &packet[..packet.len().min(MAX_ERROR_V6 - 48)];
    let length = u16::try_from(8 + quoted.len()).ok()?;
    let mut out = vec![0; 48];
    out[0] = 0x60;
    out[4..6].copy_from_slice(&length.to_be_bytes());
    out[6] = ICMPV6;
    out[7] = HOP_LIMIT;
    out[8..24].copy_from_slice(destination);
    out[24..40].copy_from_slice(source);
    out[40..42].copy_from_slice(&[1, 3]);
    out.extend_from_slice(quoted);
    let pseudo = Sum::default()
        .bytes(&out[8..40])
        .number(u16::from(ICMPV6))
        .number(length);
    let sum = pseudo.bytes(&out[40..]).finish();
    out[42..44].copy_from_slice(&sum);
    Some(out)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ping4() -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, ICMP, 0, 0, 10, 0, 0, 1, 10, 9, 0, 2];
        packet.extend([8, 0, 0, 0, 0, 1, 0, 1]);
        packet
    }

    fn udp6() -> Vec<u8> {
        let mut packet = vec![0x60, 0, 0, 0, 0, 9, 17, 64];
        packet.extend([&[0xfd, 1][..], &[0; 13], &[1], &[0xfd, 2], &[0; 13], &[2]].concat());
        packet.extend([0, 1, 0, 2, 0, 9, 0, 0, 7]);
        packet
    }

    #[test]
    fn error_has_destination_as_source_and_quotes_the_packet() {
        let packet = ping4();
        let out = icmp_unreachable(&packet).unwrap();
        assert_eq!(
            (&out[2..4], &out[9..10], &out[12..16], &out[16..22], &out[28..]),
            (
                &[0, 56][..],
                &[1][..],
                &[10, 9, 0, 2][..],
                &[10, 0, 0, 1, 3, 1][..],
                &packet[..]
            )
        );
        assert!(Sum::default().bytes(&out[..20]).is_valid() && Sum::default().bytes(&out[20..]).is_valid());

        let packet = udp6();
        let out = icmp_unreachable(&packet).unwrap();
        assert_eq!(
            (&out[4..7], &out[8..24], &out[24..40], &out[40..42], &out[48..]),
            (
                &[0, 57, 58][..],
                &packet[24..40],
                &packet[8..24],
                &[1, 3][..],
                &packet[..]
            )
        );
        let pseudo = Sum::default().bytes(&out[8..40]).number(58).number(57);
        assert!(pseudo.bytes(&out[40..]).is_valid());
    }

    #[test]
    fn errors_fragments_and_multicast_get_no_icmp_error() {
        let with = |packet: Vec<u8>, offset: usize, byte: u8| {
            let mut packet = packet;
            packet[offset] = byte;
            icmp_unreachable(&packet)
        };
        // Three ICMP errors, a later fragment, an unspecified source, a multicast source, multicast and broadcast destinations, a short
        // header.
        let patches = [
            (20, 3),
            (20, 11),
            (20, 5),
            (7, 1),
            (12, 0),
            (12, 224),
            (16, 239),
            (16, 255),
            (0, 0x44),
        ];
        assert_eq!(
            patches.map(|(offset, byte)| with(ping4(), offset, byte)),
            [const { None }; 9]
        );
        let mut error = udp6();
        error[6] = ICMPV6;
        error[40] = 1;
        assert_eq!(icmp_unreachable(&error), None);
        error[40] = 128;
        assert!(icmp_unreachable(&error).is_some());
        assert_eq!(with(udp6(), 24, 0xff), None);
    }

    proptest! {
        #[test]
        fn any_bytes_get_a_short_error_or_none(packet in prop::collection::vec(any::<u8>(), 0..2000)) {
            if let Some(out) = icmp_unreachable(&packet) {
                prop_assert!(out.len() <= MAX_ERROR_V6);
                // An ICMP error gets no ICMP error.
                prop_assert_eq!(icmp_unreachable(&out), None);
            }
        }
    }
}
