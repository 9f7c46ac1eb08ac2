//! One peer's WireGuard sessions and the rules for when to speak (whitepaper §6, the kernel's `timers.c`). Sockets, interfaces, locks and
//! the table of peers live elsewhere; time is handed in.
//!
//! No initiation is sent within 5 s of the last one *or of a response*, as the kernel: also not for a packet that has no session in the round
//! trip after we have answered the peer's initiation.
//!
//! **Crossed handshakes.** wireguard-go handles an initiation and a response of one peer at the same time in two workers and
//! does not look again at the state of the handshake before it stores the result (`ConsumeMessageResponse`): when our
//! initiation and our response to its own reach it together, it may keep a session whose index it has just thrown away, and hears
//! nothing from us until its own 15 s timer. So a response to an initiation that crossed ours is held back until ours is 50 ms old:
//! by then wireguard-go and the kernel have answered ours (and the response is not sent, since they forgot their own), or the peer
//! holds back as we do and two good sessions come to be.
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
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use clustermesh_wireguard::{
    Initiator, Keys, Local, Macs, Refused, Timestamp,
    message::{HEADER, Message, RESPONSE},
    read_initiation,
};
use x25519_dalek::PublicKey;
use zeroize::Zeroizing;

use super::{
    held::{Budget, Held},
    inner,
};

mod handshake;
#[cfg(test)]
mod tests;

/// WireGuard's own retry: no handshake message within this time of the last one (whitepaper §6.1, `REKEY_TIMEOUT`).
const REKEY_TIMEOUT: Duration = Duration::from_secs(5);
/// Up to so much is added to it, so that two that began together do not go on together (§6.4).
const MOST_JITTER: u16 = 333;
/// How long a wanted session is tried for before its packets are dropped (`REKEY_ATTEMPT_TIME`).
const ATTEMPT_TIME: Duration = Duration::from_secs(90);
/// Data came and nothing went back for so long: say that we are here (`KEEPALIVE_TIMEOUT`).
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Data went and nothing came back for so long: the peer has lost our session.
const SILENCE: Duration = KEEPALIVE_TIMEOUT.saturating_add(REKEY_TIMEOUT);
/// An initiation of the peer is not answered so soon after another (the kernel's `INITIATIONS_PER_SECOND`).
const INITIATION_INTERVAL: Duration = Duration::from_millis(20);
/// A response to an initiation that crossed ours waits until ours is so old.
const HOLD: Duration = Duration::from_millis(50);

/// Where a tunnel's output goes, as soon as it is made.
pub(super) trait Output {
    /// A UDP payload for the peer.
    fn network(&mut self, datagram: &[u8]);
}

/// What a datagram turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Received {
    /// It came from the peer: its source is where the peer is now.
    pub(super) authentic: bool,
    pub(super) inner: Inner,
}

/// What an authentic datagram held for the interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Inner {
    /// It was no data, or a keepalive.
    Nothing,
    /// Where in it the packet stands, decrypted, and its source, which is not yet checked against the peer's ranges.
    Packet(Range<usize>, IpAddr),
    /// No IP packet, or one whose own length is not true to what came.
    Malformed,
}

/// See the module.
pub(super) struct Tunnel {
    local: Arc<Local>,
    peer: PublicKey,
    preshared_key: Zeroizing<[u8; 32]>,
    index: u32,
    /// The lowest bits of the next index.
    generation: u8,
    macs: Macs,
    keys: Keys,
    keepalive: Option<Duration>,
    /// What waits for a session.
    held_packets: Held,
    /// The newest initiation of the peer, by its clock, and when it came; and ours.
    heard: Timestamp,
    heard_at: Option<Instant>,
    said: Timestamp,
    /// No initiation before this.
    quiet_until: Option<Instant>,
    /// Our last initiation, until it is answered, and when it was sent.
    initiation: Option<(Initiator, Instant)>,
    /// A response to an initiation that crossed ours, and when to send it.
    held: Option<(Instant, [u8; RESPONSE])>,
    /// Since when someone waits for a session.
    wanted: Option<Instant>,
    /// A new session was asked for because the present one nears its end.
    renewing: bool,
    /// The first inner packet received since we last sent anything.
    unanswered_by_us: Option<Instant>,
    /// The first inner packet sent since we last received anything.
    unanswered_by_peer: Option<Instant>,
    /// The last authenticated datagram in either direction.
    traffic: Instant,
    completed: Option<Instant>,
    next_tick: Option<Instant>,
    urgent: bool,
}

impl Tunnel {
    /// `index` has 24 bits and is this peer's alone: it leads every receiver index the peer will use toward us.
    pub(super) fn new(
        local: Arc<Local>,
        peer: PublicKey,
        preshared_key: Option<[u8; 32]>,
        index: u32,
        keepalive: Option<Duration>,
        now: Instant,
    ) -> Self {
        Self {
            local,
            peer,
            preshared_key: Zeroizing::new(preshared_key.unwrap_or_default()),
            index,
            generation: 0,
            macs: Macs::new(&peer),
            keys: Keys::default(),
            keepalive,
            held_packets: Held::default(),
            heard: Timestamp::default(),
            heard_at: None,
            said: Timestamp::default(),
            quiet_until: None,
            initiation: None,
            held: None,
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

    /// Counts what waits here among what waits in the whole device.
    pub(super) fn within(mut self, budget: Budget) -> Self {
        self.held_packets = Held::new(budget);
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

    /// Changes the preshared key; it counts at once. What was heard and said stays known: recorded initiations are still old, since the
    /// key is in none of them.
    pub(super) fn set_preshared_key(&mut self, preshared_key: Option<[u8; 32]>) {
        self.preshared_key = Zeroizing::new(preshared_key.unwrap_or_default());
        self.keys = Keys::default();
        self.initiation = None;
        self.held = None;
        self.quiet_until = None;
        self.renewing = false;
        self.unanswered_by_us = None;
        self.unanswered_by_peer = None;
        self.completed = None;
    }

    /// Asks for a session although there is nothing to send: the peer may hold a dead one. The next tick starts it, which is due now.
    pub(super) fn greet(&mut self, now: Instant) {
        self.wanted = Some(now);
        self.next_tick = Some(now);
    }

    /// The peer is now looked for elsewhere: without a session it is asked there at once, since that place was not asked yet.
    pub(super) fn moved(&mut self, now: Instant) {
        if !self.keys.ready(now) {
            self.quiet_until = None;
            self.greet(now);
        }
    }

    /// Encrypts the inner packet of `length` bytes that stands in `datagram` behind the room for a header: the length of the whole, 32
    /// bytes more. `None` = there is no session: see [`Self::send`].
    pub(super) fn seal(&mut self, datagram: &mut [u8], length: usize, now: Instant) -> Option<usize> {
        let sealed = self.keys.seal(datagram, length, now)?;
        self.unanswered_by_us = None;
        self.traffic = now;
        if length > 0 && self.unanswered_by_peer.is_none() {
            self.unanswered_by_peer = Some(now);
            self.urgent = true;
        }
        if !self.renewing && self.keys.renew_after_sending(now) {
            self.renew(now);
        }
        Some(sealed)
    }

    /// Sends an inner packet, or keeps it until there is a session.
    pub(super) fn send(&mut self, packet: &[u8], now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        if !self.speak(packet, now, scratch, out) {
            self.held_packets.push(packet);
            // As long as someone sends, it is tried.
            self.wanted = Some(now);
            self.urgent = true;
            self.want(now, out);
        }
    }

    /// Takes a datagram; an inner packet in it is decrypted where it stands.
    ///
    /// # Errors
    /// It is not the peer's, or not for a session that still counts; what came before stays as it is.
    pub(super) fn receive(
        &mut self,
        datagram: &mut [u8],
        now: Instant,
        scratch: &mut [u8],
        out: &mut impl Output,
    ) -> Result<Received, Refused> {
        let mut inner = Inner::Nothing;
        match Message::parse(datagram).ok_or(Refused::Invalid)? {
            Message::Data(_) => {
                let opened = self.keys.open(datagram, now)?;
                self.heard_from(now);
                if opened.confirmed {
                    self.established(now, false, scratch, out);
                }
                if !opened.packet.is_empty() {
                    let begin = opened.packet.start;
                    // Padding ends here.
                    inner = match inner::length_and_source(&datagram[opened.packet]) {
                        Some((length, source)) => Inner::Packet(begin..begin + length, source),
                        None => Inner::Malformed,
                    };
                    if self.unanswered_by_us.is_none() {
                        self.unanswered_by_us = Some(now);
                        self.urgent = true;
                    }
                }
                if !self.renewing && self.keys.renew_after_receiving(now) {
                    self.renew(now);
                }
            }
            Message::Response(response) => {
                let (initiation, _) = self.initiation.as_mut().ok_or(Refused::UnknownSession)?;
                let session = initiation.finish(response, now)?;
                self.initiation = None;
                self.heard_from(now);
                // Whoever does not hold back forgot its own when it answered ours; whoever does has both.
                if self.held.take().is_some() {
                    self.keys.unanswered();
                }
                self.keys.initiated(session);
                self.established(now, true, scratch, out);
            }
            Message::Initiation(initiation) => {
                let initiation = read_initiation(&self.local, initiation)?;
                return self.initiated(initiation, now, out);
            }
            Message::CookieReply(reply) => {
                self.macs.take(reply, now)?;
                return Ok(Received {
                    authentic: false,
                    inner: Inner::Nothing,
                });
            }
        }
        Ok(Received { authentic: true, inner })
    }

    /// Forgets the tick that was asked for: the peer has no endpoint, so there is nothing to do until it has.
    pub(super) const fn skip_tick(&mut self) {
        self.next_tick = None;
    }

    /// Does what is due.
    pub(super) fn tick(&mut self, now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        self.next_tick = None;
        self.keys.expire(now);
        if let Some((_, response)) = self.held.take_if(|(due, _)| *due <= now) {
            self.respond(&response, now, out);
        }
        if self.wanted.is_some_and(|since| passed(since, ATTEMPT_TIME, now)) {
            self.wanted = None;
            self.renewing = false;
            self.held_packets.clear();
        }
        if self.unanswered_by_peer.is_some_and(|since| passed(since, SILENCE, now)) {
            self.unanswered_by_peer = None;
            self.wanted.get_or_insert(now);
        }
        if self.wanted.is_some() {
            self.want(now, out);
        }
        let passive = self
            .unanswered_by_us
            .is_some_and(|since| passed(since, KEEPALIVE_TIMEOUT, now));
        let persistent = self.keepalive.is_some_and(|every| passed(self.traffic, every, now));
        if passive || persistent {
            self.unanswered_by_us = None;
            self.traffic = now;
            if !self.speak(&[], now, scratch, out) && persistent {
                self.want(now, out);
            }
        }
    }

    /// When [`Self::tick`] is to be called, if that is earlier than what this said before; at most one such time is open.
    pub(super) fn reschedule(&mut self, now: Instant) -> Option<Instant> {
        if self.next_tick.is_some() && !self.urgent {
            return None;
        }
        self.urgent = false;
        let times = [
            self.held.as_ref().map(|(due, _)| *due),
            self.wanted.map(|since| {
                let retry = self.quiet_until.unwrap_or(now);
                // While a response is held nothing else is sent.
                let retry = self.held.as_ref().map_or(retry, |(due, _)| retry.max(*due));
                retry.min(since + ATTEMPT_TIME)
            }),
            self.unanswered_by_us.map(|since| since + KEEPALIVE_TIMEOUT),
            self.unanswered_by_peer.map(|since| since + SILENCE),
            self.keepalive.map(|every| self.traffic + every),
            self.keys.until_expiry(now).map(|left| now + left),
        ];
        let next = times.into_iter().flatten().min()?.max(now);
        if self.next_tick.is_some_and(|open| open <= next) {
            return None;
        }
        self.next_tick = Some(next);
        self.next_tick
    }

    /// True for the tick that [`Self::reschedule`] asked for, false for one that an earlier one has replaced.
    pub(super) fn expects_tick(&self, at: Instant) -> bool {
        self.next_tick == Some(at)
    }

    fn renew(&mut self, now: Instant) {
        self.renewing = true;
        self.wanted.get_or_insert(now);
        self.urgent = true;
    }

    /// A session has come to be: what waited goes. One who began it says at least that it is there, since the other may not speak before.
    fn established(&mut self, now: Instant, began: bool, scratch: &mut [u8], out: &mut impl Output) {
        self.completed = Some(now);
        self.wanted = None;
        self.renewing = false;
        self.urgent = true;
        if !began {
            self.initiation = None;
        }
        let mut spoke = false;
        while let Some(packet) = self.held_packets.pop() {
            spoke |= self.speak(&packet, now, scratch, out);
        }
        if began && !spoke {
            self.speak(&[], now, scratch, out);
        }
    }

    /// Says this by the present session, if there is one.
    fn speak(&mut self, packet: &[u8], now: Instant, scratch: &mut [u8], out: &mut impl Output) -> bool {
        let Some(place) = scratch.get_mut(HEADER..HEADER + packet.len()) else {
            return false;
        };
        place.copy_from_slice(packet);
        let Some(length) = self.seal(scratch, packet.len(), now) else {
            return false;
        };
        out.network(&scratch[..length]);
        true
    }

    fn heard_from(&mut self, now: Instant) {
        self.unanswered_by_peer = None;
        self.traffic = now;
    }
}

fn passed(since: Instant, long: Duration, now: Instant) -> bool {
    now.saturating_duration_since(since) >= long
}
