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
use world::{Asked, Wanted, Which, World, address};

mod world;

/// So long nobody answers before it is taken for closed.
const SILENCE: u64 = 700;
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

/// How much of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    /// Real agents in the cluster that grants.
    pub(super) agents: u8,
    /// Nodes at its API server, those of the agents among them.
    pub(super) nodes: u8,
    /// How often each change is made.
    pub(super) changes: u32,
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
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
enum What {
    TakenBack,
    Given,
    LastTakenBack,
    FirstGiven,
    Quarantined,
    Released,
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
    let lab = Lab::start(world::plan()).await?;
    let world = World::start(&lab, size.agents, size.nodes).await?;
    eprintln!("bench: {} agents run", size.agents);
    let [first, second] = &world.asked;
    opened(first, 0).await?;
    let mut measured = Measured::default();
    let quarantined = Wanted {
        quarantine: true,
        ..ALL
    };
    let one = Wanted { granted: false, ..ALL };
    let none = Wanted { standing: false, ..one };
    let only = Wanted { granted: true, ..none };
    for (start, closed, [closes, opens]) in [
        (ALL, one, [What::TakenBack, What::Given]),
        (ALL, quarantined, [What::Quarantined, What::Released]),
        (only, none, [What::LastTakenBack, What::FirstGiven]),
    ] {
        world.want(start).await?;
        opened(first, now()).await?;
        tokio::time::sleep(TOLD).await;
        for round in 1..=size.changes {
            let called = begin().await;
            world.want(closed).await?;
            let last = silent(first).await?;
            measured.took(closes, called, &last);
            let called = begin().await;
            world.want(start).await?;
            measured.took(opens, called, &opened(first, called).await?);
            measured.says(round, &[closes, opens]);
        }
    }
    world.want(ALL).await?;
    opened(first, now()).await?;

    let mirror = Mirror::watch(world.mirrored.clone());
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
        let named = (1..=size.agents)
            .map(|n| address(n, usize::from(to == Which::Second)))
            .collect();
        measured.took(What::Announced, called, &[mirror.names(&named, called).await?]);
        measured.took(What::MovedAway, called, &silent(old).await?);
        measured.says(round + 1, &[What::MovedAway, What::MovedTo, What::Announced]);
    }
    measured.moves = size.changes;
    let moved = world.writes().await?;
    tokio::time::sleep(began.elapsed()).await;
    measured.idle = since(&moved, world.writes().await?);
    measured.writes = since(&before, moved);

    world.moves(Which::First).await?;
    silent(second).await?;
    for round in 1..=size.changes {
        let called = begin().await;
        world.moves(Which::Both).await?;
        measured.took(What::Joined, called, &opened(second, called).await?);
        let named = (1..=size.agents).flat_map(|n| [address(n, 0), address(n, 1)]).collect();
        measured.took(What::JoinAnnounced, called, &[mirror.names(&named, called).await?]);
        measured.says(round, &[What::Joined, What::JoinAnnounced]);
        world.moves(Which::First).await?;
        silent(second).await?;
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
        let first = |asked: &Asked| asked.answers().into_iter().find(|at| *at > after);
        let first: Vec<Option<u64>> = all.iter().map(first).collect();
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
async fn silent(all: &[Asked]) -> anyhow::Result<Vec<u64>> {
    let last = wait_until("every endpoint to be silent", PATIENCE, async || {
        let last: Vec<u64> = all.iter().filter_map(|asked| asked.answers().pop()).collect();
        let loud = last.iter().filter(|at| now() < **at + SILENCE).count();
        if loud == 0 {
            Ok(last)
        } else {
            Err(format!("{loud} answer"))
        }
    })
    .await?;
    Ok(last)
}

/// When something was heard of, and which endpoints it named.
type Named = (u64, BTreeSet<String>);

/// What the mirrored Services named.
struct Mirror {
    heard: Arc<Mutex<Vec<Named>>>,
    task: JoinHandle<()>,
}

impl Mirror {
    fn watch(slices: Api<DynamicObject>) -> Self {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&heard);
        let task = tokio::spawn(async move {
            let events = watcher(slices, watcher::Config::default());
            let mut events = std::pin::pin!(events);
            while let Some(event) = futures::StreamExt::next(&mut events).await {
                if let Ok(Event::Apply(slice) | Event::InitApply(slice)) = event {
                    let endpoints = slice.data["endpoints"].as_array().cloned().unwrap_or_default();
                    let addresses = endpoints.iter().filter_map(|one| one["addresses"][0].as_str());
                    let named = (now(), addresses.map(str::to_owned).collect());
                    kept.lock().unwrap_or_else(PoisonError::into_inner).push(named);
                }
            }
        });
        Self { heard, task }
    }

    /// When one of its slices first had exactly these endpoints after that time.
    async fn names(&self, endpoints: &BTreeSet<String>, after: u64) -> anyhow::Result<u64> {
        let named = wait_until("the mirrored Service to name the endpoints", PATIENCE, async || {
            let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
            let first = heard.iter().find(|(at, named)| *at > after && named == endpoints);
            first.map(|(at, _)| *at).ok_or_else(|| format!("{:?}", heard.last()))
        })
        .await?;
        Ok(named)
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.task.abort();
    }
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
    } = measured;
    let Size { agents, nodes, changes } = size;
    let mut out = format!(
        "{}; {agents} agents (unoptimised), {nodes} Nodes at the API server, {changes} rounds; ms.\n\n| | p50 | p99 | most | of |\n|---|---|---|---|---|\n",
        Machine::here()
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
    out.push_str(&format!(
        "\nWrites in the cluster while endpoints moved {moves} times: {writes:?}; in as long a time without: {idle:?}\n"
    ));
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
