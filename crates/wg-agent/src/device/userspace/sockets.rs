//! The UDP sockets of a device, one for each family. What goes over them is not looked at here.

use std::{
    io::{self, ErrorKind},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::AsFd,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::sockopt::{Ipv4PathMtuDiscovery, set_ip_mtu_discover},
};
use socket2::{Domain, Protocol, Socket, Type};

/// Asked of the kernel, which grants at most `net.core.{r,w}mem_max`.
const BUFFER: usize = 4 << 20;
/// How long a full send queue may stop a sender before its datagram is dropped.
const PATIENCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};

/// Bound to one port in both families; non-blocking.
#[derive(Debug)]
pub(super) struct Sockets {
    pub(super) v4: UdpSocket,
    /// `None` where the kernel has no IPv6.
    pub(super) v6: Option<UdpSocket>,
    pub(super) port: u16,
}

impl Sockets {
    /// Binds `port`, or any port that is free in both families for 0.
    pub(super) fn open(port: u16, fwmark: u32) -> io::Result<Self> {
        // A port free in one family may be taken in the other.
        let mut attempts = if port == 0 { 16 } else { 1 };
        loop {
            attempts -= 1;
            match Self::try_open(port, fwmark) {
                Err(error) if error.kind() == ErrorKind::AddrInUse && attempts > 0 => {}
                result => return result,
            }
        }
    }

    fn try_open(port: u16, fwmark: u32) -> io::Result<Self> {
        let v4 = bind(Domain::IPV4, (Ipv4Addr::UNSPECIFIED, port).into(), fwmark)?;
        let port = v4.local_addr()?.port();
        let v6 = match bind(Domain::IPV6, (Ipv6Addr::UNSPECIFIED, port).into(), fwmark) {
            Ok(socket) => Some(socket),
            Err(error)
                if [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL]
                    .iter()
                    .any(|absent| error.raw_os_error() == Some(absent.raw_os_error())) =>
            {
                None
            }
            Err(error) => return Err(error),
        };
        Ok(Self { v4, v6, port })
    }

    /// Marks every datagram from now on.
    pub(super) fn mark(&self, fwmark: u32) -> io::Result<()> {
        socket2::SockRef::from(&self.v4).set_mark(fwmark)?;
        self.v6
            .as_ref()
            .map_or(Ok(()), |v6| socket2::SockRef::from(v6).set_mark(fwmark))
    }

    /// Sends, waiting a moment where the queue is full.
    pub(super) fn send(&self, datagram: &[u8], to: SocketAddr) -> io::Result<()> {
        let socket = match (&self.v6, to) {
            (_, SocketAddr::V4(_)) => &self.v4,
            (Some(v6), SocketAddr::V6(_)) => v6,
            (None, SocketAddr::V6(_)) => return Err(ErrorKind::AddrNotAvailable.into()),
        };
        match socket.send_to(datagram, to) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                poll(&mut [PollFd::new(&socket.as_fd(), PollFlags::OUT)], Some(&PATIENCE))?;
                socket.send_to(datagram, to).map(drop)
            }
            result => result.map(drop),
        }
    }
}

fn bind(domain: Domain, address: SocketAddr, fwmark: u32) -> io::Result<UdpSocket> {
    let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
    if domain == Domain::IPV6 {
        socket.set_only_v6(true)?;
    }
    if domain == Domain::IPV4 {
        // As the kernel's own WireGuard: whoever has a narrower link on the way may fragment. With DF a router that says
        // nothing would be a black hole.
        set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DONT)?;
    }
    if fwmark != 0 {
        socket.set_mark(fwmark)?;
    }
    // More is better, less is no error.
    let _ = socket.set_recv_buffer_size(BUFFER);
    let _ = socket.set_send_buffer_size(BUFFER);
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}
