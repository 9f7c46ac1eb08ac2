//! Plans the Peers of one target: endpoints, names, anchored networks, keepalives. Each key and each prefix has one owner
//! (design rules 2, 6, 8).

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap},
    net::SocketAddr,
    sync::{Arc, PoisonError},
};

use ipnet::IpNet;

use super::{
    Fact, PlannedPeer, Reason, Skipped,
    discovered::{self, Discovered},
    endpoint,
    nodes::{NodeRegistry, RegisteredNode},
    target::{KeptTarget, MeshInputs, MeshMember, TargetOutcome},
};
use crate::{
    key::PublicKey,
    observe::{Claim, Endpoint, Gateway, Member, Node, ObservedPeer, PeerRole, PeerSpec, Server},
};

mod anchors;
pub(super) mod existing;
mod held_nodes;
pub(super) mod keepalive;
mod names;
mod own_nodes;
pub(super) mod own_pods;
mod source;

use existing::{ExistingPeers, Holder};
use keepalive::{NAT_KEEPALIVE, nat_keepalive};
use own_pods::OwnPods;
pub(super) use source::RegisteredPeers;

/// Collects the Peers of one target, and tracks which keys and prefixes are taken.
pub(super) struct PeerPlanner<'a, 'p> {
    pub(super) inputs: &'p MeshInputs<'a>,
    /// The entry name of the target.
    pub(super) name: &'p str,
    pub(super) target: &'p MeshMember<'a>,
    existing: ExistingPeers<'a>,
    /// The taken keys, each with its holder. [`Self::has_shared_claims`] decides whether planned Peers are in it.
    taken_keys: HashMap<PublicKey, Holder>,
    /// The taken prefixes, each with its holder.
    taken_prefixes: HashMap<IpNet, Holder>,
    /// Names of planned Peers. Empty without [`Self::has_shared_claims`].
    taken_names: BTreeSet<String>,
    /// Whether two planned Peers may have the same key, prefix or name, so that the planner has to compare them. Registered nodes have
    /// different keys, and the prefixes of different clusters are disjoint (rule 10). So only these Peers can collide: those of
    /// gateways, of held nodes, of two entries that are the same cluster, and of the target's own nodes, if it connects its
    /// locations.
    has_shared_claims: bool,
    /// Names of this hub's existing Peers that lost their mesh label and that this mesh adopts, by key.
    readopted: HashMap<PublicKey, String>,
    /// The first endpoint of each Peer that was added for the current source, with its node. If several nodes have the same one,
    /// the node that was added first.
    endpoints: HashMap<SocketAddr, &'a str>,
    own_pods: OwnPods,
    /// The planned Peers, in no order.
    peers: Vec<AddedPeer<'a>>,
    skipped: BTreeMap<String, Vec<Skipped>>,
    facts: BTreeSet<Fact>,
    /// Nodes whose InternalIP is left out because it is also their endpoint, by source.
    nodes_without_internal_ip: BTreeMap<String, BTreeSet<String>>,
    /// The result of [`runs_kg`] for the target.
    runs_kg: bool,
    /// The sources whose anchors may still change ([`super::target::KeptTarget::unsettled`]).
    unsettled: BTreeSet<String>,
    /// The name of each planned Peer whose name is not the readable one (`readable` in [`Self::add_named_peer`]): it is the
    /// name of an existing Peer, or it contains a hash because the readable name is taken. [`ExistingPeers::complete`] adds the
    /// names of existing Peers that match no planned Peer. The result is [`super::target::KeptTarget::irregular`].
    irregular: BTreeSet<String>,
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
        Self::with_existing(inputs, name, target, None)
    }

    /// A planner that knows only these existing Peers of the target; `None` = all.
    pub(super) fn with_existing(
        inputs: &'p MeshInputs<'a>,
        name: &'p str,
        target: &'p MeshMember<'a>,
        only: Option<&BTreeSet<String>>,
    ) -> Self {
        let member = target.last_observed();
        let (existing, kept) = ExistingPeers::of(inputs, name, target, only);
        let mut taken_keys = HashMap::new();
        let mut taken_prefixes = HashMap::new();
        for (peer, spec) in kept {
            let holder = Holder::Peer(peer.into());
            taken_prefixes.extend(spec.allowed_ips.iter().map(|net| (*net, holder.clone())));
            taken_keys.insert(spec.public_key, holder);
        }
        let runs_kg = inputs.runs_kg(name, target);
        // If a Peer has the key of a node of the target itself, kg drops that node from its mesh permanently, so these keys
        // count as taken. With wg-agent only the node with that key refuses such a Peer, so a copied key harms no other node.
        for (node, observed) in member.filter(|_| runs_kg).into_iter().flat_map(|m| &m.nodes) {
            if let Some(key) = observed.public_key.value() {
                taken_keys.entry(*key).or_insert_with(|| Holder::Node(node.into()));
            }
        }
        Self {
            inputs,
            name,
            target,
            existing,
            taken_keys,
            taken_prefixes,
            taken_names: BTreeSet::new(),
            has_shared_claims: inputs.has_shared_claims(target),
            readopted: HashMap::new(),
            endpoints: HashMap::new(),
            own_pods: OwnPods::of(target),
            peers: Vec::new(),
            skipped: BTreeMap::new(),
            facts: BTreeSet::new(),
            nodes_without_internal_ip: BTreeMap::new(),
            runs_kg,
            unsettled: BTreeSet::new(),
            irregular: BTreeSet::new(),
            discovered_by_others: discovered::by_others(inputs.mesh_members, name),
        }
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

    /// The networks of the target in which endpoints of a source's nodes must not lie. Only the target's own nodes may have
    /// endpoints in them.
    fn forbidden_networks(&self, source: &str) -> &'p [IpNet] {
        if source == self.name {
            &[]
        } else {
            &self.target.accepted
        }
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
        added_source: &AddedSource<'_>,
        node: &RegisteredNode<'a>,
        mut prefixes: Cow<'_, BTreeSet<IpNet>>,
        candidates: Result<endpoint::Candidates, (Reason, String)>,
        role: PeerRole,
    ) -> Option<usize> {
        let source = added_source.name;
        self.readopt(source, node);
        if let Some(owner) = self.taken_keys.get(&node.key) {
            let mesh_member = self.inputs.mesh_members.get(source);
            let source_of_kept = self.existing.source_kept_by_other_mesh(&node.key);
            if source_of_kept.is_some_and(|kept| {
                mesh_member.is_some_and(|mesh_member| kept.same_cluster(&mesh_member.cluster.identity))
            }) {
                // The existing Peer describes the same node, and another mesh keeps it.
                return None;
            }
            let message = format!("key {} belongs to {owner} there{}", node.key, self.remedy(owner));
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
        let mut left_out = Vec::new();
        for prefix in &*prefixes {
            // If the allowed IPs of a Peer contain its endpoint, kg routes the outer packets into the tunnel.
            if self.runs_kg && first.is_some_and(|endpoint| IpNet::from(endpoint.ip()) == *prefix) {
                self.nodes_without_internal_ip
                    .entry(source.to_owned())
                    .or_default()
                    .insert(node.node.to_owned());
                left_out.push(*prefix);
            } else if let Some(owner) = self.taken_prefixes.get(prefix) {
                let message = format!(
                    "{prefix} of Node {} is kept by {owner} in cluster {:?}{}",
                    node.node,
                    self.name,
                    self.remedy(owner)
                );
                self.facts.insert(Fact::AddressShared {
                    cluster: source.to_owned(),
                    message,
                });
                left_out.push(*prefix);
            }
        }
        if !left_out.is_empty() {
            prefixes.to_mut().retain(|prefix| !left_out.contains(prefix));
        }
        let endpoint = first.map(Endpoint::Ip);
        let persistent_keepalive = if endpoint.is_some() {
            added_source.keepalive
        } else {
            nat_keepalive(added_source.keepalive)
        };
        let candidates = if addresses.len() > 1 { addresses } else { Vec::new() };
        // Most targets get the same Peer of a node.
        let mut shared = node.shared_peer.lock().unwrap_or_else(PoisonError::into_inner);
        let peer = match &*shared {
            Some(peer)
                if peer.spec.endpoint == endpoint
                    && peer.spec.candidates == candidates
                    && peer.spec.persistent_keepalive == persistent_keepalive
                    && peer.spec.role == role
                    && peer.spec.allowed_ips == *prefixes =>
            {
                Arc::clone(peer)
            }
            _ => {
                let peer = Arc::new(PlannedPeer {
                    source: source.to_owned(),
                    node: node.node.to_owned(),
                    spec: Arc::new(PeerSpec {
                        public_key: node.key,
                        allowed_ips: prefixes.into_owned(),
                        endpoint,
                        candidates,
                        persistent_keepalive,
                        role,
                    }),
                });
                *shared = Some(Arc::clone(&peer));
                peer
            }
        };
        drop(shared);
        Some(self.add_named_peer(Cow::Borrowed(&node.peer_name), peer, &added_source.own_names))
    }

    /// Reports two nodes of one member with the same first endpoint: at most one of them answers there. Nodes of different members may
    /// have the same private address.
    fn report_shared_endpoint(&mut self, source: &str, node: &'a str, endpoint: Option<SocketAddr>) {
        let Some(endpoint) = endpoint else { return };
        let owner = *self.endpoints.entry(endpoint).or_insert(node);
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
        own_names: &OwnNames<'_>,
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
        let readable = self.inputs.naming.peer(self.inputs.mesh, source, name, false);
        let peer = PlannedPeer {
            source: source.to_owned(),
            node: name.to_owned(),
            spec: Arc::new(spec),
        };
        self.add_named_peer(Cow::Owned(readable), Arc::new(peer), own_names);
    }

    /// The spec of this source's existing Peer with this key.
    fn existing_spec(&self, source: &str, key: &PublicKey) -> Option<&'p PeerSpec> {
        let ours = self.existing.with_key(key).find(|peer| peer.is_ours_of(source))?;
        ours.peer.spec.as_ref().ok()
    }

    /// Compares the claims of all Peers from now on.
    pub(super) fn with_shared_claims(mut self) -> Self {
        self.has_shared_claims = true;
        self
    }

    /// Ends the plan of the Peers. `false` = two of them have the same name, so the target must be planned [`Self::with_shared_claims`].
    pub(super) fn finish(self, outcome: &mut TargetOutcome) -> bool {
        let planned = self.peers.len();
        outcome.plan.peers = self.peers.into_iter().map(|added| (added.name, added.peer)).collect();
        if outcome.plan.peers.len() < planned {
            return false;
        }
        outcome.skipped = self.skipped;
        let kept = KeptTarget {
            unsettled: self.unsettled,
            foreign: self.existing.foreign.clone(),
            irregular: self.irregular,
            is_entangled: self.existing.has_unlabelled,
        };
        outcome.kept = self.existing.complete(kept, &outcome.plan.peers);
        outcome.facts.extend(self.facts);
        let nodes_without_internal_ip = self.nodes_without_internal_ip.into_iter();
        outcome.facts.extend(
            nodes_without_internal_ip.map(|(cluster, nodes)| Fact::HostNetworkNotServed {
                cluster,
                target: self.name.to_owned(),
                nodes,
            }),
        );
        true
    }
}

/// A planned Peer.
struct AddedPeer<'a> {
    name: String,
    peer: Arc<PlannedPeer>,
    /// The existing Peer with its name.
    existing: Option<&'a ObservedPeer>,
}

/// The source whose nodes are being added.
struct AddedSource<'r> {
    /// The entry name.
    name: &'r str,
    /// The keepalive of its Peers that have an endpoint.
    keepalive: u16,
    own_names: OwnNames<'r>,
}

/// The names that the naming rule gives to all nodes, or gateways, of a source.
pub(super) enum OwnNames<'r> {
    /// Those of registered nodes.
    Nodes(&'r NodeRegistry<'r>),
    /// Those of gateways.
    Gateways(BTreeSet<String>),
}

impl OwnNames<'_> {
    fn contains(&self, name: &str) -> bool {
        match self {
            Self::Nodes(registry) => registry.registered.iter().any(|node| node.peer_name == name),
            Self::Gateways(names) => names.contains(name),
        }
    }
}

/// Whether kg owns the tunnel of some node of this member. A Node without a key counts only if it is held or wg-agent owns its tunnel:
/// others may have just joined. If no Node counts, the answer is `true`, the safe assumption.
pub(super) fn runs_kg(member: &Member, is_held: impl Fn(&str) -> bool) -> bool {
    // kg removes a node's key annotation while it restarts, so held nodes count too.
    let has_kg = |(name, node): (&str, &Node)| {
        node.server != Server::Agent && (node.public_key != Claim::Absent || is_held(name))
    };
    member.nodes.iter().any(has_kg) || !member.nodes.values().any(|node| node.server == Server::Agent)
}
