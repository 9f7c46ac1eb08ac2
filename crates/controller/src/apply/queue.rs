//! Decides which step of one member is sent next. It makes no requests, and the caller passes the current time.
//!
//! Each pass replaces the steps of the pass before. Steps are grouped by source ([`clustermesh_core::lanes`]), and each group has two
//! lanes. Lanes of the same kind take turns. Steps of `revoking`, which may revoke something, are sent first and are not rate limited.
//! For `rest` each group has a token bucket, so that one source cannot use up the share of the others; deletes take no token. The
//! `revoking` lanes of all groups share one limit of concurrent requests, and their `rest` lanes another. Failed steps wait here until
//! their backoff ends; no pass is needed to send them again.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Bound,
    sync::Arc,
    time::Duration,
};

use clustermesh_core::{
    diff::{Action, Step},
    lanes::{Lanes, Source},
    mesh::MeshId,
};
use tokio::time::Instant;

use super::{
    Outcome,
    contested::{Content, ObjectWrites},
    refused::RefusedObjects,
};
use crate::backoff::{Backoff, TokenBucket};

/// The maximum number of concurrent requests of the `revoking` lanes of all groups together, and of their `rest` lanes.
const REVOKING_REQUESTS: usize = 4;
const REST_REQUESTS: usize = 8;
/// The token bucket of one group in the lane `rest`: a burst of this many writes, then one write per interval. So a source of the
/// tested size (5,000 nodes) is written in a minute and a half, and a source whose nodes change all the time causes at most 50 such
/// writes per second after the burst.
const BURST: u32 = 1_000;
const INTERVAL: Duration = Duration::from_millis(20);
/// The longest pause, before jitter, while the member does not answer or throttles a lane. After the pause single requests probe the
/// member.
const MAX_OUTAGE_PAUSE: Duration = Duration::from_secs(10);
/// If this replica was not permitted to send a step, the step is tried again after this pause.
const NOT_PERMITTED_PAUSE: Duration = Duration::from_millis(500);
/// Two changes of an object by another client count as changes in a row if less than this time is between them.
const CONTEST_WINDOW: Duration = Duration::from_secs(180);

/// Kind and name of an object.
pub(super) type Key = (&'static str, String);

pub(super) fn key(step: &Step) -> Key {
    (step.item.kind(), step.item.name())
}

/// The kind of a lane. A lane is identified by its kind and its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LaneKind {
    Revoking,
    Rest,
}

/// A step whose request is in flight.
#[derive(Debug)]
pub(super) struct SentStep {
    pub(super) step: Arc<Step>,
    group: Source,
    lane_kind: LaneKind,
    /// [`Queue::generation`] at the time of sending.
    generation: u64,
}

/// Consecutive steps of the same kind and action. The next batch starts when no request of this one is in flight.
#[derive(Debug)]
struct Batch {
    id: u64,
    steps: VecDeque<Arc<Step>>,
    /// The steps may move networks or keys between Peers, so they are sent one after the other.
    is_sequential: bool,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Counts the calls of [`Self::replace`]. A failed step of an earlier generation is not sent again.
    generation: u64,
    /// The objects that have a step in this generation.
    wanted: BTreeSet<Key>,
    /// When the pass that planned these steps began to observe.
    observed_since: Option<Instant>,
    lanes: BTreeMap<(LaneKind, Source), VecDeque<Batch>>,
    next_batch: u64,
    /// Steps in backoff, keyed by the time at which it ends.
    waiting: BTreeMap<Instant, Vec<(LaneKind, Source, Arc<Step>)>>,
    /// Steps whose object has another write in flight.
    blocked: BTreeMap<Key, (LaneKind, Source, Arc<Step>)>,
    in_flight: BTreeMap<Key, MeshId>,
    /// For each lane: the batch in flight, and how many of its requests are in flight.
    batch_in_flight: BTreeMap<(LaneKind, Source), (u64, usize)>,
    /// For each kind of lane: the group that sent last.
    last_group: BTreeMap<LaneKind, Source>,
    /// Objects that were written, or found to be as planned, after the last pass began to observe. A step of that pass that
    /// repeats the same write is skipped.
    written: BTreeMap<Key, (Instant, Content)>,
    buckets: BTreeMap<Source, TokenBucket>,
    /// The backoff and the reason while the member does not answer or refuses the credentials.
    outage: Option<(Backoff, String)>,
    /// Lanes whose requests the member throttles, with backoff and reason.
    throttled: BTreeMap<(LaneKind, Source), (Backoff, String)>,
    refused: RefusedObjects,
    /// Our last writes to each object, to detect contested objects.
    object_writes: BTreeMap<Key, ObjectWrites>,
}

impl Queue {
    /// Replaces the steps. `observed_since` is the time at which the pass that planned them began to observe.
    pub(super) fn replace(&mut self, groups: BTreeMap<Source, Lanes>, observed_since: Instant, now: Instant) {
        (self.lanes, self.waiting, self.blocked) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        self.observed_since = Some(observed_since);
        self.generation += 1;
        self.written.retain(|_, (at, _)| *at >= observed_since);
        self.buckets.retain(|_, bucket| !bucket.is_full(now));
        let mut wanted: BTreeSet<Key> = BTreeSet::new();
        for (group, lanes) in groups {
            for (lane_kind, steps) in [(LaneKind::Revoking, lanes.revoking), (LaneKind::Rest, lanes.rest)] {
                wanted.extend(steps.iter().map(|step| key(step)));
                let mut due = Vec::new();
                for step in steps {
                    match self.backoff_until(&step, now) {
                        Some(until) => self.defer(until, lane_kind, group.clone(), step),
                        None => due.push(step),
                    }
                }
                self.append((lane_kind, group.clone()), due);
            }
        }
        // The failure of a step that is not planned any more must not be reported.
        self.refused.retain(&wanted);
        self.object_writes.retain(|key, object| {
            let is_recent = now.saturating_duration_since(object.recorded_at) < CONTEST_WINDOW;
            // Our last write is remembered even if this pass has no step for the object: if a later step repeats that write,
            // another client has undone it.
            is_recent && (object.last_written.is_some() || wanted.contains(key))
        });
        self.throttled.retain(|lane, _| self.lanes.contains_key(lane));
        if wanted.is_empty() {
            self.outage = None;
        }
        self.wanted = wanted;
    }

    /// Forgets the requests in flight, because their outcome will never be recorded.
    pub(super) fn forget_in_flight(&mut self) {
        self.in_flight.clear();
        self.batch_in_flight.clear();
    }

    /// Whether no request is in flight and no step is left to send.
    pub(super) fn is_empty(&self) -> bool {
        self.in_flight.is_empty() && self.lanes.is_empty() && self.waiting.is_empty() && self.blocked.is_empty()
    }

    /// Whether a write for this mesh is in flight.
    pub(super) fn is_writing(&self, mesh: &MeshId) -> bool {
        self.in_flight.values().any(|other| other == mesh)
    }

    /// The end of the backoff of a step whose object was refused, or was changed repeatedly by another client. `None` = the step may be
    /// sent.
    fn backoff_until(&self, step: &Step, now: Instant) -> Option<Instant> {
        let key = key(step);
        let refused = self.refused.backoff_until(&step.mesh, &key);
        let contested = self.object_writes.get(&key).and_then(ObjectWrites::backoff);
        let until = refused.max(contested.map(Backoff::until));
        until.filter(|until| *until > now)
    }

    fn defer(&mut self, until: Instant, lane_kind: LaneKind, group: Source, step: Arc<Step>) {
        self.waiting.entry(until).or_default().push((lane_kind, group, step));
    }

    /// Puts a step before the others of its lane.
    fn push_front(&mut self, lane_kind: LaneKind, group: Source, step: Arc<Step>) {
        let batch = Batch::new(vec![step], &mut self.next_batch);
        self.lanes.entry((lane_kind, group)).or_default().push_front(batch);
    }

    /// Returns the next step to send. `Err` is the time of the next call; `Err(None)` = call again when a request in flight has ended
    /// or the steps were replaced.
    pub(super) fn next(&mut self, now: Instant) -> Result<SentStep, Option<Instant>> {
        if let Some((backoff, _)) = self.outage.as_ref().filter(|(backoff, _)| backoff.is_waiting(now)) {
            return Err(Some(backoff.until()));
        }
        self.requeue_waiting(now);
        let mut next: Option<Instant> = None;
        for (lane_kind, limit) in [(LaneKind::Revoking, REVOKING_REQUESTS), (LaneKind::Rest, REST_REQUESTS)] {
            let in_flight = self
                .batch_in_flight
                .iter()
                .filter(|((other, _), _)| *other == lane_kind);
            // During an outage all lanes of one kind together send one request at a time, to probe whether the member answers again.
            let limit = if self.outage.is_some() { 1 } else { limit };
            if in_flight.map(|(_, (_, count))| count).sum::<usize>() >= limit {
                continue;
            }
            let groups = self.lanes.keys().filter(|(other, _)| *other == lane_kind).count();
            let mut last = self.last_group.get(&lane_kind).cloned();
            for _ in 0..groups {
                let Some(group) = self.group_after(lane_kind, last.as_ref()) else {
                    break;
                };
                match self.take(lane_kind, &group, now) {
                    Ok(step) => {
                        self.last_group.insert(lane_kind, group.clone());
                        return Ok(SentStep {
                            step,
                            group,
                            lane_kind,
                            generation: self.generation,
                        });
                    }
                    Err(until) => next = [next, until].into_iter().flatten().min(),
                }
                last = Some(group);
            }
        }
        Err([next, self.waiting.keys().next().copied()].into_iter().flatten().min())
    }

    /// Appends the steps whose backoff has ended to the end of their lanes. At the front, steps that are refused every time would
    /// use up the tokens, and the steps behind them would not be sent.
    fn requeue_waiting(&mut self, now: Instant) {
        let mut due: BTreeMap<(LaneKind, Source), Vec<Arc<Step>>> = BTreeMap::new();
        while let Some(entry) = self.waiting.first_entry().filter(|entry| *entry.key() <= now) {
            for (lane_kind, group, step) in entry.remove() {
                due.entry((lane_kind, group)).or_default().push(step);
            }
        }
        for (lane, steps) in due {
            self.append(lane, steps);
        }
    }

    /// Appends steps to the end of a lane.
    fn append(&mut self, lane: (LaneKind, Source), steps: Vec<Arc<Step>>) {
        let mut steps = steps.into_iter().peekable();
        while let Some(first) = steps.next() {
            let (kind, action) = (first.item.kind(), first.action);
            let mut batch = vec![first];
            while let Some(step) = steps.next_if(|next| next.item.kind() == kind && next.action == action) {
                batch.push(step);
            }
            let batch = Batch::new(batch, &mut self.next_batch);
            self.lanes.entry(lane.clone()).or_default().push_back(batch);
        }
    }

    /// Returns the group that follows `last` in sorted order. If none follows, or `last` is `None`, returns the first one.
    fn group_after(&self, lane_kind: LaneKind, last: Option<&Source>) -> Option<Source> {
        let mut groups = self
            .lanes
            .keys()
            .filter(|(other, _)| *other == lane_kind)
            .map(|(_, group)| group);
        let next = last.and_then(|last| {
            let after = (Bound::Excluded((lane_kind, last.clone())), Bound::Unbounded);
            let (next_lane, group) = self.lanes.range(after).next()?.0;
            (*next_lane == lane_kind).then_some(group)
        });
        next.or_else(|| groups.next()).cloned()
    }

    /// Takes the next step from the lane of one group and marks it as in flight. `Err` has the same meaning as in [`Self::next`].
    fn take(&mut self, lane_kind: LaneKind, group: &Source, now: Instant) -> Result<Arc<Step>, Option<Instant>> {
        let lane = (lane_kind, group.clone());
        // The steps of `revoking` are written before those of `rest` of the same group, except steps in backoff or in `blocked`.
        if lane_kind == LaneKind::Rest && self.lanes.contains_key(&(LaneKind::Revoking, group.clone())) {
            return Err(None);
        }
        if lane_kind == LaneKind::Rest && self.batch_in_flight.contains_key(&(LaneKind::Revoking, group.clone())) {
            return Err(None);
        }
        let throttled = self.throttled.get(&lane).map(|(backoff, _)| backoff);
        if let Some(backoff) = throttled.filter(|backoff| backoff.is_waiting(now)) {
            return Err(Some(backoff.until()));
        }
        loop {
            let Some(batches) = self.lanes.get_mut(&lane) else {
                return Err(None);
            };
            let Some(batch) = batches.front_mut() else {
                self.lanes.remove(&lane);
                return Err(None);
            };
            let in_flight = self.batch_in_flight.get(&lane);
            if in_flight.is_some_and(|(id, _)| *id != batch.id || batch.is_sequential) {
                return Err(None);
            }
            // A throttled lane sends one request at a time, to probe whether the member still throttles it.
            if in_flight.is_some() && self.throttled.contains_key(&lane) {
                return Err(None);
            }
            let Some(step) = batch.steps.pop_front() else {
                batches.pop_front();
                continue;
            };
            let (id, key) = (batch.id, key(&step));
            if self.in_flight.contains_key(&key) {
                self.blocked.insert(key, (lane_kind, group.clone(), step));
                continue;
            }
            let written = self.written.get(&key);
            let written = written.filter(|(at, _)| self.observed_since.is_some_and(|since| *at >= since));
            if written.is_some_and(|(_, content)| *content == Content::of(&step.item)) {
                continue;
            }
            if let Some(until) = self.backoff_until(&step, now) {
                self.defer(until, lane_kind, group.clone(), step);
                continue;
            }
            if lane_kind == LaneKind::Rest && step.action != Action::Delete {
                let bucket = self.buckets.entry(group.clone());
                let bucket = bucket.or_insert_with(|| TokenBucket::new(now, BURST, INTERVAL));
                if !bucket.take(now) {
                    let ready = bucket.ready_at();
                    if let Some(batch) = self.lanes.get_mut(&lane).and_then(VecDeque::front_mut) {
                        batch.steps.push_front(step);
                    }
                    return Err(Some(ready));
                }
            }
            if let Some(batches) = self.lanes.get_mut(&lane) {
                batches.retain(|batch| !batch.steps.is_empty());
                if batches.is_empty() {
                    self.lanes.remove(&lane);
                }
            }
            self.in_flight.insert(key, step.mesh.clone());
            self.batch_in_flight.entry(lane).or_insert((id, 0)).1 += 1;
            return Ok(step);
        }
    }

    /// Records the outcome of a step. Returns whether a problem of a mesh ([`Self::problem`]) begins or ends, so that a pass must report
    /// it.
    pub(super) fn record(&mut self, sent: SentStep, outcome: Outcome, now: Instant) -> bool {
        let SentStep {
            step,
            group,
            lane_kind,
            generation,
        } = sent;
        let key = key(&step);
        self.in_flight.remove(&key);
        let lane = (lane_kind, group.clone());
        if let Some((_, count)) = self.batch_in_flight.get_mut(&lane) {
            *count -= 1;
            if *count == 0 {
                self.batch_in_flight.remove(&lane);
            }
        }
        let blocked = self.blocked.remove(&key);
        // If the steps were replaced in the meantime, only the new steps decide whether and how the object is written again.
        let is_outdated = generation != self.generation;
        if let Some((lane_kind, group, step)) = blocked {
            self.push_front(lane_kind, group, step);
        }
        if matches!(outcome, Outcome::NotPermitted(_)) {
            // This outcome proves nothing about the member, so a recorded outage or throttling stays.
            if !is_outdated {
                self.defer(now + NOT_PERMITTED_PAUSE, lane_kind, group, step);
            }
            return false;
        }
        let mut changed = false;
        if !matches!(outcome, Outcome::Unavailable(_)) {
            changed |= self.outage.take().is_some();
        }
        if !matches!(outcome, Outcome::Throttled(_) | Outcome::Unavailable(_)) {
            changed |= self.throttled.remove(&lane).is_some();
        }
        let previous_cause = self.refused.remove(&step.mesh, &key);
        match outcome {
            // The object has no step any more, so its failure is not reported.
            Outcome::Refused(_) | Outcome::Conflict { .. } if !self.wanted.contains(&key) => {}
            Outcome::Unchanged => self.mark_written(key, Content::of(&step.item), now),
            Outcome::Written { overwritten_manager } => {
                changed |= self.record_change(&step, &key, overwritten_manager, true, now);
                self.mark_written(key, Content::of(&step.item), now);
            }
            Outcome::Conflict { by } => {
                changed |= self.record_change(&step, &key, by, false, now);
                match self.backoff_until(&step, now) {
                    _ if is_outdated => {}
                    Some(until) => self.defer(until, lane_kind, group, step),
                    None => self.push_front(lane_kind, group, step),
                }
            }
            Outcome::Refused(why) => {
                let cause = (group.clone(), step.item.kind(), why);
                changed |= !self.refused.has_cause(&cause);
                let until = self.refused.insert(&step.mesh, key, cause, now);
                if !is_outdated {
                    self.defer(until, lane_kind, group, step);
                }
                return changed;
            }
            Outcome::Throttled(why) => {
                match self.throttled.get_mut(&lane) {
                    Some((backoff, _)) => backoff.record_failure(now),
                    None => {
                        self.throttled.insert(lane, (Backoff::new(now, MAX_OUTAGE_PAUSE), why));
                        changed = true;
                    }
                }
                if !is_outdated {
                    self.push_front(lane_kind, group, step);
                }
            }
            Outcome::NotPermitted(_) => {}
            Outcome::Unavailable(why) => {
                match &mut self.outage {
                    Some((backoff, reason)) => {
                        changed |= *reason != why;
                        backoff.record_failure(now);
                        *reason = why;
                    }
                    None => {
                        self.outage = Some((Backoff::new(now, MAX_OUTAGE_PAUSE), why));
                        changed = true;
                    }
                }
                if !is_outdated {
                    self.push_front(lane_kind, group, step);
                }
            }
        }
        changed |= previous_cause.is_some_and(|cause| self.refused.drop_unused(&cause));
        changed
    }

    fn mark_written(&mut self, key: Key, content: Content, now: Instant) {
        self.written.insert(key, (now, content));
    }

    /// Records a conflict, or a write that may have undone a change by another client. Returns whether the object becomes contested.
    fn record_change(&mut self, step: &Step, key: &Key, by: Option<String>, written: bool, now: Instant) -> bool {
        let object = self.object_writes.entry(key.clone());
        let object = object.or_insert_with(|| ObjectWrites::new(now));
        object.record(&step.mesh, Content::of(&step.item), by, written, now)
    }

    /// The problem of a mesh's writes: an outage of the member, refused or contested objects, or throttling. `None` = none of these.
    pub(super) fn problem(&self, mesh: &MeshId) -> Option<String> {
        if let Some((_, why)) = &self.outage {
            return Some(why.clone());
        }
        let refused = self.refused.reasons(mesh);
        let contested = self
            .object_writes
            .iter()
            .filter_map(|((kind, name), object)| Some((*kind, name, object.message(mesh)?)));
        let mut all = contested.chain(refused);
        if let Some((kind, name, why)) = all.next() {
            let first = format!("{kind} {name}: {why}");
            return Some(match all.count() {
                0 => first,
                more => format!("{first}; and {more} more"),
            });
        }
        let mut throttled = self.throttled.iter().filter(|((_, (other, _)), _)| other == mesh);
        throttled.next().map(|(_, (_, why))| why.clone())
    }
}

impl Batch {
    fn new(steps: Vec<Arc<Step>>, next: &mut u64) -> Self {
        *next += 1;
        Self {
            id: *next,
            is_sequential: !can_run_concurrently(&steps),
            steps: steps.into(),
        }
    }
}

/// Whether the steps of a batch may be in flight at the same time. They must not if updates may move networks or keys between Peers: the
/// Peer that gains a network is written before the Peer that loses it. Creates and deletes have batches of their own.
fn can_run_concurrently(batch: &[Arc<Step>]) -> bool {
    let may_move = |step: &Arc<Step>| {
        step.fields
            .iter()
            .any(|field| matches!(*field, "spec.allowedIPs" | "spec.publicKey" | "spec"))
    };
    batch.first().is_some_and(|step| step.action != Action::Update) || !batch.iter().any(may_move)
}
