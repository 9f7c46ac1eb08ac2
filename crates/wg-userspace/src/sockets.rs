//! Opens the UDP sockets of a device, one for each address family and worker (a pair of threads, one for each direction), and sends and
//! receives datagrams.
//!
//! If the kernel offers it, one call sends (`UDP_SEGMENT`, Linux 4.18) or receives (`UDP_GRO`, Linux 5.0) a run: datagrams to or from
//! one address that have one size, except the last one, which may be shorter (Linux
//! `Documentation/networking/segmentation-offloads.rst`).

use std::{
    io::{self, ErrorKind, IoSlice, IoSliceMut},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::{AsFd, AsRawFd},
    sync::atomic::{AtomicBool, Ordering},
};

use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg, setsockopt, sockopt,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::sockopt::{Ipv4PathMtuDiscovery, set_ip_mtu_discover},
};
use socket2::{Domain, Protocol, Socket, Type};

/// The size of a socket's receive queue; with CAP_NET_ADMIN it may exceed `net.core.rmem_max`. It has to hold the packets of all peers' TCP
/// flows that arrive while the worker's thread is not running: with 4 MiB, 16 flows lost thousands of packets a second.
const RECEIVE_BUFFER: usize = 8 << 20;
const SEND_BUFFER: usize = 4 << 20;
/// How long a sender waits for room in a full send queue before its datagram or run is dropped.
const SEND_TIMEOUT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};
/// Maximum number of datagrams in a run (`UDP_MAX_SEGMENTS`, 64 before Linux 6.9).
pub(crate) const MAX_RUN: usize = 64;
/// Maximum number of bytes in a run, so that the run with its headers fits into an IPv4 packet of 65,535 bytes.
pub(crate) const MAX_RUN_BYTES: usize = 65_000;

mod meminfo {
    //! Reads the drop counter of a socket (`SO_MEMINFO`, Linux 4.12).
    #![allow(unsafe_code)]

    use std::net::UdpSocket;

    use nix::{libc, sys::socket::getsockopt};

    /// `SK_MEMINFO_DROPS`, the last of `SK_MEMINFO_VARS` numbers (Linux `include/uapi/linux/sock_diag.h`).
    const DROPS: usize = 8;
    type Numbers = [u32; DROPS + 1];

    #[derive(Debug, Clone, Copy)]
    struct MemInfo;

    // The kernel writes at most as many numbers as the buffer has room for.
    nix::getsockopt_impl!(
        MemInfo,
        libc::SOL_SOCKET,
        libc::SO_MEMINFO,
        Numbers,
        nix::sys::socket::sockopt::GetStruct<Numbers>
    );

    /// How often the socket dropped a datagram or run: its receive queue was full, or, rarely, a checksum was wrong.
    pub(super) fn dropped(socket: &UdpSocket) -> u64 {
        getsockopt(socket, MemInfo).map_or(0, |numbers| u64::from(numbers[DROPS]))
    }
}

/// The sockets of all workers: non-blocking, bound to one port in both address families.
#[derive(Debug)]
pub(crate) struct Sockets {
    pub(crate) workers: Vec<WorkerSockets>,
    pub(crate) port: u16,
    /// Whether one call sends a run. `false` if offload is switched off, or the kernel or the network card does not support it.
    segmentation: AtomicBool,
}

/// One worker's sockets. The kernel selects the worker by a hash of addresses and ports, so one worker receives all datagrams from one
/// endpoint to one local address.
#[derive(Debug)]
pub(crate) struct WorkerSockets {
    pub(crate) v4: UdpSocket,
    /// `None` = the kernel has no IPv6.
    pub(crate) v6: Option<UdpSocket>,
}

/// The datagrams that one call received.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReceivedRun {
    /// Number of bytes of all datagrams together.
    pub(crate) length: usize,
    /// Length of each datagram; the last one may be shorter.
    pub(crate) segment: usize,
    pub(crate) source: Endpoint,
}

/// The endpoint of a peer, and the local address to send from. The local address is the one to which the peer sends, because a firewall or
/// NAT in front of the peer may drop packets from other addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) remote: SocketAddr,
    /// `None` = the kernel chooses.
    pub(crate) local: Option<IpAddr>,
}

impl From<SocketAddr> for Endpoint {
    fn from(remote: SocketAddr) -> Self {
        Self { remote, local: None }
    }
}

impl Sockets {
    /// Binds `port`; 0 = any port that is free in both address families.
    pub(crate) fn open(port: u16, fwmark: u32, workers: usize, offload: bool) -> io::Result<Self> {
        // A port that is free for IPv4 may be in use for IPv6.
        let mut attempts = if port == 0 { 16 } else { 1 };
        loop {
            attempts -= 1;
            match Self::try_open(port, fwmark, workers, offload) {
                Err(error) if error.kind() == ErrorKind::AddrInUse && attempts > 0 => {}
                result => return result,
            }
        }
    }

    fn try_open(port: u16, fwmark: u32, workers: usize, offload: bool) -> io::Result<Self> {
        // With SO_REUSEPORT, a bind can succeed although another process uses the port. So a socket without it is bound first: this fails
        // if the port is in use.
        let exclusive = WorkerSockets::open(port, fwmark, false, offload)?;
        let port = exclusive.v4.local_addr()?.port();
        let workers = if workers > 1 {
            drop(exclusive);
            (0..workers)
                .map(|_| WorkerSockets::open(port, fwmark, true, offload))
                .collect::<Result<_, _>>()?
        } else {
            vec![exclusive]
        };
        let segmentation = offload
            && workers
                .first()
                .is_some_and(|worker| setsockopt(&worker.v4, sockopt::UdpGsoSegment, &0).is_ok());
        Ok(Self {
            workers,
            port,
            segmentation: AtomicBool::new(segmentation),
        })
    }

    /// Whether one call sends a run.
    pub(crate) fn has_segmentation(&self) -> bool {
        self.segmentation.load(Ordering::Relaxed)
    }

    /// How often the sockets dropped a datagram or run, mostly because a receive queue was full.
    pub(crate) fn receive_queue_drops(&self) -> u64 {
        let all = self
            .workers
            .iter()
            .flat_map(|worker| [Some(&worker.v4), worker.v6.as_ref()]);
        all.flatten().map(meminfo::dropped).sum()
    }

    /// Sets the firewall mark of all later datagrams.
    pub(crate) fn set_fwmark(&self, fwmark: u32) -> io::Result<()> {
        for worker in &self.workers {
            for socket in [Some(&worker.v4), worker.v6.as_ref()].into_iter().flatten() {
                socket2::SockRef::from(socket).set_mark(fwmark)?;
            }
        }
        Ok(())
    }

    /// Sends a datagram; waits up to [`SEND_TIMEOUT`] if the send queue is full.
    pub(crate) fn send(&self, worker: usize, datagram: &[u8], to: Endpoint) -> io::Result<()> {
        self.send_with(worker, datagram, None, to)
    }

    /// Sends datagrams of `segment` bytes each (the last one may be shorter); returns how many were not sent.
    pub(crate) fn send_run(&self, worker: usize, run: &[u8], segment: usize, to: Endpoint) -> usize {
        if run.len() > segment && self.has_segmentation() {
            match self.send_with(worker, run, Some(segment as u16), to) {
                Ok(()) => return 0,
                // The network card cannot compute the checksums: switch segmentation off.
                Err(error) if error.raw_os_error() == Some(Errno::IO.raw_os_error()) => {
                    if self.segmentation.swap(false, Ordering::Relaxed) {
                        tracing::info!(
                            "the network card does not support UDP segmentation: datagrams are sent one by one"
                        );
                    }
                }
                // A datagram exceeds the path MTU and needs fragmentation, or this kernel does not accept the run.
                Err(error) if is_one_of(&error, &[Errno::INVAL, Errno::MSGSIZE, Errno::OPNOTSUPP]) => {}
                Err(_) => return run.len().div_ceil(segment),
            }
        }
        run.chunks(segment)
            .filter(|datagram| self.send(worker, datagram, to).is_err())
            .count()
    }

    fn send_with(&self, worker: usize, bytes: &[u8], segment: Option<u16>, to: Endpoint) -> io::Result<()> {
        let socket = self.socket(worker, to.remote)?;
        let address = SockaddrStorage::from(to.remote);
        let send = |local: Option<IpAddr>| {
            let local = local.map(|local| PacketInfo::new(local, to.remote));
            let with = |control: &[ControlMessage<'_>]| {
                let slices = [IoSlice::new(bytes)];
                let sent = sendmsg(socket.as_raw_fd(), &slices, control, MsgFlags::empty(), Some(&address));
                sent.map(drop).map_err(io::Error::from)
            };
            match (&segment, &local) {
                (Some(segment), Some(local)) => with(&[ControlMessage::UdpGsoSegments(segment), local.message()]),
                (Some(segment), None) => with(&[ControlMessage::UdpGsoSegments(segment)]),
                (None, Some(local)) => with(&[local.message()]),
                (None, None) => with(&[]),
            }
        };
        retry_when_writable(socket, || match send(to.local) {
            // The host has lost the local address. The error code depends on the kernel and the address family.
            Err(error)
                if to.local.is_some() && is_one_of(&error, &[Errno::INVAL, Errno::NETUNREACH, Errno::ADDRNOTAVAIL]) =>
            {
                send(None)
            }
            result => result,
        })
    }

    fn socket(&self, worker: usize, to: SocketAddr) -> io::Result<&UdpSocket> {
        let worker = self.workers.get(worker).or_else(|| self.workers.first());
        let socket = worker.and_then(|worker| match to {
            SocketAddr::V4(_) => Some(&worker.v4),
            SocketAddr::V6(_) => worker.v6.as_ref(),
        });
        socket.ok_or_else(|| ErrorKind::AddrNotAvailable.into())
    }
}

/// The local address to send from, as a control message (ip(7), ipv6(7)).
enum PacketInfo {
    V4(libc::in_pktinfo),
    V6(libc::in6_pktinfo),
}

impl PacketInfo {
    fn new(local: IpAddr, to: SocketAddr) -> Self {
        match local {
            IpAddr::V4(local) => Self::V4(libc::in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: libc::in_addr {
                    s_addr: u32::from_ne_bytes(local.octets()),
                },
                ipi_addr: libc::in_addr { s_addr: 0 },
            }),
            IpAddr::V6(local) => Self::V6(libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr {
                    s6_addr: local.octets(),
                },
                // A link-local address needs its interface.
                ipi6_ifindex: match to {
                    SocketAddr::V6(to) => to.scope_id(),
                    SocketAddr::V4(_) => 0,
                },
            }),
        }
    }

    const fn message(&self) -> ControlMessage<'_> {
        match self {
            Self::V4(info) => ControlMessage::Ipv4PacketInfo(info),
            Self::V6(info) => ControlMessage::Ipv6PacketInfo(info),
        }
    }
}

impl WorkerSockets {
    fn open(port: u16, fwmark: u32, reuse_port: bool, offload: bool) -> io::Result<Self> {
        let v4 = bind(
            Domain::IPV4,
            (Ipv4Addr::UNSPECIFIED, port).into(),
            fwmark,
            reuse_port,
            offload,
        )?;
        let port = v4.local_addr()?.port();
        let v6 = match bind(
            Domain::IPV6,
            (Ipv6Addr::UNSPECIFIED, port).into(),
            fwmark,
            reuse_port,
            offload,
        ) {
            Ok(socket) => Some(socket),
            Err(error) if is_one_of(&error, &[Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL]) => None,
            Err(error) => return Err(error),
        };
        Ok(Self { v4, v6 })
    }
}

/// Allocates a buffer for the control messages that [`receive`] reads.
pub(crate) fn control_buffer() -> Vec<u8> {
    nix::cmsg_space!(i32, libc::in6_pktinfo)
}

/// Receives one datagram or a run from one source.
pub(crate) fn receive(socket: &UdpSocket, buffer: &mut [u8], control: &mut [u8]) -> io::Result<ReceivedRun> {
    let mut slices = [IoSliceMut::new(buffer)];
    let message = recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut slices, Some(control), MsgFlags::empty())?;
    let length = message.bytes;
    let (mut segment, mut local) = (None, None);
    for control in message.cmsgs()? {
        match control {
            ControlMessageOwned::UdpGroSegments(size) => segment = usize::try_from(size).ok().filter(|size| *size > 0),
            ControlMessageOwned::Ipv4PacketInfo(info) => {
                local = Some(IpAddr::from(info.ipi_spec_dst.s_addr.to_ne_bytes()));
            }
            ControlMessageOwned::Ipv6PacketInfo(info) => local = Some(IpAddr::from(info.ipi6_addr.s6_addr)),
            _ => {}
        }
    }
    let address = message.address.as_ref();
    let v4 = || address?.as_sockaddr_in().map(|source| SocketAddr::V4((*source).into()));
    let v6 = || {
        address?
            .as_sockaddr_in6()
            .map(|source| SocketAddr::V6((*source).into()))
    };
    let remote = v4().or_else(v6).ok_or(ErrorKind::InvalidData)?;
    Ok(ReceivedRun {
        length,
        segment: segment.unwrap_or(length.max(1)),
        source: Endpoint { remote, local },
    })
}

fn is_one_of(error: &io::Error, of: &[Errno]) -> bool {
    of.iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

fn retry_when_writable(socket: &UdpSocket, mut attempt: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    match attempt() {
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            poll(&mut [PollFd::new(&socket.as_fd(), PollFlags::OUT)], Some(&SEND_TIMEOUT))?;
            attempt()
        }
        result => result,
    }
}

fn bind(domain: Domain, address: SocketAddr, fwmark: u32, reuse_port: bool, offload: bool) -> io::Result<UdpSocket> {
    let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
    if domain == Domain::IPV6 {
        socket.set_only_v6(true)?;
    }
    if domain == Domain::IPV4 {
        // As in the kernel's WireGuard, DF is not set, so that a router before a link with a smaller MTU may fragment. With DF, packets
        // would be lost without notice if that router sends no ICMP error.
        set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DONT)?;
    }
    if fwmark != 0 {
        socket.set_mark(fwmark)?;
    }
    if reuse_port {
        socket.set_reuse_port(true)?;
    }
    // A smaller buffer than requested is no error.
    if setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).is_err() {
        let _ = socket.set_recv_buffer_size(RECEIVE_BUFFER);
    }
    if setsockopt(&socket, sockopt::SndBufForce, &SEND_BUFFER).is_err() {
        let _ = socket.set_send_buffer_size(SEND_BUFFER);
    }
    if offload {
        // If the kernel refuses, each call receives one datagram.
        let _ = setsockopt(&socket, sockopt::UdpGroSegment, &true);
    }
    // If the kernel refuses, it chooses the local address of each sent datagram.
    let _ = match domain {
        Domain::IPV6 => setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true),
        _ => setsockopt(&socket, sockopt::Ipv4PacketInfo, &true),
    };
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}
