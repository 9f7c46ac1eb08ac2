//! `wg-agent probe`: which sockets take a TCP connection from where it runs, and by which interface each is reached. What may
//! be open is not known here; `clustermeshctl verify` asks the planner.

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

/// For one connection: the kernel repeats a lost SYN after one second, so one may be lost.
const PATIENCE: Duration = Duration::from_millis(2500);
/// Connections under way at once; a process has 1,024 files as a rule.
const PARALLEL: usize = 400;

/// What to try.
#[derive(Debug, Clone, Args)]
pub(crate) struct ProbeArgs {
    /// Addresses, each with its ports: 10.0.0.1=80,443
    #[arg(required = true, value_name = "ADDRESS=PORT,..")]
    targets: Vec<Target>,
}

/// Ports of one address.
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

/// One line of the output.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Line<'a> {
    socket: SocketAddr,
    /// `open`, `refused`, `unreachable`, `silent`, or what else the kernel said.
    answer: String,
    /// The interface by which this host's own packets go there; `None` = no route.
    way: Option<&'a str>,
}

/// The last line: without it the output is not whole.
#[derive(Debug, Serialize)]
struct Done {
    tried: usize,
}

/// Tries them all, prints, and returns the exit code.
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
    // Asked before anything is sent: what a connection leaves behind must not answer for the route.
    let ways: BTreeMap<IpAddr, String> = paths::interfaces(&addresses)?;
    let sockets: BTreeSet<SocketAddr> = targets
        .iter()
        .flat_map(|target| target.ports.iter().map(|port| SocketAddr::new(target.address, *port)))
        .collect();
    let mut answers = stream::iter(sockets.iter().copied())
        .map(|socket| async move { (socket, ask(socket).await) })
        .buffer_unordered(PARALLEL);
    while let Some((socket, answer)) = answers.next().await {
        let way = ways.get(&socket.ip()).map(String::as_str);
        let line = serde_json::to_string(&Line { socket, answer, way })?;
        writeln!(out, "{line}")?;
    }
    let done = serde_json::to_string(&Done { tried: sockets.len() })?;
    writeln!(out, "{done}")?;
    out.flush()
}

async fn ask(socket: SocketAddr) -> String {
    let word = match tokio::time::timeout(PATIENCE, TcpStream::connect(socket)).await {
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
    fn what_is_to_be_tried_is_read_as_addresses_with_their_ports() {
        let target = |address: &str, ports: &[u16]| Target {
            address: address.parse().unwrap(),
            ports: ports.iter().copied().collect(),
        };
        assert_eq!("10.0.0.1=443,80".parse(), Ok(target("10.0.0.1", &[80, 443])));
        assert_eq!("fd00::1=1".parse(), Ok(target("fd00::1", &[1])));
        for wrong in ["10.0.0.1", "10.0.0.1=", "10.0.0.1=70000", "name=80", "10.0.0.1:80"] {
            let said = format!("{wrong:?}: write ADDRESS=PORT,PORT");
            assert_eq!(wrong.parse::<Target>(), Err(said));
        }
    }

    #[tokio::test]
    async fn an_open_socket_and_a_closed_one_are_told_apart_and_the_last_line_says_that_all_were_tried() {
        let listening = TcpListener::bind("127.0.0.1:0").unwrap();
        let open = listening.local_addr().unwrap();
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let closed = taken.local_addr().unwrap();
        drop(taken);
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
