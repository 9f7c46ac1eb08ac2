//! One peer's WireGuard session: boringtun's protocol core, and our own rules for when to speak.
//! Sockets, interfaces, locks and the table of peers live elsewhere; time is handed in.
//!
//! The core encrypts, decrypts and answers; we decide when a handshake starts, because left alone it
//! - starts one for every packet that has no session, also in the round trip after it has answered the peer's initiation.
//!   Kernel WireGuard sends no handshake within 5 s of its last initiation *or response*; so do we.
//! - forgets a passive keepalive when data went both ways within one of its clock ticks. The peer then thinks us dead after
//!   15 s and starts again, every time (cloudflare/boringtun#495). We keep these two timers ourselves.
//! - gives up for good 90 s after a silent peer, persistent keepalive or not. We ask again when there is a reason to.
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
    sync::Arc,
    time::{Duration, Instant},
};

use boringtun::noise::{Tunn, TunnResult, errors::WireGuardError, rate_limiter::RateLimiter};
use x25519_dalek::{PublicKey, StaticSecret};
use zeroize::Zeroizing;

use super::held::{Budget, Held};

#[cfg(test)]
mod tests;

/// WireGuard's own retry: no handshake message within this time of the last one (whitepaper §6.1, `REKEY_TIMEOUT`).
const REKEY_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a wanted session is tried for before its packets are dropped (`REKEY_ATTEMPT_TIME`).
const ATTEMPT_TIME: Duration = Duration::from_secs(90);
/// Data came and nothing went back for so long: say that we are here (`KEEPALIVE_TIMEOUT`).
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// No key is used or kept longer than this (`REJECT_AFTER_TIME`).
const REJECT_AFTER_TIME: Duration = Duration::from_secs(180);
/// A response to an initiation that crossed ours waits until ours is so old.
const HOLD: Duration = Duration::from_millis(50);
/// The core's clock: it stamps events with the time of its last tick.
const CORE_TICK: Duration = Duration::from_millis(250);
/// While a handshake is under way, and while only a session is to be watched.
const BUSY_TICK: Duration = Duration::from_millis(250);
const CALM_TICK: Duration = Duration::from_secs(1);

const INITIATION: u8 = 1;
const RESPONSE: u8 = 2;
const DATA: u8 = 4;
const RESPONSE_LEN: usize = 92;
/// The shortest (RFC 791 §3.1).
const IPV4_HEADER: usize = 20;

/// Where a tunnel's output goes, as soon as it is made.
pub(super) trait Output {
    /// A UDP payload for the peer.
    fn network(&mut self, datagram: &[u8]);
    /// An inner packet that the peer sent, authenticated but not yet checked against its allowed ranges.
    fn inner(&mut self, packet: &[u8], source: IpAddr);
}

/// The protocol core, made when the first word is said: it costs two multiplications on the curve and some 10 KiB, which thousands of
/// peers that nobody speaks to need not pay.
struct Core {
    private: StaticSecret,
    peer: PublicKey,
    preshared_key: Option<Zeroizing<[u8; 32]>>,
    index: u32,
    limiter: Arc<RateLimiter>,
    made: Option<Box<Tunn>>,
}

impl Core {
    fn get(&mut self) -> &mut Tunn {
        self.made.get_or_insert_with(|| {
            Box::new(Tunn::new(
                self.private.clone(),
                self.peer,
                self.preshared_key.as_deref().copied(),
                // The core's own persistent keepalive cannot be changed later, so it is not used.
                None,
                self.index,
                Some(Arc::clone(&self.limiter)),
            ))
        })
    }

    fn has_session(&self) -> bool {
        self.made
            .as_ref()
            .is_some_and(|core| core.time_since_last_handshake().is_some())
    }
}

/// See the module.
pub(super) struct Tunnel {
    core: Core,
    keepalive: Option<Duration>,
    /// What waits for a session.
    held_packets: Held,
    /// Whether the core has a session to send by; asking it costs a look at the clock.
    keyed: bool,
    core_ticked: Instant,
    /// Our last initiation or response.
    handshake_sent: Option<Instant>,
    /// Our last initiation, until it is answered.
    initiation: Option<Instant>,
    /// We answered an initiation and have not heard on that session yet.
    answered: bool,
    /// A response to an initiation that crossed ours, and when to send it.
    held: Option<(Instant, [u8; RESPONSE_LEN])>,
    /// Since when someone waits for a session.
    wanted: Option<Instant>,
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

/// A limiter that never limits: the device's own has judged a handshake message before a tunnel sees it.
pub(super) fn no_limit(own_public: &PublicKey) -> Arc<RateLimiter> {
    Arc::new(RateLimiter::new(own_public, u64::MAX))
}

impl Tunnel {
    /// `index` has 24 bits and is this peer's alone: it leads every receiver index the peer will use toward us.
    pub(super) fn new(
        private: StaticSecret,
        peer: PublicKey,
        preshared_key: Option<[u8; 32]>,
        index: u32,
        limiter: Arc<RateLimiter>,
        keepalive: Option<Duration>,
        now: Instant,
    ) -> Self {
        Self {
            core: Core {
                private,
                peer,
                preshared_key: preshared_key.map(Zeroizing::new),
                index,
                limiter,
                made: None,
            },
            keepalive,
            held_packets: Held::default(),
            keyed: false,
            core_ticked: now,
            handshake_sent: None,
            initiation: None,
            answered: false,
            held: None,
            wanted: None,
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

    /// Asks for a session although there is nothing to send: the peer may hold a dead one. The next tick starts it, which is due now.
    pub(super) fn greet(&mut self, now: Instant) {
        self.wanted = Some(now);
        self.next_tick = Some(now);
    }

    /// The peer is now looked for elsewhere: without a session it is asked there at once, since that place was not asked yet.
    pub(super) fn moved(&mut self, now: Instant) {
        if !self.keyed {
            self.handshake_sent = None;
            self.greet(now);
        }
    }

    /// Encrypts an inner packet to the beginning of `datagram`, which has 32 bytes more; its length there. `None` = there is no
    /// session: see [`Self::send`]. [`Self::refresh`] comes first.
    pub(super) fn seal(&mut self, packet: &[u8], now: Instant, datagram: &mut [u8]) -> Option<usize> {
        if !self.keyed {
            return None;
        }
        let TunnResult::WriteToNetwork(datagram) = self.core.get().encapsulate(packet, datagram) else {
            return None;
        };
        self.sent(packet, now);
        Some(datagram.len())
    }

    /// Sends an inner packet, or keeps it until there is a session.
    pub(super) fn send(&mut self, packet: &[u8], now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        self.refresh(now, scratch, out);
        if self.keyed {
            self.encrypt(packet, now, scratch, out);
        } else {
            self.held_packets.push(packet);
            self.want(now, scratch, out);
        }
    }

    /// Whether [`Self::refresh`] would do anything.
    pub(super) fn wants_refresh(&self, now: Instant) -> bool {
        now.duration_since(self.core_ticked) >= CORE_TICK
    }

    /// Brings the core's clock up to date; to be called before [`Self::receive`], whose output goes to the source of a datagram,
    /// while this may have something to say to the peer's known endpoint.
    pub(super) fn refresh(&mut self, now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        if self.wants_refresh(now) {
            self.tick_core(now, scratch, out);
        }
    }

    /// Takes a datagram; an inner packet in it is decrypted to the beginning of `packet`, which is as long as the datagram and has at least
    /// 148 bytes. `Ok(true)` = it was authenticated, so its source is where the peer is now.
    pub(super) fn receive(
        &mut self,
        source: IpAddr,
        datagram: &[u8],
        now: Instant,
        packet: &mut [u8],
        scratch: &mut [u8],
        out: &mut impl Output,
    ) -> Result<bool, WireGuardError> {
        let kind = datagram.first().copied().unwrap_or_default();
        let result = self.core.get().decapsulate(Some(source), datagram, packet);
        if kind != DATA || !self.keyed {
            self.keyed = self.core.has_session();
        }
        match result {
            TunnResult::Err(error) => return Err(error),
            TunnResult::WriteToNetwork(answer) if kind == INITIATION => {
                self.answered = true;
                self.urgent = true;
                let crossed = self.initiation.map(|sent| sent + HOLD).filter(|due| *due > now);
                match (crossed, <[u8; RESPONSE_LEN]>::try_from(&*answer)) {
                    (Some(due), Ok(response)) => self.held = Some((due, response)),
                    _ => {
                        self.handshake_sent = Some(now);
                        out.network(answer);
                    }
                }
            }
            TunnResult::WriteToNetwork(keepalive) => {
                out.network(keepalive);
                self.held = None;
                self.initiation = None;
                self.answered = false;
                self.established(now, scratch, out);
            }
            // The core takes a total length of less than the header itself at its word.
            TunnResult::WriteToTunnelV4(packet, _) if packet.len() < IPV4_HEADER => {
                return Err(WireGuardError::InvalidPacket);
            }
            TunnResult::WriteToTunnelV4(packet, from) => {
                self.unanswered_by_us.get_or_insert(now);
                out.inner(packet, IpAddr::V4(from));
            }
            TunnResult::WriteToTunnelV6(packet, from) => {
                self.unanswered_by_us.get_or_insert(now);
                out.inner(packet, IpAddr::V6(from));
            }
            TunnResult::Done => {}
        }
        if !matches!(kind, INITIATION | RESPONSE | DATA) {
            return Ok(false);
        }
        self.unanswered_by_peer = None;
        self.traffic = now;
        if kind == DATA && self.keyed {
            if std::mem::take(&mut self.answered) {
                self.established(now, scratch, out);
            } else {
                self.wanted = None;
            }
        }
        Ok(true)
    }

    /// Forgets the tick that was asked for: the peer has no endpoint, so there is nothing to do until it has.
    pub(super) const fn skip_tick(&mut self) {
        self.next_tick = None;
    }

    /// Does what is due.
    pub(super) fn tick(&mut self, now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        self.next_tick = None;
        if let Some((_, response)) = self.held.take_if(|(due, _)| *due <= now) {
            self.handshake_sent = Some(now);
            out.network(&response);
        }
        self.tick_core(now, scratch, out);
        if self
            .wanted
            .is_some_and(|since| now.duration_since(since) >= ATTEMPT_TIME)
        {
            self.wanted = None;
            self.held_packets.clear();
        }
        if self
            .unanswered_by_peer
            .is_some_and(|since| now.duration_since(since) >= KEEPALIVE_TIMEOUT + REKEY_TIMEOUT)
        {
            self.unanswered_by_peer = None;
            self.wanted = Some(now);
        }
        if self.wanted.is_some() {
            self.want(now, scratch, out);
        }
        let passive = self
            .unanswered_by_us
            .is_some_and(|since| now.duration_since(since) >= KEEPALIVE_TIMEOUT);
        let persistent = self
            .keepalive
            .is_some_and(|every| now.duration_since(self.traffic) >= every);
        if passive || persistent {
            self.unanswered_by_us = None;
            self.traffic = now;
            if self.keyed {
                self.encrypt(&[], now, scratch, out);
            } else if persistent {
                self.want(now, scratch, out);
            }
        }
    }

    /// When [`Self::tick`] is to be called, if that is earlier than what this said before; at most one such time is open.
    pub(super) fn reschedule(&mut self, now: Instant) -> Option<Instant> {
        if self.next_tick.is_some() && !self.urgent {
            return None;
        }
        self.urgent = false;
        let handshaking = self.wanted.is_some() || self.initiation.is_some();
        let keyed = self
            .handshake_sent
            .is_some_and(|sent| now.duration_since(sent) < REJECT_AFTER_TIME + CALM_TICK);
        let times = [
            self.held.as_ref().map(|(due, _)| *due),
            handshaking.then(|| now + BUSY_TICK),
            (keyed || self.keyed).then(|| now + CALM_TICK),
            self.keepalive.map(|every| (self.traffic + every).max(now)),
        ];
        let next = times.into_iter().flatten().min()?;
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

    fn tick_core(&mut self, now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        self.core_ticked = now;
        let Some(core) = &mut self.core.made else { return };
        let result = core.update_timers(scratch);
        self.keyed = self.core.has_session();
        match result {
            TunnResult::WriteToNetwork(datagram) => {
                if datagram.first() == Some(&INITIATION) {
                    self.handshake_sent = Some(now);
                    self.initiation = Some(now);
                    self.urgent = true;
                }
                out.network(datagram);
            }
            // It has given up on its own retries; ours, if any, start afresh.
            TunnResult::Err(_) => self.initiation = None,
            _ => {}
        }
    }

    fn want(&mut self, now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        self.wanted.get_or_insert(now);
        if self
            .handshake_sent
            .is_some_and(|sent| now.duration_since(sent) < REKEY_TIMEOUT)
            || self.held.is_some()
        {
            return;
        }
        if let TunnResult::WriteToNetwork(initiation) = self.core.get().format_handshake_initiation(scratch, true) {
            self.handshake_sent = Some(now);
            self.initiation = Some(now);
            self.urgent = true;
            out.network(initiation);
        }
    }

    fn established(&mut self, now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        self.completed = Some(now);
        self.wanted = None;
        self.urgent = true;
        while let Some(packet) = self.held_packets.pop() {
            self.encrypt(&packet, now, scratch, out);
        }
    }

    fn encrypt(&mut self, packet: &[u8], now: Instant, scratch: &mut [u8], out: &mut impl Output) {
        if let TunnResult::WriteToNetwork(datagram) = self.core.get().encapsulate(packet, scratch) {
            out.network(datagram);
            self.sent(packet, now);
        }
    }

    fn sent(&mut self, packet: &[u8], now: Instant) {
        self.unanswered_by_us = None;
        self.traffic = now;
        if !packet.is_empty() {
            self.unanswered_by_peer.get_or_insert(now);
        }
    }
}
