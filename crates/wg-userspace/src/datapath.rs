//! Defines the state that the threads of a device share, and runs the timer thread.
//!
//! A thread uses the same immutable table of peers for a whole batch of packets, and takes the current table for the next batch.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    time::Instant,
};

use rustix::event::{PollFd, PollFlags, poll};

use crate::{
    drops::{DropReason, Drops},
    handshakes::Handshakes,
    peer::Peers,
    peers::{Identity, Peer, PeerState, PeerTable},
    sockets::{Endpoint, Sockets},
    timer_queue::TimerQueue,
    tun::Tun,
    tunnel::Output,
};

/// Maximum number of reads in a batch. A read returns one packet of the interface (with offload it may be a large one, to be split), or
/// one run of datagrams of a socket (see [`crate::sockets`]). The maximum applies to each socket. After each batch a thread applies
/// changes of peers, sockets and MTU.
pub(crate) const BATCH: usize = 64;
/// Maximum number of packets that a thread processes before it unlocks the peer. The peer's other direction waits meanwhile.
pub(crate) const BURST: usize = 8;
/// Room for the largest datagram, and for the largest inner packet with the bytes that the protocol adds.
pub(crate) const BUFFER: usize = 65_536 + 64;

/// The state that the threads share.
pub(crate) struct Shared {
    pub(crate) tun: Tun,
    pub(crate) mtu: AtomicUsize,
    pub(crate) table: RwLock<Arc<PeerTable>>,
    pub(crate) sockets: RwLock<Arc<Sockets>>,
    pub(crate) identity: RwLock<Arc<Identity>>,
    /// The configured peers, from which the table is built.
    pub(crate) configured: RwLock<Arc<Peers>>,
    pub(crate) fwmark: AtomicU32,
    pub(crate) timers: TimerQueue,
    pub(crate) handshakes: Handshakes,
    pub(crate) drops: Drops,
    /// Whether another program deleted the interface.
    pub(crate) gone: AtomicBool,
    pub(crate) stopping: AtomicBool,
    /// An eventfd that becomes readable when `stopping` is set, and so wakes every thread that polls files. It is never read.
    pub(crate) stop: OwnedFd,
    /// One eventfd for each worker, which becomes readable when the sockets are replaced.
    pub(crate) rebound: Vec<OwnedFd>,
}

/// Returns the current value. The lock is released before the call returns.
pub(crate) fn current<T>(slot: &RwLock<Arc<T>>) -> Arc<T> {
    Arc::clone(&slot.read().unwrap_or_else(PoisonError::into_inner))
}

/// Replaces the value and returns the old one.
pub(crate) fn replace<T>(slot: &RwLock<Arc<T>>, new: T) -> Arc<T> {
    std::mem::replace(&mut slot.write().unwrap_or_else(PoisonError::into_inner), Arc::new(new))
}

/// Sends the datagrams of one tunnel to an endpoint, while the tunnel's peer is locked.
pub(crate) struct Wire<'a> {
    view: &'a View<'a>,
    pub(crate) endpoint: Option<Endpoint>,
    /// Bytes sent.
    pub(crate) sent: u64,
}

impl Output for Wire<'_> {
    fn send_datagram(&mut self, datagram: &[u8]) {
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

/// The values that one batch uses. Later changes take effect in the next batch.
pub(crate) struct View<'a> {
    pub(crate) shared: &'a Shared,
    /// The index of the worker whose sockets send datagrams. A worker is a pair of threads, one for each direction.
    pub(crate) worker: usize,
    pub(crate) sockets: Arc<Sockets>,
    pub(crate) table: Arc<PeerTable>,
}

impl<'a> View<'a> {
    pub(crate) fn new(shared: &'a Shared, worker: usize) -> Self {
        Self {
            shared,
            worker,
            sockets: current(&shared.sockets),
            table: current(&shared.table),
        }
    }

    pub(crate) fn wire(&self, endpoint: Option<Endpoint>) -> Wire<'_> {
        Wire {
            view: self,
            endpoint,
            sent: 0,
        }
    }

    /// Queues the next tick of the peer's tunnel, unless an early enough one is queued. A tunnel without an endpoint needs no tick.
    pub(crate) fn schedule(&self, peer: &Arc<Peer>, state: &mut PeerState, now: Instant) {
        if state.endpoint.is_some()
            && let Some(at) = state.tunnel.reschedule(now)
        {
            self.shared.timers.add(at, peer);
        }
    }
}

/// Runs the timers of all tunnels (handshake retries, keepalives, delayed handshake responses) until the device stops.
pub(crate) fn run_timers(shared: &Shared) {
    let mut scratch = vec![0; BUFFER];
    while let Some((peer, at)) = shared.timers.next() {
        let (view, now) = (View::new(shared, 0), Instant::now());
        let mut state = peer.state();
        if !state.tunnel.expects_tick(at) {
            continue;
        }
        if state.endpoint.is_some() {
            if state.tunnel.is_initiation_retry_due(now)
                && let Some(endpoint) = &mut state.endpoint
            {
                // The local address may have lost its route to the peer, so the kernel chooses a local address again.
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

/// Waits until some of the files in `sources` are readable, and returns which ones; `None` = the device stops. An absent source
/// (`None`) is never readable.
pub(crate) fn wait<const N: usize>(shared: &Shared, sources: [Option<BorrowedFd<'_>>; N]) -> Option<[bool; N]> {
    let (stop, mut ready) = (shared.stop.as_fd(), [false; N]);
    // `stop` takes the place of absent sources: it is readable only when the device stops.
    let all = sources.into_iter().chain([Some(stop)]);
    let mut files: Vec<PollFd<'_>> = all
        .map(|source| PollFd::from_borrowed_fd(source.unwrap_or(stop), PollFlags::IN))
        .collect();
    // On an error (EINTR, ENOMEM) the caller finds nothing to read and waits again.
    let _ = poll(&mut files, None);
    // Any event counts as readable, because a read clears a pending error of a socket.
    for (ready, file) in ready.iter_mut().zip(&files) {
        *ready = !file.revents().is_empty();
    }
    (!shared.stopping.load(Ordering::Acquire)).then_some(ready)
}

/// Detects packets that arrive one at a time, for example alternating requests and responses. Then the first packet of a batch is forwarded
/// before the thread looks for a second one; otherwise the packets of a batch are forwarded together.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    single: bool,
}

impl Pace {
    /// Whether to forward the first packet of a batch at once.
    pub(crate) const fn is_single(&self) -> bool {
        self.single
    }

    /// Records the size of the last batch.
    pub(crate) const fn record(&mut self, packets: usize) {
        self.single = packets <= 1;
    }
}
