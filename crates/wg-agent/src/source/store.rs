//! Stores the latest snapshot of the cluster's objects, and wakes the reconcile loop when it changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kube::runtime::watcher;
use tokio::sync::Notify;

use super::{
    lookup::Addresses,
    objects::{ParsedNode, ParsedPeer, ParsedPolicy},
    watch::{WatchSink, WatchedKind},
};
use crate::{cache::SavedObjects, metrics::Metrics};

/// The observed objects of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClusterSnapshot {
    /// Peers of this cluster.
    pub peers: WatchedKind<ParsedPeer>,
    /// PeerPolicies of this cluster.
    pub policies: WatchedKind<ParsedPolicy>,
    /// Nodes of this cluster.
    pub nodes: WatchedKind<ParsedNode>,
    /// The API server's endpoints, by EndpointSlice.
    pub api_servers: WatchedKind<BTreeSet<SocketAddr>>,
    /// Addresses of host names.
    pub addresses: Addresses,
    /// The last error of each kind whose watch fails.
    pub errors: BTreeMap<&'static str, String>,
    /// Kinds that the API server refuses to list (401, 403).
    pub forbidden_kinds: BTreeSet<&'static str>,
}

impl ClusterSnapshot {
    /// Kinds that are neither listed nor filled from the cache yet, except those whose CRD counts as missing.
    #[must_use]
    pub fn pending_kinds(&self) -> Vec<&'static str> {
        let Self {
            peers,
            policies,
            nodes,
            api_servers,
            addresses: _,
            errors: _,
            forbidden_kinds: _,
        } = self;
        [
            ("Peer", *peers == WatchedKind::Pending),
            ("PeerPolicy", *policies == WatchedKind::Pending),
            ("Node", *nodes == WatchedKind::Pending),
            ("EndpointSlice", *api_servers == WatchedKind::Pending),
        ]
        .into_iter()
        .filter_map(|(kind, pending)| pending.then_some(kind))
        .collect()
    }

    /// Kinds that are only known from the cache.
    #[must_use]
    pub fn cached_kinds(&self) -> Vec<&'static str> {
        let Self {
            peers,
            policies,
            nodes,
            api_servers,
            addresses: _,
            errors: _,
            forbidden_kinds: _,
        } = self;
        [
            ("Peer", matches!(peers, WatchedKind::Cached(_))),
            ("PeerPolicy", matches!(policies, WatchedKind::Cached(_))),
            ("Node", matches!(nodes, WatchedKind::Cached(_))),
            ("EndpointSlice", matches!(api_servers, WatchedKind::Cached(_))),
        ]
        .into_iter()
        .filter_map(|(kind, cached)| cached.then_some(kind))
        .collect()
    }

    /// Uses the cached objects of each pending kind, and the cached addresses of names that have no address. Returns whether a kind was
    /// pending.
    fn fill_from_cache(&mut self, saved: SavedObjects) -> bool {
        fn fill<V>(seen: &mut WatchedKind<V>, objects: BTreeMap<String, V>) -> bool {
            let pending = matches!(seen, WatchedKind::Pending);
            if pending {
                *seen = WatchedKind::Cached(objects);
            }
            pending
        }
        let SavedObjects {
            peers,
            policies,
            nodes,
            api_servers,
            addresses,
        } = saved;
        for (name, address) in addresses {
            self.addresses.entry(name).or_insert(address);
        }
        let filled = [
            fill(&mut self.peers, peers),
            fill(&mut self.policies, policies),
            fill(&mut self.nodes, nodes),
            fill(&mut self.api_servers, api_servers),
        ];
        filled.contains(&true)
    }

    /// Whether the API server still confirms the whole snapshot, as far as the agent can know. This node's Node changes every
    /// few minutes, and the other Nodes are read again and again. So if `errors` has no entry for the kind Node, the API server
    /// still answers. Errors of other kinds do not count: they stay in `errors` until an object of the kind changes, even if the
    /// watch works again.
    #[must_use]
    pub fn is_confirmed(&self) -> bool {
        self.pending_kinds().is_empty()
            && self.cached_kinds().is_empty()
            && self.forbidden_kinds.is_empty()
            && !self.errors.contains_key("Node")
    }

    /// Kinds whose CRD is missing.
    #[must_use]
    pub fn missing_crds(&self) -> Vec<&'static str> {
        let kinds = [
            ("Peer", self.peers == WatchedKind::CrdMissing),
            ("PeerPolicy", self.policies == WatchedKind::CrdMissing),
        ];
        kinds
            .into_iter()
            .filter_map(|(kind, absent)| absent.then_some(kind))
            .collect()
    }
}

/// The shared snapshot. Cheap to clone; all clones share it.
#[derive(Debug, Clone, Default)]
pub struct Store {
    snapshot: Arc<Mutex<ClusterSnapshot>>,
    notify: Arc<Notify>,
    /// Notified for PeerPolicies only.
    policies_notify: Arc<Notify>,
    metrics: Metrics,
    /// The objects and addresses from the cache, until [`Self::use_cache`] takes them.
    saved: Arc<Mutex<Option<SavedObjects>>>,
}

impl Store {
    /// An empty store. `saved` are the cached objects of an earlier process, used by [`Self::use_cache`].
    #[must_use]
    pub fn new(metrics: Metrics, saved: Option<SavedObjects>) -> Self {
        Self {
            metrics,
            saved: Arc::new(Mutex::new(saved)),
            ..Self::default()
        }
    }

    /// Uses the cached objects of each pending kind and the cached addresses. Only the first call has an effect. The first list of a kind
    /// replaces its cached objects.
    pub fn use_cache(&self) {
        let saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner).take();
        if saved.is_some_and(|saved| self.lock().fill_from_cache(saved)) {
            self.notify.notify_one();
        }
    }

    /// A copy of the current snapshot.
    #[must_use]
    pub fn snapshot(&self) -> ClusterSnapshot {
        self.lock().clone()
    }

    /// Waits until the objects or addresses have changed, a watch has failed, or `wake` was called, since the last call returned. The
    /// end of an error alone does not count. Only one task may wait.
    pub async fn changed(&self) {
        self.notify.notified().await;
    }

    /// Waits until a PeerPolicy has changed since the last call returned. Only one task may wait.
    pub async fn policies_changed(&self) {
        self.policies_notify.notified().await;
    }

    /// Wakes the waiter of [`Self::changed`] although no object has changed.
    pub(crate) fn wake(&self) {
        self.notify.notify_one();
    }

    /// Replaces the addresses of host names by the results of a new lookup.
    pub fn set_addresses(&self, addresses: Addresses) {
        self.lock().addresses = addresses;
        self.notify.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, ClusterSnapshot> {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes the objects of one watch into the store.
#[derive(Debug)]
pub(crate) struct StoreSink<V> {
    pub(crate) store: Store,
    pub(crate) kind: &'static str,
    pub(crate) part: fn(&mut ClusterSnapshot) -> &mut WatchedKind<V>,
}

impl<V> Clone for StoreSink<V> {
    fn clone(&self) -> Self {
        Self {
            store: self.store.clone(),
            kind: self.kind,
            part: self.part,
        }
    }
}

impl<V> WatchSink<V> for StoreSink<V> {
    fn change(&self, change: impl FnOnce(&mut WatchedKind<V>) -> bool + Send) {
        let mut snapshot = self.store.lock();
        let changed = change((self.part)(&mut snapshot));
        let recovered = snapshot.errors.remove(self.kind).is_some();
        snapshot.forbidden_kinds.remove(self.kind);
        drop(snapshot);
        if changed {
            self.store.notify.notify_one();
            if self.kind == super::PEER_POLICY {
                self.store.policies_notify.notify_one();
            }
        }
        if recovered {
            tracing::info!(kind = self.kind, "the watch works again");
        }
    }

    fn failed(&self, error: &watcher::Error) {
        self.store.metrics.count_error("watch");
        // Only the first error is logged, because an API server that is down causes many different errors. Known objects
        // stay.
        let text = error.to_string();
        if self.store.lock().errors.insert(self.kind, text.clone()).is_none() {
            tracing::warn!(
                kind = self.kind,
                error = text,
                "cannot watch this cluster's objects; the applied state stays"
            );
        }
        // A server that refuses access is not down: it may have revoked the right to read the cached objects. So the
        // cache is not used here, but only after the timeout in [`crate::run`].
        let is_forbidden = is_refusal(error);
        {
            let mut snapshot = self.store.lock();
            if is_forbidden {
                snapshot.forbidden_kinds.insert(self.kind);
            } else {
                snapshot.forbidden_kinds.remove(self.kind);
            }
        }
        if !is_forbidden {
            self.store.use_cache();
        }
        self.store.notify.notify_one();
    }
}

/// Whether the API server answered and refused access.
pub(super) fn is_refusal(error: &watcher::Error) -> bool {
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
    fn cached_objects_fill_unlisted_kinds_only_once() {
        let saved = SavedObjects {
            nodes: named("old"),
            api_servers: named("old"),
            addresses: [("a".to_owned(), "192.0.2.1".parse().unwrap())].into(),
            ..SavedObjects::default()
        };
        let store = Store::new(Metrics::default(), Some(saved));
        store.lock().nodes = WatchedKind::Listed(named("new"));
        assert_eq!(store.snapshot().cached_kinds(), Vec::<&str>::new());
        store.use_cache();
        let snapshot = store.snapshot();
        assert_eq!(snapshot.cached_kinds(), ["Peer", "PeerPolicy", "EndpointSlice"]);
        assert_eq!(snapshot.pending_kinds(), Vec::<&str>::new());
        assert_eq!(snapshot.nodes, WatchedKind::Listed(named("new")));
        assert_eq!(snapshot.api_servers, WatchedKind::Cached(named("old")));
        assert_eq!(snapshot.addresses.len(), 1);
        store.lock().peers = WatchedKind::Pending;
        store.use_cache();
        assert_eq!(store.snapshot().pending_kinds(), ["Peer"]);
    }

    #[test]
    fn store_without_cache_stays_empty() {
        let store = Store::new(Metrics::default(), None);
        store.use_cache();
        assert_eq!(store.snapshot(), ClusterSnapshot::default());
    }
}
