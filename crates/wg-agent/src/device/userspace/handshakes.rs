//! Initiations: the one message that anybody may send and that costs much to look at. They have a thread and a short queue of
//! their own, so that a flood of them delays no data.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use boringtun::noise::{Packet, Tunn, handshake::parse_handshake_anon};
use clustermesh_core::key::PublicKey;

use super::{
    datapath::{BUFFER, Shared, View, current},
    drops::{Drop, Drops},
    inbound::accept,
};

/// Initiations that may wait; the oldest give way. At some 5,000 a second and core none waits longer than their sender does.
const QUEUE: usize = 1024;
/// Of an initiation (whitepaper §5.4.2).
const LENGTH: usize = 148;

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
    datagram: [u8; LENGTH],
    source: SocketAddr,
    lane: usize,
}

impl Handshakes {
    /// Takes an initiation that names our key.
    pub(super) fn add(&self, datagram: &[u8], source: SocketAddr, lane: usize, drops: &Drops) {
        let Ok(datagram) = datagram.try_into() else {
            return;
        };
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
    let mut packet = vec![0; LENGTH];
    let mut scratch = vec![0; BUFFER];
    while let Some(waiting) = shared.handshakes.next() {
        if let Err(reason) = one(shared, &waiting, &mut packet, &mut scratch) {
            shared.drops.count(reason);
        }
    }
}

fn one(shared: &Shared, waiting: &Waiting, packet: &mut [u8], scratch: &mut [u8]) -> Result<(), Drop> {
    let Waiting { datagram, source, lane } = waiting;
    let view = View::new(shared, *lane);
    let identity = current(&shared.identity);
    let now = Instant::now();
    let Ok(Packet::HandshakeInit(initiation)) = Tunn::parse_incoming_packet(datagram) else {
        return Err(Drop::Invalid);
    };
    let half = parse_handshake_anon(&identity.private, &identity.public, &initiation).map_err(|_| Drop::Invalid)?;
    let peer = view.table.by_key.get(&PublicKey::new(half.peer_static_public));
    let peer = peer.ok_or(Drop::UnknownPeer)?;
    let mut state = peer.state();
    let result = accept(&view, &mut state, datagram, *source, now, packet, scratch);
    view.schedule(peer, &mut state, now);
    result.map(drop)
}
