//! Feeds that exist only while a mesh needs them: Services and EndpointSlices of namespaces with granted or mirrored Services,
//! and Pods of namespaces with exported pods.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

use clustermesh_core::{
    mesh::ObjectName,
    observe::{Pod, Service, Slice},
};

use super::rows_by_object_name;
use crate::feed::{Feed, Trust};

/// The feeds, by namespace.
#[derive(Debug, Default)]
pub(super) struct OnDemandFeeds {
    pub(super) services: BTreeMap<String, (OnDemandFeed<Service>, OnDemandFeed<Slice>)>,
    pub(super) pods: BTreeMap<String, OnDemandFeed<Pod>>,
}

/// A feed that a mesh needs. Read it with [`Self::rows`], which distinguishes an empty feed from a feed that was not listed yet.
#[derive(Debug, Clone)]
pub(super) struct OnDemandFeed<V> {
    pub(super) feed: Feed<V>,
    /// Distinguishes the feed from an earlier feed of the same objects.
    pub(super) id: u64,
}

impl<V: Clone + PartialEq> OnDemandFeed<V> {
    pub(super) fn new(feed: Feed<V>) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Self {
            feed,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Returns the objects of the last list, updated by the watch events since then.
    ///
    /// # Errors
    /// The reason why the feed was not listed yet, or why the ServiceAccount may not read it now.
    pub(super) fn rows(&self) -> Result<BTreeMap<ObjectName, V>, String> {
        match self.feed.trust() {
            // Rows that were read before the refusal may be outdated. They would count as fresh, because [`Self::trust`] reports
            // a refused namespace as `Absent`, which does not make the member stale.
            Trust::Denied(why) => Err(why),
            // A broken feed that was listed before returns its rows, too. They count as stale, because [`Self::trust`] reports
            // `Broken`.
            _ if self.feed.has_answer() => Ok(rows_by_object_name(&self.feed)),
            Trust::Broken(why) => Err(why),
            Trust::Pending | Trust::Live | Trust::Absent => Err("it is being read for the first time".to_owned()),
        }
    }

    /// Whether the feed is current, or why not. A namespace that the ServiceAccount may not read (`Denied`) counts as `Absent`, so that it
    /// does not make the whole member stale. [`Self::rows`] then returns an error, so the planner keeps the objects that depend on the
    /// namespace.
    pub(super) fn trust(&self) -> Trust {
        match self.feed.trust() {
            Trust::Denied(_) => Trust::Absent,
            trust => trust,
        }
    }
}
