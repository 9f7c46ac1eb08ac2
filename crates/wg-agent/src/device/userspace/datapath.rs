//! The three threads that carry packets: interface to network, network to interface, and the clock.
//! Who the peers are is decided elsewhere; these only look them up, one immutable table for each batch.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    time::Instant,
};

use boringtun::noise::{Packet, Tunn, TunnResult, errors::WireGuardError, handshake::parse_handshake_anon};
use clustermesh_agent_core::device::Peers;
use clustermesh_core::key::PublicKey;
use rustix::event::{PollFd, PollFlags, poll};
use tun_rs::SyncDevice;

use super::{
    clock::{Clock, Tick},
    drops::{Drop, Drops},
    peers::{Identity, Peer, PeerState, Table},
    sockets::Sockets,
    tunnel::Output,
};

/// Packets taken from one side before the other threads' changes are looked at again.
const BATCH: usize = 64;
/// The largest datagram, and room for what the protocol adds to the largest inner packet.
const BUFFER: usize = 65_536 + 64;

/// What the threads share.
pub(super) struct Shared {
    pub(super) tun: SyncDevice,
    pub(super) mtu: AtomicUsize,
    pub(super) table: RwLock<Arc<Table>>,
    pub(super) sockets: RwLock<Arc<Sockets>>,
    pub(super) identity: RwLock<Arc<Identity>>,
    /// The peers as the agent wants them; the table is made from this.
    pub(super) configured: RwLock<Arc<Peers>>,
    pub(super) fwmark: AtomicU32,
    pub(super) clock: Clock,
    pub(super) drops: Drops,
    /// The interface was deleted under us.
    pub(super) gone: AtomicBool,
    pub(super) stopping: AtomicBool,
    /// Readable when `stopping` is set; never read.
    pub(super) stop: OwnedFd,
    /// Readable when the sockets were replaced.
    pub(super) rebound: OwnedFd,
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
struct Wire<'a> {
    shared: &'a Shared,
    sockets: &'a Sockets,
    table: &'a Table,
    peer: &'a Arc<Peer>,
    endpoint: Option<SocketAddr>,
    sent: u64,
}

impl Output for Wire<'_> {
    fn network(&mut self, datagram: &[u8]) {
        match self.endpoint {
            None => self.shared.drops.count(Drop::NoEndpoint),
            Some(endpoint) if self.sockets.send(datagram, endpoint).is_ok() => self.sent += datagram.len() as u64,
            Some(_) => self.shared.drops.count(Drop::Network),
        }
    }

    fn inner(&mut self, packet: &[u8], source: IpAddr) {
        if self
            .table
            .ranges
            .get(source)
            .is_none_or(|owner| !Arc::ptr_eq(owner, self.peer))
        {
            self.shared.drops.count(Drop::ForeignSource);
        } else if self.shared.tun.send(packet).is_err() {
            self.shared.drops.count(Drop::Interface);
        }
    }
}

/// The pictures of one batch.
struct View<'a> {
    shared: &'a Shared,
    sockets: Arc<Sockets>,
    table: Arc<Table>,
}

impl<'a> View<'a> {
    fn new(shared: &'a Shared) -> Self {
        Self {
            shared,
            sockets: current(&shared.sockets),
            table: current(&shared.table),
        }
    }

    fn wire<'b>(&'b self, peer: &'b Arc<Peer>, endpoint: Option<SocketAddr>) -> Wire<'b> {
        Wire {
            shared: self.shared,
            sockets: &self.sockets,
            table: &self.table,
            peer,
            endpoint,
            sent: 0,
        }
    }

    fn schedule(&self, peer: &Arc<Peer>, state: &mut PeerState, now: Instant) {
        if state.endpoint.is_some()
            && let Some(at) = state.tunnel.reschedule(now)
        {
            self.shared.clock.add(at, peer);
        }
    }
}

/// Interface to network, until the device stops.
pub(super) fn outbound(shared: &Shared) {
    let mut buffer = vec![0; BUFFER];
    let mut scratch = vec![0; BUFFER];
    while wait(shared, &[&shared.tun.as_fd()]) {
        let view = View::new(shared);
        let now = Instant::now();
        for _ in 0..BATCH {
            let length = match shared.tun.recv(&mut buffer) {
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // Someone deleted the interface: the file can only be closed, and says "readable" for ever.
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::BADFD.raw_os_error()) => {
                    shared.gone.store(true, Ordering::Release);
                    return;
                }
                Err(_) => break,
            };
            let peer = Tunn::dst_address(&buffer[..length]).and_then(|to| view.table.ranges.get(to));
            let Some(peer) = peer else {
                shared.drops.count(Drop::NoPeer);
                continue;
            };
            let padded = pad(&mut buffer, length, shared.mtu.load(Ordering::Relaxed));
            let mut state = peer.state();
            if state.endpoint.is_none() {
                shared.drops.count(Drop::NoEndpoint);
                continue;
            }
            let mut wire = view.wire(peer, state.endpoint);
            state.tunnel.send(&buffer[..padded], now, &mut scratch, &mut wire);
            state.tx_bytes += wire.sent;
            view.schedule(peer, &mut state, now);
        }
    }
}

/// Pads with zeros to a multiple of 16, within the MTU, as the protocol asks: lengths tell less then (whitepaper §5.4.6).
fn pad(buffer: &mut [u8], length: usize, mtu: usize) -> usize {
    let padded = length.next_multiple_of(16).min(mtu).max(length);
    buffer[length..padded].fill(0);
    padded
}

/// Network to interface, until the device stops.
pub(super) fn inbound(shared: &Shared) {
    let mut buffer = vec![0; BUFFER];
    let mut scratch = vec![0; BUFFER];
    loop {
        let sockets = current(&shared.sockets);
        let (v4, v6) = (sockets.v4.as_fd(), sockets.v6.as_ref().map(AsFd::as_fd));
        let rebound = shared.rebound.as_fd();
        let mut sources: Vec<&dyn AsFd> = vec![&rebound, &v4];
        sources.extend(v6.as_ref().map(|v6| v6 as &dyn AsFd));
        if !wait(shared, &sources) {
            return;
        }
        // Readable only after a rebind: the next round takes the new sockets.
        let _ = rustix::io::read(&shared.rebound, &mut [0; 8]);
        let view = View::new(shared);
        let identity = current(&shared.identity);
        for socket in [Some(&sockets.v4), sockets.v6.as_ref()].into_iter().flatten() {
            receive_batch(&view, &identity, socket, &mut buffer, &mut scratch);
        }
    }
}

fn receive_batch(view: &View<'_>, identity: &Identity, socket: &UdpSocket, buffer: &mut [u8], scratch: &mut [u8]) {
    let now = Instant::now();
    for _ in 0..BATCH {
        match socket.recv_from(buffer) {
            Ok((length, source)) => {
                if let Err(reason) = receive(view, identity, &buffer[..length], source, now, scratch) {
                    view.shared.drops.count(reason);
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            // An ICMP error that an earlier datagram provoked: reading it clears it.
            Err(_) => {}
        }
    }
}

fn receive(
    view: &View<'_>,
    identity: &Identity,
    datagram: &[u8],
    source: SocketAddr,
    now: Instant,
    scratch: &mut [u8],
) -> Result<(), Drop> {
    let packet = match identity.limiter.verify_packet(Some(source.ip()), datagram, scratch) {
        Ok(packet) => packet,
        Err(TunnResult::WriteToNetwork(cookie)) => {
            let _ = view.sockets.send(cookie, source);
            return Err(Drop::UnderLoad);
        }
        Err(_) => return Err(Drop::Invalid),
    };
    let table = &view.table;
    let peer = match &packet {
        Packet::HandshakeInit(initiation) => {
            let half =
                parse_handshake_anon(&identity.private, &identity.public, initiation).map_err(|_| Drop::Invalid)?;
            table.by_key.get(&PublicKey::new(half.peer_static_public))
        }
        Packet::HandshakeResponse(response) => table.by_index.get(&(response.receiver_idx >> 8)),
        Packet::PacketCookieReply(cookie) => table.by_index.get(&(cookie.receiver_idx >> 8)),
        Packet::PacketData(data) => table.by_index.get(&(data.receiver_idx >> 8)),
    };
    let peer = peer.ok_or(Drop::UnknownPeer)?;
    let mut state = peer.state();
    let mut wire = view.wire(peer, state.endpoint);
    state.tunnel.refresh(now, scratch, &mut wire);
    wire.endpoint = Some(source);
    let outcome = state.tunnel.receive(source.ip(), datagram, now, scratch, &mut wire);
    state.tx_bytes += wire.sent;
    let result = match outcome {
        Ok(authenticated) => {
            if authenticated {
                state.endpoint = Some(source);
            }
            state.rx_bytes += datagram.len() as u64;
            Ok(())
        }
        Err(
            WireGuardError::DuplicateCounter | WireGuardError::InvalidCounter | WireGuardError::WrongTai64nTimestamp,
        ) => Err(Drop::Replayed),
        Err(WireGuardError::NoCurrentSession | WireGuardError::WrongIndex | WireGuardError::UnexpectedPacket) => {
            Err(Drop::UnknownPeer)
        }
        Err(_) => Err(Drop::Invalid),
    };
    view.schedule(peer, &mut state, now);
    result
}

/// Retries, keepalives and held responses, until the device stops.
pub(super) fn clockwork(shared: &Shared) {
    let mut scratch = vec![0; BUFFER];
    let mut housekept = Instant::now();
    loop {
        let tick = shared.clock.next();
        let now = Instant::now();
        match tick {
            Tick::Stop => return,
            Tick::Idle => {}
            Tick::Peer(peer, at) => {
                let view = View::new(shared);
                let mut state = peer.state();
                if state.tunnel.expects_tick(at) {
                    if state.endpoint.is_some() {
                        let mut wire = view.wire(&peer, state.endpoint);
                        state.tunnel.tick(now, &mut scratch, &mut wire);
                        state.tx_bytes += wire.sent;
                        view.schedule(&peer, &mut state, now);
                    } else {
                        state.tunnel.skip_tick();
                    }
                }
            }
        }
        if now.duration_since(housekept).as_secs() >= 1 {
            housekept = now;
            current(&shared.identity).limiter.reset_count();
        }
    }
}

/// Waits until one of the files is readable; false when the device stops.
fn wait(shared: &Shared, sources: &[&dyn AsFd]) -> bool {
    let mut files: Vec<PollFd<'_>> = sources
        .iter()
        .map(|source| PollFd::from_borrowed_fd(source.as_fd(), PollFlags::IN))
        .collect();
    files.push(PollFd::new(&shared.stop, PollFlags::IN));
    // Interrupted, or no memory for the moment: the caller finds nothing to read and comes back.
    let _ = poll(&mut files, None);
    !shared.stopping.load(Ordering::Acquire)
}
