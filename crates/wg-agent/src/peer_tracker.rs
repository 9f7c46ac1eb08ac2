//! Tracks each peer over time: chooses the endpoint to configure, and derives the peer's state from the device's
//! counters. The rules are in `clustermesh_agent_core::health`. The caller passes the time.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::{Duration, Instant},
};

use clustermesh_agent_core::{
    device::{ObservedPeers, PeerStats},
    health::{PeerActivity, PeerHealth, SESSION_LIFETIME, max_keepalive_bytes, should_try_next_endpoint, state},
};
use clustermesh_core::key::PublicKey;

use crate::publish::discovered::LivePeer;

/// A rekey is overdue if the last handshake is older than this. An initiator that sends data rekeys after 120 s (WireGuard
/// paper §6.2), and retries every 5 s; three attempts may be lost.
const REKEY_LIMIT: Duration = Duration::from_secs(135);

/// A peer from which nothing came for this time does not reach this node at present: behind a NAT it sends a keepalive every 25 s.
const QUIET_LIMIT: Duration = Duration::from_secs(30);

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
    /// Write `current` to the device, even if the device learned its present endpoint from a packet of the peer.
    must_set: bool,
    /// The newest candidate that was added after `current` was configured.
    replacement: Option<SocketAddr>,
    /// The endpoint that was in use when it was removed from the candidates.
    removed_endpoint: Option<SocketAddr>,
    stats: PeerStats,
    /// When `stats` was read.
    polled_at: Instant,
    /// The number of sent bytes when the last packet of the peer arrived, plus the persistent keepalives sent since then.
    tx_at_last_receive: u64,
    /// When a poll first showed packets other than keepalives to which the peer has not replied.
    unanswered_since: Option<Instant>,
    /// When the bytes received from the peer last increased.
    last_received: Option<Instant>,
    /// When a poll first showed that packets are sent to the peer although a rekey is overdue.
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
    removed_at: BTreeMap<PublicKey, Instant>,
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

    /// Sets the desired peers, their candidates and keepalive intervals.
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
                must_set: false,
                replacement: None,
                removed_endpoint: None,
                stats: PeerStats::default(),
                polled_at: now,
                tx_at_last_receive: 0,
                unanswered_since: None,
                last_received: None,
                overdue_since: None,
            });
            tracked.keepalive = keepalive;
            if tracked.candidates != candidates {
                tracked.set_candidates(candidates, now);
            }
            self.peers.insert(key, tracked);
        }
        let Self {
            peers,
            live,
            removed_at,
        } = self;
        let without_candidates = old.into_iter().filter(|(_, tracked)| tracked.candidates.is_empty());
        removed_at.extend(without_candidates.map(|(key, _)| (key, now)));
        let is_remembered = |since: &Instant| now.saturating_duration_since(*since) < SESSION_LIFETIME;
        removed_at.retain(|key, since| live.contains_key(key) && !peers.contains_key(key) && is_remembered(since));
        live.retain(|key, _| peers.contains_key(key) || removed_at.contains_key(key));
    }

    /// The endpoint to configure for a peer.
    pub(crate) fn configured_endpoint(&self, key: &PublicKey) -> Option<SocketAddr> {
        self.peers.get(key)?.current
    }

    /// For each peer whose endpoint must be set, copies the endpoint that the device uses into `configured`, so that a comparison with the
    /// desired endpoint finds a difference. Returns these peers. A peer that has sent since the last poll keeps the endpoint from which it
    /// sent.
    pub(crate) fn replace_configured_by_used(&self, observed: &mut ObservedPeers) -> BTreeSet<PublicKey> {
        let mut copied = BTreeSet::new();
        for (key, tracked) in self.peers.iter().filter(|(_, tracked)| tracked.must_set) {
            let Some(peer) = observed.get_mut(key) else { continue };
            if peer.stats.rx_bytes <= tracked.stats.rx_bytes {
                peer.configured.endpoint = peer.stats.endpoint;
                copied.insert(*key);
            }
        }
        copied
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
            // What arrived before `current` was configured may have come from another endpoint.
            let has_sent = peer.stats.rx_bytes > tracked.stats.rx_bytes && tracked.current_since <= tracked.polled_at;
            tracked.record(&peer.stats, now);
            if let Some(at) = peer.stats.endpoint.filter(|_| tracked.is_alive() && has_sent) {
                self.live.insert(*key, at);
            }
            endpoint_changed |= tracked.try_replacement(now);
            if should_try_next_endpoint(&tracked.activity(now), now - tracked.current_since) {
                endpoint_changed |= tracked.try_next(self.live.get(key).copied(), now);
            }
        }
        endpoint_changed
    }

    /// The peers with a live session.
    pub(crate) fn live_peers(&self) -> impl Iterator<Item = LivePeer<'_>> {
        let alive = self.peers.iter().filter(|(_, tracked)| tracked.is_alive());
        alive.filter_map(|(key, tracked)| {
            Some(LivePeer {
                key: *key,
                endpoint: *self.live.get(key)?,
                candidates: &tracked.candidates,
            })
        })
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
    /// whose rekey is overdue, then handshake initiations were sent and not answered.
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

    /// Adds the endpoints that the device has for peers with a live session. Called after it was opened: an earlier process may have left
    /// it with peers.
    pub(crate) fn learn_live_endpoints(&mut self, observed: &ObservedPeers) {
        let alive = observed
            .iter()
            .filter(|(_, peer)| peer.stats.handshake_age.is_some_and(|age| age <= SESSION_LIFETIME));
        self.live
            .extend(alive.filter_map(|(key, peer)| Some((*key, peer.stats.endpoint?))));
    }

    /// Forgets the state of all peers, but not their live endpoints, which are tried first. Called when the device was opened or its
    /// private key changed: the recorded handshakes do not prove a session of the opened device, or with the new key.
    pub(crate) fn reset_except_live_endpoints(&mut self) {
        self.peers.clear();
    }
}

impl TrackedPeer {
    fn is_alive(&self) -> bool {
        self.stats.handshake_age.is_some_and(|age| age <= SESSION_LIFETIME)
    }

    /// The endpoint that the device uses, or `current` if that is about to be written to the device.
    fn in_use(&self) -> Option<SocketAddr> {
        self.stats.endpoint.filter(|_| !self.must_set).or(self.current)
    }

    fn configure(&mut self, endpoint: SocketAddr, now: Instant) {
        self.current = Some(endpoint);
        self.current_since = now;
        (self.replacement, self.removed_endpoint) = (None, None);
        self.must_set = self.stats.endpoint.is_some_and(|observed| observed != endpoint);
    }

    /// Replaces the candidates.
    ///
    /// The first candidate is what the node itself or a person names, so a new first one is tried at once. A live session prevents this,
    /// unless the endpoint in use was just removed from the candidates.
    ///
    /// Other new candidates may be false reports of other nodes. The last new candidate is tried at once only if the peer has no live
    /// session, the endpoint in use was removed, and the first candidate is not new. It becomes [`Self::replacement`] if no endpoint is
    /// configured now.
    fn set_candidates(&mut self, candidates: &[SocketAddr], now: Instant) {
        let old = std::mem::replace(&mut self.candidates, candidates.to_vec());
        let in_use = self.in_use();
        let is_removed = in_use.is_none_or(|at| old.contains(&at) && !candidates.contains(&at));
        let first = candidates.first().copied().filter(|first| Some(*first) != in_use);
        let is_first_new = first.is_some_and(|first| !old.contains(&first));
        let added = candidates.iter().rfind(|at| !old.contains(at)).copied();
        self.replacement = added.or(self.replacement).filter(|at| candidates.contains(at));
        if is_removed {
            self.removed_endpoint = in_use;
        }
        let new_first = first.filter(|_| is_first_new);
        let next = match (self.is_alive(), is_removed) {
            (true, true) | (false, false) => new_first,
            (true, false) => None,
            (false, true) => new_first.or(added).or(first),
        };
        if let Some(next) = next {
            self.configure(next, now);
        }
    }

    /// Uses the replacement, if the endpoint in use is no candidate any more and the peer has sent nothing from it since more than one
    /// keepalive interval. So a changed NAT mapping is followed, and a false report moves no session that works.
    fn try_replacement(&mut self, now: Instant) -> bool {
        let is_quiet = self
            .last_received
            .is_none_or(|at| now.saturating_duration_since(at) > QUIET_LIMIT);
        let in_use = self.in_use().filter(|at| !self.candidates.contains(at));
        let is_removed = in_use.is_some() && in_use == self.removed_endpoint;
        match self.replacement.filter(|_| self.is_alive() && is_quiet && is_removed) {
            Some(next) => {
                self.configure(next, now);
                true
            }
            None => false,
        }
    }

    /// Configures the next endpoint, round robin through the candidates and `live`, the endpoint from which the peer last sent. Returns
    /// `false` if there is no other endpoint.
    fn try_next(&mut self, live: Option<SocketAddr>, now: Instant) -> bool {
        let live = live.filter(|at| !self.candidates.contains(at));
        let all: Vec<SocketAddr> = self.candidates.iter().copied().chain(live).collect();
        let in_use = self.in_use();
        let position = all.iter().position(|at| Some(*at) == in_use);
        let next = position.map_or(0, |position| position + 1) % all.len().max(1);
        match all.get(next).filter(|next| Some(**next) != in_use) {
            Some(next) => {
                self.configure(*next, now);
                true
            }
            None => false,
        }
    }

    fn record(&mut self, stats: &PeerStats, now: Instant) {
        // Nothing must be set if the device uses `current`, or if the peer has sent: then the endpoint in use works.
        self.must_set &= stats.endpoint != self.current && stats.rx_bytes <= self.stats.rx_bytes;
        // Counters decrease only if the device was opened again, or the peer was removed and added again.
        let is_reset = stats.rx_bytes < self.stats.rx_bytes || stats.tx_bytes < self.tx_at_last_receive;
        if is_reset || stats.rx_bytes > self.stats.rx_bytes {
            self.tx_at_last_receive = stats.tx_bytes;
            self.unanswered_since = None;
            self.last_received = if is_reset { self.last_received } else { Some(now) };
        } else {
            // With a keepalive interval, the bytes since the last poll count, as the limit is for that time. Without one, all
            // bytes since the last packet of the peer count.
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
