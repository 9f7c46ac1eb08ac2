//! A sandbox's packets through the data path of a target's node: what is granted answers, and nothing else, whatever root on
//! the sandbox's node sends. A veth pair named kilo0 stands in for the tunnel, so that WireGuard stops nothing here. Needs
//! root, nft and tcpdump.

mod exhausted;
mod gone;
#[allow(unreachable_pub, reason = "shared between test binaries")]
mod netns;
mod path;

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    thread,
    time::Duration,
};

use clustermesh_agent_core::{
    compile::{Inputs, compile},
    policy::{Policy, Port, Protocol},
};
use exhausted::{
    a_flood_of_new_connections_from_one_of_a_sandboxs_nodes_is_bounded_and_keeps_nobody_out,
    source_ports_used_up_toward_one_backend_cost_that_node_alone_and_are_counted,
};
use gone::{
    a_connection_to_the_node_itself_stays_closed_after_its_grant_without_a_table_too,
    a_table_that_goes_while_packets_are_between_its_chains_lets_none_of_them_on,
    a_table_that_is_gone_opens_nothing_in_either_direction_and_serves_again_when_it_is_back,
    what_is_granted_goes_on_at_every_step_from_routes_without_the_lock,
};
use netns::{NetNs, wait_for};
use path::{Family, Mesh, V4, V6, apply, connect, serve, source_of};
use rustix::net::sockopt::{Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover};
use wg_agent::firewall::{Keeper, Nft};

/// The same test for both families.
macro_rules! both {
    ($($name:ident)*) => { mod ipv4 { $(#[test] fn $name() { super::$name(&super::V4) })* } mod ipv6 { $(#[test] fn $name() { super::$name(&super::V6) })* } };
}

both! {
    what_is_granted_answers_and_everything_else_is_dropped_and_counted
    nobody_here_opens_a_connection_to_a_sandbox_and_what_it_answers_is_dropped
    a_stream_of_datagrams_ends_with_its_grant_in_both_directions
    an_endpoint_that_drains_keeps_what_is_open_and_takes_nothing_new
    icmp_errors_return_only_while_their_flow_is_granted
    the_first_datagram_of_a_flow_is_told_that_it_is_too_big
    grants_go_by_themselves_when_nobody_renews_them
    a_table_that_another_hand_changed_does_not_stand
    a_table_that_is_gone_opens_nothing_in_either_direction_and_serves_again_when_it_is_back
    a_table_that_goes_while_packets_are_between_its_chains_lets_none_of_them_on
    what_is_granted_goes_on_at_every_step_from_routes_without_the_lock
    a_connection_to_the_node_itself_stays_closed_after_its_grant_without_a_table_too
    a_flood_of_new_connections_from_one_of_a_sandboxs_nodes_is_bounded_and_keeps_nobody_out
    source_ports_used_up_toward_one_backend_cost_that_node_alone_and_are_counted
}

type Granted<'a> = (&'a str, Protocol, u16);

fn endpoints(granted: &[Granted<'_>]) -> std::collections::BTreeSet<(IpAddr, Port)> {
    let port = |protocol, port| Port { protocol, port };
    granted
        .iter()
        .map(|(at, protocol, number)| (at.parse().unwrap(), port(*protocol, *number)))
        .collect()
}

/// The hub's node where the member is a sandbox.
fn target(mesh: &Mesh, f: &Family, granted: &[Granted<'_>], draining: &[Granted<'_>]) -> Inputs {
    let mut inputs = mesh.hub_inputs.clone();
    let range = [f.member_wireguards.parse().unwrap()];
    inputs.policies[0] = Policy {
        sources: range.into(),
        networks: range.into(),
        allow: Vec::new(),
        sandbox: true,
        granted: endpoints(granted),
        draining: endpoints(draining),
        revision: "1".to_owned(),
        ..inputs.policies[0].clone()
    };
    let peer = &mut inputs.peers[0];
    peer.endpoint = None;
    peer.allowed_ips = vec![f.member_wireguard.parse::<IpAddr>().unwrap().into()];
    peer.requires_policy = Some("other@1".to_owned());
    inputs
}

/// Both nodes; the sandbox's sends wherever it likes.
fn sandbox(f: &'static Family, granted: &[Granted<'_>]) -> Mesh {
    let mesh = Mesh::new(f);
    apply(&mesh.hub, &target(&mesh, f, granted, &[]));
    let mut own = mesh.member_inputs.clone();
    own.policies[0].allow.clear();
    apply(&mesh.member, &own);
    mesh
}

/// Packets that the rules of a chain dropped.
fn dropped(ns: &NetNs, chain: &str) -> u64 {
    let text = ns.sh(&format!("nft -j list chain inet clustermesh {chain}"));
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let rules = json["nftables"].as_array().unwrap().iter();
    rules
        .filter_map(|object| object["rule"]["expr"].as_array())
        .filter(|rule| rule.iter().any(|part| part.get("drop").is_some()))
        .filter_map(|rule| rule.iter().find_map(|part| part["counter"]["packets"].as_u64()))
        .sum()
}

fn what_is_granted_answers_and_everything_else_is_dropped_and_counted(f: &'static Family) {
    use Protocol::Tcp;
    // What is closed to everyone stays closed, also where a grant names it.
    let mesh = sandbox(
        f,
        &[(f.hub_pod, Tcp, 8080), (f.hub, Tcp, 10250), (f.hub2_pod, Tcp, 6443)],
    );
    for port in [8080, 8081] {
        serve(&mesh.hub_pod, f.hub_pod, port);
    }
    for (at, port) in [
        (f.hub, 9090),
        (f.hub, 10250),
        (f.hub_wireguard, 9090),
        (f.hub_gateway, 9090),
    ] {
        serve(&mesh.hub, at, port);
    }
    for port in [8080, 6443] {
        serve(&mesh.hub2_pod, f.hub2_pod, port);
    }
    serve(&mesh.hub2, f.hub2, 9090);
    // A Service of the hub's whose endpoint is granted: the Service is not.
    mesh.service(&mesh.hub, f.service, f.hub_pod);
    for from in [&mesh.member_pod, &mesh.member] {
        assert_eq!(source_of(from, f.hub_pod, 8080), f.member_wireguard);
    }
    mesh.member
        .ip(&format!("route add {} dev kilo0 table 5182", f.hub_gateway));
    let refused = || -> u64 {
        let chains = ["from_sandbox", "infrastructure"];
        chains.iter().map(|chain| dropped(&mesh.hub, chain)).sum()
    };
    let before = refused();
    let closed = [
        (f.hub_pod, 8081),
        (f.hub, 9090),
        (f.hub, 10250),
        (f.hub_wireguard, 9090),
        (f.hub_gateway, 9090),
        (f.hub2_pod, 8080),
        (f.hub2_pod, 6443),
        (f.hub2, 9090),
        (f.service, 80),
    ];
    thread::scope(|scope| {
        for (to, port) in closed {
            let member = &mesh.member;
            scope.spawn(move || {
                let told = connect(member, to, port).map(|_| ()).map_err(|error| error.kind());
                assert_eq!(told, Err(ErrorKind::TimedOut), "{to}:{port}");
            });
        }
        scope.spawn(|| assert!(!mesh.member.pings(f.hub_pod), "a ping of what is granted"));
        scope.spawn(|| assert!(!mesh.member.pings(f.hub_wireguard), "a ping of the node"));
    });
    let after = refused();
    assert!(after - before >= closed.len() as u64 + 2, "{before} {after}");
}

fn nobody_here_opens_a_connection_to_a_sandbox_and_what_it_answers_is_dropped(f: &'static Family) {
    let mesh = sandbox(f, &[(f.hub_pod, Protocol::Tcp, 8080)]);
    serve(&mesh.member, f.member_wireguard, 8080);
    let fails = |why: &str| {
        for from in [&mesh.hub_pod, &mesh.hub] {
            assert!(connect(from, f.member_wireguard, 8080).is_err(), "{}: {why}", from.name);
        }
    };
    fails("there is no way to it");
    assert_eq!(dropped(&mesh.hub, "to_sandbox"), 0);
    // And if there were one, as the table's own mark is: it never leaves.
    mesh.hub
        .ip(&format!("route add {} dev kilo0 table 5182", f.member_wireguard));
    fails("it never leaves");
    assert!(dropped(&mesh.hub, "to_sandbox") >= 2);
    let before = dropped(&mesh.hub, "from_sandbox");
    // And if it left, and were taken there, the answer would not come in.
    mesh.member.sh("nft delete table inet clustermesh");
    mesh.hub.sh("nft flush chain inet clustermesh to_sandbox");
    fails("the answer is dropped");
    assert!(dropped(&mesh.hub, "from_sandbox") >= before + 2);
}

fn udp(ns: &NetNs, at: &str, port: u16) -> UdpSocket {
    let at = SocketAddr::new(at.parse().unwrap(), port);
    let socket = ns.enter(|| UdpSocket::bind(at)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    socket
}

/// A datagram that somebody sends there and gets answered.
fn exchange(client: &UdpSocket, server: &UdpSocket) -> SocketAddr {
    let to = server.local_addr().unwrap();
    let (_, from) = wait_for("the question", Duration::from_secs(5), || {
        client.send_to(b"question", to).ok()?;
        server.recv_from(&mut [0; 10]).ok()
    });
    server.send_to(b"answer", from).unwrap();
    client.recv_from(&mut [0; 10]).expect("the answer");
    from
}

/// Takes away what was under way, until nothing has come for the socket's time limit. Proves nothing.
fn drain(socket: &UdpSocket) {
    for _ in 0..1000 {
        if let Err(error) = socket.recv_from(&mut [0; 10]) {
            assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
            return;
        }
    }
    panic!("datagrams keep coming to {:?}", socket.local_addr());
}

/// Nothing comes within the socket's time limit.
fn assert_silent(socket: &UdpSocket, why: &str) {
    let mut buffer = [0; 10];
    match socket.recv_from(&mut buffer) {
        Ok((length, from)) => panic!("{:?} from {from}: {why}", String::from_utf8_lossy(&buffer[..length])),
        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}: {why}"),
    }
}

fn a_stream_of_datagrams_ends_with_its_grant_in_both_directions(f: &'static Family) {
    let granted = [(f.hub_pod, Protocol::Udp, 5000)];
    let mesh = sandbox(f, &granted);
    let (client, server) = (
        udp(&mesh.member, f.member_wireguard, 5001),
        udp(&mesh.hub_pod, f.hub_pod, 5000),
    );
    let from = exchange(&client, &server);
    apply(&mesh.hub, &target(&mesh, f, &[], &[]));
    drain(&server);
    drain(&client);
    let before = (dropped(&mesh.hub, "from_sandbox"), dropped(&mesh.hub, "to_sandbox"));
    client.send_to(b"more", server.local_addr().unwrap()).unwrap();
    server.send_to(b"more", from).unwrap();
    assert_silent(&server, "its grant is gone");
    assert_silent(&client, "its grant is gone");
    let after = (dropped(&mesh.hub, "from_sandbox"), dropped(&mesh.hub, "to_sandbox"));
    assert_eq!(after, (before.0 + 1, before.1 + 1));
    apply(&mesh.hub, &target(&mesh, f, &granted, &[]));
    exchange(&client, &server);
}

fn an_endpoint_that_drains_keeps_what_is_open_and_takes_nothing_new(f: &'static Family) {
    let endpoint = [(f.hub_pod, Protocol::Tcp, 8080)];
    let mesh = sandbox(f, &endpoint);
    let listener = mesh.hub_pod.enter(|| TcpListener::bind((f.hub_pod, 8080)).unwrap());
    let mut client = wait_for("a connection", Duration::from_secs(10), || {
        connect(&mesh.member, f.hub_pod, 8080).ok()
    });
    let (mut server, _) = listener.accept().unwrap();
    for end in [&server, &client] {
        end.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    }
    let mut byte = [0];
    apply(&mesh.hub, &target(&mesh, f, &[], &endpoint));
    client.write_all(b"a").unwrap();
    server.read_exact(&mut byte).unwrap();
    server.write_all(b"b").unwrap();
    client.read_exact(&mut byte).unwrap();
    let new = connect(&mesh.member, f.hub_pod, 8080).unwrap_err();
    assert_eq!(new.kind(), ErrorKind::TimedOut);
    apply(&mesh.hub, &target(&mesh, f, &[], &[]));
    client.write_all(b"c").unwrap();
    assert_eq!(server.read_exact(&mut byte).unwrap_err().kind(), ErrorKind::WouldBlock);
}

fn icmp_errors_return_only_while_their_flow_is_granted(f: &'static Family) {
    let granted = [(f.hub_pod, Protocol::Udp, 9)];
    let mesh = sandbox(f, &granted);
    let socket = udp(&mesh.member, f.member_wireguard, 5001);
    let to = SocketAddr::new(f.hub_pod.parse().unwrap(), 9);
    mesh.member.enter(|| socket.connect(to)).unwrap();
    let refused = || {
        let _ = socket.send(b"anyone?");
        let error = socket.recv(&mut [0; 10]).err()?;
        (error.kind() == ErrorKind::ConnectionRefused).then_some(())
    };
    wait_for("port unreachable, said by the pod", Duration::from_secs(5), refused);
    apply(&mesh.hub, &target(&mesh, f, &[(f.hub_pod, Protocol::Udp, 10)], &[]));
    while socket
        .recv(&mut [0; 10])
        .is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
    {}
    assert_eq!(refused(), None, "another port of that endpoint");
}

/// None of such a flow's packets gets far enough for conntrack to keep it.
fn the_first_datagram_of_a_flow_is_told_that_it_is_too_big(f: &'static Family) {
    let mesh = sandbox(f, &[(f.hub_pod, Protocol::Udp, 5000)]);
    mesh.hub.ip("link set cni0 mtu 1300");
    let socket = udp(&mesh.member, f.member_wireguard, 5001);
    if f.n == 4 {
        set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DO).unwrap();
    } else {
        set_ipv6_mtu_discover(&socket, Ipv6PathMtuDiscovery::DO).unwrap();
    }
    let to = SocketAddr::new(f.hub_pod.parse().unwrap(), 5000);
    mesh.member.enter(|| socket.connect(to)).unwrap();
    wait_for("too big", Duration::from_secs(10), || {
        let sent = socket.send(&[0; 1320]).map(drop);
        let told = sent.and_then(|()| socket.recv(&mut [0; 10]).map(drop)).err()?;
        (told.raw_os_error() == Some(libc::EMSGSIZE)).then_some(())
    });
}

fn grants_go_by_themselves_when_nobody_renews_them(f: &'static Family) {
    let granted = [(f.hub_pod, Protocol::Tcp, 8080)];
    let mesh = sandbox(f, &granted);
    serve(&mesh.hub_pod, f.hub_pod, 8080);
    assert_eq!(source_of(&mesh.member, f.hub_pod, 8080), f.member_wireguard);
    let mut inputs = target(&mesh, f, &granted, &[]);
    inputs.grant_timeout = Duration::from_secs(2);
    apply(&mesh.hub, &inputs);
    wait_for("the grant to go", Duration::from_secs(20), || {
        connect(&mesh.member, f.hub_pod, 8080).is_err().then_some(())
    });
    let listed = mesh.hub.sh(&format!("nft list set inet clustermesh grants{}", f.n));
    assert!(!listed.contains("8080"), "{listed}");
}

fn a_table_that_another_hand_changed_does_not_stand(f: &'static Family) {
    let mesh = sandbox(f, &[]);
    let firewall = compile(&target(&mesh, f, &[(f.hub_pod, Protocol::Tcp, 8080)], &[])).firewall;
    let sandbox = format!("sandbox{}", f.n);
    let spoilt = [
        "flush chain inet clustermesh from_sandbox".to_owned(),
        format!("add element inet clustermesh {sandbox} {{ {} }}", f.elsewhere),
        format!(
            "delete element inet clustermesh {sandbox} {{ {} }}",
            f.member_wireguards
        ),
        "insert rule inet clustermesh policy_input accept".to_owned(),
        "flush ruleset".to_owned(),
    ];
    mesh.hub.enter(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut keeper = Keeper::new(Nft::default());
            for line in spoilt {
                keeper.converge(&firewall).await.unwrap();
                keeper.stands(&firewall).await.unwrap();
                assert!(
                    std::process::Command::new("nft").arg(&line).status().unwrap().success(),
                    "{line}"
                );
                assert!(keeper.stands(&firewall).await.is_err(), "{line} unseen");
            }
            // And what is written reads as it should, told by what it says and not only by what it said before.
            keeper.converge(&firewall).await.unwrap();
            let other = compile(&mesh.hub_inputs).firewall;
            assert!(keeper.stands(&other).await.is_err());
        });
    });
}
