//! Computes how long ago kg, Kilo's agent, last checked in for each node (`kilo.squat.ai/last-seen`, Unix seconds).
//!
//! The clocks of the nodes and of the observer may differ, so an age is measured from the newest check-in in the same cluster.
//! The controller measures from the arrival of each check-in instead. It uses these ages only for the first check-in that it reads of
//! a node.

use std::{collections::BTreeMap, time::Duration};

/// A node is silent when its kg has not checked in for this long. kg checks in every 30 s. After 60 s without
/// a check-in, the other nodes' kg removes the node from Kilo's own mesh; 5 s later it counts as silent here.
pub const SILENT_AFTER: Duration = Duration::from_secs(65);

/// Returns the age of each node's last check-in, measured from the newest one. `now` is the observer's Unix time. If the newest check-in
/// is in the future, ages are measured from `now`, so that one Node with a wrong clock does not make all the others look old.
#[must_use]
pub fn ages(last_seen: &BTreeMap<String, i64>, now: i64) -> BTreeMap<String, Duration> {
    let newest = last_seen.values().copied().max().unwrap_or(now).min(now);
    let age = |seen: i64| Duration::from_secs(u64::try_from(newest.saturating_sub(seen)).unwrap_or(0));
    last_seen
        .iter()
        .map(|(node, seen)| (node.clone(), age(*seen)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(last_seen: &[(&str, i64)], now: i64) -> Vec<(String, u64)> {
        let last_seen = last_seen
            .iter()
            .map(|(node, seen)| ((*node).to_owned(), *seen))
            .collect();
        ages(&last_seen, now)
            .into_iter()
            .map(|(node, age)| (node, age.as_secs()))
            .collect()
    }

    #[test]
    fn age_counts_from_newest_check_in_or_from_now() {
        let nodes = [("a", 1_000), ("b", 970), ("dead", 100)];
        let want = [("a".to_owned(), 0), ("b".to_owned(), 30), ("dead".to_owned(), 900)];
        // The clocks of the cluster are behind the observer's clock, or equal to it.
        assert_eq!(seconds(&nodes, 99_999), want);
        assert_eq!(seconds(&nodes, 1_000), want);
        // One Node publishes a time in the future.
        let ahead = [("a", 1_000), ("ahead", i64::MAX)];
        assert_eq!(seconds(&ahead, 1_010), [("a".to_owned(), 10), ("ahead".to_owned(), 0)]);
        assert_eq!(seconds(&[("old", i64::MIN)], i64::MAX), [("old".to_owned(), 0)]);
        assert_eq!(seconds(&[], 0), []);
    }
}
