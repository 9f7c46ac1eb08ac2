//! Network to interface: datagrams are received in runs, decrypted side by side, joined where that is offered and written.
//! Handshakes that cost much are handed on. Nothing waits for more to come.

use std::{
    fs::File,
    net::{IpAddr, UdpSocket},
    ops::Range,
    os::fd::AsFd,
    sync::Arc,
    time::Instant,
};

use clustermesh_agent_core::offload::Coalescer;

use super::{
    datapath::{BATCH, BUFFER, BURST, Pace, Shared, View, current, wait},
    drops::Drop,
    gate::{COOKIE_REPLY, Verdict},
    peers::{Identity, Peer, PeerState},
    sockets::{self, Place, control_buffer},
    tun,
    tunnel::{Inner, Refused},
};

/// Datagrams whose packets may wait for the end of their batch, in bytes. Small enough to stay in the cache.
const ARENA: usize = 128 << 10;

/// Carries packets until the device stops.
pub(super) fn inbound(shared: &Shared, lane: usize) {
    let (Some(queue), Some(rebound)) = (shared.tun.queues.get(lane), shared.rebound.get(lane)) else {
        return;
    };
    let mut control = control_buffer();
    let mut space = Space {
        datagrams: vec![0; ARENA + BUFFER],
        // The plain texts of as many datagrams are shorter, but for the room that the last one needs.
        plain: vec![0; ARENA + 2 * BUFFER],
        scratch: vec![0; BUFFER],
        coalescer: Coalescer::new(shared.tun.offload.tcp, shared.tun.offload.udp),
    };
    let mut pace = Pace::default();
    loop {
        let sockets = current(&shared.sockets);
        let Some(own) = sockets.lanes.get(lane) else {
            return;
        };
        let files = [
            Some(rebound.as_fd()),
            Some(own.v4.as_fd()),
            own.v6.as_ref().map(AsFd::as_fd),
        ];
        let Some([renewed, v4, v6]) = wait(shared, files) else {
            return;
        };
        if renewed {
            // The next round takes the new sockets.
            let _ = rustix::io::read(rebound, &mut [0; 8]);
        }
        let view = View::new(shared, lane);
        let identity = current(&shared.identity);
        let mut batch = Inbound {
            view: &view,
            identity: &identity,
            queue,
            now: Instant::now(),
            used: 0,
            plain: 0,
            datagrams: 0,
            space: &mut space,
        };
        for socket in [Some(&own.v4).filter(|_| v4), own.v6.as_ref().filter(|_| v6)]
            .into_iter()
            .flatten()
        {
            batch.receive(socket, &mut control, &pace);
        }
        batch.flush();
        pace.saw(batch.datagrams);
    }
}

/// Buffers that live as long as their thread.
struct Space {
    /// Datagrams as they came, one after the other.
    datagrams: Vec<u8>,
    /// The packets that were in them.
    plain: Vec<u8>,
    scratch: Vec<u8>,
    coalescer: Coalescer,
}

/// One batch.
struct Inbound<'a> {
    view: &'a View<'a>,
    identity: &'a Identity,
    queue: &'a File,
    now: Instant,
    /// Of the datagrams' buffer.
    used: usize,
    /// Of the packets' buffer.
    plain: usize,
    /// That came so far.
    datagrams: usize,
    space: &'a mut Space,
}

impl Inbound<'_> {
    fn receive(&mut self, socket: &UdpSocket, control: &mut [u8], pace: &Pace) {
        for _ in 0..BATCH {
            // One more always has room behind what there is.
            match sockets::receive(socket, &mut self.space.datagrams[self.used..], control) {
                Ok(run) if run.length == 0 => self.view.shared.drops.count(Drop::Invalid),
                Ok(run) => self.run(self.used..self.used + run.length, run.segment, run.source),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                // An ICMP error that an earlier datagram provoked: reading it clears it.
                Err(_) => {}
            }
            if self.used > ARENA || pace.hurry() && self.datagrams == 1 {
                self.flush();
            }
        }
    }

    /// Datagrams of one source.
    fn run(&mut self, place: Range<usize>, segment: usize, source: Place) {
        let view = self.view;
        let ends = place.end;
        let mut rest = place.step_by(segment).map(|at| at..ends.min(at + segment)).peekable();
        self.datagrams += rest.len();
        while let Some(first) = rest.peek().cloned() {
            let Some(index) = data_index(&self.space.datagrams[first.clone()]) else {
                rest.next();
                if let Err(reason) = self.control(first, source) {
                    view.shared.drops.count(reason);
                }
                continue;
            };
            let Some(peer) = view.table.by_index.get(&index) else {
                rest.next();
                view.shared.drops.count(Drop::UnknownPeer);
                continue;
            };
            let mut burst = 0;
            let mut state = peer.state();
            let mut known = None;
            while burst < BURST
                && let Some(place) =
                    rest.next_if(|next| data_index(&self.space.datagrams[next.clone()]) == Some(peer.index))
            {
                burst += 1;
                if let Err(reason) = self.datagram(peer, &mut state, place, source, &mut known) {
                    view.shared.drops.count(reason);
                }
            }
            view.schedule(peer, &mut state, self.now);
        }
        self.used = ends;
    }

    /// Everything but data: rare, and checked before any peer is locked.
    fn control(&mut self, place: Range<usize>, source: Place) -> Result<(), Drop> {
        let (view, identity) = (self.view, self.identity);
        let Space {
            datagrams,
            plain,
            scratch,
            ..
        } = &mut *self.space;
        let datagram = &datagrams[place];
        let mut reply = [0; COOKIE_REPLY];
        let (index, is_response) = match identity.gate.judge(datagram, source.peer.ip(), &mut reply) {
            Verdict::Initiation => {
                if !identity.sources.allow(source.peer.ip(), self.now) {
                    return Err(Drop::UnderLoad);
                }
                let initiation = datagram.try_into().map_err(|_| Drop::Invalid)?;
                view.shared
                    .handshakes
                    .add(initiation, source, view.lane, &view.shared.drops);
                return Ok(());
            }
            Verdict::Response(index) => (index, true),
            Verdict::Cookie(index) => (index, false),
            Verdict::Reply => {
                let _ = view.sockets.send(view.lane, &reply, source);
                return Err(Drop::UnderLoad);
            }
            Verdict::Invalid => return Err(Drop::Invalid),
        };
        let peer = view.table.by_index.get(&(index >> 8)).ok_or(Drop::UnknownPeer)?;
        let mut state = peer.state();
        // A response whose receiver index was overheard costs as much as an initiation; any other ends here.
        if is_response && !(state.tunnel.awaits(index) && identity.sources.allow(source.peer.ip(), self.now)) {
            return Err(Drop::UnknownPeer);
        }
        let plain = &mut plain[self.plain..];
        let result = accept(view, &mut state, datagram, source, self.now, plain, scratch);
        view.schedule(peer, &mut state, self.now);
        result.map(drop)
    }

    /// A data message for a peer that is locked. `known` is an inner source that is within its allowed IPs.
    fn datagram(
        &mut self,
        peer: &Arc<Peer>,
        state: &mut PeerState,
        place: Range<usize>,
        source: Place,
        known: &mut Option<IpAddr>,
    ) -> Result<(), Drop> {
        let Space {
            datagrams,
            plain,
            scratch,
            coalescer,
        } = &mut *self.space;
        let begin = self.plain;
        let datagram = &datagrams[place];
        let Some((length, inner)) = accept(
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
        if *known != Some(inner) {
            let owner = self.view.table.ranges.get(inner);
            if owner.is_none_or(|owner| !Arc::ptr_eq(owner, peer)) {
                return Err(Drop::ForeignSource);
            }
            *known = Some(inner);
        }
        self.plain += length;
        coalescer.push(plain, begin..begin + length);
        Ok(())
    }

    /// Writes what was collected.
    fn flush(&mut self) {
        let drops = &self.view.shared.drops;
        let queue = self.queue;
        let Space { plain, coalescer, .. } = &mut *self.space;
        coalescer.finish(plain, |parts, packets| {
            if tun::write(queue, parts).is_err() {
                drops.count_many(Drop::Interface, usize::from(packets));
            }
        });
        (self.used, self.plain) = (0, 0);
    }
}

/// Gives a datagram to its peer's tunnel: length and source of the packet in it, decrypted to the beginning of `plain`, if it had one.
pub(super) fn accept(
    view: &View<'_>,
    state: &mut PeerState,
    datagram: &[u8],
    source: Place,
    now: Instant,
    plain: &mut [u8],
    scratch: &mut [u8],
) -> Result<Option<(usize, IpAddr)>, Drop> {
    let mut wire = view.wire(Some(source));
    let outcome = state.tunnel.receive(datagram, now, plain, scratch, &mut wire);
    state.tx_bytes += wire.sent;
    let received = outcome.map_err(refused)?;
    if received.moves_endpoint {
        state.endpoint = Some(source);
    }
    state.rx_bytes += datagram.len() as u64;
    match received.inner {
        Inner::Nothing => Ok(None),
        Inner::Packet(length, from) => Ok(Some((length, from))),
        Inner::Malformed => Err(Drop::Invalid),
    }
}

pub(super) const fn refused(reason: Refused) -> Drop {
    match reason {
        Refused::Invalid => Drop::Invalid,
        Refused::Replayed => Drop::Replayed,
        Refused::TooSoon => Drop::UnderLoad,
        Refused::UnknownSession => Drop::UnknownPeer,
    }
}

/// The peer's part of a data message's receiver index (whitepaper §5.4.6).
fn data_index(datagram: &[u8]) -> Option<u32> {
    match datagram {
        [4, 0, 0, 0, i0, i1, i2, i3, ..] if datagram.len() >= 32 => Some(u32::from_le_bytes([*i0, *i1, *i2, *i3]) >> 8),
        _ => None,
    }
}
