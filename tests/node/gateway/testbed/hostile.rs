//! Sends crafted packets to a gateway: fragments, IP options, and packets of stale connections. The test inserts the conntrack
//! entries of these connections itself, because the gateway deletes an entry when it becomes stale.

use clustermesh_lab::wait_until;
use clustermesh_tests::{
    attacker::{
        RawSender,
        packets::{self, MORE_FRAGMENTS},
    },
    netns::NetNs,
    traffic::{Counter, TcpConnection, UDP_PORT},
};

use super::{
    DB, GATEWAY, GATEWAY_POD, LOG_PORT, OTHER_POD, SQL_PORT, Sandbox, TIMEOUT, Testbed, grant, ip, socket_addr,
};

/// The IPv6 next header of a fragment header.
const FRAGMENT_HEADER: u8 = 44;
/// The IPv6 next header of a destination options header.
const DESTINATION_OPTIONS: u8 = 60;

/// Counters in the pod `db` distinguish the packets, which arrive there at port 5000 ([`UDP_PORT`]), by their UDP length.
// threat: gateway-ungranted
pub(crate) async fn fragments_options_and_extension_headers_are_dropped(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    let db = &testbed.endpoint_pods[0];
    let raw = RawSender::open(&a.ns, &a.tunnel.interface);
    let forbidden = Counter::new(db, "udp dport 5000 udp length 701-799");
    for (from, to) in a.addresses.map(ip).into_iter().zip(GATEWAY.map(ip)) {
        let plain = Counter::new(db, "udp dport 5000 udp length 700");
        let body = |length: usize| packets::udp_body(from, to, (6000, LOG_PORT), &vec![0; length - 8]);
        let (fragmented, whole) = (body(701), body(702));
        let all = if from.is_ipv4() {
            vec![
                packets::v4(from, to, packets::UDP, &[], 7, MORE_FRAGMENTS, &fragmented[..400]),
                packets::v4(from, to, packets::UDP, &[], 7, 400 / 8, &fragmented[400..]),
                // Four "no operation" options.
                packets::v4(from, to, packets::UDP, &[1; 4], 8, 0, &whole),
            ]
        } else {
            let piece = |offset: usize, more, part: &[u8]| {
                let header = packets::fragment(packets::UDP, 7, (offset / 8) as u16, more);
                packets::v6(from, to, FRAGMENT_HEADER, &[header, part.to_vec()].concat())
            };
            // A destination options header with four bytes of padding.
            let padding = vec![packets::UDP, 0, 1, 4, 0, 0, 0, 0];
            vec![
                piece(0, true, &fragmented[..400]),
                piece(400, false, &fragmented[400..]),
                packets::v6(from, to, DESTINATION_OPTIONS, &[padding, whole].concat()),
            ]
        };
        let last = packets::ip(from, to, packets::UDP, &body(700));
        wait_until("the pod to get the plain packet", TIMEOUT, async || {
            for packet in all.iter().chain([&last]) {
                raw.send(to, packet).map_err(|error| error.to_string())?;
            }
            match plain.packets() {
                0 => Err("none".to_owned()),
                _ => Ok(()),
            }
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(forbidden.packets(), 0, "from {from}");
    }
}

/// A forged entry of the gateway's conntrack table, from the first sandbox to an endpoint.
pub(crate) struct ForgedEntry {
    /// Index of the address family in pairs of addresses: 0 = IPv4, 1 = IPv6.
    family: usize,
    /// Index of the endpoint's pod.
    pod: usize,
    /// The source port of the sandbox's packets.
    port: u16,
    /// The source port of these packets after masquerading, between gateway and endpoint.
    masqueraded_port: u16,
}

impl ForgedEntry {
    /// A valid entry of the first sandbox's UDP grant: the grant's own mark and endpoint.
    pub(crate) fn of_udp_grant(testbed: &Testbed, family: usize, port: u16, masqueraded_port: u16) -> Self {
        let mark = mark(testbed, &testbed.sandboxes[0]);
        Self::new(testbed, &mark, family, 0, (port, masqueraded_port))
    }

    fn new(testbed: &Testbed, mark: &str, family: usize, pod: usize, (port, masqueraded_port): (u16, u16)) -> Self {
        let forged = Self {
            family,
            pod,
            port,
            masqueraded_port,
        };
        let gateway = (GATEWAY[family], LOG_PORT);
        let source = Some((GATEWAY_POD[family], masqueraded_port));
        insert_forged_entry(
            testbed,
            mark,
            forged.sandbox(testbed),
            gateway,
            forged.endpoint(),
            source,
        );
        forged
    }

    fn sandbox(&self, testbed: &Testbed) -> (&'static str, u16) {
        (testbed.sandboxes[0].addresses[self.family], self.port)
    }

    fn endpoint(&self) -> (&'static str, u16) {
        ([DB, OTHER_POD][self.pod][self.family], UDP_PORT)
    }

    /// Counters of the connection's requests at the endpoint, and of its replies at the sandbox.
    pub(crate) fn counters<'a>(&self, testbed: &'a Testbed) -> (Counter<'a>, Counter<'a>) {
        (
            Counter::new(
                &testbed.endpoint_pods[self.pod],
                &format!("udp sport {}", self.masqueraded_port),
            ),
            Counter::new(&testbed.sandboxes[0].ns, &format!("udp dport {}", self.port)),
        )
    }

    /// Sends a datagram from the sandbox.
    pub(crate) fn send_request(&self, testbed: &Testbed) {
        let a = &testbed.sandboxes[0];
        let gateway = (GATEWAY[self.family], LOG_PORT);
        send(&a.ns, &a.tunnel.interface, self.sandbox(testbed), gateway);
    }

    /// Sends a reply from the endpoint.
    pub(crate) fn send_reply(&self, testbed: &Testbed) {
        let back = (GATEWAY_POD[self.family], self.masqueraded_port);
        send_from_pod(&testbed.endpoint_pods[self.pod], self.endpoint(), back);
    }
}

/// Packets to the gateway's pod that come outside the tunnel, here from the pod `db`, must not create a conntrack entry. Otherwise a
/// sender with forged sources could fill the conntrack table.
// threat: gateway-forged-underlay
pub(crate) fn packets_outside_tunnel_create_no_conntrack_entry(testbed: &Testbed) {
    let db = &testbed.endpoint_pods[0];
    for (from, to) in DB.into_iter().zip(GATEWAY_POD) {
        assert!(db.pings_patiently(to), "{to}");
        TcpConnection::open(db, socket_addr(to, 9587));
        send_from_pod(db, (from, 6001), (to, 51820));
        let family = if ip(to).is_ipv6() { "ipv6" } else { "ipv4" };
        let found = testbed
            .gateway_pod
            .run("conntrack", &["-L", "-f", family, "-s", from, "-d", to]);
        assert_eq!(found, "", "{from}");
    }
}

/// The conntrack mark of a sandbox's connections to [`LOG_PORT`].
fn mark(testbed: &Testbed, sandbox: &Sandbox) -> String {
    let (from, to) = (sandbox.addresses[0], GATEWAY[0]);
    sandbox.udp_reply(socket_addr(to, LOG_PORT));
    let port = LOG_PORT.to_string();
    let list = ["-L", "-p", "udp", "-s", from, "-d", to, "--dport", &port];
    let text = testbed.gateway_pod.run("conntrack", &list);
    let mut words = text.split_whitespace();
    let mark = words.find_map(|word| word.strip_prefix("mark="));
    mark.expect("a connection with a mark").to_owned()
}

/// Inserts a conntrack entry for packets with the addresses `from` and `to`, which the gateway translates to `destination` (DNAT) and
/// `source` (SNAT).
fn insert_forged_entry(
    testbed: &Testbed,
    mark: &str,
    from: (&str, u16),
    to: (&str, u16),
    destination: (&str, u16),
    source: Option<(&str, u16)>,
) {
    let translated = |(address, port)| socket_addr(address, port).to_string();
    let (sport, dport, destination) = (from.1.to_string(), to.1.to_string(), translated(destination));
    let source = source.map(translated);
    let mut words = vec!["-I", "-p", "udp", "--timeout", "600", "--mark", mark];
    words.extend(["-s", from.0, "--sport", &sport, "-d", to.0, "--dport", &dport]);
    words.extend(["--dst-nat", &destination]);
    words.extend(source.iter().flat_map(|source| ["--src-nat", source]));
    testbed.gateway_pod.run("conntrack", &words);
}

fn send(ns: &NetNs, interface: &str, from: (&str, u16), to: (&str, u16)) {
    let (source, destination) = (ip(from.0), ip(to.0));
    let packet = packets::udp(source, destination, (from.1, to.1));
    let sent = RawSender::open(ns, interface).send(destination, &packet);
    sent.expect("send a packet");
}

/// Sends a packet, and then a ping. The reply to the ping shows that the gateway has processed the packet.
fn send_from_pod(ns: &NetNs, from: (&str, u16), to: (&str, u16)) {
    send(ns, "eth0", from, to);
    let gateway = GATEWAY_POD[usize::from(ip(from.0).is_ipv6())];
    assert!(ns.pings_patiently(gateway), "{} pings the gateway", ns.name);
}

// threat: gateway-revoked-connection
pub(crate) async fn packets_of_a_stale_connection_are_dropped(testbed: &Testbed) {
    let [a, b] = &testbed.sandboxes;
    let sql = grant("web", "sql", "TCP", SQL_PORT);
    let both = [sql.clone(), grant("web", "log", "UDP", LOG_PORT)];
    testbed.apply_access("m--b", b.access(&both)).await;
    let [own_mark, other_mark] = [a, b].map(|sandbox| mark(testbed, sandbox));
    for (family, gateway) in GATEWAY.into_iter().enumerate() {
        let forged =
            |mark, pod, number: u16| ForgedEntry::new(testbed, mark, family, pod, (7000 + number, 50000 + number));
        // Positive control: the gateway forwards packets of a valid forged entry.
        let entry = forged(&own_mark, 0, 0);
        let (requests, replies) = entry.counters(testbed);
        wait_until("packets of both directions", TIMEOUT, async || {
            entry.send_request(testbed);
            entry.send_reply(testbed);
            match (requests.packets(), replies.packets()) {
                (1.., 1..) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
        // Stale entries. 1: the grant does not have this endpoint. 2 and 3: the mark is that of the other sandbox's grant. This grant has
        // the endpoint of entry 2, but not that of entry 3.
        for (number, mark, pod) in [(1, &own_mark, 1), (2, &other_mark, 1), (3, &other_mark, 0)] {
            let entry = forged(mark, pod, number);
            let (requests, replies) = entry.counters(testbed);
            entry.send_request(testbed);
            // This reply comes after the gateway has processed the previous packet.
            a.udp_reply(socket_addr(gateway, LOG_PORT));
            assert_eq!(requests.packets(), 0, "family {family}, entry {number}");
            // The gateway's nftables rules match replies by grant and endpoint, not by sandbox, so they let the reply of entry 2 pass.
            if number != 2 {
                entry.send_reply(testbed);
                assert_eq!(replies.packets(), 0, "family {family}, entry {number}");
            }
        }
        pods_cannot_use_forged_entries(testbed, &own_mark, family);
    }
    testbed.apply_access("m--b", b.access(&[sql])).await;
}

/// Forges three conntrack entries: from a pod to a sandbox; from a pod to another pod; and from a sandbox to a pod
/// without masquerading, so that the pod replies to the sandbox's own address.
// threat: gateway-inbound
fn pods_cannot_use_forged_entries(testbed: &Testbed, mark: &str, family: usize) {
    let [db, other] = &testbed.endpoint_pods;
    let a = &testbed.sandboxes[0];
    let (endpoint, sandbox, gateway_pod) = ((DB[family], UDP_PORT), a.addresses[family], GATEWAY_POD[family]);
    insert_forged_entry(testbed, mark, endpoint, (gateway_pod, 50010), (sandbox, 7010), None);
    let received = Counter::new(&a.ns, "udp dport 7010");
    send_from_pod(db, endpoint, (gateway_pod, 50010));
    assert_eq!(received.packets(), 0, "family {family}: a sandbox receives a packet");
    let client = (OTHER_POD[family], 40000);
    insert_forged_entry(testbed, mark, client, (gateway_pod, 50011), endpoint, None);
    let received = Counter::new(db, "udp sport 40000");
    send_from_pod(other, client, (gateway_pod, 50011));
    assert_eq!(received.packets(), 0, "family {family}: a pod receives a packet");
    insert_forged_entry(
        testbed,
        mark,
        (sandbox, 7012),
        (GATEWAY[family], LOG_PORT),
        endpoint,
        None,
    );
    let received = Counter::new(&a.ns, "udp dport 7012");
    // The gateway's chain `first` drops each packet from outside the tunnel that is not addressed to the gateway's pod.
    let before = testbed.dropped("first", "not addressed to this pod");
    send_from_pod(db, endpoint, (sandbox, 7012));
    assert_eq!(
        received.packets(),
        0,
        "family {family}: a reply to the sandbox's own address"
    );
    assert!(
        testbed.dropped("first", "not addressed to this pod") > before,
        "family {family}"
    );
}
