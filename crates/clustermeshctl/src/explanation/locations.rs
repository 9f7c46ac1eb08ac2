//! Explains a connection inside one cluster. A connection between two locations uses a tunnel.

use clustermesh_core::{
    observe::PeerRole,
    plan::{PlannedPeer, TargetPlan},
};

use super::{Destination, Explainer, Explanation, Rule, Source};

impl Explainer<'_> {
    /// Explains a connection whose two ends are in the same cluster.
    pub(super) fn explain_inside(&self, from: &Source, to: &Destination) -> Explanation {
        let targets = self.plan.meshes.values().flat_map(|mesh| {
            let entries = mesh.identities.iter();
            let same = entries.filter(|(_, identity)| identity.same_cluster(&to.cluster));
            same.filter_map(|(name, _)| mesh.targets.get(name))
        });
        let own_nodes: Vec<OwnNode<'_>> = targets.flat_map(own_nodes).collect();
        let source = own_nodes.iter().find(|own| Some(&own.peer.node) == from.node.as_ref());
        let containing = own_nodes
            .iter()
            .filter_map(|own| Some((own.prefix_length(to)?, own.name, own)));
        let destination = containing
            .max_by_key(|(length, name, _)| (*length, *name))
            .map(|(.., own)| own);
        match (source, destination) {
            (Some(source), Some(destination)) if source.location != destination.location => Explanation::new(
                Rule::BetweenLocations,
                format!(
                    "Node {} is in location {:?}, and Peer {} of Node {} in location {:?} contains {}: packets use the tunnel between \
                     the two nodes, and no PeerPolicy limits them",
                    source.peer.node,
                    source.location,
                    destination.name,
                    destination.peer.node,
                    destination.location,
                    to.address
                ),
            ),
            _ => Explanation::new(
                Rule::SameCluster,
                "both ends are in the same cluster: packets between them use the cluster's own network",
            ),
        }
    }
}

/// The Peer that describes a node in the node's own cluster.
struct OwnNode<'p> {
    name: &'p str,
    peer: &'p PlannedPeer,
    location: &'p str,
}

impl OwnNode<'_> {
    /// The length of the longest allowed IP that contains the destination.
    fn prefix_length(&self, to: &Destination) -> Option<u8> {
        let allowed_ips = self.peer.spec.allowed_ips.iter();
        let containing = allowed_ips.filter(|net| net.contains(&to.address));
        containing.map(ipnet::IpNet::prefix_len).max()
    }
}

fn own_nodes(target: &TargetPlan) -> impl Iterator<Item = OwnNode<'_>> {
    target.peers.iter().filter_map(|(name, peer)| match &peer.spec.role {
        PeerRole::OwnNode(location) => Some(OwnNode { name, peer, location }),
        PeerRole::Node | PeerRole::Gateway => None,
    })
}
