//! Defines the command line of `cargo xtask`. Each command except `bench` has its own module.
#![forbid(unsafe_code)]

mod crds;
mod demo;
mod deps;
#[cfg(test)]
mod examples;
mod fuzz;
mod images;
mod leftovers;
#[cfg(test)]
mod links;
mod manifests;
mod soak;
mod test;
mod threats;
mod versions;
mod vm;

use std::{ffi::OsString, os::unix::process::CommandExt};

use anyhow::Context;
use clap::{Parser, Subcommand};
use xtask::{prereq, programs, tools};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "The project's own commands", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Connect Kubernetes clusters on this machine into one mesh, show that it works, and remove the clusters.
    Demo(demo::Args),
    /// Build the programs that the tests need, and run every test of the project.
    Test(test::Args),
    /// Fuzz the parsers of untrusted input: `cargo xtask fuzz datagram --seconds 600`. Works with the stable compiler.
    Fuzz(fuzz::Args),
    /// Run the benchmarks of bench/README.md.
    #[command(disable_help_flag = true)]
    Bench {
        /// Arguments of the program in bench/, which also handles `--help`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<OsString>,
    },
    /// Run two replicas of the controller on real API servers, with changing nodes and random faults, and check at the end that every
    /// member is as planned and that nothing was deleted without a reason.
    Soak(soak::Args),
    /// Install the packages that this machine lacks (Debian, Ubuntu), or list them.
    Prereq(prereq::Prereq),
    /// Build the lab's programs into the cache: etcd, Kubernetes, containerd, runc, CNI plugins, CoreDNS, wireguard-go.
    Tools,
    /// Run a command on a virtual machine whose kernel has WireGuard: `cargo xtask vm -- COMMAND`.
    Vm(vm::Args),
    /// Build the images of wg-agent and clustermesh-controller with podman, docker or buildah.
    Images(images::Args),
    /// Write crds/ from the API types.
    Crds(GeneratedArgs),
    /// Write the manifests in deploy/.
    Manifests(GeneratedArgs),
    /// Write docs/threats-index.md from the tags in the tests.
    Threats(GeneratedArgs),
    /// Write docs/versions.md from the supported versions.
    Versions(GeneratedArgs),
    /// Check the dependencies: imports against ARCHITECTURE.md, licences, and crates in several versions.
    Deps,
}

/// Arguments of the commands that write generated files.
#[derive(Debug, clap::Args)]
struct GeneratedArgs {
    /// Change nothing; fail if a file differs from what would be written.
    #[arg(long)]
    check: bool,
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Bench { words } => bench(&words),
        Command::Soak(args) => soak::run(&args),
        Command::Prereq(args) => prereq::run(&args),
        Command::Tools => tools::run(),
        Command::Vm(args) => vm::run(args),
        Command::Images(args) => images::run(&args),
        Command::Crds(GeneratedArgs { check }) => crds::run(check),
        Command::Manifests(GeneratedArgs { check }) => manifests::run(check),
        Command::Threats(GeneratedArgs { check }) => threats::run(check),
        Command::Versions(GeneratedArgs { check }) => versions::run(check),
        Command::Deps => deps::run(),
    }
}

/// Builds the crate in bench/ and runs it in place of this process.
fn bench(words: &[OsString]) -> anyhow::Result<()> {
    let mut run = programs::cargo();
    run.args(["run", "--package", "clustermesh-bench", "--manifest-path"])
        .arg(programs::root().join("Cargo.toml"))
        .arg("--")
        .args(words)
        // `cargo()` sets the root as the directory, but paths in `words` are relative to the caller's directory.
        .current_dir(".");
    if words.first().is_some_and(|command| command == "events") {
        // The programs of this directory are used instead of those of the dev build.
        run.env("CLUSTERMESH_BIN_DIR", programs::measured()?);
    }
    Err(run.exec()).with_context(|| format!("{run:?} cannot be started"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn command_line_definition_is_valid() {
        super::Cli::command().debug_assert();
    }
}
