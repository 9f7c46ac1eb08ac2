//! The plan of one mesh: its entries as parties, their rolls, their targets (rules 3, 7).

use std::collections::BTreeMap;

use super::{ClusterReport, Fact, MeshPlan, Naming, Reason, Settings, Skipped, TargetPlan, claims, nodes, target};
use crate::{
    key::PublicKey,
    mesh::{Cluster, ClusterIdentity, Mesh, Profile},
    observe::{Observation, Observations, ObservedPeer},
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
        let parties = self.parties(&mut planned);
        let rolls = self.rolls(&parties);
        for (name, party) in &parties {
            let roll = rolls.get(name);
            let report = ClusterReport {
                accepted: party.cluster.allowed.clone(),
                registered: 0,
                skipped: roll.map(|roll| roll.skipped.clone()).unwrap_or_default(),
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
            parties: &parties,
            rolls: &rolls,
            seen: self.seen,
            settings: self.settings,
            naming: self.naming,
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

    fn parties(&self, planned: &mut MeshPlan) -> BTreeMap<String, target::Party<'a>> {
        let mut parties = BTreeMap::new();
        for entry in &self.mesh.clusters {
            let mut cluster = entry.clone();
            let key = (self.mesh.id.clone(), entry.name.clone());
            cluster.allowed = self.accepted.networks.get(&key).cloned().unwrap_or_default();
            cluster.profile = self.profile(entry, planned);
            if let Some(message) = not_served(&cluster) {
                planned.facts.insert(Fact::NotServed {
                    cluster: entry.name.clone(),
                    message,
                });
                cluster.profile = Profile::Standard;
            }
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
            let connected = cluster.profile == Profile::ClusterMeshed && !cluster.allowed.is_empty();
            let discovered = target::discovered(observed.and_then(Observation::last));
            parties.insert(
                entry.name.clone(),
                target::Party {
                    cluster,
                    observed,
                    connected,
                    discovered,
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

    fn rolls(&self, parties: &BTreeMap<String, target::Party<'a>>) -> BTreeMap<String, nodes::Roll<'a>> {
        let mut rolls = BTreeMap::new();
        for (name, party) in parties {
            if let (true, Some(member)) = (party.connected, party.member()) {
                let has_peer = |node: &str| self.has_peer(parties, name, node);
                let source = nodes::Source {
                    cluster: &party.cluster,
                    member,
                    has_peer: &has_peer,
                };
                rolls.insert(name.clone(), source.roll());
            }
        }
        self.settle_keys(parties, &mut rolls);
        rolls
    }

    fn ours(&self, peer: &ObservedPeer) -> bool {
        ownership::of(&peer.owner, &self.seen.hub, self.claimants) == Ownership::Mesh(&self.mesh.id)
    }

    /// Whether any member holds a Peer of this mesh for that node.
    fn has_peer(&self, parties: &BTreeMap<String, target::Party<'_>>, cluster: &str, node: &str) -> bool {
        let names = [false, true].map(|taken| self.naming.peer(&self.mesh.id, cluster, node, taken));
        parties
            .values()
            .filter_map(target::Party::member)
            .filter_map(|member| member.peers.as_ref())
            .any(|peers| {
                names
                    .iter()
                    .filter_map(|name| peers.get(name))
                    .any(|peer| self.ours(peer))
            })
    }

    /// One key, one node, over all members. An attacker chooses its own timestamps, so the order is: local first, then
    /// whoever has the Peer already, then the order of the entries (rule 3).
    fn settle_keys(
        &self,
        parties: &BTreeMap<String, target::Party<'_>>,
        rolls: &mut BTreeMap<String, nodes::Roll<'_>>,
    ) {
        // (not local, has no Peer yet, position of the entry, entry, node): the smallest wins.
        type KeyClaim = (bool, bool, usize, String, String);
        let peers = parties
            .values()
            .filter_map(target::Party::member)
            .filter_map(|member| member.peers.as_ref());
        let mut standing: BTreeMap<&str, BTreeMap<PublicKey, &str>> = BTreeMap::new();
        for (name, peer) in peers.flatten().filter(|(_, peer)| self.ours(peer)) {
            if let (Some(source), Ok(spec)) = (&peer.owner.source_cluster, &peer.spec) {
                standing.entry(source).or_default().insert(spec.public_key, name);
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
                let claim = (!local, !stands, position, entry.name.clone(), node.to_owned());
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

/// What this version does not serve. Such an entry is connected to nothing: a boundary that is not enforced must not look
/// as if it were.
fn not_served(cluster: &Cluster) -> Option<String> {
    if cluster.quarantine {
        return Some(format!(
            "quarantine of cluster {:?} is not served yet: its Peers are removed as for isolationProfile: standard",
            cluster.name
        ));
    }
    (cluster.profile == Profile::Sandbox).then(|| {
        format!(
            "isolationProfile sandbox of cluster {:?} is not served yet: it is connected to nothing. Use cluster-meshed for a \
             trusted cluster, or standard",
            cluster.name
        )
    })
}
