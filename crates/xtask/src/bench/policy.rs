//! What a sandbox's packets cost the node that serves it, by the number of endpoints that are granted: the same tunnel and
//! questions with tables of one, a hundred and ten thousand. How long a grant takes to open and to close is in `times`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{
    kernel,
    load::{self, Latency},
    report::{self, Format, spread},
    times,
    tunnel::Keys,
    wire::Wire,
};

/// Endpoints that are granted beside the two that are asked.
const GRANTS: [Option<u32>; 4] = [None, Some(1), Some(100), Some(10_000)];

/// What is measured, and how it is printed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The example `node` of wg-agent, built: measures here, in the kernel that runs. Without it everything is built and the
    /// virtual machine started.
    #[arg(long)]
    program: Option<PathBuf>,
    /// Only this. Default: both, the packets first.
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Agents that run while grants open and close.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u8).range(1..=60))]
    agents: u8,
    /// Nodes at their API server, their own among them.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u8).range(1..=150))]
    nodes: u8,
    /// How often each grant is taken back and given again.
    #[arg(long, default_value_t = 20)]
    changes: u32,
    /// Nodes of another sandbox whose keys are rewritten without a pause. Measures quarantines alone, first without them.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=5000))]
    beside: Option<u16>,
    /// Keys that are rewritten in a second beside them.
    #[arg(long, default_value_t = 500, requires = "beside", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    keys_per_second: u32,
    /// Builds controller and agents of the times with our own crates optimised.
    #[arg(long)]
    optimised: bool,
    /// Of each throughput run; latency takes half of it.
    #[arg(long, default_value_t = 2)]
    seconds: u32,
    /// How often each is measured.
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// What is printed at the end; progress goes to standard error.
    #[arg(short, long, value_enum, default_value = "markdown")]
    output: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// What a packet costs.
    Packets,
    /// How long a grant takes to open and to close.
    Times,
}

#[derive(Debug, Clone, PartialEq, serde::Serialize)]
struct Sample {
    /// `None` = no sandbox: a member that is trusted.
    grants: Option<u32>,
    /// One TCP stream.
    gigabits_per_second: f64,
    latency: Latency,
}

/// Measures.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let Args {
        program,
        only,
        agents,
        nodes,
        changes,
        beside,
        keys_per_second,
        optimised,
        seconds,
        rounds,
        output,
    } = args;
    let Some(program) = program else {
        if *only != Some(Part::Times) {
            kernel::in_machine("policy", *seconds, *rounds, *output)?;
        }
        let size = times::Size {
            agents: *agents,
            nodes: (*nodes).max(*agents),
            changes: *changes,
            optimised: *optimised,
            beside: beside.map(|nodes| times::Load {
                nodes,
                keys_per_second: *keys_per_second,
            }),
        };
        return match only {
            Some(Part::Packets) => Ok(()),
            None | Some(Part::Times) => times::run(size, *output),
        };
    };
    let wire = Wire::new()?;
    let keys = Keys::new(&wire)?;
    let _server = load::server(&wire.ends[1])?;
    let mut samples = Vec::new();
    for round in 1..=*rounds {
        for grants in GRANTS {
            let sample = sample(grants, program, &wire, &keys, *seconds)?;
            eprintln!("bench: round {round} of {rounds}: {sample:?}");
            samples.push(sample);
        }
    }
    match output {
        Format::Markdown => print!("{}", markdown(&samples, *seconds)),
        Format::Json => println!("{}", serde_json::to_string_pretty(&samples)?),
    }
    Ok(())
}

fn sample(grants: Option<u32>, program: &Path, wire: &Wire, keys: &Keys, seconds: u32) -> anyhow::Result<Sample> {
    let nodes = [
        kernel::ours(program, wire, keys, 0, None)?,
        kernel::ours(program, wire, keys, 1, grants)?,
    ];
    let target = wire.ends[1].inner();
    // Brings the tunnel up: a ping is no grant.
    load::throughput(wire, &target, 1, 1, &[])?;
    let latency = load::latency(wire, &target, Duration::from_secs(seconds.into()) / 2)?;
    let run = load::throughput(wire, &target, 1, seconds, &[])?;
    nodes.into_iter().try_for_each(kernel::Node::end)?;
    Ok(Sample {
        grants,
        gigabits_per_second: run.gigabits_per_second,
        latency,
    })
}

fn markdown(samples: &[Sample], seconds: u32) -> String {
    let mut out = format!(
        "{}; medians [least-most], {seconds} s a run.\n\n| granted endpoints | 1 stream, Gbit/s | round trip p50, us | p99 |\n|---|---|---|---|\n",
        report::Machine::here()
    );
    for grants in GRANTS {
        let of = |value: fn(&Sample) -> f64| samples.iter().filter(|s| s.grants == grants).map(value).collect();
        let cells = [
            spread(of(|s| s.gigabits_per_second), 3),
            spread(of(|s| s.latency.p50 * 1e6), 1),
            spread(of(|s| s.latency.p99 * 1e6), 1),
        ];
        let name = grants.map_or_else(|| "no sandbox".to_owned(), |grants| (grants + 2).to_string());
        out.push_str(&format!("| {name} | {} |\n", cells.join(" | ")));
    }
    out
}
