//! Plans Peers for the target's own nodes, if its entry connects its locations (design rule 14).

use std::{borrow::Cow, collections::BTreeSet};

use ipnet::IpNet;

use super::{AddedSource, Holder, OwnNames, PeerPlanner};
use crate::{
    mesh::{Locations, PodNetwork, Profile, is_too_wide},
    observe::{Claim, Member, Node, PeerRole, Server},
    plan::{
        Fact, Reason, Skipped,
        nodes::{self, NodeRegistry, RegisteredNode},
    },
};

impl PeerPlanner<'_, '_> {
    /// Adds a Peer for each registered node of the target itself that has a location, and keeps the Peers of held nodes. The Peer's role
    /// contains the location, and only the nodes in other locations use the Peer. Peers of own nodes are added before those of other
    /// members, so that no other member takes an own node's prefix.
    pub(in crate::plan) fn add_own_nodes(&mut self) {
        let (target, inputs, name) = (self.target, self.inputs, self.name);
        let parts = target.last_observed().zip(inputs.registries.get(name));
        let Some((member, registry)) = parts.filter(|_| target.cluster.locations == Locations::Connected) else {
            return;
        };
        if registry.registered.is_empty() && registry.held.is_empty() {
            return;
        }
        if let Some(message) = self.why_not_connected(member, registry) {
            let cluster = name.to_owned();
            self.facts.insert(Fact::LocationsNotConnected { cluster, message });
            return;
        }
        for node in registry.held.keys() {
            self.hold_node(name, target, node);
        }
        let api_servers: BTreeSet<IpNet> = member
            .api_endpoints
            .iter()
            .map(|at| IpNet::from(at.ip().to_canonical()))
            .collect();
        let shared_ips = shared_internal_ips(registry);
        self.endpoints.clear();
        let added_source = AddedSource {
            name,
            keepalive: self.keepalive(target),
            own_names: OwnNames::Nodes(registry),
        };
        for node in agent_nodes(registry) {
            let location = &node.observed.location;
            if location.is_empty() {
                let message = "it has no location, so nodes in other locations of its cluster have no tunnel to it: set the label \
                               topology.kubernetes.io/region or the annotation kilo.squat.ai/location";
                self.skipped.entry(name.to_owned()).or_default().push(Skipped {
                    node: node.node.to_owned(),
                    reason: Reason::NodeNoLocation,
                    message: message.to_owned(),
                    target: Some(name.to_owned()),
                });
                continue;
            }
            let mut prefixes = own_prefixes(target.cluster.pod_network, node);
            // Nodes connect to the API server before they have a tunnel.
            prefixes.retain(|net| !api_servers.contains(net));
            for shared in prefixes.extract_if(.., |net| shared_ips.contains(net)) {
                let message = format!(
                    "InternalIP {} of Node {} is also that of another Node: nodes in other locations of the cluster reach neither at \
                     this address. Give one of the Nodes another address",
                    shared.addr(),
                    node.node
                );
                let cluster = name.to_owned();
                self.facts.insert(Fact::AddressShared { cluster, message });
            }
            // If a silent or held node of the target may still run kg, `PeerPlanner::new` marks the keys of all nodes of the
            // target as taken, so that no other member's Peer gets them. The Peer planned here must still get the key of
            // `node`.
            let owner = self.taken_keys.get(&node.key);
            if owner == Some(&Holder::Node(node.node.into())) {
                self.taken_keys.remove(&node.key);
            }
            let candidates = self.candidates(name, target, node);
            let role = PeerRole::OwnNode(location.clone());
            self.add_node(&added_source, node, Cow::Owned(prefixes), candidates, role);
        }
    }

    /// Why the locations of the target cannot be connected, or need no tunnels.
    fn why_not_connected(&self, member: &Member, registry: &NodeRegistry<'_>) -> Option<String> {
        if self.target.cluster.profile == Profile::Sandbox {
            return Some("the locations of a sandbox are not connected: remove `locations: Connected`".to_owned());
        }
        let has_kg =
            |node: &Node| node.server != Server::Agent && node.public_key != Claim::Absent && !node.is_silent();
        if let Some((node, _)) = member.nodes.iter().find(|(_, node)| has_kg(node)) {
            return Some(format!(
                "kg serves Node {node}, and connects the locations itself: remove `locations: Connected`, or kg and its annotations"
            ));
        }
        let registered = agent_nodes(registry).map(|node| node.observed);
        let held = registry.held.keys().filter_map(|name| member.nodes.get(name));
        let locations = registered.chain(held).map(|node| &*node.location);
        let locations: BTreeSet<&str> = locations.filter(|location| !location.is_empty()).collect();
        let found = match (locations.first(), locations.len()) {
            (None, _) => "no Node has a location".to_owned(),
            (Some(only), 1) => format!("every Node has the location {only:?}, or none"),
            _ => return None,
        };
        Some(format!(
            "{found}, so there are no tunnels inside the cluster: set the label topology.kubernetes.io/region or the annotation \
             kilo.squat.ai/location of its Nodes, or remove `locations: Connected`"
        ))
    }
}

/// The registered nodes on which wg-agent owns the tunnel: only they use Peers of their own cluster.
fn agent_nodes<'r, 'a>(registry: &'r NodeRegistry<'a>) -> impl Iterator<Item = &'r RegisteredNode<'a>> {
    let registered = registry.registered.iter();
    registered.filter(|node| node.observed.server == Server::Agent)
}

/// The allowed IPs of a node in its own cluster: the prefixes of its Peers in other members, its InternalIPs and, unless the pod network is
/// shared, its podCIDRs. They may lie outside allowedNetworks, which limit only what other members see.
fn own_prefixes(pod_network: PodNetwork, node: &RegisteredNode<'_>) -> BTreeSet<IpNet> {
    let observed = node.observed;
    let mut prefixes = node.prefixes.clone();
    prefixes.extend(internal_ips(node));
    if pod_network == PodNetwork::PerNode {
        let pod_cidrs = observed.pod_cidrs.iter().filter_map(Claim::value).map(IpNet::trunc);
        prefixes.extend(pod_cidrs.filter(|network| !is_too_wide(network)));
    }
    prefixes
}

/// The InternalIPs that more than one of the [`agent_nodes`] has, for example because two locations use the same private network.
/// The Peers of own nodes do not get such an address: an agent refuses an allowed IP that is an address of its own node.
fn shared_internal_ips(registry: &NodeRegistry<'_>) -> BTreeSet<IpNet> {
    let mut seen = BTreeSet::new();
    let all = agent_nodes(registry).flat_map(|node| internal_ips(node).collect::<BTreeSet<IpNet>>());
    all.filter(|ip| !seen.insert(*ip)).collect()
}

fn internal_ips(node: &RegisteredNode<'_>) -> impl Iterator<Item = IpNet> {
    let addresses = node.observed.internal_ips.iter();
    addresses.map(|address| nodes::host_route(address.to_canonical()))
}
