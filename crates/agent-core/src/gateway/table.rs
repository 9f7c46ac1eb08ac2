//! The table of a gateway as a value, and the smallest transaction from one to the next.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    time::Duration,
};

use clustermesh_core::mesh::ObjectName;
use ipnet::IpNet;

use super::{
    GrantId, SandboxId,
    render::{self, Chooser, Piece},
};
use crate::{interface::InterfaceName, numbers::NFT_TABLE, policy::Protocol, prefixes::Family};

/// Elements that one transaction changes at most, by [`Grant::weight`]. A gateway's container has 256 MiB, and `nft` 1.0.6 takes
/// 83 MB for 60,000 of them: 10,000 grants with one endpoint each.
pub(super) const STEP: usize = 10_000;

/// Where a grant is open.
type Place = (SandboxId, Protocol, u16);

/// What the table holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// What its rules say; with another one the whole table is written.
    pub frame: Frame,
    /// Whose addresses these are.
    pub sandboxes: BTreeMap<IpNet, SandboxId>,
    /// New connections a second.
    pub rates: BTreeMap<SandboxId, NonZeroU32>,
    /// What is open.
    pub grants: BTreeMap<Place, Grant>,
}

/// What the rules say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The WireGuard device.
    pub interface: InterfaceName,
    /// UDP port of the tunnel.
    pub listen_port: u16,
    /// TCP port of `/metrics` and `/readyz`.
    pub admin_port: u16,
    /// WireGuard addresses of this gateway.
    pub addresses: BTreeSet<IpAddr>,
    /// Connections of a sandbox; `None` = any number.
    pub sandbox_connections: Option<NonZeroU32>,
    /// Connections of one grant to one endpoint; `None` = any number.
    pub endpoint_connections: Option<NonZeroU32>,
}

/// A port of the gateway that is open to a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// The mark of its connections.
    pub id: GrantId,
    /// The Service, for people.
    pub service: ObjectName,
    /// Where new connections go.
    pub balancer: Balancer,
    /// Endpoints whose connections stand.
    pub standing: BTreeSet<SocketAddr>,
}

/// Endpoints for new connections.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Balancer {
    /// IPv4.
    pub v4: Vec<SocketAddr>,
    /// IPv6.
    pub v6: Vec<SocketAddr>,
    /// A client address always gets the same one, while they stay the same.
    pub sticky: bool,
}

impl Grant {
    /// Elements of its part of a transaction, or a few more.
    pub(super) fn weight(&self) -> usize {
        4 + 3 * self.standing.len()
    }
}

impl Table {
    /// Connections that may be in the connection table: what has another mark, or another endpoint, belongs to no grant.
    #[must_use]
    pub fn standing(&self) -> BTreeSet<(GrantId, SocketAddr)> {
        let each = self.grants.values();
        each.flat_map(|grant| grant.standing.iter().map(|socket| (grant.id, *socket)))
            .collect()
    }

    /// Grants of which a new connection finds an endpoint.
    #[must_use]
    pub fn open(&self) -> usize {
        let has = |grant: &&Grant| !grant.balancer.v4.is_empty() || !grant.balancer.v6.is_empty();
        self.grants.values().filter(has).count()
    }

    /// The next table on the way from `old` to `desired`. It differs from `old`, or without one of the same frame from a table
    /// without grants, by grants that weigh [`STEP`] together, or by one that is heavier. Repeated, it ends at `desired`.
    ///
    /// Each step is consistent: what it opens is open in `old` or in `desired`. Grants are removed first, then those that stay are
    /// changed. Networks get another sandbox, and grants are added, only when `old` has no other grant left to remove or change.
    #[must_use]
    pub fn step(old: Option<&Self>, desired: &Self) -> Self {
        Self::step_within(STEP, old, desired)
    }

    /// [`Self::step`] with another limit.
    pub(super) fn step_within(limit: usize, old: Option<&Self>, desired: &Self) -> Self {
        let old = old.filter(|old| old.frame == desired.frame);
        let mut next = Self {
            grants: old.map(|old| old.grants.clone()).unwrap_or_default(),
            ..desired.clone()
        };
        let mut room = Room { limit, left: limit };
        let mut settled = true;
        let stays = |place: &Place, grant: &Grant| desired.grants.get(place).filter(|other| other.id == grant.id);
        for (place, grant) in old.iter().flat_map(|old| &old.grants) {
            if stays(place, grant).is_some() {
                continue;
            }
            if room.take(grant.weight()) {
                next.grants.remove(place);
            } else {
                settled = false;
            }
        }
        for (place, grant) in old.iter().flat_map(|old| &old.grants) {
            let Some(wanted) = stays(place, grant).filter(|wanted| *wanted != grant) else {
                continue;
            };
            if room.take(grant.weight() + wanted.weight()) {
                next.grants.insert(*place, wanted.clone());
            } else {
                settled = false;
            }
        }
        if !settled {
            // A network that changes hands would reach what its new sandbox has left from before.
            let same = |network: &IpNet, sandbox: &SandboxId| {
                old.is_some_and(|old| old.sandboxes.get(network) == Some(sandbox))
            };
            next.sandboxes.retain(|network, sandbox| same(network, sandbox));
            return next;
        }
        for (place, wanted) in &desired.grants {
            if !next.grants.contains_key(place) && room.take(wanted.weight()) {
                next.grants.insert(*place, wanted.clone());
            }
        }
        next
    }

    /// All that can be added and removed by itself, in an order in which it can be added: what others refer to comes first.
    fn pieces(&self) -> BTreeMap<Piece, String> {
        let mut out = BTreeMap::new();
        let mut put = |piece: Piece, text: String| drop(out.insert(piece, text));
        for (sandbox, rate) in &self.rates {
            put(Piece::Limit(*sandbox), render::rate(*rate));
            put(Piece::Limited(*sandbox), render::rate(*rate));
        }
        for (network, sandbox) in &self.sandboxes {
            put(Piece::Sandbox(*network), render::mark(sandbox.0));
        }
        for ((sandbox, protocol, port), grant) in &self.grants {
            let place = (*sandbox, *protocol, *port);
            let Balancer { v4, v6, sticky } = &grant.balancer;
            for (family, endpoints) in [(Family::V4, v4), (Family::V6, v6)] {
                let (count, sticky) = (endpoints.len(), *sticky);
                let chooser = Chooser { family, count, sticky };
                if count > 0 {
                    put(Piece::Chooser(chooser), String::new());
                    put(Piece::Service(grant.id, family), chooser.name());
                }
                for (at, endpoint) in endpoints.iter().enumerate() {
                    let socket = format!("{} . {}", endpoint.ip(), endpoint.port());
                    put(Piece::Backend(grant.id, family, at), socket);
                }
            }
            put(Piece::Open(place, grant.id), String::new());
            put(Piece::Grant(place), render::mark(grant.id.0));
        }
        for (id, socket) in self.standing() {
            put(Piece::Endpoint(id, socket), String::new());
            put(Piece::Host(id, socket.ip()), String::new());
        }
        out
    }
}

/// What a step may still change.
struct Room {
    limit: usize,
    left: usize,
}

impl Room {
    /// Takes a part of it. The first part always fits. After one that does not, none does: the order of changes is kept.
    fn take(&mut self, weight: usize) -> bool {
        let fits = weight <= self.left || self.left == self.limit;
        self.left = if fits { self.left.saturating_sub(weight) } else { 0 };
        fits
    }
}

/// What leads from `old`, as last written, to `new`, for `nft -f`; `None` = nothing to do. Without `old`, the whole table.
///
/// What changes is taken away and put back in one transaction, so that no packet sees it missing.
#[must_use]
pub fn update(old: Option<&Table>, new: &Table) -> Option<String> {
    let wanted = new.pieces();
    let Some(old) = old.filter(|old| old.frame == new.frame) else {
        let mut out = render::frame(&new.frame);
        render::add(wanted.iter(), &mut out);
        return Some(out);
    };
    let standing = old.pieces();
    let mut out = String::new();
    // What refers to others goes first.
    let gone = standing
        .iter()
        .rev()
        .filter(|(piece, value)| wanted.get(piece) != Some(value));
    render::remove(gone.map(|(piece, _)| piece), &mut out);
    let come = wanted
        .iter()
        .filter(|(piece, value)| standing.get(piece) != Some(value));
    render::add(come, &mut out);
    (!out.is_empty()).then_some(out)
}

/// Sets the element that keeps the table open for `timeout`; without it every packet of the tunnel is dropped. The element is
/// added, deleted and added in one transaction: a kernel before 6.12 keeps the remaining time of an element that is only added
/// again, and an element that has timed out can be deleted only after it was added.
#[must_use]
pub fn alive(frame: &Frame, timeout: Duration) -> String {
    let mut out = String::new();
    let element = format!(
        "alive {{ \"{}\" timeout {}s }}",
        frame.interface,
        timeout.as_secs().max(1)
    );
    for verb in ["add", "delete", "add"] {
        let _ = writeln!(out, "{verb} element inet {NFT_TABLE} {element}");
    }
    out
}
