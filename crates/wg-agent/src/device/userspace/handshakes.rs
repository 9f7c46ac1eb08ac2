//! Initiations: the one message that anybody may send and that costs much to look at. They have a thread and a short queue of
//! their own, so that a flood of them delays no data.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use clustermesh_core::key::PublicKey;

use super::{
    datapath::{BUFFER, Shared, View, current},
    drops::{Drop, Drops},
    inbound::{accept, refused},
    sockets::Place,
    tunnel::INITIATION,
};

/// Initiations that may wait; the oldest give way. At some 5,000 a second and core none waits longer than their sender does.
const QUEUE: usize = 1024;

#[derive(Default)]
pub(super) struct Handshakes {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Waiting>,
    stopped: bool,
}

struct Waiting {
    datagram: [u8; INITIATION],
    source: Place,
    lane: usize,
}

impl Handshakes {
    /// Takes an initiation that names our key.
    pub(super) fn add(&self, datagram: [u8; INITIATION], source: Place, lane: usize, drops: &Drops) {
        let mut state = self.state();
        if state.queue.len() >= QUEUE {
            state.queue.pop_front();
            drops.count(Drop::UnderLoad);
        }
        state.queue.push_back(Waiting { datagram, source, lane });
        drop(state);
        self.changed.notify_one();
    }

    pub(super) fn stop(&self) {
        self.state().stopped = true;
        self.changed.notify_all();
    }

    fn next(&self) -> Option<Waiting> {
        let mut state = self.state();
        loop {
            if state.stopped {
                return None;
            }
            if let Some(waiting) = state.queue.pop_front() {
                return Some(waiting);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Answers initiations until the device stops.
pub(super) fn answer(shared: &Shared) {
    let (mut plain, mut scratch) = ([0; INITIATION], vec![0; BUFFER]);
    while let Some(waiting) = shared.handshakes.next() {
        if let Err(reason) = one(shared, &waiting, &mut plain, &mut scratch) {
            shared.drops.count(reason);
        }
    }
}

fn one(shared: &Shared, waiting: &Waiting, plain: &mut [u8], scratch: &mut [u8]) -> Result<(), Drop> {
    let Waiting { datagram, source, lane } = waiting;
    let view = View::new(shared, *lane);
    let now = Instant::now();
    // While no peer is locked: anyone may send these.
    let claimed = current(&shared.identity)
        .local
        .claimed_peer(datagram)
        .map_err(refused)?;
    let peer = view.table.by_key.get(&PublicKey::new(claimed.to_bytes()));
    let peer = peer.ok_or(Drop::UnknownPeer)?;
    let mut state = peer.state();
    let result = accept(&view, &mut state, datagram, *source, now, plain, scratch);
    view.schedule(peer, &mut state, now);
    result.map(drop)
}
