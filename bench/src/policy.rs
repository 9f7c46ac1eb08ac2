//! `cargo xtask bench policy`: measures gateways on whole clusters with packets of a sandbox: how fast an added or removed grant takes
//! effect, how long a restarted or replaced gateway is unreachable, throughput by the number of grants (for comparison also that of a
//! cluster-meshed member, without a gateway), and the resources of an idle gateway.

use std::collections::BTreeMap;

use clustermesh_lab::Lab;
use xtask::{prereq, programs};

use crate::report::{self, Format, spread};

mod changes;
mod load;
mod test_clusters;

use load::{Idle, Sample};
use test_clusters::TestClusters;

/// Arguments of `cargo xtask bench policy`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only these parts. Default: all.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Rounds of each change: revocation, quarantine, restart and replacement.
    #[arg(long, default_value_t = 20)]
    changes: u32,
    /// Seconds of each throughput run; round trips take half of it.
    #[arg(long, default_value_t = 4)]
    seconds: u32,
    /// How often throughput and round trips are measured for each number of grants.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Build agents, gateways and controller with the workspace's crates optimised.
    #[arg(long)]
    optimised: bool,
    /// Format of the results; progress goes to standard error.
    #[arg(short, long, value_enum, default_value = "markdown")]
    output: Format,
    #[command(flatten)]
    prereq: prereq::Prereq,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Memory and CPU of an idle gateway.
    Idle,
    /// A grant that is removed and added again, and a quarantine.
    Grants,
    /// A gateway whose container is restarted, and one whose pod is replaced.
    Gateways,
    /// Throughput and round trips by the number of grants.
    Throughput,
}

/// A duration that every round measures, in milliseconds. `ReplacedSilent` is the length of a silence and
/// `ConnectionWaited` that of a wait. All others start just before the change is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
enum Time {
    Revoked,
    Granted,
    Quarantined,
    Released,
    Restarted,
    Replaced,
    ReplacedSilent,
    ConnectionWaited,
    ConnectionLate,
}

impl Time {
    const fn describe(self) -> &'static str {
        match self {
            Self::Revoked => "grant removed: last answer",
            Self::Granted => "grant added again: first answer",
            Self::Quarantined => "quarantine: last answer",
            Self::Released => "quarantine ended: first answer",
            Self::Restarted => "gateway's process killed: its address answers again",
            Self::Replaced => "gateway's pod deleted: its address answers again, same UDP flow",
            Self::ReplacedSilent => "gateway's pod deleted: longest silence of that flow",
            Self::ConnectionWaited => "gateway's pod deleted: longest wait of a new connection to the Service",
            Self::ConnectionLate => {
                "gateway's pod deleted: start of the last connection that waits over 500 ms (0 = none)"
            }
        }
    }
}

#[derive(Debug, Default, serde::Serialize)]
struct Measured {
    /// The gateways' backend: `kernel` or `userspace`.
    backend: String,
    times: BTreeMap<Time, Vec<u128>>,
    /// Restarts of a gateway's container that changed its public key.
    keys_changed: u32,
    /// Peers in the sandbox that were written because of restarts.
    peers_written: usize,
    /// New connections while a gateway's pod was replaced.
    connections: u64,
    /// How many of `connections` did not open within three seconds.
    connections_lost: u64,
    samples: Vec<Sample>,
    /// The resources of each idle gateway.
    idle: Vec<Idle>,
}

/// Runs the benchmark and prints the results.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    prereq::ensure(&args.prereq)?;
    if args.optimised {
        programs::build_optimised()?;
    } else {
        programs::build()?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let measured = runtime.block_on(measure(args))?;
    match args.output {
        Format::Markdown => print!("{}", markdown(&measured, args)),
        Format::Json => println!("{}", serde_json::to_string_pretty(&measured)?),
    }
    Ok(())
}

async fn measure(args: &Args) -> anyhow::Result<Measured> {
    let print_progress = |line: &str| eprintln!("bench: {line}");
    let lab = Lab::start_with(test_clusters::plan(), &print_progress).await?;
    let clusters = TestClusters::up(&lab, &print_progress).await?;
    let mut measured = Measured {
        backend: clusters.backend().await?,
        ..Measured::default()
    };
    let wanted = |part| args.only.is_empty() || args.only.contains(&part);
    if wanted(Part::Idle) {
        measured.idle = load::idle(&clusters).await?;
        eprintln!("bench: {:?}", measured.idle);
    }
    if wanted(Part::Grants) {
        measured.measure_grants(&clusters, args.changes).await?;
    }
    if wanted(Part::Throughput) {
        measured.samples = load::throughput(&clusters, args.seconds, args.rounds).await?;
    }
    if wanted(Part::Gateways) {
        measured.measure_gateways(&clusters, args.changes).await?;
    }
    Ok(measured)
}

impl Measured {
    fn add(&mut self, time: Time, milliseconds: u128) {
        self.times.entry(time).or_default().push(milliseconds);
    }
}

/// The smallest value such that at least the fraction `share` of all values is less than or equal to it (nearest rank).
fn quantile(sorted: &[u128], share: f64) -> u128 {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "there are at most tens of thousands of values"
    )]
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

fn markdown(measured: &Measured, args: &Args) -> String {
    let Measured {
        backend,
        times,
        keys_changed,
        peers_written,
        connections,
        connections_lost,
        samples,
        idle,
    } = measured;
    let build = if args.optimised {
        "our crates optimised"
    } else {
        "unoptimised"
    };
    let mut out = format!(
        "{}; {build}, gateways with the {backend} backend.\n",
        report::Machine::here()
    );
    if !times.is_empty() {
        out.push_str("\n| ms | p50 | p99 | max | count |\n|---|---|---|---|---|\n");
    }
    for (time, values) in times {
        let mut values = values.clone();
        values.sort_unstable();
        let [p50, p99, max] = [0.5, 0.99, 1.0].map(|share| quantile(&values, share));
        out.push_str(&format!(
            "| {} | {p50} | {p99} | {max} | {} |\n",
            time.describe(),
            values.len()
        ));
    }
    if let Some(restarts) = times.get(&Time::Restarted).map(Vec::len) {
        out.push_str(&format!(
            "\n{restarts} restarts: {keys_changed} changed the public key, {peers_written} Peers written in the sandbox.\n\
             {connections} new connections while a pod was replaced, {connections_lost} not open within 3 s.\n"
        ));
    }
    if !samples.is_empty() {
        out.push_str(&format!(
            "\nMedians [min-max], {} s a run.\n\n| | 1 stream, Gbit/s | round trip p50, us | p99 | gateway's VmRSS, MB | \
             added grants served after, s |\n|---|---|---|---|---|---|\n",
            args.seconds
        ));
    }
    let grant_counts: std::collections::BTreeSet<Option<usize>> = samples.iter().map(|sample| sample.grants).collect();
    for grants in grant_counts {
        let values = |value: fn(&Sample) -> f64| samples.iter().filter(|s| s.grants == grants).map(value).collect();
        let cells = [
            spread(values(|s| s.gigabits_per_second), 3),
            spread(values(|s| s.p50), 0),
            spread(values(|s| s.p99), 0),
            spread(values(|s| s.resident.unwrap_or(f64::NAN) / 1e6), 1),
            spread(values(|s| s.applied.unwrap_or(f64::NAN)), 1),
        ];
        let name = grants.map_or_else(|| "cluster-meshed member".to_owned(), |n| format!("{n} grants"));
        out.push_str(&format!("| {name} | {} |\n", cells.join(" | ")));
    }
    for Idle {
        gateway,
        resident,
        cpu,
        seconds,
    } in idle
    {
        let megabytes = resident / 1e6;
        out.push_str(&format!(
            "\n{gateway}, idle: VmRSS {megabytes:.1} MB, {cpu:.2} s of CPU in {seconds} s\n"
        ));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantile_is_one_of_the_values() {
        let all: Vec<u128> = (1..=400).collect();
        assert_eq!([0.5, 0.99, 1.0].map(|share| quantile(&all, share)), [200, 396, 400]);
        assert_eq!(quantile(&[7], 0.99), 7);
        assert_eq!(quantile(&[], 0.99), 0);
    }
}
