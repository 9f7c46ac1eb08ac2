//! What is tried on packets: of the kernel's offload headers, of a peer that turned, and of the network between.
//! Both the fuzz targets and `crates/wg-agent/tests/corpus.rs` compile this file.

use std::collections::BTreeMap;

use clustermesh_agent_core::offload::{Coalescer, HEADER, Header, Segments, complete};
use wg_agent::device::userspace::fuzzing;

/// A packet as a TUN device gives it, its virtio-net header first.
pub(crate) fn superpacket(bytes: &[u8]) {
    let Some((header, packet)) = bytes.split_first_chunk::<HEADER>() else {
        return;
    };
    let header = Header::decode(header);
    let mut packet = packet.to_vec();
    if !header.is_large() {
        let before = packet.clone();
        if complete(&header, &mut packet).is_err() {
            assert_eq!(packet, before, "what is refused is left as it was");
        }
        return;
    }
    let parts = cut(&header, &packet);
    let mut joined = Vec::new();
    let mut places = Vec::new();
    for part in &parts {
        places.push(joined.len()..joined.len() + part.len());
        joined.extend_from_slice(part);
    }
    let mut coalescer = Coalescer::new(true, true);
    places.iter().for_each(|place| coalescer.push(&joined, place.clone()));
    let mut count = 0;
    coalescer.finish(&mut joined, |_, packets| count += usize::from(packets));
    assert_eq!(count, parts.len());
}

fn cut(header: &Header, packet: &[u8]) -> Vec<Vec<u8>> {
    let Ok(mut segments) = Segments::new(header, packet) else {
        return Vec::new();
    };
    let mut out = vec![0; segments.upcoming().unwrap_or_default()];
    let mut parts = Vec::new();
    while let Some(length) = segments.next(&mut out) {
        assert!(length <= out.len() && parts.len() <= packet.len());
        parts.push(out[..length].to_vec());
    }
    parts
}

/// Packets that peers sent, each behind its length (two bytes): what is joined of them, cut again, is what they were.
pub(crate) fn inner(bytes: &[u8]) {
    let mut buffer = Vec::new();
    let mut places = Vec::new();
    let mut rest = bytes;
    while let [high, low, after @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(after.len());
        let (packet, following) = after.split_at(length);
        rest = following;
        places.push(buffer.len()..buffer.len() + length);
        buffer.extend_from_slice(packet);
    }
    let mut before: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
    for place in &places {
        *before.entry(told_apart(&buffer[place.clone()])).or_default() += 1;
    }
    let mut coalescer = Coalescer::new(true, true);
    places.iter().for_each(|place| coalescer.push(&buffer, place.clone()));
    let mut after: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
    coalescer.finish(&mut buffer, |parts, packets| {
        let whole: Vec<u8> = parts[1..].iter().flat_map(|part| part.iter().copied()).collect();
        let header: [u8; HEADER] = parts[0][..].try_into().expect("a header first");
        let header = Header::decode(&header);
        let cut = if header.is_large() {
            cut(&header, &whole)
        } else {
            vec![whole]
        };
        assert_eq!(cut.len(), usize::from(packets));
        for packet in cut {
            *after.entry(told_apart(&packet)).or_default() += 1;
        }
    });
    assert_eq!(before, after);
}

/// A packet without the identification of IPv4, which means nothing where "don't fragment" is set, and the sum over it.
fn told_apart(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    if packet.len() >= 20 && packet[0] >> 4 == 4 && packet[6] & 0x40 != 0 {
        packet[4..6].fill(0);
        packet[10..12].fill(0);
    }
    packet
}

/// A network that does anything to the messages of a session: nothing is given to the interface twice, or that was not sent.
pub(crate) fn datagram(bytes: &[u8]) {
    let (sent, given) = fuzzing::run(bytes);
    let mut left: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
    for packet in sent {
        if let Some(meant) = meant(&packet) {
            *left.entry(meant.to_vec()).or_default() += 1;
        }
    }
    for packet in given {
        let count = left.get_mut(&packet).filter(|count| **count > 0);
        *count.unwrap_or_else(|| panic!("{packet:?} was not sent, or came twice")) -= 1;
    }
}

/// A packet as long as its header says (the protocol pads); `None` = it is no packet.
fn meant(packet: &[u8]) -> Option<&[u8]> {
    let number = |at: usize| {
        Some(usize::from(u16::from_be_bytes([
            *packet.get(at)?,
            *packet.get(at + 1)?,
        ])))
    };
    let (least, length) = match packet.first()? >> 4 {
        4 => (20, number(2)?),
        6 => (40, 40 + number(4)?),
        _ => return None,
    };
    packet.get(..length).filter(|packet| packet.len() >= least)
}
