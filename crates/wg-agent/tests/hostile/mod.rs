//! The stage of hostile_packets: a victim, a friend it talks with all the while, and a stranger on a wire of its own.

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use boringtun::noise::{Tunn, TunnResult};
use clustermesh_agent_core::device::{PeerChange, PeerSpec};
use clustermesh_core::key::PublicKey;
use wg_agent::device::{Configuration, Device, userspace::Userspace};
use x25519_dalek::StaticSecret;

use crate::netns::{NetNs, unique_name, veth, wait_until};

/// Inner addresses are 10.9.0.n.
pub(crate) const VICTIM: u8 = 1;
pub(crate) const FRIEND: u8 = 2;
/// A peer of the victim, but not its friend.
pub(crate) const STRANGER: u8 = 3;
/// Where the victim listens, as the stranger sees it.
pub(crate) const VICTIM_AT: &str = "198.51.100.1:51820";
pub(crate) const STRANGER_AT: &str = "198.51.100.3";
pub(crate) const SOON: Duration = Duration::from_secs(20);
/// No answer for so long is a stall, on a machine however busy.
pub(crate) const STALL: Duration = Duration::from_secs(5);
/// What an attack may cost in memory.
pub(crate) const MEMORY: u64 = 64 << 20;
const ECHO: u16 = 7;

pub(crate) fn secret(number: u8) -> StaticSecret {
    StaticSecret::from([number; 32])
}

pub(crate) fn public(number: u8) -> PublicKey {
    PublicKey::new(x25519_dalek::PublicKey::from(&secret(number)).to_bytes())
}

pub(crate) fn peer(number: u8, endpoint: Option<&str>) -> PeerChange {
    let spec = PeerSpec {
        endpoint: endpoint.map(|endpoint| endpoint.parse().expect("an endpoint")),
        allowed_ips: [format!("10.9.0.{number}/32").parse().expect("a range")].into(),
        ..PeerSpec::default()
    };
    PeerChange::Add(public(number), spec)
}

pub(crate) struct Stage {
    pub(crate) victim: NetNs,
    pub(crate) friend: NetNs,
    pub(crate) stranger: NetNs,
    pub(crate) device: Userspace,
    pub(crate) interface: String,
    _friends: Userspace,
}

impl Stage {
    pub(crate) fn new() -> Self {
        let (victim, friend, stranger) = (NetNs::new("victim"), NetNs::new("friend"), NetNs::new("stranger"));
        veth(&victim, "eth0", &["192.0.2.1/24"], &friend, "eth0", &["192.0.2.2/24"]);
        veth(
            &victim,
            "eth1",
            &["198.51.100.1/24"],
            &stranger,
            "eth0",
            &["198.51.100.3/24"],
        );
        let (interface, device) = open(
            &victim,
            VICTIM,
            &[peer(FRIEND, Some("192.0.2.2:51820")), peer(STRANGER, None)],
        );
        let (_, friends) = open(&friend, FRIEND, &[peer(VICTIM, Some("192.0.2.1:51820"))]);
        wait_until("the friend", SOON, || friend.pings("10.9.0.1"));
        Self {
            victim,
            friend,
            stranger,
            device,
            interface,
            _friends: friends,
        }
    }

    /// What the victim dropped so far, for one of these reasons.
    pub(crate) fn dropped(&self, reasons: &[&str]) -> u64 {
        let drops = self.device.observe().expect("observe").drops;
        reasons.iter().map(|reason| drops[reason]).sum()
    }

    /// Where the victim believes a peer to be.
    pub(crate) fn endpoint(&self, number: u8) -> Option<SocketAddr> {
        self.device.observe().expect("observe").peers[&public(number)]
            .stats
            .endpoint
    }

    /// An inner UDP server of the victim.
    pub(crate) fn inner_socket(&self, port: u16) -> UdpSocket {
        let address = SocketAddr::from((Ipv4Addr::new(10, 9, 0, VICTIM), port));
        let socket = self
            .victim
            .enter(|| UdpSocket::bind(address))
            .expect("bind an inner socket");
        socket
            .set_read_timeout(Some(Duration::from_millis(200)))
            .expect("a timeout");
        socket
    }
}

/// A device of a node, with its inner address.
pub(crate) fn open(ns: &NetNs, number: u8, peers: &[PeerChange]) -> (String, Userspace) {
    let configuration = Configuration {
        private_key: secret(number),
        listen_port: 51820,
        fwmark: 0,
        mtu: 1420,
    };
    let interface = unique_name("wh");
    let mut device = ns
        .enter(|| Userspace::open(&interface, &configuration))
        .expect("open a device");
    ns.ip(&format!("addr add 10.9.0.{number}/24 dev {interface}"));
    device.apply(peers).expect("add peers");
    (interface, device)
}

/// Victim and friend talk without a pause; how well is heard at the end.
pub(crate) struct Conversation {
    stop: Arc<AtomicBool>,
    answers: Arc<AtomicU64>,
    echo: JoinHandle<()>,
    asking: JoinHandle<Duration>,
}

impl Conversation {
    pub(crate) fn start(stage: &Stage) -> Self {
        let echo = stage.inner_socket(ECHO);
        let asking = stage.friend.enter(|| {
            let socket = UdpSocket::bind("10.9.0.2:0").expect("bind");
            socket.connect(("10.9.0.1", ECHO)).expect("connect");
            socket
        });
        asking
            .set_read_timeout(Some(Duration::from_millis(20)))
            .expect("a timeout");
        let stop = Arc::new(AtomicBool::new(false));
        let answers = Arc::new(AtomicU64::new(0));
        let (echoes, asks, heard) = (Arc::clone(&stop), Arc::clone(&stop), Arc::clone(&answers));
        Self {
            stop,
            answers,
            echo: std::thread::spawn(move || {
                let mut buffer = [0; 64];
                while !echoes.load(Ordering::Acquire) {
                    if let Ok((length, from)) = echo.recv_from(&mut buffer) {
                        let _ = echo.send_to(&buffer[..length], from);
                    }
                }
            }),
            asking: std::thread::spawn(move || {
                let (mut longest, mut last) = (Duration::ZERO, Instant::now());
                while !asks.load(Ordering::Acquire) {
                    let _ = asking.send(b"are you there?");
                    if asking.recv(&mut [0; 64]).is_ok() {
                        heard.fetch_add(1, Ordering::Release);
                        longest = longest.max(last.elapsed());
                        last = Instant::now();
                    }
                }
                longest.max(last.elapsed())
            }),
        }
    }

    /// Waits until more was said: to be called while an attack goes on.
    pub(crate) fn goes_on(&self) {
        let before = self.answers.load(Ordering::Acquire);
        wait_until("answers of the friend under attack", SOON, || {
            self.answers.load(Ordering::Acquire) > before + 20
        });
    }

    /// Ends it. Fails where it stood still.
    pub(crate) fn went_on(self) {
        self.goes_on();
        self.stop.store(true, Ordering::Release);
        let longest = self.asking.join().expect("the one who asks");
        self.echo.join().expect("the one who answers");
        let answers = self.answers.load(Ordering::Acquire);
        println!("{answers} answers, at most {longest:?} apart");
        assert!(longest < STALL, "{longest:?} without an answer");
    }
}

/// Memory of this process, bytes.
pub(crate) fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc/self/status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")).expect("VmRSS");
    kilobytes.parse::<u64>().expect("a number") * 1024
}

/// WireGuard spoken by hand over a socket of the stranger's, to say what no device would.
pub(crate) struct Mouth {
    core: Tunn,
    pub(crate) socket: UdpSocket,
}

impl Mouth {
    /// Who `own` is to the victim; from a port of its own.
    pub(crate) fn new(stage: &Stage, own: StaticSecret) -> Self {
        let socket = stage.stranger.enter(|| {
            let socket = UdpSocket::bind((STRANGER_AT, 0)).expect("bind");
            socket.connect(VICTIM_AT).expect("connect");
            socket
        });
        socket.set_read_timeout(Some(SOON)).expect("a timeout");
        let victim = x25519_dalek::PublicKey::from(&secret(VICTIM));
        Self {
            core: Tunn::new(own, victim, None, None, 1, None),
            socket,
        }
    }

    pub(crate) fn initiation(&mut self) -> Vec<u8> {
        let mut buffer = vec![0; 2048];
        match self.core.format_handshake_initiation(&mut buffer, true) {
            TunnResult::WriteToNetwork(message) => message.to_vec(),
            other => panic!("{other:?} for an initiation"),
        }
    }

    /// A session with the victim.
    pub(crate) fn shake_hands(&mut self) {
        let initiation = self.initiation();
        self.socket.send(&initiation).expect("send");
        let (mut response, mut buffer) = ([0; 2048], vec![0; 2048]);
        let length = self.socket.recv(&mut response).expect("a response");
        match self.core.decapsulate(None, &response[..length], &mut buffer) {
            TunnResult::WriteToNetwork(keepalive) => drop(self.socket.send(keepalive).expect("send")),
            other => panic!("{other:?} for a response"),
        }
    }

    /// An inner packet as a data message.
    pub(crate) fn seal(&mut self, packet: &[u8]) -> Vec<u8> {
        let mut buffer = vec![0; packet.len() + 64];
        match self.core.encapsulate(packet, &mut buffer) {
            TunnResult::WriteToNetwork(message) => message.to_vec(),
            other => panic!("{other:?} for a packet"),
        }
    }
}

/// An inner IPv4 UDP packet; without a UDP checksum, which IPv4 allows.
pub(crate) fn udp(from: [u8; 4], port: u16, text: &[u8]) -> Vec<u8> {
    let length = 28 + text.len() as u16;
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0];
    packet[2..4].copy_from_slice(&length.to_be_bytes());
    packet.extend(from);
    packet.extend([10, 9, 0, VICTIM]);
    let sum = packet
        .chunks(2)
        .fold(0_u32, |sum, pair| sum + u32::from(pair[0]) * 256 + u32::from(pair[1]));
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend([0x30, 0x39]);
    packet.extend(port.to_be_bytes());
    packet.extend((length - 20).to_be_bytes());
    packet.extend([0, 0]);
    packet.extend(text);
    packet
}
