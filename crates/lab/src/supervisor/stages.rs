//! The entry points of the `clustermesh-lab` program: the stages that the lab runs of itself, and `list` and `down`
//! for a person.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::Parser;

use crate::cgroup::Cgroups;

/// Clusters on one machine. `list` and `down` are for people; the rest is how the lab starts itself.
#[derive(Debug, Parser)]
#[command(name = "clustermesh-lab")]
enum Stage {
    /// Show the labs that stand on this machine.
    List,
    /// Build everything the lab runs into its cache.
    Build,
    /// Take every kept lab down and sweep what dead ones left.
    Down,
    /// The parent of everything in one lab (pid 1 of its own namespace).
    #[command(hide = true)]
    Supervise {
        /// The lab's run directory.
        run: PathBuf,
    },
    /// Join the machine's cgroups, then become `argv`.
    #[command(hide = true)]
    Machine {
        /// The lab's run directory.
        run: PathBuf,
        /// The machine's name.
        name: String,
        /// What to become.
        #[arg(last = true)]
        argv: Vec<String>,
    },
    /// Pid 1 of a node.
    #[command(hide = true)]
    Node {
        /// The file with the node's settings, as JSON.
        settings: PathBuf,
    },
    /// Routes between the nodes of one cluster, and masquerading of what leaves it: the rest of a CNI.
    #[command(hide = true)]
    Cni {
        /// The file with the node's settings, as JSON.
        settings: PathBuf,
    },
    /// What enforces NetworkPolicies on a node of a cluster that wants them enforced.
    #[command(hide = true)]
    Policies {
        /// The file with the node's settings, as JSON.
        settings: PathBuf,
    },
}

/// The program. Errors are for a log or a person.
///
/// # Errors
/// Whatever the stage could not do.
pub fn main() -> anyhow::Result<()> {
    match Stage::parse() {
        Stage::List => {
            for run in crate::standing() {
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
