//! Entry points of the `clustermesh-lab` program: commands for users, and hidden commands that the lab runs itself.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::Parser;

use crate::cgroup::Cgroups;

/// Runs clusters on one machine.
#[derive(Debug, Parser)]
#[command(name = "clustermesh-lab")]
enum Stage {
    /// Show the labs that run on this machine.
    List,
    /// Build the lab's programs and put them into its cache.
    Build,
    /// Take every kept lab down and remove the files of dead labs.
    Down,
    /// Run as the parent of all processes of one lab (pid 1 of its own pid namespace).
    #[command(hide = true)]
    Supervise {
        /// The lab's run directory.
        run: PathBuf,
    },
    /// Join the node's cgroups, then exec `argv`.
    #[command(hide = true)]
    Machine {
        /// The lab's run directory.
        run: PathBuf,
        /// The node's name.
        name: String,
        /// The command line to exec.
        #[arg(last = true)]
        argv: Vec<String>,
    },
    /// Run as pid 1 of a node.
    #[command(hide = true)]
    Node {
        /// The file with the node's settings, as JSON.
        settings: PathBuf,
    },
    /// Route between the nodes of one cluster and masquerade packets that leave it, as a CNI daemon does.
    #[command(hide = true)]
    Cni {
        /// The file with the node's settings, as JSON.
        settings: PathBuf,
    },
    /// Enforce NetworkPolicies on a node.
    #[command(hide = true)]
    Policies {
        /// The file with the node's settings, as JSON.
        settings: PathBuf,
    },
}

/// Runs the program.
///
/// # Errors
/// When the command fails.
pub fn main() -> anyhow::Result<()> {
    match Stage::parse() {
        Stage::List => {
            for run in crate::running_labs() {
                println!(
                    "{} {}",
                    run.display(),
                    if crate::run::is_kept(&run) { "kept" } else { "owned" }
                );
            }
            Ok(())
        }
        Stage::Build => {
            crate::Tools::ensure(&crate::ArtefactSet::ALL, &|line| eprintln!("{line}"))?;
            Ok(())
        }
        Stage::Down => Ok(crate::down_all().map(drop)?),
        Stage::Supervise { run } => super::serve(&run),
        Stage::Machine { run, name, argv } => {
            Cgroups::detect()?.of(&run, Some(&name)).join()?;
            Err(Command::new(&argv[0]).args(&argv[1..]).exec().into())
        }
        Stage::Node { settings } => crate::node::init(&settings),
        Stage::Cni { settings } => crate::node::cni(&settings),
        Stage::Policies { settings } => crate::node::policies(&settings),
    }
}
