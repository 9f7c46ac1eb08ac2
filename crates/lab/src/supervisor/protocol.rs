//! Requests of an owner to its supervisor: one JSON line each way over `control.sock` in the run directory.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Create a network namespace; `ns/<name>` in the run directory leads to it.
    AddNamespace { name: String },
    /// Release a network namespace. The kernel removes it when its last process has ended.
    DropNamespace { name: String },
    /// Start a program. Its output is appended to `log`.
    Start {
        name: String,
        argv: Vec<String>,
        env: BTreeMap<String, String>,
        log: PathBuf,
    },
    /// Kill what `Start` started, and wait until its processes and cgroup are gone.
    Kill { name: String },
    /// Send it a signal, by number.
    Signal { name: String, signal: i32 },
    /// Listen on a port of the host's 127.0.0.1 and splice every connection to `to`, opened inside `namespace`.
    Forward { namespace: String, to: SocketAddr },
    /// List the names of all running programs.
    Running,
    /// Go on when the owner ends.
    Keep,
    /// Take everything down. There is no answer: the connection closes at the end.
    Down,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Response {
    Done,
    Port(u16),
    Names(BTreeSet<String>),
    Failed(String),
}
