//! The node's WireGuard device behind one trait. What it should hold is `clustermesh_agent_core::device`'s business;
//! addresses, routes and firewall are other modules'.

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

/// A WireGuard device that stands: interface up, port bound.
///
/// The calls return at once and may be made from async code. They belong to the network namespace of the thread that
/// opened the device: make them from there. Dropping a device ends our part and leaves standing what outlives a process
/// (a kernel device, which carries on and is taken over by the next process; of a userspace device its interface with addresses and routes, which drops what is sent into it until the next
/// [`open`] takes it over). [`Device::close`] leaves nothing.
pub trait Device: Send {
    /// Which implementation this is: `kernel`, `userspace`, `memory`. For logs, metrics and the node's annotation.
    fn backend(&self) -> &'static str;

    /// The interface's name.
    fn interface(&self) -> &str;

    /// Changes what differs from the configuration in force. A new private key or port costs every peer a handshake; firewall mark and MTU
    /// cost nothing.
    ///
    /// # Errors
    /// The port is taken, or the kernel refuses. What was in force stays.
    fn configure(&mut self, configuration: &Configuration) -> Result<(), DeviceError>;

    /// Carries out the changes, in order and all at once as far as traffic is concerned. Only the peers named are touched, and only a new
    /// preshared key or a removal ends a session. A new peer with an endpoint is greeted at once.
    ///
    /// # Errors
    /// The kernel refuses; some changes may be in force then, and [`Device::observe`] says which.
    fn apply(&mut self, changes: &[PeerChange]) -> Result<(), DeviceError>;

    /// What the device holds and what it has seen.
    ///
    /// # Errors
    /// The kernel cannot be asked; [`DeviceError::Gone`] or [`DeviceError::Died`]: drop this device and open it again.
    fn observe(&self) -> Result<Observed, DeviceError>;

    /// Puts back what [`Device::observe`] found altered.
    ///
    /// # Errors
    /// The port was taken meanwhile, or the kernel refuses; what comes before it in order is put back.
    fn mend(&mut self, altered: &BTreeSet<Altered>) -> Result<(), DeviceError>;

    /// Removes the interface and everything else that is ours.
    ///
    /// # Errors
    /// What could not be removed; the rest is.
    fn close(self: Box<Self>) -> Result<(), DeviceError>;
}

/// What a device has besides peers.
#[derive(Clone)]
pub struct Configuration {
    /// The node's x25519 key; zeroized when dropped.
    pub private_key: StaticSecret,
    /// UDP, both families; 0 = any free port.
    pub listen_port: u16,
    /// Set on every outer packet (`SO_MARK`), so that routing and firewall can tell them; 0 = none.
    pub fwmark: u32,
    /// Of the interface, bytes of inner packet.
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

/// What [`Device::observe`] found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observed {
    /// By public key.
    pub peers: ObservedPeers,
    /// The port in use.
    pub listen_port: u16,
    /// Packets dropped since the device was opened, by reason: a word fit for a metric label.
    pub drops: BTreeMap<&'static str, u64>,
    /// What others changed of the configuration in force.
    pub altered: BTreeSet<Altered>,
}

/// A part of a device's configuration that another hand can change under us, in the order in which they are put back: who is
/// greeted under the right key needs everything else.
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
    /// `wg set private-key`. Every session is gone.
    PrivateKey,
}

impl Altered {
    /// A word fit for a metric label.
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
    /// The best there is on this node; [`Device::backend`] says which it became.
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

/// A device, and why it is of this kind: for the log.
pub type Opened = (Box<dyn Device>, &'static str);

/// Opens the device. The kernel's holds the peers that an earlier process of ours left; userspace starts with none. What the other
/// backend left under that name is removed first. The options are those of the userspace backend.
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
    let why = match backend {
        Backend::Kernel => "--backend=kernel asks for it",
        Backend::Userspace => "--backend=userspace asks for it",
        Backend::Auto => "--backend=auto: this node's kernel has WireGuard",
    };
    let why = match backend {
        Backend::Userspace => why,
        Backend::Kernel | Backend::Auto => match kernel::Kernel::open(interface, configuration) {
            Ok(device) => {
                // A socket would make `wg show` look for the userspace device that is gone.
                if let Err(error) = userspace::remove_leftovers(interface) {
                    tracing::warn!(%error, "left over from the userspace backend");
                }
                return Ok((Box::new(device), why));
            }
            Err(DeviceError::NoKernelWireguard) if backend == Backend::Auto => {
                "--backend=auto: this node's kernel has no WireGuard (EOPNOTSUPP)"
            }
            Err(error) => return Err(error),
        },
    };
    let device = userspace::Userspace::open_with(interface, configuration, options)?;
    Ok((Box::new(device), why))
}

/// Why a device could not be opened, changed or asked, with the likely cause.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The kernel answers `EOPNOTSUPP`.
    #[error(
        "this node's kernel has no WireGuard: load its module on the host (`modprobe wireguard`; Linux 5.6 and newer have it), or \
         use --backend=auto or userspace"
    )]
    NoKernelWireguard,
    /// The kernel would cut the name.
    #[error("{0:?} cannot be an interface name: 1 to 15 characters, no space, slash or colon")]
    Name(String),
    /// Someone else's interface, or an earlier process of ours that still runs.
    #[error(
        "interface {0} exists already: another agent or kg (Kilo) runs on this node, or someone made it; see `ip -d link show {0}`. Stop it, or choose another --interface"
    )]
    Exists(String),
    /// Someone deleted the interface while we had it.
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
    /// No TUN.
    #[error(
        "cannot make the TUN device {interface}: {source}. The agent needs /dev/net/tun (in a Pod: a hostPath volume of type CharDevice, and a container runtime that admits it: runc 1.2.0 to 1.2.3 and crun do not) and CAP_NET_ADMIN"
    )]
    Tun {
        /// The interface asked for.
        interface: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// No socket.
    #[error(
        "cannot listen on UDP port {port}: {source}. Another WireGuard on this node may have it (`ss -ulpn`); choose another --port, or give the agent CAP_NET_ADMIN"
    )]
    Listen {
        /// The port asked for.
        port: u16,
        /// What the kernel said.
        source: io::Error,
    },
    /// The control socket's file is in the way.
    #[error("cannot remove the control socket {path}: {source}")]
    ControlSocket {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Anything else the kernel refused.
    #[error("cannot {action}: {source}")]
    Kernel {
        /// What was tried, as "set the MTU of kilo0 to 1380".
        action: String,
        /// What the kernel said.
        source: io::Error,
    },
}

impl DeviceError {
    /// One word for metrics, Events and conditions.
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
