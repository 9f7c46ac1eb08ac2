//! Publishes this node: writes the desired annotations of its Node that differ from the current ones.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use backon::{BackoffBuilder, ExponentialBuilder};
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
    /// The agent's status: written at most once in [`STATUS_EVERY`].
    pub status: Annotations,
    /// The observed values of the same keys.
    pub seen: Annotations,
}

/// The shortest time between two writes of the status.
pub const STATUS_EVERY: Duration = Duration::from_secs(10);
/// If the agent's watch does not show a write within this time, the write is repeated; a write of the status after [`STATUS_EVERY`].
const SETTLE: Duration = Duration::from_secs(5);
/// How long one request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The values that were written last, and when.
#[derive(Debug, Clone, Default)]
struct WriteHistory {
    last: BTreeMap<&'static str, (Option<String>, Instant)>,
    status_written: Option<Instant>,
}

impl WriteHistory {
    /// The annotations to write now, and after which time to check again.
    fn due(&self, desired: &DesiredAnnotations, now: Instant) -> (Annotations, Option<Duration>) {
        let mut due = Annotations::new();
        let mut next_check: Option<Duration> = None;
        let mut check_after = |wait: Duration| next_check = Some(next_check.map_or(wait, |next| next.min(wait)));
        let status_wait = self
            .status_written
            .map_or(Duration::ZERO, |at| STATUS_EVERY.saturating_sub(now - at));
        let all = desired
            .identity
            .iter()
            .map(|kv| (kv, Duration::ZERO))
            .chain(desired.status.iter().map(|kv| (kv, status_wait)));
        for ((key, value), mut wait) in all {
            if desired.seen.get(key).unwrap_or(&None) == value {
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
        let (due, mut next_check) = history.due(&desired, Instant::now());
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
        };
        assert_eq!(
            WriteHistory::default().due(&desired, Instant::now()),
            (Annotations::new(), None)
        );
        let other = DesiredAnnotations {
            seen: some(&[("key", "b"), ("agent", "1")]),
            ..desired
        };
        assert_eq!(
            WriteHistory::default().due(&other, Instant::now()),
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
        };
        assert_eq!(
            history.due(&desired, at(4)),
            (some(&[("key", "a")]), Some(Duration::from_secs(6)))
        );
        assert_eq!(history.due(&desired, at(10)).0, some(&[("key", "a"), ("agent", "2")]));
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
        assert_eq!(history.due(&desired, start), (Annotations::new(), Some(SETTLE)));
        assert_eq!(history.due(&desired, start + SETTLE), (some(&[("key", "a")]), None));
    }
}
