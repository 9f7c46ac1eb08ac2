//! What a program still waits for before it is ready, by name, so that `/readyz` can list it. Not whether it is alive.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The list of what is pending. Cheap to clone; all clones are one list. Ready = nothing pending.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<Mutex<BTreeMap<String, usize>>>);

impl Readiness {
    /// An empty list: ready.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `name` on the list until the returned value is dropped. The same name may be put there several times; it
    /// leaves with the last.
    pub fn pending(&self, name: impl Into<String>) -> Pending {
        let name = name.into();
        *self.lock().entry(name.clone()).or_default() += 1;
        Pending {
            list: self.clone(),
            name,
        }
    }

    /// What is pending, sorted.
    #[must_use]
    pub fn list(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// Whether nothing is pending.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One item on the list; drop it when it is done.
#[derive(Debug)]
#[must_use = "the item leaves the list when this is dropped"]
pub struct Pending {
    list: Readiness,
    name: String,
}

impl Drop for Pending {
    fn drop(&mut self) {
        let mut list = self.list.lock();
        if let Some(count) = list.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                list.remove(&self.name);
                let left: Vec<_> = list.keys().cloned().collect();
                drop(list);
                tracing::info!(done = %self.name, pending = %left.join(", "), "readiness");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pending_items_are_listed_by_name_until_the_last_of_each_is_dropped() {
        let readiness = Readiness::new();
        let device = readiness.pending("device");
        let peers = readiness.pending("peers");
        let again = readiness.clone().pending("peers");
        assert_eq!(readiness.list(), ["device", "peers"]);
        drop(peers);
        assert_eq!(readiness.list(), ["device", "peers"]);
        drop(device);
        assert_eq!(readiness.list(), ["peers"]);
        drop(again);
        assert!(readiness.is_ready());
    }
}
