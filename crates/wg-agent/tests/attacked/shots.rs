//! What root of a member's node sends, with WireGuard of its own and the node's key: all that is open to it, and whatever is not.

use std::net::IpAddr;

use super::{
    DB, GATEWAY, MEMBER, MEMBERS_FLOOD, NODE6, OTHER, TCP_PORT, THIRD, UDP_PORT,
    around::{BRIDGE, CONTAINER, LEADS_OUT, METADATA, NEIGHBOUR, NODE_THERE},
    ip,
    objects::infrastructure,
};
use crate::attacker::{
    Shot,
    packets::{self, UDP, icmp, routing, source_route, syn, udp, udp_body, v4, v6},
};

/// Source ports of what is not open to it, one for each kind.
const BEYOND: u16 = 14_000;

/// Everything. `wireguard`: the target's node.
pub(crate) fn all(wireguard: IpAddr) -> Vec<Shot> {
    let mut next = BEYOND;
    let mut port = || {
        next += 1;
        next
    };
    let mut shots = Vec::new();
    for family in [0, 1] {
        let from = ip(MEMBER[family]);
        let [udp_port, tcp_port] = MEMBERS_FLOOD;
        let to = ip(OTHER[family]);
        shots.push(Shot::Same(to, vec![udp(from, to, (udp_port, UDP_PORT))]));
        shots.push(Shot::Same(to, vec![syn(from, to, (tcp_port, TCP_PORT))]));
        // Its pods find their node there; a member's packet does not (a ping aside).
        let gateway = ip(GATEWAY[family]);
        shots.push(Shot::Same(gateway, vec![udp(from, gateway, (port(), UDP_PORT))]));
        for (to, number) in sockets(family, wireguard) {
            shots.push(Shot::Same(to, vec![syn(from, to, (port(), number))]));
        }
        for to in outside(family) {
            shots.push(Shot::Same(to, vec![udp(from, to, (port(), UDP_PORT))]));
            for protocol in [4, 41, 47] {
                let body = udp_body(from, to, (port(), UDP_PORT), b"inside");
                shots.push(Shot::Same(to, vec![packets::ip(from, to, protocol, &body)]));
            }
            shots.push(Shot::Same(
                to,
                vec![icmp(from, to, [8, 0], [128, 0], [0, 1, 0, 1], b"ping")],
            ));
        }
        let db = ip(DB[family]);
        for forged in forged(family, wireguard) {
            shots.push(Shot::Same(db, vec![udp(forged, db, (port(), UDP_PORT))]));
            shots.push(Shot::Same(db, vec![syn(forged, db, (port(), TCP_PORT))]));
        }
        shots.extend(by_the_way(family, &mut port));
        // What a pod says to another member.
        shots.extend(about(from, db, &udp(db, ip(THIRD[family]), (UDP_PORT, UDP_PORT))));
    }
    shots
}

/// Whoever is no pod of the target's: around it, members, everybody and anybody.
fn outside(family: usize) -> Vec<IpAddr> {
    let mut all: Vec<IpAddr> = [NEIGHBOUR, METADATA, CONTAINER, THIRD]
        .map(|pair| ip(pair[family]))
        .into();
    let more: &[&str] = match family {
        0 => &["169.254.169.253", "127.0.0.2", "172.30.1.1", "224.0.0.251", "192.0.2.9"],
        _ => &["fe80::1", "ff02::fb", "2001:db8::9"],
    };
    all.extend(more.iter().map(|text| ip(text)));
    all
}

/// Sockets that are closed to it.
fn sockets(family: usize, wireguard: IpAddr) -> Vec<(IpAddr, u16)> {
    let mut all: Vec<_> = outside(family).into_iter().map(|to| (to, TCP_PORT)).collect();
    all.extend([NEIGHBOUR, METADATA].map(|pair| (ip(pair[family]), 80)));
    all.push((ip(LEADS_OUT[family]), 80));
    // The node's own that are no mesh's, and those that are: with every port, and with those of the control plane.
    let own: &[&str] = match family {
        0 => &["172.30.1.11", "127.0.0.1"],
        _ => &[NODE6, "::1"],
    };
    let own = own
        .iter()
        .copied()
        .chain([GATEWAY, BRIDGE, NODE_THERE].map(|pair| pair[family]));
    let own: Vec<IpAddr> = own.map(ip).collect();
    all.extend(own.iter().map(|to| (*to, TCP_PORT)));
    let mut local = own;
    if family == 0 {
        local.extend([ip("10.10.1.5"), wireguard]);
    }
    for to in local {
        all.extend(infrastructure().map(|port| (to, port)));
    }
    if family == 0 {
        all.push((ip("172.30.1.1"), 6443));
    }
    all
}

/// No such host; too big; too late; and by another way.
fn about(from: IpAddr, to: IpAddr, flow: &[u8]) -> Vec<Shot> {
    let kinds = [
        ([3, 1], [1, 0], [0; 4]),
        ([3, 4], [2, 0], [0, 0, 5, 0]),
        ([11, 0], [3, 0], [0; 4]),
        ([5, 1], [137, 0], [100, 66, 3, 3]),
    ];
    let shot = |(v4, v6, rest)| Shot::Same(to, vec![icmp(from, to, v4, v6, rest, flow)]);
    kinds.map(shot).into()
}

/// Whose name it takes.
fn forged(family: usize, wireguard: IpAddr) -> Vec<IpAddr> {
    let mut all: Vec<IpAddr> = [THIRD, OTHER, GATEWAY, NEIGHBOUR].map(|pair| ip(pair[family])).into();
    match family {
        0 => all.extend([wireguard, ip("127.0.0.1"), ip(METADATA[0])]),
        _ => all.extend([ip("::1"), ip("fe80::1")]),
    }
    all
}

/// To a pod that is open to it first, or to the node, and on from there by a way that is written into the packet.
fn by_the_way(family: usize, port: &mut impl FnMut() -> u16) -> Vec<Shot> {
    let from = ip(MEMBER[family]);
    let mut all = Vec::new();
    for to in [OTHER, GATEWAY].map(|pair| ip(pair[family])) {
        for hop in [NEIGHBOUR, METADATA, CONTAINER, THIRD].map(|pair| ip(pair[family])) {
            for kind in [[131, 137], [0, 2]][family] {
                let say = |port| udp_body(from, to, (port, UDP_PORT), b"by the way");
                let packet = match family {
                    0 => v4(from, to, UDP, &source_route(kind, hop), 0, 0, &say(port())),
                    // As far as the first it is as good as any.
                    _ if to == ip(OTHER[1]) => {
                        v6(from, to, 43, &[routing(UDP, kind, hop), say(MEMBERS_FLOOD[0])].concat())
                    }
                    _ => v6(from, to, 43, &[routing(UDP, kind, hop), say(port())].concat()),
                };
                all.push(Shot::Same(to, vec![packet]));
            }
        }
    }
    all
}
