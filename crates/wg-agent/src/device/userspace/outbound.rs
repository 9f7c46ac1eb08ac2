//! Interface to network: packets are read, cut where the kernel left that to us, encrypted and sent in runs. Nothing waits for a
//! run to fill: what is there is sent.

use std::{
    fs::File,
    io::IoSlice,
    os::fd::AsFd,
    sync::{Arc, MutexGuard, atomic::Ordering},
    time::{Duration, Instant},
};

use clustermesh_agent_core::{
    offload::{HEADER, Header, Segments, complete},
    unreachable::unreachable,
};
use rustix::io::Errno;

use super::{
    datapath::{BATCH, BUFFER, BURST, Pace, Shared, View, wait},
    drops::Drop,
    inner::destination,
    peers::{Peer, PeerState},
    sockets::{Place, RUN, RUN_BYTES},
    tun,
    tunnel::OVERHEAD,
};

/// Errors that one worker sends a second: a sender that does not stop is told often enough.
const ERRORS: u32 = 100;

/// Carries packets until the device stops.
pub(super) fn outbound(shared: &Shared, lane: usize) {
    let mut buffer = vec![0; HEADER + BUFFER];
    let mut space = Space {
        part: vec![0; BUFFER],
        scratch: vec![0; BUFFER],
        run: vec![0; RUN_BYTES + BUFFER],
    };
    let Some(queue) = shared.tun.queues.get(lane) else {
        return;
    };
    let mut errors = Errors {
        queue,
        left: ERRORS,
        since: Instant::now(),
    };
    let mut pace = Pace::default();
    while wait(shared, [Some(queue.as_fd())]).is_some() {
        let view = View::new(shared, lane);
        let mut out = Outbound::new(&view, &mut space, &mut errors);
        let mut packets = 0;
        for _ in 0..BATCH {
            match tun::read(queue, &mut buffer) {
                Ok(length) => {
                    out.packet(&mut buffer, length);
                    packets += 1;
                    if pace.hurry() && packets == 1 {
                        out.flush();
                    }
                }
                // Someone deleted the interface: the file can only be closed, and says "readable" for ever.
                Err(error) if error.raw_os_error() == Some(Errno::BADFD.raw_os_error()) => {
                    shared.gone.store(true, Ordering::Release);
                    return;
                }
                // Nothing more for now.
                Err(_) => break,
            }
        }
        out.flush();
        pace.saw(packets);
    }
}

/// Buffers that live as long as their thread.
struct Space {
    /// One packet of a large one.
    part: Vec<u8>,
    scratch: Vec<u8>,
    run: Vec<u8>,
}

/// Tells senders that nobody is there to send to, as kernel WireGuard does; within measure.
struct Errors<'a> {
    queue: &'a File,
    left: u32,
    since: Instant,
}

impl Errors<'_> {
    fn tell(&mut self, packet: &[u8], now: Instant) {
        if now.duration_since(self.since) >= Duration::from_secs(1) {
            (self.left, self.since) = (ERRORS, now);
        }
        if self.left > 0
            && let Some(error) = unreachable(packet)
        {
            self.left -= 1;
            // An interface that takes nothing now has more to do than this.
            let _ = tun::write(
                self.queue,
                &[IoSlice::new(&Header::default().encode()), IoSlice::new(&error)],
            );
        }
    }
}

/// One batch, with the run of datagrams that is being made.
struct Outbound<'a, 'e> {
    view: &'a View<'a>,
    errors: &'a mut Errors<'e>,
    now: Instant,
    mtu: usize,
    part: &'a mut [u8],
    scratch: &'a mut [u8],
    run: Run<'a>,
}

/// Datagrams of one size to one peer at one place, encrypted and not yet sent.
struct Run<'a> {
    view: &'a View<'a>,
    bytes: &'a mut [u8],
    used: usize,
    count: usize,
    segment: usize,
    /// A shorter one is the last.
    full: bool,
    endpoint: Option<Place>,
    to: Option<Target<'a>>,
}

/// Whom a run is for. While it is made nobody else sends to that peer, so that counters arrive in order. Of a peer's two locks this one is
/// taken first, always: another worker that holds it waits for the other.
struct Target<'a> {
    peer: &'a Arc<Peer>,
    _order: MutexGuard<'a, ()>,
}

impl<'a, 'e> Outbound<'a, 'e> {
    fn new(view: &'a View<'a>, space: &'a mut Space, errors: &'a mut Errors<'e>) -> Self {
        let Space { part, scratch, run } = space;
        Self {
            view,
            errors,
            now: Instant::now(),
            mtu: view.shared.mtu.load(Ordering::Relaxed),
            part,
            scratch,
            run: Run {
                view,
                bytes: run,
                used: 0,
                count: 0,
                segment: 0,
                full: false,
                endpoint: None,
                to: None,
            },
        }
    }

    /// Takes what was read: `length` bytes, beginning with the virtio-net header.
    fn packet(&mut self, buffer: &mut [u8], length: usize) {
        let drops = &self.view.shared.drops;
        let Some((header, packet)) = buffer.split_first_chunk_mut::<HEADER>() else {
            return;
        };
        let header = Header::decode(header);
        let length = length.saturating_sub(HEADER);
        let view = self.view;
        let Some(peer) = destination(&packet[..length]).and_then(|to| view.table.ranges.get(to)) else {
            drops.count(Drop::NoPeer);
            self.errors.tell(&packet[..length], self.now);
            return;
        };
        if !header.is_large() {
            if complete(&header, &mut packet[..length]).is_err() {
                drops.count(Drop::Interface);
                return;
            }
            let mut state = self.ready(peer);
            self.seal(&mut state, packet, length);
            view.schedule(peer, &mut state, self.now);
            return;
        }
        let Ok(mut segments) = Segments::new(&header, &packet[..length]) else {
            drops.count(Drop::Interface);
            return;
        };
        let part = std::mem::take(&mut self.part);
        while segments.upcoming().is_some() {
            let mut state = self.ready(peer);
            for _ in 0..BURST {
                let Some(length) = segments.upcoming() else { break };
                segments.next(&mut part[..length]);
                self.seal(&mut state, part, length);
            }
            view.schedule(peer, &mut state, self.now);
        }
        self.part = part;
    }

    /// Locks the peer, with room for a burst.
    fn ready(&mut self, peer: &'a Arc<Peer>) -> MutexGuard<'a, PeerState> {
        self.run.turn_to(peer);
        peer.state()
    }

    /// Encrypts the packet of `length` bytes at the beginning of `packet`, which has room for padding.
    fn seal(&mut self, state: &mut PeerState, packet: &mut [u8], length: usize) {
        let Some(endpoint) = state.endpoint else {
            self.view.shared.drops.count(Drop::NoEndpoint);
            self.errors.tell(&packet[..length], self.now);
            return;
        };
        let padded = padded(length, self.mtu);
        packet[length..padded].fill(0);
        let packet = &packet[..padded];
        let datagram = self.run.room(endpoint, padded + OVERHEAD);
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
    /// Makes this the run of that peer, with room for a burst. Nothing of the peer may be locked.
    fn turn_to(&mut self, peer: &'a Arc<Peer>) {
        let same = self.to.as_ref().is_some_and(|to| Arc::ptr_eq(to.peer, peer));
        if !same {
            self.flush();
            self.to = Some(Target {
                peer,
                _order: peer.order(),
            });
        } else if self.count + BURST > RUN || self.used + BURST * self.segment > RUN_BYTES {
            self.send();
        }
    }

    /// Where a datagram of `length` bytes to this place goes.
    fn room(&mut self, endpoint: Place, length: usize) -> &mut [u8] {
        let follows = self.endpoint == Some(endpoint) && !self.full && length <= self.segment;
        if self.count > 0 && (!follows || self.count == RUN || self.used + length > RUN_BYTES) {
            self.send();
        }
        self.endpoint = Some(endpoint);
        &mut self.bytes[self.used..]
    }

    /// The datagram that was written to the room.
    fn push(&mut self, length: usize) {
        if self.count == 0 {
            self.segment = length;
        }
        self.full = length < self.segment;
        self.used += length;
        self.count += 1;
    }

    /// Sends what there is; the peer stays this run's.
    fn send(&mut self) {
        if let Some(endpoint) = self.endpoint.filter(|_| self.count > 0) {
            let lost = self
                .view
                .sockets
                .send_run(self.view.lane, &self.bytes[..self.used], self.segment, endpoint);
            self.view.shared.drops.count_many(Drop::Network, lost);
        }
        (self.used, self.count, self.segment, self.full) = (0, 0, 0, false);
        self.endpoint = None;
    }

    /// Sends what there is and lets others send to the peer.
    fn flush(&mut self) {
        self.send();
        self.to = None;
    }
}

/// To a multiple of 16, within the MTU, as the protocol asks: lengths tell less then (whitepaper §5.4.6).
fn padded(length: usize, mtu: usize) -> usize {
    length.next_multiple_of(16).min(mtu).max(length)
}
