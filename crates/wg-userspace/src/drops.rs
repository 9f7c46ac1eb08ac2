//! Counts dropped packets by reason.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::staged::SharedBudget;

/// Why a packet was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DropReason {
    /// The destination of an inner packet is in no peer's allowed IPs.
    NoPeer,
    /// An inner packet to a peer without endpoint: none is configured, and the peer has sent nothing yet.
    NoEndpoint,
    /// The source of an inner packet is outside the allowed IPs of the peer that sent it (cryptokey routing).
    ForeignSource,
    /// A datagram that is not a WireGuard message, or not authentic.
    Invalid,
    /// A message for a session that does not exist, or from a public key of no peer.
    UnknownPeer,
    /// A message that was received before, or is too old.
    Replayed,
    /// A handshake message that was refused because there were too many: the device sent a cookie reply, or a limit was exceeded.
    UnderLoad,
    /// The TUN device refused an inner packet, or delivered a malformed one.
    Interface,
    /// The kernel refused to send a datagram.
    Network,
    /// A staged packet that was never sent ([`crate::staged`]).
    NoSession,
    /// The TUN device's queue was full, or no process read it.
    InterfaceQueue,
    /// A UDP socket's receive queue was full.
    SocketQueue,
}

/// The name of each reason in metrics, in the order of the variants.
const NAMES: [&str; 12] = [
    "no_peer",
    "no_endpoint",
    "foreign_source",
    "invalid",
    "unknown_peer",
    "replayed",
    "under_load",
    "interface",
    "network",
    "no_session",
    "interface_queue",
    "socket_queue",
];

/// One counter for each [`DropReason`]. [`crate::Device::observe`] adds the kernel's counters for the queues of the TUN device and of
/// the open UDP sockets.
#[derive(Debug, Default)]
pub(crate) struct Drops {
    counters: [AtomicU64; NAMES.len()],
    /// The budget for the peers' staged packets. It also counts the packets of [`DropReason::NoSession`].
    staging_budget: SharedBudget,
}

impl Drops {
    pub(crate) fn count(&self, reason: DropReason) {
        self.count_many(reason, 1);
    }

    pub(crate) fn count_many(&self, reason: DropReason, packets: usize) {
        self.counters[reason as usize].fetch_add(packets as u64, Ordering::Relaxed);
    }

    /// The budget for the peers' staged packets.
    pub(crate) fn staging_budget(&self) -> SharedBudget {
        Arc::clone(&self.staging_budget)
    }

    /// All counters by name, including zeros. Here `interface_queue` is 0, and `socket_queue` contains only the drops of closed
    /// sockets: [`crate::Device::observe`] adds the kernel's counters.
    pub(crate) fn read(&self) -> BTreeMap<&'static str, u64> {
        let counted = self.counters.iter().map(|counter| counter.load(Ordering::Relaxed));
        let mut all: BTreeMap<_, _> = NAMES.into_iter().zip(counted).collect();
        all.insert(NAMES[DropReason::NoSession as usize], self.staging_budget.dropped());
        all
    }
}

impl DropReason {
    /// The reason's name in metrics.
    pub(crate) const fn as_str(self) -> &'static str {
        NAMES[self as usize]
    }
}
