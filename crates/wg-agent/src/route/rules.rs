//! Rules of policy routing as rtnetlink(7) says them, and back. Which there should be is not decided here.

use clustermesh_agent_core::{
    interface::InterfaceName,
    numbers::PROTOCOL,
    policy::Protocol,
    prefixes::Family,
    routes::{Action, Incoming, Rule},
};
use ipnet::IpNet;
use rtnetlink::packet_route::{
    AddressFamily, IpProtocol,
    route::RouteProtocol,
    rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage, RulePortRange},
};

/// How the kernel calls [`Incoming::Here`].
const HERE: &str = "lo";

/// What adds a rule, and what takes that very rule away.
pub(super) fn rule_message(rule: &Rule, device: &InterfaceName) -> RuleMessage {
    let Rule {
        family,
        priority,
        invert,
        mark,
        mask,
        incoming,
        from,
        to,
        protocol,
        source_port,
        action,
    } = rule;
    let mut message = RuleMessage::default();
    message.header.family = match family {
        Family::V4 => AddressFamily::Inet,
        Family::V6 => AddressFamily::Inet6,
    };
    if *invert {
        message.header.flags = RuleFlags::Invert;
    }
    let attributes = &mut message.attributes;
    attributes.push(RuleAttribute::Priority(*priority));
    if *mask != 0 {
        attributes.extend([RuleAttribute::FwMark(*mark), RuleAttribute::FwMask(*mask)]);
    }
    attributes.extend(incoming.as_ref().map(|incoming| {
        RuleAttribute::Iifname(match incoming {
            Incoming::Here => HERE.to_owned(),
            Incoming::Device => device.to_string(),
            Incoming::Other(name) => name.to_string(),
        })
    }));
    if let Some(from) = from {
        message.header.src_len = from.prefix_len();
        attributes.push(RuleAttribute::Source(from.addr()));
    }
    if let Some(to) = to {
        message.header.dst_len = to.prefix_len();
        attributes.push(RuleAttribute::Destination(to.addr()));
    }
    attributes.extend(protocol.map(|protocol| RuleAttribute::IpProtocol(number(protocol))));
    attributes.extend(source_port.map(|port| RuleAttribute::SourcePortRange(RulePortRange { start: port, end: port })));
    message.header.action = match action {
        Action::Lookup(table) => {
            attributes.push(RuleAttribute::Table(*table));
            RuleAction::ToTable
        }
        Action::Blackhole => RuleAction::Blackhole,
    };
    attributes.push(RuleAttribute::Protocol(RouteProtocol::from(PROTOCOL)));
    message
}

const fn number(protocol: Protocol) -> IpProtocol {
    match protocol {
        Protocol::Tcp => IpProtocol::Tcp,
        Protocol::Udp => IpProtocol::Udp,
        Protocol::Sctp => IpProtocol::Sctp,
    }
}

/// A rule of ours. One that carries our protocol number and selects by something that we never use is someone's
/// experiment: neither ours to delete nor a stand-in for ours.
pub(super) fn rule(message: &RuleMessage, family: Family, device: &InterfaceName) -> Option<Rule> {
    let mut rule = Rule {
        family,
        priority: 0,
        invert: message.header.flags.contains(RuleFlags::Invert),
        mark: 0,
        mask: 0,
        incoming: None,
        from: None,
        to: None,
        protocol: None,
        source_port: None,
        action: Action::Blackhole,
    };
    let (mut ours, mut table) = (false, u32::from(message.header.table));
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Priority(p) => rule.priority = *p,
            RuleAttribute::FwMark(m) => rule.mark = *m,
            RuleAttribute::FwMask(m) => rule.mask = *m,
            RuleAttribute::Iifname(name) => {
                rule.incoming = Some(match name.as_str() {
                    HERE => Incoming::Here,
                    name if name == device.as_str() => Incoming::Device,
                    name => Incoming::Other(name.parse().ok()?),
                });
            }
            RuleAttribute::Source(a) => rule.from = Some(IpNet::new(*a, message.header.src_len).ok()?),
            RuleAttribute::Destination(a) => rule.to = Some(IpNet::new(*a, message.header.dst_len).ok()?),
            RuleAttribute::IpProtocol(IpProtocol::Tcp) => rule.protocol = Some(Protocol::Tcp),
            RuleAttribute::IpProtocol(IpProtocol::Udp) => rule.protocol = Some(Protocol::Udp),
            RuleAttribute::IpProtocol(IpProtocol::Sctp) => rule.protocol = Some(Protocol::Sctp),
            RuleAttribute::SourcePortRange(range) if range.start == range.end => rule.source_port = Some(range.start),
            RuleAttribute::Table(t) => table = *t,
            RuleAttribute::Protocol(p) => ours = *p == RouteProtocol::from(PROTOCOL),
            RuleAttribute::SuppressPrefixLen(u32::MAX) | RuleAttribute::SuppressIfGroup(u32::MAX) => {}
            RuleAttribute::Other(_) => {}
            _ => return None,
        }
    }
    rule.action = match message.header.action {
        RuleAction::ToTable => Action::Lookup(table),
        RuleAction::Blackhole => Action::Blackhole,
        _ => return None,
    };
    ours.then_some(rule)
}
