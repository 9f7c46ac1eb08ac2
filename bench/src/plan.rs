//! `cargo xtask bench plan`: measures the planner in one process, without API servers. The measuring program is an example of
//! `clustermesh-api`, so that only this crate and its dependencies are built in release mode.

use std::ffi::OsString;

use xtask::programs;

/// Arguments of `cargo xtask bench plan`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Clusters of the mesh.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(2..=60))]
    clusters: u16,
    /// Nodes of each cluster.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u16).range(10..=1000))]
    nodes: u16,
    /// How often each pass is measured.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=20))]
    rounds: u16,
}

/// Builds the measuring program and runs it.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let arguments = [args.clusters, args.nodes, args.rounds].map(|number| OsString::from(number.to_string()));
    let mut run = programs::cargo();
    run.args([
        "run",
        "--release",
        "--package",
        "clustermesh-api",
        "--example",
        "plan",
        "--",
    ]);
    programs::run_command(run.args(arguments))
}
