//! The node's own network as it was last read. Reading it dumps the main routing table, so it is read again only after an
//! event, or with age.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    time::{Duration, Instant},
};

use crate::{kernel_events::Event, route::RoutingEvent, source::underlay::Underlay};

/// The network is read again at least this often.
const MAX_AGE: Duration = Duration::from_secs(30);

/// The last reading, if it still counts.
#[derive(Debug, Default)]
pub(super) struct KnownUnderlay(Option<Reading>);

#[derive(Debug)]
struct Reading {
    /// The InternalIPs of the Node for which it was read.
    internal: BTreeSet<IpAddr>,
    underlay: Underlay,
    at: Instant,
}

impl KnownUnderlay {
    /// Forgets the reading if the event may have changed the network.
    pub(super) fn note_event(&mut self, event: Event) {
        match event {
            // A /32 or /128 of the underlay is reported as one of ours.
            Event::Routing(RoutingEvent::Underlay | RoutingEvent::Ours) | Event::Unknown => self.0 = None,
            Event::Tables | Event::Resolvers | Event::Routing(RoutingEvent::Settings) => {}
        }
    }

    /// The network, if it was read for these InternalIPs, recently, and no event since then may have changed it.
    pub(super) fn get(&self, internal: &BTreeSet<IpAddr>, now: Instant) -> Option<&Underlay> {
        let reading = self.0.as_ref()?;
        let is_valid = reading.internal == *internal && now.saturating_duration_since(reading.at) < MAX_AGE;
        is_valid.then_some(&reading.underlay)
    }

    /// Stores the network as it was read.
    pub(super) fn set(&mut self, internal: BTreeSet<IpAddr>, underlay: Underlay, at: Instant) {
        self.0 = Some(Reading { internal, underlay, at });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn underlay_is_read_again_after_an_event_or_with_age() {
        let underlay = Underlay {
            interface: "eth0".parse().unwrap(),
            mtu: 1500,
            addresses: [].into(),
            next_hops: [].into(),
        };
        let (now, internal) = (Instant::now(), BTreeSet::from(["192.0.2.1".parse().unwrap()]));
        let mut known_underlay = KnownUnderlay::default();
        let is_known = |known: &KnownUnderlay, of: &BTreeSet<IpAddr>, seconds| {
            known.get(of, now + Duration::from_secs(seconds)).is_some()
        };
        assert!(!is_known(&known_underlay, &internal, 0));
        known_underlay.set(internal.clone(), underlay.clone(), now);
        assert_eq!(
            [0, 29, 30].map(|s| is_known(&known_underlay, &internal, s)),
            [true, true, false]
        );
        assert!(
            !is_known(&known_underlay, &BTreeSet::new(), 0),
            "the Node has other addresses"
        );
        for (event, still) in [
            (Event::Tables, true),
            (Event::Resolvers, true),
            (Event::Routing(RoutingEvent::Settings), true),
            (Event::Routing(RoutingEvent::Underlay), false),
            (Event::Routing(RoutingEvent::Ours), false),
            (Event::Unknown, false),
        ] {
            known_underlay.set(internal.clone(), underlay.clone(), now);
            known_underlay.note_event(event);
            assert_eq!(is_known(&known_underlay, &internal, 0), still, "{event:?}");
        }
    }
}
