//! Members whose observation became fresh or stale, or is stale for another reason.
//!
//! The planner uses the last value of a stale member as it uses a fresh one, so the planned objects stay the same. A stale member is
//! reported, and its objects in the targets are not deleted. (SandboxAccesses also depend on the freshness of a sandbox, but a mesh with
//! one is not followed, see [`super::Kept::of`].)

use super::{MeshChanges, MeshFollower, Patch};
use crate::plan::{Fact, link::Link};

/// The new freshness of one entry.
#[derive(Debug)]
pub(super) struct FreshnessPatch {
    /// The report of the stale member; `None` = the member is fresh.
    pub(super) not_fresh: Option<Fact>,
    /// The targets in which the objects of the entry are deleted only while its member is fresh.
    pub(super) targets: Vec<String>,
}

impl MeshFollower<'_> {
    /// Adds to the patch what the changed freshness of members changes.
    pub(super) fn follow_freshness(&self, changes: &MeshChanges<'_>, patch: &mut Patch) {
        for (entry, changes) in changes {
            let Some(observed) = changes.freshness else { continue };
            let is_linked = |target: &str| {
                let link = (target != *entry).then(|| self.link(target, entry)).flatten();
                link.is_some_and(|link| link != Link::Sandbox)
            };
            let targets = self.planned.targets.keys().filter(|target| is_linked(target));
            let new = FreshnessPatch {
                not_fresh: Fact::member_not_fresh(entry, Some(observed)),
                targets: targets.cloned().collect(),
            };
            patch.freshness.insert((*entry).to_owned(), new);
        }
    }
}
