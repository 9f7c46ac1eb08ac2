//! The parameters of opening a device.

use crate::key::PrivateKey;

/// The largest number of workers that [`Options::default`] chooses. With more workers, the locks of the peers and the queues of the
/// kernel are the bottleneck.
const MAX_DEFAULT_WORKERS: usize = 8;

/// The name of an interface, and the alias by which a program recognizes the interfaces that it created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interface<'a> {
    /// 1 to 15 characters, without space, slash, colon and percent sign, and not `.` or `..`.
    pub name: &'a str,
    /// The alias of the interface (`IFLA_IFALIAS`, which `ip link show` prints), 1 to 255 bytes. Every program chooses its own. An
    /// interface with another alias, or without one, is never taken over, changed or removed.
    pub alias: &'a str,
}

/// The configuration of a device, except its peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Configuration {
    /// The private key of this device.
    pub private_key: PrivateKey,
    /// The UDP port for both address families; 0 = any free port.
    pub listen_port: u16,
    /// The firewall mark of every outer packet (`SO_MARK`), for routing rules and the firewall; 0 = none.
    pub fwmark: u32,
    /// MTU of the interface, for inner packets. 1420 fits an underlay MTU of 1500 in both address families.
    pub mtu: u16,
}

/// Options that affect only the performance of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Use segmentation and receive offload of TUN and UDP if the kernel has it.
    pub offload: bool,
    /// Number of workers (a thread for each direction), 1 to 64. The kernel spreads flows and peers over them.
    pub workers: usize,
}

impl Default for Options {
    /// Offload, and one worker for every two cores, because each worker has two threads.
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        Self {
            offload: true,
            workers: (cores / 2).clamp(1, MAX_DEFAULT_WORKERS),
        }
    }
}
