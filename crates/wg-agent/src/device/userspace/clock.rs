//! When each peer is to be ticked. Peers with nothing to wait for are not in here, so thousands of idle ones cost nothing.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use super::peers::Peer;

/// The longest wait, for the housekeeping that goes along.
const HOUSEKEEPING: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Clock {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: BinaryHeap<Reverse<Entry>>,
    stopped: bool,
}

struct Entry {
    at: Instant,
    peer: Weak<Peer>,
}

/// What the clock says.
pub(super) enum Tick {
    /// This peer's time has come.
    Peer(Arc<Peer>, Instant),
    /// Nothing for a while.
    Idle,
    /// The device is closing.
    Stop,
}

impl Clock {
    pub(super) fn add(&self, at: Instant, peer: &Arc<Peer>) {
        let mut state = self.state();
        let earliest = state.queue.peek().is_none_or(|Reverse(first)| at < first.at);
        state.queue.push(Reverse(Entry {
            at,
            peer: Arc::downgrade(peer),
        }));
        if earliest {
            self.changed.notify_one();
        }
    }

    pub(super) fn stop(&self) {
        self.state().stopped = true;
        self.changed.notify_one();
    }

    /// Waits for the next tick. An entry that a later one has replaced is returned too; the tunnel knows.
    pub(super) fn next(&self) -> Tick {
        let until = Instant::now() + HOUSEKEEPING;
        let mut state = self.state();
        loop {
            if state.stopped {
                return Tick::Stop;
            }
            let now = Instant::now();
            let due = match state.queue.peek() {
                Some(Reverse(first)) if first.at <= now => {
                    if let Some(Reverse(entry)) = state.queue.pop()
                        && let Some(peer) = entry.peer.upgrade()
                    {
                        return Tick::Peer(peer, entry.at);
                    }
                    continue;
                }
                Some(Reverse(first)) => first.at.min(until),
                None => until,
            };
            let Some(wait) = due.checked_duration_since(now).filter(|wait| !wait.is_zero()) else {
                return Tick::Idle;
            };
            state = self
                .changed
                .wait_timeout(state, wait)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}
