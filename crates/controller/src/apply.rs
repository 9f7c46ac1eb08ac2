//! Writes the steps of a plan's diff into one member. [`queue`] orders and paces them, [`write`] makes the requests.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use clustermesh_access::cause;
use clustermesh_core::{
    diff::Step,
    lanes::{Lanes, Source},
    mesh::MeshId,
};
use futures::{StreamExt, stream::FuturesUnordered};
use kube::Client;
use tokio::{sync::Notify, time::Instant};
use tokio_util::task::TaskTracker;

use crate::{api_error, election::NotPermitted, feed::Changed, metrics::Metrics, session::member_feeds::MemberFeeds};

mod contested;
mod queue;
mod refused;
mod write;

use queue::{Queue, SentStep, key};
pub(crate) use write::Claims;

/// Writes into one member. Clones share the queue.
#[derive(Clone)]
pub(crate) struct MemberWriter {
    inner: Arc<Mutex<Inner>>,
    steps_replaced: Arc<Notify>,
    changed: Changed,
    metrics: Metrics,
}

#[derive(Default)]
struct Inner {
    queue: Queue,
    connection: Option<Connection>,
    /// Whether a task is sending the steps in the queue.
    is_running: bool,
}

/// The member's client and feeds, and the rules that decide which of its objects belong to this hub.
#[derive(Clone)]
pub(crate) struct Connection {
    pub(crate) client: Client,
    pub(crate) feeds: MemberFeeds,
    pub(crate) claims: Arc<Claims>,
}

/// The result of one step.
#[derive(Debug)]
enum Outcome {
    /// The object already had the desired content, or was already deleted.
    Unchanged,
    /// The object was created, updated or deleted. `overwritten_manager`: if it was updated, the last field manager,
    /// other than the controller, that had changed it before.
    Written { overwritten_manager: Option<String> },
    /// The object changed in the meantime; `by` is the field manager that changed it.
    Conflict { by: Option<String> },
    /// The member refuses this object. Contains the reason.
    Refused(String),
    /// The request was not sent, or was given up, because this replica may not write now.
    NotPermitted(String),
    /// The member throttles requests (429).
    Throttled(String),
    /// The member does not answer, fails (502 to 504), or refuses the credentials (401).
    Unavailable(String),
}

impl Outcome {
    /// Why the member did not take the object. `None` = it did, or the object has changed, or this replica may not write.
    const fn failure(&self) -> Option<&String> {
        match self {
            Self::Refused(why) | Self::Throttled(why) | Self::Unavailable(why) => Some(why),
            Self::Unchanged | Self::Written { .. } | Self::Conflict { .. } | Self::NotPermitted(_) => None,
        }
    }

    /// The value of the metric's label `result`.
    const fn metric_label(&self) -> &'static str {
        match self {
            Self::Unchanged | Self::Written { .. } => "ok",
            Self::Conflict { .. } => "conflict",
            Self::Refused(_) => "refused",
            Self::NotPermitted(_) => "not_permitted",
            Self::Throttled(_) => "throttled",
            Self::Unavailable(_) => "unavailable",
        }
    }
}

impl MemberWriter {
    pub(crate) fn new(changed: Changed, metrics: Metrics) -> Self {
        Self {
            inner: Arc::default(),
            steps_replaced: Arc::default(),
            changed,
            metrics,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether steps are in flight or waiting.
    pub(crate) fn is_busy(&self) -> bool {
        !self.lock().queue.is_empty()
    }

    /// Whether a write for this mesh is in flight.
    pub(crate) fn is_writing(&self, mesh: &MeshId) -> bool {
        self.lock().queue.is_writing(mesh)
    }

    /// The problem of a mesh's writes: an outage of the member, refused or contested objects, or throttling. `None` = none of these.
    pub(crate) fn problem(&self, mesh: &MeshId) -> Option<String> {
        self.lock().queue.problem(mesh)
    }

    /// Replaces the steps to send, and starts a task that sends them unless one is running.
    ///
    /// `observed_since` is the time at which the pass that planned the steps began to observe.
    pub(crate) fn set_steps(
        &self,
        groups: BTreeMap<Source, Lanes>,
        observed_since: Instant,
        connection: Connection,
        tasks: &TaskTracker,
    ) {
        let mut inner = self.lock();
        inner.queue.replace(groups, observed_since, Instant::now());
        inner.connection = Some(connection);
        if !inner.is_running && !inner.queue.is_empty() {
            inner.is_running = true;
            tasks.spawn(self.clone().run());
        }
        drop(inner);
        self.steps_replaced.notify_one();
    }

    /// Drops all steps that were not sent yet. Requests in flight are not cancelled.
    pub(crate) fn clear(&self) {
        let now = Instant::now();
        self.lock().queue.replace(BTreeMap::new(), now, now);
        self.steps_replaced.notify_one();
    }

    async fn run(self) {
        let mut guard = RunGuard(Some(self.clone()));
        let mut sending = FuturesUnordered::new();
        let mut has_written = false;
        loop {
            let wait = loop {
                let mut inner = self.lock();
                let Some(connection) = inner.connection.clone() else {
                    break None;
                };
                match inner.queue.next(Instant::now()) {
                    Ok(sent) => sending.push(send(sent, connection)),
                    Err(wait) => break wait,
                }
            };
            {
                let mut inner = self.lock();
                if inner.queue.is_empty() {
                    inner.is_running = false;
                    guard.0 = None;
                    break;
                }
            }
            tokio::select! {
                Some((sent, outcome)) = sending.next() => {
                    has_written |= matches!(outcome, Outcome::Written { .. });
                    self.record(sent, outcome);
                }
                () = self.steps_replaced.notified() => {}
                () = crate::backoff::sleep_until(wait) => {}
            }
        }
        // The queue is empty. After a write, another pass must report the time since which the objects match the plan (`lastSync`).
        if has_written {
            self.changed.notify_one();
        }
    }

    /// Logs and counts the outcome of a step. It wakes the reconcile loop only if a problem begins or ends. The feed wakes the
    /// loop for the written object.
    fn record(&self, sent: SentStep, outcome: Outcome) {
        let step = &sent.step;
        let (kind, name) = key(step);
        let action = step.action.as_str();
        self.metrics.record_write(kind, action, outcome.metric_label());
        match &outcome {
            Outcome::Unchanged => {
                tracing::info!(mesh = %step.mesh, action, kind, name, "not written: the object is already as planned");
            }
            Outcome::Written { .. } => {
                tracing::info!(mesh = %step.mesh, action, kind, name, fields = step.fields.join(","), "written");
            }
            Outcome::Conflict { by } => {
                tracing::info!(mesh = %step.mesh, action, kind, name, by, "not written: another client changed the object");
            }
            Outcome::NotPermitted(why) => tracing::debug!(mesh = %step.mesh, action, kind, name, why, "not written"),
            Outcome::Refused(why) | Outcome::Throttled(why) | Outcome::Unavailable(why) => {
                tracing::debug!(mesh = %step.mesh, action, kind, name, why, "not written; will retry");
            }
        }
        let (mesh, failure) = (step.mesh.clone(), outcome.failure().cloned());
        let has_problem_changed = self.lock().queue.record(sent, outcome, Instant::now());
        if has_problem_changed {
            // Logged once for each reason, because a member may refuse thousands of objects, or every attempt to write one.
            if let Some(why) = failure {
                tracing::warn!(%mesh, action, kind, name, why, "not written; will retry, and further failures for this reason are logged at level debug");
            }
            self.changed.notify_one();
        }
    }
}

async fn send(sent: SentStep, connection: Connection) -> (SentStep, Outcome) {
    let outcome = write::write_step(&sent.step, &connection).await;
    (sent, outcome)
}

/// Allows another task to start if this one panics or is aborted. `None` = the task ended normally.
struct RunGuard(Option<MemberWriter>);

impl Drop for RunGuard {
    fn drop(&mut self) {
        if let Some(writer) = self.0.take() {
            let mut inner = writer.lock();
            inner.is_running = false;
            inner.queue.forget_in_flight();
        }
    }
}

/// Turns the error of a write into an outcome with a message for users.
fn classify_error(error: &kube::Error, step: &Step) -> Outcome {
    match cause::<NotPermitted>(error) {
        // `Member`: the request for the Lease in the member failed. This is a problem of the member, as a failed write is.
        None | Some(NotPermitted::Member(_)) => {}
        Some(why) => return Outcome::NotPermitted(why.to_string()),
    }
    if let kube::Error::Api(status) = error
        && status.code == 429
    {
        return Outcome::Throttled(api_error::describe(error));
    }
    if api_error::is_cluster_wide(error) {
        return Outcome::Unavailable(api_error::describe(error));
    }
    let kube::Error::Api(status) = error else {
        return Outcome::Refused("the existing object or the response does not parse".to_owned());
    };
    Outcome::Refused(match status.code {
        // Kubernetes' admission plugin puts this word into its message. The rest of the message is untrusted and not shown.
        403 | 422 if status.message.contains("ValidatingAdmissionPolicy") => format!(
            "an admission policy of the cluster refuses it ({}): see the lists in its ConfigMap \
             clustermesh-admission (deploy/admission.yaml)",
            status.code
        ),
        403 => format!(
            "the account may not {} it (403): apply the member's RBAC manifests",
            step.action.as_str()
        ),
        404 => "its namespace or its CRD does not exist (404)".to_owned(),
        500 => "its API server fails on this object (500): see its log, or the log of an admission webhook".to_owned(),
        code => format!("its API server refuses it ({code})"),
    })
}

#[cfg(test)]
mod tests;
