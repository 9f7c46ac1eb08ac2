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

/// A digest of what a step writes. The items themselves would take too much memory: those of a new mesh of 10,000 nodes take
/// more than all observations.
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
    /// The content of our last successful write. `None` = all our writes met a conflict.
    pub(super) last_written: Option<Content>,
    /// When [`Self::record`] was called last.
    pub(super) recorded_at: Instant,
    /// `None` = our last write had new content, so no change by another client is known. Boxed, because most objects have none.
    changes: Option<Box<Changes>>,
}

/// The changes of one object by another client in a row.
#[derive(Debug)]
struct Changes {
    mesh: MeshId,
    number: u32,
    backoff: Option<Backoff>,
    /// The other client's field manager in `managedFields`.
    other_manager: Option<String>,
}

impl ObjectWrites {
    pub(super) const fn new(now: Instant) -> Self {
        Self {
            last_written: None,
            recorded_at: now,
            changes: None,
        }
    }

    pub(super) fn backoff(&self) -> Option<&Backoff> {
        self.changes.as_ref()?.backoff.as_ref()
    }

    /// Records a write of `content`, or a conflict if not `written`. Returns whether the object has just become contested.
    pub(super) fn record(
        &mut self,
        mesh: &MeshId,
        content: Content,
        other_manager: Option<String>,
        written: bool,
        now: Instant,
    ) -> bool {
        let is_changed_by_other = !written || self.last_written == Some(content);
        if written {
            self.last_written = Some(content);
        }
        self.recorded_at = now;
        if !is_changed_by_other {
            self.changes = None;
            return false;
        }
        let changes = self.changes.get_or_insert_with(|| {
            Box::new(Changes {
                mesh: mesh.clone(),
                number: 0,
                backoff: None,
                other_manager: None,
            })
        });
        changes.number += 1;
        changes.other_manager = other_manager.or(changes.other_manager.take());
        // The backoff starts one change before the object is contested.
        if changes.number + 1 >= CONTESTED_AFTER {
            match &mut changes.backoff {
                Some(backoff) => backoff.record_failure(now),
                None => changes.backoff = Some(Backoff::new(now, MAX_REFUSED_PAUSE)),
            }
        }
        changes.number == CONTESTED_AFTER
    }

    /// The message in the status of the mesh. `None` = the object is not contested, or is another mesh's.
    pub(super) fn message(&self, mesh: &MeshId) -> Option<String> {
        let changes = self.changes.as_ref()?;
        if changes.mesh != *mesh || changes.number < CONTESTED_AFTER {
            return None;
        }
        let manager = changes.other_manager.as_deref();
        let client = manager.map_or("another writer".to_owned(), |manager| {
            format!("field manager {manager:?}")
        });
        Some(format!(
            "{client} changed it {} times in a row; one of the two writers has to stop",
            changes.number
        ))
    }
}

#[cfg(test)]
mod tests {
    use clustermesh_core::{
        key::PublicKey,
        observe::{Endpoint, PeerRole, PeerSpec},
    };

    use super::*;

    #[test]
    fn content_differs_in_name_key_and_endpoint() {
        let item = |name: &str, key: u8, port: u16| {
            let spec = PeerSpec {
                public_key: PublicKey::new([key; 32]),
                allowed_ips: [].into(),
                endpoint: Some(Endpoint::Ip(([192, 0, 2, 1], port).into())),
                candidates: vec![],
                persistent_keepalive: 0,
                role: PeerRole::Node,
            };
            Content::of(&Item::Peer(name.to_owned(), Some(spec.into())))
        };
        let first = item("a", 1, 1);
        assert_eq!(first, item("a", 1, 1));
        let others = [item("b", 1, 1), item("a", 2, 1), item("a", 1, 2)];
        assert!(!others.contains(&first), "{others:?}");
    }
}
