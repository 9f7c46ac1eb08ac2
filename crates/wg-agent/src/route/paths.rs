//! Looks up the path MTU to the peers' endpoints, and the interface of a route, as the kernel would route our packets.
//! [`clustermesh_agent_core::mtu`] derives the tunnel's MTU from it.
//!
//! The MTU is that of the route or of a learned exception (ICMP "fragmentation needed" or "packet too big"), else that
//! of the interface. The kernel sends no notification when it learns an exception, so callers repeat the lookup.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    os::fd::{AsRawFd, OwnedFd},
};

use clustermesh_agent_core::prefixes::Family;
use nix::sys::socket::{
    AddressFamily as SocketFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    setsockopt, socket, sockopt::ReceiveTimeout,
};
use rtnetlink::{
    packet_core::{NLM_F_REQUEST, NetlinkMessage, NetlinkPayload},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        link::{LinkAttribute, LinkMessage},
        route::{RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteType},
    },
};

/// Requests in one write. Each answer takes about 4 KiB of the socket's receive buffer, which holds 208 KiB by default.
const BATCH: usize = 16;
/// The kernel answers before the write returns; this timeout is for one that does not.
const RECEIVE_TIMEOUT_SECONDS: i64 = 2;

/// The path MTU in bytes to each address in `to` for packets with `mark`, in the caller's network namespace. Addresses
/// without a route, or on this node, are left out.
///
/// # Errors
/// No netlink socket, or no answer.
pub fn mtus(to: &BTreeSet<IpAddr>, mark: u32) -> io::Result<BTreeMap<IpAddr, u16>> {
    if to.is_empty() {
        return Ok(BTreeMap::new());
    }
    let socket = RouteQuery::open()?;
    let routes = socket.routes(to, mark)?;
    let link_mtus = socket.links(&routes, |attributes| {
        let mtu = attributes
            .iter()
            .find_map(|a| if let LinkAttribute::Mtu(m) = a { Some(*m) } else { None });
        Some(mtu.unwrap_or(u32::MAX))
    })?;
    let mtu = |(to, (interface, route_mtu)): (IpAddr, (u32, Option<u32>))| {
        let link_mtu = *link_mtus.get(&interface)?; // the interface was deleted in the meantime
        Some((to, u16::try_from(route_mtu.unwrap_or(link_mtu)).unwrap_or(u16::MAX)))
    };
    Ok(routes.into_iter().filter_map(mtu).collect())
}

/// The interface by which this host's own packets to each address in `to` leave, in the caller's network namespace.
/// Addresses without a route, or on this node, are left out.
///
/// # Errors
/// No netlink socket, or no answer.
pub fn interfaces(to: &BTreeSet<IpAddr>) -> io::Result<BTreeMap<IpAddr, String>> {
    let socket = RouteQuery::open()?;
    let routes = socket.routes(to, 0)?;
    let names = socket.links(&routes, |attributes| {
        attributes.iter().find_map(|a| match a {
            LinkAttribute::IfName(name) => Some(name.clone()),
            _ => None,
        })
    })?;
    let name = |(to, (interface, _)): (IpAddr, (u32, Option<u32>))| Some((to, names.get(&interface)?.clone()));
    Ok(routes.into_iter().filter_map(name).collect())
}

fn request(to: IpAddr, mark: u32) -> RouteMessage {
    let mut message = RouteMessage::default();
    let family = Family::of(&to.into());
    message.header.address_family = match family {
        Family::V4 => AddressFamily::Inet,
        Family::V6 => AddressFamily::Inet6,
    };
    message.header.destination_prefix_length = if family == Family::V4 { 32 } else { 128 };
    message.attributes = vec![
        RouteAttribute::Destination(RouteAddress::from(to)),
        RouteAttribute::Mark(mark),
    ];
    message
}

/// The interface of a unicast route, and the route's own MTU if it has one.
fn route_info(route: &RouteMessage) -> Option<(u32, Option<u32>)> {
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

/// A netlink socket that sends several requests in one write.
struct RouteQuery(OwnedFd);

impl RouteQuery {
    fn open() -> io::Result<Self> {
        let fd = socket(
            SocketFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkRoute,
        )?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        setsockopt(
            &fd,
            ReceiveTimeout,
            &nix::sys::time::TimeVal::new(RECEIVE_TIMEOUT_SECONDS, 0),
        )?;
        Ok(Self(fd))
    }

    /// Interface and own MTU of the route to each address.
    fn routes(&self, to: &BTreeSet<IpAddr>, mark: u32) -> io::Result<BTreeMap<IpAddr, (u32, Option<u32>)>> {
        let mut routes = BTreeMap::new();
        let targets: Vec<IpAddr> = to.iter().copied().collect();
        for batch in targets.chunks(BATCH) {
            let requests = batch.iter().map(|to| RouteNetlinkMessage::GetRoute(request(*to, mark)));
            for (to, answer) in batch.iter().zip(self.exchange(requests.collect())?) {
                if let Some(RouteNetlinkMessage::NewRoute(route)) = answer
                    && let Some(route_info) = route_info(&route)
                {
                    routes.insert(*to, route_info);
                }
            }
        }
        Ok(routes)
    }

    /// The desired attribute of each interface of these routes.
    fn links<T>(
        &self,
        routes: &BTreeMap<IpAddr, (u32, Option<u32>)>,
        wanted: impl Fn(&[LinkAttribute]) -> Option<T>,
    ) -> io::Result<BTreeMap<u32, T>> {
        let interfaces: BTreeSet<u32> = routes.values().map(|(interface, _)| *interface).collect();
        let mut found = BTreeMap::new();
        for interface in interfaces {
            let mut link = LinkMessage::default();
            link.header.index = interface;
            let answer = self.exchange(vec![RouteNetlinkMessage::GetLink(link)])?;
            if let Some(Some(RouteNetlinkMessage::NewLink(link))) = answer.into_iter().next() {
                found.extend(wanted(&link.attributes).map(|value| (interface, value)));
            }
        }
        Ok(found)
    }

    /// The answers in order; `None` = the kernel returned an error.
    fn exchange(&self, requests: Vec<RouteNetlinkMessage>) -> io::Result<Vec<Option<RouteNetlinkMessage>>> {
        let mut answers: Vec<Option<RouteNetlinkMessage>> = Vec::new();
        let mut out = Vec::new();
        for (number, request) in (0_u32..).zip(requests) {
            let mut message = NetlinkMessage::from(request);
            message.header.flags = NLM_F_REQUEST;
            message.header.sequence_number = number;
            message.finalize();
            let at = out.len();
            // Lengths are multiples of four already.
            out.resize(at + message.buffer_len(), 0);
            message.serialize(&mut out[at..]);
            answers.push(None);
        }
        send(self.0.as_raw_fd(), &out, MsgFlags::empty())?;
        let mut buffer = vec![0; 1 << 16];
        let mut missing = answers.len();
        while missing > 0 {
            let length = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            let mut rest = &buffer[..length];
            while !rest.is_empty() {
                let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest).map_err(io::Error::other)?;
                let length = (message.header.length as usize)
                    .next_multiple_of(4)
                    .clamp(4, rest.len());
                rest = &rest[length..];
                if let NetlinkPayload::InnerMessage(answer) = message.payload
                    && let Some(slot) = answers.get_mut(message.header.sequence_number as usize)
                {
                    *slot = Some(answer);
                }
                missing = missing.saturating_sub(1);
            }
        }
        Ok(answers)
    }
}
