//! Captures the packets of an interface with tcpdump.

use std::{
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use crate::netns::{NetNs, Running, wait_for, wait_until};

/// A running tcpdump on one interface.
pub struct Capture {
    file: tempfile::NamedTempFile,
    _tcpdump: Running,
}

/// The UDP destination port of end packets, which mark the end of a capture.
const END_PORT: u16 = 48879;

impl Capture {
    /// Starts tcpdump, and returns when it captures.
    pub fn start(ns: &NetNs, interface: &str, filter: &str) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        let messages = tempfile::NamedTempFile::new().unwrap();
        let filter = format!("({filter}) or udp dst port {END_PORT}");
        let mut command = std::process::Command::new("tcpdump");
        command.args(["-l", "-nn", "--immediate-mode", "-i", interface, &filter]);
        command
            .stdout(file.reopen().unwrap())
            .stderr(messages.reopen().unwrap());
        let tcpdump = ns.spawn_command(&mut command);
        wait_until("tcpdump to listen", Duration::from_secs(60), || {
            std::fs::read_to_string(messages.path())
                .unwrap()
                .contains("listening on")
        });
        Self {
            file,
            _tcpdump: tcpdump,
        }
    }

    /// Sends end packets in `ns` from `from` to `to` until the capture shows one. Returns the other captured packets, one
    /// line of tcpdump each.
    pub fn finish(self, ns: &NetNs, from: &str, to: &str) -> Vec<String> {
        let from = SocketAddr::new(from.parse().unwrap(), 0);
        let socket = ns.enter(|| UdpSocket::bind(from)).unwrap();
        // The source port distinguishes these end packets from those of another capture.
        let source = format!(".{} > ", socket.local_addr().unwrap().port());
        let send_end = || {
            let _ = socket.send_to(b"end", SocketAddr::new(to.parse().unwrap(), END_PORT));
            let text = std::fs::read_to_string(self.file.path()).unwrap();
            let mut ends = text.lines().filter(|line| line.contains(&format!(".{END_PORT}: ")));
            ends.any(|line| line.contains(&source)).then_some(text)
        };
        let text = wait_for("an end packet in the capture", Duration::from_secs(60), send_end);
        text.lines()
            .filter(|line| !line.contains(&format!(".{END_PORT}: ")))
            .map(str::to_owned)
            .collect()
    }
}
