//! Finds and creates the WireGuard interface over rtnetlink. [`super`] configures, renames and removes it.
//!
//! An interface belongs to the agent if its alias is [`ALIAS`]. The kernel accepts no alias when it creates a link. So a
//! link is created as [`TEMPORARY_NAME`] and gets its real name last: a link of the agent with the real name always
//! has the alias and is configured, but may be down.

use clustermesh_netlink::{Error, Socket, link};
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};

use crate::device::ALIAS;

/// The name of a link until it is configured. 15 characters is the longest name that the kernel accepts.
const TEMPORARY_NAME: &str = "clustermesh-new";

/// An existing link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) kind: Kind,
    /// Whether its alias is [`ALIAS`].
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

pub(super) fn by_name(socket: &Socket, name: &str) -> Result<Option<Link>, Error> {
    Ok(link::by_name(socket, name)?.as_ref().map(parse))
}

pub(super) fn by_index(socket: &Socket, index: u32) -> Result<Option<Link>, Error> {
    Ok(link::by_index(socket, index)?.as_ref().map(parse))
}

/// Creates a WireGuard link, down, with a temporary name, and returns its index. `EOPNOTSUPP` = this kernel has no
/// WireGuard. If WireGuard is a module, the kernel loads it.
pub(super) fn create(socket: &Socket) -> Result<u32, Error> {
    // A process that was killed before it renamed its link leaves the link with this name.
    if let Some(leftover) = by_name(socket, TEMPORARY_NAME)?
        && leftover.kind == Kind::Wireguard
    {
        link::delete(socket, leftover.index)?;
    }
    let index = link::create(socket, TEMPORARY_NAME, InfoKind::Wireguard)?;
    link::set(socket, index, vec![LinkAttribute::IfAlias(ALIAS.to_owned())])?;
    Ok(index)
}

fn parse(message: &LinkMessage) -> Link {
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
