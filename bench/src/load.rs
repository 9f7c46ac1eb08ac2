//! Generates the measured traffic: TCP streams by iperf3, UDP requests and replies, and small datagrams.

use std::{
    net::{SocketAddr, UdpSocket},
    process::Stdio,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::{
    cpu::Cpu,
    wire::{End, Running, Wire},
};

/// UDP payload of an IPv4 packet of 64 bytes.
const SMALL_PAYLOAD: usize = 64 - 20 - 8;
/// A request without reply for this time counts as lost. A server without a packet for this time checks whether it has to stop.
const LOSS_TIMEOUT: Duration = Duration::from_secs(1);
/// The default port of iperf3.
pub(crate) const IPERF_PORT: u16 = 5201;
/// The port of the UDP echo server.
pub(crate) const ECHO_PORT: u16 = 7;
const SINK_PORT: u16 = 9;

/// The result of a run of TCP streams.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub(crate) struct Throughput {
    /// Received by the iperf3 server, all streams together.
    pub(crate) gigabits_per_second: f64,
    pub(crate) retransmits: u64,
    /// CPU seconds of both daemons for a gigabit.
    pub(crate) daemons_per_gigabit: f64,
    /// CPU seconds of the whole machine for a gigabit, including traffic generators and kernel.
    pub(crate) machine_per_gigabit: f64,
}

/// Round trip times without other traffic.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub(crate) struct Latency {
    /// The median, in seconds.
    pub(crate) p50: f64,
    /// The 99th percentile, in seconds.
    pub(crate) p99: f64,
    pub(crate) lost: u64,
}

#[derive(Deserialize)]
struct Iperf {
    error: Option<String>,
    end: IperfEnd,
}

/// Both fields are `None` after an error.
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

/// Runs an iperf3 server in the end's network namespace until the result is dropped.
pub(crate) fn server(end: &End) -> anyhow::Result<Running> {
    let mut command = end.command("iperf3");
    command.arg("-s").stdout(Stdio::null()).stderr(Stdio::null());
    Running::start(&mut command)
}

/// Runs `streams` TCP streams from the near end to the iperf3 server at the address `target`. The server runs at the far end,
/// or in the pod behind the far end.
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
        // The server has not started yet, or is still busy with the previous run.
        if Instant::now() >= deadline {
            bail!("iperf3 to {target}: {}", error.unwrap_or_default());
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Measures round trips of small UDP requests to the far end, one at a time.
pub(crate) fn latency(wire: &Wire, target: &str, during: Duration) -> anyhow::Result<Latency> {
    latency_of(&bind(&wire.ends[1], target, ECHO_PORT)?, wire, target, during)
}

/// Like [`latency`], with `server` as the echo server. It must receive the packets to [`ECHO_PORT`] of `target`.
pub(crate) fn latency_of(server: &UdpSocket, wire: &Wire, target: &str, during: Duration) -> anyhow::Result<Latency> {
    server.set_read_timeout(Some(LOSS_TIMEOUT))?;
    let client = connect(&wire.ends[0], target, ECHO_PORT)?;
    client.set_read_timeout(Some(LOSS_TIMEOUT))?;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| echo(server, &stop));
        let latency = measure_round_trips(&client, during);
        stop.store(true, Ordering::Release);
        // Wake the server, so that it checks the flag at once.
        let _ = client.send(&[0; SMALL_PAYLOAD]);
        latency
    })
}

/// Echoes datagrams until `stop` is set. It checks `stop` after each datagram and each timeout of its socket.
pub(crate) fn echo(server: &UdpSocket, stop: &AtomicBool) {
    let mut buffer = [0; SMALL_PAYLOAD];
    while !stop.load(Ordering::Acquire) {
        if let Ok((length, from)) = server.recv_from(&mut buffer) {
            let _ = server.send_to(&buffer[..length], from);
        }
    }
}

fn measure_round_trips(client: &UdpSocket, during: Duration) -> anyhow::Result<Latency> {
    let mut trips = Vec::new();
    let mut lost = 0;
    let mut buffer = [0; SMALL_PAYLOAD];
    let began = Instant::now();
    for number in 0_u64.. {
        let sent_at = Instant::now();
        if sent_at.duration_since(began) >= during {
            break;
        }
        let mut request = [0; SMALL_PAYLOAD];
        request[..8].copy_from_slice(&number.to_be_bytes());
        let has_reply = client.send(&request).is_ok()
            && loop {
                match client.recv(&mut buffer) {
                    Ok(_) if buffer == request => break true,
                    // A late reply to an earlier request, which counted as lost.
                    Ok(_) => {}
                    Err(_) => break false,
                }
            };
        if has_reply {
            trips.push(sent_at.elapsed());
        } else {
            lost += 1;
        }
    }
    if trips.is_empty() {
        bail!("no request was answered");
    }
    trips.sort_unstable();
    let quantile = |share: f64| trips[((trips.len() - 1) as f64 * share).round() as usize].as_secs_f64();
    Ok(Latency {
        p50: quantile(0.5),
        p99: quantile(0.99),
        lost,
    })
}

/// Measures how many datagrams arrive per second when more are sent than the tunnel can forward. The sender has the lowest priority, so
/// that it takes no CPU time from the tunnel.
pub(crate) fn small_packets(wire: &Wire, target: &str, during: Duration) -> anyhow::Result<f64> {
    let sink = bind(&wire.ends[1], target, SINK_PORT)?;
    sink.set_read_timeout(Some(LOSS_TIMEOUT))?;
    let source = connect(&wire.ends[0], target, SINK_PORT)?;
    let stop = AtomicBool::new(false);
    let received = AtomicU64::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = [0; SMALL_PAYLOAD];
            while !stop.load(Ordering::Acquire) {
                if sink.recv(&mut buffer).is_ok() {
                    received.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        scope.spawn(|| {
            // If this fails, the sender competes with the tunnel; the figures are lower, but still valid.
            let _ = rustix::process::setpriority_process(None, 19);
            while !stop.load(Ordering::Acquire) {
                let _ = source.send(&[0; SMALL_PAYLOAD]);
            }
        });
        // Let the queues fill first.
        thread::sleep(Duration::from_millis(200));
        let (began, before) = (Instant::now(), received.load(Ordering::Relaxed));
        thread::sleep(during);
        let packets = received.load(Ordering::Relaxed) - before;
        let rate = packets as f64 / began.elapsed().as_secs_f64();
        stop.store(true, Ordering::Release);
        Ok(rate)
    })
}

/// Binds a UDP socket in an end's namespace.
pub(crate) fn bind(end: &End, address: &str, port: u16) -> anyhow::Result<UdpSocket> {
    let address = SocketAddr::new(address.parse().context("an address")?, port);
    end.enter(|| UdpSocket::bind(address))
        .with_context(|| format!("bind UDP {address}"))
}

/// Opens a UDP socket in an end's namespace, connected to the target.
pub(crate) fn connect(end: &End, target: &str, port: u16) -> anyhow::Result<UdpSocket> {
    let any = SocketAddr::from(([0, 0, 0, 0], 0));
    let connected = end.enter(|| {
        let socket = UdpSocket::bind(any)?;
        socket.connect((target, port))?;
        Ok::<_, std::io::Error>(socket)
    });
    connected.with_context(|| format!("connect UDP to {target}:{port}"))
}
