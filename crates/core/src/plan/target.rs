//! What one member holds of the others: Peers, policies, mirrored Services (rules 2, 6, 8).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use ipnet::IpNet;

use super::{
    EgressReport, Fact, Naming, PlannedPolicy, Settings, Skipped, TargetPlan, anchor,
    endpoint::NodeFamilies,
    gateways,
    link::{self, Link},
    nodes::NodeRegistry,
    peers,
    services::{self, Reach},
};
use crate::{
    key::PublicKey,
    mesh::{Addressing, Cluster, ClusterIdentity, Mesh, MeshId, ObjectName, Profile},
    observe::{AccessSpec, Member, Observation, Observations, ObservedPeer, ObservedPolicy, PolicySpec},
    ownership::{self, Claimant, Ownership},
};

/// One entry as the planner sees it. `cluster.allowed` is what was accepted without the networks of its gateways.
pub(super) struct MeshMember<'a> {
    pub(super) cluster: Cluster,
    /// All networks that were accepted.
    pub(super) accepted: Vec<IpNet>,
    pub(super) observed: Option<&'a Observation<Member>>,
    /// It takes part: cluster-meshed or a sandbox, and it holds networks.
    pub(super) connected: bool,
    /// Where its nodes saw other keys, in the order of the nodes' names.
    pub(super) discovered: BTreeMap<PublicKey, Vec<SocketAddr>>,
    pub(super) families: NodeFamilies,
}

/// Turns what each node saw into where each key was seen.
pub(super) fn discovered(member: Option<&Member>) -> BTreeMap<PublicKey, Vec<SocketAddr>> {
    let mut seen: BTreeMap<PublicKey, Vec<SocketAddr>> = BTreeMap::new();
    for node in member.into_iter().flat_map(|member| member.nodes.values()) {
        for (key, address) in &node.discovered {
            seen.entry(*key).or_default().push(*address);
        }
    }
    seen
}

impl<'a> MeshMember<'a> {
    pub(super) fn last_observed(&self) -> Option<&'a Member> {
        self.observed.and_then(Observation::last)
    }

    /// The networks of it that ride on anchors in the other members.
    pub(super) fn anchored(&self, registry: Option<&NodeRegistry<'_>>) -> Vec<IpNet> {
        let is_carried =
            self.cluster.profile == Profile::ClusterMeshed && self.cluster.effective_addressing() == Addressing::Routed;
        registry
            .filter(|_| is_carried)
            .map(|registry| anchor::anchored_networks(&self.cluster, Some(registry)))
            .unwrap_or_default()
    }

    /// The member's own addresses in the mesh: all it was granted or, masqueraded, its WireGuard range alone. Of a sandbox
    /// all of its entry, whatever its Nodes say: they must not be able to write ten thousand networks into a policy, nor a
    /// new revision with each Node that comes and goes.
    fn networks(&self) -> BTreeSet<IpNet> {
        let cluster = &self.cluster;
        if cluster.effective_addressing() == Addressing::Routed || cluster.profile == Profile::Sandbox {
            return cluster.allowed.iter().copied().collect();
        }
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
}

/// What all targets of one mesh are assembled from.
pub(super) struct MeshInputs<'a> {
    pub(super) mesh: &'a MeshId,
    pub(super) mesh_members: &'a BTreeMap<String, MeshMember<'a>>,
    pub(super) registries: &'a BTreeMap<String, NodeRegistry<'a>>,
    /// Members whose nodes hold nobody to a policy.
    pub(super) not_enforcing: &'a BTreeSet<String>,
    pub(super) seen: &'a Observations,
    pub(super) settings: &'a Settings,
    pub(super) naming: &'a dyn Naming,
    /// All meshes of this hub, oldest first.
    pub(super) all: &'a [&'a Mesh],
    /// The same, as owners.
    pub(super) claimants: &'a [Claimant],
    /// What older meshes write, by cluster.
    pub(super) used: &'a BTreeMap<ClusterIdentity, UsedNames>,
}

/// Names that one plan gives to objects of one cluster.
#[derive(Debug, Default)]
pub(super) struct UsedNames {
    pub(super) peers: BTreeSet<String>,
    pub(super) policies: BTreeSet<String>,
    pub(super) services: BTreeSet<ObjectName>,
    /// With what they say, since their ports are shared.
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

/// The identity by which two entries of the same cluster compare equal.
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

/// A target's plan, with what it means for the sources.
#[derive(Default)]
pub(super) struct TargetOutcome {
    pub(super) plan: TargetPlan,
    /// Nodes refused for this target alone, by source.
    pub(super) skipped: BTreeMap<String, Vec<Skipped>>,
    pub(super) facts: BTreeSet<Fact>,
    pub(super) egress: Vec<EgressReport>,
}

impl<'a> MeshInputs<'a> {
    /// Assembles the plan of the entry `name`.
    pub(super) fn target(&self, name: &str) -> TargetOutcome {
        let mut outcome = TargetOutcome::default();
        let Some(target) = self.mesh_members.get(name) else {
            return outcome;
        };
        outcome.plan.served = self.served(name, target);
        for (source, mesh_member) in self.sources(name, target) {
            // What the operator took out of the mesh goes, seen or not. What a sandbox may reach is no matter of what is seen of it.
            let link = self.link(name, target, mesh_member);
            if link.is_some_and(|link| link != Link::Sandbox)
                && mesh_member.observed.and_then(Observation::fresh).is_none()
            {
                outcome.plan.retained.insert(source.to_owned());
            }
        }
        if target.connected {
            self.policies(name, target, &mut outcome.plan);
            let mut peer_planner = peers::PeerPlanner::new(self, name, target);
            for (source, mesh_member) in self.sources(name, target) {
                match self.link(name, target, mesh_member) {
                    None => {}
                    Some(Link::Meshed) => peer_planner.add_source(source, mesh_member),
                    Some(Link::Sandbox) => {
                        outcome
                            .plan
                            .accesses
                            .extend(self.access(name, target, source, mesh_member));
                        outcome.facts.extend(no_gateway(target));
                    }
                    Some(Link::Grantor) => peer_planner.add_gateways(source, mesh_member),
                }
            }
            peer_planner.finish(&mut outcome);
            outcome.facts.extend(self.missing_peer_crd(name, target));
            self.grantors(name, target, &mut outcome.plan);
        }
        self.services(name, target, &mut outcome);
        outcome
    }

    /// How `source` is written into the entry `name`: not at all where it is quarantined and the nodes there would let it in all the
    /// same.
    fn link(&self, name: &str, target: &MeshMember<'_>, source: &MeshMember<'_>) -> Option<Link> {
        let link = link::between(target, source)?;
        let open = link == Link::Meshed && source.cluster.quarantine && self.not_enforcing.contains(name);
        (!open).then_some(link)
    }

    /// That Peers cannot be written into a member that was seen. A member that serves sandboxes alone gets none.
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

    fn sources(
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

    /// The networks of the sources that are connected to the entry `name`.
    pub(super) fn served(&self, name: &str, target: &MeshMember<'_>) -> BTreeSet<IpNet> {
        let linked = |(_, mesh_member): &(&str, &MeshMember<'_>)| self.link(name, target, mesh_member).is_some();
        let sources = self.sources(name, target).filter(linked);
        sources
            .flat_map(|(_, mesh_member)| mesh_member.accepted.iter().copied())
            .collect()
    }

    /// Names that an older mesh writes into this target with the same plan.
    pub(super) fn used(&self, target: &MeshMember<'_>) -> &'a UsedNames {
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

    /// Whether a standing Peer's member is connected and nothing was seen of it since this controller started.
    pub(super) fn unseen(&self, name: &str, target: &MeshMember<'_>, peer: &ObservedPeer) -> bool {
        let source = peer.owner.source_cluster.as_deref();
        source
            .and_then(|source| self.mesh_members.get(source))
            .is_some_and(|mesh_member| {
                let link = self.link(name, target, mesh_member);
                mesh_member.last_observed().is_none() && link.is_some_and(|link| link != Link::Sandbox)
            })
    }

    /// Whether a standing Peer of another mesh stays whatever is planned now: that mesh is paused, or nothing was seen of the Peer's
    /// member since this controller started. Also that member, where the mesh still names it.
    pub(super) fn stays(&self, mesh: &MeshId, peer: &ObservedPeer) -> Option<Option<&'a ClusterIdentity>> {
        let mesh = self.all.iter().find(|other| other.id == *mesh)?;
        let label = peer.owner.source_cluster.as_deref();
        let mut entries = mesh.clusters.iter();
        let source = entries
            .find(|entry| Some(&*entry.name) == label)
            .map(|entry| &entry.identity);
        let unseen = |identity| self.seen.members.get(identity).and_then(Observation::last).is_none();
        (mesh.paused || !mesh.deleting && source.is_some_and(unseen)).then_some(source)
    }

    pub(super) fn ours(&self, owner: &crate::observe::Owner) -> bool {
        ownership::of(owner, &self.seen.hub, self.claimants) == Ownership::Mesh(self.mesh)
    }

    /// The policies of the sources that send into this target.
    fn policies(&self, name: &'a str, target: &'a MeshMember<'a>, plan: &mut TargetPlan) {
        let Some((member, existing)) = target
            .last_observed()
            .and_then(|member| Some((member, member.policies.as_ref()?)))
        else {
            return;
        };
        if target.cluster.profile != Profile::ClusterMeshed {
            return;
        }
        for (source, mesh_member) in self.sources(name, target) {
            let tight = mesh_member.cluster.profile != Profile::ClusterMeshed;
            // While Peers of a member that was tightened stand, a policy that closes stands before them: one after the other
            // they go, and until the last has gone the others would let in what they did.
            let peers = member.peers.iter().flat_map(BTreeMap::values);
            let stands = || {
                let mut ours = peers.filter(|peer| peer.owner.source_cluster.as_deref() == Some(source));
                ours.any(|peer| self.ours(&peer.owner))
            };
            if link::between(target, mesh_member) != Some(Link::Meshed) && !(tight && stands()) {
                continue;
            }
            let mut networks = mesh_member.networks();
            let held = || {
                self.registries
                    .get(source)
                    .is_some_and(|registry| !registry.held.is_empty())
            };
            if mesh_member.cluster.profile != Profile::Sandbox && (mesh_member.last_observed().is_none() || held()) {
                // What is not seen now is not gone: a policy that shrinks would close its member, and unblock its networks.
                let ours = existing.values().filter(|policy| {
                    policy.owner.source_cluster.as_deref() == Some(source) && self.ours(&policy.owner)
                });
                let known = ours
                    .filter_map(|policy| policy.spec.as_ref().ok())
                    .flat_map(|spec| &spec.networks);
                networks.extend(known.copied().filter(|net| mesh_member.cluster.allows(*net)));
            }
            if networks.is_empty() {
                continue;
            }
            let closed = link::is_closed(mesh_member);
            let spec = PolicySpec {
                sources: networks.clone(),
                networks,
                allow: if closed { BTreeSet::new() } else { target.networks() },
                deny: member.api_endpoints.clone(),
                infrastructure_ports: self.settings.infrastructure_ports.clone(),
                anchored: if closed {
                    BTreeSet::new()
                } else {
                    anchor::anchored_networks(&target.cluster, self.registries.get(name))
                        .into_iter()
                        .collect()
                },
                closed,
            };
            let planned = PlannedPolicy {
                source: source.to_owned(),
                spec,
            };
            plan.policies
                .insert(self.policy_name(target, existing, source), planned);
        }
    }

    /// In a sandbox: the members whose Services it reaches send nothing into it but replies.
    fn grantors(&self, name: &'a str, target: &'a MeshMember<'a>, plan: &mut TargetPlan) {
        let member = target
            .last_observed()
            .filter(|_| target.cluster.profile == Profile::Sandbox);
        let Some((member, existing)) = member.and_then(|member| Some((member, member.policies.as_ref()?))) else {
            return;
        };
        for (source, mesh_member) in self.sources(name, target) {
            if self.link(name, target, mesh_member) != Some(Link::Grantor) {
                continue;
            }
            let peers = plan.peers.values().filter(|peer| peer.source == source);
            let networks: BTreeSet<IpNet> = peers.flat_map(|peer| &peer.spec.allowed_ips).copied().collect();
            if networks.is_empty() {
                continue;
            }
            let spec = PolicySpec {
                sources: networks.clone(),
                networks,
                allow: BTreeSet::new(),
                deny: member.api_endpoints.clone(),
                infrastructure_ports: self.settings.infrastructure_ports.clone(),
                anchored: BTreeSet::new(),
                closed: false,
            };
            let planned = PlannedPolicy {
                source: source.to_owned(),
                spec,
            };
            plan.policies
                .insert(self.policy_name(target, existing, source), planned);
        }
    }

    fn policy_name(
        &self,
        target: &MeshMember<'_>,
        existing: &BTreeMap<String, ObservedPolicy>,
        source: &str,
    ) -> String {
        let readable = self.naming.policy(self.mesh, source, false);
        let ours = |owner| {
            let of = ownership::of(owner, &self.seen.hub, self.claimants);
            of == Ownership::Mesh(self.mesh)
                || of == Ownership::Unlabelled && ownership::may_return(owner, self.mesh, source)
        };
        let foreign = existing.get(&readable).is_some_and(|policy| !ours(&policy.owner))
            || self.used(target).policies.contains(&readable);
        if foreign {
            self.naming.policy(self.mesh, source, true)
        } else {
            readable
        }
    }

    fn services(&self, name: &'a str, target: &'a MeshMember<'a>, outcome: &mut TargetOutcome) {
        let importer_state = target.last_observed();
        let ours = |service: &ObjectName| {
            let existing = importer_state.and_then(|member| member.services.get(service));
            existing
                .and_then(|service| service.managed.as_ref())
                .is_some_and(|owner| self.ours(owner))
        };
        let mut names: BTreeSet<ObjectName> = BTreeSet::new();
        for grant in &target.cluster.egress {
            let mesh_member = self.mesh_members.get(&grant.cluster);
            let link = mesh_member.and_then(|mesh_member| link::between(mesh_member, target));
            let gateway_access = mesh_member.filter(|_| link == Some(Link::Sandbox));
            let gateway_access = gateway_access.map(|mesh_member| self.gateway_access(mesh_member, name));
            let exporter = match mesh_member {
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
                reach: gateway_access.as_ref().map_or(Reach::Direct, Reach::Gateways),
                ours: &ours,
                taken: self.used(target).services.contains(&grant.local) || !names.insert(grant.local.clone()),
            };
            let grant_outcome = resolver.resolve(grant, self.naming);
            if grant_outcome.keep {
                outcome.plan.kept.insert(grant.local.clone());
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

/// Whether this is the hub's own entry.
pub(super) fn is_local(cluster: &Cluster) -> bool {
    cluster.identity == ClusterIdentity::Local
}

/// That sandboxes cannot enter a member that was seen.
fn no_gateway(target: &MeshMember<'_>) -> Option<Fact> {
    let cluster = &target.cluster.name;
    let message = gateways::missing_gateway_message(cluster, target.last_observed()?)?;
    Some(Fact::NoGateway {
        cluster: cluster.clone(),
        message,
    })
}
