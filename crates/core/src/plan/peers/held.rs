//! Peers that stand a while longer: those of held nodes (rule 9).

use std::net::IpAddr;

use ipnet::IpNet;

use super::Writer;
use crate::{
    observe::Endpoint,
    plan::{PlannedPeer, nodes, target::Party},
};

impl<'a> Writer<'a, '_> {
    /// A held node keeps the Peer it has, as far as nobody else owns its key and prefixes now.
    pub(super) fn hold(&mut self, source: &str, party: &Party<'a>, node: &str) -> Option<&mut PlannedPeer> {
        let names = [false, true].map(|taken| self.assembly.naming.peer(self.assembly.mesh, source, node, taken));
        let standing = names.iter().find_map(|name| {
            let peer = self.standing.get(&**name).filter(|peer| self.ours_of(source, peer))?;
            Some((name.clone(), peer.spec.as_ref().ok()?.clone()))
        });
        let (name, mut spec) = standing?;
        if self.keys.contains_key(&spec.public_key) || self.peers.contains_key(&name) {
            return None;
        }
        spec.allowed_ips
            .retain(|net| party.cluster.allows(*net) && !self.prefixes.contains_key(net));
        let left_out = |address: &IpAddr| {
            let endpoint = spec.endpoint.as_ref();
            let same = endpoint.is_some_and(|at| matches!(at, Endpoint::Ip(at) if at.ip() == *address));
            same && nodes::is_routable(&party.cluster, IpNet::from(*address))
        };
        let view = party.member().and_then(|member| member.nodes.get(node));
        if self.runs_kg && view.is_some_and(|view| view.internal_ips.iter().any(left_out)) {
            self.unserved
                .entry(source.to_owned())
                .or_default()
                .insert(node.to_owned());
        }
        self.keys.insert(spec.public_key, format!("Peer {name}"));
        self.prefixes
            .extend(spec.allowed_ips.iter().map(|net| (*net, format!("Peer {name}"))));
        let peer = PlannedPeer {
            source: source.to_owned(),
            node: node.to_owned(),
            spec,
        };
        Some(self.peers.entry(name).or_insert(peer))
    }
}
