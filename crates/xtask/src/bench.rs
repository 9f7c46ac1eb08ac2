//! `cargo xtask bench`: what is measured, and how its parts are chained. Nothing here asserts: a figure is for people to judge.

mod cpu;
mod dataplane;
mod load;
mod peers;
mod report;
mod soak;
mod tunnel;
mod wire;

/// What `cargo xtask bench` takes.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Bench {
    /// Throughput, latency, packet rate, CPU and memory of our userspace device beside others, in one run on the same namespaces.
    Dataplane(dataplane::Args),
    /// Minutes of traffic over our device while keys are renewed, processes killed and addresses changed.
    Soak(soak::Args),
}

/// Runs the measurement asked for.
pub(crate) fn run(bench: &Bench) -> anyhow::Result<()> {
    match bench {
        Bench::Dataplane(args) => dataplane::run(args),
        Bench::Soak(args) => soak::run(args),
    }
}
