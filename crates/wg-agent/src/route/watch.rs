//! Tells that the kernel's routing may have changed under us; what changed is for `observe` and `diff` to say.
//!
//! The kernel itself leaves out what cannot concern us: a filter on the socket drops the routes that others write into their
//! tables, so that a routing daemon with a hundred thousand of them neither wakes us nor fills our queue.

use std::io;

use clustermesh_agent_core::{
    interface::InterfaceName,
    numbers::{PROTOCOL, TABLE, TABLE_TUNNEL},
};
use futures::FutureExt;
use rtnetlink::{
    MulticastGroup,
    packet_core::{NetlinkMessage, NetlinkPayload},
    packet_route::{
        RouteNetlinkMessage,
        address::{AddressMessage, AddressScope},
        link::{LinkAttribute, LinkMessage},
        route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol},
        rule::{RuleAttribute, RuleMessage},
    },
    sys::{AsyncSocket, AsyncSocketExt, TokioSocket, protocols::NETLINK_ROUTE},
};
use rustix::io::Errno;
use socket2::{SockFilter, SockRef};

use super::Error;

/// Room for what comes while a pass runs: a flush of ten thousand routes of ours.
const BUFFER: usize = 4 << 20;

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum News {
    /// Kernel settings of the device or of all interfaces, as far as the kernel tells: forwarding, rp_filter,
    /// ignore_routes_with_linkdown.
    Settings,
    /// The node's own network: its default routes, its addresses.
    Underlay,
    /// What we have written, or the device. Also when events were lost, so that nobody knows.
    Ours,
}

/// Events of the network namespace whose thread called [`Watch::open`], those that concern us.
pub struct Watch {
    device: InterfaceName,
    socket: TokioSocket,
}

impl Watch {
    /// Opens a socket in the caller's network namespace. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Open`].
    pub fn open(device: InterfaceName) -> Result<Self, Error> {
        use MulticastGroup::{
            Ipv4Ifaddr, Ipv4Netconf, Ipv4Route, Ipv4Rule, Ipv6Ifaddr, Ipv6Netconf, Ipv6Route, Ipv6Rule, Link,
        };
        let open = || -> io::Result<_> {
            let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
            // More is better, less is no error.
            let _ = SockRef::from(socket.socket_ref()).set_recv_buffer_size(BUFFER);
            // Before the groups are joined: nothing comes in unfiltered.
            SockRef::from(socket.socket_ref()).attach_filter(&filter())?;
            socket.socket_mut().bind_auto()?;
            for group in [
                Link,
                Ipv4Ifaddr,
                Ipv4Route,
                Ipv4Rule,
                Ipv4Netconf,
                Ipv6Ifaddr,
                Ipv6Route,
                Ipv6Rule,
                Ipv6Netconf,
            ] {
                socket.socket_mut().add_membership(group as u32)?;
            }
            Ok(socket)
        };
        let socket = open().map_err(Error::Open)?;
        Ok(Self { device, socket })
    }

    /// Waits for the next event that may concern us, and takes in with it what came by then: the same look sees it. Our own
    /// changes make events too: a pass over them finds nothing to do. Safe to cancel.
    ///
    /// # Errors
    /// When the socket fails for good; open another and look at everything.
    pub async fn changed(&mut self) -> io::Result<News> {
        loop {
            let mut news = self.read(self.socket.recv_from_full().await.map(|(bytes, _)| bytes))?;
            while let Some(more) = self.socket.recv_from_full().now_or_never() {
                news = news.max(self.read(more.map(|(bytes, _)| bytes))?);
            }
            if let Some(news) = news {
                return Ok(news);
            }
        }
    }

    fn read(&self, received: io::Result<Vec<u8>>) -> io::Result<Option<News>> {
        match received {
            Ok(bytes) => Ok(heard(&self.device, &bytes)),
            // Events were lost, so look at everything.
            Err(error) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => Ok(Some(News::Ours)),
            Err(error) => Err(error),
        }
    }
}

/// Lets everything pass but routes (RTM_NEWROUTE, RTM_DELROUTE), and of those ours by their protocol, those of tables whose
/// number does not fit a byte (ours among them), and default routes. One event is one message.
fn filter() -> [SockFilter; 11] {
    // linux/bpf_common.h, linux/rtnetlink.h: struct nlmsghdr (16 bytes) and struct rtmsg behind it.
    const LOAD_HALF: u16 = 0x28;
    const LOAD_BYTE: u16 = 0x30;
    const EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const MESSAGE_TYPE: u32 = 4;
    const PREFIX_LENGTH: u32 = 16 + 1;
    const ROUTE_TABLE: u32 = 16 + 4;
    const ROUTE_PROTOCOL: u32 = 16 + 5;
    const TABLE_COMPAT: u32 = 252;
    const NEW_ROUTE: u16 = 24;
    const DELETE_ROUTE: u16 = 25;
    // Loads are in network order, the header is in the machine's own.
    let kind = |number: u16| u32::from(number.to_be());
    let load = |how, at| SockFilter::new(how, 0, 0, at);
    let equal = |value, skip, else_skip| SockFilter::new(EQUAL, skip, else_skip, value);
    let give = |bytes| SockFilter::new(RETURN, 0, 0, bytes);
    [
        load(LOAD_HALF, MESSAGE_TYPE),
        equal(kind(NEW_ROUTE), 1, 0),
        equal(kind(DELETE_ROUTE), 0, 6),
        load(LOAD_BYTE, ROUTE_PROTOCOL),
        equal(PROTOCOL.into(), 4, 0),
        load(LOAD_BYTE, ROUTE_TABLE),
        equal(TABLE_COMPAT, 2, 0),
        load(LOAD_BYTE, PREFIX_LENGTH),
        equal(0, 0, 1),
        give(u32::MAX),
        give(0),
    ]
}

/// What the messages of one datagram are about.
fn heard(device: &InterfaceName, mut rest: &[u8]) -> Option<News> {
    let mut news = None;
    while !rest.is_empty() {
        if let Some(settings) = of_settings(device, rest) {
            // One event is one datagram (inet_netconf_notify_devconf of the kernel).
            return news.max(settings);
        }
        let Ok(message) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest) else {
            return Some(News::Ours); // something new from a newer kernel: look
        };
        news = news.max(about(device, &message.payload));
        let length = (message.header.length as usize)
            .next_multiple_of(4)
            .clamp(4, rest.len());
        rest = &rest[length..];
    }
    news
}

fn about(device: &InterfaceName, payload: &NetlinkPayload<RouteNetlinkMessage>) -> Option<News> {
    use RouteNetlinkMessage as M;
    match payload {
        NetlinkPayload::InnerMessage(M::NewLink(link) | M::DelLink(link)) => {
            is_device(device, link).then_some(News::Ours)
        }
        NetlinkPayload::InnerMessage(M::NewRoute(route) | M::DelRoute(route)) => of_route(route),
        NetlinkPayload::InnerMessage(M::NewRule(rule) | M::DelRule(rule)) => is_our_rule(rule).then_some(News::Ours),
        NetlinkPayload::InnerMessage(M::NewAddress(address) | M::DelAddress(address)) => of_address(address),
        NetlinkPayload::Error(_) | NetlinkPayload::Overrun(_) => Some(News::Ours),
        _ => None,
    }
}

/// What a message about settings concerns, which the packet library does not read (linux/netconf.h); `None` = it is no such
/// message. Every pod's interface makes one.
#[allow(clippy::option_option, reason = "not of this kind, of no concern, of concern")]
fn of_settings(device: &InterfaceName, message: &[u8]) -> Option<Option<News>> {
    const NEW_NETCONF: u16 = 80;
    const DELETE_NETCONF: u16 = 81;
    const IF_INDEX: u16 = 1;
    const ALL: i32 = -1;
    // Header of netlink, then the family in a word of its own.
    const ATTRIBUTES: usize = 16 + 4;
    let half = |at: usize| Some(u16::from_ne_bytes(message.get(at..at + 2)?.try_into().ok()?));
    let kind = half(4)?;
    if kind != NEW_NETCONF {
        return (kind == DELETE_NETCONF).then_some(None);
    }
    let mut at = ATTRIBUTES;
    while let (Some(length), Some(attribute)) = (half(at), half(at + 2)) {
        let value = message.get(at + 4..at + 8);
        if let (IF_INDEX, Some(Ok(value))) = (attribute, value.map(<[u8; 4]>::try_from)) {
            let index = i32::from_ne_bytes(value);
            let ours =
                || nix::net::if_::if_nametoindex(device.as_str()).is_ok_and(|own| u32::try_from(index) == Ok(own));
            return Some((index == ALL || ours()).then_some(News::Settings));
        }
        at += usize::from(length).next_multiple_of(4).max(4);
    }
    Some(None)
}

fn is_device(device: &InterfaceName, link: &LinkMessage) -> bool {
    let name = |a: &LinkAttribute| matches!(a, LinkAttribute::IfName(name) if name == device.as_str());
    link.attributes.iter().any(name)
}

fn of_route(route: &RouteMessage) -> Option<News> {
    let named = route.attributes.iter().find_map(|a| {
        if let RouteAttribute::Table(t) = a {
            Some(*t)
        } else {
            None
        }
    });
    match named.unwrap_or_else(|| route.header.table.into()) {
        TABLE | TABLE_TUNNEL => Some(News::Ours),
        table if table == u32::from(RouteHeader::RT_TABLE_MAIN) && route.header.destination_prefix_length == 0 => {
            Some(News::Underlay)
        }
        _ => None,
    }
}

/// On whatever interface: ours may have had another index. The link-local addresses of each new pod's interface are nobody's.
fn of_address(address: &AddressMessage) -> Option<News> {
    match (address.header.scope, address.header.prefix_len) {
        (AddressScope::Universe, 32 | 128) => Some(News::Ours),
        (AddressScope::Universe, _) => Some(News::Underlay),
        _ => None,
    }
}

fn is_our_rule(rule: &RuleMessage) -> bool {
    let ours = RouteProtocol::from(PROTOCOL);
    rule.attributes
        .iter()
        .any(|a| matches!(a, RuleAttribute::Protocol(p) if *p == ours))
}
