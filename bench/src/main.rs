//! The benchmarks, which `cargo xtask bench` runs. They print figures for people, and assert nothing.
#![forbid(unsafe_code)]

mod compared_programs;
mod cpu;
mod dataplane;
mod events;
mod kernel;
mod load;
mod plan;
mod policy;
mod report;
mod scale;
mod soak;
mod tunnel;
mod wire;

use clap::Parser;

#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask bench",
    bin_name = "cargo xtask bench",
    about = "Run the benchmarks of bench/README.md"
)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, clap::Subcommand)]
enum Bench {
    /// Compare throughput, latency, packet rate, CPU and memory of our userspace device with other programs, in the same namespaces.
    Dataplane(dataplane::Args),
    /// Measure on real API servers how fast the controller creates the Peers of a new mesh and follows changed Nodes, what that costs, and
    /// whether members that misbehave delay the others.
    Events(events::Args),
    /// Compare wg-agent with the kernel backend to WireGuard configured by hand, on this machine's kernel. `dataplane --vm` runs this in
    /// the virtual machine.
    Kernel(kernel::Args),
    /// Create objects. `events` runs this on another host.
    #[command(hide = true)]
    Create(events::convergence::CreateArgs),
    /// Measure how long the controller computes for a large mesh: snapshot, plan and diff, in one process.
    Plan(plan::Args),
    /// Measure gateways for sandboxes on whole clusters: how fast an added or removed grant takes effect, how long a restarted or replaced
    /// gateway is unreachable, throughput by the number of grants, and the resources of an idle gateway.
    Policy(policy::Args),
    /// Measure what one agent at rest receives from a real API server with a thousand Nodes. No kubelets run.
    Scale(scale::Args),
    /// Send traffic through our device for minutes, with rekeys, killed processes and changed addresses.
    Soak(soak::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().bench {
        Bench::Dataplane(args) => dataplane::run(&args),
        Bench::Events(args) => events::run(&args),
        Bench::Create(args) => events::convergence::create(&args),
        Bench::Kernel(args) => kernel::run(&args),
        Bench::Plan(args) => plan::run(&args),
        Bench::Policy(args) => policy::run(&args),
        Bench::Scale(args) => scale::run(&args),
        Bench::Soak(args) => soak::run(&args),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn command_line_is_valid() {
        super::Cli::command().debug_assert();
    }
}
