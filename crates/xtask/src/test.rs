//! `cargo xtask test`: every test of the project, with all that they need built first.

use std::time::Instant;

use crate::{
    prereq,
    programs::{self, cargo, show},
    tools,
};

/// What `cargo xtask test` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    prereq: prereq::Prereq,
    /// Passed on to `cargo test`: `-p clustermesh-core`, `--test mesh_flows`, a test's name.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// Builds the lab's programs and ours, then runs the tests.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let start = Instant::now();
    prereq::ensure(&args.prereq)?;
    tools::run()?;
    let programs = programs::build()?;
    println!("xtask: everything built after {:.0} s", start.elapsed().as_secs_f64());
    let mut test = cargo();
    test.args(["test", "--no-fail-fast"])
        .env("CLUSTERMESH_BIN_DIR", programs);
    if args.words.is_empty() {
        test.arg("--workspace");
    }
    // Whole clusters want the machine for themselves: inside a test program one test at a time.
    test.args(&args.words).args(["--", "--test-threads=1"]);
    show(&mut test)?;
    println!("xtask: every test passed after {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}
