//! Builds inner packets of both address families, byte by byte.

use std::net::IpAddr;

pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
const SYN: u8 = 2;

fn bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().into(),
        IpAddr::V6(v6) => v6.octets().into(),
    }
}

/// The Internet checksum (RFC 1071).
fn sum(data: &[u8]) -> u16 {
    let mut total = data.chunks(2).fold(0_u32, |sum, pair| {
        sum + u32::from(pair[0]) * 256 + u32::from(pair.get(1).copied().unwrap_or_default())
    });
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    !(total as u16)
}

/// Writes the checksum of the transport packet `body` at its offset `at`.
fn with_checksum(from: IpAddr, to: IpAddr, protocol: u8, mut body: Vec<u8>, at: usize) -> Vec<u8> {
    // The pseudo-header of IPv6. For IPv4 addresses, it has the same sum as the pseudo-header of IPv4.
    let mut all = [bytes(from), bytes(to)].concat();
    all.extend((body.len() as u32).to_be_bytes());
    all.extend([0, 0, 0, protocol]);
    all.extend(&body);
    body[at..at + 2].copy_from_slice(&sum(&all).to_be_bytes());
    body
}

pub fn udp_body(from: IpAddr, to: IpAddr, ports: (u16, u16), text: &[u8]) -> Vec<u8> {
    let mut body = [ports.0.to_be_bytes(), ports.1.to_be_bytes()].concat();
    body.extend((8 + text.len() as u16).to_be_bytes());
    body.extend([0, 0]);
    body.extend(text);
    with_checksum(from, to, UDP, body, 6)
}

pub fn syn_body(from: IpAddr, to: IpAddr, ports: (u16, u16)) -> Vec<u8> {
    let mut body = [ports.0.to_be_bytes(), ports.1.to_be_bytes()].concat();
    body.extend(7_u32.to_be_bytes());
    body.extend([0, 0, 0, 0, 5 << 4, SYN, 0xff, 0xff, 0, 0, 0, 0]);
    with_checksum(from, to, TCP, body, 16)
}

/// An ICMP or ICMPv6 packet: `v4` or `v6` is its type and code, `rest` the 4 bytes after the checksum, `quoted` the data after them.
pub fn icmp(from: IpAddr, to: IpAddr, v4: [u8; 2], v6: [u8; 2], rest: [u8; 4], quoted: &[u8]) -> Vec<u8> {
    let mut body = if from.is_ipv4() { v4 } else { v6 }.to_vec();
    body.extend([0, 0]);
    body.extend(rest);
    body.extend(quoted);
    if from.is_ipv4() {
        let sum = sum(&body);
        body[2..4].copy_from_slice(&sum.to_be_bytes());
        return ip(from, to, 1, &body);
    }
    ip(from, to, 58, &with_checksum(from, to, 58, body, 2))
}

/// An IP packet without options or extension headers.
pub fn ip(from: IpAddr, to: IpAddr, protocol: u8, body: &[u8]) -> Vec<u8> {
    match from {
        IpAddr::V4(_) => v4(from, to, protocol, &[], 0, 0, body),
        IpAddr::V6(_) => v6(from, to, protocol, body),
    }
}

pub fn udp(from: IpAddr, to: IpAddr, ports: (u16, u16)) -> Vec<u8> {
    ip(from, to, UDP, &udp_body(from, to, ports, b"datagram"))
}

pub fn syn(from: IpAddr, to: IpAddr, ports: (u16, u16)) -> Vec<u8> {
    ip(from, to, TCP, &syn_body(from, to, ports))
}

/// An IPv4 packet or fragment. `options` must fill whole 32-bit words; `fragment` is the field of flags and fragment
/// offset (in units of 8 bytes).
pub fn v4(from: IpAddr, to: IpAddr, protocol: u8, options: &[u8], id: u16, fragment: u16, body: &[u8]) -> Vec<u8> {
    let header_length = 20 + options.len();
    let mut packet = vec![0x40 | (header_length / 4) as u8, 0];
    packet.extend(((header_length + body.len()) as u16).to_be_bytes());
    packet.extend(id.to_be_bytes());
    packet.extend(fragment.to_be_bytes());
    packet.extend([64, protocol, 0, 0]);
    packet.extend(bytes(from));
    packet.extend(bytes(to));
    packet.extend(options);
    let sum = sum(&packet);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend(body);
    packet
}

/// The IPv4 flag "more fragments".
pub const MORE_FRAGMENTS: u16 = 0x2000;

/// An IPv6 packet; `next` is the type of the next header, which may be an extension header.
pub fn v6(from: IpAddr, to: IpAddr, next: u8, body: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend((body.len() as u16).to_be_bytes());
    packet.extend([next, 64]);
    packet.extend(bytes(from));
    packet.extend(bytes(to));
    packet.extend(body);
    packet
}

/// An IPv6 fragment header; `offset` is in units of 8 bytes.
pub fn fragment(next: u8, id: u32, offset: u16, more: bool) -> Vec<u8> {
    let mut header = vec![next, 0];
    header.extend((offset << 3 | u16::from(more)).to_be_bytes());
    header.extend(id.to_be_bytes());
    header
}

/// An IPv4 source route option with one further address: the node at the header's destination address forwards the packet to
/// `hop`. Padded to whole 32-bit words; `kind` = 131 (loose) or 137 (strict).
pub fn source_route(kind: u8, hop: IpAddr) -> Vec<u8> {
    [vec![kind, 7, 4], bytes(hop), vec![0]].concat()
}

/// An IPv6 routing header of the type `kind`, with one segment left, `hop`.
pub fn routing(next: u8, kind: u8, hop: IpAddr) -> Vec<u8> {
    [vec![next, 2, kind, 1, 0, 0, 0, 0], bytes(hop)].concat()
}
