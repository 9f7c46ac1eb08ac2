//! Adds the anchored networks of a member to its Peers in one target (design rule 6).

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::PeerPlanner;
use crate::{
    observe::ObservedPeer,
    plan::{
        Fact, anchor, endpoint,
        nodes::{NodeRegistry, RegisteredNode},
        target::MeshMember,
    },
};

impl<'a> PeerPlanner<'a, '_> {
    /// Adds each of `parts` to the Peer of one node. [`anchor::split_anchored_networks`] splits the member's anchored networks into parts.
    /// `parts` has those that no held Peer keeps and that overlap no pod network of the target. A part that cannot be added is reported,
    /// unless no node is registered. `peer_names` = the names of the member's planned Peers, by node.
    pub(super) fn add_anchors(
        &mut self,
        source: &str,
        mesh_member: &MeshMember<'a>,
        registry: &NodeRegistry<'a>,
        parts: &[IpNet],
        peer_names: &BTreeMap<&str, String>,
    ) {
        let parts: Vec<IpNet> = parts
            .iter()
            .copied()
            .filter(|part| !self.check_routing_loop(source, *part))
            .collect();
        if parts.is_empty() {
            return;
        }
        let usable: Vec<&RegisteredNode<'_>> = registry
            .registered
            .iter()
            .filter(|node| node.observed.ready && !node.observed.deleting)
            .filter(|node| {
                let peer = peer_names.get(node.node).and_then(|name| self.peers.get(name));
                peer.is_some_and(|peer| peer.spec.endpoint.is_some())
            })
            .collect();
        // Nodes that will stay come first, then nodes that are about to leave, then silent ones. Silent ones are eligible, too, if there
        // are no others: their WireGuard tunnels work without kg.
        let rank = |node: &RegisteredNode<'_>| (node.observed.is_silent(), node.observed.leaving);
        let best = usable.iter().map(|node| rank(node)).min();
        let eligible = usable.iter().filter(|node| Some(rank(node)) == best);
        let eligible: BTreeSet<&str> = eligible.map(|node| node.node).collect();
        if eligible.is_empty() {
            if !registry.registered.is_empty() {
                let message =
                    "anchored networks are unreachable: each node is being deleted, has no endpoint or is not Ready";
                self.facts.insert(Fact::NoAnchor {
                    cluster: source.to_owned(),
                    message: message.into(),
                });
            }
            return;
        }
        let mut current: BTreeMap<IpNet, String> = BTreeMap::new();
        for (node, peer) in peer_names {
            if let Some(ObservedPeer { spec: Ok(spec), .. }) = self.existing.get(&**peer) {
                current.extend(spec.allowed_ips.iter().map(|net| (*net, (*node).to_owned())));
            }
        }
        for (part, node) in anchor::assign(&parts, mesh_member.cluster.anchors, &eligible, &current) {
            let Some(peer) = peer_names.get(node.as_str()).and_then(|name| self.peers.get_mut(name)) else {
                continue;
            };
            match self.taken_prefixes.get(&part) {
                None => {
                    peer.spec.allowed_ips.insert(part);
                    self.taken_prefixes.insert(part, format!("Node {node}"));
                }
                Some(owner) => {
                    let message = format!("anchored network {part} is kept by {owner} in cluster {:?}", self.name);
                    self.facts.insert(Fact::AddressShared {
                        cluster: source.to_owned(),
                        message,
                    });
                }
            }
        }
    }

    /// Returns whether kg would route outer packets into the tunnel, and reports it as a fact: kg serves the target, and `part` contains
    /// the endpoint of one of the member's Peers. wg-agent marks its outer packets and never routes them into the tunnel.
    fn check_routing_loop(&mut self, source: &str, part: IpNet) -> bool {
        let peers = self.peers.values().filter(|peer| self.runs_kg && peer.source == source);
        let ips = peers.flat_map(|peer| endpoint::peer_endpoint_ips(&peer.spec));
        let Some(endpoint) = ips.filter(|ip| part.contains(ip)).min() else {
            return false;
        };
        self.facts.insert(Fact::NoAnchor {
            cluster: source.to_owned(),
            message: format!(
                "anchored network {part} is left out in cluster {:?}, which kg serves: it contains {endpoint}, the endpoint of a \
                 Node, and kg would route that Node's outer packets into the tunnel. Remove node addresses from anchoredNetworks",
                self.name
            ),
        });
        true
    }
}
