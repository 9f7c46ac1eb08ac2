//! Counts repairs: changes by which a pass undoes what another program did since the previous pass. They restore what the
//! previous pass had applied, or delete what it had not applied.

use std::collections::BTreeSet;

use clustermesh_agent_core::{
    device::{PeerChange, Peers},
    firewall::Firewall,
    routes::{Change, Routes},
    sysctl::{Name, Sysctl},
};

use crate::route::sysctl;

/// Counts repairs. Contains the state that the previous pass applied; `None` = that part was not applied, or not completely. Each `count_*`
/// method also records what the pass applied.
#[derive(Debug, Default)]
pub(super) struct RepairCounter {
    firewall: Option<Firewall>,
    routes: Option<Routes>,
    peers: Option<Peers>,
    /// Settings that had an accepted value after the previous pass.
    settings: BTreeSet<Name>,
}

impl RepairCounter {
    /// Counts the repairs of a pass that applied the table `desired`; `written` = the kernel's table differed and was written.
    pub(super) fn count_firewall_repairs(&mut self, desired: &Firewall, written: bool) -> usize {
        if self.firewall.as_ref() == Some(desired) {
            return usize::from(written);
        }
        self.firewall = Some(desired.clone());
        0
    }

    /// Counts the repairs of a pass that applied `desired` by the changes `done`; `is_complete` = no change failed or was left
    /// out.
    pub(super) fn count_route_repairs(&mut self, desired: &Routes, done: &[Change], is_complete: bool) -> usize {
        let last = self.routes.take();
        let is_repair = |change: &&Change| last.as_ref().is_some_and(|last| is_route_repair(last, change));
        let repaired = done.iter().filter(is_repair).count();
        self.routes = is_complete.then(|| desired.clone());
        repaired
    }

    /// Counts the repairs of a pass that applied `desired` by the changes `done`.
    pub(super) fn count_peer_repairs<'a>(
        &mut self,
        desired: &Peers,
        done: impl IntoIterator<Item = &'a PeerChange>,
    ) -> usize {
        let repaired = self.peers.as_ref().map_or(0, |last| {
            let is_repair = |change: &&PeerChange| match change {
                PeerChange::Add(key, _) => last.contains_key(key),
                PeerChange::Update(key, _) => last.get(key) == desired.get(key),
                PeerChange::Remove(key) => !last.contains_key(key),
            };
            done.into_iter().filter(is_repair).count()
        });
        if self.peers.as_ref() != Some(desired) {
            self.peers = Some(desired.clone());
        }
        repaired
    }

    /// Counts the repairs of a pass that applied the settings `desired`.
    pub(super) fn count_setting_repairs(&mut self, desired: &[Sysctl], outcome: &sysctl::Outcome) -> usize {
        let repaired = outcome.written.intersection(&self.settings).count();
        let is_wrong = |name: &Name| outcome.wrong.iter().any(|wrong| wrong.sysctl.name == *name);
        let correct = desired.iter().map(|sysctl| &sysctl.name).filter(|name| !is_wrong(name));
        self.settings = correct.cloned().collect();
        repaired
    }

    /// Records that the device was opened. The device may lack its peers, and a new interface lacks its settings. To add these
    /// peers or to write these settings is not a repair.
    pub(super) fn forget_device(&mut self) {
        self.peers = None;
        self.settings.retain(|name| matches!(name, Name::Global(_)));
    }
}

/// Whether the change writes an object that the previous pass had applied, or deletes one that it had not applied.
fn is_route_repair(last: &Routes, change: &Change) -> bool {
    match change {
        Change::AddAddress(address) => last.addresses.contains(address),
        Change::AddRoute(route) | Change::ReplaceRoute(route) => last.routes.contains(route),
        Change::AddRule(rule) => last.rules.contains(rule),
        Change::DeleteRule(rule) => !last.rules.contains(rule),
        Change::DeleteRoute(route) => !last.routes.contains(route),
        Change::DeleteAddress(address) => !last.addresses.contains(address),
    }
}

#[cfg(test)]
mod tests {
    use clustermesh_agent_core::{
        device::PeerSpec,
        routes::{Plan, desired, diff},
    };
    use clustermesh_core::key::PublicKey;

    use super::*;

    fn routes(peers: &[&str]) -> Routes {
        desired(&Plan {
            peers: peers.iter().map(|net| net.parse().unwrap()).collect(),
            mesh: ["10.1.0.0/16".parse().unwrap()].into(),
            ..Plan::default()
        })
    }

    #[test]
    fn route_change_that_restores_the_previous_state_is_counted() {
        let (one, two) = (routes(&["10.1.0.0/24"]), routes(&["10.1.0.0/24", "10.1.1.0/24"]));
        let all = diff(&Routes::default(), &one).unwrap();
        let added = diff(&one, &two).unwrap();
        let mut counter = RepairCounter::default();
        assert_eq!(
            counter.count_route_repairs(&one, &all, true),
            0,
            "the first pass of a process"
        );
        assert_eq!(counter.count_route_repairs(&two, &added, true), 0, "a new peer");
        assert_eq!(counter.count_route_repairs(&two, &added, true), 1, "deleted route");
        let both: Vec<Change> = diff(&two, &one).unwrap().into_iter().chain(all.clone()).collect();
        assert_eq!(
            counter.count_route_repairs(&one, &both, true),
            all.len(),
            "a peer is removed, and another program flushed the table"
        );
        assert_eq!(counter.count_route_repairs(&one, &[], false), 0);
        assert_eq!(
            counter.count_route_repairs(&one, &all, true),
            0,
            "the previous pass was incomplete"
        );
    }

    #[test]
    fn peer_change_that_restores_the_previous_state_is_counted() {
        let key = |n| PublicKey::new([n; 32]);
        let both: Peers = [1, 2].map(|n| (key(n), PeerSpec::default())).into();
        let one: Peers = [(key(1), PeerSpec::default())].into();
        let add = |n| PeerChange::Add(key(n), PeerSpec::default());
        let mut counter = RepairCounter::default();
        assert_eq!(
            counter.count_peer_repairs(&one, &[PeerChange::Remove(key(9))]),
            0,
            "the first pass of a process"
        );
        assert_eq!(counter.count_peer_repairs(&both, &[add(2)]), 0, "a new peer");
        assert_eq!(counter.count_peer_repairs(&both, &[add(2)]), 1, "deleted peer");
        assert_eq!(
            counter.count_peer_repairs(&one, &[PeerChange::Remove(key(2)), PeerChange::Remove(key(7))]),
            1,
            "a peer is removed, and another program had added one"
        );
        counter.forget_device();
        assert_eq!(
            counter.count_peer_repairs(&one, &[add(1)]),
            0,
            "the device was opened again"
        );
    }

    #[test]
    fn setting_that_is_written_again_is_a_repair() {
        let global = Name::Global("ipv4/fwmark_reflect");
        let own = Name::Interface("kilo0".parse().unwrap(), "rp_filter");
        let settings = [global.clone(), own.clone()].map(|name| Sysctl {
            name,
            value: 1,
            accept: [1].into(),
            write: true,
            why: "",
        });
        let pass = |written: &[&Name], wrong: &[usize]| sysctl::Outcome {
            written: written.iter().copied().cloned().collect(),
            wrong: wrong
                .iter()
                .map(|at| sysctl::WrongSetting {
                    sysctl: settings[*at].clone(),
                    found: String::new(),
                    error: None,
                })
                .collect(),
        };
        let mut counter = RepairCounter::default();
        assert_eq!(
            counter.count_setting_repairs(&settings, &pass(&[&own], &[0])),
            0,
            "startup"
        );
        assert_eq!(
            counter.count_setting_repairs(&settings, &pass(&[&global], &[])),
            0,
            "the previous pass could not write it"
        );
        assert_eq!(counter.count_setting_repairs(&settings, &pass(&[], &[])), 0);
        assert_eq!(
            counter.count_setting_repairs(&settings, &pass(&[&global, &own], &[])),
            2
        );
        counter.forget_device();
        assert_eq!(
            counter.count_setting_repairs(&settings, &pass(&[&own], &[])),
            0,
            "a new interface"
        );
    }
}
