//! Implements the WireGuard device in userspace: the protocol (`tunnel`, over boringtun) between a TUN device and UDP sockets.
//!
//! Plain threads do the work: for each worker one from interface to network (`outbound`) and one from network to interface (`inbound`),
//! one for timers (`clock`), one that answers initiations (`handshakes`), and one that answers `wg show` (`control`). They share one
//! immutable table of peers, which is replaced as a whole. A thread locks a peer for one burst of packets and never locks two peers at
//! once. No async runtime is involved, so a busy agent delays no packet and a busy tunnel delays no API call.
//!
//! Where the kernel offers it, one system call transfers a large TCP or UDP packet (TUN with a virtio-net header) or a run of datagrams
//! (UDP segmentation and receive offload). Otherwise each packet takes its own call.
//!
//! The interface outlives the process (`tun`). While no process has it open, the kernel drops the packets routed into it. The next process
//! takes it over and initiates a handshake with every peer.

mod clock;
mod control;
mod datapath;
mod drops;
#[doc(hidden)]
pub mod fuzzing;
mod gate;
mod handshakes;
mod inbound;
mod inner;
mod link;
mod outbound;
mod peers;
mod prefix_map;
mod sockets;
mod source_limiter;
mod staged;
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
    drops::{DropReason, Drops},
    peers::{Identity, Peer, PeerTable},
    sockets::Sockets,
    tun::Tun,
};
use super::{Altered, Configuration, Device, DeviceError, Observed};

/// Where `wg` looks for userspace devices.
const CONTROL_DIRECTORY: &str = "/var/run/wireguard";
/// More workers do not help: the peers' locks and the kernel's queues become the limit.
const MOST_WORKERS: usize = 8;
/// How long [`retry_while_busy`] retries.
const BUSY_TIMEOUT: Duration = Duration::from_millis(300);

/// Options that affect only the performance of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Use segmentation and receive offload of TUN and UDP where the kernel has it.
    pub offload: bool,
    /// Threads for each direction, 1 to 64. The kernel spreads flows and peers over them.
    pub workers: usize,
}

impl Default for Options {
    /// Offload, and one worker for every two cores: each worker has a thread for each direction.
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        Self {
            offload: true,
            workers: (cores / 2).clamp(1, MOST_WORKERS),
        }
    }
}

/// An open userspace device.
pub struct Userspace {
    interface: String,
    options: Options,
    configuration: Configuration,
    shared: Arc<Shared>,
    /// A netlink socket in the interface's network namespace, and the interface's `tx_dropped` when this process opened it.
    links: (Socket, u64),
    threads: Vec<JoinHandle<()>>,
    control: Option<ControlSocket>,
}

impl Userspace {
    /// The result of [`Device::backend`].
    pub const BACKEND: &str = "userspace";

    /// Creates the interface, or takes over the one that an earlier agent process left, brings it up and binds the port.
    ///
    /// # Errors
    /// The interface is not the agent's, the port is taken, or the kernel refuses; nothing new is left behind.
    pub fn open(interface: &str, configuration: &Configuration) -> Result<Self, DeviceError> {
        Self::open_with(interface, configuration, Options::default())
    }

    /// Like [`Self::open`], with these options.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(interface: &str, configuration: &Configuration, options: Options) -> Result<Self, DeviceError> {
        let options = Options {
            workers: options.workers.clamp(1, 64),
            ..options
        };
        let tun = retry_while_busy(|| Tun::open(interface, options.workers, options.offload))?;
        set_up(&tun, interface, configuration.mtu)?;
        let sockets = retry_while_busy(|| listen(configuration, options))?;
        let event = || {
            eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
                .map_err(|source| kernel("make an event file", source.into()))
        };
        let links = link::socket().map_err(|source| kernel("open a netlink socket", source))?;
        let before = self::interface(&links, interface)?.tx_dropped;
        let drops = Drops::default();
        let identity = Identity::new(configuration.private_key.clone(), drops.staging_budget());
        let shared = Arc::new(Shared {
            tun,
            mtu: AtomicUsize::new(usize::from(configuration.mtu)),
            table: RwLock::new(Arc::new(PeerTable::new(Vec::new()))),
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
        for worker in 0..options.workers {
            device.start(&format!("wg-out-{worker}"), move |shared| {
                outbound::forward(shared, worker)
            })?;
            device.start(&format!("wg-in-{worker}"), move |shared| {
                inbound::forward(shared, worker)
            })?;
        }
        device.start("wg-clock", datapath::run_clock)?;
        device.start("wg-handshake", handshakes::run)?;
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
            // Only `wg show` needs the socket, so the device also works on a read-only file system.
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

    /// The path of the socket that `wg show` reads; `None` if it could not be created.
    #[must_use]
    pub fn control_socket(&self) -> Option<&Path> {
        self.control.as_ref().map(ControlSocket::path)
    }

    /// Replaces the table of peers. A peer that `keep` returns keeps its session and counters; any other is created anew.
    fn rebuild(&self, configured: &Peers, mut keep: impl FnMut(&PublicKey, &PeerTable) -> Option<Arc<Peer>>) {
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
        replace(&self.shared.table, PeerTable::new(peers));
        for peer in &fresh {
            self.initiate_handshake(peer, now);
        }
    }

    fn initiate_handshake(&self, peer: &Arc<Peer>, now: Instant) {
        let mut state = peer.state();
        if state.endpoint.is_some() {
            state.tunnel.initiate_handshake(now);
            self.shared.clock.add(now, peer);
        }
    }

    /// Changes keepalive, preshared key and endpoint of a peer in the table.
    fn update(&self, peer: &Arc<Peer>, spec: &PeerSpec, update: &PeerUpdate) {
        let now = Instant::now();
        let mut state = peer.state();
        if update.keepalive.is_some() {
            state.tunnel.set_keepalive(peers::keepalive(spec), now);
        }
        if update.preshared_key.is_some() {
            state.tunnel.set_preshared_key(peers::preshared_key(spec));
            // Without an endpoint no tick is scheduled, and the tunnel would wait for one for ever.
            if state.endpoint.is_some() {
                state.tunnel.initiate_handshake(now);
            }
        }
        let known = state.endpoint.map(|endpoint| endpoint.remote);
        if update.endpoint.is_some() && update.endpoint != known {
            state.endpoint = update.endpoint.map(Into::into);
            state.tunnel.endpoint_changed(now);
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
        // The write fails only if the eventfd's counter is full; then the eventfd is readable already.
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
                .count_many(DropReason::SocketQueue, before.receive_queue_drops() as usize);
            for rebound in &self.shared.rebound {
                let _ = rustix::io::write(rebound, &1_u64.to_ne_bytes());
            }
        } else if configuration.fwmark != self.configuration.fwmark {
            current(&self.shared.sockets)
                .set_fwmark(configuration.fwmark)
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
            let identity = Identity::new(configuration.private_key.clone(), self.shared.drops.staging_budget());
            replace(&self.shared.identity, identity);
            self.rebuild(&current(&self.shared.configured), |_, _| None);
        }
        Ok(())
    }

    fn apply(&mut self, changes: &[PeerChange]) -> Result<(), DeviceError> {
        let mut configured = Peers::clone(&current(&self.shared.configured));
        device::apply(&mut configured, changes);
        // Only new or removed peers and changed allowed IPs need a new table.
        let reshaped = changes.iter().any(|change| match change {
            PeerChange::Update(_, update) => {
                !update.add_allowed_ips.is_empty() || !update.remove_allowed_ips.is_empty()
            }
            PeerChange::Add(..) | PeerChange::Remove(_) => true,
        });
        if reshaped {
            // A peer that is removed and added in one call starts without a session.
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
        let tx_dropped = link.tx_dropped.saturating_sub(*before);
        observed.drops.insert(DropReason::InterfaceQueue.as_str(), tx_dropped);
        Ok(Observed {
            altered: altered.collect(),
            ..observed
        })
    }

    /// Other programs can change only MTU and link state, so `altered` contains nothing else.
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
        retry_while_busy(|| match link::find(&interface) {
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

/// Reads the interface's current properties.
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
                endpoint: state.endpoint.map(|endpoint| endpoint.remote),
                handshake_age: state
                    .tunnel
                    .last_handshake()
                    .map(|at| now.saturating_duration_since(at)),
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
    *drops.entry(DropReason::SocketQueue.as_str()).or_default() += sockets.receive_queue_drops();
    Observed {
        peers: peers.collect(),
        listen_port: sockets.port,
        drops,
        altered: BTreeSet::new(),
    }
}

/// Retries for [`BUSY_TIMEOUT`] while the interface or the port is in use. A child process that is just being started (`nft`) keeps our
/// closed files open between fork and exec, and with them the interface or port.
fn retry_while_busy<T>(mut attempt: impl FnMut() -> Result<T, DeviceError>) -> Result<T, DeviceError> {
    let until = Instant::now() + BUSY_TIMEOUT;
    loop {
        match attempt() {
            Err(DeviceError::Exists(_) | DeviceError::Listen { .. } | DeviceError::Kernel { .. })
                if Instant::now() < until =>
            {
                std::thread::sleep(BUSY_TIMEOUT / 20)
            }
            result => return result,
        }
    }
}

/// Removes the control socket that a killed process left.
///
/// # Errors
/// The file cannot be removed.
pub fn remove_leftovers(interface: &str) -> Result<(), DeviceError> {
    control::remove_stale(&control::path(Path::new(CONTROL_DIRECTORY), interface))
}

/// Removes the interface of that name if it is an agent's and no process has it open; `false` = it is not an agent's, and stays.
///
/// # Errors
/// A process still has the interface open, or the kernel refuses.
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
