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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{HEADER, OVERHEAD};

    /// Both ends of a session by their index; the first began it.
    fn session(index: u32, now: Instant) -> [Session; 2] {
        let keys = [[index as u8; 32], [!index as u8; 32]];
        [
            Session::new(index, index, &keys[0], &keys[1], true, now),
            Session::new(index, index, &keys[1], &keys[0], false, now),
        ]
    }

    fn speak(from: &mut Session, to: &mut Keys, now: Instant) -> Result<bool, Refused> {
        let mut datagram = [0; HEADER + OVERHEAD];
        let length = from.seal(&mut datagram, 0).expect("room");
        to.open(&mut datagram[..length], now).map(|opened| opened.confirmed)
    }

    fn slots(keys: &Keys) -> [Option<u32>; 3] {
        [&keys.current, &keys.previous, &keys.next].map(|slot| slot.as_ref().map(|session| session.own()))
    }

    #[test]
    fn what_we_answered_is_ours_to_send_by_when_the_peer_has_spoken_and_the_old_one_still_reads() {
        let now = Instant::now();
        let mut keys = Keys::default();
        let [one, mut other_one] = session(1, now);
        keys.initiated(one);
        let [mut other_two, two] = session(2, now);
        keys.answered(two);
        assert_eq!(slots(&keys), [Some(1), None, Some(2)]);
        assert_eq!(speak(&mut other_one, &mut keys, now), Ok(false));
        assert_eq!(speak(&mut other_two, &mut keys, now), Ok(true));
        assert_eq!(slots(&keys), [Some(2), Some(1), None]);
        assert_eq!(speak(&mut other_two, &mut keys, now), Ok(false), "once");
        assert_eq!(speak(&mut other_one, &mut keys, now), Ok(false), "what was under way");
    }

    #[test]
    fn a_handshake_of_ours_that_ends_keeps_the_one_we_answered_meanwhile() {
        let now = Instant::now();
        let mut keys = Keys::default();
        for (index, expected) in [(1, [Some(1), None, None]), (2, [Some(2), Some(1), None])] {
            let [ours, _] = session(index, now);
            keys.initiated(ours);
            assert_eq!(slots(&keys), expected);
        }
        let [mut other_three, three] = session(3, now);
        keys.answered(three);
        assert_eq!(slots(&keys), [Some(2), None, Some(3)], "the one before is forgotten");
        let [four, _] = session(4, now);
        keys.initiated(four);
        assert_eq!(slots(&keys), [Some(4), Some(3), None]);
        assert_eq!(speak(&mut other_three, &mut keys, now), Ok(false));
        let [_, five] = session(5, now);
        keys.answered(five);
        keys.unanswered();
        assert_eq!(slots(&keys), [Some(4), None, None]);
    }

    #[test]
    fn each_key_goes_by_its_own_age() {
        let now = Instant::now();
        let mut keys = Keys::default();
        let [one, mut other_one] = session(1, now);
        keys.initiated(one);
        let later = now + Duration::from_secs(100);
        let [two, _] = session(2, later);
        keys.initiated(two);
        assert_eq!(keys.until_expiry(later), Some(Duration::from_secs(80)));
        let ended = now + REJECT_AFTER_TIME;
        assert_eq!(speak(&mut other_one, &mut keys, ended), Err(Refused::UnknownSession));
        keys.expire(ended);
        assert_eq!(slots(&keys), [Some(2), None, None]);
        assert!(keys.ready(ended) && !keys.ready(later + REJECT_AFTER_TIME));
    }
}
