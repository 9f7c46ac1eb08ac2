//! `cargo xtask test`: builds what the tests need, runs every test of the project, and counts the results.

mod count;

use std::{
    cmp::Reverse,
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use clustermesh_lab::lab_home;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use serde::Deserialize;
use xtask::{
    prereq,
    programs::{self, cargo},
    tools,
};

use crate::leftovers::Machine;
use count::{Counts, Scope};

/// The package whose tests start whole clusters.
const CLUSTERS: &str = "crates/lab";

/// What `cargo xtask test` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    prereq: prereq::Prereq,
    /// Arguments for `cargo test`: `-p clustermesh-core`, `--test mesh_flows`, a test's name.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// Builds the lab's and the workspace's programs, then runs the tests. The last line is `N passed, N failed`; the exit code is 1 if
/// something failed or did not run.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let start = Instant::now();
    prereq::ensure(&args.prereq)?;
    tools::run()?;
    let programs = programs::build()?;
    println!("xtask: everything built after {:.0} s", start.elapsed().as_secs_f64());
    let (mut counts, mut problems, scope) = if args.words.is_empty() {
        let ours = [programs::target()?, lab_home()?];
        let before = Machine::read(&ours)?;
        let (counts, failed) = run_all(&programs)?;
        let failed = failed.into_iter().map(|name| format!("{name} failed, see above"));
        let left = before.left_since(&ours)?.into_iter();
        let left = left.map(|what| format!("the tests left on this machine: {what}"));
        (counts, failed.chain(left).collect(), Scope::ALL)
    } else {
        let mut test = cargo();
        test.args(["test", "--no-fail-fast"])
            .args(&args.words)
            .args(ONE_BY_ONE)
            .env("CLUSTERMESH_BIN_DIR", programs);
        let (counts, problem) = cargo_test(&mut test)?;
        (counts, Vec::from_iter(problem), Scope::Selected)
    };
    problems.extend(counts.judge(scope));
    for problem in &problems {
        eprintln!("xtask: {problem}");
    }
    println!("xtask: done after {:.0} s", start.elapsed().as_secs_f64());
    println!("{counts}");
    if !problems.is_empty() || !counts.is_success() {
        std::process::exit(1);
    }
    Ok(())
}

/// Tests of one program run one at a time, because they may use the same resources.
const ONE_BY_ONE: [&str; 2] = ["--", "--test-threads=1"];

/// A test program.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Program {
    /// The directory of its package, in which cargo runs it.
    directory: PathBuf,
    path: PathBuf,
}

/// Runs every test program and the doc tests; returns the counts, and the names of programs that failed. The programs that start clusters
/// mostly wait, so the others run at the same time. `cargo test` cannot do that: it runs one program after the other, and two calls at once
/// for different packages build their dependencies twice.
fn run_all(programs: &Path) -> anyhow::Result<(Counts, Vec<String>)> {
    let mut tests = build_tests()?;
    tests.sort();
    let rows: (Vec<_>, Vec<_>) = tests
        .into_iter()
        .partition(|program| program.directory.ends_with(CLUSTERS));
    let (counts, mut failed) = run_rows([&rows.0, &rows.1], programs)?;
    let (documents, problem) = cargo_test(cargo().args(["test", "--workspace", "--doc"]))?;
    failed.extend(problem.map(|_| "cargo test --doc".to_owned()));
    Ok(([counts, documents].into_iter().sum(), failed))
}

/// Runs both rows at the same time, and the programs of a row one after the other. Returns the counts, and the names of programs that
/// failed.
fn run_rows(rows: [&[Program]; 2], programs: &Path) -> anyhow::Result<(Counts, Vec<String>)> {
    let row = |tests: &[Program]| {
        tests
            .iter()
            .map(|test| test.run(programs))
            .collect::<anyhow::Result<Vec<_>>>()
    };
    let [one, other] = thread::scope(|scope| {
        rows.map(|tests| scope.spawn(move || row(tests))).map(|row| {
            row.join()
                .map_err(|_| anyhow::anyhow!("a thread of the tests panicked"))
        })
    });
    let mut results = one??;
    results.append(&mut other??);
    let failed = results.iter().filter(|result| !result.counts.is_success());
    let failed = failed.map(|result| result.name.clone()).collect();
    let counts = results.iter().map(|result| result.counts).sum();
    print_slowest(results);
    Ok((counts, failed))
}

/// Prints the programs that took the longest time.
fn print_slowest(mut results: Vec<ProgramResult>) {
    results.sort_by_key(|result| Reverse(result.time));
    println!("\nxtask: the slowest test programs:");
    for ProgramResult { name, time, .. } in results.iter().take(20) {
        println!("{:6.0} s  {name}", time.as_secs_f64());
    }
}

/// Runs `cargo test` and shows its output; returns the counts, and an error text if cargo failed.
fn cargo_test(test: &mut Command) -> anyhow::Result<(Counts, Option<String>)> {
    let (mut reader, writer) = io::pipe().context("a pipe")?;
    // One pipe keeps cargo's headings and the programs' results in order. Colours would make them unreadable for the parser.
    test.env("CARGO_TERM_COLOR", "never")
        .stderr(writer.try_clone().context("a pipe")?)
        .stdout(writer);
    let mut child = test.spawn().with_context(|| format!("{test:?} cannot be started"))?;
    // Close the command's copies of the pipe's writing end: a read ends only when all copies are closed.
    test.stdout(Stdio::null()).stderr(Stdio::null());
    let mut output = Vec::new();
    let mut buffer = [0; 8192];
    let status = loop {
        // Check this before the pipe: if cargo has ended, an empty pipe is the end of its output. Do not wait for the pipe to close,
        // because a process that a test left running may keep it open for ever.
        let ended = child.try_wait().context("wait for cargo")?;
        if readable(&reader)? {
            let length = reader.read(&mut buffer).context("read what cargo prints")?;
            if length > 0 {
                output.extend_from_slice(&buffer[..length]);
                let mut out = io::stdout().lock();
                out.write_all(&buffer[..length])
                    .and_then(|()| out.flush())
                    .context("write")?;
                continue;
            }
            break child.wait().context("wait for cargo")?;
        }
        if let Some(status) = ended {
            break status;
        }
    };
    let counts = Counts::of_cargo(&String::from_utf8_lossy(&output)).ended(status.success());
    Ok((
        counts,
        (!status.success()).then(|| format!("{test:?} failed: {status}")),
    ))
}

/// Waits up to 200 ms until there is something to read or the pipe ends.
fn readable(pipe: &io::PipeReader) -> anyhow::Result<bool> {
    let moment = Timespec {
        tv_sec: 0,
        tv_nsec: 200_000_000,
    };
    let mut polled = [PollFd::new(pipe, PollFlags::IN)];
    match poll(&mut polled, Some(&moment)) {
        Err(Errno::INTR) => Ok(false),
        ready => Ok(ready.context("wait for what cargo prints")? > 0),
    }
}

/// Builds the test programs, and returns them.
fn build_tests() -> anyhow::Result<Vec<Program>> {
    /// A line of cargo's output (`cargo help build`, `--message-format=json`).
    #[derive(Deserialize)]
    struct Message {
        reason: String,
        #[serde(default)]
        manifest_path: PathBuf,
        profile: Option<Profile>,
        executable: Option<PathBuf>,
    }
    #[derive(Deserialize)]
    struct Profile {
        test: bool,
    }
    let mut build = cargo();
    build
        .args([
            "test",
            "--workspace",
            "--no-run",
            "--message-format=json-render-diagnostics",
        ])
        .stderr(Stdio::inherit());
    let output = build.output().with_context(|| format!("{build:?} cannot be started"))?;
    if !output.status.success() {
        bail!("{build:?} failed: {}", output.status);
    }
    let mut out = Vec::new();
    for line in output
        .stdout
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
    {
        let message: Message = serde_json::from_slice(line).context("what cargo says of what it built")?;
        if message.reason == "compiler-artifact"
            && message.profile.is_some_and(|profile| profile.test)
            && let Some(path) = message.executable
        {
            let directory = message
                .manifest_path
                .parent()
                .context("a manifest without a directory")?;
            out.push(Program {
                directory: directory.to_owned(),
                path,
            });
        }
    }
    Ok(out)
}

/// The result of a test program.
struct ProgramResult {
    name: String,
    counts: Counts,
    time: Duration,
}

impl Program {
    fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        name.rsplit_once('-').map_or(&*name, |(name, _)| name).to_owned()
    }

    /// Runs the program as cargo does. Prints its output only when it has ended, because two programs run at once.
    fn run(&self, programs: &Path) -> anyhow::Result<ProgramResult> {
        let start = Instant::now();
        println!("xtask: {} starts", self.name());
        let mut output = tempfile::tempfile().context("a file")?;
        let again = || output.try_clone().context("a file");
        let status = Command::new(&self.path)
            .args(&ONE_BY_ONE[1..])
            .current_dir(&self.directory)
            .env("CARGO", env!("CARGO"))
            .env("CARGO_MANIFEST_DIR", &self.directory)
            .env("CLUSTERMESH_BIN_DIR", programs)
            .stdout(again()?)
            .stderr(again()?)
            .status()
            .with_context(|| format!("{} cannot be started", self.path.display()))?;
        let mut bytes = Vec::new();
        output
            .rewind()
            .and_then(|()| output.read_to_end(&mut bytes))
            .context("read what a test printed")?;
        let text = String::from_utf8_lossy(&bytes);
        let result = ProgramResult {
            name: self.name(),
            counts: Counts::of_program(&text).ended(status.success()),
            time: start.elapsed(),
        };
        println!("\nxtask: {}, {:.0} s\n{text}", result.name, result.time.as_secs_f64());
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSED: &str =
        "test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s";
    const FAILED: &str =
        "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s";

    #[test]
    fn failing_programs_are_reported_and_later_ones_run() {
        let directory = tempfile::tempdir().expect("a directory");
        let program = |name: &str, script: &str| {
            let path = directory.path().join(format!("{name}-0123abcd"));
            std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("a script");
            std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("its mode");
            let directory = "/".into();
            Program { directory, path }
        };
        let run = |one: &[Program], other: &[Program]| {
            let (counts, failed) = run_rows([one, other], Path::new("/")).expect("they start");
            (counts.to_string(), failed)
        };
        let well = [program("well", &format!("echo '{PASSED}'"))];
        let some = [
            program("fails", &format!("echo '{FAILED}'; exit 101")),
            program("later", &format!("echo '{PASSED}'")),
            program("silent", "exit 0"),
            program("killed", &format!("echo '{PASSED}'; kill -9 $$")),
        ];
        let none: Vec<String> = Vec::new();
        let failed = ["fails", "silent", "killed"].map(str::to_owned).to_vec();
        assert_eq!(run(&well, &well), ("4 passed, 0 failed".to_owned(), none.clone()));
        assert_eq!(run(&[], &[]), ("0 passed, 0 failed".to_owned(), none));
        assert_eq!(run(&well, &some), ("7 passed, 3 failed".to_owned(), failed.clone()));
        assert_eq!(run(&some, &well), ("7 passed, 3 failed".to_owned(), failed));
        let nowhere = Program {
            directory: "/".into(),
            path: "/nowhere".into(),
        };
        assert!(run_rows([&[nowhere], &well], Path::new("/")).is_err());
    }
}
