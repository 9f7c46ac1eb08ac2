//! A feed is a local table of one kind of object of one cluster. It also knows whether the table is current ([`Trust`]). [`follow`]
//! keeps the table up to date by list and watch, like an informer's cache. A conversion function decides what a row contains.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use clustermesh_access::memory::{Account, Charge, OverBudget};
use clustermesh_core::{mesh::ObjectName, observe::Rows};
use kube::{api::DynamicObject, core::ObjectMeta};
use tokio::sync::{Notify, watch};

use crate::api_error::sanitize;

mod follow;
mod not_found;
mod table;
mod weight;

pub(crate) use follow::{WatchedResource, follow};
use table::Table;

/// Wakes the reconcile loop. A [`Notify`] stores one permit, so any number of changes during a pass causes one further pass.
pub(crate) type Changed = Arc<Notify>;

/// Whether a feed is current, or why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Trust {
    /// The kind was not listed yet, and no request has failed yet.
    Pending,
    /// The kind was listed, and the watch is open or is being opened.
    Live,
    /// The last list or watch failed. Contains the reason, without text from the API server.
    Broken(String),
    /// The API server does not serve the kind: the CRD is not installed.
    Absent,
    /// The controller may not read the kind, or may not read whether it exists (403). Contains the missing permission.
    Denied(String),
}

/// One object: its converted value, and the preconditions for a delete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row<V> {
    pub(crate) value: V,
    /// `metadata.uid`.
    pub(crate) uid: String,
    /// `metadata.resourceVersion`.
    pub(crate) version: String,
    /// The number of bytes that are charged for the row.
    weight: usize,
    /// When the API server returned this object for our own write. `None` = a list or a watch event returned it.
    written_at: Option<Instant>,
}

impl<V> Row<V> {
    /// Whether this row is from our own recent write, so that a list or an event may still contain the object as it was before.
    ///
    /// After [`OWN_WRITE_WINDOW`] every list or event replaces the row, because versions can decrease: when a cluster is restored from a
    /// backup, or when a kubeconfig points to another cluster.
    fn may_be_ahead(&self) -> bool {
        self.written_at.is_some_and(|at| at.elapsed() < OWN_WRITE_WINDOW)
    }
}

/// A kind that was never read counts as forbidden after the API server has refused it (403) for this long. An API server that has just
/// started refuses every request until it has loaded its RBAC roles.
const FORBIDDEN_AFTER: Duration = Duration::from_secs(10);

/// For this long after our own write, lists and events may still contain the object as it was before.
const OWN_WRITE_WINDOW: Duration = Duration::from_secs(60);

/// Whether a list may come from another cluster than the list before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cluster {
    /// The connection is the same.
    Same,
    /// The connection is new. In the cluster that it reaches, a kind may exist that did not exist before.
    MayDiffer,
}

/// Converts an object to a row's value. `Ok(None)` = the object is ignored, `Err` = it is malformed.
type Convert<V> = dyn Fn(DynamicObject) -> Result<Option<V>, String> + Send + Sync;

/// A [`Table`] that is shared by the task that lists and watches, and by the readers.
pub(crate) struct Feed<V> {
    table: Arc<Mutex<Table<V>>>,
    convert: Arc<Convert<V>>,
    /// Fields that are removed before an object is converted.
    unused_fields: &'static [&'static str],
    changed: Changed,
    /// The number of the list that must be complete before the feed is current. [`Self::read_again`] raises it.
    required_list: watch::Sender<u64>,
}

/// An object after conversion. `value` is `Ok(None)` if the object is ignored, and an error if it is malformed.
pub(crate) struct Converted<V> {
    name: ObjectName,
    uid: String,
    version: String,
    weight: usize,
    value: Result<Option<V>, String>,
}

/// A complete list.
struct List<V> {
    objects: Vec<Converted<V>>,
    /// The resourceVersion of the list.
    version: String,
    /// [`Feed::required_list`] when the list began.
    number: u64,
    /// The charge for the memory of the objects.
    charge: Option<Charge>,
}

impl<V> List<V> {
    /// Adds an object.
    ///
    /// # Errors
    /// With this object the member would exceed its memory budget.
    fn add(&mut self, object: Converted<V>) -> Result<(), OverBudget> {
        if let Some(charge) = &mut self.charge {
            charge.set(charge.bytes() + object.weight)?;
        }
        self.objects.push(object);
        Ok(())
    }
}

impl<V> Clone for Feed<V> {
    fn clone(&self) -> Self {
        Self {
            table: Arc::clone(&self.table),
            convert: Arc::clone(&self.convert),
            unused_fields: self.unused_fields,
            changed: Arc::clone(&self.changed),
            required_list: self.required_list.clone(),
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
        Self {
            table: Arc::new(Mutex::new(Table::default())),
            convert: Arc::new(convert),
            unused_fields: &[],
            changed,
            required_list: watch::Sender::new(0),
        }
    }

    /// Charges the memory of the rows to a member.
    pub(crate) fn charged_to(self, account: &Account) -> Self {
        self.lock().charge = Some(account.charge());
        self
    }

    /// Removes these fields (paths such as `status/images`) before an object is converted, so that they take no memory after the
    /// response is parsed.
    pub(crate) fn without_fields(mut self, fields: &'static [&'static str]) -> Self {
        self.unused_fields = fields;
        self
    }

    /// Creates a separate charge for a list in progress. The current rows keep their own charge until the list is complete.
    fn list_charge(&self) -> Option<Charge> {
        self.lock().charge.as_ref().map(Charge::another)
    }

    /// Converts an object. `None` = the name, UID or version is invalid.
    fn convert(&self, mut object: DynamicObject) -> Option<Converted<V>> {
        let (name, uid, version) = identity(&object.metadata)?;
        weight::prune(&mut object, self.unused_fields);
        let weight = weight::estimate(&object) + size_of::<Row<V>>();
        Some(Converted {
            name,
            uid,
            version,
            weight,
            value: (self.convert)(object).map_err(|why| sanitize(&why)),
        })
    }

    /// Whether the feed is current, or why not.
    pub(crate) fn trust(&self) -> Trust {
        self.lock().trust.clone()
    }

    /// Whether the API server has said which objects exist: the kind was listed completely at least once, or does not exist.
    pub(crate) fn has_answer(&self) -> bool {
        self.lock().has_answer
    }

    /// Whether the API server has shown that it does not serve the kind, and the feed was not [`Trust::Live`] since then. Failed
    /// requests change nothing. A new connection begins with false ([`Cluster::MayDiffer`]).
    pub(crate) fn is_absent(&self) -> bool {
        self.lock().is_absent
    }

    /// For how long the trust has been [`Trust::Denied`]. `None` = the last request was not refused.
    pub(crate) fn denied_for(&self) -> Option<Duration> {
        self.lock().denied_since.map(|since| since.elapsed())
    }

    /// Whether the trust has been [`Trust::Denied`] for [`FORBIDDEN_AFTER`]. Such a kind is treated like a kind that does not exist.
    ///
    /// A kind that was listed before, and was not absent since then, is not forbidden: its objects may exist although they
    /// cannot be read now.
    pub(crate) fn is_forbidden(&self) -> bool {
        let table = self.lock();
        !table.was_read
            && table
                .denied_since
                .is_some_and(|since| since.elapsed() >= FORBIDDEN_AFTER)
    }

    /// Calls `with` on the map of all rows, under the lock.
    pub(crate) fn read<T>(&self, with: impl FnOnce(&BTreeMap<ObjectName, Row<V>>) -> T) -> T {
        with(&self.lock().rows)
    }

    /// Updates a copy of the values, by name, with the rows that changed since the last call. For feeds of objects without a namespace.
    pub(crate) fn update<T, R: Into<Arc<T>>>(&self, copy: &mut Rows<T>, convert: impl Fn(&V) -> R) {
        self.lock().update(copy, convert);
    }

    /// Objects that do not parse, with the reason.
    pub(crate) fn malformed(&self) -> BTreeMap<ObjectName, String> {
        self.lock().malformed.clone()
    }

    /// Sets the trust. [`Trust::Live`] is ignored while a list that [`Self::read_again`] required is not complete.
    /// [`Trust::Absent`] also removes all rows. Wakes the reconcile loop if the trust changed, or if the API server still denies
    /// the kind (403). Returns whether the trust changed.
    pub(crate) fn set_trust(&self, trust: Trust) -> bool {
        let mut table = self.lock();
        let required = *self.required_list.borrow();
        match trust {
            Trust::Live if table.last_list < required => return false,
            // The kind cannot be listed, so the required list counts as complete.
            Trust::Absent | Trust::Denied(_) => table.last_list = required,
            _ => {}
        }
        if table.trust == trust {
            if table.denied_since.is_some() {
                drop(table);
                // The refusal may have reached a limit by now ([`Self::is_forbidden`], and readers of [`Self::denied_for`]).
                self.changed.notify_one();
            }
            return false;
        }
        // Another reason for the refusal does not begin its time anew.
        let since = table.denied_since.unwrap_or_else(tokio::time::Instant::now);
        table.denied_since = matches!(trust, Trust::Denied(_)).then_some(since);
        if trust == Trust::Absent {
            table.rows.clear();
            table.mark_all_changed();
            table.malformed.clear();
            // A reduction of the charge never fails.
            let _ = table.charge.as_mut().map(|charge| charge.set(0));
            (table.has_answer, table.is_absent) = (true, true);
            // If the kind becomes forbidden later, no object of it is known to exist.
            table.was_read = false;
        }
        table.is_absent &= trust != Trust::Live;
        table.trust = trust;
        drop(table);
        self.changed.notify_one();
        true
    }

    /// Requires a new list. Until it is complete, the feed is not current, but keeps its rows. [`follow`] begins the list at once.
    ///
    /// Called for a new connection, and whenever a watch may be behind without an error: after an interruption, TCP may retransmit
    /// the packets of the watch only much later.
    pub(crate) fn read_again(&self, cluster: Cluster) {
        let mut table = self.lock();
        self.required_list.send_modify(|number| *number += 1);
        if cluster == Cluster::MayDiffer {
            table.is_absent = false;
        }
        // Lists and events of any version may replace rows of our own writes.
        table.rows.values_mut().for_each(|row| row.written_at = None);
        if table.trust != Trust::Pending {
            table.trust = Trust::Broken("it is being read again".to_owned());
            table.denied_since = None;
        }
        drop(table);
        self.changed.notify_one();
    }

    /// Whether a list that [`Self::read_again`] required is not complete. False while the trust is [`Trust::Pending`].
    pub(crate) fn needs_list(&self) -> bool {
        let table = self.lock();
        table.trust != Trust::Pending && table.last_list < *self.required_list.borrow()
    }

    /// Stores an object from a watch event, unless it is older than our own write ([`Row::may_be_ahead`]).
    ///
    /// # Errors
    /// The member now exceeds its memory budget. The feed contains the object, but the caller must add no more objects.
    pub(crate) fn put(&self, object: DynamicObject) -> Result<(), OverBudget> {
        self.store(object, None)
    }

    /// Stores an object that the API server returned for our own write.
    pub(crate) fn put_written(&self, object: DynamicObject) {
        // If this exceeds the budget, the watch event with the same object exceeds it, too, and reports it.
        let _ = self.store(object, Some(Instant::now()));
    }

    fn store(&self, object: DynamicObject, written_at: Option<Instant>) -> Result<(), OverBudget> {
        let Some(object) = self.convert(object) else {
            return Ok(());
        };
        let mut table = self.lock();
        let before = table.rows.get(&object.name);
        if before
            .is_some_and(|row| row.uid == object.uid && row.may_be_ahead() && is_older(&object.version, &row.version))
        {
            return Ok(());
        }
        let name = object.name.clone();
        let freed = before.map_or(0, |row| row.weight);
        let has_changed = table.set(object);
        if has_changed && let Some(why) = table.malformed.get(&name) {
            log_malformed(&name, why);
        }
        let mut taken = 0;
        if let Some(row) = table.rows.get_mut(&name) {
            row.written_at = written_at;
            taken = row.weight;
        }
        let charged = table.update_charge(taken, freed);
        drop(table);
        if has_changed {
            self.changed.notify_one();
        }
        charged
    }

    /// Removes the row of an object that was deleted.
    pub(crate) fn remove(&self, name: &ObjectName) {
        let mut table = self.lock();
        let was_malformed = table.malformed.remove(name).is_some();
        let row = table.rows.remove(name);
        if let Some(row) = &row {
            table.mark_changed(name);
            // A reduction of the charge never fails.
            let _ = table.update_charge(0, row.weight);
        }
        drop(table);
        if was_malformed || row.is_some() {
            self.changed.notify_one();
        }
    }

    /// Replaces the rows with a complete list. Rows of our own writes that are newer than the list stay, and so do the rows of listed
    /// objects that are malformed.
    ///
    /// With `is_current` the trust becomes [`Trust::Live`], unless [`Self::read_again`] was called after the list began. Otherwise
    /// [`Trust::Absent`] becomes [`Trust::Broken`], and any other trust stays.
    fn replace(
        &self,
        List {
            objects,
            version: list_version,
            number,
            charge,
        }: List<V>,
        is_current: bool,
    ) {
        let list_version = &*list_version;
        let mut table = self.lock();
        let before = std::mem::take(&mut table.rows);
        table.mark_all_changed();
        let malformed_before = std::mem::take(&mut table.malformed);
        for object in objects {
            // `Table::set` keeps the row of a malformed object, but all rows were taken out above.
            if let (Err(_), Some(row)) = (&object.value, before.get(&object.name)) {
                table.rows.insert(object.name.clone(), row.clone());
            }
            table.set(object);
        }
        for (name, row) in &before {
            let keep = row.may_be_ahead()
                && is_older(list_version, &row.version)
                && table
                    .rows
                    .get(name)
                    .is_none_or(|listed| is_older(&listed.version, &row.version));
            if keep {
                table.rows.insert(name.clone(), row.clone());
            }
        }
        for (name, why) in newly_malformed(&malformed_before, &table.malformed) {
            log_malformed(name, why);
        }
        // Nearly all rows are from the list, so the charge of the list replaces the charge of the table.
        if table.charge.is_some() {
            table.charge = charge;
        }
        table.last_list = table.last_list.max(number);
        let is_current = is_current && table.last_list >= *self.required_list.borrow();
        let trust = match &table.trust {
            _ if is_current => Trust::Live,
            // The list shows that the kind exists.
            Trust::Absent => Trust::Broken("its API server has not kept a watch open long enough yet".to_owned()),
            trust => trust.clone(),
        };
        let is_unchanged = table.has_answer
            && table.trust == trust
            && table.malformed == malformed_before
            && before.len() == table.rows.len()
            && before
                .iter()
                .zip(&table.rows)
                .all(|(a, b)| a.0 == b.0 && a.1.value == b.1.value);
        table.has_answer = true;
        table.is_absent &= !is_current;
        table.was_read = true;
        table.denied_since = None;
        table.trust = trust;
        drop(table);
        if !is_unchanged {
            self.changed.notify_one();
        }
    }
}

/// Returns the objects of `now` that are not in `before`, or have another reason in it.
fn newly_malformed<'a>(
    before: &BTreeMap<ObjectName, String>,
    now: &'a BTreeMap<ObjectName, String>,
) -> impl Iterator<Item = (&'a ObjectName, &'a String)> {
    now.iter().filter(|(name, why)| before.get(name) != Some(why))
}

fn log_malformed(name: &ObjectName, why: &str) {
    tracing::warn!(object = %name, %why, "malformed object; its last valid version, if any, stays in use");
}

/// Returns name, UID and resourceVersion. `None` = one of them is too long, or has a character that no real API server uses. Without this
/// check a hostile API server could make the controller keep texts of any length.
fn identity(metadata: &ObjectMeta) -> Option<(ObjectName, String, String)> {
    fn text(field: Option<&String>, max: usize) -> Option<String> {
        let text = field.map_or("", String::as_str);
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
        (text.len() <= max && text.bytes().all(is_allowed)).then(|| text.to_owned())
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

/// Whether resourceVersion `a` is older than `b`. Versions of one kind can be compared as numbers (guaranteed since Kubernetes 1.35,
/// KEP-5504; before that they are etcd's revisions). `false` if one of them is not a number.
fn is_older(a: &str, b: &str) -> bool {
    matches!((a.parse::<u64>(), b.parse::<u64>()), (Ok(a), Ok(b)) if a < b)
}

#[cfg(test)]
mod tests;
