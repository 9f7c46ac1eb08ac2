//! Tests the userspace device against wireguard-go. If both sides send an initiation at the same time (crossed handshakes),
//! wireguard-go may keep a session whose index it has deleted, and then receives nothing until its timer of 15 s expires: see
//! `wg-userspace/src/tunnel.rs`. Needs root and Go.

use std::{
    fs::File,
    io::Write,
    net::UdpSocket,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use clustermesh_agent_core::device::{PeerChange, PeerSpec};
use clustermesh_core::key::PublicKey;
use clustermesh_lab::{ArtefactSet, Tools};
use clustermesh_tests::netns::{NetNs, Running, transfer, unique_name, veth, wait_until};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wg_agent::device::{Configuration, Device, userspace::Userspace};
use x25519_dalek::StaticSecret;

/// The number of crossed handshakes that the test makes. If no response were held back, about one in a hundred would lose its session.
const CROSSED: u32 = 100;
/// With fewer crossed handshakes, the test proves too little and fails: on a busy machine some starts do not cross.
const MIN_CROSSED: u32 = 25;
/// How often the test starts both devices at most. Each start is one attempt to make their handshakes cross.
const MAX_STARTS: u32 = 250;
/// WireGuard's retry interval with its jitter is 5.3 s. With one retry, and on a busy machine, the first reply comes before this time;
/// after a lost session it comes later, because wireguard-go starts a new handshake after 15 s.
const RETRY: Duration = Duration::from_secs(12);

fn wireguard_go() -> PathBuf {
    let tools = Tools::ensure(&[ArtefactSet::WireguardGo], &|line| eprintln!("{line}")).expect("build wireguard-go");
    tools.path("wireguard-go").expect("wireguard-go")
}

fn secret(number: u8) -> StaticSecret {
    StaticSecret::from([number; 32])
}

fn public(number: u8) -> PublicKey {
    PublicKey::new(x25519_dalek::PublicKey::from(&secret(number)).to_bytes())
}

/// A process of wireguard-go in a network namespace, configured without a peer.
struct WireguardGo {
    interface: String,
    log: PathBuf,
    _process: Running,
}

impl Drop for WireguardGo {
    fn drop(&mut self) {
        // A killed process cannot remove its socket.
        let _ = std::fs::remove_file(format!("/var/run/wireguard/{}.sock", self.interface));
    }
}

impl WireguardGo {
    fn start(ns: &NetNs, program: &Path, directory: &Path) -> Self {
        let interface = unique_name("wg");
        let log = directory.join(format!("{interface}.log"));
        let output = File::create(&log).expect("a log");
        let mut command = Command::new(program);
        command
            .args(["-f", &interface])
            .env("LOG_LEVEL", "verbose")
            .stdin(Stdio::null());
        command.stdout(output.try_clone().expect("a log")).stderr(output);
        let process = ns.spawn_command(&mut command);
        let socket = format!("/var/run/wireguard/{interface}.sock");
        wait_until("wireguard-go", Duration::from_secs(60), || {
            std::os::unix::net::UnixStream::connect(&socket).is_ok()
        });
        let mut key = tempfile::NamedTempFile::new_in(directory).expect("a key file");
        let text = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, secret(2).as_bytes());
        key.write_all(text.as_bytes()).expect("write a key");
        let file = key.path().to_str().expect("a path");
        ns.run("wg", &["set", &interface, "listen-port", "51820", "private-key", file]);
        ns.ip(&format!("addr add 10.9.0.2/24 dev {interface}"));
        ns.ip(&format!("link set {interface} mtu 1420 up"));
        Self {
            interface,
            log,
            _process: process,
        }
    }

    /// Adds the userspace device as a peer. The persistent keepalive starts a handshake at once.
    fn add_peer(&self, ns: &NetNs, endpoint: &str) {
        let key = public(1).to_string();
        let peer = ["peer", &key, "endpoint", endpoint, "allowed-ips", "10.9.0.1/32"];
        ns.run(
            "wg",
            &[&["set", &self.interface][..], &peer, &["persistent-keepalive", "25"]].concat(),
        );
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).expect("the log of wireguard-go")
    }
}

fn open_device(ns: &NetNs) -> Userspace {
    let configuration = Configuration {
        private_key: secret(1),
        listen_port: 51820,
        fwmark: 0,
        mtu: 1420,
    };
    let interface = unique_name("wd");
    let device = ns
        .enter(|| Userspace::open(&interface, &configuration))
        .expect("open a device");
    ns.ip(&format!("addr add 10.9.0.1/24 dev {interface}"));
    device
}

/// A relay in wireguard-go's namespace that makes handshakes cross. It delays the first initiation of each side until
/// the other side's initiation arrives, or for 30 ms, and then forwards it. It forwards all other packets at once.
struct Relay {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<bool>>,
}

/// Where the relay receives packets from the userspace device. The device uses it as the endpoint of wireguard-go.
const TO_GO: &str = "192.0.2.2:6000";
/// Where the relay receives packets from wireguard-go. wireguard-go uses it as the endpoint of the userspace device.
const TO_DEVICE: &str = "127.0.0.1:6001";

impl Relay {
    fn start(ns: &NetNs) -> Self {
        let sides = ns.enter(|| {
            [(TO_GO, "192.0.2.1:51820"), (TO_DEVICE, "127.0.0.1:51820")].map(|(own, peer)| {
                let socket = UdpSocket::bind(own).expect("bind the relay");
                socket.connect(peer).expect("connect the relay");
                socket.set_nonblocking(true).expect("a non-blocking relay");
                socket
            })
        });
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || relay(&sides, &stopped));
        Self {
            stop,
            thread: Some(thread),
        }
    }

    /// Stops the relay. Returns whether the initiations crossed.
    fn finish(mut self) -> bool {
        self.stop.store(true, Ordering::Release);
        self.thread.take().expect("a thread").join().expect("the relay")
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
    }
}

fn relay(sides: &[UdpSocket; 2], stop: &AtomicBool) -> bool {
    let mut kept: [Option<Vec<u8>>; 2] = [None, None];
    let mut since = None;
    let mut crossed = false;
    let mut released = false;
    let mut buffer = [0; 2048];
    while !stop.load(Ordering::Acquire) {
        let mut files = [
            PollFd::new(&sides[0], PollFlags::IN),
            PollFd::new(&sides[1], PollFlags::IN),
        ];
        let _ = poll(
            &mut files,
            Some(&Timespec {
                tv_sec: 0,
                tv_nsec: 1_000_000,
            }),
        );
        for from in 0..2 {
            // Ends when no packet is left, or at an ICMP error: the receiver of an earlier packet is not listening yet.
            while let Ok(length) = sides[from].recv(&mut buffer) {
                if !released && buffer[0] == 1 && kept[from].is_none() {
                    kept[from] = Some(buffer[..length].to_vec());
                    since.get_or_insert_with(Instant::now);
                } else {
                    let _ = sides[1 - from].send(&buffer[..length]);
                }
            }
        }
        let both = kept.iter().all(Option::is_some);
        if both || since.is_some_and(|since| since.elapsed() > Duration::from_millis(30)) {
            crossed |= both;
            released = true;
            since = None;
            for from in [0, 1] {
                if let Some(initiation) = kept[from].take() {
                    let _ = sides[1 - from].send(&initiation);
                }
            }
        }
    }
    crossed
}

fn peer_change(endpoint: &str) -> PeerChange {
    PeerChange::Add(
        public(2),
        PeerSpec {
            endpoint: Some(endpoint.parse().expect("an endpoint")),
            allowed_ips: ["10.9.0.2/32".parse().expect("a prefix")].into(),
            ..PeerSpec::default()
        },
    )
}

/// Two connected namespaces, the first for the userspace device and the second for wireguard-go.
fn connected_namespaces() -> (NetNs, NetNs) {
    let (a, b) = (NetNs::new("userspace"), NetNs::new("wireguard-go"));
    veth(&a, "eth0", &["192.0.2.1/24"], &b, "eth0", &["192.0.2.2/24"]);
    (a, b)
}

/// The time from `began` until a ping is answered, with ten pings a second.
fn time_to_ping(ns: &NetNs, address: &str, began: Instant) -> Duration {
    // With `-c 1 -w`, ping sends until the first reply.
    let output = ns.output("ping", &["-n", "-i", "0.1", "-c", "1", "-w", "60", address]);
    assert!(output.status.success(), "no answer from {address} in 60 s");
    began.elapsed()
}

#[test]
fn crossed_handshakes_with_wireguard_go_need_at_most_one_retry() {
    let program = wireguard_go();
    let directory = tempfile::tempdir().expect("a directory");
    let (a, b) = connected_namespaces();
    // The ping fills the neighbour caches: otherwise ARP would delay an initiation, and the initiations would not cross.
    wait_until("a ping on the underlay", Duration::from_secs(60), || {
        a.pings("192.0.2.2")
    });
    let (mut starts, mut crossed) = (0, 0);
    let mut worst = Duration::ZERO;
    let mut slow = Vec::new();
    while crossed < CROSSED && starts < MAX_STARTS {
        starts += 1;
        let wireguard_go = WireguardGo::start(&b, &program, directory.path());
        let mut device = open_device(&a);
        let relay = Relay::start(&b);
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                barrier.wait();
                device.apply(&[peer_change(TO_GO)]).expect("add a peer");
            });
            barrier.wait();
            wireguard_go.add_peer(&b, TO_DEVICE);
        });
        let began = Instant::now();
        let (there, back) = std::thread::scope(|scope| {
            let there = scope.spawn(|| time_to_ping(&a, "10.9.0.2", began));
            let back = scope.spawn(|| time_to_ping(&b, "10.9.0.1", began));
            (
                there.join().expect("ping to wireguard-go"),
                back.join().expect("ping from it"),
            )
        });
        crossed += u32::from(relay.finish());
        worst = worst.max(there).max(back);
        if there.max(back) > RETRY {
            slow.push((starts, there, back, wireguard_go.log()));
        }
        a.enter(|| Box::new(device).close()).expect("close");
    }
    println!("{starts} starts, {crossed} crossed, worst {worst:?}");
    assert!(slow.is_empty(), "longer than {RETRY:?}: {slow:#?}");
    assert!(
        crossed >= MIN_CROSSED,
        "only {crossed} of {starts} starts crossed, too few for this test"
    );
}

#[test]
fn tcp_passes_in_both_directions_with_wireguard_go() {
    let program = wireguard_go();
    let directory = tempfile::tempdir().expect("a directory");
    let (a, b) = connected_namespaces();
    let wireguard_go = WireguardGo::start(&b, &program, directory.path());
    let mut device = open_device(&a);
    wireguard_go.add_peer(&b, "192.0.2.1:51820");
    device.apply(&[peer_change("192.0.2.2:51820")]).expect("add a peer");
    time_to_ping(&a, "10.9.0.2", Instant::now());
    transfer(&a, &b, "10.9.0.2:5000", 50_000_000);
    transfer(&b, &a, "10.9.0.1:5000", 50_000_000);
    let dump = b.run("wg", &["show", &wireguard_go.interface, "latest-handshakes"]);
    assert!(
        dump.starts_with(&public(1).to_string()) && !dump.trim_end().ends_with("\t0"),
        "{dump}"
    );
}
