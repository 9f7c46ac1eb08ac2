//! How often a source may have us look at an initiation while there are many. That it is the source it says is for the cookies to
//! show; what it sends is not looked at here.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::gate::INITIATIONS_PER_SECOND;

/// As the kernel's (`drivers/net/wireguard/ratelimiter.c`): so many at once, and so many a second.
const AT_ONCE: u32 = 5;
const EVERY: Duration = Duration::from_millis(50);
/// Sources that are remembered; while there are more, new ones wait.
const SOURCES: usize = 16_384;

/// Counts of one device.
#[derive(Default)]
pub(super) struct Sources(Mutex<State>);

#[derive(Default)]
struct State {
    /// The second that is counted.
    since: Option<Instant>,
    count: u64,
    /// When each source will have been forgiven everything; an IPv6 network of 64 bits is one source.
    forgiven: HashMap<IpAddr, Instant>,
    swept: Option<Instant>,
}

impl Sources {
    /// Whether an initiation that came from there now is looked at.
    pub(super) fn allow(&self, source: IpAddr, now: Instant) -> bool {
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
        let source = network(source);
        if state.forgiven.len() >= SOURCES && !state.forgiven.contains_key(&source) {
            let again = state
                .swept
                .is_none_or(|swept| now.saturating_duration_since(swept) >= EVERY * AT_ONCE);
            if again {
                state.swept = Some(now);
                state.forgiven.retain(|_, at| *at > now);
            }
            if state.forgiven.len() >= SOURCES {
                return false;
            }
        }
        let at = state.forgiven.entry(source).or_insert(now);
        let next = (*at).max(now) + EVERY;
        if next > now + EVERY * AT_ONCE {
            return false;
        }
        *at = next;
        true
    }
}

fn network(source: IpAddr) -> IpAddr {
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
    fn in_a_quiet_second_a_source_may_send_as_it_likes() {
        let (sources, now) = (Sources::default(), Instant::now());
        assert!((0..INITIATIONS_PER_SECOND).all(|_| sources.allow(v4(1), now)));
        assert!((0..AT_ONCE).all(|_| sources.allow(v4(1), now)));
        assert!(!sources.allow(v4(1), now));
        assert!(sources.allow(v4(1), now + Duration::from_secs(1)));
    }

    #[test]
    fn under_load_each_source_has_its_own_measure() {
        let (sources, now) = (Sources::default(), Instant::now());
        (0..INITIATIONS_PER_SECOND).for_each(|_| assert!(sources.allow(v4(9), now)));
        let allowed = |source: IpAddr, at| (0..100).filter(|_| sources.allow(source, at)).count();
        assert_eq!(allowed(v4(1), now), 5);
        assert_eq!(allowed(v4(2), now), 5);
        assert_eq!(allowed(v4(1), now + EVERY * 2), 2);
        assert_eq!(allowed("2001:db8::1".parse().unwrap(), now), 5);
        assert_eq!(allowed("2001:db8::2".parse().unwrap(), now), 0);
        assert_eq!(allowed("2001:db8:0:1::2".parse().unwrap(), now), 5);
    }

    #[test]
    fn more_sources_than_are_remembered_wait_until_others_are_forgotten() {
        let (sources, now) = (Sources::default(), Instant::now());
        (0..INITIATIONS_PER_SECOND).for_each(|_| assert!(sources.allow(v4(0), now)));
        let all = (1..=20_000).filter(|number| sources.allow(v4(*number), now)).count();
        assert_eq!(all, SOURCES);
        assert!(!sources.allow(v4(30_000), now + EVERY), "not swept again so soon");
        assert!(sources.allow(v4(30_000), now + EVERY * AT_ONCE));
        assert_eq!(sources.0.lock().unwrap().forgiven.len(), 1);
    }
}
