//! Runs one command as root in a virtual machine with its own kernel and the host's files, because the host's kernel may lack
//! WireGuard. It needs no hardware virtualisation.
//!
//! ```text
//!  owner --stdout, stderr, exit code-- QEMU (software emulation, killed with its owner)
//!                                        Debian's kernel -> init -> stage2 (pid 1) -> the command
//!           / of the host --9p, read-only--> lower layer of the guest's root; the upper layer is in the guest's memory
//! ```
//! So paths are the same in the guest, programs that were built on the host run there, and files that the command writes
//! are lost.

mod image;
mod kernel;

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};

use crate::{Error, Result, lab_home};

const QEMU: &str = "qemu-system-x86_64";
/// A file lock that is held during a run. The next run removes a directory whose lock is free.
const LOCK: &str = "lock";

/// The resources and limits of a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Memory in MiB. Files that are written in the guest use it, too.
    pub memory: u32,
    /// Number of processors. With more than one, the emulator sometimes executes an instruction that the kernel has
    /// just patched on another processor (a static key, such as the one that `ping` enables for its timestamps). The
    /// kernel then panics because of an unexpected breakpoint.
    pub cpus: u32,
    /// The virtual machine is killed after this time.
    pub limit: Duration,
    /// The guest's clock.
    pub clock: Clock,
}

/// The source of a guest's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Clock {
    /// Real time. The speed of the guest depends on the emulator and on the load of the host.
    #[default]
    Real,
    /// Each instruction takes one nanosecond. A measured duration is then a number of instructions, equal in every run.
    /// This clock is about five times slower and needs `cpus` = 1.
    Instructions,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            memory: 2048,
            cpus: 1,
            limit: Duration::from_secs(600),
            clock: Clock::Real,
        }
    }
}

/// The end of a command in a virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandEnd {
    /// The command exited with this code.
    Code(i32),
    /// The command did not exit within the time limit.
    TimeLimit,
}

impl Machine {
    /// Downloads and unpacks the kernel if the cache does not have it; `progress` gets a line for each step.
    ///
    /// # Errors
    /// When the architecture is not x86_64, a program is missing, or Debian's package cannot be downloaded.
    pub fn prepare(progress: &dyn Fn(&str)) -> Result<()> {
        kernel::ensure(progress).map(drop)
    }

    /// Boots, runs the command in the caller's directory with the caller's environment (and the `sbin` directories in PATH),
    /// and powers off. Boot and power-off take about 8 s. Standard output and standard error of the command are copied to the caller's.
    ///
    /// # Errors
    /// When the virtual machine cannot be started, or stops before the command exits. The message quotes the last lines
    /// of its console.
    pub fn run(&self, command: &[String]) -> Result<CommandEnd> {
        self.run_with_output(command).map(|(ended, _)| ended)
    }

    /// Does the same as [`Self::run`], and also returns the command's standard output.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_with_output(&self, command: &[String]) -> Result<(CommandEnd, String)> {
        let kernel = kernel::ensure(&|line| eprintln!("vm: {line}"))?;
        let run = Run::new(&kernel, command)?;
        let mut child = self
            .qemu_under_setpriv(&kernel, run.path())
            .spawn()
            .map_err(|source| match source.kind() {
                // The spawned program is setpriv, which starts QEMU.
                std::io::ErrorKind::NotFound => Error::Missing {
                    what: "the program setpriv".into(),
                    remedy: "`cargo xtask prereq` installs it".into(),
                },
                _ => Error::Io {
                    doing: format!("start {QEMU}"),
                    source,
                },
            })?;
        let out = child.stdout.take().map(|pipe| copy_stream(pipe, std::io::stdout()));
        let err = child.stderr.take().map(|pipe| copy_stream(pipe, std::io::stderr()));
        let in_time = wait(&mut child, self.limit)?;
        let [output, _] = [out, err].map(|copy| copy.and_then(|thread| thread.join().ok()).unwrap_or_default());
        let output = String::from_utf8_lossy(&output).into_owned();
        if !in_time {
            return Ok((CommandEnd::TimeLimit, output));
        }
        Ok((CommandEnd::Code(run.code()?), output))
    }

    fn qemu_under_setpriv(&self, kernel: &kernel::Kernel, run: &Path) -> Command {
        let Self {
            memory,
            cpus,
            limit: _,
            clock,
        } = self;
        // `no_timer_check`: the emulated timer is too irregular for this check. `panic=-1` reboots at once on a panic,
        // and with `-no-reboot` QEMU then exits.
        let kernel_arguments = "console=ttyS0 quiet panic=-1 nokaslr no_timer_check mitigations=off";
        let share = |path: &Path, tag: &str, more: &str| {
            format!(
                "local,path={},mount_tag={tag},security_model=none,multidevs=remap{more}",
                path.display()
            )
        };
        // `--pdeathsig` kills QEMU when the owner dies.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", QEMU]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command.args(["-machine", "q35"]);
        command.args(match clock {
            Clock::Real => ["-cpu", "qemu64", "-accel", "tcg,thread=multi"].as_slice(),
            // All CPU features of the emulator, because the kernel chooses its cipher implementations by them.
            Clock::Instructions => &[
                "-cpu",
                "max",
                "-accel",
                "tcg,thread=single",
                "-icount",
                "shift=0,align=off,sleep=on",
            ],
        });
        command.args(["-smp", &cpus.to_string(), "-m", &memory.to_string()]);
        command
            .arg("-kernel")
            .arg(&kernel.vmlinux)
            .arg("-initrd")
            .arg(&kernel.initramfs);
        command.args(["-append", kernel_arguments, "-device", "virtio-rng-pci"]);
        command
            .arg("-serial")
            .arg(format!("file:{}", run.join("console").display()));
        command.args(["-virtfs", &share(Path::new("/"), "host", ",readonly=on")]);
        command.args(["-virtfs", &share(run, "run", "")]);
        command.args(["-device", "virtio-serial-pci"]);
        for (name, file) in [("out", "/proc/self/fd/1"), ("err", "/proc/self/fd/2")] {
            command.args(["-chardev", &format!("file,id={name},path={file},append=on")]);
            command.args(["-device", &format!("virtserialport,chardev={name},name={name}")]);
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }
}

/// Copies a stream to its end on a new thread. The thread returns all bytes.
fn copy_stream(
    mut from: impl Read + Send + 'static,
    mut to: impl Write + Send + 'static,
) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let (mut buffer, mut all) = ([0; 1 << 16], Vec::new());
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            // A write error is ignored: the run continues without output.
            let _ = to.write_all(&buffer[..length]).and_then(|()| to.flush());
            all.extend_from_slice(&buffer[..length]);
        }
        all
    })
}

/// Waits until QEMU exits and returns true. After the time limit, kills it and returns false.
fn wait(child: &mut Child, limit: Duration) -> Result<bool> {
    let until = Instant::now() + limit;
    let failed = || Error::io(format!("wait for {QEMU}"));
    loop {
        if child.try_wait().map_err(failed())?.is_some() {
            return Ok(true);
        }
        if Instant::now() >= until {
            child.kill().map_err(failed())?;
            child.wait().map_err(failed())?;
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The directory of one run, with its command and exit code. Drop removes the directory. If this process is killed before that, the
/// next run removes it ([`sweep`]).
#[derive(Debug)]
struct Run {
    directory: tempfile::TempDir,
    _lock: Flock<File>,
}

impl Run {
    fn new(kernel: &kernel::Kernel, command: &[String]) -> Result<Self> {
        let runs = lab_home()?.join("machines");
        std::fs::create_dir_all(&runs).map_err(Error::io(format!("create {}", runs.display())))?;
        sweep(&runs);
        let failed = || Error::io(format!("prepare a run in {}", runs.display()));
        let directory = tempfile::Builder::new()
            .prefix("run.")
            .tempdir_in(&runs)
            .map_err(failed())?;
        let lock = create_locked(directory.path())?;
        let here = std::env::current_dir().map_err(Error::io("find the current directory"))?;
        let script = script(&here, std::env::vars(), command);
        std::fs::write(directory.path().join("command"), script).map_err(failed())?;
        let modules = kernel.modules.display().to_string();
        std::fs::write(directory.path().join("modules"), modules).map_err(failed())?;
        Ok(Self { directory, _lock: lock })
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn code(&self) -> Result<i32> {
        let read = |name: &str| std::fs::read_to_string(self.path().join(name)).unwrap_or_default();
        read("code").trim().parse().map_err(|_| {
            let console = read("console");
            let lines: Vec<_> = console.lines().collect();
            Error::Command {
                command: QEMU.into(),
                status: "the machine stopped before the command exited".into(),
                output: lines[lines.len().saturating_sub(20)..].join("\n"),
            }
        })
    }
}

/// Creates the lock file of a run. The file has another name until it is locked, because a sweep by another process
/// removes a directory whose lock is free.
fn create_locked(directory: &Path) -> Result<Flock<File>> {
    let new = directory.join(format!("{LOCK}.new"));
    let failed = || Error::io(format!("create {}", new.display()));
    let file = File::create(&new).map_err(failed())?;
    let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock)
        .map_err(|(_, errno)| Error::errno("take the lock of a run")(errno))?;
    std::fs::rename(&new, directory.join(LOCK)).map_err(failed())?;
    Ok(lock)
}

/// Removes the directories of runs whose owner is dead.
fn sweep(runs: &Path) {
    let directories = std::fs::read_dir(runs)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    for directory in directories {
        // A directory without a lock file is being created, or its creator was killed before the lock existed.
        let Ok(file) = File::open(directory.join(LOCK)) else {
            continue;
        };
        if Flock::lock(file, FlockArg::LockExclusiveNonblock).is_ok() {
            let _ = std::fs::remove_dir_all(&directory);
        }
    }
}

/// The script that the guest runs with bash.
fn script(here: &Path, environment: impl Iterator<Item = (String, String)>, command: &[String]) -> String {
    let is_name = |name: &str| {
        let first = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
        first && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let mut script = String::new();
    for (name, value) in environment.filter(|(name, _)| is_name(name)) {
        script += &format!("export {name}={}\n", quote(&value));
    }
    let words: Vec<_> = command.iter().map(|word| quote(word)).collect();
    let here = quote(&here.display().to_string());
    script
        + &format!(
            "export PATH=\"$PATH:/usr/local/sbin:/usr/sbin:/sbin\"\ncd {here} || exit 125\nexec {}\n",
            words.join(" ")
        )
}

/// Quotes one word for a shell.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Looks for a program in PATH, and then in the `sbin` directories, which the PATH of a user may lack.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|directory| directory.join(program))
        .find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn command_keeps_words_directory_and_environment() {
        let environment = [("A", "it's"), ("BASH_FUNC_x%%", "() { :; }")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        let command = ["echo", "$A", "two words"].map(String::from);
        assert_eq!(
            script(Path::new("/a b"), environment.into_iter(), &command),
            "export A='it'\\''s'\nexport PATH=\"$PATH:/usr/local/sbin:/usr/sbin:/sbin\"\ncd '/a b' || exit 125\nexec 'echo' '$A' \
             'two words'\n"
        );
    }

    #[test]
    fn sweep_spares_a_directory_that_is_being_created() {
        let runs = tempfile::tempdir().unwrap();
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    sweep(runs.path());
                }
            });
            let swept = (0..2_000).find(|n| {
                let directory = runs.path().join(n.to_string());
                std::fs::create_dir(&directory).unwrap();
                let lock = create_locked(&directory);
                let exists = directory.join(LOCK).exists();
                drop(lock);
                let _ = std::fs::remove_dir_all(&directory);
                !exists
            });
            is_done.store(true, Ordering::Relaxed);
            assert_eq!(swept, None);
        });
    }

    #[test]
    fn sweep_removes_only_directories_of_dead_runs() {
        let runs = tempfile::tempdir().unwrap();
        for name in ["alive", "dead", "new"] {
            std::fs::create_dir(runs.path().join(name)).unwrap();
        }
        std::fs::write(runs.path().join("dead").join(LOCK), "").unwrap();
        let lock = File::create(runs.path().join("alive").join(LOCK)).unwrap();
        let _lock = Flock::lock(lock, FlockArg::LockExclusive).unwrap();
        sweep(runs.path());
        assert_eq!(
            ["alive", "dead", "new"].map(|name| runs.path().join(name).exists()),
            [true, false, true]
        );
    }
}
