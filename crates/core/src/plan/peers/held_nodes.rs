//! Keeps the existing Peers of held nodes (design rule 9).

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;

use super::{AddedPeer, PeerPlanner};
use crate::{
    observe::{Endpoint, PeerSpec},
    plan::{PlannedPeer, nodes, target::MeshMember},
};

impl<'a> PeerPlanner<'a, '_> {
    /// Plans the existing Peer of a held node again, without prefixes that are taken. The Peer of another member's node also loses prefixes
    /// outside that member's allowedNetworks, and those that overlap [`super::own_pods::OwnPods`] of the target. `None` = the node has no
    /// valid Peer, or the Peer's key or name is taken.
    pub(super) fn hold_node(
        &mut self,
        source: &str,
        mesh_member: &MeshMember<'a>,
        node: &str,
    ) -> Option<&mut PeerSpec> {
        // The existing Peer may have the readable name, or the name with a hash.
        let names = [false, true].map(|is_taken| self.inputs.naming.peer(self.inputs.mesh, source, node, is_taken));
        let existing = names.iter().find_map(|name| {
            let peer = self.existing.get(name).filter(|peer| {
                peer.owner.source_cluster.as_deref() == Some(source) && self.inputs.is_ours(&peer.owner)
            })?;
            Some((name.clone(), peer, peer.spec.as_ref().ok()?.clone()))
        });
        let (name, existing, mut spec) = existing?;
        if self.taken_keys.contains_key(&spec.public_key) || self.taken_names.contains(&name) {
            return None;
        }
        spec.allowed_ips.retain(|net| {
            let is_allowed = mesh_member.cluster.allows(*net) && !self.own_pods.overlaps(*net);
            (is_allowed || source == self.name) && !self.taken_prefixes.contains_key(net)
        });
        // kg would route the outer packets of a Peer into the tunnel if the allowed IPs contained the endpoint. So where an InternalIP is the
        // endpoint, the planner has left it out of the allowed IPs. The fact `HostNetworkNotServed` reports such nodes.
        let is_omitted = |address: &IpAddr| {
            let endpoint = spec.endpoint.as_ref();
            let is_endpoint = endpoint.is_some_and(|at| matches!(at, Endpoint::Ip(at) if at.ip() == *address));
            is_endpoint && nodes::is_claimable(&mesh_member.cluster, IpNet::from(*address))
        };
        let observed = mesh_member.last_observed().and_then(|member| member.nodes.get(node));
        if self.runs_kg && observed.is_some_and(|observed| observed.internal_ips.iter().any(is_omitted)) {
            self.nodes_without_internal_ip
                .entry(source.to_owned())
                .or_default()
                .insert(node.to_owned());
        }
        let peer = PlannedPeer {
            source: source.to_owned(),
            node: node.to_owned(),
            spec: Arc::new(spec),
        };
        self.take_claims(&name, &peer);
        self.peers.push(AddedPeer {
            name,
            peer: Arc::new(peer),
            existing: Some(existing),
        });
        self.peers.last_mut().map(|added| added.peer.spec_mut())
    }
}
