//! `cargo xtask bench soak`: minutes of traffic over our device while keys are renewed, processes killed and addresses changed. Says
//! how long anyone waited for an answer.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::UdpSocket,
    path::Path,
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context;

use super::{
    load, peers, report,
    tunnel::{Keys, Tunnel, Variant},
    wire::{End, Running, Wire},
};
use crate::prereq;

/// Questions are asked so often.
const EVERY: Duration = Duration::from_millis(10);
/// A wait shorter than this is no stall: full CPUs alone make some.
const NOTED: Duration = Duration::from_millis(100);
/// The goal: no longer than this.
const GOAL: Duration = Duration::from_secs(1);

/// What `cargo xtask bench soak` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[arg(long, default_value_t = 10)]
    minutes: u64,
    /// Before each set of disturbances; keys are renewed after 120.
    #[arg(long, default_value_t = 150)]
    quiet_seconds: u64,
    /// Between disturbances.
    #[arg(long, default_value_t = 30)]
    pause_seconds: u64,
    #[command(flatten)]
    prereq: prereq::Prereq,
}

/// What is done to an end of the tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Disturbance {
    /// SIGKILL, and a new process at once.
    Restart,
    /// Another address on the wire; the old one goes.
    Roam,
}

/// A time without an answer, from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stall {
    began: Duration,
    length: Duration,
}

/// What one side heard.
struct Heard {
    answers: u64,
    stalls: Vec<Stall>,
}

/// Runs it and prints what was seen.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let Args {
        minutes,
        quiet_seconds,
        pause_seconds,
        prereq,
    } = args;
    prereq::ensure(prereq)?;
    let program = peers::ours()?;
    let until = Duration::from_secs(minutes * 60);
    let plan = plan(
        until,
        Duration::from_secs(*quiet_seconds),
        Duration::from_secs(*pause_seconds),
    );
    let wire = Wire::new()?;
    let keys = Keys::new(&wire)?;
    let _server = load::server(&wire.ends[1])?;
    let tunnel = Tunnel::open(Variant::WgAgent, Some(&program), &wire, &keys)?;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = Stop(&stop);
        let begin = Instant::now();
        let mut askers = Vec::new();
        for (from, to) in [(0, 1), (1, 0)] {
            let (asking, answering) = sockets(&wire, from, to)?;
            let stop = &stop;
            scope.spawn(move || load::echo(&answering, stop));
            askers.push(scope.spawn(move || ask(&asking, begin, stop)));
        }
        let done = disturb(&wire, &keys, &program, tunnel, begin, until, &plan)?;
        stop.store(true, Ordering::Release);
        let heard = askers.into_iter().map(|asker| asker.join().expect("one who asks"));
        print!("{}", markdown(until, &done, &heard.collect::<Vec<_>>()));
        Ok(())
    })
}

/// Ends the askers, also after an error.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// When what is done to which end: quiet, then each disturbance to each end, again and again.
fn plan(until: Duration, quiet: Duration, pause: Duration) -> Vec<(Duration, Disturbance, usize)> {
    let set = [
        (Disturbance::Restart, 0),
        (Disturbance::Roam, 0),
        (Disturbance::Restart, 1),
        (Disturbance::Roam, 1),
    ];
    let mut plan = Vec::new();
    let mut at = Duration::ZERO;
    for (index, (what, end)) in set.into_iter().cycle().enumerate() {
        at += if index % set.len() == 0 { quiet } else { pause };
        // The last one is given the time to be heard of.
        if at + pause.min(quiet) > until {
            break;
        }
        plan.push((at, what, end));
    }
    plan
}

/// What happened.
struct Done {
    disturbances: Vec<(Duration, Disturbance)>,
    /// Handshakes seen at the near end, by when it says they were.
    handshakes: usize,
    /// Bytes that TCP moved.
    moved: f64,
}

fn disturb(
    wire: &Wire,
    keys: &Keys,
    program: &Path,
    mut tunnel: Tunnel,
    begin: Instant,
    until: Duration,
    plan: &[(Duration, Disturbance, usize)],
) -> anyhow::Result<Done> {
    let mut handshakes = BTreeSet::new();
    let mut disturbances = Vec::new();
    let mut places = wire.ends.each_ref().map(End::outer);
    let mut plan = plan.iter().peekable();
    let mut stream: Option<Running> = None;
    let before = received(wire)?;
    while begin.elapsed() < until {
        // A connection may not survive what is done to it; the next one begins at once.
        if stream
            .as_mut()
            .is_none_or(|stream| !matches!(stream.child.try_wait(), Ok(None)))
        {
            let mut command = wire.ends[0].command("iperf3");
            command.args(["-c", &tunnel.target, "-t", "86400", "--connect-timeout", "3000"]);
            stream = Some(Running::start(command.stdout(Stdio::null()).stderr(Stdio::null()))?);
        }
        if let Some((_, what, end)) = plan.next_if(|(at, ..)| *at <= begin.elapsed()) {
            eprintln!(
                "bench: {:.0} s: {what:?} at end {}",
                begin.elapsed().as_secs_f64(),
                end + 1
            );
            disturbances.push((begin.elapsed(), *what));
            match what {
                // An agent would know where the other is now: from its Peer, or from what it kept.
                Disturbance::Restart => tunnel.restart(*end, program, wire, keys, &places[1 - end])?,
                Disturbance::Roam => {
                    let end_of = &wire.ends[*end];
                    let [home, away] = [end_of.outer(), end_of.away()];
                    let next = if places[*end] == home { away } else { home };
                    end_of.ip(&format!("addr add {next}/24 dev eth0"))?;
                    end_of.ip(&format!("addr del {}/24 dev eth0", places[*end]))?;
                    places[*end] = next;
                }
            }
        }
        handshakes.extend(tunnel.latest_handshake(wire, 0)?);
        thread::sleep(Duration::from_millis(250));
    }
    Ok(Done {
        disturbances,
        handshakes: handshakes.len(),
        moved: received(wire)? - before,
    })
}

/// Bytes that the far end's wire took so far.
fn received(wire: &Wire) -> anyhow::Result<f64> {
    let text = wire.ends[1].run("cat", &["/proc/net/dev"])?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix("eth0:"));
    let bytes = line
        .and_then(|line| line.split_whitespace().next())
        .context("no eth0 in /proc/net/dev")?;
    Ok(bytes.parse()?)
}

fn sockets(wire: &Wire, from: usize, to: usize) -> anyhow::Result<(UdpSocket, UdpSocket)> {
    let target = wire.ends[to].inner();
    let answering = load::bind(&wire.ends[to], &target, load::ECHO_PORT)?;
    let asking = load::connect(&wire.ends[from], &target, load::ECHO_PORT)?;
    answering.set_read_timeout(Some(NOTED))?;
    asking.set_read_timeout(Some(EVERY))?;
    Ok((asking, answering))
}

/// Asks until told to stop; any answer counts, however late.
fn ask(socket: &UdpSocket, begin: Instant, stop: &AtomicBool) -> Heard {
    let mut heard = Heard {
        answers: 0,
        stalls: Vec::new(),
    };
    let mut last = Instant::now();
    let mut note = |last: Instant, now: Instant| {
        if now - last >= NOTED {
            heard.stalls.push(Stall {
                began: last - begin,
                length: now - last,
            });
        }
    };
    while !stop.load(Ordering::Acquire) {
        let asked = Instant::now();
        // While the interface is away this fails at once: also then a question every 10 ms.
        if socket.send(b"are you there?").is_ok() && socket.recv(&mut [0; 64]).is_ok() {
            let now = Instant::now();
            note(last, now);
            last = now;
            heard.answers += 1;
        }
        thread::sleep(EVERY.saturating_sub(asked.elapsed()));
    }
    note(last, Instant::now());
    heard
}

fn markdown(until: Duration, done: &Done, heard: &[Heard]) -> String {
    let Done {
        disturbances,
        handshakes,
        moved,
    } = done;
    let mut longest: BTreeMap<Option<Disturbance>, Duration> = BTreeMap::new();
    longest.insert(None, Duration::ZERO);
    for (_, what) in disturbances {
        longest.entry(Some(*what)).or_default();
    }
    for stall in heard.iter().flat_map(|heard| &heard.stalls) {
        let longest = longest.entry(cause(disturbances, *stall)).or_default();
        *longest = stall.length.max(*longest);
    }
    let answers: u64 = heard.iter().map(|heard| heard.answers).sum();
    let mut text = format!(
        "{} minutes, {:.1} GB over TCP, {answers} answers to questions from both ends, {handshakes} handshakes; waits under {} ms are not counted.\n\n\
         | | times | longest wait for an answer, s |\n|---|---|---|\n",
        until.as_secs() / 60,
        moved / 1e9,
        NOTED.as_millis(),
    );
    for (what, length) in &longest {
        let (name, times) = match what {
            None => ("nothing but traffic and new keys", String::new()),
            Some(what) => {
                let times = disturbances.iter().filter(|(_, other)| other == what).count();
                let name = match what {
                    Disturbance::Restart => "a process killed and started again",
                    Disturbance::Roam => "an address changed",
                };
                (name, times.to_string())
            }
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| {name} | {times} | {:.2} |", length.as_secs_f64());
    }
    let worst = longest.values().max().copied().unwrap_or_default();
    let verdict = if worst <= GOAL { "within" } else { "beyond" };
    let _ = writeln!(
        text,
        "\nThe longest is {verdict} the goal of {} s. {}",
        GOAL.as_secs(),
        report::Machine::here()
    );
    text
}

/// What a stall is laid to: the last disturbance before its end, if that was not long ago when it began.
fn cause(disturbances: &[(Duration, Disturbance)], stall: Stall) -> Option<Disturbance> {
    let end = stall.began + stall.length;
    let last = disturbances.iter().rev().find(|(at, _)| *at <= end)?;
    (last.0 + Duration::from_secs(10) > stall.began).then_some(last.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn quiet_times_let_keys_be_renewed_between_sets_of_disturbances() {
        let at = |plan: Vec<(Duration, Disturbance, usize)>| plan.into_iter().map(|(at, ..)| at).collect::<Vec<_>>();
        assert_eq!(
            at(plan(s(600), s(150), s(30))),
            [150, 180, 210, 240, 390, 420, 450, 480].map(s)
        );
        assert_eq!(at(plan(s(60), s(150), s(30))), Vec::<Duration>::new());
    }

    #[test]
    fn a_wait_is_laid_to_the_disturbance_just_before_it() {
        let done = [(s(100), Disturbance::Restart), (s(130), Disturbance::Roam)];
        let stall = |began, length| Stall {
            began: s(began),
            length: s(length),
        };
        assert_eq!(cause(&done, stall(99, 2)), Some(Disturbance::Restart));
        assert_eq!(cause(&done, stall(131, 1)), Some(Disturbance::Roam));
        assert_eq!(cause(&done, stall(50, 1)), None);
        assert_eq!(cause(&done, stall(200, 1)), None);
    }
}
