//! What a program still waits for before it is ready, by name, so that `/readyz` can list it, and what a person should
//! know although it is. Not whether it is alive.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The list of what is pending, and of remarks. Cheap to clone; all clones are one list. Ready = nothing pending.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<Mutex<Items>>);

/// By weight and name, how often.
type Items = BTreeMap<(Weight, String), usize>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Weight {
    Pending,
    Remark,
}

impl Readiness {
    /// An empty list: ready.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `name` on the list until the returned value is dropped. The same name may be put there several times; it
    /// leaves with the last.
    pub fn pending(&self, name: impl Into<String>) -> Pending {
        self.put(Weight::Pending, name.into())
    }

    /// As [`Self::pending`], of something that makes nobody wait.
    pub fn remark(&self, name: impl Into<String>) -> Pending {
        self.put(Weight::Remark, name.into())
    }

    fn put(&self, weight: Weight, name: String) -> Pending {
        let item = (weight, name);
        *self.lock().entry(item.clone()).or_default() += 1;
        Pending {
            list: self.clone(),
            item,
        }
    }

    /// What is pending, sorted.
    #[must_use]
    pub fn list(&self) -> Vec<String> {
        self.all(Weight::Pending)
    }

    /// What a person should know besides, sorted.
    #[must_use]
    pub fn remarks(&self) -> Vec<String> {
        self.all(Weight::Remark)
    }

    fn all(&self, weight: Weight) -> Vec<String> {
        let list = self.lock();
        let items = list.keys().filter(|(of, _)| *of == weight);
        items.map(|(_, name)| name.clone()).collect()
    }

    /// Whether nothing is pending.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.list().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, Items> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One item on the list; drop it when it is done.
#[derive(Debug)]
#[must_use = "the item leaves the list when this is dropped"]
pub struct Pending {
    list: Readiness,
    item: (Weight, String),
}

impl Drop for Pending {
    fn drop(&mut self) {
        let mut list = self.list.lock();
        if let Some(count) = list.get_mut(&self.item) {
            *count -= 1;
            if *count == 0 {
                list.remove(&self.item);
                drop(list);
                let left = self.list.list();
                tracing::info!(done = %self.item.1, pending = %left.join(", "), "readiness");
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
        let remark = readiness.remark("from the cache");
        drop(again);
        assert!(readiness.is_ready());
        assert_eq!(readiness.remarks(), ["from the cache"]);
        drop(remark);
        assert_eq!(readiness.remarks(), Vec::<String>::new());
    }
}
