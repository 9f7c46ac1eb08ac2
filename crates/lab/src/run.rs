//! Manages the run directories of labs: starts a lab's supervisor, sends requests to it, and removes the files of dead
//! labs. The process that starts a lab is its owner.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::fcntl::{Flock, FlockArg};

use crate::cgroup::Cgroups;
use crate::supervisor::{Request, Response};
use crate::{Error, Result};

pub(crate) const SOCKET: &str = "control.sock";
/// A file lock that the supervisor holds while it runs.
pub(crate) const SUPERVISOR_LOCK: &str = "supervisor.lock";
/// A file lock that the owner holds until its supervisor runs.
const OWNER_LOCK: &str = "owner.lock";
/// A file that exists if the lab is kept: it continues when its owner exits.
pub(crate) const KEPT: &str = "kept";
const ROOT: &str = "/run/clustermesh-lab";

/// The directory of a running lab, and the supervisor's process if this process owns the lab.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) directory: PathBuf,
    /// `unshare`, whose child is the supervisor. The supervisor takes the lab down when the pipe to its standard input
    /// closes. `None` = this process does not own the lab, or the lab is kept.
    supervisor: Option<Child>,
}

impl Run {
    /// Cleans up after dead labs, then creates a run directory and starts its supervisor.
    pub(crate) fn start() -> Result<Self> {
        if !nix::unistd::geteuid().is_root() {
            return Err(Error::Missing {
                what: "the right to create network namespaces".into(),
                remedy: "run as root (`sudo -E cargo ...`)".into(),
            });
        }
        sweep();
        let program = lab_program()?;
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let count = STARTED.fetch_add(1, Ordering::Relaxed);
        let id = format!("{:x}-{}-{count}", now_millis() & 0xff_ffff_ffff, std::process::id());
        // If no process holds a lock in a directory, `sweep` removes the directory at once, unless its name starts with a dot. So
        // this directory gets its final name only when its lock is held.
        let hidden = Path::new(ROOT).join(format!(".{id}"));
        std::fs::create_dir_all(hidden.join("log")).map_err(Error::io(format!("create {}", hidden.display())))?;
        let lock = std::fs::File::create(hidden.join(OWNER_LOCK)).map_err(Error::io("create the owner's lock"))?;
        let _lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock)
            .map_err(|(_, errno)| Error::errno("take the owner's lock")(errno))?;
        let directory = Path::new(ROOT).join(id);
        std::fs::rename(&hidden, &directory).map_err(Error::io(format!("rename to {}", directory.display())))?;

        let log = directory.join("log/supervisor.log");
        let log = std::fs::File::create(&log).map_err(Error::io(format!("create {}", log.display())))?;
        let child = Command::new("unshare")
            .args([
                "--pid",
                "--fork",
                "--kill-child",
                "--mount",
                "--propagation",
                "private",
                "--",
            ])
            .arg(program)
            .arg("supervise")
            .arg(&directory)
            .stdin(Stdio::piped())
            .stdout(log.try_clone().map_err(Error::io("clone a log handle"))?)
            .stderr(log)
            // Ctrl-C in a terminal must signal only the owner. The pipe then closes, and the supervisor takes the lab
            // down in order.
            .process_group(0)
            .spawn()
            .map_err(Error::io("start `unshare` (package util-linux)"))?;
        let mut run = Self {
            directory,
            supervisor: Some(child),
        };
        run.wait_for_supervisor()?;
        Ok(run)
    }

    fn wait_for_supervisor(&mut self) -> Result<()> {
        let start = Instant::now();
        while self.request(&Request::Running).is_err() {
            let ended = self
                .supervisor
                .as_mut()
                .and_then(|child| child.try_wait().ok().flatten());
            if ended.is_some() || start.elapsed() > Duration::from_secs(20) {
                let log = std::fs::read_to_string(self.directory.join("log/supervisor.log")).unwrap_or_default();
                return Err(self.supervisor_error(format!("did not start: {}", log.trim())));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Attaches to a running lab.
    pub(crate) fn attach(directory: &Path) -> Result<Self> {
        let run = Self {
            directory: directory.into(),
            supervisor: None,
        };
        run.request(&Request::Running)?;
        Ok(run)
    }

    /// Sends one request and waits for the response.
    pub(crate) fn request(&self, request: &Request) -> Result<Response> {
        let path = self.directory.join(SOCKET);
        let gone = |error: std::io::Error| self.supervisor_error(format!("does not answer: {error}"));
        let mut stream = UnixStream::connect(path).map_err(gone)?;
        let mut line = serde_json::to_string(request).map_err(|error| self.supervisor_error(error.to_string()))?;
        line.push('\n');
        stream.write_all(line.as_bytes()).map_err(gone)?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).map_err(gone)?;
        match serde_json::from_str(&answer) {
            Ok(Response::Failed(message)) => Err(self.supervisor_error(message)),
            Ok(response) => Ok(response),
            Err(error) => Err(self.supervisor_error(format!("sent no response: {error}"))),
        }
    }

    /// Makes the lab continue when this process exits.
    pub(crate) fn keep(&mut self) -> Result<()> {
        self.request(&Request::Keep)?;
        self.supervisor = None;
        Ok(())
    }

    fn supervisor_error(&self, message: String) -> Error {
        Error::Supervisor {
            run: self.directory.clone(),
            message,
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let Some(mut child) = self.supervisor.take() else {
            return;
        };
        drop(child.stdin.take());
        let start = Instant::now();
        while matches!(child.try_wait(), Ok(None)) {
            if start.elapsed() > Duration::from_secs(30) {
                eprintln!("the lab's supervisor did not exit; killing it");
                // `--kill-child` kills the supervisor. It is pid 1 of its pid namespace, so the kernel then kills all
                // other processes there.
                let _ = child.kill();
                let _ = child.wait();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        if self.directory.exists() {
            sweep();
        }
    }
}

/// The run directories of the labs that run on this machine.
pub fn running_labs() -> Vec<PathBuf> {
    run_directories()
        .into_iter()
        .filter(|run| Run::attach(run).is_ok())
        .collect()
}

/// Takes every kept lab down and removes the files of dead labs. Labs that are not kept end with
/// their owner, such as a running test, and continue until then. Returns the number of labs that were taken down.
///
/// # Errors
/// When a supervisor does not exit within half a minute.
pub fn down_all() -> Result<usize> {
    down_kept(running_labs())
}

/// Takes the kept labs among `labs` down and removes the files of all dead labs. Returns the number of labs that were taken
/// down.
///
/// # Errors
/// When a supervisor does not exit within half a minute.
pub fn down_kept(labs: impl IntoIterator<Item = PathBuf>) -> Result<usize> {
    let kept: Vec<PathBuf> = labs.into_iter().filter(|directory| is_kept(directory)).collect();
    for directory in &kept {
        down(directory)?;
    }
    sweep();
    Ok(kept.len())
}

/// Whether the lab continues when its owner exits.
pub(crate) fn is_kept(directory: &Path) -> bool {
    directory.join(KEPT).exists()
}

/// Takes one lab down, whether or not it is kept.
pub(crate) fn down(directory: &Path) -> Result<()> {
    let run = Run {
        directory: directory.into(),
        supervisor: None,
    };
    let supervisor = std::fs::read_to_string(directory.join("supervisor.pid")).unwrap_or_default();
    let parent = parent(supervisor.trim()).unwrap_or_default();
    // This request has no response: the supervisor exits.
    let _ = run.request(&Request::Down);
    let start = Instant::now();
    while [supervisor.trim(), &parent]
        .iter()
        .any(|pid| is_supervisor_or_unshare(pid))
    {
        if start.elapsed() > Duration::from_secs(30) {
            return Err(run.supervisor_error("did not go down within 30 s".into()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    if directory.exists() {
        sweep();
    }
    Ok(())
}

fn parent(pid: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(
        status
            .lines()
            .find_map(|line| line.strip_prefix("PPid:"))?
            .trim()
            .into(),
    )
}

/// Whether this process is a supervisor or its parent `unshare`, and not a zombie, which has no command line.
fn is_supervisor_or_unshare(pid: &str) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    !pid.is_empty() && String::from_utf8_lossy(&line).contains("supervise")
}

/// Removes cgroups and files of dead labs. When a supervisor exits, the kernel kills its processes and
/// removes its mounts and namespaces.
fn sweep() {
    let Ok(cgroups) = Cgroups::detect() else { return };
    for directory in abandoned_directories() {
        let _ = std::fs::remove_dir_all(directory);
    }
    for run in run_directories() {
        if is_locked(&run.join(SUPERVISOR_LOCK)) || is_locked(&run.join(OWNER_LOCK)) {
            continue;
        }
        // The processes of a dead lab may still be exiting. If this takes too long, the next sweep removes the cgroup.
        let cgroup = cgroups.of(&run, None);
        let start = Instant::now();
        while !cgroup.is_empty() && start.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(10));
        }
        if cgroup.remove().is_ok() {
            let _ = std::fs::remove_dir_all(&run);
        }
    }
}

/// Hidden directories that are older than a minute: their owner died before it renamed them.
fn abandoned_directories() -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(ROOT) else {
        return vec![];
    };
    let hidden = entries
        .filter_map(|entry| entry.ok())
        .filter(|entry| entry.file_name().as_encoded_bytes()[0] == b'.');
    let age = |entry: &std::fs::DirEntry| entry.metadata().ok()?.modified().ok()?.elapsed().ok();
    let old = hidden.filter(|entry| age(entry).is_some_and(|age| age > Duration::from_secs(60)));
    old.map(|entry| entry.path()).collect()
}

fn run_directories() -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(ROOT) else {
        return vec![];
    };
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut runs: Vec<_> = paths
        .filter(|path| path.file_name().is_none_or(|n| n.as_encoded_bytes()[0] != b'.'))
        .collect();
    runs.sort();
    runs
}

fn is_locked(path: &Path) -> bool {
    let Ok(file) = std::fs::File::open(path) else {
        return false;
    };
    Flock::lock(file, FlockArg::LockSharedNonblock).is_err()
}

fn now_millis() -> u128 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_millis()
}

/// Finds a program of this workspace: by `CARGO_BIN_EXE_<name>` (cargo sets it for tests of the program's package), in
/// `CLUSTERMESH_BIN_DIR`, in the directory of the running program, or in its parent (test binaries are in `deps/`).
pub fn workspace_program(name: &str) -> Result<PathBuf> {
    let mut candidates = vec![];
    candidates.extend(std::env::var_os(format!("CARGO_BIN_EXE_{name}")).map(PathBuf::from));
    candidates.extend(std::env::var_os("CLUSTERMESH_BIN_DIR").map(|directory| Path::new(&directory).join(name)));
    let own = std::env::current_exe().unwrap_or_default();
    candidates.extend(own.ancestors().skip(1).take(2).map(|directory| directory.join(name)));
    candidates
        .into_iter()
        .find(|path| path.is_file())
        .ok_or_else(|| Error::Missing {
            what: format!("the program {name}"),
            remedy:
                "`cargo xtask test` builds it; by hand: `cargo build --workspace --bins`, or set CLUSTERMESH_BIN_DIR"
                    .into(),
        })
}

pub(crate) fn lab_program() -> Result<PathBuf> {
    workspace_program("clustermesh-lab")
}

/// The directory with the logs of failed tests.
pub(crate) fn logs_home() -> Result<PathBuf> {
    Ok(crate::lab_home()?.join("failed"))
}

/// Copies the files of `from` to `to`, and removes directories beside `to` that are older than a day.
pub(crate) fn copy_logs(from: &Path, to: &Path) -> std::io::Result<()> {
    let parent = to.parent().unwrap_or(to);
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(parent)?.filter_map(|entry| entry.ok()) {
        let age = entry.metadata()?.modified()?.elapsed().unwrap_or_default();
        if age > Duration::from_secs(24 * 3600) {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        std::fs::copy(entry.path(), to.join(entry.file_name()))?;
    }
    Ok(())
}

/// Copies the logs of the containers of a running node to `to`, as `<node>-<pod>-<container>-<number>.log`. Also writes the node's
/// addresses, routes, connections and firewall to `<node>-network.txt`.
pub(crate) fn copy_node_state(pid: i32, to: &Path, node: &str) -> std::io::Result<()> {
    let files = |directory: &Path| -> std::io::Result<Vec<PathBuf>> {
        std::fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect()
    };
    let pods = PathBuf::from(format!("/proc/{pid}/root/var/log/pods"));
    // A node that has just booted has no pods.
    for pod in files(&pods).unwrap_or_default() {
        for container in files(&pod)?.into_iter().filter(|path| path.is_dir()) {
            for log in files(&container)? {
                let name = [&pod, &container, &log].map(|path| path.file_name().unwrap_or_default().to_string_lossy());
                std::fs::copy(&log, to.join(format!("{node}-{}", name.join("-"))))?;
            }
        }
    }
    let script = "for command in 'ip address' 'ip rule' 'ip route show table all' 'ip -6 route show table all' \
                  'conntrack -L' 'nft list ruleset'; do echo \"== $command\"; $command; done 2>&1";
    let output = Command::new("nsenter")
        .args([&format!("--net=/proc/{pid}/ns/net"), "sh", "-c", script])
        .output()?;
    std::fs::write(to.join(format!("{node}-network.txt")), output.stdout)
}
