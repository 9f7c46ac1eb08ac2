//! Encodes requests, and splits received datagrams into messages (struct nlmsghdr, linux/netlink.h).

use netlink_packet_core::{
    DecodeError, Emitable, NLM_F_ACK_TLVS, NLM_F_CAPPED, NLM_F_REQUEST, NLMSG_DONE, NetlinkBuffer,
    NetlinkDeserializable, NetlinkHeader, NetlinkSerializable, NlasIterator, Parseable,
};
use rustix::io::Errno;
use zeroize::Zeroizing;

use crate::Error;

/// Length of struct nlmsghdr.
const HEADER: usize = 16;
/// The first type of a netlink family (`NLMSG_MIN_TYPE`). Lower types are control messages.
pub(crate) const FIRST_TYPE: u16 = 0x10;
/// The attribute of an extended acknowledgement that contains the kernel's reason.
const NLMSGERR_ATTR_MSG: u16 = 1;

/// A notification, whose payload is not yet parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    header: NetlinkHeader,
    payload: Vec<u8>,
}

impl Message {
    /// Builds a message from its type and payload.
    #[must_use]
    pub fn new(message_type: u16, payload: Vec<u8>) -> Self {
        let mut header = NetlinkHeader::default();
        header.message_type = message_type;
        header.length = u32::try_from(HEADER + payload.len()).unwrap_or(u32::MAX);
        Self { header, payload }
    }

    pub(crate) fn from_parts(header: NetlinkHeader, payload: &[u8]) -> Self {
        let payload = payload.to_vec();
        Self { header, payload }
    }

    /// The message type.
    #[must_use]
    pub const fn message_type(&self) -> u16 {
        self.header.message_type
    }

    /// The bytes after the netlink header.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// Parses the message.
    ///
    /// # Errors
    /// [`Error::Malformed`], also for a type that `M` does not know.
    pub fn parse<M: NetlinkDeserializable>(&self) -> Result<M, Error> {
        parse(&self.header, &self.payload)
    }
}

pub(crate) fn parse<M: NetlinkDeserializable>(header: &NetlinkHeader, payload: &[u8]) -> Result<M, Error> {
    M::deserialize(header, payload).map_err(|error| DecodeError::from(error.to_string()).into())
}

/// Encodes a request. A request may contain keys, so the returned buffer is wiped when dropped.
pub(crate) fn encode(request: &impl NetlinkSerializable, flags: u16, sequence: u32) -> Zeroizing<Vec<u8>> {
    let mut bytes = Zeroizing::new(vec![0; HEADER + request.buffer_len()]);
    let mut header = NetlinkHeader::default();
    header.length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    header.message_type = request.message_type();
    header.flags = NLM_F_REQUEST | flags;
    header.sequence_number = sequence;
    header.emit(&mut bytes[..HEADER]);
    request.serialize(&mut bytes[HEADER..]);
    bytes
}

/// Splits a datagram into messages. The iterator ends after the first error.
pub(crate) fn split(mut rest: &[u8]) -> impl Iterator<Item = Result<(NetlinkHeader, &[u8]), Error>> {
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let message = NetlinkBuffer::new_checked(rest).and_then(|buffer| NetlinkHeader::parse(&buffer));
        let message = message.map(|header| {
            // `new_checked` has checked the length. Messages are aligned to four bytes.
            let length = header.length as usize;
            let payload = rest.get(HEADER..length).unwrap_or_default();
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            (header, payload)
        });
        if message.is_err() {
            rest = &[];
        }
        Some(message.map_err(Error::from))
    })
}

/// Reads the result in an acknowledgement (NLMSG_ERROR) or at the end of a dump (NLMSG_DONE).
pub(crate) fn read_result(header: &NetlinkHeader, payload: &[u8]) -> Result<(), Error> {
    let code = payload.first_chunk().copied().map_or(0, i32::from_ne_bytes);
    if code >= 0 {
        return Ok(());
    }
    Err(Error::Kernel {
        errno: Errno::from_raw_os_error(code.wrapping_neg()),
        message: extended_ack(header, payload),
    })
}

/// Reads the kernel's reason. It follows the error code and, in an NLMSG_ERROR, a copy of the request or of its header.
fn extended_ack(header: &NetlinkHeader, payload: &[u8]) -> Option<String> {
    if header.flags & NLM_F_ACK_TLVS == 0 {
        return None;
    }
    let (_, rest) = payload.split_at_checked(4)?;
    let copied = match header.message_type {
        NLMSG_DONE => 0,
        _ if header.flags & NLM_F_CAPPED != 0 => HEADER,
        _ => u32::from_ne_bytes(*rest.first_chunk()?) as usize,
    };
    let attributes = rest.get(copied.next_multiple_of(4)..)?;
    let message = NlasIterator::new(attributes)
        .map_while(Result::ok)
        .find(|attribute| attribute.kind() == NLMSGERR_ATTR_MSG)?;
    let text = String::from_utf8_lossy(message.value());
    Some(text.trim_end_matches('\0').to_owned())
}

#[cfg(test)]
mod tests;
