//! Reports that the kernel's routing may have changed externally. `observe` and `diff` tell what changed.
//!
//! A filter on the socket drops routes that other programs write into their own tables. So a routing daemon with a
//! hundred thousand routes neither wakes the agent nor fills its queue.

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

/// Receive buffer for events during a pass: enough for a flush of ten thousand of our routes.
const BUFFER: usize = 4 << 20;

/// What an event concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RoutingEvent {
    /// Kernel settings of the device or of all interfaces, as far as the kernel reports them: forwarding, rp_filter,
    /// ignore_routes_with_linkdown.
    Settings,
    /// The node's own network: its default routes, its addresses.
    Underlay,
    /// Objects that the agent wrote, or the device. Also used when events were lost.
    Ours,
}

/// Events of the network namespace of the thread that called [`Watch::open`], filtered to those that concern the agent.
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
            // Best effort.
            let _ = SockRef::from(socket.socket_ref()).set_recv_buffer_size(BUFFER);
            // Before the groups are joined, so that nothing arrives unfiltered.
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

    /// Waits for the next event that may concern the agent, and consumes all that have arrived by then. The agent's own
    /// changes cause events, too. Safe to cancel.
    ///
    /// # Errors
    /// The socket failed for good: open another one and observe everything.
    pub async fn changed(&mut self) -> io::Result<RoutingEvent> {
        loop {
            let mut event = self.classify_received(self.socket.recv_from_full().await.map(|(bytes, _)| bytes))?;
            while let Some(more) = self.socket.recv_from_full().now_or_never() {
                event = event.max(self.classify_received(more.map(|(bytes, _)| bytes))?);
            }
            if let Some(event) = event {
                return Ok(event);
            }
        }
    }

    fn classify_received(&self, received: io::Result<Vec<u8>>) -> io::Result<Option<RoutingEvent>> {
        match received {
            Ok(bytes) => Ok(classify_datagram(&self.device, &bytes)),
            // Events were lost: observe everything.
            Err(error) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => Ok(Some(RoutingEvent::Ours)),
            Err(error) => Err(error),
        }
    }
}

/// A BPF program that drops route messages (RTM_NEWROUTE, RTM_DELROUTE), except: routes with our protocol, routes in
/// tables whose number does not fit into a byte (ours among them), and default routes. All other messages pass. Each
/// event is one message.
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
    // BPF loads convert from network order; the header is in host order.
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

/// Classifies the messages of one datagram.
fn classify_datagram(device: &InterfaceName, mut rest: &[u8]) -> Option<RoutingEvent> {
    let mut event = None;
    while !rest.is_empty() {
        if let Some(settings) = classify_netconf(device, rest) {
            // The kernel sends each such event in its own datagram (inet_netconf_notify_devconf).
            return event.max(settings);
        }
        let Ok(message) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest) else {
            return Some(RoutingEvent::Ours); // unknown message of a newer kernel
        };
        event = event.max(classify(device, &message.payload));
        let length = (message.header.length as usize)
            .next_multiple_of(4)
            .clamp(4, rest.len());
        rest = &rest[length..];
    }
    event
}

fn classify(device: &InterfaceName, payload: &NetlinkPayload<RouteNetlinkMessage>) -> Option<RoutingEvent> {
    use RouteNetlinkMessage as M;
    match payload {
        NetlinkPayload::InnerMessage(M::NewLink(link) | M::DelLink(link)) => {
            is_device(device, link).then_some(RoutingEvent::Ours)
        }
        NetlinkPayload::InnerMessage(M::NewRoute(route) | M::DelRoute(route)) => classify_route(route),
        NetlinkPayload::InnerMessage(M::NewRule(rule) | M::DelRule(rule)) => {
            is_our_rule(rule).then_some(RoutingEvent::Ours)
        }
        NetlinkPayload::InnerMessage(M::NewAddress(address) | M::DelAddress(address)) => classify_address(address),
        NetlinkPayload::Error(_) | NetlinkPayload::Overrun(_) => Some(RoutingEvent::Ours),
        _ => None,
    }
}

/// Classifies a netconf message, which the packet library does not parse (linux/netconf.h); `None` = it is another
/// message. Every pod's interface causes some.
#[allow(clippy::option_option, reason = "another kind of message, irrelevant, relevant")]
fn classify_netconf(device: &InterfaceName, message: &[u8]) -> Option<Option<RoutingEvent>> {
    const NEW_NETCONF: u16 = 80;
    const DELETE_NETCONF: u16 = 81;
    const IF_INDEX: u16 = 1;
    const ALL: i32 = -1;
    // After the netlink header and the family, padded to a word.
    const ATTRIBUTES: usize = 16 + 4;
    let u16_at = |at: usize| Some(u16::from_ne_bytes(message.get(at..at + 2)?.try_into().ok()?));
    let kind = u16_at(4)?;
    if kind != NEW_NETCONF {
        return (kind == DELETE_NETCONF).then_some(None);
    }
    let mut at = ATTRIBUTES;
    while let (Some(length), Some(attribute)) = (u16_at(at), u16_at(at + 2)) {
        let value = message.get(at + 4..at + 8);
        if let (IF_INDEX, Some(Ok(value))) = (attribute, value.map(<[u8; 4]>::try_from)) {
            let index = i32::from_ne_bytes(value);
            let ours =
                || nix::net::if_::if_nametoindex(device.as_str()).is_ok_and(|own| u32::try_from(index) == Ok(own));
            return Some((index == ALL || ours()).then_some(RoutingEvent::Settings));
        }
        at += usize::from(length).next_multiple_of(4).max(4);
    }
    Some(None)
}

fn is_device(device: &InterfaceName, link: &LinkMessage) -> bool {
    let name = |a: &LinkAttribute| matches!(a, LinkAttribute::IfName(name) if name == device.as_str());
    link.attributes.iter().any(name)
}

fn classify_route(route: &RouteMessage) -> Option<RoutingEvent> {
    let named = route.attributes.iter().find_map(|a| {
        if let RouteAttribute::Table(t) = a {
            Some(*t)
        } else {
            None
        }
    });
    match named.unwrap_or_else(|| route.header.table.into()) {
        TABLE | TABLE_TUNNEL => Some(RoutingEvent::Ours),
        table if table == u32::from(RouteHeader::RT_TABLE_MAIN) && route.header.destination_prefix_length == 0 => {
            Some(RoutingEvent::Underlay)
        }
        _ => None,
    }
}

/// On any interface, since our device may have had another index. The link-local addresses of new pods' interfaces do
/// not matter.
fn classify_address(address: &AddressMessage) -> Option<RoutingEvent> {
    match (address.header.scope, address.header.prefix_len) {
        (AddressScope::Universe, 32 | 128) => Some(RoutingEvent::Ours),
        (AddressScope::Universe, _) => Some(RoutingEvent::Underlay),
        _ => None,
    }
}

fn is_our_rule(rule: &RuleMessage) -> bool {
    let ours = RouteProtocol::from(PROTOCOL);
    rule.attributes
        .iter()
        .any(|a| matches!(a, RuleAttribute::Protocol(p) if *p == ours))
}
