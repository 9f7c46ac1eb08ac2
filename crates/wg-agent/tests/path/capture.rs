//! What passes an interface, as tcpdump says it.

use std::{
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use crate::netns::{NetNs, Running, wait_for, wait_until};

/// tcpdump on one interface.
pub(crate) struct Capture {
    file: tempfile::NamedTempFile,
    _tcpdump: Running,
}

/// A port that only [`Capture`]'s own mark has.
const MARK: u16 = 48879;

impl Capture {
    /// Returns when it listens.
    pub(crate) fn start(ns: &NetNs, interface: &str, filter: &str) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        let said = tempfile::NamedTempFile::new().unwrap();
        let filter = format!("({filter}) or udp dst port {MARK}");
        let mut command = std::process::Command::new("tcpdump");
        command.args(["-l", "-nn", "--immediate-mode", "-i", interface, &filter]);
        command.stdout(file.reopen().unwrap()).stderr(said.reopen().unwrap());
        let tcpdump = ns.spawn_command(&mut command);
        wait_until("tcpdump to listen", Duration::from_secs(10), || {
            std::fs::read_to_string(said.path()).unwrap().contains("listening on")
        });
        Self {
            file,
            _tcpdump: tcpdump,
        }
    }

    /// What was seen, in one line a packet, when a last packet sent from `from` to `to` was seen too.
    pub(crate) fn finish(self, ns: &NetNs, from: &str, to: &str) -> Vec<String> {
        let mark = || {
            let from = SocketAddr::new(from.parse().unwrap(), 0);
            let socket = ns.enter(|| UdpSocket::bind(from)).unwrap();
            let _ = socket.send_to(b"end", SocketAddr::new(to.parse().unwrap(), MARK));
            let text = std::fs::read_to_string(self.file.path()).unwrap();
            text.contains(&format!(".{MARK}: ")).then_some(text)
        };
        let text = wait_for("the mark in the capture", Duration::from_secs(10), mark);
        text.lines()
            .filter(|line| !line.contains(&format!(".{MARK}: ")))
            .map(str::to_owned)
            .collect()
    }
}
