//! TCP and UDP servers and clients, and packet counters.

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use crate::netns::{NetNs, unique_name};

/// Default ports of [`serve_name`].
pub const TCP: u16 = 8080;
pub const UDP: u16 = 5000;
/// A UDP port that receives and never answers.
pub const MUTE: u16 = 5002;
/// Time limit for a reply.
const REPLY_TIMEOUT: Duration = Duration::from_millis(700);

/// Counts the datagrams that arrive at [`MUTE`].
pub fn count_datagrams(ns: &NetNs, address: IpAddr) -> Arc<AtomicU64> {
    let counted = Arc::<AtomicU64>::default();
    let (socket, count) = (
        ns.enter(|| UdpSocket::bind((address, MUTE))).expect("bind"),
        counted.clone(),
    );
    thread::spawn(move || {
        while socket.recv_from(&mut [0; 2048]).is_ok() {
            count.fetch_add(1, Ordering::Release);
        }
    });
    counted
}

/// Answers every TCP and UDP request with `name` and the client's address.
pub fn serve_name(ns: &NetNs, name: &'static str, address: IpAddr, tcp: u16) {
    let udp = if tcp == TCP { UDP } else { tcp };
    let socket = ns.enter(|| UdpSocket::bind((address, udp))).expect("bind");
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((_, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(format!("{name} {}", from.ip()).as_bytes(), from);
        }
    });
    let listener = ns.enter(|| TcpListener::bind((address, tcp))).expect("listen");
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let Ok(from) = stream.peer_addr() else { return };
                let mut buffer = [0; 100];
                while let Ok(1..) = stream.read(&mut buffer) {
                    if stream.write_all(format!("{name} {}", from.ip()).as_bytes()).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

/// A TCP connection that stays open.
pub struct TcpConnection(TcpStream);

impl TcpConnection {
    pub fn open(ns: &NetNs, to: SocketAddr) -> Option<Self> {
        Self::connect(ns, to, REPLY_TIMEOUT)
    }

    /// Like [`Self::open`], with a longer time limit, because packets may have to be retransmitted on a loaded machine.
    pub fn open_patiently(ns: &NetNs, to: SocketAddr) -> Option<Self> {
        Self::connect(ns, to, Duration::from_secs(30))
    }

    fn connect(ns: &NetNs, to: SocketAddr, at_most: Duration) -> Option<Self> {
        let stream = ns.enter(|| TcpStream::connect_timeout(&to, at_most)).ok()?;
        stream.set_read_timeout(Some(at_most)).expect("a timeout");
        Some(Self(stream))
    }

    pub fn request(&mut self) -> Option<String> {
        self.0.write_all(b"?").ok()?;
        let mut buffer = [0; 100];
        let length = self.0.read(&mut buffer).ok().filter(|length| *length > 0)?;
        Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
    }

    /// Sends a byte and returns the error; `None` = the connection is open.
    pub fn error(&mut self) -> Option<ErrorKind> {
        self.0.write_all(b"?").err().map(|error| error.kind())
    }
}

/// A UDP socket with a fixed source port.
pub struct UdpFlow(UdpSocket);

impl UdpFlow {
    pub fn open(ns: &NetNs, to: SocketAddr) -> Self {
        let any: IpAddr = if to.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let socket = ns.enter(|| UdpSocket::bind((any, 0))).expect("bind");
        ns.enter(|| socket.connect(to)).expect("connect");
        socket.set_read_timeout(Some(REPLY_TIMEOUT)).expect("a timeout");
        Self(socket)
    }

    pub fn send(&self) {
        let _ = self.0.send(b"!");
    }

    pub fn request(&self) -> Option<String> {
        self.0.send(b"?").ok()?;
        let mut buffer = [0; 100];
        let length = self.0.recv(&mut buffer).ok()?;
        Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
    }

    /// Sends a datagram and returns the error that it causes.
    pub fn error(&self) -> Option<ErrorKind> {
        let sent = self.0.send(b"?");
        let received = sent.and_then(|_| self.0.recv(&mut [0; 100]));
        received.err().map(|error| error.kind())
    }
}

/// Counts packets in the input chain of a network namespace that match an nftables expression.
pub struct Counter<'a> {
    ns: &'a NetNs,
    table: String,
}

impl<'a> Counter<'a> {
    pub fn new(ns: &'a NetNs, rule: &str) -> Self {
        let table = unique_name("cnt");
        ns.nft(&format!(
            "table inet {table} {{ chain in {{ type filter hook input priority filter; {rule} counter; }}; }}\n"
        ));
        Self { ns, table }
    }

    pub fn packets(&self) -> u64 {
        let text = self.ns.run("nft", &["list", "chain", "inet", &self.table, "in"]);
        packets(&text)
    }
}

/// The packet count of the first counter in the output of nft.
pub fn packets(text: &str) -> u64 {
    let (_, number) = text.split_once("counter packets ").expect("a counter");
    let number = number.split_whitespace().next().expect("a number");
    number.parse().expect("a number")
}

impl Drop for Counter<'_> {
    fn drop(&mut self) {
        let _ = self.ns.output("nft", &["delete", "table", "inet", &self.table]);
    }
}
