//! Wraps boringtun for one peer: messages, handshakes, keys and the replay window. [`super::Tunnel`] decides when a message is sent.
//!
//! boringtun's timers are used only to expire sessions, handshakes and cookies. An initiation that they return is sent only if the tunnel
//! has also requested one. The tunnel does not use boringtun's own decisions about when to send, because boringtun
//! - initiates a handshake for a packet without a session, even if it has just answered the peer's initiation and the peer has not
//!   confirmed that session yet;
//! - does not send a passive keepalive if data was sent in both directions between two ticks (cloudflare/boringtun#495);
//! - gives up 90 s after the last message of a peer and then sends nothing more, even with persistent keepalives.

use std::{net::IpAddr, sync::Arc};

use boringtun::noise::{
    Packet, Tunn, TunnResult, errors::WireGuardError, handshake::parse_handshake_anon, rate_limiter::RateLimiter,
};
use x25519_dalek::{PublicKey, StaticSecret};
use zeroize::Zeroizing;

use super::low_order::is_low_order;

/// Length of an initiation (whitepaper §5.4.2).
pub(crate) const INITIATION: usize = 148;
/// Length of a response (§5.4.3).
pub(crate) const RESPONSE: usize = 92;
/// Length of a keepalive, and so the bytes that a data message adds to its packet (§5.4.6).
pub(crate) const OVERHEAD: usize = 32;
/// Length of the shortest IPv4 header (RFC 791 §3.1).
const IPV4_HEADER: usize = 20;
/// Number of slots in which boringtun keeps sessions (`N_SESSIONS`); a session is in the slot of its index modulo this number.
const SLOTS: u32 = 8;

/// The first byte of a message.
pub(super) mod kind {
    pub(crate) const INITIATION: u8 = 1;
    pub(crate) const RESPONSE: u8 = 2;
    pub(crate) const DATA: u8 = 4;
}

/// The device's key pair.
pub(crate) struct Local {
    private: StaticSecret,
    pub(crate) public: PublicKey,
    /// A rate limiter without a limit, because [`crate::handshake_gate`] has checked a handshake message before a
    /// tunnel receives it.
    unlimited: Arc<RateLimiter>,
}

impl Local {
    pub(crate) fn new(private: StaticSecret) -> Self {
        let public = PublicKey::from(&private);
        Self {
            unlimited: Arc::new(RateLimiter::new(&public, u64::MAX)),
            private,
            public,
        }
    }

    /// Decrypts the public key in an initiation. The key is not authenticated until the peer's tunnel decrypts the timestamp.
    pub(crate) fn claimed_peer(&self, initiation: &[u8; INITIATION]) -> Result<PublicKey, Refused> {
        if is_low_order(&ephemeral_key(initiation)) {
            return Err(Refused::Invalid);
        }
        let Ok(Packet::HandshakeInit(initiation)) = Tunn::parse_incoming_packet(initiation) else {
            return Err(Refused::Invalid);
        };
        let half = parse_handshake_anon(&self.private, &self.public, &initiation).map_err(|_| Refused::Invalid)?;
        Ok(PublicKey::from(half.peer_static_public))
    }
}

/// Why a message was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Not a message of this protocol, or not authentic.
    Invalid,
    /// Received before, or older than the replay window or the newest timestamp.
    Replayed,
    /// An initiation too soon after the last initiation of the peer.
    TooSoon,
    /// For a session or a handshake that does not exist.
    UnknownSession,
}

/// An authentic message.
pub(super) enum Message {
    /// An initiation, and the response to it.
    Initiation([u8; RESPONSE]),
    /// The response to our initiation, and the keepalive that confirms the session.
    Response([u8; OVERHEAD]),
    /// A cookie for the next handshake message.
    Cookie,
    Keepalive,
    /// Length and source of a packet.
    Packet(usize, IpAddr),
    /// Data that is not an IP packet, or shorter than the length in its header.
    Malformed,
}

/// The protocol of one peer.
pub(super) struct Protocol {
    local: Arc<Local>,
    peer: PublicKey,
    preshared_key: Option<Zeroizing<[u8; 32]>>,
    /// The upper 24 bits of each session index that boringtun chooses for this peer.
    index: u32,
    /// Created with the first message: it costs two Diffie-Hellman operations and about 10 KiB, too much for thousands of idle peers.
    tunn: Option<Box<Tunn>>,
}

impl Protocol {
    pub(super) fn new(local: Arc<Local>, peer: PublicKey, preshared_key: Option<[u8; 32]>, index: u32) -> Self {
        Self {
            local,
            peer,
            preshared_key: preshared_key.map(Zeroizing::new),
            index,
            tunn: None,
        }
    }

    /// Changes the preshared key. This also drops sessions, handshakes and the peer's newest timestamp, because boringtun cannot change the
    /// key of a tunnel.
    pub(super) fn set_preshared_key(&mut self, preshared_key: Option<[u8; 32]>) {
        self.preshared_key = preshared_key.map(Zeroizing::new);
        self.tunn = None;
    }

    fn tunn(&mut self) -> &mut Tunn {
        self.tunn.get_or_insert_with(|| {
            Box::new(Tunn::new(
                self.local.private.clone(),
                self.peer,
                self.preshared_key.as_deref().copied(),
                // The tunnel sends keepalives; boringtun could not change their interval.
                None,
                self.index,
                Some(Arc::clone(&self.local.unlimited)),
            ))
        })
    }

    /// Whether there is a session to encrypt with.
    pub(super) fn has_session(&self) -> bool {
        let tunn = self.tunn.as_ref();
        tunn.is_some_and(|tunn| tunn.time_since_last_handshake().is_some())
    }

    /// Expires sessions, handshakes and cookies. Returns the initiation that boringtun's timers want to send; `None` = none.
    pub(super) fn expire(&mut self, buffer: &mut [u8]) -> Option<[u8; INITIATION]> {
        match self.tunn.as_mut()?.update_timers(buffer) {
            TunnResult::WriteToNetwork(message) if message.first() == Some(&kind::INITIATION) => {
                (&*message).try_into().ok()
            }
            _ => None,
        }
    }

    /// Creates an initiation. `None` = the peer's key has a low order, or boringtun creates none.
    pub(super) fn initiate(&mut self, buffer: &mut [u8]) -> Option<[u8; INITIATION]> {
        if is_low_order(self.peer.as_bytes()) {
            return None;
        }
        // Expire before the new handshake is created: when boringtun finds that the last session is nine minutes old, it also deletes
        // handshakes in progress.
        if let Some(initiation) = self.expire(buffer) {
            return Some(initiation);
        }
        match self.tunn().format_handshake_initiation(buffer, true) {
            TunnResult::WriteToNetwork(initiation) => (&*initiation).try_into().ok(),
            _ => None,
        }
    }

    /// Encrypts a packet to the beginning of `datagram`, which is at least [`OVERHEAD`] longer; returns the datagram's length. There must
    /// be a session: without one the result is `None`.
    pub(super) fn seal(&mut self, packet: &[u8], datagram: &mut [u8]) -> Option<usize> {
        match self.tunn().encapsulate(packet, datagram) {
            TunnResult::WriteToNetwork(datagram) if datagram.first() == Some(&kind::DATA) => Some(datagram.len()),
            _ => None,
        }
    }

    /// Authenticates a message. Its inner packet is decrypted to the beginning of `plain`, which must be at least as long as
    /// the datagram, and at least [`INITIATION`] bytes.
    pub(super) fn open(&mut self, datagram: &[u8], plain: &mut [u8]) -> Result<Message, Refused> {
        let first = datagram.first().copied().unwrap_or_default();
        if matches!(first, kind::INITIATION | kind::RESPONSE) {
            // With a key of low order boringtun would compute a shared secret that is publicly known.
            if is_low_order(&ephemeral_key(datagram)) || is_low_order(self.peer.as_bytes()) {
                return Err(Refused::Invalid);
            }
        }
        if first == kind::INITIATION {
            // Updates boringtun's clock. Of two sessions, boringtun selects the one whose handshake was later by this clock.
            self.expire(plain);
        }
        if Tunn::parse_incoming_packet(datagram).is_err() {
            return Err(Refused::Invalid);
        }
        if self.tunn.is_none() && first != kind::INITIATION {
            return Err(Refused::UnknownSession);
        }
        Ok(match (first, self.tunn().decapsulate(None, datagram, plain)) {
            (kind::INITIATION, TunnResult::WriteToNetwork(response)) => {
                Message::Initiation((&*response).try_into().map_err(|_| Refused::Invalid)?)
            }
            (kind::RESPONSE, TunnResult::WriteToNetwork(keepalive)) => {
                Message::Response((&*keepalive).try_into().map_err(|_| Refused::Invalid)?)
            }
            (kind::DATA, TunnResult::Done) => Message::Keepalive,
            (_, TunnResult::Done) => Message::Cookie,
            // boringtun accepts a total length that is smaller than the header.
            (kind::DATA, TunnResult::WriteToTunnelV4(packet, _)) if packet.len() < IPV4_HEADER => Message::Malformed,
            (kind::DATA, TunnResult::WriteToTunnelV4(packet, source)) => Message::Packet(packet.len(), source.into()),
            (kind::DATA, TunnResult::WriteToTunnelV6(packet, source)) => Message::Packet(packet.len(), source.into()),
            // The datagram was parsed above, so this error is about the inner packet.
            (kind::DATA, TunnResult::Err(WireGuardError::InvalidPacket)) => Message::Malformed,
            (
                _,
                TunnResult::Err(
                    WireGuardError::DuplicateCounter
                    | WireGuardError::InvalidCounter
                    | WireGuardError::WrongTai64nTimestamp,
                ),
            ) => return Err(Refused::Replayed),
            (
                _,
                TunnResult::Err(
                    WireGuardError::NoCurrentSession | WireGuardError::WrongIndex | WireGuardError::UnexpectedPacket,
                ),
            ) => return Err(Refused::UnknownSession),
            _ => return Err(Refused::Invalid),
        })
    }
}

/// Whether boringtun keeps the sessions of both indices in the same slot, so that the later session overwrites the earlier one.
pub(super) const fn same_slot(one: u32, other: u32) -> bool {
    one % SLOTS == other % SLOTS
}

/// The sender index of an initiation or a response.
pub(super) fn sender(message: &[u8]) -> u32 {
    number(message, 4)
}

/// The receiver index of a data message.
pub(super) fn receiver(data: &[u8]) -> u32 {
    number(data, 4)
}

/// The receiver index of a response.
pub(super) fn response_receiver(response: &[u8]) -> u32 {
    number(response, 8)
}

fn number(message: &[u8], offset: usize) -> u32 {
    message
        .get(offset..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

/// The unencrypted ephemeral key of an initiation or a response; zeros if the message is too short.
fn ephemeral_key(message: &[u8]) -> [u8; 32] {
    let offset = if message.first() == Some(&kind::INITIATION) {
        8
    } else {
        12
    };
    message
        .get(offset..)
        .and_then(|rest| rest.first_chunk())
        .copied()
        .unwrap_or_default()
}
