//! Peers that stand a while longer: those of held nodes, and those of a sandbox that is not seen (rules 7, 9).

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use super::Writer;
use crate::{
    observe::{Endpoint, PeerSpec},
    plan::{PlannedPeer, link::Terms, nodes, target::Party},
};

impl<'a> Writer<'a, '_> {
    /// A held node keeps the Peer it has, as far as nobody else owns its key and prefixes now.
    pub(super) fn hold(
        &mut self,
        source: &str,
        party: &Party<'a>,
        node: &str,
        terms: &Terms<'_>,
    ) -> Option<&mut PlannedPeer> {
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
        match terms {
            Terms::Meshed => {
                spec.requires_policy = None;
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
            }
            Terms::Sandbox { requires, networks } => {
                // What it was before it became a sandbox is not held.
                spec.requires_policy.as_ref()?;
                confine(&mut spec, requires, networks);
            }
            Terms::Grantor { hosts, .. } => {
                let view = self
                    .assembly
                    .rolls
                    .get(source)
                    .and_then(|_| party.member()?.nodes.get(node));
                let endpoints = hosts.get(node)?;
                let wireguard = view
                    .and_then(|view| view.wireguard_ip.value())
                    .map(|claim| claim.addr());
                spec.allowed_ips.retain(|net| {
                    let host = net.prefix_len() == net.max_prefix_len();
                    host && (endpoints.contains(&net.addr()) || wireguard == Some(net.addr()))
                });
                spec.requires_policy = None;
            }
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

    /// Peers of a sandbox that is not seen now: what its policy says may change meanwhile, and they name its revision.
    pub(super) fn restate(&mut self, source: &str, requires: &str, networks: &BTreeSet<IpNet>) {
        let standing: Vec<(&str, PeerSpec)> = self
            .standing
            .iter()
            .filter(|(name, peer)| !self.peers.contains_key(**name) && self.ours_of(source, peer))
            .filter_map(|(name, peer)| Some((*name, peer.spec.as_ref().ok()?.clone())))
            .collect();
        for (name, mut spec) in standing {
            let own = format!("Peer {name}");
            if self.keys.get(&spec.public_key).is_some_and(|owner| *owner != own) {
                continue;
            }
            confine(&mut spec, requires, networks);
            spec.allowed_ips
                .retain(|net| self.prefixes.get(net).is_none_or(|owner| *owner == own));
            self.keys.insert(spec.public_key, own.clone());
            self.prefixes
                .extend(spec.allowed_ips.iter().map(|net| (*net, own.clone())));
            self.peers.insert(
                name.to_owned(),
                PlannedPeer {
                    source: source.to_owned(),
                    node: name.to_owned(),
                    spec,
                },
            );
        }
    }
}

/// Makes a standing Peer one of a sandbox.
fn confine(spec: &mut PeerSpec, requires: &str, networks: &BTreeSet<IpNet>) {
    spec.allowed_ips.retain(|host| {
        host.prefix_len() == host.max_prefix_len() && networks.iter().any(|network| network.contains(host))
    });
    spec.endpoint = None;
    spec.candidates = Vec::new();
    spec.persistent_keepalive = 0;
    spec.requires_policy = Some(requires.to_owned());
}
