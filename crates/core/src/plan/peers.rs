//! Plans the Peers of one target: endpoints, names, anchored networks, keepalives. Each key and each prefix has one owner
//! (design rules 2, 6, 8).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use ipnet::IpNet;

use super::{
    Fact, PlannedPeer, Reason, Skipped, anchor,
    discovered::{self, Discovered},
    endpoint,
    nodes::{NodeRegistry, RegisteredNode},
    target::{MeshInputs, MeshMember, TargetOutcome},
};
use crate::{
    key::PublicKey,
    mesh::{Addressing, ClusterIdentity, Locations, overlap},
    observe::{Claim, Endpoint, Gateway, Member, Node, ObservedPeer, PeerRole, PeerSpec, Server},
    ownership::{self, Ownership},
};

mod anchors;
mod held_nodes;
mod keepalive;
mod names;
mod own_nodes;
pub(super) mod own_pods;

use keepalive::{NAT_KEEPALIVE, nat_keepalive};
use own_pods::OwnPods;

/// Collects the Peers of one target, and tracks which keys and prefixes are taken.
pub(super) struct PeerPlanner<'a, 'p> {
    pub(super) inputs: &'p MeshInputs<'a>,
    /// The entry name of the target.
    pub(super) name: &'p str,
    pub(super) target: &'p MeshMember<'a>,
    /// All existing Peers in the target, whoever owns them.
    existing: BTreeMap<&'p str, &'p ObservedPeer>,
    /// Names of the existing Peers with each key.
    by_key: BTreeMap<PublicKey, Vec<&'p str>>,
    /// The taken keys, each with its owner as text for messages.
    taken_keys: BTreeMap<PublicKey, String>,
    /// Keys of existing Peers that other meshes keep, with the source cluster of each.
    kept_by_other_meshes: BTreeMap<PublicKey, &'a ClusterIdentity>,
    /// Names of this hub's existing Peers that lost their mesh label and that this mesh adopts, by key.
    readopted: BTreeMap<PublicKey, String>,
    /// The taken prefixes, each with its owner as text for messages.
    taken_prefixes: BTreeMap<IpNet, String>,
    /// For each source and first endpoint of a Peer: the node that was planned with this endpoint before all others.
    endpoints: BTreeMap<(String, SocketAddr), String>,
    own_pods: OwnPods,
    peers: BTreeMap<String, PlannedPeer>,
    skipped: BTreeMap<String, Vec<Skipped>>,
    facts: BTreeSet<Fact>,
    /// Nodes whose InternalIP is left out because it is also their endpoint, by source.
    nodes_without_internal_ip: BTreeMap<String, BTreeSet<String>>,
    /// The result of [`runs_kg`] for the target.
    runs_kg: bool,
    /// The endpoints at which members other than the target see nodes.
    discovered_by_others: Discovered,
}

impl MeshInputs<'_> {
    /// The result of [`runs_kg`] for a member; false if it was never observed.
    pub(super) fn runs_kg(&self, name: &str, mesh_member: &MeshMember<'_>) -> bool {
        let registry = self.registries.get(name);
        let is_held = |node: &str| registry.is_some_and(|registry| registry.held.contains_key(node));
        mesh_member
            .last_observed()
            .is_some_and(|member| runs_kg(member, is_held))
    }
}

impl<'a, 'p> PeerPlanner<'a, 'p> {
    pub(super) fn new(inputs: &'p MeshInputs<'a>, name: &'p str, target: &'p MeshMember<'a>) -> Self {
        let member = target.last_observed();
        let existing: BTreeMap<&str, &ObservedPeer> = member
            .and_then(|m| m.peers.as_ref())
            .into_iter()
            .flatten()
            .map(|(name, peer)| (&**name, peer))
            .collect();
        let mut taken_keys = BTreeMap::new();
        let mut kept_by_other_meshes = BTreeMap::new();
        let mut taken_prefixes = BTreeMap::new();
        let source_networks = inputs.source_networks(name, target);
        let mut by_key: BTreeMap<PublicKey, Vec<&str>> = BTreeMap::new();
        for (peer, observed) in &existing {
            let Ok(spec) = &observed.spec else { continue };
            by_key.entry(spec.public_key).or_default().push(peer);
            // A Peer that stays in the target regardless of the plan keeps its key and prefixes. If its key were free, a member that
            // copies the key could replace the Peer. These Peers stay: a foreign one (such as that of a laptop), one without a mesh
            // label, one whose source was not observed, one of another mesh that is paused, and most orphans.
            let kept = match ownership::of(&observed.owner, &inputs.seen.hub, inputs.claimants) {
                Ownership::Foreign | Ownership::Unlabelled => true,
                Ownership::Mesh(mesh) if mesh == inputs.mesh => inputs.is_source_unobserved(name, target, observed),
                Ownership::Mesh(mesh) => inputs.kept_source(mesh, observed).is_some_and(|source| {
                    kept_by_other_meshes.extend(source.map(|source| (spec.public_key, source)));
                    true
                }),
                // The diff deletes an orphan that is superseded: one with a network of a source of this mesh, or one that describes a node
                // of the target itself, if this mesh connects the target's locations.
                Ownership::Orphan => {
                    let superseded = |net: &IpNet| source_networks.iter().any(|other| overlap(*other, *net));
                    let is_own_node = matches!(spec.role, PeerRole::OwnNode(_));
                    let is_own_superseded = is_own_node && target.cluster.locations == Locations::Connected;
                    !is_own_superseded && !spec.allowed_ips.iter().any(superseded)
                }
            };
            if kept {
                taken_keys.insert(spec.public_key, format!("Peer {peer}"));
                taken_prefixes.extend(spec.allowed_ips.iter().map(|net| (*net, format!("Peer {peer}"))));
            }
        }
        let runs_kg = inputs.runs_kg(name, target);
        // If a Peer has the key of a node of the target itself, kg drops that node from its mesh permanently, so these keys
        // count as taken. With wg-agent only the node with that key refuses such a Peer, so a copied key harms no other node.
        for (node, observed) in member.filter(|_| runs_kg).into_iter().flat_map(|m| &m.nodes) {
            if let Some(key) = observed.public_key.value() {
                taken_keys.entry(*key).or_insert_with(|| format!("Node {node}"));
            }
        }
        Self {
            inputs,
            name,
            target,
            existing,
            by_key,
            taken_keys,
            kept_by_other_meshes,
            readopted: BTreeMap::new(),
            taken_prefixes,
            endpoints: BTreeMap::new(),
            own_pods: OwnPods::of(target),
            peers: BTreeMap::new(),
            skipped: BTreeMap::new(),
            facts: BTreeSet::new(),
            nodes_without_internal_ip: BTreeMap::new(),
            runs_kg,
            discovered_by_others: discovered::by_others(inputs.mesh_members, name),
        }
    }

    fn is_our_peer_of(&self, source: &str, peer: &ObservedPeer) -> bool {
        peer.owner.source_cluster.as_deref() == Some(source) && self.inputs.is_ours(&peer.owner)
    }

    pub(super) fn skip(&mut self, source: &str, node: &str, reason: Reason, message: &str) {
        let message = format!("toward cluster {:?}: {message}", self.name);
        self.skipped.entry(source.to_owned()).or_default().push(Skipped {
            node: node.to_owned(),
            reason,
            message,
            target: Some(self.name.to_owned()),
        });
    }

    /// The names that the naming rule gives to the Peers of a source's registered nodes.
    fn own_names(&self, source: &str, registry: &NodeRegistry<'a>) -> BTreeSet<String> {
        let nodes = registry.registered.iter();
        nodes
            .map(|node| self.inputs.naming.peer(self.inputs.mesh, source, node.node, false))
            .collect()
    }

    /// The networks of the target in which endpoints of a source's nodes must not lie. The target's own nodes may have endpoints in them.
    fn forbidden_networks(&self, source: &str) -> &'p [IpNet] {
        if source == self.name {
            &[]
        } else {
            &self.target.accepted
        }
    }

    fn set_keepalive(&mut self, peer: &str, keepalive: u16) {
        if let Some(peer) = self.peers.get_mut(peer) {
            let has_endpoint = peer.spec.endpoint.is_some();
            peer.spec.persistent_keepalive = if has_endpoint {
                keepalive
            } else {
                nat_keepalive(keepalive)
            };
        }
    }

    pub(super) fn add_source(&mut self, source: &str, mesh_member: &MeshMember<'a>) {
        let Some(registry) = self.inputs.registries.get(source) else {
            return;
        };
        let own_names = self.own_names(source, registry);
        let keepalive = self.keepalive(mesh_member);
        let is_missing_exports = mesh_member
            .last_observed()
            .is_some_and(|member| has_unlisted_exports(mesh_member, member));
        let mut added: BTreeMap<&str, String> = BTreeMap::new();
        for node in &registry.registered {
            let mut prefixes = node.prefixes.clone();
            if is_missing_exports {
                prefixes.extend(self.existing_host_routes(source, mesh_member, registry, node));
            }
            prefixes.retain(|prefix| *prefix == node.wireguard || !self.own_pods.overlaps(*prefix));
            let candidates = self.candidates(source, mesh_member, node);
            if let Some(peer) = self.add_node(source, node, prefixes, candidates, &own_names) {
                self.set_keepalive(&peer, keepalive);
                added.insert(node.node, peer);
            }
        }
        let is_routed = mesh_member.cluster.effective_addressing() == Addressing::Routed;
        let mut parts = if is_routed {
            anchor::split_anchored_networks(&mesh_member.cluster, registry)
        } else {
            Vec::new()
        };
        parts.retain(|part| !self.own_pods.overlaps(*part));
        for node in registry.held.keys() {
            let Some(peer) = self.hold_node(source, mesh_member, node) else {
                continue;
            };
            let observed = mesh_member.last_observed().and_then(|member| member.nodes.get(*node));
            if observed.is_some_and(|observed| observed.ready && !observed.deleting) {
                // The node is Ready and will probably publish again soon: it keeps its anchored networks.
                parts.retain(|part| !peer.spec.allowed_ips.contains(part));
            } else {
                let lost: Vec<IpNet> = parts
                    .iter()
                    .copied()
                    .filter(|part| peer.spec.allowed_ips.remove(part))
                    .collect();
                lost.iter().for_each(|part| drop(self.taken_prefixes.remove(part)));
            }
        }
        self.add_anchors(source, mesh_member, registry, &parts, &added);
    }

    /// The endpoint candidates of a node for this target, best first.
    fn candidates(
        &mut self,
        source: &str,
        mesh_member: &MeshMember<'a>,
        node: &RegisteredNode<'a>,
    ) -> Result<endpoint::Candidates, (Reason, String)> {
        let context = endpoint::EndpointContext {
            source: &mesh_member.cluster,
            target_networks: self.forbidden_networks(source),
            target_families: self.target.families,
            discovered: &self.target.discovered,
            // kg uses only the first endpoint, and restarts all its sessions at each change of a Peer.
            discovered_by_others: Some(&self.discovered_by_others).filter(|_| !self.runs_kg),
            resolved: &self.inputs.seen.resolved,
        };
        let mut candidates = endpoint::choose(node.observed, &context)?;
        let addresses = &mut candidates.addresses;
        if !candidates.unresolved.is_empty()
            && let Some(existing) = self.existing_spec(source, &node.key)
            && let Some(Endpoint::Ip(endpoint)) = existing.endpoint
            && context.allows(endpoint.ip())
        {
            // A DNS failure must not change the endpoint: the existing one stays the first candidate.
            addresses.retain(|address| *address != endpoint);
            addresses.insert(0, endpoint);
        }
        let unresolved = std::mem::take(&mut candidates.unresolved);
        self.facts
            .extend(unresolved.into_iter().map(|host| Fact::EndpointUnresolved {
                cluster: source.to_owned(),
                node: node.node.to_owned(),
                host,
            }));
        Ok(candidates)
    }

    fn add_node(
        &mut self,
        source: &str,
        node: &RegisteredNode<'a>,
        prefixes: BTreeSet<IpNet>,
        candidates: Result<endpoint::Candidates, (Reason, String)>,
        own_names: &BTreeSet<String>,
    ) -> Option<String> {
        self.readopt(source, node);
        if let Some(owner) = self.taken_keys.get(&node.key) {
            let mesh_member = self.inputs.mesh_members.get(source);
            let source_of_kept = self.kept_by_other_meshes.get(&node.key);
            if source_of_kept.is_some_and(|kept| {
                mesh_member.is_some_and(|mesh_member| kept.same_cluster(&mesh_member.cluster.identity))
            }) {
                // The existing Peer describes the same node, and another mesh keeps it.
                return None;
            }
            let message = format!("key {} belongs to {owner} there", node.key);
            self.skip(source, node.node, Reason::PublicKeyDuplicate, &message);
            return None;
        }
        let addresses = match candidates {
            Ok(candidates) => candidates.addresses,
            Err((reason, message)) => {
                self.skip(source, node.node, reason, &message);
                return None;
            }
        };
        let first = addresses.first().copied();
        self.report_shared_endpoint(source, node.node, first);
        let mut allowed_ips = BTreeSet::new();
        for prefix in &prefixes {
            // If the allowed IPs of a Peer contain its endpoint, kg routes the outer packets into the tunnel.
            if self.runs_kg && first.is_some_and(|endpoint| IpNet::from(endpoint.ip()) == *prefix) {
                self.nodes_without_internal_ip
                    .entry(source.to_owned())
                    .or_default()
                    .insert(node.node.to_owned());
                continue;
            }
            match self.taken_prefixes.get(prefix) {
                None => {
                    allowed_ips.insert(*prefix);
                }
                Some(owner) => {
                    let message = format!(
                        "{prefix} of Node {} is kept by {owner} in cluster {:?}",
                        node.node, self.name
                    );
                    self.facts.insert(Fact::AddressShared {
                        cluster: source.to_owned(),
                        message,
                    });
                }
            }
        }
        let spec = PeerSpec {
            public_key: node.key,
            allowed_ips,
            endpoint: first.map(Endpoint::Ip),
            candidates: if addresses.len() > 1 { addresses } else { Vec::new() },
            persistent_keepalive: 0,
            role: PeerRole::Node,
        };
        Some(self.add_named_peer(source, node.node, spec, own_names))
    }

    /// Reports two nodes of one member with the same first endpoint: at most one of them answers there. Nodes of different members may
    /// have the same private address.
    fn report_shared_endpoint(&mut self, source: &str, node: &str, endpoint: Option<SocketAddr>) {
        let Some(endpoint) = endpoint else { return };
        let owner = self
            .endpoints
            .entry((source.to_owned(), endpoint))
            .or_insert_with(|| node.to_owned());
        if owner != node {
            let message = format!(
                "Nodes {owner} and {node} both have the endpoint {endpoint}, where at most one of them answers"
            );
            self.facts.insert(Fact::AddressShared {
                cluster: source.to_owned(),
                message,
            });
        }
    }

    /// Adds the Peer of a gateway, unless its key is taken in this target. Addresses that are taken are left out.
    pub(super) fn add_gateway_peer(
        &mut self,
        source: &str,
        name: &str,
        gateway: &Gateway,
        mut allowed_ips: BTreeSet<IpNet>,
        endpoints: Vec<SocketAddr>,
        own_names: &BTreeSet<String>,
    ) {
        let key = gateway.public_key;
        if let Some(owner) = self.taken_keys.get(&key) {
            let message = format!("key {key} belongs to {owner} there");
            self.skip(source, &format!("gateway {name}"), Reason::PublicKeyDuplicate, &message);
            return;
        }
        allowed_ips.retain(|net| !self.taken_prefixes.contains_key(net));
        let spec = PeerSpec {
            public_key: key,
            allowed_ips,
            endpoint: endpoints.first().copied().map(Endpoint::Ip),
            candidates: if endpoints.len() > 1 { endpoints } else { Vec::new() },
            // The sandbox's node keeps the path open: the gateway may be behind a hostPort or another NAT, and knows no endpoint of the
            // node until the node sends.
            persistent_keepalive: NAT_KEEPALIVE.get(),
            role: PeerRole::Gateway,
        };
        self.add_named_peer(source, name, spec, own_names);
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

    /// The spec of this source's existing Peer with this key.
    fn existing_spec(&self, source: &str, key: &PublicKey) -> Option<&'p PeerSpec> {
        let names = self.by_key.get(key).into_iter().flatten();
        let ours = names
            .filter_map(|name| self.existing.get(name))
            .find(|peer| self.is_our_peer_of(source, peer))?;
        ours.spec.as_ref().ok()
    }

    pub(super) fn finish(self, outcome: &mut TargetOutcome) {
        outcome.plan.peers = self.peers;
        outcome.skipped = self.skipped;
        outcome.facts.extend(self.facts);
        let nodes_without_internal_ip = self.nodes_without_internal_ip.into_iter();
        outcome.facts.extend(
            nodes_without_internal_ip.map(|(cluster, nodes)| Fact::HostNetworkNotServed {
                cluster,
                target: self.name.to_owned(),
                nodes,
            }),
        );
    }
}

/// Whether an export of a member names a namespace of which the pods are not known.
fn has_unlisted_exports(mesh_member: &MeshMember<'_>, member: &Member) -> bool {
    let mut exports = mesh_member.cluster.exports.iter();
    exports.any(|export| member.unlisted.pods.contains_key(&export.namespace))
}

/// Whether kg configures routes from this member's Peers on some node. A Node without a key that is neither held nor served
/// by wg-agent in full mode is ignored: it may have just joined. If no other Node is left, the answer is `true`, the safe assumption.
fn runs_kg(member: &Member, is_held: impl Fn(&str) -> bool) -> bool {
    // kg removes a node's key annotation while it restarts, so held nodes count too.
    let has_kg = |(name, node): (&String, &Node)| {
        node.server != Server::Agent && (node.public_key != Claim::Absent || is_held(name))
    };
    member.nodes.iter().any(has_kg) || !member.nodes.values().any(|node| node.server == Server::Agent)
}
