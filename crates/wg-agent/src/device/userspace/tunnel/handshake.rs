//! The handshake's part of a tunnel: when an initiation or a response goes out, and which one counts.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clustermesh_wireguard::{Initiation, Refused, Timestamp, initiate, message::RESPONSE};

use super::{HOLD, INITIATION_INTERVAL, Inner, MOST_JITTER, Output, REKEY_TIMEOUT, Received, Tunnel, passed};

impl Tunnel {
    /// Takes an initiation that was opened already.
    ///
    /// # Errors
    /// It is another's, or was seen before.
    pub(in super::super) fn initiated(
        &mut self,
        initiation: Initiation,
        now: Instant,
        out: &mut impl Output,
    ) -> Result<Received, Refused> {
        if *initiation.peer() != self.peer {
            return Err(Refused::Invalid);
        }
        let timestamp = initiation.timestamp();
        if timestamp <= self.heard {
            return Err(Refused::Replayed);
        }
        if self.heard_at.is_some_and(|at| !passed(at, INITIATION_INTERVAL, now)) {
            return Err(Refused::TooSoon);
        }
        let index = self.next_index();
        let (mut response, session) = initiation.answer(&self.preshared_key, index, now)?;
        self.heard = timestamp;
        self.heard_at = Some(now);
        self.macs.seal(&mut response, now);
        self.keys.answered(session);
        self.urgent = true;
        let crossed = self.initiation.as_ref().map(|(_, sent)| *sent + HOLD);
        match crossed.filter(|due| *due > now) {
            Some(due) => self.held = Some((due, response)),
            None => {
                // One to an older initiation that was still held is no good any more.
                self.held = None;
                self.respond(&response, now, out);
            }
        }
        self.heard_from(now);
        Ok(Received {
            authentic: true,
            inner: Inner::Nothing,
        })
    }

    /// Whether this index is that of a handshake of ours that nobody has answered yet.
    pub(in super::super) fn awaits(&self, index: u32) -> bool {
        self.initiation
            .as_ref()
            .is_some_and(|(pending, _)| pending.index() == index)
    }

    /// Whether an initiation got no answer in the time that it had.
    pub(in super::super) fn unanswered(&self, now: Instant) -> bool {
        self.initiation.is_some() && self.wanted.is_some() && self.quiet_until.is_some_and(|until| until <= now)
    }

    pub(super) fn want(&mut self, now: Instant, out: &mut impl Output) {
        if self.wanted.is_none() {
            self.wanted = Some(now);
            self.urgent = true;
        }
        if self.quiet_until.is_some_and(|until| now < until) || self.held.is_some() {
            return;
        }
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.said = Timestamp::after(self.said, since_epoch);
        let index = self.next_index();
        match initiate(&self.local, &self.peer, &self.preshared_key, index, self.said) {
            Ok((initiator, mut message)) => {
                self.macs.seal(&mut message, now);
                self.initiation = Some((initiator, now));
                self.silence(&message, now);
                out.network(&message);
            }
            // There was no randomness, or the key is one that no secret can be shared with: not at once again either.
            Err(_) => self.silence(&[], now),
        }
    }

    pub(super) fn respond(&mut self, response: &[u8; RESPONSE], now: Instant, out: &mut impl Output) {
        self.silence(response, now);
        out.network(response);
    }

    /// No more handshake messages for a while; how long exactly, the message's random part says.
    fn silence(&mut self, message: &[u8], now: Instant) {
        let random = message
            .last_chunk::<32>()
            .map_or(0, |macs| u16::from_le_bytes([macs[0], macs[1]]));
        let jitter = Duration::from_millis(u64::from(random % (MOST_JITTER + 1)));
        self.quiet_until = Some(now + REKEY_TIMEOUT + jitter);
        self.urgent = true;
    }

    fn next_index(&mut self) -> u32 {
        // A session that still counts keeps its own; there are never as many as indices.
        loop {
            self.generation = self.generation.wrapping_add(1);
            let index = self.index << 8 | u32::from(self.generation);
            if !self.awaits(index) && !self.keys.has(index) {
                return index;
            }
        }
    }
}
