//! Builds the flood of the attacker, who is root on a member's node and has its WireGuard key: UDP datagrams and TCP SYNs to
//! [`ALLOWED_POD`], and many packets that are not allowed.

use std::net::IpAddr;

use clustermesh_tests::attacker::{
    FloodPacket,
    packets::{self, UDP, icmp, routing, source_route, syn, udp, udp_body, v4, v6},
};

use super::{
    ALLOWED_POD, DB, FLOOD_PORTS, MEMBER, NODE_ON_POD_LINKS, NODE6, TCP_PORT, THIRD, UDP_PORT, UNUSED, ip,
    neighbours::{BRIDGE, CONTAINER, EXTERNAL_SERVICE, METADATA, NEIGHBOUR, NODE_ON_LAN},
    objects::infrastructure,
};

/// Each forbidden UDP or TCP packet has its own source port, above this one. Exception: [`source_routed`] uses an allowed port for a
/// packet that only the pod's kernel rejects.
const FORBIDDEN_PORT_BASE: u16 = 14_000;

/// All packets of the flood. `wireguard` is the target node's WireGuard address.
pub(crate) fn flood_packets(wireguard: IpAddr) -> Vec<FloodPacket> {
    let mut next = FORBIDDEN_PORT_BASE;
    let mut port = || {
        next += 1;
        next
    };
    let mut packets = Vec::new();
    for family in [0, 1] {
        let from = ip(MEMBER[family]);
        let [udp_port, tcp_port] = FLOOD_PORTS;
        let to = ip(ALLOWED_POD[family]);
        packets.push(FloodPacket::Repeated(to, vec![udp(from, to, (udp_port, UDP_PORT))]));
        packets.push(FloodPacket::Repeated(to, vec![syn(from, to, (tcp_port, TCP_PORT))]));
        // A member may only ping this address.
        let node = ip(NODE_ON_POD_LINKS[family]);
        packets.push(FloodPacket::Repeated(node, vec![udp(from, node, (port(), UDP_PORT))]));
        for (to, number) in forbidden_sockets(family, wireguard) {
            packets.push(FloodPacket::Repeated(to, vec![syn(from, to, (port(), number))]));
        }
        for to in forbidden_addresses(family) {
            packets.push(FloodPacket::Repeated(to, vec![udp(from, to, (port(), UDP_PORT))]));
            // IPv4 and IPv6 encapsulation, and GRE.
            for protocol in [4, 41, 47] {
                let body = udp_body(from, to, (port(), UDP_PORT), b"inside");
                packets.push(FloodPacket::Repeated(to, vec![packets::ip(from, to, protocol, &body)]));
            }
            packets.push(FloodPacket::Repeated(
                to,
                vec![icmp(from, to, [8, 0], [128, 0], [0, 1, 0, 1], b"ping")],
            ));
        }
        let db = ip(DB[family]);
        for forged in forged_sources(family, wireguard) {
            packets.push(FloodPacket::Repeated(db, vec![udp(forged, db, (port(), UDP_PORT))]));
            packets.push(FloodPacket::Repeated(db, vec![syn(forged, db, (port(), TCP_PORT))]));
        }
        packets.extend(source_routed(family, &mut port));
        // Errors about a flow between a pod and another member.
        packets.extend(icmp_errors(from, db, &udp(db, ip(THIRD[family]), (UDP_PORT, UDP_PORT))));
    }
    packets
}

/// Addresses that are not pods of the target: surrounding machines, members, the API server, loopback, link-local, multicast and
/// unrelated addresses.
fn forbidden_addresses(family: usize) -> Vec<IpAddr> {
    let mut all: Vec<IpAddr> = [NEIGHBOUR, METADATA, CONTAINER, THIRD, UNUSED]
        .map(|pair| ip(pair[family]))
        .into();
    let more: &[&str] = match family {
        0 => &["169.254.169.253", "127.0.0.2", "172.30.1.1", "224.0.0.251", "192.0.2.9"],
        _ => &["fe80::1", "ff02::fb", "2001:db8::9"],
    };
    all.extend(more.iter().map(|text| ip(text)));
    all
}

/// TCP sockets that the member must not reach.
fn forbidden_sockets(family: usize, wireguard: IpAddr) -> Vec<(IpAddr, u16)> {
    let mut all: Vec<_> = forbidden_addresses(family)
        .into_iter()
        .map(|to| (to, TCP_PORT))
        .collect();
    all.extend([NEIGHBOUR, METADATA].map(|pair| (ip(pair[family]), 80)));
    all.push((ip(EXTERNAL_SERVICE[family]), 80));
    // The node's own addresses.
    let own: &[&str] = match family {
        0 => &["172.30.1.11", "127.0.0.1"],
        _ => &[NODE6, "::1"],
    };
    let own = own
        .iter()
        .copied()
        .chain([NODE_ON_POD_LINKS, BRIDGE, NODE_ON_LAN].map(|pair| pair[family]));
    for to in own.map(ip) {
        all.extend(infrastructure().chain([TCP_PORT]).map(|port| (to, port)));
    }
    if family == 0 {
        // The address in the pod network that the node itself has (`Site::pod`), and the node's WireGuard address. Only their
        // infrastructure ports are tested.
        for to in [ip("10.10.1.5"), wireguard] {
            all.extend(infrastructure().map(|port| (to, port)));
        }
        // The API server.
        all.push((ip("172.30.1.1"), 6443));
    }
    all
}

/// ICMP errors about `flow`: host unreachable, packet too big, time exceeded, and redirect.
fn icmp_errors(from: IpAddr, to: IpAddr, flow: &[u8]) -> Vec<FloodPacket> {
    let kinds = [
        ([3, 1], [1, 0], [0; 4]),
        ([3, 4], [2, 0], [0, 0, 5, 0]),
        ([11, 0], [3, 0], [0; 4]),
        ([5, 1], [137, 0], [100, 66, 3, 3]),
    ];
    let packet = |(v4, v6, rest)| FloodPacket::Repeated(to, vec![icmp(from, to, v4, v6, rest, flow)]);
    kinds.map(packet).into()
}

/// Inner source addresses that do not belong to the member.
fn forged_sources(family: usize, wireguard: IpAddr) -> Vec<IpAddr> {
    let mut all: Vec<IpAddr> = [THIRD, ALLOWED_POD, NODE_ON_POD_LINKS, NEIGHBOUR]
        .map(|pair| ip(pair[family]))
        .into();
    match family {
        0 => all.extend([wireguard, ip("127.0.0.1"), ip(METADATA[0])]),
        _ => all.extend([ip("::1"), ip("fe80::1")]),
    }
    all
}

/// Packets to the allowed pod or to the node, with a source route that continues to a forbidden address.
fn source_routed(family: usize, port: &mut impl FnMut() -> u16) -> Vec<FloodPacket> {
    let from = ip(MEMBER[family]);
    let mut all = Vec::new();
    for to in [ALLOWED_POD, NODE_ON_POD_LINKS].map(|pair| ip(pair[family])) {
        for final_hop in [NEIGHBOUR, METADATA, CONTAINER, THIRD].map(|pair| ip(pair[family])) {
            // IPv4: the options for a loose (131) and a strict (137) source route. IPv6: types of the routing header, which is
            // next header 43.
            for kind in [[131, 137], [0, 2]][family] {
                let body = |port| udp_body(from, to, (port, UDP_PORT), b"by the way");
                let packet = match family {
                    0 => v4(from, to, UDP, &source_route(kind, final_hop), 0, 0, &body(port())),
                    // This packet is allowed to arrive in the pod: only the pod's kernel rejects its routing header. So it has the
                    // source port of the allowed datagrams, FLOOD_PORTS[0].
                    _ if to == ip(ALLOWED_POD[1]) => v6(
                        from,
                        to,
                        43,
                        &[routing(UDP, kind, final_hop), body(FLOOD_PORTS[0])].concat(),
                    ),
                    _ => v6(from, to, 43, &[routing(UDP, kind, final_hop), body(port())].concat()),
                };
                all.push(FloodPacket::Repeated(to, vec![packet]));
            }
        }
    }
    all
}
