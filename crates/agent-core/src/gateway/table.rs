//! Models the firewall table of a gateway, and computes the steps from one table to another and the transaction for each step.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    time::Duration,
};

use clustermesh_core::mesh::{ObjectName, Protocol};
use ipnet::IpNet;

use super::{
    GrantId, SandboxId,
    render::{self, Chooser, Piece},
};
use crate::{interface::InterfaceName, numbers::NFT_TABLE, prefixes::Family};

/// The highest total [`Grant::weight`] of the grants that one step changes, unless a single grant weighs more. A gateway's container
/// has 256 MiB, and `nft` 1.0.6 takes 83 MB for 60,000 elements, which is six times as many as this limit allows.
pub(super) const MAX_STEP_WEIGHT: usize = 10_000;

/// The sandbox, protocol and gateway port of a grant.
type GrantKey = (SandboxId, Protocol, u16);

/// The contents of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// The numbers and names in the rules. If one of them changes, the whole table is written again.
    pub parameters: RuleParameters,
    /// The sandbox of each network.
    pub sandboxes: BTreeMap<IpNet, SandboxId>,
    /// Limits on new connections per second.
    pub rates: BTreeMap<SandboxId, NonZeroU32>,
    /// The grants by sandbox, protocol and gateway port.
    pub grants: BTreeMap<GrantKey, Grant>,
}

/// The numbers and names in the rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleParameters {
    /// The WireGuard device.
    pub interface: InterfaceName,
    /// UDP port of the tunnel.
    pub listen_port: u16,
    /// The admin port (TCP).
    pub admin_port: u16,
    /// WireGuard addresses of this gateway.
    pub addresses: BTreeSet<IpAddr>,
    /// Limit on open connections of a sandbox.
    pub sandbox_connections: Option<NonZeroU32>,
    /// Limit on open connections of one grant to one endpoint.
    pub endpoint_connections: Option<NonZeroU32>,
}

/// A grant: the endpoints behind a port of the gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// The mark of its connections.
    pub id: GrantId,
    /// The Service. It is not in the kernel's table.
    pub service: ObjectName,
    /// Endpoints for new connections.
    pub balancer: Balancer,
    /// Endpoints that connections may have: those of `balancer`, and draining ones, which keep their open connections.
    pub allowed_endpoints: BTreeSet<SocketAddr>,
}

/// Endpoints for new connections.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Balancer {
    /// IPv4.
    pub v4: Vec<SocketAddr>,
    /// IPv6.
    pub v6: Vec<SocketAddr>,
    /// Each client address always gets the same endpoint while the endpoints stay the same.
    pub sticky: bool,
}

impl Grant {
    /// An upper estimate of the number of set elements that change when this grant is added or removed.
    pub(super) fn weight(&self) -> usize {
        4 + 3 * self.allowed_endpoints.len()
    }
}

impl Table {
    /// The endpoints that connections of each grant may have. Every other conntrack entry with a grant's mark is stale.
    #[must_use]
    pub fn allowed_endpoints(&self) -> BTreeSet<(GrantId, SocketAddr)> {
        let each = self.grants.values();
        each.flat_map(|grant| grant.allowed_endpoints.iter().map(|socket| (grant.id, *socket)))
            .collect()
    }

    /// Counts the grants that have an endpoint for new connections.
    #[must_use]
    pub fn count_open_grants(&self) -> usize {
        let has = |grant: &&Grant| !grant.balancer.v4.is_empty() || !grant.balancer.v6.is_empty();
        self.grants.values().filter(has).count()
    }

    /// Computes the next table between `old` and `desired`. Repeated calls reach `desired`.
    ///
    /// The result differs from `old` by grants with a total weight of at most `MAX_STEP_WEIGHT`, or by one heavier grant. Networks and
    /// rates do not count. If `old` is `None` or has other rule parameters, the step starts from a table without grants.
    ///
    /// A step allows only connections that `old` or `desired` allows. Grants are removed first, then changed. Networks are added or move
    /// to another sandbox, and grants are added, only when no grant of `old` is left to remove or change. A grant with another id is
    /// removed and added, not changed.
    #[must_use]
    pub fn step(old: Option<&Self>, desired: &Self) -> Self {
        Self::step_within(MAX_STEP_WEIGHT, old, desired)
    }

    /// [`Self::step`] with another limit.
    pub(super) fn step_within(limit: usize, old: Option<&Self>, desired: &Self) -> Self {
        let old = old.filter(|old| old.parameters == desired.parameters);
        let mut next = Self {
            grants: old.map(|old| old.grants.clone()).unwrap_or_default(),
            ..desired.clone()
        };
        let mut budget = Budget { limit, left: limit };
        let mut is_settled = true;
        let desired_of = |key: &GrantKey, grant: &Grant| desired.grants.get(key).filter(|other| other.id == grant.id);
        for (key, grant) in old.iter().flat_map(|old| &old.grants) {
            if desired_of(key, grant).is_some() {
                continue;
            }
            if budget.take(grant.weight()) {
                next.grants.remove(key);
            } else {
                is_settled = false;
            }
        }
        for (key, grant) in old.iter().flat_map(|old| &old.grants) {
            let Some(wanted) = desired_of(key, grant).filter(|wanted| *wanted != grant) else {
                continue;
            };
            if budget.take(grant.weight() + wanted.weight()) {
                next.grants.insert(*key, wanted.clone());
            } else {
                is_settled = false;
            }
        }
        if !is_settled {
            // No network is added, or moved to another sandbox, yet: it would get the obsolete grants of its new sandbox.
            let is_unmoved = |network: &IpNet, sandbox: &SandboxId| {
                old.is_some_and(|old| old.sandboxes.get(network) == Some(sandbox))
            };
            next.sandboxes.retain(|network, sandbox| is_unmoved(network, sandbox));
            return next;
        }
        for (key, wanted) in &desired.grants {
            if !next.grants.contains_key(key) && budget.take(wanted.weight()) {
                next.grants.insert(*key, wanted.clone());
            }
        }
        next
    }

    /// Returns the pieces of the table, each before those that refer to it, with the value that the piece sets, such as a mark. Empty = the
    /// piece sets no value.
    fn pieces(&self) -> BTreeMap<Piece, String> {
        let mut out = BTreeMap::new();
        let mut put = |piece: Piece, value: String| drop(out.insert(piece, value));
        for (sandbox, rate) in &self.rates {
            put(Piece::Limit(*sandbox), render::rate(*rate));
            put(Piece::LimitElement(*sandbox), render::rate(*rate));
        }
        for (network, sandbox) in &self.sandboxes {
            put(Piece::Sandbox(*network), render::mark(sandbox.0));
        }
        for ((sandbox, protocol, port), grant) in &self.grants {
            let key = (*sandbox, *protocol, *port);
            let Balancer { v4, v6, sticky } = &grant.balancer;
            for (family, endpoints) in [(Family::V4, v4), (Family::V6, v6)] {
                let (count, sticky) = (endpoints.len(), *sticky);
                let chooser = Chooser { family, count, sticky };
                if count > 0 {
                    put(Piece::Chooser(chooser), String::new());
                    put(Piece::Service(grant.id, family), chooser.name());
                }
                for (index, endpoint) in endpoints.iter().enumerate() {
                    let socket = format!("{} . {}", endpoint.ip(), endpoint.port());
                    put(Piece::Backend(grant.id, family, index), socket);
                }
            }
            put(Piece::Open(key, grant.id), String::new());
            put(Piece::Grant(key), render::mark(grant.id.0));
        }
        for (id, socket) in self.allowed_endpoints() {
            put(Piece::Endpoint(id, socket), String::new());
            put(Piece::Host(id, socket.ip()), String::new());
        }
        out
    }
}

/// The weight of grants that a step may still change.
struct Budget {
    limit: usize,
    left: usize,
}

impl Budget {
    /// Takes `weight` if it fits. The first weight always fits. After one that does not fit, none fits, which keeps the order of changes.
    fn take(&mut self, weight: usize) -> bool {
        let fits = weight <= self.left || self.left == self.limit;
        self.left = if fits { self.left.saturating_sub(weight) } else { 0 };
        fits
    }
}

/// Renders the transaction for `nft -f` from `old`, the table that was written last, to `new`. `None` = they are equal. Without `old`,
/// the whole table is written.
///
/// A piece that changes is removed and added in one transaction, so that every packet finds the old or the new piece.
#[must_use]
pub fn update(old: Option<&Table>, new: &Table) -> Option<String> {
    let wanted = new.pieces();
    let Some(old) = old.filter(|old| old.parameters == new.parameters) else {
        let mut out = render::base_table(&new.parameters);
        render::add(wanted.iter(), &mut out);
        return Some(out);
    };
    let existing = old.pieces();
    let mut out = String::new();
    // A piece is removed before the pieces that it refers to.
    let removed = existing
        .iter()
        .rev()
        .filter(|(piece, value)| wanted.get(piece) != Some(value));
    render::remove(removed.map(|(piece, _)| piece), &mut out);
    let added = wanted
        .iter()
        .filter(|(piece, value)| existing.get(piece) != Some(value));
    render::add(added, &mut out);
    (!out.is_empty()).then_some(out)
}

/// Renders the transaction that renews the element of the set `alive` for `timeout`. Without this element every packet of the tunnel is
/// dropped.
///
/// The element is added, deleted and added again. Before Linux 6.12, adding an existing element does not change its remaining time, so
/// the element is deleted first; and the first `add` makes sure that the element exists, because otherwise `delete` fails.
#[must_use]
pub fn render_renewal(parameters: &RuleParameters, timeout: Duration) -> String {
    let mut out = String::new();
    let element = format!(
        "alive {{ \"{}\" timeout {}s }}",
        parameters.interface,
        timeout.as_secs().max(1)
    );
    for verb in ["add", "delete", "add"] {
        let _ = writeln!(out, "{verb} element inet {NFT_TABLE} {element}");
    }
    out
}
