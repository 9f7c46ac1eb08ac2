//! Implements one peer's WireGuard tunnel: decides when to send which message (whitepaper §6 and the kernel's `timers.c`). boringtun
//! encodes and decodes the messages ([`protocol`]). The tunnel does no I/O and reads no clock: the caller passes datagrams and the time.
//!
//! As in the kernel, no initiation is sent within 5 s after our last initiation *or response* to the peer. These 5 s end early if the
//! configuration changes the preshared key or the endpoint. A responder cannot send on a new session before the
//! initiator has confirmed it. If it has no older session, it stages packets until then.
//!
//! **An initiation does not change the endpoint.** The response is sent to the source of the initiation, and the first data message or
//! response from there changes the endpoint. After a restart or a change of the preshared key, an initiation that an attacker has
//! recorded is valid again, because the newest timestamp is forgotten. But its replay redirects no packet.
//!
//! **Crossed handshakes.** wireguard-go handles an initiation and a response of one peer at the same time in two workers, and does not
//! check the state of the handshake again before it stores the result (`ConsumeMessageResponse`). If our initiation and our response to
//! its initiation arrive together, it may keep a session whose index it has just deleted; then it receives nothing until its own 15 s
//! timer. So if the peer's initiation crossed ours, our response is held until our initiation is 50 ms old. If wireguard-go or the
//! kernel answers our initiation before that, the held response is dropped, because the peer forgot its own initiation. If the peer is
//! also this program, it holds its response too; then both sessions are valid.
//!
//! ```text
//!  us                        wireguard-go, kernel         |  us                          this program
//!  |-- initiation A ---.  .--- initiation B --|           |  |-- initiation A --.  .-- initiation B --|
//!  |   (B arrives:      ><                    |           |  |   (hold)          ><           (hold)  |
//!  |    hold)          '  '-> answers A       |           |  |                                        |
//!  |<------------- response A ----------------|           |  |-- response B, 50 ms ------------------>|
//!  |   (drop response B)                      |           |  |<----------------- response A, 50 ms ---|
//! ```

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use x25519_dalek::PublicKey;

pub(crate) use self::protocol::{INITIATION, Local, OVERHEAD, RESPONSE, Refused};
use self::protocol::{Message, Protocol, kind, receiver, response_receiver};
use crate::staged::{SharedBudget, StagedPackets};

mod handshake;
mod low_order;
mod protocol;
#[cfg(test)]
mod tests;

/// The minimum time from our last initiation or response to the next initiation (whitepaper §6.1, `REKEY_TIMEOUT`).
const REKEY_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum random time added to [`REKEY_TIMEOUT`], in milliseconds, so that two peers do not retry at the same time for ever (§6.4).
const MAX_JITTER: u16 = 333;
/// After this time without a new session, the staged packets are dropped, and initiations stop until there is a new reason for one, such
/// as a packet (`REKEY_ATTEMPT_TIME`).
const ATTEMPT_TIME: Duration = Duration::from_secs(90);
/// An initiator that sends on a session of this age initiates a new handshake (`REKEY_AFTER_TIME`).
const REKEY_AFTER_TIME: Duration = Duration::from_secs(120);
/// A session is used no longer than this (`REJECT_AFTER_TIME`).
const REJECT_AFTER_TIME: Duration = Duration::from_secs(180);
/// An initiator that receives on a session of this age initiates a new handshake (§6.2).
const REKEY_ON_RECEIVE: Duration = Duration::from_secs(165);
/// A keepalive is sent this long after data was received, if nothing else was sent (`KEEPALIVE_TIMEOUT`).
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// A handshake is initiated this long after data was sent, if nothing was received: the peer may have lost the session.
const NO_REPLY_TIMEOUT: Duration = KEEPALIVE_TIMEOUT.saturating_add(REKEY_TIMEOUT);
/// The minimum time between two answered initiations of a peer (the kernel's `INITIATIONS_PER_SECOND`).
const INITIATION_INTERVAL: Duration = Duration::from_millis(20);
/// The response to an initiation that crossed ours is held until our initiation has this age.
const RESPONSE_HOLD: Duration = Duration::from_millis(50);
/// boringtun measures the age of keys by its own clock, which it reads slightly later than the caller reads the time. With this
/// margin the keys are expired at our deadline.
const EXPIRY_MARGIN: Duration = Duration::from_secs(1);
/// Maximum number of sessions of answered initiations that boringtun keeps.
const MAX_UNCONFIRMED: usize = 8;

/// Sends a tunnel's datagrams.
pub(crate) trait Output {
    /// Sends this UDP payload to the peer.
    fn send_datagram(&mut self, datagram: &[u8]);
}

/// The result of receiving an authentic datagram.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Received {
    /// Whether the source of the datagram is the peer's new endpoint.
    pub(crate) moves_endpoint: bool,
    pub(crate) inner: Inner,
}

/// The inner packet of a datagram.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Inner {
    /// Nothing: a handshake message or a keepalive.
    Nothing,
    /// Length and source of the decrypted packet. The source is not checked against the allowed IPs yet.
    Packet(usize, IpAddr),
    /// Not an IP packet, or shorter than the length in its header.
    Malformed,
}

/// The session that encrypts sent packets.
#[derive(Debug, Clone, Copy)]
struct Session {
    /// Our index: the receiver index of the peer's data messages.
    index: u32,
    since: Instant,
    is_initiator: bool,
}

/// One peer's tunnel; see the documentation of this module.
pub(crate) struct Tunnel {
    protocol: Protocol,
    keepalive: Option<Duration>,
    /// Packets that wait for a session.
    staged: StagedPackets,
    session: Option<Session>,
    /// Sessions of answered initiations, oldest first, on which the peer has sent nothing yet.
    unconfirmed: Vec<(u32, Instant)>,
    /// When the keys of all sessions are expired.
    keys_until: Option<Instant>,
    /// When the peer's last initiation was received.
    peer_initiated_at: Option<Instant>,
    /// No initiation is sent before this time.
    no_initiation_before: Option<Instant>,
    /// Our last initiation, until it is answered: its sender index, and when it was sent.
    initiation: Option<(u32, Instant)>,
    /// The response to an initiation that crossed ours, and when to send it.
    held_response: Option<(Instant, [u8; RESPONSE])>,
    /// The start of the period in which we try to get a new session. Each staged packet restarts the period. `None` = no
    /// attempts.
    wanted_since: Option<Instant>,
    /// Whether a handshake was requested because the session is old.
    is_rekeying: bool,
    /// When the first packet was received after our last data message.
    unanswered_by_us: Option<Instant>,
    /// When the first packet was sent after the last data message or response that we received.
    unanswered_by_peer: Option<Instant>,
    /// The persistent keepalive is due one interval after this time. Data messages (sent or received), received responses and attempts
    /// to send a keepalive renew it; other handshake messages do not.
    last_traffic: Instant,
    last_handshake: Option<Instant>,
    next_tick: Option<Instant>,
    must_reschedule: bool,
}

impl Tunnel {
    /// Creates a tunnel without a session. `index` has 24 bits and is unique in the device: it is the upper part of every receiver index in
    /// the peer's messages to us.
    pub(crate) fn new(
        local: Arc<Local>,
        peer: PublicKey,
        preshared_key: Option<[u8; 32]>,
        index: u32,
        keepalive: Option<Duration>,
        now: Instant,
    ) -> Self {
        Self {
            protocol: Protocol::new(local, peer, preshared_key, index),
            keepalive,
            staged: StagedPackets::default(),
            session: None,
            unconfirmed: Vec::new(),
            keys_until: None,
            peer_initiated_at: None,
            no_initiation_before: None,
            initiation: None,
            held_response: None,
            wanted_since: None,
            is_rekeying: false,
            unanswered_by_us: None,
            unanswered_by_peer: None,
            last_traffic: now,
            last_handshake: None,
            next_tick: None,
            must_reschedule: true,
        }
    }

    /// Stages packets within the budget of the device.
    pub(crate) fn with_budget(mut self, budget: SharedBudget) -> Self {
        self.staged = StagedPackets::new(budget);
        self
    }

    /// When the last handshake was completed.
    pub(crate) const fn last_handshake(&self) -> Option<Instant> {
        self.last_handshake
    }

    /// Changes the interval of persistent keepalives. If they were off, the first one is due at once, as in the kernel.
    pub(crate) fn set_keepalive(&mut self, keepalive: Option<Duration>, now: Instant) {
        if keepalive.is_some() && self.keepalive.is_none() {
            self.last_traffic = now.checked_sub(keepalive.unwrap_or_default()).unwrap_or(now);
        }
        self.keepalive = keepalive;
        self.must_reschedule = true;
    }

    /// Changes the preshared key. All sessions and handshakes end.
    pub(crate) fn set_preshared_key(&mut self, preshared_key: Option<[u8; 32]>) {
        self.protocol.set_preshared_key(preshared_key);
        self.session = None;
        self.unconfirmed.clear();
        self.keys_until = None;
        self.initiation = None;
        self.held_response = None;
        self.no_initiation_before = None;
        self.is_rekeying = false;
        self.unanswered_by_us = None;
        self.unanswered_by_peer = None;
        self.last_handshake = None;
    }

    /// Requests a handshake although there is no packet to send, because the peer may use a session that we have lost. The next tick, which
    /// is due now, sends the initiation, unless [`Self::may_initiate`] is false.
    pub(crate) fn initiate_handshake(&mut self, now: Instant) {
        self.wanted_since = Some(now);
        self.next_tick = Some(now);
    }

    /// Called after a change of the endpoint. Initiates a handshake at once, also during a session: its response shows that the peer is
    /// there, and the initiation shows the peer from which address this node sends.
    pub(crate) fn endpoint_changed(&mut self, now: Instant) {
        self.no_initiation_before = None;
        self.initiate_handshake(now);
    }

    /// Whether the session may still encrypt.
    fn is_ready(&self, now: Instant) -> bool {
        self.session
            .is_some_and(|session| !has_elapsed(session.since, REJECT_AFTER_TIME, now))
    }

    /// Encrypts a packet to the beginning of `datagram`, which is at least [`OVERHEAD`] longer; returns the datagram's length. `None` =
    /// no session can encrypt it; [`Self::send`] can stage it.
    pub(crate) fn seal(&mut self, packet: &[u8], now: Instant, datagram: &mut [u8]) -> Option<usize> {
        if !self.is_ready(now) {
            return None;
        }
        let sealed = self.protocol.seal(packet, datagram)?;
        self.unanswered_by_us = None;
        self.last_traffic = now;
        if !packet.is_empty() && self.unanswered_by_peer.is_none() {
            self.unanswered_by_peer = Some(now);
            self.must_reschedule = true;
        }
        self.rekey_if_older(REKEY_AFTER_TIME, now);
        Some(sealed)
    }

    /// Sends a packet, or stages it until there is a session.
    pub(crate) fn send(&mut self, packet: &[u8], now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        if !self.send_sealed(packet, now, scratch, out) {
            self.staged.push(packet);
            // Every new packet restarts the time during which initiations are sent.
            self.wanted_since = Some(now);
            self.must_reschedule = true;
            self.request_session(now, scratch, out);
        }
    }

    /// Handles a datagram. Its inner packet is decrypted to the beginning of `plain`, which must be at least as long as the datagram,
    /// and at least [`INITIATION`] bytes.
    ///
    /// # Errors
    /// [`Refused`]: why the message was refused. The tunnel is unchanged.
    pub(crate) fn receive(
        &mut self,
        datagram: &[u8],
        now: Instant,
        plain: &mut [u8],
        scratch: &mut [u8],
        out: &mut impl Output,
    ) -> Result<Received, Refused> {
        let nothing = |moves_endpoint| Received {
            moves_endpoint,
            inner: Inner::Nothing,
        };
        if datagram.first() == Some(&kind::INITIATION)
            && self
                .peer_initiated_at
                .is_some_and(|at| !has_elapsed(at, INITIATION_INTERVAL, now))
        {
            return Err(Refused::TooSoon);
        }
        match self.protocol.open(datagram, plain)? {
            Message::Initiation(response) => {
                self.handle_initiation(response, now, out);
                Ok(nothing(false))
            }
            Message::Response(keepalive) => {
                self.initiation = None;
                self.mark_answered_by_peer(now);
                // We send on the session of this response from now on, so the peer's own initiations are no longer needed:
                // wireguard-go and the kernel forgot theirs when they answered ours, and would reject our held response. A peer
                // that is this program keeps both sessions, so it accepts what we send on this one.
                self.held_response = None;
                self.unconfirmed.clear();
                let index = response_receiver(datagram);
                self.set_session(index, true, now, now);
                if !self.flush(now, scratch, out) {
                    // The responder may send only after this confirmation.
                    out.send_datagram(&keepalive);
                }
                Ok(nothing(true))
            }
            Message::Cookie => Ok(nothing(false)),
            Message::Keepalive => {
                self.handle_data(datagram, now, scratch, out);
                Ok(nothing(true))
            }
            Message::Packet(length, source) => {
                self.handle_data(datagram, now, scratch, out);
                self.mark_unanswered_by_us(now);
                Ok(Received {
                    moves_endpoint: true,
                    inner: Inner::Packet(length, source),
                })
            }
            Message::Malformed => {
                self.handle_data(datagram, now, scratch, out);
                self.mark_unanswered_by_us(now);
                Ok(Received {
                    moves_endpoint: true,
                    inner: Inner::Malformed,
                })
            }
        }
    }

    /// Forgets the scheduled tick, for a peer without endpoint.
    pub(crate) const fn skip_tick(&mut self) {
        self.next_tick = None;
    }

    /// Sends the messages that are due, and removes expired sessions and staged packets.
    pub(crate) fn tick(&mut self, now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        self.next_tick = None;
        if let Some((_, response)) = self.held_response.take_if(|(due, _)| *due <= now) {
            self.respond(&response, now, out);
        }
        if self
            .session
            .is_some_and(|session| has_elapsed(session.since, REJECT_AFTER_TIME, now))
        {
            self.session = None;
        }
        self.keys_until.take_if(|until| *until <= now);
        if self
            .wanted_since
            .is_some_and(|since| has_elapsed(since, ATTEMPT_TIME, now))
        {
            self.wanted_since = None;
            self.is_rekeying = false;
            self.staged.clear();
        }
        if self
            .unanswered_by_peer
            .is_some_and(|since| has_elapsed(since, NO_REPLY_TIMEOUT, now))
        {
            self.unanswered_by_peer = None;
            self.wanted_since.get_or_insert(now);
        }
        if self.wanted_since.is_some() && self.may_initiate(now) {
            self.request_session(now, scratch, out);
        } else {
            // An initiation that boringtun's timers return is not sent, because the tunnel has its own timers.
            self.protocol.expire(scratch);
        }
        self.forget_expired();
        let passive = self
            .unanswered_by_us
            .is_some_and(|since| has_elapsed(since, KEEPALIVE_TIMEOUT, now));
        let persistent = self
            .keepalive
            .is_some_and(|every| has_elapsed(self.last_traffic, every, now));
        if passive || persistent {
            self.unanswered_by_us = None;
            self.last_traffic = now;
            if !self.send_sealed(&[], now, scratch, out) && persistent {
                self.request_session(now, scratch, out);
            }
        }
    }

    /// Returns when [`Self::tick`] is due; `None` = no tick is needed, or one is scheduled that is early enough.
    pub(crate) fn reschedule(&mut self, now: Instant) -> Option<Instant> {
        if self.next_tick.is_some() && !self.must_reschedule {
            return None;
        }
        self.must_reschedule = false;
        let held = self.held_response.as_ref().map(|(due, _)| *due);
        let times = [
            held,
            self.wanted_since.map(|since| {
                let retry = self.no_initiation_before.unwrap_or(now);
                // While a response is held no initiation is sent.
                let retry = held.map_or(retry, |due| retry.max(due));
                retry.min(since + ATTEMPT_TIME)
            }),
            self.unanswered_by_us.map(|since| since + KEEPALIVE_TIMEOUT),
            self.unanswered_by_peer.map(|since| since + NO_REPLY_TIMEOUT),
            self.keepalive.map(|every| self.last_traffic + every),
            self.keys_until,
        ];
        let next = times.into_iter().flatten().min()?.max(now);
        if self.next_tick.is_some_and(|scheduled| scheduled <= next) {
            return None;
        }
        self.next_tick = Some(next);
        self.next_tick
    }

    /// Whether the scheduled tick is still the one at `at`.
    pub(crate) fn expects_tick(&self, at: Instant) -> bool {
        self.next_tick == Some(at)
    }

    fn rekey_if_older(&mut self, age: Duration, now: Instant) {
        let due = |session: Session| session.is_initiator && has_elapsed(session.since, age, now);
        if !self.is_rekeying && self.session.is_some_and(due) {
            self.is_rekeying = true;
            self.wanted_since.get_or_insert(now);
            self.must_reschedule = true;
        }
    }

    /// Starts to use an established session. The caller sends the staged packets.
    fn set_session(&mut self, index: u32, is_initiator: bool, since: Instant, now: Instant) {
        self.session = Some(Session {
            index,
            since,
            is_initiator,
        });
        self.keys_until = Some(now + REJECT_AFTER_TIME + EXPIRY_MARGIN);
        self.last_handshake = Some(now);
        self.wanted_since = None;
        self.is_rekeying = false;
        self.must_reschedule = true;
    }

    /// Sends the staged packets; returns whether any was sent.
    fn flush(&mut self, now: Instant, scratch: &mut [u8], out: &mut impl Output) -> bool {
        let mut any = false;
        while let Some(packet) = self.staged.pop() {
            any |= self.send_sealed(&packet, now, scratch, out);
        }
        any
    }

    /// Sends a packet if there is a session and the packet fits into `scratch`; returns whether it was sent.
    fn send_sealed(&mut self, packet: &[u8], now: Instant, scratch: &mut [u8], out: &mut impl Output) -> bool {
        if scratch.len() < packet.len() + OVERHEAD {
            return false;
        }
        let Some(length) = self.seal(packet, now, scratch) else {
            return false;
        };
        out.send_datagram(&scratch[..length]);
        true
    }

    fn mark_answered_by_peer(&mut self, now: Instant) {
        self.unanswered_by_peer = None;
        self.last_traffic = now;
    }

    fn handle_data(&mut self, datagram: &[u8], now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        self.mark_answered_by_peer(now);
        let index = receiver(datagram);
        if let Some(position) = self.unconfirmed.iter().position(|(own, _)| *own == index) {
            let (_, since) = self.unconfirmed[position];
            self.unconfirmed.drain(..=position);
            // boringtun deletes an expired session up to a second late.
            if !has_elapsed(since, REJECT_AFTER_TIME, now) {
                self.initiation = None;
                self.set_session(index, false, since, now);
                self.flush(now, scratch, out);
            }
        }
        self.rekey_if_older(REKEY_ON_RECEIVE, now);
    }

    /// Drops a session that boringtun has expired. boringtun's clock continues while the machine is suspended, the caller's clock does not.
    fn forget_expired(&mut self) {
        if self.session.is_some() && !self.protocol.has_session() {
            self.session = None;
        }
    }

    fn mark_unanswered_by_us(&mut self, now: Instant) {
        if self.unanswered_by_us.is_none() {
            self.unanswered_by_us = Some(now);
            self.must_reschedule = true;
        }
    }
}

fn has_elapsed(since: Instant, duration: Duration, now: Instant) -> bool {
    now.saturating_duration_since(since) >= duration
}
