//! A sandbox's node that uses up what others need, too: entries in the table of connections, and source ports toward one backend.

use std::{
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use clustermesh_agent_core::policy::Protocol::{Tcp, Udp};
use socket2::{Domain, Socket, Type};
use wg_agent::conntrack;

use super::{
    dropped, exchange,
    netns::NetNs,
    path::{Family, Mesh, apply, connect, serve},
    sandbox, target, udp,
};

const BACKEND: u16 = 5000;
const QUIET: u16 = 5002;

/// The next address.
fn after(address: &str) -> String {
    match address.parse().unwrap() {
        IpAddr::V4(v4) => std::net::Ipv4Addr::from(u32::from(v4) + 1).to_string(),
        IpAddr::V6(v6) => std::net::Ipv6Addr::from(u128::from(v6) + 1).to_string(),
    }
}

/// One datagram from each of these ports.
fn flood(ns: &NetNs, from: &str, ports: Range<u16>, to: (&str, u16)) {
    let [from, to] = [(from, 0), to].map(|(at, port)| SocketAddr::new(at.parse().unwrap(), port));
    ns.enter(|| {
        for port in ports {
            let socket = UdpSocket::bind((from.ip(), port)).expect("bind");
            let _ = socket.send_to(b"and me", to);
        }
    });
}

/// Connections to this port, as another program than ours reads them.
fn entries(ns: &NetNs, f: &Family, port: u16) -> usize {
    let list = format!("conntrack -L -f ipv{} -p udp --orig-port-dst {port} 2>/dev/null", f.n);
    ns.sh(&list).lines().count()
}

/// A connection from this address of the namespace.
fn connects(ns: &NetNs, from: &str, to: (&str, u16)) -> std::io::Result<()> {
    let [from, to] = [(from, 0), to].map(|(at, port)| SocketAddr::new(at.parse().unwrap(), port));
    ns.enter(|| {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        socket.bind(&from.into())?;
        socket.connect_timeout(&to.into(), Duration::from_secs(5))?;
        drop(TcpStream::from(socket));
        Ok(())
    })
}

/// The sandbox has a second node here, by an address of its own.
fn second_node(mesh: &Mesh, f: &Family) -> String {
    let second = after(f.member_wireguard);
    mesh.member
        .ip(&format!("addr add {second}/{} dev lo{}", f.host, f.nodad));
    // Its own root keeps nothing from any source.
    mesh.member.sh("nft delete table inet clustermesh");
    second
}

pub(crate) fn a_flood_of_new_connections_from_one_of_a_sandboxs_nodes_is_bounded_and_keeps_nobody_out(
    f: &'static Family,
) {
    let granted = [
        (f.hub_pod, Udp, BACKEND),
        (f.hub_pod, Udp, QUIET),
        (f.hub_pod, Tcp, 8080),
    ];
    let mesh = sandbox(f, &granted);
    let second = second_node(&mesh, f);
    serve(&mesh.hub_pod, f.hub_pod, 8080);
    let _backend = udp(&mesh.hub_pod, f.hub_pod, BACKEND);
    let mut inputs = target(&mesh, f, &granted, &[]);
    inputs.peers[0]
        .allowed_ips
        .push(second.parse::<IpAddr>().unwrap().into());
    inputs.new_flows = 0;
    apply(&mesh.hub, &inputs);
    let (open, quiet) = (
        udp(&mesh.member, f.member_wireguard, 999),
        udp(&mesh.hub_pod, f.hub_pod, QUIET),
    );
    exchange(&open, &quiet);

    // What is denied leaves nothing behind; what is granted does, without a bound.
    flood(&mesh.member, f.member_wireguard, 1000..6000, (f.hub_pod, BACKEND + 1));
    assert_eq!(entries(&mesh.hub, f, BACKEND + 1), 0);
    flood(&mesh.member, f.member_wireguard, 1000..6000, (f.hub_pod, BACKEND));
    assert_eq!(entries(&mesh.hub, f, BACKEND), 5000);
    let seen = mesh.hub.enter(conntrack::read).expect("the table");
    assert!(seen.entries >= 5000 && seen.limit > 0, "{seen:?}");

    inputs.new_flows = 50;
    apply(&mesh.hub, &inputs);
    mesh.hub.sh(&format!(
        "conntrack -D -f ipv{} -p udp --orig-port-dst {BACKEND} 2>&1",
        f.n
    ));
    let before = dropped(&mesh.hub, "from_sandbox");
    flood(&mesh.member, f.member_wireguard, 1000..6000, (f.hub_pod, BACKEND));
    let (kept, more) = (
        entries(&mesh.hub, f, BACKEND),
        dropped(&mesh.hub, "from_sandbox") - before,
    );
    assert!(
        (100..2500).contains(&kept) && more > 2500,
        "{kept} kept, {more} dropped"
    );

    // While it goes on: what is open, another node of the sandbox, and whoever is at home here.
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                flood(&mesh.member, f.member_wireguard, 1000..6000, (f.hub_pod, BACKEND));
            }
        });
        let work = || {
            exchange(&open, &quiet);
            for _ in 0..20 {
                connects(&mesh.member, &second, (f.hub_pod, 8080)).expect("another node of the sandbox");
                connect(&mesh.hub2_pod, f.hub_pod, 8080).expect("a pod of the target's");
            }
        };
        let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        stop.store(true, Ordering::Relaxed);
        worked.unwrap();
    });
}

pub(crate) fn source_ports_used_up_toward_one_backend_cost_that_node_alone_and_are_counted(f: &'static Family) {
    let granted = [(f.hub_pod, Udp, BACKEND), (f.hub_pod, Udp, QUIET)];
    let mesh = sandbox(f, &granted);
    let backend = udp(&mesh.hub_pod, f.hub_pod, BACKEND);
    let quiet = udp(&mesh.hub_pod, f.hub_pod, QUIET);
    let other = after(f.member_pod);
    mesh.member_pod
        .ip(&format!("addr add {other}/{} dev eth0{}", f.length, f.nodad));
    let first = udp(&mesh.member_pod, f.member_pod, 600);
    exchange(&first, &backend);
    let failed = || {
        let table = mesh.member.enter(conntrack::read).expect("the table");
        table.failures["insert_failed"]
    };
    let before = failed();
    // A translation leaves a port below 512 below 512 (Linux, nf_nat_core.c): so few are soon used up.
    flood(&mesh.member_pod, f.member_pod, 1..512, (f.hub_pod, BACKEND));
    assert_eq!((entries(&mesh.member, f, BACKEND), failed() - before), (512, 0));
    flood(&mesh.member_pod, &other, 1..512, (f.hub_pod, BACKEND));
    assert_eq!((entries(&mesh.member, f, BACKEND), failed() - before), (512, 511));
    let said = mesh.member.sh("conntrack -S");
    let count = |line: &str| {
        line.split("insert_failed=")
            .nth(1)?
            .split(' ')
            .next()?
            .parse::<u64>()
            .ok()
    };
    assert_eq!(said.lines().filter_map(count).sum::<u64>(), failed(), "{said}");

    // The same toward another backend, and what is open.
    exchange(&udp(&mesh.member_pod, &other, 7), &quiet);
    backend.set_nonblocking(true).expect("no wait");
    while backend.recv_from(&mut [0; 10]).is_ok() {}
    backend.set_nonblocking(false).expect("wait");
    exchange(&first, &backend);
    // And another node.
    let second = second_node(&mesh, f);
    let mut inputs = target(&mesh, f, &granted, &[]);
    inputs.peers[0]
        .allowed_ips
        .push(second.parse::<IpAddr>().unwrap().into());
    apply(&mesh.hub, &inputs);
    exchange(&udp(&mesh.member, &second, 7), &backend);
}
