//! A node that nobody but its owner rules: WireGuard of its own with allowedIPs of its own choosing, programs that send
//! whatever they like into it without a pause, and others that ask in earnest. What it may reach is the tests' business.
#![allow(dead_code, reason = "each test binary uses its own part of this module")]

pub(crate) mod packets;
pub(crate) mod witness;

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

/// Between two rounds of a flood: others have work to do, too.
const PACE: Duration = Duration::from_millis(8);
/// Bytes that wait in the target's socket: a few rounds.
const FULL: u64 = 1 << 18;
/// For how many paces a flood waits for less.
const PATIENT: u32 = 20;
/// Between two questions of one that asks in earnest, and the time that it waits for each answer.
const ASKING: Duration = Duration::from_millis(50);
/// Without an answer for so long it begins a new session: a target that has started again knows nothing of the old one.
const SILENCE: Duration = Duration::from_millis(400);
/// Longer than anything takes on a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn public(secret: &StaticSecret) -> PublicKey {
    PublicKey::new(x25519_dalek::PublicKey::from(secret).to_bytes())
}

/// A thread that works until it is dropped.
pub(crate) struct Work {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Work {
    pub(crate) fn start(ns: &NetNs, work: impl FnOnce(&AtomicBool) + Send + 'static) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let stopped = stop.clone();
        let thread = Some(ns.enter(|| thread::spawn(move || work(&stopped))));
        Self { stop, thread }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            join(thread);
        }
    }
}

/// Waits for a thread; its panic becomes the test's, unless that one has failed already.
fn join(thread: JoinHandle<()>) {
    if let Err(panic) = thread.join()
        && !thread::panicking()
    {
        resume_unwind(panic);
    }
}

/// WireGuard on a node, by hand: one peer that may be anybody.
pub(crate) struct Tunnel {
    pub(crate) interface: String,
    device: Mutex<Userspace>,
    configuration: Mutex<Configuration>,
    peer: Mutex<(PublicKey, PeerSpec)>,
}

impl Tunnel {
    /// Opens it, with these addresses and a route for each of `routes`. The peer comes with [`Self::dial`].
    pub(crate) fn open(ns: &NetNs, interface: &str, key: StaticSecret, addresses: &[IpAddr], routes: &[&str]) -> Self {
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

    /// Takes this one for its peer, at this address, with everything behind it.
    pub(crate) fn dial(&self, key: PublicKey, endpoint: SocketAddr) {
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

    /// Begins a session anew.
    pub(crate) fn knock(&self) {
        let (key, spec) = self.peer.lock().expect("the peer").clone();
        if spec.endpoint.is_some() {
            let anew = [PeerChange::Remove(key), PeerChange::Add(key, spec)];
            let mut device = self.device.lock().expect("the device");
            device.apply(&anew).expect("configure a peer");
        }
    }

    /// Calls itself otherwise.
    pub(crate) fn take_key(&self, key: StaticSecret) {
        let mut configuration = self.configuration.lock().expect("the configuration");
        configuration.private_key = key;
        let mut device = self.device.lock().expect("the device");
        device.configure(&configuration).expect("configure the device");
        drop((device, configuration));
        self.knock();
    }
}

/// One that asks in earnest, over and over.
pub(crate) struct Asker {
    pub(crate) name: String,
    answers: Arc<AtomicU64>,
    _work: Work,
}

impl Asker {
    /// Datagrams from a port of this node's to an [`echo`], and whoever is silent too long is called anew.
    pub(crate) fn udp(ns: &NetNs, tunnel: &Arc<Tunnel>, from: SocketAddr, to: SocketAddr) -> Self {
        let socket = ns.enter(|| UdpSocket::bind(from)).expect("bind");
        socket.set_read_timeout(Some(ASKING)).expect("a timeout");
        let tunnel = tunnel.clone();
        Self::with(ns, format!("udp {to}"), move |answers, stop| {
            let mut last = Instant::now();
            while !stop.load(Ordering::Acquire) {
                let _ = socket.send_to(b"anyone?", to);
                if matches!(socket.recv_from(&mut [0; 100]), Ok((_, from)) if from == to) {
                    answers.fetch_add(1, Ordering::Release);
                    last = Instant::now();
                    thread::park_timeout(ASKING);
                } else if last.elapsed() > SILENCE {
                    tunnel.knock();
                    last = Instant::now();
                }
            }
        })
    }

    /// Connections to an [`echo`], each a new one.
    pub(crate) fn tcp(ns: &NetNs, to: SocketAddr) -> Self {
        Self::with(ns, format!("tcp {to}"), move |answers, stop| {
            while !stop.load(Ordering::Acquire) {
                if talk(to).is_ok() {
                    answers.fetch_add(1, Ordering::Release);
                }
                thread::park_timeout(ASKING);
            }
        })
    }

    fn with(ns: &NetNs, name: String, work: impl FnOnce(&AtomicU64, &AtomicBool) + Send + 'static) -> Self {
        let answers = Arc::<AtomicU64>::default();
        let counted = answers.clone();
        let work = Work::start(ns, move |stop| work(&counted, stop));
        Self {
            name,
            answers,
            _work: work,
        }
    }

    pub(crate) fn answers(&self) -> u64 {
        self.answers.load(Ordering::Acquire)
    }
}

fn talk(to: SocketAddr) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, Duration::from_millis(500))?;
    stream.set_read_timeout(Some(Duration::from_millis(500)))?;
    stream.write_all(b"?")?;
    stream.read_exact(&mut [0])
}

/// Sends everything back that comes to this address, by UDP at one port and TCP at another, for as long as the process runs.
pub(crate) fn echo(ns: &NetNs, at: IpAddr, udp: u16, tcp: u16) {
    let socket = ns.enter(|| UdpSocket::bind((at, udp))).expect("bind");
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        loop {
            if let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(&buffer[..length], from);
            }
        }
    });
    let listener = ns.enter(|| TcpListener::bind((at, tcp))).expect("listen");
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

/// Sends whole packets into an interface, by no route.
pub(crate) struct Raw {
    v4: Socket,
    v6: Socket,
}

impl Raw {
    pub(crate) fn open(ns: &NetNs, interface: &str) -> Self {
        let open = |domain| {
            let socket = Socket::new(domain, Type::RAW, Some(Protocol::from(255))).expect("a raw socket");
            socket.bind_device(Some(interface.as_bytes())).expect("bind it");
            socket
        };
        let (v4, v6) = ns.enter(|| (open(Domain::IPV4), open(Domain::IPV6)));
        Self { v4, v6 }
    }

    /// Of IPv4 the kernel writes the length and the checksum of the header itself.
    pub(crate) fn send(&self, to: IpAddr, packet: &[u8]) -> std::io::Result<usize> {
        match to {
            IpAddr::V4(to) => self.v4.send_to(packet, &SocketAddrV4::new(to, 0).into()),
            IpAddr::V6(to) => self.v6.send_to(packet, &SocketAddrV6::new(to, 0, 0, 0).into()),
        }
    }
}

/// What a flood sends in each round.
pub(crate) enum Shot {
    /// The same packet, or the same few, to this address.
    Same(IpAddr, Vec<Vec<u8>>),
    /// A connection that is always a new one: from, to.
    New(IpAddr, SocketAddr),
}

/// What waits to be read by a port of UDP, as the kernel tells it.
struct Waiting {
    tables: [File; 2],
    port: String,
}

impl Waiting {
    fn at(ns: &NetNs, port: u16) -> Self {
        let open = |name| File::open(format!("/proc/thread-self/net/{name}")).expect("a table of sockets");
        Self {
            tables: ns.enter(|| ["udp", "udp6"].map(open)),
            port: format!(":{port:04X}"),
        }
    }

    /// In bytes, of every socket of this port.
    fn bytes(&mut self) -> u64 {
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

/// One that sends without a pause, as fast as its target reads: what stood in the target's socket would keep everybody's packets
/// for seconds.
pub(crate) struct Flood {
    rounds: Arc<AtomicU64>,
    /// What the node's own kernel would not send, by its error: such an attack would test nothing.
    unsent: Arc<Mutex<BTreeMap<String, u64>>>,
    shots: usize,
    began: Instant,
    _work: Work,
}

impl Flood {
    /// Sends into this interface, by no route, all of `shots` in each round, by a tunnel that ends in this namespace at this port.
    pub(crate) fn start(ns: &NetNs, interface: &str, shots: Vec<Shot>, (target, port): (&NetNs, u16)) -> Self {
        let mut waiting = Waiting::at(target, port);
        let raw = Raw::open(ns, interface);
        let (rounds, unsent) = (
            Arc::<AtomicU64>::default(),
            Arc::<Mutex<BTreeMap<String, u64>>>::default(),
        );
        let (counted, failed) = (rounds.clone(), unsent.clone());
        let number = shots.len();
        let work = Work::start(ns, move |stop| {
            let send = |to: IpAddr, packet: &[u8]| {
                if let Err(error) = raw.send(to, packet) {
                    let mut all = failed.lock().expect("what was not sent");
                    *all.entry(format!("{to}: {error}")).or_default() += 1;
                }
            };
            for port in witness::NEW.cycle() {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                for shot in &shots {
                    match shot {
                        Shot::Same(to, packets) => packets.iter().for_each(|packet| send(*to, packet)),
                        Shot::New(from, to) => send(to.ip(), &packets::syn(*from, to.ip(), (port, to.port()))),
                    }
                }
                counted.fetch_add(1, Ordering::Release);
                thread::park_timeout(PACE);
                // A reader that stands still is no reason to stop.
                for _ in 0..PATIENT {
                    if waiting.bytes() < FULL || stop.load(Ordering::Acquire) {
                        break;
                    }
                    thread::park_timeout(PACE);
                }
            }
        });
        Self {
            rounds,
            unsent,
            shots: number,
            began: Instant::now(),
            _work: work,
        }
    }

    pub(crate) fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Acquire)
    }

    /// Waits until so many rounds more were sent.
    pub(crate) async fn more(&self, rounds: u64) {
        let from = self.rounds();
        wait_until("a flood to go on", PATIENCE, async || match self.rounds() {
            now if now >= from + rounds => Ok(()),
            now => Err(format!("{} rounds", now - from)),
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    }

    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    /// Different packets in a round.
    pub(crate) fn shots(&self) -> usize {
        self.shots
    }

    pub(crate) fn unsent(&self) -> BTreeMap<String, u64> {
        self.unsent.lock().expect("what was not sent").clone()
    }
}
