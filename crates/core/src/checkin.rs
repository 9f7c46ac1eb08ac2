//! When kg last checked in for a node (`kilo.squat.ai/last-seen`, Unix seconds), and how old that is.
//!
//! Two clocks are involved that may differ, the nodes' and the observer's, so an age counts from the newest check-in of the
//! same cluster. Whoever watches goes by the time at which a check-in arrives and needs this for the first list alone.

use std::{collections::BTreeMap, time::Duration};

/// A node whose kg has not checked in for so long is silent. kg checks in every 30 s and leaves a node out after 60 s.
pub const SILENT: Duration = Duration::from_secs(65);

/// How old each node's last check-in is. `now` = the observer's Unix time: a check-in later than that counts as one of now,
/// so that one Node with a wrong clock does not make all others look old.
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
    fn ages_count_from_the_newest_check_in_that_is_not_of_the_future() {
        let nodes = [("a", 1_000), ("b", 970), ("dead", 100)];
        let want = [("a".to_owned(), 0), ("b".to_owned(), 30), ("dead".to_owned(), 900)];
        // The cluster's clocks are behind the observer's, or as the observer's.
        assert_eq!(seconds(&nodes, 99_999), want);
        assert_eq!(seconds(&nodes, 1_000), want);
        // One Node's clock, or its owner, is ahead.
        let ahead = [("a", 1_000), ("liar", i64::MAX)];
        assert_eq!(seconds(&ahead, 1_010), [("a".to_owned(), 10), ("liar".to_owned(), 0)]);
        assert_eq!(seconds(&[("old", i64::MIN)], i64::MAX), [("old".to_owned(), 0)]);
        assert_eq!(seconds(&[], 0), []);
    }
}
