//! The UDP sockets of a device, one for each family and worker. What goes over them is not looked at here.
//!
//! Datagrams of one size to one place leave as a run in one call (`UDP_SEGMENT`) and arrive so (`UDP_GRO`), where the kernel offers it
//! (Linux `Documentation/networking/segmentation-offloads.rst`, since 4.18 and 5.0).

use std::{
    io::{self, ErrorKind, IoSlice, IoSliceMut},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
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
    pub(super) source: SocketAddr,
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
    pub(super) fn send(&self, lane: usize, datagram: &[u8], to: SocketAddr) -> io::Result<()> {
        let socket = self.socket(lane, to)?;
        patiently(socket, || socket.send_to(datagram, to).map(drop))
    }

    /// Sends datagrams of `segment` bytes, of which the last may be shorter; returns how many the kernel did not take.
    pub(super) fn send_run(&self, lane: usize, run: &[u8], segment: usize, to: SocketAddr) -> usize {
        if run.len() > segment && self.segmentation.load(Ordering::Relaxed) {
            match self.send_at_once(lane, run, segment, to) {
                Ok(()) => return 0,
                // The card cannot checksum: it will not be asked again.
                Err(error) if error.raw_os_error() == Some(Errno::IO.raw_os_error()) => {
                    if self.segmentation.swap(false, Ordering::Relaxed) {
                        tracing::info!("the network card takes no runs of datagrams: they are sent one by one");
                    }
                }
                // Larger than the path's MTU, so that each has to be fragmented, or more than this kernel takes.
                Err(error)
                    if [Errno::INVAL, Errno::MSGSIZE, Errno::OPNOTSUPP]
                        .iter()
                        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error())) => {}
                Err(_) => return run.len().div_ceil(segment),
            }
        }
        run.chunks(segment)
            .filter(|datagram| self.send(lane, datagram, to).is_err())
            .count()
    }

    fn send_at_once(&self, lane: usize, run: &[u8], segment: usize, to: SocketAddr) -> io::Result<()> {
        let socket = self.socket(lane, to)?;
        let segment = segment as u16;
        let (control, to) = ([ControlMessage::UdpGsoSegments(&segment)], SockaddrStorage::from(to));
        patiently(socket, || {
            sendmsg(
                socket.as_raw_fd(),
                &[IoSlice::new(run)],
                &control,
                MsgFlags::empty(),
                Some(&to),
            )
            .map(drop)
            .map_err(Into::into)
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
            Err(error)
                if [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL]
                    .iter()
                    .any(|absent| error.raw_os_error() == Some(absent.raw_os_error())) =>
            {
                None
            }
            Err(error) => return Err(error),
        };
        Ok(Self { v4, v6 })
    }
}

/// Room for what [`receive`] is told beside the data.
pub(super) fn control_buffer() -> Vec<u8> {
    nix::cmsg_space!(i32)
}

/// Takes what is there: one datagram, or a run from one source.
pub(super) fn receive(socket: &UdpSocket, buffer: &mut [u8], control: &mut [u8]) -> io::Result<Run> {
    let mut slices = [IoSliceMut::new(buffer)];
    let message = recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut slices, Some(control), MsgFlags::empty())?;
    let length = message.bytes;
    let segment = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::UdpGroSegments(size) => usize::try_from(size).ok().filter(|size| *size > 0),
        _ => None,
    });
    let address = message.address.as_ref();
    let v4 = || address?.as_sockaddr_in().map(|source| SocketAddr::V4((*source).into()));
    let v6 = || {
        address?
            .as_sockaddr_in6()
            .map(|source| SocketAddr::V6((*source).into()))
    };
    let source = v4().or_else(v6).ok_or(ErrorKind::InvalidData)?;
    Ok(Run {
        length,
        segment: segment.unwrap_or(length.max(1)),
        source,
    })
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
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}
