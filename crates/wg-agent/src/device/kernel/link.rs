//! Finds, creates, configures and removes the WireGuard interface over rtnetlink.
//!
//! An interface belongs to the agent if its alias says so ([`ALIAS`]). The kernel accepts no alias when it creates a
//! link. So a link is created as [`UNFINISHED`] and gets its real name last: under that name, a device is always
//! complete.

use std::io;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
};
use nix::errno::Errno;

use super::netlink::Netlink;
use crate::device::ALIAS;

/// The name of a link while it is created; 15 characters.
const UNFINISHED: &str = "clustermesh-new";

/// An existing link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) kind: Kind,
    /// Whether its alias is the agent's.
    pub(super) is_ours: bool,
    pub(super) mtu: u32,
    pub(super) is_up: bool,
    pub(super) drops: Drops,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Wireguard,
    Tun,
    Other,
}

/// The link's drop counters in packets (Documentation/networking/statistics.rst).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Drops {
    pub(super) receive_errors: u64,
    pub(super) receive_dropped: u64,
    pub(super) send_errors: u64,
    pub(super) send_dropped: u64,
}

/// The links of one network namespace.
pub(super) struct Links(Netlink);

impl Links {
    pub(super) fn open() -> io::Result<Self> {
        Netlink::open(netlink_sys::protocols::NETLINK_ROUTE).map(Self)
    }

    pub(super) fn by_name(&self, name: &str) -> io::Result<Option<Link>> {
        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::IfName(name.to_owned()));
        self.get(message)
    }

    pub(super) fn by_index(&self, index: u32) -> io::Result<Option<Link>> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        self.get(message)
    }

    fn get(&self, message: LinkMessage) -> io::Result<Option<Link>> {
        match self.0.request(RouteNetlinkMessage::GetLink(message), 0) {
            Ok(answers) => Ok(answers.into_iter().find_map(|answer| match answer {
                RouteNetlinkMessage::NewLink(message) => Some(link(&message)),
                _ => None,
            })),
            Err(error) if error.raw_os_error() == Some(Errno::ENODEV as i32) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates a WireGuard link, down, with a temporary name. `EOPNOTSUPP` = this kernel has no WireGuard. If it is a
    /// module, the kernel loads it.
    pub(super) fn create(&self) -> io::Result<u32> {
        // Left by a process that was killed while it created a link.
        if let Some(left) = self.by_name(UNFINISHED)?
            && left.kind == Kind::Wireguard
        {
            self.remove(left.index)?;
        }
        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::IfName(UNFINISHED.to_owned()));
        message
            .attributes
            .push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Wireguard)]));
        self.0
            .request(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)?;
        let made = self
            .by_name(UNFINISHED)?
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        self.set(made.index, vec![LinkAttribute::IfAlias(ALIAS.to_owned())], false)?;
        Ok(made.index)
    }

    /// Sets attributes and, with `up`, brings the link up.
    pub(super) fn set(&self, index: u32, attributes: Vec<LinkAttribute>, up: bool) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        if up {
            message.header.flags = LinkFlags::Up;
            message.header.change_mask = LinkFlags::Up;
        }
        message.attributes = attributes;
        self.0.request(RouteNetlinkMessage::SetLink(message), 0).map(drop)
    }

    /// Removes a link; a missing one is no error.
    pub(super) fn remove(&self, index: u32) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        match self.0.request(RouteNetlinkMessage::DelLink(message), 0) {
            Err(error) if error.raw_os_error() == Some(Errno::ENODEV as i32) => Ok(()),
            result => result.map(drop),
        }
    }
}

fn link(message: &LinkMessage) -> Link {
    let mut link = Link {
        index: message.header.index,
        kind: Kind::Other,
        is_ours: false,
        mtu: 0,
        is_up: message.header.flags.contains(LinkFlags::Up),
        drops: Drops::default(),
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfAlias(alias) => link.is_ours = alias == ALIAS,
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(InfoKind::Wireguard) => link.kind = Kind::Wireguard,
                        LinkInfo::Kind(InfoKind::Tun) => link.kind = Kind::Tun,
                        _ => {}
                    }
                }
            }
            LinkAttribute::Stats64(stats) => {
                link.drops = Drops {
                    receive_errors: stats.rx_errors,
                    receive_dropped: stats.rx_dropped,
                    send_errors: stats.tx_errors,
                    send_dropped: stats.tx_dropped,
                };
            }
            _ => {}
        }
    }
    link
}
