//! What an owner may ask of the supervisor: one JSON line there, one back, over `control.sock` in the run directory.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Make a network namespace; `ns/<name>` in the run directory leads to it.
    AddNamespace { name: String },
    /// Let go of one. The kernel removes it when its last process has ended.
    DropNamespace { name: String },
    /// Start a program. Output is appended to `log`.
    Start {
        name: String,
        argv: Vec<String>,
        env: BTreeMap<String, String>,
        log: PathBuf,
    },
    /// Kill what `Start` started and wait until it and its cgroup are gone.
    Kill { name: String },
    /// Send it a signal by number.
    Signal { name: String, signal: i32 },
    /// Listen on a port of the host's 127.0.0.1 and splice every connection to `to`, dialled inside `namespace`.
    Forward { namespace: String, to: SocketAddr },
    /// The names of what runs.
    Running,
    /// Stay when the owner goes.
    Keep,
    /// Take everything down. There is no answer: the connection closes when it is done.
    Down,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Response {
    Done,
    Port(u16),
    Names(BTreeSet<String>),
    Failed(String),
}
