//! Sends one request at a time to the kernel and reads the complete answer.

use std::{
    fmt, io,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use netlink_packet_core::{
    DecodeError, NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_EXCL, NLM_F_REPLACE, NLMSG_DONE,
    NLMSG_ERROR, NetlinkDeserializable, NetlinkHeader, NetlinkSerializable,
};
use netlink_sys::{
    SocketAddr,
    protocols::{NETLINK_GENERIC, NETLINK_NETFILTER, NETLINK_ROUTE},
};
use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags, recv, send},
};
use socket2::SockRef;
use zeroize::Zeroize;

use crate::{
    Error, Events,
    message::{FIRST_TYPE, encode, parse, read_result, split},
};

/// How long to wait for an answer. A correct kernel queues the answer, or the first part of a dump, before `send` returns.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);
/// How often a dump is tried. A change of the objects can interrupt every attempt.
pub(crate) const ATTEMPTS: usize = 10;
/// Initial size of the buffer for one datagram. It grows for longer datagrams. The kernel sends dumps in parts of at most 32 KiB if the
/// buffer is large enough.
const BUFFER: usize = 32 * 1024;

/// A netlink protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// Links, addresses, routes and rules (rtnetlink(7)); messages of netlink-packet-route.
    Route,
    /// Generic netlink, such as WireGuard's; messages of netlink-packet-generic.
    Generic,
    /// nftables, conntrack and nflog; messages of netlink-packet-netfilter.
    Netfilter,
}

/// A socket for requests. Several threads may share it: a request waits for the previous one.
pub struct Socket(Mutex<Exchange>);

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket").finish_non_exhaustive()
    }
}

impl Socket {
    /// Opens a socket in the network namespace of the calling thread.
    ///
    /// # Errors
    /// [`Error::Open`].
    pub fn open(protocol: Protocol) -> Result<Self, Error> {
        let open = || {
            let socket = connect(protocol)?;
            // Requests the kernel's reasons for errors (Linux 4.12), without a copy of the request (Linux 4.3).
            let _ = socket.set_ext_ack(true);
            let _ = socket.set_cap_ack(true);
            if protocol == Protocol::Route {
                // The kernel filters dumps by the attributes of the request. Before Linux 4.20 it does not, so callers
                // filter too.
                let _ = socket.set_netlink_get_strict_chk(true);
            }
            SockRef::from(&socket).set_read_timeout(Some(TIMEOUT))?;
            Ok(socket)
        };
        let socket = open().map_err(Error::Open)?;
        Ok(Self(Mutex::new(Exchange {
            socket,
            sequence: 0,
            buffer: vec![0; BUFFER],
        })))
    }

    /// Requests one object.
    ///
    /// # Errors
    /// [`Error::Kernel`], for example if the object does not exist; [`Error::NoAnswer`], [`Error::Socket`] or [`Error::Malformed`].
    pub fn get<M: NetlinkSerializable + NetlinkDeserializable>(&self, request: &M) -> Result<M, Error> {
        let mut exchange = self.lock();
        exchange.send(request, 0)?;
        let mut answer = None;
        exchange.receive(true, |header, payload| answer = Some(parse(header, payload)))?;
        answer.unwrap_or_else(|| Err(DecodeError::from("it contains no object").into()))
    }

    /// Changes or deletes an object.
    ///
    /// # Errors
    /// [`Error::Kernel`], [`Error::NoAnswer`] or [`Error::Socket`].
    pub fn change(&self, request: &impl NetlinkSerializable) -> Result<(), Error> {
        self.send_change(request, 0)
    }

    /// Creates an object.
    ///
    /// # Errors
    /// As [`Self::change`]. [`Errno::EXIST`] = the object exists already.
    pub fn create(&self, request: &impl NetlinkSerializable) -> Result<(), Error> {
        self.send_change(request, NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Creates an object, or replaces the one with the same key.
    ///
    /// # Errors
    /// As [`Self::change`].
    pub fn replace(&self, request: &impl NetlinkSerializable) -> Result<(), Error> {
        self.send_change(request, NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Requests all objects of a kind and returns the values that `pick` returns for them. If the objects change meanwhile
    /// (`NLM_F_DUMP_INTR`: some may be missing or duplicated), the dump starts again, so `pick` may get an object repeatedly.
    ///
    /// # Errors
    /// [`Error::Malformed`] if any object cannot be parsed; [`Error::Interrupted`] after ten attempts; or an
    /// error of [`Self::change`].
    pub fn dump<M, T>(&self, request: &M, mut pick: impl FnMut(M) -> Option<T>) -> Result<Vec<T>, Error>
    where
        M: NetlinkSerializable + NetlinkDeserializable,
    {
        self.dump_parsed(request, |object| object.map(&mut pick).transpose())
    }

    /// As [`Self::dump`], but leaves out objects that cannot be parsed. It is meant for objects that other programs create,
    /// so that an object with unknown attributes of a newer kernel does not hide the others.
    ///
    /// # Errors
    /// As [`Self::dump`], without [`Error::Malformed`] for a single object.
    pub fn dump_readable<M, T>(&self, request: &M, mut pick: impl FnMut(M) -> Option<T>) -> Result<Vec<T>, Error>
    where
        M: NetlinkSerializable + NetlinkDeserializable,
    {
        self.dump_parsed(request, |object| object.ok().and_then(&mut pick).map(Ok))
    }

    /// Turns the socket into a receiver of notifications that the kernel sends to this socket, for example after an nflog
    /// request. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Open`].
    pub fn into_events(self) -> Result<Events, Error> {
        let Exchange { socket, .. } = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        Events::new(socket).map_err(Error::Open)
    }

    fn send_change(&self, request: &impl NetlinkSerializable, flags: u16) -> Result<(), Error> {
        let mut exchange = self.lock();
        exchange.send(request, NLM_F_ACK | flags)?;
        exchange.receive(false, |_, _| ()).map(drop)
    }

    fn dump_parsed<M, T>(
        &self,
        request: &M,
        mut pick: impl FnMut(Result<M, Error>) -> Option<Result<T, Error>>,
    ) -> Result<Vec<T>, Error>
    where
        M: NetlinkSerializable + NetlinkDeserializable,
    {
        let mut exchange = self.lock();
        for _ in 0..ATTEMPTS {
            let mut objects = Ok(Vec::new());
            exchange.send(request, NLM_F_DUMP)?;
            // After an object that cannot be parsed, the rest of the answer is read too: on one socket, the kernel refuses a new dump
            // until the answer to the previous one was read.
            let is_consistent = exchange.receive(false, |header, payload| {
                if let Ok(picked) = &mut objects {
                    match pick(parse(header, payload)) {
                        Some(Ok(object)) => picked.push(object),
                        Some(Err(error)) => objects = Err(error),
                        None => {}
                    }
                }
            })?;
            if is_consistent {
                return objects;
            }
        }
        Err(Error::Interrupted)
    }

    fn lock(&self) -> MutexGuard<'_, Exchange> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The socket with the state of the current request.
struct Exchange {
    socket: netlink_sys::Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Exchange {
    fn send(&mut self, request: &impl NetlinkSerializable, flags: u16) -> Result<(), Error> {
        self.sequence = self.sequence.wrapping_add(1);
        let bytes = encode(request, flags, self.sequence);
        let send = || send(&self.socket, &bytes, SendFlags::empty());
        let sent = rustix::io::retry_on_intr(send).map_err(|errno| Error::Socket(errno.into()))?;
        debug_assert_eq!(sent, bytes.len(), "netlink sends a datagram as a whole");
        Ok(())
    }

    /// Calls `each` for the objects of the answer, or only for the first one if `is_single`. Returns whether the objects are
    /// consistent.
    fn receive(&mut self, is_single: bool, mut each: impl FnMut(&NetlinkHeader, &[u8])) -> Result<bool, Error> {
        let mut is_consistent = true;
        loop {
            let length = match receive(&self.socket, &mut self.buffer) {
                Err(Errno::AGAIN) => return Err(Error::NoAnswer),
                length => length.map_err(|errno| Error::Socket(errno.into()))?,
            };
            let datagram = &mut self.buffer[..length];
            let mut answer = Answer {
                sequence: self.sequence,
                is_single,
                is_consistent,
            };
            let is_end = answer.read(datagram, &mut each);
            is_consistent = answer.is_consistent;
            // Answers may contain keys.
            datagram.zeroize();
            if is_end? {
                return Ok(is_consistent);
            }
        }
    }
}

/// Reads one datagram of the answer to a request.
struct Answer {
    /// The sequence number of the request.
    sequence: u32,
    /// Whether the answer ends with the first object.
    is_single: bool,
    /// Whether no message of the answer has `NLM_F_DUMP_INTR` so far.
    is_consistent: bool,
}

impl Answer {
    /// Reads one datagram of the answer, and returns whether it is the last one.
    fn read(&mut self, datagram: &[u8], each: &mut impl FnMut(&NetlinkHeader, &[u8])) -> Result<bool, Error> {
        for message in split(datagram) {
            let (header, payload) = message?;
            if header.sequence_number != self.sequence {
                continue; // belongs to an earlier request
            }
            self.is_consistent &= header.flags & NLM_F_DUMP_INTR == 0;
            match header.message_type {
                NLMSG_ERROR | NLMSG_DONE => return read_result(&header, payload).map(|()| true),
                FIRST_TYPE.. => {
                    each(&header, payload);
                    if self.is_single {
                        return Ok(true);
                    }
                }
                _ => {}
            }
        }
        Ok(false)
    }
}

/// Opens a socket that exchanges messages only with the kernel.
pub(crate) fn connect(protocol: Protocol) -> io::Result<netlink_sys::Socket> {
    let mut socket = netlink_sys::Socket::new(match protocol {
        Protocol::Route => NETLINK_ROUTE,
        Protocol::Generic => NETLINK_GENERIC,
        Protocol::Netfilter => NETLINK_NETFILTER,
    })?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    Ok(socket)
}

/// Receives one datagram into the buffer, which grows as needed, and returns its length.
pub(crate) fn receive(socket: &netlink_sys::Socket, buffer: &mut Vec<u8>) -> rustix::io::Result<usize> {
    let mut none = [0_u8; 0];
    let peek = || recv(socket, &mut none[..], RecvFlags::PEEK | RecvFlags::TRUNC);
    let (_, length) = rustix::io::retry_on_intr(peek)?;
    if length > buffer.len() {
        buffer.resize(length, 0);
    }
    let (length, _) = rustix::io::retry_on_intr(|| recv(socket, &mut buffer[..], RecvFlags::empty()))?;
    Ok(length)
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::{Emitable, NLMSG_NOOP};

    use super::*;

    fn message(message_type: u16, flags: u16, sequence: u32) -> Vec<u8> {
        let mut header = NetlinkHeader::default();
        header.length = 20;
        header.message_type = message_type;
        header.flags = flags;
        header.sequence_number = sequence;
        let mut bytes = vec![0; 20];
        header.emit(&mut bytes);
        bytes
    }

    /// Reads a datagram that answers request 7. Returns the types of its objects, whether it is the last one, and whether
    /// it is consistent.
    fn read(is_single: bool, messages: &[Vec<u8>]) -> (Vec<u16>, bool, bool) {
        let mut answer = Answer {
            sequence: 7,
            is_single,
            is_consistent: true,
        };
        let mut objects = Vec::new();
        let is_end = answer.read(&messages.concat(), &mut |header, _| objects.push(header.message_type));
        (objects, is_end.unwrap(), answer.is_consistent)
    }

    #[test]
    fn answer_ends_at_ack_end_of_dump_or_single_object() {
        let object = || message(16, 0, 7);
        assert_eq!(read(false, &[object(), object()]), (vec![16, 16], false, true));
        assert_eq!(read(true, &[object(), object()]), (vec![16], true, true));
        for end in [NLMSG_ERROR, NLMSG_DONE] {
            let messages = [object(), message(end, 0, 7), object()];
            assert_eq!(read(false, &messages), (vec![16], true, true));
        }
    }

    #[test]
    fn answers_to_earlier_requests_are_skipped() {
        let messages = [message(16, 0, 6), message(NLMSG_DONE, 0, 6), message(NLMSG_NOOP, 0, 7)];
        assert_eq!(read(true, &messages), (vec![], false, true));
    }

    #[test]
    fn interrupted_dump_is_not_consistent() {
        let interrupted = message(16, NLM_F_DUMP_INTR, 7);
        let messages = [interrupted, message(16, 0, 7), message(NLMSG_DONE, 0, 7)];
        assert_eq!(read(false, &messages), (vec![16, 16], true, false));
        let last = message(NLMSG_DONE, NLM_F_DUMP_INTR, 7);
        assert_eq!(read(false, &[last]), (vec![], true, false));
    }
}
