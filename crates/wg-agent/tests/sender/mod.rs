//! Programs that send all the time from inside namespaces, and what each of them is told: answers, errors, or nothing.
#![allow(dead_code, reason = "each test binary uses its own part of this module")]

use std::{
    collections::BTreeMap,
    fs::File,
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    panic::resume_unwind,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use nix::{
    sched::{CloneFlags, setns},
    sys::socket::{setsockopt, sockopt},
};

/// Where everybody who is asked listens.
const PORT: u16 = 7007;
/// Where the agents listen.
const WIREGUARD: u16 = 51820;
/// Between two packets of one that sends all the time.
const PACE: Duration = Duration::from_millis(10);
/// Between two of one that asks now and then. A node counts the errors about `unreachable` routes against a packet's IPv4
/// source twice (ip_error and icmp_send of Linux share one bucket, a second's worth of each): who sends without a pause of
/// two seconds is told twice and then not again.
const ASKING: Duration = Duration::from_millis(2100);
/// Without an answer for so many packets, a sender begins a new flow, as a client that tries again: the translation of a
/// flow is settled by its first packet.
const PATIENCE: u32 = 25;

/// What a sender has met with so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Told {
    /// Packets that came back.
    pub(crate) answers: u64,
    /// Errors of the socket, by what the system calls them: what ICMP says, and what the node itself does.
    pub(crate) errors: BTreeMap<String, u64>,
}

impl Told {
    /// Errors that say there is no way.
    pub(crate) fn unreachable(&self) -> u64 {
        let told = |error: &&String| error.contains("EHOSTUNREACH") || error.contains("ENETUNREACH");
        self.errors
            .iter()
            .filter(|(error, _)| told(error))
            .map(|(_, count)| count)
            .sum()
    }
}

/// One that sends to one address until it is dropped.
pub(crate) struct Sender {
    pub(crate) name: String,
    told: Arc<Mutex<Told>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Runs on a thread inside the network namespace that `path` leads to.
fn inside<T: Send + 'static>(path: &Path, what: impl FnOnce() -> T + Send + 'static) -> T {
    let file = File::open(path).expect("open a network namespace");
    let run = move || {
        setns(&file, CloneFlags::CLONE_NEWNET).expect("enter a network namespace");
        what()
    };
    thread::spawn(run).join().expect("what runs in a namespace")
}

fn socket(netns: &Path, source: IpAddr, to: IpAddr) -> UdpSocket {
    inside(netns, move || {
        // An ephemeral port may be the one that an agent wants when it starts.
        let bind = || UdpSocket::bind((source, 0)).expect("a socket");
        let port = |socket: &UdpSocket| socket.local_addr().expect("its address").port();
        let socket = std::iter::repeat_with(bind).find(|socket| port(socket) != WIREGUARD);
        let socket = socket.expect("it never ends");
        // Else UDP keeps to itself what a router says of a host that cannot be reached (ip(7), IP_RECVERR).
        match to {
            IpAddr::V4(_) => setsockopt(&socket, sockopt::Ipv4RecvErr, &true),
            IpAddr::V6(_) => setsockopt(&socket, sockopt::Ipv6RecvErr, &true),
        }
        .expect("ask for errors");
        socket.set_nonblocking(true).expect("a socket that does not wait");
        socket
    })
}

impl Sender {
    /// Starts one in the namespace that `netns` leads to, which sends all the time.
    pub(crate) fn start(name: &str, netns: &Path, to: IpAddr) -> Self {
        let any: IpAddr = match to {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        Self::with(name, netns, any, to, PACE)
    }

    /// The same of one that asks now and then, from an address that nobody else sends from.
    pub(crate) fn asking(name: &str, netns: &Path, source: IpAddr, to: IpAddr) -> Self {
        Self::with(name, netns, source, to, ASKING)
    }

    fn with(name: &str, netns: &Path, source: IpAddr, to: IpAddr, pace: Duration) -> Self {
        let (told, stop) = (Arc::<Mutex<Told>>::default(), Arc::<AtomicBool>::default());
        let (netns, shared, stopped) = (netns.to_owned(), told.clone(), stop.clone());
        let thread = thread::spawn(move || {
            let at = SocketAddr::new(to, PORT);
            let mut from = socket(&netns, source, to);
            let mut connected = false;
            let mut silent = 0;
            while !stopped.load(Ordering::Relaxed) {
                // Where there is no route this says so at once.
                let sent = match connected {
                    true => from.send(b"is it clear?"),
                    false => from.connect(at).map(|()| {
                        connected = true;
                        0
                    }),
                };
                silent += 1;
                let mut said = vec![sent.err()];
                loop {
                    match from.recv(&mut [0; 100]) {
                        Ok(_) => {
                            shared.lock().expect("told").answers += 1;
                            silent = 0;
                        }
                        Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                        Err(error) => said.push(Some(error)),
                    }
                    if said.len() > 8 {
                        break;
                    }
                }
                for error in said.into_iter().flatten() {
                    let code = nix::errno::Errno::from_raw(error.raw_os_error().unwrap_or_default());
                    *shared
                        .lock()
                        .expect("told")
                        .errors
                        .entry(format!("{code:?}"))
                        .or_default() += 1;
                }
                if silent >= PATIENCE {
                    (from, connected, silent) = (socket(&netns, source, to), false, 0);
                }
                thread::park_timeout(pace);
            }
        });
        Self {
            name: name.to_owned(),
            told,
            stop,
            thread: Some(thread),
        }
    }

    /// What it was told until now.
    pub(crate) fn told(&self) -> Told {
        self.told.lock().expect("told").clone()
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

impl Drop for Sender {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            join(thread);
        }
    }
}

/// Sends everything back that comes to this address of the namespace, for as long as the process runs.
pub(crate) fn echo(netns: &Path, address: IpAddr) {
    let socket = inside(netns, move || {
        UdpSocket::bind((address, PORT)).unwrap_or_else(|error| panic!("listen on {address}: {error}"))
    });
    thread::spawn(move || {
        let mut buffer = [0; 100];
        loop {
            // An error is about an answer that could not be given: nobody's loss.
            if let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(&buffer[..length], from);
            }
        }
    });
}
