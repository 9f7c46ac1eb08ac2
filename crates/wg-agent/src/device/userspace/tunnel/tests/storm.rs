//! Both ends start at once, again and again, over wires that delay, reorder, duplicate and lose; the time is the test's own.

use std::collections::BTreeMap;

use super::*;

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
    /// Both greet at once and soon have something to send.
    fn new(number: u32, rng: &mut Seeded) -> Self {
        let now = Instant::now();
        let lose = match number % 5 {
            0 | 1 => [0, 0],
            2 => [1, 0],
            3 => [rng.next_u32() % 3, rng.next_u32() % 3],
            _ => [1, 1],
        };
        let mut start = Self {
            ends: pair(rng, now),
            wire: BTreeMap::new(),
            counter: 0,
            lose,
            delay: [100, 5_000, 40_000, 120_000][rng.next_u32() as usize % 4],
            duplicate: number % 2 == 1,
            began: now,
            sends: [now, now + Duration::from_micros(u64::from(rng.next_u32() % 60_000))],
            ticks: [None; 2],
            heard: [None; 2],
        };
        for end in 0..2 {
            let sent = start.ends[end].greet(now);
            start.put(end, sent, now, rng);
        }
        start
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
            self.heard[from].get_or_insert(now.duration_since(self.began));
        }
        if let Some(at) = self.ends[from].tunnel.reschedule(now) {
            self.ticks[from] = Some(at);
        }
    }

    /// What happens next happens.
    fn step(&mut self, rng: &mut Seeded) {
        let arrival = self.wire.keys().next().map(|(at, _)| *at);
        let times = [
            arrival,
            self.ticks[0],
            self.ticks[1],
            Some(self.sends[0]),
            Some(self.sends[1]),
        ];
        let Some(now) = times.into_iter().flatten().min() else {
            return;
        };
        if let Some(entry) = self.wire.first_entry().filter(|entry| entry.key().0 <= now) {
            let (to, datagram) = entry.remove();
            let sent = self.ends[to].receive(&datagram, now);
            self.put(to, sent, now, rng);
            return;
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
}

/// Both ends greet and send at once, over wires that delay, reorder, duplicate and lose.
#[test]
fn no_crossed_start_needs_longer_than_wireguards_own_retry() {
    let seed = 0x5eed_0001_u64;
    println!("seed {seed:#x}");
    let mut rng = seeded(seed);
    let mut worst = BTreeMap::<[u32; 2], Duration>::new();
    for number in 0..500_u32 {
        let mut start = Start::new(number, &mut rng);
        let lost = match number % 5 {
            0 | 1 => 0,
            2 | 4 => 1,
            _ => 2,
        };
        // A retry at its latest, and round trips.
        let bound = (REKEY_TIMEOUT + Duration::from_millis(333)) * lost + Duration::from_secs(1);
        for _ in 0..1000 {
            if start.heard.iter().all(Option::is_some) {
                break;
            }
            start.step(&mut rng);
        }
        let [Some(a), Some(b)] = start.heard else {
            panic!(
                "start {number} (delay {} us) still deaf: {:?}",
                start.delay, start.heard
            );
        };
        assert!(
            a.max(b) <= bound,
            "start {number} took {a:?} and {b:?}, at most {bound:?} expected"
        );
        let entry = worst.entry([number % 5, start.delay]).or_default();
        *entry = (*entry).max(a.max(b));
    }
    println!("worst by [case, delay]: {worst:?}");
}
