//! Which nodes kg has stopped checking in for, by the time at which their check-ins arrived here.
//!
//! kg writes `kilo.squat.ai/last-seen` every 30 s. Its values have no part in what wakes the loop; only that one stayed away
//! for [`SILENT`] has. Arrival is measured with this process's clock, so neither a clock that differs nor a Node that claims
//! a check-in of the future makes another one silent.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use clustermesh_core::checkin::{SILENT, ages};

#[derive(Debug)]
struct CheckIn {
    /// What the annotation holds.
    value: i64,
    /// When that value arrived.
    arrived: Instant,
    /// How old it was then; `None` = it is of the first list and not compared with the others yet.
    before: Option<Duration>,
}

/// Check-ins of one member's nodes.
#[derive(Debug, Default)]
pub(super) struct CheckIns {
    nodes: BTreeMap<String, CheckIn>,
    silent: BTreeSet<String>,
}

impl CheckIns {
    /// A Node as it was listed or watched; `value` = its annotation, `None` = it has none. Returns whether it was silent and is
    /// not any more.
    pub(super) fn note(&mut self, node: &str, value: Option<i64>, now: Instant) -> bool {
        let Some(value) = value else {
            self.nodes.remove(node);
            return self.silent.contains(node);
        };
        let before = match self.nodes.get(node) {
            Some(known) if known.value == value => return false,
            Some(_) => Some(Duration::ZERO),
            None => None,
        };
        let check_in = CheckIn {
            value,
            arrived: now,
            before,
        };
        self.nodes.insert(node.to_owned(), check_in);
        self.silent.contains(node)
    }

    /// The nodes that are silent at `now`, which is `unix` in Unix seconds. While the member is not `current`, no
    /// check-in can arrive: no node becomes silent, and afterwards each has the whole time again.
    pub(super) fn silent(
        &mut self,
        is_there: impl Fn(&str) -> bool,
        current: bool,
        now: Instant,
        unix: i64,
    ) -> &BTreeSet<String> {
        self.nodes.retain(|node, _| is_there(node));
        let values = self
            .nodes
            .iter()
            .map(|(node, known)| (node.clone(), known.value))
            .collect();
        let ages = ages(&values, unix);
        for (node, known) in &mut self.nodes {
            let before = known.before.get_or_insert_with(|| ages[node]);
            let age = now.saturating_duration_since(known.arrived) + *before;
            if age < SILENT {
                self.silent.remove(node);
            } else if current {
                self.silent.insert(node.clone());
            }
            if !current && !self.silent.contains(node) {
                (known.arrived, *before) = (now, Duration::ZERO);
            }
        }
        self.silent.retain(|node| self.nodes.contains_key(node));
        &self.silent
    }

    /// When the next node falls silent, if nothing arrives.
    pub(super) fn due(&self) -> Option<Instant> {
        let waiting = self.nodes.iter().filter(|(node, _)| !self.silent.contains(*node));
        waiting
            .map(|(_, known)| known.arrived + SILENT.saturating_sub(known.before.unwrap_or_default()))
            .min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIX: i64 = 1_795_411_942;

    /// Check-ins with a clock: `at` = seconds since the start.
    struct World {
        check_ins: CheckIns,
        start: Instant,
    }

    impl World {
        fn new() -> Self {
            Self {
                check_ins: CheckIns::default(),
                start: Instant::now(),
            }
        }

        fn note(&mut self, node: &str, value: i64, at: u64) -> bool {
            let at = self.start + Duration::from_secs(at);
            self.check_ins.note(node, Some(value), at)
        }

        fn silent(&mut self, current: bool, at: u64) -> Vec<String> {
            let now = self.start + Duration::from_secs(at);
            let silent = self
                .check_ins
                .silent(|_| true, current, now, UNIX + i64::try_from(at).unwrap());
            silent.iter().cloned().collect()
        }

        fn due(&self) -> Option<u64> {
            let due = self.check_ins.due()?;
            Some(due.duration_since(self.start).as_secs())
        }
    }

    #[test]
    fn a_node_is_silent_65_s_after_its_last_check_in_arrived() {
        let mut world = World::new();
        for at in [0, 30, 60, 90] {
            world.note("a", UNIX + i64::try_from(at).unwrap(), at);
            // kg died on b. The kubelet goes on writing the Node.
            world.note("b", UNIX, at);
            let silent = world.silent(true, at);
            assert_eq!(silent, if at < 65 { vec![] } else { vec!["b".to_owned()] }, "at {at}");
        }
        assert_eq!(world.due(), Some(155));
        assert_eq!(world.silent(true, 155), ["a", "b"]);
        assert!(!world.note("b", UNIX, 159), "the same check-in");
        assert!(world.note("b", UNIX + 200, 160), "the loop has to look again");
        assert_eq!(world.silent(true, 160), ["a"]);
        // kg removes the annotation when it ends, and nothing is known then.
        world.check_ins.note("a", None, world.start);
        assert_eq!((world.silent(true, 161), world.due()), (vec![], Some(225)));
    }

    #[test]
    fn the_first_list_tells_who_was_silent_before() {
        let mut world = World::new();
        // The cluster's clocks are ten minutes behind.
        let then = UNIX - 600;
        world.note("a", then, 0);
        world.note("b", then - 20, 0);
        world.note("dead", then - 64, 0);
        assert_eq!(world.silent(true, 0), Vec::<String>::new());
        assert_eq!(world.due(), Some(1));
        assert_eq!(world.silent(true, 1), ["dead"]);
        // A check-in of the future makes nobody else silent once they check in.
        let mut world = World::new();
        world.note("liar", i64::MAX, 0);
        world.note("a", UNIX - 10, 0);
        assert_eq!(world.silent(true, 0), Vec::<String>::new());
    }

    #[test]
    fn nobody_falls_silent_while_nothing_can_arrive() {
        let mut world = World::new();
        world.note("a", UNIX, 0);
        world.note("dead", UNIX - 600, 0);
        assert_eq!(world.silent(true, 0), ["dead"]);
        assert_eq!(world.silent(false, 600), ["dead"]);
        assert_eq!(
            (world.silent(true, 664), world.due()),
            (vec!["dead".to_owned()], Some(665))
        );
        assert_eq!(world.silent(true, 665), ["a", "dead"]);
        let gone = world
            .check_ins
            .silent(|node| node == "a", true, world.start, UNIX)
            .clone();
        assert!(!gone.contains("dead"), "its Node is gone: {gone:?}");
    }
}
