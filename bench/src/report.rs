//! Prints the results of `bench dataplane` as Markdown tables (as in bench/results.md) or as JSON.

use std::fmt::{self, Write as _};

use crate::{
    compared_programs,
    dataplane::{Measured, STREAMS, Sample},
    load::Throughput,
    tunnel::{IDLE_PEERS, IdlePeers, Variant},
};

/// How the figures are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Medians, with minimum and maximum in brackets.
    Markdown,
    /// Every sample.
    Json,
}

/// The machine of a measurement, and the commit of this repository.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Machine {
    cpu: String,
    cpus: usize,
    kernel: String,
    revision: String,
}

impl Machine {
    /// This machine. A text that cannot be read is "unknown", an unknown number of CPUs is 0; the figures are still useful.
    pub(crate) fn here() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_else(|_| "unknown".into());
        let info = read("/proc/cpuinfo");
        let model = info.lines().find_map(|line| line.strip_prefix("model name"));
        Self {
            cpu: model
                .map_or("unknown", |model| model.trim_start_matches([' ', '\t', ':']))
                .into(),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            kernel: version(&read("/proc/sys/kernel/osrelease")).into(),
            revision: compared_programs::revision(),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            cpu,
            cpus,
            kernel,
            revision,
        } = self;
        write!(f, "{revision}, {cpus} x {cpu}, Linux {kernel}")
    }
}

/// The kernel's version without the distribution's suffix.
fn version(release: &str) -> &str {
    release.trim().split(['-', '+']).next().unwrap_or_default()
}

/// Prints the results.
pub(crate) fn print(measured: &Measured, format: Format) -> anyhow::Result<()> {
    match format {
        Format::Markdown => print!("{}", markdown(measured)),
        Format::Json => println!("{}", serde_json::to_string_pretty(measured)?),
    }
    Ok(())
}

/// One sample in one line, to show progress.
pub(crate) fn line(sample: &Sample) -> String {
    let Sample {
        variant,
        udp_offload,
        throughput,
        latency,
        small_packets,
    } = sample;
    let streams = throughput
        .iter()
        .map(|(streams, run)| format!("{streams}: {:.2}", run.gigabits_per_second));
    format!(
        "{} (UDP segmentation of the underlay {}): Gbit/s {}; {:.0}/{:.0} us, {} lost; {:.0} k packets/s",
        variant.name(),
        if *udp_offload { "on" } else { "off" },
        streams.collect::<Vec<_>>().join(", "),
        latency.p50 * 1e6,
        latency.p99 * 1e6,
        latency.lost,
        small_packets / 1e3,
    )
}

fn markdown(measured: &Measured) -> String {
    let Measured {
        machine,
        seconds,
        samples,
        idle_peers,
        failed,
    } = measured;
    let mut text = format!(
        "{machine}; medians [min-max], {seconds} s a run. Both ends of the tunnel, iperf3's two \
         ends and the kernel share these CPUs.\n"
    );
    for udp_offload in [true, false] {
        let rows: Vec<&Sample> = samples.iter().filter(|s| s.udp_offload == udp_offload).collect();
        if !rows.is_empty() {
            table(&mut text, udp_offload, &rows);
        }
    }
    if !idle_peers.is_empty() {
        idle_peers_table(&mut text, idle_peers);
    }
    for failure in failed {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\nNot measured: {}", failure.trim());
    }
    text
}

fn table(text: &mut String, udp_offload: bool, samples: &[&Sample]) {
    let state = if udp_offload { "on" } else { "off" };
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "\nUDP segmentation of the underlay {state}:\n\n\
         | | 1 stream, Gbit/s | 4 streams | 16 streams | CPU s/Gbit, daemons (4 streams) | whole machine | \
         round trip p50, us | p99 | 64-byte packets, k/s |\n|---|---|---|---|---|---|---|---|---|\n"
    );
    for variant in variants(samples.iter().map(|sample| sample.variant)) {
        let cell = |value: &dyn Fn(&Sample) -> f64, digits| {
            let rows = samples.iter().filter(|sample| sample.variant == variant);
            spread(rows.map(|sample| value(sample)).collect(), digits)
        };
        let throughput_cell = |streams: u32, value: fn(&Throughput) -> f64, digits| {
            cell(
                &|sample| sample.throughput.get(&streams).map_or(f64::NAN, value),
                digits,
            )
        };
        let mut cells = vec![variant.name().to_owned()];
        cells.extend(STREAMS.map(|streams| throughput_cell(streams, |run| run.gigabits_per_second, 2)));
        cells.push(throughput_cell(4, |run| run.daemons_per_gigabit, 2));
        cells.push(throughput_cell(4, |run| run.machine_per_gigabit, 2));
        cells.push(cell(&|sample| sample.latency.p50 * 1e6, 0));
        cells.push(cell(&|sample| sample.latency.p99 * 1e6, 0));
        cells.push(cell(&|sample| sample.small_packets / 1e3, 0));
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
}

fn idle_peers_table(text: &mut String, samples: &[(Variant, IdlePeers)]) {
    let _ = write!(
        text,
        "\n{IDLE_PEERS} idle peers with three allowed IPs each:\n\n\
         | | programmed, ms | one changed, ms | memory for 1,000, MB |\n|---|---|---|---|\n"
    );
    for variant in variants(samples.iter().map(|(variant, _)| *variant)) {
        let cell = |value: fn(&IdlePeers) -> f64, digits| {
            let rows = samples.iter().filter(|(other, _)| *other == variant);
            spread(rows.map(|(_, sample)| value(sample)).collect(), digits)
        };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} |",
            variant.name(),
            cell(|sample| sample.programmed * 1e3, 0),
            cell(|sample| sample.changed * 1e3, 2),
            cell(|sample| sample.memory_per_thousand / 1e6, 1),
        );
    }
}

/// Each variant once, in order.
fn variants(all: impl Iterator<Item = Variant>) -> std::collections::BTreeSet<Variant> {
    all.collect()
}

/// The median (the lower of two in the middle), with minimum and maximum if there is more than one value; `-` without values.
/// NaN is no value.
pub(crate) fn spread(mut values: Vec<f64>, digits: usize) -> String {
    values.retain(|value| !value.is_nan());
    values.sort_by(f64::total_cmp);
    match values[..] {
        [] => "-".into(),
        [one] => format!("{one:.digits$}"),
        [min, .., max] => {
            let median = values[(values.len() - 1) / 2];
            format!("{median:.digits$} [{min:.digits$}-{max:.digits$}]")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_is_the_median_with_minimum_and_maximum() {
        assert_eq!(spread(vec![], 1), "-");
        assert_eq!(spread(vec![f64::NAN], 1), "-");
        assert_eq!(spread(vec![2.25], 1), "2.2");
        assert_eq!(spread(vec![3.0, 1.0, 2.0], 2), "2.00 [1.00-3.00]");
        assert_eq!(spread(vec![4.0, 1.0, 3.0, 2.0], 0), "2 [1-4]");
    }
}
