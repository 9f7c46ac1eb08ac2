//! Tracks each peer over time: chooses the endpoint to configure, and derives the peer's state from the device's
//! counters. The rules are in `clustermesh_agent_core::health`. The caller passes the time.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    time::{Duration, Instant},
};

use clustermesh_agent_core::{
    device::{ObservedPeers, PeerStats},
    health::{PeerActivity, PeerHealth, SESSION_LIFETIME, max_keepalive_bytes, should_try_next_endpoint, state},
};
use clustermesh_core::key::PublicKey;

/// A handshake is overdue if the last one is older than this. An initiator that sends data rekeys after 120 s (WireGuard
/// paper §6.2), and retries every 5 s; three attempts may be lost.
const REKEY_LIMIT: Duration = Duration::from_secs(135);

#[derive(Debug, Clone)]
struct TrackedPeer {
    added_at: Instant,
    keepalive: Option<Duration>,
    /// Candidate endpoints in order of preference. If empty, and no live endpoint is known, only the peer can initiate handshakes.
    candidates: Vec<SocketAddr>,
    /// The configured endpoint.
    current: Option<SocketAddr>,
    /// When `current` was configured.
    current_since: Instant,
    stats: PeerStats,
    /// When `stats` was read.
    polled_at: Instant,
    /// The number of sent bytes when the last packet of the peer arrived, plus the persistent keepalives sent since then.
    tx_at_last_receive: u64,
    /// When a poll first showed packets other than keepalives to which the peer has not replied.
    unanswered_since: Option<Instant>,
    /// When the bytes received from the peer last increased.
    last_received: Option<Instant>,
    /// When a poll first showed that packets are sent to the peer although its handshake is overdue.
    overdue_since: Option<Instant>,
}

/// The tracked peers.
#[derive(Debug, Clone, Default)]
pub(crate) struct PeerTracker {
    peers: BTreeMap<PublicKey, TrackedPeer>,
    /// The endpoint from which each peer last sent to this process or an earlier one. A peer that is added to the device
    /// is tried there first.
    live: BTreeMap<PublicKey, SocketAddr>,
    /// When peers without candidates (for example behind NAT) were removed. A Peer object may be missing
    /// for a moment between two related writes, so the peer's live endpoint is remembered as long as a session may last.
    removed: BTreeMap<PublicKey, Instant>,
}

impl PeerTracker {
    /// A tracker without peers. `live` = the live endpoints that an earlier process saved.
    pub(crate) fn new(live: BTreeMap<PublicKey, SocketAddr>) -> Self {
        Self {
            live,
            ..Self::default()
        }
    }

    /// The endpoint from which each peer last sent.
    pub(crate) const fn live_endpoints(&self) -> &BTreeMap<PublicKey, SocketAddr> {
        &self.live
    }

    /// Sets the desired peers, their candidates and keepalive intervals. When the candidates of a peer change, the first one becomes its
    /// configured endpoint, with these exceptions. The configured endpoint stays:
    ///
    /// - if there is no candidate;
    /// - if the peer has roamed, during its live session;
    /// - if the configured endpoint is still a candidate, during the live session.
    pub(crate) fn sync<'a>(
        &mut self,
        wanted: impl Iterator<Item = (PublicKey, &'a [SocketAddr], Option<Duration>)>,
        now: Instant,
    ) {
        let mut old = std::mem::take(&mut self.peers);
        for (key, candidates, keepalive) in wanted {
            let mut tracked = old.remove(&key).unwrap_or_else(|| TrackedPeer {
                added_at: now,
                keepalive,
                candidates: candidates.to_vec(),
                current: self.live.get(&key).or(candidates.first()).copied(),
                current_since: now,
                stats: PeerStats::default(),
                polled_at: now,
                tx_at_last_receive: 0,
                unanswered_since: None,
                last_received: None,
                overdue_since: None,
            });
            tracked.keepalive = keepalive;
            if tracked.candidates != candidates {
                tracked.candidates = candidates.to_vec();
                tracked.reselect(now);
            }
            self.peers.insert(key, tracked);
        }
        let Self { peers, live, removed } = self;
        let without_candidates = old.into_iter().filter(|(_, tracked)| tracked.candidates.is_empty());
        removed.extend(without_candidates.map(|(key, _)| (key, now)));
        let is_remembered = |since: &Instant| now.saturating_duration_since(*since) < SESSION_LIFETIME;
        removed.retain(|key, since| live.contains_key(key) && !peers.contains_key(key) && is_remembered(since));
        live.retain(|key, _| peers.contains_key(key) || removed.contains_key(key));
    }

    /// The endpoint to configure for a peer.
    pub(crate) fn configured_endpoint(&self, key: &PublicKey) -> Option<SocketAddr> {
        self.peers.get(key)?.current
    }

    /// The destination of outer packets to each peer: the endpoint that the device uses now, else the configured one.
    pub(crate) fn outer_destinations(&self) -> impl Iterator<Item = (&PublicKey, SocketAddr)> {
        let destination = |tracked: &TrackedPeer| tracked.stats.endpoint.or(tracked.current);
        self.peers
            .iter()
            .filter_map(move |(key, tracked)| Some((key, destination(tracked)?)))
    }

    /// Records an observation of the device. True = the configured endpoint of some peer changes.
    pub(crate) fn update(&mut self, observed: &ObservedPeers, now: Instant) -> bool {
        let mut endpoint_changed = false;
        for (key, tracked) in &mut self.peers {
            let Some(peer) = observed.get(key) else { continue };
            tracked.record(&peer.stats, now);
            if let Some(at) = peer.stats.endpoint.filter(|_| tracked.is_alive()) {
                self.live.insert(*key, at);
            }
            if tracked.has_alternative()
                && should_try_next_endpoint(&tracked.activity(now), now - tracked.current_since)
            {
                tracked.try_next_candidate(now);
                endpoint_changed = true;
            }
        }
        endpoint_changed
    }

    /// The state of a peer; [`PeerHealth::Unknown`] if it is not tracked.
    pub(crate) fn state(&self, key: &PublicKey, now: Instant) -> PeerHealth {
        self.peers
            .get(key)
            .map_or(PeerHealth::Unknown, |tracked| state(&tracked.activity(now)))
    }

    /// For how long no peer has answered a rekey; `None` = some peer has answered, or no rekey was due.
    ///
    /// Unanswered packets alone prove nothing, because keepalives are never answered. But if packets are sent to a peer
    /// whose handshake is overdue, then handshake initiations were sent and not answered.
    pub(crate) fn unanswered_for(&self, now: Instant) -> Option<Duration> {
        let age = |tracked: &TrackedPeer| tracked.stats.handshake_age;
        let fresh = self
            .peers
            .values()
            .any(|tracked| age(tracked).is_some_and(|age| age <= REKEY_LIMIT));
        let overdue = self
            .peers
            .values()
            .filter(|tracked| age(tracked).is_some_and(|age| age > REKEY_LIMIT));
        let earliest = overdue.filter_map(|tracked| tracked.overdue_since).min()?;
        let answered = self
            .peers
            .values()
            .any(|tracked| tracked.last_received.is_some_and(|at| at >= earliest));
        (!fresh && !answered).then(|| now.saturating_duration_since(earliest))
    }

    /// Called after the device was opened. It may be the device of an earlier process, with peers: those with a live session keep
    /// their endpoint.
    pub(crate) fn keep_live_endpoints(&mut self, observed: &ObservedPeers) {
        let alive = observed
            .iter()
            .filter(|(_, peer)| peer.stats.handshake_age.is_some_and(|age| age <= SESSION_LIFETIME));
        self.live
            .extend(alive.filter_map(|(key, peer)| Some((*key, peer.stats.endpoint?))));
    }

    /// Forgets the state of all peers, but not their live endpoints, which are tried first. Called when the device was opened or its
    /// private key changed: the recorded handshakes do not prove a session of the opened device, or with the new key.
    pub(crate) fn reset(&mut self) {
        self.peers.clear();
    }
}

impl TrackedPeer {
    fn is_alive(&self) -> bool {
        self.stats.handshake_age.is_some_and(|age| age <= SESSION_LIFETIME)
    }

    /// Whether there is another endpoint to try.
    fn has_alternative(&self) -> bool {
        self.candidates.iter().any(|candidate| Some(*candidate) != self.current)
    }

    fn reselect(&mut self, now: Instant) {
        let first = self.candidates.first().copied();
        // A peer that roamed keeps its live endpoint while its session is alive: packets arrived from there, while a
        // candidate may be unreachable.
        let has_roamed = self.is_alive() && self.stats.endpoint.is_some() && self.stats.endpoint != self.current;
        let is_live_candidate = self.is_alive() && self.current.is_some_and(|at| self.candidates.contains(&at));
        if first.is_some() && !has_roamed && !is_live_candidate && self.current != first {
            self.current = first;
            self.current_since = now;
        }
    }

    fn try_next_candidate(&mut self, now: Instant) {
        let position = self
            .candidates
            .iter()
            .position(|candidate| Some(*candidate) == self.current);
        let next = position.map_or(0, |position| (position + 1) % self.candidates.len());
        self.current = self.candidates.get(next).copied();
        self.current_since = now;
    }

    fn record(&mut self, stats: &PeerStats, now: Instant) {
        // Counters decrease only if the device was opened again, or the peer was removed and added again.
        let is_reset = stats.rx_bytes < self.stats.rx_bytes || stats.tx_bytes < self.tx_at_last_receive;
        if is_reset || stats.rx_bytes > self.stats.rx_bytes {
            self.tx_at_last_receive = stats.tx_bytes;
            self.unanswered_since = None;
            self.last_received = if is_reset { self.last_received } else { Some(now) };
        } else {
            // A peer with a keepalive interval is judged by the bytes since the last poll: the keepalives of many polls
            // together would exceed any limit.
            let time = now.saturating_duration_since(self.polled_at);
            if stats.tx_bytes - self.tx_at_last_receive > max_keepalive_bytes(self.keepalive, time) {
                self.unanswered_since.get_or_insert(now);
            } else if self.keepalive.is_some() {
                self.tx_at_last_receive = stats.tx_bytes;
            }
        }
        self.polled_at = now;
        let overdue = stats.handshake_age.is_some_and(|age| age > REKEY_LIMIT);
        if !overdue {
            self.overdue_since = None;
        } else if stats.tx_bytes > self.stats.tx_bytes && self.overdue_since.is_none() {
            self.overdue_since = Some(now);
        }
        self.stats = stats.clone();
    }

    fn activity(&self, now: Instant) -> PeerActivity {
        PeerActivity {
            configured: now - self.added_at,
            handshake: self.stats.handshake_age,
            has_endpoint: self.current.is_some() || self.stats.endpoint.is_some(),
            keepalive: self.keepalive,
            unanswered: self
                .unanswered_since
                .map(|since| now.saturating_duration_since(since))
                .filter(|d| *d > Duration::ZERO),
        }
    }
}

#[cfg(test)]
mod tests;
