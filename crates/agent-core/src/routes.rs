//! What this node's routing should hold of ours - addresses on the device, routes in our tables, rules that reach them -
//! and the named changes from what is there; telling the kernel is the backend's.

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

/// Everything of ours in the kernel's routing. Observed and desired are the same values: a kernel adds nothing to them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Routes {
    /// Addresses on the device, as /32 and /128 there.
    pub addresses: BTreeSet<IpAddr>,
    /// Routes of our two tables that carry our protocol number.
    pub routes: BTreeSet<Route>,
    /// Rules that carry our protocol number.
    pub rules: BTreeSet<Rule>,
}

/// One route. (table, prefix, metric) is its key in the kernel; our kinds differ in metric, so none replaces another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// Routing table.
    pub table: u32,
    /// Destination.
    pub prefix: IpNet,
    /// Priority among routes of one prefix: less wins. Always written, since IPv6 turns 0 into 1024.
    pub metric: u32,
    /// What happens to the packet.
    pub kind: Kind,
}

/// What a route does.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Into the WireGuard device.
    Device {
        /// The source address of packets this node makes (`src` of ip-route(8)), where it is not the device's own.
        source: Option<IpAddr>,
        /// The largest packet, bytes, where it is less than the device's MTU (`mtu` of ip-route(8)).
        mtu: Option<u16>,
    },
    /// Answered with ICMP unreachable.
    Unreachable,
    /// Leaves the table: the next rule decides.
    Throw,
    /// Of ours by its numbers, but nothing that we write. Only ever observed.
    Other,
}

/// What [`desired`] starts from: values that [`crate::compile`] has already cleaned.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Addresses of the device.
    pub addresses: BTreeSet<IpAddr>,
    /// Prefixes that programmed Peers have.
    pub peers: BTreeSet<IpNet>,
    /// Every mesh prefix, an aggregate; covers `peers`.
    pub mesh: BTreeSet<IpNet>,
    /// What the underlay needs.
    pub throw: BTreeSet<IpNet>,
    /// This node's underlay addresses that lie in `mesh`.
    pub underlay: BTreeSet<IpAddr>,
    /// The largest packet of those of `peers` that take less than the device's MTU ([`crate::mtu`]).
    pub sizes: BTreeMap<IpNet, u16>,
}

/// The routes, rules and addresses that serve a plan.
///
/// A family without any mesh prefix gets nothing, so a kernel without IPv6 is never asked for it.
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
            mtu: plan.sizes.get(net).copied(),
        };
        out.routes.insert(Route {
            table: TABLE,
            prefix: *net,
            metric: METRIC_PEER,
            kind,
        });
    }
    for net in &plan.mesh {
        // An unbound UDP server on an underlay address that lies in the mesh must answer from that address, and its route
        // is looked up before netfilter sees the answer: `unreachable` there would be final: the
        // send fails. The device itself has no peer for these addresses, so nothing leaves by this fallback.
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
        // Whose way this is nobody knows: what it carries fits every one.
        let sizes = plan.sizes.iter().filter(|(net, _)| Family::of(net) == family);
        let kind = Kind::Device {
            source: None,
            mtu: sizes.map(|(_, size)| *size).min(),
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
    let mut mine = plan.underlay.iter().filter(|a| Family::of(&host(**a)) == family);
    mine.find(|a| plan.mesh.iter().any(|net| overlap(net, &host(**a))))
        .copied()
}

/// One step from what is there to what should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Puts an address on the device.
    AddAddress(IpAddr),
    /// Adds a route whose key is free.
    AddRoute(Route),
    /// Writes a route over ours of the same key, in one step.
    ReplaceRoute(Route),
    /// Adds a rule.
    AddRule(Rule),
    /// Takes a rule away.
    DeleteRule(Rule),
    /// Takes a route away.
    DeleteRoute(Route),
    /// Takes an address off the device.
    DeleteAddress(IpAddr),
}

impl Change {
    /// It puts something on the device, which has to be ours for that.
    #[must_use]
    pub const fn puts_on_device(&self) -> bool {
        match self {
            Self::AddAddress(_) => true,
            Self::AddRoute(route) | Self::ReplaceRoute(route) => matches!(route.kind, Kind::Device { .. }),
            Self::AddRule(_) | Self::DeleteRule(_) | Self::DeleteRoute(_) | Self::DeleteAddress(_) => false,
        }
    }
}

/// The changes that lead from `observed` to `desired`, in an order in which nothing for the mesh leaves in clear half way:
/// fallbacks before what they back up, rules last on the way in and first on the way out. `None` = nothing to do.
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
    add.sort_by_key(|r| (safety(&r.kind, r.metric), (*r).clone()));
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

    let mut gone: Vec<&Route> = observed.routes.iter().filter(|r| !wanted.contains(&key(r))).collect();
    gone.sort_by_key(|r| (std::cmp::Reverse(safety(&r.kind, r.metric)), (*r).clone()));
    changes.extend(gone.into_iter().cloned().map(Change::DeleteRoute));
    changes.extend(
        observed
            .addresses
            .difference(&desired.addresses)
            .copied()
            .map(Change::DeleteAddress),
    );
    (!changes.is_empty()).then_some(changes)
}

/// Who comes first: what the underlay needs, then the closed door, then what opens it.
const fn safety(kind: &Kind, metric: u32) -> u8 {
    match (kind, metric) {
        (Kind::Throw | Kind::Other, _) => 0,
        (Kind::Unreachable, _) => 1,
        (Kind::Device { .. }, METRIC_FALLBACK) => 2,
        (Kind::Device { .. }, _) => 3,
    }
}

impl fmt::Display for Route {
    /// As ip-route(8) takes it, but for the device's name.
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
    /// The same after one change, as a kernel would do it.
    pub fn step(&mut self, change: &Change) {
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
