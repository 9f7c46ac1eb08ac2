//! Detects objects that another client changes back again and again, and delays our writes to them.
//!
//! An object is contested after [`CONTESTED_AFTER`] changes by the other client in a row. Such a change shows as a
//! conflict (409), or as a repeated write of ours: if we write the same content again, the other client has undone our last write.

use clustermesh_core::{diff::Item, mesh::MeshId};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use super::refused::MAX_REFUSED_PAUSE;
use crate::backoff::Backoff;

const CONTESTED_AFTER: u32 = 3;

/// A digest of what a step writes. After a new mesh of 10,000 nodes the items themselves would take more memory than all observations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Content([u8; 32]);

impl Content {
    pub(super) fn of(item: &Item) -> Self {
        // Equal texts are equal contents: `Debug` shows every field of an item.
        Self(Sha256::digest(format!("{item:?}")).into())
    }
}

/// Our last write to one object, and the changes of the object by another client.
#[derive(Debug)]
pub(super) struct ObjectWrites {
    pub(super) mesh: MeshId,
    /// The content of our last successful write. `None` = all our writes met a conflict.
    pub(super) last_written: Option<Content>,
    /// The number of changes by the other client in a row.
    changes: u32,
    /// When [`Self::record`] was called last.
    pub(super) recorded_at: Instant,
    pub(super) backoff: Option<Backoff>,
    /// The other client's field manager in `managedFields`.
    other_manager: Option<String>,
}

impl ObjectWrites {
    pub(super) const fn new(mesh: MeshId, now: Instant) -> Self {
        Self {
            mesh,
            last_written: None,
            changes: 0,
            recorded_at: now,
            backoff: None,
            other_manager: None,
        }
    }

    pub(super) const fn is_contested(&self) -> bool {
        self.changes >= CONTESTED_AFTER
    }

    /// Records a write of `content`, or a conflict if not `written`. Returns whether the object has just become contested.
    pub(super) fn record(
        &mut self,
        content: Content,
        other_manager: Option<String>,
        written: bool,
        now: Instant,
    ) -> bool {
        let is_changed_by_other = !written || self.last_written == Some(content);
        if written {
            self.last_written = Some(content);
        }
        if !is_changed_by_other {
            (self.changes, self.backoff, self.recorded_at) = (0, None, now);
            return false;
        }
        self.changes += 1;
        (self.recorded_at, self.other_manager) = (now, other_manager.or(self.other_manager.take()));
        // The backoff starts one change before the object is contested.
        if self.changes + 1 >= CONTESTED_AFTER {
            match &mut self.backoff {
                Some(backoff) => backoff.record_failure(now),
                None => self.backoff = Some(Backoff::new(now, MAX_REFUSED_PAUSE)),
            }
        }
        self.changes == CONTESTED_AFTER
    }

    /// The message in the status.
    pub(super) fn message(&self) -> String {
        let manager = self.other_manager.as_deref();
        let client = manager.map_or("another writer".to_owned(), |manager| {
            format!("field manager {manager:?}")
        });
        format!(
            "{client} changed it {} times in a row; one of the two writers has to stop",
            self.changes
        )
    }
}
