//! Encodes peer changes as WireGuard netlink messages (linux/wireguard.h). A change touches only its own peer, and
//! perhaps a temporary one.
//!
//! The netlink interface lacks three operations, which have workarounds:
//! - **Remove one allowed IP.** Kernels before 6.17 can only replace all allowed IPs of a peer, which leaves the peer
//!   without any for a moment. So the allowed IP moves to a temporary peer, which a later entry removes.
//! - **Start a handshake.** Turning persistent keepalive on sends a keepalive at once, which starts a handshake if there
//!   is no session. So the message turns it off, on, and sets its configured value. Sending a packet into the tunnel
//!   instead would need an exception in the firewall.
//! - **Use a new preshared key at once.** The kernel uses it from the next handshake on, up to two minutes later. So the
//!   peer is removed and added again. It loses its session and its counters.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    num::NonZeroU16,
};

use clustermesh_agent_core::device::{IndexedPeers, PeerChange, PeerSpec, PeerUpdate, Peers};
use clustermesh_core::key::PublicKey;
use ipnet::IpNet;
use netlink_packet_core::Nla;
use netlink_packet_wireguard::{
    WireguardAddressFamily, WireguardAllowedIp, WireguardAllowedIpAttr, WireguardPeer,
    WireguardPeerAttribute as Attribute, WireguardPeerFlags as Flags,
};
use sha2::{Digest, Sha256};

/// The maximum size of the peer entries in one message: about half of a page (4 KiB), which leaves room for the headers.
const MESSAGE_BYTES: usize = 2_000;
/// The limit of allowed IPs in one entry; a peer with more has several entries. An IPv6 allowed IP takes 40 bytes, so an entry
/// is smaller than [`MESSAGE_BYTES`].
const ALLOWED_IPS_PER_ENTRY: usize = 40;

/// The live endpoint of each peer, which may differ from the configured one.
pub(super) type LiveEndpoints = BTreeMap<PublicKey, SocketAddr>;

/// Encodes `changes` as messages for a device that has `peers`.
pub(super) fn plan(peers: &Peers, live: &LiveEndpoints, changes: &[PeerChange]) -> Vec<Vec<WireguardPeer>> {
    let mut entries = Vec::new();
    let mut peers = peers.clone();
    let mut indexed = IndexedPeers::new(&mut peers);
    for change in changes {
        let before = indexed.peers().get(change.key()).map(|spec| spec.allowed_ips.clone());
        let exists = before.is_some();
        indexed.apply(change);
        match change {
            PeerChange::Add(key, spec) => {
                if exists {
                    entries.push(remove_entry(key));
                }
                add_peer(key, spec, spec.endpoint, &mut entries);
            }
            PeerChange::Update(key, update) => {
                let Some((spec, before)) = indexed.peers().get(key).zip(before) else {
                    continue;
                };
                if update.preshared_key.is_some() {
                    entries.push(remove_entry(key));
                    let endpoint = update.endpoint.or_else(|| live.get(key).copied()).or(spec.endpoint);
                    add_peer(key, spec, endpoint, &mut entries);
                } else {
                    let removed = update.remove_allowed_ips.intersection(&before).copied().collect();
                    update_peer(key, spec, update, removed, &mut entries);
                }
            }
            PeerChange::Remove(key) if exists => entries.push(remove_entry(key)),
            PeerChange::Remove(_) => {}
        }
    }
    messages(entries)
}

/// Encodes messages that start a handshake with every peer that has a configured endpoint.
pub(super) fn start_handshakes(peers: &Peers) -> Vec<Vec<WireguardPeer>> {
    let mut entries = Vec::new();
    for (key, spec) in peers.iter().filter(|(_, spec)| spec.endpoint.is_some()) {
        toggle_keepalive(key, spec.keepalive, &mut entries);
    }
    messages(entries)
}

fn add_peer(key: &PublicKey, spec: &PeerSpec, endpoint: Option<SocketAddr>, entries: &mut Vec<WireguardPeer>) {
    let mut first = vec![
        Attribute::PublicKey(*key.as_bytes()),
        Attribute::Flags(Flags::ReplaceAllowedIps),
    ];
    if let Some(secret) = &spec.preshared_key {
        first.push(Attribute::PresharedKey(*secret.expose()));
    }
    first.extend(endpoint.map(Attribute::Endpoint));
    // No handshake can be started with a peer without an endpoint, so its keepalive is set without [`toggle_keepalive`].
    if endpoint.is_none() {
        first.push(Attribute::PersistentKeepalive(seconds(spec.keepalive)));
    }
    let mut chunks = chunks(&spec.allowed_ips).into_iter();
    first.extend(chunks.next());
    entries.push(WireguardPeer(first));
    entries.extend(chunks.map(|chunk| update_entry(key, [chunk])));
    if endpoint.is_some() {
        toggle_keepalive(key, spec.keepalive, entries);
    }
}

fn update_peer(
    key: &PublicKey,
    spec: &PeerSpec,
    update: &PeerUpdate,
    removed: BTreeSet<IpNet>,
    entries: &mut Vec<WireguardPeer>,
) {
    let PeerUpdate {
        endpoint,
        keepalive,
        preshared_key: _,
        add_allowed_ips,
        remove_allowed_ips: _,
    } = update;
    if !removed.is_empty() {
        let temporary = temporary_key(key);
        let moved = chunks(&removed).into_iter();
        entries.extend(moved.map(|chunk| WireguardPeer(vec![Attribute::PublicKey(*temporary.as_bytes()), chunk])));
        entries.push(remove_entry(&temporary));
    }
    if let Some(endpoint) = endpoint {
        entries.push(update_entry(key, [Attribute::Endpoint(*endpoint)]));
        toggle_keepalive(key, spec.keepalive, entries);
    } else if keepalive.is_some() {
        entries.push(update_entry(
            key,
            [Attribute::PersistentKeepalive(seconds(spec.keepalive))],
        ));
    }
    entries.extend(
        chunks(add_allowed_ips)
            .into_iter()
            .map(|chunk| update_entry(key, [chunk])),
    );
}

/// Turns persistent keepalive off and on, which sends a packet, and sets its configured value.
fn toggle_keepalive(key: &PublicKey, keepalive: Option<NonZeroU16>, entries: &mut Vec<WireguardPeer>) {
    // Any value except 0 turns it on.
    let on = keepalive.or(NonZeroU16::new(25));
    let mut values = vec![0, seconds(on)];
    if keepalive.is_none() {
        values.push(0);
    }
    entries.extend(
        values
            .into_iter()
            .map(|value| update_entry(key, [Attribute::PersistentKeepalive(value)])),
    );
}

fn seconds(keepalive: Option<NonZeroU16>) -> u16 {
    keepalive.map_or(0, NonZeroU16::get)
}

/// An entry for an existing peer; it does not create one.
fn update_entry(key: &PublicKey, attributes: impl IntoIterator<Item = Attribute>) -> WireguardPeer {
    let head = [
        Attribute::PublicKey(*key.as_bytes()),
        Attribute::Flags(Flags::UpdateOnly),
    ];
    WireguardPeer(head.into_iter().chain(attributes).collect())
}

fn remove_entry(key: &PublicKey) -> WireguardPeer {
    let attributes = [Attribute::PublicKey(*key.as_bytes()), Attribute::Flags(Flags::RemoveMe)];
    WireguardPeer(attributes.into())
}

/// Returns the public key of the temporary peer that takes the allowed IPs of the peer `key`. The key is a hash, so no private key that
/// belongs to it is known, and no node can complete a handshake as this peer.
fn temporary_key(key: &PublicKey) -> PublicKey {
    let digest = Sha256::new_with_prefix("clustermesh wg-agent temporary peer")
        .chain_update(key.as_bytes())
        .finalize();
    PublicKey::new(digest.into())
}

fn chunks(allowed_ips: &BTreeSet<IpNet>) -> Vec<Attribute> {
    let all: Vec<_> = allowed_ips.iter().map(allowed_ip).collect();
    all.chunks(ALLOWED_IPS_PER_ENTRY)
        .map(|chunk| Attribute::AllowedIps(chunk.to_vec()))
        .collect()
}

fn allowed_ip(net: &IpNet) -> WireguardAllowedIp {
    let family = match net {
        IpNet::V4(_) => WireguardAddressFamily::Ipv4,
        IpNet::V6(_) => WireguardAddressFamily::Ipv6,
    };
    WireguardAllowedIp(vec![
        WireguardAllowedIpAttr::Family(family),
        WireguardAllowedIpAttr::IpAddr(net.addr()),
        WireguardAllowedIpAttr::Cidr(net.prefix_len()),
    ])
}

/// Splits entries into messages and keeps their order. The kernel handles messages in order, so the result is the same as
/// with one message.
fn messages(entries: Vec<WireguardPeer>) -> Vec<Vec<WireguardPeer>> {
    let mut messages: Vec<Vec<WireguardPeer>> = Vec::new();
    let mut room = 0;
    for entry in entries {
        let length = entry.value_len() + 4;
        if length > room || messages.is_empty() {
            messages.push(Vec::new());
            room = MESSAGE_BYTES.max(length);
        }
        room -= length;
        if let Some(message) = messages.last_mut() {
            message.push(entry);
        }
    }
    messages
}

#[cfg(test)]
mod tests;
