//! Captures the packets of an interface with tcpdump.

use std::{
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use crate::netns::{NetNs, Running, wait_for, wait_until};

/// tcpdump on one interface.
pub struct Capture {
    file: tempfile::NamedTempFile,
    _tcpdump: Running,
}

/// The destination port of the packet that ends a capture.
const MARK: u16 = 48879;

impl Capture {
    /// Starts tcpdump and returns once it listens.
    pub fn start(ns: &NetNs, interface: &str, filter: &str) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        let messages = tempfile::NamedTempFile::new().unwrap();
        let filter = format!("({filter}) or udp dst port {MARK}");
        let mut command = std::process::Command::new("tcpdump");
        command.args(["-l", "-nn", "--immediate-mode", "-i", interface, &filter]);
        command
            .stdout(file.reopen().unwrap())
            .stderr(messages.reopen().unwrap());
        let tcpdump = ns.spawn_command(&mut command);
        wait_until("tcpdump to listen", Duration::from_secs(10), || {
            std::fs::read_to_string(messages.path())
                .unwrap()
                .contains("listening on")
        });
        Self {
            file,
            _tcpdump: tcpdump,
        }
    }

    /// Sends a last packet from `from` to `to` and waits until the capture shows it. Returns the packets before, one
    /// per line.
    pub fn finish(self, ns: &NetNs, from: &str, to: &str) -> Vec<String> {
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
