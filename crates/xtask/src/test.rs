//! `cargo xtask test`: every test of the project, with all that they need built first.

use std::{
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Instant,
};

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::{
    prereq,
    programs::{self, cargo, show},
    tools,
};

/// The package whose tests start whole clusters.
const CLUSTERS: &str = "crates/lab";

/// What `cargo xtask test` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    prereq: prereq::Prereq,
    /// Passed on to `cargo test`: `-p clustermesh-core`, `--test mesh_flows`, a test's name.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// Builds the lab's programs and ours, then runs the tests.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let start = Instant::now();
    prereq::ensure(&args.prereq)?;
    tools::run()?;
    let programs = programs::build()?;
    println!("xtask: everything built after {:.0} s", start.elapsed().as_secs_f64());
    if args.words.is_empty() {
        all(&programs)?;
    } else {
        let mut test = cargo();
        test.args(["test", "--no-fail-fast"])
            .args(&args.words)
            .args(ONE_BY_ONE)
            .env("CLUSTERMESH_BIN_DIR", programs);
        show(&mut test)?;
    }
    println!("xtask: every test passed after {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Inside a test program: the next test may want what this one has.
const ONE_BY_ONE: [&str; 2] = ["--", "--test-threads=1"];

/// A test program.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Program {
    /// Where cargo runs it: its package's directory.
    directory: PathBuf,
    path: PathBuf,
}

/// Every test program, and the documents' tests. Those that start clusters wait more than they work, and the others run beside
/// them.
fn all(programs: &Path) -> anyhow::Result<()> {
    let mut tests = built()?;
    tests.sort();
    let rows: (Vec<_>, Vec<_>) = tests
        .into_iter()
        .partition(|program| program.directory.ends_with(CLUSTERS));
    let failed = beside([&rows.0, &rows.1], programs)?;
    let documents = show(cargo().args(["test", "--workspace", "--doc"]));
    if !failed.is_empty() {
        bail!("tests failed, see above: {}", failed.join(", "));
    }
    documents
}

/// Runs both rows at once, each program by itself, and returns which failed.
fn beside(rows: [&[Program]; 2], programs: &Path) -> anyhow::Result<Vec<String>> {
    let row = |tests: &[Program]| -> anyhow::Result<Vec<String>> {
        let mut failed = Vec::new();
        for test in tests {
            if !test.run(programs)? {
                failed.push(test.name());
            }
        }
        Ok(failed)
    };
    let [one, other] = thread::scope(|scope| {
        rows.map(|tests| scope.spawn(move || row(tests))).map(|row| {
            row.join()
                .map_err(|_| anyhow::anyhow!("a thread of the tests panicked"))
        })
    });
    Ok([one??, other??].concat())
}

/// Builds the test programs, and says which they are.
fn built() -> anyhow::Result<Vec<Program>> {
    /// A line of cargo's (`cargo help build`, `--message-format=json`).
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

impl Program {
    fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        name.rsplit_once('-').map_or(&*name, |(name, _)| name).to_owned()
    }

    /// Runs it as cargo does, and shows what it said when it has ended: two at once would be told apart by nobody. False = it
    /// failed.
    fn run(&self, programs: &Path) -> anyhow::Result<bool> {
        let start = Instant::now();
        println!("xtask: {} starts", self.name());
        let said = tempfile::tempfile().context("a file")?;
        let again = || said.try_clone().context("a file");
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
        self.show(said, start)?;
        Ok(status.success())
    }

    fn show(&self, mut said: File, start: Instant) -> anyhow::Result<()> {
        io::Seek::rewind(&mut said).context("read what a test said")?;
        let mut out = io::stdout().lock();
        writeln!(out, "\nxtask: {}, {:.0} s", self.name(), start.elapsed().as_secs_f64())
            .and_then(|()| io::copy(&mut said, &mut out))
            .context("write")?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_fails_is_named_and_those_behind_it_run() {
        let program = |path: &str| Program {
            directory: "/".into(),
            path: path.into(),
        };
        let directory = tempfile::tempdir().expect("a directory");
        let fails = directory.path().join("mesh_flows-0123abcd");
        std::os::unix::fs::symlink("/bin/false", &fails).expect("a link");
        let fails = fails.to_str().expect("UTF-8");
        let run = |one: &[Program], other: &[Program]| beside([one, other], Path::new("/")).expect("they start");
        let well = [program("/bin/true")];
        assert_eq!(run(&well, &well), Vec::<String>::new());
        let some = [program(fails), program("/bin/true"), program(fails)];
        assert_eq!(run(&well, &some), ["mesh_flows", "mesh_flows"]);
        assert_eq!(run(&some, &well), ["mesh_flows", "mesh_flows"]);
        assert!(beside([&[program("/nowhere")], &well], Path::new("/")).is_err());
    }
}
