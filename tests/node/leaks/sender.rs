//! Sends UDP packets continuously from network namespaces and counts the replies and errors of each sender.

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

use clustermesh_lab::wait_until;
use nix::{
    sched::{CloneFlags, setns},
    sys::socket::{setsockopt, sockopt},
};

use super::SENDER_TIMEOUT;

/// The port of every echo server.
const ECHO_PORT: u16 = 7007;
/// The listen port of the agents.
const WIREGUARD_PORT: u16 = 51820;
/// Time between two packets of a fast sender.
const PACE: Duration = Duration::from_millis(10);
/// Time between two packets of a slow sender. Linux rate-limits ICMP errors with one token bucket per IPv4 source, which
/// gets one token a second. An error for an `unreachable` route takes two tokens: one in ip_error, then one in icmp_send.
/// A sender with shorter pauses gets two errors and then none, because ip_error takes each token before icmp_send can.
const SLOW_PACE: Duration = Duration::from_millis(2100);
/// After this many rounds (connect or send) without a reply, a sender opens a new socket, as a retrying client does, because the
/// first packet of a flow fixes its NAT.
const ROUNDS_BEFORE_RETRY: u32 = 25;

/// Replies and errors that a sender has received so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Responses {
    /// Echoed packets.
    pub(crate) answers: u64,
    /// Errors of the socket by name, from ICMP errors or from the node's own kernel.
    pub(crate) errors: BTreeMap<String, u64>,
}

impl Responses {
    /// The number of errors that mean "no route".
    pub(crate) fn unreachable(&self) -> u64 {
        let is_unreachable = |error: &&String| error.contains("EHOSTUNREACH") || error.contains("ENETUNREACH");
        self.errors
            .iter()
            .filter(|(error, _)| is_unreachable(error))
            .map(|(_, count)| count)
            .sum()
    }
}

/// A thread that sends to one address. It ends when the `Sender` is dropped.
pub(crate) struct Sender {
    pub(crate) name: String,
    responses: Arc<Mutex<Responses>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Runs a closure on a thread inside the network namespace at `path`.
fn inside<T: Send + 'static>(path: &Path, run_inside: impl FnOnce() -> T + Send + 'static) -> T {
    let file = File::open(path).expect("open a network namespace");
    let run = move || {
        setns(&file, CloneFlags::CLONE_NEWNET).expect("enter a network namespace");
        run_inside()
    };
    thread::spawn(run).join().expect("the thread inside the namespace")
}

fn socket(netns: &Path, source: IpAddr, to: IpAddr) -> UdpSocket {
    inside(netns, move || {
        // The ephemeral port must not be the one that an agent needs when it starts.
        let bind = || UdpSocket::bind((source, 0)).expect("a socket");
        let port = |socket: &UdpSocket| socket.local_addr().expect("its address").port();
        let socket = std::iter::repeat_with(bind).find(|socket| port(socket) != WIREGUARD_PORT);
        let socket = socket.expect("an endless iterator");
        // Without this option UDP hides ICMP errors about unreachable hosts (ip(7), IP_RECVERR).
        match to {
            IpAddr::V4(_) => setsockopt(&socket, sockopt::Ipv4RecvErr, &true),
            IpAddr::V6(_) => setsockopt(&socket, sockopt::Ipv6RecvErr, &true),
        }
        .expect("set IP_RECVERR");
        socket.set_nonblocking(true).expect("a socket that does not wait");
        socket
    })
}

impl Sender {
    /// Starts a fast sender in the namespace at `netns`.
    pub(crate) fn start(name: &str, netns: &Path, to: IpAddr) -> Self {
        let any: IpAddr = match to {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        Self::with(name, netns, any, to, PACE)
    }

    /// Starts a slow sender, from an address that no other sender uses.
    pub(crate) fn slow(name: &str, netns: &Path, source: IpAddr, to: IpAddr) -> Self {
        Self::with(name, netns, source, to, SLOW_PACE)
    }

    fn with(name: &str, netns: &Path, source: IpAddr, to: IpAddr, pace: Duration) -> Self {
        let (responses, stop) = (Arc::<Mutex<Responses>>::default(), Arc::<AtomicBool>::default());
        let (netns, shared, stopped) = (netns.to_owned(), responses.clone(), stop.clone());
        let thread = thread::spawn(move || {
            let server = SocketAddr::new(to, ECHO_PORT);
            let mut from = socket(&netns, source, to);
            let mut connected = false;
            let mut unanswered = 0;
            while !stopped.load(Ordering::Relaxed) {
                // Without a route, connect fails at once. Then the next round connects again.
                let sent = match connected {
                    true => from.send(b"is it clear?"),
                    false => from.connect(server).map(|()| {
                        connected = true;
                        0
                    }),
                };
                unanswered += 1;
                let mut errors = vec![sent.err()];
                loop {
                    match from.recv(&mut [0; 100]) {
                        Ok(_) => {
                            shared.lock().expect("the responses").answers += 1;
                            unanswered = 0;
                        }
                        Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                        Err(error) => errors.push(Some(error)),
                    }
                    // Continuous errors must not keep the sender from sending.
                    if errors.len() > 8 {
                        break;
                    }
                }
                for error in errors.into_iter().flatten() {
                    let code = nix::errno::Errno::from_raw(error.raw_os_error().unwrap_or_default());
                    *shared
                        .lock()
                        .expect("the responses")
                        .errors
                        .entry(format!("{code:?}"))
                        .or_default() += 1;
                }
                if unanswered >= ROUNDS_BEFORE_RETRY {
                    (from, connected, unanswered) = (socket(&netns, source, to), false, 0);
                }
                thread::park_timeout(pace);
            }
        });
        Self {
            name: name.to_owned(),
            responses,
            stop,
            thread: Some(thread),
        }
    }

    /// Replies and errors so far.
    pub(crate) fn responses(&self) -> Responses {
        self.responses.lock().expect("the responses").clone()
    }
}

/// Waits for a thread. Resumes its panic in this thread, unless this thread already panics.
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

/// Echoes all datagrams to this address of the namespace until the process ends.
pub(crate) fn echo(netns: &Path, address: IpAddr) {
    let socket = inside(netns, move || {
        UdpSocket::bind((address, ECHO_PORT)).unwrap_or_else(|error| panic!("listen on {address}: {error}"))
    });
    thread::spawn(move || {
        let mut buffer = [0; 100];
        loop {
            // An error concerns an earlier reply that could not be delivered.
            if let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(&buffer[..length], from);
            }
        }
    });
}

/// The senders of a run.
pub(super) struct Senders {
    /// Send from the node under test and its pod to the other cluster's pod.
    pub(super) reach: Vec<Sender>,
    /// Send from the node under test and its pod to the other node's WireGuard address. An echo server listens there, but the
    /// other node's firewall accepts only ping at this address.
    pub(super) to_wireguard_address: Vec<Sender>,
    /// Send from the other cluster's node and pod to the pod of the node under test.
    pub(super) back: Vec<Sender>,
    /// Send from the node under test and its pod to mesh addresses that no node has.
    pub(super) unassigned: Vec<Sender>,
    /// Slow senders in the pod: the first two send to existing addresses, the last to an unassigned one.
    pub(super) slow: Vec<Sender>,
}

impl Senders {
    /// Waits until each sender of `reach` and `back` gets a new answer.
    pub(super) async fn wait_for_answers(&self, why: &str) {
        let senders = || self.reach.iter().chain(&self.back);
        let before: Vec<u64> = senders().map(|sender| sender.responses().answers).collect();
        let all_answered = async || {
            let late = senders()
                .zip(&before)
                .filter(|(sender, before)| sender.responses().answers <= **before);
            let late: Vec<_> = late.map(|(sender, _)| (&sender.name, sender.responses())).collect();
            if late.is_empty() {
                Ok(())
            } else {
                Err(format!("{late:?}"))
            }
        };
        wait_until(format!("answers: {why}"), SENDER_TIMEOUT, all_answered)
            .await
            .unwrap();
    }

    /// Waits until each sender of the node under test and its pod gets a new unreachable error, in both families. Fast IPv4 senders
    /// of the pod (`pod -> 1...`) are left out, because the kernel rate-limits their errors (see [`SLOW_PACE`]).
    pub(super) async fn wait_for_errors(&self, why: &str) {
        let all = self
            .reach
            .iter()
            .chain(&self.to_wireguard_address)
            .chain(&self.unassigned)
            .chain(&self.slow);
        wait_for_new_errors(all.filter(|sender| !sender.name.starts_with("pod -> 1")), why).await;
    }

    /// Waits until each sender to an unassigned address gets a new unreachable error. Leaves out the same fast
    /// IPv4 senders as [`Self::wait_for_errors`].
    pub(super) async fn wait_for_errors_about_unassigned(&self, why: &str) {
        let all = self.unassigned.iter().chain(self.slow.last());
        wait_for_new_errors(all.filter(|sender| !sender.name.starts_with("pod -> 1")), why).await;
    }
}

pub(super) async fn wait_for_new_errors(senders: impl Iterator<Item = &Sender>, why: &str) {
    let before: Vec<(&Sender, Responses)> = senders.map(|sender| (sender, sender.responses())).collect();
    let all_got_errors = async || {
        let late = before
            .iter()
            .filter(|(sender, before)| sender.responses().unreachable() <= before.unreachable());
        let late: Vec<_> = late.map(|(sender, _)| (&sender.name, sender.responses())).collect();
        if late.is_empty() {
            Ok(())
        } else {
            Err(format!("{late:?}"))
        }
    };
    wait_until(
        format!("every sender to get an unreachable error: {why}"),
        SENDER_TIMEOUT,
        all_got_errors,
    )
    .await
    .unwrap();
}
