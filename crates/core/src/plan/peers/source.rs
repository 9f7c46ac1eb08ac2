//! Adds the Peers of a source to the plan of one target, and plans Peers of single nodes.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
};

use ipnet::IpNet;

use super::{AddedSource, OwnNames, PeerPlanner};
use crate::{
    key::PublicKey,
    mesh::Addressing,
    observe::{Member, PeerRole},
    plan::{
        Fact, PlannedPeer, Skipped, anchor,
        discovered::Discovered,
        nodes::{NodeRegistry, RegisteredNode},
        target::MeshMember,
    },
};

/// The skipped nodes by source, the facts, and by source the nodes whose Peers do not contain their InternalIP.
type Reports = (
    BTreeMap<String, Vec<Skipped>>,
    BTreeSet<Fact>,
    BTreeMap<String, BTreeSet<String>>,
);

/// The Peers of some registered nodes of one source, without anchored networks.
pub(in crate::plan) struct RegisteredPeers<'a, 'p> {
    /// By node: the Peer's name, and the Peer.
    pub(in crate::plan) peers: BTreeMap<&'a str, (String, Arc<PlannedPeer>)>,
    /// What is reported about them.
    pub(in crate::plan) reports: Reports,
    /// The result of [`runs_kg`] for the target.
    pub(in crate::plan) runs_kg: bool,
    discovered: (&'p Discovered, Discovered),
}

impl RegisteredPeers<'_, '_> {
    /// The endpoints that nodes of the target, or of other members, report, by the key of the node that has them.
    pub(in crate::plan) fn discovered(&self) -> impl Iterator<Item = (&PublicKey, &Vec<SocketAddr>)> {
        self.discovered.0.iter().chain(&self.discovered.1)
    }
}

/// The parts into which the anchored networks of a source are split; none if it is masqueraded.
fn anchored_parts(mesh_member: &MeshMember<'_>, registry: &NodeRegistry<'_>) -> Vec<IpNet> {
    if mesh_member.cluster.effective_addressing() == Addressing::Masqueraded {
        return Vec::new();
    }
    anchor::split_anchored_networks(&mesh_member.cluster, registry)
}

impl<'a, 'p> PeerPlanner<'a, 'p> {
    /// Adds the Peers of the registered and held nodes of a source, with its anchored networks.
    pub(in crate::plan) fn add_source(&mut self, source: &str, mesh_member: &MeshMember<'a>) {
        let Some(registry) = self.inputs.registries.get(source) else {
            return;
        };
        let first = self.peers.len();
        let added = self.add_registered(source, mesh_member, registry, self.keepalive(mesh_member));
        let mut parts = anchored_parts(mesh_member, registry);
        parts.retain(|part| !self.own_pods.overlaps(*part));
        for node in registry.held.keys() {
            let Some(spec) = self.hold_node(source, mesh_member, node) else {
                continue;
            };
            let observed = mesh_member.last_observed().and_then(|member| member.nodes.get(node));
            if observed.is_some_and(|observed| observed.ready && !observed.deleting) {
                // The node is Ready and will probably publish again soon: it keeps its anchored networks.
                parts.retain(|part| !spec.allowed_ips.contains(part));
            } else {
                let lost: Vec<IpNet> = parts
                    .iter()
                    .copied()
                    .filter(|part| spec.allowed_ips.remove(part))
                    .collect();
                lost.iter().for_each(|part| drop(self.taken_prefixes.remove(part)));
            }
        }
        self.add_anchors(source, mesh_member, registry, &parts, &added);
        // Sorts the new Peers by node. Then they are nearly in the order of their names, and `finish` has little to sort.
        let mut unsorted: Vec<_> = self.peers.drain(first..).map(Some).collect();
        let positions = registry.sorted_by_name().iter().filter_map(|index| added[*index]);
        self.peers
            .extend(positions.filter_map(|position| unsorted[position - first].take()));
        self.peers.extend(unsorted.into_iter().flatten());
    }

    /// Plans only the Peers of the registered nodes of a source, as [`Self::add_source`] does.
    pub(in crate::plan) fn plan_registered(mut self, source: &str, keepalive: u16) -> RegisteredPeers<'a, 'p> {
        let (registry, mesh_member) = (&self.inputs.registries[source], &self.inputs.mesh_members[source]);
        let added = self.add_registered(source, mesh_member, registry, keepalive);
        let nodes = registry.registered.iter().zip(added);
        let peers = nodes.filter_map(|(node, position)| {
            let added = &self.peers[position?];
            Some((node.node, (added.name.clone(), Arc::clone(&added.peer))))
        });
        RegisteredPeers {
            peers: peers.collect(),
            reports: (self.skipped, self.facts, self.nodes_without_internal_ip),
            runs_kg: self.runs_kg,
            discovered: (&self.target.discovered, self.discovered_by_others),
        }
    }

    /// Adds the Peers of the registered nodes of a source. `keepalive` is the keepalive of those Peers that have an endpoint.
    /// Returns, for each registered node, the position of its Peer in `peers`.
    fn add_registered(
        &mut self,
        source: &str,
        mesh_member: &MeshMember<'a>,
        registry: &NodeRegistry<'a>,
        keepalive: u16,
    ) -> Vec<Option<usize>> {
        let added_source = AddedSource {
            name: source,
            keepalive,
            own_names: OwnNames::Nodes(registry),
        };
        let is_missing_exports = mesh_member
            .last_observed()
            .is_some_and(|member| has_unlisted_exports(mesh_member, member));
        let mut added: Vec<Option<usize>> = Vec::with_capacity(registry.registered.len());
        self.peers.reserve(registry.registered.len());
        self.endpoints.clear();
        for node in &registry.registered {
            let mut prefixes = Cow::Borrowed(&node.prefixes);
            if is_missing_exports {
                let existing = self.existing_host_routes(source, mesh_member, registry, node);
                prefixes.to_mut().extend(existing);
            }
            let is_kept = |prefix: &IpNet| *prefix == node.wireguard || !self.own_pods.overlaps(*prefix);
            if !self.own_pods.is_empty() && !prefixes.iter().all(is_kept) {
                prefixes.to_mut().retain(is_kept);
            }
            let candidates = self.candidates(source, mesh_member, node);
            added.push(self.add_node(&added_source, node, prefixes, candidates, PeerRole::Node));
        }
        added
    }

    /// Host routes that the node's existing Peer contains and no registered node has. They are kept while namespaces with exported
    /// pods are not listed, because they may belong to such pods.
    fn existing_host_routes(
        &self,
        source: &str,
        mesh_member: &MeshMember<'a>,
        registry: &NodeRegistry<'a>,
        node: &RegisteredNode<'a>,
    ) -> BTreeSet<IpNet> {
        let existing = self.existing_spec(source, &node.key).map(|spec| &spec.allowed_ips);
        let hosts = existing.into_iter().flatten().copied();
        hosts
            .filter(|net| net.prefix_len() == net.max_prefix_len() && mesh_member.cluster.allows(*net))
            .filter(|net| !registry.registered.iter().any(|other| other.prefixes.contains(net)))
            .collect()
    }
}

/// Whether an export of a member names a namespace of which the pods are not known.
fn has_unlisted_exports(mesh_member: &MeshMember<'_>, member: &Member) -> bool {
    let mut exports = mesh_member.cluster.exports.iter();
    exports.any(|export| member.unlisted.pods.contains_key(&export.namespace))
}
