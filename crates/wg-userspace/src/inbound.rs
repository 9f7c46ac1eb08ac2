//! Forwards packets from network to interface: receives runs of datagrams (see `sockets`), decrypts
//! them, joins segments of a flow (as GRO does) if the TUN device accepts joined packets, and writes the packets.
//!
//! Initiations are passed to the queue of `handshakes`. A batch ends when the sockets are empty, or after [`BATCH`] runs from each; it
//! never waits for more datagrams.

use std::{
    fs::File,
    net::{IpAddr, UdpSocket},
    ops::Range,
    os::fd::AsFd,
    sync::Arc,
    time::Instant,
};

use crate::{
    datapath::{BATCH, BUFFER, BURST, Pace, Shared, View, current, wait},
    drops::DropReason,
    handshake_gate::{COOKIE_REPLY, Verdict},
    offload::Coalescer,
    peers::{Identity, Peer, PeerState},
    sockets::{self, Endpoint, control_buffer},
    tun,
    tunnel::{Inner, Refused},
};

/// When a batch has more bytes of datagrams than this, its packets are written. Buffers of this size fit into the CPU's cache.
const ARENA: usize = 128 << 10;

/// Forwards packets until the device stops.
pub(crate) fn forward(shared: &Shared, worker: usize) {
    let (Some(queue), Some(rebound)) = (shared.tun.queues.get(worker), shared.rebound.get(worker)) else {
        return;
    };
    let mut control = control_buffer();
    let mut buffers = Buffers {
        datagrams: vec![0; ARENA + BUFFER],
        // Packets are shorter than their datagrams, so they fill at most `ARENA + BUFFER`. Each decryption needs
        // room for its whole datagram behind these packets: the other `BUFFER`.
        plain: vec![0; ARENA + 2 * BUFFER],
        scratch: vec![0; BUFFER],
        coalescer: Coalescer::new(shared.tun.offload.tcp, shared.tun.offload.udp),
    };
    let mut pace = Pace::default();
    loop {
        let sockets = current(&shared.sockets);
        let Some(own) = sockets.workers.get(worker) else {
            return;
        };
        let files = [
            Some(rebound.as_fd()),
            Some(own.v4.as_fd()),
            own.v6.as_ref().map(AsFd::as_fd),
        ];
        let Some([is_rebound, v4, v6]) = wait(shared, files) else {
            return;
        };
        if is_rebound {
            // Resets the eventfd. The next iteration uses the new sockets.
            let _ = rustix::io::read(rebound, &mut [0; 8]);
        }
        let view = View::new(shared, worker);
        let identity = current(&shared.identity);
        let mut batch = Inbound {
            view: &view,
            identity: &identity,
            queue,
            now: Instant::now(),
            datagram_bytes: 0,
            plain_bytes: 0,
            datagram_count: 0,
            buffers: &mut buffers,
        };
        for socket in [Some(&own.v4).filter(|_| v4), own.v6.as_ref().filter(|_| v6)]
            .into_iter()
            .flatten()
        {
            batch.receive(socket, &mut control, &pace);
        }
        batch.flush();
        pace.record(batch.datagram_count);
    }
}

/// The buffers of a worker's thread.
struct Buffers {
    /// The received datagrams, one after the other.
    datagrams: Vec<u8>,
    /// The decrypted packets.
    plain: Vec<u8>,
    /// A datagram that the tunnel sends in reply.
    scratch: Vec<u8>,
    coalescer: Coalescer,
}

/// One batch of datagrams.
struct Inbound<'a> {
    view: &'a View<'a>,
    identity: &'a Identity,
    queue: &'a File,
    now: Instant,
    /// Bytes used in `Buffers::datagrams`.
    datagram_bytes: usize,
    /// Bytes used in `Buffers::plain`.
    plain_bytes: usize,
    /// Datagrams received in this batch.
    datagram_count: usize,
    buffers: &'a mut Buffers,
}

impl Inbound<'_> {
    fn receive(&mut self, socket: &UdpSocket, control: &mut [u8], pace: &Pace) {
        for _ in 0..BATCH {
            // At most `ARENA` bytes are used, so the buffer has room for one more run.
            match sockets::receive(socket, &mut self.buffers.datagrams[self.datagram_bytes..], control) {
                Ok(run) if run.length == 0 => self.view.shared.drops.count(DropReason::Invalid),
                Ok(run) => self.receive_run(
                    self.datagram_bytes..self.datagram_bytes + run.length,
                    run.segment,
                    run.source,
                ),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                // An ICMP error for a datagram that was sent earlier. This call has cleared the error.
                Err(_) => {}
            }
            // If the previous batch had one datagram, the first datagram of this one does not wait for others.
            if self.datagram_bytes > ARENA || pace.is_single() && self.datagram_count == 1 {
                self.flush();
            }
        }
    }

    /// Handles a run of datagrams from one source.
    fn receive_run(&mut self, span: Range<usize>, segment: usize, source: Endpoint) {
        let view = self.view;
        let end = span.end;
        let mut rest = span.step_by(segment).map(|at| at..end.min(at + segment)).peekable();
        self.datagram_count += rest.len();
        while let Some(first) = rest.peek().cloned() {
            let Some(peer_index) = data_peer_index(&self.buffers.datagrams[first.clone()]) else {
                rest.next();
                if let Err(reason) = self.receive_handshake(first, source) {
                    view.shared.drops.count(reason);
                }
                continue;
            };
            let Some(peer) = view.table.by_index.get(&peer_index) else {
                rest.next();
                view.shared.drops.count(DropReason::UnknownPeer);
                continue;
            };
            let mut burst = 0;
            let mut state = peer.state();
            let mut known = None;
            while burst < BURST
                && let Some(span) =
                    rest.next_if(|next| data_peer_index(&self.buffers.datagrams[next.clone()]) == Some(peer.index))
            {
                burst += 1;
                if let Err(reason) = self.receive_data(peer, &mut state, span, source, &mut known) {
                    view.shared.drops.count(reason);
                }
            }
            view.schedule(peer, &mut state, self.now);
        }
        self.datagram_bytes = end;
    }

    /// Handles a message that is not data. The gate checks it before any peer is locked.
    fn receive_handshake(&mut self, span: Range<usize>, source: Endpoint) -> Result<(), DropReason> {
        let (view, identity) = (self.view, self.identity);
        let Buffers {
            datagrams,
            plain,
            scratch,
            ..
        } = &mut *self.buffers;
        let datagram = &datagrams[span];
        let mut reply = [0; COOKIE_REPLY];
        let (index, is_response) = match identity.gate.check(datagram, source.remote.ip(), &mut reply) {
            Verdict::Initiation => {
                if !identity.source_limiter.allow(source.remote.ip(), self.now) {
                    return Err(DropReason::UnderLoad);
                }
                let initiation = datagram.try_into().map_err(|_| DropReason::Invalid)?;
                view.shared
                    .handshakes
                    .add(initiation, source, view.worker, &view.shared.drops);
                return Ok(());
            }
            Verdict::Response(index) => (index, true),
            Verdict::Cookie(index) => (index, false),
            Verdict::CookieNeeded => {
                let _ = view.sockets.send(view.worker, &reply, source);
                return Err(DropReason::UnderLoad);
            }
            Verdict::Invalid => return Err(DropReason::Invalid),
        };
        // The upper 24 bits of a receiver index identify the peer.
        let peer = view.table.by_index.get(&(index >> 8)).ok_or(DropReason::UnknownPeer)?;
        let mut state = peer.state();
        // An eavesdropper can forge a response with a valid receiver index, and processing it costs as much as an initiation. So responses
        // are rate limited too. A response with an index that the peer's tunnel does not expect is refused here.
        if is_response {
            if !state.tunnel.is_awaiting_response(index) {
                return Err(DropReason::UnknownPeer);
            }
            if !identity.source_limiter.allow(source.remote.ip(), self.now) {
                return Err(DropReason::UnderLoad);
            }
        }
        let plain = &mut plain[self.plain_bytes..];
        let result = accept(view, &mut state, datagram, source, self.now, plain, scratch);
        view.schedule(peer, &mut state, self.now);
        result.map(drop)
    }

    /// Handles a data message of a locked peer. `known` caches the last inner source that is within the peer's allowed IPs.
    fn receive_data(
        &mut self,
        peer: &Arc<Peer>,
        state: &mut PeerState,
        span: Range<usize>,
        source: Endpoint,
        known: &mut Option<IpAddr>,
    ) -> Result<(), DropReason> {
        let Buffers {
            datagrams,
            plain,
            scratch,
            coalescer,
        } = &mut *self.buffers;
        let begin = self.plain_bytes;
        let datagram = &datagrams[span];
        let Some((length, inner_source)) = accept(
            self.view,
            state,
            datagram,
            source,
            self.now,
            &mut plain[begin..],
            scratch,
        )?
        else {
            return Ok(());
        };
        if *known != Some(inner_source) {
            let owner = self.view.table.allowed_ips.get(inner_source);
            if owner.is_none_or(|owner| !Arc::ptr_eq(owner, peer)) {
                return Err(DropReason::ForeignSource);
            }
            *known = Some(inner_source);
        }
        self.plain_bytes += length;
        coalescer.push(plain, begin..begin + length);
        Ok(())
    }

    /// Writes the packets of the batch to the interface.
    fn flush(&mut self) {
        let drops = &self.view.shared.drops;
        let queue = self.queue;
        let Buffers { plain, coalescer, .. } = &mut *self.buffers;
        coalescer.finish(plain, |parts, packets| {
            if tun::write(queue, parts).is_err() {
                drops.count_many(DropReason::Interface, usize::from(packets));
            }
        });
        (self.datagram_bytes, self.plain_bytes) = (0, 0);
    }
}

/// Passes a datagram to its peer's tunnel and sends the tunnel's answers. Returns length and source of the inner packet, which is decrypted
/// to the beginning of `plain`; `None` = the datagram has no inner packet.
pub(crate) fn accept(
    view: &View<'_>,
    state: &mut PeerState,
    datagram: &[u8],
    source: Endpoint,
    now: Instant,
    plain: &mut [u8],
    scratch: &mut [u8],
) -> Result<Option<(usize, IpAddr)>, DropReason> {
    let mut wire = view.wire(Some(source));
    let outcome = state.tunnel.receive(datagram, now, plain, scratch, &mut wire);
    state.tx_bytes += wire.sent;
    let received = outcome.map_err(drop_reason)?;
    if received.moves_endpoint {
        state.endpoint = Some(source);
    }
    state.rx_bytes += datagram.len() as u64;
    match received.inner {
        Inner::Nothing => Ok(None),
        Inner::Packet(length, from) => Ok(Some((length, from))),
        Inner::Malformed => Err(DropReason::Invalid),
    }
}

pub(crate) const fn drop_reason(reason: Refused) -> DropReason {
    match reason {
        Refused::Invalid => DropReason::Invalid,
        Refused::Replayed => DropReason::Replayed,
        Refused::TooSoon => DropReason::UnderLoad,
        Refused::UnknownSession => DropReason::UnknownPeer,
    }
}

/// The upper 24 bits of the receiver index, which identify the peer; `None` = not a data message (whitepaper §5.4.6).
fn data_peer_index(datagram: &[u8]) -> Option<u32> {
    match datagram {
        [4, 0, 0, 0, i0, i1, i2, i3, ..] if datagram.len() >= 32 => Some(u32::from_le_bytes([*i0, *i1, *i2, *i3]) >> 8),
        _ => None,
    }
}
