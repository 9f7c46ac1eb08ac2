//! For how long each node's agent has said other PeerPolicies than stand in its cluster. What counts as other, and for how
//! long that is no alarm, is `clustermesh_core::enforcement`'s; this is the clock.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use clustermesh_core::{
    enforcement::{GRACE, outdated},
    mesh::ClusterIdentity,
};

/// The nodes of each member that are behind, by name.
#[derive(Debug, Default)]
pub(crate) struct Lagging(BTreeMap<ClusterIdentity, BTreeMap<String, Behind>>);

#[derive(Debug)]
struct Behind {
    /// What it says. Another word, though it be none that stands, is of an agent that works.
    said: String,
    since: Instant,
    told: bool,
}

impl Lagging {
    /// Forgets the members that are not these.
    pub(crate) fn keep(&mut self, there: impl Fn(&ClusterIdentity) -> bool) {
        self.0.retain(|identity, _| there(identity));
    }

    /// Which nodes of a member are to be told of, where `standing` is the revision of what stands there and `said` each
    /// node's. Without the first, since it cannot be read at the moment, those that were told of before.
    pub(crate) fn told(
        &mut self,
        identity: &ClusterIdentity,
        standing: Option<&str>,
        said: BTreeMap<String, String>,
        now: Instant,
    ) -> BTreeSet<String> {
        if let Some(standing) = standing {
            let mut before = self.0.remove(identity).unwrap_or_default();
            let others = said.into_iter().filter(|(_, said)| outdated(said, standing));
            let behind: BTreeMap<String, Behind> = others
                .map(|(node, said)| {
                    let mut behind = before
                        .remove(&node)
                        .filter(|before| before.said == said)
                        .unwrap_or(Behind {
                            said,
                            since: now,
                            told: false,
                        });
                    behind.told |= now.saturating_duration_since(behind.since) >= GRACE;
                    (node, behind)
                })
                .collect();
            if !behind.is_empty() {
                self.0.insert(identity.clone(), behind);
            }
        }
        let behind = self.0.get(identity).into_iter().flatten();
        behind
            .filter(|(_, behind)| behind.told)
            .map(|(node, _)| node.clone())
            .collect()
    }

    /// When the next of them is to be told of, after `now`.
    pub(crate) fn due(&self, now: Instant) -> Option<Instant> {
        let waiting = self.0.values().flat_map(BTreeMap::values).filter(|behind| !behind.told);
        waiting.map(|behind| behind.since + GRACE).filter(|at| *at > now).min()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_node_is_told_of_when_its_word_did_not_move_for_long_enough_and_until_it_is_the_one_that_stands() {
        let (mut lagging, start) = (Lagging::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut told = |second, standing: Option<&str>, said: &[(&str, &str)]| {
            let said = said.iter().map(|(node, word)| ((*node).to_owned(), (*word).to_owned()));
            let told = lagging.told(&ClusterIdentity::Local, standing, said.collect(), at(second));
            let told: Vec<String> = told.into_iter().collect();
            (told.join(" "), lagging.due(at(second)))
        };
        let none = String::new;
        let a = || "a".to_owned();
        assert_eq!(
            told(0, Some("1"), &[("a", "1"), ("b", "1"), ("old", "")]),
            (none(), None)
        );
        assert_eq!(told(1, Some("2"), &[("a", "1"), ("b", "1")]), (none(), Some(at(16))));
        assert_eq!(told(9, Some("3"), &[("a", "1"), ("b", "2")]), (none(), Some(at(16))));
        assert_eq!(told(15, None, &[]), (none(), Some(at(16))));
        assert_eq!(told(16, Some("3"), &[("a", "1"), ("b", "2")]), (a(), Some(at(24))));
        assert_eq!(told(17, Some("3"), &[("a", "1"), ("b", "3")]), (a(), None));
        assert_eq!(told(90, None, &[]), (a(), None), "what was true stays, unseen");
        assert_eq!(told(91, Some("3"), &[("a", "3"), ("b", "3")]), (none(), None));
    }
}
