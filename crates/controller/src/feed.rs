//! One kind of object of one cluster as a table that a list and a watch keep true ([`follow`]), and how far that table can
//! be trusted. What the rows mean is the sessions' business.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use clustermesh_access::memory::{Account, Charge, OverBudget};
use clustermesh_core::mesh::ObjectName;
use kube::{api::DynamicObject, core::ObjectMeta};
use tokio::sync::Notify;

use crate::trouble::quoted;

mod follow;
mod weight;

pub(crate) use follow::{Resume, Source, follow};

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
    /// What it is charged for, in bytes.
    weight: usize,
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

/// Malformed objects whose reason is kept.
const MAX_MALFORMED: usize = 1_000;

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
    denied: Option<tokio::time::Instant>,
    /// For the rows, where they are of a member; `None` = of the hub, which is trusted.
    charge: Option<Charge>,
}

/// What turns an object into a row's value: `Ok(None)` = of no interest, `Err` = malformed.
type Convert<V> = dyn Fn(DynamicObject) -> Result<Option<V>, String> + Send + Sync;

/// A table that is shared between the task that follows the API server and those that read it.
pub(crate) struct Feed<V> {
    table: Arc<Mutex<Table<V>>>,
    convert: Arc<Convert<V>>,
    /// Fields that are left out before an object is converted.
    without: &'static [&'static str],
    changed: Changed,
}

/// An object as it was read: its name, its row but for `written`, or why it is malformed.
pub(crate) struct Draft<V> {
    name: ObjectName,
    uid: String,
    version: String,
    weight: usize,
    value: Result<Option<V>, String>,
}

/// A whole list.
struct List<V> {
    drafts: Vec<Draft<V>>,
    /// The version it is of.
    version: String,
    /// For its objects.
    charge: Option<Charge>,
}

impl<V> List<V> {
    /// Adds an object.
    ///
    /// # Errors
    /// Then its member would take too much memory.
    fn add(&mut self, draft: Draft<V>) -> Result<(), OverBudget> {
        if let Some(charge) = &mut self.charge {
            charge.set(charge.bytes() + draft.weight)?;
        }
        self.drafts.push(draft);
        Ok(())
    }
}

impl<V> Clone for Feed<V> {
    fn clone(&self) -> Self {
        Self {
            table: Arc::clone(&self.table),
            convert: Arc::clone(&self.convert),
            without: self.without,
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
            charge: None,
        };
        Self {
            table: Arc::new(Mutex::new(table)),
            convert: Arc::new(convert),
            without: &[],
            changed,
        }
    }

    /// Charges its rows to a member.
    pub(crate) fn charged_to(self, account: &Account) -> Self {
        self.lock().charge = Some(account.charge());
        self
    }

    /// Removes these fields (JSON pointers) before an object is converted, so that fields that are not used take no memory
    /// beyond the answer that contained them.
    pub(crate) fn without(mut self, fields: &'static [&'static str]) -> Self {
        self.without = fields;
        self
    }

    /// A charge for what is being listed, beside the rows that stand until the list is whole.
    fn charge(&self) -> Option<Charge> {
        self.lock().charge.as_ref().map(Charge::another)
    }

    /// Converts an object; `None` = its name is none of an object.
    fn draft(&self, mut object: DynamicObject) -> Option<Draft<V>> {
        let (name, uid, version) = identity(&object.metadata)?;
        weight::prune(&mut object, self.without);
        let weight = weight::of(&object) + size_of::<Row<V>>();
        Some(Draft {
            name,
            uid,
            version,
            weight,
            value: (self.convert)(object).map_err(|why| quoted(&why)),
        })
    }

    /// How far it can be trusted now.
    pub(crate) fn trust(&self) -> Trust {
        self.lock().trust.clone()
    }

    /// It was listed whole at least once, or is known not to be there.
    pub(crate) fn listed(&self) -> bool {
        self.lock().listed
    }

    /// For how long the account has not been allowed to read it; `None` = it is, as far as is known.
    pub(crate) fn denied(&self) -> Option<Duration> {
        self.lock().denied.map(|since| since.elapsed())
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
        table.denied = matches!(trust, Trust::Denied(_)).then(tokio::time::Instant::now);
        if trust == Trust::Absent {
            table.rows.clear();
            table.malformed.clear();
            // Less always succeeds.
            let _ = table.charge.as_mut().map(|charge| charge.set(0));
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
    ///
    /// # Errors
    /// The member's objects take too much memory by now. This one is in the table; those after it must not be.
    pub(crate) fn put(&self, object: DynamicObject) -> Result<(), OverBudget> {
        self.take(object, None)
    }

    /// An object as the API server answered our own write.
    pub(crate) fn wrote(&self, object: DynamicObject) {
        // Over the budget: the watch, which brings the same object, says so.
        let _ = self.take(object, Some(Instant::now()));
    }

    fn take(&self, object: DynamicObject, written: Option<Instant>) -> Result<(), OverBudget> {
        let Some(draft) = self.draft(object) else { return Ok(()) };
        let mut table = self.lock();
        let before = table.rows.get(&draft.name);
        if before.is_some_and(|row| row.uid == draft.uid && row.may_be_ahead() && older(&draft.version, &row.version)) {
            return Ok(());
        }
        let name = draft.name.clone();
        let freed = before.map_or(0, |row| row.weight);
        let news = table.set(draft);
        let mut taken = 0;
        if let Some(row) = table.rows.get_mut(&name) {
            row.written = written;
            taken = row.weight;
        }
        let charged = table.grow(taken, freed);
        drop(table);
        if news {
            self.changed.notify_one();
        }
        charged
    }

    /// The object is gone.
    pub(crate) fn remove(&self, name: &ObjectName) {
        let mut table = self.lock();
        table.malformed.remove(name);
        if let Some(row) = table.rows.remove(name) {
            // Less always succeeds.
            let _ = table.grow(0, row.weight);
            drop(table);
            self.changed.notify_one();
        }
    }

    /// A whole list, as of `list_version`, takes the place of the table; rows that are newer than the list (our own
    /// writes while it was made) stay. `current` = nothing contradicts that the list is up to date; otherwise the table is
    /// trusted as far as before.
    fn replace(
        &self,
        List {
            drafts,
            version: list_version,
            charge,
        }: List<V>,
        current: bool,
    ) {
        let list_version = &*list_version;
        let mut table = self.lock();
        let before = std::mem::take(&mut table.rows);
        table.malformed.clear();
        for draft in drafts {
            if let (Err(_), Some(row)) = (&draft.value, before.get(&draft.name)) {
                table.rows.insert(draft.name.clone(), row.clone());
            }
            table.set(draft);
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
        // Almost all rows are those of the list, so the list's charge covers them.
        if table.charge.is_some() {
            table.charge = charge;
        }
        let trust = if current { Trust::Live } else { table.trust.clone() };
        let same = table.listed
            && table.trust == trust
            && before.len() == table.rows.len()
            && before
                .iter()
                .zip(&table.rows)
                .all(|(a, b)| a.0 == b.0 && a.1.value == b.1.value);
        table.listed = true;
        table.read = true;
        table.denied = None;
        table.trust = trust;
        drop(table);
        if !same {
            self.changed.notify_one();
        }
    }
}

impl<V: PartialEq> Table<V> {
    /// Writes one row; whether a reader can tell. A malformed object keeps its last value: nothing is deleted because of
    /// what could not be read.
    fn set(&mut self, draft: Draft<V>) -> bool {
        let Draft {
            name,
            uid,
            version,
            weight,
            value,
        } = draft;
        match value {
            Ok(Some(value)) => {
                let news = self.rows.get(&name).is_none_or(|row| row.value != value);
                let news = self.malformed.remove(&name).is_some() || news;
                self.rows.insert(
                    name,
                    Row {
                        value,
                        uid,
                        version,
                        weight,
                        written: None,
                    },
                );
                news
            }
            Ok(None) => {
                self.malformed.remove(&name);
                self.rows.remove(&name).is_some()
            }
            Err(why) => {
                if self.malformed.len() >= MAX_MALFORMED && !self.malformed.contains_key(&name) {
                    return false;
                }
                if self.malformed.get(&name) != Some(&why) {
                    tracing::warn!(object = %name, %why, "malformed object; it costs itself and nothing else");
                }
                self.malformed.insert(name, why.clone()) != Some(why)
            }
        }
    }

    /// One row came to weigh `taken` and no longer `freed`.
    fn grow(&mut self, taken: usize, freed: usize) -> Result<(), OverBudget> {
        let Some(charge) = &mut self.charge else { return Ok(()) };
        charge.set((charge.bytes() + taken).saturating_sub(freed))
    }
}

/// Name, UID and resourceVersion; `None` = they are none that an API server gives, and could be of any length.
fn identity(metadata: &ObjectMeta) -> Option<(ObjectName, String, String)> {
    fn text(field: Option<&String>, max: usize) -> Option<String> {
        let text = field.map_or("", String::as_str);
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
        (text.len() <= max && text.bytes().all(plain)).then(|| text.to_owned())
    }
    let name = ObjectName {
        namespace: text(metadata.namespace.as_ref(), 63)?,
        name: text(metadata.name.as_ref(), 253)?,
    };
    let (uid, version) = (
        text(metadata.uid.as_ref(), 64)?,
        text(metadata.resource_version.as_ref(), 64)?,
    );
    Some((name, uid, version))
}

/// Whether resourceVersion `a` is older than `b`. They compare as numbers within one kind (Kubernetes 1.35, KEP-5504, and
/// etcd before that); what is no number is never older.
fn older(a: &str, b: &str) -> bool {
    matches!((a.parse::<u64>(), b.parse::<u64>()), (Ok(a), Ok(b)) if a < b)
}

#[cfg(test)]
mod tests;
