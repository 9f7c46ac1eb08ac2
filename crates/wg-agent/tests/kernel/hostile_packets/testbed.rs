//! Sets up the testbed of `hostile_packets`: a victim, a friend (a peer that exchanges packets with the victim all the
//! time), and an attacker (a compromised peer). Friend and attacker each have their own link to the victim.

mod raw_peer;

use std::{
    env,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use clustermesh_agent_core::device::{PeerChange, PeerSpec};
use clustermesh_core::key::PublicKey;
use wg_agent::device::{
    Configuration, Device,
    userspace::{Options, Userspace},
};
use x25519_dalek::StaticSecret;

pub(crate) use self::raw_peer::{RawPeer, udp};
use clustermesh_tests::netns::{NetNs, unique_name, veth, wait_until};

/// The victim's number. The node with number `n` has the inner address 10.9.0.n.
pub(crate) const VICTIM: u8 = 1;
pub(crate) const FRIEND: u8 = 2;
/// A peer of the victim from which the attacks come.
pub(crate) const ATTACKER: u8 = 3;
pub(crate) const PORT: u16 = 51820;
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// A gap between replies through the tunnel is a stall if it is longer than the longest gap outside the tunnel by this time.
pub(crate) const STALL: Duration = Duration::from_secs(5);
/// The limit of memory growth during an attack.
pub(crate) const MAX_MEMORY_GROWTH: u64 = 64 << 20;
/// The UDP port at which the victim echoes.
const ECHO_PORT: u16 = 7;

pub(crate) fn secret(number: u8) -> StaticSecret {
    StaticSecret::from([number; 32])
}

pub(crate) fn public(number: u8) -> PublicKey {
    PublicKey::new(x25519_dalek::PublicKey::from(&secret(number)).to_bytes())
}

pub(crate) fn peer(number: u8, endpoint: Option<SocketAddr>) -> PeerChange {
    let spec = PeerSpec {
        endpoint,
        allowed_ips: [format!("10.9.0.{number}/32").parse().expect("a prefix")].into(),
        ..PeerSpec::default()
    };
    PeerChange::Add(public(number), spec)
}

/// The outer addresses of one family, and the number of workers with which the tests of this family run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outer {
    /// The victim's links to the friend, to the attacker and to a further peer that some tests add: on each, the victim's address and
    /// the address of the other end.
    pub(crate) links: [[IpAddr; 2]; 3],
    /// The victim's address on the link to the attacker.
    pub(crate) victim: IpAddr,
    pub(crate) attacker: IpAddr,
    prefix: u8,
    /// The network of further addresses of the attacker.
    pub(crate) range: &'static str,
    /// Returns the n-th address of `range`.
    pub(crate) nth: fn(u32) -> IpAddr,
    /// Number of workers (a thread for each direction) of each device.
    workers: usize,
}

const fn v4(c: [u8; 3], d: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(c[0], c[1], c[2], d))
}

const fn v6(net: u16, node: u16) -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, net, 0, 0, 0, node))
}

pub(crate) static V4: Outer = Outer {
    links: [
        [v4([192, 0, 2], 1), v4([192, 0, 2], 2)],
        [v4([198, 51, 100], 1), v4([198, 51, 100], 3)],
        [v4([203, 0, 113], 1), v4([203, 0, 113], 4)],
    ],
    victim: v4([198, 51, 100], 1),
    attacker: v4([198, 51, 100], 3),
    prefix: 24,
    range: "198.18.0.0/15",
    nth: |number| Ipv4Addr::from_bits(Ipv4Addr::new(198, 18, 0, 0).to_bits() + number).into(),
    workers: 1,
};

pub(crate) static V6: Outer = Outer {
    links: [[v6(1, 1), v6(1, 2)], [v6(2, 1), v6(2, 3)], [v6(3, 1), v6(3, 4)]],
    victim: v6(2, 1),
    attacker: v6(2, 3),
    prefix: 64,
    range: "fd99::/32",
    // Each address is in its own /64, because rate limits count a whole /64 as one source.
    nth: |number| Ipv6Addr::from_bits((0xfd99 << 112) + (u128::from(number) << 64) + 1).into(),
    workers: 2,
};

pub(crate) struct Testbed {
    pub(crate) outer: &'static Outer,
    pub(crate) victim: NetNs,
    pub(crate) friend: NetNs,
    pub(crate) attacker: NetNs,
    pub(crate) device: Userspace,
    pub(crate) interface: String,
    _friend_device: Userspace,
}

impl Testbed {
    pub(crate) fn new(outer: &'static Outer) -> Self {
        let (victim, friend, attacker) = (NetNs::new("victim"), NetNs::new("friend"), NetNs::new("attacker"));
        outer.add_link(0, &victim, &friend);
        outer.add_link(1, &victim, &attacker);
        let [victim_at, friend_at] = outer.links[0].map(|address| SocketAddr::new(address, PORT));
        let (interface, device) = open(
            outer,
            &victim,
            VICTIM,
            &[peer(FRIEND, Some(friend_at)), peer(ATTACKER, None)],
        );
        let (_, friend_device) = open(outer, &friend, FRIEND, &[peer(VICTIM, Some(victim_at))]);
        wait_until("a ping from the friend", TIMEOUT, || friend.pings("10.9.0.1"));
        Self {
            outer,
            victim,
            friend,
            attacker,
            device,
            interface,
            _friend_device: friend_device,
        }
    }

    /// The outer address and port at which the attacker reaches the victim.
    pub(crate) fn victim_endpoint(&self) -> SocketAddr {
        SocketAddr::new(self.outer.victim, PORT)
    }

    /// The victim's drops so far, for these reasons.
    pub(crate) fn dropped(&self, reasons: &[&str]) -> u64 {
        let drops = self.device.observe().expect("observe").drops;
        reasons.iter().map(|reason| drops[reason]).sum()
    }

    /// The endpoint of a peer, as the victim knows it.
    pub(crate) fn endpoint(&self, number: u8) -> Option<SocketAddr> {
        self.device.observe().expect("observe").peers[&public(number)]
            .stats
            .endpoint
    }

    /// A UDP socket on the victim's inner address.
    pub(crate) fn inner_socket(&self, port: u16) -> UdpSocket {
        let address = SocketAddr::from((Ipv4Addr::new(10, 9, 0, VICTIM), port));
        let socket = self
            .victim
            .enter(|| UdpSocket::bind(address))
            .expect("bind an inner socket");
        socket.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        socket
    }
}

impl Outer {
    /// Creates one of the victim's links: `eth<number>` in the victim, `eth0` at the other end.
    pub(crate) fn add_link(&self, number: usize, victim: &NetNs, other: &NetNs) {
        let [ours, theirs] = self.links[number].map(|address| format!("{address}/{}", self.prefix));
        veth(victim, &format!("eth{number}"), &[&ours], other, "eth0", &[&theirs]);
    }
}

/// Opens the device of a node, with its inner address.
pub(crate) fn open(outer: &Outer, ns: &NetNs, number: u8, peers: &[PeerChange]) -> (String, Userspace) {
    let configuration = Configuration {
        private_key: secret(number),
        listen_port: PORT,
        fwmark: 0,
        mtu: 1420,
    };
    let interface = unique_name("wh");
    let options = Options {
        workers: outer.workers,
        ..Options::default()
    };
    let mut device = ns
        .enter(|| Userspace::open_with(&interface, &configuration, options))
        .expect("open a device");
    ns.ip(&format!("addr add 10.9.0.{number}/24 dev {interface}"));
    device.apply(peers).expect("add peers");
    (interface, device)
}

/// Continuous requests from the friend to the victim through the tunnel, and as a control also directly over their link.
/// [`Self::finish`] compares the longest gaps between replies.
pub(crate) struct Conversation {
    stop: Arc<AtomicBool>,
    answers: Arc<AtomicU64>,
    echoes: [JoinHandle<()>; 2],
    tunnel: JoinHandle<Duration>,
    control: JoinHandle<Duration>,
}

impl Conversation {
    pub(crate) fn start(testbed: &Testbed) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let answers = Arc::new(AtomicU64::new(0));
        let inner = [VICTIM, FRIEND].map(|number| IpAddr::from(Ipv4Addr::new(10, 9, 0, number)));
        let start = |[victim, friend]: [IpAddr; 2], counted: Arc<AtomicU64>, pause| {
            let bind = |ns: &NetNs, address: IpAddr, port, timeout| {
                let socket = ns.enter(|| UdpSocket::bind((address, port))).expect("bind");
                socket.set_read_timeout(Some(timeout)).expect("a timeout");
                socket
            };
            let echo = bind(&testbed.victim, victim, ECHO_PORT, Duration::from_millis(200));
            let requester = bind(&testbed.friend, friend, 0, Duration::from_millis(20));
            requester.connect((victim, ECHO_PORT)).expect("connect");
            let (echo_stop, requester_stop) = (Arc::clone(&stop), Arc::clone(&stop));
            (
                std::thread::spawn(move || echo_until(&echo_stop, &echo)),
                std::thread::spawn(move || longest_gap_until(&requester_stop, &requester, &counted, pause)),
            )
        };
        let (tunnel_echo, tunnel) = start(inner, Arc::clone(&answers), Duration::ZERO);
        let (control_echo, control) = start(testbed.outer.links[0], Arc::default(), Duration::from_millis(10));
        Self {
            stop,
            answers,
            echoes: [tunnel_echo, control_echo],
            tunnel,
            control,
        }
    }

    /// Waits for more than 20 further replies.
    pub(crate) fn wait_for_answers(&self) {
        let before = self.answers.load(Ordering::Acquire);
        wait_until("replies to the friend during the attack", TIMEOUT, || {
            self.answers.load(Ordering::Acquire) > before + 20
        });
    }

    /// Stops the requests. Fails if there was a stall.
    pub(crate) fn finish(self) {
        self.wait_for_answers();
        self.stop.store(true, Ordering::Release);
        let [longest, control] = [self.tunnel, self.control].map(|thread| thread.join().expect("a requesting thread"));
        for echo in self.echoes {
            echo.join().expect("an echo thread");
        }
        let answers = self.answers.load(Ordering::Acquire);
        println!("{answers} replies, at most {longest:?} apart; {control:?} outside the tunnel");
        assert!(longest < STALL + control, "{longest:?} without a reply");
    }
}

fn echo_until(stop: &AtomicBool, socket: &UdpSocket) {
    let mut buffer = [0; 64];
    while !stop.load(Ordering::Acquire) {
        if let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..length], from);
        }
    }
}

fn longest_gap_until(stop: &AtomicBool, socket: &UdpSocket, answers: &AtomicU64, pause: Duration) -> Duration {
    let (mut longest, mut last) = (Duration::ZERO, Instant::now());
    while !stop.load(Ordering::Acquire) {
        let _ = socket.send(b"are you there?");
        if socket.recv(&mut [0; 64]).is_ok() {
            answers.fetch_add(1, Ordering::Release);
            longest = longest.max(last.elapsed());
            last = Instant::now();
            std::thread::sleep(pause);
        }
    }
    longest.max(last.elapsed())
}

/// Environment variable that is set in a process that runs one test.
const SINGLE_TEST: &str = "CLUSTERMESH_TEST_ALONE";

/// Runs the test with this path in its own process. In a shared process, the victim could reuse memory that an earlier test
/// has freed, which would hide memory growth.
pub(crate) fn run_in_own_process(path: &str, test: impl FnOnce()) {
    if env::var_os(SINGLE_TEST).is_some() {
        return test();
    }
    let (_, name) = path.split_once("::").expect("a path in this program");
    let output = Command::new(env::current_exe().expect("this program"))
        .args(["--exact", name, "--test-threads=1", "--nocapture"])
        .env(SINGLE_TEST, "1")
        .output()
        .expect("start this program again");
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    print!("{out}");
    eprint!("{err}");
    assert!(output.status.success() && out.contains("\ntest result: ok. 1 passed;"));
}

/// Resident memory of this process, in bytes.
pub(crate) fn resident_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc/self/status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")).expect("VmRSS");
    kilobytes.parse::<u64>().expect("a number") * 1024
}
