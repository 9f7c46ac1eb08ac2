//! Whose name is asked for next: of the members that have a name due, the one with the fewest lookups under way, so that
//! names which nobody answers starve no other member's. No lookup and no clock here.

use std::collections::{BTreeMap, BTreeSet};

use clustermesh_core::mesh::ClusterIdentity;
use tokio::time::Instant;

use super::Wanted;

/// Every wanted name is in exactly one of its member's two sets.
#[derive(Debug, Default)]
pub(super) struct Turns(BTreeMap<ClusterIdentity, Queue>);

#[derive(Debug, Default)]
struct Queue {
    waiting: BTreeSet<(Instant, String)>,
    asking: BTreeSet<String>,
    /// Those of `asking` that nobody wants any more.
    dropped: BTreeSet<String>,
}

impl Turns {
    /// These names from now on; those that are new are due at once.
    pub(super) fn want(&mut self, names: &Wanted, now: Instant) {
        let none = BTreeSet::new();
        for (member, queue) in &mut self.0 {
            let names = names.get(member).unwrap_or(&none);
            queue.waiting.retain(|(_, name)| names.contains(name));
            queue.dropped = queue.asking.difference(names).cloned().collect();
        }
        for (member, names) in names {
            let queue = self.0.entry(member.clone()).or_default();
            let waiting: BTreeSet<String> = queue.waiting.iter().map(|(_, name)| name.clone()).collect();
            let new = names
                .iter()
                .filter(|name| !waiting.contains(*name) && !queue.asking.contains(*name));
            queue.waiting.extend(new.map(|name| (now, name.clone())));
        }
        self.0
            .retain(|_, queue| !queue.waiting.is_empty() || !queue.asking.is_empty());
    }

    /// The next name, which counts as being asked for until it is [`Self::done`].
    pub(super) fn next(&mut self, now: Instant) -> Option<(ClusterIdentity, String)> {
        let due = self
            .0
            .iter_mut()
            .filter(|(_, queue)| queue.waiting.first().is_some_and(|(at, _)| *at <= now));
        let (member, queue) = due.min_by_key(|(_, queue)| (queue.asking.len(), queue.waiting.first().cloned()))?;
        let (_, name) = queue.waiting.pop_first()?;
        queue.asking.insert(name.clone());
        Some((member.clone(), name))
    }

    /// The lookup has ended; the name is due again then.
    pub(super) fn done(&mut self, member: &ClusterIdentity, name: String, again: Instant) {
        let Some(queue) = self.0.get_mut(member) else { return };
        queue.asking.remove(&name);
        if !queue.dropped.remove(&name) {
            queue.waiting.insert((again, name));
        }
    }

    /// When the next name is due.
    pub(super) fn due(&self) -> Option<Instant> {
        self.0
            .values()
            .filter_map(|queue| queue.waiting.first())
            .map(|(at, _)| *at)
            .min()
    }
}
