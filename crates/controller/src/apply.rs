//! Writes steps into one member: in order, a few at a time, each object's failures remembered apart so that one that is
//! refused delays no other. What to write was decided elsewhere.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use clustermesh_core::{
    diff::{Action, Step},
    mesh::MeshId,
};
use futures::{StreamExt, stream};
use kube::Client;
use tokio_util::task::TaskTracker;

use crate::{feed::Changed, metrics::Metrics, session::tables::Tables, trouble};

mod write;

pub(crate) use write::Claims;

/// Requests to one member at the same time.
const CONCURRENT: usize = 8;

/// The writer of one member. Cheap to clone; all clones are one writer.
#[derive(Debug, Clone)]
pub(crate) struct Writer {
    state: Arc<Mutex<State>>,
    changed: Changed,
    metrics: Metrics,
}

#[derive(Debug, Default)]
struct State {
    busy: bool,
    /// The member as a whole asked to wait, or did not answer.
    cluster: Option<Failure>,
    /// Objects that were refused, by kind and name.
    objects: BTreeMap<(&'static str, String), Failure>,
}

#[derive(Debug)]
struct Failure {
    mesh: Option<MeshId>,
    why: String,
    not_before: Instant,
    pauses: ExponentialBackoff,
}

impl Failure {
    fn again(before: Option<Self>, mesh: Option<MeshId>, why: String) -> Self {
        let mut pauses = before.map_or_else(pauses, |failure| failure.pauses);
        let wait = pauses.next().unwrap_or(Duration::from_secs(60));
        Self {
            mesh,
            why,
            not_before: Instant::now() + wait,
            pauses,
        }
    }
}

fn pauses() -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(500))
        .with_max_delay(Duration::from_secs(60))
        .with_jitter()
        .without_max_times()
        .build()
}

/// What became of one step.
enum Outcome {
    /// Written, or there was nothing left to write.
    Done,
    /// Somebody else changed it meanwhile: the next plan sees what.
    Conflict,
    /// This object is refused.
    Refused(String),
    /// The member is in trouble.
    Trouble(String),
}

impl Writer {
    pub(crate) fn new(changed: Changed, metrics: Metrics) -> Self {
        Self {
            state: Arc::default(),
            changed,
            metrics,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a batch is being written.
    pub(crate) fn busy(&self) -> bool {
        self.lock().busy
    }

    /// Why something of this mesh could not be written, if so.
    pub(crate) fn trouble(&self, mesh: &MeshId) -> Option<String> {
        let state = self.lock();
        let objects = || {
            state
                .objects
                .iter()
                .filter(|(_, failure)| failure.mesh.as_ref() == Some(mesh))
                .map(|((kind, name), failure)| format!("{kind} {name}: {}", failure.why))
        };
        let more = objects().count().saturating_sub(1);
        match (&state.cluster, objects().next()) {
            (Some(failure), _) => Some(failure.why.clone()),
            (None, Some(first)) if more > 0 => Some(format!("{first}; and {more} more")),
            (None, first) => first,
        }
    }

    /// Takes what is to be written now; when it is busy or told to wait, the next plan will offer it again. Returns when
    /// the loop has to look again because of a wait.
    pub(crate) fn offer(
        &self,
        steps: Vec<Step>,
        client: Client,
        tables: &Tables,
        claims: &Arc<Claims>,
        tasks: &TaskTracker,
    ) -> Option<Instant> {
        let now = Instant::now();
        let mut state = self.lock();
        // What is no longer to be written has no failure any more.
        state
            .objects
            .retain(|(kind, name), _| steps.iter().any(|s| s.item.kind() == *kind && s.item.name() == *name));
        if state.busy || steps.is_empty() {
            if steps.is_empty() {
                state.cluster = None;
            }
            return None;
        }
        if let Some(failure) = &state.cluster
            && failure.not_before > now
        {
            return Some(failure.not_before);
        }
        let waits = |step: &Step| {
            state
                .objects
                .get(&key(step))
                .map(|f| f.not_before)
                .filter(|until| *until > now)
        };
        let earliest = steps.iter().filter_map(waits).min();
        let batch: Vec<Step> = steps.iter().filter(|step| waits(step).is_none()).cloned().collect();
        if batch.is_empty() {
            return earliest;
        }
        state.busy = true;
        drop(state);
        let (writer, tables, claims) = (self.clone(), tables.clone(), Arc::clone(claims));
        tasks.spawn(async move {
            // Also when the batch is dropped half way, the writer is free again.
            let _free = Free(writer.clone());
            writer.write(batch, client, tables, claims).await;
        });
        earliest
    }

    async fn write(&self, steps: Vec<Step>, client: Client, tables: Tables, claims: Arc<Claims>) {
        for run in runs(&steps) {
            let at_once = if concurrent(run) { CONCURRENT } else { 1 };
            // Owned, since the compiler cannot see that futures over borrowed steps may be sent (rust-lang/rust#110338).
            let mut outcomes = stream::iter(run.to_vec())
                .map(|step| {
                    let (client, tables, claims) = (client.clone(), tables.clone(), Arc::clone(&claims));
                    async move {
                        let outcome = write::one(&step, &client, &tables, &claims).await;
                        (step, outcome)
                    }
                })
                .buffered(at_once);
            while let Some((step, outcome)) = outcomes.next().await {
                if !self.note(&step, outcome) {
                    return;
                }
            }
        }
        self.lock().cluster = None;
    }

    /// Remembers what became of a step; `false` = the rest of the batch has no chance.
    fn note(&self, step: &Step, outcome: Outcome) -> bool {
        let (kind, name) = key(step);
        let action = step.action.as_str();
        let mut state = self.lock();
        match outcome {
            Outcome::Done => {
                state.objects.remove(&(kind, name.clone()));
                drop(state);
                self.metrics.wrote(kind, action, "ok");
                tracing::info!(mesh = %step.mesh, action, kind, name, fields = step.fields.join(","), "written");
                true
            }
            Outcome::Conflict => {
                drop(state);
                self.metrics.wrote(kind, action, "conflict");
                tracing::info!(mesh = %step.mesh, action, kind, name, "changed by somebody else meanwhile; planning again");
                true
            }
            Outcome::Refused(why) => {
                tracing::warn!(mesh = %step.mesh, action, kind, name, %why, "refused");
                let before = state.objects.remove(&(kind, name.clone()));
                state
                    .objects
                    .insert((kind, name), Failure::again(before, Some(step.mesh.clone()), why));
                drop(state);
                self.metrics.wrote(kind, action, "refused");
                true
            }
            Outcome::Trouble(why) => {
                tracing::warn!(mesh = %step.mesh, action, kind, name, %why, "not written; the member is given time");
                let before = state.cluster.take();
                state.cluster = Some(Failure::again(before, None, why));
                drop(state);
                self.metrics.wrote(kind, action, "trouble");
                false
            }
        }
    }
}

/// Frees the writer and wakes the loop, however the batch ended.
struct Free(Writer);

impl Drop for Free {
    fn drop(&mut self) {
        self.0.lock().busy = false;
        self.0.changed.notify_one();
    }
}

fn key(step: &Step) -> (&'static str, String) {
    (step.item.kind(), step.item.name())
}

/// Cuts the steps into runs of one kind and action: between runs the order matters.
fn runs(steps: &[Step]) -> impl Iterator<Item = &[Step]> {
    steps.chunk_by(|a, b| a.item.kind() == b.item.kind() && a.action == b.action)
}

/// Whether the order inside a run does not matter. It does where prefixes or keys move between Peers: gain comes before loss.
fn concurrent(run: &[Step]) -> bool {
    let moves = |step: &Step| {
        step.fields
            .iter()
            .any(|field| matches!(*field, "spec.allowedIPs" | "spec.publicKey" | "spec"))
    };
    run.first().is_some_and(|step| step.action != Action::Update) || !run.iter().any(moves)
}

/// The words for a refused write.
fn refusal(error: &kube::Error, step: &Step) -> Outcome {
    if trouble::is_of_the_cluster(error) {
        return Outcome::Trouble(trouble::words(error));
    }
    let kube::Error::Api(status) = error else {
        return Outcome::Refused("what stands there, or the answer, cannot be read".to_owned());
    };
    Outcome::Refused(match status.code {
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
