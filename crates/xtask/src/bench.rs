//! `cargo xtask bench`: what is measured, and how its parts are chained. Nothing here asserts: a figure is for people to judge.

mod cpu;
mod dataplane;
mod kernel;
mod load;
mod peers;
mod policy;
mod report;
mod soak;
mod tunnel;
mod wire;

/// What `cargo xtask bench` takes.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Bench {
    /// Throughput, latency, packet rate, CPU and memory of our userspace device beside others, in one run on the same namespaces.
    Dataplane(dataplane::Args),
    /// The kernel's WireGuard with everything of ours around it beside the same set up by hand, on this machine's own kernel:
    /// what `dataplane --vm` runs in the virtual machine.
    Kernel(kernel::Args),
    /// Sandboxes that enter through gateways, on whole clusters: how fast a grant closes and opens, what a restarted or replaced
    /// gateway interrupts, throughput by the number of grants, and what an idle gateway uses.
    Policy(policy::Args),
    /// Minutes of traffic over our device while keys are renewed, processes killed and addresses changed.
    Soak(soak::Args),
}

/// Runs the measurement asked for.
pub(crate) fn run(bench: &Bench) -> anyhow::Result<()> {
    match bench {
        Bench::Dataplane(args) => dataplane::run(args),
        Bench::Kernel(args) => kernel::run(args),
        Bench::Policy(args) => policy::run(args),
        Bench::Soak(args) => soak::run(args),
    }
}
