//! The UDP sockets of a device, one for each family and worker. What goes over them is not looked at here.
//!
//! Datagrams of one size to one place leave as a run in one call (`UDP_SEGMENT`) and arrive so (`UDP_GRO`), where the kernel offers it
//! (Linux `Documentation/networking/segmentation-offloads.rst`, since 4.18 and 5.0).

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

/// Asked of the kernel: with CAP_NET_ADMIN also beyond `net.core.{r,w}mem_max`. What waits to be received is what all TCP flows of all
/// peers may have under way while the thread that takes it is not running: with 4 MiB 16 flows lost thousands of packets a second.
const RECEIVE_BUFFER: usize = 8 << 20;
const SEND_BUFFER: usize = 4 << 20;
/// How long a full send queue may stop a sender before its datagram is dropped.
const PATIENCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};
/// The most datagrams in a run (`UDP_MAX_SEGMENTS`, 64 before Linux 6.9).
pub(super) const RUN: usize = 64;
/// The most bytes in a run: an IPv4 packet of 65,535 with all its headers.
pub(super) const RUN_BYTES: usize = 65_000;

mod memory {
    //! What the kernel says of a socket's queues (`SO_MEMINFO`, Linux 4.12).
    #![allow(unsafe_code)]

    use std::net::UdpSocket;

    use nix::{libc, sys::socket::getsockopt};

    /// `SK_MEMINFO_DROPS` of `SK_MEMINFO_VARS` numbers (Linux `include/uapi/linux/sock_diag.h`).
    const DROPS: usize = 8;
    type Numbers = [u32; DROPS + 1];

    #[derive(Debug, Clone, Copy)]
    struct MemInfo;

    // The kernel fills in so many numbers, and as many as there is room for.
    nix::getsockopt_impl!(
        MemInfo,
        libc::SOL_SOCKET,
        libc::SO_MEMINFO,
        Numbers,
        nix::sys::socket::sockopt::GetStruct<Numbers>
    );

    /// Datagrams that found the receive queue full.
    pub(super) fn dropped(socket: &UdpSocket) -> u64 {
        getsockopt(socket, MemInfo).map_or(0, |numbers| u64::from(numbers[DROPS]))
    }
}

/// Bound to one port in both families; non-blocking.
#[derive(Debug)]
pub(super) struct Sockets {
    pub(super) lanes: Vec<Lane>,
    pub(super) port: u16,
    /// Runs may be sent in one call.
    segmentation: AtomicBool,
}

/// One worker's sockets. The kernel gives every peer's datagrams to one of them, by the addresses.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) v4: UdpSocket,
    /// `None` where the kernel has no IPv6.
    pub(super) v6: Option<UdpSocket>,
}

/// What came in one call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    pub(super) length: usize,
    /// Bytes of each datagram but the last.
    pub(super) segment: usize,
    pub(super) source: Place,
}

/// Where a peer is, and the address of ours that it knows: what is sent from another one a firewall or a NAT on its side may not
/// take for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) peer: SocketAddr,
    /// `None` = the kernel chooses.
    pub(super) own: Option<IpAddr>,
}

impl From<SocketAddr> for Place {
    fn from(peer: SocketAddr) -> Self {
        Self { peer, own: None }
    }
}

impl Sockets {
    /// Binds `port`, or any port that is free in both families for 0.
    pub(super) fn open(port: u16, fwmark: u32, lanes: usize, offload: bool) -> io::Result<Self> {
        // A port free in one family may be taken in the other.
        let mut attempts = if port == 0 { 16 } else { 1 };
        loop {
            attempts -= 1;
            match Self::try_open(port, fwmark, lanes, offload) {
                Err(error) if error.kind() == ErrorKind::AddrInUse && attempts > 0 => {}
                result => return result,
            }
        }
    }

    fn try_open(port: u16, fwmark: u32, lanes: usize, offload: bool) -> io::Result<Self> {
        // Sockets that share a port would share it with another agent too: this one finds out that nobody has it.
        let alone = Lane::open(port, fwmark, false, offload)?;
        let port = alone.v4.local_addr()?.port();
        let lanes = if lanes > 1 {
            drop(alone);
            (0..lanes)
                .map(|_| Lane::open(port, fwmark, true, offload))
                .collect::<Result<_, _>>()?
        } else {
            vec![alone]
        };
        let segmentation = offload
            && lanes
                .first()
                .is_some_and(|lane| setsockopt(&lane.v4, sockopt::UdpGsoSegment, &0).is_ok());
        Ok(Self {
            lanes,
            port,
            segmentation: AtomicBool::new(segmentation),
        })
    }

    /// Whether runs are sent in one call.
    pub(super) fn offload(&self) -> bool {
        self.segmentation.load(Ordering::Relaxed)
    }

    /// Datagrams that the kernel dropped since their socket's queue was full.
    pub(super) fn overflowed(&self) -> u64 {
        let all = self.lanes.iter().flat_map(|lane| [Some(&lane.v4), lane.v6.as_ref()]);
        all.flatten().map(memory::dropped).sum()
    }

    /// Marks every datagram from now on.
    pub(super) fn mark(&self, fwmark: u32) -> io::Result<()> {
        for lane in &self.lanes {
            for socket in [Some(&lane.v4), lane.v6.as_ref()].into_iter().flatten() {
                socket2::SockRef::from(socket).set_mark(fwmark)?;
            }
        }
        Ok(())
    }

    /// Sends, waiting a moment where the queue is full.
    pub(super) fn send(&self, lane: usize, datagram: &[u8], to: Place) -> io::Result<()> {
        self.send_with(lane, datagram, None, to)
    }

    /// Sends datagrams of `segment` bytes, of which the last may be shorter; returns how many the kernel did not take.
    pub(super) fn send_run(&self, lane: usize, run: &[u8], segment: usize, to: Place) -> usize {
        if run.len() > segment && self.segmentation.load(Ordering::Relaxed) {
            match self.send_with(lane, run, Some(segment as u16), to) {
                Ok(()) => return 0,
                // The card cannot checksum: it will not be asked again.
                Err(error) if error.raw_os_error() == Some(Errno::IO.raw_os_error()) => {
                    if self.segmentation.swap(false, Ordering::Relaxed) {
                        tracing::info!("the network card takes no runs of datagrams: they are sent one by one");
                    }
                }
                // Larger than the path's MTU, so that each has to be fragmented, or more than this kernel takes.
                Err(error) if is_one_of(&error, &[Errno::INVAL, Errno::MSGSIZE, Errno::OPNOTSUPP]) => {}
                Err(_) => return run.len().div_ceil(segment),
            }
        }
        run.chunks(segment)
            .filter(|datagram| self.send(lane, datagram, to).is_err())
            .count()
    }

    fn send_with(&self, lane: usize, bytes: &[u8], segment: Option<u16>, to: Place) -> io::Result<()> {
        let socket = self.socket(lane, to.peer)?;
        let address = SockaddrStorage::from(to.peer);
        let send = |own: Option<IpAddr>| {
            let own = own.map(|own| Own::new(own, to.peer));
            let with = |control: &[ControlMessage<'_>]| {
                let slices = [IoSlice::new(bytes)];
                let sent = sendmsg(socket.as_raw_fd(), &slices, control, MsgFlags::empty(), Some(&address));
                sent.map(drop).map_err(io::Error::from)
            };
            match (&segment, &own) {
                (Some(segment), Some(own)) => with(&[ControlMessage::UdpGsoSegments(segment), own.message()]),
                (Some(segment), None) => with(&[ControlMessage::UdpGsoSegments(segment)]),
                (None, Some(own)) => with(&[own.message()]),
                (None, None) => with(&[]),
            }
        };
        patiently(socket, || match send(to.own) {
            // The address is ours no longer; which of these it is depends on the kernel and the family.
            Err(error)
                if to.own.is_some() && is_one_of(&error, &[Errno::INVAL, Errno::NETUNREACH, Errno::ADDRNOTAVAIL]) =>
            {
                send(None)
            }
            result => result,
        })
    }

    fn socket(&self, lane: usize, to: SocketAddr) -> io::Result<&UdpSocket> {
        let lane = self.lanes.get(lane).or_else(|| self.lanes.first());
        let socket = lane.and_then(|lane| match to {
            SocketAddr::V4(_) => Some(&lane.v4),
            SocketAddr::V6(_) => lane.v6.as_ref(),
        });
        socket.ok_or_else(|| ErrorKind::AddrNotAvailable.into())
    }
}

/// The address to send from, as the kernel takes it (ip(7), ipv6(7)).
enum Own {
    V4(libc::in_pktinfo),
    V6(libc::in6_pktinfo),
}

impl Own {
    fn new(own: IpAddr, to: SocketAddr) -> Self {
        match own {
            IpAddr::V4(own) => Self::V4(libc::in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: libc::in_addr {
                    s_addr: u32::from_ne_bytes(own.octets()),
                },
                ipi_addr: libc::in_addr { s_addr: 0 },
            }),
            IpAddr::V6(own) => Self::V6(libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr { s6_addr: own.octets() },
                // A link-local address means nothing without its link.
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

impl Lane {
    fn open(port: u16, fwmark: u32, shared: bool, offload: bool) -> io::Result<Self> {
        let v4 = bind(
            Domain::IPV4,
            (Ipv4Addr::UNSPECIFIED, port).into(),
            fwmark,
            shared,
            offload,
        )?;
        let port = v4.local_addr()?.port();
        let v6 = match bind(
            Domain::IPV6,
            (Ipv6Addr::UNSPECIFIED, port).into(),
            fwmark,
            shared,
            offload,
        ) {
            Ok(socket) => Some(socket),
            Err(error) if is_one_of(&error, &[Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL]) => None,
            Err(error) => return Err(error),
        };
        Ok(Self { v4, v6 })
    }
}

/// Room for what [`receive`] is told beside the data.
pub(super) fn control_buffer() -> Vec<u8> {
    nix::cmsg_space!(i32, libc::in6_pktinfo)
}

/// Takes what is there: one datagram, or a run from one source.
pub(super) fn receive(socket: &UdpSocket, buffer: &mut [u8], control: &mut [u8]) -> io::Result<Run> {
    let mut slices = [IoSliceMut::new(buffer)];
    let message = recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut slices, Some(control), MsgFlags::empty())?;
    let length = message.bytes;
    let (mut segment, mut own) = (None, None);
    for control in message.cmsgs()? {
        match control {
            ControlMessageOwned::UdpGroSegments(size) => segment = usize::try_from(size).ok().filter(|size| *size > 0),
            ControlMessageOwned::Ipv4PacketInfo(info) => {
                own = Some(IpAddr::from(info.ipi_spec_dst.s_addr.to_ne_bytes()));
            }
            ControlMessageOwned::Ipv6PacketInfo(info) => own = Some(IpAddr::from(info.ipi6_addr.s6_addr)),
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
    let peer = v4().or_else(v6).ok_or(ErrorKind::InvalidData)?;
    Ok(Run {
        length,
        segment: segment.unwrap_or(length.max(1)),
        source: Place { peer, own },
    })
}

fn is_one_of(error: &io::Error, of: &[Errno]) -> bool {
    of.iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

fn patiently(socket: &UdpSocket, mut attempt: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    match attempt() {
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            poll(&mut [PollFd::new(&socket.as_fd(), PollFlags::OUT)], Some(&PATIENCE))?;
            attempt()
        }
        result => result,
    }
}

fn bind(domain: Domain, address: SocketAddr, fwmark: u32, shared: bool, offload: bool) -> io::Result<UdpSocket> {
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
    if shared {
        socket.set_reuse_port(true)?;
    }
    // More is better, less is no error.
    if setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).is_err() {
        let _ = socket.set_recv_buffer_size(RECEIVE_BUFFER);
    }
    if setsockopt(&socket, sockopt::SndBufForce, &SEND_BUFFER).is_err() {
        let _ = socket.set_send_buffer_size(SEND_BUFFER);
    }
    if offload {
        // Without it datagrams come one by one.
        let _ = setsockopt(&socket, sockopt::UdpGroSegment, &true);
    }
    // Without it the kernel chooses the address of each answer.
    let _ = match domain {
        Domain::IPV6 => setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true),
        _ => setsockopt(&socket, sockopt::Ipv4PacketInfo, &true),
    };
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}
