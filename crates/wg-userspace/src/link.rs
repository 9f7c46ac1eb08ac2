//! Reads, configures and removes a network interface over rtnetlink, with one blocking request at a time.

use std::io;

use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload, Nla};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{InfoData, InfoKind, InfoTun, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use rustix::io::Errno;

use crate::configuration::Interface;

/// `IFLA_TUN_NUM_QUEUES` (Linux `include/uapi/linux/if_link.h`): the number of attached files.
const TUN_NUM_QUEUES: u16 = 8;

/// An existing interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) index: u32,
    pub(crate) kind: Kind,
    /// Whether it has the caller's alias.
    pub(crate) is_ours: bool,
    pub(crate) mtu: u32,
    pub(crate) is_up: bool,
    /// Packets that the kernel dropped on transmission. The reasons for a TUN device: its queue was full, or no process had it open.
    pub(crate) tx_dropped: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A TUN device; `attached` = the kernel reports that a process has it open. It does not report this of a single-queue device that
    /// is down.
    Tun {
        attached: bool,
    },
    Wireguard,
    Other,
}

/// Reads the interface with this name in this thread's network namespace; `None` = it does not exist.
pub(crate) fn find(interface: Interface<'_>) -> io::Result<Option<Link>> {
    find_by(&socket()?, interface)
}

/// Like [`find`], but in the network namespace of `socket`.
pub(crate) fn find_by(socket: &Socket, interface: Interface<'_>) -> io::Result<Option<Link>> {
    let mut message = LinkMessage::default();
    message
        .attributes
        .push(LinkAttribute::IfName(interface.name.to_owned()));
    let reply = match request(socket, RouteNetlinkMessage::GetLink(message), 0) {
        Err(error) if has_errno(&error, Errno::NODEV) => return Ok(None),
        reply => reply?,
    };
    match reply {
        Some(RouteNetlinkMessage::NewLink(message)) => Ok(Some(parse(&message, interface.alias))),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn parse(message: &LinkMessage, own_alias: &str) -> Link {
    let mut link = Link {
        index: message.header.index,
        kind: Kind::Other,
        is_ours: false,
        mtu: 0,
        is_up: message.header.flags.contains(LinkFlags::Up),
        tx_dropped: 0,
    };
    // A TUN device has a carrier while a process has it open, but the kernel reports the carrier only if the device is up. If
    // the device is multi-queue, the kernel also reports the number of attached files, even while the device is down.
    let mut attached = message.header.flags.contains(LinkFlags::LowerUp);
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::Stats64(stats) => link.tx_dropped = stats.tx_dropped,
            LinkAttribute::IfAlias(alias) => link.is_ours = alias == own_alias,
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(InfoKind::Tun) => link.kind = Kind::Tun { attached: false },
                        LinkInfo::Kind(InfoKind::Wireguard) => link.kind = Kind::Wireguard,
                        LinkInfo::Data(InfoData::Tun(attributes)) => attached |= attributes.iter().any(has_queues),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if let Kind::Tun { attached: is_attached } = &mut link.kind {
        *is_attached = attached;
    }
    link
}

fn has_queues(attribute: &InfoTun) -> bool {
    let mut value = [0; 4];
    if attribute.kind() != TUN_NUM_QUEUES || attribute.value_len() != value.len() {
        return false;
    }
    attribute.emit_value(&mut value);
    u32::from_ne_bytes(value) > 0
}

/// Sets MTU and alias of an interface and brings it up.
pub(crate) fn set_up(index: u32, mtu: u16, alias: &str) -> io::Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    message.attributes = vec![
        LinkAttribute::Mtu(u32::from(mtu)),
        LinkAttribute::IfAlias(alias.to_owned()),
    ];
    request(&socket()?, RouteNetlinkMessage::SetLink(message), NLM_F_ACK).map(drop)
}

/// Removes an interface, if it still exists.
pub(crate) fn remove(index: u32) -> io::Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    match request(&socket()?, RouteNetlinkMessage::DelLink(message), NLM_F_ACK) {
        Err(error) if has_errno(&error, Errno::NODEV) => Ok(()),
        result => result.map(drop),
    }
}

fn has_errno(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// Opens a socket in this thread's network namespace.
pub(crate) fn socket() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    Ok(socket)
}

/// Sends a request and returns its answer; `None` = a plain acknowledgement.
fn request(socket: &Socket, message: RouteNetlinkMessage, flags: u16) -> io::Result<Option<RouteNetlinkMessage>> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send_to(&bytes, &SocketAddr::new(0, 0), 0)?;
    let (answer, _) = socket.recv_from_full()?;
    let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer).map_err(io::Error::other)?;
    match answer.payload {
        NetlinkPayload::InnerMessage(message) => Ok(Some(message)),
        NetlinkPayload::Error(error) if error.code.is_some() => Err(error.to_io()),
        _ => Ok(None),
    }
}
