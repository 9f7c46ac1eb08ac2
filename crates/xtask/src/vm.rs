//! `cargo xtask vm -- COMMAND`: a command on a kernel that has WireGuard, whatever this machine's kernel lacks. The machine
//! itself is the lab's.

use std::time::Duration;

use clustermesh_lab::{Clock, Ended, Machine};

/// What `cargo xtask vm` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Seconds after which the machine is ended (exit code 124).
    #[arg(long, default_value_t = 600)]
    limit: u64,
    /// Its memory, MiB.
    #[arg(long, default_value_t = 2048)]
    memory: u32,
    /// Its processors; with more than one the emulated kernel dies now and then.
    #[arg(long, default_value_t = 1)]
    cpus: u32,
    /// A nanosecond is an instruction inside: figures without noise, for one processor.
    #[arg(long, conflicts_with = "cpus")]
    count_instructions: bool,
    /// What to run, with its arguments: as root, in this directory, on this machine's files. What it writes is gone afterwards.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// Runs it and ends with its exit code.
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
