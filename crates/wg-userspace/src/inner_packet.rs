//! Reads the destination of an inner packet, by which cryptokey routing selects the peer.

use std::net::IpAddr;

/// Length of the shortest IPv4 header (RFC 791 §3.1).
const IPV4_HEADER: usize = 20;
/// Length of the IPv6 header (RFC 8200 §3).
const IPV6_HEADER: usize = 40;

/// Returns the destination; `None` = the packet is not IP, or is shorter than the fixed header (without IPv4 options).
pub(crate) fn destination(packet: &[u8]) -> Option<IpAddr> {
    Some(match packet.first()? >> 4 {
        4 if packet.len() >= IPV4_HEADER => IpAddr::from(*packet.get(16..)?.first_chunk::<4>()?),
        6 if packet.len() >= IPV6_HEADER => IpAddr::from(*packet.get(24..)?.first_chunk::<16>()?),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(length_field: u16, length: usize) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        packet[2..4].copy_from_slice(&length_field.to_be_bytes());
        packet.resize(length, 0);
        packet
    }

    fn v6(length_field: u16, length: usize) -> Vec<u8> {
        let mut packet = vec![0; 40];
        packet[0] = 0x60;
        packet[4..6].copy_from_slice(&length_field.to_be_bytes());
        packet[8] = 0xfd;
        packet[23] = 1;
        packet[24] = 0xfd;
        packet[39] = 2;
        packet.resize(length, 0);
        packet
    }

    #[test]
    fn destination_is_read_in_both_families() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        assert_eq!(destination(&v4(25, 32)), Some(ip("10.0.0.2")));
        assert_eq!(destination(&v6(5, 48)), Some(ip("fd00::2")));
    }

    #[test]
    fn packet_without_a_whole_ip_header_has_no_destination() {
        for packet in [v4(20, 19), v6(0, 39), vec![], vec![0x15; 64]] {
            assert_eq!(destination(&packet), None, "{packet:?}");
        }
    }
}
