//! TCP and UDP servers and clients, and packet counters.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::netns::{NetNs, unique_name};

/// The usual TCP port for [`serve_name`].
pub const TCP_PORT: u16 = 8080;
/// The UDP port that [`serve_name`] uses with [`TCP_PORT`].
pub const UDP_PORT: u16 = 5000;
/// A UDP port whose datagrams are counted and never answered.
pub const MUTE_PORT: u16 = 5002;
/// Time limit of one attempt: of a request that must not be answered, or of one of several requests.
const ATTEMPT: Duration = Duration::from_millis(700);
/// Time limit of a request that must be answered, also on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

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

/// Answers every request on a TCP port and a UDP port with `name` and the client's address; over UDP also with the first 20 bytes of the
/// request. The UDP port is [`UDP_PORT`] if `tcp_port` is [`TCP_PORT`], else it has the same number.
pub fn serve_name(ns: &NetNs, name: &'static str, address: IpAddr, tcp_port: u16) {
    let udp_port = if tcp_port == TCP_PORT { UDP_PORT } else { tcp_port };
    let socket = ns.enter(|| UdpSocket::bind((address, udp_port))).expect("bind");
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let request = String::from_utf8_lossy(&buffer[..length.min(20)]).into_owned();
            let _ = socket.send_to(format!("{name} {} {request}", from.ip()).as_bytes(), from);
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
    /// Connects. Panics if there is no connection within a minute.
    #[track_caller]
    pub fn open(ns: &NetNs, to: SocketAddr) -> Self {
        Self::connect(ns, to, PATIENCE).unwrap_or_else(|error| panic!("{} -> {to}: {error}", ns.name))
    }

    /// Tries to connect; `None` = there is no connection within 0.7 s.
    pub fn try_open(ns: &NetNs, to: SocketAddr) -> Option<Self> {
        Self::connect(ns, to, ATTEMPT).ok()
    }

    fn connect(ns: &NetNs, to: SocketAddr, at_most: Duration) -> io::Result<Self> {
        ns.enter(|| TcpStream::connect_timeout(&to, at_most)).map(Self)
    }

    /// Sends a request and returns the reply. Panics if there is none within a minute.
    #[track_caller]
    pub fn request(&mut self) -> String {
        self.exchange(PATIENCE)
            .unwrap_or_else(|error| panic!("no reply: {error}"))
    }

    /// Sends a request; `None` = there is no reply within 0.7 s.
    pub fn try_request(&mut self) -> Option<String> {
        self.exchange(ATTEMPT).ok()
    }

    /// Sends a request and returns its error: a reset, or the end of the connection. `None` = a reply arrived. Panics if there is neither
    /// within a minute.
    #[track_caller]
    pub fn error(&mut self) -> Option<ErrorKind> {
        let error = self.exchange(PATIENCE).err()?.kind();
        assert_ne!(error, ErrorKind::WouldBlock, "neither a reply nor an error");
        Some(error)
    }

    fn exchange(&mut self, at_most: Duration) -> io::Result<String> {
        self.0.set_read_timeout(Some(at_most))?;
        self.0.write_all(b"?")?;
        let mut buffer = [0; 100];
        match self.0.read(&mut buffer)? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            length => Ok(String::from_utf8_lossy(&buffer[..length]).into_owned()),
        }
    }
}

/// A connected UDP socket. Its source port stays the same.
pub struct UdpFlow {
    socket: UdpSocket,
    /// The number of requests so far. Each request contains its number, so that a late reply is not taken for the reply to a later
    /// request.
    requests: AtomicU64,
}

impl UdpFlow {
    pub fn open(ns: &NetNs, to: SocketAddr) -> Self {
        let any: IpAddr = if to.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let socket = ns.enter(|| UdpSocket::bind((any, 0))).expect("bind");
        ns.enter(|| socket.connect(to)).expect("connect");
        socket.set_read_timeout(Some(ATTEMPT)).expect("a timeout");
        Self {
            socket,
            requests: AtomicU64::new(0),
        }
    }

    pub fn send(&self) {
        let _ = self.socket.send(b"!");
    }

    /// Sends requests until one is answered, and returns the reply. Panics if there is none within a minute.
    #[track_caller]
    pub fn request(&self) -> String {
        let first = self.requests.load(Ordering::Relaxed);
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(reply) = self.exchange(first) {
                return reply;
            }
            assert!(Instant::now() < deadline, "no reply from {:?}", self.socket.peer_addr());
            // An ICMP error ends an attempt at once.
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Sends one request; `None` = there is no reply within 0.7 s.
    pub fn try_request(&self) -> Option<String> {
        self.exchange(self.requests.load(Ordering::Relaxed))
    }

    /// Sends a request and returns the reply to it or to an earlier one, from the number `first` on.
    fn exchange(&self, first: u64) -> Option<String> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        self.socket.send(number.to_string().as_bytes()).ok()?;
        let mut buffer = [0; 100];
        loop {
            let length = self.socket.recv(&mut buffer).ok()?;
            let text = String::from_utf8_lossy(&buffer[..length]);
            let (reply, request) = text.rsplit_once(' ')?;
            if request.parse().is_ok_and(|request: u64| request >= first) {
                return Some(reply.to_owned());
            }
        }
    }

    /// Sends a datagram and returns the error: an ICMP error, or the timeout of the reply. `None` = a reply arrived.
    pub fn error(&self) -> Option<ErrorKind> {
        let sent = self.socket.send(b"?");
        let received = sent.and_then(|_| self.socket.recv(&mut [0; 100]));
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
