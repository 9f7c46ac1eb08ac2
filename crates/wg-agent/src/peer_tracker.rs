//! Chooses the endpoint of each peer, and derives the peer's state (up, down or unknown) from the device's counters. The rules for
//! both are in `clustermesh_agent_core::health`. The caller passes the time.
//!
//! A peer has three kinds of endpoints:
//! - The candidates are the endpoints in its Peer object. The first is the one that the peer's node publishes or that a person sets.
//!   Others can be endpoints at which other nodes of this cluster report to see the peer (`kilo.squat.ai/discovered-endpoints`).
//! - The desired endpoint is the one that this module chooses and the agent writes to the device.
//! - The endpoint in use is the one to which the device sends. At first it is the desired one, but WireGuard replaces it by the
//!   source of each authenticated packet of the peer (roaming).

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

/// A peer behind a NAT sends a keepalive every 25 s. If nothing arrives for longer than this limit, the peer's packets
/// do not reach this node at present.
const QUIET_LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug, Clone)]
struct TrackedPeer {
    added_at: Instant,
    keepalive: Option<Duration>,
    /// In order of preference. If there are none, and no live endpoint is known, only the peer can initiate handshakes.
    candidates: Vec<SocketAddr>,
    /// The desired endpoint. The device may use another one.
    desired: Option<SocketAddr>,
    /// When `desired` was chosen.
    desired_since: Instant,
    /// The device uses another endpoint, so `desired` must be written, even if it is the one that was written last.
    must_write: bool,
    /// The newest candidate that was added after `desired` was chosen.
    replacement: Option<SocketAddr>,
    /// The endpoint that was in use when it was removed from the candidates.
    removed_endpoint: Option<SocketAddr>,
    stats: PeerStats,
    /// When `stats` was read.
    polled_at: Instant,
    /// The value of `stats.tx_bytes` after which sent bytes count as unanswered. It is set to the present value by a poll that finds that
    /// the peer has sent something, or that this node has sent nothing but keepalives.
    tx_baseline: u64,
    /// When a poll first showed that the peer has not replied to packets other than keepalives. `None` = it has replied, or no such
    /// packets were sent.
    unanswered_since: Option<Instant>,
    /// When the bytes received from the peer last increased.
    last_received: Option<Instant>,
    /// When a poll first showed that packets were sent to the peer while a rekey was overdue. `None` = no rekey is overdue, or no packets
    /// were sent.
    overdue_since: Option<Instant>,
}

/// The tracked peers.
#[derive(Debug, Clone, Default)]
pub(crate) struct PeerTracker {
    peers: BTreeMap<PublicKey, TrackedPeer>,
    /// The live endpoints: those from which the peers last sent, also to an earlier process. When a peer is added to the device, its live
    /// endpoint is tried before its candidates.
    live: BTreeMap<PublicKey, SocketAddr>,
    /// When peers without candidates (for example behind NAT) were removed. The live endpoint is the only one of such a peer. Its Peer
    /// object may be missing for a moment between two related writes, so the endpoint is remembered as long as a session may last.
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

    /// The live endpoints: those from which the peers last sent.
    pub(crate) const fn live_endpoints(&self) -> &BTreeMap<PublicKey, SocketAddr> {
        &self.live
    }

    /// Sets the peers to track, their candidates and keepalive intervals.
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
                desired: self.live.get(&key).or(candidates.first()).copied(),
                desired_since: now,
                must_write: false,
                replacement: None,
                removed_endpoint: None,
                stats: PeerStats::default(),
                polled_at: now,
                tx_baseline: 0,
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

    /// The endpoint that the device should have for a peer.
    pub(crate) fn desired_endpoint(&self, key: &PublicKey) -> Option<SocketAddr> {
        self.peers.get(key)?.desired
    }

    /// Overwrites `configured.endpoint` with the endpoint in use, for the peers whose endpoint in use must be replaced by the desired
    /// one. Returns the keys of these peers.
    ///
    /// The caller then compares `configured.endpoint` with the desired endpoint, and writes the latter if they differ. Without this call
    /// they could be equal although the device uses another endpoint: `configured.endpoint` is the endpoint that was written last.
    ///
    /// Leaves out a peer that has sent since the last poll: its packets came from the endpoint in use, so that endpoint works.
    pub(crate) fn replace_configured_by_used(&self, observed: &mut ObservedPeers) -> BTreeSet<PublicKey> {
        let mut copied = BTreeSet::new();
        for (key, tracked) in self.peers.iter().filter(|(_, tracked)| tracked.must_write) {
            let Some(peer) = observed.get_mut(key) else { continue };
            if peer.stats.rx_bytes <= tracked.stats.rx_bytes {
                peer.configured.endpoint = peer.stats.endpoint;
                copied.insert(*key);
            }
        }
        copied
    }

    /// The destination of outer packets to each peer: the endpoint in use at the last poll, else the desired one.
    pub(crate) fn outer_destinations(&self) -> impl Iterator<Item = (&PublicKey, SocketAddr)> {
        let destination = |tracked: &TrackedPeer| tracked.stats.endpoint.or(tracked.desired);
        self.peers
            .iter()
            .filter_map(move |(key, tracked)| Some((key, destination(tracked)?)))
    }

    /// Records an observation (poll) of the device, and chooses other endpoints where needed. Returns whether the desired endpoint of some
    /// peer has changed.
    pub(crate) fn update(&mut self, observed: &ObservedPeers, now: Instant) -> bool {
        let mut endpoint_changed = false;
        for (key, tracked) in &mut self.peers {
            let Some(peer) = observed.get(key) else { continue };
            // If `desired` was chosen after the last poll, packets received since that poll may be older than the choice, and come from
            // another endpoint.
            let has_sent = peer.stats.rx_bytes > tracked.stats.rx_bytes && tracked.desired_since <= tracked.polled_at;
            tracked.record(&peer.stats, now);
            if let Some(at) = peer.stats.endpoint.filter(|_| tracked.is_alive() && has_sent) {
                self.live.insert(*key, at);
            }
            endpoint_changed |= tracked.try_replacement(now);
            if should_try_next_endpoint(&tracked.activity(now), now - tracked.desired_since) {
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

    /// For how long no peer has answered this node's handshake initiations. `None` = no rekey is overdue at a peer to which
    /// packets are sent, or some peer has a recent handshake, or some peer has sent something since the earliest `overdue_since`.
    ///
    /// Unanswered packets alone prove nothing, because keepalives are never answered. But if packets are sent to a peer whose rekey is
    /// overdue, then handshake initiations were sent and not answered.
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

    /// Sets the live endpoint of each peer with a live session to its endpoint in use. Called after the device was opened: the
    /// device may still have peers that an earlier process configured.
    pub(crate) fn learn_live_endpoints(&mut self, observed: &ObservedPeers) {
        let alive = observed
            .iter()
            .filter(|(_, peer)| peer.stats.handshake_age.is_some_and(|age| age <= SESSION_LIFETIME));
        self.live
            .extend(alive.filter_map(|(key, peer)| Some((*key, peer.stats.endpoint?))));
    }

    /// Forgets all peers, but not their live endpoints. The next [`Self::sync`] adds the peers again, with their live endpoints
    /// as desired endpoints.
    ///
    /// Called when the device was opened or its private key changed: the recorded handshakes then prove no session.
    pub(crate) fn reset_except_live_endpoints(&mut self) {
        self.peers.clear();
    }
}

impl TrackedPeer {
    fn is_alive(&self) -> bool {
        self.stats.handshake_age.is_some_and(|age| age <= SESSION_LIFETIME)
    }

    /// The endpoint in use, or `desired` if that is about to be written to the device or the device has no endpoint.
    fn in_use(&self) -> Option<SocketAddr> {
        self.stats.endpoint.filter(|_| !self.must_write).or(self.desired)
    }

    fn set_desired(&mut self, endpoint: SocketAddr, now: Instant) {
        self.desired = Some(endpoint);
        self.desired_since = now;
        (self.replacement, self.removed_endpoint) = (None, None);
        self.must_write = self.stats.endpoint.is_some_and(|observed| observed != endpoint);
    }

    /// Replaces the candidates, and may choose another desired endpoint:
    ///
    /// ```text
    ///                               | live session            | no live session
    /// endpoint in use just removed  | first candidate, if new | first candidate, if new; else the last new one; else the first
    /// endpoint in use not removed   | no change               | first candidate, if new
    /// ```
    /// "Just removed" means: it was a candidate until this call. A peer without an endpoint in use is treated as
    /// in the first row.
    ///
    /// The first candidate comes from the peer's own node or from a person, the others can be false reports of other nodes. So a new first
    /// candidate is preferred to other new ones. If this call does not change the desired endpoint, the last new candidate becomes
    /// [`Self::replacement`]. Without a new candidate, the previous replacement stays while it is a candidate.
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
            self.set_desired(next, now);
        }
    }

    /// Makes the replacement the desired endpoint, if the endpoint in use was removed from the candidates and the peer has sent nothing for
    /// [`QUIET_LIMIT`] in a live session. So this node follows a changed NAT mapping, and no false report moves a session that works.
    /// Returns whether the desired endpoint has changed.
    fn try_replacement(&mut self, now: Instant) -> bool {
        let is_quiet = self
            .last_received
            .is_none_or(|at| now.saturating_duration_since(at) > QUIET_LIMIT);
        let in_use = self.in_use().filter(|at| !self.candidates.contains(at));
        let is_removed = in_use.is_some() && in_use == self.removed_endpoint;
        match self.replacement.filter(|_| self.is_alive() && is_quiet && is_removed) {
            Some(next) => {
                self.set_desired(next, now);
                true
            }
            None => false,
        }
    }

    /// Chooses the next desired endpoint, round robin through the candidates and `live`, the peer's live endpoint. Returns `false` if there
    /// is no other endpoint.
    fn try_next(&mut self, live: Option<SocketAddr>, now: Instant) -> bool {
        let live = live.filter(|at| !self.candidates.contains(at));
        let all: Vec<SocketAddr> = self.candidates.iter().copied().chain(live).collect();
        let in_use = self.in_use();
        let position = all.iter().position(|at| Some(*at) == in_use);
        let next = position.map_or(0, |position| position + 1) % all.len().max(1);
        match all.get(next).filter(|next| Some(**next) != in_use) {
            Some(next) => {
                self.set_desired(*next, now);
                true
            }
            None => false,
        }
    }

    fn record(&mut self, stats: &PeerStats, now: Instant) {
        // `desired` need not be written if the device uses it, or if the peer has sent: then the endpoint in use works.
        self.must_write &= stats.endpoint != self.desired && stats.rx_bytes <= self.stats.rx_bytes;
        // Counters decrease only if the device was opened again, or the peer was removed and added again.
        let is_reset = stats.rx_bytes < self.stats.rx_bytes || stats.tx_bytes < self.tx_baseline;
        if is_reset || stats.rx_bytes > self.stats.rx_bytes {
            self.tx_baseline = stats.tx_bytes;
            self.unanswered_since = None;
            self.last_received = if is_reset { self.last_received } else { Some(now) };
        } else {
            // Without a keepalive interval, `tx_baseline` stays, so all bytes since the peer's last packet count. With an
            // interval, each poll that finds only keepalives sets `tx_baseline`, so only the bytes since that poll count.
            let time = now.saturating_duration_since(self.polled_at);
            if stats.tx_bytes - self.tx_baseline > max_keepalive_bytes(self.keepalive, time) {
                self.unanswered_since.get_or_insert(now);
            } else if self.keepalive.is_some() {
                self.tx_baseline = stats.tx_bytes;
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
            has_endpoint: self.desired.is_some() || self.stats.endpoint.is_some(),
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
