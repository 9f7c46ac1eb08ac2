//! Rules of policy routing as values, and which of them a family and its sandboxes need; the routes they lead to are in
//! [`super`].
//!
//! **The lock.** A flushed firewall table must not open a sandbox. So the mesh's table has no route to one, only
//! `unreachable`; the way into the device lies behind a mark that our firewall table alone sets, on the packets from a
//! sandbox and on the answers to them. Without the table nothing here reaches a sandbox, and nothing of a sandbox's is taken:
//! IPv4's reverse path filter looks the way back up with the packet's own mark (`src_valid_mark`), finds the closed door and
//! drops it before it is delivered or forwarded. IPv6 has no such filter: what is to be forwarded meets a rule of its own,
//! what is for this node's own addresses does not (the table `local` is asked before any rule that one can add), and finds no
//! way to be answered.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;

use crate::{
    interface::InterfaceName,
    numbers::{
        CONNECTION_MASK, MARK_CHECKED, MARK_MASK, MARK_TUNNEL, MARK_UNDERLAY, RULE_ANSWER, RULE_CHECKED, RULE_MESH,
        RULE_REVOKED, RULE_TUNNEL, RULE_UNCHECKED, TABLE, TABLE_TUNNEL,
    },
    policy::{Port, Protocol},
    prefixes::{Family, host},
};

/// One rule: what a packet, or a lookup for one, must have, and what follows.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rule {
    /// Address family.
    pub family: Family,
    /// Priority: less is asked first.
    pub priority: u32,
    /// Whether it is for whatever does *not* match.
    pub invert: bool,
    /// Mark.
    pub mark: u32,
    /// Bits of the mark that count; 0 = any mark.
    pub mask: u32,
    /// Where the packet came in.
    pub incoming: Option<Incoming>,
    /// Source addresses.
    pub from: Option<IpNet>,
    /// Destination addresses.
    pub to: Option<IpNet>,
    /// Transport protocol.
    pub protocol: Option<Protocol>,
    /// Source port.
    pub source_port: Option<u16>,
    /// What follows.
    pub action: Action,
}

/// Where a packet came in.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Incoming {
    /// Nowhere: this node sends it, or it is for this node and the way back is looked up (`iif lo`).
    Here,
    /// By the WireGuard device.
    Device,
    /// By another interface. Only ever observed: the device had another name once.
    Other(InterfaceName),
}

/// What a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    /// Looks into this routing table.
    Lookup(u32),
    /// Drops the packet and says nothing.
    Blackhole,
}

/// What a socket of this node answers to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Answer {
    /// This node's address.
    pub from: IpAddr,
    /// The sandbox's addresses.
    pub to: IpNet,
    /// The protocol, and the port it answers from.
    pub port: Port,
}

/// The two rules of a family: answers that must use the tunnel, then everything that is not the tunnel's outer packets.
#[must_use]
pub fn rules(family: Family) -> [Rule; 2] {
    [
        Rule {
            mark: MARK_TUNNEL,
            mask: MARK_MASK,
            ..rule(family, RULE_TUNNEL, Action::Lookup(TABLE_TUNNEL))
        },
        Rule {
            invert: true,
            mark: MARK_UNDERLAY,
            mask: MARK_MASK,
            ..rule(family, RULE_MESH, Action::Lookup(TABLE))
        },
    ]
}

/// The rules of one network of sandboxes: what comes from it unchecked goes no further; what is checked has a way to it, but
/// for connections of this node's own, whose sockets keep the mark for as long as they are open ([`answer`]).
#[must_use]
pub(super) fn sandbox(net: IpNet) -> [Rule; 3] {
    let family = Family::of(&net);
    let checked = |rule| Rule {
        mark: MARK_CHECKED,
        mask: MARK_MASK,
        to: Some(net),
        ..rule
    };
    [
        Rule {
            mask: CONNECTION_MASK,
            incoming: Some(Incoming::Device),
            from: Some(net),
            ..rule(family, RULE_UNCHECKED, Action::Blackhole)
        },
        Rule {
            incoming: Some(Incoming::Here),
            protocol: Some(Protocol::Tcp),
            ..checked(rule(family, RULE_REVOKED, Action::Blackhole))
        },
        checked(rule(family, RULE_CHECKED, Action::Lookup(TABLE_TUNNEL))),
    ]
}

/// The rule of one answer. TCP's carries the mark of the connection's first packet (`tcp_fwmark_accept`); the route of others
/// is looked up before netfilter sees them.
///
/// It goes with its grant, and with any rule the routes that sockets keep, so that an open connection is not heard either.
/// A reverse path check does not know ports, and so does not find this rule, unless somebody else's rule by ports makes it
/// look (`fib_rule_requires_fldissect` of the kernel); then it has them changed over, and finds it for this very port.
#[must_use]
pub(super) fn answer(answer: &Answer) -> Rule {
    let Answer { from, to, port } = answer;
    let (mark, mask) = match port.protocol {
        Protocol::Tcp => (MARK_CHECKED, MARK_MASK),
        Protocol::Udp | Protocol::Sctp => (0, 0),
    };
    Rule {
        mark,
        mask,
        incoming: Some(Incoming::Here),
        from: Some(host(*from)),
        to: Some(*to),
        protocol: Some(port.protocol),
        source_port: Some(port.port),
        ..rule(Family::of(to), RULE_ANSWER, Action::Lookup(TABLE_TUNNEL))
    }
}

const fn rule(family: Family, priority: u32, action: Action) -> Rule {
    Rule {
        family,
        priority,
        invert: false,
        mark: 0,
        mask: 0,
        incoming: None,
        from: None,
        to: None,
        protocol: None,
        source_port: None,
        action,
    }
}

impl Rule {
    /// It is part of the lock.
    #[must_use]
    pub const fn of_sandbox(&self) -> bool {
        matches!(
            self.priority,
            RULE_UNCHECKED | RULE_ANSWER | RULE_REVOKED | RULE_CHECKED
        )
    }
}

impl fmt::Display for Rule {
    /// As ip-rule(8) takes it, but for the device's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
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
        } = self;
        let family = if *family == Family::V6 { "-6 " } else { "" };
        write!(f, "{family}pref {priority}")?;
        if *invert {
            f.write_str(" not")?;
        }
        if let Some(from) = from {
            write!(f, " from {from}")?;
        }
        if let Some(to) = to {
            write!(f, " to {to}")?;
        }
        if (*mark, *mask) != (0, 0) {
            write!(f, " fwmark {mark:#x}/{mask:#x}")?;
        }
        match incoming {
            None => {}
            Some(Incoming::Here) => f.write_str(" iif lo")?,
            Some(Incoming::Device) => f.write_str(" iif <device>")?,
            Some(Incoming::Other(name)) => write!(f, " iif {name}")?,
        }
        if let Some(protocol) = protocol {
            write!(f, " ipproto {protocol}")?;
        }
        if let Some(port) = source_port {
            write!(f, " sport {port}")?;
        }
        match action {
            Action::Lookup(table) => write!(f, " lookup {table}"),
            Action::Blackhole => f.write_str(" blackhole"),
        }
    }
}
