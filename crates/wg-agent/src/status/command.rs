//! `wg-agent status`: asks the agent that runs, prints, and says by the exit code how the node is.

use std::{io::Write, process::ExitCode};

use clap::{Args, ValueEnum};
use serde::Deserialize;

use super::{ask::ask, table, view::View};

/// What to show.
#[derive(Debug, Clone, Args)]
pub(crate) struct StatusArgs {
    /// A table for a person, or everything the agent knows.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// Only peers of this cluster, by its name in the ClusterMesh (table).
    #[arg(long)]
    cluster: Option<String>,
    /// Only this Peer, by its name (table).
    #[arg(long)]
    peer: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For a person.
    Table,
    /// As at /debug/state.
    Json,
}

/// Prints. 0 = nothing to mend, 1 = something is, 2 = no answer.
pub(crate) fn run(args: StatusArgs) -> ExitCode {
    let StatusArgs { output, cluster, peer } = args;
    let answer = ask().map_err(|error| error.to_string()).and_then(|state| {
        let view = View::deserialize(&state).map_err(|error| {
            format!(
                "the agent is of another version and its state reads otherwise ({error}): use its own `wg-agent status`"
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
    view.only(cluster.as_deref(), peer.as_deref());
    let text = match output {
        Output::Table => table::page(&view),
        Output::Json => format!("{state:#}\n"),
    };
    // Nobody may be reading any more, as behind `| head`.
    let _ = std::io::stdout().write_all(text.as_bytes());
    if view.well() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
