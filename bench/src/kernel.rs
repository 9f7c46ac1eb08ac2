//! Compares the agent's kernel backend, with firewall table, routes and rules, to WireGuard configured by hand with `wg` and `ip`, and
//! measures flows of a sandbox through a gateway. All variants take turns in the same namespaces. Needs a kernel with WireGuard: this
//! machine's, or that of the lab's virtual machine.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{ChildStdin, Stdio},
    time::Duration,
};

use anyhow::{Context, bail};
use clustermesh_lab::{Clock, CommandEnd, Machine};
use xtask::programs::{cargo, run_command};

use crate::{
    load::{self, Latency},
    report::{self, Format, spread},
    tunnel::{Keys, MTU, PORT},
    wire::{End, POD, Running, Wire},
};

/// Numbers of TCP streams in the throughput runs.
const STREAMS: [u32; 2] = [1, 4];
const INTERFACE: &str = "bench0";
/// Time to boot, and to set up all runs, on an emulated processor.
const SETUP: Duration = Duration::from_secs(300);
/// Real time that one variant may take in one round in the virtual machine if `--seconds` is 1. More seconds raise it in proportion. It is
/// long enough on a busy machine.
const LIMIT_PER_SECOND: Duration = Duration::from_secs(60);

/// Arguments of `cargo xtask bench kernel`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The directory with wg-agent's built examples `node` and `gateway`.
    #[arg(long)]
    examples: PathBuf,
    /// Seconds of each throughput run; latency takes half of it.
    #[arg(long, default_value_t = 6)]
    seconds: u32,
    /// How often each variant is measured.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Format of the results; progress goes to standard error.
    #[arg(short, long, value_enum, default_value = "markdown")]
    output: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
enum Variant {
    ByHand,
    /// By hand, with connection tracking, which kube-proxy enables on every node.
    Tracked,
    Ours,
    /// A node configured by hand -> a gateway -> a pod.
    GatewayByHand,
    /// A node of wg-agent -> a gateway -> a pod: the path of a sandbox's flow.
    Gateway,
}

impl Variant {
    const ALL: [Self; 5] = [
        Self::ByHand,
        Self::Tracked,
        Self::Ours,
        Self::GatewayByHand,
        Self::Gateway,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::ByHand => "`wg` by hand",
            Self::Tracked => "`wg` by hand, connections tracked",
            Self::Ours => "**wg-agent**, kernel backend",
            Self::GatewayByHand => "`wg` by hand, through a gateway",
            Self::Gateway => "**wg-agent**, through a gateway",
        }
    }
}

#[derive(Debug, Clone, PartialEq, serde::Serialize)]
struct Sample {
    variant: Variant,
    /// Gbit/s by number of streams.
    throughput: BTreeMap<u32, f64>,
    latency: Latency,
}

/// Builds the examples, and runs `bench kernel` in the virtual machine.
pub(crate) fn in_machine(seconds: u32, rounds: u32, output: Format) -> anyhow::Result<()> {
    let mut build = cargo();
    // The kernel does all the work, so cargo's profile does not matter.
    build.args([
        "build",
        "--package",
        "wg-agent",
        "--example",
        "node",
        "--example",
        "gateway",
    ]);
    run_command(&mut build)?;
    let own = std::env::current_exe().context("find the path of this program")?;
    let examples = own.with_file_name("examples");
    let utf8 = |path: &Path| path.to_str().map(str::to_owned).context("a path that is not UTF-8");
    let output = clap::ValueEnum::to_possible_value(&output).map_or_else(String::new, |v| v.get_name().to_owned());
    let mut command = vec![utf8(&own)?, "kernel".into()];
    for (flag, value) in [
        ("--examples", utf8(&examples)?),
        ("--seconds", seconds.to_string()),
        ("--rounds", rounds.to_string()),
        ("--output", output),
    ] {
        command.extend([flag.to_owned(), value]);
    }
    let machine = Machine {
        limit: SETUP + LIMIT_PER_SECOND * seconds * rounds * Variant::ALL.len() as u32,
        // The clock counts instructions, so ratios have no noise. It does not show the effect of parallel execution on a real processor.
        clock: Clock::Instructions,
        ..Machine::default()
    };
    match machine.run(&command)? {
        CommandEnd::Code(0) => Ok(()),
        CommandEnd::Code(code) => {
            bail!("the measurement in the virtual machine ended with exit code {code}; see above")
        }
        CommandEnd::TimeLimit => bail!("the virtual machine was ended after {} s", machine.limit.as_secs()),
    }
}

/// Measures on this machine's kernel.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let Args {
        examples,
        seconds,
        rounds,
        output,
    } = args;
    let wire = Wire::new()?;
    let pod = wire.pod()?;
    let keys = Keys::new(&wire)?;
    let _servers = [load::server(&wire.ends[1])?, load::server(&pod)?];
    let bench = Bench {
        examples,
        wire: &wire,
        pod: &pod,
        keys: &keys,
    };
    let mut samples = Vec::new();
    for round in 1..=*rounds {
        // Each round starts one variant later, so that no variant is always the first.
        let mut order = Variant::ALL;
        order.rotate_left(round as usize % Variant::ALL.len());
        for variant in order {
            let sample = bench.sample(variant, *seconds)?;
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

/// The resources that all variants share.
struct Bench<'a> {
    examples: &'a Path,
    wire: &'a Wire,
    pod: &'a End,
    keys: &'a Keys,
}

impl Bench<'_> {
    fn sample(&self, variant: Variant, seconds: u32) -> anyhow::Result<Sample> {
        let wire = self.wire;
        let (by_hand, programs) = match variant {
            Variant::ByHand | Variant::Tracked => ([0, 1].as_slice(), Vec::new()),
            Variant::Ours => ([].as_slice(), vec![self.start_node(0)?, self.start_node(1)?]),
            Variant::GatewayByHand => ([0].as_slice(), vec![self.start_gateway()?]),
            Variant::Gateway => ([].as_slice(), vec![self.start_gateway()?, self.start_node(0)?]),
        };
        for &end in by_hand {
            self.configure_by_hand(end)?;
            if variant == Variant::Tracked {
                track_connections(&wire.ends[end])?;
            }
        }
        let target = wire.ends[1].inner();
        let half = Duration::from_secs(seconds.into()) / 2;
        let latency = match variant {
            Variant::ByHand | Variant::Tracked | Variant::Ours => {
                wire.ends[0].until_answered(&target)?;
                load::latency(wire, &target, half)?
            }
            // Do not wait for a ping, because a gateway answers none. No wait is needed: WireGuard stages the first request until
            // the handshake is done.
            Variant::GatewayByHand | Variant::Gateway => {
                load::latency_of(&load::bind(self.pod, POD, load::ECHO_PORT)?, wire, &target, half)?
            }
        };
        let mut throughput = BTreeMap::new();
        for streams in STREAMS {
            let run = load::throughput(wire, &target, streams, seconds, &[])?;
            throughput.insert(streams, run.gigabits_per_second);
        }
        for &end in by_hand {
            wire.ends[end].ip(&format!("link del {INTERFACE}"))?;
            wire.ends[end].run("nft", &["flush", "ruleset"])?;
        }
        programs.into_iter().try_for_each(Example::end)?;
        Ok(Sample {
            variant,
            throughput,
            latency,
        })
    }

    /// Configures WireGuard with `wg` and `ip`, without a firewall and with one route.
    fn configure_by_hand(&self, end: usize) -> anyhow::Result<()> {
        let (end, far) = (&self.wire.ends[end], &self.wire.ends[1 - end]);
        end.ip(&format!("link add {INTERFACE} mtu {MTU} type wireguard"))?;
        let (file, endpoint, allowed_ip) = (
            self.keys.private_file(end),
            format!("{}:{PORT}", far.outer()),
            format!("{}/32", far.inner()),
        );
        end.run("wg", &["set", INTERFACE, "private-key", &file, "listen-port", PORT])?;
        let peer = [
            "peer",
            self.keys.public(far),
            "endpoint",
            &endpoint,
            "allowed-ips",
            &allowed_ip,
        ];
        end.run("wg", &[&["set", INTERFACE][..], &peer].concat())?;
        end.ip(&format!("addr add {}/32 dev {INTERFACE}", end.inner()))?;
        end.ip(&format!("link set {INTERFACE} up"))?;
        end.ip(&format!("route add {allowed_ip} dev {INTERFACE}"))
    }

    /// Starts a node of wg-agent at one end of the veth.
    fn start_node(&self, end: usize) -> anyhow::Result<Example> {
        let (end, far) = (&self.wire.ends[end], &self.wire.ends[1 - end]);
        let peer = format!("{},{}:{PORT},{}", self.keys.public(far), far.outer(), far.inner());
        let underlay = format!("eth0,{}", end.outer());
        self.start("node", end, &["--underlay", &underlay, "--peer", &peer])
    }

    /// Starts a gateway at the far end, which grants the near end the ports of the pod.
    fn start_gateway(&self) -> anyhow::Result<Example> {
        let [near, end] = &self.wire.ends;
        let peer = format!("{},{}", self.keys.public(near), near.inner());
        let [tcp, udp] = [load::IPERF_PORT, load::ECHO_PORT].map(|port| port.to_string());
        let grants = ["--pod", POD, "--tcp-port", &tcp, "--udp-port", &udp];
        self.start("gateway", end, &[&["--peer", &peer][..], &grants].concat())
    }

    /// Starts an example of wg-agent, and waits until it is ready.
    fn start(&self, example: &str, end: &End, extra_args: &[&str]) -> anyhow::Result<Example> {
        let program = self.examples.join(example);
        let program = program.to_str().context("a program whose path is not UTF-8")?;
        let mut command = end.command(program);
        command
            .args(["--interface", INTERFACE, "--mtu", MTU, "--listen-port", PORT])
            .args([
                "--private-key-file",
                &self.keys.private_file(end),
                "--address",
                &end.inner(),
            ])
            .args(extra_args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut running = Running::start(&mut command)?;
        let stdin = running.child.stdin.take().context("the example's standard input")?;
        let stdout = running.child.stdout.take().context("the example's standard output")?;
        let mut line = String::new();
        BufReader::new(stdout)
            .read_line(&mut line)
            .with_context(|| format!("read the output of the example {example}"))?;
        if line.trim() != "ready" {
            bail!("the example {example} failed to start; see its message above");
        }
        Ok(Example { running, stdin })
    }
}

/// Adds one rule that matches `ct state`, which makes the kernel track every connection.
fn track_connections(end: &End) -> anyhow::Result<()> {
    let rules = "table inet tracked { chain input { type filter hook input priority filter; ct state new accept; }; }";
    end.run("nft", &[rules]).map(drop)
}

/// A running example `node` or `gateway`, which ends when its standard input closes.
struct Example {
    running: Running,
    stdin: ChildStdin,
}

impl Example {
    fn end(self) -> anyhow::Result<()> {
        let Self { mut running, stdin } = self;
        drop(stdin);
        let status = running.child.wait().context("wait for a node or gateway of ours")?;
        if !status.success() {
            bail!("a node or gateway of ours did not remove all its state: {status}");
        }
        Ok(())
    }
}

/// A column of the table: its name, the number of decimals, and the function that returns the value of a sample.
type Column = (&'static str, usize, fn(&Sample) -> f64);

fn markdown(samples: &[Sample], seconds: u32) -> String {
    let values_of = |variant, value: fn(&Sample) -> f64| -> Vec<f64> {
        samples.iter().filter(|s| s.variant == variant).map(value).collect()
    };
    let columns: [Column; 4] = [
        ("1 stream, Gbit/s", 3, |s| s.throughput[&1]),
        ("4 streams", 3, |s| s.throughput[&4]),
        ("round trip p50, us", 0, |s| s.latency.p50 * 1e6),
        ("p99", 0, |s| s.latency.p99 * 1e6),
    ];
    let mut rows = vec![vec![String::new()], vec!["---".to_owned()]];
    rows.extend(Variant::ALL.map(|variant| vec![variant.name().to_owned()]));
    rows.push(vec!["wg-agent / by hand".to_owned()]);
    rows.push(vec!["wg-agent / by hand, tracked".to_owned()]);
    for (name, decimals, value) in columns {
        let all = Variant::ALL.map(|variant| values_of(variant, value));
        let [hand, tracked, ours, ..] = &all;
        let ratio = |to: &[f64]| format!("{:.2}x", median(ours) / median(to));
        let ratios = [ratio(hand), ratio(tracked)];
        let cells = [name.to_owned(), "---".to_owned()]
            .into_iter()
            .chain(all.clone().map(|values| spread(values, decimals)))
            .chain(ratios);
        rows.iter_mut().zip(cells).for_each(|(row, cell)| row.push(cell));
    }
    let lines = rows.iter().map(|row| format!("| {} |\n", row.join(" | ")));
    format!(
        "{}; medians [min-max], {seconds} s a run.\n\n{}",
        report::Machine::here(),
        lines.collect::<String>()
    )
}

/// The same median as in [`spread`].
fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values
        .get(values.len().saturating_sub(1) / 2)
        .copied()
        .unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_is_computed_from_medians() {
        let sample = |variant, gigabits, seconds| Sample {
            variant,
            throughput: STREAMS.map(|streams| (streams, gigabits)).into(),
            latency: Latency {
                p50: seconds,
                p99: seconds,
                lost: 0,
            },
        };
        let hand = [2.0, 1.0, 9.0].map(|gigabits| sample(Variant::ByHand, gigabits, 100e-6));
        let tracked = [2.0; 3].map(|gigabits| sample(Variant::Tracked, gigabits, 250e-6));
        let ours = [1.5, 1.0, 1.9].map(|gigabits| sample(Variant::Ours, gigabits, 125e-6));
        let gateway = [Variant::GatewayByHand, Variant::Gateway].map(|variant| sample(variant, 1.25, 200e-6));
        let text = markdown(&[&hand[..], &tracked, &ours, &gateway].concat(), 6);
        let lines: Vec<&str> = text.lines().skip(4).collect();
        assert_eq!(
            lines,
            [
                "| `wg` by hand | 2.000 [1.000-9.000] | 2.000 [1.000-9.000] | 100 [100-100] | 100 [100-100] |",
                "| `wg` by hand, connections tracked | 2.000 [2.000-2.000] | 2.000 [2.000-2.000] | 250 [250-250] | 250 [250-250] |",
                "| **wg-agent**, kernel backend | 1.500 [1.000-1.900] | 1.500 [1.000-1.900] | 125 [125-125] | 125 [125-125] |",
                "| `wg` by hand, through a gateway | 1.250 | 1.250 | 200 | 200 |",
                "| **wg-agent**, through a gateway | 1.250 | 1.250 | 200 | 200 |",
                "| wg-agent / by hand | 0.75x | 0.75x | 1.25x | 1.25x |",
                "| wg-agent / by hand, tracked | 0.75x | 0.75x | 0.50x | 0.50x |",
            ]
        );
    }
}
