//! Opens a device, changes and observes it while its threads run, and removes it.

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

use netlink_sys::Socket;
use rustix::event::{EventfdFlags, eventfd};

use crate::{
    configuration::{Configuration, Interface, Options},
    control::{self, ControlSocket},
    datapath::{self, Shared, current, replace},
    drops::{DropReason, Drops},
    error::Error,
    handshakes, inbound,
    key::PublicKey,
    link::{self, Link},
    observed::{Altered, Observed, observed},
    outbound,
    peer::{self, PeerChange, PeerSpec, PeerUpdate, Peers},
    peers::{self, Identity, Peer, PeerTable},
    sockets::Sockets,
    timer_queue,
    tun::{self, Tun},
};

/// Where `wg` looks for userspace devices.
const CONTROL_DIRECTORY: &str = "/var/run/wireguard";
/// How long [`retry_while_busy`] retries.
const BUSY_TIMEOUT: Duration = Duration::from_millis(300);

/// A running WireGuard device, whose interface is up and whose port is bound.
///
/// No call waits for the network, so all may be made from async code. [`Device::open`], [`Device::close`] and a drop can take a fraction of
/// a second, to wait for the kernel or the device's threads. All calls must be made from a thread in the network namespace in which the
/// device was opened.
///
/// Dropping a device keeps its interface, with addresses and routes, until the next process takes it over. Until then the kernel drops the
/// packets routed into it. [`Device::close`] removes everything.
///
/// # Example
/// ```no_run
/// use wg_userspace::{Configuration, Device, Interface, Options, PeerChange, PeerSpec};
///
/// let interface = Interface { name: "wg0", alias: "my program" };
/// let configuration = Configuration {
///     private_key: std::fs::read_to_string("/etc/my-program/key")?.trim().parse()?,
///     listen_port: 51820,
///     fwmark: 0,
///     mtu: 1420,
/// };
/// let mut device = Device::open(interface, configuration, Options::default())?;
/// let peer = PeerSpec {
///     endpoint: Some("192.0.2.2:51820".parse()?),
///     allowed_ips: ["10.9.0.2/32".parse()?].into(),
///     ..PeerSpec::default()
/// };
/// device.apply(&[PeerChange::Add("F5rh5BOUkcQ1QCw92IwcjvpXs1h3Bi+HFNTJul+WkBU=".parse()?, peer)]);
///
/// // Now give the interface an address: ip addr add 10.9.0.1/24 dev wg0
/// for (key, peer) in device.observe()?.peers {
///     println!("{key}: {} bytes received", peer.stats.rx_bytes);
/// }
/// device.close()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Device {
    interface: String,
    alias: String,
    options: Options,
    configuration: Configuration,
    shared: Arc<Shared>,
    /// A netlink socket in the interface's network namespace, and the interface's counter `tx_dropped` when this process opened the device.
    netlink: (Socket, u64),
    threads: Vec<JoinHandle<()>>,
    control: Option<ControlSocket>,
}

impl Device {
    /// Creates the interface, or takes over the interface of an earlier process. Then brings it up and binds the port.
    ///
    /// # Errors
    /// The interface has another alias or is in use, the port is in use, or the kernel refuses. A new interface is removed again.
    pub fn open(interface: Interface<'_>, configuration: Configuration, options: Options) -> Result<Self, Error> {
        let options = Options {
            workers: options.workers.clamp(1, 64),
            ..options
        };
        let tun = retry_while_busy(|| Tun::open(interface, options.workers, options.offload))?;
        set_up(&tun, interface, configuration.mtu)?;
        let sockets = retry_while_busy(|| listen(&configuration, options))?;
        let netlink = link::socket().map_err(|source| Error::kernel("open a netlink socket", source))?;
        let tx_dropped_at_open = find(&netlink, interface)?.tx_dropped;
        let mut device = Self {
            interface: interface.name.to_owned(),
            alias: interface.alias.to_owned(),
            options,
            shared: Arc::new(Self::build_shared(tun, sockets, &configuration, options)?),
            configuration,
            netlink: (netlink, tx_dropped_at_open),
            threads: Vec::new(),
            control: None,
        };
        device.start_forwarding()?;
        device.start_control()?;
        // Last, so that an earlier error leaves no new interface behind.
        device
            .shared
            .tun
            .persist(true)
            .map_err(|source| Error::kernel(format!("make {} outlive this process", interface.name), source))?;
        tracing::info!(
            interface = interface.name,
            workers = options.workers,
            tun = ?device.shared.tun.offload,
            udp = ?current(&device.shared.sockets).has_segmentation(),
            "userspace device opened"
        );
        Ok(device)
    }

    /// The name of the interface.
    #[must_use]
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// The path of the socket that `wg show` reads; `None` if it could not be created.
    #[must_use]
    pub fn control_socket(&self) -> Option<&Path> {
        self.control.as_ref().map(ControlSocket::path)
    }

    /// Applies the differences from the current configuration. A new private key requires a new handshake with every peer; other changes
    /// keep the sessions.
    ///
    /// # Errors
    /// The port is in use, or the kernel refuses.
    pub fn configure(&mut self, configuration: Configuration) -> Result<(), Error> {
        // Each step records what it changed, so that after an error a second call continues with the rest.
        if configuration.listen_port != self.configuration.listen_port {
            // The new sockets also have the new firewall mark.
            let sockets = listen(&configuration, self.options)?;
            let old_sockets = replace(&self.shared.sockets, sockets);
            self.shared
                .drops
                .count_many(DropReason::SocketQueue, old_sockets.receive_queue_drops() as usize);
            for rebound in &self.shared.rebound {
                let _ = rustix::io::write(rebound, &1_u64.to_ne_bytes());
            }
            self.configuration.listen_port = configuration.listen_port;
        } else if configuration.fwmark != self.configuration.fwmark {
            current(&self.shared.sockets)
                .set_fwmark(configuration.fwmark)
                .map_err(|source| Error::kernel("set the firewall mark of the UDP sockets", source))?;
        }
        self.shared.fwmark.store(configuration.fwmark, Ordering::Relaxed);
        self.configuration.fwmark = configuration.fwmark;
        if configuration.mtu != self.configuration.mtu {
            set_up(&self.shared.tun, self.own_interface(), configuration.mtu)?;
            self.shared.mtu.store(usize::from(configuration.mtu), Ordering::Relaxed);
            self.configuration.mtu = configuration.mtu;
        }
        if configuration.private_key != self.configuration.private_key {
            let private = configuration.private_key.secret().clone();
            self.configuration.private_key = configuration.private_key;
            let identity = Identity::new(private, self.shared.drops.staging_budget());
            replace(&self.shared.identity, identity);
            self.rebuild(&current(&self.shared.configured), |_, _| None);
        }
        Ok(())
    }

    /// Applies the changes in order; a batch of packets uses either all changed allowed IPs or none. A peer's session ends only if the peer
    /// is removed or replaced, or gets a new preshared key. A handshake with a new peer that has an endpoint starts at once.
    pub fn apply(&mut self, changes: &[PeerChange]) {
        let mut configured = Peers::clone(&current(&self.shared.configured));
        peer::apply(&mut configured, changes);
        // Only new or removed peers and changed allowed IPs need a new table.
        if changes.iter().any(PeerChange::needs_new_table) {
            // An added peer starts without a session, also if it replaces a peer.
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
    }

    /// Returns the peers, their counters, and the changes that other programs made to the interface.
    ///
    /// # Errors
    /// The kernel does not answer. After [`Error::Gone`] or [`Error::Died`], drop this device and open it again.
    pub fn observe(&self) -> Result<Observed, Error> {
        if self.shared.gone.load(Ordering::Acquire) {
            return Err(Error::Gone(self.interface.clone()));
        }
        if let Some(thread) = self.threads.iter().find(|thread| thread.is_finished()) {
            let thread = thread.thread().name().unwrap_or_default().to_owned();
            return Err(Error::Died {
                interface: self.interface.clone(),
                thread,
            });
        }
        let (netlink, tx_dropped_at_open) = &self.netlink;
        let link = find(netlink, self.own_interface())?;
        let altered = [
            (link.mtu != u32::from(self.configuration.mtu), Altered::Mtu),
            (!link.is_up, Altered::Down),
        ];
        let altered = altered
            .into_iter()
            .filter_map(|(is_altered, part)| is_altered.then_some(part));
        let mut observed = observed(&self.shared);
        let tx_dropped = link.tx_dropped.saturating_sub(*tx_dropped_at_open);
        observed.drops.insert(DropReason::InterfaceQueue.as_str(), tx_dropped);
        Ok(Observed {
            altered: altered.collect(),
            ..observed
        })
    }

    /// Reverts the changes of [`Observed::altered`]: sets the MTU and brings the interface up.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn repair(&mut self) -> Result<(), Error> {
        set_up(&self.shared.tun, self.own_interface(), self.configuration.mtu)
    }

    /// Stops the threads, and removes the interface and the control socket.
    ///
    /// # Errors
    /// The interface or the control socket could not be removed. An error with one does not prevent the removal of the other.
    pub fn close(mut self) -> Result<(), Error> {
        self.stop();
        let socket = self.control.take().map_or(Ok(()), ControlSocket::close);
        let (name, alias) = (self.interface.clone(), self.alias.clone());
        let interface = Interface {
            name: &name,
            alias: &alias,
        };
        let result = self
            .shared
            .tun
            .persist(false)
            .map_err(|source| Error::kernel(format!("remove {name}"), source));
        drop(self);
        result?;
        retry_while_busy(|| match link::find(interface) {
            Ok(None) => Ok(()),
            _ => Err(Error::kernel(format!("remove {name}"), io::ErrorKind::TimedOut.into())),
        })?;
        socket
    }

    fn own_interface(&self) -> Interface<'_> {
        Interface {
            name: &self.interface,
            alias: &self.alias,
        }
    }

    /// Builds the state that the threads share.
    fn build_shared(
        tun: Tun,
        sockets: Sockets,
        configuration: &Configuration,
        options: Options,
    ) -> Result<Shared, Error> {
        let event = || {
            eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
                .map_err(|source| Error::kernel("create an eventfd", source.into()))
        };
        let drops = Drops::default();
        let identity = Identity::new(configuration.private_key.secret().clone(), drops.staging_budget());
        Ok(Shared {
            tun,
            mtu: AtomicUsize::new(usize::from(configuration.mtu)),
            table: RwLock::new(Arc::new(PeerTable::new(Vec::new()))),
            sockets: RwLock::new(Arc::new(sockets)),
            identity: RwLock::new(Arc::new(identity)),
            timers: timer_queue::TimerQueue::default(),
            handshakes: handshakes::Handshakes::default(),
            drops,
            configured: RwLock::default(),
            fwmark: AtomicU32::new(configuration.fwmark),
            gone: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            stop: event()?,
            rebound: (0..options.workers).map(|_| event()).collect::<Result<_, _>>()?,
        })
    }

    fn start_forwarding(&mut self) -> Result<(), Error> {
        for worker in 0..self.options.workers {
            self.start(&format!("wg-out-{worker}"), move |shared| {
                outbound::forward(shared, worker)
            })?;
            self.start(&format!("wg-in-{worker}"), move |shared| {
                inbound::forward(shared, worker)
            })?;
        }
        self.start("wg-clock", datapath::run_timers)?;
        self.start("wg-handshake", handshakes::run)
    }

    fn start_control(&mut self) -> Result<(), Error> {
        match ControlSocket::open(Path::new(CONTROL_DIRECTORY), &self.interface) {
            Ok((socket, listener)) => {
                self.control = Some(socket);
                self.start("wg-control", move |shared| control::serve(&listener, shared))
            }
            // Only `wg show` needs the socket, so the device opens without it, for example on a read-only file system.
            Err(error) => {
                let interface = &self.interface;
                tracing::info!(interface, %error, "no control socket: `wg show` will not see this device");
                Ok(())
            }
        }
    }

    fn start(&mut self, name: &str, work: impl FnOnce(&Shared) + Send + 'static) -> Result<(), Error> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work(&shared))
            .map_err(|source| Error::kernel("start a thread", source))?;
        self.threads.push(thread);
        Ok(())
    }

    /// Replaces the table of peers. A peer that `keep` returns keeps its session and counters; all others are created.
    fn rebuild(&self, configured: &Peers, mut keep: impl FnMut(&PublicKey, &PeerTable) -> Option<Arc<Peer>>) {
        let now = Instant::now();
        let identity = current(&self.shared.identity);
        let old = current(&self.shared.table);
        let mut used_indexes = HashSet::new();
        let mut new_peers = Vec::new();
        let mut peers = Vec::with_capacity(configured.len());
        for (key, spec) in configured {
            let peer = keep(key, &old).unwrap_or_else(|| {
                let index = old.free_index(&used_indexes);
                used_indexes.insert(index);
                let peer = Arc::new(Peer::new(index, identity.tunnel(key, spec, index, now), spec.endpoint));
                new_peers.push(Arc::clone(&peer));
                peer
            });
            peers.push((*key, spec, peer));
        }
        replace(&self.shared.table, PeerTable::new(peers));
        for peer in &new_peers {
            self.initiate_handshake(peer, now);
        }
    }

    fn initiate_handshake(&self, peer: &Arc<Peer>, now: Instant) {
        let mut state = peer.state();
        if state.endpoint.is_some() {
            state.tunnel.initiate_handshake(now);
            self.shared.timers.add(now, peer);
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
            // `initiate_handshake` records a tick for `now`. Without an endpoint, no timer is added below, so this tick would
            // never run, and while it is recorded, the tunnel schedules no later one.
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
            // `initiate_handshake` and `endpoint_changed` record a tick for `now`, which needs a timer.
            if state.tunnel.expects_tick(now) {
                self.shared.timers.add(now, peer);
            } else if let Some(at) = state.tunnel.reschedule(now) {
                self.shared.timers.add(at, peer);
            }
        }
    }

    fn stop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.timers.stop();
        self.shared.handshakes.stop();
        // The write fails only if the counter of the eventfd is full. Then the eventfd is readable already.
        let _ = rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Reads the interface's current properties.
fn find(netlink: &Socket, interface: Interface<'_>) -> Result<Link, Error> {
    let name = interface.name;
    link::find_by(netlink, interface)
        .map_err(|source| Error::kernel(format!("look for interface {name}"), source))?
        .ok_or_else(|| Error::Gone(name.to_owned()))
}

/// Retries for [`BUSY_TIMEOUT`] after an error that may mean that the interface or the port is still in use. Between fork and exec, a new
/// child process still has files open that this process has closed, and so keeps the interface or port in use.
fn retry_while_busy<T>(mut attempt: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    let until = Instant::now() + BUSY_TIMEOUT;
    loop {
        match attempt() {
            Err(Error::Exists(_) | Error::Listen { .. } | Error::Kernel { .. }) if Instant::now() < until => {
                std::thread::sleep(BUSY_TIMEOUT / 20)
            }
            result => return result,
        }
    }
}

/// Removes the control socket of a killed process, if no process listens on it.
///
/// # Errors
/// The file cannot be removed, or a process listens on it.
pub fn remove_control_socket(interface: &str) -> Result<(), Error> {
    control::remove_stale(&control::path(Path::new(CONTROL_DIRECTORY), interface))
}

/// Removes the interface, whatever its kind. `true` = it does not exist any more; `false` = it has another alias or none, and stays.
///
/// # Errors
/// A process still has the interface open, or the kernel refuses.
pub fn remove_interface(interface: Interface<'_>) -> Result<bool, Error> {
    tun::remove_ours(interface)
}

fn set_up(tun: &Tun, interface: Interface<'_>, mtu: u16) -> Result<(), Error> {
    let Interface { name, alias } = interface;
    link::set_up(tun.index, mtu, alias)
        .map_err(|source| Error::kernel(format!("bring {name} up with an MTU of {mtu}"), source))
}

fn listen(configuration: &Configuration, options: Options) -> Result<Sockets, Error> {
    let port = configuration.listen_port;
    Sockets::open(port, configuration.fwmark, options.workers, options.offload)
        .map_err(|source| Error::Listen { port, source })
}
