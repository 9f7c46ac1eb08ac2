//! Lists the pending items for which a program waits before it is ready, and remarks that do not affect readiness. `/readyz` shows both.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The pending items and the remarks. The program is ready when no item is pending. Cheap to clone; all clones share one list.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<Mutex<Items>>);

/// For each kind and name, the number of [`ReadinessItem`] values that exist.
type Items = BTreeMap<(Kind, String), usize>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Pending,
    Remark,
}

impl Readiness {
    /// Creates an empty list; with it, the program is ready.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Lists `name` as pending until the returned value is dropped. If a name is added several times, it is listed until the last of the
    /// returned values is dropped.
    pub fn pending(&self, name: impl Into<String>) -> ReadinessItem {
        self.put(Kind::Pending, name.into())
    }

    /// Like [`Self::pending`], for a remark that does not affect readiness.
    pub fn remark(&self, name: impl Into<String>) -> ReadinessItem {
        self.put(Kind::Remark, name.into())
    }

    fn put(&self, kind: Kind, name: String) -> ReadinessItem {
        let item = (kind, name);
        *self.lock().entry(item.clone()).or_default() += 1;
        ReadinessItem {
            list: self.clone(),
            item,
        }
    }

    /// The pending items, sorted.
    #[must_use]
    pub fn pending_items(&self) -> Vec<String> {
        self.names_of(Kind::Pending)
    }

    /// The remarks, sorted.
    #[must_use]
    pub fn remarks(&self) -> Vec<String> {
        self.names_of(Kind::Remark)
    }

    fn names_of(&self, kind: Kind) -> Vec<String> {
        let list = self.lock();
        let items = list.keys().filter(|(item_kind, _)| *item_kind == kind);
        items.map(|(_, name)| name.clone()).collect()
    }

    /// Whether no item is pending.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.pending_items().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, Items> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps one item in the list: a pending item or a remark. Dropping the last value of an item removes it.
#[derive(Debug)]
#[must_use = "the item is removed from the list when this value is dropped"]
pub struct ReadinessItem {
    list: Readiness,
    item: (Kind, String),
}

impl Drop for ReadinessItem {
    fn drop(&mut self) {
        let mut list = self.list.lock();
        if let Some(count) = list.get_mut(&self.item) {
            *count -= 1;
            if *count == 0 {
                list.remove(&self.item);
                drop(list);
                let pending = self.list.pending_items();
                tracing::info!(done = %self.item.1, pending = %pending.join(", "), "readiness");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn item_is_listed_until_its_last_value_is_dropped() {
        let readiness = Readiness::new();
        let device = readiness.pending("device");
        let peers = readiness.pending("peers");
        let again = readiness.clone().pending("peers");
        assert_eq!(readiness.pending_items(), ["device", "peers"]);
        drop(peers);
        assert_eq!(readiness.pending_items(), ["device", "peers"]);
        drop(device);
        assert_eq!(readiness.pending_items(), ["peers"]);
        let remark = readiness.remark("from the cache");
        drop(again);
        assert!(readiness.is_ready());
        assert_eq!(readiness.remarks(), ["from the cache"]);
        drop(remark);
        assert_eq!(readiness.remarks(), Vec::<String>::new());
    }
}
