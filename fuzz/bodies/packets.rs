//! What is tried on packets: of the kernel's offload headers, of a peer that turned, and of the network between.
//! Each returns whether the input got as far as it is made for: to be cut, joined, answered or carried.
//! Both the fuzz targets and `crates/wg-agent/tests/corpus.rs` compile this file.

use std::collections::BTreeMap;

use clustermesh_agent_core::{
    offload::{Coalescer, HEADER, Header, Segments, complete},
    unreachable,
};
use wg_agent::device::userspace::fuzzing;

/// A packet as a TUN device gives it, its virtio-net header first.
pub(crate) fn superpacket(bytes: &[u8]) -> bool {
    let Some((header, packet)) = bytes.split_first_chunk::<HEADER>() else {
        return false;
    };
    let header = Header::decode(header);
    let mut packet = packet.to_vec();
    if !header.is_large() {
        let before = packet.clone();
        if complete(&header, &mut packet).is_err() {
            assert_eq!(packet, before, "what is refused is left as it was");
        }
        return false;
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
    count > 1
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
pub(crate) fn inner(bytes: &[u8]) -> bool {
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
    let mut joined = false;
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
        joined |= packets > 1;
        for packet in cut {
            *after.entry(told_apart(&packet)).or_default() += 1;
        }
    });
    assert_eq!(before, after);
    joined
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

/// A packet that nobody can be sent: what its sender is told is whole, small, about it, and answered by nobody.
pub(crate) fn unreachable(bytes: &[u8]) -> bool {
    let Some(error) = unreachable::unreachable(bytes) else {
        return false;
    };
    let v4 = bytes[0] >> 4 == 4;
    let (header, addresses, largest) = if v4 { (20, 12..20, 576) } else { (40, 8..40, 1280) };
    assert!(error.len() <= largest, "{} bytes", error.len());
    assert_eq!(meant(&error), Some(&error[..]), "its length is what it says");
    let half = addresses.len() / 2;
    let swapped = [
        &bytes[addresses.start + half..addresses.end],
        &bytes[addresses.start..addresses.start + half],
    ]
    .concat();
    assert_eq!(error[addresses.clone()], swapped);
    let quoted = &error[header + 8..];
    assert_eq!(quoted, &bytes[..quoted.len()]);
    assert!(
        quoted.len() == bytes.len() || error.len() == largest,
        "cut without need"
    );
    let mut summed = if v4 { Vec::new() } else { error[addresses].to_vec() };
    if v4 {
        assert_eq!(sum(&error[..header]), 0xffff);
    } else {
        summed.extend([error[4], error[5], 0, error[6]]);
    }
    summed.extend(&error[header..]);
    assert_eq!(sum(&summed), 0xffff);
    assert_eq!(unreachable::unreachable(&error), None);
    true
}

/// The Internet checksum (RFC 1071), written without looking at ours.
fn sum(bytes: &[u8]) -> u64 {
    let words = bytes
        .chunks(2)
        .map(|word| u64::from(word[0]) << 8 | u64::from(*word.get(1).unwrap_or(&0)));
    let sum: u64 = words.sum();
    (0..4).fold(sum, |sum, _| (sum & 0xffff) + (sum >> 16))
}

/// A network that does anything to the messages of a session: nothing is given to the interface twice, or that was not sent.
pub(crate) fn datagram(bytes: &[u8]) -> bool {
    let (sent, given) = fuzzing::run(bytes);
    let carried = !given.is_empty();
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
    carried
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
