//! Writes to the hub on behalf of the reconcile loop: finalizers, status and Events of ClusterMeshes.
//!
//! A pass publishes what should stand ([`HubWriter::publish`]) and goes on; a task of this module writes it. Each mesh has one
//! pending value, the last that was published. A hub that is slow or away delays nothing but these writes.

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
use futures::{StreamExt, stream::FuturesUnordered};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use tokio::{sync::Notify, time::Instant};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    backoff::{Backoff, Bucket, sleep_until},
    events::{EventPublisher, Notice, Reported},
    feed::Feed,
    report::Report,
};

mod requests;

/// Meshes that are written at the same time.
const CONCURRENT: usize = 4;
/// The longest pause after a failure.
const PAUSE: Duration = Duration::from_secs(30);
/// Reports of one mesh: so many at once, then one each interval. A mesh that never comes to rest is not a write a second.
const REPORTS: u32 = 10;
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// What should stand at the hub for one mesh.
pub(crate) struct Desired {
    /// The object on which the pass decided.
    pub(crate) object: Arc<ClusterMesh>,
    /// A change of our finalizer.
    pub(crate) finalizer: Option<Finalizer>,
    /// Status and Events; `None` = the last report stays.
    pub(crate) report: Option<Report>,
}

/// What to do with our finalizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finalizer {
    /// The mesh may be served from then on.
    Add,
    /// Nothing of it is left. Written only over the version of the object on which this was decided.
    Remove,
}

/// The writer. Dropping it ends the task.
pub(crate) struct HubWriter {
    shared: Arc<Shared>,
    _task: AbortOnDropHandle<()>,
}

struct Shared {
    queue: Mutex<Queue>,
    published: Notify,
    meshes: Feed<Arc<ClusterMesh>>,
    client: Client,
    events: EventPublisher,
}

#[derive(Default)]
struct Queue {
    meshes: BTreeMap<MeshId, Entry>,
    /// The hub as a whole does not answer, or asks to slow down.
    hub: Option<Backoff>,
    /// What it refuses, by kind of write and status code.
    refused: BTreeMap<(Write, u16), Backoff>,
}

struct Entry {
    object: Arc<ClusterMesh>,
    finalizer: Option<Finalizer>,
    report: Option<Report>,
    reported: Option<Reported>,
    /// Why a kind of write waits: its code in [`Queue::refused`].
    blocked: BTreeMap<Write, u16>,
    bucket: Bucket,
    /// Its status was written, and no Events since.
    told: bool,
    /// Published since it was last found to be done.
    dirty: bool,
    writing: bool,
}

/// Kinds of writes, in the order in which one mesh has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Write {
    Finalizer,
    Status,
    Events,
}

/// One write that is due.
enum Job {
    Add(Arc<ClusterMesh>),
    Remove(Arc<ClusterMesh>),
    Status(Arc<ClusterMesh>, Box<ClusterMeshStatus>),
    Events(Arc<ClusterMesh>, Vec<Notice>),
}

impl Job {
    const fn write(&self) -> Write {
        match self {
            Self::Add(_) | Self::Remove(_) => Write::Finalizer,
            Self::Status(..) => Write::Status,
            Self::Events(..) => Write::Events,
        }
    }
}

/// What became of a write.
enum Outcome {
    /// Written; of Events these.
    Done(Vec<Notice>),
    /// The object changed meanwhile: its next version comes by the watch, and with it the next pass.
    Outdated,
    /// The hub refuses it with this code.
    Refused(u16),
    /// The hub gave no answer, or asks to slow down; of Events all but these.
    Unavailable(Vec<Notice>),
}

impl HubWriter {
    /// Starts the task. `meshes` = the ClusterMeshes as they are watched; answers to writes are put there.
    pub(crate) fn start(client: Client, meshes: Feed<Arc<ClusterMesh>>, events: EventPublisher) -> Self {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            published: Notify::new(),
            meshes,
            client,
            events,
        });
        let task = tokio::spawn(Arc::clone(&shared).run());
        Self {
            shared,
            _task: AbortOnDropHandle::new(task),
        }
    }

    /// Replaces what should stand. Meshes that are not named are forgotten.
    pub(crate) fn publish(&self, desired: BTreeMap<MeshId, Desired>) {
        let now = Instant::now();
        let mut queue = self.shared.queue();
        queue.meshes.retain(|id, _| desired.contains_key(id));
        for (id, desired) in desired {
            let entry = queue.meshes.entry(id).or_insert_with(|| Entry {
                object: Arc::clone(&desired.object),
                finalizer: None,
                report: None,
                reported: None,
                blocked: BTreeMap::new(),
                bucket: Bucket::new(now, REPORTS, REPORT_INTERVAL),
                told: false,
                dirty: true,
                writing: false,
            });
            entry.set(desired);
        }
        drop(queue);
        self.shared.published.notify_one();
    }
}

impl Entry {
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
            // Before the first status of this process is written over what an earlier one reported.
            let reported = self.reported.take();
            self.reported = Some(reported.unwrap_or_else(|| Reported::before(&object, &report.notices)));
            self.report = Some(report);
        }
        (self.object, self.finalizer, self.dirty) = (object, finalizer, true);
    }

    /// The first write that is due, of the object as it stands now. `waits` = for a kind of write: until when.
    fn job(
        &mut self,
        standing: &Arc<ClusterMesh>,
        now: Instant,
        waits: impl Fn(Write, &BTreeMap<Write, u16>) -> Option<Instant>,
    ) -> Result<Job, Option<Instant>> {
        let mut next: Option<Instant> = None;
        let mut due = |write| match waits(write, &self.blocked) {
            None => true,
            Some(until) => {
                next = Some(next.map_or(until, |next| next.min(until)));
                false
            }
        };
        match self.finalizer {
            Some(Finalizer::Add) if !is_finalized(standing) && due(Write::Finalizer) => {
                return Ok(Job::Add(Arc::clone(standing)));
            }
            Some(Finalizer::Remove) if is_finalized(standing) => {
                return if due(Write::Finalizer) {
                    Ok(Job::Remove(Arc::clone(&self.object)))
                } else {
                    Err(next)
                };
            }
            _ => {}
        }
        let Some(report) = &self.report else { return Err(next) };
        let status = report.status(standing.status.as_ref(), &Time(k8s_openapi::jiff::Timestamp::now()));
        let differs = standing.status.as_ref() != Some(&status);
        if differs && due(Write::Status) {
            if self.bucket.take(now) {
                return Ok(Job::Status(Arc::clone(standing), Box::new(status)));
            }
            let until = self.bucket.ready();
            next = Some(next.map_or(until, |next| next.min(until)));
        }
        // Also where the next report differs already: a mesh that never comes to rest has Events, too.
        if differs && !self.told {
            return Err(next);
        }
        let news = self
            .reported
            .iter_mut()
            .flat_map(|reported| reported.news(&report.notices));
        let news: Vec<Notice> = news.collect();
        let waits = waits(Write::Events, &self.blocked);
        match waits {
            _ if news.is_empty() => Err(next),
            None => {
                self.told = false;
                Ok(Job::Events(Arc::clone(standing), news))
            }
            Some(until) => Err(Some(next.map_or(until, |next| next.min(until)))),
        }
    }
}

impl Queue {
    /// The first mesh with a write that is due, else until when to wait.
    fn next(&mut self, meshes: &Feed<Arc<ClusterMesh>>, now: Instant) -> Result<(MeshId, Job), Option<Instant>> {
        let mut wait: Option<Instant> = None;
        let mut earliest = |until: Instant| wait = Some(wait.map_or(until, |wait: Instant| wait.min(until)));
        if let Some(hub) = self.hub.as_ref().filter(|hub| hub.waits(now)) {
            return Err(Some(hub.until()));
        }
        let refused = &self.refused;
        let waits = |write, blocked: &BTreeMap<Write, u16>| {
            let backoff = refused.get(&(write, *blocked.get(&write)?))?;
            backoff.waits(now).then(|| backoff.until())
        };
        for (id, entry) in self
            .meshes
            .iter_mut()
            .filter(|(_, entry)| entry.dirty && !entry.writing)
        {
            let name = ObjectName {
                namespace: id.namespace.clone(),
                name: id.name.clone(),
            };
            let standing = meshes.read(|rows| rows.get(&name).map(|row| Arc::clone(&row.value)));
            let same = |standing: &Arc<ClusterMesh>| standing.metadata.uid == entry.object.metadata.uid;
            let Some(standing) = standing.filter(same) else {
                entry.dirty = false;
                continue;
            };
            match entry.job(&standing, now, waits) {
                Ok(job) => {
                    (entry.writing, entry.dirty) = (true, false);
                    return Ok((id.clone(), job));
                }
                Err(Some(until)) => earliest(until),
                Err(None) => entry.dirty = false,
            }
        }
        Err(wait)
    }

    fn note(&mut self, id: &MeshId, write: Write, outcome: Outcome, now: Instant) {
        let published = match &outcome {
            Outcome::Done(events) | Outcome::Unavailable(events) => &events[..],
            Outcome::Outdated | Outcome::Refused(_) => &[],
        };
        let entry = self.meshes.get_mut(id);
        let blocked = entry.map(|entry| {
            entry.writing = false;
            entry.told |= write == Write::Status && matches!(outcome, Outcome::Done(_));
            for notice in published {
                entry.reported.get_or_insert_default().add(notice);
            }
            // What is outdated waits for what the next pass publishes, unless that has happened already.
            entry.dirty |= !matches!(outcome, Outcome::Outdated);
            match outcome {
                Outcome::Refused(code) => entry.blocked.insert(write, code),
                _ => entry.blocked.remove(&write),
            }
        });
        match outcome {
            Outcome::Done(_) | Outcome::Outdated => {
                self.hub = None;
                if let Some(code) = blocked.flatten() {
                    self.refused.remove(&(write, code));
                }
            }
            Outcome::Refused(code) => {
                self.hub = None;
                let backoff = self.refused.entry((write, code));
                let backoff = backoff.or_insert_with(|| Backoff::new(now, PAUSE));
                backoff.failed(now);
            }
            Outcome::Unavailable(_) => match &mut self.hub {
                Some(hub) => hub.failed(now),
                None => self.hub = Some(Backoff::new(now, PAUSE)),
            },
        }
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn run(self: Arc<Self>) {
        let mut writing = FuturesUnordered::new();
        loop {
            let wait = loop {
                if writing.len() >= CONCURRENT {
                    break None;
                }
                let next = self.queue().next(&self.meshes, Instant::now());
                match next {
                    Ok((id, job)) => writing.push(async {
                        let write = job.write();
                        let outcome = self.write(&id, job).await;
                        (id, write, outcome)
                    }),
                    Err(wait) => break wait,
                }
            };
            tokio::select! {
                Some((id, write, outcome)) = writing.next() => self.queue().note(&id, write, outcome, Instant::now()),
                () = self.published.notified() => {}
                () = sleep_until(wait) => {}
            }
        }
    }

    async fn write(&self, id: &MeshId, job: Job) -> Outcome {
        let write = job.write();
        let answer = match job {
            Job::Add(object) => requests::add_finalizer(&self.client, &object).await.map(Some),
            Job::Remove(object) => {
                let answer = requests::remove_finalizer(&self.client, &object).await;
                answer.map(|()| {
                    tracing::info!(mesh = %id, "finalizer removed: nothing of the mesh is left");
                    None
                })
            }
            Job::Status(object, status) => requests::status(&self.client, &object, &status).await.map(Some),
            Job::Events(object, news) => {
                let (published, failed) = self.events.publish(id, &object, news).await;
                return match failed {
                    None => Outcome::Done(published),
                    Some(error) => failure(&error, published),
                };
            }
        };
        match answer {
            Ok(object) => {
                if let Some(object) = object {
                    requests::put(&self.meshes, &object);
                }
                Outcome::Done(vec![])
            }
            Err(error) => {
                let outcome = failure(&error, vec![]);
                let error = &error as &dyn std::error::Error;
                if matches!(outcome, Outcome::Outdated) {
                    tracing::debug!(mesh = %id, ?write, error, "the ClusterMesh has changed; the next pass decides again");
                } else {
                    tracing::warn!(mesh = %id, ?write, error, "not written to the hub");
                }
                outcome
            }
        }
    }
}

fn failure(error: &kube::Error, published: Vec<Notice>) -> Outcome {
    match error {
        kube::Error::Api(status) => match status.code {
            404 | 409 => Outcome::Outdated,
            429 | 502..=504 => Outcome::Unavailable(published),
            code => Outcome::Refused(code),
        },
        _ => Outcome::Unavailable(published),
    }
}

/// Whether the mesh carries our finalizer.
pub(crate) fn is_finalized(object: &ClusterMesh) -> bool {
    let finalizers = object.metadata.finalizers.iter().flatten();
    finalizers.into_iter().any(|name| name == FINALIZER)
}

#[cfg(test)]
mod tests;
