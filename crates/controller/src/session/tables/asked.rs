//! Feeds that only some meshes ask for: of granted and exported Services, and of pods.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

use clustermesh_core::{
    mesh::ObjectName,
    observe::{Pod, Service, Slice},
};

use super::values;
use crate::feed::{Feed, Trust};

/// The feeds, by namespace.
#[derive(Debug, Default)]
pub(super) struct Extra {
    pub(super) services: BTreeMap<String, (Asked<Service>, Asked<Slice>)>,
    pub(super) pods: BTreeMap<String, Asked<Pod>>,
}

/// A feed that some mesh asks for. Until it was listed it says nothing, which is not the same as an empty list.
#[derive(Debug, Clone)]
pub(super) struct Asked<V> {
    pub(super) feed: Feed<V>,
    /// Tells it from an earlier one of the same objects.
    pub(super) table: u64,
}

impl<V: Clone + PartialEq> Asked<V> {
    pub(super) fn new(feed: Feed<V>) -> Self {
        static TABLES: AtomicU64 = AtomicU64::new(0);
        Self {
            feed,
            table: TABLES.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Its rows as they were last listed or watched.
    ///
    /// # Errors
    /// It was never listed, or is closed to the account now, and why.
    pub(super) fn rows(&self) -> Result<BTreeMap<ObjectName, V>, String> {
        match self.feed.trust() {
            // What was read before may be long past by now.
            Trust::Denied(why) => Err(why),
            _ if self.feed.listed() => Ok(values(&self.feed)),
            Trust::Broken(why) => Err(why),
            Trust::Pending | Trust::Live | Trust::Absent => Err("it is being read for the first time".to_owned()),
        }
    }

    /// How far it can be trusted. The refusal of one namespace is no trouble of the member: the planner holds what came of it.
    pub(super) fn trust(&self) -> Trust {
        match self.feed.trust() {
            Trust::Denied(_) => Trust::Absent,
            trust => trust,
        }
    }
}
