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
    /// The configured peers by public key.
    pub peers: BTreeMap<PublicKey, ObservedPeer>,
    /// The bound UDP port.
    pub listen_port: u16,
    /// Packets dropped since the device was opened, by reason: `no_peer`, `invalid`, `under_load` and others. Every reason is present.
    pub drops: BTreeMap<&'static str, u64>,
    /// Changes that other programs made to the interface.
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
    /// The current endpoint. An authentic data message or response replaces it with its own source; an initiation does not change it.
    pub endpoint: Option<SocketAddr>,
    /// Time since the last completed handshake; `None` = none since the peer was added or a key of its tunnel changed.
    pub handshake_age: Option<Duration>,
    /// Bytes of authenticated UDP payload received from the peer.
    pub rx_bytes: u64,
    /// Bytes of UDP payload sent to the peer.
    pub tx_bytes: u64,
}

/// A change that another program made to the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Altered {
    /// Its MTU is not the configured one (`ip link set mtu`).
    Mtu,
    /// It is down (`ip link set down`).
    Down,
}

/// Reads peers, port and drop counters. The caller adds the drops and changes that it reads from the interface.
pub(crate) fn observed(shared: &Shared) -> Observed {
    let configured = current(&shared.configured);
    let now = Instant::now();
    let table = current(&shared.table);
    let peers = configured.iter().map(|(key, spec)| {
        // The table lacks a configured peer only for a moment, while `Device::apply` removes that peer.
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
