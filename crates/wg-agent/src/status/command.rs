//! Implements `wg-agent status`: queries the running agent, prints its state, and reports the node's health by the exit
//! code.

use std::{io::Write, process::ExitCode};

use clap::{Args, ValueEnum};
use serde::Deserialize;

use super::{socket::query, table, view::View};

/// What to show.
#[derive(Debug, Clone, Args)]
pub(crate) struct StatusArgs {
    /// A table, or the agent's whole state as JSON.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// Show only peers of this cluster, by its name in the ClusterMesh. Ignored with `-o json`.
    #[arg(long)]
    cluster: Option<String>,
    /// Show only this Peer, by its name. Ignored with `-o json`.
    #[arg(long)]
    peer: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For a person.
    Table,
    /// The content of /debug/state.
    Json,
}

/// Prints the state. The exit code is 0 if the node is healthy, 1 if it has problems, 2 if the agent did not answer, or if it has
/// another version and its state cannot be parsed. In a table, peers that `--cluster` and `--peer` exclude do not count.
pub(crate) fn run(args: StatusArgs) -> ExitCode {
    let StatusArgs { output, cluster, peer } = args;
    let answer = query().map_err(|error| error.to_string()).and_then(|state| {
        let view = View::deserialize(&state).map_err(|error| {
            format!(
                "the agent has another version and its state cannot be parsed ({error}): use that version's `wg-agent status`"
            )
        })?;
        Ok((state, view))
    });
    let (state, mut view) = match answer {
        Ok(answer) => answer,
        Err(error) => {
            eprintln!("wg-agent status: {error}");
            return ExitCode::from(2);
        }
    };
    let text = match output {
        Output::Table => {
            view.filter_peers(cluster.as_deref(), peer.as_deref());
            table::page(&view)
        }
        Output::Json => format!("{state:#}\n"),
    };
    // The reader may have closed the pipe, as `head` does.
    let _ = std::io::stdout().write_all(text.as_bytes());
    if view.is_healthy() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
