//! The table inside a feed.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use clustermesh_access::memory::{Charge, OverBudget};
use clustermesh_core::{mesh::ObjectName, observe::Rows};

use super::{Converted, Row, Trust};

/// The maximum number of malformed objects that a feed remembers.
const MAX_MALFORMED: usize = 1_000;

/// The content of a feed.
#[derive(Debug)]
pub(super) struct Table<V> {
    pub(super) rows: BTreeMap<ObjectName, Row<V>>,
    /// The rows whose values changed since the last [`super::Feed::update`]. `None` = all may have changed, or more rows changed
    /// than the table has.
    changed_rows: Option<BTreeSet<ObjectName>>,
    /// Objects that do not parse, with the reason. The last version that parsed, if any, stays in `rows`.
    pub(super) malformed: BTreeMap<ObjectName, String>,
    pub(super) trust: Trust,
    /// Which required list the rows answer: the number in [`super::Feed::required_list`] when the last complete list began, or when the
    /// API server last showed that the kind does not exist or is denied.
    pub(super) last_list: u64,
    /// The API server has said which objects exist: the kind was listed completely at least once, or does not exist.
    pub(super) has_answer: bool,
    /// See [`super::Feed::is_absent`]. Always true while the trust is [`Trust::Absent`].
    pub(super) is_absent: bool,
    /// The kind was listed completely, and did not become absent since then.
    pub(super) was_read: bool,
    /// Since when the API server has refused to list or watch the kind (403).
    pub(super) denied_since: Option<tokio::time::Instant>,
    /// The charge for the memory of the rows. `None` for feeds of the hub, whose memory is not limited.
    pub(super) charge: Option<Charge>,
}

impl<V> Default for Table<V> {
    fn default() -> Self {
        Self {
            rows: BTreeMap::new(),
            changed_rows: None,
            malformed: BTreeMap::new(),
            trust: Trust::Pending,
            last_list: 0,
            has_answer: false,
            is_absent: false,
            was_read: false,
            denied_since: None,
            charge: None,
        }
    }
}

impl<V: PartialEq> Table<V> {
    /// See [`super::Feed::update`].
    pub(super) fn update<T, R: Into<Arc<T>>>(&mut self, copy: &mut Rows<T>, convert: impl Fn(&V) -> R) {
        let Some(changed) = self.changed_rows.replace(BTreeSet::new()) else {
            let rows = self.rows.iter();
            *copy = rows
                .map(|(name, row)| (name.name.clone(), convert(&row.value)))
                .collect();
            return;
        };
        for name in changed {
            match self.rows.get(&name) {
                Some(row) => copy.insert(name.name, convert(&row.value)),
                None => {
                    copy.remove(&name.name);
                }
            }
        }
    }

    /// Stores that all rows may have changed.
    pub(super) fn mark_all_changed(&mut self) {
        self.changed_rows = None;
    }

    /// Stores that the value of a row changed, or that the row was removed.
    pub(super) fn mark_changed(&mut self, name: &ObjectName) {
        let limit = self.rows.len();
        self.changed_rows = self.changed_rows.take().filter(|changed| changed.len() <= limit);
        if let Some(changed) = &mut self.changed_rows {
            changed.insert(name.clone());
        }
    }

    /// Sets one row, or stores why the object is malformed. Returns whether a value or reason changed. If [`MAX_MALFORMED`] other objects
    /// are malformed, the reason is not stored.
    ///
    /// The row of a malformed object keeps its last valid value. Otherwise the object would look as if it was deleted.
    pub(super) fn set(&mut self, object: Converted<V>) -> bool {
        let Converted {
            name,
            uid,
            version,
            weight,
            value,
        } = object;
        match value {
            Ok(Some(value)) => {
                let has_changed = self.rows.get(&name).is_none_or(|row| row.value != value);
                if has_changed {
                    self.mark_changed(&name);
                }
                let has_changed = self.malformed.remove(&name).is_some() || has_changed;
                self.rows.insert(
                    name,
                    Row {
                        value,
                        uid,
                        version,
                        weight,
                        written_at: None,
                    },
                );
                has_changed
            }
            Ok(None) => {
                let was_malformed = self.malformed.remove(&name).is_some();
                let was_row = self.rows.remove(&name).is_some();
                if was_row {
                    self.mark_changed(&name);
                }
                was_row || was_malformed
            }
            Err(why) => {
                if self.malformed.len() >= MAX_MALFORMED && !self.malformed.contains_key(&name) {
                    return false;
                }
                self.malformed.insert(name, why.clone()) != Some(why)
            }
        }
    }

    /// Adds `taken` bytes to the charge and subtracts `freed`.
    pub(super) fn update_charge(&mut self, taken: usize, freed: usize) -> Result<(), OverBudget> {
        let Some(charge) = &mut self.charge else { return Ok(()) };
        charge.set((charge.bytes() + taken).saturating_sub(freed))
    }
}
