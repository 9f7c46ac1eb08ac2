//! Sends packets through the whole data path of nodes in real network namespaces: routes, conntrack, the masquerading of
//! a CNI and the DNAT of a Service. In most tests a veth pair named kilo0 replaces the tunnel. Needs root, nft, curl and
//! tcpdump.

mod worker;

use std::{
    net::{IpAddr, UdpSocket},
    time::Duration,
};

use clustermesh_tests::{
    netns::{NetNs, wait_for, wait_until},
    path::{self, Capture, Family, Mesh, V4, V4_OVER_V6, V6, V6_OVER_V4, apply, policy_of, request, serve, source_of},
};

use worker::{
    worker_forwards_node_port_connections_into_the_tunnel, worker_in_the_hub_reaches_its_api_server_by_eth0,
    worker_in_the_hub_replies_on_the_path_of_the_request,
};

/// Runs tests in both families.
macro_rules! both {
    ($($name:ident)*) => { mod ipv4 { $(#[test] fn $name() { super::$name(&super::V4) })* } mod ipv6 { $(#[test] fn $name() { super::$name(&super::V6) })* } };
}

both! {
    pods_keep_their_addresses_despite_cni_masquerading
    unpublished_source_leaves_with_the_wireguard_address
    remote_service_is_reached_and_answers_through_its_anchor
    locally_translated_service_keeps_the_pod_source
    node_address_is_tunnelled_while_outer_packets_are_not
    icmp_errors_come_back_through_the_tunnel
    destinations_outside_the_policy_are_unreachable
    host_listeners_are_open_only_at_listener_addresses
    emptied_allow_list_blocks_an_open_connection
    closed_policy_blocks_open_connections_both_ways
    mesh_packets_never_leave_unencrypted_without_a_tunnel
    spoofed_mesh_source_is_not_forwarded
    mss_fits_the_smaller_device_mtu
    worker_in_the_hub_replies_on_the_path_of_the_request
    worker_in_the_hub_reaches_its_api_server_by_eth0
    worker_forwards_node_port_connections_into_the_tunnel
}

/// Runs tests with real WireGuard devices, whose outer packets have the other family. Tests that need the veth pair are excluded: those
/// that break the tunnel, those that send outer packets themselves, and those of a worker (a member's node in the hub's pod network).
macro_rules! across {
    ($($name:ident)*) => {
        mod ipv4_over_ipv6 { $(#[test] fn $name() { super::$name(&super::V4_OVER_V6) })* }
        mod ipv6_over_ipv4 { $(#[test] fn $name() { super::$name(&super::V6_OVER_V4) })* }
    };
}

across! {
    pods_keep_their_addresses_despite_cni_masquerading
    unpublished_source_leaves_with_the_wireguard_address
    remote_service_is_reached_and_answers_through_its_anchor
    locally_translated_service_keeps_the_pod_source
    icmp_errors_come_back_through_the_tunnel
    destinations_outside_the_policy_are_unreachable
    host_listeners_are_open_only_at_listener_addresses
    emptied_allow_list_blocks_an_open_connection
    closed_policy_blocks_open_connections_both_ways
    spoofed_mesh_source_is_not_forwarded
    mss_fits_the_smaller_device_mtu
}

fn pods_keep_their_addresses_despite_cni_masquerading(f: &'static Family) {
    let mesh = Mesh::new(f);
    serve(&mesh.hub_pod, f.hub_pod, 8080);
    serve(&mesh.member_pod, f.member_pod, 8080);
    assert_eq!(source_of(&mesh.member_pod, f.hub_pod, 8080), f.member_pod);
    assert_eq!(source_of(&mesh.hub_pod, f.member_pod, 8080), f.hub_pod);
    assert!(mesh.hub_pod.pings_patiently(f.member_pod));
    // Without the rules that map the source to itself, the CNI masquerades it.
    mesh.member.sh("nft flush chain inet clustermesh nat");
    assert_eq!(source_of(&mesh.member_pod, f.hub_pod, 8080), f.member_wireguard);
}

fn unpublished_source_leaves_with_the_wireguard_address(f: &'static Family) {
    let mesh = Mesh::new(f);
    serve(&mesh.hub_pod, f.hub_pod, 8080);
    assert_eq!(source_of(&mesh.member, f.hub_pod, 8080), f.member_wireguard);
    mesh.member
        .ip(&format!("addr add {}/{} dev eth0{}", f.stray, f.host, f.nodad));
    let stray = mesh.member.sh(&format!(
        "curl -sS -m 60 --interface {} http://{}:8080",
        f.stray,
        f.url(f.hub_pod)
    ));
    assert_eq!(stray, f.member_wireguard);
}

fn remote_service_is_reached_and_answers_through_its_anchor(f: &'static Family) {
    let mesh = Mesh::new(f);
    serve(&mesh.hub2_pod, f.hub2_pod, 8080);
    mesh.service(&mesh.hub, f.service, f.hub2_pod);
    // The endpoint is on another node than the anchor. The anchor masquerades the requests with its own address, so that
    // the replies return through the anchor.
    assert_eq!(source_of(&mesh.member_pod, f.service, 80), f.hub);
    assert_eq!(source_of(&mesh.member, f.service, 80), f.hub);
}

fn locally_translated_service_keeps_the_pod_source(f: &'static Family) {
    let mesh = Mesh::new(f);
    serve(&mesh.hub_pod, f.hub_pod, 8080);
    mesh.service(&mesh.member, f.local_service, f.hub_pod);
    assert_eq!(source_of(&mesh.member_pod, f.local_service, 80), f.member_pod);
    assert_eq!(source_of(&mesh.member, f.local_service, 80), f.member_wireguard);
}

fn node_address_is_tunnelled_while_outer_packets_are_not(f: &'static Family) {
    let mesh = Mesh::new(f);
    serve(&mesh.hub, f.hub, 9090);
    for interface in ["all", "eth0", "kilo0"] {
        mesh.hub
            .set_sysctl(&format!("net/ipv4/conf/{interface}/rp_filter"), "1");
        mesh.member
            .set_sysctl(&format!("net/ipv4/conf/{interface}/rp_filter"), "1");
    }
    assert_eq!(source_of(&mesh.member, f.hub, 9090), f.member_wireguard);
    assert_eq!(source_of(&mesh.member_pod, f.hub, 9090), f.member_pod);
    // Outer packets of the member's device have a mark and go to the hub's node address, too.
    let [ours, theirs] =
        [(&mesh.member, f.member), (&mesh.hub, f.hub)].map(|(ns, at)| path::outer_socket(ns, at, 51820));
    let capture = Capture::start(&mesh.member, "eth0", "udp port 51820");
    wait_for("both directions of the outer packets", Duration::from_secs(60), || {
        let mut buffer = [0; 10];
        ours.send_to(b"outer", (f.hub.parse::<IpAddr>().unwrap(), 51820)).ok()?;
        let (_, from) = theirs.recv_from(&mut buffer).ok()?;
        assert_eq!(from.ip().to_string(), f.member);
        theirs.send_to(b"reply", from).ok()?;
        ours.recv_from(&mut buffer)
            .ok()
            .filter(|(_, from)| from.ip().to_string() == f.hub)
    });
    assert!(capture.finish(&mesh.member, f.member, f.switch).len() >= 2);
}

// threat: forged-icmp-error
fn icmp_errors_come_back_through_the_tunnel(f: &'static Family) {
    let mesh = Mesh::new(f);
    for from in [&mesh.member_pod, &mesh.member] {
        let any: IpAddr = if f.n == 4 { "0.0.0.0" } else { "::" }.parse().unwrap();
        let socket = from.enter(|| UdpSocket::bind((any, 0)).unwrap());
        from.enter(|| socket.connect((f.hub_pod.parse::<IpAddr>().unwrap(), 9)))
            .unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        wait_for("port unreachable from the hub's pod", Duration::from_secs(60), || {
            let _ = socket.send(b"anyone?");
            let error = socket.recv(&mut [0; 10]).err()?;
            (error.kind() == std::io::ErrorKind::ConnectionRefused).then_some(())
        });
    }
    // Errors about a reply reach the server.
    let bind = |ns: &NetNs, address: &str| {
        let socket = ns
            .enter(|| UdpSocket::bind((address.parse::<IpAddr>().unwrap(), 5000)))
            .unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        socket
    };
    let (client, server) = (bind(&mesh.member_pod, f.member_pod), bind(&mesh.hub_pod, f.hub_pod));
    let (_, from) = wait_for("the request", Duration::from_secs(60), || {
        client
            .send_to(b"question", (f.hub_pod.parse::<IpAddr>().unwrap(), 5000))
            .ok()?;
        server.recv_from(&mut [0; 10]).ok()
    });
    drop(client);
    server.connect(from).unwrap();
    wait_for(
        "port unreachable from the member's pod",
        Duration::from_secs(60),
        || {
            let _ = server.send(b"answer");
            let error = server.recv(&mut [0; 10]).err()?;
            (error.kind() == std::io::ErrorKind::ConnectionRefused).then_some(())
        },
    );
}

// threat: denied-address
fn destinations_outside_the_policy_are_unreachable(f: &'static Family) {
    let mesh = Mesh::new(f);
    for port in [9090, 10250] {
        serve(&mesh.hub, f.hub, port);
    }
    for port in [6443, 9090] {
        serve(&mesh.hub2_pod, f.hub2_pod, port); // port 6443 stands for the hub's API server
    }
    for port in [9090, 10250] {
        serve(&mesh.hub2, f.hub2, port);
        serve(&mesh.hub2, f.hub2_bridge, port);
    }
    mesh.hub_pod
        .ip(&format!("addr add {}/{} dev eth0{}", f.denied, f.host, f.nodad));
    mesh.hub.ip(&format!("route add {} dev cni0", f.denied));
    for port in [9090, 9091] {
        serve(&mesh.hub_pod, f.denied, port);
    }
    // At the address `denied`, only port 9090 is denied.
    assert_eq!(source_of(&mesh.hub, f.denied, 9090), f.hub_bridge);
    assert_eq!(source_of(&mesh.member_pod, f.denied, 9091), f.hub_bridge);
    assert_eq!(source_of(&mesh.member_pod, f.hub, 9090), f.member_pod);
    assert_eq!(source_of(&mesh.member_pod, f.hub2_pod, 9090), f.hub);
    assert_eq!(source_of(&mesh.hub, f.hub2_pod, 6443), f.hub);
    // Through the node `hub`, the member reaches both addresses of the node `hub2`: the one in its Node object, and the bridge's,
    // which is not in it. Port 10250 is open inside the hub; the next loop shows that it is closed to the member.
    for other in [f.hub2, f.hub2_bridge] {
        assert_eq!(source_of(&mesh.member_pod, other, 9090), f.hub);
        assert_eq!(source_of(&mesh.hub, other, 10250), f.hub);
    }
    for (to, port) in [
        (f.hub, 10250),
        (f.hub2, 10250),
        (f.hub2_bridge, 10250),
        (f.hub2_pod, 6443),
        (f.denied, 9090),
    ] {
        let error = request(&mesh.member_pod, to, port).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{to}:{port} {error}");
    }
    // A pod behind a Service may listen on a port with the number of an infrastructure port.
    serve(&mesh.hub2_pod, f.hub2_pod, 10250);
    mesh.service_on(&mesh.hub, f.service, f.hub2_pod, 10250);
    assert_eq!(source_of(&mesh.member_pod, f.service, 80), f.hub);
    if f.outer.is_some() {
        // The rest needs the veth pair: a WireGuard device sends nothing to addresses outside all allowed IPs.
        return;
    }
    // A node forwards nothing from one peer to another. The agent writes its routes into table 5182.
    mesh.member
        .ip(&format!("route add {} dev kilo0 table 5182", f.elsewhere));
    mesh.hub.ip(&format!("route add {} dev kilo0 table 5182", f.elsewhere));
    mesh.hub.sh(&format!(
        "nft add element inet clustermesh allow{n} {{ {} . {} }}",
        f.member_pods,
        f.elsewhere,
        n = f.n
    ));
    mesh.hub.sh(&format!(
        "nft 'table inet watch {{ chain post {{ type filter hook postrouting priority 300; oifname \"kilo0\" {} daddr {} counter; }}; }}'",
        f.ip(),
        f.elsewhere
    ));
    let forwarded = || {
        assert!(request(&mesh.member_pod, f.elsewhere, 80).is_err());
        let chain = mesh.hub.sh("nft list chain inet watch post");
        let packets = chain.split("counter packets ").nth(1).unwrap();
        packets.split(' ').next().unwrap().parse::<u64>().unwrap()
    };
    assert_eq!(forwarded(), 0);
    mesh.hub.nft("delete table inet clustermesh");
    assert_ne!(forwarded(), 0, "without the table the packets must pass");
}

// threat: node-listener
fn host_listeners_are_open_only_at_listener_addresses(f: &'static Family) {
    let mesh = Mesh::new(f);
    let any = if f.n == 4 { "0.0.0.0" } else { "::" };
    serve(&mesh.hub, any, 22);
    serve(&mesh.hub_pod, f.hub_pod, 8080);
    mesh.hub.sh(&format!(
        "nft 'table {ip} proxy {{ chain pre {{ type nat hook prerouting priority -100; fib daddr type local tcp dport 30080 dnat to {pod}:8080; }}; }}'",
        ip = f.ip(),
        pod = f.url(f.hub_pod),
    ));
    // Inside the cluster, the listeners are reached at the WireGuard address, at the address on the pods' bridge and by NodePort. The
    // policy allows the networks of both addresses, so it is not the policy that drops the member's packets below.
    for address in [f.hub_wireguard, f.hub_bridge] {
        assert_eq!(source_of(&mesh.hub_pod, address, 22), f.hub_pod);
    }
    assert_eq!(source_of(&mesh.hub2, f.hub, 30080), f.hub2);
    // At a listener address the ports are open to the other member.
    for port in [22, 30080] {
        assert_eq!(source_of(&mesh.member_pod, f.hub, port), f.member_pod);
    }
    let udp = mesh
        .hub
        .enter(|| UdpSocket::bind((any.parse::<IpAddr>().unwrap(), 161)).unwrap());
    udp.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let client = mesh.member_pod.enter(|| UdpSocket::bind((f.member_pod, 0)).unwrap());
    let received = |to: &str| {
        client
            .send_to(to.as_bytes(), (to.parse::<IpAddr>().unwrap(), 161))
            .unwrap();
        let mut buffer = [0; 64];
        let (length, _) = udp.recv_from(&mut buffer).ok()?;
        Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
    };
    wait_until("a datagram at a listener address", Duration::from_secs(60), || {
        received(f.hub).as_deref() == Some(f.hub)
    });
    // Discards late datagrams.
    while udp.recv(&mut [0; 64]).is_ok() {}
    for address in [f.hub_wireguard, f.hub_bridge] {
        for port in [22, 30080] {
            let error = request(&mesh.member_pod, address, port).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{address}:{port} {error}");
        }
        assert_eq!(received(address), None, "{address}");
        assert!(mesh.member_pod.pings_patiently(address), "{address}");
    }
    // The node opens a connection with its WireGuard address as the source, and receives the replies.
    serve(&mesh.member_pod, f.member_pod, 8080);
    assert_eq!(source_of(&mesh.hub, f.member_pod, 8080), f.hub_wireguard);
}

// threat: policy-removed
fn emptied_allow_list_blocks_an_open_connection(f: &'static Family) {
    use std::io::{Read, Write};
    let mesh = Mesh::new(f);
    let listener = mesh
        .hub_pod
        .enter(|| std::net::TcpListener::bind((f.hub_pod, 8080)).unwrap());
    let mut client = path::connect(&mesh.member_pod, f.hub_pod, 8080);
    let (mut server, _) = listener.accept().unwrap();
    let mut byte = [0];
    client.write_all(b"a").unwrap();
    server.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    server.read_exact(&mut byte).unwrap();
    server.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let mut without = mesh.hub_inputs.clone();
    policy_of(&mut without).allow.clear();
    apply(&mesh.hub, &without);
    client.write_all(b"b").unwrap();
    assert_eq!(
        server.read_exact(&mut byte).unwrap_err().kind(),
        std::io::ErrorKind::WouldBlock
    );
    apply(&mesh.hub, &mesh.hub_inputs);
    wait_for("the connection to continue", Duration::from_secs(60), || {
        server.read_exact(&mut byte).ok()
    });
    assert_eq!(&byte, b"b");
}

// threat: closed-member-continues
fn closed_policy_blocks_open_connections_both_ways(f: &'static Family) {
    use std::io::{Read, Write};
    let mesh = Mesh::new(f);
    let open = |from: &NetNs, to: &NetNs, at: &str, port| {
        let listener = to.enter(|| std::net::TcpListener::bind((at, port)).unwrap());
        let client = path::connect(from, at, port);
        let (server, _) = listener.accept().unwrap();
        (client, server, listener)
    };
    let mut ends = [
        open(&mesh.member_pod, &mesh.hub_pod, f.hub_pod, 8080),
        open(&mesh.hub_pod, &mesh.member_pod, f.member_pod, 8080),
        // The client's address is the WireGuard address, which is a published source under any policy.
        open(&mesh.hub, &mesh.member_pod, f.member_pod, 8081),
    ];
    let mut exchange = |text: &[u8; 1], at_most| {
        let mut received = Vec::new();
        for (client, server, _) in &mut ends {
            let mut byte = [0];
            for end in [&*client, &*server] {
                end.set_read_timeout(Some(at_most)).unwrap();
            }
            client.write_all(text).unwrap();
            received.push(server.read_exact(&mut byte).is_ok());
            server.write_all(text).unwrap();
            received.push(client.read_exact(&mut byte).is_ok());
        }
        received
    };
    let short = Duration::from_millis(300);
    assert_eq!(exchange(b"a", Duration::from_secs(60)), [true; 6]);
    // The policy still allows everything, and the Peer still exists.
    let mut closed = mesh.hub_inputs.clone();
    policy_of(&mut closed).closed = true;
    apply(&mesh.hub, &closed);
    assert_eq!(exchange(b"b", short), [false; 6]);
    assert!(!mesh.hub_pod.pings(f.member_pod) && !mesh.member_pod.pings(f.hub_pod));
    apply(&mesh.hub, &mesh.hub_inputs);
    wait_for("all connections to continue", Duration::from_secs(60), || {
        (exchange(b"c", short) == [true; 6]).then_some(())
    });
}

// threat: unencrypted-packet
fn mesh_packets_never_leave_unencrypted_without_a_tunnel(f: &'static Family) {
    let mesh = Mesh::new(f);
    let try_all = || {
        for to in [f.hub_pod, f.service, f.hub_wireguard] {
            let _ = request(&mesh.member_pod, to, 8080);
            let _ = request(&mesh.member, to, 8080);
            let _ = mesh.member_pod.output("ping", &["-n", "-c1", "-W1", to]);
        }
    };
    let filter = format!(
        "dst net {} or dst net {} or dst net {}",
        f.hub_pod_net, f.services, f.hub_wireguards
    );
    let assert_sends_nothing = |why: &str| {
        let capture = Capture::start(&mesh.member, "eth0", &filter);
        try_all();
        let seen = capture.finish(&mesh.member, f.member, f.switch);
        assert_eq!(seen, Vec::<String>::new(), "{why}");
    };
    mesh.member.ip("link set kilo0 down");
    for ns in [&mesh.member, &mesh.member_pod] {
        // The client gets an error (exit code 7 of curl) before the timeout. TCP over IPv6 reports it at the first retransmission,
        // after 1 s.
        let output = ns.output(
            "curl",
            &["-sS", "-m", "60", &format!("http://{}:8080", f.url(f.hub_pod))],
        );
        assert_eq!(
            output.status.code(),
            Some(7),
            "{}: {}",
            ns.name,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    assert_sends_nothing("the device is down");
    mesh.member.ip("link del kilo0");
    assert_sends_nothing("the device is deleted");
    let mut without = mesh.member_inputs.clone();
    without.peers.clear();
    path::apply_without_device(&mesh.member, &without);
    assert_sends_nothing("the Peers are deleted");
    mesh.member.sh("ip rule flush; ip rule add pref 32766 lookup main; ip -6 rule flush; ip -6 rule add pref 32766 lookup main; ip rule add pref 0 lookup local; ip -6 rule add pref 0 lookup local");
    assert_sends_nothing("the rules are flushed");
    mesh.member.sh("nft delete table inet clustermesh");
    let capture = Capture::start(&mesh.member, "eth0", &filter);
    try_all();
    assert_ne!(
        capture.finish(&mesh.member, f.member, f.hub),
        Vec::<String>::new(),
        "the capture must show packets when routes and table are missing"
    );
}

// threat: forged-mesh-source
fn spoofed_mesh_source_is_not_forwarded(f: &'static Family) {
    let mesh = Mesh::new(f);
    serve(&mesh.hub_pod, f.hub_pod, 8080);
    // hub2, a machine on the hub's underlay, sends from an address of the member.
    mesh.hub2
        .ip(&format!("addr add {}/{} dev eth0{}", f.member_pod, f.host, f.nodad));
    let reaches_hub_pod = |ns: &NetNs| {
        let url = format!("http://{}:8080", f.url(f.hub_pod));
        ns.output("curl", &["-sS", "-m", "1", "--interface", f.member_pod, &url])
            .status
            .success()
    };
    wait_until("hub2 to reach the hub", Duration::from_secs(60), || {
        mesh.hub2.pings(f.hub)
    });
    // Let only the chain path_in drop packets: empty the chain `leave`, which drops the replies, and route the replies to hub2.
    mesh.hub.sh("nft flush chain inet clustermesh leave");
    mesh.hub.ip(&format!(
        "route add {}/{} via {} table 99",
        f.member_pod, f.host, f.hub2
    ));
    mesh.hub.ip(&format!("-{} rule add pref 500 lookup 99", f.n));
    assert!(!reaches_hub_pod(&mesh.hub2));
    wait_until("one rule to drop the packet", Duration::from_secs(60), || {
        let path_in = mesh.hub.sh("nft list chain inet clustermesh path_in");
        let rules = path_in.lines().filter(|line| line.contains(" drop comment "));
        rules.filter(|line| !line.contains("packets 0 ")).count() == 1
    });
    mesh.hub.sh("nft flush chain inet clustermesh path_in");
    wait_until(
        "the packet to be forwarded without the chain",
        Duration::from_secs(60),
        || reaches_hub_pod(&mesh.hub2),
    );
}

fn mss_fits_the_smaller_device_mtu(f: &'static Family) {
    let mesh = Mesh::new(f);
    serve(&mesh.hub_pod, f.hub_pod, 8080);
    serve(&mesh.member_pod, f.member_pod, 8080);
    // The member's device has an MTU of 1380, the hub's device 1420: the MSS in each SYN must fit both.
    for (server, from, to) in [
        (&mesh.hub_pod, &mesh.member_pod, f.hub_pod),
        (&mesh.member_pod, &mesh.hub_pod, f.member_pod),
    ] {
        let capture = Capture::start(server, "eth0", &format!("dst host {to} and dst port 8080"));
        source_of(from, to, 8080);
        let seen = capture.finish(server, to, if to == f.hub_pod { f.hub_bridge } else { f.member_bridge });
        let syn = seen.iter().find(|line| line.contains("Flags [S]")).expect("a SYN");
        let size = 1380 - f.headers;
        assert!(syn.contains(&format!("mss {size},")), "wanted {size}: {syn}");
    }
}
