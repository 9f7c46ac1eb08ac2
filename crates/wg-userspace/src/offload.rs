//! Segments and coalesces packets of a TUN device with virtio-net headers, and computes their checksums. With these headers the kernel
//! leaves this work to the program. The module works on bytes and does no I/O.
//!
//! Sources: Linux `include/uapi/linux/virtio_net.h` and virtio 1.2 §5.1.6; for the conditions of coalescing `net/ipv4/tcp_offload.c`
//! and `net/ipv4/udp_offload.c` (generic receive offload).

pub(crate) mod checksum;
mod coalesce;
mod headers;
mod segment;

pub use coalesce::Coalescer;
pub use segment::{Malformed, Segments, complete_checksum};

#[cfg(test)]
mod tests;

/// Length of an encoded [`Header`] in bytes.
pub const HEADER: usize = 10;

const NEEDS_CHECKSUM: u8 = 1;
const ECN: u8 = 0x80;

/// The kind of packets that a large packet is cut into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Tcp4,
    Tcp6,
    Udp,
}

/// `struct virtio_net_hdr`, which a TUN device passes before each packet, in native byte order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Header {
    /// Bit 0: the checksum field contains only the sum of the pseudo header and has to be completed.
    pub flags: u8,
    /// 0 = a single packet, 1 = TCP over IPv4, 4 = TCP over IPv6, 5 = UDP; bit 7 = with ECN.
    pub gso_type: u8,
    /// Bytes before the payload. Only a hint.
    pub header_length: u16,
    /// Payload bytes of each packet that this packet is cut into; the last one may have fewer.
    pub gso_size: u16,
    /// Offset at which the checksummed bytes begin: the transport header.
    pub checksum_start: u16,
    /// Offset of the checksum field from `checksum_start`.
    pub checksum_offset: u16,
}

impl Header {
    /// Decodes a header.
    #[must_use]
    pub const fn decode(bytes: &[u8; HEADER]) -> Self {
        Self {
            flags: bytes[0],
            gso_type: bytes[1],
            header_length: u16::from_ne_bytes([bytes[2], bytes[3]]),
            gso_size: u16::from_ne_bytes([bytes[4], bytes[5]]),
            checksum_start: u16::from_ne_bytes([bytes[6], bytes[7]]),
            checksum_offset: u16::from_ne_bytes([bytes[8], bytes[9]]),
        }
    }

    /// Encodes a header.
    #[must_use]
    pub const fn encode(&self) -> [u8; HEADER] {
        let [l0, l1] = self.header_length.to_ne_bytes();
        let [s0, s1] = self.gso_size.to_ne_bytes();
        let [c0, c1] = self.checksum_start.to_ne_bytes();
        let [o0, o1] = self.checksum_offset.to_ne_bytes();
        [self.flags, self.gso_type, l0, l1, s0, s1, c0, c1, o0, o1]
    }

    /// Whether [`Segments`] has to cut the packet. A packet that is not large is passed to [`complete_checksum`].
    #[must_use]
    pub const fn is_large(&self) -> bool {
        self.gso_type & !ECN != 0
    }

    const fn gso_type_of(kind: Kind) -> u8 {
        match kind {
            Kind::Tcp4 => 1,
            Kind::Tcp6 => 4,
            Kind::Udp => 5,
        }
    }

    const fn kind(&self) -> Option<Kind> {
        match self.gso_type & !ECN {
            1 => Some(Kind::Tcp4),
            4 => Some(Kind::Tcp6),
            5 => Some(Kind::Udp),
            _ => None,
        }
    }
}
