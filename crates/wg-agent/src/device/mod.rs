//! Defines the trait [`Device`] of the node's WireGuard device, and opens one of its implementations.
//! `clustermesh_agent_core::device` decides which peers it has. Other modules write addresses, routes and the firewall.

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

/// The alias (`IFLA_IFALIAS`) of an interface that is ours; `ip link show` prints it. The name alone proves nothing.
pub const ALIAS: &str = "clustermesh wg-agent";

/// An open WireGuard device: interface up, port bound.
///
/// Calls return at once and may be made from async code. They must be made from a thread in the network namespace in
/// which the device was opened.
///
/// Dropping a device keeps its interface for the next process, which takes it over. Until then a kernel device keeps
/// working, and the interface of a userspace device keeps its addresses and routes but drops all packets.
/// [`Device::close`] removes everything.
pub trait Device: Send {
    /// Which implementation this is: `kernel`, `userspace`, `memory`. For logs, metrics and the node's annotation.
    fn backend(&self) -> &'static str;

    /// The interface's name.
    fn interface(&self) -> &str;

    /// Changes what differs from the current configuration. A new private key or port costs every peer a handshake;
    /// firewall mark and MTU cost nothing.
    ///
    /// # Errors
    /// The port is taken, or the kernel refuses. The old configuration stays.
    fn configure(&mut self, configuration: &Configuration) -> Result<(), DeviceError>;

    /// Applies the changes in order; traffic sees all of them at once. Only the named peers are touched, and only a
    /// new preshared key or a removal ends a session. A handshake with a new peer that has an endpoint starts at once.
    ///
    /// # Errors
    /// The kernel refuses; some changes may be applied then, and [`Device::observe`] tells which.
    fn apply(&mut self, changes: &[PeerChange]) -> Result<(), DeviceError>;

    /// The peers, their counters, and external changes of the configuration.
    ///
    /// # Errors
    /// The kernel does not answer; [`DeviceError::Gone`] or [`DeviceError::Died`]: drop this device and open it again.
    fn observe(&self) -> Result<Observed, DeviceError>;

    /// Restores what [`Device::observe`] found altered.
    ///
    /// # Errors
    /// The port was taken meanwhile, or the kernel refuses. The parts before the failed one, in the order of [`Altered`],
    /// are restored.
    fn mend(&mut self, altered: &BTreeSet<Altered>) -> Result<(), DeviceError>;

    /// Removes the interface and all other state of the device.
    ///
    /// # Errors
    /// What could not be removed; the rest is removed.
    fn close(self: Box<Self>) -> Result<(), DeviceError>;
}

/// The configuration of a device, except its peers.
#[derive(Clone)]
pub struct Configuration {
    /// The node's x25519 key; zeroized when dropped.
    pub private_key: StaticSecret,
    /// UDP, both families; 0 = any free port.
    pub listen_port: u16,
    /// Set on every outer packet (`SO_MARK`), so that routing and firewall recognize them; 0 = none.
    pub fwmark: u32,
    /// MTU of the interface: bytes of inner packet.
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
    /// By public key.
    pub peers: ObservedPeers,
    /// The port in use.
    pub listen_port: u16,
    /// Packets dropped since the device was opened, by reason (usable as a metric label).
    pub drops: BTreeMap<&'static str, u64>,
    /// Parts of the configuration that external programs changed.
    pub altered: BTreeSet<Altered>,
}

/// A part of a device's configuration that another program can change. The order is that of the repair: the private key
/// comes last, because setting it starts handshakes, which need the rest.
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

/// Which implementation to use (`--backend`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// The kernel's WireGuard if available, else userspace; [`Device::backend`] tells which was chosen.
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
            other => Err(format!("{other:?} is no backend: write auto, kernel or userspace")),
        }
    }
}

/// An open device.
pub struct Opened {
    /// The device.
    pub device: Box<dyn Device>,
    /// Why it has this backend, for log and status.
    pub reason: &'static str,
}

/// Opens the device. A kernel device keeps the peers that an earlier process left; a userspace device starts with none.
/// An interface that the other backend left is removed first. `options` are for the userspace backend.
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
    let reason = match backend {
        Backend::Kernel => "--backend=kernel asks for it",
        Backend::Userspace => "--backend=userspace asks for it",
        Backend::Auto => "--backend=auto: this node's kernel has WireGuard",
    };
    let reason = match backend {
        Backend::Userspace => reason,
        Backend::Kernel | Backend::Auto => match kernel::Kernel::open(interface, configuration) {
            Ok(device) => {
                // If the control socket of the userspace device were left, `wg show` would ask that device, which is gone.
                if let Err(error) = userspace::remove_leftovers(interface) {
                    tracing::warn!(%error, "cannot remove what the userspace backend left");
                }
                return Ok(Opened {
                    device: Box::new(device),
                    reason,
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

/// Why a device could not be opened, changed or observed, with the likely cause.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The kernel answers `EOPNOTSUPP`.
    #[error(
        "this node's kernel has no WireGuard: load its module on the host (`modprobe wireguard`; Linux 5.6 and newer have it), or \
         use --backend=auto or userspace"
    )]
    NoKernelWireguard,
    /// The kernel would truncate the name.
    #[error("{0:?} cannot be an interface name: 1 to 15 characters, no space, slash or colon")]
    Name(String),
    /// The interface is not this agent's, or an earlier agent process still runs.
    #[error(
        "interface {0} exists already: another agent or kg (Kilo) runs on this node, or another program created it; see `ip -d link show {0}`. Stop it, or choose another --interface"
    )]
    Exists(String),
    /// The interface was deleted externally.
    #[error("interface {0} was deleted by someone else: open the device again")]
    Gone(String),
    /// A thread of a userspace device ended by a panic.
    #[error(
        "thread {thread} of {interface} died, so packets stand still: a bug, the log has its panic; open the device again"
    )]
    Died {
        /// The interface.
        interface: String,
        /// Which thread.
        thread: String,
    },
    /// The TUN device could not be created.
    #[error(
        "cannot make the TUN device {interface}: {source}. The agent needs /dev/net/tun (in a Pod: a hostPath volume of type CharDevice, and a container runtime that admits it: runc 1.2.0 to 1.2.3 and crun do not) and CAP_NET_ADMIN"
    )]
    Tun {
        /// The interface asked for.
        interface: String,
        /// The error.
        source: io::Error,
    },
    /// A UDP socket could not be bound.
    #[error(
        "cannot listen on UDP port {port}: {source}. Another WireGuard on this node may have it (`ss -ulpn`); choose another --port, or give the agent CAP_NET_ADMIN"
    )]
    Listen {
        /// The port asked for.
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
    /// Any other kernel error.
    #[error("cannot {action}: {source}")]
    Kernel {
        /// What was tried, such as "set the MTU of kilo0 to 1380".
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
