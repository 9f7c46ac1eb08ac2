//! The peers of a running device and how each packet finds its own: by receiver index, by public key, by inner address.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    hash::{BuildHasher, RandomState},
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use clustermesh_agent_core::device::PeerSpec;
use clustermesh_core::key::PublicKey;
use x25519_dalek::StaticSecret;

use super::{
    gate::Gate,
    held::Budget,
    ranges::Ranges,
    sockets::Place,
    sources::Sources,
    tunnel::{Local, Tunnel},
};

/// This node's keys, and what limits the handshakes toward them.
pub(super) struct Identity {
    pub(super) local: Arc<Local>,
    pub(super) gate: Gate,
    pub(super) sources: Sources,
    held: Budget,
}

impl Identity {
    pub(super) fn new(private: StaticSecret, held: Budget) -> Self {
        let local = Local::new(private);
        Self {
            gate: Gate::new(&local.public),
            sources: Sources::default(),
            held,
            local: Arc::new(local),
        }
    }

    pub(super) fn tunnel(&self, key: &PublicKey, spec: &PeerSpec, index: u32, now: Instant) -> Tunnel {
        Tunnel::new(
            Arc::clone(&self.local),
            x25519_dalek::PublicKey::from(*key.as_bytes()),
            preshared_key(spec),
            index,
            keepalive(spec),
            now,
        )
        .within(Arc::clone(&self.held))
    }
}

pub(super) fn preshared_key(spec: &PeerSpec) -> Option<[u8; 32]> {
    spec.preshared_key.as_ref().map(|key| *key.expose())
}

pub(super) fn keepalive(spec: &PeerSpec) -> Option<Duration> {
    spec.keepalive
        .map(|seconds| Duration::from_secs(u64::from(seconds.get())))
}

/// One peer. Its locks are never held together with another peer's: `order` for one run of datagrams, `state` for one burst of packets.
pub(super) struct Peer {
    /// 24 bits, unique in the device: the upper part of every receiver index of this peer.
    pub(super) index: u32,
    order: Mutex<()>,
    state: Mutex<PeerState>,
}

/// What changes with traffic.
pub(super) struct PeerState {
    pub(super) tunnel: Tunnel,
    pub(super) endpoint: Option<Place>,
    pub(super) rx_bytes: u64,
    pub(super) tx_bytes: u64,
}

impl Peer {
    pub(super) fn new(index: u32, tunnel: Tunnel, endpoint: Option<SocketAddr>) -> Self {
        Self {
            index,
            order: Mutex::new(()),
            state: Mutex::new(PeerState {
                tunnel,
                endpoint: endpoint.map(Place::from),
                rx_bytes: 0,
                tx_bytes: 0,
            }),
        }
    }

    /// Held from encrypting to sending, by who sends runs of data: they leave in the order of their counters. What is sent by the way
    /// (keepalives, what waited for a session) may overtake them, which the window of the other side allows.
    pub(super) fn order(&self) -> MutexGuard<'_, ()> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn state(&self) -> MutexGuard<'_, PeerState> {
        // A panic while it was held costs that packet; the session goes on.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An immutable picture of all peers, swapped whole: a range that moves has an owner at every moment.
pub(super) struct Table {
    pub(super) by_key: BTreeMap<PublicKey, Arc<Peer>>,
    pub(super) by_index: HashMap<u32, Arc<Peer>>,
    pub(super) ranges: Ranges<Arc<Peer>>,
}

impl Table {
    pub(super) fn new(peers: Vec<(PublicKey, &PeerSpec, Arc<Peer>)>) -> Self {
        let ranges = peers
            .iter()
            .flat_map(|(_, spec, peer)| spec.allowed_ips.iter().map(|range| (*range, Arc::clone(peer))));
        Self {
            ranges: Ranges::new(ranges),
            by_index: peers
                .iter()
                .map(|(_, _, peer)| (peer.index, Arc::clone(peer)))
                .collect(),
            by_key: peers.into_iter().map(|(key, _, peer)| (key, peer)).collect(),
        }
    }

    /// An index that no peer has. Guessing one gains nobody anything; it is random so that a restarted device
    /// does not take up the indices of the one before.
    pub(super) fn free_index(&self, taken: &HashSet<u32>) -> u32 {
        let random = RandomState::new();
        (0_u64..)
            .map(|attempt| (random.hash_one(attempt) >> 40) as u32)
            .find(|index| !self.by_index.contains_key(index) && !taken.contains(index))
            .unwrap_or_default()
    }
}
