//! Implements `wg-agent probe`: tests which sockets accept a TCP connection from this network namespace (of a node or a pod), and by
//! which interface packets to them leave. `clustermeshctl verify` compares the results with the plan.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, ErrorKind, Write},
    net::{IpAddr, SocketAddr},
    process::ExitCode,
    str::FromStr,
    time::Duration,
};

use clap::Args;
use futures::{StreamExt, stream};
use serde::Serialize;
use tokio::net::TcpStream;

use crate::route::paths;

/// Timeout of one connection attempt: the kernel repeats a lost SYN after one second, so one lost SYN is tolerated.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(2500);
/// Concurrent connections; a process may usually have 1,024 open files.
const CONCURRENCY: usize = 400;

/// The sockets to test.
#[derive(Debug, Clone, Args)]
pub(crate) struct ProbeArgs {
    /// Addresses, each with its ports: 10.0.0.1=80,443
    #[arg(required = true, value_name = "ADDRESS=PORT,..")]
    targets: Vec<Target>,
}

/// An address and the ports to test.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Target {
    address: IpAddr,
    ports: BTreeSet<u16>,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?}: write ADDRESS=PORT,PORT");
        let (address, ports) = text.split_once('=').ok_or_else(wrong)?;
        let ports: Result<BTreeSet<u16>, _> = ports.split(',').map(str::parse).collect();
        Ok(Self {
            address: address.parse().map_err(|_| wrong())?,
            ports: ports.map_err(|_| wrong())?,
        })
    }
}

/// The result of one socket: a line of the output.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct ProbeResult<'a> {
    socket: SocketAddr,
    /// `open`, `refused`, `unreachable`, `silent`, or another error of the kernel.
    answer: String,
    /// The interface by which packets to the socket leave this network namespace; `None` = no route, or an address of the namespace.
    way: Option<&'a str>,
}

/// The last line of the output. Output without this line is incomplete.
#[derive(Debug, Serialize)]
struct Summary {
    tried: usize,
}

/// Tests all sockets, prints the results, and returns the exit code.
pub(crate) fn run(args: &ProbeArgs) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.and_then(|runtime| runtime.block_on(probe(&args.targets, &mut io::stdout()))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("wg-agent: probe: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn probe(targets: &[Target], out: &mut impl Write) -> io::Result<()> {
    let addresses: BTreeSet<IpAddr> = targets.iter().map(|target| target.address).collect();
    // Looked up before the first connection, because a connection may leave a route exception behind, which would change
    // the result.
    let interfaces: BTreeMap<IpAddr, String> = paths::interfaces(&addresses)?;
    let sockets: BTreeSet<SocketAddr> = targets
        .iter()
        .flat_map(|target| target.ports.iter().map(|port| SocketAddr::new(target.address, *port)))
        .collect();
    let mut answers = stream::iter(sockets.iter().copied())
        .map(|socket| async move { (socket, connect(socket).await) })
        .buffer_unordered(CONCURRENCY);
    while let Some((socket, answer)) = answers.next().await {
        let way = interfaces.get(&socket.ip()).map(String::as_str);
        let line = serde_json::to_string(&ProbeResult { socket, answer, way })?;
        writeln!(out, "{line}")?;
    }
    let summary = serde_json::to_string(&Summary { tried: sockets.len() })?;
    writeln!(out, "{summary}")?;
    out.flush()
}

async fn connect(socket: SocketAddr) -> String {
    let word = match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(socket)).await {
        Ok(Ok(_)) => "open",
        Err(_) => "silent",
        Ok(Err(error)) => match error.kind() {
            ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset => "refused",
            ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => "unreachable",
            ErrorKind::TimedOut => "silent",
            _ => return error.to_string(),
        },
    };
    word.to_owned()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn probe_target_is_an_address_with_ports() {
        let target = |address: &str, ports: &[u16]| Target {
            address: address.parse().unwrap(),
            ports: ports.iter().copied().collect(),
        };
        assert_eq!("10.0.0.1=443,80".parse(), Ok(target("10.0.0.1", &[80, 443])));
        assert_eq!("fd00::1=1".parse(), Ok(target("fd00::1", &[1])));
        for wrong in ["10.0.0.1", "10.0.0.1=", "10.0.0.1=70000", "name=80", "10.0.0.1:80"] {
            let message = format!("{wrong:?}: write ADDRESS=PORT,PORT");
            assert_eq!(wrong.parse::<Target>(), Err(message));
        }
    }

    #[tokio::test]
    async fn probe_reports_open_and_refused_sockets_and_a_final_count() {
        let listening = TcpListener::bind("127.0.0.1:0").unwrap();
        let open = listening.local_addr().unwrap();
        let dropped = TcpListener::bind("127.0.0.1:0").unwrap();
        let closed = dropped.local_addr().unwrap();
        drop(dropped);
        let target = Target {
            address: open.ip(),
            ports: [open.port(), closed.port()].into(),
        };
        let mut out = Vec::new();
        probe(&[target], &mut out).await.unwrap();
        let mut lines: Vec<serde_json::Value> = String::from_utf8(out)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.pop(), Some(serde_json::json!({"tried": 2})));
        lines.sort_by_key(|line| line["answer"].to_string());
        let want = [(open, "open"), (closed, "refused")]
            .map(|(socket, answer)| serde_json::json!({"socket": socket.to_string(), "answer": answer, "way": null}));
        assert_eq!(lines, want);
    }
}
