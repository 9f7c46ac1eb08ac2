//! Attacks from a compromised node. [`Tunnel`] is a WireGuard device whose peer has all addresses as allowed IPs, [`Flood`]
//! sends arbitrary packets at a high rate, and [`Prober`] sends legitimate requests.

pub mod packets;
pub mod witness;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Seek, SeekFrom, Write},
    net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6, TcpListener, TcpStream, UdpSocket},
    panic::resume_unwind,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use clustermesh_agent_core::device::{PeerChange, PeerSpec};
use clustermesh_core::key::PublicKey;
use clustermesh_lab::wait_until;
use socket2::{Domain, Protocol, Socket, Type};
use wg_agent::device::{Configuration, Device, userspace::Userspace};
use x25519_dalek::StaticSecret;

use crate::netns::NetNs;

/// Time between two rounds of a flood, so that other threads can run.
const PACE: Duration = Duration::from_millis(8);
/// A flood pauses while more than this number of bytes (a few rounds) is queued in the target's socket.
const QUEUE_LIMIT: u64 = 1 << 18;
/// The longest pause of a flood, in units of [`PACE`].
const MAX_PAUSE: u32 = 20;
/// Time between two requests of a prober, and the time limit for a reply over UDP.
const REQUEST_PACE: Duration = Duration::from_millis(50);
/// After this time without a reply a UDP prober starts a new session, because a restarted target has lost the old session.
const SESSION_TIMEOUT: Duration = Duration::from_millis(400);
/// Time limit of a wait, also on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn public(secret: &StaticSecret) -> PublicKey {
    PublicKey::new(x25519_dalek::PublicKey::from(secret).to_bytes())
}

/// A thread that is stopped when this is dropped.
pub struct BackgroundThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl BackgroundThread {
    pub fn start(ns: &NetNs, work: impl FnOnce(&AtomicBool) + Send + 'static) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let stopped = stop.clone();
        let thread = Some(ns.enter(|| thread::spawn(move || work(&stopped))));
        Self { stop, thread }
    }
}

impl Drop for BackgroundThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            join(thread);
        }
    }
}

/// Waits for a thread. If the thread has panicked, the test panics too, unless it already does.
fn join(thread: JoinHandle<()>) {
    if let Err(panic) = thread.join()
        && !thread::panicking()
    {
        resume_unwind(panic);
    }
}

/// The attacker's WireGuard device, with at most one peer.
pub struct Tunnel {
    pub interface: String,
    device: Mutex<Userspace>,
    configuration: Mutex<Configuration>,
    /// Without an endpoint until [`Self::set_peer`] adds the peer.
    peer: Mutex<(PublicKey, PeerSpec)>,
}

impl Tunnel {
    /// Opens a device with these addresses, and adds `routes` to it. [`Self::set_peer`] adds the peer.
    pub fn open(ns: &NetNs, interface: &str, key: StaticSecret, addresses: &[IpAddr], routes: &[&str]) -> Self {
        let configuration = Configuration {
            private_key: key,
            listen_port: 51820,
            fwmark: 0,
            mtu: 1420,
        };
        let device = ns
            .enter(|| Userspace::open(interface, &configuration))
            .expect("open a device");
        for address in addresses {
            ns.ip(&format!("addr add {address} dev {interface}"));
        }
        for route in routes {
            ns.ip(&format!("route add {route} dev {interface}"));
        }
        Self {
            interface: interface.to_owned(),
            device: Mutex::new(device),
            configuration: Mutex::new(configuration),
            peer: Mutex::new((PublicKey::new([0; 32]), PeerSpec::default())),
        }
    }

    /// Replaces the peer by one with this key and endpoint, whose allowed IPs are all addresses.
    pub fn set_peer(&self, key: PublicKey, endpoint: SocketAddr) {
        let everything = ["0.0.0.0/0", "::/0"].map(|net| net.parse().expect("a network"));
        let spec = PeerSpec {
            endpoint: Some(endpoint),
            allowed_ips: everything.into(),
            ..PeerSpec::default()
        };
        let old = std::mem::replace(&mut *self.peer.lock().expect("the peer"), (key, spec.clone()));
        let mut changes = vec![PeerChange::Add(key, spec)];
        if old.1.endpoint.is_some() {
            changes.insert(0, PeerChange::Remove(old.0));
        }
        let mut device = self.device.lock().expect("the device");
        device.apply(&changes).expect("configure a peer");
    }

    /// Starts a new session by removing and adding the peer.
    pub fn restart_session(&self) {
        let (key, spec) = self.peer.lock().expect("the peer").clone();
        if spec.endpoint.is_some() {
            let changes = [PeerChange::Remove(key), PeerChange::Add(key, spec)];
            let mut device = self.device.lock().expect("the device");
            device.apply(&changes).expect("configure a peer");
        }
    }

    /// Replaces the private key, and starts a new session.
    pub fn replace_private_key(&self, key: StaticSecret) {
        let mut configuration = self.configuration.lock().expect("the configuration");
        configuration.private_key = key;
        let mut device = self.device.lock().expect("the device");
        device.configure(&configuration).expect("configure the device");
        drop((device, configuration));
        self.restart_session();
    }
}

/// Sends legitimate requests, one after the other, and counts the replies.
pub struct Prober {
    pub name: String,
    replies: Arc<AtomicU64>,
    _thread: BackgroundThread,
}

impl Prober {
    /// Sends datagrams from a fixed port to an [`echo`]. Restarts the session if no reply arrives for 0.4 s.
    pub fn udp(ns: &NetNs, tunnel: &Arc<Tunnel>, from: SocketAddr, to: SocketAddr) -> Self {
        let socket = ns.enter(|| UdpSocket::bind(from)).expect("bind");
        socket.set_read_timeout(Some(REQUEST_PACE)).expect("a timeout");
        let tunnel = tunnel.clone();
        Self::start(ns, format!("udp {to}"), move |replies, stop| {
            let mut last = Instant::now();
            while !stop.load(Ordering::Acquire) {
                let _ = socket.send_to(b"request", to);
                if matches!(socket.recv_from(&mut [0; 100]), Ok((_, from)) if from == to) {
                    replies.fetch_add(1, Ordering::Release);
                    last = Instant::now();
                    thread::park_timeout(REQUEST_PACE);
                } else if last.elapsed() > SESSION_TIMEOUT {
                    tunnel.restart_session();
                    last = Instant::now();
                }
            }
        })
    }

    /// Opens a new connection to an [`echo`] for each request.
    pub fn tcp(ns: &NetNs, to: SocketAddr) -> Self {
        Self::start(ns, format!("tcp {to}"), move |replies, stop| {
            while !stop.load(Ordering::Acquire) {
                if request(to).is_ok() {
                    replies.fetch_add(1, Ordering::Release);
                }
                thread::park_timeout(REQUEST_PACE);
            }
        })
    }

    fn start(ns: &NetNs, name: String, work: impl FnOnce(&AtomicU64, &AtomicBool) + Send + 'static) -> Self {
        let replies = Arc::<AtomicU64>::default();
        let counted = replies.clone();
        let work = BackgroundThread::start(ns, move |stop| work(&counted, stop));
        Self {
            name,
            replies,
            _thread: work,
        }
    }

    pub fn replies(&self) -> u64 {
        self.replies.load(Ordering::Acquire)
    }
}

fn request(to: SocketAddr) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, Duration::from_millis(500))?;
    stream.set_read_timeout(Some(Duration::from_millis(500)))?;
    stream.write_all(b"?")?;
    stream.read_exact(&mut [0])
}

/// Echoes everything that arrives at one UDP and one TCP port of this address, until the process exits.
pub fn echo(ns: &NetNs, address: IpAddr, udp_port: u16, tcp_port: u16) {
    let socket = ns.enter(|| UdpSocket::bind((address, udp_port))).expect("bind");
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        loop {
            if let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(&buffer[..length], from);
            }
        }
    });
    let listener = ns.enter(|| TcpListener::bind((address, tcp_port))).expect("listen");
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut buffer = [0; 100];
                while let Ok(length @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..length]).is_err() {
                        break;
                    }
                }
            });
        }
    });
}

/// Sends packets with their IP headers into an interface, bypassing the routing tables.
pub struct RawSender {
    v4: Socket,
    v6: Socket,
}

impl RawSender {
    pub fn open(ns: &NetNs, interface: &str) -> Self {
        let open = |domain| {
            let socket = Socket::new(domain, Type::RAW, Some(Protocol::from(255))).expect("a raw socket");
            socket.bind_device(Some(interface.as_bytes())).expect("bind the socket");
            socket
        };
        let (v4, v6) = ns.enter(|| (open(Domain::IPV4), open(Domain::IPV6)));
        Self { v4, v6 }
    }

    /// Sends a packet. The kernel overwrites the length and checksum of an IPv4 header.
    pub fn send(&self, to: IpAddr, packet: &[u8]) -> std::io::Result<usize> {
        match to {
            IpAddr::V4(to) => self.v4.send_to(packet, &SocketAddrV4::new(to, 0).into()),
            IpAddr::V6(to) => self.v6.send_to(packet, &SocketAddrV6::new(to, 0, 0, 0).into()),
        }
    }
}

/// One item of each round of a flood: one or more packets.
pub enum FloodPacket {
    /// The same packets to this address.
    Repeated(IpAddr, Vec<Vec<u8>>),
    /// The SYN of a new connection from this source to this destination, with another source port of [`witness::NEW_PORTS`] in
    /// each round.
    NewConnection(IpAddr, SocketAddr),
}

/// The receive queues of a UDP port, read from /proc/net.
struct ReceiveQueue {
    tables: [File; 2],
    port: String,
}

impl ReceiveQueue {
    fn open(ns: &NetNs, port: u16) -> Self {
        let open = |name| File::open(format!("/proc/thread-self/net/{name}")).expect("a table of sockets");
        Self {
            tables: ns.enter(|| ["udp", "udp6"].map(open)),
            port: format!(":{port:04X}"),
        }
    }

    /// The number of bytes queued in all sockets of this port.
    fn queued_bytes(&mut self) -> u64 {
        let mut sum = 0;
        for table in &mut self.tables {
            let mut text = String::new();
            table.seek(SeekFrom::Start(0)).expect("seek");
            table.read_to_string(&mut text).expect("read a table of sockets");
            for line in text.lines().skip(1) {
                let words: Vec<&str> = line.split_whitespace().collect();
                let [_, local, _, _, queues, ..] = words[..] else {
                    panic!("a socket: {line}");
                };
                let (_, received) = queues.split_once(':').expect("two queues");
                if local.ends_with(&self.port) {
                    sum += u64::from_str_radix(received, 16).expect("a number");
                }
            }
        }
        sum
    }
}

/// Sends arbitrary packets in rounds. Waits up to `MAX_PAUSE` between rounds until the target has read most of its socket queue: a
/// full queue would delay the packets of all peers by seconds.
pub struct Flood {
    rounds: Arc<AtomicU64>,
    /// Counts of packets that the attacker's own kernel refused to send, by error. They never reach the target.
    unsent: Arc<Mutex<BTreeMap<String, u64>>>,
    flood_packets_per_round: usize,
    started_at: Instant,
    _thread: BackgroundThread,
}

impl Flood {
    /// Starts to send `packets` in each round into this interface, bypassing the routing tables. `port` in the namespace
    /// `target` receives the encrypted packets.
    pub fn start(ns: &NetNs, interface: &str, packets: Vec<FloodPacket>, (target, port): (&NetNs, u16)) -> Self {
        let mut queue = ReceiveQueue::open(target, port);
        let raw = RawSender::open(ns, interface);
        let (rounds, unsent) = (
            Arc::<AtomicU64>::default(),
            Arc::<Mutex<BTreeMap<String, u64>>>::default(),
        );
        let (counted, failed) = (rounds.clone(), unsent.clone());
        let flood_packets_per_round = packets.len();
        let work = BackgroundThread::start(ns, move |stop| {
            let send = |to: IpAddr, packet: &[u8]| {
                if let Err(error) = raw.send(to, packet) {
                    let mut all = failed.lock().expect("the unsent packets");
                    *all.entry(format!("{to}: {error}")).or_default() += 1;
                }
            };
            for source_port in witness::NEW_PORTS.cycle() {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                for packet in &packets {
                    match packet {
                        FloodPacket::Repeated(to, packets) => packets.iter().for_each(|packet| send(*to, packet)),
                        FloodPacket::NewConnection(from, to) => {
                            send(to.ip(), &packets::syn(*from, to.ip(), (source_port, to.port())))
                        }
                    }
                }
                counted.fetch_add(1, Ordering::Release);
                thread::park_timeout(PACE);
                // The flood continues even if the target has stopped reading.
                for _ in 0..MAX_PAUSE {
                    if queue.queued_bytes() < QUEUE_LIMIT || stop.load(Ordering::Acquire) {
                        break;
                    }
                    thread::park_timeout(PACE);
                }
            }
        });
        Self {
            rounds,
            unsent,
            flood_packets_per_round,
            started_at: Instant::now(),
            _thread: work,
        }
    }

    pub fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Acquire)
    }

    /// Waits for this many further rounds.
    pub async fn wait_for_rounds(&self, rounds: u64) {
        let from = self.rounds();
        wait_until("further rounds of the flood", PATIENCE, async || match self.rounds() {
            now if now >= from + rounds => Ok(()),
            now => Err(format!("{} rounds", now - from)),
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    }

    pub fn started_at(&self) -> Instant {
        self.started_at
    }

    /// The number of [`FloodPacket`]s in a round.
    pub fn flood_packets_per_round(&self) -> usize {
        self.flood_packets_per_round
    }

    pub fn unsent(&self) -> BTreeMap<String, u64> {
        self.unsent.lock().expect("the unsent packets").clone()
    }
}
