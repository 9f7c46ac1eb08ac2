//! The sessions that one peer may have at a time: the one we send by, the one before it, and the one we answered to and have not
//! heard on yet (as the kernel's `noise_keypairs`).

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use crate::{
    Refused, Session,
    message::{Message, number},
};

/// No key is used for longer (whitepaper §6.1).
pub const REJECT_AFTER_TIME: Duration = Duration::from_secs(180);
/// Whoever began a session renews it when it sends by it after so long.
const REKEY_AFTER_TIME: Duration = Duration::from_secs(120);
/// And when it hears on it so shortly before its end that nothing it may send could come in time (`REJECT_AFTER_TIME -
/// KEEPALIVE_TIMEOUT - REKEY_TIMEOUT`).
const REKEY_BEFORE_END: Duration = Duration::from_secs(165);

/// See the module. Empty in the beginning.
#[derive(Default)]
pub struct Keys {
    current: Option<Box<Session>>,
    previous: Option<Box<Session>>,
    next: Option<Box<Session>>,
}

/// An authentic data message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opened {
    /// Where the inner packet stands in it, padding included; empty = a keepalive.
    pub packet: Range<usize>,
    /// It is the first on a session that we answered to: the peer has it, and we send by it from now on.
    pub confirmed: bool,
}

impl Keys {
    /// A handshake that we began has ended.
    pub fn initiated(&mut self, session: Session) {
        self.previous = self.next.take().or_else(|| self.current.take());
        self.current = Some(Box::new(session));
    }

    /// We answered a handshake. The peer may still send by what it had.
    pub fn answered(&mut self, session: Session) {
        self.previous = None;
        self.next = Some(Box::new(session));
    }

    /// The answer was never sent.
    pub fn unanswered(&mut self) {
        self.next = None;
    }

    /// Whether there is a session to send by.
    #[must_use]
    pub fn ready(&self, now: Instant) -> bool {
        self.current
            .as_ref()
            .is_some_and(|session| session.age(now) < REJECT_AFTER_TIME && !session.spent())
    }

    /// Whether an answer of ours waits for the peer's first word.
    #[must_use]
    pub const fn awaited(&self) -> bool {
        self.next.is_some()
    }

    /// Seals the packet of `length` bytes that stands in `datagram` behind [`crate::message::HEADER`] bytes: the length of the whole,
    /// which is [`crate::message::OVERHEAD`] more. `None` = there is no session to send by; the packet is as it was.
    pub fn seal(&mut self, datagram: &mut [u8], length: usize, now: Instant) -> Option<usize> {
        self.current
            .as_mut()
            .filter(|session| session.age(now) < REJECT_AFTER_TIME)?
            .seal(datagram, length)
    }

    /// Opens a data message where it stands.
    ///
    /// # Errors
    /// It is not of a session that still counts, or not authentic (it is garbage then), or a replay.
    pub fn open(&mut self, datagram: &mut [u8], now: Instant) -> Result<Opened, Refused> {
        let Some(Message::Data(_)) = Message::parse(datagram) else {
            return Err(Refused::Invalid);
        };
        let index = number(datagram, 4);
        let session = [&mut self.current, &mut self.previous, &mut self.next]
            .into_iter()
            .flatten()
            .find(|session| session.own() == index && session.age(now) < REJECT_AFTER_TIME)
            .ok_or(Refused::UnknownSession)?;
        let packet = session.open(datagram)?;
        let confirmed = self.next.take_if(|next| next.own() == index);
        let opened = Opened {
            packet,
            confirmed: confirmed.is_some(),
        };
        if confirmed.is_some() {
            self.previous = std::mem::replace(&mut self.current, confirmed);
        }
        Ok(opened)
    }

    /// Whether what was just sent asks for a new session.
    #[must_use]
    pub fn renew_after_sending(&self, now: Instant) -> bool {
        self.current
            .as_ref()
            .is_some_and(|session| session.worn() || (session.initiator() && session.age(now) >= REKEY_AFTER_TIME))
    }

    /// Whether what was just received does.
    #[must_use]
    pub fn renew_after_receiving(&self, now: Instant) -> bool {
        self.current
            .as_ref()
            .is_some_and(|session| session.initiator() && session.age(now) >= REKEY_BEFORE_END)
    }

    /// Forgets keys that are too old to be used.
    pub fn expire(&mut self, now: Instant) {
        for slot in [&mut self.current, &mut self.previous, &mut self.next] {
            slot.take_if(|session| session.age(now) >= REJECT_AFTER_TIME);
        }
    }

    /// How long until [`Self::expire`] has something to forget.
    #[must_use]
    pub fn until_expiry(&self, now: Instant) -> Option<Duration> {
        [&self.current, &self.previous, &self.next]
            .into_iter()
            .flatten()
            .map(|session| REJECT_AFTER_TIME.saturating_sub(session.age(now)))
            .min()
    }

    /// Whether one of them has that index.
    #[must_use]
    pub fn has(&self, index: u32) -> bool {
        [&self.current, &self.previous, &self.next]
            .into_iter()
            .flatten()
            .any(|session| session.own() == index)
    }
}
