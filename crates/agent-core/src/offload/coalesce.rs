//! Joins packets of a flow that follow each other into large ones, as generic receive offload does. Cutting is elsewhere.
//!
//! Only what the kernel itself would join, and could cut again into the same packets: whole checksums, equal headers but
//! for what counts up, sizes equal but for the last, nothing after a push. The order within a flow stays.

use std::{io::IoSlice, ops::Range};

use super::{
    Header, Kind, NEEDS_CHECKSUM,
    headers::{self, FLAGS, PSH, Parsed, TCP, UDP, long, number, put},
};

/// The most packets that become one.
pub const PIECES: usize = 64;
/// How many flows may be open side by side; beyond that, packets pass as they are.
const OPEN: usize = 64;
const END: u32 = u32::MAX;

/// Collects the packets of one batch, which lie in a buffer of the caller's.
#[derive(Debug)]
pub struct Coalescer {
    tcp: bool,
    udp: bool,
    items: Vec<Item>,
    /// Payloads after an item's first packet, each with the next one's place.
    pieces: Vec<(Range<usize>, u32)>,
}

/// A packet, or several that became one.
#[derive(Debug)]
struct Item {
    /// The first packet.
    head: Range<usize>,
    parsed: Option<Parsed>,
    /// Payload of the first packet, and so of all but the last.
    size: usize,
    /// Of all.
    length: usize,
    /// What the next TCP segment begins with.
    sequence: u32,
    count: u16,
    first_piece: u32,
    last_piece: u32,
    /// More may follow.
    open: bool,
    /// The first packet's checksum was looked at.
    checked: bool,
    push: bool,
    /// Every packet has the same IPv4 identification, which "don't fragment" allows (RFC 6864).
    fixed: bool,
}

impl Coalescer {
    /// What is joined: TCP, UDP.
    #[must_use]
    pub const fn new(tcp: bool, udp: bool) -> Self {
        Self {
            tcp,
            udp,
            items: Vec::new(),
            pieces: Vec::new(),
        }
    }

    /// True where nothing was pushed since the last [`Self::finish`].
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Takes the packet at `place` of `buffer`.
    ///
    /// # Panics
    /// `place` is not within `buffer`.
    pub fn push(&mut self, buffer: &[u8], place: Range<usize>) {
        let packet = &buffer[place.clone()];
        let parsed = Parsed::read(packet).filter(|parsed| match parsed.protocol {
            TCP => self.tcp,
            _ => self.udp && parsed.protocol == UDP,
        });
        if let Some(parsed) = &parsed {
            // Only the flow's latest packet can be followed: earlier ones have gone before it already.
            let latest = self.items.iter_mut().rev().take(OPEN).find(|item| {
                item.parsed
                    .is_some_and(|its| its.same_flow(&buffer[item.head.clone()], parsed, packet))
            });
            if let Some(item) = latest {
                if item.takes(buffer, parsed, packet) {
                    let piece = self.pieces.len() as u32;
                    match item.last_piece {
                        END => item.first_piece = piece,
                        last => self.pieces[last as usize].1 = piece,
                    }
                    item.last_piece = piece;
                    item.extend(parsed, packet);
                    self.pieces.push((place.start + parsed.header..place.end, END));
                    return;
                }
                item.open = false;
            }
        }
        self.items.push(Item::new(place, parsed, packet));
    }

    /// Gives every packet, in order, as its virtio-net header and its parts, and the number of packets in it; then begins anew.
    /// The buffer is that of [`Self::push`].
    ///
    /// # Panics
    /// The buffer is shorter than it was.
    pub fn finish(&mut self, buffer: &mut [u8], mut each: impl FnMut(&[IoSlice<'_>], u16)) {
        for item in &self.items {
            let header = item.complete(buffer).encode();
            let mut parts = [IoSlice::new(&[]); PIECES + 1];
            parts[0] = IoSlice::new(&header);
            parts[1] = IoSlice::new(&buffer[item.head.clone()]);
            let (mut used, mut next) = (2, item.first_piece);
            while let Some((place, following)) = self.pieces.get(next as usize) {
                parts[used] = IoSlice::new(&buffer[place.clone()]);
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
        let plain = parsed.filter(|parsed| parsed.plain);
        let size = plain.map_or(0, |parsed| packet.len() - parsed.header);
        let tcp = plain.filter(|parsed| parsed.protocol == TCP);
        let push = tcp.is_some_and(|parsed| packet[parsed.transport + FLAGS] & PSH != 0);
        Self {
            length: head.len(),
            head,
            parsed,
            size,
            sequence: tcp.map_or(0, |parsed| long(packet, parsed.transport + 4).wrapping_add(size as u32)),
            count: 1,
            first_piece: END,
            last_piece: END,
            open: plain.is_some() && !push,
            checked: false,
            push,
            fixed: false,
        }
    }

    /// Whether a packet of the same flow may follow; notes what was found out about the first one.
    fn takes(&mut self, buffer: &[u8], parsed: &Parsed, packet: &[u8]) -> bool {
        let Some(own) = self.parsed.filter(|_| self.open && parsed.plain) else {
            return false;
        };
        let head = &buffer[self.head.clone()];
        let payload = packet.len() - parsed.header;
        if parsed.header != own.header
            || payload > self.size
            || usize::from(self.count) >= PIECES
            || self.length + payload > 65_535
        {
            return false;
        }
        let same_ip = if own.v6 {
            // Traffic class and flow label; hop limit.
            head[..4] == packet[..4] && head[7] == packet[7]
        } else {
            // Type of service; "don't fragment"; time to live.
            head[1] == packet[1] && head[6..9] == packet[6..9] && self.identified(head, packet)
        };
        let transport = own.transport;
        let same_transport = own.protocol == UDP
            || long(packet, transport + 4) == self.sequence
                // Acknowledgement, window, options.
                && head[transport + 8..transport + 12] == packet[transport + 8..transport + 12]
                && head[transport + 14..transport + 16] == packet[transport + 14..transport + 16]
                && head[transport + 18..own.header] == packet[transport + 18..own.header];
        if !same_ip || !same_transport || !parsed.is_whole(packet) {
            return false;
        }
        self.checked = self.checked || own.is_whole(head);
        if self.checked && !own.v6 && self.count == 1 {
            self.fixed = number(head, 4) == number(packet, 4);
        }
        self.checked
    }

    /// Identifications count up, or all are equal where nothing may be cut up further.
    fn identified(&self, head: &[u8], packet: &[u8]) -> bool {
        let (first, this) = (number(head, 4), number(packet, 4));
        let counted = this == first.wrapping_add(self.count);
        let fixed = this == first && head[6] & 0x40 != 0;
        if self.count == 1 {
            counted || fixed
        } else if self.fixed {
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
        self.push = parsed.protocol == TCP && packet[parsed.transport + FLAGS] & PSH != 0;
        self.open = payload == self.size && !self.push;
    }

    /// Makes the first packet's headers those of the whole.
    fn complete(&self, buffer: &mut [u8]) -> Header {
        let Some(parsed) = self.parsed.filter(|_| self.count > 1) else {
            return Header::default();
        };
        let head = &mut buffer[self.head.clone()];
        let transport = parsed.transport;
        if parsed.v6 {
            put(head, 4, (self.length - 40) as u16);
        } else {
            put(head, 2, self.length as u16);
            headers::sum_ipv4(&mut head[..transport]);
        }
        let length = (self.length - transport) as u16;
        if parsed.protocol == UDP {
            put(head, transport + 4, length);
        } else if self.push {
            head[transport + FLAGS] |= PSH;
        }
        let at = headers::checksum_at(parsed.protocol);
        let sum = headers::pseudo(head, parsed.v6, parsed.protocol, length).partial();
        head[transport + at..transport + at + 2].copy_from_slice(&sum);
        Header {
            flags: NEEDS_CHECKSUM,
            gso_type: Header::of(match (parsed.protocol, parsed.v6) {
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
