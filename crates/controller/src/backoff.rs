//! Backoffs and token buckets. The caller passes the current time.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use tokio::time::Instant;

/// An exponential backoff with jitter for one cause. Failures that are recorded during a pause do not extend it.
#[derive(Debug)]
pub(crate) struct Backoff {
    pauses: ExponentialBackoff,
    max: Duration,
    until: Instant,
}

impl Backoff {
    /// Starts with a pause of half a second from `now`. Later pauses grow up to `max`. Jitter makes each pause up to twice as long.
    pub(crate) fn new(now: Instant, max: Duration) -> Self {
        let pauses = ExponentialBuilder::new()
            .with_min_delay(Duration::from_millis(500))
            .with_max_delay(max)
            .with_jitter()
            .without_max_times()
            .build();
        let mut backoff = Self {
            pauses,
            max,
            until: now,
        };
        backoff.record_failure(now);
        backoff
    }

    /// Records another failure for the same cause. Starts the next pause if none is running.
    pub(crate) fn record_failure(&mut self, now: Instant) {
        if self.until <= now {
            self.until = now + self.pauses.next().unwrap_or(self.max);
        }
    }

    /// The end of the current or last pause, which is the time of the next attempt.
    pub(crate) const fn until(&self) -> Instant {
        self.until
    }

    /// Whether a pause is running.
    pub(crate) fn is_waiting(&self, now: Instant) -> bool {
        self.until > now
    }
}

/// A token bucket: `burst` tokens at once, then one token per `interval`.
#[derive(Debug)]
pub(crate) struct TokenBucket {
    burst: u32,
    interval: Duration,
    /// The time at which the bucket is full again.
    full_at: Instant,
}

impl TokenBucket {
    /// Creates a full bucket.
    pub(crate) const fn new(now: Instant, burst: u32, interval: Duration) -> Self {
        Self {
            burst,
            interval,
            full_at: now,
        }
    }

    /// The time at which the next token is available.
    pub(crate) fn ready_at(&self) -> Instant {
        // The bucket is full `burst - 1` intervals after it has one token.
        let time_for_others = self.interval * (self.burst.saturating_sub(1));
        self.full_at.checked_sub(time_for_others).unwrap_or(self.full_at)
    }

    /// Takes a token if one is available. Returns whether it took one.
    pub(crate) fn take(&mut self, now: Instant) -> bool {
        let is_available = self.ready_at() <= now;
        if is_available {
            self.full_at = self.full_at.max(now) + self.interval;
        }
        is_available
    }

    /// Whether no token is missing.
    pub(crate) fn is_full(&self, now: Instant) -> bool {
        self.full_at <= now
    }
}

/// Sleeps until `until`, or forever if it is `None`.
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
    async fn bucket_after_its_burst_gives_one_token_per_interval() {
        let (start, interval) = (Instant::now(), Duration::from_secs(10));
        let mut bucket = TokenBucket::new(start, 3, interval);
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
    async fn failures_during_a_pause_do_not_extend_it() {
        let start = Instant::now();
        let mut backoff = Backoff::new(start, Duration::from_secs(60));
        let first = backoff.until();
        backoff.record_failure(start);
        assert_eq!(backoff.until(), first);
        assert!(backoff.is_waiting(start) && !backoff.is_waiting(first));
        backoff.record_failure(first);
        assert!(backoff.until() > first);
        for _ in 0..20 {
            let until = backoff.until();
            backoff.record_failure(until);
        }
        // Each of the 21 pauses after `first` lasts at most 60 s, or twice that with the jitter.
        assert!(backoff.until() - first <= 21 * Duration::from_secs(120));
    }
}
