//! The operator's command line: reads files or running clusters, asks the planner, prints. No rule about addresses or peers is
//! made here, and nothing is written into a cluster but the Jobs of `verify`.
//!
//! The binary is `clustermeshctl`; a copy or link of it called `kubectl-clustermesh` on the PATH is `kubectl clustermesh`.
#![forbid(unsafe_code)]

use std::{
    ffi::OsString,
    io::{Read, Write},
    process::ExitCode,
};

use clap::Parser;

mod args;
mod document;
mod explain;
mod live;
mod objects;
mod output;
mod page;
mod plan;
mod problem;
mod verify;
mod world;

use args::{Args, Command};

/// Runs one command. `args` begins with the program's name.
///
/// Exit codes: 0 done (with `plan --exit-code`: and nothing would change), 1 an error, wrong usage included, 2 with
/// `plan --exit-code`: something would change. Of `explain`: 0 allowed, 1 denied, 2 cannot tell, for an error as well. Of
/// `verify`: 0 as planned, 1 a violation, 2 cannot tell, 3 something granted does not answer.
pub fn run(
    args: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    stdin: &mut dyn Read,
    stdout: &mut dyn Write,
    stderr: &mut dyn Write,
) -> ExitCode {
    let stdout: &mut dyn Write = &mut output::Printable(stdout);
    let stderr: &mut dyn Write = &mut output::Printable(stderr);
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    // Where 1 means "denied" or "open", an error must not look like it.
    let failure = match args.get(1).and_then(|command| command.to_str()) {
        Some("explain") => explain::CANNOT_TELL,
        Some("verify") => verify::CANNOT_TELL,
        _ => 1,
    };
    let Args { command } = match Args::try_parse_from(args) {
        Ok(args) => args,
        // clap's own code for wrong usage is 2, which means "changes" here.
        Err(usage) => {
            let failed = usage.use_stderr();
            let out: &mut dyn Write = if failed { stderr } else { stdout };
            let _ = write!(out, "{usage}");
            return ExitCode::from(if failed { failure } else { 0 });
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
                Command::Verify(args) => verify::run(&args, stdin, stdout, stderr).await,
            }
        }),
        Err(error) => Err(vec![problem::Problem::usage(format!("no threads to run on: {error}"))]),
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
