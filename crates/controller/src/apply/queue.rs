//! The order in which one member's writer sends its steps. Values and a clock that is handed in; no request is made here.
//!
//! The steps come from the last pass and replace those of the pass before. Each group of sources ([`clustermesh_core::lanes`])
//! has two lanes. `closing` goes first, has its own places among the requests in flight, and is not paced. `rest` shares the
//! other places in turn with the other groups and is paced by a token bucket, so that one source cannot use up the others'
//! share. Failures wait here for their backoff; the reconcile loop has no part in it.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Bound,
    time::Duration,
};

use clustermesh_core::{
    diff::{Action, Item, Step},
    lanes::{Lanes, Source},
    mesh::MeshId,
};
use tokio::time::Instant;

use super::{Outcome, contest::Contest};
use crate::backoff::{Backoff, Bucket};

/// Requests in flight of each lane.
const CLOSING: usize = 4;
const REST: usize = 8;
/// Writes in `rest` for one source: so many at once, then one each interval. A cluster of the size that is tested (5,000 nodes)
/// is written in a minute and a half; one whose nodes change without end costs the member 50 writes a second.
const BURST: u32 = 1_000;
const INTERVAL: Duration = Duration::from_millis(20);
/// The longest pause after a refusal, and while the member or a source is in trouble; one probing request ends that.
pub(super) const REFUSED: Duration = Duration::from_secs(60);
const TROUBLE: Duration = Duration::from_secs(10);
/// Changes by another writer count as one row while each comes within this time of the one before.
const CONTEST: Duration = Duration::from_secs(180);

/// Kind and name of an object.
pub(super) type Key = (&'static str, String);

pub(super) fn key(step: &Step) -> Key {
    (step.item.kind(), step.item.name())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lane {
    Closing,
    Rest,
}

/// A step in flight.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) step: Step,
    group: Source,
    lane: Lane,
    offer: u64,
}

/// Steps of one kind and action: between runs the order matters.
#[derive(Debug)]
struct Run {
    id: u64,
    steps: VecDeque<Step>,
    /// Its steps move networks or keys, so that their order matters too.
    one_by_one: bool,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Counts the replacements: a step of an earlier one is not sent again.
    offer: u64,
    /// What the last one holds.
    wanted: BTreeSet<Key>,
    /// When the pass began to observe whose steps these are.
    observed: Option<Instant>,
    lanes: BTreeMap<(Lane, Source), VecDeque<Run>>,
    next_run: u64,
    /// Steps whose backoff has not passed, by its end.
    waiting: BTreeMap<Instant, Vec<(Lane, Source, Step)>>,
    /// Steps whose object has a write in flight.
    blocked: BTreeMap<Key, (Lane, Source, Step)>,
    in_flight: BTreeMap<Key, MeshId>,
    /// By lane and group: the run that is in flight, and how many of its steps.
    flying: BTreeMap<(Lane, Source), (u64, usize)>,
    /// Which group had the last turn.
    turn: BTreeMap<Lane, Source>,
    /// What was written since the last pass observed: its steps may be of before.
    done: BTreeMap<Key, (Instant, Item)>,
    buckets: BTreeMap<Source, Bucket>,
    /// The member does not answer, or refuses the credentials.
    trouble: Option<(Backoff, String)>,
    /// The member asks a source to slow down.
    throttled: BTreeMap<(Lane, Source), (Backoff, String)>,
    refused: BTreeMap<MeshId, BTreeMap<Key, Refused>>,
    /// One backoff for each cause: a source, a kind and the words.
    causes: BTreeMap<Cause, Backoff>,
    contests: BTreeMap<Key, Contest>,
}

type Cause = (Source, &'static str, String);

#[derive(Debug)]
struct Refused {
    cause: Cause,
    until: Instant,
}

impl Queue {
    /// Replaces what is to be written. `observed` = when the pass began to observe.
    pub(super) fn replace(&mut self, groups: BTreeMap<Source, Lanes>, observed: Instant, now: Instant) {
        (self.lanes, self.waiting, self.blocked) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        self.observed = Some(observed);
        self.offer += 1;
        self.done.retain(|_, (at, _)| *at >= observed);
        self.buckets.retain(|_, bucket| !bucket.is_full(now));
        let mut wanted: BTreeSet<Key> = BTreeSet::new();
        for (group, lanes) in groups {
            for (lane, steps) in [(Lane::Closing, lanes.closing), (Lane::Rest, lanes.rest)] {
                wanted.extend(steps.iter().map(key));
                let mut due = Vec::new();
                for step in steps {
                    match self.backoff(&step, now) {
                        Some(until) => self.wait(until, lane, group.clone(), step),
                        None => due.push(step),
                    }
                }
                let runs = due.chunk_by(|a, b| a.item.kind() == b.item.kind() && a.action == b.action);
                let runs: VecDeque<Run> = runs.map(|run| Run::new(run, &mut self.next_run)).collect();
                if !runs.is_empty() {
                    self.lanes.insert((lane, group.clone()), runs);
                }
            }
        }
        // What is no longer to be written has no failure any more.
        for refused in self.refused.values_mut() {
            refused.retain(|key, _| wanted.contains(key));
        }
        self.refused.retain(|_, refused| !refused.is_empty());
        self.forget_causes();
        self.contests.retain(|key, contest| {
            let recent = now.saturating_duration_since(contest.last) < CONTEST;
            recent && (contest.wrote.is_some() || wanted.contains(key))
        });
        self.throttled.retain(|place, _| self.lanes.contains_key(place));
        if wanted.is_empty() {
            self.trouble = None;
        }
        self.wanted = wanted;
    }

    /// Forgets the requests in flight, whose outcome will not be noted.
    pub(super) fn abandon(&mut self) {
        self.in_flight.clear();
        self.flying.clear();
    }

    /// Whether nothing is in flight and nothing left to send.
    pub(super) fn is_empty(&self) -> bool {
        self.in_flight.is_empty() && self.lanes.is_empty() && self.waiting.is_empty() && self.blocked.is_empty()
    }

    /// Whether a write for this mesh is in flight.
    pub(super) fn is_writing(&self, mesh: &MeshId) -> bool {
        self.in_flight.values().any(|of| of == mesh)
    }

    /// Until when a step waits for its own backoff.
    fn backoff(&self, step: &Step, now: Instant) -> Option<Instant> {
        let key = key(step);
        let refused = self.refused.get(&step.mesh).and_then(|refused| refused.get(&key));
        let contest = self.contests.get(&key).and_then(|contest| contest.backoff.as_ref());
        let until = refused.map(|refused| refused.until).max(contest.map(Backoff::until));
        until.filter(|until| *until > now)
    }

    fn wait(&mut self, until: Instant, lane: Lane, group: Source, step: Step) {
        self.waiting.entry(until).or_default().push((lane, group, step));
    }

    /// Puts a step before the others of its lane.
    fn first(&mut self, lane: Lane, group: Source, step: Step) {
        let run = Run::new(&[step], &mut self.next_run);
        self.lanes.entry((lane, group)).or_default().push_front(run);
    }

    /// The next step to send, else when to look again; `None` = when something in flight has ended.
    pub(super) fn next(&mut self, now: Instant) -> Result<Sent, Option<Instant>> {
        if let Some((backoff, _)) = self.trouble.as_ref().filter(|(backoff, _)| backoff.waits(now)) {
            return Err(Some(backoff.until()));
        }
        self.resume(now);
        let mut again: Option<Instant> = None;
        for (lane, places) in [(Lane::Closing, CLOSING), (Lane::Rest, REST)] {
            let flying = self.flying.iter().filter(|((of, _), _)| *of == lane);
            // While the member is in trouble one request finds out whether it still is.
            let places = if self.trouble.is_some() { 1 } else { places };
            if flying.map(|(_, (_, count))| count).sum::<usize>() >= places {
                continue;
            }
            let groups = self.lanes.keys().filter(|(of, _)| *of == lane).count();
            let mut last = self.turn.get(&lane).cloned();
            for _ in 0..groups {
                let Some(group) = self.group_after(lane, last.as_ref()) else {
                    break;
                };
                match self.take(lane, &group, now) {
                    Ok(step) => {
                        self.turn.insert(lane, group.clone());
                        return Ok(Sent {
                            step,
                            group,
                            lane,
                            offer: self.offer,
                        });
                    }
                    Err(until) => again = [again, until].into_iter().flatten().min(),
                }
                last = Some(group);
            }
        }
        Err([again, self.waiting.keys().next().copied()].into_iter().flatten().min())
    }

    /// Puts the steps whose backoff has passed behind the others: what is refused again and again must not use up the pace of
    /// what was never tried.
    fn resume(&mut self, now: Instant) {
        let mut due: BTreeMap<(Lane, Source), Vec<Step>> = BTreeMap::new();
        while let Some(entry) = self.waiting.first_entry().filter(|entry| *entry.key() <= now) {
            for (lane, group, step) in entry.remove() {
                due.entry((lane, group)).or_default().push(step);
            }
        }
        for (place, steps) in due {
            let runs = steps.chunk_by(|a, b| a.item.kind() == b.item.kind() && a.action == b.action);
            let runs: Vec<Run> = runs.map(|run| Run::new(run, &mut self.next_run)).collect();
            self.lanes.entry(place).or_default().extend(runs);
        }
    }

    /// The group whose turn is next.
    fn group_after(&self, lane: Lane, last: Option<&Source>) -> Option<Source> {
        let mut groups = self.lanes.keys().filter(|(of, _)| *of == lane).map(|(_, group)| group);
        let next = last.and_then(|last| {
            let after = (Bound::Excluded((lane, last.clone())), Bound::Unbounded);
            let (of, group) = self.lanes.range(after).next()?.0;
            (*of == lane).then_some(group)
        });
        next.or_else(|| groups.next()).cloned()
    }

    /// The next step of one lane of one group, marked as in flight.
    fn take(&mut self, lane: Lane, group: &Source, now: Instant) -> Result<Step, Option<Instant>> {
        let place = (lane, group.clone());
        if lane == Lane::Rest && self.lanes.contains_key(&(Lane::Closing, group.clone())) {
            return Err(None);
        }
        if lane == Lane::Rest && self.flying.contains_key(&(Lane::Closing, group.clone())) {
            return Err(None);
        }
        let throttled = self.throttled.get(&place).map(|(backoff, _)| backoff);
        if let Some(backoff) = throttled.filter(|backoff| backoff.waits(now)) {
            return Err(Some(backoff.until()));
        }
        loop {
            let Some(runs) = self.lanes.get_mut(&place) else {
                return Err(None);
            };
            let Some(run) = runs.front_mut() else {
                self.lanes.remove(&place);
                return Err(None);
            };
            let flying = self.flying.get(&place);
            if flying.is_some_and(|(id, _)| *id != run.id || run.one_by_one) {
                return Err(None);
            }
            // A source whose last request was throttled sends one to find out.
            if flying.is_some() && self.throttled.contains_key(&place) {
                return Err(None);
            }
            let Some(step) = run.steps.pop_front() else {
                runs.pop_front();
                continue;
            };
            let (id, key) = (run.id, key(&step));
            if self.in_flight.contains_key(&key) {
                self.blocked.insert(key, (lane, group.clone(), step));
                continue;
            }
            let written = self.done.get(&key);
            let written = written.filter(|(at, _)| self.observed.is_some_and(|observed| *at >= observed));
            if written.is_some_and(|(_, item)| *item == step.item) {
                continue;
            }
            if let Some(until) = self.backoff(&step, now) {
                self.wait(until, lane, group.clone(), step);
                continue;
            }
            if lane == Lane::Rest && step.action != Action::Delete {
                let bucket = self.buckets.entry(group.clone());
                let bucket = bucket.or_insert_with(|| Bucket::new(now, BURST, INTERVAL));
                if !bucket.take(now) {
                    let ready = bucket.ready();
                    if let Some(run) = self.lanes.get_mut(&place).and_then(VecDeque::front_mut) {
                        run.steps.push_front(step);
                    }
                    return Err(Some(ready));
                }
            }
            if let Some(runs) = self.lanes.get_mut(&place) {
                runs.retain(|run| !run.steps.is_empty());
                if runs.is_empty() {
                    self.lanes.remove(&place);
                }
            }
            self.in_flight.insert(key, step.mesh.clone());
            self.flying.entry(place).or_insert((id, 0)).1 += 1;
            return Ok(step);
        }
    }

    /// Remembers what became of a step; whether the report of a mesh changes by it.
    pub(super) fn note(&mut self, sent: Sent, outcome: Outcome, now: Instant) -> bool {
        let Sent {
            step,
            group,
            lane,
            offer,
        } = sent;
        let key = key(&step);
        self.in_flight.remove(&key);
        let place = (lane, group.clone());
        if let Some((_, count)) = self.flying.get_mut(&place) {
            *count -= 1;
            if *count == 0 {
                self.flying.remove(&place);
            }
        }
        let blocked = self.blocked.remove(&key);
        // The last offer decides whether the object is written again, and how.
        let newer = offer != self.offer;
        if let Some((lane, group, step)) = blocked {
            self.first(lane, group, step);
        }
        let mut changed = false;
        if !matches!(outcome, Outcome::Unavailable(_)) {
            changed |= self.trouble.take().is_some();
        }
        if !matches!(outcome, Outcome::Throttled(_) | Outcome::Unavailable(_)) {
            changed |= self.throttled.remove(&place).is_some();
        }
        let refused = self
            .refused
            .get_mut(&step.mesh)
            .and_then(|refused| refused.remove(&key));
        match outcome {
            // The last pass does not contain this step any more.
            Outcome::Refused(_) | Outcome::Conflict { .. } if !self.wanted.contains(&key) => {}
            Outcome::Unchanged => self.wrote(key, step.item, now),
            Outcome::Written { over } => {
                changed |= self.contest(&step, &key, over, true, now);
                self.wrote(key, step.item, now);
            }
            Outcome::Conflict { by } => {
                changed |= self.contest(&step, &key, by, false, now);
                match self.backoff(&step, now) {
                    _ if newer => {}
                    Some(until) => self.wait(until, lane, group, step),
                    None => self.first(lane, group, step),
                }
            }
            Outcome::Refused(why) => {
                let cause = (group.clone(), step.item.kind(), why);
                let known = self.causes.contains_key(&cause);
                changed |= !known;
                let backoff = self.causes.entry(cause.clone());
                let backoff = backoff.or_insert_with(|| Backoff::new(now, REFUSED));
                backoff.failed(now);
                let until = backoff.until();
                let refused = self.refused.entry(step.mesh.clone()).or_default();
                refused.insert(key, Refused { cause, until });
                if !newer {
                    self.wait(until, lane, group, step);
                }
                return changed;
            }
            Outcome::Throttled(why) => {
                match self.throttled.get_mut(&place) {
                    Some((backoff, _)) => backoff.failed(now),
                    None => {
                        self.throttled.insert(place, (Backoff::new(now, TROUBLE), why));
                        changed = true;
                    }
                }
                if !newer {
                    self.first(lane, group, step);
                }
            }
            Outcome::Unavailable(why) => {
                match &mut self.trouble {
                    Some((backoff, words)) => {
                        changed |= *words != why;
                        backoff.failed(now);
                        *words = why;
                    }
                    None => {
                        self.trouble = Some((Backoff::new(now, TROUBLE), why));
                        changed = true;
                    }
                }
                if !newer {
                    self.first(lane, group, step);
                }
            }
        }
        if let Some(Refused { cause, .. }) = refused
            && !self.is_refused(&cause)
        {
            self.causes.remove(&cause);
            changed = true;
        }
        changed
    }

    fn wrote(&mut self, key: Key, item: Item, now: Instant) {
        self.done.insert(key, (now, item));
    }

    /// Notes a write that met another writer's, or that may have had to undo one; whether the object is contested from now on.
    fn contest(&mut self, step: &Step, key: &Key, by: Option<String>, written: bool, now: Instant) -> bool {
        let contest = self.contests.entry(key.clone());
        let contest = contest.or_insert_with(|| Contest::new(step.mesh.clone(), now));
        contest.note(&step.item, by, written, now)
    }

    fn is_refused(&self, cause: &Cause) -> bool {
        self.refused
            .values()
            .flat_map(BTreeMap::values)
            .any(|refused| refused.cause == *cause)
    }

    fn forget_causes(&mut self) {
        let used: BTreeSet<&Cause> = self
            .refused
            .values()
            .flat_map(BTreeMap::values)
            .map(|refused| &refused.cause)
            .collect();
        self.causes.retain(|cause, _| used.contains(cause));
    }

    /// Why something of a mesh could not be written, if so.
    pub(super) fn trouble(&self, mesh: &MeshId) -> Option<String> {
        if let Some((_, why)) = &self.trouble {
            return Some(why.clone());
        }
        let refused = self.refused.get(mesh).into_iter().flatten();
        let refused = refused.map(|((kind, name), refused)| (*kind, name, refused.cause.2.clone()));
        let contests = self
            .contests
            .iter()
            .filter(|(_, contest)| contest.mesh == *mesh && contest.is_contested());
        let contests = contests.map(|((kind, name), contest)| (*kind, name, contest.message()));
        let mut all = contests.chain(refused);
        if let Some((kind, name, why)) = all.next() {
            let first = format!("{kind} {name}: {why}");
            return Some(match all.count() {
                0 => first,
                more => format!("{first}; and {more} more"),
            });
        }
        let mut throttled = self.throttled.iter().filter(|((_, (of, _)), _)| of == mesh);
        throttled.next().map(|(_, (_, why))| why.clone())
    }
}

impl Run {
    fn new(steps: &[Step], next: &mut u64) -> Self {
        *next += 1;
        Self {
            id: *next,
            steps: steps.iter().cloned().collect(),
            one_by_one: !concurrent(steps),
        }
    }
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
