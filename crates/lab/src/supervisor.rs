//! Runs the supervisor: one process for each lab, the ancestor of the lab's other processes. It keeps the network namespaces
//! open, starts and kills processes and forwards ports. Its standard input is a pipe from the lab's owner. When this pipe
//! closes, the supervisor takes the lab down, unless the lab is kept.
//!
//! It is pid 1 of its own pid namespace, so the kernel kills all processes of the lab when it exits.

mod forward;
mod protocol;
mod reaper;
pub mod stages;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

pub(crate) use protocol::{Request, Response};
use reaper::Reaper;

use crate::cgroup::Cgroups;
use crate::run;

/// Timeout for killed processes to exit.
const KILL_TIMEOUT: Duration = Duration::from_secs(20);

struct Supervisor {
    /// The directory of the lab's files. [`Self::down`] removes it.
    directory: PathBuf,
    /// The supervisor's pid in the host's pid namespace, read from the host's /proc, which is still mounted.
    host_pid: String,
    cgroups: Cgroups,
    reaper: Reaper,
    resources: Mutex<Resources>,
    /// Whether the lab continues after its owner has exited.
    keep: AtomicBool,
}

#[derive(Default)]
struct Resources {
    namespaces: BTreeMap<String, std::fs::File>,
    /// Name -> pid in the supervisor's pid namespace.
    processes: BTreeMap<String, Pid>,
}

/// Serves requests until the process exits: at `Down`, or when standard input closes and the lab is not kept. Returns only
/// on an error.
fn serve(directory: &Path) -> anyhow::Result<()> {
    let lock = std::fs::File::create(directory.join(run::SUPERVISOR_LOCK))?;
    let _lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno)?;
    let host_pid = std::fs::read_link("/proc/self")?.to_string_lossy().into_owned();
    std::fs::write(directory.join("supervisor.pid"), &host_pid)?;
    let supervisor = Arc::new(Supervisor {
        directory: directory.into(),
        host_pid,
        cgroups: Cgroups::detect()?,
        reaper: Reaper::start(),
        resources: Mutex::default(),
        keep: AtomicBool::new(false),
    });
    std::fs::create_dir_all(directory.join("ns"))?;
    let listener = UnixListener::bind(directory.join(run::SOCKET))?;
    let watching = supervisor.clone();
    std::thread::spawn(move || watching.watch_owner());
    for connection in listener.incoming() {
        let connection = connection?;
        let serving = supervisor.clone();
        std::thread::spawn(move || serving.serve_connection(connection));
    }
    Ok(())
}

impl Supervisor {
    /// Takes the lab down, unless it is kept, when standard input ends. The kernel closes the owner's end of the pipe
    /// even if the owner is killed.
    fn watch_owner(&self) {
        let mut buffer = [0; 64];
        while !matches!(std::io::stdin().read(&mut buffer), Ok(0) | Err(_)) {}
        if !self.keep.load(Ordering::SeqCst) {
            self.down();
        }
    }

    fn serve_connection(&self, connection: UnixStream) {
        let mut line = String::new();
        if BufReader::new(&connection).read_line(&mut line).is_err() {
            return;
        }
        let response = match serde_json::from_str(&line) {
            Ok(request) => self
                .handle(request)
                .unwrap_or_else(|error| Response::Failed(format!("{error:#}"))),
            Err(error) => Response::Failed(format!("cannot read the request: {error}")),
        };
        let mut text = serde_json::to_string(&response).unwrap_or_default();
        text.push('\n');
        // If the client has closed the connection, it does not need the response.
        let _ = (&connection).write_all(text.as_bytes());
    }

    fn handle(&self, request: Request) -> anyhow::Result<Response> {
        match request {
            Request::AddNamespace { name } => self.add_namespace(&name)?,
            Request::DropNamespace { name } => self.drop_namespace(&name)?,
            Request::Start { name, argv, env, log } => self.start(&name, &argv, &env, &log)?,
            Request::Kill { name } => self.kill(&name)?,
            Request::Signal { name, signal } => {
                let pid = self.pid(&name)?;
                kill(pid, Signal::try_from(signal)?)?;
            }
            Request::Forward { namespace, to } => {
                let namespace = self
                    .lock()
                    .namespaces
                    .get(&namespace)
                    .map(std::fs::File::try_clone)
                    .transpose()?;
                let namespace = namespace.ok_or_else(|| anyhow::anyhow!("no such network namespace"))?;
                return Ok(Response::Port(forward::start(namespace, to)?));
            }
            Request::Running => {
                let resources = self.lock();
                let processes = resources.processes.iter();
                let names = processes.filter(|(_, pid)| !self.reaper.has_exited(**pid));
                return Ok(Response::Names(names.map(|(name, _)| name.clone()).collect()));
            }
            Request::Keep => {
                std::fs::write(self.directory.join(run::KEPT), "")?;
                self.keep.store(true, Ordering::SeqCst);
            }
            Request::Down => self.down(),
        }
        Ok(Response::Done)
    }

    /// Creates a network namespace. A file descriptor of the supervisor keeps it alive, and other processes open it by a
    /// link in `ns/`.
    fn add_namespace(&self, name: &str) -> anyhow::Result<()> {
        let made = std::thread::spawn(|| -> anyhow::Result<std::fs::File> {
            unshare(CloneFlags::CLONE_NEWNET)?;
            Ok(std::fs::File::open("/proc/thread-self/ns/net")?)
        });
        let namespace = made
            .join()
            .map_err(|_| anyhow::anyhow!("the thread that creates namespaces panicked"))??;
        let link = self.directory.join("ns").join(name);
        anyhow::ensure!(
            !self.lock().namespaces.contains_key(name),
            "the network namespace {name} already exists"
        );
        std::os::unix::fs::symlink(format!("/proc/{}/fd/{}", self.host_pid, namespace.as_raw_fd()), link)?;
        self.lock().namespaces.insert(name.into(), namespace);
        Ok(())
    }

    fn drop_namespace(&self, name: &str) -> anyhow::Result<()> {
        std::fs::remove_file(self.directory.join("ns").join(name))?;
        self.lock().namespaces.remove(name);
        Ok(())
    }

    fn start(&self, name: &str, argv: &[String], env: &BTreeMap<String, String>, log: &Path) -> anyhow::Result<()> {
        let mut resources = self.lock();
        if let Some(pid) = resources.processes.get(name) {
            anyhow::ensure!(self.reaper.has_exited(*pid), "{name} is running already");
        }
        let log = std::fs::File::options().create(true).append(true).open(log)?;
        let mut command = Command::new(&argv[0]);
        command
            .args(&argv[1..])
            .envs(env)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let pid = self
            .reaper
            .spawn(&mut command)
            .map_err(|error| anyhow::anyhow!("start {}: {error}", argv[0]))?;
        resources.processes.insert(name.into(), pid);
        Ok(())
    }

    fn pid(&self, name: &str) -> anyhow::Result<Pid> {
        let pid = self
            .lock()
            .processes
            .get(name)
            .copied()
            .filter(|pid| !self.reaper.has_exited(*pid));
        pid.ok_or_else(|| anyhow::anyhow!("{name} is not running; its log is in {}/log", self.directory.display()))
    }

    /// Kills a program that `start` started, waits until all its processes have exited, and removes its cgroup.
    fn kill(&self, name: &str) -> anyhow::Result<()> {
        let pid = self.pid(name)?;
        kill(pid, Signal::SIGKILL)?;
        let deadline = Instant::now() + KILL_TIMEOUT;
        let cgroup = self.cgroups.of(&self.directory, Some(name));
        while !(self.reaper.has_exited(pid) && cgroup.is_empty()) {
            anyhow::ensure!(
                Instant::now() < deadline,
                "{name} was killed but did not exit within {} s",
                KILL_TIMEOUT.as_secs()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        self.lock().processes.remove(name);
        cgroup.remove()
    }

    /// Kills all processes, removes the lab's files and exits. An error of one step does not prevent the next.
    fn down(&self) -> ! {
        // The lock is held until the exit, so that no request starts a process meanwhile.
        let _locked = self.lock();
        // From pid 1, `kill(-1)` reaches every other process of the pid namespace.
        let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
        let deadline = Instant::now() + KILL_TIMEOUT;
        let cgroup = self.cgroups.of(&self.directory, None);
        while !(self.reaper.is_childless() && cgroup.is_empty()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Err(error) = cgroup.remove() {
            eprintln!("down: {error:#}");
        }
        if let Err(error) = std::fs::remove_dir_all(&self.directory) {
            eprintln!("down: remove {}: {error}", self.directory.display());
        }
        std::process::exit(0)
    }

    fn lock(&self) -> MutexGuard<'_, Resources> {
        self.resources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
