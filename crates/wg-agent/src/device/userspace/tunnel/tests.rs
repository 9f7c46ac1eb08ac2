//! Real cryptography, no sockets. Our own timers are tried by handing in later times; what the core times itself runs in real time,
//! many tunnels at once.

use std::collections::BTreeMap;

use super::*;

const LOCAL: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

#[derive(Default)]
struct Sent {
    network: Vec<Vec<u8>>,
    inner: Vec<Vec<u8>>,
}

impl Output for Sent {
    fn network(&mut self, datagram: &[u8]) {
        self.network.push(datagram.to_vec());
    }
    fn inner(&mut self, packet: &[u8], _: IpAddr) {
        self.inner.push(packet.to_vec());
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
}

impl End {
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
    fn receive(&mut self, datagram: &[u8], now: Instant) -> Sent {
        self.call(|tunnel, scratch, sent| {
            tunnel.refresh(now, scratch, sent);
            // A replayed or superseded datagram is refused: that is what lossy tests provoke.
            let _ = tunnel.receive(LOCAL, datagram, now, &mut [0; 4096], scratch, sent);
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
    let (a, b) = (secret(rng), secret(rng));
    let (a_public, b_public) = (PublicKey::from(&a), PublicKey::from(&b));
    let end = |private: StaticSecret, own: &PublicKey, peer, index| End {
        tunnel: Tunnel::new(private, peer, None, index, no_limit(own), None, now),
        scratch: vec![0; 4096],
    };
    [
        end(a, &a_public, b_public, rng.next_u32() >> 8),
        end(b, &b_public, a_public, rng.next_u32() >> 8),
    ]
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
    assert_eq!(a.tunnel.reschedule(now), Some(now + BUSY_TICK));
    a.receive(&from_b.network[0], now);
    assert_eq!(a.tunnel.reschedule(now), Some(now + HOLD));
    assert!(!a.tunnel.expects_tick(now + BUSY_TICK));
    assert_eq!(a.tick(now + HOLD).kinds(), vec![RESPONSE]);
}

#[test]
fn data_that_got_no_reply_is_acknowledged_after_ten_seconds_and_one_silent_for_fifteen_is_greeted() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(5), now);
    connect(&mut a, &mut b, now);
    // Both ways within one tick of the core, then silence: the core alone would not send this keepalive.
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
    let initiations = |a: &mut End, from: u64, to: u64| {
        (from..to)
            .map(|second| a.tick(now + Duration::from_secs(second)).kinds().len())
            .sum::<usize>()
    };
    assert_eq!(initiations(&mut a, 0, 90), 18);
    // Given up at 90; the keepalive due at 100 starts afresh.
    assert_eq!(initiations(&mut a, 90, 180), 16);
}

#[test]
fn a_greeting_that_nobody_answers_stops_after_ninety_seconds() {
    let now = Instant::now();
    let [mut a, _] = pair(&mut seeded(8), now);
    let mut sent = a.greet(now).network.len();
    sent += (1..300)
        .map(|second| a.tick(now + Duration::from_secs(second)).network.len())
        .sum::<usize>();
    assert_eq!(sent, 18);
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

/// The report of cloudflare/boringtun#495, without our timers: after data both ways within one tick of its clock, the core
/// never sends the keepalive that the peer waits for. When this fails, the core was mended and our timer may go.
#[test]
fn the_core_alone_forgets_the_keepalive_after_data_both_ways_in_one_tick() {
    let now = Instant::now();
    let [mut a, mut b] = pair(&mut seeded(10), now);
    connect(&mut a, &mut b, now);
    let mut scratch = vec![0; 2048];
    b.tunnel.core.get().encapsulate(&packet(1), &mut scratch);
    let there = a.send(&packet(2), now);
    assert!(matches!(
        b.tunnel
            .core
            .get()
            .decapsulate(Some(LOCAL), &there.network[0], &mut scratch),
        TunnResult::WriteToTunnelV4(..)
    ));
    let until = now + KEEPALIVE_TIMEOUT + Duration::from_millis(500);
    while Instant::now() < until {
        assert!(
            matches!(b.tunnel.core.get().update_timers(&mut scratch), TunnResult::Done),
            "the core has been mended"
        );
        std::thread::sleep(CORE_TICK);
    }
}

/// One start in the storm below.
struct Start {
    ends: [End; 2],
    /// Datagrams under way: when, counter, to whom.
    wire: BTreeMap<(Instant, u32), (usize, Vec<u8>)>,
    counter: u32,
    /// How many of the first datagrams of each end are lost.
    lose: [u32; 2],
    /// The longest delay of a datagram, microseconds.
    delay: u32,
    duplicate: bool,
    began: Instant,
    sends: [Instant; 2],
    ticks: [Option<Instant>; 2],
    heard: [Option<Duration>; 2],
}

impl Start {
    fn new(number: u32, rng: &mut Seeded) -> Self {
        let now = Instant::now();
        let lose = match number % 5 {
            0 | 1 => [0, 0],
            2 => [1, 0],
            3 => [rng.next_u32() % 3, rng.next_u32() % 3],
            _ => [1, 1],
        };
        Self {
            ends: pair(rng, now),
            wire: BTreeMap::new(),
            counter: 0,
            lose,
            delay: [100, 5_000, 40_000, 120_000][rng.next_u32() as usize % 4],
            duplicate: number % 2 == 1,
            began: now,
            sends: [now; 2],
            ticks: [None; 2],
            heard: [None; 2],
        }
    }

    /// Both greet at once and soon have something to send.
    fn begin(&mut self, rng: &mut Seeded) {
        let now = Instant::now();
        self.began = now;
        self.sends = [now, now + Duration::from_micros(u64::from(rng.next_u32() % 60_000))];
        for end in 0..2 {
            let sent = self.ends[end].greet(now);
            self.put(end, sent, now, rng);
        }
    }

    fn put(&mut self, from: usize, sent: Sent, now: Instant, rng: &mut Seeded) {
        for datagram in sent.network {
            if self.lose[from] > 0 {
                self.lose[from] -= 1;
                continue;
            }
            for _ in 0..=u8::from(self.duplicate && rng.next_u32().is_multiple_of(3)) {
                self.counter += 1;
                let late = Duration::from_micros(u64::from(rng.next_u32() % (self.delay + 1)));
                self.wire
                    .insert((now + late, self.counter), (1 - from, datagram.clone()));
            }
        }
        if !sent.inner.is_empty() {
            let took = now.duration_since(self.began);
            self.heard[from].get_or_insert(took);
        }
        if let Some(at) = self.ends[from].tunnel.reschedule(now) {
            self.ticks[from] = Some(at);
        }
    }

    fn step(&mut self, now: Instant, rng: &mut Seeded) {
        while let Some(entry) = self.wire.first_entry().filter(|entry| entry.key().0 <= now) {
            let (to, datagram) = entry.remove();
            let sent = self.ends[to].receive(&datagram, now);
            self.put(to, sent, now, rng);
        }
        for end in 0..2 {
            if self.ticks[end].is_some_and(|at| at <= now) {
                self.ticks[end] = None;
                let sent = self.ends[end].tick(now);
                self.put(end, sent, now, rng);
            }
            if self.sends[end] <= now {
                self.sends[end] = now + Duration::from_millis(300);
                let sent = self.ends[end].send(&packet(1), now);
                self.put(end, sent, now, rng);
            }
        }
    }

    fn done(&self) -> bool {
        self.heard.iter().all(Option::is_some)
    }
}

/// Both ends greet and send at once, over wires that delay, reorder, duplicate and lose.
#[test]
fn no_crossed_start_needs_longer_than_wireguards_own_retry() {
    let seed = 0x5eed_0001_u64;
    println!("seed {seed:#x}");
    let mut rng = seeded(seed);
    let mut starts: Vec<Start> = (0..500_u32).map(|number| Start::new(number, &mut rng)).collect();
    for start in &mut starts {
        start.begin(&mut rng);
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    // What a busy machine adds to every step of a start.
    let mut round = Duration::ZERO;
    while starts.iter().any(|start| !start.done()) && Instant::now() < deadline {
        let began = Instant::now();
        for start in starts.iter_mut().filter(|start| !start.done()) {
            start.step(Instant::now(), &mut rng);
        }
        round = round.max(began.elapsed());
        std::thread::yield_now();
    }
    let mut worst = BTreeMap::<[u32; 2], Duration>::new();
    for (number, start) in (0_u32..).zip(&starts) {
        let [Some(a), Some(b)] = start.heard else {
            panic!(
                "start {number} (delay {} us) still deaf: {:?}",
                start.delay, start.heard
            );
        };
        let lost = match number % 5 {
            0 | 1 => 0,
            2 | 4 => 1,
            _ => 2,
        };
        // A retry, its round trips, and the crypto of all other starts on the same core.
        let slack = Duration::from_millis(1000) + round * 5;
        let bound = REKEY_TIMEOUT * lost + slack;
        assert!(
            a.max(b) <= bound,
            "start {number} took {a:?} and {b:?}, at most {bound:?} expected"
        );
        let entry = worst.entry([number % 5, start.delay]).or_default();
        *entry = (*entry).max(a.max(b));
    }
    println!("worst by [case, delay]: {worst:?}");
}
