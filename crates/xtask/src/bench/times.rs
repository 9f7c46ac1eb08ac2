//! How long what is granted to a sandbox takes to open and to close, felt by its packets: on the real controller and real
//! agents, which are asked without a pause while the mesh is changed.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use clustermesh_lab::{Lab, wait_until};
use kube::{
    Api,
    api::DynamicObject,
    runtime::watcher::{self, Event, watcher},
};
use tokio::task::JoinHandle;

use super::report::{Format, Machine};
pub(super) use busy::Load;
use busy::{Busy, Changed};
use world::{Asked, Wanted, Which, World, address};

mod busy;
mod world;

/// So many milliseconds nobody answers before it is taken for closed; longer where all processors are busy.
const SILENCE: u64 = 700;
const LONG_SILENCE: u64 = 2000;
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two changes: what the first makes twenty agents on few cores do is done by then.
const PAUSE: Duration = Duration::from_secs(3);
/// Before the first change of a kind: by then the agents have published what the one before did (every 10 s, where they have
/// something to tell).
const TOLD: Duration = Duration::from_secs(15);
const ALL: Wanted = Wanted {
    granted: true,
    standing: true,
    quarantine: false,
};

const QUARANTINED: Wanted = Wanted {
    quarantine: true,
    ..ALL
};

/// How much of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    /// Real agents in the cluster that grants.
    pub(super) agents: u8,
    /// Nodes at its API server, those of the agents among them.
    pub(super) nodes: u8,
    /// How often each change is made.
    pub(super) changes: u32,
    /// Controller and agents are built with our own crates optimised.
    pub(super) optimised: bool,
    /// Only quarantines, without such a sandbox and beside it.
    pub(super) beside: Option<Load>,
}

/// What was measured: milliseconds from before the call to the API server, of each node in each round.
#[derive(Debug, Default, serde::Serialize)]
struct Measured {
    times: BTreeMap<What, Vec<u64>>,
    /// Writes that the cluster's API server took while endpoints moved in it, the moves among them.
    writes: BTreeMap<String, u64>,
    moves: u32,
    /// And in as long a time in which nothing moved.
    idle: BTreeMap<String, u64>,
    /// While quarantines were measured beside it.
    beside: Option<Changed>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
enum What {
    TakenBack,
    Given,
    LastTakenBack,
    FirstGiven,
    Quarantined,
    QuarantineWritten,
    Released,
    QuarantinedBeside,
    QuarantineWrittenBeside,
    ReleasedBeside,
    MovedAway,
    MovedTo,
    Announced,
    Joined,
    JoinAnnounced,
}

impl What {
    const fn says(self) -> &'static str {
        match self {
            Self::TakenBack => "a grant beside others taken back: last answer",
            Self::Given => "given again: first answer",
            Self::LastTakenBack => "the only grant taken back: last answer",
            Self::FirstGiven => "given again: first answer, a handshake in it",
            Self::Quarantined => "quarantine: last answer",
            Self::Released => "released: first answer",
            Self::QuarantineWritten => "quarantine: the hub's PeerPolicy is written",
            Self::QuarantineWrittenBeside => "quarantine beside changing keys: the hub's PeerPolicy is written",
            Self::QuarantinedBeside => "quarantine beside changing keys: last answer",
            Self::ReleasedBeside => "released beside changing keys: first answer",
            Self::MovedAway => "endpoint moved: last answer of the old one",
            Self::MovedTo => "endpoint moved: first answer of the new one",
            Self::Announced => "endpoint moved: the mirrored Service names the new one",
            Self::Joined => "endpoint beside the old one: first answer",
            Self::JoinAnnounced => "endpoint beside the old one: the mirrored Service names both",
        }
    }
}

/// Measures and prints.
pub(super) fn run(size: Size, format: Format) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let measured = runtime.block_on(measure(size))?;
    match format {
        Format::Markdown => print!("{}", markdown(&measured, size)),
        Format::Json => println!("{}", serde_json::to_string_pretty(&measured)?),
    }
    Ok(())
}

async fn measure(size: Size) -> anyhow::Result<Measured> {
    let lab = Lab::start(world::plan(size.beside.is_some())).await?;
    let world = World::start(&lab, size).await?;
    eprintln!("bench: {} agents run", size.agents);
    let [first, second] = &world.asked;
    opened(first, 0).await?;
    let mut measured = Measured::default();
    if let Some(load) = size.beside {
        let policy = Watched::start(world.policies.clone(), allows);
        let kinds = [What::Quarantined, What::QuarantineWritten, What::Released];
        measured.quarantines(&world, size.changes, kinds, &policy).await?;
        let busy = Busy::start(&world, load).await?;
        let rotation = busy.rotate(&world).await?;
        let kinds = [
            What::QuarantinedBeside,
            What::QuarantineWrittenBeside,
            What::ReleasedBeside,
        ];
        measured.quarantines(&world, size.changes, kinds, &policy).await?;
        measured.beside = Some(rotation.changed(&world).await?);
        return Ok(measured);
    }
    let one = Wanted { granted: false, ..ALL };
    let none = Wanted { standing: false, ..one };
    let only = Wanted { granted: true, ..none };
    for (start, closed, [closes, opens]) in [
        (ALL, one, [What::TakenBack, What::Given]),
        (ALL, QUARANTINED, [What::Quarantined, What::Released]),
        (only, none, [What::LastTakenBack, What::FirstGiven]),
    ] {
        measured
            .takes_turns(&world, size.changes, [start, closed], [closes, opens])
            .await?;
    }
    world.want(ALL).await?;
    opened(first, now()).await?;

    let mirror = Watched::start(world.mirrored.clone(), endpoints);
    let names = "the mirrored Service to name the endpoints";
    tokio::time::sleep(TOLD).await;
    let before = world.writes().await?;
    let began = Instant::now();
    for round in 0..size.changes {
        let (to, [old, new]) = if round % 2 == 0 {
            (Which::Second, [first, second])
        } else {
            (Which::First, [second, first])
        };
        let called = begin().await;
        world.moves(to).await?;
        measured.took(What::MovedTo, called, &opened(new, called).await?);
        let named: BTreeSet<String> = (1..=size.agents)
            .map(|n| address(n, usize::from(to == Which::Second)))
            .collect();
        let announced = mirror.first(names, called, |said| *said == named).await?;
        measured.took(What::Announced, called, &[announced]);
        measured.took(What::MovedAway, called, &silent(old, SILENCE).await?);
        measured.says(round + 1, &[What::MovedAway, What::MovedTo, What::Announced]);
    }
    measured.moves = size.changes;
    let moved = world.writes().await?;
    tokio::time::sleep(began.elapsed()).await;
    measured.idle = since(&moved, world.writes().await?);
    measured.writes = since(&before, moved);

    world.moves(Which::First).await?;
    silent(second, SILENCE).await?;
    for round in 1..=size.changes {
        let called = begin().await;
        world.moves(Which::Both).await?;
        measured.took(What::Joined, called, &opened(second, called).await?);
        let named: BTreeSet<String> = (1..=size.agents).flat_map(|n| [address(n, 0), address(n, 1)]).collect();
        let announced = mirror.first(names, called, |said| *said == named).await?;
        measured.took(What::JoinAnnounced, called, &[announced]);
        measured.says(round, &[What::Joined, What::JoinAnnounced]);
        world.moves(Which::First).await?;
        silent(second, SILENCE).await?;
    }
    Ok(measured)
}

/// What was counted since then.
fn since(before: &BTreeMap<String, u64>, mut now: BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    for (kind, count) in before {
        now.entry(kind.clone()).and_modify(|all| *all -= count);
    }
    now.retain(|_, count| *count > 0);
    now
}

impl Measured {
    /// Quarantines the sandbox and releases it, so often.
    async fn quarantines(
        &mut self,
        world: &World<'_>,
        rounds: u32,
        [closes, written, opens]: [What; 3],
        policy: &Watched<bool>,
    ) -> anyhow::Result<()> {
        let [asked, _] = &world.asked;
        world.want(ALL).await?;
        opened(asked, now()).await?;
        tokio::time::sleep(TOLD).await;
        for round in 1..=rounds {
            let called = begin().await;
            world.want(QUARANTINED).await?;
            let last = silent(asked, LONG_SILENCE).await?;
            self.took(closes, called, &last);
            let closed = policy
                .first("the PeerPolicy to be closed", called, |allows| !allows)
                .await?;
            self.took(written, called, &[closed]);
            let called = begin().await;
            world.want(ALL).await?;
            self.took(opens, called, &opened(asked, called).await?);
            self.says(round, &[closes, written, opens]);
        }
        Ok(())
    }

    /// Changes the mesh from what is open to what is closed and back, so often.
    async fn takes_turns(
        &mut self,
        world: &World<'_>,
        rounds: u32,
        [open, closed]: [Wanted; 2],
        [closes, opens]: [What; 2],
    ) -> anyhow::Result<()> {
        let [asked, _] = &world.asked;
        world.want(open).await?;
        opened(asked, now()).await?;
        tokio::time::sleep(TOLD).await;
        for round in 1..=rounds {
            let called = begin().await;
            world.want(closed).await?;
            let last = silent(asked, SILENCE).await?;
            self.took(closes, called, &last);
            let called = begin().await;
            world.want(open).await?;
            self.took(opens, called, &opened(asked, called).await?);
            self.says(round, &[closes, opens]);
        }
        Ok(())
    }

    fn took(&mut self, what: What, called: u64, at: &[u64]) {
        let took = at.iter().map(|at| at.saturating_sub(called));
        self.times.entry(what).or_default().extend(took);
    }

    /// Prints what the last of so many rounds took.
    fn says(&self, rounds: u32, of: &[What]) {
        let last = of.iter().filter_map(|what| {
            let all = self.times.get(what)?;
            let here = all.rchunks(all.len() / usize::try_from(rounds).ok()?).next()?;
            Some(format!("{what:?} {:?} ms at most", here.iter().max()?))
        });
        eprintln!("bench: round {rounds}: {}", last.collect::<Vec<_>>().join(", "));
    }
}

/// Waits until each answers after that time; when each did so first.
async fn opened(all: &[Asked], after: u64) -> anyhow::Result<Vec<u64>> {
    let opened = wait_until("every endpoint to answer", PATIENCE, async || {
        let first: Vec<Option<u64>> = all.iter().map(|asked| asked.first_after(after)).collect();
        let silent = first.iter().filter(|at| at.is_none()).count();
        first
            .into_iter()
            .collect::<Option<Vec<u64>>>()
            .ok_or(format!("{silent} are silent"))
    })
    .await?;
    Ok(opened)
}

/// Waits until none answers any more; when each did so last.
async fn silent(all: &[Asked], silence: u64) -> anyhow::Result<Vec<u64>> {
    let last = wait_until("every endpoint to be silent", PATIENCE, async || {
        let last: Vec<u64> = all.iter().filter_map(Asked::last).collect();
        let loud = last.iter().filter(|at| now() < **at + silence).count();
        if loud == 0 {
            Ok(last)
        } else {
            Err(format!("{loud} answer"))
        }
    })
    .await?;
    Ok(last)
}

/// What one cluster's objects said, and when.
struct Watched<T> {
    heard: Arc<Mutex<Vec<(u64, T)>>>,
    task: JoinHandle<()>,
}

impl<T: std::fmt::Debug + Send + 'static> Watched<T> {
    /// `read` = what an object says; `None` = another object.
    fn start(objects: Api<DynamicObject>, read: impl Fn(&DynamicObject) -> Option<T> + Send + 'static) -> Self {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&heard);
        let task = tokio::spawn(async move {
            let events = watcher(objects, watcher::Config::default());
            let mut events = std::pin::pin!(events);
            while let Some(event) = futures::StreamExt::next(&mut events).await {
                if let Ok(Event::Apply(object) | Event::InitApply(object)) = event
                    && let Some(said) = read(&object)
                {
                    kept.lock().unwrap_or_else(PoisonError::into_inner).push((now(), said));
                }
            }
        });
        Self { heard, task }
    }

    /// When that was first said after that time.
    async fn first(&self, what: &str, after: u64, is_it: impl Fn(&T) -> bool) -> anyhow::Result<u64> {
        let first = wait_until(what, PATIENCE, async || {
            let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
            let first = heard.iter().find(|(at, said)| *at > after && is_it(said));
            first.map(|(at, _)| *at).ok_or_else(|| format!("{:?}", heard.last()))
        })
        .await?;
        Ok(first)
    }
}

impl<T> Drop for Watched<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The endpoints that a slice names.
fn endpoints(slice: &DynamicObject) -> Option<BTreeSet<String>> {
    let endpoints = slice.data["endpoints"].as_array().cloned().unwrap_or_default();
    let addresses = endpoints.iter().filter_map(|one| one["addresses"][0].as_str());
    Some(addresses.map(str::to_owned).collect())
}

/// Whether the measured sandbox's policy allows anything.
fn allows(policy: &DynamicObject) -> Option<bool> {
    let is_it = policy.data["spec"]["source"] == world::SANDBOX;
    is_it.then(|| {
        policy.data["spec"]["allow"]
            .as_array()
            .is_some_and(|allow| !allow.is_empty())
    })
}

/// When a change may be made, as [`now`] says it.
async fn begin() -> u64 {
    tokio::time::sleep(PAUSE).await;
    now()
}

/// Milliseconds since 1970.
fn now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}

/// The value below which that share of all lies.
fn quantile(sorted: &[u64], share: f64) -> u64 {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a few hundred values"
    )]
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

fn markdown(measured: &Measured, size: Size) -> String {
    let Measured {
        times,
        writes,
        moves,
        idle,
        beside,
    } = measured;
    let Size {
        agents,
        nodes,
        changes,
        optimised,
        ..
    } = size;
    let mut out = format!(
        "{}; {agents} agents ({}), {nodes} Nodes at the API server, {changes} rounds; ms.\n\n| | p50 | p99 | most | of |\n|---|---|---|---|---|\n",
        Machine::here(),
        if optimised {
            "our crates optimised"
        } else {
            "unoptimised"
        }
    );
    for (what, times) in times {
        let mut times = times.clone();
        times.sort_unstable();
        let [p50, p99, most] = [0.5, 0.99, 1.0].map(|share| quantile(&times, share));
        out.push_str(&format!(
            "| {} | {p50} | {p99} | {most} | {} |\n",
            what.says(),
            times.len()
        ));
    }
    match beside {
        Some(Changed {
            nodes,
            keys_per_second,
            peer_writes_per_second,
        }) => out.push_str(&format!(
            "\nBeside: {nodes} Nodes of another sandbox, {keys_per_second:.0} keys a second; \
             {peer_writes_per_second:.0} writes of Peers a second in the hub\n"
        )),
        None => out.push_str(&format!(
            "\nWrites in the cluster while endpoints moved {moves} times: {writes:?}; in as long a time without: {idle:?}\n"
        )),
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_a_value_that_was_measured() {
        let all: Vec<u64> = (1..=400).collect();
        assert_eq!([0.5, 0.99, 1.0].map(|share| quantile(&all, share)), [200, 396, 400]);
        assert_eq!(quantile(&[7], 0.99), 7);
        assert_eq!(quantile(&[], 0.99), 0);
    }
}
