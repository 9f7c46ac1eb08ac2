//! Tests of segmentation and coalescing with examples and arbitrary flows.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::{
    checksum::Sum,
    headers::{self, ACK, CWR, FIN, PSH, Parsed, TCP, UDP, read_u16, read_u32, write_u16},
    *,
};

#[derive(Debug, Clone)]
struct Template {
    v6: bool,
    protocol: u8,
    port: u16,
    sequence: u32,
    flags: u8,
    identification: u16,
    payload: Vec<u8>,
}

impl Template {
    fn packet(&self) -> Vec<u8> {
        let Self {
            v6,
            protocol,
            port,
            sequence,
            flags,
            identification,
            payload,
        } = self;
        let transport = if *v6 { 40 } else { 20 };
        let header = transport + if *protocol == TCP { 32 } else { 8 };
        let mut packet = vec![0; header + payload.len()];
        packet[header..].copy_from_slice(payload);
        let length = (packet.len() - transport) as u16;
        if *v6 {
            packet[0] = 0x60;
            write_u16(&mut packet, 4, length);
            packet[6..8].copy_from_slice(&[*protocol, 64]);
            packet[23] = 1;
            packet[39] = 2;
        } else {
            packet[0] = 0x45;
            write_u16(&mut packet, 2, header as u16 + payload.len() as u16);
            write_u16(&mut packet, 4, *identification);
            packet[8..10].copy_from_slice(&[64, *protocol]);
            packet[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
            headers::set_ipv4_checksum(&mut packet[..20]);
        }
        let rest = &mut packet[transport..];
        write_u16(rest, 0, *port);
        write_u16(rest, 2, 80);
        if *protocol == TCP {
            rest[4..8].copy_from_slice(&sequence.to_be_bytes());
            rest[12..14].copy_from_slice(&[0x80, *flags]);
            write_u16(rest, 14, 500);
            rest[20..24].copy_from_slice(&[1, 1, 8, 10]);
        } else {
            write_u16(rest, 4, length);
        }
        let at = transport + headers::checksum_at(*protocol);
        let sum = headers::pseudo(&packet, *v6, *protocol, length)
            .bytes(&packet[transport..])
            .finish();
        let sum = if sum == [0, 0] { [0xff, 0xff] } else { sum };
        packet[at..at + 2].copy_from_slice(&sum);
        packet
    }
}

fn tcp(sequence: u32, payload: &[u8]) -> Template {
    Template {
        v6: false,
        protocol: TCP,
        port: 1000,
        sequence,
        flags: ACK,
        identification: (sequence / 100) as u16,
        payload: payload.to_vec(),
    }
}

/// Joins packets. Returns each packet of the output with its header and the number of packets joined in it.
fn joined(packets: &[Vec<u8>], join_udp: bool) -> Vec<(Header, Vec<u8>, u16)> {
    let mut coalescer = Coalescer::new(true, join_udp);
    let mut buffer = packets.concat();
    let mut begin = 0;
    for packet in packets {
        coalescer.push(&buffer, begin..begin + packet.len());
        begin += packet.len();
    }
    let mut all = Vec::new();
    coalescer.finish(&mut buffer, |parts, count| {
        let whole: Vec<u8> = parts.iter().flat_map(|part| part.to_vec()).collect();
        let (header, packet) = whole.split_first_chunk::<HEADER>().expect("a header");
        all.push((Header::decode(header), packet.to_vec(), count));
    });
    assert!(coalescer.is_empty());
    all
}

/// Splits a large packet into its segments, or completes the checksum of a single packet.
fn cut(header: &Header, packet: &[u8]) -> Vec<Vec<u8>> {
    if !header.is_large() {
        let mut packet = packet.to_vec();
        complete_checksum(header, &mut packet).expect("a good header");
        return vec![packet];
    }
    let mut segments = Segments::new(header, packet).expect("a good header");
    let mut out = vec![0xee; segments.upcoming().unwrap_or_default()];
    std::iter::from_fn(|| segments.next(&mut out).map(|length| out[..length].to_vec())).collect()
}

#[test]
fn sum_equals_the_example_of_rfc_1071() {
    // RFC 1071 §3.
    let sum = Sum::default().bytes(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
    assert_eq!(sum.partial(), [0xdd, 0xf2]);
    assert_eq!(sum.finish(), [0x22, 0x0d]);
    assert_eq!(sum.number(7).without(7).partial(), [0xdd, 0xf2]);
}

#[test]
fn consecutive_segments_are_joined_until_a_push() {
    let last = Template {
        flags: ACK | PSH,
        ..tcp(300, &[3; 40])
    };
    let made = [tcp(100, &[1; 100]), tcp(200, &[2; 100]), last, tcp(340, &[4; 100])];
    let packets: Vec<_> = made.iter().map(Template::packet).collect();
    let all = joined(&packets, false);
    assert_eq!(
        all.iter()
            .map(|(header, packet, count)| (*header, packet.len(), *count))
            .collect::<Vec<_>>(),
        [
            (
                Header {
                    flags: 1,
                    gso_type: 1,
                    header_length: 52,
                    gso_size: 100,
                    checksum_start: 20,
                    checksum_offset: 16
                },
                292,
                3
            ),
            (Header::default(), 152, 1)
        ]
    );
    assert_eq!((read_u16(&all[0].1, 2), all[0].1[33]), (292, ACK | PSH));
    assert_eq!(cut(&all[0].0, &all[0].1), packets[..3]);
}

#[test]
fn packet_that_does_not_continue_the_first_is_not_joined() {
    let first = tcp(100, &[1; 100]).packet();
    let next = || tcp(200, &[2; 100]);
    let patched = |at: usize, value: u8| {
        let mut packet = next().packet();
        packet[at] = value;
        let protocol = packet[9];
        packet[36..38].fill(0);
        let sum = headers::pseudo(&packet, false, protocol, 132)
            .bytes(&packet[20..])
            .finish();
        packet[36..38].copy_from_slice(&sum);
        headers::set_ipv4_checksum(&mut packet[..20]);
        packet
    };
    assert_eq!(joined(&[first.clone(), next().packet()], false).len(), 1);
    let cases: [(&str, Vec<u8>); 14] = [
        ("a gap", tcp(201, &[2; 100]).packet()),
        ("a larger payload", tcp(200, &[2; 101]).packet()),
        ("no payload", tcp(200, &[]).packet()),
        ("an identification that does not count up", patched(5, 9)),
        ("type of service", patched(1, 3)),
        ("a fragment", patched(6, 0x20)),
        ("don't fragment", patched(6, 0x40)),
        ("time to live", patched(8, 63)),
        ("FIN", patched(33, ACK | FIN)),
        ("CWR", patched(33, ACK | CWR)),
        ("acknowledgement", patched(31, 1)),
        ("window", patched(35, 1)),
        ("an option", patched(45, 1)),
        ("reserved bits", patched(32, 0x81)),
    ];
    for (difference, packet) in cases {
        let all = joined(&[first.clone(), packet.clone()], false);
        assert_eq!(
            all.into_iter().map(|(_, packet, _)| packet).collect::<Vec<_>>(),
            [first.clone(), packet],
            "{difference}"
        );
    }
    for broken in 0..2 {
        let mut packets = [first.clone(), next().packet()];
        packets[broken][60] ^= 1;
        let all = joined(&packets, false);
        assert_eq!(all.len(), 2, "packet {broken} with a broken checksum was joined");
        assert_eq!([&all[0].1, &all[1].1], [&packets[0], &packets[1]]);
    }
}

#[test]
fn pure_acknowledgement_keeps_its_position() {
    let made = [tcp(100, &[1; 100]), tcp(200, &[]), tcp(200, &[2; 100])];
    let packets: Vec<_> = made.iter().map(Template::packet).collect();
    let all = joined(&packets, false);
    assert_eq!(
        all.into_iter().map(|(_, packet, _)| packet).collect::<Vec<_>>(),
        packets
    );
}

#[test]
fn cwr_is_only_in_the_first_part_and_fin_in_the_last() {
    let packet = Template {
        flags: ACK | CWR | PSH | FIN,
        ..tcp(100, &[1; 250])
    }
    .packet();
    // VIRTIO_NET_HDR_F_NEEDS_CSUM; VIRTIO_NET_HDR_GSO_TCPV4 with VIRTIO_NET_HDR_GSO_ECN.
    let header = Header {
        flags: 1,
        gso_type: 1 | 0x80,
        header_length: 0,
        gso_size: 100,
        checksum_start: 20,
        checksum_offset: 16,
    };
    let mut large = packet;
    let sum = headers::pseudo(&large, false, TCP, (large.len() - 20) as u16).partial();
    large[36..38].copy_from_slice(&sum);
    let parts = cut(&header, &large);
    let seen: Vec<_> = parts
        .iter()
        .map(|part| (part.len(), part[33], read_u32(part, 24), read_u16(part, 4)))
        .collect();
    assert_eq!(
        seen,
        [
            (152, ACK | CWR, 100, 1),
            (152, ACK, 200, 2),
            (102, ACK | PSH | FIN, 300, 3)
        ]
    );
    for part in parts {
        assert!(Parsed::parse(&part).expect("a packet").has_valid_checksum(&part));
        assert!(Sum::default().bytes(&part[..20]).is_valid());
    }
}

#[test]
fn packet_too_long_for_its_length_field_is_malformed() {
    for (v6, longest) in [(false, 65_535), (true, 65_575)] {
        let parts = [0, 100].map(|sequence| {
            Template {
                v6,
                ..tcp(sequence, &[0; 100])
            }
            .packet()
        });
        let (header, mut packet, _) = joined(&parts, false).swap_remove(0);
        packet.resize(longest, 0);
        assert!(Segments::new(&header, &packet).is_ok(), "{longest}");
        packet.push(0);
        assert!(Segments::new(&header, &packet).is_err(), "{longest}");
    }
}

#[test]
fn partial_checksum_is_completed() {
    for v6 in [false, true] {
        for protocol in [TCP, UDP] {
            let whole = Template {
                v6,
                protocol,
                ..tcp(1, b"odd")
            }
            .packet();
            let mut packet = whole.clone();
            let (start, at) = (if v6 { 40 } else { 20 }, headers::checksum_at(protocol));
            let sum = headers::pseudo(&packet, v6, protocol, (packet.len() - start) as u16).partial();
            packet[start + at..start + at + 2].copy_from_slice(&sum);
            let header = Header {
                flags: 1,
                checksum_start: start as u16,
                checksum_offset: at as u16,
                ..Header::default()
            };
            assert_ne!(packet, whole);
            complete_checksum(&header, &mut packet).expect("a good header");
            assert_eq!(packet, whole);
            assert_eq!(Header::decode(&header.encode()), header);
        }
    }
}

fn payload(length: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), length)
}

/// Packets of four flows, mostly consecutive and with 100 bytes of payload. Oddities: 1 = another sequence number, 2 = a changed last
/// byte, 3 = a changed second byte; any other number = none.
fn flows() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let step = (
        0..4_u16,
        prop::bool::weighted(0.2),
        0..12_u8,
        prop_oneof![9 => Just(100_usize), 1 => 0..130_usize],
    )
        .prop_flat_map(|(flow, push, oddity, length)| (Just(flow), Just(push), Just(oddity), payload(length)));
    prop::collection::vec(step, 0..200).prop_map(|steps| {
        let mut next = [(0_u32, 0_u16); 4];
        steps
            .into_iter()
            .map(|(flow, push, oddity, payload)| {
                let (sequence, identification) = next[usize::from(flow)];
                next[usize::from(flow)] = (
                    sequence.wrapping_add(payload.len() as u32),
                    identification.wrapping_add(1),
                );
                let mut packet = Template {
                    v6: flow % 2 == 1,
                    protocol: if flow < 2 { TCP } else { UDP },
                    port: flow,
                    sequence: if oddity == 1 { 77 } else { sequence },
                    flags: if push { ACK | PSH } else { ACK },
                    identification,
                    payload,
                }
                .packet();
                let last = packet.len() - 1;
                match oddity {
                    2 => packet[last] ^= 1,
                    3 => packet[1] = 2,
                    _ => {}
                }
                packet
            })
            .collect()
    })
}

fn by_flow(packets: &[Vec<u8>]) -> BTreeMap<u16, Vec<Vec<u8>>> {
    packets.iter().fold(BTreeMap::new(), |mut all, packet| {
        let port = read_u16(packet, if packet[0] >> 4 == 6 { 40 } else { 20 });
        all.entry(port).or_insert_with(Vec::new).push(packet.clone());
        all
    })
}

proptest! {
    #[test]
    fn joined_and_cut_packets_are_equal_and_in_order(packets in flows(), join_udp: bool) {
        let all = joined(&packets, join_udp);
        let counts = all.iter().map(|(_, _, count)| usize::from(*count)).sum::<usize>();
        prop_assert_eq!(counts, packets.len());
        let again: Vec<_> = all.iter().flat_map(|(header, packet, _)| cut(header, packet)).collect();
        prop_assert_eq!(by_flow(&again), by_flow(&packets));
    }

    #[test]
    fn any_bytes_are_processed_without_a_panic(
        header: [u8; HEADER],
        kind in prop::sample::select(&[0_u8, 1, 4, 5, 0x81, 9][..]),
        packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..120), 1..6),
        first in prop::sample::select(&[0x45_u8, 0x60, 0x46][..]),
    ) {
        let packets: Vec<Vec<u8>> = packets.into_iter().map(|mut packet| {
            if let Some(byte) = packet.first_mut() { *byte = first }
            packet
        }).collect();
        let header = Header { gso_type: kind, flags: 1, ..Header::decode(&header) };
        // The second header passes more checks: its checksum is where TCP over IPv4 has it.
        for header in [header, Header { checksum_start: 20, checksum_offset: 16, gso_size: header.gso_size % 50, ..header }] {
            if let Ok(mut segments) = Segments::new(&header, &packets[0]) {
                let mut out = vec![0; segments.upcoming().unwrap_or_default()];
                while segments.next(&mut out).is_some() {}
            }
            let _ = complete_checksum(&Header { gso_type: 0, ..header }, &mut packets[0].clone());
        }
        prop_assert_eq!(joined(&packets, true).iter().map(|(_, _, count)| usize::from(*count)).sum::<usize>(), packets.len());
    }
}
