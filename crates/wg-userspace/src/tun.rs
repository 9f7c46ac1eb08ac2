//! Creates or takes over the TUN device, and reads and writes its packets, each with a virtio-net header in front.
//!
//! [`crate::Device::open`] makes the device persistent (`TUNSETPERSIST`). When the process that opened it ends, the interface stays
//! with its addresses and routes, but loses its carrier. The kernel drops packets routed into it until the next process takes it over.
//! A program recognizes its interface by the alias.

use std::{
    fs::{File, OpenOptions},
    io::{self, IoSlice},
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
};

use nix::{errno::Errno, libc};
use rustix::fs::OFlags;

use crate::{
    configuration::Interface,
    error::Error,
    link::{self, Kind},
    offload::HEADER,
};

/// The size of an alias with its terminating NUL (`IFALIASZ`, Linux `include/uapi/linux/if.h`).
const ALIAS_SIZE: usize = 256;

/// The offloads that the kernel has accepted. With them the kernel delivers large packets, which this program splits, and accepts large
/// packets that this program has joined.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Offload {
    pub(crate) tcp: bool,
    pub(crate) udp: bool,
}

/// An open TUN device, with one file for each queue.
#[derive(Debug)]
pub(crate) struct Tun {
    pub(crate) queues: Vec<File>,
    pub(crate) index: u32,
    pub(crate) offload: Offload,
}

mod control {
    //! `ioctl` requests of `/dev/net/tun` (Linux `Documentation/networking/tuntap.rst`).
    #![allow(unsafe_code)]

    use std::os::fd::RawFd;

    use nix::libc;

    nix::ioctl_write_ptr_bad!(set_interface, libc::TUNSETIFF, libc::ifreq);
    nix::ioctl_write_ptr_bad!(set_header_size, libc::TUNSETVNETHDRSZ, libc::c_int);
    nix::ioctl_write_int_bad!(set_persist, libc::TUNSETPERSIST);
    nix::ioctl_write_int_bad!(set_offload, libc::TUNSETOFFLOAD);

    /// Attaches an open `/dev/net/tun` to the interface.
    pub(super) fn attach(file: RawFd, name: &[u8; libc::IFNAMSIZ], flags: libc::c_int) -> nix::Result<()> {
        let mut request = libc::ifreq {
            ifr_name: name.map(|byte| byte as libc::c_char),
            ifr_ifru: libc::__c_anonymous_ifr_ifru {
                ifru_flags: flags as libc::c_short,
            },
        };
        // SAFETY: the kernel reads and writes one ifreq, which lives through the call.
        unsafe { set_interface(file, &raw mut request) }.map(drop)
    }

    pub(super) fn header_size(file: RawFd, bytes: usize) -> nix::Result<()> {
        let bytes = bytes as libc::c_int;
        // SAFETY: the kernel reads one int, which lives through the call.
        unsafe { set_header_size(file, &raw const bytes) }.map(drop)
    }

    pub(super) fn persist(file: RawFd, yes: bool) -> nix::Result<()> {
        // SAFETY: the argument is a number.
        unsafe { set_persist(file, libc::c_int::from(yes)) }.map(drop)
    }

    pub(super) fn offload(file: RawFd, flags: libc::c_uint) -> nix::Result<()> {
        // SAFETY: the argument is a number.
        unsafe { set_offload(file, flags as libc::c_int) }.map(drop)
    }
}

impl Tun {
    /// Creates the TUN interface, or takes over an existing one that has our alias and that no process has open. Replaces an interface
    /// with our alias if it is the kernel's WireGuard, or a TUN interface with other flags. Any other interface of this name is an error.
    /// A new interface is neither up nor persistent.
    pub(crate) fn open(interface: Interface<'_>, queues: usize, offload: bool) -> Result<Self, Error> {
        let name = check(interface)?;
        let existing = find(interface)?;
        let owned = || interface.name.to_owned();
        let taken_over = match existing {
            None => false,
            Some(link) => match link.kind {
                Kind::Tun { attached: false } if link.is_ours => true,
                Kind::Wireguard if link.is_ours => {
                    remove(interface, link.index)?;
                    false
                }
                _ => return Err(Error::Exists(owned())),
            },
        };
        let files = match attach(interface, &name, queues) {
            // An earlier version of this program created the interface with other flags.
            Err(Errno::EINVAL) if taken_over => {
                remove(interface, existing.map_or(0, |link| link.index))?;
                attach(interface, &name, queues)
            }
            files => files,
        };
        let files = files.map_err(|errno| match errno {
            // Another program created or opened the interface after `find`.
            Errno::EBUSY | Errno::EINVAL => Error::Exists(owned()),
            errno => Error::Tun {
                interface: owned(),
                source: errno.into(),
            },
        })?;
        let gone = || Error::Gone(owned());
        let index = find(interface)?.ok_or_else(gone)?.index;
        let tun = |source: Errno| Error::Tun {
            interface: owned(),
            source: source.into(),
        };
        let first = files.first().ok_or_else(gone)?.as_raw_fd();
        control::header_size(first, HEADER).map_err(tun)?;
        let offload = enable_offload(first, offload);
        Ok(Self {
            queues: files,
            index,
            offload,
        })
    }

    /// Sets whether the interface outlives this process.
    pub(crate) fn persist(&self, yes: bool) -> io::Result<()> {
        let Some(queue) = self.queues.first() else {
            return Ok(());
        };
        match control::persist(queue.as_raw_fd(), yes) {
            // The interface was deleted.
            Err(Errno::EBADFD) => Ok(()),
            result => result.map_err(Into::into),
        }
    }
}

/// Reads one packet with its virtio-net header in front; returns the length of both.
pub(crate) fn read(queue: &File, buffer: &mut [u8]) -> io::Result<usize> {
    rustix::io::read(queue, buffer).map_err(Into::into)
}

/// Writes one packet. `parts` starts with its virtio-net header.
pub(crate) fn write(queue: &File, parts: &[IoSlice<'_>]) -> io::Result<()> {
    rustix::io::writev(queue, parts).map(drop).map_err(Into::into)
}

/// Removes the interface with that name, of any kind, if it exists and has our alias; `false` = it has another alias or none, and stays.
/// It is an error if a process has the interface open.
pub(crate) fn remove_ours(interface: Interface<'_>) -> Result<bool, Error> {
    match find(interface)? {
        None => Ok(true),
        Some(link) if !link.is_ours => Ok(false),
        Some(link) => match link.kind {
            Kind::Tun { attached: true } => Err(Error::Exists(interface.name.to_owned())),
            _ => remove(interface, link.index).map(|()| true),
        },
    }
}

/// Checks name and alias; returns the name padded with zeros for `ifreq`.
fn check(interface: Interface<'_>) -> Result<[u8; libc::IFNAMSIZ], Error> {
    let Interface { name, alias } = interface;
    let mut padded = [0; libc::IFNAMSIZ];
    let fits = (1..padded.len()).contains(&name.len());
    if !fits || [".", ".."].contains(&name) || name.contains(|c: char| c.is_whitespace() || "/:%".contains(c)) {
        return Err(Error::Name(name.to_owned()));
    }
    if !(1..ALIAS_SIZE).contains(&alias.len()) || alias.contains('\0') {
        return Err(Error::Alias(alias.to_owned()));
    }
    padded[..name.len()].copy_from_slice(name.as_bytes());
    Ok(padded)
}

fn find(interface: Interface<'_>) -> Result<Option<link::Link>, Error> {
    link::find(interface).map_err(|source| Error::kernel(format!("look for interface {}", interface.name), source))
}

fn remove(interface: Interface<'_>, index: u32) -> Result<(), Error> {
    link::remove(index).map_err(|source| Error::kernel(format!("remove interface {}", interface.name), source))
}

fn attach(interface: Interface<'_>, name: &[u8; libc::IFNAMSIZ], queues: usize) -> Result<Vec<File>, Errno> {
    let flags = libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE;
    let open = |_| {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags((OFlags::NONBLOCK | OFlags::CLOEXEC).bits() as i32)
            .open("/dev/net/tun")
            .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))?;
        control::attach(file.as_raw_fd(), name, flags)?;
        Ok(file)
    };
    let files = (0..queues.max(1)).map(open).collect::<Result<Vec<_>, _>>();
    if let Err(errno) = &files {
        tracing::debug!(interface = interface.name, %errno, "cannot attach to the interface");
    }
    files
}

/// Enables as much offload as the kernel accepts; none if `wanted` is false.
fn enable_offload(file: i32, wanted: bool) -> Offload {
    let tcp = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    let requests = [
        // Since Linux 6.2.
        (
            tcp | libc::TUN_F_USO4 | libc::TUN_F_USO6,
            Offload { tcp: true, udp: true },
        ),
        (tcp, Offload { tcp: true, udp: false }),
    ];
    requests
        .into_iter()
        .filter(|_| wanted)
        .find(|(flags, _)| control::offload(file, *flags).is_ok())
        .map(|(_, offload)| offload)
        .unwrap_or_else(|| {
            // Disables the offloads that an earlier process enabled.
            let _ = control::offload(file, 0);
            Offload::default()
        })
}
