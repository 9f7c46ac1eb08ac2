//! Reaps exited processes. The supervisor is pid 1, so it inherits every orphan of its pid namespace.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::wait::{WaitStatus, wait};
use nix::unistd::Pid;

/// Reaps children on a thread and records which have exited.
pub(super) struct Reaper {
    ended: Arc<Mutex<BTreeSet<Pid>>>,
    childless: Arc<AtomicBool>,
}

impl Reaper {
    pub(super) fn start() -> Self {
        let reaper = Self {
            ended: Arc::default(),
            childless: Arc::default(),
        };
        let (ended, childless) = (reaper.ended.clone(), reaper.childless.clone());
        std::thread::spawn(move || {
            loop {
                match wait() {
                    Ok(status @ (WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..))) => {
                        eprintln!("ended: {status:?}");
                        ended.lock().unwrap_or_else(PoisonError::into_inner).insert(pid);
                    }
                    Err(Errno::ECHILD) => {
                        childless.store(true, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(10));
                        continue;
                    }
                    _ => {}
                }
                childless.store(false, Ordering::SeqCst);
            }
        });
        reaper
    }

    /// Starts a child. The kernel may reuse a pid, so an earlier exit of the same pid is forgotten.
    pub(super) fn spawn(&self, command: &mut Command) -> std::io::Result<Pid> {
        // The lock is held over both steps. Otherwise the exit of the new child could be recorded before `remove`.
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let id = command.spawn()?.id();
        let pid = Pid::from_raw(i32::try_from(id).map_err(std::io::Error::other)?);
        ended.remove(&pid);
        self.childless.store(false, Ordering::SeqCst);
        Ok(pid)
    }

    /// Whether this child has exited.
    pub(super) fn has_exited(&self, pid: Pid) -> bool {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).contains(&pid)
    }

    /// Whether the last `wait` found no child, and [`Self::spawn`] has started none since.
    pub(super) fn is_childless(&self) -> bool {
        self.childless.load(Ordering::SeqCst)
    }
}
