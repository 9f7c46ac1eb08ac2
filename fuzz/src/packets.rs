//! Fuzz targets for packets: offload headers of the kernel, packets of a malicious peer, and datagrams from a malicious network.
//!
//! Each target returns whether the input was useful: the target has split, joined, answered or delivered a packet.

use std::collections::BTreeMap;

use wg_userspace::fuzzing::{self, Coalescer, HEADER, Header, Segments, complete_checksum};

/// Splits a packet that follows its virtio-net header, as a TUN device passes it, and joins the parts again. If the header describes no
/// large packet, only completes the checksum.
pub fn superpacket(bytes: &[u8]) -> bool {
    let Some((header, packet)) = bytes.split_first_chunk::<HEADER>() else {
        return false;
    };
    let header = Header::decode(header);
    let mut packet = packet.to_vec();
    if !header.is_large() {
        let before = packet.clone();
        if complete_checksum(&header, &mut packet).is_err() {
            assert_eq!(packet, before, "a refused packet is unchanged");
        }
        return false;
    }
    let parts = split(&header, &packet);
    let mut joined = Vec::new();
    let mut spans = Vec::new();
    for part in &parts {
        spans.push(joined.len()..joined.len() + part.len());
        joined.extend_from_slice(part);
    }
    let mut coalescer = Coalescer::new(true, true);
    spans.iter().for_each(|span| coalescer.push(&joined, span.clone()));
    let mut count = 0;
    coalescer.finish(&mut joined, |_, packets| count += usize::from(packets));
    assert_eq!(count, parts.len());
    count > 1
}

fn split(header: &Header, packet: &[u8]) -> Vec<Vec<u8>> {
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

/// Joins packets from peers; in the input, two bytes before each packet are its length. Splitting must restore the packets.
pub fn inner(bytes: &[u8]) -> bool {
    let mut buffer = Vec::new();
    let mut spans = Vec::new();
    let mut rest = bytes;
    while let [high, low, tail @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(tail.len());
        let (packet, following) = tail.split_at(length);
        rest = following;
        spans.push(buffer.len()..buffer.len() + length);
        buffer.extend_from_slice(packet);
    }
    let mut before: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
    for span in &spans {
        *before.entry(comparable(&buffer[span.clone()])).or_default() += 1;
    }
    let mut coalescer = Coalescer::new(true, true);
    spans.iter().for_each(|span| coalescer.push(&buffer, span.clone()));
    let mut after: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
    let mut joined = false;
    coalescer.finish(&mut buffer, |slices, packets| {
        let whole: Vec<u8> = slices[1..].iter().flat_map(|slice| slice.iter().copied()).collect();
        let header: [u8; HEADER] = slices[0][..].try_into().expect("a header first");
        let header = Header::decode(&header);
        let packets_again = if header.is_large() {
            split(&header, &whole)
        } else {
            vec![whole]
        };
        assert_eq!(packets_again.len(), usize::from(packets));
        joined |= packets > 1;
        for packet in packets_again {
            *after.entry(comparable(&packet)).or_default() += 1;
        }
    });
    assert_eq!(before, after);
    joined
}

/// Prepares a packet for comparison. If "don't fragment" is set, the IPv4 identification has no meaning: it and the header checksum,
/// which covers it, are set to zero.
fn comparable(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    if packet.len() >= 20 && packet[0] >> 4 == 4 && packet[6] & 0x40 != 0 {
        packet[4..6].fill(0);
        packet[10..12].fill(0);
    }
    packet
}

/// Answers an unroutable packet. The ICMP error must be well-formed and short, quote the packet, and cause no further error.
pub fn unreachable(bytes: &[u8]) -> bool {
    let Some(error) = fuzzing::icmp_unreachable(bytes) else {
        return false;
    };
    let v4 = bytes[0] >> 4 == 4;
    let (header, addresses, largest) = if v4 { (20, 12..20, 576) } else { (40, 8..40, 1280) };
    assert!(error.len() <= largest, "{} bytes", error.len());
    assert_eq!(
        without_padding(&error),
        Some(&error[..]),
        "the length differs from the length field of the header"
    );
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
        "the quoted packet is truncated too early"
    );
    let mut summed = if v4 { Vec::new() } else { error[addresses].to_vec() };
    if v4 {
        assert_eq!(sum(&error[..header]), 0xffff);
    } else {
        summed.extend([error[4], error[5], 0, error[6]]);
    }
    summed.extend(&error[header..]);
    assert_eq!(sum(&summed), 0xffff);
    assert_eq!(fuzzing::icmp_unreachable(&error), None);
    true
}

/// The Internet checksum (RFC 1071), independent of the implementation under test.
fn sum(bytes: &[u8]) -> u64 {
    let words = bytes
        .chunks(2)
        .map(|word| u64::from(word[0]) << 8 | u64::from(*word.get(1).unwrap_or(&0)));
    let sum: u64 = words.sum();
    (0..4).fold(sum, |sum, _| (sum & 0xffff) + (sum >> 16))
}

/// Runs a session over a malicious network. The interface must get only packets that were sent, and each at most once.
pub fn datagram(bytes: &[u8]) -> bool {
    let (sent, delivered) = fuzzing::run(bytes);
    let has_delivered = !delivered.is_empty();
    let mut left: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
    for packet in sent {
        if let Some(packet) = without_padding(&packet) {
            *left.entry(packet.to_vec()).or_default() += 1;
        }
    }
    for packet in delivered {
        let count = left.get_mut(&packet).filter(|count| **count > 0);
        *count.unwrap_or_else(|| panic!("{packet:?} was not sent, or was delivered twice")) -= 1;
    }
    has_delivered
}

/// The packet without padding, according to the length field of its header; `None` = no complete IP packet.
fn without_padding(packet: &[u8]) -> Option<&[u8]> {
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
