//! A network interface's own properties over rtnetlink, one blocking request at a time: for the moment a device is opened, set up,
//! looked at or removed. Addresses and routes are `crate::route`'s.

use std::io;

use rtnetlink::{
    packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload, Nla},
    packet_route::{
        RouteNetlinkMessage,
        link::{InfoData, InfoKind, InfoTun, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
    },
    sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE},
};
use rustix::io::Errno;

use crate::device::ALIAS;

/// `IFLA_TUN_NUM_QUEUES` (Linux `include/uapi/linux/if_link.h`): files attached now.
const TUN_NUM_QUEUES: u16 = 8;

/// An interface that stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) kind: Kind,
    /// It carries our alias.
    pub(super) ours: bool,
    pub(super) mtu: u32,
    pub(super) up: bool,
    /// Packets sent into it that nobody took: of a TUN device those that found its queue full, or no reader.
    pub(super) untaken: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A TUN device, and whether a process holds it.
    Tun {
        attached: bool,
    },
    Wireguard,
    Other,
}

/// The interface of this name, if there is one.
pub(super) fn find(name: &str) -> io::Result<Option<Link>> {
    find_by(&socket()?, name)
}

/// [`find`] in the network namespace that the socket was made in.
pub(super) fn find_by(socket: &Socket, name: &str) -> io::Result<Option<Link>> {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::IfName(name.to_owned()));
    let reply = match request(socket, RouteNetlinkMessage::GetLink(message), 0) {
        Err(error) if is(&error, Errno::NODEV) => return Ok(None),
        reply => reply?,
    };
    match reply {
        Some(RouteNetlinkMessage::NewLink(message)) => Ok(Some(read(&message))),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn read(message: &LinkMessage) -> Link {
    let mut link = Link {
        index: message.header.index,
        kind: Kind::Other,
        ours: false,
        mtu: 0,
        up: message.header.flags.contains(LinkFlags::Up),
        untaken: 0,
    };
    // A TUN device has a carrier while someone holds it.
    let mut attached = message.header.flags.contains(LinkFlags::LowerUp);
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::Stats64(stats) => link.untaken = stats.tx_dropped,
            LinkAttribute::IfAlias(alias) => link.ours = alias == ALIAS,
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(InfoKind::Tun) => link.kind = Kind::Tun { attached: false },
                        LinkInfo::Kind(InfoKind::Wireguard) => link.kind = Kind::Wireguard,
                        LinkInfo::Data(InfoData::Tun(facts)) => attached |= facts.iter().any(holds),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if let Kind::Tun { attached: held } = &mut link.kind {
        *held = attached;
    }
    link
}

fn holds(fact: &InfoTun) -> bool {
    let mut value = [0; 4];
    if fact.kind() != TUN_NUM_QUEUES || fact.value_len() != value.len() {
        return false;
    }
    fact.emit_value(&mut value);
    u32::from_ne_bytes(value) > 0
}

/// Sets MTU and alias and brings it up.
pub(super) fn set_up(index: u32, mtu: u16) -> io::Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    message.attributes = vec![
        LinkAttribute::Mtu(u32::from(mtu)),
        LinkAttribute::IfAlias(ALIAS.to_owned()),
    ];
    request(&socket()?, RouteNetlinkMessage::SetLink(message), NLM_F_ACK).map(drop)
}

/// Removes an interface; one that is gone is fine too.
pub(super) fn remove(index: u32) -> io::Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    match request(&socket()?, RouteNetlinkMessage::DelLink(message), NLM_F_ACK) {
        Err(error) if is(&error, Errno::NODEV) => Ok(()),
        result => result.map(drop),
    }
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// For requests in this thread's network namespace.
pub(super) fn socket() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    Ok(socket)
}

/// One request, one answer: `None` for a plain acknowledgement.
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
