//! What the ways to the peers' endpoints carry, asked of the kernel as it would route our outer packets; what follows from
//! it for the tunnel is [`clustermesh_agent_core::mtu`]'s.
//!
//! The answer holds the MTU of the route or of a learnt exception (ICMP "fragmentation needed", "packet too big") where there
//! is one, else that of the interface. The kernel tells nobody when it learns an exception, so this is asked again and again.

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

/// Questions in one write. Each answer takes about 4 KiB of the socket's receive buffer, which holds 208 KiB by default.
const BATCH: usize = 16;
/// The kernel answers within the write; this is for a kernel that does not.
const PATIENCE: i64 = 2;

/// The MTU, bytes, of the way to each of `to` for packets that carry `mark`, in the caller's network namespace. Left out is
/// what has no way, or one that ends on this node.
///
/// # Errors
/// No netlink socket, or one that does not answer.
pub fn mtus(to: &BTreeSet<IpAddr>, mark: u32) -> io::Result<BTreeMap<IpAddr, u16>> {
    if to.is_empty() {
        return Ok(BTreeMap::new());
    }
    let socket = Asking::open()?;
    let ways = socket.ways(to, mark)?;
    let widths = socket.links(&ways, |attributes| {
        let mtu = attributes
            .iter()
            .find_map(|a| if let LinkAttribute::Mtu(m) = a { Some(*m) } else { None });
        Some(mtu.unwrap_or(u32::MAX))
    })?;
    let mtu = |(to, (interface, own)): (IpAddr, (u32, Option<u32>))| {
        let width = *widths.get(&interface)?; // gone since
        Some((to, u16::try_from(own.unwrap_or(width)).unwrap_or(u16::MAX)))
    };
    Ok(ways.into_iter().filter_map(mtu).collect())
}

/// The interface by which packets of this host's own to each of `to` leave, in the caller's network namespace. Left out is what
/// has no way, or one that ends on this node.
///
/// # Errors
/// No netlink socket, or one that does not answer.
pub fn interfaces(to: &BTreeSet<IpAddr>) -> io::Result<BTreeMap<IpAddr, String>> {
    let socket = Asking::open()?;
    let ways = socket.ways(to, 0)?;
    let names = socket.links(&ways, |attributes| {
        attributes.iter().find_map(|a| match a {
            LinkAttribute::IfName(name) => Some(name.clone()),
            _ => None,
        })
    })?;
    let name = |(to, (interface, _)): (IpAddr, (u32, Option<u32>))| Some((to, names.get(&interface)?.clone()));
    Ok(ways.into_iter().filter_map(name).collect())
}

fn question(to: IpAddr, mark: u32) -> RouteMessage {
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

/// The interface, and the route's own MTU if it has one.
fn way(route: &RouteMessage) -> Option<(u32, Option<u32>)> {
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

/// A socket on which several questions go out in one write.
struct Asking(OwnedFd);

impl Asking {
    fn open() -> io::Result<Self> {
        let fd = socket(
            SocketFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkRoute,
        )?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        setsockopt(&fd, ReceiveTimeout, &nix::sys::time::TimeVal::new(PATIENCE, 0))?;
        Ok(Self(fd))
    }

    /// Interface and own MTU of the route to each address.
    fn ways(&self, to: &BTreeSet<IpAddr>, mark: u32) -> io::Result<BTreeMap<IpAddr, (u32, Option<u32>)>> {
        let mut ways = BTreeMap::new();
        let targets: Vec<IpAddr> = to.iter().copied().collect();
        for batch in targets.chunks(BATCH) {
            let questions = batch
                .iter()
                .map(|to| RouteNetlinkMessage::GetRoute(question(*to, mark)));
            for (to, answer) in batch.iter().zip(self.ask(questions.collect())?) {
                if let Some(RouteNetlinkMessage::NewRoute(route)) = answer
                    && let Some(way) = way(&route)
                {
                    ways.insert(*to, way);
                }
            }
        }
        Ok(ways)
    }

    /// What is wanted of each interface that some way leads by.
    fn links<T>(
        &self,
        ways: &BTreeMap<IpAddr, (u32, Option<u32>)>,
        wanted: impl Fn(&[LinkAttribute]) -> Option<T>,
    ) -> io::Result<BTreeMap<u32, T>> {
        let interfaces: BTreeSet<u32> = ways.values().map(|(interface, _)| *interface).collect();
        let mut found = BTreeMap::new();
        for interface in interfaces {
            let mut link = LinkMessage::default();
            link.header.index = interface;
            let answer = self.ask(vec![RouteNetlinkMessage::GetLink(link)])?;
            if let Some(Some(RouteNetlinkMessage::NewLink(link))) = answer.into_iter().next() {
                found.extend(wanted(&link.attributes).map(|value| (interface, value)));
            }
        }
        Ok(found)
    }

    /// The answers, in order; `None` where the kernel said no.
    fn ask(&self, questions: Vec<RouteNetlinkMessage>) -> io::Result<Vec<Option<RouteNetlinkMessage>>> {
        let mut answers: Vec<Option<RouteNetlinkMessage>> = Vec::new();
        let mut out = Vec::new();
        for (number, question) in (0_u32..).zip(questions) {
            let mut message = NetlinkMessage::from(question);
            message.header.flags = NLM_F_REQUEST;
            message.header.sequence_number = number;
            message.finalize();
            let at = out.len();
            // Lengths are multiples of four already: headers, and attributes padded by their writer.
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
