//! Where each peer is tried, and how each is: what the device counts, remembered from look to look. The rules are
//! `clustermesh_agent_core::health`'s; the clock is the caller's.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    time::{Duration, Instant},
};

use clustermesh_agent_core::{
    device::{ObservedPeers, PeerStats},
    health::{SESSION, Signs, State, keepalives, state, try_next},
};
use clustermesh_core::key::PublicKey;

/// A session is renewed at 120 s by whoever began it and sends (WireGuard paper §6.2), with tries every 5 s.
const RENEWED: Duration = Duration::from_secs(135);

#[derive(Debug, Clone)]
struct Track {
    configured: Instant,
    keepalive: Option<Duration>,
    /// Candidates in order; empty = it has to find us.
    candidates: Vec<SocketAddr>,
    /// The one that is configured now, and since when.
    current: Option<SocketAddr>,
    since: Instant,
    stats: PeerStats,
    /// When the device said that.
    looked: Instant,
    /// What we had sent when it was last heard, and keepalives since.
    answered: u64,
    unanswered: Option<Instant>,
    /// When something last came in.
    heard: Option<Instant>,
    /// Since when we send although the handshake is overdue.
    unrenewed: Option<Instant>,
}

/// All peers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tracks {
    peers: BTreeMap<PublicKey, Track>,
    /// Where each was heard from last, also by an earlier process: one that is new on the device is tried there first.
    live: BTreeMap<PublicKey, SocketAddr>,
    /// Of those that nobody tells where they are, as behind a translation: since when they are not wanted. Between two writes that
    /// belong together a Peer may be missing for a moment, and its node has a session for as long as this remembers.
    gone: BTreeMap<PublicKey, Instant>,
}

impl Tracks {
    /// No peers yet; `live` is where an earlier process heard from them.
    pub(crate) fn new(live: BTreeMap<PublicKey, SocketAddr>) -> Self {
        Self {
            live,
            ..Self::default()
        }
    }

    /// Where each was heard from last.
    pub(crate) const fn live(&self) -> &BTreeMap<PublicKey, SocketAddr> {
        &self.live
    }

    /// Takes over who there is and where each may be. What lives keeps the endpoint it lives on.
    pub(crate) fn sync<'a>(
        &mut self,
        wanted: impl Iterator<Item = (PublicKey, &'a [SocketAddr], Option<Duration>)>,
        now: Instant,
    ) {
        let mut old = std::mem::take(&mut self.peers);
        for (key, candidates, keepalive) in wanted {
            let mut track = old.remove(&key).unwrap_or_else(|| Track {
                configured: now,
                keepalive,
                candidates: candidates.to_vec(),
                current: self.live.get(&key).or(candidates.first()).copied(),
                since: now,
                stats: PeerStats::default(),
                looked: now,
                answered: 0,
                unanswered: None,
                heard: None,
                unrenewed: None,
            });
            track.keepalive = keepalive;
            if track.candidates != candidates {
                track.candidates = candidates.to_vec();
                track.rechoose(now);
            }
            self.peers.insert(key, track);
        }
        let Self { peers, live, gone } = self;
        let untold = old.into_iter().filter(|(_, track)| track.candidates.is_empty());
        gone.extend(untold.map(|(key, _)| (key, now)));
        let remembered = |since: &Instant| now.saturating_duration_since(*since) < SESSION;
        gone.retain(|key, since| live.contains_key(key) && !peers.contains_key(key) && remembered(since));
        live.retain(|key, _| peers.contains_key(key) || gone.contains_key(key));
    }

    /// The endpoint to configure for a peer.
    pub(crate) fn current(&self, key: &PublicKey) -> Option<SocketAddr> {
        self.peers.get(key)?.current
    }

    /// Where packets to each peer go now, as far as that is known: where it was last heard from, else what is configured.
    pub(crate) fn toward(&self) -> impl Iterator<Item = (&PublicKey, SocketAddr)> {
        let at = |track: &Track| track.stats.endpoint.or(track.current);
        self.peers
            .iter()
            .filter_map(move |(key, track)| Some((key, at(track)?)))
    }

    /// Takes over what the device says. True when some peer has to be tried elsewhere.
    pub(crate) fn look(&mut self, observed: &ObservedPeers, now: Instant) -> bool {
        let mut moved = false;
        for (key, track) in &mut self.peers {
            let Some(peer) = observed.get(key) else { continue };
            track.count(&peer.stats, now);
            if let Some(at) = peer.stats.endpoint.filter(|_| track.alive()) {
                self.live.insert(*key, at);
            }
            if track.has_other() && try_next(&track.signs(now), now - track.since) {
                track.advance(now);
                moved = true;
            }
        }
        moved
    }

    /// How a peer is; one that is not known is unknown.
    pub(crate) fn state(&self, key: &PublicKey, now: Instant) -> State {
        self.peers
            .get(key)
            .map_or(State::Unknown, |track| state(&track.signs(now)))
    }

    /// For how long nobody has answered although sessions were to be renewed; `None` = somebody has, or nobody was asked.
    ///
    /// What is sent without an answer proves nothing: keepalives are never answered. A handshake that is overdue, of a peer
    /// that we go on sending to, was asked for and refused.
    pub(crate) fn silent(&self, now: Instant) -> Option<Duration> {
        let age = |track: &Track| track.stats.handshake_age;
        let fresh = self
            .peers
            .values()
            .any(|track| age(track).is_some_and(|age| age <= RENEWED));
        let overdue = self
            .peers
            .values()
            .filter(|track| age(track).is_some_and(|age| age > RENEWED));
        let longest = overdue.filter_map(|track| track.unrenewed).min()?;
        let heard = self
            .peers
            .values()
            .any(|track| track.heard.is_some_and(|at| at >= longest));
        (!fresh && !heard).then(|| now.saturating_duration_since(longest))
    }

    /// The device was taken over from an earlier process: whom it talks to is left where it is.
    pub(crate) fn adopt(&mut self, observed: &ObservedPeers) {
        let alive = observed
            .iter()
            .filter(|(_, peer)| peer.stats.handshake_age.is_some_and(|age| age <= SESSION));
        self.live
            .extend(alive.filter_map(|(key, peer)| Some((*key, peer.stats.endpoint?))));
    }

    /// Everything was put on a new device: nobody was heard yet.
    pub(crate) fn restart(&mut self) {
        self.peers.clear();
    }
}

impl Track {
    fn alive(&self) -> bool {
        self.stats.handshake_age.is_some_and(|age| age <= SESSION)
    }

    /// Whether there is another endpoint to try.
    fn has_other(&self) -> bool {
        self.candidates.iter().any(|candidate| Some(*candidate) != self.current)
    }

    fn rechoose(&mut self, now: Instant) {
        let first = self.candidates.first().copied();
        // It was heard from elsewhere than where we were told, so we know better, until it falls silent.
        let roamed = self.alive() && self.stats.endpoint.is_some() && self.stats.endpoint != self.current;
        let still_right = self.alive() && self.current.is_some_and(|at| self.candidates.contains(&at));
        if first.is_some() && !roamed && !still_right && self.current != first {
            self.current = first;
            self.since = now;
        }
    }

    fn advance(&mut self, now: Instant) {
        let at = self
            .candidates
            .iter()
            .position(|candidate| Some(*candidate) == self.current);
        let next = at.map_or(0, |at| (at + 1) % self.candidates.len());
        self.current = self.candidates.get(next).copied();
        self.since = now;
    }

    fn count(&mut self, stats: &PeerStats, now: Instant) {
        // Counters that begin anew are a device's that does.
        let anew = stats.rx_bytes < self.stats.rx_bytes || stats.tx_bytes < self.answered;
        if anew || stats.rx_bytes > self.stats.rx_bytes {
            self.answered = stats.tx_bytes;
            self.unanswered = None;
            self.heard = if anew { self.heard } else { Some(now) };
        } else {
            // With keepalives at an interval each look is taken by itself: over many they would come to anything.
            let time = now.saturating_duration_since(self.looked);
            if stats.tx_bytes - self.answered > keepalives(self.keepalive, time) {
                self.unanswered.get_or_insert(now);
            } else if self.keepalive.is_some() {
                self.answered = stats.tx_bytes;
            }
        }
        self.looked = now;
        let overdue = stats.handshake_age.is_some_and(|age| age > RENEWED);
        if !overdue {
            self.unrenewed = None;
        } else if stats.tx_bytes > self.stats.tx_bytes && self.unrenewed.is_none() {
            self.unrenewed = Some(now);
        }
        self.stats = stats.clone();
    }

    fn signs(&self, now: Instant) -> Signs {
        Signs {
            configured: now - self.configured,
            handshake: self.stats.handshake_age,
            reachable: self.current.is_some() || self.stats.endpoint.is_some(),
            keepalive: self.keepalive,
            unanswered: self
                .unanswered
                .map(|since| now.saturating_duration_since(since))
                .filter(|d| *d > Duration::ZERO),
        }
    }
}

#[cfg(test)]
mod tests {
    use clustermesh_agent_core::device::ObservedPeer;

    use super::*;

    const KEY: PublicKey = PublicKey::new([7; 32]);

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn heard(age: Option<u64>, endpoint: Option<&str>, rx: u64, tx: u64) -> ObservedPeers {
        let stats = PeerStats {
            endpoint: endpoint.map(at),
            handshake_age: age.map(Duration::from_secs),
            rx_bytes: rx,
            tx_bytes: tx,
        };
        [(
            KEY,
            ObservedPeer {
                stats,
                ..ObservedPeer::default()
            },
        )]
        .into()
    }

    fn sync(tracks: &mut Tracks, candidates: &[&str], now: Instant) {
        let candidates: Vec<_> = candidates.iter().map(|text| at(text)).collect();
        tracks.sync([(KEY, candidates.as_slice(), None)].into_iter(), now);
    }

    #[test]
    fn candidates_are_tried_in_turn_until_one_answers() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut tracks = Tracks::default();
        sync(&mut tracks, &["192.0.2.1:1", "192.0.2.2:1"], start);
        let mut tried = vec![tracks.current(&KEY)];
        for seconds in [10, 16, 20, 32] {
            tracks.look(&heard(None, None, 0, seconds), after(seconds));
            tried.push(tracks.current(&KEY));
        }
        let (one, two) = (Some(at("192.0.2.1:1")), Some(at("192.0.2.2:1")));
        assert_eq!(tried, [one, one, two, two, one]);
        assert_eq!(tracks.state(&KEY, after(32)), State::Down);
        assert!(!tracks.look(&heard(Some(1), Some("192.0.2.1:1"), 9, 40), after(60)));
        assert_eq!((tracks.current(&KEY), tracks.state(&KEY, after(60))), (one, State::Up));
    }

    #[test]
    fn what_lives_keeps_its_endpoint_unless_that_is_withdrawn() {
        let now = Instant::now();
        let mut tracks = Tracks::default();
        sync(&mut tracks, &["192.0.2.1:1"], now);
        tracks.look(&heard(Some(5), Some("192.0.2.1:1"), 1, 1), now);
        sync(&mut tracks, &["192.0.2.9:1", "192.0.2.1:1"], now);
        assert_eq!(
            tracks.current(&KEY),
            Some(at("192.0.2.1:1")),
            "a better candidate is no reason to move"
        );
        sync(&mut tracks, &["192.0.2.9:1"], now);
        assert_eq!(tracks.current(&KEY), Some(at("192.0.2.9:1")), "the node has moved");
        tracks.look(&heard(Some(5), Some("203.0.113.5:777"), 2, 2), now);
        sync(&mut tracks, &["192.0.2.10:1"], now);
        assert_eq!(
            tracks.current(&KEY),
            Some(at("192.0.2.9:1")),
            "it roamed: what we hear beats what we are told"
        );
        tracks.look(&heard(Some(181), Some("203.0.113.5:777"), 2, 2), now);
        sync(&mut tracks, &["192.0.2.11:1"], now);
        assert_eq!(
            tracks.current(&KEY),
            Some(at("192.0.2.11:1")),
            "and no longer once it is silent"
        );
    }

    #[test]
    fn one_that_is_refused_for_a_moment_comes_back_where_it_was_heard_from_and_is_forgotten_with_its_session() {
        let start = Instant::now();
        let mut tracks = Tracks::default();
        sync(&mut tracks, &[], start);
        tracks.look(&heard(Some(1), Some("203.0.113.5:777"), 1, 1), start);
        let nobody = |tracks: &mut Tracks, at| tracks.sync([].into_iter(), at);
        let last = start + SESSION - Duration::from_secs(1);
        for now in [start, last] {
            nobody(&mut tracks, now);
        }
        sync(&mut tracks, &[], last);
        assert_eq!(tracks.current(&KEY), Some(at("203.0.113.5:777")));
        nobody(&mut tracks, last);
        nobody(&mut tracks, last + SESSION);
        sync(&mut tracks, &[], last + SESSION);
        assert_eq!((tracks.current(&KEY), tracks.live().len()), (None, 0));

        // Of one that is made anew with an endpoint that endpoint counts.
        let mut tracks = Tracks::default();
        sync(&mut tracks, &["192.0.2.1:1"], start);
        tracks.look(&heard(Some(1), Some("192.0.2.1:1"), 1, 1), start);
        nobody(&mut tracks, start);
        sync(&mut tracks, &["[2001:db8::1]:1"], start);
        assert_eq!(tracks.current(&KEY), Some(at("[2001:db8::1]:1")));
    }

    #[test]
    fn a_new_device_tries_first_where_a_peer_was_heard_from_and_then_where_we_are_told() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let (told, live) = (Some(at("192.0.2.1:1")), Some(at("203.0.113.5:777")));
        let mut tracks = Tracks::new(
            [
                (KEY, at("203.0.113.5:777")),
                (PublicKey::new([8; 32]), at("192.0.2.8:1")),
            ]
            .into(),
        );
        sync(&mut tracks, &["192.0.2.1:1"], start);
        assert_eq!(tracks.current(&KEY), live);
        assert_eq!(
            tracks.live().keys().collect::<Vec<_>>(),
            [&KEY],
            "the other peer is gone"
        );
        assert!(tracks.look(&heard(None, Some("203.0.113.5:777"), 0, 1), after(20)));
        assert_eq!(tracks.current(&KEY), told);
        assert_eq!(tracks.live()[&KEY], live.unwrap(), "silence says nothing");
        tracks.look(&heard(Some(1), Some("192.0.2.7:9"), 1, 1), after(25));
        tracks.restart();
        sync(&mut tracks, &["192.0.2.1:1"], after(30));
        assert_eq!(tracks.current(&KEY), Some(at("192.0.2.7:9")));
        // And one that nobody tells us where it is.
        tracks.restart();
        sync(&mut tracks, &[], after(31));
        assert_eq!(tracks.current(&KEY), Some(at("192.0.2.7:9")));
    }

    #[test]
    fn all_are_silent_when_a_renewal_fails_and_nobody_else_speaks_and_keepalives_prove_nothing() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let other = PublicKey::new([8; 32]);
        let two = |a: (u64, u64, u64), b: (u64, u64, u64)| -> ObservedPeers {
            let mut all = heard(Some(a.0), Some("192.0.2.1:1"), a.1, a.2);
            let more = heard(Some(b.0), Some("192.0.2.2:1"), b.1, b.2);
            all.extend(more.into_values().map(|peer| (other, peer)));
            all
        };
        let mut tracks = Tracks::default();
        let none: &[SocketAddr] = &[];
        tracks.sync(
            [(KEY, none, Some(Duration::from_secs(25))), (other, none, None)].into_iter(),
            start,
        );
        tracks.look(&two((1, 100, 100), (1, 100, 100)), after(1));
        tracks.look(&two((100, 100, 228), (100, 100, 100)), after(100));
        assert_eq!(tracks.silent(after(120)), None, "keepalives alone");
        tracks.look(&two((140, 100, 400), (100, 100, 100)), after(140));
        assert_eq!(tracks.silent(after(150)), None, "the other one has a session");
        tracks.look(&two((150, 100, 600), (150, 100, 100)), after(150));
        assert_eq!(tracks.silent(after(153)), Some(Duration::from_secs(13)));
        tracks.look(&two((155, 100, 700), (155, 132, 100)), after(155));
        assert_eq!(tracks.silent(after(156)), None, "the other one speaks");
        tracks.look(&two((1, 300, 800), (160, 132, 100)), after(160));
        assert_eq!(tracks.silent(after(161)), None);
    }

    #[test]
    fn sending_without_an_answer_is_noticed() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut tracks = Tracks::default();
        sync(&mut tracks, &["192.0.2.1:1"], start);
        tracks.look(&heard(Some(0), None, 10, 10), after(1));
        tracks.look(&heard(Some(200), None, 10, 10), after(201));
        assert_eq!(tracks.state(&KEY, after(201)), State::Unknown, "idle");
        tracks.look(&heard(Some(280), None, 10, 158), after(281));
        assert_eq!(tracks.state(&KEY, after(300)), State::Down);
        tracks.look(&heard(Some(281), None, 11, 158), after(301));
        assert_eq!(tracks.state(&KEY, after(330)), State::Unknown);
    }

    #[test]
    fn of_a_peer_with_keepalives_silence_says_something_once_more_than_keepalives_is_sent() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut tracks = Tracks::default();
        let at = [at("192.0.2.1:1")];
        tracks.sync([(KEY, &at[..], Some(Duration::from_secs(25)))].into_iter(), start);
        let mut tx = 500;
        tracks.look(&heard(Some(0), None, 500, tx), after(0));
        for look in 1..=24 {
            tx += if look % 5 == 0 { 32 } else { 0 };
            tracks.look(&heard(Some(look * 5), None, 500, tx), after(look * 5));
            assert_eq!(tracks.state(&KEY, after(look * 5)), State::Up);
        }
        // Its keepalive renews the session, and nobody answers the handshake.
        for look in 25..=34 {
            tx += 148;
            tracks.look(&heard(Some(look * 5), None, 500, tx), after(look * 5));
            assert_eq!(tracks.state(&KEY, after(look * 5)), State::Up, "{}", look * 5);
        }
        assert_eq!(tracks.state(&KEY, after(171)), State::Down);
        tracks.look(&heard(Some(1), None, 600, tx + 148), after(175));
        assert_eq!(tracks.state(&KEY, after(175)), State::Up);
    }

    #[test]
    fn the_keepalive_that_ends_a_conversation_asks_for_no_answer() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut tracks = Tracks::default();
        sync(&mut tracks, &["192.0.2.1:1"], start);
        tracks.look(&heard(Some(0), None, 500, 500), after(1));
        // Whoever heard data last says so 10 s later, and nobody says anything to that.
        tracks.look(&heard(Some(10), None, 500, 532), after(11));
        tracks.look(&heard(Some(300), None, 500, 532), after(301));
        assert_eq!(tracks.state(&KEY, after(301)), State::Unknown);
        // A packet of data does.
        tracks.look(&heard(Some(310), None, 500, 532 + 128), after(311));
        tracks.look(&heard(Some(330), None, 500, 532 + 128 + 148), after(331));
        assert_eq!(tracks.state(&KEY, after(331)), State::Down);
    }
}
