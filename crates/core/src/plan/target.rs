//! Plans one target: its Peers, PeerPolicies, SandboxAccesses and mirrored Services (design rules 2, 6, 8).

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Deref,
    sync::Arc,
};

use ipnet::IpNet;

use super::{
    EgressReport, Fact, Naming, Settings, Skipped, TargetPlan,
    discovered::Discovered,
    endpoint::NodeFamilies,
    gateways,
    link::{self, Link},
    nodes::NodeRegistry,
    peers,
    services::{self, AccessPath},
};
use crate::{
    mesh::{Addressing, Cluster, ClusterIdentity, Locations, Mesh, MeshId, ObjectName, Profile},
    observe::{AccessSpec, Claim, Member, Observation, Observations, ObservedPeer, Server},
    ownership::{self, Claimant, Ownership},
};

/// One member of a mesh, as the planner uses it.
pub(super) struct MeshMember<'a> {
    pub(super) traits: Arc<MemberTraits>,
    pub(super) observed: Option<&'a Observation<Member>>,
}

/// The properties of a member as a whole that the plans of all targets use. A changed Node seldom changes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MemberTraits {
    /// The entry, with the profile and quarantine that apply. `cluster.allowed` contains the accepted networks without those of
    /// gateways, because other members send to gateways only by the gateways' own Peers.
    pub(super) cluster: Cluster,
    /// All accepted networks.
    pub(super) accepted: Vec<IpNet>,
    /// The member is cluster-meshed or a sandbox, and has accepted networks.
    pub(super) can_connect: bool,
    /// The endpoints at which the member's nodes see the nodes of others.
    pub(super) discovered: Discovered,
    pub(super) families: NodeFamilies,
}

impl Deref for MeshMember<'_> {
    type Target = MemberTraits;

    fn deref(&self) -> &MemberTraits {
        &self.traits
    }
}

impl<'a> MeshMember<'a> {
    pub(super) fn last_observed(&self) -> Option<&'a Member> {
        self.observed.and_then(Observation::last)
    }

    /// The anchored networks that the member's Peers contain in other members; none if it is masqueraded or not cluster-meshed.
    pub(super) fn anchored(&self, registry: Option<&NodeRegistry<'_>>) -> Vec<IpNet> {
        let has_anchors =
            self.cluster.profile == Profile::ClusterMeshed && self.cluster.effective_addressing() == Addressing::Routed;
        registry
            .filter(|_| has_anchors)
            .map(|registry| registry.anchored.clone())
            .unwrap_or_default()
    }

    pub(super) fn has_wireguard_address_in(&self, network: IpNet) -> bool {
        let nodes = self
            .last_observed()
            .into_iter()
            .flat_map(|member| member.nodes.values());
        let mut claims = nodes.filter_map(|node| node.wireguard_ip.value());
        claims.any(|claim| network.contains(&claim.addr()))
    }

    /// The accepted WireGuard addresses of the member's gateways.
    pub(super) fn gateway_prefixes(&self) -> BTreeSet<IpNet> {
        let gateways = self
            .last_observed()
            .into_iter()
            .flat_map(|member| member.gateways.values());
        let prefixes = gateways
            .flat_map(|gateway| &gateway.addresses)
            .map(|address| IpNet::from(*address));
        prefixes
            .filter(|net| self.accepted.iter().any(|accepted| accepted.contains(net)))
            .collect()
    }

    /// The WireGuard network of each node, or only the node's WireGuard address if allowedNetworks do not contain that network.
    pub(super) fn wireguard_networks(&self) -> BTreeSet<IpNet> {
        let cluster = &self.cluster;
        let nodes = self
            .last_observed()
            .into_iter()
            .flat_map(|member| member.nodes.values());
        nodes
            .filter_map(|node| node.wireguard_ip.value())
            .filter(|claim| cluster.allows(IpNet::from(claim.addr())))
            .map(|claim| {
                if cluster.allows(claim.trunc()) {
                    claim.trunc()
                } else {
                    IpNet::from(claim.addr())
                }
            })
            .collect()
    }

    /// The member's own networks in the mesh: `cluster.allowed` of a routed member or a sandbox, [`Self::wireguard_networks`] of
    /// a masqueraded member that is no sandbox. The networks of a sandbox do not depend on its Nodes: otherwise thousands of
    /// Nodes would put thousands of networks into a policy, and each added or deleted Node would change the policy.
    pub(super) fn networks(&self) -> BTreeSet<IpNet> {
        let cluster = &self.cluster;
        if cluster.effective_addressing() == Addressing::Routed || cluster.profile == Profile::Sandbox {
            return cluster.allowed.iter().copied().collect();
        }
        self.wireguard_networks()
    }
}

/// The inputs that the plans of all targets of one mesh share.
pub(super) struct MeshInputs<'a> {
    pub(super) mesh: &'a MeshId,
    pub(super) mesh_members: &'a BTreeMap<String, MeshMember<'a>>,
    pub(super) registries: &'a BTreeMap<String, NodeRegistry<'a>>,
    /// Observed members for which [`link::enforces_policies`] is false.
    pub(super) not_enforcing: &'a BTreeSet<String>,
    pub(super) seen: &'a Observations,
    pub(super) settings: &'a Settings,
    pub(super) naming: &'a dyn Naming,
    /// All meshes of this hub, oldest first.
    pub(super) all_meshes: &'a [&'a Mesh],
    /// The same meshes, as owners of objects.
    pub(super) claimants: &'a [Claimant],
    /// Names that older meshes use in each cluster.
    pub(super) used: &'a BTreeMap<ClusterIdentity, UsedNames>,
}

/// Names of objects that older meshes plan for one cluster.
#[derive(Debug, Default)]
pub(super) struct UsedNames {
    pub(super) peers: BTreeSet<String>,
    pub(super) policies: BTreeSet<String>,
    pub(super) services: BTreeSet<ObjectName>,
    /// SandboxAccesses with their specs, because all SandboxAccesses of a sandbox share one range of gateway ports.
    pub(super) accesses: BTreeMap<String, AccessSpec>,
}

impl UsedNames {
    pub(super) fn add(&mut self, plan: &TargetPlan) {
        self.peers.extend(plan.peers.keys().cloned());
        self.policies.extend(plan.policies.keys().cloned());
        self.services.extend(plan.services.keys().cloned());
        let accesses = plan.accesses.iter();
        self.accesses
            .extend(accesses.map(|(name, access)| (name.clone(), access.spec.clone())));
    }
}

/// Clears `key` (the data key inside the Secret) in an identity. Then two identities are equal exactly if
/// [`ClusterIdentity::same_cluster`] is true.
pub(super) fn canonical_identity(identity: &ClusterIdentity) -> ClusterIdentity {
    match identity {
        ClusterIdentity::Local => ClusterIdentity::Local,
        ClusterIdentity::Secret {
            namespace,
            name,
            context,
            ..
        } => ClusterIdentity::Secret {
            namespace: namespace.clone(),
            name: name.clone(),
            key: String::new(),
            context: context.clone(),
        },
    }
}

/// A target's plan, with the nodes that it skips and the facts that it reports.
#[derive(Default)]
pub(super) struct TargetOutcome {
    pub(super) plan: TargetPlan,
    /// Nodes that have no Peer in this target, although they may have Peers in others, by source.
    pub(super) skipped: BTreeMap<String, Vec<Skipped>>,
    pub(super) facts: BTreeSet<Fact>,
    pub(super) egress: Vec<EgressReport>,
    pub(super) kept: KeptTarget,
    /// Planned Peers may have the same key, prefix or name, so they were compared with one another ([`peers::PeerPlanner`]).
    pub(super) has_shared_claims: bool,
}

/// The data of a target, in addition to its plan, that the planner needs to follow a change.
#[derive(Debug, Default)]
pub(super) struct KeptTarget {
    /// Sources whose anchors may still change: one of the source's anchored networks is not yet in the existing Peer of any node
    /// that can be its anchor, or another Peer has this network.
    pub(super) unsettled: BTreeSet<String>,
    /// Names of existing Peers that do not belong to the mesh, or have no valid spec.
    pub(super) foreign: BTreeSet<String>,
    /// Names of existing Peers, except those in `foreign`, for which no planned Peer has the same name, source and key. Usually
    /// they were not deleted or updated yet. Also the names of planned Peers that are not the ones that the naming rule gives
    /// without a hash: such a Peer keeps the name of an existing Peer, or the name without a hash is taken.
    pub(super) irregular: BTreeSet<String>,
    /// An existing Peer may affect a planned Peer of another name: a Peer of this hub has no mesh label, so a mesh may adopt it,
    /// or an existing Peer in `irregular` has the key of a planned Peer. Then no change is followed; the mesh is planned anew.
    pub(super) is_entangled: bool,
}

/// Adds the networks of a closed source's Peers to its closed PeerPolicy. [`MeshInputs::plan_policies`] leaves out a whole
/// network if a part of it overlaps pods of the target itself, but the Peers may contain the other parts.
fn close_networks_of_peers(plan: &mut TargetPlan) {
    for policy in plan.policies.values_mut().filter(|policy| policy.spec.closed) {
        let peers = plan.peers.values().filter(|peer| peer.source == policy.source);
        for network in peers.flat_map(|peer| &peer.spec.allowed_ips) {
            if !policy.spec.networks.iter().any(|closed| closed.contains(network)) {
                policy.spec.networks.insert(*network);
            }
        }
    }
}

impl<'a> MeshInputs<'a> {
    /// Plans the objects in the target `name`.
    pub(super) fn plan_target(&self, name: &str) -> TargetOutcome {
        let mut outcome = TargetOutcome::default();
        let Some(target) = self.mesh_members.get(name) else {
            return outcome;
        };
        outcome.plan.source_networks = self.source_networks(name, target);
        for (source, mesh_member) in self.sources(name, target) {
            // A connected source whose observation is not Fresh keeps its objects; a source that is not connected loses them. Sandboxes
            // are left out: their grants come from the ClusterMesh, and `plan_access` keeps their nodes.
            let link = self.link(name, target, mesh_member);
            if link.is_some_and(|link| link != Link::Sandbox)
                && mesh_member.observed.and_then(Observation::fresh).is_none()
            {
                outcome.plan.sources_not_fresh.insert(source.to_owned());
            }
        }
        if target.can_connect {
            self.plan_policies(name, target, &mut outcome.plan);
            for (source, mesh_member) in self.sources(name, target) {
                if self.uses_gateways(target, mesh_member) {
                    let access = self.plan_access(name, target, source, mesh_member);
                    outcome.plan.accesses.extend(access);
                    outcome.facts.extend(missing_gateway(target));
                }
            }
            outcome.has_shared_claims = self.has_shared_claims(target);
            if !self.plan_peers(peers::PeerPlanner::new(self, name, target), &mut outcome) {
                outcome.has_shared_claims = true;
                let again = peers::PeerPlanner::new(self, name, target).with_shared_claims();
                self.plan_peers(again, &mut outcome);
            }
            close_networks_of_peers(&mut outcome.plan);
            outcome.facts.extend(self.missing_peer_crd(name, target));
            self.plan_grantor_policies(name, target, &mut outcome.plan);
        }
        self.plan_services(name, target, &mut outcome);
        outcome
    }

    /// Plans the Peers of one target. Returns the result of [`peers::PeerPlanner::finish`].
    fn plan_peers(&'a self, mut peer_planner: peers::PeerPlanner<'a, 'a>, outcome: &mut TargetOutcome) -> bool {
        let (name, target) = (peer_planner.name, peer_planner.target);
        peer_planner.add_own_nodes();
        for (source, mesh_member) in self.sources(name, target) {
            if self.link(name, target, mesh_member) == Some(Link::Meshed) {
                peer_planner.add_source(source, mesh_member);
            }
        }
        // After the nodes of all sources, so that a gateway with a copied key does not take a node's place.
        for (source, mesh_member) in self.sources(name, target) {
            if self.uses_gateways(mesh_member, target) && self.link(name, target, mesh_member).is_some() {
                peer_planner.add_gateways(source, mesh_member);
            }
        }
        peer_planner.finish(outcome)
    }

    /// Whether planned Peers of this target may have the same key, prefix or name ([`peers::PeerPlanner`]).
    pub(super) fn has_shared_claims(&self, target: &MeshMember<'_>) -> bool {
        let mut members: Vec<&MeshMember<'_>> = self.mesh_members.values().collect();
        members.sort_by_key(|member| canonical_identity(&member.cluster.identity));
        let has_equal_sources = members
            .windows(2)
            .any(|pair| pair[0].cluster.identity.same_cluster(&pair[1].cluster.identity));
        let has_held = self.registries.values().any(|registry| !registry.held.is_empty());
        let has_gateways = |member: &MeshMember<'_>| link::uses_gateways(member, target);
        has_equal_sources
            || has_held
            || target.cluster.locations == Locations::Connected
            || self.mesh_members.values().any(has_gateways)
    }

    /// How `source` is connected to the target `name` ([`link::between_enforced`]).
    pub(super) fn link(&self, name: &str, target: &MeshMember<'_>, source: &MeshMember<'_>) -> Option<Link> {
        link::between_enforced(target, source, self.not_enforcing.contains(name))
    }

    /// Whether `importer` reaches Services of `exporter` through gateways. This is [`link::uses_gateways`], but `false`
    /// if kg owns the tunnels of all nodes of the importer: kg also sends from addresses that gateways do not accept.
    /// Nodes of a sandbox can send only from the accepted addresses, so kg is no obstacle there.
    pub(super) fn uses_gateways(&self, exporter: &MeshMember<'_>, importer: &MeshMember<'_>) -> bool {
        let has_only_kg = importer.last_observed().is_some_and(|member| {
            let mut nodes = member
                .nodes
                .values()
                .filter(|node| node.public_key != Claim::Absent)
                .peekable();
            nodes.peek().is_some() && nodes.all(|node| node.server != Server::Agent)
        });
        let is_sandbox = importer.cluster.profile == Profile::Sandbox;
        link::uses_gateways(exporter, importer) && (is_sandbox || !has_only_kg)
    }

    /// Reports that the observed target `name` lacks the Peer CRD, if a source is connected to it that is no sandbox. Sandboxes get no
    /// Peers in a target.
    fn missing_peer_crd(&self, name: &'a str, target: &'a MeshMember<'a>) -> Option<Fact> {
        let mut sources = self.sources(name, target);
        let gets_peers = sources.any(|(_, mesh_member)| {
            let link = self.link(name, target, mesh_member);
            link.is_some_and(|link| link != Link::Sandbox)
        });
        (gets_peers && target.last_observed()?.peers.is_none()).then(|| Fact::PeerCRDMissing {
            cluster: name.to_owned(),
        })
    }

    /// The possible sources of the target `name`: all members that are other clusters.
    pub(super) fn sources(
        &self,
        name: &'a str,
        target: &'a MeshMember<'a>,
    ) -> impl Iterator<Item = (&'a str, &'a MeshMember<'a>)> + use<'a> {
        self.mesh_members
            .iter()
            .filter(move |(source, mesh_member)| {
                *source != name && !mesh_member.cluster.identity.same_cluster(&target.cluster.identity)
            })
            .map(|(source, mesh_member)| (&**source, mesh_member))
    }

    /// The accepted networks of the sources that are connected to the target `name`.
    pub(super) fn source_networks(&self, name: &str, target: &MeshMember<'_>) -> BTreeSet<IpNet> {
        let is_linked = |(_, mesh_member): &(&str, &MeshMember<'_>)| self.link(name, target, mesh_member).is_some();
        let sources = self.sources(name, target).filter(is_linked);
        sources
            .flat_map(|(_, mesh_member)| mesh_member.accepted.iter().copied())
            .collect()
    }

    /// Names that older meshes use in this target.
    pub(super) fn used_names(&self, target: &MeshMember<'_>) -> &'a UsedNames {
        static NOTHING: UsedNames = UsedNames {
            peers: BTreeSet::new(),
            policies: BTreeSet::new(),
            services: BTreeSet::new(),
            accesses: BTreeMap::new(),
        };
        self.used
            .get(&canonical_identity(&target.cluster.identity))
            .unwrap_or(&NOTHING)
    }

    /// Whether the source of an existing Peer is connected, but was not observed since this controller started. Sandboxes do not
    /// count: a target has no Peers of them.
    pub(super) fn is_source_unobserved(&self, name: &str, target: &MeshMember<'_>, peer: &ObservedPeer) -> bool {
        let source = peer.owner.source_cluster.as_deref();
        source
            .and_then(|source| self.mesh_members.get(source))
            .is_some_and(|mesh_member| {
                let link = self.link(name, target, mesh_member);
                mesh_member.last_observed().is_none() && link.is_some_and(|link| link != Link::Sandbox)
            })
    }

    /// Whether an existing Peer of another mesh is kept regardless of that mesh's plan: the mesh is paused, or it is not being
    /// deleted and the Peer's source was not observed since this controller started. `None` = the Peer is not kept. `Some` contains the
    /// source's identity, if that mesh has an entry for it.
    pub(super) fn kept_source(&self, mesh: &MeshId, peer: &ObservedPeer) -> Option<Option<&'a ClusterIdentity>> {
        let mesh = self.all_meshes.iter().find(|other| other.id == *mesh)?;
        let label = peer.owner.source_cluster.as_deref();
        let mut entries = mesh.clusters.iter();
        let source = entries
            .find(|entry| Some(&*entry.name) == label)
            .map(|entry| &entry.identity);
        let unseen = |identity| self.seen.members.get(identity).and_then(Observation::last).is_none();
        (mesh.paused || !mesh.deleting && source.is_some_and(unseen)).then_some(source)
    }

    pub(super) fn is_ours(&self, owner: &crate::observe::Owner) -> bool {
        ownership::of(owner, &self.seen.hub, self.claimants) == Ownership::Mesh(self.mesh)
    }

    fn plan_services(&self, name: &'a str, target: &'a MeshMember<'a>, outcome: &mut TargetOutcome) {
        let importer_state = target.last_observed();
        let is_ours = |service: &ObjectName| {
            let existing = importer_state.and_then(|member| member.services.get(service));
            existing
                .and_then(|service| service.managed.as_ref())
                .is_some_and(|owner| self.is_ours(owner))
        };
        let mut names: BTreeSet<ObjectName> = BTreeSet::new();
        for grant in &target.cluster.egress {
            let mesh_member = self.mesh_members.get(&grant.cluster);
            // The importer sends to the exporter, so here the importer is the source.
            let link = mesh_member.and_then(|mesh_member| link::between(mesh_member, target));
            let gateway_access = mesh_member.filter(|mesh_member| self.uses_gateways(mesh_member, target));
            let gateway_access = gateway_access.map(|mesh_member| self.gateway_access(mesh_member, name));
            let needs_agents = gateway_access.is_none()
                && mesh_member.is_some_and(|mesh_member| link::uses_gateways(mesh_member, target));
            let exporter = match mesh_member {
                Some(_) if needs_agents => Err(format!(
                    "cluster {:?} is masqueraded, so its Services are reached through its gateways. They accept only WireGuard addresses, \
                     and kg on nodes of this cluster sends with other sources: run wg-agent instead of kg there",
                    grant.cluster
                )),
                Some(mesh_member) if matches!(link, Some(Link::Meshed | Link::Sandbox)) => Ok(&mesh_member.cluster),
                mesh_member => Err(link::refusal(target, mesh_member, &grant.cluster)),
            };
            let resolver = services::GrantResolver {
                mesh: self.mesh,
                importer: &target.cluster,
                importer_state,
                exporter_state: mesh_member
                    .filter(|_| exporter.is_ok())
                    .and_then(|mesh_member| mesh_member.observed),
                exporter,
                access_path: gateway_access.as_ref().map_or(AccessPath::Direct, AccessPath::Gateways),
                is_ours: &is_ours,
                is_local_name_used: self.used_names(target).services.contains(&grant.local)
                    || !names.insert(grant.local.clone()),
            };
            let grant_outcome = resolver.resolve(grant, self.naming);
            if grant_outcome.keep {
                outcome.plan.kept_services.insert(grant.local.clone());
            }
            if let Some(service) = grant_outcome.service {
                outcome.plan.services.insert(grant.local.clone(), service);
            }
            if !grant_outcome.report.message.is_empty() {
                outcome.facts.insert(Fact::EgressUnresolved {
                    cluster: name.to_owned(),
                    service: grant.local.clone(),
                    message: grant_outcome.report.message.clone(),
                });
            }
            outcome.egress.push(grant_outcome.report);
        }
    }
}

/// Whether this entry is the hub's own.
pub(super) fn is_local(cluster: &Cluster) -> bool {
    cluster.identity == ClusterIdentity::Local
}

/// Reports that an observed member has no gateway, although another member needs one.
fn missing_gateway(target: &MeshMember<'_>) -> Option<Fact> {
    let cluster = &target.cluster.name;
    let message = gateways::missing_gateway_message(cluster, target.last_observed()?)?;
    Some(Fact::NoGateway {
        cluster: cluster.clone(),
        message,
    })
}
