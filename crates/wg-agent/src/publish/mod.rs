//! Publishes this node: writes the desired annotations of its Node that differ from the current ones.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use backon::{BackoffBuilder, ExponentialBuilder};
use clustermesh_api::names::NODE_AGENT;
use clustermesh_core::enforcement::report_interval;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

pub(crate) mod discovered;
pub mod identity;

/// Annotations by key; `None` = absent, or to be removed.
pub type Annotations = BTreeMap<&'static str, Option<String>>;

/// The desired annotations of the Node, and the observed values with which they are compared.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DesiredAnnotations {
    /// The node's identity: written at once.
    pub identity: Annotations,
    /// The agent's status: written at most once in [`STATUS_EVERY`], and only in this node's turn.
    pub status: Annotations,
    /// The observed values of the same keys.
    pub seen: Annotations,
    /// When this node may write its status.
    pub turn: Turn,
}

impl DesiredAnnotations {
    fn differs(&self, (key, value): (&&'static str, &Option<String>)) -> bool {
        self.seen.get(key).unwrap_or(&None) != value
    }

    /// Whether the annotation [`NODE_AGENT`] has to be added or removed. This is rare and shows whether wg-agent runs on the
    /// node, so it does not wait for a turn.
    fn adds_or_removes_agent(&self) -> bool {
        let wanted = self.status.get(NODE_AGENT);
        wanted.is_some_and(|wanted| wanted.is_some() != matches!(self.seen.get(NODE_AGENT), Some(Some(_))))
    }
}

/// The turns of this node to write its status. When a remote node dies, the status of all nodes of the cluster changes at the same time.
/// Therefore each node has one turn in each [`report_interval`] since 1970. The turn always starts at the same offset from the
/// start of the interval. The order of the Nodes' names gives the offset. So the cluster's nodes write one after the other,
/// without coordination and without random peaks, and the nodes of a small cluster wait for less than a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Turn {
    /// The number of the cluster's Nodes that precede this one by name.
    position: usize,
    /// The number of the cluster's Nodes.
    nodes: usize,
}

impl Turn {
    /// The turn of `me` among the cluster's Nodes, which must be sorted by name.
    pub fn of<'a>(me: &str, nodes: impl Iterator<Item = &'a str>) -> Self {
        let mut turn = Self::default();
        for node in nodes {
            turn.nodes += 1;
            turn.position += usize::from(node < me);
        }
        turn
    }

    /// How long until the next turn starts, at the time `now` since 1970.
    fn wait(self, now: Duration) -> Duration {
        let interval = report_interval(self.nodes);
        let offset = interval / u32::try_from(self.nodes.max(1)).unwrap_or(u32::MAX)
            * u32::try_from(self.position).unwrap_or(u32::MAX);
        let into_interval = Duration::from_nanos((now.as_nanos() % interval.as_nanos()) as u64);
        if offset >= into_interval {
            offset - into_interval
        } else {
            offset + interval - into_interval
        }
    }
}

/// The shortest time between two writes of the status.
pub const STATUS_EVERY: Duration = Duration::from_secs(10);
/// If the agent's watch does not show a write within this time, the write is repeated. A write of the status is repeated only
/// after [`STATUS_EVERY`].
const SETTLE: Duration = Duration::from_secs(5);
/// How long one request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The values that were written last, and when.
#[derive(Debug, Clone, Default)]
struct WriteHistory {
    last: BTreeMap<&'static str, (Option<String>, Instant)>,
    status_written: Option<Instant>,
    /// When the current change of the status is to be written; `None` = there is no change. It stays as it is while the status changes
    /// further, so a status that changes all the time is written too.
    status_due: Option<Instant>,
}

impl WriteHistory {
    /// How long the status has to wait. `unix` is the time of `now` since 1970.
    fn status_wait(&mut self, desired: &DesiredAnnotations, now: Instant, unix: Duration) -> Duration {
        if !desired.status.iter().any(|kv| desired.differs(kv)) {
            self.status_due = None;
        }
        let earliest = self.status_written.map_or(now, |at| now.max(at + STATUS_EVERY));
        if desired.adds_or_removes_agent() {
            return earliest - now;
        }
        let due = self
            .status_due
            .get_or_insert_with(|| earliest + desired.turn.wait(unix + (earliest - now)));
        due.saturating_duration_since(now)
    }

    /// The annotations to write now, and after which time to check again. `unix` is the time of `now` since 1970.
    fn due(&mut self, desired: &DesiredAnnotations, now: Instant, unix: Duration) -> (Annotations, Option<Duration>) {
        let mut due = Annotations::new();
        let mut next_check: Option<Duration> = None;
        let mut check_after = |wait: Duration| next_check = Some(next_check.map_or(wait, |next| next.min(wait)));
        let status_wait = self.status_wait(desired, now, unix);
        let all = desired
            .identity
            .iter()
            .map(|kv| (kv, Duration::ZERO))
            .chain(desired.status.iter().map(|kv| (kv, status_wait)));
        for ((key, value), mut wait) in all {
            if !desired.differs((key, value)) {
                continue;
            }
            // The agent's watch may not show the last write yet, so the same value is not written again before `SETTLE`.
            if let Some((written, at)) = self.last.get(key)
                && written == value
            {
                wait = wait.max(SETTLE.saturating_sub(now - *at));
            }
            if wait.is_zero() {
                due.insert(*key, value.clone());
            } else {
                check_after(wait);
            }
        }
        (due, next_check)
    }

    fn record(&mut self, due: &Annotations, status: &Annotations, now: Instant) {
        for (key, value) in due {
            self.last.insert(*key, (value.clone(), now));
            if status.contains_key(key) {
                self.status_written = Some(now);
                self.status_due = None;
            }
        }
    }
}

/// Writes annotations when they change, until the token is cancelled or the sender of the desired annotations is dropped.
pub async fn run(
    client: Client,
    node: String,
    mut receiver: watch::Receiver<DesiredAnnotations>,
    metrics: Metrics,
    stop: CancellationToken,
) {
    let mut history = WriteHistory::default();
    let new_backoff = || {
        let backoff = ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(500))
            .with_jitter();
        backoff
            .with_max_delay(Duration::from_secs(10))
            .without_max_times()
            .build()
    };
    let mut backoff = new_backoff();
    let mut last_error = String::new();
    loop {
        let desired = receiver.borrow_and_update().clone();
        let (due, mut next_check) = history.due(&desired, Instant::now(), unix_time());
        if !due.is_empty() {
            match write(&client, &node, &due).await {
                Ok(()) => {
                    history.record(&due, &desired.status, Instant::now());
                    metrics.count_changes("publish", due.len());
                    if due.keys().any(|key| desired.identity.contains_key(key)) {
                        tracing::info!(annotations = describe(&due), "published on this Node");
                    }
                    backoff = new_backoff();
                    last_error.clear();
                    continue;
                }
                Err(error) => {
                    metrics.count_error("publish");
                    if last_error != error {
                        tracing::warn!(%error, "cannot write this Node's annotations; trying again");
                        last_error = error;
                    }
                    // If the API server fails, the writes of all agents fail at the same time. So the status waits for this
                    // node's next turn.
                    history.status_due = None;
                    next_check = backoff.next();
                }
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(next_check.unwrap_or(Duration::from_secs(3600))) => {}
            changed = receiver.changed() => if changed.is_err() { return },
        }
    }
}

fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Renders annotations for the log: `key=value`, or `key removed`.
fn describe(annotations: &Annotations) -> String {
    let each = annotations.iter().map(|(key, value)| match value {
        Some(value) => format!("{key}={value}"),
        None => format!("{key} removed"),
    });
    each.collect::<Vec<_>>().join(", ")
}

/// Writes annotations of the Node by one merge patch.
pub(crate) async fn write(client: &Client, node: &str, annotations: &Annotations) -> Result<(), String> {
    let nodes: Api<Node> = Api::all(client.clone());
    let patch = serde_json::json!({"metadata": {"annotations": annotations}});
    let params = PatchParams::default();
    match tokio::time::timeout(
        REQUEST_TIMEOUT,
        nodes.patch_metadata(node, &params, &Patch::Merge(&patch)),
    )
    .await
    {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(kube::Error::Api(status))) if status.code == 403 => Err(format!(
            "{}; the agent's account needs the verb patch on nodes (deploy/ has the ClusterRole)",
            status.message
        )),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!(
            "no answer from the API server within {} s",
            REQUEST_TIMEOUT.as_secs()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(pairs: &[(&'static str, &str)]) -> Annotations {
        pairs.iter().map(|(k, v)| (*k, Some((*v).to_owned()))).collect()
    }

    #[test]
    fn annotations_are_logged_as_key_and_value() {
        let mut annotations = some(&[("a/endpoint", "192.0.2.7:51820"), ("a/key", "F5rh=")]);
        annotations.insert("a/discovered", None);
        assert_eq!(
            describe(&annotations),
            "a/discovered removed, a/endpoint=192.0.2.7:51820, a/key=F5rh="
        );
    }

    #[test]
    fn only_annotations_that_differ_are_written() {
        let desired = DesiredAnnotations {
            identity: some(&[("key", "a")]),
            status: some(&[("agent", "1")]),
            seen: some(&[("key", "a"), ("agent", "1")]),
            ..DesiredAnnotations::default()
        };
        assert_eq!(
            WriteHistory::default().due(&desired, Instant::now(), Duration::ZERO),
            (Annotations::new(), None)
        );
        let other = DesiredAnnotations {
            seen: some(&[("key", "b"), ("agent", "1")]),
            ..desired
        };
        assert_eq!(
            WriteHistory::default().due(&other, Instant::now(), Duration::ZERO),
            (some(&[("key", "a")]), None)
        );
    }

    #[test]
    fn status_waits_ten_seconds_and_identity_is_written_at_once() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut history = WriteHistory::default();
        history.record(&some(&[("agent", "1")]), &some(&[("agent", "1")]), start);
        let desired = DesiredAnnotations {
            identity: some(&[("key", "a")]),
            status: some(&[("agent", "2")]),
            seen: some(&[("agent", "1")]),
            ..DesiredAnnotations::default()
        };
        let mut due = |seconds| history.due(&desired, at(seconds), Duration::from_secs(seconds));
        assert_eq!(due(4), (some(&[("key", "a")]), Some(Duration::from_secs(6))));
        assert_eq!(due(10).0, some(&[("key", "a"), ("agent", "2")]));
    }

    #[test]
    fn nodes_of_a_large_cluster_write_their_status_in_turn() {
        let names: Vec<String> = (0..1000).map(|n| format!("n{n:03}")).collect();
        let start = Instant::now();
        let changed_at = Duration::from_millis(1_790_000_012_345);
        let mut writes: Vec<u128> = Vec::new();
        for name in &names {
            let desired = DesiredAnnotations {
                status: some(&[(NODE_AGENT, "2")]),
                seen: some(&[(NODE_AGENT, "1")]),
                turn: Turn::of(name, names.iter().map(String::as_str)),
                ..DesiredAnnotations::default()
            };
            let mut history = WriteHistory::default();
            let (due, wait) = history.due(&desired, start, changed_at);
            assert!(due.is_empty() || wait.is_none());
            let wait = wait.unwrap_or_default();
            // The turn does not move: an agent that wakes late still writes its status at once.
            let later = wait + Duration::from_millis(250);
            assert_eq!(
                history.due(&desired, start + later, changed_at + later).0,
                desired.status
            );
            writes.push(wait.as_millis());
        }
        writes.sort_unstable();
        // One write every 100 ms: ten a second, for 100 s.
        let first = writes[0];
        let expected: Vec<u128> = (0..1000).map(|n| first + n * 100).collect();
        assert_eq!(writes, expected);
        assert!(first < 100, "{first}");
    }

    #[test]
    fn node_of_a_small_cluster_waits_less_than_a_second() {
        let turn = Turn::of("c", ["a", "b", "c"].into_iter());
        let waits = [0, 150, 199, 200, 201, 299, 300].map(|ms| turn.wait(Duration::from_millis(ms)).as_millis());
        assert_eq!(waits, [200, 50, 1, 0, 299, 201, 200]);
    }

    #[test]
    fn first_status_does_not_wait_for_a_turn() {
        let desired = DesiredAnnotations {
            status: some(&[(NODE_AGENT, "1")]),
            turn: Turn {
                position: 999,
                nodes: 1000,
            },
            ..DesiredAnnotations::default()
        };
        let mut history = WriteHistory::default();
        let due = history.due(&desired, Instant::now(), Duration::ZERO);
        assert_eq!(due, (desired.status, None));
    }

    #[test]
    fn unobserved_write_is_repeated_after_five_seconds() {
        let start = Instant::now();
        let mut history = WriteHistory::default();
        history.record(&some(&[("key", "a")]), &Annotations::new(), start);
        let desired = DesiredAnnotations {
            identity: some(&[("key", "a")]),
            ..DesiredAnnotations::default()
        };
        let mut due = |after| history.due(&desired, start + after, after);
        assert_eq!(due(Duration::ZERO), (Annotations::new(), Some(SETTLE)));
        assert_eq!(due(SETTLE), (some(&[("key", "a")]), None));
    }
}
