//! Measures route lookups, and how long it takes to add and to read 10,000 routes, as many as the agent has for 5,000 peers. Uses a
//! network namespace of its own. Needs root.
//! Run it with `cargo run --release -p clustermesh-netlink --example timing`.

use std::{error::Error, net::Ipv4Addr, time::Instant};

use clustermesh_netlink::{Protocol, Socket, link};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    link::InfoKind,
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteProtocol, RouteScope, RouteType},
};
use nix::sched::{CloneFlags, unshare};

const PEERS: u32 = 5_000;
/// The agent has two routes for each peer: to its pod CIDR and to its WireGuard address. Here all routes are `/32`.
const ROUTES: u32 = 10_000;
/// Routing table of the added routes.
const TABLE: u32 = 5182;

fn main() -> Result<(), Box<dyn Error>> {
    unshare(CloneFlags::CLONE_NEWNET)?;
    let socket = Socket::open(Protocol::Route)?;
    let index = link::create(&socket, "probe", InfoKind::Bridge)?;
    link::set_up(&socket, index)?;
    let route = |length, to: u32, table| {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        message.header.destination_prefix_length = length;
        message.header.protocol = RouteProtocol::Static;
        message.header.scope = RouteScope::Link;
        message.header.kind = RouteType::Unicast;
        message.attributes = vec![
            RouteAttribute::Destination(RouteAddress::Inet(Ipv4Addr::from_bits(to))),
            RouteAttribute::Table(table),
            RouteAttribute::Oif(index),
        ];
        RouteNetlinkMessage::NewRoute(message)
    };
    // A default route in the main table (RT_TABLE_MAIN), which the lookups find.
    socket.create(&route(0, 0, 254))?;
    let first = Ipv4Addr::new(10, 0, 0, 0).to_bits();

    for _ in 0..5 {
        let start = Instant::now();
        for peer in 0..PEERS {
            let mut message = RouteMessage::default();
            message.header.address_family = AddressFamily::Inet;
            message.header.destination_prefix_length = 32;
            let to = RouteAddress::Inet(Ipv4Addr::from_bits(first + peer));
            message.attributes.push(RouteAttribute::Destination(to));
            socket.get(&RouteNetlinkMessage::GetRoute(message))?;
        }
        println!("{PEERS} route lookups: {:?}", start.elapsed());
    }

    let start = Instant::now();
    for number in 0..ROUTES {
        socket.create(&route(32, first + number, TABLE))?;
    }
    println!("{ROUTES} routes added: {:?}", start.elapsed());

    let mut filter = RouteMessage::default();
    filter.header.address_family = AddressFamily::Inet;
    filter.attributes.push(RouteAttribute::Table(TABLE));
    let request = RouteNetlinkMessage::GetRoute(filter);
    for _ in 0..5 {
        let start = Instant::now();
        let routes = socket.dump(&request, Some)?;
        println!("{} routes read: {:?}", routes.len(), start.elapsed());
    }
    Ok(())
}
