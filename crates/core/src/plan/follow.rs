//! Applies changes of Nodes, Peers and the freshness of members to the last plan, instead of planning all meshes anew.
//!
//! [`super::plan`] is the reference: [`Follower::plan`] returns an equal plan. [`Follower`] follows a change only if it can show
//! that the change touches nothing but the Peers of the changed Nodes, the reports about the changed Nodes and members, and which
//! objects may be deleted. After any other change it plans anew.
//! [`nodes`] has the conditions for Nodes, [`peers`] those for existing Peers.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    Fact, MeshPlan, Naming, Plan, PlannedPeer, Settings, Skipped, by_age, claims,
    link::{self, Link},
    location,
    mesh::{MeshPlanner, PreparedMesh},
    peers::existing::is_matched,
    plan_and_keep,
    target::{KeptTarget, MemberTraits, MeshMember},
};
use crate::{
    mesh::{Addressing, ClusterIdentity, Mesh, MeshId, Profile},
    observe::Observations,
};

mod changes;
mod freshness;
mod nodes;
mod pair;
mod peers;

use changes::MemberChanges;
use freshness::FreshnessPatch;

/// By entry name.
type MeshChanges<'a> = BTreeMap<&'a str, MemberChanges<'a>>;

/// Why a change is not followed, so that all meshes are planned anew.
pub type NotFollowed = &'static str;

/// What may have changed in the steps of each member.
pub(crate) type StepChanges = BTreeMap<ClusterIdentity, MemberStepChanges>;

/// What may have changed in the steps of one member.
#[derive(Debug, Default)]
pub(crate) struct MemberStepChanges {
    /// Names of Peers whose plan or observation changed, and of unplanned Peers if the controller may now delete them, or may no
    /// longer do so.
    pub(crate) peers: BTreeSet<String>,
    /// The controller may now delete objects of other kinds that are not planned, or may no longer do so.
    pub(crate) has_other_kinds: bool,
}

/// Plans all meshes again and again, and follows changes.
#[derive(Debug, Default)]
pub(crate) struct Follower {
    last: Option<Last>,
}

/// The last plan, and its inputs.
#[derive(Debug)]
struct Last {
    meshes: Vec<Mesh>,
    settings: Settings,
    seen: Arc<Observations>,
    accepted: claims::Accepted,
    plan: Arc<Plan>,
    kept: BTreeMap<MeshId, Result<Kept, NotFollowed>>,
}

/// The data of one mesh that is needed, in addition to its last plan, to follow a change. A mesh whose changes cannot be followed
/// has the reason instead. When a change is followed, only [`KeptTarget::irregular`] is updated in this value.
#[derive(Debug)]
pub(super) struct Kept {
    /// By entry name.
    traits: BTreeMap<String, Arc<MemberTraits>>,
    /// The anchored networks of each member, by entry name.
    anchored: BTreeMap<String, Vec<ipnet::IpNet>>,
    /// As in [`PreparedMesh`].
    not_enforcing: BTreeSet<String>,
    /// By entry name.
    targets: BTreeMap<String, KeptTarget>,
}

/// What changes in the plan of one mesh.
#[derive(Debug, Default)]
struct Patch {
    /// By target and name. `None` = the Peer is not planned any more.
    peers: BTreeMap<String, BTreeMap<String, Option<Arc<PlannedPeer>>>>,
    /// By entry name.
    reports: BTreeMap<String, ReportPatch>,
    /// By entry name.
    freshness: BTreeMap<String, FreshnessPatch>,
}

/// New values for the report of one entry.
#[derive(Debug, Default)]
struct ReportPatch {
    registered: usize,
    skipped: Vec<Skipped>,
    behind_nat: Option<String>,
}

impl Follower {
    /// Plans all meshes, as [`super::plan`] does, or follows the changes since the last call.
    ///
    /// Returns the plan, and which steps of [`crate::diff`] may have changed. If all meshes were planned anew, returns the reason instead.
    pub(crate) fn plan(
        &mut self,
        meshes: &[Mesh],
        seen: &Arc<Observations>,
        settings: &Settings,
        naming: &dyn Naming,
    ) -> (Arc<Plan>, Result<StepChanges, NotFollowed>) {
        let why = match &mut self.last {
            None => "there is no earlier plan",
            Some(last) => match last.follow(meshes, seen, settings, naming) {
                Ok(changed) => {
                    debug_assert!(
                        *last.plan == super::plan(meshes, seen, settings, naming),
                        "the plan that followed {changed:?} differs from one that is made anew"
                    );
                    return (Arc::clone(&last.plan), Ok(changed));
                }
                Err(why) => why,
            },
        };
        let (plan, (accepted, kept)) = plan_and_keep(meshes, seen, settings, naming);
        let plan = Arc::new(plan);
        self.last = Some(Last {
            meshes: meshes.to_vec(),
            settings: settings.clone(),
            seen: Arc::clone(seen),
            accepted,
            plan: Arc::clone(&plan),
            kept,
        });
        (plan, Err(why))
    }
}

impl Last {
    fn follow(
        &mut self,
        meshes: &[Mesh],
        seen: &Arc<Observations>,
        settings: &Settings,
        naming: &dyn Naming,
    ) -> Result<StepChanges, NotFollowed> {
        if self.meshes != meshes || self.settings != *settings {
            return Err("the ClusterMeshes or the settings changed");
        }
        let before = Arc::clone(&self.seen);
        let changes = changes::find(&before, seen)?;
        let by_age = by_age(meshes);
        let mut changed_meshes: BTreeMap<&MeshId, (&Mesh, MeshChanges<'_>)> = BTreeMap::new();
        for (identity, changes) in changes {
            // It is enough to find the first entry. If the cluster has several entries, their meshes have no `Kept`, and the
            // change is not followed.
            let mut entries = meshes
                .iter()
                .flat_map(|mesh| mesh.clusters.iter().map(move |entry| (mesh, entry)));
            let (mesh, entry) = entries
                .find(|(_, entry)| entry.identity == *identity)
                .ok_or("no mesh has an entry for a changed member")?;
            let (_, of_mesh) = changed_meshes
                .entry(&mesh.id)
                .or_insert_with(|| (mesh, BTreeMap::new()));
            of_mesh.insert(&entry.name, changes);
        }
        let mut patches: Vec<(&MeshId, Patch)> = Vec::new();
        for (id, (mesh, changes)) in &changed_meshes {
            let last = self.kept.get(*id).zip(self.plan.meshes.get(*id));
            let (kept, planned) = last.ok_or("a changed mesh has no plan")?;
            let planner = |seen| MeshPlanner {
                mesh,
                all_meshes: &by_age,
                accepted: &self.accepted,
                seen,
                settings,
                naming,
                claimants: &self.plan.claimants,
                used: &NO_NAMES,
            };
            let follower = MeshFollower {
                kept: kept.as_ref().map_err(|why| *why)?,
                planned,
                before: planner(&before),
                after: planner(seen),
            };
            let mut patch = Patch::default();
            follower.follow_nodes(changes, &mut patch)?;
            follower.check_peers(changes, &patch)?;
            follower.follow_freshness(changes, &mut patch);
            patches.push((*id, patch));
        }
        let mut changed = StepChanges::new();
        for (id, patch) in patches {
            let mut by_target: BTreeMap<String, MemberStepChanges> = BTreeMap::new();
            for (target, peers) in &patch.peers {
                let names = peers.keys().cloned();
                by_target.entry(target.clone()).or_default().peers.extend(names);
            }
            for (entry, changes) in changed_meshes[id]
                .1
                .iter()
                .filter(|(_, changes)| !changes.peers.is_empty())
            {
                let names = changes.peers.iter().map(|row| row.name.to_owned());
                by_target.entry((*entry).to_owned()).or_default().peers.extend(names);
            }
            for target in patch.freshness.values().flat_map(|patch| &patch.targets) {
                by_target.entry(target.clone()).or_default().has_other_kinds = true;
            }
            if !patch.is_empty()
                && let Some(planned) = Arc::make_mut(&mut self.plan).meshes.get_mut(id)
            {
                patch.apply(planned);
            }
            let (Some(planned), Some(Ok(kept))) = (self.plan.meshes.get(id), self.kept.get_mut(id)) else {
                continue;
            };
            for (target, mut changes) in by_target {
                kept.update(&target, &changes.peers, planned, seen);
                if changes.has_other_kinds {
                    changes.peers.extend(kept.unplanned(&target));
                }
                changed.insert(planned.identities[&target].clone(), changes);
            }
        }
        self.seen = Arc::clone(seen);
        Ok(changed)
    }
}

/// A mesh that can be followed shares no cluster with another mesh, so no names are reserved.
static NO_NAMES: BTreeMap<ClusterIdentity, super::target::UsedNames> = BTreeMap::new();

/// Follows the changes of one mesh.
struct MeshFollower<'a> {
    kept: &'a Kept,
    /// The last plan.
    planned: &'a MeshPlan,
    /// The planner with the observations of the last plan.
    before: MeshPlanner<'a, 'a>,
    /// The planner with the present observations.
    after: MeshPlanner<'a, 'a>,
}

impl MeshFollower<'_> {
    /// How `source` is connected to `target`, as in [`super::target::MeshInputs::link`].
    fn link(&self, target: &str, source: &str) -> Option<Link> {
        let member = |name: &str| {
            let traits = self.kept.traits.get(name)?;
            Some(MeshMember {
                traits: Arc::clone(traits),
                observed: self.after.seen.members.get(&traits.cluster.identity),
            })
        };
        let (target_member, source) = (member(target)?, member(source)?);
        link::between_enforced(&target_member, &source, self.kept.not_enforcing.contains(target))
    }
}

impl Kept {
    /// `targets` = by entry name.
    pub(super) fn of(
        planner: &MeshPlanner<'_, '_>,
        prepared: &PreparedMesh<'_>,
        planned: &MeshPlan,
        targets: BTreeMap<String, KeptTarget>,
        has_shared_claims: bool,
    ) -> Result<Self, NotFollowed> {
        let PreparedMesh {
            mesh_members,
            registries,
            not_enforcing,
        } = prepared;
        let all_entries = || planner.all_meshes.iter().flat_map(|mesh| &mesh.clusters);
        let is_shared = |identity: &ClusterIdentity| {
            let same = all_entries().filter(|entry| entry.identity.same_cluster(identity));
            same.count() > 1
        };
        let members = || mesh_members.values();
        let is_masqueraded = |member: &MeshMember<'_>| is_masqueraded(&member.traits);
        let conditions: [(bool, NotFollowed); 10] = [
            (planned.paused, "the mesh is paused"),
            (
                members().any(|member| is_shared(&member.cluster.identity)),
                "a cluster is an entry of several meshes, or of one mesh twice",
            ),
            (
                members().any(|member| member.last_observed().is_none()),
                "a member was not observed since the controller started",
            ),
            (
                // The existing Peers decide which cluster-meshed member keeps the key.
                registries.iter().any(|(name, registry)| {
                    mesh_members[name].cluster.profile == Profile::ClusterMeshed && registry.has_duplicate_key()
                }),
                "two nodes have the same key",
            ),
            (
                targets.values().any(|target| target.is_entangled),
                "an existing Peer lacks a mesh label, or has the key of a Peer that is planned with another name",
            ),
            (
                // The existing Peers decide which node leads.
                members().any(|member| member.last_observed().is_some_and(location::may_have_followers)),
                "a node may be led by another node of its Kilo location",
            ),
            (
                // In a masqueraded target, the closed policy of a quarantined source contains the allowed IPs of its Peers.
                members().any(is_masqueraded) && members().any(|member| member.cluster.quarantine),
                "a member is masqueraded, and one is quarantined",
            ),
            (
                // This is also true if a node is held, or a member connects its locations or reaches Services through gateways.
                has_shared_claims,
                "Peers in one target may claim the same key, prefix or name",
            ),
            (
                members().any(|member| !member.cluster.exports.is_empty()),
                "a member exports pods",
            ),
            (
                planned
                    .facts
                    .iter()
                    .any(|fact| matches!(fact, Fact::EndpointUnresolved { .. })),
                "the host name of an endpoint does not resolve",
            ),
        ];
        if let Some((_, why)) = conditions.iter().find(|(applies, _)| *applies) {
            return Err(why);
        }
        let anchored = registries
            .iter()
            .map(|(name, registry)| (name.clone(), registry.anchored.clone()));
        Ok(Self {
            traits: mesh_members
                .iter()
                .map(|(name, member)| (name.clone(), Arc::clone(&member.traits)))
                .collect(),
            anchored: anchored.collect(),
            not_enforcing: not_enforcing.clone(),
            targets,
        })
    }

    fn has_masqueraded(&self) -> bool {
        self.traits.values().any(|traits| is_masqueraded(traits))
    }

    /// The anchored networks that the Peers of this source contain; none if it is masqueraded.
    fn anchored_in_peers(&self, source: &str) -> &[ipnet::IpNet] {
        let is_routed = self.traits.get(source).is_some_and(|traits| !is_masqueraded(traits));
        let networks = self.anchored.get(source).filter(|_| is_routed);
        networks.map(|networks| &**networks).unwrap_or_default()
    }

    /// Names of Peers in this target: at least those of all existing Peers that are not planned.
    fn unplanned(&self, target: &str) -> impl Iterator<Item = String> {
        let kept = self.targets.get(target).into_iter();
        kept.flat_map(|kept| kept.irregular.iter().chain(&kept.foreign).cloned())
    }

    /// Updates which of these Peers match no planned Peer.
    fn update(&mut self, target: &str, names: &BTreeSet<String>, planned: &MeshPlan, seen: &Observations) {
        let (Some(kept), Some(plan)) = (self.targets.get_mut(target), planned.targets.get(target)) else {
            return;
        };
        let member = planned
            .identities
            .get(target)
            .and_then(|identity| seen.members.get(identity)?.last());
        let existing = member.and_then(|member| member.peers.as_ref());
        for name in names {
            let planned = plan.peers.get(name);
            match existing.and_then(|existing| existing.get(name)) {
                Some(peer) if !planned.is_some_and(|planned| is_matched(peer, planned)) => {
                    kept.irregular.insert(name.clone());
                }
                _ => drop(kept.irregular.remove(name)),
            }
        }
    }
}

fn is_masqueraded(traits: &MemberTraits) -> bool {
    traits.cluster.effective_addressing() == Addressing::Masqueraded
}

impl Patch {
    fn is_empty(&self) -> bool {
        self.peers.is_empty() && self.reports.is_empty() && self.freshness.is_empty()
    }

    fn apply(self, planned: &mut MeshPlan) {
        for (target, peers) in self.peers {
            let Some(target_plan) = planned.targets.get_mut(&target) else {
                continue;
            };
            for (name, peer) in peers {
                match peer {
                    Some(peer) => drop(target_plan.peers.insert(name, peer)),
                    None => drop(target_plan.peers.remove(&name)),
                }
            }
            let number = target_plan.peers.len();
            planned
                .facts
                .retain(|fact| !matches!(fact, Fact::MeshTooLarge { cluster, .. } if *cluster == target));
            planned.facts.extend(Fact::mesh_too_large(&target, number));
        }
        for (entry, patch) in self.reports {
            let report = planned.clusters.entry(entry).or_default();
            report.registered = patch.registered;
            report.skipped = patch.skipped;
            report.behind_nat = patch.behind_nat;
        }
        for (entry, patch) in self.freshness {
            planned
                .facts
                .retain(|fact| !matches!(fact, Fact::MemberNotFresh { cluster, .. } if *cluster == entry));
            for target in &patch.targets {
                let Some(target) = planned.targets.get_mut(target) else {
                    continue;
                };
                if patch.not_fresh.is_some() {
                    target.sources_not_fresh.insert(entry.clone());
                } else {
                    target.sources_not_fresh.remove(&entry);
                }
            }
            planned.facts.extend(patch.not_fresh);
        }
    }
}
