//! Holds the peers of a running device, and looks them up by receiver index, by public key and by inner address.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    hash::{BuildHasher, RandomState},
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use x25519_dalek::StaticSecret;

use crate::{
    handshake_gate::Gate,
    key::PublicKey,
    peer::PeerSpec,
    prefix_map::PrefixMap,
    sockets::Endpoint,
    source_limiter::SourceLimiter,
    staged::SharedBudget,
    tunnel::{Local, Tunnel},
};

/// The device's key pair, and what is needed to check handshake messages and to create tunnels. A new private key replaces all of it,
/// except the staging budget, which all tunnels of the device share.
pub(crate) struct Identity {
    pub(crate) local: Arc<Local>,
    pub(crate) gate: Gate,
    pub(crate) source_limiter: SourceLimiter,
    staging_budget: SharedBudget,
}

impl Identity {
    pub(crate) fn new(private: StaticSecret, staging_budget: SharedBudget) -> Self {
        let local = Local::new(private);
        Self {
            gate: Gate::new(&local.public),
            source_limiter: SourceLimiter::default(),
            staging_budget,
            local: Arc::new(local),
        }
    }

    pub(crate) fn tunnel(&self, key: &PublicKey, spec: &PeerSpec, index: u32, now: Instant) -> Tunnel {
        Tunnel::new(
            Arc::clone(&self.local),
            x25519_dalek::PublicKey::from(*key.as_bytes()),
            preshared_key(spec),
            index,
            keepalive(spec),
            now,
        )
        .with_budget(Arc::clone(&self.staging_budget))
    }
}

pub(crate) fn preshared_key(spec: &PeerSpec) -> Option<[u8; 32]> {
    spec.preshared_key.as_ref().map(|key| *key.expose())
}

pub(crate) fn keepalive(spec: &PeerSpec) -> Option<Duration> {
    spec.keepalive
        .map(|seconds| Duration::from_secs(u64::from(seconds.get())))
}

/// One peer. A thread never locks two peers at once. It locks `order` while it encrypts and sends a run of datagrams to this peer
/// ([`Self::order`]), and `state` for a burst of at most `datapath::BURST` packets.
pub(crate) struct Peer {
    /// 24 bits, unique in the device: the upper part of every receiver index of this peer.
    pub(crate) index: u32,
    order: Mutex<()>,
    state: Mutex<PeerState>,
}

/// The part of a peer that traffic changes.
pub(crate) struct PeerState {
    pub(crate) tunnel: Tunnel,
    pub(crate) endpoint: Option<Endpoint>,
    pub(crate) rx_bytes: u64,
    pub(crate) tx_bytes: u64,
}

impl Peer {
    pub(crate) fn new(index: u32, tunnel: Tunnel, endpoint: Option<SocketAddr>) -> Self {
        Self {
            index,
            order: Mutex::new(()),
            state: Mutex::new(PeerState {
                tunnel,
                endpoint: endpoint.map(Endpoint::from),
                rx_bytes: 0,
                tx_bytes: 0,
            }),
        }
    }

    /// Locks the order of data messages. A thread keeps this lock from the encryption of a run (datagrams that one system call sends) until
    /// the run is sent, so that the messages leave in the order of their counters. Keepalives and staged packets are sent without the
    /// lock; the peer's replay window allows that.
    pub(crate) fn order(&self) -> MutexGuard<'_, ()> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, PeerState> {
        // A panic while the lock was held lost at most one burst of packets, but the session is still usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All peers. The table is immutable and replaced as a whole, so allowed IPs that move between peers always have an owner.
pub(crate) struct PeerTable {
    pub(crate) by_key: BTreeMap<PublicKey, Arc<Peer>>,
    pub(crate) by_index: HashMap<u32, Arc<Peer>>,
    pub(crate) allowed_ips: PrefixMap<Arc<Peer>>,
}

impl PeerTable {
    pub(crate) fn new(peers: Vec<(PublicKey, &PeerSpec, Arc<Peer>)>) -> Self {
        let allowed_ips = peers
            .iter()
            .flat_map(|(_, spec, peer)| spec.allowed_ips.iter().map(|net| (*net, Arc::clone(peer))));
        Self {
            allowed_ips: PrefixMap::new(allowed_ips),
            by_index: peers
                .iter()
                .map(|(_, _, peer)| (peer.index, Arc::clone(peer)))
                .collect(),
            by_key: peers.into_iter().map(|(key, _, peer)| (key, peer)).collect(),
        }
    }

    /// Returns an index that no peer of this table has and that is not in `used`. The index is random, so that a restarted
    /// device does not reuse the indices of the earlier process; it is not a secret.
    pub(crate) fn free_index(&self, used: &HashSet<u32>) -> u32 {
        let random = RandomState::new();
        (0_u64..)
            .map(|attempt| (random.hash_one(attempt) >> 40) as u32)
            .find(|index| !self.by_index.contains_key(index) && !used.contains(index))
            .unwrap_or_default()
    }
}
