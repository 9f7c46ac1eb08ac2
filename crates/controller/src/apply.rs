//! Sends the steps of one member: [`queue`] orders and paces them, [`write`] makes the requests.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use clustermesh_core::{
    diff::Step,
    lanes::{Lanes, Source},
    mesh::MeshId,
};
use futures::{StreamExt, stream::FuturesUnordered};
use kube::Client;
use tokio::{sync::Notify, time::Instant};
use tokio_util::task::TaskTracker;

use crate::{feed::Changed, metrics::Metrics, session::tables::Tables, trouble};

mod contest;
mod queue;
mod write;

use queue::{Queue, Sent, key};
pub(crate) use write::Claims;

/// The writer of one member. Cheap to clone; all clones are one writer.
#[derive(Clone)]
pub(crate) struct Writer {
    state: Arc<Mutex<State>>,
    offered: Arc<Notify>,
    changed: Changed,
    metrics: Metrics,
}

#[derive(Default)]
struct State {
    queue: Queue,
    target: Option<Target>,
    /// Whether a task sends what is in the queue.
    running: bool,
}

/// How to write into the member.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) client: Client,
    pub(crate) tables: Tables,
    pub(crate) claims: Arc<Claims>,
}

/// What became of one step.
#[derive(Debug)]
enum Outcome {
    /// There was nothing left to write.
    Unchanged,
    /// Written; the other field manager that changed the object last.
    Written { over: Option<String> },
    /// Changed meanwhile, and by which field manager.
    Conflict { by: Option<String> },
    /// This object is refused.
    Refused(String),
    /// The member asks to slow down.
    Throttled(String),
    /// The member does not answer, or refuses the credentials.
    Unavailable(String),
}

impl Outcome {
    /// As the metric has it.
    const fn result(&self) -> &'static str {
        match self {
            Self::Unchanged | Self::Written { .. } => "ok",
            Self::Conflict { .. } => "conflict",
            Self::Refused(_) => "refused",
            Self::Throttled(_) => "throttled",
            Self::Unavailable(_) => "trouble",
        }
    }
}

impl Writer {
    pub(crate) fn new(changed: Changed, metrics: Metrics) -> Self {
        Self {
            state: Arc::default(),
            offered: Arc::default(),
            changed,
            metrics,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether anything is in flight or still to be sent.
    pub(crate) fn busy(&self) -> bool {
        !self.lock().queue.is_empty()
    }

    /// Whether a write for this mesh is in flight.
    pub(crate) fn is_writing(&self, mesh: &MeshId) -> bool {
        self.lock().queue.is_writing(mesh)
    }

    /// Why something of this mesh could not be written, if so.
    pub(crate) fn trouble(&self, mesh: &MeshId) -> Option<String> {
        self.lock().queue.trouble(mesh)
    }

    /// Replaces what is to be written; `observed` = when the pass that decided it began to observe. A task sends it.
    pub(crate) fn offer(
        &self,
        groups: BTreeMap<Source, Lanes>,
        observed: Instant,
        target: Target,
        tasks: &TaskTracker,
    ) {
        let mut state = self.lock();
        state.queue.replace(groups, observed, Instant::now());
        state.target = Some(target);
        if !state.running && !state.queue.is_empty() {
            state.running = true;
            tasks.spawn(self.clone().run());
        }
        drop(state);
        self.offered.notify_one();
    }

    /// Sends nothing more until the next offer. What is in flight ends.
    pub(crate) fn clear(&self) {
        let now = Instant::now();
        self.lock().queue.replace(BTreeMap::new(), now, now);
        self.offered.notify_one();
    }

    async fn run(self) {
        let mut ended = Ended(Some(self.clone()));
        let mut sending = FuturesUnordered::new();
        let mut written = false;
        loop {
            let wait = loop {
                let mut state = self.lock();
                let Some(target) = state.target.clone() else { break None };
                match state.queue.next(Instant::now()) {
                    Ok(sent) => sending.push(send(sent, target)),
                    Err(wait) => break wait,
                }
            };
            {
                let mut state = self.lock();
                if state.queue.is_empty() {
                    state.running = false;
                    ended.0 = None;
                    break;
                }
            }
            tokio::select! {
                Some((sent, outcome)) = sending.next() => {
                    written |= matches!(outcome, Outcome::Written { .. });
                    self.note(sent, outcome);
                }
                () = self.offered.notified() => {}
                () = crate::backoff::sleep_until(wait) => {}
            }
        }
        // All steps are written: a pass reports the time. Without a write it would find nothing new.
        if written {
            self.changed.notify_one();
        }
    }

    /// Logs and counts what became of a step. The loop is woken only when its report changes; what was written wakes it by the
    /// table.
    fn note(&self, sent: Sent, outcome: Outcome) {
        let step = &sent.step;
        let (kind, name) = key(step);
        let action = step.action.as_str();
        self.metrics.wrote(kind, action, outcome.result());
        match &outcome {
            Outcome::Unchanged | Outcome::Written { .. } => {
                tracing::info!(mesh = %step.mesh, action, kind, name, fields = step.fields.join(","), "written");
            }
            Outcome::Conflict { by } => {
                tracing::info!(mesh = %step.mesh, action, kind, name, by, "changed by another writer meanwhile");
            }
            Outcome::Refused(why) => tracing::warn!(mesh = %step.mesh, action, kind, name, why, "refused"),
            Outcome::Throttled(why) | Outcome::Unavailable(why) => {
                tracing::warn!(mesh = %step.mesh, action, kind, name, why, "not written; to be tried again");
            }
        }
        let changed = self.lock().queue.note(sent, outcome, Instant::now());
        if changed {
            self.changed.notify_one();
        }
    }
}

async fn send(sent: Sent, target: Target) -> (Sent, Outcome) {
    let outcome = write::one(&sent.step, &target).await;
    (sent, outcome)
}

/// Lets another task begin when this one ended before its time.
struct Ended(Option<Writer>);

impl Drop for Ended {
    fn drop(&mut self) {
        if let Some(writer) = self.0.take() {
            let mut state = writer.lock();
            state.running = false;
            state.queue.abandon();
        }
    }
}

/// The words for a refused write.
fn refusal(error: &kube::Error, step: &Step) -> Outcome {
    if let kube::Error::Api(status) = error
        && status.code == 429
    {
        return Outcome::Throttled(trouble::words(error));
    }
    if trouble::is_of_the_cluster(error) {
        return Outcome::Unavailable(trouble::words(error));
    }
    let kube::Error::Api(status) = error else {
        return Outcome::Refused("the object there, or the answer, cannot be read".to_owned());
    };
    Outcome::Refused(match status.code {
        // The words of Kubernetes' own plugin; nothing of the message is repeated.
        403 | 422 if status.message.contains("ValidatingAdmissionPolicy") => format!(
            "an admission policy of the cluster refuses it ({}): see the lists in the ConfigMap of deploy/admission.yaml there",
            status.code
        ),
        403 => format!(
            "the account may not {} it (403): apply the member's RBAC manifests",
            step.action.as_str()
        ),
        404 => "its namespace or its CRD is not there (404)".to_owned(),
        500 => "its API server fails on this object (500): see its log, or an admission webhook's".to_owned(),
        code => format!("its API server refuses it ({code})"),
    })
}

#[cfg(test)]
mod tests;
