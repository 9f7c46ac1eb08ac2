//! Tests the data path of a node with IPv4 packets that contain a source route, on a node whose administrator has enabled the
//! sysctl that makes them dangerous. A veth pair named kilo0 is used instead of a tunnel. Needs root, nft and iproute2.

use std::{
    net::{IpAddr, UdpSocket},
    time::Duration,
};

use clustermesh_agent_core::compile::Inputs;
use clustermesh_tests::{
    attacker::{
        RawSender,
        packets::{UDP, source_route, udp_body, v4},
    },
    netns::{self, wait_until},
    path::{Mesh, V4, apply, policy_of},
};

const PORT: u16 = 5000;

/// The hub node's inputs, with a policy that allows only the node's own address.
fn inputs_with_one_open_address(mesh: &Mesh) -> Inputs {
    let mut inputs = mesh.hub_inputs.clone();
    policy_of(&mut inputs).allow = [V4.hub.parse::<IpAddr>().unwrap().into()].into();
    inputs
}

/// If a node accepts the IP option "source route", it forwards a packet with this option to an address that its netfilter rules
/// have not checked. One open port of the node would then open the same port of every other address.
/// The kernel accepts the option if `accept_source_route` is 1 on the interface (the default) and in `conf/all` (0 by default).
// threat: ip-source-route
#[test]
fn accepted_source_route_reaches_no_closed_address() {
    let mesh = Mesh::new(&V4);
    apply(&mesh.hub, &inputs_with_one_open_address(&mesh));
    // The sysctl is set in the pods, too, because on a real node the pods' network namespaces inherit it.
    for ns in [&mesh.hub, &mesh.hub2, &mesh.hub_pod, &mesh.hub2_pod] {
        ns.set_sysctl("net/ipv4/conf/all/accept_source_route", "1");
    }
    let [from, node, pod, other_pod, bridge] = [V4.member_wireguard, V4.hub, V4.hub_pod, V4.hub2_pod, V4.hub_bridge]
        .map(|text| text.parse::<IpAddr>().unwrap());
    let listen = |ns: &netns::NetNs, address: IpAddr| {
        let socket = ns.enter(|| UdpSocket::bind((address, PORT))).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        socket
    };
    let (open, others) = (
        listen(&mesh.hub, node),
        [
            listen(&mesh.hub_pod, pod),
            listen(&mesh.hub2_pod, other_pod),
            listen(&mesh.hub, bridge),
        ],
    );
    let raw = RawSender::open(&mesh.member, "kilo0");
    let send = |options: &[u8], text: &[u8]| {
        let mut body = udp_body(from, node, (9, PORT), text);
        // Removes the UDP checksum. A valid one would cover the last address of the source route instead of `node`.
        body[6..8].fill(0);
        raw.send(node, &v4(from, node, UDP, options, 0, 0, &body))
            .expect("send");
    };
    let received = |socket: &UdpSocket| {
        let mut buffer = [0; 100];
        let (length, from) = socket.recv_from(&mut buffer).ok()?;
        Some((from.ip(), String::from_utf8_lossy(&buffer[..length]).into_owned()))
    };
    wait_until("a packet to the open socket", Duration::from_secs(60), || {
        send(&[], b"honest");
        received(&open).is_some()
    });
    // The IP options "loose source route" and "strict source route" (RFC 791).
    for kind in [131, 137] {
        for hop in [pod, other_pod, bridge] {
            send(&source_route(kind, hop), b"source-routed");
        }
    }
    // Packets arrive in order: when the last packet has arrived, no earlier packet is still on its way.
    while received(&open).is_some() {}
    send(&[], b"last");
    wait_until("the last packet", Duration::from_secs(60), || {
        received(&open).is_some_and(|(_, text)| text == "last")
    });
    assert_eq!(others.map(|socket| received(&socket)), [None, None, None]);
}
