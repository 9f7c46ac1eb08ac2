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
use crate::metrics::Metrics;

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
    metrics: Metrics,
}

impl Store {
    /// Nothing seen yet.
    #[must_use]
    pub fn new(metrics: Metrics) -> Self {
        Self {
            metrics,
            ..Self::default()
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
        drop(world);
        if changed {
            self.store.bell.notify_one();
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
        self.store.bell.notify_one();
    }
}
