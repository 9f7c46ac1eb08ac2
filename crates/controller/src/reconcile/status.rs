//! What a pass reports of each mesh: status and Events, which [`crate::hub_writer`] writes, metrics, `/debug/state`; and when
//! a report has to wait. The words are made in [`crate::report`].

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use clustermesh_api::{
    mesh::{AgentCounts, ClusterMesh},
    names::FORCE_CLEANUP,
};
use clustermesh_core::{
    enforcement::{self, Unenforced},
    links::{self, Broken},
    mesh::MeshId,
    observe::{Claim, Member, Node, Observation, ObservedPeer, Server},
    pending::pending,
    plan::{ClusterReport, MeshPlan},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{Pass, Reconciler, removed::ways_out};
use crate::{
    hub_writer::Desired,
    metrics::{Entry, EntryGauges},
    report::{Facts, Subject, report},
};

/// For so long a report waits for writes that are on their way.
const PATIENCE: Duration = Duration::from_secs(10);

/// Of an entry that holds networks and whose cluster the spec does not name any more.
fn unfindable(entry: &str) -> String {
    format!(
        "the spec no longer says which cluster it is, so its objects there cannot be removed. Put its entry back, or annotate \
         the ClusterMesh with {FORCE_CLEANUP}={entry}"
    )
}

impl Reconciler {
    /// Publishes what ought to stand at the hub for every mesh; `false` = some report waits.
    pub(super) fn report_status(&mut self, pass: &Pass) -> bool {
        let now = seconds(k8s_openapi::jiff::Timestamp::now());
        let mut settled = true;
        let mut gauges = Vec::new();
        let mut desired = BTreeMap::new();
        let mut removed = self.sync_removed(pass);
        for known in pass.known.values() {
            let id = &known.mesh.id;
            let removed = removed.remove(id).unwrap_or_default();
            let (Some(plan), Some(object)) = (pass.plan.meshes.get(id), &known.object) else {
                continue;
            };
            let facts = self.facts(pass, id, plan, object, &now);
            let broken = self.broken(id, plan);
            gauges.extend(entry_gauges(pass, id, plan));
            let waits = self.waits(pass, id, plan);
            settled &= !waits;
            let report = (!waits).then(|| {
                let mut unwritten = self.unwritten(pass, id, plan);
                if plan.deleting {
                    unwritten.extend(known.lost.iter().map(|entry| (entry.clone(), unfindable(entry))));
                }
                report(&Subject {
                    object,
                    mesh: &known.mesh,
                    plan,
                    refused: known.refused.as_ref(),
                    warnings: &known.warnings,
                    unwritten: &unwritten,
                    removed: &removed,
                    outstanding: &outstanding(pass, id, plan),
                    facts: &facts,
                    broken: &broken,
                    pending: &pending(&known.mesh, &pass.plan, &pass.seen, &unwritten),
                })
            });
            let finalizer = self.finalizer(pass, known);
            let object = Arc::clone(object);
            desired.insert(
                id.clone(),
                Desired {
                    object,
                    finalizer,
                    report,
                },
            );
        }
        self.metrics.replace(gauges);
        self.hub_writer.publish(desired);
        let there: BTreeSet<MeshId> = pass.known.keys().cloned().collect();
        self.unreported.retain(|id, _| there.contains(id));
        self.synced.retain(|(id, _), _| there.contains(id));
        self.links.keep(&there);
        let members = &self.members;
        self.lagging.keep(|identity| members.contains_key(identity));
        self.gateways_lagging.keep(|identity| members.contains_key(identity));
        settled
    }

    /// Between which members tunnels are down, as it is to be told.
    fn broken(&mut self, id: &MeshId, plan: &MeshPlan) -> Vec<Broken> {
        let members = plan.identities.iter();
        let said: BTreeMap<_, _> = members
            .filter_map(|(entry, identity)| {
                let tables = self.members.get(identity)?.session.tables();
                Some((entry.clone(), tables.links(id)))
            })
            .collect();
        self.links.steady(id, links::broken(plan, &said), Instant::now())
    }

    /// Whether the report of a mesh should wait: a session has only just begun, or its writes are on their way.
    fn waits(&mut self, pass: &Pass, id: &MeshId, plan: &MeshPlan) -> bool {
        let members = || {
            plan.identities
                .values()
                .filter_map(|identity| self.members.get(identity))
        };
        let settling = members().any(|member| member.session.settling());
        let writing = !plan.paused
            && pass.outstanding.iter().any(|(identity, counts)| {
                // Nothing can be written to a member that does not answer, and what is still open there is reported at once.
                let failed = self
                    .members
                    .get(identity)
                    .is_some_and(|member| member.writer.trouble(id).is_some() || member.session.silent());
                !failed && counts.keys().any(|(mesh, _)| mesh == id)
            });
        if !settling && !writing {
            self.unreported.remove(id);
            return false;
        }
        let since = *self.unreported.entry(id.clone()).or_insert_with(Instant::now);
        since.elapsed() < PATIENCE
    }

    fn facts(
        &mut self,
        pass: &Pass,
        id: &MeshId,
        plan: &MeshPlan,
        object: &ClusterMesh,
        now: &Time,
    ) -> BTreeMap<String, Facts> {
        let mut facts = BTreeMap::new();
        for (entry, identity) in &plan.identities {
            let Some(member) = self.members.get(identity) else {
                continue;
            };
            let observation = pass.seen.members.get(identity);
            let fresh = matches!(observation, Some(Observation::Fresh(_)));
            let open = pass
                .outstanding
                .get(identity)
                .is_some_and(|counts| counts.keys().any(|(mesh, _)| mesh == id));
            let key = (id.clone(), entry.clone());
            if fresh && !open && !member.writer.busy() {
                let before = || {
                    let row = object
                        .status
                        .iter()
                        .flat_map(|s| &s.clusters)
                        .find(|row| row.name == *entry);
                    row.and_then(|row| row.last_sync.clone()).unwrap_or_else(|| now.clone())
                };
                self.synced.entry(key.clone()).or_insert_with(before);
            } else if open {
                // Forgotten while something is missing: the next time it is whole is another time.
                self.synced.insert(key.clone(), now.clone());
            }
            let seen = observation.and_then(Observation::last);
            let tables = member.session.tables();
            let (standing, said) = (tables.policy_revision(), tables.enforced());
            let outdated = (self.lagging).told(identity, standing.as_deref(), said, Instant::now());
            let said = seen.map(enforcement::applied_by_gateways).unwrap_or_default();
            let applied = fresh.then_some(enforcement::APPLIED);
            let gateways = (self.gateways_lagging).told(identity, applied, said, Instant::now());
            // Where no Peer of this mesh is, nothing has to be held to a policy: sandboxes enter through gateways.
            let standing_peers = seen.and_then(|seen| seen.peers.as_ref());
            let of_mesh = |peer: &ObservedPeer| peer.owner.mesh.as_ref() == Some(&id.name);
            let has_peers = plan.targets.get(entry).is_some_and(|target| !target.peers.is_empty())
                || standing_peers.is_some_and(|peers| peers.values().any(of_mesh));
            let meshed = plan.clusters.get(entry).zip(seen);
            let restarting = meshed.map_or_else(BTreeSet::new, |(report, seen)| restarting(report, seen));
            let mut unenforced = Unenforced::default();
            if has_peers {
                unenforced = tables.unenforced();
                unenforced.without_agent.extend(restarting.iter().cloned());
            }
            facts.insert(
                entry.clone(),
                Facts {
                    fresh,
                    uid: seen.and_then(|seen| seen.uid.clone()),
                    version: member.session.version(),
                    agents: seen.map(|_| {
                        let counts = tables.agents(env!("CARGO_PKG_VERSION"));
                        AgentCounts {
                            kilo: counts.kilo + i64::try_from(restarting.len()).unwrap_or(i64::MAX),
                            ..counts
                        }
                    }),
                    unenforced: Unenforced {
                        outdated,
                        gateways,
                        ..unenforced
                    },
                    last_sync: self.synced.get(&key).cloned(),
                },
            );
        }
        facts
    }

    /// What could not be written into which entry, and what still has to go when the mesh is being deleted.
    fn unwritten(&self, pass: &Pass, id: &MeshId, plan: &MeshPlan) -> BTreeMap<String, String> {
        let mut unwritten = BTreeMap::new();
        for (entry, identity) in &plan.identities {
            let trouble = self.members.get(identity).and_then(|member| member.writer.trouble(id));
            let absent = pass
                .seen
                .members
                .get(identity)
                .and_then(Observation::trouble)
                .filter(|_| plan.deleting);
            let why = match (trouble, absent) {
                (Some(why), _) => why,
                (None, Some(why)) => format!("{why}. {}", ways_out(entry)),
                (None, None) => continue,
            };
            unwritten.insert(entry.clone(), why);
        }
        unwritten
    }

    /// Puts the pass where `/debug/state` finds it.
    pub(super) fn show(&self, pass: &Pass) {
        let meshes: BTreeMap<String, serde_json::Value> = pass
            .plan
            .meshes
            .iter()
            .map(|(id, plan)| {
                let clusters: BTreeMap<_, _> = plan
                    .clusters
                    .iter()
                    .map(|(name, report)| {
                        let identity = plan.identities.get(name);
                        let seen = identity.and_then(|identity| pass.seen.members.get(identity));
                        let steps = identity.and_then(|identity| pass.steps.get(identity)).map_or(0, Vec::len);
                        let row = serde_json::json!({
                            "member": identity.map(ToString::to_string),
                            "observation": seen.map(Observation::word),
                            "trouble": seen.and_then(Observation::trouble),
                            "registered": report.registered,
                            "skipped": report.skipped.iter().map(|s| format!("{}: {}", s.node, s.reason)).collect::<Vec<_>>(),
                            "held": report.held.iter().map(|(node, reason)| format!("{node}: {reason}")).collect::<Vec<_>>(),
                            "openSteps": steps,
                        });
                        (name.clone(), row)
                    })
                    .collect();
                let refused = pass.known.get(id).and_then(|known| known.refused.as_ref()).map(|(word, _)| *word);
                let row = serde_json::json!({
                    "paused": plan.paused,
                    "deleting": plan.deleting,
                    "refused": refused,
                    "facts": plan.facts.iter().map(|fact| format!("{fact:?}")).collect::<Vec<_>>(),
                    "clusters": clusters,
                });
                (id.to_string(), row)
            })
            .collect();
        let mut view = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        view.sessions = self
            .members
            .iter()
            .map(|(identity, m)| (identity.to_string(), Arc::clone(&m.session)))
            .collect();
        view.meshes = serde_json::json!(meshes);
    }
}

/// A time as the API keeps it. With its fraction it would differ from what is read back.
pub(super) fn seconds(time: k8s_openapi::jiff::Timestamp) -> Time {
    Time(k8s_openapi::jiff::Timestamp::from_second(time.as_second()).unwrap_or(time))
}

/// Nodes of kg that publish nothing now and are meshed all the same. kg removes its annotations at each restart, which is no
/// reason to write a status.
fn restarting(report: &ClusterReport, member: &Member) -> BTreeSet<String> {
    let skipped: BTreeSet<&String> = report.skipped.iter().map(|skipped| &skipped.node).collect();
    // One that is neither held nor skipped is carried by the leader of its location.
    let meshed = |name: &String| report.held.contains_key(name) || report.registered > 0 && !skipped.contains(name);
    let bare = |node: &Node| node.server == Server::Kilo && node.public_key == Claim::Absent;
    let nodes = member
        .nodes
        .iter()
        .filter(|(_, node)| bare(node) && node.ready && !node.deleting);
    nodes
        .filter(|(name, _)| meshed(name))
        .map(|(name, _)| name.clone())
        .collect()
}

/// How many objects of a mesh are not as planned, by the entry where they are and the entry they describe.
fn outstanding(pass: &Pass, id: &MeshId, plan: &MeshPlan) -> BTreeMap<(String, String), usize> {
    let mut outstanding = BTreeMap::new();
    for (entry, identity) in &plan.identities {
        let counts = pass.outstanding.get(identity).into_iter().flatten();
        for ((_, source), count) in counts.filter(|((mesh, _), _)| mesh == id) {
            outstanding.insert((entry.clone(), source.clone()), *count);
        }
    }
    outstanding
}

fn entry_gauges(pass: &Pass, id: &MeshId, plan: &MeshPlan) -> Vec<EntryGauges> {
    let gauges = plan.clusters.iter().map(|(cluster, report)| {
        let identity = plan.identities.get(cluster);
        let observation = identity.and_then(|identity| pass.seen.members.get(identity));
        let mut skipped = BTreeMap::new();
        for skip in &report.skipped {
            *skipped.entry(skip.reason.to_string()).or_default() += 1;
        }
        EntryGauges {
            entry: Entry {
                mesh: id.to_string(),
                cluster: cluster.clone(),
            },
            registered: report.registered,
            state: observation.map_or("Missing", Observation::word),
            skipped,
        }
    });
    gauges.collect()
}
