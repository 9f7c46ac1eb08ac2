//! What the attacker sends: all that is granted to it, and everything that is not.

use std::net::{IpAddr, SocketAddr};

use super::{
    ATTACKER, DB, FLOOD, GATEWAY, MEMBER, MEMBER_ASKING, MEMBER_AT, OTHER, SPARE, SPARE_FLOOD, TCP_PORT, UDP_PORT, VIP,
    ip,
};
use crate::attacker::{
    Shot,
    packets::{self, MORE, TCP, UDP, fragment, icmp, routing, source_route, syn, syn_body, udp, udp_body, v4, v6},
};

/// Source ports of what is beyond the grants, one for each kind, so that a witness tells which it was.
const BEYOND: u16 = 10_000;

/// Everything. `wireguard`: the target's node.
pub(crate) fn all(wireguard: IpAddr) -> Vec<Shot> {
    let mut shots = granted();
    let mut next = BEYOND;
    let mut port = || {
        next += 1;
        next
    };
    for family in [0, 1] {
        let from = ip(ATTACKER[family]);
        for (to, number) in sockets(family, wireguard) {
            let to = ip(&to);
            shots.push(Shot::Same(to, vec![syn(from, to, (port(), number))]));
            shots.push(Shot::Same(to, vec![udp(from, to, (port(), number))]));
        }
        let [udp_port, tcp_port] = SPARE_FLOOD;
        let spare = ip(SPARE[family]);
        shots.push(Shot::Same(spare, vec![udp(from, spare, (udp_port, UDP_PORT))]));
        shots.push(Shot::Same(spare, vec![syn(from, spare, (tcp_port, TCP_PORT))]));
        let db = ip(DB[family]);
        // What is granted by another protocol, and what has no ports.
        shots.push(Shot::Same(db, vec![syn(from, db, (port(), UDP_PORT))]));
        shots.push(Shot::Same(db, vec![udp(from, db, (port(), TCP_PORT))]));
        for protocol in [4, 41, 47, 50, 132] {
            let body = udp_body(from, db, (port(), UDP_PORT), b"inside");
            shots.push(Shot::Same(db, vec![packets::ip(from, db, protocol, &body)]));
        }
        for forged in forged(family, wireguard) {
            shots.push(Shot::Same(db, vec![udp(ip(&forged), db, (port(), UDP_PORT))]));
            shots.push(Shot::Same(db, vec![syn(ip(&forged), db, (port(), TCP_PORT))]));
        }
        shots.extend(errors(family, wireguard));
    }
    shots.extend(options_and_fragments(wireguard, &mut port));
    shots.extend(extensions(&mut port));
    shots
}

fn granted() -> Vec<Shot> {
    let mut shots = Vec::new();
    for (from, db) in ATTACKER.map(ip).into_iter().zip(DB.map(ip)) {
        let [udp_port, tcp_port, fragments] = FLOOD;
        shots.push(Shot::Same(db, vec![udp(from, db, (udp_port, UDP_PORT))]));
        shots.push(Shot::Same(db, vec![syn(from, db, (tcp_port, TCP_PORT))]));
        shots.push(Shot::New(from, SocketAddr::new(db, TCP_PORT)));
        let body = udp_body(
            from,
            db,
            (fragments, UDP_PORT),
            b"what is in pieces is put together, and judged as a whole",
        );
        let (first, rest) = body.split_at(24);
        let pieces = match from {
            IpAddr::V4(_) => [
                v4(from, db, UDP, &[], 71, MORE, first),
                v4(from, db, UDP, &[], 71, 3, rest),
            ],
            IpAddr::V6(_) => {
                let piece =
                    |offset, more, body: &[u8]| v6(from, db, 44, &[&fragment(UDP, 71, offset, more), body].concat());
                [piece(0, true, first), piece(3, false, rest)]
            }
        };
        shots.push(Shot::Same(db, pieces.into()));
    }
    shots
}

/// Sockets that nobody granted.
fn sockets(family: usize, wireguard: IpAddr) -> Vec<(String, u16)> {
    let mut all = vec![
        (DB[family].to_owned(), TCP_PORT + 1),
        (OTHER[family].to_owned(), TCP_PORT),
        (OTHER[family].to_owned(), UDP_PORT),
        (VIP[family].to_owned(), 80),
        (MEMBER[family].to_owned(), UDP_PORT),
    ];
    let (own, more): (&[&str], &[&str]) = match family {
        0 => (
            &["172.30.1.11", GATEWAY[0], "10.10.1.5"],
            // Nobody's pod, the API server, another node, the loopback, another of the sandbox's own, everybody, anybody.
            &[
                "10.10.1.77",
                "172.30.1.1",
                MEMBER_AT,
                "127.0.0.1",
                "100.66.2.78",
                "224.0.0.251",
                "192.0.2.9",
            ],
        ),
        _ => (
            &["fd00:30::1:11", GATEWAY[1]],
            &["fd00:10:0:1::77", "fd00:66:2::78", "ff02::fb", "2001:db8::9"],
        ),
    };
    let mut node: Vec<String> = own.iter().map(ToString::to_string).collect();
    node.extend((family == 0).then(|| wireguard.to_string()));
    for address in &node {
        all.extend([10250, 9587, TCP_PORT, UDP_PORT, 51820].map(|port| (address.clone(), port)));
    }
    if family == 0 {
        all.push(("172.30.1.11".to_owned(), 30080));
    }
    all.extend(more.iter().map(|address| ((*address).to_owned(), 6443)));
    all
}

/// Whose name it takes: pods and addresses of the target, the member, another of its own networks.
fn forged(family: usize, wireguard: IpAddr) -> Vec<String> {
    let mut all: Vec<String> = [OTHER[family], DB[family], MEMBER[family], GATEWAY[family]]
        .map(str::to_owned)
        .into();
    match family {
        0 => all.extend([
            wireguard.to_string(),
            "172.30.1.11".into(),
            "100.66.2.78".into(),
            "127.0.0.1".into(),
        ]),
        _ => all.extend(["fd00:66:2::78".into(), "::1".into(), "fe80::1".into()]),
    }
    all
}

/// ICMP that is asked for by nobody: echoes, redirects, errors about flows that are not its own and lies about one that is.
fn errors(family: usize, wireguard: IpAddr) -> Vec<Shot> {
    let from = ip(ATTACKER[family]);
    let (db, other, member) = (ip(DB[family]), ip(OTHER[family]), ip(MEMBER[family]));
    let gateway = ip(GATEWAY[family]);
    let node = if family == 0 { wireguard } else { gateway };
    // What the pod beside it says to the member, the node to its pod, the granted pod to the attacker.
    let quoted = [
        (other, udp(other, member, (UDP_PORT, MEMBER_ASKING))),
        (member, udp(member, other, (MEMBER_ASKING, UDP_PORT))),
        (node, udp(node, db, (UDP_PORT, UDP_PORT))),
    ];
    let mut all = Vec::new();
    for to in [db, other, node, gateway] {
        all.push(Shot::Same(
            to,
            vec![icmp(from, to, [8, 0], [128, 0], [0, 1, 0, 1], b"ping")],
        ));
    }
    for (to, flow) in &quoted {
        all.extend(about(from, *to, flow));
    }
    // Where its own flow goes is not its to say.
    let own = udp(db, from, (UDP_PORT, FLOOD[0]));
    all.extend(about(from, db, &own).pop());
    all
}

/// No such host; too big; too late; and by another way.
pub(super) fn about(from: IpAddr, to: IpAddr, flow: &[u8]) -> Vec<Shot> {
    let kinds = [
        ([3, 1], [1, 0], [0; 4]),
        ([3, 4], [2, 0], [0, 0, 5, 0]),
        ([11, 0], [3, 0], [0; 4]),
        ([5, 1], [137, 0], [100, 66, 2, 77]),
    ];
    let shot = |(v4, v6, rest)| Shot::Same(to, vec![icmp(from, to, v4, v6, rest, flow)]);
    kinds.map(shot).into()
}

/// IPv4: the way written into the packet, and pieces that say one thing first and another after it.
fn options_and_fragments(wireguard: IpAddr, port: &mut impl FnMut() -> u16) -> Vec<Shot> {
    let (from, db, other) = (ip(ATTACKER[0]), ip(DB[0]), ip(OTHER[0]));
    let mut all = Vec::new();
    for kind in [131, 137] {
        for (to, hop) in [(db, other), (wireguard, other), (ip("172.30.1.11"), other), (other, db)] {
            let body = udp_body(from, to, (port(), UDP_PORT), b"by the way");
            all.push(Shot::Same(
                to,
                vec![v4(from, to, UDP, &source_route(kind, hop), 0, 0, &body)],
            ));
        }
    }
    let mut pieces = |to: IpAddr, protocol, id, pieces: &[(u16, &[u8])]| {
        let packet = |(at, body): &(u16, &[u8])| v4(from, to, protocol, &[], id, *at, body);
        all.push(Shot::Same(to, pieces.iter().map(packet).collect()));
    };
    let text = b"a datagram that is long enough for a few pieces of it";
    // Another pod, and another port, in pieces that hold the ports alone first.
    for (id, to, number) in [(81, other, UDP_PORT), (82, db, UDP_PORT + 1)] {
        let body = udp_body(from, to, (port(), number), text);
        pieces(to, UDP, id, &[(MORE, &body[..8]), (1, &body[8..])]);
    }
    let body = syn_body(from, db, (port(), TCP_PORT + 1));
    pieces(
        db,
        TCP,
        83,
        &[(MORE, &body[..8]), (MORE | 1, &body[8..16]), (2, &body[16..])],
    );
    // The granted port first, and over it another; then the other way round. Where the wire loses the right piece, the others make a
    // datagram to the granted port, which is granted from this port.
    let source = FLOOD[2];
    let [good, bad] = [UDP_PORT, UDP_PORT + 1].map(|number| udp_body(from, db, (source, number), text));
    for (id, first, second) in [(84, &good, &bad), (85, &bad, &good)] {
        pieces(
            db,
            UDP,
            id,
            &[(3, &first[24..]), (MORE, &first[..16]), (MORE, &second[..24])],
        );
    }
    // Never a first piece.
    pieces(db, UDP, 86, &[(MORE | 1, &good[8..16]), (2, &good[16..])]);
    all
}

/// IPv6: headers between, before ports that are not granted, and a way written into the packet.
fn extensions(port: &mut impl FnMut() -> u16) -> Vec<Shot> {
    let (from, db, other) = (ip(ATTACKER[1]), ip(DB[1]), ip(OTHER[1]));
    const PADDING: [u8; 6] = [1, 4, 0, 0, 0, 0];
    let mut all = Vec::new();
    for (to, number) in [(db, UDP_PORT + 1), (other, UDP_PORT)] {
        let mut body = || udp_body(from, to, (port(), number), b"behind it");
        for (header, extension) in [
            (0, [&[UDP, 0][..], &PADDING].concat()),
            (60, [&[UDP, 0][..], &PADDING].concat()),
            (44, fragment(UDP, 91, 0, false)),
        ] {
            all.push(Shot::Same(
                to,
                vec![v6(from, to, header, &[extension, body()].concat())],
            ));
        }
    }
    for kind in [0, 2, 4] {
        let body = udp_body(from, other, (port(), UDP_PORT), b"by the way");
        let extension = routing(UDP, kind, other);
        all.push(Shot::Same(db, vec![v6(from, db, 43, &[extension, body].concat())]));
    }
    // A fragment that overlaps.
    let source = port();
    let [good, bad] =
        [UDP_PORT, UDP_PORT + 1].map(|number| udp_body(from, db, (source, number), b"long enough for two pieces"));
    let piece = |offset, more, body: &[u8]| v6(from, db, 44, &[&fragment(UDP, 92, offset, more), body].concat());
    all.push(Shot::Same(
        db,
        vec![
            piece(3, false, &good[24..]),
            piece(0, true, &good[..16]),
            piece(0, true, &bad[..24]),
        ],
    ));
    all
}
