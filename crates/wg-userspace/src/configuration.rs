//! The values that a device is opened with.

use crate::key::PrivateKey;

/// More workers do not help: the peers' locks and the kernel's queues become the limit.
const MOST_WORKERS: usize = 8;

/// The name of an interface, and the mark by which a program recognizes that it created the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interface<'a> {
    /// 1 to 15 characters, without space, slash, colon and percent sign.
    pub name: &'a str,
    /// The alias of the interface (`IFLA_IFALIAS`, which `ip link show` prints), 1 to 255 bytes. Every program chooses its own. An interface
    /// with another alias, or without one, is never taken over, changed or removed.
    pub alias: &'a str,
}

/// The configuration of a device, except its peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Configuration {
    /// The private key of this end.
    pub private_key: PrivateKey,
    /// UDP, both families; 0 = any free port.
    pub listen_port: u16,
    /// Set on every outer packet (`SO_MARK`), so that routing and firewall recognize them; 0 = none.
    pub fwmark: u32,
    /// MTU of the interface: bytes of inner packet. 1420 fits into an underlay of 1500 bytes in both families.
    pub mtu: u16,
}

/// Options that affect only the performance of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Use segmentation and receive offload of TUN and UDP where the kernel has it.
    pub offload: bool,
    /// Threads for each direction, 1 to 64. The kernel spreads flows and peers over them.
    pub workers: usize,
}

impl Default for Options {
    /// Offload, and one worker for every two cores: each worker has a thread for each direction.
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        Self {
            offload: true,
            workers: (cores / 2).clamp(1, MOST_WORKERS),
        }
    }
}
