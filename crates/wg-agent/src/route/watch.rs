//! Reports that the kernel's routing may have changed. Callers find the change by `observe` and `diff`.
//!
//! A BPF filter on the socket drops the routes of other programs in the tables up to 255 (such as main), except default routes. So a
//! routing daemon with a hundred thousand routes there neither wakes the agent nor fills its receive buffer.

use clustermesh_agent_core::{
    interface::InterfaceName,
    numbers::{PROTOCOL, RULE_MESH, TABLE, TABLE_TUNNEL},
};
use clustermesh_netlink::{Error as NetlinkError, Event, Events, Message, Protocol, SockFilter, Subscription};
use netlink_packet_core::NlasIterator;
use netlink_packet_route::{
    RouteNetlinkMessage,
    address::{AddressMessage, AddressScope},
    link::{LinkAttribute, LinkMessage},
    route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol},
    rule::{RuleAttribute, RuleMessage},
};

use super::{Error, rules::foreign_priority};

/// Size of the receive buffer, which collects events during a pass: enough for a flush of ten thousand routes of the agent.
const BUFFER: usize = 4 << 20;
/// Links, and for both families addresses, routes, rules and settings: `RTNLGRP_LINK`, `_IPV4_IFADDR`, `_IPV4_ROUTE`,
/// `_IPV4_RULE`, `_IPV6_IFADDR`, `_IPV6_ROUTE`, `_IPV6_RULE`, `_IPV4_NETCONF`, `_IPV6_NETCONF` (linux/rtnetlink.h).
const GROUPS: [u32; 9] = [1, 5, 7, 8, 9, 11, 19, 24, 25];

/// The objects that may have changed. A later variant makes the agent do all that an earlier one does, and more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RoutingEvent {
    /// Kernel settings of the device or of all interfaces. Of the agent's settings, the kernel reports changes only of
    /// forwarding, rp_filter and ignore_routes_with_linkdown.
    Settings,
    /// The node's own network: its default routes in the main table, and its addresses of scope universe except those with prefix length
    /// 32 or 128.
    Underlay,
    /// Objects that the agent may have written, a rule of another program that must come after the agent's rules, or the device.
    /// Also used when events were lost.
    Ours,
}

/// Events of the network namespace of the thread that called [`Watch::open`], filtered to those that concern the agent.
pub struct Watch {
    device: InterfaceName,
    events: Events,
}

impl Watch {
    /// Opens a socket in the caller's network namespace. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Open`].
    pub fn open(device: InterfaceName) -> Result<Self, Error> {
        let subscription = Subscription {
            groups: &GROUPS,
            receive_buffer: Some(BUFFER),
            filter: Some(&filter()),
        };
        let events = Events::open(Protocol::Route, subscription).map_err(Error::Open)?;
        Ok(Self { device, events })
    }

    /// Waits for the next event that may concern the agent, consumes all events that have arrived by then, and returns the
    /// greatest of them. The agent's own changes cause events, too. Safe to cancel.
    ///
    /// # Errors
    /// The socket failed permanently: open another one and observe everything.
    pub async fn changed(&mut self) -> Result<RoutingEvent, NetlinkError> {
        loop {
            let events = self.events.next().await?;
            if let Some(event) = events.iter().filter_map(|event| classify(&self.device, event)).max() {
                return Ok(event);
            }
        }
    }
}

/// A BPF program that drops route messages (RTM_NEWROUTE, RTM_DELROUTE), except: routes with the agent's protocol,
/// routes in tables whose number does not fit into a byte (such as the agent's tables), and default routes. All other
/// messages pass. The program reads only the first message of a datagram; the kernel sends each event in a datagram of its own.
fn filter() -> [SockFilter; 11] {
    // linux/bpf_common.h, linux/rtnetlink.h: struct nlmsghdr (16 bytes), followed by struct rtmsg.
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
    let load = |size, offset| SockFilter::new(size, 0, 0, offset);
    let equal = |value, skip, else_skip| SockFilter::new(EQUAL, skip, else_skip, value);
    let verdict = |bytes| SockFilter::new(RETURN, 0, 0, bytes);
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
        verdict(u32::MAX),
        verdict(0),
    ]
}

fn classify(device: &InterfaceName, event: &Event) -> Option<RoutingEvent> {
    use RouteNetlinkMessage as M;
    // linux/rtnetlink.h; the packet library does not parse these messages.
    const NEW_NETCONF: u16 = 80;
    const DELETE_NETCONF: u16 = 81;
    let Event::Message(message) = event else {
        return Some(RoutingEvent::Ours);
    };
    match message.message_type() {
        NEW_NETCONF => return classify_netconf(device, message),
        DELETE_NETCONF => return None,
        _ => {}
    }
    match message.parse() {
        Ok(M::NewLink(link) | M::DelLink(link)) => is_device(device, &link).then_some(RoutingEvent::Ours),
        Ok(M::NewRoute(route) | M::DelRoute(route)) => classify_route(&route),
        Ok(M::NewRule(rule) | M::DelRule(rule)) => concerns_our_rules(&rule).then_some(RoutingEvent::Ours),
        Ok(M::NewAddress(address) | M::DelAddress(address)) => classify_address(&address),
        Ok(_) => None,
        Err(_) => Some(RoutingEvent::Ours), // unknown message of a newer kernel
    }
}

/// Classifies a change of an interface's settings (linux/netconf.h). Changes of other single interfaces are
/// ignored: every new pod's interface causes some.
fn classify_netconf(device: &InterfaceName, message: &Message) -> Option<RoutingEvent> {
    const IF_INDEX: u16 = 1;
    const ALL: i32 = -1;
    // The attributes follow the family, which is padded to 4 bytes.
    let attributes = NlasIterator::new(message.payload().get(4..)?);
    let index = attributes
        .map_while(Result::ok)
        .find(|attribute| attribute.kind() == IF_INDEX)?;
    let index = i32::from_ne_bytes(index.value().try_into().ok()?);
    let is_own = || nix::net::if_::if_nametoindex(device.as_str()).is_ok_and(|own| u32::try_from(index) == Ok(own));
    (index == ALL || is_own()).then_some(RoutingEvent::Settings)
}

fn is_device(device: &InterfaceName, link: &LinkMessage) -> bool {
    let name = |a: &LinkAttribute| matches!(a, LinkAttribute::IfName(name) if name == device.as_str());
    link.attributes.iter().any(name)
}

fn classify_route(route: &RouteMessage) -> Option<RoutingEvent> {
    let table = route.attributes.iter().find_map(|a| {
        if let RouteAttribute::Table(t) = a {
            Some(*t)
        } else {
            None
        }
    });
    match table.unwrap_or_else(|| route.header.table.into()) {
        TABLE | TABLE_TUNNEL => Some(RoutingEvent::Ours),
        table if table == u32::from(RouteHeader::RT_TABLE_MAIN) && route.header.destination_prefix_length == 0 => {
            Some(RoutingEvent::Underlay)
        }
        _ => None,
    }
}

/// A /32 or /128 may be an address of the agent, which assigns no other prefix lengths. Addresses on any interface count, since
/// the agent's device may have been created anew with another index. Link-local addresses are ignored: every new pod's interface gets one.
fn classify_address(address: &AddressMessage) -> Option<RoutingEvent> {
    match (address.header.scope, address.header.prefix_len) {
        (AddressScope::Universe, 32 | 128) => Some(RoutingEvent::Ours),
        (AddressScope::Universe, _) => Some(RoutingEvent::Underlay),
        _ => None,
    }
}

/// Whether the rule is the agent's, or a rule of another program that must come after the agent's rules.
fn concerns_our_rules(rule: &RuleMessage) -> bool {
    let ours = RouteProtocol::from(PROTOCOL);
    let is_ours = |a: &RuleAttribute| matches!(a, RuleAttribute::Protocol(p) if *p == ours);
    rule.attributes.iter().any(is_ours) || foreign_priority(rule).is_some_and(|priority| priority <= RULE_MESH)
}
