//! Computes the nftables table of a node as typed values, renders it as text for `nft`, and derives the transactions that turn
//! one table into the next. A backend in `wg-agent` runs `nft`.
//!
//! The chains are fixed except for a few numbers and names ([`RuleParameters`]). Everything that changes with Peers and policies is a set
//! element, so most changes write only elements. The exception concerns deny sets, whose rules drop packets (such as `deny` and
//! `closed`): if a change adds some of their elements and removes others, the whole table is written again ([`update()`] has the
//! reason).
//!
//! Only typed values are rendered, never text from an object.

use std::{
    borrow::Borrow,
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use clustermesh_core::{mesh::Protocol, observe::PolicySpec};
use ipnet::IpNet;

use crate::{
    interface::InterfaceName,
    prefixes::{Family, SPECIAL_PURPOSE, aggregate, disjoint, host, maximal, overlap},
};

mod render;
mod routing;
mod sets;
mod update;

pub use render::render;
pub use update::{Update, update};

/// The whole table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Firewall {
    /// The numbers and names in the chains.
    pub parameters: RuleParameters,
    /// IPv4 sets.
    pub v4: Sets,
    /// IPv6 sets.
    pub v6: Sets,
    /// Ports closed on the addresses of this cluster's nodes ([`PolicySpec::infrastructure_ports`]).
    pub infrastructure: BTreeSet<(Protocol, u16)>,
}

/// Which traffic of the node the table controls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scope {
    /// This agent owns the device. The table controls all packets from and into the tunnel, and drops packets that would bypass it.
    #[default]
    Tunnel,
    /// Another program owns the device and its routes, and also uses it for other traffic. The table filters only packets from the
    /// tunnel with a mesh source, and exempts packets to the mesh with a published source from masquerading.
    Mesh,
}

/// The numbers and names in the chains. With [`Scope::Mesh`] the chains contain only `device`. If a parameter changes, the whole
/// table is written again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleParameters {
    /// Which traffic the chains control.
    pub scope: Scope,
    /// The WireGuard device.
    pub device: InterfaceName,
    /// The device's UDP port.
    pub listen_port: u16,
    /// The device's MTU, for the MSS clamp of packets from the tunnel.
    pub mtu: u16,
    /// The device's IPv4 address, which replaces unpublished sources. `None`: packets with unpublished IPv4 sources are dropped.
    pub wireguard_v4: Option<Ipv4Addr>,
    /// The same for IPv6.
    pub wireguard_v6: Option<Ipv6Addr>,
}

/// The set elements of one address family. The kernel requires that no two elements of a set overlap.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sets {
    /// Every mesh prefix. With [`Scope::Tunnel`], packets to it leave only by the tunnel, except those that chain `leave` accepts, and
    /// packets from it are forwarded only if they came by the tunnel.
    pub mesh: BTreeSet<IpNet>,
    /// Prefixes inside `mesh` that the underlay needs, reached by `throw` routes.
    pub throw: BTreeSet<IpNet>,
    /// Prefixes of this node that are in the allowed IPs of its Peers in other members. With [`Scope::Tunnel`], connections
    /// from other sources into the tunnel get the device's address.
    pub published: BTreeSet<IpNet>,
    /// Allowed IPs of this cluster's nodes in other locations. All packets from them are accepted.
    pub own_cluster: BTreeSet<IpNet>,
    /// Addresses of this node that the nodes in other locations accept as sources. Packets from them to `own_cluster` keep their
    /// source.
    pub own_sources: BTreeSet<IpNet>,
    /// This node's pod CIDRs.
    pub own_pods: BTreeSet<IpNet>,
    /// Addresses of gateways. Gateways accept only this node's WireGuard address as a source, so this address replaces even a
    /// published source.
    pub gateways: BTreeSet<IpNet>,
    /// This cluster's networks that other members may reach. Connections from the tunnel to addresses in them that are not this
    /// node's (`published`) are masqueraded: other members reach these addresses through this node, so the replies have to return
    /// through it.
    pub served: BTreeSet<IpNet>,
    /// Two networks of the same member. A source in the first may send ICMP errors about flows from or to the second.
    pub pairs: BTreeSet<(IpNet, IpNet)>,
    /// Addresses of this node at which other members may reach its listening sockets, if `allow` contains them too: its InternalIPs
    /// and the anchored networks. ClusterIPs can be local addresses, because kube-proxy in IPVS mode adds them to an interface.
    pub listeners: BTreeSet<IpNet>,
    /// (source, destination) allowed on every port that no other set closes.
    pub allow: BTreeSet<(IpNet, IpNet)>,
    /// (source, destination) denied on every port: the destinations of [`SPECIAL_PURPOSE`] that overlap an allowed network.
    pub deny: BTreeSet<(IpNet, IpNet)>,
    /// (source, destination, TCP port) denied.
    pub deny_ports: BTreeSet<(IpNet, IpNet, u16)>,
    /// The API server's ClusterIP and endpoints, closed to every member.
    pub api: BTreeSet<(IpAddr, u16)>,
    /// Addresses of this cluster's nodes, whose infrastructure ports are closed. Every node closes them for all nodes: the CNI may
    /// masquerade a packet that this node forwards to another node, and that node cannot recognize the member's packet then.
    pub nodes: BTreeSet<IpAddr>,
    /// Pod CIDRs of the other nodes. Infrastructure ports in them are closed, except through a Service.
    pub pod_cidrs_of_other_nodes: BTreeSet<IpNet>,
    /// Networks and sources of closed PeerPolicies. Packets from and to them are dropped.
    pub closed: BTreeSet<IpNet>,
}

/// Input of [`desired`], validated by [`crate::compile()`].
#[derive(Debug, Clone)]
pub struct Plan<'a> {
    /// The numbers and names in the chains.
    pub parameters: RuleParameters,
    /// Allowed IPs of the Peers that describe nodes of this cluster in other locations.
    pub own_cluster: &'a BTreeSet<IpNet>,
    /// Allowed IPs of the Peer that describes this node in its own cluster.
    pub own_sources: &'a BTreeSet<IpNet>,
    /// This node's pod CIDRs.
    pub own_pods: &'a BTreeSet<IpNet>,
    /// Allowed IPs of the Peers that describe gateways.
    pub gateways: &'a BTreeSet<IpNet>,
    /// Every mesh prefix.
    pub mesh: &'a BTreeSet<IpNet>,
    /// Prefixes inside `mesh` that the underlay needs.
    pub throw: &'a BTreeSet<IpNet>,
    /// Published sources.
    pub published: &'a BTreeSet<IpNet>,
    /// Policies, without the networks that were refused.
    pub policies: &'a [PolicySpec],
    /// InternalIPs of this node.
    pub internal_ips: &'a BTreeSet<IpAddr>,
    /// The API server's ClusterIP and endpoints.
    pub api_servers: &'a BTreeSet<SocketAddr>,
    /// Addresses of this cluster's nodes.
    pub nodes: &'a BTreeSet<IpAddr>,
    /// Pod CIDRs of the other nodes, without those in an anchored pod network.
    pub pod_cidrs_of_other_nodes: &'a BTreeSet<IpNet>,
}

/// Computes the table for a plan.
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
        parameters: plan.parameters.clone(),
        v4,
        v6,
        infrastructure,
    }
}

fn sets(plan: &Plan<'_>, family: Family) -> Sets {
    let of_family = |nets: &BTreeSet<IpNet>| aggregate(nets.iter().filter(|n| Family::of(n) == family));
    let closed = plan.policies.iter().filter(|policy| policy.closed);
    let closed = closed.flat_map(|policy| policy.sources.iter().chain(&policy.networks));
    let mut pairs: BTreeMap<IpNet, BTreeSet<IpNet>> = BTreeMap::new();
    for policy in plan.policies {
        let networks = of_family(&policy.networks);
        for net in &networks {
            pairs.entry(*net).or_default().extend(&networks);
        }
    }
    Sets {
        mesh: of_family(plan.mesh),
        throw: of_family(plan.throw),
        published: of_family(plan.published),
        own_cluster: of_family(plan.own_cluster),
        own_sources: of_family(plan.own_sources),
        own_pods: of_family(plan.own_pods),
        gateways: of_family(plan.gateways),
        served: of_family(&plan.policies.iter().flat_map(PolicySpec::allowed).copied().collect()),
        listeners: of_family(&listeners(plan)),
        pairs: disjoint(&pairs),
        allow: source_pairs(plan.policies, family, PolicySpec::allowed),
        deny: source_pairs(plan.policies, family, special_purpose),
        deny_ports: denied_ports(plan.policies, family),
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
        // Not aggregated, so that a node with a neighbouring CIDR only adds an element. With aggregation, one element would be deleted and
        // another added. This is a deny set, so `update` would write the whole table.
        pod_cidrs_of_other_nodes: maximal(
            plan.pod_cidrs_of_other_nodes
                .iter()
                .filter(|net| Family::of(net) == family),
        ),
        closed: of_family(&closed.copied().collect()),
    }
}

fn listeners(plan: &Plan<'_>) -> BTreeSet<IpNet> {
    let anchored = plan.policies.iter().flat_map(|policy| &policy.anchored).copied();
    let own = plan.internal_ips.iter().map(|ip| host(ip.to_canonical()));
    anchored.chain(own).collect()
}

/// The prefixes of [`SPECIAL_PURPOSE`] that overlap an allowed network.
fn special_purpose(policy: &PolicySpec) -> impl Iterator<Item = &'static IpNet> {
    let overlaps_allowed = |net: &&IpNet| policy.allow.iter().any(|to| overlap(to, net));
    SPECIAL_PURPOSE.iter().filter(overlaps_allowed)
}

fn denied_ports(policies: &[PolicySpec], family: Family) -> BTreeSet<(IpNet, IpNet, u16)> {
    let ports: BTreeSet<u16> = policies
        .iter()
        .flat_map(|policy| &policy.deny)
        .map(SocketAddr::port)
        .collect();
    let of_port = |port| {
        let denied = |policy: &PolicySpec| -> Vec<IpNet> {
            let at_port = policy.deny.iter().filter(|at| at.port() == port);
            at_port.map(|at| host(at.ip().to_canonical())).collect()
        };
        let pairs = source_pairs(policies, family, denied).into_iter();
        pairs.map(move |(source, to)| (source, to, port))
    };
    ports.into_iter().flat_map(of_port).collect()
}

/// (source, destination) for every source of a policy and every destination that `destinations` selects from it. Policies may have
/// sources in common.
fn source_pairs<'a, I>(
    policies: &'a [PolicySpec],
    family: Family,
    destinations: impl Fn(&'a PolicySpec) -> I,
) -> BTreeSet<(IpNet, IpNet)>
where
    I: IntoIterator<Item: Borrow<IpNet>>,
{
    let mut pairs: BTreeMap<IpNet, BTreeSet<IpNet>> = BTreeMap::new();
    for policy in policies {
        let to: BTreeSet<IpNet> = destinations(policy)
            .into_iter()
            .map(|net| net.borrow().trunc())
            .collect();
        if to.is_empty() {
            continue;
        }
        for source in policy.sources.iter().filter(|source| Family::of(source) == family) {
            pairs.entry(source.trunc()).or_default().extend(&to);
        }
    }
    disjoint(&pairs)
}

#[cfg(test)]
mod tests;
