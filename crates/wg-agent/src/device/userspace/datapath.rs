//! Defines the state that the threads of a device share, and runs the timer thread.
//!
//! A thread uses one immutable table of peers for each batch of packets.

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
    drops::{DropReason, Drops},
    handshakes::Handshakes,
    peers::{Identity, Peer, PeerState, PeerTable},
    sockets::{Endpoint, Sockets},
    tun::Tun,
    tunnel::Output,
};

/// Packets of a batch: after these a thread sees changes of peers, sockets and MTU.
pub(super) const BATCH: usize = 64;
/// The most packets for which a peer stays locked, while its other direction waits.
pub(super) const BURST: usize = 8;
/// The largest datagram, and room for what the protocol adds to the largest inner packet.
pub(super) const BUFFER: usize = 65_536 + 64;

/// The state that the threads share.
pub(super) struct Shared {
    pub(super) tun: Tun,
    pub(super) mtu: AtomicUsize,
    pub(super) table: RwLock<Arc<PeerTable>>,
    pub(super) sockets: RwLock<Arc<Sockets>>,
    pub(super) identity: RwLock<Arc<Identity>>,
    /// The desired peers, from which the table is built.
    pub(super) configured: RwLock<Arc<Peers>>,
    pub(super) fwmark: AtomicU32,
    pub(super) clock: Clock,
    pub(super) handshakes: Handshakes,
    pub(super) drops: Drops,
    /// Another program deleted the interface.
    pub(super) gone: AtomicBool,
    pub(super) stopping: AtomicBool,
    /// An eventfd that is readable once `stopping` is set, to wake every thread; never read.
    pub(super) stop: OwnedFd,
    /// One eventfd for each worker, readable after the sockets were replaced.
    pub(super) rebound: Vec<OwnedFd>,
}

/// The current value; the lock is not held after the call.
pub(super) fn current<T>(slot: &RwLock<Arc<T>>) -> Arc<T> {
    Arc::clone(&slot.read().unwrap_or_else(PoisonError::into_inner))
}

/// Replaces the value; returns the old one.
pub(super) fn replace<T>(slot: &RwLock<Arc<T>>, new: T) -> Arc<T> {
    std::mem::replace(&mut slot.write().unwrap_or_else(PoisonError::into_inner), Arc::new(new))
}

/// Sends one tunnel's output to an endpoint, while its peer is locked.
pub(super) struct Wire<'a> {
    view: &'a View<'a>,
    pub(super) endpoint: Option<Endpoint>,
    pub(super) sent: u64,
}

impl Output for Wire<'_> {
    fn network(&mut self, datagram: &[u8]) {
        let View { shared, sockets, .. } = self.view;
        match self.endpoint {
            None => shared.drops.count(DropReason::NoEndpoint),
            Some(endpoint) if sockets.send(self.view.worker, datagram, endpoint).is_ok() => {
                self.sent += datagram.len() as u64;
            }
            Some(_) => shared.drops.count(DropReason::Network),
        }
    }
}

/// The values that one batch uses: later changes apply from the next batch on.
pub(super) struct View<'a> {
    pub(super) shared: &'a Shared,
    /// The number of the worker.
    pub(super) worker: usize,
    pub(super) sockets: Arc<Sockets>,
    pub(super) table: Arc<PeerTable>,
}

impl<'a> View<'a> {
    pub(super) fn new(shared: &'a Shared, worker: usize) -> Self {
        Self {
            shared,
            worker,
            sockets: current(&shared.sockets),
            table: current(&shared.table),
        }
    }

    pub(super) fn wire(&self, endpoint: Option<Endpoint>) -> Wire<'_> {
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

/// Sends retries, keepalives and held responses when they are due, until the device stops.
pub(super) fn run_clock(shared: &Shared) {
    let mut scratch = vec![0; BUFFER];
    while let Some((peer, at)) = shared.clock.next() {
        let (view, now) = (View::new(shared, 0), Instant::now());
        let mut state = peer.state();
        if !state.tunnel.expects_tick(at) {
            continue;
        }
        if state.endpoint.is_some() {
            if state.tunnel.has_unanswered_initiation(now)
                && let Some(endpoint) = &mut state.endpoint
            {
                // Perhaps our source address has no route to the peer now. So the kernel chooses another one.
                endpoint.local = None;
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

/// Waits until some of the files are readable, and returns which; `None` when the device stops.
pub(super) fn wait<const N: usize>(shared: &Shared, sources: [Option<BorrowedFd<'_>>; N]) -> Option<[bool; N]> {
    let (stop, mut ready) = (shared.stop.as_fd(), [false; N]);
    let all = sources.into_iter().chain([Some(stop)]);
    let mut files: Vec<PollFd<'_>> = all
        .map(|source| PollFd::from_borrowed_fd(source.unwrap_or(stop), PollFlags::IN))
        .collect();
    // On an error (EINTR, ENOMEM) the caller finds nothing to read and waits again.
    let _ = poll(&mut files, None);
    // Any event counts: a socket's pending error is cleared by a read.
    for (ready, file) in ready.iter_mut().zip(&files) {
        *ready = !file.revents().is_empty();
    }
    (!shared.stopping.load(Ordering::Acquire)).then_some(ready)
}

/// Detects packets that arrive one at a time, as in request and response. The first packet of such a batch is forwarded at once, before the
/// thread looks for a second one; otherwise the packets of a batch are forwarded together.
#[derive(Debug, Default)]
pub(super) struct Pace {
    single: bool,
}

impl Pace {
    /// Whether to forward the first packet of a batch at once.
    pub(super) const fn is_single(&self) -> bool {
        self.single
    }

    /// Records the size of the last batch.
    pub(super) const fn record(&mut self, packets: usize) {
        self.single = packets <= 1;
    }
}
