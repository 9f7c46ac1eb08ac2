//! Defines the requests to a supervisor and its responses, each one line of JSON over `control.sock` in the run directory.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Create a network namespace, with a symbolic link to it at `ns/<name>` in the run directory.
    AddNamespace { name: String },
    /// Close a network namespace. The kernel removes it when its last process has exited.
    DropNamespace { name: String },
    /// Start a program. Its output is appended to `log`.
    Start {
        name: String,
        argv: Vec<String>,
        env: BTreeMap<String, String>,
        log: PathBuf,
    },
    /// Kill a program that `Start` started, wait until all its processes have exited, and remove its cgroup.
    Kill { name: String },
    /// Send a signal, by number, to a program that `Start` started.
    Signal { name: String, signal: i32 },
    /// Listen on a port of the host's 127.0.0.1 and forward every connection to `to` inside `namespace`.
    Forward { namespace: String, to: SocketAddr },
    /// List the names of all running programs.
    Running,
    /// Keep everything running when the lab's owner exits.
    Keep,
    /// Take everything down. There is no response: the connection closes when the supervisor exits.
    Down,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Response {
    Done,
    Port(u16),
    Names(BTreeSet<String>),
    Failed(String),
}
