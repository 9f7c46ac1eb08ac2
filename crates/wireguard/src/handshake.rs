//! The two messages of a handshake, without their macs (whitepaper §5.4.2 and §5.4.3), and the session that comes of them.

use std::time::Instant;

use snow::HandshakeState;
use x25519_dalek::{PublicKey, StaticSecret};
use zeroize::Zeroizing;

use crate::{
    Refused, Session, Timestamp,
    message::{INITIATION, INITIATION_TYPE, MACS, RESPONSE, RESPONSE_TYPE, number},
    noise,
};

/// Who we are.
pub struct Local {
    /// Our private key; it is wiped when this goes.
    pub private: StaticSecret,
    /// What belongs to it.
    pub public: PublicKey,
}

impl Local {
    /// The owner of that key.
    #[must_use]
    pub fn new(private: StaticSecret) -> Self {
        Self {
            public: PublicKey::from(&private),
            private,
        }
    }
}

/// A handshake that we began.
pub struct Initiator {
    noise: Box<HandshakeState>,
    index: u32,
}

/// Begins a handshake: its first message, the macs still zero. `index` is what the peer will call us by; `psk` is zeros where there is
/// none.
///
/// # Errors
/// The peer's key is no point that a secret can be shared with, or there is no randomness.
pub fn initiate(
    local: &Local,
    peer: &PublicKey,
    psk: &[u8; 32],
    index: u32,
    timestamp: Timestamp,
) -> Result<(Initiator, [u8; INITIATION]), Refused> {
    let mut message = [0; INITIATION];
    message[..4].copy_from_slice(&INITIATION_TYPE);
    message[4..8].copy_from_slice(&index.to_le_bytes());
    let mut noise = noise::initiator(local, peer, psk).map_err(|_| Refused::Invalid)?;
    noise
        .write_message(timestamp.as_bytes(), &mut message[8..INITIATION - MACS])
        .map_err(|_| Refused::Invalid)?;
    let initiator = Initiator {
        noise: Box::new(noise),
        index,
    };
    Ok((initiator, message))
}

impl Initiator {
    /// What the peer calls us by.
    #[must_use]
    pub const fn index(&self) -> u32 {
        self.index
    }

    /// Ends the handshake. After an error the true response may still come.
    ///
    /// # Errors
    /// It is not the peer's response to our initiation.
    pub fn finish(&mut self, response: &[u8; RESPONSE], now: Instant) -> Result<Session, Refused> {
        if number(response, 8) != self.index {
            return Err(Refused::UnknownSession);
        }
        self.noise
            .read_message(&response[12..RESPONSE - MACS], &mut [0; 16])
            .map_err(|_| Refused::Invalid)?;
        let (ours, theirs) = keys(&mut self.noise);
        Ok(Session::new(self.index, number(response, 4), &ours, &theirs, true, now))
    }
}

/// An initiation that was meant for us, from the owner of a key; whether that is a peer of ours is for the caller to say.
pub struct Initiation {
    noise: Box<HandshakeState>,
    sender: u32,
    peer: PublicKey,
    timestamp: Timestamp,
}

/// Opens an initiation.
///
/// # Errors
/// It is not for our key, or not authentic.
pub fn read_initiation(local: &Local, message: &[u8; INITIATION]) -> Result<Initiation, Refused> {
    let mut noise = noise::responder(local).map_err(|_| Refused::Invalid)?;
    let mut timestamp = [0; Timestamp::LENGTH + 16];
    noise
        .read_message(&message[8..INITIATION - MACS], &mut timestamp)
        .map_err(|_| Refused::Invalid)?;
    let peer: [u8; 32] = noise
        .get_remote_static()
        .and_then(|key| key.first_chunk().copied())
        .ok_or(Refused::Invalid)?;
    Ok(Initiation {
        noise: Box::new(noise),
        sender: number(message, 4),
        peer: PublicKey::from(peer),
        timestamp: Timestamp::from_bytes(*timestamp.first_chunk().ok_or(Refused::Invalid)?),
    })
}

impl Initiation {
    /// Who began it.
    #[must_use]
    pub const fn peer(&self) -> &PublicKey {
        &self.peer
    }

    /// When, by its clock: not later than another one of the same peer = a replay.
    #[must_use]
    pub const fn timestamp(&self) -> Timestamp {
        self.timestamp
    }

    /// Ends the handshake on this side: the response, the macs still zero, and the session that the peer has once it has read it.
    ///
    /// # Errors
    /// The ephemeral key of the initiation is of low order, or there is no randomness.
    pub fn answer(mut self, psk: &[u8; 32], index: u32, now: Instant) -> Result<([u8; RESPONSE], Session), Refused> {
        let mut message = [0; RESPONSE];
        message[..4].copy_from_slice(&RESPONSE_TYPE);
        message[4..8].copy_from_slice(&index.to_le_bytes());
        message[8..12].copy_from_slice(&self.sender.to_le_bytes());
        self.noise
            .set_psk(noise::PSK_AT, psk)
            .and_then(|()| self.noise.write_message(&[], &mut message[12..RESPONSE - MACS]))
            .map_err(|_| Refused::Invalid)?;
        let (theirs, ours) = keys(&mut self.noise);
        Ok((message, Session::new(index, self.sender, &ours, &theirs, false, now)))
    }
}

/// What the initiator seals with, and what the responder does.
fn keys(noise: &mut HandshakeState) -> (Zeroizing<[u8; 32]>, Zeroizing<[u8; 32]>) {
    let (initiator, responder) = noise.dangerously_get_raw_split();
    (Zeroizing::new(initiator), Zeroizing::new(responder))
}
