use std::collections::BTreeSet;

use clustermesh_agent_core::device::ObservedPeer;

use super::*;

const KEY: PublicKey = PublicKey::new([7; 32]);

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn observed(age: Option<u64>, endpoint: Option<&str>, rx: u64, tx: u64) -> ObservedPeers {
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

fn sync(tracker: &mut PeerTracker, candidates: &[&str], now: Instant) {
    let candidates: Vec<_> = candidates.iter().map(|text| at(text)).collect();
    tracker.sync([(KEY, candidates.as_slice(), None)].into_iter(), now);
}

#[test]
fn candidates_are_tried_in_turn_until_one_answers() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let mut tracker = PeerTracker::default();
    sync(&mut tracker, &["192.0.2.1:1", "192.0.2.2:1"], start);
    let mut tried = vec![tracker.desired_endpoint(&KEY)];
    // Each candidate is tried for 8 s (`ENDPOINT_TURN`).
    for seconds in [8, 9, 17, 18] {
        tracker.update(&observed(None, None, 0, seconds), after(seconds));
        tried.push(tracker.desired_endpoint(&KEY));
    }
    let (one, two) = (Some(at("192.0.2.1:1")), Some(at("192.0.2.2:1")));
    assert_eq!(tried, [one, one, two, two, one]);
    assert_eq!(tracker.state(&KEY, after(18)), PeerHealth::Down);
    assert!(!tracker.update(&observed(Some(1), Some("192.0.2.1:1"), 9, 40), after(60)));
    assert_eq!(
        (tracker.desired_endpoint(&KEY), tracker.state(&KEY, after(60))),
        (one, PeerHealth::Up)
    );
}

#[test]
fn desired_endpoint_stays_while_the_session_is_alive() {
    let now = Instant::now();
    let mut tracker = PeerTracker::default();
    sync(&mut tracker, &["192.0.2.1:1"], now);
    tracker.update(&observed(Some(5), Some("192.0.2.1:1"), 1, 1), now);
    sync(&mut tracker, &["192.0.2.9:1", "192.0.2.1:1"], now);
    assert_eq!(
        tracker.desired_endpoint(&KEY),
        Some(at("192.0.2.1:1")),
        "a preferred candidate does not replace a live endpoint"
    );
    sync(&mut tracker, &["192.0.2.9:1"], now);
    assert_eq!(
        tracker.desired_endpoint(&KEY),
        Some(at("192.0.2.1:1")),
        "the endpoint is no candidate any more, but it works"
    );
    tracker.update(&observed(Some(5), Some("203.0.113.5:777"), 2, 2), now);
    sync(&mut tracker, &["192.0.2.10:1"], now);
    assert_eq!(
        tracker.desired_endpoint(&KEY),
        Some(at("192.0.2.1:1")),
        "the peer has roamed to an endpoint that is no candidate"
    );
    tracker.update(&observed(Some(181), Some("203.0.113.5:777"), 2, 2), now);
    sync(&mut tracker, &["192.0.2.11:1"], now);
    assert_eq!(
        tracker.desired_endpoint(&KEY),
        Some(at("192.0.2.11:1")),
        "the session has ended"
    );
}

/// A peer with a live session. The agent last wrote the endpoint `configured`, and the peer last sent from `used`, so the device uses that.
fn live_session(configured: &str, used: &str, rx: u64, tx: u64) -> ObservedPeers {
    let mut observed = observed(Some(9), Some(used), rx, tx);
    observed.get_mut(&KEY).unwrap().configured.endpoint = Some(at(configured));
    observed
}

#[test]
fn quiet_endpoint_that_is_no_candidate_is_replaced_by_newest() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let (private, mapped, remapped) = ("192.168.2.1:51820", "198.51.100.9:40001", "198.51.100.9:41001");
    let mut tracker = PeerTracker::default();
    sync(&mut tracker, &[private], start);
    // The peer is behind a NAT, which maps its private endpoint to `mapped`. It sends first, so the device uses `mapped`.
    let mut device = live_session(private, mapped, 1, 1);
    tracker.update(&device, start);
    for candidates in [&[private, mapped][..], &[private], &[private, mapped]] {
        sync(&mut tracker, candidates, start);
        assert_eq!(tracker.desired_endpoint(&KEY), Some(at(private)));
        assert!(
            tracker.replace_configured_by_used(&mut device).is_empty(),
            "the live endpoint stays: {candidates:?}"
        );
    }
    // The NAT now maps the peer to `remapped`. Two nodes of this cluster report at which endpoint they see the peer, and the candidates
    // contain these endpoints. One node reports `remapped` at 10 s, the other at 20 s.
    sync(&mut tracker, &[private, mapped, remapped], after(10));
    sync(&mut tracker, &[private, remapped], after(20));
    assert!(
        !tracker.update(&device, after(30)),
        "the peer may still send keepalives"
    );
    assert!(tracker.update(&device, after(31)));
    assert_eq!(tracker.desired_endpoint(&KEY), Some(at(remapped)));
    assert_eq!(tracker.replace_configured_by_used(&mut device), [KEY].into());
    assert_eq!(
        device[&KEY].configured.endpoint,
        Some(at(mapped)),
        "the endpoint in use, so that `remapped` differs and is written"
    );
    // The agent has written the new endpoint. No packet of the peer has arrived since.
    let mut device = live_session(remapped, remapped, 1, 1);
    tracker.update(&device, after(36));
    assert!(tracker.replace_configured_by_used(&mut device).is_empty());
    assert_eq!(tracker.live_endpoints()[&KEY], at(mapped));
    tracker.update(&live_session(remapped, remapped, 2, 2), after(41));
    assert_eq!(tracker.live_endpoints()[&KEY], at(remapped));
}

// threat: forged-discovered-endpoint
#[test]
fn false_candidates_move_no_peer_that_sends() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let (public, mapped) = ("192.0.2.1:1", "198.51.100.9:40001");
    let mut tracker = PeerTracker::default();
    sync(&mut tracker, &[public, mapped], start);
    tracker.update(&live_session(mapped, mapped, 1, 1), start);
    // The peer sends from `mapped` all the time. Other nodes no longer report this endpoint, but a new false one every 2 s.
    for n in 1..100 {
        sync(&mut tracker, &[public, &format!("203.0.113.66:{n}")], after(n * 2));
        assert!(
            !tracker.update(&live_session(mapped, mapped, 1 + n, 1), after(n * 2)),
            "{n}"
        );
    }
    // Without a session, the other candidates are still tried, although there is a new false one every 2 s.
    let mut tracker = PeerTracker::default();
    sync(&mut tracker, &[public, mapped], start);
    let mut tried = BTreeSet::new();
    for n in 1..100 {
        sync(
            &mut tracker,
            &[public, mapped, &format!("203.0.113.66:{n}")],
            after(n * 2),
        );
        let device = observed(None, None, 0, n);
        tracker.update(&device, after(n * 2));
        tried.extend(tracker.desired_endpoint(&KEY));
    }
    assert!(tried.is_superset(&[at(public), at(mapped)].into()), "{tried:?}");
}

#[test]
fn endpoint_from_which_the_peer_sends_is_not_replaced() {
    let now = Instant::now();
    let mut tracker = PeerTracker::default();
    sync(&mut tracker, &["192.0.2.1:1"], now);
    tracker.update(&live_session("192.0.2.1:1", "192.0.2.1:1", 1, 1), now);
    sync(&mut tracker, &["192.0.2.2:1"], now);
    // The agent has written the new endpoint, and then a packet of the peer arrived from a third one.
    let mut device = live_session("192.0.2.2:1", "203.0.113.5:777", 2, 1);
    let before = device.clone();
    assert!(
        tracker.replace_configured_by_used(&mut device).is_empty(),
        "the packet came after the last poll"
    );
    tracker.update(&device, now);
    assert!(tracker.replace_configured_by_used(&mut device).is_empty());
    assert_eq!(
        device, before,
        "the configured endpoint is the desired one, so nothing is written"
    );
}

#[test]
fn unanswering_peer_is_tried_at_every_endpoint_in_turn() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let mut tracker = PeerTracker::default();
    let (one, two, live) = ("192.0.2.1:1", "192.0.2.2:1", "203.0.113.5:777");
    sync(&mut tracker, &[one, two], start);
    tracker.update(&live_session(one, live, 100, 100), start);
    // From now on the peer receives data and sends nothing.
    tracker.update(&live_session(one, live, 100, 1_000), after(5));
    assert!(
        !tracker.update(&live_session(one, live, 100, 2_000), after(25)),
        "the endpoint stays for 20 s without a reply"
    );
    let mut tried = vec![];
    let mut used = live;
    for seconds in [26, 42, 58, 74] {
        let mut device = live_session(one, used, 100, 1_000 * seconds);
        assert!(tracker.update(&device, after(seconds)));
        // At 26 s the desired endpoint is `one`, which is also the configured one. The agent writes it again, because the endpoint in
        // use differs.
        assert_eq!(tracker.replace_configured_by_used(&mut device), [KEY].into());
        assert_eq!(device[&KEY].configured.endpoint, Some(at(used)));
        let endpoint = tracker.desired_endpoint(&KEY).unwrap();
        used = [one, two, live].into_iter().find(|text| at(text) == endpoint).unwrap();
        tried.push(used);
    }
    assert_eq!(tried, [one, two, live, one]);
}

#[test]
fn removed_peer_without_candidates_keeps_live_endpoint() {
    let start = Instant::now();
    let mut tracker = PeerTracker::default();
    sync(&mut tracker, &[], start);
    tracker.update(&observed(Some(1), Some("203.0.113.5:777"), 1, 1), start);
    let remove_all = |tracker: &mut PeerTracker, now| tracker.sync([].into_iter(), now);
    // The live endpoint is kept for `SESSION_LIFETIME` after the removal.
    let last = start + SESSION_LIFETIME - Duration::from_secs(1);
    for now in [start, last] {
        remove_all(&mut tracker, now);
    }
    sync(&mut tracker, &[], last);
    assert_eq!(tracker.desired_endpoint(&KEY), Some(at("203.0.113.5:777")));
    remove_all(&mut tracker, last);
    remove_all(&mut tracker, last + SESSION_LIFETIME);
    sync(&mut tracker, &[], last + SESSION_LIFETIME);
    assert_eq!(
        (tracker.desired_endpoint(&KEY), tracker.live_endpoints().len()),
        (None, 0)
    );

    // The tracker forgets the endpoint of a removed peer that had candidates: when the peer is added again, its first candidate
    // is tried.
    let mut tracker = PeerTracker::default();
    sync(&mut tracker, &["192.0.2.1:1"], start);
    tracker.update(&observed(Some(1), Some("192.0.2.1:1"), 1, 1), start);
    remove_all(&mut tracker, start);
    sync(&mut tracker, &["[2001:db8::1]:1"], start);
    assert_eq!(tracker.desired_endpoint(&KEY), Some(at("[2001:db8::1]:1")));
}

#[test]
fn new_device_tries_the_live_endpoint_before_the_candidates() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let (candidate, live) = (Some(at("192.0.2.1:1")), Some(at("203.0.113.5:777")));
    let mut tracker = PeerTracker::new(
        [
            (KEY, at("203.0.113.5:777")),
            (PublicKey::new([8; 32]), at("192.0.2.8:1")),
        ]
        .into(),
    );
    sync(&mut tracker, &["192.0.2.1:1"], start);
    assert_eq!(tracker.desired_endpoint(&KEY), live);
    assert_eq!(
        tracker.live_endpoints().keys().collect::<Vec<_>>(),
        [&KEY],
        "the live endpoint of a peer that is not tracked is forgotten"
    );
    assert!(tracker.update(&observed(None, Some("203.0.113.5:777"), 0, 1), after(20)));
    assert_eq!(tracker.desired_endpoint(&KEY), candidate);
    assert_eq!(
        tracker.live_endpoints()[&KEY],
        live.unwrap(),
        "the live endpoint is kept although the peer has not answered"
    );
    tracker.update(&observed(Some(1), Some("192.0.2.7:9"), 1, 1), after(25));
    tracker.reset_except_live_endpoints();
    sync(&mut tracker, &["192.0.2.1:1"], after(30));
    assert_eq!(tracker.desired_endpoint(&KEY), Some(at("192.0.2.7:9")));
    // The same for a peer without candidates.
    tracker.reset_except_live_endpoints();
    sync(&mut tracker, &[], after(31));
    assert_eq!(tracker.desired_endpoint(&KEY), Some(at("192.0.2.7:9")));
}

#[test]
fn rekey_counts_as_unanswered_only_if_no_peer_answers() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let other = PublicKey::new([8; 32]);
    // Handshake age in seconds, received bytes and sent bytes of each peer.
    let two = |a: (u64, u64, u64), b: (u64, u64, u64)| -> ObservedPeers {
        let mut all = observed(Some(a.0), Some("192.0.2.1:1"), a.1, a.2);
        let more = observed(Some(b.0), Some("192.0.2.2:1"), b.1, b.2);
        all.extend(more.into_values().map(|peer| (other, peer)));
        all
    };
    let mut tracker = PeerTracker::default();
    let none: &[SocketAddr] = &[];
    tracker.sync(
        [(KEY, none, Some(Duration::from_secs(25))), (other, none, None)].into_iter(),
        start,
    );
    tracker.update(&two((1, 100, 100), (1, 100, 100)), after(1));
    tracker.update(&two((100, 100, 228), (100, 100, 100)), after(100));
    assert_eq!(tracker.unanswered_for(after(120)), None, "keepalives alone");
    tracker.update(&two((140, 100, 400), (100, 100, 100)), after(140));
    assert_eq!(
        tracker.unanswered_for(after(150)),
        None,
        "the other peer needs no rekey yet"
    );
    tracker.update(&two((150, 100, 600), (150, 100, 100)), after(150));
    assert_eq!(tracker.unanswered_for(after(153)), Some(Duration::from_secs(13)));
    tracker.update(&two((155, 100, 700), (155, 132, 100)), after(155));
    assert_eq!(tracker.unanswered_for(after(156)), None, "the other peer sends");
    tracker.update(&two((1, 300, 800), (160, 132, 100)), after(160));
    assert_eq!(tracker.unanswered_for(after(161)), None);
}

#[test]
fn peer_that_does_not_answer_is_down() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let mut tracker = PeerTracker::default();
    sync(&mut tracker, &["192.0.2.1:1"], start);
    tracker.update(&observed(Some(0), None, 10, 10), after(1));
    tracker.update(&observed(Some(200), None, 10, 10), after(201));
    assert_eq!(tracker.state(&KEY, after(201)), PeerHealth::Unknown, "idle");
    // The session has expired, so the peer is down if a packet to it (a handshake initiation) gets no reply for 15 s (`HANDSHAKE_TIMEOUT`).
    tracker.update(&observed(Some(280), None, 10, 158), after(281));
    assert_eq!(tracker.state(&KEY, after(300)), PeerHealth::Down);
    tracker.update(&observed(Some(281), None, 11, 158), after(301));
    assert_eq!(tracker.state(&KEY, after(330)), PeerHealth::Unknown);
}

#[test]
fn peer_with_keepalives_is_down_once_a_rekey_is_unanswered() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let mut tracker = PeerTracker::default();
    let candidates = [at("192.0.2.1:1")];
    tracker.sync(
        [(KEY, &candidates[..], Some(Duration::from_secs(25)))].into_iter(),
        start,
    );
    let mut tx = 500;
    tracker.update(&observed(Some(0), None, 500, tx), after(0));
    for poll in 1..=24 {
        tx += if poll % 5 == 0 { 32 } else { 0 };
        tracker.update(&observed(Some(poll * 5), None, 500, tx), after(poll * 5));
        assert_eq!(tracker.state(&KEY, after(poll * 5)), PeerHealth::Up);
    }
    // At 125 s a keepalive triggers a rekey, and the initiations are not answered. While the session is alive, the peer is down only
    // after 45 s without a reply (`REPLY_TIMEOUT`).
    for poll in 25..=34 {
        tx += 148;
        tracker.update(&observed(Some(poll * 5), None, 500, tx), after(poll * 5));
        assert_eq!(tracker.state(&KEY, after(poll * 5)), PeerHealth::Up, "{}", poll * 5);
    }
    assert_eq!(tracker.state(&KEY, after(171)), PeerHealth::Down);
    tracker.update(&observed(Some(1), None, 600, tx + 148), after(175));
    assert_eq!(tracker.state(&KEY, after(175)), PeerHealth::Up);
}

#[test]
fn passive_keepalive_needs_no_answer() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let mut tracker = PeerTracker::default();
    sync(&mut tracker, &["192.0.2.1:1"], start);
    tracker.update(&observed(Some(0), None, 500, 500), after(1));
    // This node received the last data packet. After 10 s it sends a passive keepalive, which is never answered.
    tracker.update(&observed(Some(10), None, 500, 532), after(11));
    tracker.update(&observed(Some(300), None, 500, 532), after(301));
    assert_eq!(tracker.state(&KEY, after(301)), PeerHealth::Unknown);
    // An unanswered data packet counts.
    tracker.update(&observed(Some(310), None, 500, 532 + 128), after(311));
    tracker.update(&observed(Some(330), None, 500, 532 + 128 + 148), after(331));
    assert_eq!(tracker.state(&KEY, after(331)), PeerHealth::Down);
}
