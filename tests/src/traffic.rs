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

/// The usual TCP port for [`serve_name`].
pub const TCP_PORT: u16 = 8080;
/// The UDP port that [`serve_name`] uses with [`TCP_PORT`].
pub const UDP_PORT: u16 = 5000;
/// A UDP port whose datagrams are counted and never answered.
pub const MUTE_PORT: u16 = 5002;
/// Time limit for connecting, and for a reply.
const REPLY_TIMEOUT: Duration = Duration::from_millis(700);

/// Counts the datagrams that arrive at [`MUTE_PORT`].
pub fn count_datagrams(ns: &NetNs, address: IpAddr) -> Arc<AtomicU64> {
    let counted = Arc::<AtomicU64>::default();
    let (socket, count) = (
        ns.enter(|| UdpSocket::bind((address, MUTE_PORT))).expect("bind"),
        counted.clone(),
    );
    thread::spawn(move || {
        while socket.recv_from(&mut [0; 2048]).is_ok() {
            count.fetch_add(1, Ordering::Release);
        }
    });
    counted
}

/// Answers every request on a TCP port and a UDP port with `name` and the client's address. The UDP port is [`UDP_PORT`] if
/// `tcp_port` is [`TCP_PORT`], else it has the same number.
pub fn serve_name(ns: &NetNs, name: &'static str, address: IpAddr, tcp_port: u16) {
    let udp_port = if tcp_port == TCP_PORT { UDP_PORT } else { tcp_port };
    let socket = ns.enter(|| UdpSocket::bind((address, udp_port))).expect("bind");
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((_, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(format!("{name} {}", from.ip()).as_bytes(), from);
        }
    });
    let listener = ns.enter(|| TcpListener::bind((address, tcp_port))).expect("listen");
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

    /// Sends a byte and returns the error; `None` = there is none so far. A reset in reply to this byte shows only at the next call.
    pub fn error(&mut self) -> Option<ErrorKind> {
        self.0.write_all(b"?").err().map(|error| error.kind())
    }
}

/// A connected UDP socket. Its source port stays the same.
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

    /// Sends a datagram and returns the error: an ICMP error, or the timeout of the reply. `None` = a reply arrived.
    pub fn error(&self) -> Option<ErrorKind> {
        let sent = self.0.send(b"?");
        let received = sent.and_then(|_| self.0.recv(&mut [0; 100]));
        received.err().map(|error| error.kind())
    }
}

/// Counts the packets that match an nftables expression at the input hook of a network namespace.
pub struct Counter<'a> {
    ns: &'a NetNs,
    table: String,
}

impl<'a> Counter<'a> {
    pub fn new(ns: &'a NetNs, expression: &str) -> Self {
        let table = unique_name("cnt");
        ns.nft(&format!(
            "table inet {table} {{ chain in {{ type filter hook input priority filter; {expression} counter; }}; }}\n"
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
