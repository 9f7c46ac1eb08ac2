//! Divides the test programs into jobs and runs several jobs at a time. A job is a process that runs the tests of one program, or of one
//! of its top-level modules, one after the other. Tests of different jobs share no namespaces or clusters, only the machine.

use std::{
    collections::BTreeMap,
    io::{Read, Seek},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};

use super::{SEQUENTIAL, count::Counts};

/// Programs whose modules take minutes, and single jobs that take the longest. They start first, in this order, so that no long job
/// starts near the end.
const LONGEST: [&str; 9] = [
    "machine",
    "mesh",
    "kernel flows",
    "node gateway",
    "reconcile faulty_member",
    "reconcile",
    "kernel",
    "node",
    "lab",
];

/// Programs whose jobs run whole clusters or a virtual machine.
const HEAVY: [&str; 3] = ["machine", "mesh", "lab"];

/// The shares of the processors that jobs take, in sixths of one processor. A job of [`HEAVY`] keeps a processor busy for about half of its
/// time, a job of `reconcile` or `node` for about a third. The rest of the time they wait.
const SHARE_OF_HEAVY_JOB: usize = 3;
const SHARE_OF_LIGHT_JOB: usize = 2;

/// The sixths of the processors for jobs. One more than there are, so that two processors run three heavy jobs and two light ones.
pub(super) fn shares(processors: usize) -> usize {
    6 * processors + 1
}

/// Programs that are not divided: `machine` boots one virtual machine for all its tests.
const UNDIVIDED: [&str; 1] = ["machine"];

/// A test program.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Program {
    /// The name of its cargo target; for unit tests, the name of the crate.
    pub(super) name: String,
    /// `true` = integration tests in a `tests` directory, `false` = unit tests.
    pub(super) is_integration: bool,
    /// The directory of its package. Cargo runs it in this directory.
    pub(super) directory: PathBuf,
    pub(super) path: PathBuf,
}

/// A test process to run.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) name: String,
    program: Program,
    /// The names of its tests; empty = all tests of the program.
    tests: Vec<String>,
}

/// The result of a job.
pub(super) struct JobResult {
    pub(super) name: String,
    pub(super) counts: Counts,
    pub(super) time: Duration,
}

/// Divides all programs into jobs. A program of integration tests has a job for each top-level module, unless it is one of
/// [`UNDIVIDED`]; each other program is one job. The jobs in [`LONGEST`] come first, in the order of that list; all other jobs follow.
/// Jobs of equal rank are sorted by the length of [`Job::tests`], longest first.
pub(super) fn divide(programs: Vec<Program>, bin_directory: &Path) -> anyhow::Result<Vec<Job>> {
    let mut jobs = Vec::new();
    for program in programs {
        if !program.is_integration || UNDIVIDED.contains(&&*program.name) {
            jobs.push(Job {
                name: program.name.clone(),
                program,
                tests: Vec::new(),
            });
            continue;
        }
        for (module, tests) in modules(&program.list(bin_directory)?) {
            jobs.push(Job {
                name: format!("{} {module}", program.name),
                program: program.clone(),
                tests,
            });
        }
    }
    let position = |job: &Job| {
        LONGEST
            .iter()
            .position(|name| *name == job.name || *name == job.program.name)
    };
    jobs.sort_by_key(|job| (position(job).unwrap_or(LONGEST.len()), usize::MAX - job.tests.len()));
    Ok(jobs)
}

/// The tests of each top-level module, from the output of `--list --format terse`. A test outside a module counts as a module.
fn modules(list: &str) -> BTreeMap<String, Vec<String>> {
    let mut modules: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for test in list.lines().filter_map(|line| line.strip_suffix(": test")) {
        let module = test.split_once("::").map_or(test, |(module, _)| module);
        modules.entry(module.to_owned()).or_default().push(test.to_owned());
    }
    modules
}

/// Runs the jobs. Whenever shares are free, the first job that needs no more than these starts; with none running, any job does.
pub(super) fn run(jobs: Vec<Job>, shares: usize, bin_directory: &Path) -> anyhow::Result<Vec<JobResult>> {
    let mut queue = jobs;
    let (sender, finished) = mpsc::channel();
    thread::scope(|scope| {
        let mut results = Vec::new();
        let (mut used, mut running) = (0, 0);
        loop {
            let next = queue
                .iter()
                .position(|job| running == 0 || used + job.share() <= shares);
            if let Some(next) = next {
                let job = queue.remove(next);
                (used, running) = (used + job.share(), running + 1);
                let sender = sender.clone();
                scope.spawn(move || {
                    let result = catch_unwind(AssertUnwindSafe(|| job.run(bin_directory)));
                    sender.send((job.share(), result))
                });
                continue;
            }
            if running == 0 {
                return Ok(results);
            }
            let (share, result) = finished.recv().context("no job is left")?;
            (used, running) = (used - share, running - 1);
            results.push(result.unwrap_or_else(|_| bail!("a thread of the tests panicked"))?);
        }
    })
}

impl Program {
    fn command(&self, bin_directory: &Path) -> Command {
        let mut command = Command::new(&self.path);
        command
            .current_dir(&self.directory)
            .env("CARGO", env!("CARGO"))
            .env("CARGO_MANIFEST_DIR", &self.directory)
            .env("CLUSTERMESH_BIN_DIR", bin_directory);
        command
    }

    fn list(&self, bin_directory: &Path) -> anyhow::Result<String> {
        let mut command = self.command(bin_directory);
        command.args(["--list", "--format", "terse"]).stderr(Stdio::inherit());
        let output = command
            .output()
            .with_context(|| format!("{} cannot be started", self.path.display()))?;
        if !output.status.success() {
            bail!("{command:?} failed: {}", output.status);
        }
        String::from_utf8(output.stdout).with_context(|| format!("list the tests of {}", self.path.display()))
    }
}

impl Job {
    fn share(&self) -> usize {
        if HEAVY.contains(&&*self.program.name) {
            SHARE_OF_HEAVY_JOB
        } else {
            SHARE_OF_LIGHT_JOB
        }
    }

    /// Runs the job as cargo would. Prints the output only after the process has exited, because several jobs run at once.
    fn run(&self, bin_directory: &Path) -> anyhow::Result<JobResult> {
        let start = Instant::now();
        println!("xtask: {} starts", self.name);
        let mut output = tempfile::tempfile().context("a file")?;
        let copy = || output.try_clone().context("a file");
        let mut command = self.program.command(bin_directory);
        // Without `--`, which only cargo needs.
        command.args(&SEQUENTIAL[1..]).stdout(copy()?).stderr(copy()?);
        if !self.tests.is_empty() {
            command.arg("--exact").args(&self.tests);
        }
        let status = command
            .status()
            .with_context(|| format!("{} cannot be started", self.program.path.display()))?;
        let mut bytes = Vec::new();
        output
            .rewind()
            .and_then(|()| output.read_to_end(&mut bytes))
            .context("read the output of a test")?;
        let text = String::from_utf8_lossy(&bytes);
        let result = JobResult {
            name: self.name.clone(),
            counts: Counts::of_program(&text).with_exit(status.success()),
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

    /// A program that is a shell script.
    fn program(directory: &Path, name: &str, is_integration: bool, script: &str) -> Program {
        let path = directory.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("a script");
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("its mode");
        Program {
            name: name.to_owned(),
            is_integration,
            directory: "/".into(),
            path,
        }
    }

    #[test]
    fn failing_jobs_are_reported_and_later_ones_run() {
        let directory = tempfile::tempdir().expect("a directory");
        let program = |name: &str, script: String| program(directory.path(), name, false, &script);
        let programs = vec![
            program("well", format!("echo '{PASSED}'")),
            program("fails", format!("echo '{FAILED}'; exit 101")),
            program("later", format!("echo '{PASSED}'")),
            program("silent", "exit 0".to_owned()),
            program("killed", format!("echo '{PASSED}'; kill -9 $$")),
        ];
        for shares in [1, 6] {
            let jobs = divide(programs.clone(), Path::new("/")).expect("scripts");
            let results = run(jobs, shares, Path::new("/")).expect("they start");
            let counts: Counts = results.iter().map(|result| result.counts).sum();
            // `silent` prints no result, and `killed` dies after all its tests have passed: each counts as one failure.
            assert_eq!(counts.to_string(), "7 passed, 3 failed");
            let failed = results.into_iter().filter(|result| !result.counts.is_success());
            let mut failed: Vec<_> = failed.map(|result| result.name).collect();
            failed.sort();
            assert_eq!(failed, ["fails", "killed", "silent"]);
        }
        // A program that cannot be started makes `run` fail.
        let nowhere = Program {
            path: "/nowhere".into(),
            ..programs[0].clone()
        };
        let jobs = divide(vec![nowhere, programs[0].clone()], Path::new("/")).expect("unit tests are not listed");
        assert!(run(jobs, 2, Path::new("/")).is_err());
    }

    #[test]
    fn light_job_runs_beside_a_heavy_one_and_a_second_heavy_one_waits() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().display();
        let wait_for = |file: &str| {
            format!("i=0; until [ -e {path}/{file} ]; do i=$((i+1)); [ $i -lt 200 ] || exit 1; sleep 0.1; done")
        };
        let scripts = [
            ("light", format!("touch {path}/light-ran")),
            (
                "machine",
                format!("{}; touch {path}/machine-ran", wait_for("light-ran")),
            ),
            ("mesh", format!("[ -e {path}/machine-ran ] || exit 1")),
        ];
        let programs =
            scripts.map(|(name, script)| program(directory.path(), name, false, &format!("{script}; echo '{PASSED}'")));
        let jobs = divide(programs.into(), Path::new("/")).expect("scripts");
        let shares = SHARE_OF_HEAVY_JOB + SHARE_OF_LIGHT_JOB;
        let results = run(jobs, shares, Path::new("/")).expect("they start");
        let counts: Counts = results.iter().map(|result| result.counts).sum();
        assert_eq!(counts.to_string(), "6 passed, 0 failed");
    }

    #[test]
    fn integration_tests_are_divided_by_module_longest_first() {
        let directory = tempfile::tempdir().expect("a directory");
        let script = "printf 'b::one: test\\na::x::two: test\\na::three: test\\nalone: test\\n'";
        let programs = ["plan", "mesh"].map(|name| program(directory.path(), name, true, script));
        let jobs = divide(programs.into(), Path::new("/")).expect("scripts");
        let jobs: Vec<_> = jobs
            .iter()
            .map(|job| (job.name.as_str(), job.tests.join(" ")))
            .collect();
        let expected = ["mesh", "plan"].map(|program| {
            [("a", "a::x::two a::three"), ("alone", "alone"), ("b", "b::one")]
                .map(|(module, tests)| (format!("{program} {module}"), tests.to_owned()))
        });
        let expected: Vec<_> = expected
            .as_flattened()
            .iter()
            .map(|(name, tests)| (name.as_str(), tests.clone()))
            .collect();
        assert_eq!(jobs, expected);
    }
}
