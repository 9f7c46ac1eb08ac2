//! WireGuard in this process: the protocol (`tunnel`, over boringtun) between a TUN device and two UDP sockets. What peers there should be
//! is decided elsewhere.
//!
//! Plain threads carry packets: for each worker one from interface to network (`outbound`) and one back (`inbound`); the clock
//! (`datapath`), one that answers handshakes (`handshakes`), and one that answers `wg show` (`control`). They share one immutable table
//! of peers that is swapped whole; a peer's lock is held for a burst of packets and never waits for another peer. No async runtime is
//! involved, so a busy agent delays no packet and a busy tunnel no API call.
//!
//! With the kernel they exchange large packets (TUN with a virtio-net header) and runs of datagrams (UDP segmentation and receive
//! offload); what it does not offer is done packet by packet.
//!
//! The interface outlives the process (`tun`): while nobody holds it the kernel drops what is sent into it, and the next start takes it over
//! and greets every peer.

mod clock;
mod control;
mod datapath;
mod drops;
#[doc(hidden)]
pub mod fuzzing;
mod gate;
mod handshakes;
mod held;
mod inbound;
mod inner;
mod link;
mod outbound;
mod peers;
mod ranges;
mod sockets;
mod sources;
mod tun;
mod tunnel;

use std::{
    collections::{BTreeSet, HashSet},
    io,
    path::Path,
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use clustermesh_agent_core::device::{self, ObservedPeer, PeerChange, PeerSpec, PeerStats, PeerUpdate, Peers};
use clustermesh_core::key::PublicKey;
use rtnetlink::sys::Socket;
use rustix::event::{EventfdFlags, eventfd};

use self::{
    control::ControlSocket,
    datapath::{Shared, current, replace},
    drops::{Drop as Dropped, Drops},
    peers::{Identity, Peer, Table},
    sockets::Sockets,
    tun::Tun,
};
use super::{Altered, Configuration, Device, DeviceError, Observed};

/// Where `wg` looks for userspace devices.
const CONTROL_DIRECTORY: &str = "/var/run/wireguard";
/// Beyond this the peers' own locks and the kernel's queues are what limits.
const MOST_WORKERS: usize = 8;
/// How long a name or port that is still taken is asked for again.
const PATIENCE: Duration = Duration::from_millis(300);

/// How the device works, beside what it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Large packets and runs of datagrams are exchanged with the kernel where it offers that.
    pub offload: bool,
    /// Threads for each direction, 1 to 64. The kernel spreads flows and peers over them.
    pub workers: usize,
}

impl Default for Options {
    /// With offload; as many threads as there are cores, half of them for each direction.
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        Self {
            offload: true,
            workers: (cores / 2).clamp(1, MOST_WORKERS),
        }
    }
}

/// A device of this kind that stands.
pub struct Userspace {
    interface: String,
    options: Options,
    configuration: Configuration,
    shared: Arc<Shared>,
    /// Asks about the interface in the network namespace it is in, and what it had not taken before it was ours.
    links: (Socket, u64),
    threads: Vec<JoinHandle<()>>,
    control: Option<ControlSocket>,
}

impl Userspace {
    /// [`Device::backend`] of this kind.
    pub const BACKEND: &str = "userspace";

    /// Makes the interface, or takes over the one that an earlier process of ours left, brings it up and binds the port.
    ///
    /// # Errors
    /// The interface is someone else's, the port is taken, or the kernel refuses; nothing new is left behind.
    pub fn open(interface: &str, configuration: &Configuration) -> Result<Self, DeviceError> {
        Self::open_with(interface, configuration, Options::default())
    }

    /// [`Self::open`] with other than the default options.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(interface: &str, configuration: &Configuration, options: Options) -> Result<Self, DeviceError> {
        let options = Options {
            workers: options.workers.clamp(1, 64),
            ..options
        };
        let tun = patiently(|| Tun::open(interface, options.workers, options.offload))?;
        set_up(&tun, interface, configuration.mtu)?;
        let sockets = patiently(|| listen(configuration, options))?;
        let event = || {
            eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
                .map_err(|source| kernel("make an event file", source.into()))
        };
        let links = link::socket().map_err(|source| kernel("open a netlink socket", source))?;
        let before = self::interface(&links, interface)?.untaken;
        let drops = Drops::default();
        let identity = Identity::new(configuration.private_key.clone(), drops.held());
        let shared = Arc::new(Shared {
            tun,
            mtu: AtomicUsize::new(usize::from(configuration.mtu)),
            table: RwLock::new(Arc::new(Table::new(Vec::new()))),
            sockets: RwLock::new(Arc::new(sockets)),
            identity: RwLock::new(Arc::new(identity)),
            clock: clock::Clock::default(),
            handshakes: handshakes::Handshakes::default(),
            drops,
            configured: RwLock::default(),
            fwmark: AtomicU32::new(configuration.fwmark),
            gone: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            stop: event()?,
            rebound: (0..options.workers).map(|_| event()).collect::<Result<_, _>>()?,
        });
        let mut device = Self {
            interface: interface.to_owned(),
            options,
            configuration: configuration.clone(),
            shared,
            links: (links, before),
            threads: Vec::new(),
            control: None,
        };
        for lane in 0..options.workers {
            device.start(&format!("wg-out-{lane}"), move |shared| {
                outbound::outbound(shared, lane)
            })?;
            device.start(&format!("wg-in-{lane}"), move |shared| inbound::inbound(shared, lane))?;
        }
        device.start("wg-clock", datapath::clockwork)?;
        device.start("wg-handshake", handshakes::answer)?;
        device
            .shared
            .tun
            .persist(true)
            .map_err(|source| kernel(&format!("make {interface} outlive this process"), source))?;
        tracing::info!(
            interface,
            workers = options.workers,
            tun = ?device.shared.tun.offload,
            udp = ?current(&device.shared.sockets).offload(),
            "userspace device opened"
        );
        match ControlSocket::open(Path::new(CONTROL_DIRECTORY), interface) {
            Ok((socket, listener)) => {
                device.control = Some(socket);
                device.start("wg-control", move |shared| control::serve(&listener, shared))?;
            }
            // A convenience for people; a read-only file system is no reason to have no tunnel.
            Err(error) => tracing::info!(interface, %error, "no control socket: `wg show` will not see this device"),
        }
        Ok(device)
    }

    fn start(&mut self, name: &str, work: impl FnOnce(&Shared) + Send + 'static) -> Result<(), DeviceError> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work(&shared))
            .map_err(|source| kernel("start a thread", source))?;
        self.threads.push(thread);
        Ok(())
    }

    /// Where `wg show` finds this device, if that could be made.
    #[must_use]
    pub fn control_socket(&self) -> Option<&Path> {
        self.control.as_ref().map(ControlSocket::path)
    }

    /// Swaps in a table for the peers as configured: those that `keep` returns stay, with their session and counters.
    fn rebuild(&self, configured: &Peers, mut keep: impl FnMut(&PublicKey, &Table) -> Option<Arc<Peer>>) {
        let now = Instant::now();
        let identity = current(&self.shared.identity);
        let old = current(&self.shared.table);
        let mut taken = HashSet::new();
        let mut fresh = Vec::new();
        let mut peers = Vec::with_capacity(configured.len());
        for (key, spec) in configured {
            let peer = keep(key, &old).unwrap_or_else(|| {
                let index = old.free_index(&taken);
                taken.insert(index);
                let peer = Arc::new(Peer::new(index, identity.tunnel(key, spec, index, now), spec.endpoint));
                fresh.push(Arc::clone(&peer));
                peer
            });
            peers.push((*key, spec, peer));
        }
        replace(&self.shared.table, Table::new(peers));
        for peer in &fresh {
            self.greet(peer, now);
        }
    }

    fn greet(&self, peer: &Arc<Peer>, now: Instant) {
        let mut state = peer.state();
        if state.endpoint.is_some() {
            state.tunnel.greet(now);
            self.shared.clock.add(now, peer);
        }
    }

    /// Changes a peer that stays.
    fn update(&self, peer: &Arc<Peer>, spec: &PeerSpec, update: &PeerUpdate) {
        let now = Instant::now();
        let mut state = peer.state();
        if update.keepalive.is_some() {
            state.tunnel.set_keepalive(peers::keepalive(spec), now);
        }
        if update.preshared_key.is_some() {
            state.tunnel.set_preshared_key(peers::preshared_key(spec));
            // Without a place to ask it at, a tick would be waited for that nobody counts.
            if state.endpoint.is_some() {
                state.tunnel.greet(now);
            }
        }
        let known = state.endpoint.map(|endpoint| endpoint.peer);
        if update.endpoint.is_some() && update.endpoint != known {
            state.endpoint = update.endpoint.map(Into::into);
            state.tunnel.moved(now);
        }
        if state.endpoint.is_some() {
            if state.tunnel.expects_tick(now) {
                self.shared.clock.add(now, peer);
            } else if let Some(at) = state.tunnel.reschedule(now) {
                self.shared.clock.add(at, peer);
            }
        }
    }

    fn stop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.clock.stop();
        self.shared.handshakes.stop();
        // An event file that is full is readable, which is all we want.
        let _ = rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Device for Userspace {
    fn backend(&self) -> &'static str {
        Self::BACKEND
    }

    fn interface(&self) -> &str {
        &self.interface
    }

    fn configure(&mut self, configuration: &Configuration) -> Result<(), DeviceError> {
        if configuration.listen_port != self.configuration.listen_port {
            let sockets = listen(configuration, self.options)?;
            let before = replace(&self.shared.sockets, sockets);
            self.shared
                .drops
                .count_many(Dropped::SocketQueue, before.overflowed() as usize);
            for rebound in &self.shared.rebound {
                let _ = rustix::io::write(rebound, &1_u64.to_ne_bytes());
            }
        } else if configuration.fwmark != self.configuration.fwmark {
            current(&self.shared.sockets)
                .mark(configuration.fwmark)
                .map_err(|source| kernel("set the firewall mark of the UDP sockets", source))?;
        }
        self.shared.fwmark.store(configuration.fwmark, Ordering::Relaxed);
        if configuration.mtu != self.configuration.mtu {
            set_up(&self.shared.tun, &self.interface, configuration.mtu)?;
            self.shared.mtu.store(usize::from(configuration.mtu), Ordering::Relaxed);
        }
        let rekeyed = configuration.private_key.as_bytes() != self.configuration.private_key.as_bytes();
        self.configuration = configuration.clone();
        if rekeyed {
            let identity = Identity::new(configuration.private_key.clone(), self.shared.drops.held());
            replace(&self.shared.identity, identity);
            self.rebuild(&current(&self.shared.configured), |_, _| None);
        }
        Ok(())
    }

    fn apply(&mut self, changes: &[PeerChange]) -> Result<(), DeviceError> {
        let mut configured = Peers::clone(&current(&self.shared.configured));
        device::apply(&mut configured, changes);
        // The table need not be made anew for what only one peer notices.
        let reshaped = changes.iter().any(|change| match change {
            PeerChange::Update(_, update) => {
                !update.add_allowed_ips.is_empty() || !update.remove_allowed_ips.is_empty()
            }
            PeerChange::Add(..) | PeerChange::Remove(_) => true,
        });
        if reshaped {
            // A peer that is added again is a new one.
            let added: BTreeSet<_> = changes
                .iter()
                .filter(|change| matches!(change, PeerChange::Add(..)))
                .map(PeerChange::key)
                .collect();
            self.rebuild(&configured, |key, old| {
                old.by_key.get(key).filter(|_| !added.contains(key)).cloned()
            });
        }
        let table = current(&self.shared.table);
        for change in changes {
            if let PeerChange::Update(key, update) = change
                && let (Some(peer), Some(spec)) = (table.by_key.get(key), configured.get(key))
            {
                self.update(peer, spec, update);
            }
        }
        replace(&self.shared.configured, configured);
        Ok(())
    }

    fn observe(&self) -> Result<Observed, DeviceError> {
        if self.shared.gone.load(Ordering::Acquire) {
            return Err(DeviceError::Gone(self.interface.clone()));
        }
        if let Some(thread) = self.threads.iter().find(|thread| thread.is_finished()) {
            let thread = thread.thread().name().unwrap_or_default().to_owned();
            return Err(DeviceError::Died {
                interface: self.interface.clone(),
                thread,
            });
        }
        let (links, before) = &self.links;
        let link = interface(links, &self.interface)?;
        let altered = [
            (link.mtu != u32::from(self.configuration.mtu), Altered::Mtu),
            (!link.up, Altered::Down),
        ];
        let altered = altered.into_iter().filter_map(|(is, part)| is.then_some(part));
        let mut observed = observed(&self.shared);
        let untaken = link.untaken.saturating_sub(*before);
        observed.drops.insert(Dropped::InterfaceQueue.word(), untaken);
        Ok(Observed {
            altered: altered.collect(),
            ..observed
        })
    }

    /// Nobody else can change more than the interface.
    fn mend(&mut self, altered: &BTreeSet<Altered>) -> Result<(), DeviceError> {
        if altered.is_empty() {
            return Ok(());
        }
        set_up(&self.shared.tun, &self.interface, self.configuration.mtu)
    }

    fn close(mut self: Box<Self>) -> Result<(), DeviceError> {
        self.stop();
        let socket = self.control.take().map_or(Ok(()), ControlSocket::close);
        let interface = self.interface.clone();
        let left = self
            .shared
            .tun
            .persist(false)
            .map_err(|source| kernel(&format!("remove {interface}"), source));
        drop(self);
        left?;
        patiently(|| match link::find(&interface) {
            Ok(None) => Ok(()),
            _ => Err(kernel(&format!("remove {interface}"), io::ErrorKind::TimedOut.into())),
        })?;
        socket
    }
}

impl Drop for Userspace {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What the interface is now.
fn interface(links: &Socket, name: &str) -> Result<link::Link, DeviceError> {
    link::find_by(links, name)
        .map_err(|source| kernel(&format!("look for interface {name}"), source))?
        .ok_or_else(|| DeviceError::Gone(name.to_owned()))
}

fn observed(shared: &Shared) -> Observed {
    let configured = current(&shared.configured);
    let now = Instant::now();
    let table = current(&shared.table);
    let peers = configured.iter().map(|(key, spec)| {
        let stats = table.by_key.get(key).map_or_else(PeerStats::default, |peer| {
            let state = peer.state();
            PeerStats {
                endpoint: state.endpoint.map(|endpoint| endpoint.peer),
                handshake_age: state.tunnel.completed().map(|at| now.saturating_duration_since(at)),
                rx_bytes: state.rx_bytes,
                tx_bytes: state.tx_bytes,
            }
        });
        (
            *key,
            ObservedPeer {
                configured: spec.clone(),
                stats,
            },
        )
    });
    let sockets = current(&shared.sockets);
    let mut drops = shared.drops.read();
    *drops.entry(Dropped::SocketQueue.word()).or_default() += sockets.overflowed();
    Observed {
        peers: peers.collect(),
        listen_port: sockets.port,
        drops,
        altered: BTreeSet::new(),
    }
}

/// Tries again for a moment. A file we have closed stays open in a child process that is just being started (between fork and
/// exec), and with it the interface or port: an agent that runs `nft` meets this now and then.
fn patiently<T>(mut attempt: impl FnMut() -> Result<T, DeviceError>) -> Result<T, DeviceError> {
    let until = Instant::now() + PATIENCE;
    loop {
        match attempt() {
            Err(DeviceError::Exists(_) | DeviceError::Listen { .. } | DeviceError::Kernel { .. })
                if Instant::now() < until =>
            {
                std::thread::sleep(PATIENCE / 20)
            }
            result => return result,
        }
    }
}

/// Removes what a killed process left: its control socket.
///
/// # Errors
/// The file cannot be removed.
pub fn remove_leftovers(interface: &str) -> Result<(), DeviceError> {
    control::remove_stale(&control::path(Path::new(CONTROL_DIRECTORY), interface))
}

/// Removes the interface of that name if an agent made it and ended; `false` = it is somebody else's, and was left alone.
///
/// # Errors
/// A process still holds the interface, or the kernel refuses.
pub fn remove_interface(interface: &str) -> Result<bool, DeviceError> {
    tun::remove_ours(interface)
}

fn set_up(tun: &Tun, interface: &str, mtu: u16) -> Result<(), DeviceError> {
    link::set_up(tun.index, mtu).map_err(|source| kernel(&format!("bring {interface} up with an MTU of {mtu}"), source))
}

fn listen(configuration: &Configuration, options: Options) -> Result<Sockets, DeviceError> {
    let port = configuration.listen_port;
    Sockets::open(port, configuration.fwmark, options.workers, options.offload)
        .map_err(|source| DeviceError::Listen { port, source })
}

fn kernel(action: &str, source: io::Error) -> DeviceError {
    DeviceError::Kernel {
        action: action.to_owned(),
        source,
    }
}
