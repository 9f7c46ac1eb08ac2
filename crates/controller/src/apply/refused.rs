//! Remembers the objects that the member's API server refused, with the reason, until their steps have another outcome or are not
//! planned any more.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use clustermesh_core::{lanes::Source, mesh::MeshId};
use tokio::time::Instant;

use super::queue::Key;
use crate::backoff::Backoff;

/// The longest pause after a refusal or after repeated changes by another client. Jitter can double it.
pub(super) const MAX_REFUSED_PAUSE: Duration = Duration::from_secs(60);

/// Why an object is refused: the source of its step (mesh and entry), its kind, and the reason.
pub(super) type Cause = (Source, &'static str, String);

#[derive(Debug, Default)]
pub(super) struct RefusedObjects {
    objects: BTreeMap<MeshId, BTreeMap<Key, Refused>>,
    /// Objects with the same cause share a backoff.
    causes: BTreeMap<Cause, Backoff>,
}

#[derive(Debug)]
struct Refused {
    cause: Cause,
    until: Instant,
}

impl RefusedObjects {
    /// Forgets all objects that are not `wanted`, and the causes that no object has any more.
    pub(super) fn retain(&mut self, wanted: &BTreeSet<Key>) {
        for objects in self.objects.values_mut() {
            objects.retain(|key, _| wanted.contains(key));
        }
        self.objects.retain(|_, objects| !objects.is_empty());
        let objects = self.objects.values().flat_map(BTreeMap::values);
        let used: BTreeSet<&Cause> = objects.map(|refused| &refused.cause).collect();
        self.causes.retain(|cause, _| used.contains(cause));
    }

    /// The end of the backoff of an object. `None` = the object is not refused.
    pub(super) fn backoff_until(&self, mesh: &MeshId, key: &Key) -> Option<Instant> {
        Some(self.objects.get(mesh)?.get(key)?.until)
    }

    pub(super) fn has_cause(&self, cause: &Cause) -> bool {
        self.causes.contains_key(cause)
    }

    /// Records a refusal and returns the end of the backoff.
    pub(super) fn insert(&mut self, mesh: &MeshId, key: Key, cause: Cause, now: Instant) -> Instant {
        let backoff = self.causes.entry(cause.clone());
        let backoff = backoff.or_insert_with(|| Backoff::new(now, MAX_REFUSED_PAUSE));
        backoff.record_failure(now);
        let until = backoff.until();
        let objects = self.objects.entry(mesh.clone()).or_default();
        objects.insert(key, Refused { cause, until });
        until
    }

    /// Forgets an object and returns its cause, whose backoff stays.
    pub(super) fn remove(&mut self, mesh: &MeshId, key: &Key) -> Option<Cause> {
        Some(self.objects.get_mut(mesh)?.remove(key)?.cause)
    }

    /// Forgets the backoff of a cause that no object has. Returns whether it did so.
    pub(super) fn drop_unused(&mut self, cause: &Cause) -> bool {
        let mut objects = self.objects.values().flat_map(BTreeMap::values);
        if objects.any(|refused| refused.cause == *cause) {
            return false;
        }
        self.causes.remove(cause);
        true
    }

    /// Kind, name and reason of each refused object of a mesh.
    pub(super) fn reasons(&self, mesh: &MeshId) -> impl Iterator<Item = (&'static str, &String, String)> {
        let objects = self.objects.get(mesh).into_iter().flatten();
        objects.map(|((kind, name), refused)| (*kind, name, refused.cause.2.clone()))
    }
}
