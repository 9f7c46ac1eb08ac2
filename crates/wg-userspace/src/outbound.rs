//! Forwards packets from interface to network: reads them, splits large ones (TSO, USO), encrypts them and sends them in runs.
//!
//! A [`Run`] is sent at the latest when the interface has no more packets or the batch ends; it never waits for more packets.

use std::{
    fs::File,
    io::IoSlice,
    os::fd::AsFd,
    sync::{Arc, MutexGuard, atomic::Ordering},
    time::{Duration, Instant},
};

use rustix::io::Errno;

use crate::{
    datapath::{BATCH, BUFFER, BURST, Pace, Shared, View, wait},
    drops::DropReason,
    inner_packet::destination,
    offload::{HEADER, Header, Segments, complete_checksum},
    peers::{Peer, PeerState},
    sockets::{Endpoint, MAX_RUN, MAX_RUN_BYTES},
    tun,
    tunnel::OVERHEAD,
    unreachable::icmp_unreachable,
};

/// Maximum number of ICMP errors that one worker sends per second.
const MAX_ERRORS_PER_SECOND: u32 = 100;

/// Forwards packets until the device stops.
pub(crate) fn forward(shared: &Shared, worker: usize) {
    let mut buffer = vec![0; HEADER + BUFFER];
    let mut buffers = Buffers {
        segment: vec![0; BUFFER],
        scratch: vec![0; BUFFER],
        run: vec![0; MAX_RUN_BYTES + BUFFER],
    };
    let Some(queue) = shared.tun.queues.get(worker) else {
        return;
    };
    let mut errors = UnreachableErrors {
        queue,
        left: MAX_ERRORS_PER_SECOND,
        since: Instant::now(),
    };
    let mut pace = Pace::default();
    while wait(shared, [Some(queue.as_fd())]).is_some() {
        let view = View::new(shared, worker);
        let mut out = Outbound::new(&view, &mut buffers, &mut errors);
        let mut packets = 0;
        for _ in 0..BATCH {
            match tun::read(queue, &mut buffer) {
                Ok(length) => {
                    out.encrypt(&mut buffer, length);
                    packets += 1;
                    // If packets arrive one at a time, this one does not wait for the next read.
                    if pace.is_single() && packets == 1 {
                        out.flush();
                    }
                }
                // The interface was deleted. Its file stays readable for ever, so this thread has to end.
                Err(error) if error.raw_os_error() == Some(Errno::BADFD.raw_os_error()) => {
                    shared.gone.store(true, Ordering::Release);
                    return;
                }
                // The interface has no more packets, or the read failed.
                Err(_) => break,
            }
        }
        out.flush();
        pace.record(packets);
    }
}

/// The buffers of a worker's thread.
struct Buffers {
    /// One segment of a large packet.
    segment: Vec<u8>,
    /// A datagram that is sent alone, such as a handshake initiation.
    scratch: Vec<u8>,
    /// The datagrams of a [`Run`].
    run: Vec<u8>,
}

/// Answers packets without peer or endpoint with ICMP unreachable errors, as the kernel's WireGuard does, up to a rate limit.
struct UnreachableErrors<'a> {
    queue: &'a File,
    left: u32,
    since: Instant,
}

impl UnreachableErrors<'_> {
    fn send(&mut self, packet: &[u8], now: Instant) {
        if now.duration_since(self.since) >= Duration::from_secs(1) {
            (self.left, self.since) = (MAX_ERRORS_PER_SECOND, now);
        }
        if self.left > 0
            && let Some(error) = icmp_unreachable(packet)
        {
            self.left -= 1;
            // If the interface's queue is full, the error is not sent.
            let _ = tun::write(
                self.queue,
                &[IoSlice::new(&Header::default().encode()), IoSlice::new(&error)],
            );
        }
    }
}

/// One batch of packets, with the run that is being filled.
struct Outbound<'a, 'e> {
    view: &'a View<'a>,
    errors: &'a mut UnreachableErrors<'e>,
    now: Instant,
    mtu: usize,
    segment: &'a mut [u8],
    scratch: &'a mut [u8],
    run: Run<'a>,
}

/// Encrypted datagrams of one size to one endpoint of one peer, not sent yet.
struct Run<'a> {
    view: &'a View<'a>,
    bytes: &'a mut [u8],
    /// Bytes used in `bytes`.
    used: usize,
    /// Number of datagrams.
    count: usize,
    /// Length of a datagram; the last one may be shorter.
    datagram_length: usize,
    /// The last datagram is shorter than the others, so none can follow (`UDP_SEGMENT`).
    is_complete: bool,
    endpoint: Option<Endpoint>,
    peer: Option<LockedPeer<'a>>,
}

/// The peer of a run, with its `order` lock. The lock keeps other workers from sending runs to the peer, so that datagrams
/// leave in the order of their counters.
///
/// Lock order: `order` before `state`. A worker that holds `order` waits for `state`, so the reverse order could deadlock.
struct LockedPeer<'a> {
    peer: &'a Arc<Peer>,
    _order: MutexGuard<'a, ()>,
}

impl<'a, 'e> Outbound<'a, 'e> {
    fn new(view: &'a View<'a>, buffers: &'a mut Buffers, errors: &'a mut UnreachableErrors<'e>) -> Self {
        let Buffers { segment, scratch, run } = buffers;
        Self {
            view,
            errors,
            now: Instant::now(),
            mtu: view.shared.mtu.load(Ordering::Relaxed),
            segment,
            scratch,
            run: Run {
                view,
                bytes: run,
                used: 0,
                count: 0,
                datagram_length: 0,
                is_complete: false,
                endpoint: None,
                peer: None,
            },
        }
    }

    /// Encrypts a packet that was read from the interface. `length` includes the virtio-net header before the packet.
    fn encrypt(&mut self, buffer: &mut [u8], length: usize) {
        let drops = &self.view.shared.drops;
        let Some((header, packet)) = buffer.split_first_chunk_mut::<HEADER>() else {
            return;
        };
        let header = Header::decode(header);
        let length = length.saturating_sub(HEADER);
        let view = self.view;
        let Some(peer) = destination(&packet[..length]).and_then(|to| view.table.allowed_ips.get(to)) else {
            drops.count(DropReason::NoPeer);
            self.errors.send(&packet[..length], self.now);
            return;
        };
        if !header.is_large() {
            if complete_checksum(&header, &mut packet[..length]).is_err() {
                drops.count(DropReason::Interface);
                return;
            }
            let mut state = self.lock(peer);
            self.seal(&mut state, packet, length);
            view.schedule(peer, &mut state, self.now);
            return;
        }
        let Ok(mut segments) = Segments::new(&header, &packet[..length]) else {
            drops.count(DropReason::Interface);
            return;
        };
        let segment = std::mem::take(&mut self.segment);
        while segments.upcoming().is_some() {
            let mut state = self.lock(peer);
            for _ in 0..BURST {
                let Some(length) = segments.upcoming() else { break };
                segments.next(&mut segment[..length]);
                self.seal(&mut state, segment, length);
            }
            view.schedule(peer, &mut state, self.now);
        }
        self.segment = segment;
    }

    /// Locks the peer, and makes room for a burst in its run.
    fn lock(&mut self, peer: &'a Arc<Peer>) -> MutexGuard<'a, PeerState> {
        self.run.lock_peer(peer);
        peer.state()
    }

    /// Encrypts the packet in the first `length` bytes of `packet`, whose buffer has room for padding. Stages it if there is no session.
    fn seal(&mut self, state: &mut PeerState, packet: &mut [u8], length: usize) {
        let Some(endpoint) = state.endpoint else {
            self.view.shared.drops.count(DropReason::NoEndpoint);
            self.errors.send(&packet[..length], self.now);
            return;
        };
        let padded = padded(length, self.mtu);
        packet[length..padded].fill(0);
        let packet = &packet[..padded];
        let datagram = self.run.reserve(endpoint, padded + OVERHEAD);
        if let Some(sealed) = state.tunnel.seal(packet, self.now, datagram) {
            state.tx_bytes += sealed as u64;
            self.run.push(sealed);
        } else {
            let mut wire = self.view.wire(Some(endpoint));
            state.tunnel.send(packet, self.now, self.scratch, &mut wire);
            state.tx_bytes += wire.sent;
        }
    }

    fn flush(&mut self) {
        self.run.flush();
    }
}

impl<'a> Run<'a> {
    /// Starts or continues a run of that peer, with room for a burst. The caller must not hold the peer's `state` lock.
    fn lock_peer(&mut self, peer: &'a Arc<Peer>) {
        let same = self.peer.as_ref().is_some_and(|locked| Arc::ptr_eq(locked.peer, peer));
        if !same {
            self.flush();
            self.peer = Some(LockedPeer {
                peer,
                _order: peer.order(),
            });
        } else if self.count + BURST > MAX_RUN || self.used + BURST * self.datagram_length > MAX_RUN_BYTES {
            self.send();
        }
    }

    /// Returns the buffer for the next datagram of `length` bytes. If the datagram cannot be part of the run, the run is sent first.
    fn reserve(&mut self, endpoint: Endpoint, length: usize) -> &mut [u8] {
        let follows = self.endpoint == Some(endpoint) && !self.is_complete && length <= self.datagram_length;
        if self.count > 0 && (!follows || self.count == MAX_RUN || self.used + length > MAX_RUN_BYTES) {
            self.send();
        }
        self.endpoint = Some(endpoint);
        &mut self.bytes[self.used..]
    }

    /// Appends the datagram that was written to the reserved buffer.
    fn push(&mut self, length: usize) {
        if self.count == 0 {
            self.datagram_length = length;
        }
        self.is_complete = length < self.datagram_length;
        self.used += length;
        self.count += 1;
    }

    /// Sends the datagrams; the peer stays locked.
    fn send(&mut self) {
        if let Some(endpoint) = self.endpoint.filter(|_| self.count > 0) {
            let lost = self.view.sockets.send_run(
                self.view.worker,
                &self.bytes[..self.used],
                self.datagram_length,
                endpoint,
            );
            self.view.shared.drops.count_many(DropReason::Network, lost);
        }
        (self.used, self.count, self.datagram_length, self.is_complete) = (0, 0, 0, false);
        self.endpoint = None;
    }

    /// Sends the datagrams and unlocks the peer.
    fn flush(&mut self) {
        self.send();
        self.peer = None;
    }
}

/// The length after padding to a multiple of 16, but not beyond the MTU; a packet above the MTU is not padded. Padding hides the exact
/// length (whitepaper §5.4.6).
fn padded(length: usize, mtu: usize) -> usize {
    length.next_multiple_of(16).min(mtu).max(length)
}
