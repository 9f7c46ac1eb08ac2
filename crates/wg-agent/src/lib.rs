//! The node agent. In full mode, it reconciles one node's WireGuard device, routes and firewall table with the cluster's
//! Peers and PeerPolicies. `policy_mode` and `gateway` are the other two modes.
//!
//! One loop: sources -> compile -> diff -> apply -> publish. The pure part (compile, diff) is `clustermesh_agent_core`.
//! This crate talks to the API server, the kernel and the disk.
#![forbid(unsafe_code)]

mod admission;
pub mod args;
pub mod cache;
pub mod cleanup;
pub mod conntrack;
pub mod device;
pub mod firewall;
mod gateway;
pub mod identity;
mod kernel_events;
pub mod lock;
pub mod metrics;
mod peer_tracker;
mod policy_mode;
pub mod preflight;
pub mod prepare;
mod probe;
pub mod publish;
mod reconcile;
pub mod route;
pub mod run;
mod runtime;
pub mod source;
mod status;

use std::process::ExitCode;

use clap::Parser;

/// Runs the program: parses flags, starts the log, runs the mode or subcommand. Returns the exit code.
#[must_use]
pub fn main() -> ExitCode {
    let args::Cli { flags, command } = args::Cli::parse();
    match command {
        Some(args::Command::Status(args)) => return status::command::run(args),
        Some(args::Command::Probe(args)) => return probe::run(&args),
        _ => {}
    }
    if let Err(error) = clustermesh_daemon::telemetry::init(flags.log_format()) {
        eprintln!("wg-agent: {error:#}");
        return ExitCode::from(2);
    }
    clustermesh_daemon::descriptors::raise_limit();
    let result = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(Into::into)
        .and_then(|runtime| {
            runtime.block_on(async {
                match command {
                    Some(args::Command::Cleanup) => cleanup::run(flags.into_cleanup_config()).await,
                    Some(args::Command::Prepare(_)) if flags.mode() == args::ModeFlag::Gateway => {
                        prepare::prepare_pod().await
                    }
                    Some(args::Command::Prepare(args)) => prepare::run(flags.port(), args.conntrack_min).await,
                    Some(args::Command::Preflight) => preflight::run(flags.into_kubeconfig().as_deref()).await,
                    Some(args::Command::RotateKey) => rotate_key(&flags.into_key_file()),
                    // Handled above, before the log starts: these commands print only their own output.
                    Some(args::Command::Status(_) | args::Command::Probe(_)) => Ok(()),
                    None => match flags.mode() {
                        args::ModeFlag::Full => run::run(flags.into_config()?).await,
                        args::ModeFlag::Policy => policy_mode::run(flags.into_policy_config()?).await,
                        args::ModeFlag::Gateway => gateway::run(flags.into_gateway_config()?).await,
                    },
                }
            })
        });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Creates the next key of this node. The running agent, or the next one to start, publishes it and later switches to it.
fn rotate_key(path: &std::path::Path) -> anyhow::Result<()> {
    let next = identity::key::create_next(path)?;
    tracing::info!(
        public = %next.public(),
        "new key created in {}: the running wg-agent publishes it within 5 s; /readyz shows what the rotation waits for",
        identity::key::next_path(path).display()
    );
    Ok(())
}
