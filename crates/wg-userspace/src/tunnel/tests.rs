//! Tests two tunnels against each other, with real cryptography and without sockets. The tests do not sleep: they pass the time to each
//! call.

use x25519_dalek::StaticSecret;

use super::*;

mod crossed_handshakes;

const INITIATION: u8 = 1;
const RESPONSE: u8 = 2;
const DATA: u8 = 4;

#[derive(Default)]
struct Sent {
    datagrams: Vec<Vec<u8>>,
    /// The inner packets that [`TestPeer::receive`] decrypted.
    inner: Vec<Vec<u8>>,
}

impl Output for Sent {
    fn send_datagram(&mut self, datagram: &[u8]) {
        self.datagrams.push(datagram.to_vec());
    }
}

impl Sent {
    fn kinds(&self) -> Vec<u8> {
        self.datagrams.iter().map(|datagram| datagram[0]).collect()
    }
}

/// One end of a tunnel, with its scratch space. Methods that return [`Sent`] return what the tunnel sent.
struct TestPeer {
    tunnel: Tunnel,
    scratch: Vec<u8>,
    /// The public key of this end.
    public: PublicKey,
}

impl TestPeer {
    /// Returns the result of [`Tunnel::receive`], and the kinds of the messages that it sent.
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
    fn initiate_handshake(&mut self, now: Instant) -> Sent {
        self.call(|tunnel, scratch, sent| {
            tunnel.initiate_handshake(now);
            tunnel.tick(now, scratch, sent);
        })
    }
    fn send(&mut self, packet: &[u8], now: Instant) -> Sent {
        self.call(|tunnel, scratch, sent| tunnel.send(packet, now, scratch, sent))
    }
    fn tick(&mut self, now: Instant) -> Sent {
        self.call(|tunnel, scratch, sent| tunnel.tick(now, scratch, sent))
    }
    /// Counts the initiations that the tunnel sends between `from` and `until`. Each tick happens when the tunnel schedules it.
    fn count_initiations(&mut self, from: Instant, until: Instant) -> usize {
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
            // Errors are ignored: some tests deliver duplicate or outdated datagrams.
            if let Ok(received) = tunnel.receive(datagram, now, &mut plain, scratch, sent)
                && let Inner::Packet(length, _) = received.inner
            {
                sent.inner.push(plain[..length].to_vec());
            }
        })
    }
}

/// A splitmix64 random number generator: the same numbers in every run.
struct TestRng(u64);

impl TestRng {
    fn next_u32(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z >> 32) as u32
    }
}

const fn seeded(seed: u64) -> TestRng {
    TestRng(seed)
}

fn secret(rng: &mut TestRng) -> StaticSecret {
    let mut bytes = [0; 32];
    for chunk in bytes.chunks_exact_mut(4) {
        chunk.copy_from_slice(&rng.next_u32().to_le_bytes());
    }
    StaticSecret::from(bytes)
}

fn pair(rng: &mut TestRng, now: Instant) -> [TestPeer; 2] {
    let [a, b] = [secret(rng), secret(rng)].map(|private| Arc::new(Local::new(private)));
    let mut test_peer = |own: &Arc<Local>, peer: &Arc<Local>| TestPeer {
        tunnel: Tunnel::new(Arc::clone(own), peer.public, None, rng.next_u32() >> 8, None, now),
        scratch: vec![0; 4096],
        public: own.public,
    };
    [test_peer(&a, &b), test_peer(&b, &a)]
}

/// A minimal IPv4 packet with a number as its payload.
fn packet(number: u8) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 24, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    packet.extend([number; 4]);
    packet
}

fn connect(a: &mut TestPeer, b: &mut TestPeer, now: Instant) {
    let initiation = a.initiate_handshake(now);
    let response = b.receive(&initiation.datagrams[0], now);
    let keepalive = a.receive(&response.datagrams[0], now);
    b.receive(&keepalive.datagrams[0], now);
}

#[test]
fn handshake_makes_a_session_for_both_directions() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(1), now);
    connect(&mut a, &mut b, now);
    let there = a.send(&packet(1), now);
    assert_eq!(b.receive(&there.datagrams[0], now).inner, vec![packet(1)]);
    let back = b.send(&packet(2), now);
    assert_eq!(a.receive(&back.datagrams[0], now).inner, vec![packet(2)]);
    assert_eq!(
        (a.tunnel.last_handshake(), b.tunnel.last_handshake()),
        (Some(now), Some(now))
    );
}

#[test]
fn responder_stages_packets_instead_of_initiating() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(2), now);
    let initiation = a.initiate_handshake(now);
    let response = b.receive(&initiation.datagrams[0], now);
    assert_eq!(b.send(&packet(1), now).kinds(), Vec::<u8>::new());
    let keepalive = a.receive(&response.datagrams[0], now);
    let staged = b.receive(&keepalive.datagrams[0], now);
    assert_eq!(staged.kinds(), vec![DATA]);
    assert_eq!(a.receive(&staged.datagrams[0], now).inner, vec![packet(1)]);
}

#[test]
fn held_response_is_dropped_when_own_initiation_is_answered() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(3), now);
    let (from_a, from_b) = (a.initiate_handshake(now), b.initiate_handshake(now));
    assert_eq!(a.receive(&from_b.datagrams[0], now).kinds(), Vec::<u8>::new());
    assert_eq!(b.receive(&from_a.datagrams[0], now).kinds(), Vec::<u8>::new());
    // Both hold their responses (see "Crossed handshakes" in tunnel.rs). b ticks first, so its response arrives before a ticks. A
    // response of wireguard-go would arrive as early, because wireguard-go never holds a response.
    let response = b.tick(now + RESPONSE_HOLD);
    assert_eq!(response.kinds(), vec![RESPONSE]);
    assert_eq!(a.receive(&response.datagrams[0], now).kinds(), vec![DATA]);
    assert_eq!(a.tick(now + RESPONSE_HOLD).kinds(), Vec::<u8>::new());
}

#[test]
fn held_response_is_sent_at_a_scheduled_tick() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(4), now);
    a.initiate_handshake(now);
    let from_b = b.initiate_handshake(now);
    let retry = a.tunnel.reschedule(now).expect("a retry");
    let max_jitter = Duration::from_millis(MAX_JITTER.into());
    assert!(retry >= now + REKEY_TIMEOUT && retry <= now + REKEY_TIMEOUT + max_jitter);
    a.receive(&from_b.datagrams[0], now);
    assert_eq!(a.tunnel.reschedule(now), Some(now + RESPONSE_HOLD));
    assert!(
        !a.tunnel.expects_tick(retry),
        "the earlier tick replaces that of the retry"
    );
    assert_eq!(a.tick(now + RESPONSE_HOLD).kinds(), vec![RESPONSE]);
}

#[test]
fn silence_causes_receiver_keepalive_and_sender_handshake() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(5), now);
    connect(&mut a, &mut b, now);
    // Packets in both directions between two ticks (the packet of b is lost), then silence.
    b.send(&packet(1), now);
    let there = a.send(&packet(2), now);
    b.receive(&there.datagrams[0], now);
    assert_eq!(b.tick(now + Duration::from_secs(9)).kinds(), Vec::<u8>::new());
    assert_eq!(b.tick(now + KEEPALIVE_TIMEOUT).kinds(), vec![DATA]);
    assert_eq!(a.tick(now + Duration::from_secs(14)).kinds(), Vec::<u8>::new());
    assert_eq!(a.tick(now + Duration::from_secs(15)).kinds(), vec![INITIATION]);
}

#[test]
fn persistent_keepalive_is_sent_when_idle_and_can_change() {
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
fn persistent_keepalive_starts_new_handshake_attempts() {
    let now = Instant::now();
    let [mut a, _] = pair(&mut seeded(7), now);
    a.tunnel.set_keepalive(Some(Duration::from_secs(25)), now);
    // The attempts end after 90 s; the keepalive due at 100 s starts new ones.
    let first = a.count_initiations(now, now + Duration::from_secs(95));
    let then = a.count_initiations(now + Duration::from_secs(95), now + Duration::from_secs(180));
    assert!(
        (17..=18).contains(&first) && (15..=16).contains(&then),
        "{first}, {then}"
    );
}

#[test]
fn unanswered_handshake_is_retried_for_ninety_seconds() {
    let now = Instant::now();
    let [mut a, _] = pair(&mut seeded(8), now);
    a.tunnel.initiate_handshake(now);
    let sent = a.count_initiations(now, now + Duration::from_secs(300));
    assert!((17..=18).contains(&sent), "{sent}");
    assert_eq!(a.tunnel.reschedule(now + Duration::from_secs(300)), None);
}

// threat: low-order-handshake
#[test]
fn low_order_peer_key_causes_no_message_and_few_ticks() {
    let now = Instant::now();
    let [mut a, _] = pair(&mut seeded(16), now);
    let local = Arc::new(Local::new(StaticSecret::from([1; 32])));
    a.tunnel = Tunnel::new(local, PublicKey::from([0; 32]), None, 1, None, now);
    a.tunnel.initiate_handshake(now);
    let (mut ticks, mut at) = (0, now);
    loop {
        assert_eq!(a.tick(at).kinds(), Vec::<u8>::new());
        ticks += 1;
        assert!(ticks < 25, "the tunnel schedules too many ticks");
        match a.tunnel.reschedule(at) {
            Some(next) => at = next,
            None => return,
        }
    }
}

#[test]
fn full_staging_queue_keeps_the_newest_packets() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(9), now);
    let initiation = a.send(&packet(0), now);
    for number in 1..=u8::try_from(crate::staged::MAX_PACKETS).expect("a small queue") {
        a.send(&packet(number), now);
    }
    let response = b.receive(&initiation.datagrams[0], now);
    let staged = a.receive(&response.datagrams[0], now);
    let arrived: Vec<u8> = staged
        .datagrams
        .iter()
        .flat_map(|datagram| b.receive(datagram, now).inner)
        .map(|packet| packet[23])
        .collect();
    assert_eq!(arrived, (1..=128).collect::<Vec<u8>>());
}

#[test]
fn sending_initiator_rekeys_after_two_minutes() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(10), now);
    connect(&mut a, &mut b, now);
    let later = now + Duration::from_secs(119);
    assert_eq!(a.send(&packet(1), later).kinds(), vec![DATA]);
    assert_eq!(a.tunnel.reschedule(later), Some(later + NO_REPLY_TIMEOUT));
    let later = now + Duration::from_secs(120);
    assert_eq!(b.send(&packet(2), later).kinds(), vec![DATA]);
    let old = a.send(&packet(3), later);
    assert_eq!(a.tunnel.reschedule(later), Some(later), "a handshake is due at once");
    let initiation = a.tick(later);
    assert_eq!(initiation.kinds(), vec![INITIATION]);
    assert_eq!(a.send(&packet(4), later).kinds(), vec![DATA], "on the old session");
    let response = b.receive(&initiation.datagrams[0], later);
    // Sent on the old session, received after b has answered the new handshake.
    assert_eq!(b.receive(&old.datagrams[0], later).inner, vec![packet(3)]);
    let confirmation = a.receive(&response.datagrams[0], later);
    assert_eq!(confirmation.kinds(), vec![DATA]);
    b.receive(&confirmation.datagrams[0], later);
    // The new session works after the old one has expired.
    let ended = now + Duration::from_secs(181);
    let there = a.send(&packet(5), ended);
    assert_eq!(b.receive(&there.datagrams[0], ended).inner, vec![packet(5)]);
}

#[test]
fn receiving_initiator_rekeys_before_expiry() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(11), now);
    connect(&mut a, &mut b, now);
    for (seconds, kinds) in [(164, vec![]), (165, vec![INITIATION])] {
        let later = now + Duration::from_secs(seconds);
        let data = b.send(&packet(1), later);
        assert_eq!(a.receive(&data.datagrams[0], later).inner, vec![packet(1)]);
        // Keeps the tick from sending a passive keepalive.
        a.tunnel.unanswered_by_us = None;
        assert_eq!(a.tick(later).kinds(), kinds, "after {seconds} s");
    }
}

#[test]
fn session_expires_after_three_minutes_and_its_keys_later() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(12), now);
    connect(&mut a, &mut b, now);
    let before = now + Duration::from_secs(179);
    assert_eq!(a.send(&packet(1), before).kinds(), vec![DATA]);
    let after = now + Duration::from_secs(180);
    assert_eq!(b.send(&packet(2), after).kinds(), vec![INITIATION]);
    // One second after the session expires (`EXPIRY_MARGIN`) a tick is due even if the tunnel is idle. In this tick boringtun deletes
    // the keys.
    assert_eq!(b.tunnel.keys_until, Some(now + Duration::from_secs(181)));
}

// threat: replayed-message
#[test]
fn replayed_or_foreign_initiation_is_refused() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(13), now);
    let later = now + INITIATION_INTERVAL;
    let first = a.initiate_handshake(now).datagrams.remove(0);
    let (received, kinds) = b.try_receive(&first, now).expect("an initiation");
    assert!(!received.moves_endpoint);
    assert_eq!(kinds, vec![RESPONSE]);
    assert_eq!(b.try_receive(&first, later), Err(Refused::Replayed));
    let stranger_local = Arc::new(Local::new(secret(&mut seeded(14))));
    let public = stranger_local.public;
    let to_b = Tunnel::new(stranger_local, b.public, None, 1, None, now);
    let mut stranger = TestPeer {
        tunnel: to_b,
        scratch: vec![0; 4096],
        public,
    };
    let foreign = stranger.initiate_handshake(now).datagrams.remove(0);
    assert_eq!(b.try_receive(&foreign, later), Err(Refused::Invalid));
}

// threat: low-order-handshake
#[test]
fn handshake_message_with_low_order_key_is_refused() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(22), now);
    let initiation = a.initiate_handshake(now).datagrams.remove(0);
    let mut forged = initiation.clone();
    forged[8..40].fill(0);
    assert_eq!(b.try_receive(&forged, now), Err(Refused::Invalid));
    let response = b.receive(&initiation, now).datagrams.remove(0);
    let mut forged = response.clone();
    forged[12..44].fill(0);
    assert_eq!(a.try_receive(&forged, now), Err(Refused::Invalid));
    assert_eq!(a.receive(&response, now).kinds(), vec![DATA]);
}

// threat: replayed-message
#[test]
fn replayed_initiation_changes_no_endpoint_or_session() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(17), now);
    let recorded = a.initiate_handshake(now).datagrams.remove(0);
    assert_eq!(b.receive(&recorded, now).kinds(), vec![RESPONSE]);
    for tunnel in [&mut a.tunnel, &mut b.tunnel] {
        tunnel.set_preshared_key(Some([1; 32]));
    }
    let later = now + Duration::from_secs(1);
    // b waits for an answer to a packet. A replayed initiation does not count as one.
    b.tunnel.unanswered_by_peer = Some(now);
    // The change of the preshared key deleted the newest initiation timestamp in b, so the recorded initiation is valid again.
    let (received, _) = b.try_receive(&recorded, later).expect("an initiation");
    assert!(!received.moves_endpoint);
    assert_eq!(b.tunnel.unanswered_by_peer, Some(now));
    assert!(!b.tunnel.is_ready(later));
    let later = later + REKEY_TIMEOUT * 2;
    a.tunnel.initiate_handshake(later);
    let initiation = a.tick(later);
    let response = b.receive(&initiation.datagrams[0], later);
    assert_eq!(a.receive(&response.datagrams[0], later).kinds(), vec![DATA]);
}

#[test]
fn malformed_inner_packet_counts_as_a_reply() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(18), now);
    connect(&mut a, &mut b, now);
    a.send(&packet(1), now);
    let garbage = b.send(&[0xff; 32], now);
    let expected = Received {
        moves_endpoint: true,
        inner: Inner::Malformed,
    };
    assert_eq!(a.try_receive(&garbage.datagrams[0], now), Ok((expected, vec![])));
    assert_eq!(
        a.tick(now + NO_REPLY_TIMEOUT).kinds(),
        vec![DATA],
        "a keepalive is sent, and no initiation"
    );
}

#[test]
fn lost_first_packets_cause_a_new_handshake() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(19), now);
    let initiation = a.send(&packet(1), now);
    let response = b.receive(&initiation.datagrams[0], now);
    assert_eq!(
        a.receive(&response.datagrams[0], now).kinds(),
        vec![DATA],
        "this packet is lost"
    );
    assert_eq!(a.tick(now + NO_REPLY_TIMEOUT).kinds(), vec![INITIATION]);
}

#[test]
fn only_the_newer_of_two_initiations_is_answered() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(20), now);
    let from_b = b.initiate_handshake(now).datagrams.remove(0);
    let first = a.initiate_handshake(now).datagrams.remove(0);
    assert_eq!(b.receive(&first, now).kinds(), Vec::<u8>::new(), "the response is held");
    // The tick is late: the next initiation arrives before the held response was sent.
    let late = now + RESPONSE_HOLD;
    a.tunnel.endpoint_changed(late);
    let second = a.tick(late).datagrams.remove(0);
    let response = b.receive(&second, late);
    assert_eq!(response.kinds(), vec![RESPONSE]);
    assert_eq!(b.tick(late).kinds(), Vec::<u8>::new());
    // b's own initiation arrives late. `a` holds its response, and drops it when b's response arrives, so b's session stays.
    let held = a.receive(&from_b, late);
    assert_eq!(held.kinds(), Vec::<u8>::new(), "a holds its response");
    let confirmation = a.receive(&response.datagrams[0], late);
    assert_eq!(b.receive(&confirmation.datagrams[0], late).kinds(), Vec::<u8>::new());
    assert!(b.tunnel.is_ready(late));
}

#[test]
fn packets_stay_staged_while_new_ones_are_sent() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(21), now);
    let mut initiations = a.send(&packet(1), now).datagrams;
    for seconds in 1..=100 {
        let at = now + Duration::from_secs(seconds);
        initiations.extend(a.tick(at).datagrams);
        a.send(&packet(1), at);
    }
    let at = now + Duration::from_secs(101);
    let response = b.receive(initiations.last().expect("one"), at);
    assert_eq!(a.receive(&response.datagrams[0], at).datagrams.len(), 101);
}

#[test]
fn endpoint_change_initiates_again_at_once() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(15), now);
    let first = a.initiate_handshake(now).datagrams.remove(0);
    a.tunnel.endpoint_changed(now);
    let second = a.tick(now).datagrams.remove(0);
    assert_eq!(b.receive(&first, now).kinds(), vec![RESPONSE]);
    assert_eq!(
        b.receive(&second, now + INITIATION_INTERVAL / 2).kinds(),
        Vec::<u8>::new(),
        "too soon"
    );
    let response = b.receive(&second, now + INITIATION_INTERVAL);
    assert_eq!(a.receive(&response.datagrams[0], now).kinds(), vec![DATA]);
    let later = now + Duration::from_secs(1);
    a.tunnel.endpoint_changed(later);
    assert_eq!(a.tick(later).kinds(), vec![INITIATION], "during a session");
}
