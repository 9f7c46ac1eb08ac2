//! Telling the cluster who this node is: annotations of its own Node, written only when they differ from what stands there.
//! What they say is decided by `run`; their spelling is `clustermesh_api`'s.

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

pub mod identity;

/// Annotations by key; `None` = not there, or to be taken away.
pub type Annotations = BTreeMap<&'static str, Option<String>>;

/// What should stand on the Node, and what stands there as far as was seen.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Wanted {
    /// Who the node is: written at once.
    pub identity: Annotations,
    /// How the agent is: written at most every [`STATUS_EVERY`].
    pub status: Annotations,
    /// What was last seen on the Node, of the same keys.
    pub seen: Annotations,
}

/// How often a changed status is written.
pub const STATUS_EVERY: Duration = Duration::from_secs(10);
/// How long what was just written may take to be seen again before it is written once more.
const SETTLE: Duration = Duration::from_secs(5);
/// How long one request may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// When what was written.
#[derive(Debug, Clone, Default)]
struct Written {
    last: BTreeMap<&'static str, (Option<String>, Instant)>,
    status: Option<Instant>,
}

impl Written {
    /// What has to be written now, and when to look again at the latest.
    fn due(&self, wanted: &Wanted, now: Instant) -> (Annotations, Option<Duration>) {
        let mut due = Annotations::new();
        let mut again: Option<Duration> = None;
        let mut later = |wait: Duration| again = Some(again.map_or(wait, |a| a.min(wait)));
        let quiet = self
            .status
            .map_or(Duration::ZERO, |at| STATUS_EVERY.saturating_sub(now - at));
        let all = wanted
            .identity
            .iter()
            .map(|kv| (kv, Duration::ZERO))
            .chain(wanted.status.iter().map(|kv| (kv, quiet)));
        for ((key, value), mut wait) in all {
            if wanted.seen.get(key).unwrap_or(&None) == value {
                continue;
            }
            // Our own watch may be behind our own write.
            if let Some((written, at)) = self.last.get(key)
                && written == value
            {
                wait = wait.max(SETTLE.saturating_sub(now - *at));
            }
            if wait.is_zero() {
                due.insert(*key, value.clone());
            } else {
                later(wait);
            }
        }
        (due, again)
    }

    fn wrote(&mut self, due: &Annotations, status: &Annotations, now: Instant) {
        for (key, value) in due {
            self.last.insert(*key, (value.clone(), now));
            if status.contains_key(key) {
                self.status = Some(now);
            }
        }
    }
}

/// Writes whatever `wanted` comes to say, until the token is cancelled.
pub async fn run(
    client: Client,
    node: String,
    mut wanted: watch::Receiver<Wanted>,
    metrics: Metrics,
    stop: CancellationToken,
) {
    let mut written = Written::default();
    let pauses = || {
        let pauses = ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(500))
            .with_jitter();
        pauses
            .with_max_delay(Duration::from_secs(10))
            .without_max_times()
            .build()
    };
    let mut pause = pauses();
    let mut said = String::new();
    loop {
        let now = wanted.borrow_and_update().clone();
        let (due, mut again) = written.due(&now, Instant::now());
        if !due.is_empty() {
            match write(&client, &node, &due).await {
                Ok(()) => {
                    written.wrote(&due, &now.status, Instant::now());
                    metrics.applied("publish", due.len());
                    if due.keys().any(|key| now.identity.contains_key(key)) {
                        tracing::info!(annotations = readable(&due), "published on this Node");
                    }
                    pause = pauses();
                    said.clear();
                    continue;
                }
                Err(error) => {
                    metrics.failed("publish");
                    if said != error {
                        tracing::warn!(%error, "cannot publish this node's identity; trying again");
                        said = error;
                    }
                    again = pause.next();
                }
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(again.unwrap_or(Duration::from_secs(3600))) => {}
            changed = wanted.changed() => if changed.is_err() { return },
        }
    }
}

/// For the log: `key=value`, and `key removed`.
fn readable(annotations: &Annotations) -> String {
    let each = annotations.iter().map(|(key, value)| match value {
        Some(value) => format!("{key}={value}"),
        None => format!("{key} removed"),
    });
    each.collect::<Vec<_>>().join(", ")
}

/// One merge patch of the Node's annotations.
pub(crate) async fn write(client: &Client, node: &str, annotations: &Annotations) -> Result<(), String> {
    let nodes: Api<Node> = Api::all(client.clone());
    let patch = serde_json::json!({"metadata": {"annotations": annotations}});
    let params = PatchParams::default();
    match tokio::time::timeout(PATIENCE, nodes.patch_metadata(node, &params, &Patch::Merge(&patch))).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(kube::Error::Api(status))) if status.code == 403 => Err(format!(
            "{}; the agent's account needs the verb patch on nodes (deploy/ has the ClusterRole)",
            status.message
        )),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer from the API server within {} s", PATIENCE.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(pairs: &[(&'static str, &str)]) -> Annotations {
        pairs.iter().map(|(k, v)| (*k, Some((*v).to_owned()))).collect()
    }

    #[test]
    fn the_log_tells_annotations_as_a_person_writes_them() {
        let mut annotations = some(&[("a/endpoint", "192.0.2.7:51820"), ("a/key", "F5rh=")]);
        annotations.insert("a/discovered", None);
        assert_eq!(
            readable(&annotations),
            "a/discovered removed, a/endpoint=192.0.2.7:51820, a/key=F5rh="
        );
    }

    #[test]
    fn what_stands_there_is_not_written() {
        let wanted = Wanted {
            identity: some(&[("key", "a")]),
            status: some(&[("agent", "1")]),
            seen: some(&[("key", "a"), ("agent", "1")]),
        };
        assert_eq!(
            Written::default().due(&wanted, Instant::now()),
            (Annotations::new(), None)
        );
        let other = Wanted {
            seen: some(&[("key", "b"), ("agent", "1")]),
            ..wanted
        };
        assert_eq!(
            Written::default().due(&other, Instant::now()),
            (some(&[("key", "a")]), None)
        );
    }

    #[test]
    fn a_status_that_keeps_changing_is_written_every_ten_seconds_and_an_identity_at_once() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut written = Written::default();
        written.wrote(&some(&[("agent", "1")]), &some(&[("agent", "1")]), start);
        let wanted = Wanted {
            identity: some(&[("key", "a")]),
            status: some(&[("agent", "2")]),
            seen: some(&[("agent", "1")]),
        };
        assert_eq!(
            written.due(&wanted, at(4)),
            (some(&[("key", "a")]), Some(Duration::from_secs(6)))
        );
        assert_eq!(written.due(&wanted, at(10)).0, some(&[("key", "a"), ("agent", "2")]));
    }

    #[test]
    fn what_was_just_written_is_given_time_to_be_seen() {
        let start = Instant::now();
        let mut written = Written::default();
        written.wrote(&some(&[("key", "a")]), &Annotations::new(), start);
        let wanted = Wanted {
            identity: some(&[("key", "a")]),
            ..Wanted::default()
        };
        assert_eq!(written.due(&wanted, start), (Annotations::new(), Some(SETTLE)));
        assert_eq!(written.due(&wanted, start + SETTLE), (some(&[("key", "a")]), None));
    }
}
