//! Chooses the next name to look up: a due name of the member that has the fewest lookups in progress. So names that never resolve do not
//! delay the names of other members. The caller does the lookups and passes the current time.

use std::collections::{BTreeMap, BTreeSet};

use clustermesh_core::mesh::ClusterIdentity;
use tokio::time::Instant;

use super::NamesByMember;

/// The names of all members. Each name is either waiting or in progress.
#[derive(Debug, Default)]
pub(super) struct LookupQueue(BTreeMap<ClusterIdentity, MemberQueue>);

#[derive(Debug, Default)]
struct MemberQueue {
    /// Names with the time of their next lookup.
    waiting: BTreeSet<(Instant, String)>,
    in_progress: BTreeSet<String>,
    /// Names in progress that are not wanted any more.
    dropped: BTreeSet<String>,
}

impl LookupQueue {
    /// Replaces the wanted names. New names are due at once.
    pub(super) fn set_names(&mut self, names: &NamesByMember, now: Instant) {
        let none = BTreeSet::new();
        for (member, queue) in &mut self.0 {
            let names = names.get(member).unwrap_or(&none);
            queue.waiting.retain(|(_, name)| names.contains(name));
            queue.dropped = queue.in_progress.difference(names).cloned().collect();
        }
        for (member, names) in names {
            let queue = self.0.entry(member.clone()).or_default();
            let waiting: BTreeSet<String> = queue.waiting.iter().map(|(_, name)| name.clone()).collect();
            let new = names
                .iter()
                .filter(|name| !waiting.contains(*name) && !queue.in_progress.contains(*name));
            queue.waiting.extend(new.map(|name| (now, name.clone())));
        }
        self.0
            .retain(|_, queue| !queue.waiting.is_empty() || !queue.in_progress.is_empty());
    }

    /// Returns the next name that is due. It is in progress until [`Self::finish`].
    pub(super) fn next(&mut self, now: Instant) -> Option<(ClusterIdentity, String)> {
        let due_members = self
            .0
            .iter_mut()
            .filter(|(_, queue)| queue.waiting.first().is_some_and(|(at, _)| *at <= now));
        let (member, queue) =
            due_members.min_by_key(|(_, queue)| (queue.in_progress.len(), queue.waiting.first().cloned()))?;
        let (_, name) = queue.waiting.pop_first()?;
        queue.in_progress.insert(name.clone());
        Some((member.clone(), name))
    }

    /// Marks a lookup as finished. The name is due again at `due_at`, unless it is not wanted any more.
    pub(super) fn finish(&mut self, member: &ClusterIdentity, name: String, due_at: Instant) {
        let Some(queue) = self.0.get_mut(member) else { return };
        queue.in_progress.remove(&name);
        if !queue.dropped.remove(&name) {
            queue.waiting.insert((due_at, name));
        }
    }

    /// The time at which the next name is due.
    pub(super) fn due(&self) -> Option<Instant> {
        self.0
            .values()
            .filter_map(|queue| queue.waiting.first())
            .map(|(at, _)| *at)
            .min()
    }
}
