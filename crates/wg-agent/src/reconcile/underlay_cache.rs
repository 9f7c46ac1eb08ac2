//! Caches the [`Underlay`]: the node's network without the mesh. Reading it dumps the main routing table, so it is read
//! again only after an event that may have changed it, when the Node's InternalIPs change, or after 30 seconds.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    time::{Duration, Instant},
};

use crate::{kernel_events::Event, route::RoutingEvent, source::underlay::Underlay};

/// A pass uses no reading that is older.
const MAX_AGE: Duration = Duration::from_secs(30);

/// The last reading; `None` = the underlay has not been read since the last event that may have changed it.
#[derive(Debug, Default)]
pub(super) struct UnderlayCache(Option<Reading>);

#[derive(Debug)]
struct Reading {
    /// The Node's InternalIPs at the time of the reading.
    internal: BTreeSet<IpAddr>,
    underlay: Underlay,
    at: Instant,
}

impl UnderlayCache {
    /// Forgets the reading if the event may have changed the underlay.
    pub(super) fn record_event(&mut self, event: Event) {
        match event {
            // The watch reports every address with prefix length 32 or 128 as `Ours`, even an address of the underlay.
            Event::Routing(RoutingEvent::Underlay | RoutingEvent::Ours) | Event::Unknown => self.0 = None,
            Event::Nftables | Event::Resolvers | Event::Routing(RoutingEvent::Settings) => {}
        }
    }

    /// The last reading, if it is younger than [`MAX_AGE`] and was made for these InternalIPs.
    pub(super) fn get(&self, internal: &BTreeSet<IpAddr>, now: Instant) -> Option<&Underlay> {
        let reading = self.0.as_ref()?;
        let is_valid = reading.internal == *internal && now.saturating_duration_since(reading.at) < MAX_AGE;
        is_valid.then_some(&reading.underlay)
    }

    /// Stores a reading.
    pub(super) fn set(&mut self, internal: BTreeSet<IpAddr>, underlay: Underlay, at: Instant) {
        self.0 = Some(Reading { internal, underlay, at });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_expires_by_age_event_or_changed_internal_ips() {
        let underlay = Underlay {
            interface: "eth0".parse().unwrap(),
            mtu: 1500,
            addresses: [].into(),
            next_hops: [].into(),
        };
        let (now, internal) = (Instant::now(), BTreeSet::from(["192.0.2.1".parse().unwrap()]));
        let mut underlay_cache = UnderlayCache::default();
        let is_known = |cache: &UnderlayCache, ips: &BTreeSet<IpAddr>, seconds| {
            cache.get(ips, now + Duration::from_secs(seconds)).is_some()
        };
        assert!(!is_known(&underlay_cache, &internal, 0));
        underlay_cache.set(internal.clone(), underlay.clone(), now);
        assert_eq!(
            [0, 29, 30].map(|s| is_known(&underlay_cache, &internal, s)),
            [true, true, false]
        );
        assert!(
            !is_known(&underlay_cache, &BTreeSet::new(), 0),
            "the InternalIPs changed"
        );
        for (event, is_still_known) in [
            (Event::Nftables, true),
            (Event::Resolvers, true),
            (Event::Routing(RoutingEvent::Settings), true),
            (Event::Routing(RoutingEvent::Underlay), false),
            (Event::Routing(RoutingEvent::Ours), false),
            (Event::Unknown, false),
        ] {
            underlay_cache.set(internal.clone(), underlay.clone(), now);
            underlay_cache.record_event(event);
            assert_eq!(is_known(&underlay_cache, &internal, 0), is_still_known, "{event:?}");
        }
    }
}
