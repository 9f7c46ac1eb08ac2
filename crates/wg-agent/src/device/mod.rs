//! Defines the trait [`Device`] of the node's WireGuard device, and opens one of its implementations.
//! `clustermesh_agent_core::device` decides which peers the device has.

pub mod kernel;
mod memory;
pub mod userspace;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    path::PathBuf,
    str::FromStr,
};

use clustermesh_agent_core::{
    device::{ObservedPeers, PeerChange},
    interface::InterfaceName,
};
use x25519_dalek::StaticSecret;

pub use memory::Memory;

/// The alias (`IFLA_IFALIAS`) of the agent's interface; `ip link show` prints it. It distinguishes the interface from one of
/// the same name that another program created.
pub const ALIAS: &str = "clustermesh wg-agent";

/// An open WireGuard device: interface up, port bound.
///
/// Methods block only for a short time and may be called from async code. The calling thread must be in the network namespace in which
/// the device was opened.
///
/// Dropping a device keeps its interface for the next process, which takes it over. Until then a kernel device keeps
/// working, and the interface of a userspace device keeps its addresses and routes but drops all packets.
/// [`Device::close`] removes everything.
pub trait Device: Send {
    /// The name of the implementation (`kernel`, `userspace` or `memory`) for logs, metrics and the node's annotation.
    fn backend(&self) -> &'static str;

    /// The interface's name.
    fn interface(&self) -> &str;

    /// Changes the values that differ from the current configuration. A new private key costs every peer a
    /// handshake; the other values keep the sessions.
    ///
    /// # Errors
    /// If the port is in use, the whole old configuration stays. If the kernel refuses another value, the values that were
    /// set before it stay, and a second call continues with the rest.
    fn configure(&mut self, configuration: &Configuration) -> Result<(), DeviceError>;

    /// Applies the changes in order. Peers without a change are not touched, and only a new preshared key or a removal
    /// ends a session. A handshake with a new peer that has an endpoint starts at once.
    ///
    /// # Errors
    /// The kernel refuses. Some changes may be applied; [`Device::observe`] shows which.
    fn apply(&mut self, changes: &[PeerChange]) -> Result<(), DeviceError>;

    /// Reads the peers, their counters, and external changes of the configuration.
    ///
    /// # Errors
    /// The kernel does not answer. After [`DeviceError::Gone`] or [`DeviceError::Died`], drop this device and open it again.
    fn observe(&self) -> Result<Observed, DeviceError>;

    /// Restores the parts of the configuration that [`Device::observe`] reported as altered.
    ///
    /// # Errors
    /// Another program uses the port, or the kernel refuses. The parts before the failed one, in the order of [`Altered`],
    /// are restored.
    fn repair(&mut self, altered: &BTreeSet<Altered>) -> Result<(), DeviceError>;

    /// Removes the interface and all other state of the device.
    ///
    /// # Errors
    /// Something could not be removed.
    fn close(self: Box<Self>) -> Result<(), DeviceError>;
}

/// The configuration of a device, except its peers.
#[derive(Clone)]
pub struct Configuration {
    /// The node's x25519 key; zeroized when dropped.
    pub private_key: StaticSecret,
    /// UDP port for both address families; 0 = any free port.
    pub listen_port: u16,
    /// The mark (`SO_MARK`) by which routing and firewall recognize outer packets; 0 = none.
    pub fwmark: u32,
    /// MTU of the interface: the largest inner packet, in bytes.
    pub mtu: u16,
}

impl fmt::Debug for Configuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            private_key: _,
            listen_port,
            fwmark,
            mtu,
        } = self;
        write!(
            f,
            "Configuration {{ listen_port: {listen_port}, fwmark: {fwmark:#x}, mtu: {mtu}, private_key: hidden }}"
        )
    }
}

/// The result of [`Device::observe`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observed {
    /// The peers, by public key.
    pub peers: ObservedPeers,
    /// The port in use.
    pub listen_port: u16,
    /// Dropped packets, by reason (usable as a metric label): since the interface was created (kernel), or since the device was
    /// opened (userspace).
    pub drops: BTreeMap<&'static str, u64>,
    /// Parts of the configuration that external programs changed.
    pub altered: BTreeSet<Altered>,
}

/// A part of a device's configuration that another program can change, in the order of the repair: the private key is
/// last, because setting it starts handshakes, which need the other parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Altered {
    /// `ip link set mtu`.
    Mtu,
    /// `wg set listen-port`.
    ListenPort,
    /// `wg set fwmark`.
    Fwmark,
    /// `ip link set down`.
    Down,
    /// `wg set private-key`. All sessions are lost.
    PrivateKey,
}

impl Altered {
    /// The name of the part as a metric label.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Mtu => "mtu",
            Self::ListenPort => "listen_port",
            Self::Fwmark => "fwmark",
            Self::Down => "link_down",
            Self::PrivateKey => "private_key",
        }
    }
}

/// The choice of the implementation (`--backend`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// The kernel's WireGuard if available, else userspace. [`Device::backend`] is the one in use.
    Auto,
    /// The kernel's WireGuard.
    Kernel,
    /// WireGuard in this process, over a TUN device.
    Userspace,
}

impl FromStr for Backend {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "kernel" => Ok(Self::Kernel),
            "userspace" => Ok(Self::Userspace),
            other => Err(format!("{other:?} is not a backend: write auto, kernel or userspace")),
        }
    }
}

/// An open device.
pub struct Opened {
    /// The device.
    pub device: Box<dyn Device>,
    /// Why this backend is used, for log and status.
    pub reason: &'static str,
}

/// Opens the device. A kernel device of an earlier process keeps its peers; a userspace device starts with none. An
/// interface of the other backend is removed. `options` are for the userspace backend.
///
/// # Errors
/// See [`DeviceError`]; nothing new is left behind.
pub fn open(
    backend: Backend,
    interface: &str,
    configuration: &Configuration,
    options: userspace::Options,
) -> Result<Opened, DeviceError> {
    if interface.parse::<InterfaceName>().is_err() {
        return Err(DeviceError::Name(interface.to_owned()));
    }
    let reason_without_fallback = match backend {
        Backend::Kernel => "set by --backend=kernel",
        Backend::Userspace => "set by --backend=userspace",
        Backend::Auto => "--backend=auto: this node's kernel has WireGuard",
    };
    let reason = match backend {
        Backend::Userspace => reason_without_fallback,
        Backend::Kernel | Backend::Auto => match kernel::Kernel::open(interface, configuration) {
            Ok(device) => {
                // If the control socket of a killed userspace device exists, `wg show` uses it and not the kernel.
                if let Err(error) = userspace::remove_control_socket(interface) {
                    tracing::warn!(%error, "cannot remove the control socket of the userspace backend");
                }
                return Ok(Opened {
                    device: Box::new(device),
                    reason: reason_without_fallback,
                });
            }
            Err(DeviceError::NoKernelWireguard) if backend == Backend::Auto => {
                "--backend=auto: this node's kernel has no WireGuard (EOPNOTSUPP)"
            }
            Err(error) => return Err(error),
        },
    };
    let device = userspace::Userspace::open_with(interface, configuration, options)?;
    Ok(Opened {
        device: Box::new(device),
        reason,
    })
}

/// Why a device could not be opened, changed, observed or closed, with the likely cause.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The kernel answers `EOPNOTSUPP`.
    #[error(
        "this node's kernel has no WireGuard: load its module on the host (`modprobe wireguard`; Linux 5.6 and newer have it), or \
         use --backend=auto or userspace"
    )]
    NoKernelWireguard,
    /// The name is not a valid interface name.
    #[error("{0:?} cannot be an interface name: 1 to 15 characters, no space, slash or colon")]
    Name(String),
    /// An interface of another program has this name, or an earlier agent process still runs.
    #[error(
        "interface {0} exists already: another agent or kg (Kilo) runs on this node, or another program created it; see `ip -d link show {0}`. Stop it, or choose another --interface"
    )]
    Exists(String),
    /// Another program deleted or renamed the interface.
    #[error("interface {0} was deleted or renamed by another program: open the device again")]
    Gone(String),
    /// A thread of a userspace device panicked.
    #[error(
        "thread {thread} of {interface} panicked, so no packets are forwarded: a bug, see the panic in the log; open the device again"
    )]
    Died {
        /// The interface.
        interface: String,
        /// The name of the thread.
        thread: String,
    },
    /// The TUN device could not be created.
    #[error(
        "cannot make the TUN device {interface}: {source}. The agent needs /dev/net/tun (in a Pod: a hostPath volume of type CharDevice, and a container runtime that admits it: runc 1.2.0 to 1.2.3 and crun do not) and CAP_NET_ADMIN"
    )]
    Tun {
        /// The interface to create.
        interface: String,
        /// The error.
        source: io::Error,
    },
    /// A UDP socket could not be bound.
    #[error(
        "cannot listen on UDP port {port}: {source}. Another WireGuard on this node may have it (`ss -ulpn`); choose another --port, or give the agent CAP_NET_ADMIN"
    )]
    Listen {
        /// The port to bind.
        port: u16,
        /// The error.
        source: io::Error,
    },
    /// The control socket could not be removed.
    #[error("cannot remove the control socket {path}: {source}")]
    ControlSocket {
        /// The path of the socket.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// Any other kernel error.
    #[error("cannot {action}: {source}")]
    Kernel {
        /// The failed action, such as "set the MTU of kilo0".
        action: String,
        /// The error.
        source: io::Error,
    },
}

impl DeviceError {
    /// The error's name in metrics, Events and conditions.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::NoKernelWireguard => "NoKernelWireguard",
            Self::Name(_) => "InterfaceName",
            Self::Exists(_) => "InterfaceExists",
            Self::Gone(_) => "InterfaceGone",
            Self::Died { .. } => "DataPathDied",
            Self::Tun { .. } => "NoTun",
            Self::Listen { .. } => "PortTaken",
            Self::ControlSocket { .. } => "ControlSocket",
            Self::Kernel { .. } => "KernelRefused",
        }
    }
}
