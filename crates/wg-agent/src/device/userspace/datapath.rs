//! What the threads that carry packets share, and the clock's thread. Who the peers are is decided elsewhere; these only look them
//! up, one immutable table for each batch.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    time::Instant,
};

use clustermesh_agent_core::device::Peers;
use rustix::event::{PollFd, PollFlags, poll};

use super::{
    clock::Clock,
    drops::{Drop, Drops},
    handshakes::Handshakes,
    peers::{Identity, Peer, PeerState, Table},
    sockets::{Place, Sockets},
    tun::Tun,
    tunnel::Output,
};

/// Packets taken from one side before the other threads' changes are looked at again.
pub(super) const BATCH: usize = 64;
/// Packets for which a peer stays locked: its other direction waits for so many at most.
pub(super) const BURST: usize = 8;
/// The largest datagram, and room for what the protocol adds to the largest inner packet.
pub(super) const BUFFER: usize = 65_536 + 64;

/// What the threads share.
pub(super) struct Shared {
    pub(super) tun: Tun,
    pub(super) mtu: AtomicUsize,
    pub(super) table: RwLock<Arc<Table>>,
    pub(super) sockets: RwLock<Arc<Sockets>>,
    pub(super) identity: RwLock<Arc<Identity>>,
    /// The peers as the agent wants them; the table is made from this.
    pub(super) configured: RwLock<Arc<Peers>>,
    pub(super) fwmark: AtomicU32,
    pub(super) clock: Clock,
    pub(super) handshakes: Handshakes,
    pub(super) drops: Drops,
    /// The interface was deleted under us.
    pub(super) gone: AtomicBool,
    pub(super) stopping: AtomicBool,
    /// Readable when `stopping` is set; never read.
    pub(super) stop: OwnedFd,
    /// Readable when the sockets were replaced: one for each worker.
    pub(super) rebound: Vec<OwnedFd>,
}

/// The present picture, without holding the lock.
pub(super) fn current<T>(slot: &RwLock<Arc<T>>) -> Arc<T> {
    Arc::clone(&slot.read().unwrap_or_else(PoisonError::into_inner))
}

/// Replaces the picture; returns the old one.
pub(super) fn replace<T>(slot: &RwLock<Arc<T>>, new: T) -> Arc<T> {
    std::mem::replace(&mut slot.write().unwrap_or_else(PoisonError::into_inner), Arc::new(new))
}

/// Carries one tunnel's output while its peer is locked.
pub(super) struct Wire<'a> {
    view: &'a View<'a>,
    pub(super) endpoint: Option<Place>,
    pub(super) sent: u64,
}

impl Output for Wire<'_> {
    fn network(&mut self, datagram: &[u8]) {
        let View { shared, sockets, .. } = self.view;
        match self.endpoint {
            None => shared.drops.count(Drop::NoEndpoint),
            Some(endpoint) if sockets.send(self.view.lane, datagram, endpoint).is_ok() => {
                self.sent += datagram.len() as u64;
            }
            Some(_) => shared.drops.count(Drop::Network),
        }
    }
}

/// The pictures of one batch.
pub(super) struct View<'a> {
    pub(super) shared: &'a Shared,
    /// Which worker this is.
    pub(super) lane: usize,
    pub(super) sockets: Arc<Sockets>,
    pub(super) table: Arc<Table>,
}

impl<'a> View<'a> {
    pub(super) fn new(shared: &'a Shared, lane: usize) -> Self {
        Self {
            shared,
            lane,
            sockets: current(&shared.sockets),
            table: current(&shared.table),
        }
    }

    pub(super) fn wire(&self, endpoint: Option<Place>) -> Wire<'_> {
        Wire {
            view: self,
            endpoint,
            sent: 0,
        }
    }

    pub(super) fn schedule(&self, peer: &Arc<Peer>, state: &mut PeerState, now: Instant) {
        if state.endpoint.is_some()
            && let Some(at) = state.tunnel.reschedule(now)
        {
            self.shared.clock.add(at, peer);
        }
    }
}

/// Retries, keepalives and held responses, until the device stops.
pub(super) fn clockwork(shared: &Shared) {
    let mut scratch = vec![0; BUFFER];
    while let Some((peer, at)) = shared.clock.next() {
        let (view, now) = (View::new(shared, 0), Instant::now());
        let mut state = peer.state();
        if !state.tunnel.expects_tick(at) {
            continue;
        }
        if state.endpoint.is_some() {
            if state.tunnel.unanswered(now)
                && let Some(endpoint) = &mut state.endpoint
            {
                // Perhaps because of the address that it came from: the kernel chooses one that has a way there now.
                endpoint.own = None;
            }
            let mut wire = view.wire(state.endpoint);
            state.tunnel.tick(now, &mut scratch, &mut wire);
            state.tx_bytes += wire.sent;
            view.schedule(&peer, &mut state, now);
        } else {
            state.tunnel.skip_tick();
        }
    }
}

/// Waits until some of the files are readable and says which; `None` when the device stops.
pub(super) fn wait<const N: usize>(shared: &Shared, sources: [Option<BorrowedFd<'_>>; N]) -> Option<[bool; N]> {
    let (stop, mut ready) = (shared.stop.as_fd(), [false; N]);
    let all = sources.into_iter().chain([Some(stop)]);
    let mut files: Vec<PollFd<'_>> = all
        .map(|source| PollFd::from_borrowed_fd(source.unwrap_or(stop), PollFlags::IN))
        .collect();
    // Interrupted, or no memory for the moment: the caller finds nothing to read and comes back.
    let _ = poll(&mut files, None);
    // An error of a socket too: reading it clears it.
    for (ready, file) in ready.iter_mut().zip(&files) {
        *ready = !file.revents().is_empty();
    }
    (!shared.stopping.load(Ordering::Acquire)).then_some(ready)
}

/// Whether packets come one at a time, as questions and answers do. Then each goes on before a look for the next one is taken;
/// where several come at once, they go on together.
#[derive(Debug, Default)]
pub(super) struct Pace {
    single: bool,
}

impl Pace {
    /// Whether the first of a batch should go on at once.
    pub(super) const fn hurry(&self) -> bool {
        self.single
    }

    /// What the last batch held.
    pub(super) const fn saw(&mut self, packets: usize) {
        self.single = packets <= 1;
    }
}
