//! What the one nftables table of this node should hold: typed values, their text, and the smallest transaction from one
//! state to the next. Running `nft` is the backend's.
//!
//! The chains are fixed but for a few numbers ([`Frame`]); everything that changes with Peers and policies is a set
//! element, so that churn never rewrites a rule. Only typed values are ever rendered: no text of any object gets in.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use ipnet::IpNet;

use crate::{
    interface::InterfaceName,
    policy::{Policy, Port, Rule},
    prefixes::{Family, aggregate, disjoint, host, maximal},
};

mod render;
mod update;
mod ways;

pub use render::render;
pub use update::{Update, update};

/// The whole table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Firewall {
    /// What the chains are written with.
    pub frame: Frame,
    /// IPv4 sets.
    pub v4: Sets,
    /// IPv6 sets.
    pub v6: Sets,
    /// Ports closed on the addresses of this cluster's nodes, as [`Policy::infrastructure_ports`] says.
    pub infrastructure: BTreeSet<Port>,
}

/// How much of the node's traffic the table is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scope {
    /// This agent owns the device: everything that comes out of it and goes into it, and what must not pass beside it.
    #[default]
    Tunnel,
    /// Another program owns the device and its routes, and carries more than meshes by it: only what comes out of it with a
    /// mesh source, and the sources of what goes into it for the mesh.
    Mesh,
}

/// The numbers and names inside the chains. A change of one writes the whole table anew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// What the chains are about.
    pub scope: Scope,
    /// The WireGuard device.
    pub device: InterfaceName,
    /// The device's UDP port.
    pub listen_port: u16,
    /// The device's MTU, for the MSS clamp of what comes out of it.
    pub mtu: u16,
    /// The device's IPv4 address: source of everything unpublished. `None`: unpublished IPv4 sources are dropped.
    pub wireguard_v4: Option<Ipv4Addr>,
    /// The same for IPv6.
    pub wireguard_v6: Option<Ipv6Addr>,
}

/// The elements of one family. No two elements of a set overlap, as the kernel demands.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sets {
    /// Every mesh prefix: what may not leave by another device, nor come by another to be forwarded.
    pub mesh: BTreeSet<IpNet>,
    /// What the underlay needs although it lies in `mesh`.
    pub throw: BTreeSet<IpNet>,
    /// Sources that the other members' Peers for this node carry.
    pub published: BTreeSet<IpNet>,
    /// This cluster's networks that others may reach: what of them is not `published` is served as an anchor.
    pub served: BTreeSet<IpNet>,
    /// (network, network) of one member: who may send an ICMP error about whose flow.
    pub pairs: BTreeSet<(IpNet, IpNet)>,
    /// Of this node's own addresses those at which its listeners may be reached: InternalIPs, and anchored networks, which
    /// a proxy may hold as local addresses (kube-proxy in IPVS mode). `allow` has to name them, too.
    pub listeners: BTreeSet<IpNet>,
    /// (source, destination) allowed on every port.
    pub allow: BTreeSet<(IpNet, IpNet)>,
    /// (source, destination, port) allowed.
    pub allow_ports: BTreeSet<(IpNet, IpNet, Port)>,
    /// (source, destination) denied on every port.
    pub deny: BTreeSet<(IpNet, IpNet)>,
    /// (source, destination, port) denied.
    pub deny_ports: BTreeSet<(IpNet, IpNet, Port)>,
    /// The API server's endpoints, closed for everyone wherever they are.
    pub api: BTreeSet<(IpAddr, u16)>,
    /// Addresses of this cluster's nodes, whose infrastructure ports are closed: another node sees what came through this
    /// one as coming from here.
    pub nodes: BTreeSet<IpAddr>,
    /// Pod CIDRs of the other nodes: their infrastructure ports are closed, but for what a Service of ours led there.
    pub pods_elsewhere: BTreeSet<IpNet>,
    /// Networks of members that are closed both ways.
    pub closed: BTreeSet<IpNet>,
}

/// What [`desired`] starts from: values that [`crate::compile`] has already cleaned.
#[derive(Debug, Clone)]
pub struct Plan<'a> {
    /// The chains' numbers.
    pub frame: Frame,
    /// Every mesh prefix.
    pub mesh: &'a BTreeSet<IpNet>,
    /// What the underlay needs, inside `mesh`.
    pub throw: &'a BTreeSet<IpNet>,
    /// Published sources.
    pub published: &'a BTreeSet<IpNet>,
    /// Policies, without what was refused of them.
    pub policies: &'a [Policy],
    /// InternalIPs of this node.
    pub internal_ips: &'a BTreeSet<IpAddr>,
    /// The API server's endpoints.
    pub api_servers: &'a BTreeSet<SocketAddr>,
    /// Addresses of this cluster's nodes.
    pub nodes: &'a BTreeSet<IpAddr>,
    /// Pod CIDRs of the other nodes, where they mean something.
    pub pods_elsewhere: &'a BTreeSet<IpNet>,
}

/// The table that serves a plan.
#[must_use]
pub fn desired(plan: &Plan<'_>) -> Firewall {
    let [v4, v6] = Family::BOTH.map(|family| sets(plan, family));
    let infrastructure = plan
        .policies
        .iter()
        .flat_map(|p| &p.infrastructure_ports)
        .copied()
        .collect();
    Firewall {
        frame: plan.frame.clone(),
        v4,
        v6,
        infrastructure,
    }
}

fn sets(plan: &Plan<'_>, family: Family) -> Sets {
    let of = |nets: &BTreeSet<IpNet>| aggregate(nets.iter().filter(|n| Family::of(n) == family));
    let (allow, allow_ports) = rules(plan.policies, family, Policy::allowed);
    let (deny, deny_ports) = rules(plan.policies, family, |p| &p.deny);
    let closed = plan.policies.iter().filter(|policy| policy.closed);
    let closed = closed.flat_map(|policy| policy.sources.iter().chain(&policy.networks));
    let mut pairs: BTreeMap<IpNet, BTreeSet<IpNet>> = BTreeMap::new();
    for policy in plan.policies {
        let networks = of(&policy.networks);
        for net in &networks {
            pairs.entry(*net).or_default().extend(&networks);
        }
    }
    Sets {
        mesh: of(plan.mesh),
        throw: of(plan.throw),
        published: of(plan.published),
        served: of(&plan.policies.iter().flat_map(Policy::served).copied().collect()),
        listeners: of(&listeners(plan)),
        pairs: disjoint(&pairs),
        allow,
        allow_ports,
        deny,
        deny_ports,
        api: plan
            .api_servers
            .iter()
            .map(|a| (a.ip(), a.port()))
            .filter(|(ip, _)| Family::of(&IpNet::from(*ip)) == family)
            .collect(),
        nodes: plan
            .nodes
            .iter()
            .copied()
            .filter(|ip| Family::of(&IpNet::from(*ip)) == family)
            .collect(),
        // Not aggregated: a node that joins beside another is one element more, and not one that goes and one that comes, for
        // which the whole table is written.
        pods_elsewhere: maximal(plan.pods_elsewhere.iter().filter(|net| Family::of(net) == family)),
        closed: of(&closed.copied().collect()),
    }
}

fn listeners(plan: &Plan<'_>) -> BTreeSet<IpNet> {
    let anchored = plan.policies.iter().flat_map(|policy| &policy.anchored).copied();
    let own = plan.internal_ips.iter().map(|ip| host(ip.to_canonical()));
    anchored.chain(own).collect()
}

type Pairs = BTreeSet<(IpNet, IpNet)>;

/// The elements that some rules of every policy come to: those for every port, and those for one.
fn rules(
    policies: &[Policy],
    family: Family,
    which: impl Fn(&Policy) -> &[Rule],
) -> (Pairs, BTreeSet<(IpNet, IpNet, Port)>) {
    let mut by_port: BTreeMap<Option<Port>, BTreeMap<IpNet, BTreeSet<IpNet>>> = BTreeMap::new();
    for policy in policies {
        for rule in which(policy) {
            let every = rule.ports.is_empty().then_some(None);
            for port in every.into_iter().chain(rule.ports.iter().copied().map(Some)) {
                let pairs = by_port.entry(port).or_default();
                for source in policy.sources.iter().filter(|s| Family::of(s) == family) {
                    pairs
                        .entry(source.trunc())
                        .or_default()
                        .extend(rule.to.iter().map(IpNet::trunc));
                }
            }
        }
    }
    let every = by_port.remove(&None).map(|pairs| disjoint(&pairs)).unwrap_or_default();
    let ports = by_port
        .iter()
        .filter_map(|(port, pairs)| port.map(|port| (port, pairs)));
    let ports = ports.flat_map(|(port, pairs)| disjoint(pairs).into_iter().map(move |(s, d)| (s, d, port)));
    (every, ports.collect())
}

#[cfg(test)]
mod tests;
