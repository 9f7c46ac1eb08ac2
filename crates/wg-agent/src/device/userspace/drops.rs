//! Packets dropped, counted by reason.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

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
}

const WORDS: [&str; 9] = [
    "no_peer",
    "no_endpoint",
    "foreign_source",
    "invalid",
    "unknown_peer",
    "replayed",
    "under_load",
    "interface",
    "network",
];

/// One counter for each [`Drop`].
#[derive(Debug, Default)]
pub(super) struct Drops([AtomicU64; WORDS.len()]);

impl Drops {
    pub(super) fn count(&self, reason: Drop) {
        self.count_many(reason, 1);
    }

    pub(super) fn count_many(&self, reason: Drop, packets: usize) {
        self.0[reason as usize].fetch_add(packets as u64, Ordering::Relaxed);
    }

    /// By word, zeros included.
    pub(super) fn read(&self) -> BTreeMap<&'static str, u64> {
        WORDS
            .into_iter()
            .zip(self.0.iter().map(|counter| counter.load(Ordering::Relaxed)))
            .collect()
    }
}
