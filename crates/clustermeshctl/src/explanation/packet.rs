//! Follows a connection through the planned Peers and PeerPolicies of both clusters.
//! [`super::connectivity`] explains why a Peer is missing.

use std::{collections::BTreeSet, net::IpAddr};

use clustermesh_core::{
    mesh::{ClusterIdentity, Protocol},
    observe::{Claim, Member, PolicySpec, Server},
    plan::{MeshPlan, Plan, PlannedPeer, PlannedPolicy, TargetPlan},
};
use ipnet::IpNet;

use super::{
    Explanation, Hop, Route, Rule, Verdict, allowed_networks_text, connectivity::Query, last_observed, port_text,
};

/// Follows the packets of one query.
pub(super) struct PacketTrace<'q> {
    pub(super) query: &'q Query<'q>,
}

/// For each mesh that contains a cluster: the mesh's plan, and what it plans to write into the cluster. Callers need the mesh's
/// plan to find the cluster of an entry, because names of entries are unique only within a mesh.
fn targets<'p>(plan: &'p Plan, cluster: &'p ClusterIdentity) -> impl Iterator<Item = (&'p MeshPlan, &'p TargetPlan)> {
    plan.meshes.values().flat_map(move |mesh| {
        let entries = mesh.identities.iter();
        let same = entries.filter(move |(_, identity)| identity.same_cluster(cluster));
        same.filter_map(move |(name, _)| Some((mesh, mesh.targets.get(name)?)))
    })
}

fn is_cluster(mesh: &MeshPlan, entry: &str, cluster: &ClusterIdentity) -> bool {
    mesh.identities
        .get(entry)
        .is_some_and(|identity| identity.same_cluster(cluster))
}

/// The planned Peers of `source` in `cluster`.
fn peers<'p>(
    plan: &'p Plan,
    cluster: &'p ClusterIdentity,
    source: &'p ClusterIdentity,
) -> impl Iterator<Item = (&'p String, &'p PlannedPeer)> {
    targets(plan, cluster).flat_map(move |(mesh, target)| {
        let peers = target.peers.iter().map(|(name, peer)| (name, &**peer));
        peers.filter(move |(_, peer)| is_cluster(mesh, &peer.source, source))
    })
}

/// The planned policies for `source` in `cluster`.
fn policies<'p>(
    plan: &'p Plan,
    cluster: &'p ClusterIdentity,
    source: &'p ClusterIdentity,
) -> impl Iterator<Item = (&'p String, &'p PlannedPolicy)> {
    targets(plan, cluster).flat_map(move |(mesh, target)| {
        let policies = target.policies.iter();
        policies.filter(move |(_, policy)| is_cluster(mesh, &policy.source, source))
    })
}

/// The longest prefix among a Peer's allowed IPs that contains an address.
fn matching_prefix(peer: &PlannedPeer, address: IpAddr) -> Option<IpNet> {
    let nets = peer.spec.allowed_ips.iter().filter(|net| net.contains(&address));
    nets.max_by_key(|net| net.prefix_len()).copied()
}

impl PacketTrace<'_> {
    pub(super) fn follow(&self) -> Explanation {
        let query = self.query;
        let (plan, from, to) = (query.plan, query.from, query.to);
        let best_match = peers(plan, &from.cluster, &to.cluster)
            .filter_map(|(name, peer)| Some((matching_prefix(peer, to.address)?, name, peer)))
            .max_by_key(|(net, name, _)| (net.prefix_len(), *name));
        let Some((prefix, name, peer)) = best_match else {
            return query.explain_missing_peer();
        };
        let out = self.hop(&from.cluster, name, peer, prefix);
        let node_prefixes = query.destination_member.prefixes(&peer.node);
        let anchored = node_prefixes.is_some_and(|nets| !nets.iter().any(|net| net.contains(&prefix)));
        // Two Nodes may claim one address. The packets reach the Node whose Peer contains it.
        let other_node = to
            .node
            .as_deref()
            .filter(|node| !anchored && *node != peer.node && !query.destination_member.is_led_by(node, &peer.node));
        if let Some(skipped) = other_node.and_then(|node| query.skipped(query.destination, node, query.source)) {
            return skipped;
        }
        let (seen_as, back) = match self.return_hop() {
            Ok(back) => back,
            Err(explanation) => return *explanation,
        };
        let mut route = Route {
            out,
            anchored,
            back,
            seen_as,
            masqueraded: self.is_masqueraded(seen_as),
            policy: None,
        };
        let mut answer = self.evaluate_policies(&mut route);
        if anchored && answer.verdict() == Verdict::Allowed {
            answer.notes.push(format!(
                "Node {} is the anchor of {prefix} and forwards the connection: the server sees the address of this node, or for a \
                 Service that of another node of its cluster",
                peer.node
            ));
        }
        if let (Some(node), Verdict::Allowed) = (other_node, answer.verdict()) {
            answer.notes.push(format!(
                "{} belongs to Node {}, so the connection reaches that Node and not {node}",
                to.address, peer.node
            ));
        }
        if route.masqueraded.is_none() && answer.verdict() == Verdict::Allowed {
            answer.notes.push(
                "kg does not prevent masquerading: if the CNI masquerades traffic that leaves the cluster, the connection arrives \
                 from the WireGuard address or the InternalIP of the source's node. wg-agent with --mode=policy on that node keeps \
                 the address"
                    .to_owned(),
            );
        }
        answer.route = Some(route);
        answer
    }

    /// Whether the source address is replaced. wg-agent, in full and policy mode, prevents masquerading by the CNI; kg does not. `None` =
    /// unknown, because the CNI decides. Without a source address there is nothing to replace: `Some(false)`.
    fn is_masqueraded(&self, seen_as: IpAddr) -> Option<bool> {
        let from = self.query.from;
        let is_replaced = from.address.is_some_and(|address| address != seen_as);
        let source = last_observed(self.query.observations, &from.cluster);
        let node = from.node.as_deref().and_then(|node| source?.nodes.get(node));
        let has_only_kg = node.is_some_and(|node| node.server == Server::Kilo);
        (is_replaced || from.address.is_none() || !has_only_kg).then_some(is_replaced)
    }

    fn hop(&self, cluster: &ClusterIdentity, name: &str, peer: &PlannedPeer, prefix: IpNet) -> Hop {
        let existing =
            last_observed(self.query.observations, cluster).and_then(|member| member.peers.as_ref()?.get(name));
        Hop {
            peer: name.to_owned(),
            node: peer.node.clone(),
            prefix,
            written: existing.is_some_and(|existing| existing.spec.as_ref() == Ok(&peer.spec)),
        }
    }

    /// Returns the source address that packets have at the destination, and the Peer in the destination's cluster that contains this
    /// address. The source address is the client's own if the Peer of the client's node, or of that node's leader, contains it; if the
    /// client's node is unknown, a Peer of any node counts. In all other cases the source address is the WireGuard address of the client's
    /// node. `Err` = no Peer contains either address, or the WireGuard address is not of the destination's IP family.
    fn return_hop(&self) -> Result<(IpAddr, Hop), Box<Explanation>> {
        let query = self.query;
        let (plan, from, to) = (query.plan, query.from, query.to);
        let is_same_family = |net: &IpNet| net.addr().is_ipv4() == to.address.is_ipv4();
        let return_peers = || peers(plan, &to.cluster, &from.cluster);
        let may_be_own = |peer: &PlannedPeer| from.node.as_deref().is_none_or(|node| peer.node == node);
        let by_own_peer = from.address.and_then(|address| {
            let candidates = return_peers().filter(|(_, peer)| may_be_own(peer));
            let candidates = candidates.filter_map(|(name, peer)| Some((matching_prefix(peer, address)?, name, peer)));
            let (net, name, peer) = candidates.max_by_key(|(net, name, _)| (net.prefix_len(), *name))?;
            Some((address, self.hop(&to.cluster, name, peer, net)))
        });
        // With Kilo's location granularity, the Peer of the leader contains the addresses of its followers.
        let by_leader = || {
            let address = from.address?;
            let node = from.node.as_deref()?;
            let candidates = return_peers().filter(|(_, peer)| query.source_member.is_led_by(node, &peer.node));
            let (net, name, peer) = candidates
                .filter_map(|(name, peer)| Some((matching_prefix(peer, address)?, name, peer)))
                .max_by_key(|(net, name, _)| (net.prefix_len(), *name))?;
            Some((address, self.hop(&to.cluster, name, peer, net)))
        };
        let by_wireguard_address = || {
            let node = from.node.as_deref()?;
            let source = last_observed(query.observations, &from.cluster)?;
            let wireguard = source.nodes.get(node)?.wireguard_ip.value()?.addr();
            let mut candidates = return_peers().filter(|(_, peer)| peer.node == node);
            let (net, name, peer) =
                candidates.find_map(|(name, peer)| Some((matching_prefix(peer, wireguard)?, name, peer)))?;
            is_same_family(&net).then(|| (wireguard, self.hop(&to.cluster, name, peer, net)))
        };
        by_own_peer.or_else(by_leader).or_else(by_wireguard_address).ok_or_else(|| {
            let node = from.node.as_deref();
            let skipped = node.and_then(|node| query.skipped(query.source, node, query.destination));
            Box::new(skipped.unwrap_or_else(|| {
                let sender = match (&from.address, &from.node) {
                    (Some(address), Some(node)) => format!("{address} on Node {node}"),
                    (Some(address), None) => address.to_string(),
                    (None, Some(node)) => format!("Node {node}"),
                    (None, None) => "the source".to_owned(),
                };
                Explanation::new(
                    Rule::NoPeer,
                    format!(
                        "no Peer in cluster {:?} contains {sender} of cluster {:?}: no Node of cluster {:?} publishes the address, \
                         and the source's Node has no WireGuard address of the same IP family",
                        query.destination, query.source, query.source
                    ),
                )
            }))
        })
    }

    /// Evaluates the policies of both clusters.
    fn evaluate_policies(&self, route: &mut Route) -> Explanation {
        let query = self.query;
        let (plan, from, to) = (query.plan, query.from, query.to);
        // A `closed` policy also drops packets to the member that it describes, here the destination. A member is
        // closed because it is quarantined or not cluster-meshed. `Query::denied_between_members` has already answered in both cases,
        // so this check is only a safeguard, and it reports `TowardSandbox` even if the destination is no sandbox.
        if let Some((name, _)) = policies(plan, &from.cluster, &to.cluster)
            .find(|(_, policy)| policy.spec.closed && contains(&policy.spec.networks, to.address))
        {
            return Explanation::new(
                Rule::TowardSandbox,
                format!(
                    "PeerPolicy {name} in cluster {:?} allows no connection to {}",
                    query.source, to.address
                ),
            );
        }
        let Some(member) = last_observed(query.observations, &to.cluster) else {
            return Explanation::new(
                Rule::MemberUnseen,
                format!("cluster {:?} was not observed", query.destination),
            );
        };
        let Some(existing) = &member.policies else {
            return Explanation::new(
                Rule::NoPolicyHere,
                format!(
                    "cluster {:?} has no CRD peerpolicies.kilo.squat.ai, so its nodes accept all packets from its Peers: run wg-agent \
                     there (with --mode=policy on the nodes of kg)",
                    query.destination
                ),
            );
        };
        let matching: Vec<(&String, &PlannedPolicy)> = policies(plan, &to.cluster, &from.cluster)
            .filter(|(_, policy)| contains(&policy.spec.sources, route.seen_as))
            .collect();
        let Some((name, first)) = matching.first() else {
            return Explanation::new(
                Rule::PolicyMissing,
                format!(
                    "no PeerPolicy in cluster {:?} has {} among its sources, and packets from unknown sources are dropped",
                    query.destination, route.seen_as
                ),
            );
        };
        let written = existing
            .get(*name)
            .is_some_and(|existing| existing.spec.as_ref() == Ok(&first.spec));
        route.policy = Some(((*name).clone(), written));
        let specs: Vec<&PolicySpec> = matching.iter().map(|(_, policy)| &policy.spec).collect();
        if let Some(explanation) = to.port.and_then(|port| self.closed_port(&specs, member, port)) {
            return explanation;
        }
        if !specs.iter().any(|spec| contains(&spec.allow, to.address)) {
            return Explanation::new(
                Rule::OutsideAllowedNetworks,
                format!(
                    "{} lies outside the networks that cluster {:?} opens to other members ({})",
                    to.address,
                    query.destination,
                    allowed_networks_text(query.destination_member.cluster())
                ),
            );
        }
        let is_wireguard_only =
            wireguard_addresses(member).contains(&to.address) && !is_internal_ip(member, to.address);
        if is_wireguard_only && to.port.is_some() {
            return Explanation::new(
                Rule::WireguardAddress,
                format!(
                    "{} is the WireGuard address of a node, which answers only ping: use the node's InternalIP, if allowedNetworks of \
                     {:?} contain it",
                    to.address, query.destination
                ),
            );
        }
        let mut answer = Explanation::new(
            Rule::Meshed,
            format!(
                "clusters {:?} and {:?} are cluster-meshed, and {} lies in allowedNetworks of {:?}",
                query.source, query.destination, to.address, query.destination
            ),
        );
        if to.port.is_none() && is_wireguard_only {
            answer
                .notes
                .push("the address is a node's WireGuard address, which answers only ping".to_owned());
        } else if to.port.is_none() {
            answer.notes.extend(self.closed_port_notes(&specs, member));
        }
        answer
    }

    /// Explains that the port is closed to all members: an endpoint of the API server, or an infrastructure port at a node's address.
    /// `None` = it is neither.
    fn closed_port(&self, specs: &[&PolicySpec], member: &Member, port: (Protocol, u16)) -> Option<Explanation> {
        let query = self.query;
        let to = query.to;
        if port.0 == Protocol::Tcp
            && specs
                .iter()
                .any(|spec| spec.deny.contains(&(to.address, port.1).into()))
        {
            return Some(Explanation::new(
                Rule::ApiServer,
                format!(
                    "{} port {} is an endpoint of the API server of cluster {:?}, which is closed to every member",
                    to.address,
                    port_text(port),
                    query.destination
                ),
            ));
        }
        let infrastructure = specs.iter().any(|spec| spec.infrastructure_ports.contains(&port));
        (infrastructure && node_addresses(member).contains(&to.address)).then(|| {
            Explanation::new(
                Rule::InfrastructurePort,
                format!(
                    "port {} is an infrastructure port (such as API server, kubelet, etcd), closed to every member at the addresses \
                     of the nodes of cluster {:?}",
                    port_text(port),
                    query.destination
                ),
            )
        })
    }

    /// Lists the ports of the destination that are closed, for a query without a port.
    fn closed_port_notes(&self, specs: &[&PolicySpec], member: &Member) -> Vec<String> {
        let to = self.query.to;
        let mut notes = Vec::new();
        if node_addresses(member).contains(&to.address) {
            let ports: BTreeSet<_> = specs
                .iter()
                .flat_map(|spec| &spec.infrastructure_ports)
                .copied()
                .collect();
            let ports: Vec<String> = ports.into_iter().map(port_text).collect();
            notes.push(format!(
                "these ports are closed, as infrastructure ports: {}",
                ports.join(", ")
            ));
        }
        let api: BTreeSet<u16> = specs
            .iter()
            .flat_map(|spec| &spec.deny)
            .filter(|denied| denied.ip() == to.address)
            .map(std::net::SocketAddr::port)
            .collect();
        notes.extend(
            api.into_iter()
                .map(|port| format!("this port is closed, as a port of the API server: {port}/TCP")),
        );
        notes
    }
}

fn contains(nets: &BTreeSet<IpNet>, address: IpAddr) -> bool {
    nets.iter().any(|net| net.contains(&address))
}

fn wireguard_addresses(member: &Member) -> BTreeSet<IpAddr> {
    let addresses = member.nodes.values().filter_map(|node| match &node.wireguard_ip {
        Claim::Valid(net) => Some(net.addr()),
        _ => None,
    });
    addresses.collect()
}

fn is_internal_ip(member: &Member, address: IpAddr) -> bool {
    let mut internal = member.nodes.values().flat_map(|node| &node.internal_ips);
    internal.any(|ip| ip.to_canonical() == address)
}

/// All addresses of a cluster's nodes: InternalIPs, ExternalIPs and WireGuard addresses.
fn node_addresses(member: &Member) -> BTreeSet<IpAddr> {
    let nodes = member.nodes.values();
    let own = nodes.flat_map(|node| node.internal_ips.iter().chain(&node.external_ips));
    own.map(IpAddr::to_canonical)
        .chain(wireguard_addresses(member))
        .collect()
}
