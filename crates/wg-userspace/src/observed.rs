//! Reads the state of a running device.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::{Duration, Instant},
};

use crate::{
    datapath::{Shared, current},
    drops::DropReason,
    key::PublicKey,
    peer::PeerSpec,
};

/// The result of [`Device::observe`](crate::Device::observe).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observed {
    /// By public key.
    pub peers: BTreeMap<PublicKey, ObservedPeer>,
    /// The port in use.
    pub listen_port: u16,
    /// Packets dropped since the device was opened, by reason: `no_peer`, `invalid`, `under_load` and others. Every reason is present.
    pub drops: BTreeMap<&'static str, u64>,
    /// What other programs changed in the interface.
    pub altered: BTreeSet<Altered>,
}

/// The observed state of one peer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObservedPeer {
    /// As last configured: `endpoint` is the one that was set, not the one that the peer roamed to.
    pub configured: PeerSpec,
    /// Endpoint, handshake and counters.
    pub stats: PeerStats,
}

/// Endpoint, handshake and counters of one peer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerStats {
    /// The current endpoint, which follows authenticated packets.
    pub endpoint: Option<SocketAddr>,
    /// Time since the last completed handshake; `None` = never.
    pub handshake_age: Option<Duration>,
    /// Bytes of authenticated UDP payload received from it.
    pub rx_bytes: u64,
    /// Bytes of UDP payload sent to it.
    pub tx_bytes: u64,
}

/// A part of the interface that another program can change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Altered {
    /// `ip link set mtu`.
    Mtu,
    /// `ip link set down`.
    Down,
}

/// Everything but the drops and changes that only the interface knows.
pub(crate) fn observed(shared: &Shared) -> Observed {
    let configured = current(&shared.configured);
    let now = Instant::now();
    let table = current(&shared.table);
    let peers = configured.iter().map(|(key, spec)| {
        let stats = table.by_key.get(key).map_or_else(PeerStats::default, |peer| {
            let state = peer.state();
            PeerStats {
                endpoint: state.endpoint.map(|endpoint| endpoint.remote),
                handshake_age: state
                    .tunnel
                    .last_handshake()
                    .map(|at| now.saturating_duration_since(at)),
                rx_bytes: state.rx_bytes,
                tx_bytes: state.tx_bytes,
            }
        });
        (
            *key,
            ObservedPeer {
                configured: spec.clone(),
                stats,
            },
        )
    });
    let sockets = current(&shared.sockets);
    let mut drops = shared.drops.read();
    *drops.entry(DropReason::SocketQueue.as_str()).or_default() += sockets.receive_queue_drops();
    Observed {
        peers: peers.collect(),
        listen_port: sockets.port,
        drops,
        altered: BTreeSet::new(),
    }
}
