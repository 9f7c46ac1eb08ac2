//! Everything seen so far in one place, and a bell that rings when it changes; what follows from it is decided elsewhere.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kube::runtime::watcher;
use tokio::sync::Notify;

use super::{
    lookup::Addresses,
    objects::{NodeSeen, PeerSeen, PolicySeen},
    watch::{Seen, Sink},
};
use crate::{cache::Saved, metrics::Metrics};

/// What was seen.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct World {
    /// Peers of this cluster.
    pub peers: Seen<PeerSeen>,
    /// PeerPolicies of this cluster.
    pub policies: Seen<PolicySeen>,
    /// Nodes of this cluster.
    pub nodes: Seen<NodeSeen>,
    /// The API server's endpoints, by EndpointSlice.
    pub api_servers: Seen<BTreeSet<SocketAddr>>,
    /// Names that were looked up.
    pub addresses: Addresses,
    /// Why a kind cannot be followed at present.
    pub errors: BTreeMap<&'static str, String>,
    /// The kinds that the API server refuses to show (401, 403).
    pub refused: BTreeSet<&'static str>,
}

impl World {
    /// The kinds that have not been listed yet.
    #[must_use]
    pub fn pending(&self) -> Vec<&'static str> {
        let Self {
            peers,
            policies,
            nodes,
            api_servers,
            addresses: _,
            errors: _,
            refused: _,
        } = self;
        [
            ("Peer", *peers == Seen::Pending),
            ("PeerPolicy", *policies == Seen::Pending),
            ("Node", *nodes == Seen::Pending),
            ("EndpointSlice", *api_servers == Seen::Pending),
        ]
        .into_iter()
        .filter_map(|(kind, pending)| pending.then_some(kind))
        .collect()
    }

    /// The kinds of which only what an earlier process kept is known.
    #[must_use]
    pub fn remembered(&self) -> Vec<&'static str> {
        let Self {
            peers,
            policies,
            nodes,
            api_servers,
            addresses: _,
            errors: _,
            refused: _,
        } = self;
        [
            ("Peer", matches!(peers, Seen::Remembered(_))),
            ("PeerPolicy", matches!(policies, Seen::Remembered(_))),
            ("Node", matches!(nodes, Seen::Remembered(_))),
            ("EndpointSlice", matches!(api_servers, Seen::Remembered(_))),
        ]
        .into_iter()
        .filter_map(|(kind, remembered)| remembered.then_some(kind))
        .collect()
    }

    /// Takes for every kind that was not listed yet what an earlier process kept. True when there was one.
    fn remember(&mut self, saved: Saved) -> bool {
        fn take<V>(seen: &mut Seen<V>, objects: BTreeMap<String, V>) -> bool {
            let pending = matches!(seen, Seen::Pending);
            if pending {
                *seen = Seen::Remembered(objects);
            }
            pending
        }
        let Saved {
            peers,
            policies,
            nodes,
            api_servers,
            addresses,
        } = saved;
        for (name, address) in addresses {
            self.addresses.entry(name).or_insert(address);
        }
        let taken = [
            take(&mut self.peers, peers),
            take(&mut self.policies, policies),
            take(&mut self.nodes, nodes),
            take(&mut self.api_servers, api_servers),
        ];
        taken.contains(&true)
    }

    /// Whether the API server still says that all this is so, as far as can be told. Of Nodes something is heard every few
    /// minutes; a watch of other kinds that stands again after a failure says nothing until something changes.
    #[must_use]
    pub fn current(&self) -> bool {
        self.pending().is_empty()
            && self.remembered().is_empty()
            && self.refused.is_empty()
            && !self.errors.contains_key("Node")
    }

    /// The kinds whose CRD is missing.
    #[must_use]
    pub fn absent(&self) -> Vec<&'static str> {
        let kinds = [
            ("Peer", self.peers == Seen::Absent),
            ("PeerPolicy", self.policies == Seen::Absent),
        ];
        kinds
            .into_iter()
            .filter_map(|(kind, absent)| absent.then_some(kind))
            .collect()
    }
}

/// The one place. Cheap to clone; all clones are one.
#[derive(Debug, Clone, Default)]
pub struct Store {
    world: Arc<Mutex<World>>,
    bell: Arc<Notify>,
    /// For PeerPolicies alone.
    policies: Arc<Notify>,
    metrics: Metrics,
    /// Until it is used, or not needed any more.
    saved: Arc<Mutex<Option<Saved>>>,
}

impl Store {
    /// Nothing seen yet; `saved` is what an earlier process kept for the case that the API server is away.
    #[must_use]
    pub fn new(metrics: Metrics, saved: Option<Saved>) -> Self {
        Self {
            metrics,
            saved: Arc::new(Mutex::new(saved)),
            ..Self::default()
        }
    }

    /// The API server has not told everything by now: works from what an earlier process kept, as far as it did. What was
    /// listed stays, and the first list of a kind replaces what is kept of it.
    pub fn remember(&self) {
        let saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner).take();
        if saved.is_some_and(|saved| self.lock().remember(saved)) {
            self.bell.notify_one();
        }
    }

    /// A copy of what is known now.
    #[must_use]
    pub fn world(&self) -> World {
        self.lock().clone()
    }

    /// Waits until something changed since the last time this returned. For one waiter.
    pub async fn changed(&self) {
        self.bell.notified().await;
    }

    /// Waits until a PeerPolicy changed since the last time this returned. For one waiter.
    pub async fn policies_changed(&self) {
        self.policies.notified().await;
    }

    /// Wakes the waiter, whatever the reason.
    pub(crate) fn ring(&self) {
        self.bell.notify_one();
    }

    /// New answers of the lookup.
    pub fn set_addresses(&self, addresses: Addresses) {
        self.lock().addresses = addresses;
        self.bell.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The part of a store that one follower fills.
pub(crate) struct Shelf<V> {
    pub(crate) store: Store,
    pub(crate) kind: &'static str,
    pub(crate) part: fn(&mut World) -> &mut Seen<V>,
}

impl<V> Sink<V> for Shelf<V> {
    fn change(&self, change: impl FnOnce(&mut Seen<V>) -> bool + Send) {
        let mut world = self.store.lock();
        let changed = change((self.part)(&mut world));
        let mended = world.errors.remove(self.kind).is_some();
        world.refused.remove(self.kind);
        drop(world);
        if changed {
            self.store.bell.notify_one();
            if self.kind == super::PEER_POLICY {
                self.store.policies.notify_one();
            }
        }
        if mended {
            tracing::info!(kind = self.kind, "following again");
        }
    }

    fn failed(&self, error: &watcher::Error) {
        self.store.metrics.failed("watch");
        // An API server that is down says so many times, in many ways; what we have stays in force.
        let text = error.to_string();
        if self.store.lock().errors.insert(self.kind, text.clone()).is_none() {
            tracing::warn!(
                kind = self.kind,
                error = text,
                "cannot follow this cluster's objects; what is in force stays"
            );
        }
        // One that answers and refuses is not away: what an earlier process was allowed to read may have been taken back.
        let refused = refused(error);
        {
            let mut world = self.store.lock();
            if refused {
                world.refused.insert(self.kind);
            } else {
                world.refused.remove(self.kind);
            }
        }
        if !refused {
            self.store.remember();
        }
        self.store.bell.notify_one();
    }
}

/// Whether the API server answered, and said no.
fn refused(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => matches!(status.code, 401 | 403),
        watcher::Error::WatchError(status) => matches!(status.code, 401 | 403),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named<V: Default>(name: &str) -> BTreeMap<String, V> {
        [(name.to_owned(), V::default())].into()
    }

    #[test]
    fn what_was_kept_stands_in_for_what_was_not_listed_and_only_once() {
        let saved = Saved {
            nodes: named("old"),
            api_servers: named("old"),
            addresses: [("a".to_owned(), "192.0.2.1".parse().unwrap())].into(),
            ..Saved::default()
        };
        let store = Store::new(Metrics::default(), Some(saved));
        store.lock().nodes = Seen::Listed(named("new"));
        assert_eq!(store.world().remembered(), Vec::<&str>::new());
        store.remember();
        let world = store.world();
        assert_eq!(world.remembered(), ["Peer", "PeerPolicy", "EndpointSlice"]);
        assert_eq!(world.pending(), Vec::<&str>::new());
        assert_eq!(world.nodes, Seen::Listed(named("new")));
        assert_eq!(world.api_servers, Seen::Remembered(named("old")));
        assert_eq!(world.addresses.len(), 1);
        store.lock().peers = Seen::Pending;
        store.remember();
        assert_eq!(store.world().pending(), ["Peer"]);
    }

    #[test]
    fn without_anything_kept_there_is_nothing_to_stand_in() {
        let store = Store::new(Metrics::default(), None);
        store.remember();
        assert_eq!(store.world(), World::default());
    }
}
