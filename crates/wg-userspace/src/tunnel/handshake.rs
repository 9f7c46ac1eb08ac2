//! Decides when a tunnel sends an initiation or a response.
//!
//! The initiations of two peers cross if each is sent before the other arrives. If ours may have crossed the peer's, our response
//! is held until our unanswered initiation has the age [`RESPONSE_HOLD`]. The documentation of the module `tunnel` gives the
//! reason.

use std::time::{Duration, Instant};

use super::{
    EXPIRY_MARGIN, INITIATION, MAX_JITTER, MAX_UNCONFIRMED, Output, REJECT_AFTER_TIME, REKEY_TIMEOUT, RESPONSE,
    RESPONSE_HOLD, Tunnel,
    protocol::{same_slot, sender},
};

impl Tunnel {
    /// Whether `index` is the sender index of our last initiation, and the initiation is not answered yet.
    pub(crate) fn is_awaiting_response(&self, index: u32) -> bool {
        self.initiation.is_some_and(|(own, _)| own == index)
    }

    /// Whether our last initiation is unanswered, a new session is still wanted, and the delay of the next initiation is over.
    pub(crate) fn is_initiation_retry_due(&self, now: Instant) -> bool {
        self.initiation.is_some()
            && self.wanted_since.is_some()
            && self.no_initiation_before.is_some_and(|until| until <= now)
    }

    /// Answers an initiation at once, or holds the response if the initiation may have crossed ours.
    pub(super) fn handle_initiation(&mut self, response: [u8; RESPONSE], now: Instant, out: &mut impl Output) {
        self.peer_initiated_at = Some(now);
        self.keys_until = Some(now + REJECT_AFTER_TIME + EXPIRY_MARGIN);
        self.must_reschedule = true;
        self.forget_expired();
        let index = sender(&response);
        // If the new session has the same slot as the current one, boringtun has overwritten the current one.
        self.session.take_if(|session| same_slot(session.index, index));
        self.unconfirmed.retain(|(other, _)| !same_slot(*other, index));
        if self.unconfirmed.len() == MAX_UNCONFIRMED {
            self.unconfirmed.remove(0);
        }
        self.unconfirmed.push((index, now));
        let hold_until = self
            .initiation
            .map(|(_, sent)| sent + RESPONSE_HOLD)
            .filter(|due| *due > now);
        match hold_until {
            Some(due) => self.held_response = Some((due, response)),
            None => {
                // A response that is still held answers an older initiation, which the new one replaces.
                self.held_response = None;
                self.respond(&response, now, out);
            }
        }
    }

    /// Sends a response. As after an initiation, our next initiation is delayed.
    pub(super) fn respond(&mut self, response: &[u8; RESPONSE], now: Instant, out: &mut impl Output) {
        self.delay_next_initiation(response, now);
        out.send_datagram(response);
    }

    pub(super) fn may_initiate(&self, now: Instant) -> bool {
        self.no_initiation_before.is_none_or(|until| until <= now) && self.held_response.is_none()
    }

    /// Requests a new session, and initiates the handshake if an initiation may be sent now.
    pub(super) fn request_session(&mut self, now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        if self.wanted_since.is_none() {
            self.wanted_since = Some(now);
            self.must_reschedule = true;
        }
        if !self.may_initiate(now) {
            return;
        }
        match self.protocol.initiate(scratch) {
            Some(initiation) => self.send_initiation(&initiation, now, out),
            // The peer's key has a low order. The next attempt waits as after an initiation, without jitter.
            None => self.delay_next_initiation(&[], now),
        }
    }

    fn send_initiation(&mut self, initiation: &[u8; INITIATION], now: Instant, out: &mut impl Output) {
        self.initiation = Some((sender(initiation), now));
        self.delay_next_initiation(initiation, now);
        out.send_datagram(initiation);
    }

    /// Delays the next initiation by [`REKEY_TIMEOUT`] and a jitter. The first two bytes of the MACs at the end of `message` serve as the
    /// random number; without a message there is no jitter.
    fn delay_next_initiation(&mut self, message: &[u8], now: Instant) {
        let random = message
            .last_chunk::<32>()
            .map_or(0, |macs| u16::from_le_bytes([macs[0], macs[1]]));
        let jitter = Duration::from_millis(u64::from(random % (MAX_JITTER + 1)));
        self.no_initiation_before = Some(now + REKEY_TIMEOUT + jitter);
        self.must_reschedule = true;
    }
}
