//! Implements one peer's WireGuard tunnel: decides when to send which message (whitepaper §6 and the kernel's `timers.c`). boringtun
//! encodes and decodes the messages ([`protocol`]). The tunnel does no I/O and reads no clock: the caller passes datagrams and the time.
//!
//! As in the kernel, no initiation is sent within 5 s of the last one *or of a response*. So after a response, a packet without a session
//! is staged until the initiator has confirmed the new session.
//!
//! **An initiation does not change the endpoint.** The response goes to the initiation's source, and the first data message or response
//! from there changes the endpoint. A recorded initiation is valid again after a restart or a change of the preshared key, because the
//! newest timestamp is forgotten; but it redirects no packet.
//!
//! **Crossed handshakes.** wireguard-go handles an initiation and a response of one peer at the same time in two workers and
//! does not check the state of the handshake again before it stores the result (`ConsumeMessageResponse`). If our initiation and our
//! response to its own arrive together, it may keep a session whose index it has just deleted; then it receives nothing until its own
//! 15 s timer. So a response to an initiation that crossed ours is held until ours is 50 ms old. By then wireguard-go or the kernel has
//! answered ours, and the held response is dropped, because the peer forgot its own initiation. Or the peer is a tunnel of this kind, which
//! holds its response, too; then both sessions are valid.
//!
//! ```text
//!  us                        wireguard-go, kernel         |  us                          ourselves
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

/// The time from a handshake message to the next initiation (whitepaper §6.1, `REKEY_TIMEOUT`).
const REKEY_TIMEOUT: Duration = Duration::from_secs(5);
/// Milliseconds: a random time up to this is added to it, so that two peers do not retry at the same time for ever (§6.4).
const MAX_JITTER: u16 = 333;
/// After this time without a session the attempts end, and the staged packets are dropped (`REKEY_ATTEMPT_TIME`).
const ATTEMPT_TIME: Duration = Duration::from_secs(90);
/// An initiator that sends on a session of this age initiates a new one (`REKEY_AFTER_TIME`).
const REKEY_AFTER_TIME: Duration = Duration::from_secs(120);
/// A session is used no longer than this (`REJECT_AFTER_TIME`).
const REJECT_AFTER_TIME: Duration = Duration::from_secs(180);
/// An initiator that receives on a session of this age initiates a new one.
const REKEY_ON_RECEIVE: Duration = Duration::from_secs(165);
/// A keepalive is sent this long after data was received, if nothing else was sent (`KEEPALIVE_TIMEOUT`).
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// A handshake is initiated this long after data was sent, if nothing was received: the peer may have lost the session.
const NO_REPLY_TIMEOUT: Duration = KEEPALIVE_TIMEOUT.saturating_add(REKEY_TIMEOUT);
/// The least time between two initiations of a peer that are answered (the kernel's `INITIATIONS_PER_SECOND`).
const INITIATION_INTERVAL: Duration = Duration::from_millis(20);
/// A response to an initiation that crossed ours is held until ours has this age.
const RESPONSE_HOLD: Duration = Duration::from_millis(50);
/// boringtun's own clock decides when keys expire, in whole milliseconds; this is added to our deadline.
const EXPIRY_MARGIN: Duration = Duration::from_secs(1);
/// boringtun keeps no more sessions of answered initiations.
const MAX_UNCONFIRMED: usize = 8;

/// Sends a tunnel's datagrams.
pub(crate) trait Output {
    /// Sends this UDP payload to the peer.
    fn network(&mut self, datagram: &[u8]);
}

/// The result of an authentic datagram.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Received {
    /// The datagram's source is the peer's new endpoint.
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
    /// Not an IP packet, or one that is shorter than its header says.
    Malformed,
}

/// The session that encrypts what is sent.
#[derive(Debug, Clone, Copy)]
struct Session {
    /// Our index: the receiver index of the peer's data messages.
    index: u32,
    since: Instant,
    is_initiator: bool,
}

/// One peer's tunnel; see the module.
pub(crate) struct Tunnel {
    protocol: Protocol,
    keepalive: Option<Duration>,
    /// Packets that wait for a session.
    staged: StagedPackets,
    session: Option<Session>,
    /// Sessions of answered initiations, oldest first, on which the peer has sent nothing yet.
    unconfirmed: Vec<(u32, Instant)>,
    /// When the keys of every session are expired.
    keys_until: Option<Instant>,
    /// When the peer's last initiation was received.
    initiated_at: Option<Instant>,
    /// No initiation is sent before this time.
    no_initiation_before: Option<Instant>,
    /// Our last initiation, until it is answered: its index, and when it was sent.
    initiation: Option<(u32, Instant)>,
    /// A response to an initiation that crossed ours, and when to send it.
    held_response: Option<(Instant, [u8; RESPONSE])>,
    /// Since when the tunnel tries to get a new session; `None` = it does not.
    wanted_since: Option<Instant>,
    /// A handshake was requested because the session is old.
    is_rekeying: bool,
    /// When the first packet was received since we last sent anything.
    unanswered_by_us: Option<Instant>,
    /// When the first packet was sent since we last received anything.
    unanswered_by_peer: Option<Instant>,
    /// When the last authentic datagram was sent or received.
    traffic: Instant,
    last_handshake: Option<Instant>,
    next_tick: Option<Instant>,
    must_reschedule: bool,
}

impl Tunnel {
    /// `index` has 24 bits and is unique in the device: it is the upper part of every receiver index in the peer's messages to us.
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
            initiated_at: None,
            no_initiation_before: None,
            initiation: None,
            held_response: None,
            wanted_since: None,
            is_rekeying: false,
            unanswered_by_us: None,
            unanswered_by_peer: None,
            traffic: now,
            last_handshake: None,
            next_tick: None,
            must_reschedule: true,
        }
    }

    /// Counts the staged packets among those of the whole device.
    pub(crate) fn with_budget(mut self, budget: SharedBudget) -> Self {
        self.staged = StagedPackets::new(budget);
        self
    }

    /// When the last handshake was completed.
    pub(crate) const fn last_handshake(&self) -> Option<Instant> {
        self.last_handshake
    }

    /// Changes the persistent keepalive; a new one is due at once, as in the kernel.
    pub(crate) fn set_keepalive(&mut self, keepalive: Option<Duration>, now: Instant) {
        if keepalive.is_some() && self.keepalive.is_none() {
            self.traffic = now.checked_sub(keepalive.unwrap_or_default()).unwrap_or(now);
        }
        self.keepalive = keepalive;
        self.must_reschedule = true;
    }

    /// Changes the preshared key, from the next message on.
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

    /// Requests a handshake without a packet to send, because the peer may use a session that we no longer have. The next tick, which is
    /// due now, sends the initiation.
    pub(crate) fn initiate_handshake(&mut self, now: Instant) {
        self.wanted_since = Some(now);
        self.next_tick = Some(now);
    }

    /// Without a session, initiates a handshake with the new endpoint at once.
    pub(crate) fn endpoint_changed(&mut self, now: Instant) {
        if !self.is_ready(now) {
            self.no_initiation_before = None;
            self.initiate_handshake(now);
        }
    }

    /// Whether the session may still encrypt.
    fn is_ready(&self, now: Instant) -> bool {
        self.session
            .is_some_and(|session| !has_elapsed(session.since, REJECT_AFTER_TIME, now))
    }

    /// Encrypts a packet to the beginning of `datagram`, which is [`OVERHEAD`] longer; returns the datagram's length. `None` =
    /// there is no session: see [`Self::send`].
    pub(crate) fn seal(&mut self, packet: &[u8], now: Instant, datagram: &mut [u8]) -> Option<usize> {
        if !self.is_ready(now) {
            return None;
        }
        let sealed = self.protocol.seal(packet, datagram)?;
        self.unanswered_by_us = None;
        self.traffic = now;
        if !packet.is_empty() && self.unanswered_by_peer.is_none() {
            self.unanswered_by_peer = Some(now);
            self.must_reschedule = true;
        }
        self.rekey_after(REKEY_AFTER_TIME, now);
        Some(sealed)
    }

    /// Sends a packet, or stages it until there is a session.
    pub(crate) fn send(&mut self, packet: &[u8], now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        if !self.send_sealed(packet, now, scratch, out) {
            self.staged.push(packet);
            // Every new packet extends the time of the attempts.
            self.wanted_since = Some(now);
            self.must_reschedule = true;
            self.request_session(now, scratch, out);
        }
    }

    /// Handles a datagram. A packet in it is decrypted to the beginning of `plain`, which is as long as the datagram and at least
    /// [`INITIATION`] bytes.
    ///
    /// # Errors
    /// The message is not the peer's, or not for a session that exists; nothing changes.
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
                .initiated_at
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
                self.record_received(now);
                // wireguard-go and the kernel forgot their own initiation when they answered ours. A peer that held its response has both
                // sessions.
                self.held_response = None;
                self.unconfirmed.clear();
                let index = response_receiver(datagram);
                self.set_session(index, true, now, now);
                if !self.flush(now, scratch, out) {
                    // The responder must not send first.
                    out.network(&keepalive);
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
                self.record_received_packet(now);
                Ok(Received {
                    moves_endpoint: true,
                    inner: Inner::Packet(length, source),
                })
            }
            Message::Malformed => {
                self.handle_data(datagram, now, scratch, out);
                self.record_received_packet(now);
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

    /// Sends and expires what is due.
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
            // An initiation that boringtun asks for is not sent: the tunnel's own timers decide.
            self.protocol.expire(scratch);
        }
        self.forget_expired();
        let passive = self
            .unanswered_by_us
            .is_some_and(|since| has_elapsed(since, KEEPALIVE_TIMEOUT, now));
        let persistent = self
            .keepalive
            .is_some_and(|every| has_elapsed(self.traffic, every, now));
        if passive || persistent {
            self.unanswered_by_us = None;
            self.traffic = now;
            if !self.send_sealed(&[], now, scratch, out) && persistent {
                self.request_session(now, scratch, out);
            }
        }
    }

    /// When [`Self::tick`] is due, if a tick must be scheduled: none is, or the scheduled one is later.
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
            self.keepalive.map(|every| self.traffic + every),
            self.keys_until,
        ];
        let next = times.into_iter().flatten().min()?.max(now);
        if self.next_tick.is_some_and(|open| open <= next) {
            return None;
        }
        self.next_tick = Some(next);
        self.next_tick
    }

    /// Whether this tick is the scheduled one; false if an earlier tick has replaced it.
    pub(crate) fn expects_tick(&self, at: Instant) -> bool {
        self.next_tick == Some(at)
    }

    fn rekey_after(&mut self, age: Duration, now: Instant) {
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

    /// Sends a packet if there is a session; returns whether there is.
    fn send_sealed(&mut self, packet: &[u8], now: Instant, scratch: &mut [u8], out: &mut impl Output) -> bool {
        if scratch.len() < packet.len() + OVERHEAD {
            return false;
        }
        let Some(length) = self.seal(packet, now, scratch) else {
            return false;
        };
        out.network(&scratch[..length]);
        true
    }

    fn record_received(&mut self, now: Instant) {
        self.unanswered_by_peer = None;
        self.traffic = now;
    }

    fn handle_data(&mut self, datagram: &[u8], now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        self.record_received(now);
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
        self.rekey_after(REKEY_ON_RECEIVE, now);
    }

    /// Drops a session that boringtun has expired. Its clock goes on while the machine is suspended, the caller's does not.
    fn forget_expired(&mut self) {
        if self.session.is_some() && !self.protocol.has_session() {
            self.session = None;
        }
    }

    fn record_received_packet(&mut self, now: Instant) {
        if self.unanswered_by_us.is_none() {
            self.unanswered_by_us = Some(now);
            self.must_reschedule = true;
        }
    }
}

fn has_elapsed(since: Instant, long: Duration, now: Instant) -> bool {
    now.saturating_duration_since(since) >= long
}
