//! The four messages and where their parts are (whitepaper §5.4). All numbers are little-endian.

/// Bytes of an initiation.
pub const INITIATION: usize = 148;
/// Bytes of a response.
pub const RESPONSE: usize = 92;
/// Bytes of a cookie reply.
pub const COOKIE_REPLY: usize = 64;
/// What a data message adds to its packet: header and tag.
pub const OVERHEAD: usize = HEADER + TAG;
/// Of a data message, before the packet: type, receiver, counter.
pub const HEADER: usize = 16;
/// Of Poly1305.
pub(crate) const TAG: usize = 16;
/// Both macs at the end of an initiation or a response.
pub(crate) const MACS: usize = 32;

pub(crate) const INITIATION_TYPE: [u8; 4] = [1, 0, 0, 0];
pub(crate) const RESPONSE_TYPE: [u8; 4] = [2, 0, 0, 0];
pub(crate) const COOKIE_REPLY_TYPE: [u8; 4] = [3, 0, 0, 0];
pub(crate) const DATA_TYPE: [u8; 4] = [4, 0, 0, 0];

/// A datagram that has the shape of a message; nothing in it is authenticated yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message<'a> {
    /// The first message of a handshake.
    Initiation(&'a [u8; INITIATION]),
    /// The second.
    Response(&'a [u8; RESPONSE]),
    /// What an overloaded responder says instead.
    CookieReply(&'a [u8; COOKIE_REPLY]),
    /// A packet in a session, perhaps an empty one.
    Data(&'a [u8]),
}

impl<'a> Message<'a> {
    /// `None` = no message of this protocol.
    #[must_use]
    pub fn parse(datagram: &'a [u8]) -> Option<Self> {
        match *datagram.first_chunk::<4>()? {
            DATA_TYPE if datagram.len() >= OVERHEAD => Some(Self::Data(datagram)),
            INITIATION_TYPE => datagram.try_into().ok().map(Self::Initiation),
            RESPONSE_TYPE => datagram.try_into().ok().map(Self::Response),
            COOKIE_REPLY_TYPE => datagram.try_into().ok().map(Self::CookieReply),
            _ => None,
        }
    }

    /// The index by which its receiver knows the session or handshake; an initiation has none.
    #[must_use]
    pub fn receiver(&self) -> Option<u32> {
        match self {
            Self::Initiation(_) => None,
            Self::Response(message) => Some(number(*message, 8)),
            Self::CookieReply(message) => Some(number(*message, 4)),
            Self::Data(message) => Some(number(message, 4)),
        }
    }
}

/// The number of 32 bits at that place; 0 past the end.
pub(crate) fn number(message: &[u8], at: usize) -> u32 {
    message
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_message_has_its_type_its_length_and_its_receiver() {
        let with = |kind: u8, length: usize| {
            let mut bytes: Vec<u8> = (0..=u8::MAX).cycle().take(length).collect();
            if let Some(first) = bytes.first_chunk_mut::<4>() {
                *first = [kind, 0, 0, 0];
            }
            bytes
        };
        let receiver = |bytes: &[u8]| Message::parse(bytes).map(|message| message.receiver());
        assert_eq!(receiver(&with(1, 148)), Some(None));
        assert_eq!(receiver(&with(2, 92)), Some(Some(0x0b0a_0908)));
        assert_eq!(receiver(&with(3, 64)), Some(Some(0x0706_0504)));
        assert_eq!(receiver(&with(4, 32)), Some(Some(0x0706_0504)));
        assert_eq!(receiver(&with(4, 1500)), Some(Some(0x0706_0504)));
        for (kind, length) in [
            (1, 147),
            (1, 149),
            (2, 91),
            (3, 65),
            (4, 31),
            (0, 148),
            (5, 32),
            (4, 0),
            (4, 3),
        ] {
            assert_eq!(receiver(&with(kind, length)), None, "type {kind}, {length} bytes");
        }
        assert_eq!(receiver(&[4; 64]), None, "the reserved bytes are zero");
    }
}
