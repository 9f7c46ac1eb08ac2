//! WireGuard's protocol (whitepaper §5) as values: messages, the handshake, macs and cookies, sessions and their keys. No socket, no
//! clock, no thread; when to speak is decided by whoever owns a peer.
//!
//! The handshake is the Noise library's (`Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s`); what is sealed with the keys that come of it, many
//! times a second, is ring's.
//!
//! ```text
//!  initiator                                            responder
//!  initiate() -- initiation 148 bytes ------> Gate::judge, read_initiation(): who it is
//!      |                                                  | Initiation::answer()
//!  Initiator::finish() <---- response 92 bytes -----------+--> Keys::answered: a session to read with
//!      |
//!  Keys::initiated -------- data, perhaps empty -----> Keys::open: now also one to write with
//! ```
#![forbid(unsafe_code)]

mod gate;
mod handshake;
mod keys;
mod macs;
pub mod message;
mod noise;
mod replay;
mod session;
mod timestamp;

pub use self::{
    gate::{Gate, Verdict},
    handshake::{Initiation, Initiator, Local, initiate, read_initiation},
    keys::{Keys, Opened, REJECT_AFTER_TIME},
    macs::Macs,
    session::Session,
    timestamp::Timestamp,
};

/// Why a message was refused. It says nothing that the sender could not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Not a message of this protocol, or one that does not authenticate.
    #[error("no WireGuard message, or not authentic")]
    Invalid,
    /// It was seen before, or is older than what was seen.
    #[error("seen before, or too old")]
    Replayed,
    /// An initiation so soon after the last one of its sender that no honest peer sends it.
    #[error("too soon after the last")]
    TooSoon,
    /// It is for a session or a handshake that we do not have, or no longer.
    #[error("for a session that is not ours")]
    UnknownSession,
}
