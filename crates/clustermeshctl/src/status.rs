//! `clustermeshctl status`: shows what is broken, where, since when, and what to do. The sources are the status of the hub's
//! ClusterMeshes, which the controller writes, and the controller's Lease; with `--live` also the members themselves.

use std::{
    io::{IsTerminal, Write},
    time::Duration,
};

use crate::{
    args::{Output, StatusArgs},
    output::Printable,
    plan::print,
    problem::Problem,
};

mod live;
mod remedy;
mod replicas;
mod report;
pub(crate) mod snapshot;
pub(crate) mod table;

use live::LiveMeshes;
use report::Report;
pub(crate) use report::full_name;
use snapshot::{HubReader, Snapshot};

#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
mod tests;

/// The exit code if the hub cannot be read, and for all other errors of `status` and `graph`.
pub(crate) const CANNOT_TELL: u8 = 2;

/// How often `--watch` reads the hub.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Runs the command. Exit code: 0 = every mesh is healthy, 1 = one has a problem. Notes go to `stderr`.
///
/// # Errors
/// The hub cannot be read.
pub(crate) async fn run(
    args: &StatusArgs,
    stdout: &mut Printable<'_>,
    stderr: &mut dyn Write,
) -> Result<u8, Vec<Problem>> {
    let hub = HubReader::open(&args.hub).await?;
    let mut snapshot = hub.read().await?;
    let live = if args.live {
        snapshot.replicas = hub.read_replicas().await;
        Some(live::read(args).await?)
    } else {
        None
    };
    for note in &snapshot.notes {
        let _ = writeln!(stderr, "{note}");
    }
    let (mut code, mut shown) = show(&snapshot, live.as_ref(), args)?;
    if !args.watch {
        print(stdout, &shown)?;
        return Ok(code);
    }
    redraw(stdout, &shown)?;
    loop {
        tokio::select! {
            _ = tokio::signal::ctrl_c() => return Ok(code),
            () = tokio::time::sleep(POLL_INTERVAL) => {}
        }
        // The hub may be away for a moment. Then the error replaces the status, until the hub can be read again.
        let read = async { show(&hub.read().await?, None, args) };
        let text = match read.await {
            Ok((new_code, text)) => {
                code = new_code;
                text
            }
            Err(problems) => {
                code = CANNOT_TELL;
                let lines: Vec<String> = problems.iter().map(|problem| format!("error: {problem}\n")).collect();
                lines.concat()
            }
        };
        if text != shown {
            redraw(stdout, &text)?;
            shown = text;
        }
    }
}

/// Returns the exit code and the output.
fn show(snapshot: &Snapshot, live: Option<&LiveMeshes>, args: &StatusArgs) -> Result<(u8, String), Vec<Problem>> {
    let report = Report::new(snapshot, live);
    let failed = |error: &dyn std::fmt::Display| vec![Problem::other(format!("the status cannot be written: {error}"))];
    let text = match args.output {
        Output::Table => table::render(&report, snapshot.time, args.all),
        Output::Json => serde_json::to_string_pretty(&report).map_err(|error| failed(&error))? + "\n",
        Output::Yaml => serde_saphyr::to_string(&report).map_err(|error| failed(&error))?,
    };
    Ok((u8::from(!report.healthy), text))
}

/// Prints the output in place of the last one on a terminal, else after it.
fn redraw(stdout: &mut Printable<'_>, text: &str) -> Result<(), Vec<Problem>> {
    if std::io::stdout().is_terminal() {
        stdout
            .clear_screen()
            .map_err(|error| vec![Problem::other(format!("cannot write: {error}"))])?;
    }
    print(stdout, text)
}
