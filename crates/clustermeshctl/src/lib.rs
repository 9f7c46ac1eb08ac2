//! The command line for operators. Each command reads the status of the ClusterMeshes in the hub, or runs the planner of
//! `clustermesh_core` on files or running clusters, and prints the result. Nothing is written into a cluster, except the
//! temporary Jobs of `verify`.
//!
//! The binary is `clustermeshctl`. It is also a kubectl plugin: `kubectl clustermesh` runs a copy or link of it in the PATH, with the
//! name `kubectl-clustermesh`.
#![forbid(unsafe_code)]

use std::{
    ffi::OsString,
    io::{Read, Write},
    process::ExitCode,
};

use clap::{CommandFactory, Parser};

mod args;
mod document;
mod explain;
mod explanation;
mod graph;
mod inputs;
mod live;
mod objects;
mod output;
mod page;
mod plan;
mod problem;
mod status;
mod verify;

use args::{Args, Command};

/// Returns the definition of the command line. xtask checks the commands in documents against it.
#[must_use]
pub fn command() -> clap::Command {
    Args::command()
}

/// Runs one command. `args` begins with the program's name.
///
/// Exit codes of `plan`: 0 success, 1 error; with `--exit-code` also 2, an object would change.
/// Exit codes of `explain`: 0 allowed, 1 denied, 2 cannot tell or error.
/// Exit codes of `status`: 0 healthy, 1 a problem, 2 cannot tell or error. Exit codes of `graph`: 0 drawn, 2 error.
/// Exit codes of `verify`: 0 as planned, 1 violation, 2 cannot tell or error, 3 a granted socket does not answer.
pub fn run(
    args: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    stdin: &mut dyn Read,
    stdout: &mut dyn Write,
    stderr: &mut dyn Write,
) -> ExitCode {
    let stdout = &mut output::Printable(stdout);
    let stderr: &mut dyn Write = &mut output::Printable(stderr);
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    // 1 means "denied" in `explain`, "violation" in `verify` and "a problem" in `status`, so their errors have another code.
    let failure = match args.get(1).and_then(|command| command.to_str()) {
        Some("explain") => explain::CANNOT_TELL,
        Some("verify") => verify::CANNOT_TELL,
        Some("status" | "graph") => status::CANNOT_TELL,
        _ => 1,
    };
    let Args { command } = match Args::try_parse_from(args) {
        Ok(args) => args,
        // clap's own exit code for wrong usage is 2, which means "an object would change" in `plan`. `--help` is also an `Err`.
        Err(usage) => {
            let is_error = usage.use_stderr();
            let out: &mut dyn Write = if is_error { stderr } else { stdout };
            let _ = write!(out, "{usage}");
            return ExitCode::from(if is_error { failure } else { 0 });
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let outcome = match runtime {
        Ok(runtime) => runtime.block_on(async {
            match command {
                Command::Plan(args) => plan::run(&args, stdin, stdout, stderr).await,
                Command::Explain(args) => explain::run(&args, stdin, stdout, stderr).await,
                Command::Status(args) => status::run(&args, stdout, stderr).await,
                Command::Graph(args) => graph::run(&args, stdout, stderr).await,
                Command::Verify(args) => verify::run(&args, stdin, stdout, stderr).await,
            }
        }),
        Err(error) => Err(vec![problem::Problem::other(format!("cannot start threads: {error}"))]),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(problems) => {
            for problem in problems {
                let _ = writeln!(stderr, "error: {problem}");
            }
            ExitCode::from(failure)
        }
    }
}
