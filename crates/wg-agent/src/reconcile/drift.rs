//! What others did to the node since the last pass: what has to be looked at again because of it, and how much of what a pass
//! did put something back. A pass itself makes no difference between what is new and what was lost.

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
    heard::Event,
    route::{News, Routing, sysctl},
    source::underlay::Underlay,
};

/// The node's network is read again after so long, whatever was heard: reading it costs a dump of its main table, which a
/// routing daemon may have filled.
const UNDERLAY_AGE: Duration = Duration::from_secs(30);

/// What is remembered from pass to pass.
#[derive(Debug, Default)]
pub(super) struct Drift {
    /// The node's network as it was read for these InternalIPs.
    underlay: Option<(BTreeSet<IpAddr>, Underlay, Instant)>,
    /// Somebody was at our routing or at the device.
    device_in_doubt: bool,
    /// What the kernel was brought to, as far as all of it could be.
    routes: Option<Routes>,
    firewall: Option<Firewall>,
    /// Whom the device was told to hold; `None` = it was opened since.
    peers: Option<Peers>,
    /// The settings that were right after the last pass.
    settings: BTreeSet<Name>,
}

impl Drift {
    /// Takes over what was heard.
    pub(super) fn hear(&mut self, event: Event) {
        match event {
            Event::Routing(News::Underlay) => self.underlay = None,
            // An address of the node's own may look like ours.
            Event::Routing(News::Ours) | Event::Anything => {
                self.underlay = None;
                self.device_in_doubt = true;
            }
            Event::Tables | Event::Resolvers | Event::Routing(News::Settings) => {}
        }
    }

    /// The node's network, if it was read for these InternalIPs and nothing was heard since.
    pub(super) fn underlay(&self, internal: &BTreeSet<IpAddr>, now: Instant) -> Option<&Underlay> {
        let (of, underlay, at) = self.underlay.as_ref()?;
        (of == internal && now.saturating_duration_since(*at) < UNDERLAY_AGE).then_some(underlay)
    }

    /// It was read.
    pub(super) fn saw(&mut self, internal: BTreeSet<IpAddr>, underlay: Underlay, now: Instant) {
        self.underlay = Some((internal, underlay, now));
    }

    /// Whether the device has to be asked if it is still there; asks once.
    pub(super) fn doubts_device(&mut self) -> bool {
        std::mem::take(&mut self.device_in_doubt)
    }

    /// A pass brought the routing to `desired`, by the changes `done`; `whole` = none failed. Returns how many of them no
    /// change of what is wanted explains.
    pub(super) fn routed(&mut self, desired: &Routes, done: &[Change], whole: bool) -> usize {
        let before = self.routes.take();
        let put_back = before.map_or(0, |before| {
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
        put_back
    }

    /// Settings were looked at. Returns how many were right before and had to be written.
    pub(super) fn set(&mut self, wanted: &[Sysctl], pass: &sysctl::Pass) -> usize {
        let put_back = pass.written.intersection(&self.settings).count();
        let missing = |name: &Name| pass.missing.iter().any(|missing| missing.sysctl.name == *name);
        let right = wanted.iter().map(|sysctl| &sysctl.name).filter(|name| !missing(name));
        self.settings = right.cloned().collect();
        put_back
    }

    /// A pass brought the table to `desired`; `written` = something had to be. Returns whether nothing that is wanted
    /// explains it.
    pub(super) fn filtered(&mut self, desired: &Firewall, written: bool) -> bool {
        let same = self.firewall.as_ref() == Some(desired);
        if !same {
            self.firewall = Some(desired.clone());
        }
        same && written
    }

    /// A pass brought the device's peers to `desired` by these changes. Returns how many of them no change of what is wanted
    /// explains.
    pub(super) fn peopled(&mut self, desired: &Peers, done: &[PeerChange]) -> usize {
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

    /// The device was opened: whatever it holds is no work of another hand, and a new interface has no setting of the old one's.
    pub(super) fn emptied(&mut self) {
        self.peers = None;
        self.settings.retain(|name| matches!(name, Name::Global(_)));
    }
}

impl<R: Routing, F: Backend> Reconciler<R, F> {
    /// Something was heard: the next pass looks at it.
    pub(crate) fn hear(&mut self, event: Event) {
        self.drift.hear(event);
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
    fn only_what_nobody_asked_for_counts_as_put_back() {
        let (one, two) = (routes(&["10.1.0.0/24"]), routes(&["10.1.0.0/24", "10.1.1.0/24"]));
        let all = diff(&Routes::default(), &one).unwrap();
        let added = diff(&one, &two).unwrap();
        let mut drift = Drift::default();
        assert_eq!(drift.routed(&one, &all, true), 0, "a start takes over what it finds");
        assert_eq!(drift.routed(&two, &added, true), 0, "a new peer");
        assert_eq!(drift.routed(&two, &added, true), 1, "its route was taken away");
        let both: Vec<Change> = diff(&two, &one).unwrap().into_iter().chain(all.clone()).collect();
        assert_eq!(
            drift.routed(&one, &both, true),
            all.len(),
            "a peer goes, and somebody flushed the table"
        );
        assert_eq!(drift.routed(&one, &[], false), 0);
        assert_eq!(
            drift.routed(&one, &all, true),
            0,
            "what could not be made before is not put back"
        );
    }

    #[test]
    fn peers_that_nobody_asked_to_change_count_as_put_back() {
        let key = |n| PublicKey::new([n; 32]);
        let both: Peers = [1, 2].map(|n| (key(n), PeerSpec::default())).into();
        let one: Peers = [(key(1), PeerSpec::default())].into();
        let add = |n| PeerChange::Add(key(n), PeerSpec::default());
        let mut drift = Drift::default();
        assert_eq!(
            drift.peopled(&one, &[PeerChange::Remove(key(9))]),
            0,
            "a start takes over what it finds"
        );
        assert_eq!(drift.peopled(&both, &[add(2)]), 0, "a new peer");
        assert_eq!(drift.peopled(&both, &[add(2)]), 1, "it was taken away");
        assert_eq!(
            drift.peopled(&one, &[PeerChange::Remove(key(2)), PeerChange::Remove(key(7))]),
            1,
            "a peer goes, and somebody had added another"
        );
        drift.emptied();
        assert_eq!(drift.peopled(&one, &[add(1)]), 0, "a device that was opened anew");
    }

    #[test]
    fn a_setting_that_was_right_and_is_written_again_counts_as_put_back() {
        let global = Name::Global("ipv4/fwmark_reflect");
        let own = Name::Interface("kilo0".parse().unwrap(), "rp_filter");
        let wanted = [global.clone(), own.clone()].map(|name| Sysctl {
            name,
            value: 1,
            accept: [1].into(),
            write: true,
            why: "",
        });
        let pass = |written: &[&Name], missing: &[usize]| sysctl::Pass {
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
        assert_eq!(drift.set(&wanted, &pass(&[&own], &[0])), 0, "a start");
        assert_eq!(
            drift.set(&wanted, &pass(&[&global], &[])),
            0,
            "it could not be written before"
        );
        assert_eq!(drift.set(&wanted, &pass(&[], &[])), 0);
        assert_eq!(drift.set(&wanted, &pass(&[&global, &own], &[])), 2);
        drift.emptied();
        assert_eq!(drift.set(&wanted, &pass(&[&own], &[])), 0, "another interface");
    }

    #[test]
    fn the_nodes_network_is_read_again_when_something_was_heard_or_it_is_old() {
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
        drift.saw(internal.clone(), underlay.clone(), now);
        assert_eq!([0, 29, 30].map(|s| known(&drift, &internal, s)), [true, true, false]);
        assert!(!known(&drift, &BTreeSet::new(), 0), "the Node has other addresses");
        for (event, still) in [
            (Event::Tables, true),
            (Event::Resolvers, true),
            (Event::Routing(News::Settings), true),
            (Event::Routing(News::Underlay), false),
            (Event::Routing(News::Ours), false),
            (Event::Anything, false),
        ] {
            drift.saw(internal.clone(), underlay.clone(), now);
            drift.hear(event);
            assert_eq!(known(&drift, &internal, 0), still, "{event:?}");
        }
    }
}
