//! Backoffs and token buckets. The caller passes the time.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use tokio::time::Instant;

/// An exponential backoff with jitter for one cause. All attempts that fail in one round extend it once.
#[derive(Debug)]
pub(crate) struct Backoff {
    pauses: ExponentialBackoff,
    most: Duration,
    until: Instant,
}

impl Backoff {
    /// Waits half a second from `now`, later up to `most`.
    pub(crate) fn new(now: Instant, most: Duration) -> Self {
        let pauses = ExponentialBuilder::new()
            .with_min_delay(Duration::from_millis(500))
            .with_max_delay(most)
            .with_jitter()
            .without_max_times()
            .build();
        let mut backoff = Self {
            pauses,
            most,
            until: now,
        };
        backoff.failed(now);
        backoff
    }

    /// Another attempt failed for the same cause.
    pub(crate) fn failed(&mut self, now: Instant) {
        if self.until <= now {
            self.until = now + self.pauses.next().unwrap_or(self.most);
        }
    }

    /// When to try again.
    pub(crate) const fn until(&self) -> Instant {
        self.until
    }

    /// Whether to wait now.
    pub(crate) fn waits(&self, now: Instant) -> bool {
        self.until > now
    }
}

/// A token bucket: `burst` at once, then one every `interval`.
#[derive(Debug)]
pub(crate) struct Bucket {
    burst: u32,
    interval: Duration,
    /// When it will be full again.
    full: Instant,
}

impl Bucket {
    /// A full one.
    pub(crate) const fn new(now: Instant, burst: u32, interval: Duration) -> Self {
        Self {
            burst,
            interval,
            full: now,
        }
    }

    /// When the next token is there.
    pub(crate) fn ready(&self) -> Instant {
        let spare = self.interval * (self.burst.saturating_sub(1));
        self.full.checked_sub(spare).unwrap_or(self.full)
    }

    /// Takes one, if it is there.
    pub(crate) fn take(&mut self, now: Instant) -> bool {
        let there = self.ready() <= now;
        if there {
            self.full = self.full.max(now) + self.interval;
        }
        there
    }

    /// Whether it is as good as a new one.
    pub(crate) fn is_full(&self, now: Instant) -> bool {
        self.full <= now
    }
}

/// Sleeps until then; for ever without it.
pub(crate) async fn sleep_until(until: Option<Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn bucket_gives_its_burst_and_then_one_an_interval() {
        let (start, interval) = (Instant::now(), Duration::from_secs(10));
        let mut bucket = Bucket::new(start, 3, interval);
        let mut taken = |seconds| bucket.take(start + Duration::from_secs(seconds));
        assert_eq!([taken(0), taken(0), taken(0), taken(0)], [true, true, true, false]);
        assert_eq!([taken(9), taken(10), taken(10)], [false, true, false]);
        assert_eq!(
            [taken(100), taken(100), taken(100), taken(100)],
            [true, true, true, false]
        );
        assert!(!bucket.is_full(start + Duration::from_secs(129)) && bucket.is_full(start + Duration::from_secs(130)));
    }

    #[tokio::test(start_paused = true)]
    async fn failures_of_one_round_extend_a_backoff_once() {
        let start = Instant::now();
        let mut backoff = Backoff::new(start, Duration::from_secs(60));
        let first = backoff.until();
        backoff.failed(start);
        assert_eq!(backoff.until(), first);
        assert!(backoff.waits(start) && !backoff.waits(first));
        backoff.failed(first);
        assert!(backoff.until() > first);
        for _ in 0..20 {
            let until = backoff.until();
            backoff.failed(until);
        }
        // The jitter is as long as the pause at most.
        assert!(backoff.until() - first <= 22 * Duration::from_secs(120));
    }
}
