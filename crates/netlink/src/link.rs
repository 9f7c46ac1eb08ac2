//! Finds, creates, changes and deletes network interfaces, over a [`Socket`] of [`Protocol::Route`](crate::Protocol).

use netlink_packet_core::DecodeError;
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
};

use crate::{Errno, Error, Socket};

/// Returns the interface with this name; `None` = it does not exist.
///
/// # Errors
/// As [`Socket::get`].
pub fn by_name(socket: &Socket, name: &str) -> Result<Option<LinkMessage>, Error> {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::IfName(name.to_owned()));
    find(socket, message)
}

/// Returns the interface with this index; `None` = it does not exist.
///
/// # Errors
/// As [`Socket::get`].
pub fn by_index(socket: &Socket, index: u32) -> Result<Option<LinkMessage>, Error> {
    find(socket, with_index(index))
}

fn find(socket: &Socket, message: LinkMessage) -> Result<Option<LinkMessage>, Error> {
    match socket.get(&RouteNetlinkMessage::GetLink(message)) {
        Ok(RouteNetlinkMessage::NewLink(link)) => Ok(Some(link)),
        Ok(_) => Err(DecodeError::from("it is not about an interface").into()),
        Err(error) if error.errno() == Some(Errno::NODEV) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Creates an interface in state down, and returns its index.
///
/// # Errors
/// As [`Socket::create`] and [`by_name`]. [`Errno::OPNOTSUPP`] = the kernel does not have this kind of interface; [`Errno::NODEV`] =
/// another program deleted the new interface at once.
pub fn create(socket: &Socket, name: &str, kind: InfoKind) -> Result<u32, Error> {
    let mut message = LinkMessage::default();
    message.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)]),
    ];
    socket.create(&RouteNetlinkMessage::NewLink(message))?;
    let link = by_name(socket, name)?.ok_or(Error::Kernel {
        errno: Errno::NODEV,
        message: Some("the new interface was deleted at once".to_owned()),
    })?;
    Ok(link.header.index)
}

/// Deletes an interface. If it does not exist, that is no error.
///
/// # Errors
/// As [`Socket::change`].
pub fn delete(socket: &Socket, index: u32) -> Result<(), Error> {
    match socket.change(&RouteNetlinkMessage::DelLink(with_index(index))) {
        Err(error) if error.errno() == Some(Errno::NODEV) => Ok(()),
        result => result,
    }
}

/// Brings an interface up.
///
/// # Errors
/// As [`Socket::change`].
pub fn set_up(socket: &Socket, index: u32) -> Result<(), Error> {
    let mut message = with_index(index);
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    socket.change(&RouteNetlinkMessage::SetLink(message))
}

/// Sets the MTU, in bytes.
///
/// # Errors
/// As [`Socket::change`].
pub fn set_mtu(socket: &Socket, index: u32, mtu: u32) -> Result<(), Error> {
    set(socket, index, vec![LinkAttribute::Mtu(mtu)])
}

/// Sets attributes in one request.
///
/// # Errors
/// As [`Socket::change`].
pub fn set(socket: &Socket, index: u32, attributes: Vec<LinkAttribute>) -> Result<(), Error> {
    let mut message = with_index(index);
    message.attributes = attributes;
    socket.change(&RouteNetlinkMessage::SetLink(message))
}

fn with_index(index: u32) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message
}
