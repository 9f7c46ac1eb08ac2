//! `cargo xtask soak`: builds the programs, and runs `clustermesh-soak` of tests/, which describes what it does.

use std::{os::unix::process::CommandExt, process::Command};

use anyhow::Context;
use xtask::{prereq, programs};

/// Arguments of `cargo xtask soak`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The seed from which the faults and the changes of nodes are drawn. Default: the current time.
    #[arg(long)]
    seed: Option<u64>,
    /// How long faults happen. After that the members have ten minutes to become as planned.
    #[arg(long, default_value_t = 20)]
    minutes: u64,
    #[command(flatten)]
    prereq: prereq::Prereq,
}

/// Runs the soak in place of this process.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let Args { seed, minutes, prereq } = args;
    prereq::ensure(prereq)?;
    let mut soak = Command::new(programs::build()?.join("clustermesh-soak"));
    soak.arg(format!("--minutes={minutes}"));
    if let Some(seed) = seed {
        soak.arg(format!("--seed={seed}"));
    }
    Err(soak.exec()).with_context(|| format!("{soak:?} cannot be started"))
}
