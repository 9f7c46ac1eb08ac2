//! One peer's WireGuard tunnel: when a message is sent (whitepaper §6 and the kernel's `timers.c`), over the protocol of boringtun
//! ([`protocol`]). Sockets, interfaces, locks and the table of peers are elsewhere; the caller passes the time.
//!
//! No initiation is sent within 5 s of the last one *or of a response*, as in the kernel. So a packet without a session waits in the
//! round trip after an answer to the peer's initiation.
//!
//! **An initiation does not move the endpoint.** The response goes to where it came from, and the first data or response from there moves
//! the endpoint. So a recorded initiation, which counts once more after a restart or a change of the preshared key, leads no packet away.
//!
//! **Crossed handshakes.** wireguard-go handles an initiation and a response of one peer at the same time in two workers and
//! does not check the state of the handshake again before it stores the result (`ConsumeMessageResponse`). If our initiation and our
//! response to its own arrive together, it may keep a session whose index it has just deleted; then it receives nothing until its own
//! 15 s timer. So a response to an initiation that crossed ours is held until ours is 50 ms old. By then wireguard-go and the kernel have
//! answered ours (the held response is dropped, because they forgot their own initiation), or the peer holds as we do and both sessions
//! are good.
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

pub(super) use self::protocol::{INITIATION, Local, OVERHEAD, RESPONSE, Refused};
use self::protocol::{Message, Protocol, kind, receiver, response_receiver, same_slot, sender};
use super::held::{Budget, Held};

mod low_order;
mod protocol;
#[cfg(test)]
mod tests;

/// No handshake message within this time of the last one (whitepaper §6.1, `REKEY_TIMEOUT`).
const REKEY_TIMEOUT: Duration = Duration::from_secs(5);
/// A random time up to this is added to it, so that two peers that began together do not go on together (§6.4), in milliseconds.
const MAX_JITTER: u16 = 333;
/// How long a wanted session is tried for before its packets are dropped (`REKEY_ATTEMPT_TIME`).
const ATTEMPT_TIME: Duration = Duration::from_secs(90);
/// An initiator that sends on a session of this age begins a new one (`REKEY_AFTER_TIME`).
const REKEY_AFTER_TIME: Duration = Duration::from_secs(120);
/// A session is used no longer than this (`REJECT_AFTER_TIME`).
const REJECT_AFTER_TIME: Duration = Duration::from_secs(180);
/// An initiator that receives on a session of this age begins a new one.
const REKEY_ON_RECEIVE: Duration = Duration::from_secs(165);
/// Data came and nothing was sent for this time: a keepalive is sent (`KEEPALIVE_TIMEOUT`).
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Data was sent and nothing came for this time: the peer has lost the session.
const SILENCE: Duration = KEEPALIVE_TIMEOUT.saturating_add(REKEY_TIMEOUT);
/// A peer's initiation is not answered this soon after another (the kernel's `INITIATIONS_PER_SECOND`).
const INITIATION_INTERVAL: Duration = Duration::from_millis(20);
/// A response to an initiation that crossed ours waits until ours has this age.
const HOLD: Duration = Duration::from_millis(50);
/// boringtun compares with whole milliseconds of another clock.
const EXPIRY_MARGIN: Duration = Duration::from_secs(1);
/// Answered initiations whose sessions boringtun still holds.
const MAX_UNCONFIRMED: usize = 8;

/// Where a tunnel's output goes, at once.
pub(super) trait Output {
    /// A UDP payload for the peer.
    fn network(&mut self, datagram: &[u8]);
}

/// The content of a datagram.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Received {
    /// Its source is where the peer is now.
    pub(super) moves_endpoint: bool,
    pub(super) inner: Inner,
}

/// What a datagram holds for the interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Inner {
    /// Nothing: a handshake message or a keepalive.
    Nothing,
    /// Length and source of the decrypted packet. The source is not checked against the allowed IPs yet.
    Packet(usize, IpAddr),
    /// No IP packet, or one that is shorter than its header says.
    Malformed,
}

/// The session that encrypts.
#[derive(Debug, Clone, Copy)]
struct Session {
    /// What the peer calls us by.
    index: u32,
    since: Instant,
    initiator: bool,
}

/// See the module.
pub(super) struct Tunnel {
    protocol: Protocol,
    keepalive: Option<Duration>,
    /// Staged packets: they wait for a session.
    staged: Held,
    session: Option<Session>,
    /// Sessions of answered initiations, oldest first, on which the peer has sent nothing yet.
    unconfirmed: Vec<(u32, Instant)>,
    /// The keys of every session are deleted by then.
    keys_until: Option<Instant>,
    /// The last initiation of the peer.
    initiated_at: Option<Instant>,
    /// No initiation before this.
    quiet_until: Option<Instant>,
    /// Our last initiation, until it is answered: its index, and when it was sent.
    initiation: Option<(u32, Instant)>,
    /// A response to an initiation that crossed ours, and when to send it.
    held_response: Option<(Instant, [u8; RESPONSE])>,
    /// Since when a session is wanted.
    wanted: Option<Instant>,
    /// A new session was wanted because the present one nears its end.
    renewing: bool,
    /// The first packet received since we last sent anything.
    unanswered_by_us: Option<Instant>,
    /// The first packet sent since we last received anything.
    unanswered_by_peer: Option<Instant>,
    /// The last authenticated datagram in either direction.
    traffic: Instant,
    completed: Option<Instant>,
    next_tick: Option<Instant>,
    urgent: bool,
}

impl Tunnel {
    /// `index` has 24 bits and is this peer's alone: it leads every receiver index that the peer uses toward us.
    pub(super) fn new(
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
            staged: Held::default(),
            session: None,
            unconfirmed: Vec::new(),
            keys_until: None,
            initiated_at: None,
            quiet_until: None,
            initiation: None,
            held_response: None,
            wanted: None,
            renewing: false,
            unanswered_by_us: None,
            unanswered_by_peer: None,
            traffic: now,
            completed: None,
            next_tick: None,
            urgent: true,
        }
    }

    /// Counts the staged packets among those of the whole device.
    pub(super) fn within(mut self, budget: Budget) -> Self {
        self.staged = Held::new(budget);
        self
    }

    /// The last completed handshake.
    pub(super) const fn completed(&self) -> Option<Instant> {
        self.completed
    }

    /// Changes the persistent keepalive; a new one is due at once, as in the kernel.
    pub(super) fn set_keepalive(&mut self, keepalive: Option<Duration>, now: Instant) {
        if keepalive.is_some() && self.keepalive.is_none() {
            self.traffic = now.checked_sub(keepalive.unwrap_or_default()).unwrap_or(now);
        }
        self.keepalive = keepalive;
        self.urgent = true;
    }

    /// Changes the preshared key, from the next message on.
    pub(super) fn set_preshared_key(&mut self, preshared_key: Option<[u8; 32]>) {
        self.protocol.set_preshared_key(preshared_key);
        self.session = None;
        self.unconfirmed.clear();
        self.keys_until = None;
        self.initiation = None;
        self.held_response = None;
        self.quiet_until = None;
        self.renewing = false;
        self.unanswered_by_us = None;
        self.unanswered_by_peer = None;
        self.completed = None;
    }

    /// Begins a handshake without a packet to send, because the peer may hold a dead session. The next tick does it, and is due now.
    pub(super) fn greet(&mut self, now: Instant) {
        self.wanted = Some(now);
        self.next_tick = Some(now);
    }

    /// The peer has a new endpoint: without a session a handshake begins there at once.
    pub(super) fn moved(&mut self, now: Instant) {
        if !self.is_ready(now) {
            self.quiet_until = None;
            self.greet(now);
        }
    }

    fn is_ready(&self, now: Instant) -> bool {
        self.session
            .is_some_and(|session| !passed(session.since, REJECT_AFTER_TIME, now))
    }

    /// Encrypts a packet to the beginning of `datagram`, which is [`OVERHEAD`] longer; its length there. `None` = there is no session: see
    /// [`Self::send`].
    pub(super) fn seal(&mut self, packet: &[u8], now: Instant, datagram: &mut [u8]) -> Option<usize> {
        if !self.is_ready(now) {
            return None;
        }
        let sealed = self.protocol.seal(packet, datagram)?;
        self.unanswered_by_us = None;
        self.traffic = now;
        if !packet.is_empty() && self.unanswered_by_peer.is_none() {
            self.unanswered_by_peer = Some(now);
            self.urgent = true;
        }
        self.renew_after(REKEY_AFTER_TIME, now);
        Some(sealed)
    }

    /// Sends a packet, or stages it until there is a session.
    pub(super) fn send(&mut self, packet: &[u8], now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        if !self.send_sealed(packet, now, scratch, out) {
            self.staged.push(packet);
            // Attempts go on as long as packets come.
            self.wanted = Some(now);
            self.urgent = true;
            self.want(now, scratch, out);
        }
    }

    /// Takes a datagram. A packet in it is decrypted to the beginning of `plain`, which is as long as the datagram and at least
    /// [`INITIATION`] bytes.
    ///
    /// # Errors
    /// The message is not the peer's, or not for a session that exists; nothing changes.
    pub(super) fn receive(
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
                .is_some_and(|at| !passed(at, INITIATION_INTERVAL, now))
        {
            return Err(Refused::TooSoon);
        }
        match self.protocol.open(datagram, plain)? {
            Message::Initiation(response) => {
                self.initiated(response, now, out);
                Ok(nothing(false))
            }
            Message::Response(keepalive) => {
                self.initiation = None;
                self.received(now);
                // wireguard-go and the kernel forgot their own initiation when they answered ours; a peer that holds has both sessions.
                self.held_response = None;
                self.unconfirmed.clear();
                let index = response_receiver(datagram);
                self.established(index, true, now, now);
                if !self.flush(now, scratch, out) {
                    // The responder must not send first.
                    out.network(&keepalive);
                }
                Ok(nothing(true))
            }
            Message::Cookie => Ok(nothing(false)),
            Message::Keepalive => {
                self.received_data(datagram, now, scratch, out);
                Ok(nothing(true))
            }
            Message::Packet(length, source) => {
                self.received_data(datagram, now, scratch, out);
                self.has_packet(now);
                Ok(Received {
                    moves_endpoint: true,
                    inner: Inner::Packet(length, source),
                })
            }
            Message::Malformed => {
                self.received_data(datagram, now, scratch, out);
                self.has_packet(now);
                Ok(Received {
                    moves_endpoint: true,
                    inner: Inner::Malformed,
                })
            }
        }
    }

    /// Whether this is the index of our last initiation, and it is not answered yet.
    pub(super) fn awaits(&self, index: u32) -> bool {
        self.initiation.is_some_and(|(own, _)| own == index)
    }

    /// Whether an initiation was not answered in its time.
    pub(super) fn unanswered(&self, now: Instant) -> bool {
        self.initiation.is_some() && self.wanted.is_some() && self.quiet_until.is_some_and(|until| until <= now)
    }

    /// Forgets the tick that was scheduled: without an endpoint there is nothing to do.
    pub(super) const fn skip_tick(&mut self) {
        self.next_tick = None;
    }

    /// Does what is due.
    pub(super) fn tick(&mut self, now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        self.next_tick = None;
        if let Some((_, response)) = self.held_response.take_if(|(due, _)| *due <= now) {
            self.respond(&response, now, out);
        }
        if self
            .session
            .is_some_and(|session| passed(session.since, REJECT_AFTER_TIME, now))
        {
            self.session = None;
        }
        self.keys_until.take_if(|until| *until <= now);
        if self.wanted.is_some_and(|since| passed(since, ATTEMPT_TIME, now)) {
            self.wanted = None;
            self.renewing = false;
            self.staged.clear();
        }
        if self.unanswered_by_peer.is_some_and(|since| passed(since, SILENCE, now)) {
            self.unanswered_by_peer = None;
            self.wanted.get_or_insert(now);
        }
        if self.wanted.is_some() && self.may_initiate(now) {
            self.want(now, scratch, out);
        } else {
            // The tunnel's own timers decide.
            self.protocol.expire(scratch);
        }
        self.forget_expired();
        let passive = self
            .unanswered_by_us
            .is_some_and(|since| passed(since, KEEPALIVE_TIMEOUT, now));
        let persistent = self.keepalive.is_some_and(|every| passed(self.traffic, every, now));
        if passive || persistent {
            self.unanswered_by_us = None;
            self.traffic = now;
            if !self.send_sealed(&[], now, scratch, out) && persistent {
                self.want(now, scratch, out);
            }
        }
    }

    /// When [`Self::tick`] is due, if that is earlier than the last answer; at most one such time is open.
    pub(super) fn reschedule(&mut self, now: Instant) -> Option<Instant> {
        if self.next_tick.is_some() && !self.urgent {
            return None;
        }
        self.urgent = false;
        let held = self.held_response.as_ref().map(|(due, _)| *due);
        let times = [
            held,
            self.wanted.map(|since| {
                let retry = self.quiet_until.unwrap_or(now);
                // While a response is held nothing else is sent.
                let retry = held.map_or(retry, |due| retry.max(due));
                retry.min(since + ATTEMPT_TIME)
            }),
            self.unanswered_by_us.map(|since| since + KEEPALIVE_TIMEOUT),
            self.unanswered_by_peer.map(|since| since + SILENCE),
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

    /// True for the tick of [`Self::reschedule`], false for one that an earlier one has replaced.
    pub(super) fn expects_tick(&self, at: Instant) -> bool {
        self.next_tick == Some(at)
    }

    /// Answers an initiation, at once or when ours has had its time.
    fn initiated(&mut self, response: [u8; RESPONSE], now: Instant, out: &mut impl Output) {
        self.initiated_at = Some(now);
        self.keys_until = Some(now + REJECT_AFTER_TIME + EXPIRY_MARGIN);
        self.urgent = true;
        self.forget_expired();
        let index = sender(&response);
        // boringtun has put the new session into the slot of the old one, and would use it before the peer has confirmed it.
        self.session.take_if(|session| same_slot(session.index, index));
        self.unconfirmed.retain(|(other, _)| !same_slot(*other, index));
        if self.unconfirmed.len() == MAX_UNCONFIRMED {
            self.unconfirmed.remove(0);
        }
        self.unconfirmed.push((index, now));
        let crossed = self.initiation.map(|(_, sent)| sent + HOLD).filter(|due| *due > now);
        match crossed {
            Some(due) => self.held_response = Some((due, response)),
            None => {
                // A held response to an older initiation is void.
                self.held_response = None;
                self.respond(&response, now, out);
            }
        }
    }

    fn respond(&mut self, response: &[u8; RESPONSE], now: Instant, out: &mut impl Output) {
        self.be_quiet(response, now);
        out.network(response);
    }

    fn may_initiate(&self, now: Instant) -> bool {
        self.quiet_until.is_none_or(|until| until <= now) && self.held_response.is_none()
    }

    /// Begins a handshake, unless it is too soon.
    fn want(&mut self, now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        if self.wanted.is_none() {
            self.wanted = Some(now);
            self.urgent = true;
        }
        if !self.may_initiate(now) {
            return;
        }
        match self.protocol.initiate(scratch) {
            Some(initiation) => self.sent_initiation(&initiation, now, out),
            // Not at once again either.
            None => self.be_quiet(&[], now),
        }
    }

    fn sent_initiation(&mut self, initiation: &[u8; INITIATION], now: Instant, out: &mut impl Output) {
        self.initiation = Some((sender(initiation), now));
        self.be_quiet(initiation, now);
        out.network(initiation);
    }

    /// No handshake message for some time; the random part of the message gives the jitter.
    fn be_quiet(&mut self, message: &[u8], now: Instant) {
        let random = message
            .last_chunk::<32>()
            .map_or(0, |macs| u16::from_le_bytes([macs[0], macs[1]]));
        let jitter = Duration::from_millis(u64::from(random % (MAX_JITTER + 1)));
        self.quiet_until = Some(now + REKEY_TIMEOUT + jitter);
        self.urgent = true;
    }

    fn renew_after(&mut self, age: Duration, now: Instant) {
        let due = |session: Session| session.initiator && passed(session.since, age, now);
        if !self.renewing && self.session.is_some_and(due) {
            self.renewing = true;
            self.wanted.get_or_insert(now);
            self.urgent = true;
        }
    }

    /// A session is there: the staged packets may go.
    fn established(&mut self, index: u32, initiator: bool, since: Instant, now: Instant) {
        self.session = Some(Session {
            index,
            since,
            initiator,
        });
        self.keys_until = Some(now + REJECT_AFTER_TIME + EXPIRY_MARGIN);
        self.completed = Some(now);
        self.wanted = None;
        self.renewing = false;
        self.urgent = true;
    }

    /// Whether anything was sent.
    fn flush(&mut self, now: Instant, scratch: &mut [u8], out: &mut impl Output) -> bool {
        let mut any = false;
        while let Some(packet) = self.staged.pop() {
            any |= self.send_sealed(&packet, now, scratch, out);
        }
        any
    }

    /// Sends a packet by the present session, if there is one.
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

    fn received(&mut self, now: Instant) {
        self.unanswered_by_peer = None;
        self.traffic = now;
    }

    fn received_data(&mut self, datagram: &[u8], now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        self.received(now);
        let index = receiver(datagram);
        if let Some(place) = self.unconfirmed.iter().position(|(own, _)| *own == index) {
            let (_, since) = self.unconfirmed[place];
            self.unconfirmed.drain(..=place);
            self.initiation = None;
            self.established(index, false, since, now);
            self.flush(now, scratch, out);
        }
        self.renew_after(REKEY_ON_RECEIVE, now);
    }

    /// boringtun has another clock than the caller: it runs on while the machine sleeps.
    fn forget_expired(&mut self) {
        if self.session.is_some() && !self.protocol.has_session() {
            self.session = None;
        }
    }

    fn has_packet(&mut self, now: Instant) {
        if self.unanswered_by_us.is_none() {
            self.unanswered_by_us = Some(now);
            self.urgent = true;
        }
    }
}

fn passed(since: Instant, long: Duration, now: Instant) -> bool {
    now.saturating_duration_since(since) >= long
}
