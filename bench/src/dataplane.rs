//! `cargo xtask bench dataplane`: compares tunnel programs with each other and with a link without a tunnel. Measures each
//! of these ([`Variant`]) in every round. Each round starts with another variant, so that no variant is always the first.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use xtask::prereq;

use crate::{
    kernel,
    load::{self, Latency, Throughput},
    report,
    tunnel::{self, IdlePeers, Keys, Tunnel, Variant},
    wire::Wire,
};

/// Numbers of TCP streams in the throughput runs.
pub(crate) const STREAMS: [u32; 3] = [1, 4, 16];

/// Arguments of `cargo xtask bench dataplane`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// One round with runs of two seconds, only with UDP offload: shows that everything works, not how fast.
    #[arg(long)]
    quick: bool,
    /// Only compare the kernel backend with a device that is configured by hand with `wg`, in the virtual machine.
    #[arg(long, conflicts_with = "only")]
    vm: bool,
    /// Only these variants.
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Variant>,
    /// Seconds of each throughput run; latency and packet rate take half of it.
    #[arg(long, default_value_t = 6)]
    seconds: u32,
    /// How often each variant is measured, with and without UDP offload each time.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Format of the results; progress goes to standard error.
    #[arg(short, long, value_enum, default_value = "markdown")]
    output: report::Format,
    #[command(flatten)]
    prereq: prereq::Prereq,
}

/// One measurement of a variant.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub(crate) struct Sample {
    pub(crate) variant: Variant,
    /// Whether UDP segmentation offload (USO) of the underlay's veth was on.
    pub(crate) udp_offload: bool,
    /// By number of streams.
    pub(crate) throughput: BTreeMap<u32, Throughput>,
    pub(crate) latency: Latency,
    /// Datagrams of 64 bytes received in a second.
    pub(crate) small_packets: f64,
}

/// Everything that was measured.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub(crate) struct Measured {
    pub(crate) machine: report::Machine,
    pub(crate) seconds: u32,
    pub(crate) samples: Vec<Sample>,
    /// Measurements with many idle peers: in each round, one for each variant that is a program.
    #[serde(rename = "crowds")]
    pub(crate) idle_peers: Vec<(Variant, IdlePeers)>,
    /// The variants that could not be built or measured, and why; the other results are valid.
    pub(crate) failed: Vec<String>,
}

impl Measured {
    /// Records a failure and continues, so that one failure does not lose half an hour of results.
    fn ok_or_record<T>(&mut self, variant: Variant, result: anyhow::Result<T>) -> Option<T> {
        result
            .map_err(|error| {
                let failure = format!("{}: {error:#}", variant.name());
                eprintln!("bench: {failure}");
                self.failed.push(failure);
            })
            .ok()
    }
}

/// Builds the programs, measures them, and prints the results.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let Args {
        quick,
        vm,
        only,
        seconds,
        rounds,
        output,
        prereq,
    } = args;
    prereq::ensure(prereq)?;
    let (seconds, rounds) = if *quick { (2, 1) } else { (*seconds, *rounds) };
    if *vm {
        return kernel::in_machine(seconds, rounds, *output);
    }
    let udp_offload_settings: &[bool] = if *quick { &[true] } else { &[true, false] };
    let all = <Variant as clap::ValueEnum>::value_variants();
    let mut measured = Measured {
        machine: report::Machine::here(),
        seconds,
        samples: Vec::new(),
        idle_peers: Vec::new(),
        failed: Vec::new(),
    };
    let mut programs = BTreeMap::new();
    for variant in all.iter().filter(|variant| only.is_empty() || only.contains(variant)) {
        if let Some(program) = measured.ok_or_record(*variant, variant.build()) {
            programs.insert(*variant, program);
        }
    }
    let measured = measure(measured, &programs, rounds, udp_offload_settings)?;
    report::print(&measured, *output)
}

fn measure(
    mut measured: Measured,
    programs: &BTreeMap<Variant, Option<PathBuf>>,
    rounds: u32,
    udp_offload_settings: &[bool],
) -> anyhow::Result<Measured> {
    let wire = Wire::new()?;
    let keys = Keys::new(&wire)?;
    let _server = load::server(&wire.ends[1])?;
    let mut order: Vec<(Variant, Option<&PathBuf>)> = programs
        .iter()
        .map(|(variant, program)| (*variant, program.as_ref()))
        .collect();
    for round in 1..=rounds {
        for &udp_offload in udp_offload_settings {
            wire.set_udp_offload(udp_offload)?;
            for &(variant, program) in &order {
                let sample = sample(variant, program, udp_offload, &wire, &keys, measured.seconds);
                if let Some(sample) = measured.ok_or_record(variant, sample) {
                    eprintln!("bench: round {round} of {rounds}: {}", report::line(&sample));
                    measured.samples.push(sample);
                }
            }
        }
        for &(variant, program) in &order {
            if let Some(program) = program {
                let idle_peers = tunnel::measure_idle(variant, program, &wire, &keys);
                if let Some(idle_peers) = measured.ok_or_record(variant, idle_peers) {
                    measured.idle_peers.push((variant, idle_peers));
                }
            }
        }
        if !order.is_empty() {
            order.rotate_left(1);
        }
    }
    Ok(measured)
}

fn sample(
    variant: Variant,
    program: Option<&PathBuf>,
    udp_offload: bool,
    wire: &Wire,
    keys: &Keys,
    seconds: u32,
) -> anyhow::Result<Sample> {
    let tunnel = Tunnel::open(variant, program.map(PathBuf::as_path), wire, keys)?;
    let half = Duration::from_secs(u64::from(seconds)) / 2;
    // Measure latency first: packets that throughput runs leave in queues would add to it.
    let latency = load::latency(wire, &tunnel.target, half)?;
    let mut throughput = BTreeMap::new();
    for streams in STREAMS {
        let run = load::throughput(wire, &tunnel.target, streams, seconds, &tunnel.pids())?;
        throughput.insert(streams, run);
    }
    Ok(Sample {
        variant,
        udp_offload,
        throughput,
        latency,
        small_packets: load::small_packets(wire, &tunnel.target, half)?,
    })
}
