//! Writes finalizers, status and Events of ClusterMeshes to the hub, in the background.
//!
//! Each pass of the reconcile loop sets the desired values ([`HubWriter::publish`]) and does not wait. A task of this module writes
//! them. For each mesh only the latest values are kept. A slow or unavailable hub delays only these writes, never a pass.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use clustermesh_api::{
    mesh::{ClusterMesh, ClusterMeshStatus},
    names::FINALIZER,
};
use clustermesh_core::mesh::{MeshId, ObjectName};
use clustermesh_daemon::Readiness;
use futures::{StreamExt, stream::FuturesUnordered};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use tokio::{sync::Notify, time::Instant};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    backoff::{Backoff, TokenBucket, sleep_until},
    election::{
        Election, Leadership,
        guard::{Permit, guard},
    },
    events::{EventPublisher, Notice, Reported},
    feed::Feed,
    report::Report,
};

mod remarks;
mod requests;

use remarks::Remarks;
use requests::classify_error;

/// The maximum number of requests in flight at the same time.
const MAX_IN_FLIGHT: usize = 4;
/// How often the task looks again whether this replica holds the leader's Lease.
const LAPSE_PAUSE: Duration = Duration::from_millis(500);
/// After this many conflicts (409) in a row for one mesh, its writes count as refused.
const MAX_CONFLICTS: u32 = 3;
/// The longest pause after a failure.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// The token bucket for status writes of one mesh: a burst of this many writes, then one write per interval. It limits the writes for a
/// mesh whose status changes all the time.
const STATUS_BURST: u32 = 10;
const STATUS_INTERVAL: Duration = Duration::from_secs(5);

/// The desired finalizer, status and Events of one ClusterMesh.
pub(crate) struct Desired {
    /// The version of the object that the pass read.
    pub(crate) object: Arc<ClusterMesh>,
    /// The change of our finalizer; `None` = no change.
    pub(crate) finalizer: Option<FinalizerChange>,
    /// Status and Events. `None` = the last report stays valid.
    pub(crate) report: Option<Report>,
}

/// A change of our finalizer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FinalizerChange {
    /// Nothing is written into members for a mesh before it has the finalizer.
    Add,
    /// No object of the mesh is left in any member, except in these clusters, as the annotation `force-cleanup` allows. The request contains
    /// the resourceVersion that the pass read, so it fails if the ClusterMesh has changed since.
    Remove { left_behind: Vec<String> },
}

/// The handle of the task that writes to the hub. Dropping it stops the task.
pub(crate) struct HubWriter {
    shared: Arc<Shared>,
    _task: AbortOnDropHandle<()>,
}

struct Shared {
    queue: Mutex<Queue>,
    published: Notify,
    meshes: Feed<Arc<ClusterMesh>>,
    election: Arc<Election>,
    /// Sends requests only while this replica holds the leader's Lease.
    client: Client,
    events: EventPublisher,
    readiness: Readiness,
}

#[derive(Default)]
struct Queue {
    meshes: BTreeMap<MeshId, QueuedMesh>,
    /// Delays all writes while the hub does not answer or throttles requests.
    outage: Option<Backoff>,
    /// Delays writes that the hub refuses, by kind of write and status code.
    refused: BTreeMap<(WriteKind, u16), Backoff>,
}

/// The desired values of one mesh, and what was written of them.
struct QueuedMesh {
    object: Arc<ClusterMesh>,
    finalizer: Option<FinalizerChange>,
    report: Option<Report>,
    /// The notices that already have an Event.
    reported: Option<Reported>,
    /// Kinds of writes that the hub refused, with the status code. Both together are the key of the backoff in [`Queue::refused`].
    blocked: BTreeMap<WriteKind, u16>,
    /// The number of writes in a row that failed because the ClusterMesh had changed.
    conflicts: u32,
    bucket: TokenBucket,
    /// The hub accepted or refused the status, and its Events were not written yet.
    events_due: bool,
    /// The mesh may have something to write.
    is_dirty: bool,
    is_writing: bool,
}

/// Kinds of writes, in the order in which they are sent for one mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum WriteKind {
    Finalizer,
    Status,
    Events,
}

/// One write that is due.
enum Job {
    AddFinalizer(Arc<ClusterMesh>),
    RemoveFinalizer(Arc<ClusterMesh>, Vec<String>),
    Status(Arc<ClusterMesh>, Box<ClusterMeshStatus>),
    Events(Arc<ClusterMesh>, Vec<Notice>),
}

impl Job {
    const fn kind(&self) -> WriteKind {
        match self {
            Self::AddFinalizer(_) | Self::RemoveFinalizer(..) => WriteKind::Finalizer,
            Self::Status(..) => WriteKind::Status,
            Self::Events(..) => WriteKind::Events,
        }
    }
}

/// The result of a write.
enum Outcome {
    /// The write succeeded. Contains the notices whose Events need no further write.
    Done(Vec<Notice>),
    /// The finalizer was removed, so the ClusterMesh disappears. The watch delivers this.
    Removed,
    /// The object changed or was deleted in the meantime. The watch delivers this change, and the next pass starts.
    Outdated,
    /// The hub refused the write with this status code.
    Refused(u16),
    /// The hub did not answer, or throttles requests. Contains the notices whose Events need no further write.
    Unavailable(Vec<Notice>),
}

impl HubWriter {
    /// Starts the task. It stores the objects that the hub returns for our writes in `meshes`, the feed of ClusterMeshes. `readiness` gets a
    /// remark while something cannot be written.
    pub(crate) fn start(
        client: Client,
        instance: Option<String>,
        meshes: Feed<Arc<ClusterMesh>>,
        election: Arc<Election>,
        readiness: Readiness,
    ) -> Self {
        let client = guard(client, Permit::Hub(Arc::clone(&election)));
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            published: Notify::new(),
            meshes,
            events: EventPublisher::new(client.clone(), instance),
            election,
            client,
            readiness,
        });
        let task = tokio::spawn(Arc::clone(&shared).run());
        Self {
            shared,
            _task: AbortOnDropHandle::new(task),
        }
    }

    /// Replaces the desired values. Drops meshes that `desired` does not contain.
    pub(crate) fn publish(&self, desired: BTreeMap<MeshId, Desired>) {
        let now = Instant::now();
        let mut queue = self.shared.queue();
        queue.meshes.retain(|id, _| desired.contains_key(id));
        for (id, desired) in desired {
            let queued = queue.meshes.entry(id).or_insert_with(|| QueuedMesh {
                object: Arc::clone(&desired.object),
                finalizer: None,
                report: None,
                reported: None,
                blocked: BTreeMap::new(),
                conflicts: 0,
                bucket: TokenBucket::new(now, STATUS_BURST, STATUS_INTERVAL),
                events_due: false,
                is_dirty: true,
                is_writing: false,
            });
            queued.set(desired);
        }
        drop(queue);
        self.shared.published.notify_one();
    }
}

impl QueuedMesh {
    fn set(&mut self, desired: Desired) {
        let Desired {
            object,
            finalizer,
            report,
        } = desired;
        if object.metadata.uid != self.object.metadata.uid {
            (self.report, self.reported) = (None, None);
        }
        if let Some(report) = report {
            // `from_status` needs the status that an earlier process wrote, so it must run before this process writes a status.
            let reported = self.reported.take();
            self.reported = Some(reported.unwrap_or_else(|| Reported::from_status(&object, &report.notices)));
            self.report = Some(report);
        }
        (self.object, self.finalizer, self.is_dirty) = (object, finalizer, true);
    }

    /// Returns the first write that is due. `Err` is the time at which a write becomes due; `Err(None)` = nothing is left to write.
    ///
    /// `current` is the object as the feed contains it. `blocked_until` returns the end of the backoff for a kind of write.
    fn next_job(
        &mut self,
        current: &Arc<ClusterMesh>,
        now: Instant,
        blocked_until: impl Fn(WriteKind, &BTreeMap<WriteKind, u16>) -> Option<Instant>,
    ) -> Result<Job, Option<Instant>> {
        let mut next: Option<Instant> = None;
        let mut is_due = |kind| match blocked_until(kind, &self.blocked) {
            None => true,
            Some(until) => {
                next = Some(next.map_or(until, |next| next.min(until)));
                false
            }
        };
        match &self.finalizer {
            Some(FinalizerChange::Add) if !has_finalizer(current) && is_due(WriteKind::Finalizer) => {
                return Ok(Job::AddFinalizer(Arc::clone(current)));
            }
            // The ClusterMesh disappears with its finalizer, so its status and Events are not written any more.
            Some(FinalizerChange::Remove { left_behind }) if has_finalizer(current) => {
                return if is_due(WriteKind::Finalizer) {
                    Ok(Job::RemoveFinalizer(Arc::clone(&self.object), left_behind.clone()))
                } else {
                    Err(next)
                };
            }
            _ => {}
        }
        let Some(report) = &self.report else { return Err(next) };
        let status = report.status(current.status.as_ref(), &Time(k8s_openapi::jiff::Timestamp::now()));
        let differs = current.status.as_ref() != Some(&status);
        if differs && is_due(WriteKind::Status) {
            if self.bucket.take(now) {
                return Ok(Job::Status(Arc::clone(current), Box::new(status)));
            }
            let until = self.bucket.ready_at();
            next = Some(next.map_or(until, |next| next.min(until)));
        }
        // Events are written when the status is up to date. They are also due after each status write, because a status that changes all
        // the time is never up to date.
        if differs && !self.events_due {
            return Err(next);
        }
        let unpublished = self
            .reported
            .iter_mut()
            .flat_map(|reported| reported.unpublished(&report.notices));
        let unpublished: Vec<Notice> = unpublished.collect();
        match blocked_until(WriteKind::Events, &self.blocked) {
            _ if unpublished.is_empty() => Err(next),
            None => {
                self.events_due = false;
                Ok(Job::Events(Arc::clone(current), unpublished))
            }
            Some(until) => Err(Some(next.map_or(until, |next| next.min(until)))),
        }
    }
}

impl Queue {
    /// Returns the first mesh with a write that is due, and marks the mesh as being written. `Err` is the time of the next call;
    /// `Err(None)` = no write becomes due by the passing of time.
    fn next(&mut self, meshes: &Feed<Arc<ClusterMesh>>, now: Instant) -> Result<(MeshId, Job), Option<Instant>> {
        let mut wait: Option<Instant> = None;
        let mut earliest = |until: Instant| wait = Some(wait.map_or(until, |wait: Instant| wait.min(until)));
        if let Some(outage) = self.outage.as_ref().filter(|outage| outage.is_waiting(now)) {
            return Err(Some(outage.until()));
        }
        let refused = &self.refused;
        let blocked_until = |kind, blocked: &BTreeMap<WriteKind, u16>| {
            let backoff = refused.get(&(kind, *blocked.get(&kind)?))?;
            backoff.is_waiting(now).then(|| backoff.until())
        };
        for (id, queued) in self
            .meshes
            .iter_mut()
            .filter(|(_, queued)| queued.is_dirty && !queued.is_writing)
        {
            let name = ObjectName {
                namespace: id.namespace.clone(),
                name: id.name.clone(),
            };
            let current = meshes.read(|rows| rows.get(&name).map(|row| Arc::clone(&row.value)));
            let is_same_object = |current: &Arc<ClusterMesh>| current.metadata.uid == queued.object.metadata.uid;
            let Some(current) = current.filter(is_same_object) else {
                queued.is_dirty = false;
                continue;
            };
            match queued.next_job(&current, now, blocked_until) {
                Ok(job) => {
                    (queued.is_writing, queued.is_dirty) = (true, false);
                    return Ok((id.clone(), job));
                }
                Err(Some(until)) => earliest(until),
                Err(None) => queued.is_dirty = false,
            }
        }
        Err(wait)
    }

    /// Records the outcome of a write.
    fn record(&mut self, id: &MeshId, kind: WriteKind, outcome: Outcome, now: Instant) {
        let outcome = self.count_conflicts(id, kind, outcome);
        let finished_notices = match &outcome {
            Outcome::Done(notices) | Outcome::Unavailable(notices) => &notices[..],
            Outcome::Removed | Outcome::Outdated | Outcome::Refused(_) => &[],
        };
        let queued = self.meshes.get_mut(id);
        let previous_code = queued.map(|queued| {
            queued.is_writing = false;
            // Events are published also if the hub refuses the status.
            queued.events_due |= kind == WriteKind::Status && matches!(outcome, Outcome::Done(_) | Outcome::Refused(_));
            for notice in finished_notices {
                queued.reported.get_or_insert_default().add(notice);
            }
            // After `Removed` or `Outdated` there is nothing to write until a pass publishes new values. If a pass published some
            // during the write, the mesh is already dirty and stays so.
            queued.is_dirty |= !matches!(outcome, Outcome::Removed | Outcome::Outdated);
            match outcome {
                Outcome::Refused(code) => queued.blocked.insert(kind, code),
                _ => queued.blocked.remove(&kind),
            }
        });
        match outcome {
            Outcome::Done(_) | Outcome::Removed | Outcome::Outdated => {
                self.outage = None;
                if let Some(code) = previous_code.flatten() {
                    self.refused.remove(&(kind, code));
                }
            }
            Outcome::Refused(code) => {
                self.outage = None;
                let backoff = self.refused.entry((kind, code));
                let backoff = backoff.or_insert_with(|| Backoff::new(now, MAX_PAUSE));
                // Does not change a new backoff, because its first pause is running.
                backoff.record_failure(now);
            }
            Outcome::Unavailable(_) => match &mut self.outage {
                Some(outage) => outage.record_failure(now),
                None => self.outage = Some(Backoff::new(now, MAX_PAUSE)),
            },
        }
    }
}

impl Queue {
    /// Counts conflicts in a row. From number [`MAX_CONFLICTS`] on, each conflict becomes a refusal.
    fn count_conflicts(&mut self, id: &MeshId, kind: WriteKind, outcome: Outcome) -> Outcome {
        let Some(queued) = self.meshes.get_mut(id) else {
            return outcome;
        };
        match outcome {
            Outcome::Outdated => queued.conflicts += 1,
            // Events do not depend on the version of the object.
            Outcome::Done(_) if kind != WriteKind::Events => queued.conflicts = 0,
            _ => return outcome,
        }
        if queued.conflicts < MAX_CONFLICTS {
            return outcome;
        }
        Outcome::Refused(409)
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn run(self: Arc<Self>) {
        let mut leadership = self.election.subscribe();
        let mut remarks = Remarks::default();
        let mut writing = FuturesUnordered::new();
        loop {
            let wait = loop {
                if writing.len() >= MAX_IN_FLIGHT {
                    break None;
                }
                if self.election.leadership() != Leadership::Leader {
                    // `leadership` reports a change only after a request for the Lease. If the Lease lapses and this request
                    // renews it, no change is reported. So the task looks again after a pause.
                    break Some(Instant::now() + LAPSE_PAUSE);
                }
                let next = self.queue().next(&self.meshes, Instant::now());
                match next {
                    Ok((id, job)) => writing.push(async {
                        let kind = job.kind();
                        let outcome = self.write(&id, job).await;
                        (id, kind, outcome)
                    }),
                    Err(wait) => break wait,
                }
            };
            tokio::select! {
                Some((id, kind, outcome)) = writing.next() => {
                    let mut queue = self.queue();
                    queue.record(&id, kind, outcome, Instant::now());
                    remarks.update(&queue, &self.readiness);
                }
                () = self.published.notified() => {}
                // `changed` never fails, because `self.election` contains the sender.
                Ok(()) = leadership.changed() => {}
                () = sleep_until(wait) => {}
            }
        }
    }

    async fn write(&self, id: &MeshId, job: Job) -> Outcome {
        let kind = job.kind();
        let answer = match job {
            Job::AddFinalizer(object) => requests::add_finalizer(&self.client, &object).await.map(Some),
            Job::RemoveFinalizer(object, left_behind) => {
                if !left_behind.is_empty() {
                    // The ClusterMesh and its status disappear; this Event stays.
                    let notice = Notice::objects_left(id, &left_behind.join(", "));
                    tracing::warn!(mesh = %id, why = notice.message, "the finalizer is removed");
                    self.events.publish(id, &object, vec![notice]).await;
                }
                let answer = requests::remove_finalizer(&self.client, &object).await;
                if answer.is_ok() {
                    tracing::info!(mesh = %id, left_behind = left_behind.len(), "finalizer removed");
                    return Outcome::Removed;
                }
                answer.map(|()| None)
            }
            Job::Status(object, status) => requests::apply_status(&self.client, &object, &status).await.map(Some),
            Job::Events(object, notices) => {
                let (published, failed) = self.events.publish(id, &object, notices).await;
                return match failed {
                    None => Outcome::Done(published),
                    Some(error) => classify_error(&error, published),
                };
            }
        };
        match answer {
            Ok(object) => {
                if let Some(object) = object {
                    requests::update_feed(&self.meshes, &object);
                }
                Outcome::Done(vec![])
            }
            Err(error) => {
                let outcome = classify_error(&error, vec![]);
                let error = &error as &dyn std::error::Error;
                if matches!(outcome, Outcome::Outdated) {
                    tracing::debug!(mesh = %id, write = ?kind, error, "the ClusterMesh has changed; the next pass decides again");
                } else {
                    tracing::warn!(mesh = %id, write = ?kind, error, "not written to the hub");
                }
                outcome
            }
        }
    }
}

/// Whether the ClusterMesh has our finalizer.
pub(crate) fn has_finalizer(object: &ClusterMesh) -> bool {
    let finalizers = object.metadata.finalizers.iter().flatten();
    finalizers.into_iter().any(|name| name == FINALIZER)
}

#[cfg(test)]
mod tests;
