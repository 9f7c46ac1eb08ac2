//! TCP servers that respond with the client's source address, clients of these servers, and UDP sockets for outer packets.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use clustermesh_agent_core::numbers::MARK_UNDERLAY;
use nix::sys::socket::{setsockopt, sockopt};

use crate::netns::NetNs;

/// Time limit of a connection or response that must come, also on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Serves HTTP until the test ends. The response is the source address of the client.
pub fn serve(ns: &NetNs, address: &str, port: u16) {
    let at = SocketAddr::new(address.parse().unwrap(), port);
    let listener = ns
        .enter(|| TcpListener::bind(at))
        .unwrap_or_else(|e| panic!("listen on {at} in {}: {e}", ns.name));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = answer(stream);
        }
    });
}

fn answer(mut stream: TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let from = stream.peer_addr()?.ip().to_string();
    let _ = stream.read(&mut [0; 4096])?;
    write!(
        stream,
        "HTTP/1.0 200 OK\r\nContent-Length: {}\r\n\r\n{from}",
        from.len()
    )
}

/// A UDP socket with the fwmark of the device's outer packets. The mark keeps the socket's packets out of the tunnel.
pub fn outer_socket(ns: &NetNs, address: &str, port: u16) -> UdpSocket {
    let socket = ns
        .enter(|| UdpSocket::bind((address.parse::<IpAddr>().unwrap(), port)))
        .unwrap();
    setsockopt(&socket, sockopt::Mark, &MARK_UNDERLAY).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    socket
}

/// Opens a TCP connection, which must be accepted, from a network namespace.
pub fn connect(ns: &NetNs, to: &str, port: u16) -> TcpStream {
    let to = SocketAddr::new(to.parse::<IpAddr>().unwrap(), port);
    ns.enter(|| TcpStream::connect_timeout(&to, PATIENCE)).unwrap()
}

/// Sends a request to a [`serve`] server, as an attempt that may fail after a second. Returns the source address that the server sees.
pub fn request(ns: &NetNs, to: &str, port: u16) -> io::Result<String> {
    let to = SocketAddr::new(to.parse::<IpAddr>().unwrap(), port);
    let mut stream = ns.enter(|| TcpStream::connect_timeout(&to, Duration::from_secs(1)))?;
    stream.set_read_timeout(Some(Duration::from_secs(3)))?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text.rsplit('\n').next().unwrap_or_default().to_owned())
}

/// Like [`request`], with retries: the first packets in new namespaces may be lost during neighbour discovery (ARP, NDP). Panics if
/// there is no response for a minute.
pub fn source_of(ns: &NetNs, to: &str, port: u16) -> String {
    let mut last;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let is_last = Instant::now() >= deadline;
        match request(ns, to, port) {
            Ok(source) => return source,
            Err(error) => last = error.to_string(),
        }
        assert!(!is_last, "{} -> {to}:{port}: {last}", ns.name);
    }
}
