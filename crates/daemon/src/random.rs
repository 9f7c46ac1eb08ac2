//! Random times, so that processes and watches that started together do not send their next requests together.

use std::{
    hash::{BuildHasher, RandomState},
    ops::RangeInclusive,
    time::Duration,
};

/// A random number of a range. An empty range gives its start.
#[must_use]
pub fn within(range: RangeInclusive<u32>) -> u32 {
    let (first, last) = range.into_inner();
    let numbers = u64::from(last.saturating_sub(first)) + 1;
    u32::try_from(below(numbers)).map_or(first, |offset| first.saturating_add(offset))
}

/// A random time of at most `limit`, in whole milliseconds.
#[must_use]
pub fn up_to(limit: Duration) -> Duration {
    let limit = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX - 1);
    Duration::from_millis(below(limit.saturating_add(1)))
}

/// A random number below `limit`; `limit` must not be 0. Not for secrets.
fn below(limit: u64) -> u64 {
    // Each `RandomState` has other random keys.
    RandomState::new().hash_one(()) % limit
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn numbers_differ_and_lie_in_their_range() {
        let drawn: BTreeSet<u32> = (0..100).map(|_| within(300..=600)).collect();
        assert!(drawn.iter().all(|number| (300..=600).contains(number)), "{drawn:?}");
        assert!(drawn.len() > 50, "{drawn:?}");
        assert_eq!(within(7..=7), 7);
    }

    #[test]
    fn times_are_at_most_the_limit() {
        let limit = Duration::from_millis(3);
        let drawn: BTreeSet<Duration> = (0..100).map(|_| up_to(limit)).collect();
        assert_eq!(drawn.last(), Some(&limit), "{drawn:?}");
        assert_eq!(up_to(Duration::ZERO), Duration::ZERO);
    }
}
