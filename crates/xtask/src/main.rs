//! The project's own commands. Each lives in a module; this file only names them.
#![forbid(unsafe_code)]

mod bench;
mod crds;
mod demo;
mod deps;
mod fuzz;
mod images;
mod leftovers;
#[cfg(test)]
mod links;
mod manifests;
mod prereq;
mod programs;
mod test;
mod threats;
mod tools;
mod vm;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "The project's own commands", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Two whole Kubernetes clusters on this machine become one mesh; shows it, and tears everything down.
    Demo(demo::Args),
    /// Every test of the project, with all that they need built first.
    Test(test::Args),
    /// Fuzz what reads what others wrote: `cargo xtask fuzz datagram --seconds 600`. Needs no other compiler.
    Fuzz(fuzz::Args),
    /// Measure: what bench/README.md holds comes from here.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Install what this machine lacks (Debian, Ubuntu) or name it.
    Prereq(prereq::Prereq),
    /// Build what the lab runs - Kubernetes, containerd, CNI plugins, CoreDNS - into the cache.
    Tools,
    /// Run a command on a virtual machine whose kernel has WireGuard: `cargo xtask vm -- COMMAND`.
    Vm(vm::Args),
    /// Build the images of wg-agent and clustermesh-controller with podman, docker or buildah.
    Images(images::Args),
    /// Write crds/ from the API types.
    Crds(Drift),
    /// Write the manifests in deploy/.
    Manifests(Drift),
    /// Write docs/threats-index.md from the tags in the tests.
    Threats(Drift),
    /// Prove from cargo metadata who imports whom.
    Deps,
}

#[derive(Debug, clap::Args)]
struct Drift {
    /// Change nothing; fail where a file is not what would be written.
    #[arg(long)]
    check: bool,
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Bench(bench) => bench::run(&bench),
        Command::Prereq(args) => prereq::run(&args),
        Command::Tools => tools::run(),
        Command::Vm(args) => vm::run(args),
        Command::Images(args) => images::run(&args),
        Command::Crds(Drift { check }) => crds::run(check),
        Command::Manifests(Drift { check }) => manifests::run(check),
        Command::Threats(Drift { check }) => threats::run(check),
        Command::Deps => deps::run(),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_contradicts_itself_nowhere() {
        super::Cli::command().debug_assert();
    }
}
