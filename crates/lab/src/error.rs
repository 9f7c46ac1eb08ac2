//! What can go wrong in the lab, in words that say where to look.

use std::path::PathBuf;

/// Result of everything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the lab itself (not of the software under test).
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something the machine lacks; the second part says how to get it.
    #[error("{what} is missing: {remedy}")]
    Missing {
        /// What is missing.
        what: String,
        /// What a person can do about it.
        remedy: String,
    },
    /// A command ended with a failure.
    #[error("`{command}` failed ({status}): {output}")]
    Command {
        /// The command line.
        command: String,
        /// Exit status in words.
        status: String,
        /// Last lines of what it printed.
        output: String,
    },
    /// A condition did not come about in time.
    #[error("waited {seconds:.1} s for {what}; last state: {last}")]
    Timeout {
        /// What was waited for.
        what: String,
        /// How long.
        seconds: f64,
        /// The last thing that was seen.
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
    /// The supervisor refused a request or is gone.
    #[error("the lab's supervisor at {run}: {message}")]
    Supervisor {
        /// The lab's run directory.
        run: PathBuf,
        /// What it said.
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
    /// The plan or a name in a call makes no sense.
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
