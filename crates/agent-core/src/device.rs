//! What a WireGuard device should hold, what it holds, and the named changes between the two.
//! How to tell a device is a backend's business (`wg-agent`).

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

/// The peers a device should hold. An address range has one owner: where two peers name the same range,
/// the one with the higher key gets it and the diff never comes to rest, so the compiler of this map must not do that.
pub type Peers = BTreeMap<PublicKey, PeerSpec>;

/// What we configure of one peer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerSpec {
    /// Where to send until the peer is heard from elsewhere. `None` = it dials us; an endpoint the device already has is kept,
    /// since WireGuard cannot unset one.
    pub endpoint: Option<SocketAddr>,
    /// Seconds between keepalives, for peers behind NAT (wg(8), `PersistentKeepalive`).
    pub keepalive: Option<NonZeroU16>,
    /// An additional symmetric key.
    pub preshared_key: Option<PresharedKey>,
    /// The inner sources accepted from and the inner destinations sent to this peer. Host bits are zero.
    pub allowed_ips: BTreeSet<IpNet>,
}

/// One peer as the device holds it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObservedPeer {
    /// As last configured: `endpoint` is the one we set, not the one it roamed to. This alone takes part in [`diff`].
    pub configured: PeerSpec,
    /// What happened since; never compared.
    pub stats: PeerStats,
}

/// What a device knows of its dealings with one peer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerStats {
    /// Where packets to it go now; follows authenticated packets.
    pub endpoint: Option<SocketAddr>,
    /// Since the last completed handshake; `None` = never.
    pub handshake_age: Option<Duration>,
    /// Bytes of UDP payload received from it and authenticated.
    pub rx_bytes: u64,
    /// Bytes of UDP payload sent to it.
    pub tx_bytes: u64,
}

/// The peers a device holds.
pub type ObservedPeers = BTreeMap<PublicKey, ObservedPeer>;

/// One named change to one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerChange {
    /// The device does not have this key yet.
    Add(PublicKey, PeerSpec),
    /// Some attributes differ; the session stays.
    Update(PublicKey, PeerUpdate),
    /// The key is gone from the desired state, its ranges with it.
    Remove(PublicKey),
}

/// The attributes of a peer that change; the others are left alone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerUpdate {
    /// The endpoint to use from now on, over whatever it roamed to.
    pub endpoint: Option<SocketAddr>,
    /// The new keepalive; `Some(None)` turns it off.
    pub keepalive: Option<Option<NonZeroU16>>,
    /// The new preshared key; `Some(None)` drops it. The one attribute whose change costs a new handshake.
    pub preshared_key: Option<Option<PresharedKey>>,
    /// Ranges gained; each moves here from whichever peer has it.
    pub add_allowed_ips: BTreeSet<IpNet>,
    /// Ranges given up, where this peer still has them.
    pub remove_allowed_ips: BTreeSet<IpNet>,
}

impl PeerUpdate {
    /// True when it changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl PeerChange {
    /// The peer it concerns.
    #[must_use]
    pub const fn key(&self) -> &PublicKey {
        match self {
            Self::Add(key, _) | Self::Update(key, _) | Self::Remove(key) => key,
        }
    }
}

/// The changes that bring a device from `observed` to `desired`; `None` when there is nothing to do.
///
/// A range that moves between peers is never without an owner: it appears only as gained, which takes it from whoever has it,
/// and peers are removed last.
#[must_use]
pub fn diff(observed: &ObservedPeers, desired: &Peers) -> Option<Vec<PeerChange>> {
    let wanted: BTreeSet<&IpNet> = desired.values().flat_map(|spec| &spec.allowed_ips).collect();
    let mut changes = Vec::new();
    for (key, want) in desired {
        let Some(have) = observed.get(key) else {
            changes.push(PeerChange::Add(*key, want.clone()));
            continue;
        };
        let update = update(&have.configured, want, &wanted);
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

fn update(have: &PeerSpec, want: &PeerSpec, wanted: &BTreeSet<&IpNet>) -> PeerUpdate {
    let lost = have.allowed_ips.difference(&want.allowed_ips);
    PeerUpdate {
        endpoint: want.endpoint.filter(|endpoint| have.endpoint != Some(*endpoint)),
        keepalive: (have.keepalive != want.keepalive).then_some(want.keepalive),
        preshared_key: (have.preshared_key != want.preshared_key).then(|| want.preshared_key.clone()),
        add_allowed_ips: want.allowed_ips.difference(&have.allowed_ips).copied().collect(),
        remove_allowed_ips: lost.filter(|range| !wanted.contains(range)).copied().collect(),
    }
}

/// What `changes` make of the configured side of `peers`: the meaning every backend must agree with.
/// A range that is added moves from its owner; an update or removal of an unknown peer does nothing.
pub fn apply(peers: &mut Peers, changes: &[PeerChange]) {
    let mut ledger = Ledger::new(peers);
    changes.iter().for_each(|change| ledger.apply(change));
}

/// Peers, and whose each range is: for a backend that looks at them between two changes of many.
#[derive(Debug)]
pub struct Ledger<'a> {
    peers: &'a mut Peers,
    owners: BTreeMap<IpNet, PublicKey>,
}

impl<'a> Ledger<'a> {
    /// Costs as much as there are ranges.
    pub fn new(peers: &'a mut Peers) -> Self {
        let owners = peers
            .iter()
            .flat_map(|(key, spec)| spec.allowed_ips.iter().map(|range| (*range, *key)))
            .collect();
        Self { peers, owners }
    }

    /// The peers as they are now.
    #[must_use]
    pub const fn peers(&self) -> &Peers {
        self.peers
    }

    /// As [`apply`], at the cost of the one change.
    pub fn apply(&mut self, change: &PeerChange) {
        match change {
            PeerChange::Add(key, spec) => {
                self.release(key);
                self.peers.insert(
                    *key,
                    PeerSpec {
                        allowed_ips: BTreeSet::new(),
                        ..spec.clone()
                    },
                );
                spec.allowed_ips.iter().for_each(|range| self.grant(key, *range));
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
                for range in &update.remove_allowed_ips {
                    if spec.allowed_ips.remove(range) {
                        self.owners.remove(range);
                    }
                }
                update.add_allowed_ips.iter().for_each(|range| self.grant(key, *range));
            }
            PeerChange::Remove(key) => self.release(key),
        }
    }

    fn grant(&mut self, key: &PublicKey, range: IpNet) {
        if let Some(spec) = self.owners.insert(range, *key).and_then(|old| self.peers.get_mut(&old)) {
            spec.allowed_ips.remove(&range);
        }
        if let Some(spec) = self.peers.get_mut(key) {
            spec.allowed_ips.insert(range);
        }
    }

    fn release(&mut self, key: &PublicKey) {
        for range in self.peers.remove(key).map(|spec| spec.allowed_ips).unwrap_or_default() {
            self.owners.remove(&range);
        }
    }
}

/// One line for logs and people; shows no secret.
impl fmt::Display for PeerChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Add(key, spec) => {
                write!(f, "add peer {key} with {} ranges", spec.allowed_ips.len())?;
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
                for range in &update.add_allowed_ips {
                    write!(f, " +{range}")?;
                }
                update
                    .remove_allowed_ips
                    .iter()
                    .try_for_each(|range| write!(f, " -{range}"))
            }
        }
    }
}
