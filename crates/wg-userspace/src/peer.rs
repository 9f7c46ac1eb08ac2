//! The configured peers of a device, and changes to them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    num::NonZeroU16,
};

use ipnet::IpNet;

use crate::key::{PresharedKey, PublicKey};

/// The configured peers of a device.
pub(crate) type Peers = BTreeMap<PublicKey, PeerSpec>;

/// The configuration of one peer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerSpec {
    /// The destination of datagrams until an authentic data message or handshake response arrives from another endpoint. `None` = the
    /// peer has to initiate; the response goes to the source of its initiation.
    pub endpoint: Option<SocketAddr>,
    /// Seconds between keepalives, for peers behind NAT (wg(8), `PersistentKeepalive`).
    pub keepalive: Option<NonZeroU16>,
    /// An additional symmetric key (wg(8), `PresharedKey`).
    pub preshared_key: Option<PresharedKey>,
    /// Allowed IPs: inner sources accepted from this peer, and inner destinations sent to it. Host bits must be zero ([`IpNet::trunc`]).
    pub allowed_ips: BTreeSet<IpNet>,
}

/// A change to one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerChange {
    /// Adds a peer. An existing peer with this key is replaced, and its session ends.
    Add(PublicKey, PeerSpec),
    /// Changes attributes of a peer. An unknown peer is not added.
    Update(PublicKey, PeerUpdate),
    /// Removes a peer with its allowed IPs.
    Remove(PublicKey),
}

/// The attributes of a peer that change. Others stay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerUpdate {
    /// The new endpoint. It also replaces an endpoint that the peer roamed to.
    pub endpoint: Option<SocketAddr>,
    /// The new keepalive; `Some(None)` turns it off.
    pub keepalive: Option<Option<NonZeroU16>>,
    /// The new preshared key; `Some(None)` removes it. This change ends the session; changes of the other attributes do not.
    pub preshared_key: Option<Option<PresharedKey>>,
    /// Allowed IPs to add. If another peer has one, it moves to this peer.
    pub add_allowed_ips: BTreeSet<IpNet>,
    /// Allowed IPs to remove, if this peer still has them.
    pub remove_allowed_ips: BTreeSet<IpNet>,
}

impl PeerChange {
    /// The peer that changes.
    #[must_use]
    pub const fn key(&self) -> &PublicKey {
        match self {
            Self::Add(key, _) | Self::Update(key, _) | Self::Remove(key) => key,
        }
    }

    /// Whether the device needs a new table of peers and allowed IPs: the change adds or removes a peer or an allowed IP.
    pub(crate) fn needs_new_table(&self) -> bool {
        match self {
            Self::Update(_, update) => !update.add_allowed_ips.is_empty() || !update.remove_allowed_ips.is_empty(),
            Self::Add(..) | Self::Remove(_) => true,
        }
    }
}

/// Applies changes to the configured peers, in order. An allowed IP that is added moves from its owner.
pub(crate) fn apply(peers: &mut Peers, changes: &[PeerChange]) {
    let owners = peers
        .iter()
        .flat_map(|(key, spec)| spec.allowed_ips.iter().map(|net| (*net, *key)))
        .collect();
    let mut indexed = IndexedPeers { peers, owners };
    changes.iter().for_each(|change| indexed.apply(change));
}

/// The configured peers, with the owner of each allowed IP.
struct IndexedPeers<'a> {
    peers: &'a mut Peers,
    owners: BTreeMap<IpNet, PublicKey>,
}

impl IndexedPeers<'_> {
    fn apply(&mut self, change: &PeerChange) {
        match change {
            PeerChange::Add(key, spec) => {
                self.remove_peer(key);
                let spec_without_ips = PeerSpec {
                    allowed_ips: BTreeSet::new(),
                    ..spec.clone()
                };
                self.peers.insert(*key, spec_without_ips);
                spec.allowed_ips.iter().for_each(|net| self.assign(key, *net));
            }
            PeerChange::Update(key, update) => self.update(key, update),
            PeerChange::Remove(key) => self.remove_peer(key),
        }
    }

    fn update(&mut self, key: &PublicKey, update: &PeerUpdate) {
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

#[cfg(test)]
mod tests {
    use super::*;

    const A: PublicKey = PublicKey::new([1; 32]);
    const B: PublicKey = PublicKey::new([2; 32]);

    fn nets(texts: &[&str]) -> BTreeSet<IpNet> {
        texts.iter().map(|text| text.parse().expect("a network")).collect()
    }

    fn spec(allowed_ips: &[&str]) -> PeerSpec {
        PeerSpec {
            endpoint: Some(([192, 0, 2, 1], 51820).into()),
            keepalive: NonZeroU16::new(25),
            preshared_key: PresharedKey::new([3; 32]),
            allowed_ips: nets(allowed_ips),
        }
    }

    #[test]
    fn changes_apply_in_order_and_added_allowed_ip_moves() {
        let unknown = PublicKey::new([9; 32]);
        let mut peers = Peers::new();
        let moves = PeerUpdate {
            add_allowed_ips: nets(&["10.1.0.0/16"]),
            ..PeerUpdate::default()
        };
        let changes = [
            PeerChange::Add(A, spec(&["10.1.0.0/16", "fd01::/64"])),
            PeerChange::Add(B, spec(&[])),
            PeerChange::Update(B, moves.clone()),
            PeerChange::Update(unknown, moves),
        ];
        apply(&mut peers, &changes);
        assert_eq!(peers, [(A, spec(&["fd01::/64"])), (B, spec(&["10.1.0.0/16"]))].into());
        apply(
            &mut peers,
            &[PeerChange::Remove(B), PeerChange::Add(A, spec(&["10.1.0.0/16"]))],
        );
        assert_eq!(peers, [(A, spec(&["10.1.0.0/16"]))].into());
    }

    #[test]
    fn update_changes_only_the_named_attributes() {
        let mut peers = [(A, spec(&["10.1.0.0/16", "fd01::/64"]))].into();
        apply(&mut peers, &[PeerChange::Update(A, PeerUpdate::default())]);
        assert_eq!(peers, [(A, spec(&["10.1.0.0/16", "fd01::/64"]))].into());
        let update = PeerUpdate {
            endpoint: None,
            keepalive: Some(None),
            preshared_key: Some(None),
            add_allowed_ips: BTreeSet::new(),
            remove_allowed_ips: nets(&["10.1.0.0/16", "10.2.0.0/16"]),
        };
        apply(&mut peers, &[PeerChange::Update(A, update)]);
        let left = PeerSpec {
            keepalive: None,
            preshared_key: None,
            ..spec(&["fd01::/64"])
        };
        assert_eq!(peers, [(A, left)].into());
    }
}
