//! The traffic that is measured: TCP streams by iperf3, questions and answers, and small datagrams.

use std::{
    net::{SocketAddr, UdpSocket},
    process::Stdio,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use serde::Deserialize;

use super::{
    cpu::Cpu,
    wire::{End, Running, Wire},
};

/// UDP payload of an IPv4 packet of 64 bytes.
const SMALL: usize = 64 - 20 - 8;
/// A question or an answer that does not come for so long is lost.
const LOST: Duration = Duration::from_secs(1);
/// Where iperf3 listens by default.
pub(crate) const IPERF_PORT: u16 = 5201;
/// Where questions are answered.
pub(crate) const ECHO_PORT: u16 = 7;
const SINK_PORT: u16 = 9;

/// What TCP streams moved and what that took.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub(crate) struct Throughput {
    /// Received by the far end's program, together.
    pub(crate) gigabits_per_second: f64,
    pub(crate) retransmits: u64,
    /// CPU seconds for a gigabit: of both daemons.
    pub(crate) daemons_per_gigabit: f64,
    /// CPU seconds for a gigabit: of the whole machine, traffic generators and kernel included.
    pub(crate) machine_per_gigabit: f64,
}

/// How long an answer takes when nothing else goes on.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub(crate) struct Latency {
    /// Seconds: half of all round trips are shorter.
    pub(crate) p50: f64,
    /// Seconds: one in a hundred is longer.
    pub(crate) p99: f64,
    pub(crate) lost: u64,
}

#[derive(Deserialize)]
struct Iperf {
    error: Option<String>,
    end: IperfEnd,
}

/// Empty where there was an error.
#[derive(Deserialize)]
struct IperfEnd {
    sum_sent: Option<IperfSum>,
    sum_received: Option<IperfSum>,
}

#[derive(Deserialize)]
struct IperfSum {
    bytes: f64,
    bits_per_second: f64,
    #[serde(default)]
    retransmits: u64,
}

/// iperf3 as a server in this namespace, for as long as this is kept.
pub(crate) fn server(end: &End) -> anyhow::Result<Running> {
    let mut command = end.command("iperf3");
    command.arg("-s").stdout(Stdio::null()).stderr(Stdio::null());
    Running::start(&mut command)
}

/// So many TCP streams from the near end to the far one.
pub(crate) fn throughput(
    wire: &Wire,
    target: &str,
    streams: u32,
    seconds: u32,
    daemons: &[u32],
) -> anyhow::Result<Throughput> {
    let (streams, seconds) = (streams.to_string(), seconds.to_string());
    let args = [
        "-c",
        target,
        "-P",
        &streams,
        "-t",
        &seconds,
        "-J",
        "--connect-timeout",
        "5000",
    ];
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let before = Cpu::now(daemons)?;
        let output = wire.ends[0].output("iperf3", &args)?;
        let used = Cpu::now(daemons)?.since(before);
        let Iperf { error, end } = serde_json::from_slice(&output.stdout).context("iperf3 -J printed no JSON")?;
        if let (None, Some(sent), Some(received)) = (&error, end.sum_sent, end.sum_received) {
            let gigabits = received.bytes * 8.0 / 1e9;
            return Ok(Throughput {
                gigabits_per_second: received.bits_per_second / 1e9,
                retransmits: sent.retransmits,
                daemons_per_gigabit: used.daemons / gigabits,
                machine_per_gigabit: used.machine / gigabits,
            });
        }
        // The server is not up yet, or still busy with the run before.
        if Instant::now() >= deadline {
            bail!("iperf3 to {target}: {}", error.unwrap_or_default());
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Small questions to the far end, one at a time, each answered at once.
pub(crate) fn latency(wire: &Wire, target: &str, during: Duration) -> anyhow::Result<Latency> {
    latency_of(&bind(&wire.ends[1], target, ECHO_PORT)?, wire, target, during)
}

/// The same, where packets to the target's [`ECHO_PORT`] reach this server.
pub(crate) fn latency_of(server: &UdpSocket, wire: &Wire, target: &str, during: Duration) -> anyhow::Result<Latency> {
    server.set_read_timeout(Some(LOST))?;
    let client = connect(&wire.ends[0], target, ECHO_PORT)?;
    client.set_read_timeout(Some(LOST))?;
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| echo(server, &done));
        let asked = ask(&client, during);
        done.store(true, Ordering::Release);
        // So that the far end looks at the flag now.
        let _ = client.send(&[0; SMALL]);
        asked
    })
}

/// Answers questions until told to stop, which it looks at when asked or when nothing came for its socket's timeout.
pub(crate) fn echo(server: &UdpSocket, stop: &AtomicBool) {
    let mut buffer = [0; SMALL];
    while !stop.load(Ordering::Acquire) {
        if let Ok((length, from)) = server.recv_from(&mut buffer) {
            let _ = server.send_to(&buffer[..length], from);
        }
    }
}

fn ask(client: &UdpSocket, during: Duration) -> anyhow::Result<Latency> {
    let mut trips = Vec::new();
    let mut lost = 0;
    let mut buffer = [0; SMALL];
    let began = Instant::now();
    for number in 0_u64.. {
        let asked = Instant::now();
        if asked.duration_since(began) >= during {
            break;
        }
        let mut question = [0; SMALL];
        question[..8].copy_from_slice(&number.to_be_bytes());
        let answered = client.send(&question).is_ok()
            && loop {
                match client.recv(&mut buffer) {
                    Ok(_) if buffer == question => break true,
                    // An answer that had been given up.
                    Ok(_) => {}
                    Err(_) => break false,
                }
            };
        if answered {
            trips.push(asked.elapsed());
        } else {
            lost += 1;
        }
    }
    if trips.is_empty() {
        bail!("no question was answered");
    }
    trips.sort_unstable();
    let at = |share: f64| trips[((trips.len() - 1) as f64 * share).round() as usize].as_secs_f64();
    Ok(Latency {
        p50: at(0.5),
        p99: at(0.99),
        lost,
    })
}

/// Datagrams received in a second when more are sent than get through. The sender has the lowest priority: it offers what the others
/// leave it time for, and does not take theirs.
pub(crate) fn small_packets(wire: &Wire, target: &str, during: Duration) -> anyhow::Result<f64> {
    let sink = bind(&wire.ends[1], target, SINK_PORT)?;
    sink.set_read_timeout(Some(LOST))?;
    let source = connect(&wire.ends[0], target, SINK_PORT)?;
    let done = AtomicBool::new(false);
    let received = AtomicU64::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = [0; SMALL];
            while !done.load(Ordering::Acquire) {
                if sink.recv(&mut buffer).is_ok() {
                    received.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        scope.spawn(|| {
            // Without the right to lower itself it is as important as the others, which the figures survive.
            let _ = rustix::process::setpriority_process(None, 19);
            while !done.load(Ordering::Acquire) {
                let _ = source.send(&[0; SMALL]);
            }
        });
        // The first moments fill queues.
        thread::sleep(Duration::from_millis(200));
        let (began, before) = (Instant::now(), received.load(Ordering::Relaxed));
        thread::sleep(during);
        let packets = received.load(Ordering::Relaxed) - before;
        let rate = packets as f64 / began.elapsed().as_secs_f64();
        done.store(true, Ordering::Release);
        Ok(rate)
    })
}

/// A UDP socket at an end.
pub(crate) fn bind(end: &End, address: &str, port: u16) -> anyhow::Result<UdpSocket> {
    let address = SocketAddr::new(address.parse().context("an address")?, port);
    end.enter(|| UdpSocket::bind(address))
        .with_context(|| format!("bind UDP {address}"))
}

/// A UDP socket at an end, for an address of the other.
pub(crate) fn connect(end: &End, target: &str, port: u16) -> anyhow::Result<UdpSocket> {
    let any = SocketAddr::from(([0, 0, 0, 0], 0));
    let connected = end.enter(|| {
        let socket = UdpSocket::bind(any)?;
        socket.connect((target, port))?;
        Ok::<_, std::io::Error>(socket)
    });
    connected.with_context(|| format!("connect UDP to {target}:{port}"))
}
