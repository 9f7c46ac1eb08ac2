//! Publishes the results of a pass: the report of each mesh (status and Events, written by [`crate::hub_writer`]), metrics, and
//! `/debug/state`.
//!
//! This module collects the input of a report and decides whether the report waits. [`crate::report`] builds the report.

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
    links::{self, BrokenTunnels},
    mesh::{ClusterIdentity, MeshId},
    observe::{Claim, Member, Node, Observation, ObservedPeer, Server},
    ownership::{self, Ownership},
    pending::find_pending,
    plan::{ClusterReport, MeshPlan},
    versions::MemberVersions,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{Pass, Reconciler, SharedDebugView, link_reports::LinkReports, removed::not_removed};
use crate::{
    hub_writer::{Desired, HubWriter},
    metrics::{EntryGauges, EntryLabels, Metrics},
    outdated_agents::{OutdatedAgents, agents_grace},
    report::{MemberDetails, ReportInput, build_report},
};

/// The longest time that a report waits for outstanding objects and for members without a fresh observation.
const MAX_REPORT_DELAY: Duration = Duration::from_secs(10);

/// The message about an entry in `LoadedMesh::unlocatable`, for a mesh that is being deleted.
fn unlocatable_message(entry: &str) -> String {
    format!(
        "the spec no longer contains its entry, so the cluster is unknown and its objects cannot be removed. Put the entry back, or annotate \
         the ClusterMesh with {FORCE_CLEANUP}={entry}"
    )
}

/// The state of the reports between passes, and the places to which they are published.
pub(super) struct Reports {
    hub_writer: HubWriter,
    pub(super) metrics: Metrics,
    debug_view: SharedDebugView,
    /// `lastSync` of each entry of a mesh ([`MemberDetails::last_sync`]).
    synced: BTreeMap<(MeshId, String), Time>,
    /// For each mesh whose report has a reason to wait ([`Reconciler::must_wait`]): since when.
    waiting_since: BTreeMap<MeshId, Instant>,
    /// The broken links in the last report of each mesh.
    links: LinkReports,
    /// Nodes whose agent enforces an outdated revision of the PeerPolicies.
    outdated_agents: OutdatedAgents,
    /// Gateways that have applied an outdated generation of a SandboxAccess.
    outdated_gateways: OutdatedAgents,
}

impl Reports {
    pub(super) fn new(hub_writer: HubWriter, metrics: Metrics, debug_view: SharedDebugView) -> Self {
        Self {
            hub_writer,
            metrics,
            debug_view,
            synced: BTreeMap::new(),
            waiting_since: BTreeMap::new(),
            links: LinkReports::default(),
            outdated_agents: OutdatedAgents::default(),
            outdated_gateways: OutdatedAgents::default(),
        }
    }

    /// Forgets everything. If this replica becomes the leader, its first reports start from the status in the hub, as after a restart.
    pub(super) fn reset(&mut self) {
        self.hub_writer.publish(BTreeMap::new());
        self.metrics.replace(Vec::new());
        (self.synced, self.waiting_since) = (BTreeMap::new(), BTreeMap::new());
        (self.links, self.outdated_agents, self.outdated_gateways) = Default::default();
    }

    /// The next time at which a report may change only because time passes.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let outdated = [self.outdated_agents.due(now), self.outdated_gateways.due(now)];
        outdated.into_iter().chain([self.links.due()]).flatten().min()
    }

    /// Forgets all meshes and members except these.
    fn keep(&mut self, meshes: &BTreeSet<MeshId>, is_member: impl Fn(&ClusterIdentity) -> bool) {
        self.waiting_since.retain(|id, _| meshes.contains(id));
        self.synced.retain(|(id, _), _| meshes.contains(id));
        self.links.keep(meshes);
        self.outdated_agents.keep(&is_member);
        self.outdated_gateways.keep(&is_member);
    }
}

impl Reconciler {
    /// Gives the hub writer the desired status, Events and finalizer of each mesh, except of meshes that never parsed. Returns
    /// `false` if a report waits ([`Self::must_wait`]).
    pub(super) fn report_status(&mut self, pass: &Pass) -> bool {
        let now = truncate_to_seconds(k8s_openapi::jiff::Timestamp::now());
        let mut all_reported = true;
        let mut gauges = Vec::new();
        let mut desired = BTreeMap::new();
        let mut removed = self.sync_removed(pass);
        for loaded in pass.meshes.values() {
            let id = &loaded.mesh.id;
            let removed = removed.remove(id).unwrap_or_default();
            let (Some(plan), Some(object)) = (pass.plan.meshes.get(id), &loaded.object) else {
                continue;
            };
            let details = self.collect_details(pass, id, plan, object, &now);
            let broken = self.broken_links(id, plan);
            gauges.extend(entry_gauges(pass, id, plan, &details));
            let must_wait = self.must_wait(pass, id, plan);
            all_reported &= !must_wait;
            let report = (!must_wait).then(|| {
                let mut unwritten = self.collect_unwritten(pass, id, plan);
                if plan.deleting {
                    let unlocatable = loaded.unlocatable.iter();
                    unwritten.extend(unlocatable.map(|entry| (entry.clone(), unlocatable_message(entry))));
                }
                build_report(&ReportInput {
                    object,
                    mesh: &loaded.mesh,
                    plan,
                    refused: loaded.refused.as_ref(),
                    warnings: &loaded.warnings,
                    unwritten: &unwritten,
                    removed: &removed,
                    given_up: &self.meshes.removed.given_up(id).collect::<Vec<_>>(),
                    outstanding: &outstanding_by_entry(pass, id, plan),
                    details: &details,
                    broken: &broken,
                    pending: &find_pending(&loaded.mesh, &pass.plan, &pass.seen, &unwritten),
                    now: &now,
                })
            });
            let finalizer = self.finalizer_change(pass, loaded);
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
        self.reports.metrics.replace(gauges);
        self.reports.hub_writer.publish(desired);
        let existing: BTreeSet<MeshId> = pass.meshes.keys().cloned().collect();
        self.reports
            .keep(&existing, |identity| self.members.contains_key(identity));
        all_reported
    }

    /// Returns the links with broken tunnels that the report of a mesh lists ([`LinkReports::throttle`]).
    fn broken_links(&mut self, id: &MeshId, plan: &MeshPlan) -> Vec<BrokenTunnels> {
        let members = plan.identities.iter();
        let reported: BTreeMap<_, _> = members
            .filter_map(|(entry, identity)| {
                let feeds = self.members.get(identity)?.session.feeds();
                Some((entry.clone(), feeds.links(id)))
            })
            .collect();
        self.reports
            .links
            .throttle(id, links::find_broken(plan, &reported), Instant::now())
    }

    /// Whether the report of a mesh has to wait, at most [`MAX_REPORT_DELAY`]. It waits for a member that lost its fresh observation only a
    /// short time ago, or just began to be read ([`Session::is_settling`](crate::session::Session::is_settling)). If the mesh is not
    /// paused, it also waits for objects that do not match the plan yet. It does not wait for those in a member that refuses writes, or
    /// that does not answer.
    fn must_wait(&mut self, pass: &Pass, id: &MeshId, plan: &MeshPlan) -> bool {
        let members = || {
            plan.identities
                .values()
                .filter_map(|identity| self.members.get(identity))
        };
        let is_settling = members().any(|member| member.session.is_settling());
        let has_outstanding = !plan.paused
            && pass.outstanding.iter().any(|(identity, counts)| {
                // A member may refuse writes, or not answer, for a long time.
                let has_failed = self
                    .members
                    .get(identity)
                    .is_some_and(|member| member.write_problem(id).is_some() || member.session.is_unresponsive());
                !has_failed && counts.keys().any(|(mesh, _)| mesh == id)
            });
        if !is_settling && !has_outstanding {
            self.reports.waiting_since.remove(id);
            return false;
        }
        let waiting_since = &mut self.reports.waiting_since;
        let since = waiting_since.entry(id.clone()).or_insert_with(Instant::now);
        since.elapsed() < MAX_REPORT_DELAY
    }

    /// Collects what the report of a mesh contains about each member in addition to the plan.
    fn collect_details(
        &mut self,
        pass: &Pass,
        id: &MeshId,
        plan: &MeshPlan,
        object: &ClusterMesh,
        now: &Time,
    ) -> BTreeMap<String, MemberDetails> {
        let mut details = BTreeMap::new();
        for (entry, identity) in &plan.identities {
            let Some(member) = self.members.get(identity) else {
                continue;
            };
            let observation = pass.seen.members.get(identity);
            let is_fresh = matches!(observation, Some(Observation::Fresh(_)));
            let is_outstanding = pass
                .outstanding
                .get(identity)
                .is_some_and(|counts| counts.keys().any(|(mesh, _)| mesh == id));
            let key = (id.clone(), entry.clone());
            if is_fresh && !is_outstanding && !member.writer.is_busy() {
                let stored_or_now = || {
                    let row = object
                        .status
                        .iter()
                        .flat_map(|s| &s.clusters)
                        .find(|row| row.name == *entry);
                    row.and_then(|row| row.last_sync.clone()).unwrap_or_else(|| now.clone())
                };
                self.reports.synced.entry(key.clone()).or_insert_with(stored_or_now);
            } else if is_outstanding {
                // While objects are outstanding, each pass sets the current time. When all objects are written, the time stays.
                self.reports.synced.insert(key.clone(), now.clone());
            }
            let seen = observation.and_then(Observation::last);
            let feeds = member.session.feeds();
            let (current, enforced) = (feeds.policy_revision(), feeds.enforced_revisions());
            let grace = agents_grace(seen.map_or(0, |seen| seen.nodes.len()));
            let outdated =
                (self.reports.outdated_agents).update(identity, current.as_deref(), enforced, grace, Instant::now());
            // The same for gateways, with texts instead of revisions. The current text is always `APPLIED`. The text of each
            // gateway is `APPLIED`, or the list of its outdated SandboxAccesses.
            let current_text = is_fresh.then_some(enforcement::APPLIED);
            let texts_of_gateways = seen.map(enforcement::outdated_accesses).unwrap_or_default();
            let gateways = (self.reports.outdated_gateways).update(
                identity,
                current_text,
                texts_of_gateways,
                enforcement::GRACE,
                Instant::now(),
            );
            // Without Peers of this mesh, only the gateways of a member have tunnels of the mesh. Then it is no problem if a node
            // has no wg-agent, or if its packets bypass the PeerPolicies.
            let observed_peers = seen.and_then(|seen| seen.peers.as_ref());
            let is_of_mesh = |peer: &ObservedPeer| {
                ownership::of(&peer.owner, &pass.plan.hub, &pass.plan.claimants) == Ownership::Mesh(id)
            };
            let has_peers = plan.targets.get(entry).is_some_and(|target| !target.peers.is_empty())
                || observed_peers.is_some_and(|peers| peers.values().any(is_of_mesh));
            let planned = plan.clusters.get(entry).zip(seen);
            let restarting = planned.map_or_else(BTreeSet::new, |(planned, seen)| restarting_kg_nodes(planned, seen));
            let mut unenforced = Unenforced::default();
            if has_peers {
                unenforced = feeds.unenforced();
                unenforced.without_agent.extend(restarting.iter().cloned());
            }
            details.insert(
                entry.clone(),
                MemberDetails {
                    is_fresh,
                    uid: seen.and_then(|seen| seen.uid.clone()),
                    expiry: member.session.expiry(),
                    version: member.session.version(),
                    agents: seen.map(|_| {
                        let counts = feeds.count_agents(env!("CARGO_PKG_VERSION"));
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
                    versions: MemberVersions {
                        kubernetes: member.session.version(),
                        lacks_policies: seen.is_some_and(|seen| seen.policies.is_none()),
                        nodes: feeds.versions(),
                    },
                    last_sync: self.reports.synced.get(&key).cloned(),
                },
            );
        }
        details
    }

    /// Returns the entries to whose cluster an object cannot be written, with the reason. If the mesh is being deleted, this includes
    /// clusters without a fresh observation.
    fn collect_unwritten(&self, pass: &Pass, id: &MeshId, plan: &MeshPlan) -> BTreeMap<String, String> {
        let mut unwritten = BTreeMap::new();
        for (entry, identity) in &plan.identities {
            let write_problem = self.members.get(identity).and_then(|member| member.write_problem(id));
            let not_fresh = pass
                .seen
                .members
                .get(identity)
                .and_then(Observation::not_fresh_reason)
                .filter(|_| plan.deleting);
            let Some(why) = write_problem.as_deref().or(not_fresh) else {
                continue;
            };
            let why = if plan.deleting {
                not_removed(entry, why)
            } else {
                why.to_owned()
            };
            unwritten.insert(entry.clone(), why);
        }
        unwritten
    }

    /// Updates the content of `/debug/state`.
    pub(super) fn update_debug_view(&self, pass: &Pass) {
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
                        let steps = identity.and_then(|identity| pass.step_counts.get(identity)).copied();
                        let steps = steps.unwrap_or_default();
                        let row = serde_json::json!({
                            "member": identity.map(ToString::to_string),
                            "observation": seen.map(Observation::state_name),
                            "trouble": seen.and_then(Observation::not_fresh_reason),
                            "registered": report.registered,
                            "skipped": report.skipped.iter().map(|s| format!("{}: {}", s.node, s.reason)).collect::<Vec<_>>(),
                            "held": report.held.iter().map(|(node, reason)| format!("{node}: {reason}")).collect::<Vec<_>>(),
                            "openSteps": steps,
                        });
                        (name.clone(), row)
                    })
                    .collect();
                let refused = pass.meshes.get(id).and_then(|loaded| loaded.refused.as_ref()).map(|(reason, _)| *reason);
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
        let mut view = self.reports.debug_view.lock().unwrap_or_else(PoisonError::into_inner);
        view.sessions = self
            .members
            .iter()
            .map(|(identity, m)| (identity.to_string(), Arc::clone(&m.session)))
            .collect();
        view.meshes = serde_json::json!(meshes);
    }
}

/// Drops the fraction of a second. The API does not store fractions, so a stored time would always differ from the desired time.
pub(super) fn truncate_to_seconds(time: k8s_openapi::jiff::Timestamp) -> Time {
    Time(k8s_openapi::jiff::Timestamp::from_second(time.as_second()).unwrap_or(time))
}

/// Returns the nodes of kg that are part of the mesh although they publish no key now. kg removes its annotations at each restart.
/// The status counts them as nodes without wg-agent, as before the restart, so that a restart of kg causes no status write.
fn restarting_kg_nodes(planned: &ClusterReport, member: &Member) -> BTreeSet<String> {
    let skipped: BTreeSet<&str> = planned.skipped.iter().map(|skipped| &*skipped.node).collect();
    // If a node is neither held nor skipped, the leader of its Kilo location has the tunnel for it.
    let is_meshed = |name: &str| planned.held.contains_key(name) || planned.registered > 0 && !skipped.contains(name);
    let has_no_key = |node: &Node| node.server == Server::Kilo && node.public_key == Claim::Absent;
    let nodes = member
        .nodes
        .iter()
        .filter(|(_, node)| has_no_key(node) && node.ready && !node.deleting);
    nodes
        .filter(|(name, _)| is_meshed(name))
        .map(|(name, _)| name.to_owned())
        .collect()
}

/// Counts the objects of a mesh that differ from the plan, by target entry and source entry.
fn outstanding_by_entry(pass: &Pass, id: &MeshId, plan: &MeshPlan) -> BTreeMap<(String, String), usize> {
    let mut outstanding = BTreeMap::new();
    for (entry, identity) in &plan.identities {
        let counts = pass.outstanding.get(identity).into_iter().flatten();
        for ((_, source), count) in counts.filter(|((mesh, _), _)| mesh == id) {
            outstanding.insert((entry.clone(), source.clone()), *count);
        }
    }
    outstanding
}

fn entry_gauges(
    pass: &Pass,
    id: &MeshId,
    plan: &MeshPlan,
    details: &BTreeMap<String, MemberDetails>,
) -> Vec<EntryGauges> {
    let gauges = plan.clusters.iter().map(|(cluster, report)| {
        let identity = plan.identities.get(cluster);
        let observation = identity.and_then(|identity| pass.seen.members.get(identity));
        let mut skipped = BTreeMap::new();
        for skip in &report.skipped {
            *skipped.entry(skip.reason.to_string()).or_default() += 1;
        }
        EntryGauges {
            entry: EntryLabels {
                mesh: id.to_string(),
                cluster: cluster.clone(),
            },
            registered: report.registered,
            state: observation.map_or("Missing", Observation::state_name),
            skipped,
            credentials_expire: details
                .get(cluster)
                .and_then(|details| Some(details.expiry?.expires.as_second())),
        }
    });
    gauges.collect()
}
