//! What is checked of a message before any multiplication on the curve: that its sender knows our public key (mac1), and under load that
//! its address is its own (a cookie, whitepaper §5.3). Done by boringtun, whose cookies are for an address without its port.

use std::net::IpAddr;

use boringtun::noise::{Packet, TunnResult, rate_limiter::RateLimiter};
use x25519_dalek::PublicKey;

/// Initiations a second beyond which senders need a cookie.
pub(super) const INITIATIONS_PER_SECOND: u64 = 1000;
/// Length of a cookie reply (§5.4.7).
pub(super) const COOKIE_REPLY: usize = 64;

pub(super) struct Gate {
    initiations: RateLimiter,
    /// Responses are not counted as load: a device that starts with thousands of peers gets as many at once, and a response that answers
    /// nothing is known by its index.
    others: RateLimiter,
}

/// What becomes of a datagram that is no data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Initiation,
    /// Its receiver index.
    Response(u32),
    /// Its receiver index.
    Cookie(u32),
    /// The sender gets the cookie reply that was written.
    Reply,
    Invalid,
}

impl Gate {
    pub(super) fn new(own: &PublicKey) -> Self {
        Self {
            initiations: RateLimiter::new(own, INITIATIONS_PER_SECOND),
            others: RateLimiter::new(own, u64::MAX),
        }
    }

    pub(super) fn judge(&self, datagram: &[u8], source: IpAddr, reply: &mut [u8; COOKIE_REPLY]) -> Verdict {
        let limiter = if datagram.first() == Some(&1) {
            self.initiations.reset_count();
            &self.initiations
        } else {
            &self.others
        };
        match limiter.verify_packet(Some(source), datagram, reply) {
            Ok(Packet::HandshakeInit(_)) => Verdict::Initiation,
            Ok(Packet::HandshakeResponse(response)) => Verdict::Response(response.receiver_idx),
            Ok(Packet::PacketCookieReply(cookie)) => Verdict::Cookie(cookie.receiver_idx),
            Err(TunnResult::WriteToNetwork(_)) => Verdict::Reply,
            Ok(Packet::PacketData(_)) | Err(_) => Verdict::Invalid,
        }
    }
}
