//! Computes the desired addresses, routes and policy routing rules of the agent on this node, and the changes from the observed ones.
//! A backend in `wg-agent` applies the changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use ipnet::IpNet;

use crate::{
    numbers::{METRIC_FALLBACK, METRIC_PEER, METRIC_THROW, METRIC_UNREACHABLE, TABLE, TABLE_TUNNEL},
    prefixes::{Family, covered, host, overlap},
};

mod rule;

pub use rule::{Action, Rule, rules};

/// The agent's part of the kernel's routing, desired or observed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Routes {
    /// Addresses on the device, assigned as /32 and /128.
    pub addresses: BTreeSet<IpAddr>,
    /// Routes in our two tables with our protocol number.
    pub routes: BTreeSet<Route>,
    /// Rules with our protocol number.
    pub rules: BTreeSet<Rule>,
}

/// One route. Its key in the kernel is (table, prefix, metric). Each kind that the agent writes has its own metrics, so none
/// of these kinds replaces another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// Routing table.
    pub table: u32,
    /// Destination.
    pub prefix: IpNet,
    /// Priority among routes of one prefix: the lowest wins. Always set, because IPv6 turns 0 into 1024.
    pub metric: u32,
    /// What the route does.
    pub kind: Kind,
}

/// What a route does.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Into the WireGuard device.
    Device {
        /// Source address of this node's own packets (`src` of ip-route(8)); `None` = the kernel chooses an address of the device.
        source: Option<IpAddr>,
        /// MTU in bytes (`mtu` of ip-route(8)); `None` = the MTU of the device.
        mtu: Option<u16>,
    },
    /// Rejected with ICMP unreachable.
    Unreachable,
    /// Ends the lookup in this table; the lookup continues with the next rule.
    Throw,
    /// An observed route with our protocol number, in a form that the agent never writes.
    Other,
}

/// Input of [`desired`], validated by [`crate::compile()`].
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Addresses of the device.
    pub addresses: BTreeSet<IpAddr>,
    /// Allowed IPs of the Peers that are not refused.
    pub peers: BTreeSet<IpNet>,
    /// Every mesh prefix, aggregated; covers `peers`.
    pub mesh: BTreeSet<IpNet>,
    /// Prefixes that stay on the underlay.
    pub throw: BTreeSet<IpNet>,
    /// This node's underlay addresses. In each family, the first that lies in `mesh` is the source of peer and fallback routes.
    pub underlay: BTreeSet<IpAddr>,
    /// MTUs of the routes to those of `peers` whose path MTU is too small for the device's MTU ([`crate::mtu`]).
    pub mtus: BTreeMap<IpNet, u16>,
}

/// Computes the routes, rules and addresses for a plan.
///
/// A family without a mesh prefix gets no routes and rules, so a mesh without IPv6 works on a kernel without IPv6.
#[must_use]
pub fn desired(plan: &Plan) -> Routes {
    let mut out = Routes {
        addresses: plan.addresses.clone(),
        ..Routes::default()
    };
    for net in plan.throw.iter().filter(|net| covered(net, &plan.mesh)) {
        out.routes.insert(Route {
            table: TABLE,
            prefix: *net,
            metric: METRIC_THROW,
            kind: Kind::Throw,
        });
    }
    for net in plan.peers.iter().filter(|net| !plan.throw.contains(net)) {
        let kind = Kind::Device {
            source: source(plan, Family::of(net)),
            mtu: plan.mtus.get(net).copied(),
        };
        out.routes.insert(Route {
            table: TABLE,
            prefix: *net,
            metric: METRIC_PEER,
            kind,
        });
    }
    for net in &plan.mesh {
        // The fallback lets a UDP server that is not bound to an address answer a mesh source over the underlay. The answer's
        // source is the node's underlay address that lies in a mesh network. The kernel looks up the answer's route before
        // netfilter can mark the answer, so with only an `unreachable` route the send would fail. With the fallback, netfilter
        // sets the underlay mark, and the kernel looks up the route again, without this table. A packet that gets no mark goes to
        // the device, which drops it, because no peer has its destination.
        if let Some(source) = source(plan, Family::of(net)) {
            let kind = Kind::Device {
                source: Some(source),
                mtu: None,
            };
            out.routes.insert(Route {
                table: TABLE,
                prefix: *net,
                metric: METRIC_FALLBACK,
                kind,
            });
        }
        let kind = Kind::Unreachable;
        out.routes.insert(Route {
            table: TABLE,
            prefix: *net,
            metric: METRIC_UNREACHABLE,
            kind,
        });
    }
    for family in Family::BOTH
        .into_iter()
        .filter(|f| plan.mesh.iter().any(|net| Family::of(net) == *f))
    {
        // The default route may lead to any peer, so it has the smallest MTU.
        let mtus = plan.mtus.iter().filter(|(net, _)| Family::of(net) == family);
        let kind = Kind::Device {
            source: None,
            mtu: mtus.map(|(_, mtu)| *mtu).min(),
        };
        out.routes.insert(Route {
            table: TABLE_TUNNEL,
            prefix: family.everything(),
            metric: METRIC_PEER,
            kind,
        });
        out.rules.extend(rules(family));
    }
    out
}

fn source(plan: &Plan, family: Family) -> Option<IpAddr> {
    let mut underlay = plan.underlay.iter().filter(|a| Family::of(&host(**a)) == family);
    underlay
        .find(|a| plan.mesh.iter().any(|net| overlap(net, &host(**a))))
        .copied()
}

/// One change to the kernel's routing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Adds an address to the device.
    AddAddress(IpAddr),
    /// Adds a route whose key does not exist.
    AddRoute(Route),
    /// Replaces our route with the same key atomically.
    ReplaceRoute(Route),
    /// Adds a rule.
    AddRule(Rule),
    /// Deletes a rule.
    DeleteRule(Rule),
    /// Deletes a route.
    DeleteRoute(Route),
    /// Deletes an address from the device.
    DeleteAddress(IpAddr),
}

impl Change {
    /// Whether the change adds an address or a route to the device. Such a change may be applied only while the agent has the
    /// device open.
    #[must_use]
    pub const fn adds_to_device(&self) -> bool {
        match self {
            Self::AddAddress(_) => true,
            Self::AddRoute(route) | Self::ReplaceRoute(route) => matches!(route.kind, Kind::Device { .. }),
            Self::AddRule(_) | Self::DeleteRule(_) | Self::DeleteRoute(_) | Self::DeleteAddress(_) => false,
        }
    }
}

/// Computes the changes from `observed` to `desired`; `None` = they are equal.
///
/// The order keeps packets to the mesh from leaving unencrypted while the changes are applied. `unreachable` and fallback routes are
/// added before the routes of Peers and deleted after them. Rules are added after all routes are added, and deleted before any route
/// is deleted.
#[must_use]
pub fn diff(observed: &Routes, desired: &Routes) -> Option<Vec<Change>> {
    let mut changes: Vec<Change> = desired
        .addresses
        .difference(&observed.addresses)
        .copied()
        .map(Change::AddAddress)
        .collect();
    let key = |r: &Route| (r.table, r.prefix, r.metric);
    let had: BTreeSet<_> = observed.routes.iter().map(key).collect();
    let wanted: BTreeSet<_> = desired.routes.iter().map(key).collect();

    let mut add: Vec<&Route> = desired.routes.difference(&observed.routes).collect();
    add.sort_by_key(|r| (add_order(&r.kind, r.metric), (*r).clone()));
    changes.extend(add.into_iter().cloned().map(|r| match had.contains(&key(&r)) {
        true => Change::ReplaceRoute(r),
        false => Change::AddRoute(r),
    }));
    changes.extend(desired.rules.difference(&observed.rules).cloned().map(Change::AddRule));
    changes.extend(
        observed
            .rules
            .difference(&desired.rules)
            .cloned()
            .map(Change::DeleteRule),
    );

    let mut removed: Vec<&Route> = observed.routes.iter().filter(|r| !wanted.contains(&key(r))).collect();
    removed.sort_by_key(|r| (std::cmp::Reverse(add_order(&r.kind, r.metric)), (*r).clone()));
    changes.extend(removed.into_iter().cloned().map(Change::DeleteRoute));
    changes.extend(
        observed
            .addresses
            .difference(&desired.addresses)
            .copied()
            .map(Change::DeleteAddress),
    );
    (!changes.is_empty()).then_some(changes)
}

/// Sort key of routes to add: `throw` routes, `unreachable` routes, fallback routes, other routes into the device. Routes are deleted in
/// the reverse order, altered ones ([`Kind::Other`]) with the `throw` routes.
const fn add_order(kind: &Kind, metric: u32) -> u8 {
    match (kind, metric) {
        (Kind::Throw | Kind::Other, _) => 0,
        (Kind::Unreachable, _) => 1,
        (Kind::Device { .. }, METRIC_FALLBACK) => 2,
        (Kind::Device { .. }, _) => 3,
    }
}

impl fmt::Display for Route {
    /// The syntax of ip-route(8), with `<device>` for the name of the device. `(altered)` marks [`Kind::Other`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            Kind::Device { source, mtu } => {
                write!(f, "{} dev <device>", self.prefix)?;
                if let Some(source) = source {
                    write!(f, " src {source}")?;
                }
                if let Some(mtu) = mtu {
                    write!(f, " mtu {mtu}")?;
                }
            }
            Kind::Unreachable => write!(f, "unreachable {}", self.prefix)?,
            Kind::Throw => write!(f, "throw {}", self.prefix)?,
            Kind::Other => write!(f, "(altered) {}", self.prefix)?,
        }
        write!(f, " table {} metric {}", self.table, self.metric)
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddAddress(a) => write!(f, "address add {a}"),
            Self::AddRoute(r) => write!(f, "route add {r}"),
            Self::ReplaceRoute(r) => write!(f, "route replace {r}"),
            Self::AddRule(r) => write!(f, "rule add {r}"),
            Self::DeleteRule(r) => write!(f, "rule delete {r}"),
            Self::DeleteRoute(r) => write!(f, "route delete {r}"),
            Self::DeleteAddress(a) => write!(f, "address delete {a}"),
        }
    }
}

impl Routes {
    /// Applies one change from [`diff`] to the state that was observed, with the same result as in the kernel.
    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::AddAddress(a) => drop(self.addresses.insert(*a)),
            Change::DeleteAddress(a) => drop(self.addresses.remove(a)),
            Change::AddRoute(r) => drop(self.routes.insert(r.clone())),
            Change::ReplaceRoute(r) => {
                self.routes
                    .retain(|o| (o.table, o.prefix, o.metric) != (r.table, r.prefix, r.metric));
                self.routes.insert(r.clone());
            }
            Change::DeleteRoute(r) => drop(self.routes.remove(r)),
            Change::AddRule(r) => drop(self.rules.insert(*r)),
            Change::DeleteRule(r) => drop(self.rules.remove(r)),
        }
    }
}

#[cfg(test)]
mod tests;
