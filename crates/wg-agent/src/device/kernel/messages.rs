//! Named changes as WireGuard's netlink messages (linux/wireguard.h): each touches the peers it names and no other. Sending
//! them is not done here.
//!
//! Three things that the interface does not offer, and what is done instead:
//! - **A range is given up without a gap for the others.** Kernels before 6.17 know only "replace all ranges", which leaves the peer
//!   without any for a moment. So the range moves to a peer that is made for that and removed in the same message.
//! - **A greeting.** Turning keepalive on sends one at once, and that needs a handshake where there is no session. So a
//!   greeting is keepalive on and, in the same message, back to what it shall be. No packet has to be invented that the firewall
//!   would need to know and the other side's host would get.
//! - **A new preshared key takes effect at once.** The kernel uses it from the next handshake on, up to two minutes later. So the peer
//!   is removed and added again in one message; it loses its session, as it must, and its counters.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    num::NonZeroU16,
};

use clustermesh_agent_core::device::{Ledger, PeerChange, PeerSpec, PeerUpdate, Peers};
use clustermesh_core::key::PublicKey;
use ipnet::IpNet;
use netlink_packet_core::Nla;
use netlink_packet_wireguard::{
    WireguardAddressFamily, WireguardAllowedIp, WireguardAllowedIpAttr, WireguardPeer,
    WireguardPeerAttribute as Attribute, WireguardPeerFlags as Flags,
};
use sha2::{Digest, Sha256};

/// Bytes of peers in one message, so that it stays below a page with its headers and the next peer.
const FULL: usize = 2_000;
/// Ranges in one entry; a peer with more has several.
const RANGES: usize = 40;

/// Where peers are now, which may be elsewhere than where they were configured to be.
pub(super) type Live = BTreeMap<PublicKey, SocketAddr>;

/// The entries that carry out `changes` on a device that holds `held`, message by message.
pub(super) fn plan(held: &Peers, live: &Live, changes: &[PeerChange]) -> Vec<Vec<WireguardPeer>> {
    let mut entries = Vec::new();
    let mut held = held.clone();
    let mut ledger = Ledger::new(&mut held);
    for change in changes {
        let before = ledger.peers().get(change.key()).map(|spec| spec.allowed_ips.clone());
        let known = before.is_some();
        ledger.apply(change);
        match change {
            PeerChange::Add(key, spec) => {
                if known {
                    entries.push(remove(key));
                }
                add(key, spec, spec.endpoint, &mut entries);
            }
            PeerChange::Update(key, update) => {
                let Some((spec, before)) = ledger.peers().get(key).zip(before) else {
                    continue;
                };
                if update.preshared_key.is_some() {
                    entries.push(remove(key));
                    let endpoint = update.endpoint.or_else(|| live.get(key).copied()).or(spec.endpoint);
                    add(key, spec, endpoint, &mut entries);
                } else {
                    let gone = update.remove_allowed_ips.intersection(&before).copied().collect();
                    change_one(key, spec, update, gone, &mut entries);
                }
            }
            PeerChange::Remove(key) if known => entries.push(remove(key)),
            PeerChange::Remove(_) => {}
        }
    }
    messages(entries)
}

/// Entries that make a handshake begin with every peer that has an endpoint.
pub(super) fn greet(held: &Peers) -> Vec<Vec<WireguardPeer>> {
    let mut entries = Vec::new();
    for (key, spec) in held.iter().filter(|(_, spec)| spec.endpoint.is_some()) {
        greeting(key, spec.keepalive, &mut entries);
    }
    messages(entries)
}

fn add(key: &PublicKey, spec: &PeerSpec, endpoint: Option<SocketAddr>, entries: &mut Vec<WireguardPeer>) {
    let mut first = vec![
        Attribute::PublicKey(*key.as_bytes()),
        Attribute::Flags(Flags::ReplaceAllowedIps),
    ];
    if let Some(secret) = &spec.preshared_key {
        first.push(Attribute::PresharedKey(*secret.expose()));
    }
    first.extend(endpoint.map(Attribute::Endpoint));
    // Of a peer that has nowhere to send to, keepalive is what it will be, without a packet.
    if endpoint.is_none() {
        first.push(Attribute::PersistentKeepalive(seconds(spec.keepalive)));
    }
    let mut chunks = chunks(&spec.allowed_ips).into_iter();
    first.extend(chunks.next());
    entries.push(WireguardPeer(first));
    entries.extend(chunks.map(|chunk| known(key, [chunk])));
    if endpoint.is_some() {
        greeting(key, spec.keepalive, entries);
    }
}

fn change_one(
    key: &PublicKey,
    spec: &PeerSpec,
    update: &PeerUpdate,
    gone: BTreeSet<IpNet>,
    entries: &mut Vec<WireguardPeer>,
) {
    let PeerUpdate {
        endpoint,
        keepalive,
        preshared_key: _,
        add_allowed_ips,
        remove_allowed_ips: _,
    } = update;
    if !gone.is_empty() {
        let heir = heir(key);
        let taken = chunks(&gone).into_iter();
        entries.extend(taken.map(|chunk| WireguardPeer(vec![Attribute::PublicKey(*heir.as_bytes()), chunk])));
        entries.push(remove(&heir));
    }
    if let Some(endpoint) = endpoint {
        entries.push(known(key, [Attribute::Endpoint(*endpoint)]));
        greeting(key, spec.keepalive, entries);
    } else if keepalive.is_some() {
        entries.push(known(key, [Attribute::PersistentKeepalive(seconds(spec.keepalive))]));
    }
    entries.extend(chunks(add_allowed_ips).into_iter().map(|chunk| known(key, [chunk])));
}

/// Keepalive off, on, and to what it shall be: going from off to on is what sends.
fn greeting(key: &PublicKey, keepalive: Option<NonZeroU16>, entries: &mut Vec<WireguardPeer>) {
    let on = keepalive.or(NonZeroU16::new(25));
    let mut values = vec![0, seconds(on)];
    if keepalive.is_none() {
        values.push(0);
    }
    entries.extend(
        values
            .into_iter()
            .map(|value| known(key, [Attribute::PersistentKeepalive(value)])),
    );
}

fn seconds(keepalive: Option<NonZeroU16>) -> u16 {
    keepalive.map_or(0, NonZeroU16::get)
}

/// An entry about a peer that is there; if it is not, it is not made either.
fn known(key: &PublicKey, attributes: impl IntoIterator<Item = Attribute>) -> WireguardPeer {
    let head = [
        Attribute::PublicKey(*key.as_bytes()),
        Attribute::Flags(Flags::UpdateOnly),
    ];
    WireguardPeer(head.into_iter().chain(attributes).collect())
}

fn remove(key: &PublicKey) -> WireguardPeer {
    let attributes = [Attribute::PublicKey(*key.as_bytes()), Attribute::Flags(Flags::RemoveMe)];
    WireguardPeer(attributes.into())
}

/// Who takes over what `key` gives up, for as long as one message is worked on: a key that nobody has.
fn heir(key: &PublicKey) -> PublicKey {
    let digest = Sha256::new_with_prefix("clustermesh wg-agent heir")
        .chain_update(key.as_bytes())
        .finalize();
    PublicKey::new(digest.into())
}

fn chunks(ranges: &BTreeSet<IpNet>) -> Vec<Attribute> {
    let all: Vec<_> = ranges.iter().map(range).collect();
    all.chunks(RANGES)
        .map(|chunk| Attribute::AllowedIps(chunk.to_vec()))
        .collect()
}

fn range(range: &IpNet) -> WireguardAllowedIp {
    let family = match range {
        IpNet::V4(_) => WireguardAddressFamily::Ipv4,
        IpNet::V6(_) => WireguardAddressFamily::Ipv6,
    };
    WireguardAllowedIp(vec![
        WireguardAllowedIpAttr::Family(family),
        WireguardAllowedIpAttr::IpAddr(range.addr()),
        WireguardAllowedIpAttr::Cidr(range.prefix_len()),
    ])
}

/// Entries that belong together by order are never torn apart by it: messages are worked on in order as well.
fn messages(entries: Vec<WireguardPeer>) -> Vec<Vec<WireguardPeer>> {
    let mut messages: Vec<Vec<WireguardPeer>> = Vec::new();
    let mut room = 0;
    for entry in entries {
        let length = entry.value_len() + 4;
        if length > room || messages.is_empty() {
            messages.push(Vec::new());
            room = FULL.max(length);
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
