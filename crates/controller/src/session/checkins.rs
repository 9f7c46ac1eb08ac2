//! Detects nodes on which kg has stopped checking in.
//!
//! kg writes the annotation `kilo.squat.ai/last-seen` every 30 s. A node is silent when no new value has arrived for [`SILENT_AFTER`]. A
//! new or removed value wakes the reconcile loop only if the node was silent. The controller measures the time of arrival with its own
//! clock, so a wrong clock of a node does not matter. Exception: the age of a node's first value comes from a comparison with the other
//! nodes' values ([`ages`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use clustermesh_core::checkin::{SILENT_AFTER, ages};

#[derive(Debug)]
struct CheckIn {
    /// The value of the annotation, in Unix seconds.
    value: i64,
    /// When the value arrived.
    arrived: Instant,
    /// The age of the value when it arrived. `None` = it is the first value of the node and was not compared with the values of other
    /// nodes yet.
    initial_age: Option<Duration>,
}

/// The check-ins of the nodes of one member.
#[derive(Debug, Default)]
pub(super) struct CheckIns {
    nodes: BTreeMap<String, CheckIn>,
    silent: BTreeSet<String>,
}

impl CheckIns {
    /// Records the annotation of a Node that a list or an event contains. `None` = the Node has no such annotation. Returns `true` if
    /// the node was silent, and now has a new value or no annotation.
    pub(super) fn record(&mut self, node: &str, value: Option<i64>, now: Instant) -> bool {
        let Some(value) = value else {
            self.nodes.remove(node);
            return self.silent.contains(node);
        };
        let initial_age = match self.nodes.get(node) {
            Some(last) if last.value == value => return false,
            Some(_) => Some(Duration::ZERO),
            None => None,
        };
        let check_in = CheckIn {
            value,
            arrived: now,
            initial_age,
        };
        self.nodes.insert(node.to_owned(), check_in);
        self.silent.contains(node)
    }

    /// Returns the nodes that are silent at `now`, which is `unix` in Unix seconds. Forgets nodes for which `exists` is false.
    ///
    /// While `is_current` is false, the watches of the member lag behind, so check-ins may be missing. Then no node becomes silent.
    /// When it is true again, [`SILENT_AFTER`] starts anew for each node that was not silent.
    pub(super) fn silent(
        &mut self,
        exists: impl Fn(&str) -> bool,
        is_current: bool,
        now: Instant,
        unix: i64,
    ) -> &BTreeSet<String> {
        self.nodes.retain(|node, _| exists(node));
        let values = self
            .nodes
            .iter()
            .map(|(node, check_in)| (node.clone(), check_in.value))
            .collect();
        let ages = ages(&values, unix);
        for (node, check_in) in &mut self.nodes {
            let initial_age = check_in.initial_age.get_or_insert_with(|| ages[node]);
            let age = now.saturating_duration_since(check_in.arrived) + *initial_age;
            if age < SILENT_AFTER {
                self.silent.remove(node);
            } else if is_current {
                self.silent.insert(node.clone());
            }
            if !is_current && !self.silent.contains(node) {
                (check_in.arrived, *initial_age) = (now, Duration::ZERO);
            }
        }
        self.silent.retain(|node| self.nodes.contains_key(node));
        &self.silent
    }

    /// The time at which the next node becomes silent if no check-in arrives.
    pub(super) fn due(&self) -> Option<Instant> {
        let not_silent = self.nodes.iter().filter(|(node, _)| !self.silent.contains(*node));
        not_silent
            .map(|(_, check_in)| {
                check_in.arrived + SILENT_AFTER.saturating_sub(check_in.initial_age.unwrap_or_default())
            })
            .min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START_UNIX: i64 = 1_795_411_942;

    /// Check-ins with a clock. Each `at` is in seconds since the start.
    struct Fixture {
        check_ins: CheckIns,
        start: Instant,
    }

    impl Fixture {
        fn new() -> Self {
            Self {
                check_ins: CheckIns::default(),
                start: Instant::now(),
            }
        }

        fn record(&mut self, node: &str, value: i64, at: u64) -> bool {
            let at = self.start + Duration::from_secs(at);
            self.check_ins.record(node, Some(value), at)
        }

        fn silent(&mut self, is_current: bool, at: u64) -> Vec<String> {
            let now = self.start + Duration::from_secs(at);
            let silent = self
                .check_ins
                .silent(|_| true, is_current, now, START_UNIX + i64::try_from(at).unwrap());
            silent.iter().cloned().collect()
        }

        fn due(&self) -> Option<u64> {
            let due = self.check_ins.due()?;
            Some(due.duration_since(self.start).as_secs())
        }
    }

    #[test]
    fn node_is_silent_65_s_after_its_last_check_in() {
        let mut fixture = Fixture::new();
        for at in [0, 30, 60, 90] {
            fixture.record("a", START_UNIX + i64::try_from(at).unwrap(), at);
            // kg crashed on node b, but the kubelet still updates the Node.
            fixture.record("b", START_UNIX, at);
            let silent = fixture.silent(true, at);
            assert_eq!(silent, if at < 65 { vec![] } else { vec!["b".to_owned()] }, "at {at}");
        }
        assert_eq!(fixture.due(), Some(155));
        assert_eq!(fixture.silent(true, 155), ["a", "b"]);
        assert!(!fixture.record("b", START_UNIX, 159), "the value is unchanged");
        assert!(fixture.record("b", START_UNIX + 200, 160), "a new value wakes the loop");
        assert_eq!(fixture.silent(true, 160), ["a"]);
        // kg removes the annotation when it stops. A node without it is not silent.
        fixture.check_ins.record("a", None, fixture.start);
        assert_eq!((fixture.silent(true, 161), fixture.due()), (vec![], Some(225)));
    }

    #[test]
    fn wrong_node_clocks_do_not_change_ages_of_first_values() {
        let mut fixture = Fixture::new();
        // The clocks of the cluster are ten minutes behind.
        let then = START_UNIX - 600;
        fixture.record("a", then, 0);
        fixture.record("b", then - 20, 0);
        fixture.record("dead", then - 64, 0);
        assert_eq!(fixture.silent(true, 0), Vec::<String>::new());
        assert_eq!(fixture.due(), Some(1));
        assert_eq!(fixture.silent(true, 1), ["dead"]);
        // A check-in in the future makes no other node silent.
        let mut fixture = Fixture::new();
        fixture.record("future", i64::MAX, 0);
        fixture.record("a", START_UNIX - 10, 0);
        assert_eq!(fixture.silent(true, 0), Vec::<String>::new());
    }

    #[test]
    fn no_node_becomes_silent_while_watches_lag_behind() {
        let mut fixture = Fixture::new();
        fixture.record("a", START_UNIX, 0);
        fixture.record("dead", START_UNIX - 600, 0);
        assert_eq!(fixture.silent(true, 0), ["dead"]);
        assert_eq!(fixture.silent(false, 600), ["dead"]);
        assert_eq!(
            (fixture.silent(true, 664), fixture.due()),
            (vec!["dead".to_owned()], Some(665))
        );
        assert_eq!(fixture.silent(true, 665), ["a", "dead"]);
        let silent = fixture
            .check_ins
            .silent(|node| node == "a", true, fixture.start, START_UNIX)
            .clone();
        assert!(!silent.contains("dead"), "a deleted Node is not silent: {silent:?}");
    }
}
