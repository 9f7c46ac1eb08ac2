//! Real cryptography, no sockets, and a clock that only the test moves.

use x25519_dalek::StaticSecret;

use super::*;

mod storm;

const INITIATION: u8 = 1;
const RESPONSE: u8 = 2;
const DATA: u8 = 4;

#[derive(Default)]
struct Sent {
    network: Vec<Vec<u8>>,
    inner: Vec<Vec<u8>>,
}

impl Output for Sent {
    fn network(&mut self, datagram: &[u8]) {
        self.network.push(datagram.to_vec());
    }
}

impl Sent {
    fn kinds(&self) -> Vec<u8> {
        self.network.iter().map(|datagram| datagram[0]).collect()
    }
}

/// A tunnel with its scratch space, each call answered by what it sent.
struct End {
    tunnel: Tunnel,
    scratch: Vec<u8>,
    /// Its own key.
    public: PublicKey,
}

impl End {
    /// What [`Tunnel::receive`] says, and the kinds of what it sent.
    fn try_receive(&mut self, datagram: &[u8], now: Instant) -> Result<(Received, Vec<u8>), Refused> {
        let (mut plain, mut sent) = ([0; 4096], Sent::default());
        self.tunnel
            .receive(datagram, now, &mut plain, &mut self.scratch, &mut sent)
            .map(|received| (received, sent.kinds()))
    }
    fn call(&mut self, act: impl FnOnce(&mut Tunnel, &mut [u8], &mut Sent)) -> Sent {
        let mut sent = Sent::default();
        act(&mut self.tunnel, &mut self.scratch, &mut sent);
        sent
    }
    fn greet(&mut self, now: Instant) -> Sent {
        self.call(|tunnel, scratch, sent| {
            tunnel.greet(now);
            tunnel.tick(now, scratch, sent);
        })
    }
    fn send(&mut self, packet: &[u8], now: Instant) -> Sent {
        self.call(|tunnel, scratch, sent| tunnel.send(packet, now, scratch, sent))
    }
    fn tick(&mut self, now: Instant) -> Sent {
        self.call(|tunnel, scratch, sent| tunnel.tick(now, scratch, sent))
    }
    /// How many initiations it sends in that time, ticked when it asks for it.
    fn initiations(&mut self, from: Instant, until: Instant) -> usize {
        let (mut count, mut at) = (0, from);
        loop {
            count += self.tick(at).kinds().iter().filter(|kind| **kind == INITIATION).count();
            match self.tunnel.reschedule(at) {
                Some(next) if next < until => at = next,
                _ => return count,
            }
        }
    }
    fn receive(&mut self, datagram: &[u8], now: Instant) -> Sent {
        self.call(|tunnel, scratch, sent| {
            let mut plain = [0; 4096];
            // A replayed or superseded datagram is refused: that is what lossy tests provoke.
            if let Ok(received) = tunnel.receive(datagram, now, &mut plain, scratch, sent)
                && let Inner::Packet(length, _) = received.inner
            {
                sent.inner.push(plain[..length].to_vec());
            }
        })
    }
}

/// Splitmix64: enough to vary a test, and the same in every run.
struct Seeded(u64);

impl Seeded {
    fn next_u32(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z >> 32) as u32
    }
}

const fn seeded(seed: u64) -> Seeded {
    Seeded(seed)
}

fn secret(rng: &mut Seeded) -> StaticSecret {
    let mut bytes = [0; 32];
    for chunk in bytes.chunks_exact_mut(4) {
        chunk.copy_from_slice(&rng.next_u32().to_le_bytes());
    }
    StaticSecret::from(bytes)
}

fn pair(rng: &mut Seeded, now: Instant) -> [End; 2] {
    let [a, b] = [secret(rng), secret(rng)].map(|private| Arc::new(Local::new(private)));
    let mut end = |own: &Arc<Local>, peer: &Arc<Local>| End {
        tunnel: Tunnel::new(Arc::clone(own), peer.public, None, rng.next_u32() >> 8, None, now),
        scratch: vec![0; 4096],
        public: own.public,
    };
    [end(&a, &b), end(&b, &a)]
}

/// A minimal IPv4 packet that says who it is.
fn packet(number: u8) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 24, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    packet.extend([number; 4]);
    packet
}

fn connect(a: &mut End, b: &mut End, now: Instant) {
    let initiation = a.greet(now);
    let response = b.receive(&initiation.network[0], now);
    let keepalive = a.receive(&response.network[0], now);
    b.receive(&keepalive.network[0], now);
}

#[test]
fn a_greeting_makes_a_session_that_carries_data_both_ways() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(1), now);
    connect(&mut a, &mut b, now);
    let there = a.send(&packet(1), now);
    assert_eq!(b.receive(&there.network[0], now).inner, vec![packet(1)]);
    let back = b.send(&packet(2), now);
    assert_eq!(a.receive(&back.network[0], now).inner, vec![packet(2)]);
    assert_eq!((a.tunnel.completed(), b.tunnel.completed()), (Some(now), Some(now)));
}

#[test]
fn one_who_has_just_answered_keeps_its_packets_instead_of_starting_a_handshake_of_its_own() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(2), now);
    let initiation = a.greet(now);
    let response = b.receive(&initiation.network[0], now);
    assert_eq!(b.send(&packet(1), now).kinds(), Vec::<u8>::new());
    let keepalive = a.receive(&response.network[0], now);
    let queued = b.receive(&keepalive.network[0], now);
    assert_eq!(queued.kinds(), vec![DATA]);
    assert_eq!(a.receive(&queued.network[0], now).inner, vec![packet(1)]);
}

#[test]
fn a_response_to_a_crossed_initiation_is_held_and_dropped_once_ours_is_answered() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(3), now);
    let (from_a, from_b) = (a.greet(now), b.greet(now));
    assert_eq!(a.receive(&from_b.network[0], now).kinds(), Vec::<u8>::new());
    assert_eq!(b.receive(&from_a.network[0], now).kinds(), Vec::<u8>::new());
    // Ours holds too; wireguard-go would answer at once: take its held response early.
    let response = b.tick(now + HOLD);
    assert_eq!(response.kinds(), vec![RESPONSE]);
    assert_eq!(a.receive(&response.network[0], now).kinds(), vec![DATA]);
    assert_eq!(a.tick(now + HOLD).kinds(), Vec::<u8>::new());
}

#[test]
fn the_hold_is_a_tick_that_the_tunnel_asks_for() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(4), now);
    a.greet(now);
    let from_b = b.greet(now);
    let retry = a.tunnel.reschedule(now).expect("a retry");
    assert!(retry >= now + REKEY_TIMEOUT && retry <= now + Duration::from_millis(5333));
    a.receive(&from_b.network[0], now);
    assert_eq!(a.tunnel.reschedule(now), Some(now + HOLD));
    assert!(!a.tunnel.expects_tick(retry));
    assert_eq!(a.tick(now + HOLD).kinds(), vec![RESPONSE]);
}

#[test]
fn data_that_got_no_reply_is_acknowledged_after_ten_seconds_and_one_silent_for_fifteen_is_greeted() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(5), now);
    connect(&mut a, &mut b, now);
    // Both ways at once, then silence.
    b.send(&packet(1), now);
    let there = a.send(&packet(2), now);
    b.receive(&there.network[0], now);
    assert_eq!(b.tick(now + Duration::from_secs(9)).kinds(), Vec::<u8>::new());
    assert_eq!(b.tick(now + KEEPALIVE_TIMEOUT).kinds(), vec![DATA]);
    assert_eq!(a.tick(now + Duration::from_secs(14)).kinds(), Vec::<u8>::new());
    assert_eq!(a.tick(now + Duration::from_secs(15)).kinds(), vec![INITIATION]);
}

#[test]
fn a_persistent_keepalive_is_sent_when_nothing_else_was_and_can_be_changed() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(6), now);
    connect(&mut a, &mut b, now);
    a.tunnel.set_keepalive(Some(Duration::from_secs(25)), now);
    assert_eq!(a.tick(now).kinds(), vec![DATA]);
    assert_eq!(a.tick(now + Duration::from_secs(24)).kinds(), Vec::<u8>::new());
    assert_eq!(a.tick(now + Duration::from_secs(25)).kinds(), vec![DATA]);
    a.tunnel.set_keepalive(None, now);
    assert_eq!(a.tick(now + Duration::from_secs(100)).kinds(), Vec::<u8>::new());
}

#[test]
fn a_persistent_keepalive_asks_again_after_the_attempts_were_given_up() {
    let now = Instant::now();
    let [mut a, _] = pair(&mut seeded(7), now);
    a.tunnel.set_keepalive(Some(Duration::from_secs(25)), now);
    // Given up at 90; the keepalive due at 100 starts afresh.
    let first = a.initiations(now, now + Duration::from_secs(95));
    let then = a.initiations(now + Duration::from_secs(95), now + Duration::from_secs(180));
    assert!(
        (17..=18).contains(&first) && (15..=16).contains(&then),
        "{first}, {then}"
    );
}

#[test]
fn a_greeting_that_nobody_answers_stops_after_ninety_seconds_and_asks_for_no_more_ticks() {
    let now = Instant::now();
    let [mut a, _] = pair(&mut seeded(8), now);
    a.tunnel.greet(now);
    let sent = a.initiations(now, now + Duration::from_secs(300));
    assert!((17..=18).contains(&sent), "{sent}");
    assert_eq!(a.tunnel.reschedule(now + Duration::from_secs(300)), None);
}

// threat: low-order-handshake
#[test]
fn a_key_that_no_secret_can_be_shared_with_is_tried_no_more_often_than_another() {
    let now = Instant::now();
    let [mut a, _] = pair(&mut seeded(16), now);
    let local = Arc::new(Local::new(StaticSecret::from([1; 32])));
    a.tunnel = Tunnel::new(local, PublicKey::from([0; 32]), None, 1, None, now);
    a.tunnel.greet(now);
    let (mut ticks, mut at) = (0, now);
    loop {
        assert_eq!(a.tick(at).kinds(), Vec::<u8>::new());
        ticks += 1;
        assert!(ticks < 25, "a tick is asked for again and again");
        match a.tunnel.reschedule(at) {
            Some(next) => at = next,
            None => return,
        }
    }
}

#[test]
fn without_a_session_the_newest_packets_are_kept_and_the_oldest_give_way() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(9), now);
    let initiation = a.send(&packet(0), now);
    for number in 1..=u8::try_from(crate::device::userspace::held::PACKETS).expect("a small queue") {
        a.send(&packet(number), now);
    }
    let response = b.receive(&initiation.network[0], now);
    let queued = a.receive(&response.network[0], now);
    let arrived: Vec<u8> = queued
        .network
        .iter()
        .flat_map(|datagram| b.receive(datagram, now).inner)
        .map(|packet| packet[23])
        .collect();
    assert_eq!(arrived, (1..=128).collect::<Vec<u8>>());
}

#[test]
fn the_one_who_began_a_session_renews_it_when_it_sends_after_two_minutes_and_nothing_is_lost_meanwhile() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(10), now);
    connect(&mut a, &mut b, now);
    let later = now + Duration::from_secs(119);
    assert_eq!(a.send(&packet(1), later).kinds(), vec![DATA]);
    assert_eq!(a.tunnel.reschedule(later), Some(later + SILENCE));
    let later = now + Duration::from_secs(120);
    assert_eq!(b.send(&packet(2), later).kinds(), vec![DATA]);
    let old = a.send(&packet(3), later);
    assert_eq!(a.tunnel.reschedule(later), Some(later), "a handshake is due at once");
    let initiation = a.tick(later);
    assert_eq!(initiation.kinds(), vec![INITIATION]);
    assert_eq!(a.send(&packet(4), later).kinds(), vec![DATA], "by the old session");
    let response = b.receive(&initiation.network[0], later);
    assert_eq!(b.receive(&old.network[0], later).inner, vec![packet(3)]);
    let confirmation = a.receive(&response.network[0], later);
    assert_eq!(confirmation.kinds(), vec![DATA]);
    b.receive(&confirmation.network[0], later);
    // What was under way by the old session still arrives, and the new one lives on when the old one has ended.
    let ended = now + Duration::from_secs(181);
    let there = a.send(&packet(5), ended);
    assert_eq!(b.receive(&there.network[0], ended).inner, vec![packet(5)]);
}

#[test]
fn the_one_who_began_it_also_renews_it_when_it_only_listens_and_the_end_is_near() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(11), now);
    connect(&mut a, &mut b, now);
    for (seconds, kinds) in [(164, vec![]), (165, vec![INITIATION])] {
        let later = now + Duration::from_secs(seconds);
        let data = b.send(&packet(1), later);
        assert_eq!(a.receive(&data.network[0], later).inner, vec![packet(1)]);
        // Not the tick's other business.
        a.tunnel.unanswered_by_us = None;
        assert_eq!(a.tick(later).kinds(), kinds, "after {seconds} s");
    }
}

#[test]
fn after_three_minutes_a_session_carries_nothing_and_its_keys_are_gone() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(12), now);
    connect(&mut a, &mut b, now);
    let before = now + Duration::from_secs(179);
    assert_eq!(a.send(&packet(1), before).kinds(), vec![DATA]);
    let after = now + Duration::from_secs(180);
    assert_eq!(b.send(&packet(2), after).kinds(), vec![INITIATION]);
    // boringtun deletes the keys at a tick that comes even to an idle tunnel.
    assert_eq!(b.tunnel.keys_until, Some(now + Duration::from_secs(181)));
}

// threat: replayed-message
#[test]
fn initiation_seen_before_or_of_another_peer_is_refused() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(13), now);
    let later = now + INITIATION_INTERVAL;
    let first = a.greet(now).network.remove(0);
    let (received, kinds) = b.try_receive(&first, now).expect("an initiation");
    assert!(!received.moves_endpoint);
    assert_eq!(kinds, vec![RESPONSE]);
    assert_eq!(b.try_receive(&first, later), Err(Refused::Replayed));
    let ours = Arc::new(Local::new(secret(&mut seeded(14))));
    let to_b = Tunnel::new(ours, b.public, None, 1, None, now);
    let mut stranger = End {
        tunnel: to_b,
        scratch: vec![0; 4096],
        public: b.public,
    };
    let foreign = stranger.greet(now).network.remove(0);
    assert_eq!(b.try_receive(&foreign, later), Err(Refused::Invalid));
}

// threat: low-order-handshake
#[test]
fn handshake_message_with_low_order_key_is_refused() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(22), now);
    let initiation = a.greet(now).network.remove(0);
    let mut forged = initiation.clone();
    forged[8..40].fill(0);
    assert_eq!(b.try_receive(&forged, now), Err(Refused::Invalid));
    let response = b.receive(&initiation, now).network.remove(0);
    let mut forged = response.clone();
    forged[12..44].fill(0);
    assert_eq!(a.try_receive(&forged, now), Err(Refused::Invalid));
    assert_eq!(a.receive(&response, now).kinds(), vec![DATA]);
}

// threat: replayed-message
#[test]
fn recorded_initiation_moves_no_endpoint_and_completes_nothing() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(17), now);
    let recorded = a.greet(now).network.remove(0);
    assert_eq!(b.receive(&recorded, now).kinds(), vec![RESPONSE]);
    for tunnel in [&mut a.tunnel, &mut b.tunnel] {
        tunnel.set_preshared_key(Some([1; 32]));
    }
    let later = now + Duration::from_secs(1);
    b.tunnel.unanswered_by_peer = Some(now);
    // The newest timestamp is forgotten with the key, so it counts once more.
    let (received, _) = b.try_receive(&recorded, later).expect("an initiation");
    assert!(!received.moves_endpoint);
    assert_eq!(b.tunnel.unanswered_by_peer, Some(now));
    assert!(!b.tunnel.is_ready(later));
    let later = later + REKEY_TIMEOUT * 2;
    a.tunnel.greet(later);
    let initiation = a.tick(later);
    let response = b.receive(&initiation.network[0], later);
    assert_eq!(a.receive(&response.network[0], later).kinds(), vec![DATA]);
}

#[test]
fn what_a_peer_says_that_is_no_packet_still_shows_that_it_lives() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(18), now);
    connect(&mut a, &mut b, now);
    a.send(&packet(1), now);
    let garbage = b.send(&[0xff; 32], now);
    let expected = Received {
        moves_endpoint: true,
        inner: Inner::Malformed,
    };
    assert_eq!(a.try_receive(&garbage.network[0], now), Ok((expected, vec![])));
    assert_eq!(a.tick(now + SILENCE).kinds(), vec![DATA], "a keepalive, no handshake");
}

#[test]
fn a_first_burst_that_is_lost_is_noticed() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(19), now);
    let initiation = a.send(&packet(1), now);
    let response = b.receive(&initiation.network[0], now);
    assert_eq!(
        a.receive(&response.network[0], now).kinds(),
        vec![DATA],
        "and it is lost"
    );
    assert_eq!(a.tick(now + SILENCE).kinds(), vec![INITIATION]);
}

#[test]
fn of_two_initiations_only_the_newer_one_is_answered() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(20), now);
    let ours = b.greet(now).network.remove(0);
    let first = a.greet(now).network.remove(0);
    assert_eq!(b.receive(&first, now).kinds(), Vec::<u8>::new(), "held");
    // The clock is late: the next one comes before the held response has gone.
    let late = now + HOLD;
    a.tunnel.moved(late);
    let second = a.tick(late).network.remove(0);
    let response = b.receive(&second, late);
    assert_eq!(response.kinds(), vec![RESPONSE]);
    assert_eq!(b.tick(late).kinds(), Vec::<u8>::new());
    // Also an answer to ours leaves the session that was answered.
    let to_ours = a.receive(&ours, late);
    assert_eq!(to_ours.kinds(), Vec::<u8>::new(), "held by the other");
    let confirmation = a.receive(&response.network[0], late);
    assert_eq!(b.receive(&confirmation.network[0], late).kinds(), Vec::<u8>::new());
    assert!(b.tunnel.is_ready(late));
}

#[test]
fn packets_to_a_silent_peer_are_kept_as_long_as_someone_sends() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(21), now);
    let mut initiation = a.send(&packet(1), now).network;
    for seconds in 1..=100 {
        let at = now + Duration::from_secs(seconds);
        initiation.extend(a.tick(at).network);
        a.send(&packet(1), at);
    }
    let at = now + Duration::from_secs(101);
    let response = b.receive(initiation.last().expect("one"), at);
    assert_eq!(a.receive(&response.network[0], at).network.len(), 101);
}

#[test]
fn a_peer_that_moved_is_asked_again_at_once_and_the_newer_initiation_counts() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(15), now);
    let first = a.greet(now).network.remove(0);
    a.tunnel.moved(now);
    let second = a.tick(now).network.remove(0);
    assert_eq!(b.receive(&first, now).kinds(), vec![RESPONSE]);
    assert_eq!(
        b.receive(&second, now + INITIATION_INTERVAL / 2).kinds(),
        Vec::<u8>::new(),
        "too soon"
    );
    let response = b.receive(&second, now + INITIATION_INTERVAL);
    assert_eq!(a.receive(&response.network[0], now).kinds(), vec![DATA]);
}
