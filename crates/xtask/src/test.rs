//! `cargo xtask test`: builds the programs that the tests need, runs every test of the project, and counts the results.

mod count;
mod jobs;

use std::{
    cmp::Reverse,
    fs,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Instant,
};

use anyhow::{Context, bail};
use clustermesh_lab::{ArtefactSet, KG_BIN, lab_home};
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

use crate::leftovers::MachineState;
use count::{Counts, Scope};
use jobs::{JobResult, Program};

/// The integration tests that `--quick` runs. Of these only `schema` needs a cluster: one API server. The tests that
/// `--quick` leaves out need several clusters, network namespaces or a virtual machine.
const QUICK: [&str; 5] = ["conversions", "explain", "plan", "properties", "schema"];

/// Arguments of `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    prereq: prereq::Prereq,
    /// Run only unit tests and the test programs properties, conversions, plan, explain and schema: about three minutes.
    #[arg(long, conflicts_with = "words")]
    quick: bool,
    /// Program and module of integration tests, such as `mesh flows`; or arguments for `cargo test`, such as `-p clustermesh-core` or the
    /// name of a test.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// Builds the programs of the lab and of the workspace, then runs the tests. The last line is `N passed, N failed`; the exit code is 1
/// if a test failed or did not run. Without arguments for `cargo test` it is also 1 if the tests left something on this machine.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let start = Instant::now();
    prereq::ensure(&args.prereq)?;
    if args.quick {
        tools::build(&[ArtefactSet::ControlPlane])?;
    } else {
        tools::run()?;
    }
    let bin_directory = programs::build()?;
    println!("xtask: programs built after {:.0} s", start.elapsed().as_secs_f64());
    let (mut counts, mut problems, scope) = if args.words.is_empty() {
        let program_directories = [programs::target()?, lab_home()?];
        let before = MachineState::read(&program_directories)?;
        let (counts, failed) = if args.quick {
            // The fuzz targets are excluded: because of --bins, cargo would build them as test programs, which never exit.
            let targets = ["--lib", "--bins", "--exclude=clustermesh-fuzz"];
            run_jobs(build_tests(&targets, &QUICK)?, &bin_directory)?
        } else {
            run_all(&bin_directory)?
        };
        let failed = failed.into_iter().map(|name| format!("{name} failed, see above"));
        let left = before.left_since(&program_directories)?.into_iter();
        let left = left.map(|what| format!("the tests left on this machine: {what}"));
        let scope = if args.quick { Scope::Selected } else { Scope::ALL };
        (counts, failed.chain(left).collect(), scope)
    } else {
        let mut test = cargo();
        test.args(["test", "--no-fail-fast"])
            .args(cargo_arguments(&args.words))
            .args(SEQUENTIAL)
            .env("CLUSTERMESH_BIN_DIR", bin_directory);
        let (counts, problem) = cargo_test(&mut test)?;
        (counts, Vec::from_iter(problem), Scope::Selected)
    };
    problems.extend(counts.check_completeness(scope));
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

/// Returns the arguments for `cargo test`. Two words without a leading `-` are a test program and a module of it.
fn cargo_arguments(words: &[String]) -> Vec<String> {
    match words {
        [program, module] if ![program, module].iter().any(|word| word.starts_with('-')) => {
            vec!["--test".to_owned(), program.clone(), module.clone()]
        }
        _ => words.to_vec(),
    }
}

/// The job that needs Kilo, which cannot be installed from a package registry.
const KILO: &str = "mesh kilo";

/// Arguments of a test program. Its tests run one after the other, because they may use the same resources.
const SEQUENTIAL: [&str; 2] = ["--", "--test-threads=1"];

/// Runs every test program and the doc tests. Returns the counts, and the names of failed jobs.
fn run_all(bin_directory: &Path) -> anyhow::Result<(Counts, Vec<String>)> {
    let (counts, mut failed) = run_jobs(build_tests(&[], &[])?, bin_directory)?;
    let (doc_tests, problem) = cargo_test(cargo().args(["test", "--workspace", "--doc"]))?;
    failed.extend(problem.map(|_| "cargo test --doc".to_owned()));
    Ok(([counts, doc_tests].into_iter().sum(), failed))
}

/// Runs test programs in parallel. `cargo test` would run them one after the other, although they often wait.
fn run_jobs(programs: Vec<Program>, bin_directory: &Path) -> anyhow::Result<(Counts, Vec<String>)> {
    let start = Instant::now();
    let before = busy_seconds()?;
    let cores = thread::available_parallelism()
        .context("the number of processors")?
        .get();
    let mut jobs = jobs::divide(programs, bin_directory)?;
    let has_kilo = std::env::var_os(KG_BIN).is_some_and(|path| !path.is_empty());
    let lacks_kilo = !has_kilo && jobs.iter().any(|job| job.name == KILO);
    if lacks_kilo {
        jobs.retain(|job| job.name != KILO);
    }
    let results = jobs::run(jobs, jobs::shares(cores), bin_directory)?;
    let failed = results.iter().filter(|result| !result.counts.is_success());
    let failed = failed.map(|result| result.name.clone()).collect();
    let counts = results.iter().map(|result| result.counts).sum();
    print_slowest(results);
    let seconds = start.elapsed().as_secs_f64();
    let busy = 100.0 * (busy_seconds()? - before) / (seconds * cores as f64);
    println!("xtask: the tests ran for {seconds:.0} s; {cores} processors were busy for {busy:.0} % of it");
    if lacks_kilo {
        println!("xtask: not run: {KILO}. To run it, set {KG_BIN} to the path of Kilo's program kg");
    }
    Ok((counts, failed))
}

/// The time in seconds for which the processors of this machine have been busy since its start (proc_stat(5)).
fn busy_seconds() -> anyhow::Result<f64> {
    let stat = fs::read_to_string("/proc/stat").context("read /proc/stat")?;
    let line = stat.lines().next().unwrap_or_default();
    let ticks: Vec<f64> = line
        .split_whitespace()
        .skip(1)
        .map_while(|word| word.parse().ok())
        .collect();
    // user nice system idle iowait irq softirq steal; a tick is 10 ms.
    let [user, nice, system, _, _, irq, softirq, ..] = ticks[..] else {
        bail!("/proc/stat has an unknown format: {line:?}");
    };
    Ok((user + nice + system + irq + softirq) / 100.0)
}

/// Prints the jobs that took the longest time.
fn print_slowest(mut results: Vec<JobResult>) {
    results.sort_by_key(|result| Reverse(result.time));
    println!("\nxtask: the slowest jobs:");
    for JobResult { name, time, .. } in results.iter().take(20) {
        println!("{:6.0} s  {name}", time.as_secs_f64());
    }
}

/// Runs `cargo test` and shows its output. Returns the counts, and an error text if cargo failed.
fn cargo_test(test: &mut Command) -> anyhow::Result<(Counts, Option<String>)> {
    let (mut reader, writer) = io::pipe().context("a pipe")?;
    // With one pipe for both streams, headings of cargo and results of programs stay in order. The parser does not understand colours.
    test.env("CARGO_TERM_COLOR", "never")
        .stderr(writer.try_clone().context("a pipe")?)
        .stdout(writer);
    let mut child = test.spawn().with_context(|| format!("{test:?} cannot be started"))?;
    // Close the copies of the pipe's write end in `test`: the reader sees the end of the output only when all copies are closed.
    test.stdout(Stdio::null()).stderr(Stdio::null());
    let mut output = Vec::new();
    let mut buffer = [0; 8192];
    let status = loop {
        // Check the exit before the pipe: if cargo has exited, an empty pipe is the end of its output. Do not wait until the pipe is
        // closed, because a process that a test has left running may keep it open for ever.
        let exited = child.try_wait().context("wait for cargo")?;
        if is_readable(&reader)? {
            let length = reader.read(&mut buffer).context("read the output of cargo")?;
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
        if let Some(status) = exited {
            break status;
        }
    };
    let counts = Counts::of_cargo(&String::from_utf8_lossy(&output)).with_exit(status.success());
    Ok((
        counts,
        (!status.success()).then(|| format!("{test:?} failed: {status}")),
    ))
}

/// Waits up to 200 ms until the pipe has data or is closed.
fn is_readable(pipe: &io::PipeReader) -> anyhow::Result<bool> {
    let timeout = Timespec {
        tv_sec: 0,
        tv_nsec: 200_000_000,
    };
    let mut polled = [PollFd::new(pipe, PollFlags::IN)];
    match poll(&mut polled, Some(&timeout)) {
        Err(Errno::INTR) => Ok(false),
        ready => Ok(ready.context("wait for the output of cargo")? > 0),
    }
}

/// Builds the test programs of the workspace, and returns them. `targets` (flags of cargo) and `names` (integration tests) select
/// programs; without both, all are built.
fn build_tests(targets: &[&str], names: &[&str]) -> anyhow::Result<Vec<Program>> {
    /// A line of the output of cargo with `--message-format=json`.
    #[derive(Deserialize)]
    struct Message {
        reason: String,
        #[serde(default)]
        manifest_path: PathBuf,
        target: Option<Target>,
        profile: Option<Profile>,
        executable: Option<PathBuf>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
        kind: Vec<String>,
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
        .args(targets)
        .args(names.iter().flat_map(|name| ["--test", name]))
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
        let message: Message = serde_json::from_slice(line).context("parse a message of cargo")?;
        if message.reason == "compiler-artifact"
            && message.profile.is_some_and(|profile| profile.test)
            && let (Some(target), Some(path)) = (message.target, message.executable)
        {
            let directory = message.manifest_path.parent();
            out.push(Program {
                name: target.name,
                is_integration: target.kind == ["test"],
                directory: directory.context("a manifest without a directory")?.to_owned(),
                path,
            });
        }
    }
    out.sort();
    Ok(out)
}
