//! Simulates crossed handshakes: both peers initiate at once over a network that delays, reorders, duplicates and loses datagrams.

use std::collections::BTreeMap;

use super::*;

/// One simulation of two peers that initiate at once.
struct Simulation {
    peers: [TestPeer; 2],
    /// Datagrams in flight with their receiver, by arrival time and a counter that makes the key unique.
    wire: BTreeMap<(Instant, u32), (usize, Vec<u8>)>,
    counter: u32,
    /// How many of each peer's next datagrams are lost.
    to_lose: [u32; 2],
    /// The longest delay of a datagram, in microseconds.
    max_delay: u32,
    duplicate: bool,
    began: Instant,
    next_send: [Instant; 2],
    next_tick: [Option<Instant>; 2],
    /// When each peer decrypted its first inner packet.
    first_packet: [Option<Duration>; 2],
}

impl Simulation {
    /// Both peers initiate at once and soon send a packet.
    fn new(number: u32, rng: &mut TestRng) -> Self {
        let now = Instant::now();
        let to_lose = match number % 5 {
            0 | 1 => [0, 0],
            2 => [1, 0],
            3 => [rng.next_u32() % 3, rng.next_u32() % 3],
            _ => [1, 1],
        };
        let mut simulation = Self {
            peers: pair(rng, now),
            wire: BTreeMap::new(),
            counter: 0,
            to_lose,
            max_delay: [100, 5_000, 40_000, 120_000][rng.next_u32() as usize % 4],
            duplicate: number % 2 == 1,
            began: now,
            next_send: [now, now + Duration::from_micros(u64::from(rng.next_u32() % 60_000))],
            next_tick: [None; 2],
            first_packet: [None; 2],
        };
        for peer in 0..2 {
            let sent = simulation.peers[peer].initiate_handshake(now);
            simulation.transmit(peer, sent, now, rng);
        }
        simulation
    }

    /// Puts the datagrams in `sent` on the wire. Records when the peer `from` decrypted its first inner packet, and its next tick.
    fn transmit(&mut self, from: usize, sent: Sent, now: Instant, rng: &mut TestRng) {
        for datagram in sent.datagrams {
            if self.to_lose[from] > 0 {
                self.to_lose[from] -= 1;
                continue;
            }
            for _ in 0..=u8::from(self.duplicate && rng.next_u32().is_multiple_of(3)) {
                self.counter += 1;
                let delay = Duration::from_micros(u64::from(rng.next_u32() % (self.max_delay + 1)));
                self.wire
                    .insert((now + delay, self.counter), (1 - from, datagram.clone()));
            }
        }
        if !sent.inner.is_empty() {
            self.first_packet[from].get_or_insert(now.duration_since(self.began));
        }
        if let Some(at) = self.peers[from].tunnel.reschedule(now) {
            self.next_tick[from] = Some(at);
        }
    }

    /// Runs the next event: an arrival, or the ticks and packets that are due.
    fn step(&mut self, rng: &mut TestRng) {
        let arrival = self.wire.keys().next().map(|(at, _)| *at);
        let times = [
            arrival,
            self.next_tick[0],
            self.next_tick[1],
            Some(self.next_send[0]),
            Some(self.next_send[1]),
        ];
        let Some(now) = times.into_iter().flatten().min() else {
            return;
        };
        if let Some(entry) = self.wire.first_entry().filter(|entry| entry.key().0 <= now) {
            let (to, datagram) = entry.remove();
            let sent = self.peers[to].receive(&datagram, now);
            self.transmit(to, sent, now, rng);
            return;
        }
        for peer in 0..2 {
            if self.next_tick[peer].is_some_and(|at| at <= now) {
                self.next_tick[peer] = None;
                let sent = self.peers[peer].tick(now);
                self.transmit(peer, sent, now, rng);
            }
            if self.next_send[peer] <= now {
                self.next_send[peer] = now + Duration::from_millis(300);
                let sent = self.peers[peer].send(&packet(1), now);
                self.transmit(peer, sent, now, rng);
            }
        }
    }
}

#[test]
fn crossed_handshakes_complete_within_the_retry_time() {
    let seed = 0x5eed_0001_u64;
    println!("seed {seed:#x}");
    let mut rng = seeded(seed);
    let mut worst = BTreeMap::<[u32; 2], Duration>::new();
    for number in 0..500_u32 {
        let mut simulation = Simulation::new(number, &mut rng);
        // The largest possible value in `to_lose`. Each lost datagram costs at most one retry. The retries of the two peers overlap.
        let max_retries = match number % 5 {
            0 | 1 => 0,
            2 | 4 => 1,
            _ => 2,
        };
        // A retry takes at most REKEY_TIMEOUT and the longest jitter; all round trips together take at most one second.
        let bound = (REKEY_TIMEOUT + Duration::from_millis(333)) * max_retries + Duration::from_secs(1);
        for _ in 0..1000 {
            if simulation.first_packet.iter().all(Option::is_some) {
                break;
            }
            simulation.step(&mut rng);
        }
        let [Some(a), Some(b)] = simulation.first_packet else {
            panic!(
                "simulation {number} (delay {} us) received no packet: {:?}",
                simulation.max_delay, simulation.first_packet
            );
        };
        assert!(
            a.max(b) <= bound,
            "simulation {number} took {a:?} and {b:?}, at most {bound:?} expected"
        );
        let entry = worst.entry([number % 5, simulation.max_delay]).or_default();
        *entry = (*entry).max(a.max(b));
    }
    println!("worst by [case, delay]: {worst:?}");
}
