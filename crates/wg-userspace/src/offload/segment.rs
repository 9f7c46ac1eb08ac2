//! Cuts a large TCP or UDP packet into packets for the wire, as a network card does.

use super::{
    Header, Kind, NEEDS_CHECKSUM,
    checksum::Sum,
    headers::{self, CWR, FIN, FLAGS, PSH, TCP, UDP, read_u16, write_u16},
};

/// The error of a virtio-net header that does not match its packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a virtio-net header that does not fit its packet")]
pub struct Malformed;

/// Completes the checksum of a packet that is not cut into segments (not [`Header::is_large`]).
///
/// # Errors
/// [`Malformed`]; the packet is unchanged.
pub fn complete_checksum(header: &Header, packet: &mut [u8]) -> Result<(), Malformed> {
    if header.flags & NEEDS_CHECKSUM == 0 {
        return Ok(());
    }
    let start = usize::from(header.checksum_start);
    let rest = packet.get_mut(start..).ok_or(Malformed)?;
    let at = usize::from(header.checksum_offset);
    if at + 2 > rest.len() {
        return Err(Malformed);
    }
    // The checksum field contains the sum of the pseudo header, so the sum over `rest` includes the pseudo header.
    let sum = Sum::default().bytes(rest).finish();
    // A UDP checksum of 0 would mean "no checksum" (RFC 768). For TCP, 0 and 0xffff are equivalent.
    let sum = if sum == [0, 0] { [0xff, 0xff] } else { sum };
    rest[at..at + 2].copy_from_slice(&sum);
    Ok(())
}

/// Iterates over the packets that a large packet is cut into.
#[derive(Debug)]
pub struct Segments<'a> {
    packet: &'a [u8],
    v6: bool,
    protocol: u8,
    /// Offset of the TCP or UDP header.
    transport: usize,
    /// Length of all headers, and so the offset of the payload.
    header: usize,
    /// Maximum payload bytes of one packet.
    size: usize,
    /// Offset of the payload that is not cut yet.
    next_payload: usize,
    /// Sum of the pseudo header without its length field.
    pseudo: Sum,
    index: u16,
}

impl<'a> Segments<'a> {
    /// Validates a large packet ([`Header::is_large`]).
    ///
    /// # Errors
    /// [`Malformed`]
    pub fn new(header: &Header, packet: &'a [u8]) -> Result<Self, Malformed> {
        let kind = header.kind().ok_or(Malformed)?;
        let v6 = packet.first().ok_or(Malformed)? >> 4 == 6;
        let transport = usize::from(header.checksum_start);
        let protocol = if kind == Kind::Udp { UDP } else { TCP };
        let minimum = if protocol == TCP { 20 } else { 8 };
        let fits = transport >= if v6 { 40 } else { 20 }
            && transport + minimum <= packet.len()
            && packet.len() <= 65_535 + if v6 { 40 } else { 0 }
            && usize::from(header.checksum_offset) == headers::checksum_at(protocol)
            && header.flags & NEEDS_CHECKSUM != 0
            && header.gso_size > 0
            && (kind != Kind::Tcp4 || !v6)
            && (kind != Kind::Tcp6 || v6)
            && (v6 || (packet[0] >> 4 == 4 && usize::from(packet[0] & 0xf) * 4 == transport));
        if !fits {
            return Err(Malformed);
        }
        let length = match kind {
            Kind::Udp => 8,
            _ => usize::from(packet[transport + 12] >> 4) * 4,
        };
        let header_length = transport + length;
        if length < minimum || header_length >= packet.len() {
            return Err(Malformed);
        }
        let at = transport + headers::checksum_at(protocol);
        // The checksum field contains the sum of the large packet's pseudo header, which differs from that of each part only in its length.
        let whole = (packet.len() - transport) as u16;
        Ok(Self {
            packet,
            v6,
            protocol,
            transport,
            header: header_length,
            size: usize::from(header.gso_size),
            next_payload: header_length,
            pseudo: Sum::default().bytes(&packet[at..at + 2]).without(whole),
            index: 0,
        })
    }

    /// Length of the packet that [`Self::next`] will write; `None` = no packet is left.
    #[must_use]
    pub fn upcoming(&self) -> Option<usize> {
        let left = self
            .packet
            .len()
            .checked_sub(self.next_payload)
            .filter(|left| *left > 0)?;
        Some(self.header + left.min(self.size))
    }

    /// Writes the next packet to the beginning of `out` and returns its length; `None` = no packet is left.
    ///
    /// # Panics
    /// `out` is shorter than [`Self::upcoming`].
    pub fn next(&mut self, out: &mut [u8]) -> Option<usize> {
        let length = self.upcoming()?;
        let payload = &self.packet[self.next_payload..self.next_payload + length - self.header];
        let offset = (self.next_payload - self.header) as u32;
        self.next_payload += payload.len();
        let (header, transport) = (self.header, self.transport);
        let out = &mut out[..length];
        out[..header].copy_from_slice(&self.packet[..header]);
        out[header..].copy_from_slice(payload);
        if self.v6 {
            write_u16(out, 4, (length - 40) as u16);
        } else {
            write_u16(out, 2, length as u16);
            let identification = read_u16(out, 4).wrapping_add(self.index);
            write_u16(out, 4, identification);
            headers::set_ipv4_checksum(&mut out[..transport]);
        }
        let rest = &mut out[transport..];
        if self.protocol == TCP {
            let sequence = headers::read_u32(rest, 4).wrapping_add(offset);
            rest[4..8].copy_from_slice(&sequence.to_be_bytes());
            if self.next_payload < self.packet.len() {
                rest[FLAGS] &= !(FIN | PSH);
            }
            if self.index > 0 {
                rest[FLAGS] &= !CWR;
            }
        } else {
            write_u16(rest, 4, (length - transport) as u16);
        }
        let at = headers::checksum_at(self.protocol);
        write_u16(rest, at, 0);
        let sum = self.pseudo.number((length - transport) as u16).bytes(rest).finish();
        let sum = if sum == [0, 0] { [0xff, 0xff] } else { sum };
        rest[at..at + 2].copy_from_slice(&sum);
        self.index = self.index.wrapping_add(1);
        Some(length)
    }
}
