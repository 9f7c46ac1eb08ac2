//! One node's WireGuard device, routes and firewall: sources -> compile -> diff -> apply -> publish.
//!
//! The middle is `clustermesh_agent_core`; here are the ends that touch the API server, the kernel and the disk. `run` is
//! the wiring.
#![deny(unsafe_code)]

mod admission;
pub mod args;
mod beside;
pub mod cache;
pub mod cleanup;
pub mod conntrack;
pub mod device;
mod endpoints;
pub mod firewall;
mod gateway;
mod heard;
pub mod identity;
pub mod lock;
pub mod metrics;
pub mod preflight;
pub mod prepare;
mod probe;
pub mod publish;
mod reconcile;
pub mod route;
pub mod run;
pub mod source;
mod status;
mod wiring;

use std::process::ExitCode;

use clap::Parser;

/// The whole program: flags, log, and then a run or a cleanup. Returns its exit code.
#[must_use]
pub fn main() -> ExitCode {
    let args::Cli { flags, command } = args::Cli::parse();
    match command {
        Some(args::Command::Status(what)) => return status::command::run(what),
        Some(args::Command::Probe(what)) => return probe::run(&what),
        _ => {}
    }
    if let Err(error) = clustermesh_daemon::telemetry::init(flags.log_format()) {
        eprintln!("wg-agent: {error:#}");
        return ExitCode::from(2);
    }
    clustermesh_daemon::descriptors::raise_limit();
    let done = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(Into::into)
        .and_then(|runtime| {
            runtime.block_on(async {
                match command {
                    Some(args::Command::Cleanup) => cleanup::run(flags.into_cleanup()).await,
                    Some(args::Command::Prepare(_)) if flags.mode() == args::ModeFlag::Gateway => prepare::pod().await,
                    Some(args::Command::Prepare(what)) => prepare::run(flags.port(), what.conntrack_min).await,
                    Some(args::Command::Preflight) => preflight::run(flags.into_preflight().as_deref()).await,
                    Some(args::Command::RotateKey) => rotate_key(&flags.into_key_file()),
                    // Answered above: what they print is all that may stand on their standard output.
                    Some(args::Command::Status(_) | args::Command::Probe(_)) => Ok(()),
                    None => match flags.mode() {
                        args::ModeFlag::Full => run::run(flags.into_config()?).await,
                        args::ModeFlag::Policy => beside::run(flags.into_policy_config()?).await,
                        args::ModeFlag::Gateway => gateway::run(flags.into_gateway_config()?).await,
                    },
                }
            })
        });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Makes the key that the running agent, or the next one, will take.
fn rotate_key(path: &std::path::Path) -> anyhow::Result<()> {
    let next = identity::key::create_next(path)?;
    tracing::info!(
        public = %next.public(),
        "a new key waits in {}: wg-agent publishes it within 5 s and takes it when the first peer has learnt of it",
        identity::key::next(path).display()
    );
    Ok(())
}
