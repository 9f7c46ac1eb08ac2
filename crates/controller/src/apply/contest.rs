//! Another writer that keeps changing an object of ours: when it is one, how long to wait before the next write, and its name.

use clustermesh_core::{diff::Item, mesh::MeshId};
use tokio::time::Instant;

use super::queue::REFUSED;
use crate::backoff::Backoff;

/// So many changes in a row, and an object is contested.
const CONTESTED: u32 = 3;

/// Another writer on one object.
#[derive(Debug)]
pub(super) struct Contest {
    pub(super) mesh: MeshId,
    /// What we wrote last; `None` = our write met a conflict.
    pub(super) wrote: Option<Item>,
    times: u32,
    pub(super) last: Instant,
    pub(super) backoff: Option<Backoff>,
    /// Its name in managedFields.
    by: Option<String>,
}

impl Contest {
    pub(super) const fn new(mesh: MeshId, now: Instant) -> Self {
        Self {
            mesh,
            wrote: None,
            times: 0,
            last: now,
            backoff: None,
            by: None,
        }
    }

    pub(super) const fn is_contested(&self) -> bool {
        self.times >= CONTESTED
    }

    /// Notes a write of `item`, or a conflict; whether the object is contested from now on.
    pub(super) fn note(&mut self, item: &Item, by: Option<String>, written: bool, now: Instant) -> bool {
        let again = !written || self.wrote.as_ref() == Some(item);
        if written {
            self.wrote = Some(item.clone());
        }
        if !again {
            (self.times, self.backoff, self.last) = (0, None, now);
            return false;
        }
        self.times += 1;
        (self.last, self.by) = (now, by.or(self.by.take()));
        // The first time is no reason to wait.
        if self.times + 1 >= CONTESTED {
            match &mut self.backoff {
                Some(backoff) => backoff.failed(now),
                None => self.backoff = Some(Backoff::new(now, REFUSED)),
            }
        }
        self.times == CONTESTED
    }

    /// What the status says.
    pub(super) fn message(&self) -> String {
        let by = self.by.as_deref();
        let by = by.map_or("another writer".to_owned(), |by| format!("field manager {by:?}"));
        format!(
            "{by} changed it {} times in a row; one of the two writers has to stop",
            self.times
        )
    }
}
