//! Runs programs as children of the calling process, until they exit or in the background.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};

use crate::{Error, Result, wait_until};

/// The output and exit status of a finished program. Bytes that are not UTF-8 are replaced.
#[derive(Debug, Clone)]
pub struct Output {
    /// The exit status.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Output {
    /// The output. If the program failed, an error that quotes the last 20 lines.
    pub(crate) fn check(self, argv: &[String]) -> Result<Self> {
        if self.status.success() {
            return Ok(self);
        }
        let all = format!("{}\n{}", self.stdout.trim(), self.stderr.trim());
        let lines: Vec<_> = all.trim().lines().collect();
        let output = lines[lines.len().saturating_sub(20)..].join("\n");
        Err(Error::Command {
            command: argv.join(" "),
            status: self.status.to_string(),
            output,
        })
    }
}

/// Converts words to an argument list. The first word is the program: a path, or a name in PATH.
pub(crate) fn argv<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(words: I) -> Vec<String> {
    words
        .into_iter()
        .map(|word| word.as_ref().to_string_lossy().into_owned())
        .collect()
}

/// Runs a program and returns its output, also when it fails.
pub(crate) async fn output(argv: &[String], stdin: Option<&[u8]>) -> Result<Output> {
    let mut command = Command::new(&argv[0]);
    command
        .args(&argv[1..])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command.stdin(if stdin.is_some() { Stdio::piped() } else { Stdio::null() });
    let mut child = command.spawn().map_err(|source| spawn_error(&argv[0], source))?;
    let input = child.stdin.take().zip(stdin);
    let write_input = async {
        if let Some((mut pipe, bytes)) = input {
            // A program may exit before it has read all input. Its exit status decides, so a write error is ignored.
            let _ = pipe.write_all(bytes).await;
        }
    };
    let (done, ()) = tokio::join!(child.wait_with_output(), write_input);
    let done = done.map_err(Error::io(format!("run {}", argv[0])))?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok(Output {
        status: done.status,
        stdout: text(done.stdout),
        stderr: text(done.stderr),
    })
}

/// Runs a program. A failure is an error with the last lines of the output.
pub(crate) async fn run(argv: &[String], stdin: Option<&[u8]>) -> Result<Output> {
    output(argv, stdin).await?.check(argv)
}

fn spawn_error(program: &str, source: std::io::Error) -> Error {
    if source.kind() == std::io::ErrorKind::NotFound {
        return Error::Missing {
            what: format!("the program {program}"),
            remedy: "`cargo xtask test` names the package that contains it".into(),
        };
    }
    Error::Io {
        doing: format!("start {program}"),
        source,
    }
}

/// A program in the background, killed when dropped. Its output goes to a log file.
#[derive(Debug)]
pub struct Running {
    child: Child,
    log: PathBuf,
    /// Whether `child` is an nsenter, and the program is its child in another pid namespace.
    wrapped: bool,
}

impl Running {
    pub(crate) fn start(argv: &[String], log: &Path, wrapped: bool) -> Result<Self> {
        let file = std::fs::File::create(log).map_err(Error::io(format!("create {}", log.display())))?;
        let file_for_stderr = file.try_clone().map_err(Error::io("clone a log handle"))?;
        let child = Command::new(&argv[0])
            .args(&argv[1..])
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(file_for_stderr)
            .kill_on_drop(true)
            .spawn()
            .map_err(|source| spawn_error(&argv[0], source))?;
        Ok(Self {
            child,
            log: log.into(),
            wrapped,
        })
    }

    /// The program's output so far.
    pub fn log(&self) -> String {
        std::fs::read(&self.log)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// The program's pid in the host's pid namespace. `None` after [`Self::wait_for_exit`] has returned the exit status; for a wrapped
    /// program, also before it has started and as soon as it has exited.
    pub fn pid(&self) -> Option<i32> {
        let own = i32::try_from(self.child.id()?).ok()?;
        if !self.wrapped {
            return Some(own);
        }
        let children = std::fs::read_to_string(format!("/proc/{own}/task/{own}/children")).ok()?;
        children.split_whitespace().next()?.parse().ok()
    }

    /// Sends a signal to the program.
    ///
    /// # Errors
    /// When [`Self::pid`] is `None`, or the kernel refuses the signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let gone = || {
            Error::Other(format!(
                "cannot send {signal}: the program is not running; see {}",
                self.log.display()
            ))
        };
        kill(Pid::from_raw(self.pid().ok_or_else(gone)?), signal).map_err(|_| gone())
    }

    /// Waits until the log contains `text`.
    ///
    /// # Errors
    /// After `timeout`, with the last line of the log.
    pub async fn wait_for_log(&mut self, text: &str, timeout: Duration) -> Result<()> {
        let what = format!("{text:?} in {}", self.log.display());
        wait_until(what, timeout, async || {
            let log = self.log();
            if log.contains(text) {
                Ok(())
            } else {
                Err(log.lines().last().unwrap_or("an empty log").to_owned())
            }
        })
        .await
    }

    /// Waits until the program exits.
    ///
    /// # Errors
    /// After `timeout`.
    pub async fn wait_for_exit(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let what = format!("the exit of the program that logs to {}", self.log.display());
        wait_until(what, timeout, async || match self.child.try_wait() {
            Ok(Some(status)) => Ok(status),
            Ok(None) => Err("running".into()),
            Err(error) => Err(error.to_string()),
        })
        .await
    }

    /// Sends SIGTERM and waits until the program exits.
    ///
    /// # Errors
    /// When it does not exit within `timeout`.
    pub async fn terminate(&mut self, timeout: Duration) -> Result<ExitStatus> {
        if self.pid().is_some() {
            let _ = self.signal(Signal::SIGTERM);
        }
        self.wait_for_exit(timeout).await
    }
}
