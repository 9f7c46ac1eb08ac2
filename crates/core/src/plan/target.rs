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
    nodes::Roll,
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
pub(super) struct Party<'a> {
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

impl<'a> Party<'a> {
    pub(super) fn member(&self) -> Option<&'a Member> {
        self.observed.and_then(Observation::last)
    }

    /// The networks of it that ride on anchors in the other members.
    pub(super) fn anchored(&self, roll: Option<&Roll<'_>>) -> Vec<IpNet> {
        let is_carried =
            self.cluster.profile == Profile::ClusterMeshed && self.cluster.effective_addressing() == Addressing::Routed;
        roll.filter(|_| is_carried)
            .map(|roll| anchor::anchored(&self.cluster, Some(roll)))
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
        let nodes = self.member().into_iter().flat_map(|member| member.nodes.values());
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
pub(super) struct Assembly<'a> {
    pub(super) mesh: &'a MeshId,
    pub(super) parties: &'a BTreeMap<String, Party<'a>>,
    pub(super) rolls: &'a BTreeMap<String, Roll<'a>>,
    /// Members whose nodes hold nobody to a policy.
    pub(super) lax: &'a BTreeSet<String>,
    pub(super) seen: &'a Observations,
    pub(super) settings: &'a Settings,
    pub(super) naming: &'a dyn Naming,
    /// All meshes of this hub, oldest first.
    pub(super) all: &'a [&'a Mesh],
    /// The same, as owners.
    pub(super) claimants: &'a [Claimant],
    /// What older meshes write, by cluster.
    pub(super) used: &'a BTreeMap<ClusterIdentity, Used>,
}

/// Names that one plan gives to objects of one cluster.
#[derive(Debug, Default)]
pub(super) struct Used {
    pub(super) peers: BTreeSet<String>,
    pub(super) policies: BTreeSet<String>,
    pub(super) services: BTreeSet<ObjectName>,
    /// With what they say, since their ports are shared.
    pub(super) accesses: BTreeMap<String, AccessSpec>,
}

impl Used {
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
pub(super) fn one_cluster(identity: &ClusterIdentity) -> ClusterIdentity {
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
pub(super) struct Assembled {
    pub(super) plan: TargetPlan,
    /// Nodes refused for this target alone, by source.
    pub(super) skipped: BTreeMap<String, Vec<Skipped>>,
    pub(super) facts: BTreeSet<Fact>,
    pub(super) egress: Vec<EgressReport>,
}

impl<'a> Assembly<'a> {
    /// Assembles the plan of the entry `name`.
    pub(super) fn target(&self, name: &str) -> Assembled {
        let mut assembled = Assembled::default();
        let Some(target) = self.parties.get(name) else {
            return assembled;
        };
        assembled.plan.served = self.served(name, target);
        for (source, party) in self.sources(name, target) {
            // What the operator took out of the mesh goes, seen or not. What a sandbox may reach is no matter of what is seen of it.
            let link = self.link(name, target, party);
            if link.is_some_and(|link| link != Link::Sandbox) && party.observed.and_then(Observation::fresh).is_none() {
                assembled.plan.retained.insert(source.to_owned());
            }
        }
        if target.connected {
            self.policies(name, target, &mut assembled.plan);
            let mut writer = peers::Writer::new(self, name, target);
            for (source, party) in self.sources(name, target) {
                match self.link(name, target, party) {
                    None => {}
                    Some(Link::Meshed) => writer.add_source(source, party),
                    Some(Link::Sandbox) => {
                        assembled.plan.accesses.extend(self.access(name, target, source, party));
                        assembled.facts.extend(no_gateway(target));
                    }
                    Some(Link::Grantor) => writer.add_gateways(source, party),
                }
            }
            writer.finish(&mut assembled);
            assembled.facts.extend(self.no_peer_crd(name, target));
            self.grantors(name, target, &mut assembled.plan);
        }
        self.services(name, target, &mut assembled);
        assembled
    }

    /// How `source` is written into the entry `name`: not at all where it is quarantined and the nodes there would let it in all the
    /// same.
    fn link(&self, name: &str, target: &Party<'_>, source: &Party<'_>) -> Option<Link> {
        let link = link::between(target, source)?;
        let open = link == Link::Meshed && source.cluster.quarantine && self.lax.contains(name);
        (!open).then_some(link)
    }

    /// That Peers cannot be written into a member that was seen. A member that serves sandboxes alone gets none.
    fn no_peer_crd(&self, name: &'a str, target: &'a Party<'a>) -> Option<Fact> {
        let mut sources = self.sources(name, target);
        let gets_peers = sources.any(|(_, party)| {
            let link = self.link(name, target, party);
            link.is_some_and(|link| link != Link::Sandbox)
        });
        (gets_peers && target.member()?.peers.is_none()).then(|| Fact::PeerCRDMissing {
            cluster: name.to_owned(),
        })
    }

    fn sources(
        &self,
        name: &'a str,
        target: &'a Party<'a>,
    ) -> impl Iterator<Item = (&'a str, &'a Party<'a>)> + use<'a> {
        self.parties
            .iter()
            .filter(move |(source, party)| {
                *source != name && !party.cluster.identity.same_cluster(&target.cluster.identity)
            })
            .map(|(source, party)| (&**source, party))
    }

    /// The networks of the sources that are connected to the entry `name`.
    pub(super) fn served(&self, name: &str, target: &Party<'_>) -> BTreeSet<IpNet> {
        let linked = |(_, party): &(&str, &Party<'_>)| self.link(name, target, party).is_some();
        let sources = self.sources(name, target).filter(linked);
        sources.flat_map(|(_, party)| party.accepted.iter().copied()).collect()
    }

    /// Names that an older mesh writes into this target with the same plan.
    pub(super) fn used(&self, target: &Party<'_>) -> &'a Used {
        static NOTHING: Used = Used {
            peers: BTreeSet::new(),
            policies: BTreeSet::new(),
            services: BTreeSet::new(),
            accesses: BTreeMap::new(),
        };
        self.used
            .get(&one_cluster(&target.cluster.identity))
            .unwrap_or(&NOTHING)
    }

    /// Whether a standing Peer's member is connected and nothing was seen of it since this controller started.
    pub(super) fn unseen(&self, name: &str, target: &Party<'_>, peer: &ObservedPeer) -> bool {
        let source = peer.owner.source_cluster.as_deref();
        source.and_then(|source| self.parties.get(source)).is_some_and(|party| {
            let link = self.link(name, target, party);
            party.member().is_none() && link.is_some_and(|link| link != Link::Sandbox)
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
    fn policies(&self, name: &'a str, target: &'a Party<'a>, plan: &mut TargetPlan) {
        let Some((member, standing)) = target
            .member()
            .and_then(|member| Some((member, member.policies.as_ref()?)))
        else {
            return;
        };
        if target.cluster.profile != Profile::ClusterMeshed {
            return;
        }
        for (source, party) in self.sources(name, target) {
            let tight = party.cluster.profile != Profile::ClusterMeshed;
            // While Peers of a member that was tightened stand, a policy that closes stands before them: one after the other
            // they go, and until the last has gone the others would let in what they did.
            let peers = member.peers.iter().flat_map(BTreeMap::values);
            let stands = || {
                let mut ours = peers.filter(|peer| peer.owner.source_cluster.as_deref() == Some(source));
                ours.any(|peer| self.ours(&peer.owner))
            };
            if link::between(target, party) != Some(Link::Meshed) && !(tight && stands()) {
                continue;
            }
            let mut networks = party.networks();
            let held = || self.rolls.get(source).is_some_and(|roll| !roll.held.is_empty());
            if party.cluster.profile != Profile::Sandbox && (party.member().is_none() || held()) {
                // What is not seen now is not gone: a policy that shrinks would close its member, and unblock its networks.
                let ours = standing.values().filter(|policy| {
                    policy.owner.source_cluster.as_deref() == Some(source) && self.ours(&policy.owner)
                });
                let known = ours
                    .filter_map(|policy| policy.spec.as_ref().ok())
                    .flat_map(|spec| &spec.networks);
                networks.extend(known.copied().filter(|net| party.cluster.allows(*net)));
            }
            if networks.is_empty() {
                continue;
            }
            let closed = link::closed(party);
            let spec = PolicySpec {
                sources: networks.clone(),
                networks,
                allow: if closed { BTreeSet::new() } else { target.networks() },
                deny: member.api_endpoints.clone(),
                infrastructure_ports: self.settings.infrastructure_ports.clone(),
                anchored: if closed {
                    BTreeSet::new()
                } else {
                    anchor::anchored(&target.cluster, self.rolls.get(name))
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
                .insert(self.policy_name(target, standing, source), planned);
        }
    }

    /// In a sandbox: the members whose Services it reaches send nothing into it but replies.
    fn grantors(&self, name: &'a str, target: &'a Party<'a>, plan: &mut TargetPlan) {
        let member = target.member().filter(|_| target.cluster.profile == Profile::Sandbox);
        let Some((member, standing)) = member.and_then(|member| Some((member, member.policies.as_ref()?))) else {
            return;
        };
        for (source, party) in self.sources(name, target) {
            if self.link(name, target, party) != Some(Link::Grantor) {
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
                .insert(self.policy_name(target, standing, source), planned);
        }
    }

    fn policy_name(&self, target: &Party<'_>, standing: &BTreeMap<String, ObservedPolicy>, source: &str) -> String {
        let readable = self.naming.policy(self.mesh, source, false);
        let ours = |owner| {
            let of = ownership::of(owner, &self.seen.hub, self.claimants);
            of == Ownership::Mesh(self.mesh)
                || of == Ownership::Unlabelled && ownership::may_return(owner, self.mesh, source)
        };
        let foreign = standing.get(&readable).is_some_and(|policy| !ours(&policy.owner))
            || self.used(target).policies.contains(&readable);
        if foreign {
            self.naming.policy(self.mesh, source, true)
        } else {
            readable
        }
    }

    fn services(&self, name: &'a str, target: &'a Party<'a>, assembled: &mut Assembled) {
        let importing = target.member();
        let ours = |service: &ObjectName| {
            let standing = importing.and_then(|member| member.services.get(service));
            standing
                .and_then(|service| service.managed.as_ref())
                .is_some_and(|owner| self.ours(owner))
        };
        let mut names: BTreeSet<ObjectName> = BTreeSet::new();
        for grant in &target.cluster.egress {
            let party = self.parties.get(&grant.cluster);
            let link = party.and_then(|party| link::between(party, target));
            let through = party.filter(|_| link == Some(Link::Sandbox));
            let through = through.map(|party| self.through(party, name));
            let exporter = match party {
                Some(party) if matches!(link, Some(Link::Meshed | Link::Sandbox)) => Ok(&party.cluster),
                party => Err(link::refusal(target, party, &grant.cluster)),
            };
            let ends = services::Ends {
                mesh: self.mesh,
                importer: &target.cluster,
                importing,
                exporting: party.filter(|_| exporter.is_ok()).and_then(|party| party.observed),
                exporter,
                reach: through.as_ref().map_or(Reach::Anywhere, Reach::Gateways),
                ours: &ours,
                taken: self.used(target).services.contains(&grant.local) || !names.insert(grant.local.clone()),
            };
            let mirror = ends.mirror(grant, self.naming);
            if mirror.keep {
                assembled.plan.kept.insert(grant.local.clone());
            }
            if let Some(service) = mirror.service {
                assembled.plan.services.insert(grant.local.clone(), service);
            }
            if !mirror.report.message.is_empty() {
                assembled.facts.insert(Fact::EgressUnresolved {
                    cluster: name.to_owned(),
                    service: grant.local.clone(),
                    message: mirror.report.message.clone(),
                });
            }
            assembled.egress.push(mirror.report);
        }
    }
}

/// Whether this is the hub's own entry.
pub(super) fn is_local(cluster: &Cluster) -> bool {
    cluster.identity == ClusterIdentity::Local
}

/// That sandboxes cannot enter a member that was seen.
fn no_gateway(target: &Party<'_>) -> Option<Fact> {
    let cluster = &target.cluster.name;
    let message = gateways::none_there(cluster, target.member()?)?;
    Some(Fact::NoGateway {
        cluster: cluster.clone(),
        message,
    })
}
