//! `cargo xtask vm -- COMMAND`: runs a command on a virtual machine whose kernel has WireGuard. The lab crate implements the machine.

use std::time::Duration;

use clustermesh_lab::{Clock, Ended, Machine};

/// What `cargo xtask vm` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Seconds after which the machine is stopped (exit code 124).
    #[arg(long, default_value_t = 600)]
    limit: u64,
    /// Memory in MiB.
    #[arg(long, default_value_t = 2048)]
    memory: u32,
    /// Processors; with more than one the emulated kernel sometimes crashes.
    #[arg(long, default_value_t = 1)]
    cpus: u32,
    /// Advance the machine's clock by one nanosecond for each instruction: results without noise, for one processor.
    #[arg(long, conflicts_with = "cpus")]
    count_instructions: bool,
    /// The command and its arguments. It runs as root, in this directory, with this machine's files; what it writes to them is discarded.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// Runs the command and exits with its exit code.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let Args {
        limit,
        memory,
        cpus,
        count_instructions,
        command,
    } = args;
    let machine = Machine {
        memory,
        cpus,
        limit: Duration::from_secs(limit),
        clock: if count_instructions {
            Clock::Instructions
        } else {
            Clock::Real
        },
    };
    match machine.run(&command)? {
        Ended::Code(0) => Ok(()),
        Ended::Code(code) => std::process::exit(code),
        Ended::TimeLimit => {
            eprintln!("vm: ended after the limit of {limit} s (--limit)");
            std::process::exit(124)
        }
    }
}
