//! Entry points of the `clustermesh-lab` program: commands for users, and hidden commands that the lab runs itself.

use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::Parser;

use crate::cgroup::Cgroups;

/// Runs clusters on one machine.
#[derive(Debug, Parser)]
#[command(name = "clustermesh-lab")]
enum LabCommand {
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
    /// Join the node's cgroups, then exec `argv`, which starts the node's pid 1.
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
    /// Accept TCP connections at an address, and forward them to another one.
    #[command(hide = true)]
    Forward {
        /// Where to accept.
        at: SocketAddr,
        /// Where to connect.
        to: SocketAddr,
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
    match LabCommand::parse() {
        LabCommand::List => {
            for run in crate::running_labs() {
                let is_kept = crate::run::is_kept(&run);
                let lifetime = if is_kept { "kept" } else { "ends with its owner" };
                println!("{} {lifetime}", run.display());
            }
            Ok(())
        }
        LabCommand::Build => {
            crate::Tools::ensure(&crate::ArtefactSet::ALL, &|line| eprintln!("{line}"))?;
            Ok(())
        }
        LabCommand::Down => Ok(crate::down_all().map(drop)?),
        LabCommand::Supervise { run } => super::serve(&run),
        LabCommand::Machine { run, name, argv } => {
            Cgroups::detect()?.of(&run, Some(&name)).join()?;
            Err(Command::new(&argv[0]).args(&argv[1..]).exec().into())
        }
        LabCommand::Node { settings } => crate::node::init(&settings),
        LabCommand::Cni { settings } => crate::node::cni(&settings),
        LabCommand::Forward { at, to } => super::forward::serve(at, to),
        LabCommand::Policies { settings } => crate::node::policies(&settings),
    }
}
