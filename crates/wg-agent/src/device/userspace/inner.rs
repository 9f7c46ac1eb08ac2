//! Where an inner packet goes, where it comes from and where it ends: all that cryptokey routing looks at. Nothing else of it is read.

use std::net::IpAddr;

/// The shortest (RFC 791 §3.1).
const IPV4: usize = 20;
/// The only (RFC 8200 §3).
const IPV6: usize = 40;

/// Where it is to go; `None` = no IP packet.
pub(super) fn destination(packet: &[u8]) -> Option<IpAddr> {
    Some(match packet.first()? >> 4 {
        4 if packet.len() >= IPV4 => IpAddr::from(*packet.get(16..)?.first_chunk::<4>()?),
        6 if packet.len() >= IPV6 => IpAddr::from(*packet.get(24..)?.first_chunk::<16>()?),
        _ => return None,
    })
}

/// How long it is without the padding behind it, and who says to have sent it; `None` = no IP packet, or one that is longer than what is
/// there or shorter than its own header.
pub(super) fn length_and_source(packet: &[u8]) -> Option<(usize, IpAddr)> {
    let number = |at: usize| Some(usize::from(u16::from_be_bytes(*packet.get(at..)?.first_chunk()?)));
    let (length, shortest, source) = match packet.first()? >> 4 {
        4 => (number(2)?, IPV4, IpAddr::from(*packet.get(12..)?.first_chunk::<4>()?)),
        6 => (
            IPV6 + number(4)?,
            IPV6,
            IpAddr::from(*packet.get(8..)?.first_chunk::<16>()?),
        ),
        _ => return None,
    };
    (length >= shortest && length <= packet.len()).then_some((length, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(total: u16, bytes: usize) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        packet[2..4].copy_from_slice(&total.to_be_bytes());
        packet.resize(bytes, 0);
        packet
    }

    fn v6(payload: u16, bytes: usize) -> Vec<u8> {
        let mut packet = vec![0; 40];
        packet[0] = 0x60;
        packet[4..6].copy_from_slice(&payload.to_be_bytes());
        packet[8] = 0xfd;
        packet[23] = 1;
        packet[24] = 0xfd;
        packet[39] = 2;
        packet.resize(bytes, 0);
        packet
    }

    #[test]
    fn a_packet_ends_where_it_says_and_padding_follows() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        assert_eq!(length_and_source(&v4(25, 32)), Some((25, ip("10.0.0.1"))));
        assert_eq!(length_and_source(&v6(5, 48)), Some((45, ip("fd00::1"))));
        assert_eq!(destination(&v4(25, 32)), Some(ip("10.0.0.2")));
        assert_eq!(destination(&v6(5, 48)), Some(ip("fd00::2")));
    }

    #[test]
    fn what_is_not_true_to_its_length_is_no_packet() {
        for packet in [
            v4(33, 32),
            v4(19, 32),
            v4(20, 19),
            v6(9, 48),
            v6(0, 39),
            vec![],
            vec![0x45],
            vec![0x15; 64],
        ] {
            assert_eq!(length_and_source(&packet), None, "{packet:?}");
        }
        for packet in [v4(20, 19), v6(0, 39), vec![], vec![0x15; 64]] {
            assert_eq!(destination(&packet), None, "{packet:?}");
        }
    }
}
