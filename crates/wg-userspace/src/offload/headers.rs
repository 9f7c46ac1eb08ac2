//! Reads and writes the fields of IP, TCP and UDP headers that segmentation and coalescing need.

use super::checksum::Sum;

pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;

pub(super) const FIN: u8 = 0x01;
pub(super) const PSH: u8 = 0x08;
pub(super) const ACK: u8 = 0x10;
pub(super) const CWR: u8 = 0x80;
/// Offset of the flags in a TCP header.
pub(super) const FLAGS: usize = 13;

/// Offset of the checksum in a TCP or UDP header.
pub(super) const fn checksum_at(protocol: u8) -> usize {
    if protocol == TCP { 16 } else { 6 }
}

pub(super) fn read_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

pub(super) fn read_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

pub(super) fn write_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// Sets the checksum of an IPv4 header.
pub(super) fn set_ipv4_checksum(header: &mut [u8]) {
    write_u16(header, 10, 0);
    let sum = Sum::default().bytes(header).finish();
    header[10..12].copy_from_slice(&sum);
}

/// Computes the sum of the pseudo header. The IP header must have no options or extensions (RFC 9293 §3.1, RFC 8200 §8.1).
pub(super) fn pseudo(packet: &[u8], v6: bool, protocol: u8, length: u16) -> Sum {
    let addresses = if v6 { &packet[8..40] } else { &packet[12..20] };
    Sum::default()
        .bytes(addresses)
        .number(u16::from(protocol))
        .number(length)
}

/// The layout of a packet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parsed {
    pub(super) v6: bool,
    pub(super) protocol: u8,
    /// Offset of the transport header: the length of the IP header.
    pub(super) transport: usize,
    /// Length of all headers.
    pub(super) header: usize,
    /// Whether the packet may be coalesced, that is, joined with others of its flow.
    pub(super) can_join: bool,
}

impl Parsed {
    /// Parses a packet. `None` = the packet is neither TCP nor UDP, is a fragment, is truncated, or has IP options, IPv6 extension
    /// headers, the reserved IPv4 flag or a wrong length.
    pub(super) fn parse(packet: &[u8]) -> Option<Self> {
        let (v6, protocol, transport) = match packet.first()? {
            0x45 if packet.len() >= 20 => {
                // Of the flags and the fragment offset, only the DF bit may be set: the packet is then no fragment.
                let complete = read_u16(packet, 6) & 0xbfff == 0 && usize::from(read_u16(packet, 2)) == packet.len();
                (false, packet[9], complete.then_some(20)?)
            }
            first if first >> 4 == 6 && packet.len() >= 40 => {
                let complete = usize::from(read_u16(packet, 4)) + 40 == packet.len();
                (true, packet[6], complete.then_some(40)?)
            }
            _ => return None,
        };
        let rest = &packet[transport..];
        let (length, can_join) = match protocol {
            TCP if rest.len() >= 20 => {
                let length = usize::from(rest[12] >> 4) * 4;
                (length, rest[12] & 0x0f == 0 && rest[FLAGS] & !PSH == ACK)
            }
            UDP if rest.len() >= 8 => (
                8,
                usize::from(read_u16(rest, 4)) == rest.len() && read_u16(rest, 6) != 0,
            ),
            _ => return None,
        };
        let minimum = if protocol == TCP { 20 } else { 8 };
        (length >= minimum && rest.len() >= length).then_some(Self {
            v6,
            protocol,
            transport,
            header: transport + length,
            can_join: can_join && rest.len() > length && (v6 || Sum::default().bytes(&packet[..20]).is_valid()),
        })
    }

    /// Whether two packets have the same addresses, ports and protocol.
    pub(super) fn is_same_flow(&self, packet: &[u8], other: &Self, other_packet: &[u8]) -> bool {
        let addresses = if self.v6 { 8..40 } else { 12..20 };
        let ports = self.transport..self.transport + 4;
        self.v6 == other.v6
            && self.protocol == other.protocol
            && packet[ports.clone()] == other_packet[ports]
            && packet[addresses.clone()] == other_packet[addresses]
    }

    /// Whether the transport checksum is correct.
    pub(super) fn has_valid_checksum(&self, packet: &[u8]) -> bool {
        let rest = &packet[self.transport..];
        // `parse` has checked that the length fits.
        let length = u16::try_from(rest.len()).unwrap_or_default();
        pseudo(packet, self.v6, self.protocol, length).bytes(rest).is_valid()
    }
}
