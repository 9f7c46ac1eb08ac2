//! Receives multicast notifications.

use std::io;

use rustix::io::Errno;
use socket2::{SockFilter, SockRef};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{
    Error, Message, Protocol,
    message::{FIRST_TYPE, split},
    socket::{connect, receive},
};

/// Maximum number of datagrams that one call of [`Events::next`] reads, so that a flood delays no other task.
const BATCH: usize = 1_024;
/// The control messages after which notifications may be missing: NLMSG_ERROR and NLMSG_OVERRUN (linux/netlink.h).
const ERROR_TYPES: [u16; 2] = [2, 4];

/// A received notification, or the loss of some.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A notification.
    Message(Message),
    /// Notifications were lost. Dump all objects again.
    Lost,
}

/// The notifications to receive.
#[derive(Debug, Clone, Copy, Default)]
pub struct Subscription<'a> {
    /// Numbers of multicast groups, for example `RTNLGRP_*` (linux/rtnetlink.h).
    pub groups: &'a [u32],
    /// Size of the receive buffer in bytes; `None` = the kernel's default. Best effort.
    pub receive_buffer: Option<usize>,
    /// A BPF program that returns how many bytes of a datagram to keep; 0 = drop the datagram.
    pub filter: Option<&'a [SockFilter]>,
}

/// A socket for notifications, of the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Events {
    socket: AsyncFd<netlink_sys::Socket>,
    buffer: Vec<u8>,
}

impl Events {
    /// Subscribes in the network namespace of the calling thread. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Open`].
    pub fn open(protocol: Protocol, subscription: Subscription<'_>) -> Result<Self, Error> {
        let Subscription {
            groups,
            receive_buffer,
            filter,
        } = subscription;
        let open = || {
            let socket = connect(protocol)?;
            if let Some(bytes) = receive_buffer {
                let _ = SockRef::from(&socket).set_recv_buffer_size(bytes);
            }
            // The filter is attached before the groups are joined, so that no notification arrives unfiltered.
            if let Some(filter) = filter {
                SockRef::from(&socket).attach_filter(filter)?;
            }
            for group in groups {
                socket.add_membership(*group)?;
            }
            Self::new(socket)
        };
        open().map_err(Error::Open)
    }

    #[allow(unsafe_code, reason = "tokio has no safe way to register a file descriptor")]
    pub(crate) fn new(socket: netlink_sys::Socket) -> io::Result<Self> {
        socket.set_non_blocking(true)?;
        // SAFETY: a `netlink_sys::Socket` owns its descriptor, never changes it, and closes it only when it is dropped. The
        // `AsyncFd` owns the socket, and nothing here replaces it.
        let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }?;
        let buffer = Vec::new();
        Ok(Self { socket, buffer })
    }

    /// Waits for events and returns all that have arrived, from at most 1,024 datagrams. Cancel safe.
    ///
    /// # Errors
    /// [`Error::Socket`]: the socket is unusable. Subscribe again and dump all objects.
    pub async fn next(&mut self) -> Result<Vec<Event>, Error> {
        loop {
            let mut ready = self.socket.readable().await.map_err(Error::Socket)?;
            let buffer = &mut self.buffer;
            if let Ok(events) = ready.try_io(|socket| drain(socket.get_ref(), buffer)) {
                let events = events.map_err(Error::Socket)?;
                // A datagram may contain no event.
                if !events.is_empty() {
                    return Ok(events);
                }
            }
        }
    }
}

/// Receives all events that have arrived, up to [`BATCH`] datagrams; `WouldBlock` = none has arrived.
fn drain(socket: &netlink_sys::Socket, buffer: &mut Vec<u8>) -> io::Result<Vec<Event>> {
    let mut events = Vec::new();
    for number in 0..BATCH {
        match receive(socket, buffer) {
            Ok(length) => events.extend(parse_datagram(&buffer[..length])),
            Err(Errno::AGAIN) if number > 0 => break,
            Err(Errno::NOBUFS) => events.push(Event::Lost),
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(events)
}

fn parse_datagram(datagram: &[u8]) -> impl Iterator<Item = Event> {
    split(datagram).filter_map(|message| match message {
        Ok((header, payload)) if header.message_type >= FIRST_TYPE => {
            Some(Event::Message(Message::from_parts(header, payload)))
        }
        Ok((header, _)) => ERROR_TYPES.contains(&header.message_type).then_some(Event::Lost),
        Err(_) => Some(Event::Lost),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_or_error_datagram_counts_as_lost_events() {
        let message = |message_type: u16| {
            let mut bytes = 20_u32.to_ne_bytes().to_vec();
            bytes.extend(message_type.to_ne_bytes());
            bytes.resize(20, 0);
            bytes
        };
        let events = |datagram: &[u8]| parse_datagram(datagram).collect::<Vec<_>>();
        let [noop, error, overrun, new_link] = [1, 2, 4, 16];
        assert_eq!(
            events(&[message(new_link), message(noop), message(overrun)].concat()),
            [Event::Message(Message::new(new_link, vec![0; 4])), Event::Lost]
        );
        assert_eq!(events(&message(new_link)[..19]), [Event::Lost]);
        assert_eq!(events(&message(error)), [Event::Lost]);
        assert_eq!(events(&[]), []);
    }
}
