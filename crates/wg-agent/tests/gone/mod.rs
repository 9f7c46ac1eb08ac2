//! A sandbox while the firewall table is gone, and on the way to the routes that keep it closed then.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use clustermesh_agent_core::{
    compile::compile,
    firewall::render,
    policy::{Port, Protocol},
    routes::{Change, diff},
};
use wg_agent::route::{Netlink, Routing, converge};

use super::{
    Granted, assert_silent, drain, exchange,
    netns::wait_for,
    path::{Family, Mesh, apply, ask, connect, serve, source_of},
    sandbox, target, udp,
};

/// What came in at sockets that nothing was granted for, by address and port.
fn received(udp: &[UdpSocket], tcp: &[TcpListener]) -> Vec<SocketAddr> {
    let datagrams = udp.iter().filter(|socket| socket.recv_from(&mut [0; 10]).is_ok());
    let connections = tcp.iter().filter(|listener| listener.accept().is_ok());
    let at = datagrams.map(UdpSocket::local_addr);
    at.chain(connections.map(TcpListener::local_addr))
        .map(Result::unwrap)
        .collect()
}

/// Sends to all of these from the sandbox's node without a pause.
fn flood(mesh: &Mesh, udp: &[UdpSocket], tcp: &[TcpListener], stop: &AtomicBool) {
    let mouth = mesh
        .member
        .enter(|| UdpSocket::bind((mesh.f.member_wireguard, 0)))
        .unwrap();
    let to: Vec<SocketAddr> = udp.iter().map(|socket| socket.local_addr().unwrap()).collect();
    while !stop.load(Ordering::Relaxed) {
        for to in &to {
            let _ = mouth.send_to(b"let me in", to);
        }
        for to in tcp.iter().map(|listener| listener.local_addr().unwrap()) {
            let _ = mesh
                .member
                .enter(|| TcpStream::connect_timeout(&to, Duration::from_millis(1)));
        }
    }
}

/// A TCP and a UDP server in a pod, and the same on the node itself.
fn granted(f: &Family) -> [Granted<'static>; 4] {
    use Protocol::{Tcp, Udp};
    [
        (f.hub_pod, Tcp, 8080),
        (f.hub_pod, Udp, 5000),
        (f.hub, Tcp, 8080),
        (f.hub, Udp, 5000),
    ]
}

/// A sandbox that sends without a pause to what is granted to it and to what is not, to a pod and to the node's own
/// addresses, while the table is taken away and written again.
pub(crate) fn a_table_that_is_gone_opens_nothing_in_either_direction_and_serves_again_when_it_is_back(
    f: &'static Family,
) {
    let granted = granted(f);
    let mesh = sandbox(f, &granted);
    serve(&mesh.hub_pod, f.hub_pod, 8080);
    serve(&mesh.hub, f.hub, 8080);
    serve(&mesh.member, f.member_wireguard, 8080);
    let client = udp(&mesh.member, f.member_wireguard, 5001);
    let (pod, node) = (udp(&mesh.hub_pod, f.hub_pod, 5000), udp(&mesh.hub, f.hub, 5000));
    let own = [f.hub, f.hub_wireguard, f.hub_gateway].map(|at| (&mesh.hub, at));
    let closed: Vec<_> = own.into_iter().chain([(&mesh.hub_pod, f.hub_pod)]).collect();
    // Over IPv6 nothing stops a datagram to an address of this very node while there is no table.
    let deaf = closed.iter().filter(|(ns, _)| f.n == 4 || ns.name != mesh.hub.name);
    let deaf: Vec<UdpSocket> = deaf.map(|(ns, at)| udp(ns, at, 5001)).collect();
    let mute = closed
        .iter()
        .map(|(ns, at)| ns.enter(|| TcpListener::bind((*at, 8081)).unwrap()));
    let mute: Vec<TcpListener> = mute.collect();
    deaf.iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
    mute.iter().for_each(|listener| listener.set_nonblocking(true).unwrap());
    let serves = || {
        for server in [&pod, &node] {
            exchange(&client, server);
        }
        for at in [f.hub_pod, f.hub] {
            assert_eq!(source_of(&mesh.member, at, 8080), f.member_wireguard);
        }
    };
    mesh.member
        .ip(&format!("route add {} dev kilo0 table 5182", f.hub_gateway));
    serves();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _end = Stop(&stop);
        scope.spawn(|| flood(&mesh, &deaf, &mute, &stop));
        for gone in ["flush ruleset", "delete table inet clustermesh"] {
            mesh.hub.sh(&format!("nft {gone}"));
            thread::scope(|scope| {
                for to in [f.hub_pod, f.hub] {
                    let member = &mesh.member;
                    scope.spawn(move || assert!(connect(member, to, 8080).is_err(), "{to} answers after {gone}"));
                }
                for from in [&mesh.hub_pod, &mesh.hub] {
                    scope.spawn(move || {
                        let there = connect(from, f.member_wireguard, 8080);
                        assert!(there.is_err(), "{} calls the sandbox after {gone}", from.name);
                    });
                }
            });
            for server in if f.n == 4 { vec![&pod, &node] } else { vec![&pod] } {
                drain(server);
                client.send_to(b"granted", server.local_addr().unwrap()).unwrap();
                assert_silent(server, &format!("granted, and comes in after {gone}"));
            }
            drain(&client);
            for from in [&mesh.hub_pod, &mesh.hub] {
                let any = from.enter(|| UdpSocket::bind((if f.n == 4 { "0.0.0.0" } else { "::" }, 0)).unwrap());
                let _ = any.send_to(b"to the sandbox", client.local_addr().unwrap());
            }
            let _ = pod.send_to(b"to the sandbox", client.local_addr().unwrap());
            assert_silent(&client, &format!("comes to the sandbox after {gone}"));
            apply(&mesh.hub, &target(&mesh, f, &granted, &[]));
            serves();
            assert_eq!(received(&deaf, &mute), [], "beyond the grants, after {gone}");
        }
    });
}

/// Each time that the table goes, some packet of the flood has passed the first of its chains and not yet the next: rules between
/// them that say nothing make that moment long.
pub(crate) fn a_table_that_goes_while_packets_are_between_its_chains_lets_none_of_them_on(f: &'static Family) {
    use Protocol::Udp;
    let granted = [(f.hub_pod, Udp, 5000), (f.hub_pod, Udp, 5002), (f.hub, Udp, 10250)];
    let mesh = sandbox(f, &granted);
    let rules = "meta length 0 counter\n".repeat(5000);
    mesh.hub.nft(&format!(
        "table inet long {{ chain pre {{ type filter hook prerouting priority filter; policy accept;\n{rules}}}\n}}\n"
    ));
    let client = udp(&mesh.member, f.member_wireguard, 5001);
    let [open, revoked, draining, closed] = [5000, 5002, 5003, 5001].map(|port| udp(&mesh.hub_pod, f.hub_pod, port));
    let infrastructure = udp(&mesh.hub, f.hub, 10250);
    for server in [&open, &revoked] {
        exchange(&client, server);
    }
    let mut left = target(&mesh, f, &[granted[0], granted[2]], &[(f.hub_pod, Udp, 5003)]);
    left.policies[0].infrastructure_ports.insert(Port {
        protocol: Udp,
        port: 10250,
    });
    apply(&mesh.hub, &left);
    drain(&revoked);
    drain(&client);
    let table = render(&compile(&left).firewall);
    let heard = |socket: &UdpSocket| {
        let came = socket.recv_from(&mut [0; 10]).ok();
        came.map(|_| socket.local_addr().unwrap())
    };
    let mut came = Vec::new();
    for (from, to) in [
        (&client, &closed),
        (&client, &draining),
        (&client, &infrastructure),
        (&revoked, &client),
    ] {
        // Over IPv6 nothing stops a datagram to an address of this very node while there is no table.
        if f.n == 6 && to.local_addr().unwrap() == infrastructure.local_addr().unwrap() {
            continue;
        }
        to.set_nonblocking(true).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let _end = Stop(&stop);
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    // A link that is full may say so.
                    let _ = from.send_to(b"let me in", to.local_addr().unwrap());
                }
            });
            for _ in 0..60 {
                mesh.hub.nft("delete table inet clustermesh");
                mesh.hub.nft(&table);
            }
        });
        came.extend(heard(to));
    }
    assert_eq!(came, []);
    client.set_nonblocking(false).unwrap();
    exchange(&client, &open);
}

/// As after a version whose sandboxes' routes lay among the mesh's.
pub(crate) fn what_is_granted_goes_on_at_every_step_from_routes_without_the_lock(f: &'static Family) {
    let granted = granted(f);
    let mesh = sandbox(f, &granted);
    serve(&mesh.hub_pod, f.hub_pod, 8080);
    serve(&mesh.hub, f.hub, 8080);
    let client = udp(&mesh.member, f.member_wireguard, 5001);
    let servers = [udp(&mesh.hub_pod, f.hub_pod, 5000), udp(&mesh.hub, f.hub, 5000)];
    let wanted = target(&mesh, f, &granted, &[]);
    let mut before = wanted.clone();
    before.policies[0].sandbox = false;
    before.peers[0].requires_policy = None;
    let [before, wanted] = [before, wanted].map(|inputs| compile(&inputs).routes);
    let serves = || {
        for server in &servers {
            exchange(&client, server);
        }
        for at in [f.hub_pod, f.hub] {
            assert_eq!(ask(&mesh.member, at, 8080).unwrap(), f.member_wireguard);
        }
    };
    let step = |change: Option<&Change>| {
        mesh.hub.enter(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let mut routing = Netlink::open("kilo0".parse().unwrap()).unwrap();
                match change {
                    Some(change) => routing.apply(change).await.unwrap(),
                    None => assert!(converge(&mut routing, &before).await.unwrap().failed.is_empty()),
                }
            });
        });
        println!("after {change:?}");
        serves();
    };
    step(None);
    let changes = diff(&before, &wanted).unwrap();
    assert!(changes.len() >= 7, "{changes:?}");
    changes.iter().for_each(|change| step(Some(change)));
    // Another program's rule by ports: a reverse path check now looks at ports, too, the other way round.
    mesh.hub
        .ip(&format!("-{} rule add pref 5 ipproto udp dport 9 lookup main", f.n));
    serves();
    if f.n == 4 {
        let closed = udp(&mesh.hub, f.hub, 5001);
        mesh.hub.sh("nft flush ruleset");
        client.send_to(b"anyone?", closed.local_addr().unwrap()).unwrap();
        assert_silent(&closed, "a port that is not granted");
    }
}

/// The kernel keeps a connection's mark and its routes with the socket.
pub(crate) fn a_connection_to_the_node_itself_stays_closed_after_its_grant_without_a_table_too(f: &'static Family) {
    let endpoint = [(f.hub, Protocol::Tcp, 8080)];
    let mesh = sandbox(f, &endpoint);
    let listener = mesh.hub.enter(|| TcpListener::bind((f.hub, 8080)).unwrap());
    let mut client = wait_for("a connection", Duration::from_secs(10), || {
        connect(&mesh.member, f.hub, 8080).ok()
    });
    let (mut server, _) = listener.accept().unwrap();
    for end in [&server, &client] {
        end.set_read_timeout(Some(Duration::from_millis(700))).unwrap();
    }
    let mut byte = [0];
    client.write_all(b"a").unwrap();
    server.read_exact(&mut byte).unwrap();
    apply(&mesh.hub, &target(&mesh, f, &[], &[]));
    client.write_all(b"b").unwrap();
    assert!(server.read_exact(&mut byte).is_err());
    mesh.hub.sh("nft flush ruleset");
    // It is sent again all the time. Over IPv6 what is for the node itself is heard.
    if f.n == 4 {
        assert!(server.read_exact(&mut byte).is_err(), "it is heard");
    }
    let _ = server.write_all(b"c");
    assert!(client.read_exact(&mut byte).is_err(), "it is answered");
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
