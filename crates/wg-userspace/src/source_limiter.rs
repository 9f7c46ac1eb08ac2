//! Limits the handshake messages of each source address while the device receives many of them, with one token bucket for each source.
//!
//! Under load, a cookie (`handshake_gate`) proves that the source address of an initiation is not spoofed. Responses need no cookie, so
//! their source may be spoofed.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::handshake_gate::INITIATIONS_PER_SECOND;

/// Burst and rate of each source, as in the kernel (`drivers/net/wireguard/ratelimiter.c`): 5 at once, 20 per second.
const BURST: u32 = 5;
const REFILL_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum number of buckets. Messages of further sources are refused until a sweep removes full buckets.
const MAX_SOURCES: usize = 16_384;

/// The limiter of one device.
#[derive(Default)]
pub(crate) struct SourceLimiter(Mutex<Buckets>);

#[derive(Default)]
struct Buckets {
    /// Start of the second for which `count` counts all handshake messages.
    since: Option<Instant>,
    count: u64,
    /// The time when the bucket of each source is full again. An IPv6 /64 network is one source.
    full_at: HashMap<IpAddr, Instant>,
    /// The time when full buckets were last removed.
    swept: Option<Instant>,
}

impl SourceLimiter {
    /// Whether to process a handshake message (initiation or response) of this source. The first [`INITIATIONS_PER_SECOND`] messages of
    /// all sources in a second are processed without a limit.
    pub(crate) fn allow(&self, source: IpAddr, now: Instant) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *state;
        if state
            .since
            .is_none_or(|since| now.saturating_duration_since(since) >= Duration::from_secs(1))
        {
            state.since = Some(now);
            state.count = 0;
        }
        state.count += 1;
        if state.count <= INITIATIONS_PER_SECOND {
            return true;
        }
        let source = bucket_key(source);
        if state.full_at.len() >= MAX_SOURCES && !state.full_at.contains_key(&source) {
            let is_due = state
                .swept
                .is_none_or(|swept| now.saturating_duration_since(swept) >= REFILL_INTERVAL * BURST);
            if is_due {
                state.swept = Some(now);
                state.full_at.retain(|_, full_at| *full_at > now);
            }
            if state.full_at.len() >= MAX_SOURCES {
                return false;
            }
        }
        let full_at = state.full_at.entry(source).or_insert(now);
        let next = (*full_at).max(now) + REFILL_INTERVAL;
        if next > now + REFILL_INTERVAL * BURST {
            return false;
        }
        *full_at = next;
        true
    }
}

fn bucket_key(source: IpAddr) -> IpAddr {
    match source {
        IpAddr::V4(_) => source,
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(number: u32) -> IpAddr {
        IpAddr::V4(number.into())
    }

    #[test]
    fn source_is_limited_only_above_the_device_rate() {
        let (limiter, now) = (SourceLimiter::default(), Instant::now());
        assert!((0..INITIATIONS_PER_SECOND).all(|_| limiter.allow(v4(1), now)));
        assert!((0..BURST).all(|_| limiter.allow(v4(1), now)));
        assert!(!limiter.allow(v4(1), now));
        assert!(limiter.allow(v4(1), now + Duration::from_secs(1)));
    }

    #[test]
    fn each_source_has_its_own_bucket_under_load() {
        let (limiter, now) = (SourceLimiter::default(), Instant::now());
        (0..INITIATIONS_PER_SECOND).for_each(|_| assert!(limiter.allow(v4(9), now)));
        let allowed = |source: IpAddr, at| (0..100).filter(|_| limiter.allow(source, at)).count();
        assert_eq!(allowed(v4(1), now), 5);
        assert_eq!(allowed(v4(2), now), 5);
        assert_eq!(allowed(v4(1), now + REFILL_INTERVAL * 2), 2);
        assert_eq!(allowed("2001:db8::1".parse().unwrap(), now), 5);
        assert_eq!(allowed("2001:db8::2".parse().unwrap(), now), 0);
        assert_eq!(allowed("2001:db8:0:1::2".parse().unwrap(), now), 5);
    }

    #[test]
    fn source_beyond_the_maximum_waits_for_a_sweep() {
        let (limiter, now) = (SourceLimiter::default(), Instant::now());
        (0..INITIATIONS_PER_SECOND).for_each(|_| assert!(limiter.allow(v4(0), now)));
        let allowed = (1..=20_000).filter(|number| limiter.allow(v4(*number), now)).count();
        assert_eq!(allowed, MAX_SOURCES);
        assert!(
            !limiter.allow(v4(30_000), now + REFILL_INTERVAL),
            "full buckets are removed only every 250 ms"
        );
        assert!(limiter.allow(v4(30_000), now + REFILL_INTERVAL * BURST));
        assert_eq!(limiter.0.lock().unwrap().full_at.len(), 1);
    }
}
