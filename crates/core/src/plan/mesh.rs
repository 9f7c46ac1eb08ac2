//! The plan of one mesh: its entries as parties, their rolls, their targets (rules 3, 7).

use std::collections::{BTreeMap, BTreeSet};

use super::{
    ClusterReport, Fact, MeshPlan, Naming, Reason, Settings, Skipped, TargetPlan, anchor, claims, collisions, endpoint,
    gateways, link, nodes, target,
};
use crate::{
    key::PublicKey,
    mesh::{Cluster, ClusterIdentity, Mesh, MeshId, Profile},
    observe::{Observation, Observations, ObservedPeer, Owner},
    ownership::{self, Claimant, Ownership},
};

pub(super) struct MeshPlanner<'a> {
    pub(super) mesh: &'a Mesh,
    pub(super) all: &'a [&'a Mesh],
    pub(super) accepted: &'a claims::Accepted,
    pub(super) seen: &'a Observations,
    pub(super) settings: &'a Settings,
    pub(super) naming: &'a dyn Naming,
    pub(super) claimants: &'a [Claimant],
    pub(super) used: &'a BTreeMap<ClusterIdentity, target::Used>,
}

/// What a mesh comes to before anything of it is written into a target.
pub(super) struct Stage<'a> {
    /// The entries.
    pub(super) parties: BTreeMap<String, target::Party<'a>>,
    /// Their Nodes.
    pub(super) rolls: BTreeMap<String, nodes::Roll<'a>>,
    /// Members whose nodes hold nobody to a policy.
    pub(super) lax: BTreeSet<String>,
}

impl<'a> MeshPlanner<'a> {
    pub(super) fn plan(&self) -> MeshPlan {
        let mesh = self.mesh;
        let mut planned = MeshPlan {
            paused: mesh.paused,
            deleting: mesh.deleting,
            identities: mesh
                .clusters
                .iter()
                .map(|c| (c.name.clone(), c.identity.clone()))
                .collect(),
            facts: self.accepted.facts.get(&mesh.id).cloned().unwrap_or_default(),
            ..MeshPlan::default()
        };
        if mesh.deleting {
            planned.targets = mesh
                .clusters
                .iter()
                .map(|c| (c.name.clone(), TargetPlan::default()))
                .collect();
            return planned;
        }
        let stage = self.stage(&mut planned);
        planned.facts.extend(collisions::facts(&stage.parties));
        let Stage { parties, rolls, lax } = &stage;
        for (name, party) in parties {
            let roll = rolls.get(name);
            let linked = parties
                .values()
                .any(|other| link::between(other, party).is_some_and(|link| link != link::Link::Grantor));
            let report = ClusterReport {
                accepted: (self.accepted.networks)
                    .get(&(mesh.id.clone(), name.clone()))
                    .cloned()
                    .unwrap_or_default(),
                anchored: party
                    .anchored(roll)
                    .into_iter()
                    .map(|net| (net, BTreeSet::new()))
                    .collect(),
                registered: 0,
                gateways: 0,
                sandbox: party.cluster.profile == Profile::Sandbox,
                // Nodes that need no Peer are not left out.
                skipped: roll
                    .filter(|_| linked)
                    .map(|roll| roll.skipped.clone())
                    .unwrap_or_default(),
                uncovered: roll.map(|roll| roll.uncovered.clone()).unwrap_or_default(),
                linked,
                held: roll
                    .map(|r| r.held.iter().map(|(n, why)| ((*n).to_owned(), *why)).collect())
                    .unwrap_or_default(),
            };
            planned.clusters.insert(name.clone(), report);
            planned
                .facts
                .extend(roll.into_iter().flat_map(|roll| roll.facts.iter().cloned()));
        }
        let assembly = target::Assembly {
            mesh: &mesh.id,
            parties,
            rolls,
            lax,
            seen: self.seen,
            settings: self.settings,
            naming: self.naming,
            all: self.all,
            claimants: self.claimants,
            used: self.used,
        };
        for cluster in &mesh.clusters {
            let assembled = assembly.target(&cluster.name);
            planned.targets.insert(cluster.name.clone(), assembled.plan);
            planned.facts.extend(assembled.facts);
            planned.egress.extend(assembled.egress);
            for (source, skipped) in assembled.skipped {
                let report = planned.clusters.entry(source).or_default();
                report.skipped.extend(skipped);
                report.skipped.sort();
            }
        }
        planned
    }

    /// What the targets are assembled from; what is to be said of it goes into `planned`.
    pub(super) fn stage(&self, planned: &mut MeshPlan) -> Stage<'a> {
        let parties = self.parties(planned);
        let rolls = self.rolls(&parties);
        let lax = Self::lax(&parties, &rolls);
        self.note_quarantines(&parties, &lax, planned);
        Stage { parties, rolls, lax }
    }

    fn parties(&self, planned: &mut MeshPlan) -> BTreeMap<String, target::Party<'a>> {
        let mut parties = BTreeMap::new();
        for entry in &self.mesh.clusters {
            let mut cluster = entry.clone();
            let key = (self.mesh.id.clone(), entry.name.clone());
            cluster.allowed = self.accepted.networks.get(&key).cloned().unwrap_or_default();
            cluster.profile = self.profile(entry, planned);
            cluster.quarantine = self.quarantined_by(entry).is_some();
            let observed = self.seen.members.get(&entry.identity);
            let (state, trouble) = observed.map_or(("Missing", Some("it has not been looked at yet")), |o| {
                (o.word(), o.trouble())
            });
            if let Some(message) = trouble {
                let message = message.to_owned();
                planned.facts.insert(Fact::MemberNotFresh {
                    cluster: entry.name.clone(),
                    state,
                    message,
                });
            }
            let connected = cluster.profile != Profile::Standard && !cluster.allowed.is_empty();
            let member = observed.and_then(Observation::last);
            let accepted = cluster.allowed.clone();
            if let Some(member) = member {
                gateways::leave_out_networks(&mut cluster, member);
                anchor::forget_node_addresses(&mut cluster, member);
            }
            let discovered = target::discovered(member);
            parties.insert(
                entry.name.clone(),
                target::Party {
                    cluster,
                    accepted,
                    observed,
                    connected,
                    discovered,
                    families: endpoint::NodeFamilies::of(member),
                },
            );
        }
        parties
    }

    /// One profile in all meshes of a hub; else the tighter one holds (rule 7).
    fn profile(&self, entry: &Cluster, planned: &mut MeshPlan) -> Profile {
        let mut tightest = entry.profile;
        for mesh in self.all.iter().filter(|mesh| !mesh.deleting) {
            for other in mesh
                .clusters
                .iter()
                .filter(|other| other.identity.same_cluster(&entry.identity))
            {
                if other.profile != entry.profile {
                    planned.facts.insert(Fact::ProfileConflict {
                        cluster: entry.name.clone(),
                        message: format!(
                            "cluster {:?} is {} here and {} in ClusterMesh {}; the tighter one holds",
                            entry.name,
                            entry.profile.as_str(),
                            other.profile.as_str(),
                            mesh.id
                        ),
                    });
                    tightest = tightest.max(other.profile);
                }
            }
        }
        tightest
    }

    /// The mesh that quarantines this entry's cluster. Quarantined in one mesh of a hub is quarantined in all.
    fn quarantined_by(&self, entry: &Cluster) -> Option<&'a MeshId> {
        let meshes = self.all.iter().filter(|mesh| !mesh.deleting);
        let mut asking = meshes.filter(|mesh| {
            let mut entries = mesh.clusters.iter();
            entries.any(|other| other.quarantine && other.identity.same_cluster(&entry.identity))
        });
        asking.next().map(|mesh| &mesh.id)
    }

    /// What a quarantine comes to: objects stand where policies close them, Peers go where nothing enforces a policy.
    fn note_quarantines(
        &self,
        parties: &BTreeMap<String, target::Party<'a>>,
        lax: &BTreeSet<String>,
        planned: &mut MeshPlan,
    ) {
        for (name, party) in parties {
            let Some(by) = self.quarantined_by(&party.cluster) else {
                continue;
            };
            let meshed = |target: &&String| link::between(&parties[*target], party) == Some(link::Link::Meshed);
            let removed = lax.iter().filter(meshed);
            let removed: Vec<String> = removed.map(|target| format!("{target:?}")).collect();
            let objects = if removed.is_empty() {
                "its objects stand".to_owned()
            } else {
                format!(
                    "its objects stand, but for its Peers in {}, whose nodes enforce no policy: those are removed",
                    removed.join(", ")
                )
            };
            planned.facts.insert(Fact::Quarantined {
                cluster: name.clone(),
                message: format!(
                    "cluster {name:?} is quarantined by ClusterMesh {by}: nothing from it is let through, and {objects}"
                ),
            });
        }
    }

    /// Members whose nodes hold nobody to a policy, of those that were seen.
    fn lax(
        parties: &BTreeMap<String, target::Party<'a>>,
        rolls: &BTreeMap<String, nodes::Roll<'a>>,
    ) -> BTreeSet<String> {
        let lax = parties.iter().filter(|(name, party)| {
            let member = party.member();
            member.is_some_and(|member| !link::enforces(member, rolls.get(*name)))
        });
        lax.map(|(name, _)| name.clone()).collect()
    }

    fn rolls(&self, parties: &BTreeMap<String, target::Party<'a>>) -> BTreeMap<String, nodes::Roll<'a>> {
        let mut rolls = BTreeMap::new();
        for (name, party) in parties {
            if let (true, Some(member)) = (party.connected, party.member()) {
                let standing = |node: &str| self.standing(parties, name, node);
                let source = nodes::Source {
                    cluster: &party.cluster,
                    member,
                    standing: &standing,
                };
                rolls.insert(name.clone(), source.roll());
            }
        }
        self.settle_keys(parties, &mut rolls);
        rolls
    }

    fn ours(&self, peer: &ObservedPeer) -> bool {
        self.is_own(&peer.owner)
    }

    fn is_own(&self, owner: &Owner) -> bool {
        ownership::of(owner, &self.seen.hub, self.claimants) == Ownership::Mesh(&self.mesh.id)
    }

    /// The Peers of this mesh for that node that stand in the members.
    fn standing(
        &self,
        parties: &BTreeMap<String, target::Party<'a>>,
        cluster: &str,
        node: &str,
    ) -> Vec<&'a ObservedPeer> {
        let names = [false, true].map(|taken| self.naming.peer(&self.mesh.id, cluster, node, taken));
        let members = parties
            .values()
            .filter(|party| trusted(party))
            .filter_map(target::Party::member);
        let peers = members.filter_map(|member| member.peers.as_ref());
        let named = peers.flat_map(|peers| names.iter().filter_map(|name| peers.get(name)));
        named.filter(|peer| self.ours(peer)).collect()
    }

    /// One key, one node, over all members. An attacker chooses its own timestamps, so the order is: local first, then a
    /// cluster-meshed member before a sandbox, then whoever has the Peer, or the place in the SandboxAccess, already, then the order
    /// of the entries (rule 3). What a sandbox has already counts against other sandboxes alone: else it had the key of every Node
    /// for which a moment came without one.
    fn settle_keys(
        &self,
        parties: &BTreeMap<String, target::Party<'_>>,
        rolls: &mut BTreeMap<String, nodes::Roll<'_>>,
    ) {
        // (not local, profile, has none yet, position of the entry, entry, node): the smallest wins.
        type KeyClaim = (bool, Profile, bool, usize, String, String);
        let peers = parties
            .values()
            .filter(|party| trusted(party))
            .filter_map(target::Party::member)
            .filter_map(|member| member.peers.as_ref());
        let accesses = parties
            .values()
            .filter(|party| trusted(party))
            .filter_map(target::Party::member)
            .flat_map(|member| member.accesses.iter().flatten());
        let mut standing: BTreeMap<&str, BTreeMap<PublicKey, &str>> = BTreeMap::new();
        for (name, peer) in peers.flatten().filter(|(_, peer)| self.ours(peer)) {
            if let (Some(source), Ok(spec)) = (&peer.owner.source_cluster, &peer.spec) {
                standing.entry(source).or_default().insert(spec.public_key, name);
            }
        }
        for (_, access) in accesses.filter(|(_, access)| self.is_own(&access.owner)) {
            if let (Some(source), Ok(spec)) = (&access.owner.source_cluster, &access.spec) {
                let nodes = spec.nodes.iter().map(|(key, node)| (*key, &*node.name));
                standing.entry(source).or_default().extend(nodes);
            }
        }
        let mut claims: BTreeMap<PublicKey, Vec<KeyClaim>> = BTreeMap::new();
        for (position, entry) in self.mesh.clusters.iter().enumerate() {
            let Some(party) = parties.get(&entry.name) else {
                continue;
            };
            let standing = standing.get(&*entry.name);
            let local = target::is_local(entry);
            let mut claim = |key: PublicKey, stands: bool, node: &str| {
                let claim = (
                    !local,
                    party.cluster.profile,
                    !stands,
                    position,
                    entry.name.clone(),
                    node.to_owned(),
                );
                claims.entry(key).or_default().push(claim);
            };
            match rolls.get(&entry.name) {
                Some(roll) => roll.registered.iter().for_each(|node| {
                    claim(
                        node.key,
                        standing.is_some_and(|keys| keys.contains_key(&node.key)),
                        node.node,
                    );
                }),
                // Not seen since the controller started: its standing Peers speak for it, or whoever copies a key takes it.
                None if party.connected => {
                    standing
                        .into_iter()
                        .flatten()
                        .for_each(|(key, peer)| claim(*key, true, peer));
                }
                None => {}
            }
        }
        for (key, mut claims) in claims {
            claims.sort();
            let mut claims = claims.into_iter();
            let Some((.., owner_cluster, owner)) = claims.next() else {
                continue;
            };
            for (.., cluster, node) in claims {
                let Some(roll) = rolls.get_mut(&cluster) else { continue };
                roll.registered.retain(|registered| registered.node != node);
                let message =
                    format!("key {key} is that of Node {owner} of cluster {owner_cluster:?}; one of the two is a copy");
                roll.skipped.push(Skipped {
                    node,
                    reason: Reason::PublicKeyDuplicate,
                    message,
                });
                roll.skipped.sort();
            }
        }
    }
}

/// Whether Peers that stand in a member count as news of others: whoever owns a sandbox's API server may write any there.
fn trusted(party: &target::Party<'_>) -> bool {
    party.cluster.profile == Profile::ClusterMeshed
}
