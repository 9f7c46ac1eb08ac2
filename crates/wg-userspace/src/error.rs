//! The errors of opening, changing, observing and removing a device.

use std::{io, path::PathBuf};

/// Why a device could not be opened, changed, observed or removed, with the likely cause.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel would refuse or truncate the name.
    #[error("{0:?} cannot be an interface name: 1 to 15 characters, no space, slash, colon or percent sign")]
    Name(String),
    /// The alias is empty, too long, or contains NUL. Without an alias the interface would not be recognized later.
    #[error("{0:?} cannot be the alias of an interface: 1 to 255 bytes, without NUL")]
    Alias(String),
    /// The interface has another alias, or a process has it open.
    #[error(
        "interface {0} exists already: another program created it, or a process still has it open; see `ip -d link show {0}`. Stop that process, or choose another name"
    )]
    Exists(String),
    /// Another program deleted the interface.
    #[error("another program deleted interface {0}: open the device again")]
    Gone(String),
    /// A thread of the device panicked.
    #[error(
        "thread {thread} of {interface} panicked, so the device forwards no packets: this is a bug, see the panic on standard error; open the device again"
    )]
    Died {
        /// The interface.
        interface: String,
        /// The name of the thread.
        thread: String,
    },
    /// The TUN device could not be created.
    #[error("cannot create the TUN device {interface}: {source}. The process needs /dev/net/tun and CAP_NET_ADMIN")]
    Tun {
        /// The name of the interface.
        interface: String,
        /// The error.
        source: io::Error,
    },
    /// A UDP socket could not be bound.
    #[error(
        "cannot listen on UDP port {port}: {source}. Another program may use the port (`ss -ulpn`): choose another one; a firewall mark needs CAP_NET_ADMIN"
    )]
    Listen {
        /// The configured port.
        port: u16,
        /// The error.
        source: io::Error,
    },
    /// The file of the control socket could not be removed.
    #[error("cannot remove the control socket {path}: {source}")]
    ControlSocket {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// Any other error of the kernel.
    #[error("cannot {action}: {source}")]
    Kernel {
        /// The action that failed, such as "bring wg0 up with an MTU of 1380".
        action: String,
        /// The error.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn kernel(action: impl Into<String>, source: io::Error) -> Self {
        Self::Kernel {
            action: action.into(),
            source,
        }
    }
}
