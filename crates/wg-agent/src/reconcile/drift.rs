//! Remembers what passes applied, to decide what must be observed again after external changes, and to count repairs. A
//! pass itself does not distinguish a new change from the repair of a lost one.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    time::{Duration, Instant},
};

use clustermesh_agent_core::{
    device::{self, ObservedPeer, PeerChange, PeerSpec, PeerStats, Peers},
    firewall::Firewall,
    routes::{Change, Routes, diff},
    sysctl::{Name, Sysctl},
};
use clustermesh_core::key::PublicKey;

use super::Reconciler;
use crate::{
    firewall::Backend,
    kernel_events::Event,
    route::{Routing, RoutingEvent, sysctl},
    source::underlay::Underlay,
};

/// The node's network is read again at least this often. Reading it dumps the main table, which a routing daemon may
/// have filled.
const UNDERLAY_AGE: Duration = Duration::from_secs(30);

/// State that is remembered from pass to pass.
#[derive(Debug, Default)]
pub(super) struct Drift {
    /// The InternalIPs of the Node, the network that was read for them, and when.
    underlay: Option<(BTreeSet<IpAddr>, Underlay, Instant)>,
    /// An event about our routing or the device arrived.
    device_in_doubt: bool,
    /// The routes in the kernel after the last pass; `None` = not all could be applied.
    routes: Option<Routes>,
    firewall: Option<Firewall>,
    /// The peers that the device was given; `None` = it was opened since.
    peers: Option<Peers>,
    /// Settings that were right after the last pass.
    settings: BTreeSet<Name>,
}

impl Drift {
    /// Marks what this event makes doubtful.
    pub(super) fn note_event(&mut self, event: Event) {
        match event {
            Event::Routing(RoutingEvent::Underlay) => self.underlay = None,
            // A /32 or /128 of the underlay is reported as one of ours.
            Event::Routing(RoutingEvent::Ours) | Event::Unknown => {
                self.underlay = None;
                self.device_in_doubt = true;
            }
            Event::Tables | Event::Resolvers | Event::Routing(RoutingEvent::Settings) => {}
        }
    }

    /// The node's network, if it was read for these InternalIPs, recently, and no event made it doubtful.
    pub(super) fn underlay(&self, internal: &BTreeSet<IpAddr>, now: Instant) -> Option<&Underlay> {
        let (of, underlay, at) = self.underlay.as_ref()?;
        (of == internal && now.saturating_duration_since(*at) < UNDERLAY_AGE).then_some(underlay)
    }

    /// Stores the network as it was read.
    pub(super) fn store_underlay(&mut self, internal: BTreeSet<IpAddr>, underlay: Underlay, now: Instant) {
        self.underlay = Some((internal, underlay, now));
    }

    /// Whether the device must be observed to see if it still exists; clears the doubt.
    pub(super) fn take_device_in_doubt(&mut self) -> bool {
        std::mem::take(&mut self.device_in_doubt)
    }

    /// A pass applied `desired` by the changes `done`; `whole` = none failed. Returns how many changes were repairs:
    /// those that the new desired state does not explain.
    pub(super) fn count_repaired_routes(&mut self, desired: &Routes, done: &[Change], whole: bool) -> usize {
        let before = self.routes.take();
        let repaired = before.map_or(0, |before| {
            let wanted: BTreeSet<String> = diff(&before, desired)
                .into_iter()
                .flatten()
                .map(|c| c.to_string())
                .collect();
            done.iter()
                .filter(|change| !wanted.contains(&change.to_string()))
                .count()
        });
        self.routes = whole.then(|| desired.clone());
        repaired
    }

    /// A pass checked the settings. Returns how many were right after the last pass and had to be written again.
    pub(super) fn count_repaired_settings(&mut self, wanted: &[Sysctl], pass: &sysctl::Outcome) -> usize {
        let repaired = pass.written.intersection(&self.settings).count();
        let is_missing = |name: &Name| pass.missing.iter().any(|missing| missing.sysctl.name == *name);
        let right = wanted
            .iter()
            .map(|sysctl| &sysctl.name)
            .filter(|name| !is_missing(name));
        self.settings = right.cloned().collect();
        repaired
    }

    /// A pass applied the table `desired`; `written` = it had to be written. Returns whether that was a repair: the
    /// desired table is unchanged.
    pub(super) fn is_firewall_repair(&mut self, desired: &Firewall, written: bool) -> bool {
        let same = self.firewall.as_ref() == Some(desired);
        if !same {
            self.firewall = Some(desired.clone());
        }
        same && written
    }

    /// A pass applied the peers `desired` by the changes `done`. Returns how many changes were repairs.
    pub(super) fn count_repaired_peers(&mut self, desired: &Peers, done: &[PeerChange]) -> usize {
        if self.peers.as_ref() == Some(desired) {
            return done.len();
        }
        let before = self.peers.replace(desired.clone());
        before.map_or(0, |before| {
            let held = |(key, configured): (&PublicKey, &PeerSpec)| {
                let peer = ObservedPeer {
                    configured: configured.clone(),
                    stats: PeerStats::default(),
                };
                (*key, peer)
            };
            let wanted = device::diff(&before.iter().map(held).collect(), desired).unwrap_or_default();
            done.iter().filter(|change| !wanted.contains(change)).count()
        })
    }

    /// The device was opened: differences in it are no external changes, and a new interface has none of the old
    /// settings.
    pub(super) fn reset_device(&mut self) {
        self.peers = None;
        self.settings.retain(|name| matches!(name, Name::Global(_)));
    }
}

impl<R: Routing, F: Backend> Reconciler<R, F> {
    /// Takes note of an event for the next pass.
    pub(crate) fn note_event(&mut self, event: Event) {
        self.drift.note_event(event);
    }
}

#[cfg(test)]
mod tests {
    use clustermesh_agent_core::routes::{Plan, desired};

    use super::*;

    fn routes(peers: &[&str]) -> Routes {
        desired(&Plan {
            peers: peers.iter().map(|net| net.parse().unwrap()).collect(),
            mesh: ["10.1.0.0/16".parse().unwrap()].into(),
            ..Plan::default()
        })
    }

    #[test]
    fn only_unexplained_route_changes_are_repairs() {
        let (one, two) = (routes(&["10.1.0.0/24"]), routes(&["10.1.0.0/24", "10.1.1.0/24"]));
        let all = diff(&Routes::default(), &one).unwrap();
        let added = diff(&one, &two).unwrap();
        let mut drift = Drift::default();
        assert_eq!(
            drift.count_repaired_routes(&one, &all, true),
            0,
            "the first pass of a process"
        );
        assert_eq!(drift.count_repaired_routes(&two, &added, true), 0, "a new peer");
        assert_eq!(
            drift.count_repaired_routes(&two, &added, true),
            1,
            "its route was deleted"
        );
        let both: Vec<Change> = diff(&two, &one).unwrap().into_iter().chain(all.clone()).collect();
        assert_eq!(
            drift.count_repaired_routes(&one, &both, true),
            all.len(),
            "a peer is removed, and another program flushed the table"
        );
        assert_eq!(drift.count_repaired_routes(&one, &[], false), 0);
        assert_eq!(
            drift.count_repaired_routes(&one, &all, true),
            0,
            "a change that failed before is no repair"
        );
    }

    #[test]
    fn only_unexplained_peer_changes_are_repairs() {
        let key = |n| PublicKey::new([n; 32]);
        let both: Peers = [1, 2].map(|n| (key(n), PeerSpec::default())).into();
        let one: Peers = [(key(1), PeerSpec::default())].into();
        let add = |n| PeerChange::Add(key(n), PeerSpec::default());
        let mut drift = Drift::default();
        assert_eq!(
            drift.count_repaired_peers(&one, &[PeerChange::Remove(key(9))]),
            0,
            "the first pass of a process"
        );
        assert_eq!(drift.count_repaired_peers(&both, &[add(2)]), 0, "a new peer");
        assert_eq!(drift.count_repaired_peers(&both, &[add(2)]), 1, "it was deleted");
        assert_eq!(
            drift.count_repaired_peers(&one, &[PeerChange::Remove(key(2)), PeerChange::Remove(key(7))]),
            1,
            "a peer is removed, and another program had added one"
        );
        drift.reset_device();
        assert_eq!(
            drift.count_repaired_peers(&one, &[add(1)]),
            0,
            "a device that was opened again"
        );
    }

    #[test]
    fn rewritten_setting_that_was_right_is_a_repair() {
        let global = Name::Global("ipv4/fwmark_reflect");
        let own = Name::Interface("kilo0".parse().unwrap(), "rp_filter");
        let wanted = [global.clone(), own.clone()].map(|name| Sysctl {
            name,
            value: 1,
            accept: [1].into(),
            write: true,
            why: "",
        });
        let pass = |written: &[&Name], missing: &[usize]| sysctl::Outcome {
            written: written.iter().copied().cloned().collect(),
            missing: missing
                .iter()
                .map(|at| sysctl::Missing {
                    sysctl: wanted[*at].clone(),
                    found: String::new(),
                    error: None,
                })
                .collect(),
        };
        let mut drift = Drift::default();
        assert_eq!(
            drift.count_repaired_settings(&wanted, &pass(&[&own], &[0])),
            0,
            "a start"
        );
        assert_eq!(
            drift.count_repaired_settings(&wanted, &pass(&[&global], &[])),
            0,
            "it could not be written before"
        );
        assert_eq!(drift.count_repaired_settings(&wanted, &pass(&[], &[])), 0);
        assert_eq!(drift.count_repaired_settings(&wanted, &pass(&[&global, &own], &[])), 2);
        drift.reset_device();
        assert_eq!(
            drift.count_repaired_settings(&wanted, &pass(&[&own], &[])),
            0,
            "another interface"
        );
    }

    #[test]
    fn underlay_is_read_again_after_an_event_or_with_age() {
        let underlay = Underlay {
            interface: "eth0".parse().unwrap(),
            mtu: 1500,
            addresses: [].into(),
            next_hops: [].into(),
        };
        let (now, internal) = (Instant::now(), BTreeSet::from(["192.0.2.1".parse().unwrap()]));
        let mut drift = Drift::default();
        let known = |drift: &Drift, of: &BTreeSet<IpAddr>, seconds| {
            drift.underlay(of, now + Duration::from_secs(seconds)).is_some()
        };
        assert!(!known(&drift, &internal, 0));
        drift.store_underlay(internal.clone(), underlay.clone(), now);
        assert_eq!([0, 29, 30].map(|s| known(&drift, &internal, s)), [true, true, false]);
        assert!(!known(&drift, &BTreeSet::new(), 0), "the Node has other addresses");
        for (event, still) in [
            (Event::Tables, true),
            (Event::Resolvers, true),
            (Event::Routing(RoutingEvent::Settings), true),
            (Event::Routing(RoutingEvent::Underlay), false),
            (Event::Routing(RoutingEvent::Ours), false),
            (Event::Unknown, false),
        ] {
            drift.store_underlay(internal.clone(), underlay.clone(), now);
            drift.note_event(event);
            assert_eq!(known(&drift, &internal, 0), still, "{event:?}");
        }
    }
}
