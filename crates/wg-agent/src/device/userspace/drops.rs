//! Packets dropped, counted by reason.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::held::Budget;

/// Why a packet was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drop {
    /// An inner packet to an address in no peer's ranges.
    NoPeer,
    /// An inner packet to a peer that has no endpoint and has not been heard from.
    NoEndpoint,
    /// An inner packet from a peer with a source outside its ranges: cryptokey routing forbids it.
    ForeignSource,
    /// A datagram that is no WireGuard message or does not authenticate.
    Invalid,
    /// A datagram for a session or a public key that we do not have.
    UnknownPeer,
    /// A datagram or handshake that was seen before, or is too old.
    Replayed,
    /// A handshake refused because there were too many; its sender got a cookie.
    UnderLoad,
    /// The interface did not take an inner packet.
    Interface,
    /// The network did not take a datagram.
    Network,
    /// An inner packet that waited for a session in vain, or that others took the place of: see `held`.
    NoSession,
    /// The interface's queue was full: packets came faster than we read them.
    InterfaceQueue,
    /// A socket's queue was full: datagrams came faster than we read them.
    SocketQueue,
}

const WORDS: [&str; 12] = [
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

/// One counter for each [`Drop`].
#[derive(Debug, Default)]
pub(super) struct Drops {
    counters: [AtomicU64; WORDS.len()],
    /// What waits for sessions counts for itself.
    held: Budget,
}

impl Drops {
    pub(super) fn count(&self, reason: Drop) {
        self.count_many(reason, 1);
    }

    pub(super) fn count_many(&self, reason: Drop, packets: usize) {
        self.counters[reason as usize].fetch_add(packets as u64, Ordering::Relaxed);
    }

    /// For the peers, whose waiting packets are counted here.
    pub(super) fn held(&self) -> Budget {
        Arc::clone(&self.held)
    }

    /// By word, zeros included.
    pub(super) fn read(&self) -> BTreeMap<&'static str, u64> {
        let counted = self.counters.iter().map(|counter| counter.load(Ordering::Relaxed));
        let mut all: BTreeMap<_, _> = WORDS.into_iter().zip(counted).collect();
        all.insert(WORDS[Drop::NoSession as usize], self.held.given_up());
        all
    }
}

impl Drop {
    /// What it is called in metrics.
    pub(super) const fn word(self) -> &'static str {
        WORDS[self as usize]
    }
}
