//! What one member holds of the others: Peers, policies, mirrored Services (rules 2, 6, 8).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use ipnet::IpNet;

use super::{
    EgressReport, Fact, Naming, PlannedPolicy, Settings, Skipped, TargetPlan, anchor,
    nodes::{Registered, Roll},
    peers, services,
};
use crate::{
    key::PublicKey,
    mesh::{Addressing, Cluster, ClusterIdentity, MeshId, ObjectName},
    observe::{Member, Observation, Observations, ObservedPeer, PolicySpec},
    ownership::{self, Claimant, Ownership},
};

/// One entry as the planner sees it, with `cluster.allowed` cut down to what was accepted.
pub(super) struct Party<'a> {
    pub(super) cluster: Cluster,
    pub(super) observed: Option<&'a Observation<Member>>,
    /// It takes part: cluster-meshed, and it holds networks.
    pub(super) connected: bool,
    /// Where its nodes saw other keys, in the order of the nodes' names.
    pub(super) discovered: BTreeMap<PublicKey, Vec<SocketAddr>>,
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

    /// The member's own addresses in the mesh: all it was granted or, masqueraded, its WireGuard range alone.
    fn networks(&self) -> BTreeSet<IpNet> {
        let cluster = &self.cluster;
        if cluster.effective_addressing() == Addressing::Routed {
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
    pub(super) seen: &'a Observations,
    pub(super) settings: &'a Settings,
    pub(super) naming: &'a dyn Naming,
    /// All meshes of this hub, oldest first.
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
}

impl Used {
    pub(super) fn add(&mut self, plan: &TargetPlan) {
        self.peers.extend(plan.peers.keys().cloned());
        self.policies.extend(plan.policies.keys().cloned());
        self.services.extend(plan.services.keys().cloned());
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
        for (source, party) in self.sources(name, target) {
            // What the operator took out of the mesh goes, seen or not.
            let meshed = target.connected && party.connected;
            if meshed && party.observed.and_then(Observation::fresh).is_none() {
                assembled.plan.retained.insert(source.to_owned());
            }
        }
        if target.connected {
            let mut writer = peers::Writer::new(self, name, target);
            for (source, party) in self.sources(name, target).filter(|(_, party)| party.connected) {
                writer.add_source(source, party);
            }
            writer.finish(&mut assembled);
            self.policies(name, target, &mut assembled.plan);
        }
        self.services(name, target, &mut assembled);
        assembled
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

    fn registered(&self, name: &str) -> &[Registered<'a>] {
        self.rolls.get(name).map_or(&[], |roll| &roll.registered)
    }

    /// Names that an older mesh writes into this target with the same plan.
    pub(super) fn used(&self, target: &Party<'_>) -> &'a Used {
        static NOTHING: Used = Used {
            peers: BTreeSet::new(),
            policies: BTreeSet::new(),
            services: BTreeSet::new(),
        };
        self.used
            .get(&one_cluster(&target.cluster.identity))
            .unwrap_or(&NOTHING)
    }

    /// Whether a standing Peer's member is connected and nothing was seen of it since this controller started.
    pub(super) fn unseen(&self, peer: &ObservedPeer) -> bool {
        let source = peer
            .owner
            .source_cluster
            .as_deref()
            .and_then(|source| self.parties.get(source));
        source.is_some_and(|party| party.connected && party.member().is_none())
    }

    pub(super) fn ours(&self, owner: &crate::observe::Owner) -> bool {
        ownership::of(owner, &self.seen.hub, self.claimants) == Ownership::Mesh(self.mesh)
    }

    fn policies(&self, name: &'a str, target: &'a Party<'a>, plan: &mut TargetPlan) {
        let Some(member) = target.member() else { return };
        let Some(standing) = &member.policies else { return };
        for (source, party) in self.sources(name, target).filter(|(_, party)| party.connected) {
            let mut networks = party.networks();
            if party.member().is_none() || self.rolls.get(source).is_some_and(|roll| !roll.held.is_empty()) {
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
            let spec = PolicySpec {
                sources: networks.clone(),
                networks,
                allow: target.networks(),
                deny: member.api_endpoints.clone(),
                infrastructure_ports: self.settings.infrastructure_ports.clone(),
                anchored: anchor::anchored(&target.cluster, self.registered(name))
                    .into_iter()
                    .collect(),
                sandbox: false,
                grants: BTreeSet::new(),
            };
            let readable = self.naming.policy(self.mesh, source, false);
            let foreign = standing.get(&readable).is_some_and(|policy| !self.ours(&policy.owner))
                || self.used(target).policies.contains(&readable);
            let policy_name = if foreign {
                self.naming.policy(self.mesh, source, true)
            } else {
                readable
            };
            plan.policies.insert(
                policy_name,
                PlannedPolicy {
                    source: source.to_owned(),
                    spec,
                },
            );
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
            let exporter = self
                .parties
                .get(&grant.cluster)
                .filter(|party| party.connected && target.connected && grant.cluster != name);
            let ends = services::Ends {
                mesh: self.mesh,
                importer: &target.cluster,
                importing,
                exporter: exporter.map(|party| &party.cluster),
                exporting: exporter.and_then(|party| party.observed),
                ours: &ours,
                taken: self.used(target).services.contains(&grant.local) || !names.insert(grant.local.clone()),
            };
            let mirror = ends.mirror(grant, self.naming);
            if mirror.keep {
                assembled.plan.retained.insert(grant.cluster.clone());
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
