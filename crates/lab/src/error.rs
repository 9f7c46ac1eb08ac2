//! Errors of the lab. Each names the action that failed, and what a person can do about it.

use std::path::PathBuf;

/// Result of every function in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the lab itself (not of the software under test).
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something that the machine lacks; `remedy` = how to get it.
    #[error("{what} is missing: {remedy}")]
    Missing {
        /// What is missing.
        what: String,
        /// What a person can do about it.
        remedy: String,
    },
    /// A command exited with a failure.
    #[error("`{command}` failed ({status}): {output}")]
    Command {
        /// The command line.
        command: String,
        /// Exit status in words.
        status: String,
        /// Last lines of what it printed.
        output: String,
    },
    /// A condition did not become true in time.
    #[error("waited {seconds:.1} s for {what}; last state: {last}")]
    Timeout {
        /// What was waited for.
        what: String,
        /// How long it waited.
        seconds: f64,
        /// The state at the last check.
        last: String,
    },
    /// A file or socket operation failed.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// The cause.
        source: std::io::Error,
    },
    /// The lab's supervisor refused a request, or does not run any more.
    #[error("the lab's supervisor at {run}: {message}")]
    Supervisor {
        /// The lab's run directory.
        run: PathBuf,
        /// Its answer.
        message: String,
    },
    /// An API server refused a request.
    #[error("{doing}: {source}")]
    Kube {
        /// What was being done.
        doing: String,
        /// The cause.
        source: Box<kube::Error>,
    },
    /// The plan, or a name that a test passed to the lab, is invalid.
    #[error("{0}")]
    Plan(String),
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
