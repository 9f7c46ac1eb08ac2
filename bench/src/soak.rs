//! `cargo xtask bench soak`: sends traffic through our device for minutes, with rekeys, killed processes and changed addresses. Prints the
//! longest time without a reply for each kind of disturbance, and without any disturbance.

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
use xtask::prereq;

use crate::{
    compared_programs, load, report,
    tunnel::{Keys, Tunnel, Variant},
    wire::{End, Running, Wire},
};

/// Time from one request to the next.
const INTERVAL: Duration = Duration::from_millis(10);
/// A shorter time without a reply does not count as a stall, because busy CPUs alone cause such times.
const MIN_STALL: Duration = Duration::from_millis(100);
/// The goal for the longest stall.
const GOAL: Duration = Duration::from_secs(1);

/// Arguments of `cargo xtask bench soak`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[arg(long, default_value_t = 10)]
    minutes: u64,
    /// Seconds before each set of disturbances. A rekey happens after 120 s.
    #[arg(long, default_value_t = 150)]
    quiet_seconds: u64,
    /// Seconds between the disturbances of a set.
    #[arg(long, default_value_t = 30)]
    pause_seconds: u64,
    #[command(flatten)]
    prereq: prereq::Prereq,
}

/// A disturbance of one end of the tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Disturbance {
    /// Kill the process with SIGKILL, and start a new one at once.
    Restart,
    /// Replace the address on the veth.
    Roam,
}

/// A time without a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stall {
    began: Duration,
    length: Duration,
}

/// How many replies one end received, and the stalls between them.
struct Replies {
    count: u64,
    stalls: Vec<Stall>,
}

/// Runs the benchmark and prints the results.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let Args {
        minutes,
        quiet_seconds,
        pause_seconds,
        prereq,
    } = args;
    prereq::ensure(prereq)?;
    let program = compared_programs::build_our_device()?;
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
        let _stop = StopOnDrop(&stop);
        let begin = Instant::now();
        let mut clients = Vec::new();
        for (from, to) in [(0, 1), (1, 0)] {
            let (client, server) = sockets(&wire, from, to)?;
            let stop = &stop;
            scope.spawn(move || load::echo(&server, stop));
            clients.push(scope.spawn(move || send_requests(&client, begin, stop)));
        }
        let events = disturb(&wire, &keys, &program, tunnel, begin, until, &plan)?;
        stop.store(true, Ordering::Release);
        let replies = clients
            .into_iter()
            .map(|client| client.join().expect("a thread that sends requests"));
        print!("{}", markdown(until, &events, &replies.collect::<Vec<_>>()));
        Ok(())
    })
}

/// Stops the threads when it is dropped, also after an error.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Plans the disturbances: time, kind and tunnel end of each. A set has each kind at each tunnel end. `quiet` is the time before a set,
/// `pause` the time between the disturbances of a set. Sets repeat until `until`; the last one may be incomplete.
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
        // Leave time to see the effect of the last disturbance.
        if at + pause.min(quiet) > until {
            break;
        }
        plan.push((at, what, end));
    }
    plan
}

/// What happened during the run.
struct Events {
    disturbances: Vec<(Duration, Disturbance)>,
    /// Handshakes of end 1: the number of different times that it reported for its latest handshake.
    handshakes: usize,
    /// Bytes that the veth of end 2 received, nearly all of them from the TCP connection.
    received_bytes: f64,
}

/// Carries out the plan. Until `until`, also keeps a TCP connection from end 1 to end 2 busy, and counts handshakes.
fn disturb(
    wire: &Wire,
    keys: &Keys,
    program: &Path,
    mut tunnel: Tunnel,
    begin: Instant,
    until: Duration,
    plan: &[(Duration, Disturbance, usize)],
) -> anyhow::Result<Events> {
    let mut handshakes = BTreeSet::new();
    let mut disturbances = Vec::new();
    let mut addresses = wire.ends.each_ref().map(End::outer);
    let mut plan = plan.iter().peekable();
    let mut stream: Option<Running> = None;
    let before = received(wire)?;
    while begin.elapsed() < until {
        // A disturbance may end the TCP connection; start the next one at once.
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
                // As an agent does, start with the other end's current endpoint.
                Disturbance::Restart => tunnel.restart(*end, program, wire, keys, &addresses[1 - end])?,
                Disturbance::Roam => {
                    let roaming_end = &wire.ends[*end];
                    let [first, away] = [roaming_end.outer(), roaming_end.away()];
                    let next = if addresses[*end] == first { away } else { first };
                    roaming_end.ip(&format!("addr add {next}/24 dev eth0"))?;
                    roaming_end.ip(&format!("addr del {}/24 dev eth0", addresses[*end]))?;
                    addresses[*end] = next;
                }
            }
        }
        handshakes.extend(tunnel.latest_handshake(wire, 0)?);
        thread::sleep(Duration::from_millis(250));
    }
    Ok(Events {
        disturbances,
        handshakes: handshakes.len(),
        received_bytes: received(wire)? - before,
    })
}

/// Bytes that the veth of end 2 has received so far.
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
    let server = load::bind(&wire.ends[to], &target, load::ECHO_PORT)?;
    let client = load::connect(&wire.ends[from], &target, load::ECHO_PORT)?;
    // How often `echo` checks whether to stop; any short time will do.
    server.set_read_timeout(Some(MIN_STALL))?;
    client.set_read_timeout(Some(INTERVAL))?;
    Ok((client, server))
}

/// Sends requests until `stop` is set. Any reply counts, also a late one.
fn send_requests(socket: &UdpSocket, begin: Instant, stop: &AtomicBool) -> Replies {
    let mut replies = Replies {
        count: 0,
        stalls: Vec::new(),
    };
    let mut last = Instant::now();
    let mut record_stall = |last: Instant, now: Instant| {
        if now - last >= MIN_STALL {
            replies.stalls.push(Stall {
                began: last - begin,
                length: now - last,
            });
        }
    };
    while !stop.load(Ordering::Acquire) {
        let sent_at = Instant::now();
        // Without the interface the send fails at once; the loop still sends only every 10 ms.
        if socket.send(b"are you there?").is_ok() && socket.recv(&mut [0; 64]).is_ok() {
            let now = Instant::now();
            record_stall(last, now);
            last = now;
            replies.count += 1;
        }
        thread::sleep(INTERVAL.saturating_sub(sent_at.elapsed()));
    }
    record_stall(last, Instant::now());
    replies
}

fn markdown(until: Duration, events: &Events, replies: &[Replies]) -> String {
    let Events {
        disturbances,
        handshakes,
        received_bytes,
    } = events;
    let mut longest: BTreeMap<Option<Disturbance>, Duration> = BTreeMap::new();
    longest.insert(None, Duration::ZERO);
    for (_, what) in disturbances {
        longest.entry(Some(*what)).or_default();
    }
    for stall in replies.iter().flat_map(|replies| &replies.stalls) {
        let longest = longest.entry(cause(disturbances, *stall)).or_default();
        *longest = stall.length.max(*longest);
    }
    let echoes: u64 = replies.iter().map(|replies| replies.count).sum();
    let mut text = format!(
        "{} minutes, {:.1} GB over TCP, {echoes} echoes from both ends, {handshakes} handshakes; waits under {} ms are not counted.\n\n\
         | | times | longest wait for an answer, s |\n|---|---|---|\n",
        until.as_secs() / 60,
        received_bytes / 1e9,
        MIN_STALL.as_millis(),
    );
    for (what, length) in &longest {
        let (name, times) = match what {
            None => ("no disturbance (only traffic and rekeys)", String::new()),
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

/// The cause of a stall: the last disturbance before the stall ended. `None` if there was none, or if the stall began at least 10 s
/// after it.
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
    fn each_set_of_disturbances_starts_after_a_quiet_time() {
        let at = |plan: Vec<(Duration, Disturbance, usize)>| plan.into_iter().map(|(at, ..)| at).collect::<Vec<_>>();
        assert_eq!(
            at(plan(s(600), s(150), s(30))),
            [150, 180, 210, 240, 390, 420, 450, 480].map(s)
        );
        assert_eq!(at(plan(s(60), s(150), s(30))), Vec::<Duration>::new());
    }

    #[test]
    fn stall_is_caused_by_the_last_disturbance_before_its_end() {
        let events = [(s(100), Disturbance::Restart), (s(130), Disturbance::Roam)];
        let stall = |began, length| Stall {
            began: s(began),
            length: s(length),
        };
        assert_eq!(cause(&events, stall(99, 2)), Some(Disturbance::Restart));
        assert_eq!(cause(&events, stall(131, 1)), Some(Disturbance::Roam));
        assert_eq!(cause(&events, stall(50, 1)), None);
        assert_eq!(cause(&events, stall(200, 1)), None);
    }
}
