//! Who of all senders in the world is worth a multiplication on the curve: whoever knows our key, and under load whoever shows by a
//! cookie that its address is its own (whitepaper §5.3).

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use subtle::ConstantTimeEq;
use x25519_dalek::PublicKey;
use zeroize::Zeroizing;

use crate::{
    macs::{COOKIE_LIFE, Cookie, ReceiverKeys, Sealed, cookie_reply, mac},
    message::{COOKIE_REPLY, Message, number},
};

/// Judges the messages sent to one public key.
pub struct Gate {
    own: ReceiverKeys,
    per_second: u64,
    state: Mutex<State>,
}

struct State {
    secret: Zeroizing<[u8; 32]>,
    changed: Option<Instant>,
    second: Option<Instant>,
    count: u64,
}

/// What is to be done with a datagram.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict<'a> {
    /// It is looked at.
    Pass(Message<'a>),
    /// There are too many: this is said to its sender instead.
    Reply([u8; COOKIE_REPLY]),
    /// It is no message for us.
    Invalid,
}

impl Gate {
    /// For the owner of that key; beyond so many initiations a second their senders must show a cookie.
    #[must_use]
    pub fn new(own: &PublicKey, per_second: u64) -> Self {
        Self {
            own: ReceiverKeys::new(own),
            per_second,
            state: Mutex::new(State {
                secret: Zeroizing::default(),
                changed: None,
                second: None,
                count: 0,
            }),
        }
    }

    /// The message in a datagram, where it is one that names our key or belongs to a session.
    #[must_use]
    pub fn addressed<'a>(&self, datagram: &'a [u8]) -> Option<Message<'a>> {
        let message = Message::parse(datagram)?;
        if let Message::Initiation(_) | Message::Response(_) = message {
            let sealed = Sealed::new(datagram)?;
            if !bool::from(mac(&self.own.mac1, &[sealed.under_mac1]).ct_eq(sealed.mac1)) {
                return None;
            }
        }
        Some(message)
    }

    /// Looks at the outside of a datagram.
    #[must_use]
    pub fn judge<'a>(&self, datagram: &'a [u8], source: SocketAddr, now: Instant) -> Verdict<'a> {
        let Some(message) = self.addressed(datagram) else {
            return Verdict::Invalid;
        };
        // Responses are not counted: whoever starts with thousands of peers gets as many at once, and one that is not to a handshake of
        // ours is told by its index.
        if !matches!(message, Message::Initiation(_)) {
            return Verdict::Pass(message);
        }
        let Some(sealed) = Sealed::new(datagram) else {
            return Verdict::Invalid;
        };
        let Some(cookie) = self.cookie_if_loaded(source, now) else {
            return Verdict::Pass(message);
        };
        if mac(&cookie, &[sealed.under_mac2]).ct_eq(sealed.mac2).into() {
            return Verdict::Pass(message);
        }
        let mut nonce = [0; 24];
        // Without randomness there is no answer; the sender asks again.
        match getrandom::fill(&mut nonce) {
            Ok(()) => Verdict::Reply(cookie_reply(&self.own, number(datagram, 4), sealed.mac1, cookie, nonce)),
            Err(_) => Verdict::Invalid,
        }
    }

    /// Counts an initiation; the cookie of its source if there were too many.
    fn cookie_if_loaded(&self, source: SocketAddr, now: Instant) -> Option<Cookie> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *state;
        let older = |since: Option<Instant>, than: Duration| {
            since.is_none_or(|since| now.saturating_duration_since(since) >= than)
        };
        if older(state.second, Duration::from_secs(1)) {
            (state.second, state.count) = (Some(now), 0);
        }
        state.count = state.count.saturating_add(1);
        if state.count <= self.per_second {
            return None;
        }
        if older(state.changed, COOKIE_LIFE) && getrandom::fill(&mut *state.secret).is_ok() {
            state.changed = Some(now);
        }
        let port = source.port().to_be_bytes();
        Some(match source.ip() {
            IpAddr::V4(address) => mac(&*state.secret, &[&address.octets(), &port]),
            IpAddr::V6(address) => mac(&*state.secret, &[&address.octets(), &port]),
        })
    }
}
