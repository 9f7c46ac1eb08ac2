//! `cargo xtask vm -- COMMAND`: runs a command on a virtual machine whose kernel has WireGuard. The lab crate implements the machine.

use std::time::Duration;

use clustermesh_lab::{Clock, CommandEnd, Machine};

/// Arguments of `cargo xtask vm`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Time limit in seconds. When it is reached, the machine is stopped, and the exit code is 124.
    #[arg(long, default_value_t = 600)]
    limit: u64,
    /// Memory in MiB.
    #[arg(long, default_value_t = 2048)]
    memory: u32,
    /// Number of processors. With more than one, the emulated kernel sometimes crashes.
    #[arg(long, default_value_t = 1)]
    cpus: u32,
    /// Advance the clock of the machine by one nanosecond per instruction, for reproducible measurements. Needs one processor.
    #[arg(long, conflicts_with = "cpus")]
    count_instructions: bool,
    /// The command and its arguments. It runs as root, in this directory, on a copy of this machine's files that is discarded.
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
        CommandEnd::Code(0) => Ok(()),
        CommandEnd::Code(code) => std::process::exit(code),
        CommandEnd::TimeLimit => {
            eprintln!("vm: stopped at the time limit of {limit} s (--limit)");
            std::process::exit(124)
        }
    }
}
