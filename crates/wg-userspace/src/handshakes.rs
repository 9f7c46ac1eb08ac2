//! Answers initiations on a separate thread with a short queue, so that a flood of initiations delays no data. Any host can send
//! initiations, and each needs expensive Diffie-Hellman operations.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::{
    datapath::{BUFFER, Shared, View, current},
    drops::{DropReason, Drops},
    inbound::{accept, drop_reason},
    key::PublicKey,
    sockets::Endpoint,
    tunnel::INITIATION,
};

/// Maximum length of the queue; beyond it the oldest initiation is dropped. One core answers about 5,000 a second, so the last in a full
/// queue is answered after 0.2 s. An initiator retries after 5 s.
const MAX_QUEUED: usize = 1024;

#[derive(Default)]
pub(crate) struct Handshakes {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    queue: VecDeque<QueuedInitiation>,
    stopped: bool,
}

struct QueuedInitiation {
    datagram: [u8; INITIATION],
    source: Endpoint,
    /// The worker whose socket received the initiation. The response is sent from the same socket.
    worker: usize,
}

impl Handshakes {
    /// Queues an initiation whose mac1 is valid.
    pub(crate) fn add(&self, datagram: [u8; INITIATION], source: Endpoint, worker: usize, drops: &Drops) {
        let mut state = self.state();
        if state.queue.len() >= MAX_QUEUED {
            state.queue.pop_front();
            drops.count(DropReason::UnderLoad);
        }
        state.queue.push_back(QueuedInitiation {
            datagram,
            source,
            worker,
        });
        drop(state);
        self.changed.notify_one();
    }

    pub(crate) fn stop(&self) {
        self.state().stopped = true;
        self.changed.notify_all();
    }

    fn next(&self) -> Option<QueuedInitiation> {
        let mut state = self.state();
        loop {
            if state.stopped {
                return None;
            }
            if let Some(queued) = state.queue.pop_front() {
                return Some(queued);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Answers initiations until the device stops.
pub(crate) fn run(shared: &Shared) {
    // Buffers that `accept` needs for every kind of datagram.
    let (mut plain, mut scratch) = ([0; INITIATION], vec![0; BUFFER]);
    while let Some(queued) = shared.handshakes.next() {
        if let Err(reason) = answer(shared, &queued, &mut plain, &mut scratch) {
            shared.drops.count(reason);
        }
    }
}

fn answer(shared: &Shared, queued: &QueuedInitiation, plain: &mut [u8], scratch: &mut [u8]) -> Result<(), DropReason> {
    let QueuedInitiation {
        datagram,
        source,
        worker,
    } = queued;
    let view = View::new(shared, *worker);
    let now = Instant::now();
    // No peer is locked during this Diffie-Hellman operation, because the sender is not authenticated yet.
    let claimed = current(&shared.identity)
        .local
        .claimed_peer(datagram)
        .map_err(drop_reason)?;
    let peer = view.table.by_key.get(&PublicKey::new(claimed.to_bytes()));
    let peer = peer.ok_or(DropReason::UnknownPeer)?;
    let mut state = peer.state();
    let result = accept(&view, &mut state, datagram, *source, now, plain, scratch);
    view.schedule(peer, &mut state, now);
    result.map(drop)
}
