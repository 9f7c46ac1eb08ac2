//! One session's keys and counters: sealing and opening data messages (whitepaper §5.4.6).

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use crate::{
    Refused,
    message::{DATA_TYPE, HEADER, OVERHEAD, TAG},
    replay::Replay,
};

/// A session carries no more messages (whitepaper §6.1): past it counters would repeat.
const REJECT_AFTER_MESSAGES: u64 = u64::MAX - (1 << 13);
/// After so many a new session is made.
const REKEY_AFTER_MESSAGES: u64 = 1 << 60;

/// A pair of keys. The indices are what each side calls it by: the receiver's is in every message.
pub struct Session {
    own: u32,
    peer: u32,
    sealing: Option<LessSafeKey>,
    opening: Option<LessSafeKey>,
    next: u64,
    replay: Replay,
    initiator: bool,
    born: Instant,
}

impl Session {
    pub(crate) fn new(own: u32, peer: u32, seal: &[u8; 32], open: &[u8; 32], initiator: bool, born: Instant) -> Self {
        // Only a key of another length would be refused.
        let key = |bytes| UnboundKey::new(&CHACHA20_POLY1305, bytes).ok().map(LessSafeKey::new);
        Self {
            own,
            peer,
            sealing: key(seal),
            opening: key(open),
            next: 0,
            replay: Replay::default(),
            initiator,
            born,
        }
    }

    pub(crate) const fn own(&self) -> u32 {
        self.own
    }

    pub(crate) fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.born)
    }

    /// Who began it is who renews it.
    pub(crate) const fn initiator(&self) -> bool {
        self.initiator
    }

    pub(crate) const fn worn(&self) -> bool {
        self.next >= REKEY_AFTER_MESSAGES
    }

    pub(crate) const fn spent(&self) -> bool {
        self.next >= REJECT_AFTER_MESSAGES
    }

    /// Seals the packet of `length` bytes that stands in `datagram` behind the room for a header: the length of the whole. `None` =
    /// the session is spent, or there is no room for the tag; the packet is as it was.
    pub(crate) fn seal(&mut self, datagram: &mut [u8], length: usize) -> Option<usize> {
        let (header, sealed) = datagram.get_mut(..length + OVERHEAD)?.split_at_mut(HEADER);
        let (packet, tag) = sealed.split_at_mut(length);
        let key = self.sealing.as_ref().filter(|_| !self.spent())?;
        let counter = self.next;
        let made = key
            .seal_in_place_separate_tag(nonce(counter), Aad::empty(), packet)
            .ok()?;
        self.next += 1;
        tag.copy_from_slice(made.as_ref());
        header[..4].copy_from_slice(&DATA_TYPE);
        header[4..8].copy_from_slice(&self.peer.to_le_bytes());
        header[8..].copy_from_slice(&counter.to_le_bytes());
        Some(length + OVERHEAD)
    }

    /// Opens a data message where it stands: the place of the inner packet in it.
    pub(crate) fn open(&mut self, datagram: &mut [u8]) -> Result<Range<usize>, Refused> {
        let (header, sealed) = datagram.split_at_mut_checked(HEADER).ok_or(Refused::Invalid)?;
        let counter = header.last_chunk().map_or(u64::MAX, |bytes| u64::from_le_bytes(*bytes));
        if counter >= REJECT_AFTER_MESSAGES {
            return Err(Refused::Invalid);
        }
        if !self.replay.may_be_new(counter) {
            return Err(Refused::Replayed);
        }
        let key = self.opening.as_ref().ok_or(Refused::Invalid)?;
        key.open_in_place(nonce(counter), Aad::empty(), sealed)
            .map_err(|_| Refused::Invalid)?;
        self.replay.mark(counter);
        Ok(HEADER..datagram.len() - TAG)
    }
}

/// Four zeros and the counter.
fn nonce(counter: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[4..].copy_from_slice(&counter.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Session, Session) {
        let now = Instant::now();
        let (a, b) = ([1; 32], [2; 32]);
        (
            Session::new(10, 20, &a, &b, true, now),
            Session::new(20, 10, &b, &a, false, now),
        )
    }

    /// The whole message for this text, in a buffer with room to spare.
    fn seal(session: &mut Session, text: &[u8]) -> Option<Vec<u8>> {
        let mut datagram = [0; 64];
        datagram[HEADER..HEADER + text.len()].copy_from_slice(text);
        let length = session.seal(&mut datagram, text.len())?;
        Some(datagram[..length].to_vec())
    }

    fn open(session: &mut Session, message: &[u8]) -> Result<Vec<u8>, Refused> {
        let mut message = message.to_vec();
        session.open(&mut message).map(|place| message[place].to_vec())
    }

    #[test]
    fn a_counter_is_never_used_twice_and_none_past_the_last() {
        let (mut a, mut b) = pair();
        a.next = REJECT_AFTER_MESSAGES - 1;
        assert!(a.worn() && !a.spent());
        let last = seal(&mut a, b"last").expect("the last one");
        assert_eq!(open(&mut b, &last), Ok(b"last".to_vec()));
        assert_eq!((seal(&mut a, b"more"), a.spent()), (None, true));
    }

    #[test]
    fn a_counter_that_may_not_be_is_refused_before_it_is_looked_at() {
        let (mut a, mut b) = pair();
        let one = seal(&mut a, b"one").expect("room");
        let mut changed = one.clone();
        changed[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(open(&mut b, &changed), Err(Refused::Invalid));
        assert_eq!(open(&mut b, &one), Ok(b"one".to_vec()));
        assert_eq!(open(&mut b, &one), Err(Refused::Replayed));
    }

    #[test]
    fn a_message_that_does_not_authenticate_moves_no_window() {
        let (mut a, mut b) = pair();
        let one = seal(&mut a, b"one").expect("room");
        let mut forged = one.clone();
        forged[8..16].copy_from_slice(&1_000_000_u64.to_le_bytes());
        assert_eq!(open(&mut b, &forged), Err(Refused::Invalid));
        assert_eq!(open(&mut b, &one), Ok(b"one".to_vec()));
    }

    #[test]
    fn where_there_is_no_room_nothing_is_sealed() {
        let (mut a, _) = pair();
        assert_eq!(a.seal(&mut [0; 41], 10), None);
        assert_eq!(a.seal(&mut [0; 42], 10), Some(42));
    }
}
