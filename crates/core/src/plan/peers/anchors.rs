//! Adds the anchored networks of a member to its Peers in one target (design rule 6).

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::{Holder, PeerPlanner};
use crate::plan::{
    Fact, anchor, endpoint,
    nodes::{NodeRegistry, RegisteredNode},
    target::MeshMember,
};

impl<'a> PeerPlanner<'a, '_> {
    /// Adds each of `parts` to the Peer of one node. [`anchor::split_anchored_networks`] splits the member's anchored networks into parts.
    /// `parts` has those that no held Peer keeps and that overlap no pod network of the target. A part that cannot be added is reported,
    /// unless no node is registered. `added` = for each registered node, the position of its Peer in `peers`.
    pub(super) fn add_anchors(
        &mut self,
        source: &str,
        mesh_member: &MeshMember<'a>,
        registry: &NodeRegistry<'a>,
        parts: &[IpNet],
        added: &[Option<usize>],
    ) {
        let parts: Vec<IpNet> = parts
            .iter()
            .copied()
            .filter(|part| !self.check_routing_loop(source, *part))
            .collect();
        if parts.is_empty() {
            return;
        }
        let with_peers = || {
            let all = registry.registered.iter().zip(added);
            all.filter_map(|(node, position)| Some((node, (*position)?)))
        };
        let usable: Vec<&RegisteredNode<'_>> = with_peers()
            .filter(|(node, position)| {
                node.observed.ready && !node.observed.deleting && self.peers[*position].peer.spec.endpoint.is_some()
            })
            .map(|(node, _)| node)
            .collect();
        let rank = |node: &&RegisteredNode<'_>| anchor::rank(node.observed);
        let best = usable.iter().map(rank).min();
        let eligible = usable.iter().filter(|node| Some(rank(node)) == best);
        let eligible: BTreeSet<&str> = eligible.map(|node| node.node).collect();
        if eligible.is_empty() {
            self.unsettled.insert(source.to_owned());
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
        // By part: the node whose existing Peer has the part; of several such nodes, the last one by name.
        let mut current: BTreeMap<IpNet, &str> = BTreeMap::new();
        for (node, position) in with_peers() {
            let existing = self.peers[position].existing;
            let Some(Ok(spec)) = existing.map(|existing| &existing.spec) else {
                continue;
            };
            for part in parts.iter().filter(|part| spec.allowed_ips.contains(part)) {
                let holder = current.entry(*part).or_insert(node.node);
                *holder = node.node.max(*holder);
            }
        }
        let is_settled = |part: &IpNet| current.get(part).is_some_and(|node| eligible.contains(node));
        if !parts.iter().all(is_settled) {
            self.unsettled.insert(source.to_owned());
        }
        for (part, node) in anchor::assign(&parts, mesh_member.cluster.anchors, &eligible, &current) {
            let Some((_, position)) = with_peers().find(|(with_peer, _)| with_peer.node == node) else {
                continue;
            };
            let of_this_source = with_peers().map(|(_, position)| &self.peers[position]);
            let mut holding = of_this_source.filter(|added| added.peer.spec.allowed_ips.contains(&part));
            let holder = holding.next().map(|added| Holder::Peer(added.name.as_str().into()));
            let holder = self.taken_prefixes.get(&part).cloned().or(holder);
            match holder {
                None => {
                    self.peers[position].peer.spec_mut().allowed_ips.insert(part);
                    if self.has_shared_claims {
                        self.taken_prefixes.insert(part, Holder::Node(node.into()));
                    }
                }
                Some(owner) => {
                    self.unsettled.insert(source.to_owned());
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
        let peers = self.peers.iter().map(|added| &added.peer);
        let peers = peers.filter(|peer| self.runs_kg && peer.source == source);
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
