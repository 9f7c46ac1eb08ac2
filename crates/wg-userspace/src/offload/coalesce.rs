//! Joins consecutive packets of a flow into large ones, as generic receive offload does.
//!
//! It joins only packets that the kernel would join and could cut again into the same packets. Their checksums are correct, and their
//! headers are equal, except lengths, checksums and fields that count up. Only the last one may be smaller or have PSH. The order
//! within a flow is kept.

use std::{io::IoSlice, ops::Range};

use super::{
    Header, Kind, NEEDS_CHECKSUM,
    headers::{self, FLAGS, PSH, Parsed, TCP, UDP, read_u16, read_u32, write_u16},
};

/// Maximum number of packets that are joined into one.
const MAX_JOINED: usize = 64;
/// Number of the latest items that are searched for the flow of a packet. A packet whose flow is not among them is not joined.
const SEARCH_DEPTH: usize = 64;
/// The end of an item's list of pieces.
const END: u32 = u32::MAX;

/// Joins the packets of one batch, which are in a buffer of the caller.
#[derive(Debug)]
pub struct Coalescer {
    tcp: bool,
    udp: bool,
    items: Vec<Item>,
    /// The payloads of the second and later packets of each item, each with the index of the item's next piece.
    pieces: Vec<(Range<usize>, u32)>,
}

/// One packet, or several that are joined.
#[derive(Debug)]
struct Item {
    /// The first packet.
    head: Range<usize>,
    parsed: Option<Parsed>,
    /// Payload bytes of each packet; the last one may have fewer.
    size: usize,
    /// Bytes of the joined packet.
    length: usize,
    /// Sequence number of the next TCP segment.
    sequence: u32,
    count: u16,
    first_piece: u32,
    last_piece: u32,
    /// Whether another packet may be joined.
    is_open: bool,
    /// Whether the checksum of the first packet was found correct.
    is_verified: bool,
    /// Whether the last packet has PSH.
    has_push: bool,
    /// Whether all packets have the same IPv4 identification, which is allowed with "don't fragment" (RFC 6864).
    has_fixed_id: bool,
}

impl Coalescer {
    /// Creates a coalescer that joins packets of TCP, of UDP, or of both.
    #[must_use]
    pub const fn new(tcp: bool, udp: bool) -> Self {
        Self {
            tcp,
            udp,
            items: Vec::new(),
            pieces: Vec::new(),
        }
    }

    /// Whether no packet was pushed since the last [`Self::finish`].
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Adds the packet at `range` of `buffer`.
    ///
    /// # Panics
    /// `range` is not within `buffer`.
    pub fn push(&mut self, buffer: &[u8], range: Range<usize>) {
        let packet = &buffer[range.clone()];
        let parsed = Parsed::parse(packet).filter(|parsed| match parsed.protocol {
            TCP => self.tcp,
            _ => self.udp && parsed.protocol == UDP,
        });
        if let Some(parsed) = &parsed {
            // The packet may join only the latest item of its flow. Joining an earlier one would change the order.
            let latest = self.items.iter_mut().rev().take(SEARCH_DEPTH).find(|item| {
                item.parsed
                    .is_some_and(|own| own.is_same_flow(&buffer[item.head.clone()], parsed, packet))
            });
            if let Some(item) = latest {
                if item.can_append(buffer, parsed, packet) {
                    let piece = self.pieces.len() as u32;
                    match item.last_piece {
                        END => item.first_piece = piece,
                        last => self.pieces[last as usize].1 = piece,
                    }
                    item.last_piece = piece;
                    item.extend(parsed, packet);
                    self.pieces.push((range.start + parsed.header..range.end, END));
                    return;
                }
                item.is_open = false;
            }
        }
        self.items.push(Item::new(range, parsed, packet));
    }

    /// Calls `each` for every resulting packet in order, with its virtio-net header and its parts, and the number of packets joined
    /// in it. The coalescer is empty afterwards. `buffer` must be that of [`Self::push`].
    ///
    /// # Panics
    /// The buffer is shorter than it was.
    pub fn finish(&mut self, buffer: &mut [u8], mut each: impl FnMut(&[IoSlice<'_>], u16)) {
        for item in &self.items {
            let header = item.write_joined_headers(buffer).encode();
            let mut parts = [IoSlice::new(&[]); MAX_JOINED + 1];
            parts[0] = IoSlice::new(&header);
            parts[1] = IoSlice::new(&buffer[item.head.clone()]);
            let (mut used, mut next) = (2, item.first_piece);
            while let Some((range, following)) = self.pieces.get(next as usize) {
                parts[used] = IoSlice::new(&buffer[range.clone()]);
                used += 1;
                next = *following;
            }
            each(&parts[..used], item.count);
        }
        self.items.clear();
        self.pieces.clear();
    }
}

impl Item {
    fn new(head: Range<usize>, parsed: Option<Parsed>, packet: &[u8]) -> Self {
        let joinable = parsed.filter(|parsed| parsed.can_join);
        let size = joinable.map_or(0, |parsed| packet.len() - parsed.header);
        let tcp = joinable.filter(|parsed| parsed.protocol == TCP);
        let has_push = tcp.is_some_and(|parsed| packet[parsed.transport + FLAGS] & PSH != 0);
        Self {
            length: head.len(),
            head,
            parsed,
            size,
            sequence: tcp.map_or(0, |parsed| {
                read_u32(packet, parsed.transport + 4).wrapping_add(size as u32)
            }),
            count: 1,
            first_piece: END,
            last_piece: END,
            is_open: joinable.is_some() && !has_push,
            is_verified: false,
            has_push,
            has_fixed_id: false,
        }
    }

    /// Whether a packet of the same flow may be joined. Updates `is_verified` and `has_fixed_id`.
    fn can_append(&mut self, buffer: &[u8], parsed: &Parsed, packet: &[u8]) -> bool {
        let Some(own) = self.parsed.filter(|_| self.is_open && parsed.can_join) else {
            return false;
        };
        let head = &buffer[self.head.clone()];
        let payload = packet.len() - parsed.header;
        if parsed.header != own.header
            || payload > self.size
            || usize::from(self.count) >= MAX_JOINED
            || self.length + payload > 65_535
        {
            return false;
        }
        let same_ip = if own.v6 {
            // Version, traffic class and flow label; hop limit.
            head[..4] == packet[..4] && head[7] == packet[7]
        } else {
            // Type of service; flags, fragment offset and time to live; identification.
            head[1] == packet[1] && head[6..9] == packet[6..9] && self.has_next_id(head, packet)
        };
        let transport = own.transport;
        let same_transport = own.protocol == UDP
            || read_u32(packet, transport + 4) == self.sequence
                // Acknowledgement number, window, options.
                && head[transport + 8..transport + 12] == packet[transport + 8..transport + 12]
                && head[transport + 14..transport + 16] == packet[transport + 14..transport + 16]
                && head[transport + 18..own.header] == packet[transport + 18..own.header];
        if !same_ip || !same_transport || !parsed.has_valid_checksum(packet) {
            return false;
        }
        self.is_verified = self.is_verified || own.has_valid_checksum(head);
        if self.is_verified && !own.v6 && self.count == 1 {
            self.has_fixed_id = read_u16(head, 4) == read_u16(packet, 4);
        }
        self.is_verified
    }

    /// Whether the IPv4 identification continues the item: it counts up, or all are equal and have "don't fragment" set.
    fn has_next_id(&self, head: &[u8], packet: &[u8]) -> bool {
        let (first, this) = (read_u16(head, 4), read_u16(packet, 4));
        let counted = this == first.wrapping_add(self.count);
        let fixed = this == first && head[6] & 0x40 != 0;
        if self.count == 1 {
            counted || fixed
        } else if self.has_fixed_id {
            fixed
        } else {
            counted
        }
    }

    fn extend(&mut self, parsed: &Parsed, packet: &[u8]) {
        let payload = packet.len() - parsed.header;
        self.length += payload;
        self.count += 1;
        self.sequence = self.sequence.wrapping_add(payload as u32);
        self.has_push = parsed.protocol == TCP && packet[parsed.transport + FLAGS] & PSH != 0;
        self.is_open = payload == self.size && !self.has_push;
    }

    /// Turns the headers of the first packet into those of the joined packet. Returns the joined packet's virtio-net header.
    fn write_joined_headers(&self, buffer: &mut [u8]) -> Header {
        let Some(parsed) = self.parsed.filter(|_| self.count > 1) else {
            return Header::default();
        };
        let head = &mut buffer[self.head.clone()];
        let transport = parsed.transport;
        if parsed.v6 {
            write_u16(head, 4, (self.length - 40) as u16);
        } else {
            write_u16(head, 2, self.length as u16);
            headers::set_ipv4_checksum(&mut head[..transport]);
        }
        let length = (self.length - transport) as u16;
        if parsed.protocol == UDP {
            write_u16(head, transport + 4, length);
        } else if self.has_push {
            head[transport + FLAGS] |= PSH;
        }
        let at = headers::checksum_at(parsed.protocol);
        let sum = headers::pseudo(head, parsed.v6, parsed.protocol, length).partial();
        head[transport + at..transport + at + 2].copy_from_slice(&sum);
        Header {
            flags: NEEDS_CHECKSUM,
            gso_type: Header::gso_type_of(match (parsed.protocol, parsed.v6) {
                (UDP, _) => Kind::Udp,
                (_, false) => Kind::Tcp4,
                (_, true) => Kind::Tcp6,
            }),
            header_length: parsed.header as u16,
            gso_size: self.size as u16,
            checksum_start: transport as u16,
            checksum_offset: at as u16,
        }
    }
}
