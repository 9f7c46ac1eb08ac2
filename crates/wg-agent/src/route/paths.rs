//! Looks up the kernel's route to an address: the path MTU and the interface. [`clustermesh_agent_core::mtu`] computes
//! the tunnel's MTU from the path MTUs to the peers' endpoints.
//!
//! The path MTU is the MTU of the route, or of a learned exception (ICMP "fragmentation needed" or "packet too big"), else
//! of the interface. The kernel sends no notification when it learns an exception, so callers repeat the lookup.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use clustermesh_agent_core::prefixes::Family;
use clustermesh_netlink::{Error, Protocol, Socket, link};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::LinkAttribute,
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteType},
};

use super::address_family;

/// The index of a route's interface, and the MTU of the route or of a learned exception, if there is one.
type RouteInfo = (u32, Option<u32>);

/// The path MTU in bytes to each address in `to` for packets with `mark`, in the caller's network namespace. Addresses
/// without a route, or on this node, are left out.
///
/// # Errors
/// The netlink socket cannot be opened or fails, or the kernel cannot look up an interface.
pub fn mtus(to: &BTreeSet<IpAddr>, mark: u32) -> Result<BTreeMap<IpAddr, u16>, Error> {
    if to.is_empty() {
        return Ok(BTreeMap::new());
    }
    let socket = Socket::open(Protocol::Route)?;
    let routes = routes(&socket, to, mark)?;
    let link_mtus = pick_from_links(&socket, &routes, |attributes| {
        let mtu = attributes
            .iter()
            .find_map(|a| if let LinkAttribute::Mtu(m) = a { Some(*m) } else { None });
        Some(mtu.unwrap_or(u32::MAX))
    })?;
    let mtu = |(to, (interface, route_mtu)): (IpAddr, RouteInfo)| {
        let link_mtu = *link_mtus.get(&interface)?; // `None` = the interface was deleted meanwhile
        Some((to, u16::try_from(route_mtu.unwrap_or(link_mtu)).unwrap_or(u16::MAX)))
    };
    Ok(routes.into_iter().filter_map(mtu).collect())
}

/// The interface by which this node's own, unmarked packets to each address in `to` leave, in the caller's network namespace.
/// Addresses without a route, or on this node, are left out.
///
/// # Errors
/// The netlink socket cannot be opened or fails, or the kernel cannot look up an interface.
pub fn interfaces(to: &BTreeSet<IpAddr>) -> Result<BTreeMap<IpAddr, String>, Error> {
    let socket = Socket::open(Protocol::Route)?;
    let routes = routes(&socket, to, 0)?;
    let names = pick_from_links(&socket, &routes, |attributes| {
        attributes.iter().find_map(|a| match a {
            LinkAttribute::IfName(name) => Some(name.clone()),
            _ => None,
        })
    })?;
    let name = |(to, (interface, _)): (IpAddr, RouteInfo)| Some((to, names.get(&interface)?.clone()));
    Ok(routes.into_iter().filter_map(name).collect())
}

fn request(to: IpAddr, mark: u32) -> RouteMessage {
    let mut message = RouteMessage::default();
    let family = Family::of(&to.into());
    message.header.address_family = address_family(family);
    message.header.destination_prefix_length = if family == Family::V4 { 32 } else { 128 };
    message.attributes = vec![
        RouteAttribute::Destination(RouteAddress::from(to)),
        RouteAttribute::Mark(mark),
    ];
    message
}

/// `None` = not a unicast route through an interface, for example a local address of this node.
fn route_info(route: &RouteMessage) -> Option<RouteInfo> {
    let interface = route
        .attributes
        .iter()
        .find_map(|a| if let RouteAttribute::Oif(i) = a { Some(*i) } else { None })?;
    let metrics = route.attributes.iter().find_map(|a| {
        if let RouteAttribute::Metrics(m) = a {
            Some(m)
        } else {
            None
        }
    });
    let mtu = metrics.into_iter().flatten().find_map(|m| {
        if let RouteMetric::Mtu(mtu) = m {
            Some(*mtu)
        } else {
            None
        }
    });
    (route.header.kind == RouteType::Unicast).then_some((interface, mtu))
}

/// Looks up the route to each address. Leaves out addresses of this node, and addresses for which the kernel returns an error, for
/// example because they have no route.
fn routes(socket: &Socket, to: &BTreeSet<IpAddr>, mark: u32) -> Result<BTreeMap<IpAddr, RouteInfo>, Error> {
    let mut routes = BTreeMap::new();
    for to in to {
        match socket.get(&RouteNetlinkMessage::GetRoute(request(*to, mark))) {
            Ok(RouteNetlinkMessage::NewRoute(route)) => {
                routes.extend(route_info(&route).map(|route| (*to, route)));
            }
            Ok(_) | Err(Error::Kernel { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(routes)
}

/// Looks up each interface of these routes, and returns the value that `pick` finds in its attributes.
fn pick_from_links<T>(
    socket: &Socket,
    routes: &BTreeMap<IpAddr, RouteInfo>,
    pick: impl Fn(&[LinkAttribute]) -> Option<T>,
) -> Result<BTreeMap<u32, T>, Error> {
    let interfaces: BTreeSet<u32> = routes.values().map(|(interface, _)| *interface).collect();
    let mut found = BTreeMap::new();
    for interface in interfaces {
        if let Some(link) = link::by_index(socket, interface)? {
            found.extend(pick(&link.attributes).map(|value| (interface, value)));
        }
    }
    Ok(found)
}
