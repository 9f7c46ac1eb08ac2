//! One kind of object of one cluster as a table that a list and a watch keep true ([`follow`]), and how far that table can
//! be trusted. What the rows mean is the sessions' business.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use clustermesh_core::mesh::ObjectName;
use kube::{api::DynamicObject, core::ObjectMeta};
use tokio::sync::Notify;

mod follow;

pub(crate) use follow::{Source, follow};

/// Wakes the reconcile loop; one permit, so many changes are one wake.
pub(crate) type Changed = Arc<Notify>;

/// How far a table can be trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Trust {
    /// Not listed yet, and nothing has failed yet.
    Pending,
    /// Listed, and the watch stands.
    Live,
    /// The last list or watch failed; why, in words that are safe to show.
    Broken(String),
    /// The API server has no such kind (404): the CRD is not there.
    Absent,
    /// The account may not read it (403); which right is missing.
    Denied(String),
}

/// One row: the value and what a conditional delete needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row<V> {
    /// The object as far as it is read.
    pub(crate) value: V,
    /// `metadata.uid`.
    pub(crate) uid: String,
    /// `metadata.resourceVersion`.
    pub(crate) version: String,
    /// When it came as the answer to our own write; `None` = it was listed or watched since.
    written: Option<Instant>,
}

impl<V> Row<V> {
    /// The row is our own write, of so short a time ago that a list or an event may still be of before it. Not for ever:
    /// versions go back when a cluster is restored, or when a kubeconfig turns to another one.
    fn may_be_ahead(&self) -> bool {
        self.written.is_some_and(|at| at.elapsed() < AHEAD)
    }
}

/// A server that has just started answers 403 until it has read its own roles: only a refusal that lasts is believed.
const BELIEVED: Duration = Duration::from_secs(10);

/// For so long lists and events may be of before our own write.
const AHEAD: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Table<V> {
    rows: BTreeMap<ObjectName, Row<V>>,
    /// Objects that do not parse, and why; each costs itself.
    malformed: BTreeMap<ObjectName, String>,
    trust: Trust,
    /// It was listed whole at least once, or is known not to be there.
    listed: bool,
    /// It was listed whole at least once.
    read: bool,
    /// Since when the account may not read it.
    denied: Option<Instant>,
}

/// What turns an object into a row's value: `Ok(None)` = of no interest, `Err` = malformed.
type Convert<V> = dyn Fn(DynamicObject) -> Result<Option<V>, String> + Send + Sync;

/// A table that is shared between the task that follows the API server and those that read it.
pub(crate) struct Feed<V> {
    table: Arc<Mutex<Table<V>>>,
    convert: Arc<Convert<V>>,
    changed: Changed,
}

impl<V> Clone for Feed<V> {
    fn clone(&self) -> Self {
        Self {
            table: Arc::clone(&self.table),
            convert: Arc::clone(&self.convert),
            changed: Arc::clone(&self.changed),
        }
    }
}

impl<V> fmt::Debug for Feed<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.lock();
        f.debug_struct("Feed")
            .field("rows", &table.rows.len())
            .field("trust", &table.trust)
            .finish()
    }
}

impl<V> Feed<V> {
    fn lock(&self) -> MutexGuard<'_, Table<V>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<V: Clone + PartialEq> Feed<V> {
    pub(crate) fn new(
        changed: Changed,
        convert: impl Fn(DynamicObject) -> Result<Option<V>, String> + Send + Sync + 'static,
    ) -> Self {
        let table = Table {
            rows: BTreeMap::new(),
            malformed: BTreeMap::new(),
            trust: Trust::Pending,
            listed: false,
            read: false,
            denied: None,
        };
        Self {
            table: Arc::new(Mutex::new(table)),
            convert: Arc::new(convert),
            changed,
        }
    }

    /// How far it can be trusted now.
    pub(crate) fn trust(&self) -> Trust {
        self.lock().trust.clone()
    }

    /// It was listed whole at least once.
    pub(crate) fn listed(&self) -> bool {
        self.lock().listed
    }

    /// Whether the account was never let in and will not be: to it the kind is as good as not there. What was read once and
    /// is refused now is something else, since what stands there still stands.
    pub(crate) fn closed(&self) -> bool {
        let table = self.lock();
        !table.read && table.denied.is_some_and(|since| since.elapsed() >= BELIEVED)
    }

    /// Reads all rows under the lock.
    pub(crate) fn read<T>(&self, with: impl FnOnce(&BTreeMap<ObjectName, Row<V>>) -> T) -> T {
        with(&self.lock().rows)
    }

    /// Objects that do not parse, and why.
    pub(crate) fn malformed(&self) -> BTreeMap<ObjectName, String> {
        self.lock().malformed.clone()
    }

    /// Says how far the table can be trusted; wakes the loop when that is news, and says whether it is.
    pub(crate) fn set_trust(&self, trust: Trust) -> bool {
        let mut table = self.lock();
        if table.trust == trust {
            if table.denied.is_some() {
                drop(table);
                // By now it may have lasted.
                self.changed.notify_one();
            }
            return false;
        }
        table.denied = matches!(trust, Trust::Denied(_)).then(Instant::now);
        if trust == Trust::Absent {
            table.rows.clear();
            table.malformed.clear();
        }
        table.listed |= trust == Trust::Absent;
        table.trust = trust;
        drop(table);
        self.changed.notify_one();
        true
    }

    /// The connection is another one, perhaps to another cluster: what we wrote is ahead of nothing any more.
    pub(crate) fn forget_writes(&self) {
        self.lock().rows.values_mut().for_each(|row| row.written = None);
    }

    /// An object as the watch shows it.
    pub(crate) fn put(&self, object: DynamicObject) {
        self.take(object, None);
    }

    /// An object as the API server answered our own write.
    pub(crate) fn wrote(&self, object: DynamicObject) {
        self.take(object, Some(Instant::now()));
    }

    fn take(&self, object: DynamicObject, written: Option<Instant>) {
        let (name, uid, version) = identity(&object.metadata);
        let converted = (self.convert)(object);
        let mut table = self.lock();
        let before = table.rows.get(&name);
        if before.is_some_and(|row| row.uid == uid && row.may_be_ahead() && older(&version, &row.version)) {
            return;
        }
        let news = table.set(&name, uid, version, converted);
        if let Some(row) = table.rows.get_mut(&name) {
            row.written = written;
        }
        if news {
            drop(table);
            self.changed.notify_one();
        }
    }

    /// The object is gone.
    pub(crate) fn remove(&self, name: &ObjectName) {
        let mut table = self.lock();
        table.malformed.remove(name);
        if table.rows.remove(name).is_some() {
            drop(table);
            self.changed.notify_one();
        }
    }

    /// A whole list, as of `list_version`, takes the place of the table; rows that are newer than the list (our own
    /// writes while it was made) stay.
    fn replace(&self, objects: Vec<DynamicObject>, list_version: &str) {
        let converted: Vec<_> = objects
            .into_iter()
            .map(|object| (identity(&object.metadata), (self.convert)(object)))
            .collect();
        let mut table = self.lock();
        let before = std::mem::take(&mut table.rows);
        table.malformed.clear();
        for ((name, uid, version), value) in converted {
            if let (Err(_), Some(row)) = (&value, before.get(&name)) {
                table.rows.insert(name.clone(), row.clone());
            }
            table.set(&name, uid, version, value);
        }
        for (name, row) in &before {
            let keep = row.may_be_ahead()
                && older(list_version, &row.version)
                && table
                    .rows
                    .get(name)
                    .is_none_or(|listed| older(&listed.version, &row.version));
            if keep {
                table.rows.insert(name.clone(), row.clone());
            }
        }
        let same = table.listed
            && table.trust == Trust::Live
            && before.len() == table.rows.len()
            && before
                .iter()
                .zip(&table.rows)
                .all(|(a, b)| a.0 == b.0 && a.1.value == b.1.value);
        table.listed = true;
        table.read = true;
        table.denied = None;
        table.trust = Trust::Live;
        drop(table);
        if !same {
            self.changed.notify_one();
        }
    }
}

impl<V: PartialEq> Table<V> {
    /// Writes one row; whether a reader can tell. A malformed object keeps its last value: nothing is deleted because of
    /// what could not be read.
    fn set(&mut self, name: &ObjectName, uid: String, version: String, value: Result<Option<V>, String>) -> bool {
        match value {
            Ok(Some(value)) => {
                let news = self.rows.get(name).is_none_or(|row| row.value != value);
                self.rows.insert(
                    name.clone(),
                    Row {
                        value,
                        uid,
                        version,
                        written: None,
                    },
                );
                self.malformed.remove(name).is_some() || news
            }
            Ok(None) => {
                self.malformed.remove(name);
                self.rows.remove(name).is_some()
            }
            Err(why) => {
                if self.malformed.get(name) != Some(&why) {
                    tracing::warn!(object = %name, %why, "malformed object; it costs itself and nothing else");
                }
                self.malformed.insert(name.clone(), why.clone()) != Some(why)
            }
        }
    }
}

fn identity(metadata: &ObjectMeta) -> (ObjectName, String, String) {
    let name = ObjectName {
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
    };
    (
        name,
        metadata.uid.clone().unwrap_or_default(),
        metadata.resource_version.clone().unwrap_or_default(),
    )
}

/// Whether resourceVersion `a` is older than `b`. They compare as numbers within one kind (Kubernetes 1.35, KEP-5504, and
/// etcd before that); what is no number is never older.
fn older(a: &str, b: &str) -> bool {
    matches!((a.parse::<u64>(), b.parse::<u64>()), (Ok(a), Ok(b)) if a < b)
}

#[cfg(test)]
mod tests {
    use kube::core::TypeMeta;
    use serde_json::json;

    use super::*;

    fn feed() -> Feed<i64> {
        Feed::new(Changed::default(), |object| match object.data.get("n") {
            Some(n) => n.as_i64().map(Some).ok_or_else(|| "n is not a number".to_owned()),
            None => Ok(None),
        })
    }

    fn object(name: &str, version: &str, data: serde_json::Value) -> DynamicObject {
        let metadata = ObjectMeta {
            name: Some(name.to_owned()),
            uid: Some(format!("uid-{name}")),
            resource_version: Some(version.to_owned()),
            ..ObjectMeta::default()
        };
        DynamicObject {
            types: Some(TypeMeta::default()),
            metadata,
            data,
        }
    }

    fn rows(feed: &Feed<i64>) -> Vec<(String, i64)> {
        feed.read(|rows| rows.iter().map(|(name, row)| (name.name.clone(), row.value)).collect())
    }

    fn woken(feed: &Feed<i64>) -> bool {
        futures::FutureExt::now_or_never(feed.changed.notified()).is_some()
    }

    #[test]
    fn a_malformed_object_keeps_its_last_value_and_costs_no_other() {
        let feed = feed();
        feed.replace(
            vec![object("a", "1", json!({"n": 1})), object("b", "2", json!({"n": "x"}))],
            "3",
        );
        assert_eq!((rows(&feed), feed.trust()), (vec![("a".into(), 1)], Trust::Live));
        feed.put(object("a", "4", json!({"n": "y"})));
        assert_eq!(rows(&feed), [("a".into(), 1)]);
        assert_eq!(feed.malformed().len(), 2);
        feed.replace(
            vec![object("a", "4", json!({"n": "y"})), object("c", "5", json!({"n": 3}))],
            "6",
        );
        assert_eq!(rows(&feed), [("a".into(), 1), ("c".into(), 3)]);
    }

    #[test]
    fn a_change_that_no_reader_can_tell_wakes_nobody() {
        let feed = feed();
        feed.replace(vec![object("a", "1", json!({"n": 1}))], "1");
        assert!(woken(&feed));
        feed.put(object("a", "2", json!({"n": 1, "heartbeat": 7})));
        feed.put(object("other", "3", json!({})));
        feed.replace(vec![object("a", "2", json!({"n": 1}))], "3");
        assert!(!woken(&feed));
        feed.put(object("a", "4", json!({"n": 2})));
        assert!(woken(&feed));
    }

    #[test]
    fn an_earlier_event_or_list_does_not_undo_our_own_write() {
        let feed = feed();
        feed.replace(vec![object("a", "1", json!({"n": 1}))], "1");
        feed.wrote(object("a", "5", json!({"n": 5})));
        feed.wrote(object("new", "6", json!({"n": 6})));
        feed.put(object("a", "3", json!({"n": 3})));
        feed.replace(vec![object("a", "3", json!({"n": 3}))], "4");
        assert_eq!(rows(&feed), [("a".into(), 5), ("new".into(), 6)]);
        feed.replace(vec![object("a", "5", json!({"n": 5}))], "7");
        assert_eq!(rows(&feed), [("a".into(), 5)]);
    }

    #[test]
    fn a_cluster_whose_versions_went_back_is_believed() {
        let feed = feed();
        feed.replace(
            vec![object("a", "90", json!({"n": 1})), object("b", "91", json!({"n": 1}))],
            "95",
        );
        feed.replace(vec![object("a", "7", json!({"n": 2}))], "10");
        assert_eq!(rows(&feed), [("a".into(), 2)]);
        feed.wrote(object("mine", "99", json!({"n": 9})));
        feed.forget_writes();
        feed.replace(vec![object("a", "8", json!({"n": 3}))], "11");
        assert_eq!(rows(&feed), [("a".into(), 3)]);
    }

    #[test]
    fn a_refusal_is_believed_when_it_lasts_and_only_of_what_was_never_read() {
        let denied = || Trust::Denied("403".into());
        let lasting = |feed: &Feed<i64>| {
            feed.set_trust(denied());
            let at_once = feed.closed();
            feed.lock().denied = Instant::now().checked_sub(BELIEVED);
            (at_once, feed.closed())
        };
        let never_read = feed();
        assert_eq!(lasting(&never_read), (false, true));
        assert!(!never_read.listed());
        let read = feed();
        read.replace(vec![object("a", "1", json!({"n": 1}))], "1");
        assert_eq!(lasting(&read), (false, false));
        assert_eq!((rows(&read), read.listed()), (vec![("a".into(), 1)], true));
    }

    #[test]
    fn a_kind_that_is_not_there_is_listed_and_empty() {
        let feed = feed();
        feed.put(object("a", "1", json!({"n": 1})));
        feed.set_trust(Trust::Absent);
        assert_eq!((rows(&feed), feed.listed()), (vec![], true));
    }
}
