//! Sends one request to the kernel over a blocking netlink socket and reads the complete answer.
//!
//! The kernel answers before the system call returns, so nothing blocks for long. An async client would need a task and
//! would make [`super::super::Device`] async.

use std::{fmt::Debug, io, sync::Mutex, sync::PoisonError};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage, NetlinkPayload,
    NetlinkSerializable,
};
use netlink_sys::{Socket, SocketAddr};
use zeroize::Zeroizing;

/// `NLM_F_DUMP_INTR` (netlink(7)): the dumped data changed meanwhile, so parts may be missing or duplicated.
const DUMP_INTERRUPTED: u16 = 0x10;
/// Attempts for a dump that is not interrupted.
const ATTEMPTS: usize = 10;

/// A socket of the network namespace in which it was opened.
pub(super) struct Netlink(Mutex<(Socket, u32)>);

impl Netlink {
    pub(super) fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self(Mutex::new((socket, 0))))
    }

    /// Sends a request for one object. `flags` are added to "request" and "acknowledge".
    pub(super) fn request<M>(&self, message: M, flags: u16) -> io::Result<Vec<M>>
    where
        M: NetlinkSerializable + NetlinkDeserializable + Debug,
    {
        self.exchange(message, NLM_F_ACK | flags).map(|(answers, _)| answers)
    }

    /// Dumps all objects of a kind; repeats until the dump is consistent.
    pub(super) fn dump<M>(&self, message: M) -> io::Result<Vec<M>>
    where
        M: NetlinkSerializable + NetlinkDeserializable + Debug + Clone,
    {
        for _ in 0..ATTEMPTS {
            let (answers, interrupted) = self.exchange(message.clone(), NLM_F_DUMP)?;
            if !interrupted {
                return Ok(answers);
            }
        }
        Err(io::Error::other("every attempt to dump it was interrupted by a change"))
    }

    /// The answers, and whether a dump was interrupted.
    fn exchange<M>(&self, message: M, flags: u16) -> io::Result<(Vec<M>, bool)>
    where
        M: NetlinkSerializable + NetlinkDeserializable + Debug,
    {
        let mut guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (socket, sequence) = &mut *guard;
        *sequence = sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = *sequence;
        let mut request = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        request.finalize();
        // Requests and answers contain keys, so the buffers are wiped.
        let mut buffer = Zeroizing::new(vec![0; request.buffer_len()]);
        request.serialize(&mut buffer);
        socket.send(&buffer, 0)?;
        let (mut answers, mut interrupted) = (Vec::new(), false);
        loop {
            let datagram = Zeroizing::new(socket.recv_from_full()?.0);
            let mut rest = &datagram[..];
            while !rest.is_empty() {
                let answer = NetlinkMessage::<M>::deserialize(rest).map_err(|e| io::Error::other(e.to_string()))?;
                let length = (answer.header.length as usize)
                    .next_multiple_of(4)
                    .clamp(4, rest.len().max(4));
                rest = rest.get(length..).unwrap_or_default();
                if answer.header.sequence_number != *sequence {
                    continue; // belongs to an abandoned request
                }
                interrupted |= answer.header.flags & DUMP_INTERRUPTED != 0;
                match answer.payload {
                    NetlinkPayload::InnerMessage(message) => answers.push(message),
                    NetlinkPayload::Error(error) => match error.code {
                        None => return Ok((answers, interrupted)),
                        Some(code) => return Err(io::Error::from_raw_os_error(-code.get())),
                    },
                    NetlinkPayload::Done(done) if done.code < 0 => {
                        return Err(io::Error::from_raw_os_error(-done.code));
                    }
                    NetlinkPayload::Done(_) => return Ok((answers, interrupted)),
                    _ => {}
                }
            }
        }
    }
}
