//! Errors of the lab. Each message names what failed: an action, a command, a condition or a missing thing.

use std::path::PathBuf;

/// Result with the [`Error`] of the lab.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the lab itself (not of the software under test).
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program, file, permission or setting is missing on this machine.
    #[error("{what} is missing: {remedy}")]
    Missing {
        /// The missing thing.
        what: String,
        /// How the user can provide it.
        remedy: String,
    },
    /// A command exited with a failure.
    #[error("`{command}` failed ({status}): {output}")]
    Command {
        /// The command line.
        command: String,
        /// The exit status, as text.
        status: String,
        /// The command's output, or its last lines.
        output: String,
    },
    /// A condition did not become true in time.
    #[error("waited {seconds:.1} s for {what}; last state: {last}")]
    Timeout {
        /// The condition.
        what: String,
        /// The waiting time.
        seconds: f64,
        /// The state at the last check.
        last: String,
    },
    /// A file or socket operation failed.
    #[error("{doing}: {source}")]
    Io {
        /// The action, as a verb in the infinitive.
        doing: String,
        /// The cause.
        source: std::io::Error,
    },
    /// The lab's supervisor refused a request, or is not running.
    #[error("the lab's supervisor at {run}: {message}")]
    Supervisor {
        /// The lab's run directory.
        run: PathBuf,
        /// The supervisor's response, or the reason why there is none.
        message: String,
    },
    /// An API server refused a request.
    #[error("{doing}: {source}")]
    Kube {
        /// The action, as a verb in the infinitive.
        doing: String,
        /// The cause.
        source: Box<kube::Error>,
    },
    /// Any other failure, such as an invalid plan or an unknown name. The message describes it.
    #[error("{0}")]
    Other(String),
}

impl Error {
    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source }
    }

    pub(crate) fn errno(doing: impl Into<String>) -> impl FnOnce(nix::errno::Errno) -> Self {
        let doing = doing.into();
        move |errno| Self::Io {
            doing,
            source: errno.into(),
        }
    }

    pub(crate) fn kube(doing: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Kube {
            doing,
            source: Box::new(source),
        }
    }
}
