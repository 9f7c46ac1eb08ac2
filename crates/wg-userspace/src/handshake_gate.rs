//! Checks the mac1 of initiations and responses and, under load, the cookie of initiations, before any Diffie-Hellman.
//!
//! mac1 proves that the sender knows the device's public key. The cookie proves that the sender receives packets at its source address
//! (whitepaper §5.3). boringtun does the checks. Its cookies are bound to an address without the port.

use std::net::IpAddr;

use boringtun::noise::{Packet, TunnResult, rate_limiter::RateLimiter};
use x25519_dalek::PublicKey;

/// Initiations per second above which senders need a cookie.
pub(crate) const INITIATIONS_PER_SECOND: u64 = 1000;
/// Length of a cookie reply (§5.4.7).
pub(crate) const COOKIE_REPLY: usize = 64;

pub(crate) struct Gate {
    initiations: RateLimiter,
    /// For all other messages, without a limit: a device that starts with thousands of peers receives as many responses at
    /// once. The caller drops each response whose receiver index belongs to no initiation. For each source, it limits the rate
    /// of the remaining responses.
    others: RateLimiter,
}

/// The result of checking a datagram that is not a data message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// An initiation with a valid mac1 and, under load, a valid cookie.
    Initiation,
    /// A response with a valid mac1, and its receiver index.
    Response(u32),
    /// A cookie reply, which is not checked, and its receiver index.
    Cookie(u32),
    /// An initiation without a valid cookie under load. The caller sends the cookie reply that [`Gate::check`] wrote
    /// into `reply`.
    CookieNeeded,
    Invalid,
}

impl Gate {
    pub(crate) fn new(own: &PublicKey) -> Self {
        Self {
            initiations: RateLimiter::new(own, INITIATIONS_PER_SECOND),
            others: RateLimiter::new(own, u64::MAX),
        }
    }

    pub(crate) fn check(&self, datagram: &[u8], source: IpAddr, reply: &mut [u8; COOKIE_REPLY]) -> Verdict {
        // Message type 1 is an initiation (§5.4.2).
        let limiter = if datagram.first() == Some(&1) {
            // Resets the count at most once a second.
            self.initiations.reset_count();
            &self.initiations
        } else {
            &self.others
        };
        match limiter.verify_packet(Some(source), datagram, reply) {
            Ok(Packet::HandshakeInit(_)) => Verdict::Initiation,
            Ok(Packet::HandshakeResponse(response)) => Verdict::Response(response.receiver_idx),
            Ok(Packet::PacketCookieReply(cookie)) => Verdict::Cookie(cookie.receiver_idx),
            Err(TunnResult::WriteToNetwork(_)) => Verdict::CookieNeeded,
            Ok(Packet::PacketData(_)) | Err(_) => Verdict::Invalid,
        }
    }
}
