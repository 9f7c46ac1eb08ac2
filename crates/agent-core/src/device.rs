//! The desired and the observed peers of a WireGuard device, and the changes from one to the other. A backend in `wg-agent`
//! applies them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::SocketAddr,
    num::NonZeroU16,
    time::Duration,
};

use clustermesh_core::key::PublicKey;
use ipnet::IpNet;

use crate::key::PresharedKey;

#[cfg(test)]
mod tests;

/// The desired peers of a device. No two of them may have the same allowed IP: the device would assign it to the peer with the higher
/// key, and every [`diff`] would find a change.
pub type Peers = BTreeMap<PublicKey, PeerSpec>;

/// The desired configuration of one peer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerSpec {
    /// The destination of datagrams until authenticated packets arrive from another endpoint. `None` = the device keeps the
    /// endpoint that it has, because WireGuard cannot unset it. If the device has none, the peer must initiate.
    pub endpoint: Option<SocketAddr>,
    /// Seconds between keepalives, for peers behind NAT (wg(8), `PersistentKeepalive`).
    pub keepalive: Option<NonZeroU16>,
    /// An additional symmetric key (wg(8), `PresharedKey`).
    pub preshared_key: Option<PresharedKey>,
    /// Allowed IPs: inner sources accepted from this peer, and inner destinations sent to it. Host bits are zero.
    pub allowed_ips: BTreeSet<IpNet>,
}

/// The observed state of one peer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObservedPeer {
    /// As last configured: `endpoint` is the one that was set, not the one that the peer roamed to. [`diff`] compares only this.
    pub configured: PeerSpec,
    /// Endpoint, handshake and counters. Never compared.
    pub stats: PeerStats,
}

/// Endpoint, handshake and counters of one peer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerStats {
    /// The current endpoint, which follows authenticated packets.
    pub endpoint: Option<SocketAddr>,
    /// Time since the last completed handshake; `None` = never.
    pub handshake_age: Option<Duration>,
    /// Bytes of authenticated UDP payload received from the peer.
    pub rx_bytes: u64,
    /// Bytes of UDP payload sent to the peer.
    pub tx_bytes: u64,
}

/// The observed peers of a device.
pub type ObservedPeers = BTreeMap<PublicKey, ObservedPeer>;

/// A change to one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerChange {
    /// Adds a peer.
    Add(PublicKey, PeerSpec),
    /// Changes attributes of a peer. Its session stays, unless the preshared key changes.
    Update(PublicKey, PeerUpdate),
    /// Removes a peer with its allowed IPs.
    Remove(PublicKey),
}

/// The attributes of a peer that change. Others stay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerUpdate {
    /// The new endpoint. It also replaces one that the peer roamed to.
    pub endpoint: Option<SocketAddr>,
    /// The new keepalive; `Some(None)` turns it off.
    pub keepalive: Option<Option<NonZeroU16>>,
    /// The new preshared key; `Some(None)` removes it. Only this change requires a new handshake.
    pub preshared_key: Option<Option<PresharedKey>>,
    /// Allowed IPs to add. If another peer has one, it moves to this peer.
    pub add_allowed_ips: BTreeSet<IpNet>,
    /// Allowed IPs to remove, if this peer still has them.
    pub remove_allowed_ips: BTreeSet<IpNet>,
}

impl PeerUpdate {
    /// Whether the update changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl PeerChange {
    /// Whether only the endpoint of a peer changes.
    #[must_use]
    pub fn is_endpoint_only(&self) -> bool {
        let Self::Update(_, update) = self else { return false };
        let endpoint = update.endpoint;
        *update
            == PeerUpdate {
                endpoint,
                ..PeerUpdate::default()
            }
    }

    /// The peer that changes.
    #[must_use]
    pub const fn key(&self) -> &PublicKey {
        match self {
            Self::Add(key, _) | Self::Update(key, _) | Self::Remove(key) => key,
        }
    }
}

/// Computes the changes from `observed` to `desired`; `None` = none are needed. A peer whose desired endpoint is `None` keeps the observed
/// one.
///
/// An allowed IP that moves between peers always has an owner: adding it to the new peer takes it from the old one. So the
/// changes do not remove it from the old peer first, and they remove peers last.
#[must_use]
pub fn diff(observed: &ObservedPeers, desired: &Peers) -> Option<Vec<PeerChange>> {
    let all_desired: BTreeSet<&IpNet> = desired.values().flat_map(|spec| &spec.allowed_ips).collect();
    let mut changes = Vec::new();
    for (key, want) in desired {
        let Some(have) = observed.get(key) else {
            changes.push(PeerChange::Add(*key, want.clone()));
            continue;
        };
        let update = update(&have.configured, want, &all_desired);
        if !update.is_empty() {
            changes.push(PeerChange::Update(*key, update));
        }
    }
    changes.extend(
        observed
            .keys()
            .filter(|key| !desired.contains_key(key))
            .map(|key| PeerChange::Remove(*key)),
    );
    (!changes.is_empty()).then_some(changes)
}

fn update(have: &PeerSpec, want: &PeerSpec, all_desired: &BTreeSet<&IpNet>) -> PeerUpdate {
    let lost = have.allowed_ips.difference(&want.allowed_ips);
    PeerUpdate {
        endpoint: want.endpoint.filter(|endpoint| have.endpoint != Some(*endpoint)),
        keepalive: (have.keepalive != want.keepalive).then_some(want.keepalive),
        preshared_key: (have.preshared_key != want.preshared_key).then(|| want.preshared_key.clone()),
        add_allowed_ips: want.allowed_ips.difference(&have.allowed_ips).copied().collect(),
        remove_allowed_ips: lost.filter(|net| !all_desired.contains(net)).copied().collect(),
    }
}

/// Applies `changes` to the configuration of `peers`. It defines what every backend has to do: an allowed IP that is added moves from
/// its owner, and an update or removal of an unknown peer does nothing.
pub fn apply(peers: &mut Peers, changes: &[PeerChange]) {
    let mut indexed = IndexedPeers::new(peers);
    changes.iter().for_each(|change| indexed.apply(change));
}

/// Peers with an index of the owner of each allowed IP, for a backend that applies many changes and reads the peers after each.
#[derive(Debug)]
pub struct IndexedPeers<'a> {
    peers: &'a mut Peers,
    owners: BTreeMap<IpNet, PublicKey>,
}

impl<'a> IndexedPeers<'a> {
    /// Builds the index, in time proportional to the number of allowed IPs.
    pub fn new(peers: &'a mut Peers) -> Self {
        let owners = peers
            .iter()
            .flat_map(|(key, spec)| spec.allowed_ips.iter().map(|net| (*net, *key)))
            .collect();
        Self { peers, owners }
    }

    /// The peers as they are now.
    #[must_use]
    pub const fn peers(&self) -> &Peers {
        self.peers
    }

    /// Applies one change as [`apply`] does, in time proportional to the change.
    pub fn apply(&mut self, change: &PeerChange) {
        match change {
            PeerChange::Add(key, spec) => {
                self.remove_peer(key);
                self.peers.insert(
                    *key,
                    PeerSpec {
                        allowed_ips: BTreeSet::new(),
                        ..spec.clone()
                    },
                );
                spec.allowed_ips.iter().for_each(|net| self.assign(key, *net));
            }
            PeerChange::Update(key, update) => {
                let Some(spec) = self.peers.get_mut(key) else { return };
                if update.endpoint.is_some() {
                    spec.endpoint = update.endpoint;
                }
                if let Some(keepalive) = update.keepalive {
                    spec.keepalive = keepalive;
                }
                if let Some(preshared_key) = &update.preshared_key {
                    spec.preshared_key.clone_from(preshared_key);
                }
                for net in &update.remove_allowed_ips {
                    if spec.allowed_ips.remove(net) {
                        self.owners.remove(net);
                    }
                }
                update.add_allowed_ips.iter().for_each(|net| self.assign(key, *net));
            }
            PeerChange::Remove(key) => self.remove_peer(key),
        }
    }

    fn assign(&mut self, key: &PublicKey, net: IpNet) {
        if let Some(spec) = self.owners.insert(net, *key).and_then(|old| self.peers.get_mut(&old)) {
            spec.allowed_ips.remove(&net);
        }
        if let Some(spec) = self.peers.get_mut(key) {
            spec.allowed_ips.insert(net);
        }
    }

    fn remove_peer(&mut self, key: &PublicKey) {
        for net in self.peers.remove(key).map(|spec| spec.allowed_ips).unwrap_or_default() {
            self.owners.remove(&net);
        }
    }
}

/// One line for logs, without secrets.
impl fmt::Display for PeerChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Add(key, spec) => {
                write!(f, "add peer {key} with {} allowed IPs", spec.allowed_ips.len())?;
                spec.endpoint.map_or(Ok(()), |endpoint| write!(f, " at {endpoint}"))
            }
            Self::Remove(key) => write!(f, "remove peer {key}"),
            Self::Update(key, update) => {
                write!(f, "update peer {key}:")?;
                if let Some(endpoint) = update.endpoint {
                    write!(f, " endpoint {endpoint}")?;
                }
                match update.keepalive {
                    Some(Some(seconds)) => write!(f, " keepalive {seconds}s")?,
                    Some(None) => write!(f, " keepalive off")?,
                    None => {}
                }
                if update.preshared_key.is_some() {
                    write!(f, " preshared key")?;
                }
                for net in &update.add_allowed_ips {
                    write!(f, " +{net}")?;
                }
                update
                    .remove_allowed_ips
                    .iter()
                    .try_for_each(|net| write!(f, " -{net}"))
            }
        }
    }
}
