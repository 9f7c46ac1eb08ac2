//! Keeps the times of the peers' next ticks in a heap. A peer without a pending timer gets no entry, so thousands of idle peers cost
//! nothing.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    time::Instant,
};

use crate::peers::Peer;

#[derive(Default)]
pub(crate) struct TimerQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    queue: BinaryHeap<Reverse<Entry>>,
    stopped: bool,
}

struct Entry {
    at: Instant,
    peer: Weak<Peer>,
}

impl TimerQueue {
    pub(crate) fn add(&self, at: Instant, peer: &Arc<Peer>) {
        let mut state = self.state();
        let is_earliest = state.queue.peek().is_none_or(|Reverse(first)| at < first.at);
        state.queue.push(Reverse(Entry {
            at,
            peer: Arc::downgrade(peer),
        }));
        if is_earliest {
            self.changed.notify_one();
        }
    }

    pub(crate) fn stop(&self) {
        self.state().stopped = true;
        self.changed.notify_one();
    }

    /// Waits for the next tick; `None` = the device stops. If an earlier tick was added for a peer, its later tick stays in the heap and is
    /// also returned, so the caller checks with `Tunnel::expects_tick`.
    pub(crate) fn next(&self) -> Option<(Arc<Peer>, Instant)> {
        let mut state = self.state();
        loop {
            if state.stopped {
                return None;
            }
            let now = Instant::now();
            let Some(Reverse(first)) = state.queue.peek() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let wait = first.at.saturating_duration_since(now);
            if wait.is_zero() {
                if let Some(Reverse(entry)) = state.queue.pop()
                    && let Some(peer) = entry.peer.upgrade()
                {
                    return Some((peer, entry.at));
                }
                continue;
            }
            state = self
                .changed
                .wait_timeout(state, wait)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
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
