//! The operator's command line: reads files, asks the planner, prints. No cluster is reached from here, and no rule about
//! addresses or peers is made here.
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
mod objects;
mod page;
mod plan;
mod problem;
mod world;

use args::{Args, Command};

/// Runs one command. `args` begins with the program's name.
///
/// Exit codes: 0 done (with `plan --exit-code`: and nothing would change), 1 an error, wrong usage included, 2 with
/// `plan --exit-code`: something would change. Of `explain`: 0 allowed, 1 denied, 2 cannot tell, for an error as well.
pub fn run(
    args: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    stdin: &mut dyn Read,
    stdout: &mut dyn Write,
    stderr: &mut dyn Write,
) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    // Where 1 means "denied", an error must not look like it.
    let failure = if args.get(1).is_some_and(|command| command == "explain") {
        explain::CANNOT_TELL
    } else {
        1
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
    let outcome = match command {
        Command::Plan(args) => plan::run(&args, stdin, stdout, stderr),
        Command::Explain(args) => explain::run(&args, stdin, stdout, stderr),
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
