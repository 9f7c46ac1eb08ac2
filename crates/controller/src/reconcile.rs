//! The reconcile loop. Each pass observes all members, plans, computes the diff, passes the steps of the diff to the writers of the
//! members, and reports.
//!
//! `clustermesh_core` plans and computes the diff, as pure functions. This module owns the state between passes, such as the session
//! and the writer of each member.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use clustermesh_api::{convert, mesh::ClusterMesh, names::Names};
use clustermesh_core::{
    diff::Action,
    lanes::{self, Source},
    mesh::{ClusterIdentity, Mesh, MeshId, ObjectName},
    observe::{Member as ObservedMember, Observation, Observations},
    plan::Plan,
    planner::Steps,
};
use tokio_util::task::TaskTracker;

use crate::{
    apply::{Claims, Connection, MemberWriter},
    election::Leadership,
    feed::{Changed, Feed, Trust},
    held_nodes::HeldNodes,
    hub::Hub,
    hub_writer::HubWriter,
    metrics::Metrics,
    resolver::{Resolver, collect_names},
    session::{Interest, Session},
};

mod finalize;
mod link_reports;
mod meshes;
mod planning;
mod removed;
mod status;
mod takeover;

use meshes::{LastValidMeshes, LoadedMesh, load_meshes};
use planning::{Planning, count_outstanding};
use removed::RemovedClusters;
pub(crate) use removed::RemovedRow;
use status::{Reports, truncate_to_seconds};
use takeover::Takeover;

/// The next pass runs after this time even if nothing changes.
const RESYNC: Duration = Duration::from_secs(30);
/// The next pass runs after this time if the report of a mesh waits for writes or observations, or if the ClusterMeshes were not listed
/// yet.
const PENDING_RESYNC: Duration = Duration::from_millis(500);

/// One member: the session that observes it, and the writer that changes it.
struct Member {
    session: Arc<Session>,
    writer: MemberWriter,
}

impl Member {
    /// Why objects of a mesh cannot be written into the member. `None` = no problem is known.
    fn write_problem(&self, mesh: &MeshId) -> Option<String> {
        // The fence is the Lease in the member (docs/glossary.md).
        let of_fence = || self.session.writer()?.fence?.problem();
        self.writer.problem(mesh).or_else(of_fence)
    }
}

/// The content of `/debug/state`, shared with the admin endpoint.
pub(crate) type SharedDebugView = Arc<Mutex<DebugView>>;

/// The sessions of the last pass, as they are now, and the meshes as that pass saw them, for `/debug/state`.
#[derive(Default)]
pub(crate) struct DebugView {
    sessions: BTreeMap<String, Arc<Session>>,
    meshes: serde_json::Value,
}

impl DebugView {
    /// Returns the sessions and the meshes as JSON, without secrets.
    pub(crate) fn dump(&self) -> serde_json::Value {
        let sessions: BTreeMap<_, _> = self
            .sessions
            .iter()
            .map(|(name, session)| (name, session.dump()))
            .collect();
        serde_json::json!({ "members": sessions, "meshes": self.meshes })
    }
}

/// The state of the reconcile loop between passes.
pub(crate) struct Reconciler {
    hub: Arc<Hub>,
    meshes: Meshes,
    members: BTreeMap<ClusterIdentity, Member>,
    held_nodes: HeldNodes,
    planning: Planning,
    resolver: Resolver,
    takeover: Takeover,
    reports: Reports,
    changed: Changed,
    /// The tasks that write into members. Shutdown waits for them.
    pub(crate) tasks: TaskTracker,
}

/// The ClusterMeshes, and the state of the loop about them.
struct Meshes {
    feed: Feed<Arc<ClusterMesh>>,
    /// The last valid content of each mesh.
    last_valid: LastValidMeshes,
    /// Clusters that were removed from a mesh but may still contain its objects.
    removed: RemovedClusters,
}

/// The data of one pass, for the writers and the reports.
struct Pass {
    meshes: BTreeMap<MeshId, LoadedMesh>,
    seen: Arc<Observations>,
    plan: Arc<Plan>,
    /// Moved to the writers when this replica writes.
    steps: Steps,
    /// The number of steps of each member.
    step_counts: BTreeMap<ClusterIdentity, usize>,
    /// For each member and source, the number of objects that differ from the plan, including objects of paused meshes.
    outstanding: BTreeMap<ClusterIdentity, BTreeMap<Source, usize>>,
    /// When the pass began to observe.
    observed_since: tokio::time::Instant,
}

impl Reconciler {
    pub(crate) fn new(
        hub: Arc<Hub>,
        meshes: Feed<Arc<ClusterMesh>>,
        hub_writer: HubWriter,
        metrics: Metrics,
        changed: Changed,
        debug_view: SharedDebugView,
    ) -> Self {
        Self {
            resolver: Resolver::start(Arc::clone(&changed)),
            hub,
            meshes: Meshes {
                feed: meshes,
                last_valid: LastValidMeshes::new(),
                removed: RemovedClusters::default(),
            },
            members: BTreeMap::new(),
            held_nodes: HeldNodes::default(),
            planning: Planning::default(),
            takeover: Takeover::default(),
            reports: Reports::new(hub_writer, metrics, debug_view),
            changed,
            tasks: TaskTracker::new(),
        }
    }

    /// Runs one pass. Returns the time after which the next pass is due if nothing changes.
    pub(crate) async fn pass(&mut self) -> Duration {
        // There is no plan before the first complete list, because a mesh that is not listed yet would lose its Peers. If the hub
        // later does not answer or refuses (403), the last listed meshes are used, but nothing is deleted.
        let trust = self.meshes.feed.trust();
        // A watch ends only some time after the hub has stopped answering. The election notices this earlier, because it reads or
        // renews the leader's Lease about once a second.
        let hub_is_fresh = trust == Trust::Live
            && (self.hub.election.hub_answers() || self.hub.election.leadership() == Leadership::Leader);
        let is_listed = match trust {
            Trust::Live => true,
            Trust::Broken(_) | Trust::Denied(_) => self.meshes.feed.has_answer(),
            Trust::Pending | Trust::Absent => false,
        };
        if !is_listed {
            self.stop_writing();
            return PENDING_RESYNC;
        }
        let (started, observed_since) = (Instant::now(), tokio::time::Instant::now());
        let loaded = load_meshes(&self.meshes.feed, &self.hub, &mut self.meshes.last_valid);
        self.meshes.removed.update(&loaded);
        self.sync_sessions(&loaded);

        let mut seen = self.observe();
        self.held_nodes.fill_ages(&mut seen, started);
        let meshes: Vec<Mesh> = loaded.values().map(|loaded| loaded.mesh.clone()).collect();
        self.resolver.set_names(collect_names(&meshes, &seen));
        let names = Names {
            hub: self.hub.id.clone(),
        };
        let settings = self.hub.settings.clone();
        let seen = Arc::new(seen);
        let mut planning = std::mem::take(&mut self.planning);
        let planned = tokio::task::spawn_blocking(move || {
            let (plan, mut steps, not_followed) = planning.plan(&meshes, &seen, &settings, &names);
            if !hub_is_fresh {
                let all = steps.values_mut();
                all.for_each(|steps| steps.retain(|step| step.action != Action::Delete));
            }
            let outstanding = count_outstanding(&plan, &seen, &steps);
            (planning, not_followed, seen, plan, steps, outstanding)
        });
        let (not_followed, seen, plan, steps, outstanding) = match planned.await {
            Ok((planning, not_followed, seen, plan, steps, outstanding)) => {
                self.planning = planning;
                (not_followed, seen, plan, steps, outstanding)
            }
            Err(error) => {
                tracing::error!(%error, "the planner failed; nothing is written");
                if cfg!(debug_assertions) && error.is_panic() {
                    // In a debug build the planner panics if the plan that followed a change differs from one that is made anew.
                    // The panic ends the controller, so that the test fails.
                    std::panic::resume_unwind(error.into_panic());
                }
                return RESYNC;
            }
        };
        let next_hold = self.held_nodes.update(&plan, &seen, started);
        if let Some(why) = not_followed {
            tracing::debug!(why, "planned all meshes anew");
        }
        self.reports
            .metrics
            .record_pass(started.elapsed(), not_followed.is_some());

        let mut pass = Pass {
            meshes: loaded,
            seen,
            plan,
            steps,
            step_counts: BTreeMap::new(),
            outstanding,
            observed_since,
        };
        finalize::drop_steps_without_finalizer(&mut pass);
        let counts = pass
            .steps
            .iter()
            .map(|(identity, steps)| (identity.clone(), steps.len()));
        pass.step_counts = counts.collect();
        // A standby observes and plans, so that it can write as soon as it is the leader.
        let leadership = self.hub.election.leadership();
        self.reports.metrics.set_leader(leadership == Leadership::Leader);
        let all_reported = match leadership {
            Leadership::Standby => {
                self.stop_writing();
                self.reports.reset();
                self.meshes.removed = RemovedClusters::default();
                true
            }
            // `Lapsed`: this replica was the leader and cannot renew the hub's Lease now. It still writes into the members whose
            // Leases it can renew. Its client sends no other writes.
            Leadership::Leader | Leadership::Lapsed if self.is_taking_over() => {
                self.stop_writing();
                false
            }
            Leadership::Leader | Leadership::Lapsed => {
                self.write(&mut pass);
                self.report_status(&pass)
            }
        };
        self.update_debug_view(&pass);

        let time_until = |due: Instant| due.saturating_duration_since(Instant::now());
        // The time at which the next node of `kg` becomes silent. Times in the past are left out: they are from members that cannot be
        // observed now.
        let silences = self.members.values().filter_map(|member| member.session.silence_due());
        let silence = silences.filter(|due| *due > started).min();
        let next = [
            next_hold,
            self.reports.due(started).map(time_until),
            silence.map(time_until),
        ];
        let next = next.into_iter().flatten().min().unwrap_or(RESYNC).min(RESYNC);
        if all_reported {
            // At least 50 ms, so that deadlines in quick succession share a pass. While a report waits, there is no minimum.
            next.max(Duration::from_millis(50))
        } else {
            next.min(PENDING_RESYNC)
        }
    }

    /// Starts the sessions that the meshes need, updates which objects each session reads, and stops the other sessions.
    fn sync_sessions(&mut self, loaded: &BTreeMap<MeshId, LoadedMesh>) {
        let mut wanted = compute_interests(loaded.values().map(|loaded| &loaded.mesh));
        for identity in self.meshes.removed.identities() {
            wanted.entry(identity.clone()).or_default();
        }
        let in_use = loaded.values().filter(|loaded| !loaded.mesh.deleting);
        let in_use: BTreeSet<&ClusterIdentity> = in_use
            .flat_map(|loaded| loaded.mesh.clusters.iter().map(|cluster| &cluster.identity))
            .collect();
        for (identity, interest) in &wanted {
            let member = self.members.entry(identity.clone()).or_insert_with(|| {
                tracing::info!(member = %identity, "session starts");
                Member {
                    session: Arc::new(Session::start(
                        identity.clone(),
                        Arc::clone(&self.hub),
                        Arc::clone(&self.changed),
                    )),
                    writer: MemberWriter::new(Arc::clone(&self.changed), self.reports.metrics.clone()),
                }
            });
            member.session.set_interest(interest);
            member.session.set_cleanup_only(!in_use.contains(identity));
        }
        self.members.retain(|identity, member| {
            let is_wanted = wanted.contains_key(identity);
            if !is_wanted {
                tracing::info!(member = %identity, "session ends: no mesh needs it any more");
                member.writer.clear();
            }
            is_wanted
        });
    }

    fn observe(&self) -> Observations {
        Observations {
            members: self
                .members
                .iter()
                .map(|(identity, m)| (identity.clone(), m.session.observe()))
                .collect(),
            hub: self.hub.id.clone(),
            resolved: self.resolver.addresses(),
        }
    }

    /// Passes the steps of the diff to the writers of the members.
    fn write(&self, pass: &mut Pass) {
        let claims = Arc::new(Claims {
            hub: pass.plan.hub.clone(),
            claimants: pass.plan.claimants.clone(),
        });
        let unseen = ObservedMember::default();
        for (identity, member) in &self.members {
            // The client for writes and the fence. The MemberWriter `member.writer` sends the steps with this client.
            let write_access = member.session.writer().filter(|_| !member.session.is_unresponsive());
            let (Some(write_access), Some(steps)) = (write_access, pass.steps.get_mut(identity)) else {
                member.writer.clear();
                continue;
            };
            if let Some(fence) = &write_access.fence {
                // The fence, the Lease in the member, is taken even if there is nothing to write yet. While the hub does not
                // answer, this replica needs the fence to write and cannot take it, because that needs the hub's Lease.
                if fence.start_taking() {
                    let (fence, changed) = (Arc::clone(fence), Arc::clone(&self.changed));
                    self.tasks.spawn(async move {
                        fence.take().await;
                        changed.notify_one();
                    });
                }
                if fence.is_awaited() {
                    member.writer.clear();
                    continue;
                }
            }
            let seen = pass
                .seen
                .members
                .get(identity)
                .and_then(Observation::last)
                .unwrap_or(&unseen);
            let connection = Connection {
                client: write_access.client,
                feeds: member.session.feeds(),
                claims: Arc::clone(&claims),
            };
            let groups = lanes::split_by_source(std::mem::take(steps), seen);
            member
                .writer
                .set_steps(groups, pass.observed_since, connection, &self.tasks);
        }
    }

    /// Drops all steps that were not sent yet. Requests in flight are not cancelled.
    pub(crate) fn stop_writing(&self) {
        self.members.values().for_each(|member| member.writer.clear());
    }
}

/// Computes which on-demand objects ([`Interest`]) the session of each member has to read.
fn compute_interests<'a>(meshes: impl Iterator<Item = &'a Mesh>) -> BTreeMap<ClusterIdentity, Interest> {
    let mut wanted: BTreeMap<ClusterIdentity, Interest> = BTreeMap::new();
    for mesh in meshes {
        let identity = |name: &str| {
            mesh.clusters
                .iter()
                .find(|c| c.name == name)
                .map(|c| c.identity.clone())
        };
        for cluster in &mesh.clusters {
            let interest = wanted.entry(cluster.identity.clone()).or_default();
            interest
                .pod_namespaces
                .extend(cluster.exports.iter().map(|export| export.namespace.clone()));
            // The session reads the Service that already has the name of a mirrored Service, if any, so that the planner does not plan to
            // overwrite it.
            let mirrored = cluster.egress.iter().map(|grant| grant.local.clone());
            interest.services.extend(mirrored.collect::<BTreeSet<ObjectName>>());
            for grant in &cluster.egress {
                if let Some(identity) = identity(&grant.cluster) {
                    wanted
                        .entry(identity)
                        .or_default()
                        .services
                        .insert(grant.service.clone());
                }
            }
        }
    }
    wanted
}

/// Creates the feed of all ClusterMeshes.
pub(crate) fn mesh_feed(changed: Changed) -> Feed<Arc<ClusterMesh>> {
    Feed::new(changed, |object| {
        object
            .try_parse::<ClusterMesh>()
            .map(|mesh| Some(Arc::new(mesh)))
            .map_err(|error| error.to_string())
    })
}

/// Converts a ClusterMesh to the planner's input. The error lists all invalid fields.
fn to_core(object: &ClusterMesh) -> Result<(Mesh, Vec<convert::Finding>), String> {
    convert::mesh::to_core(object).map_err(|problems| {
        problems
            .iter()
            .map(|p| format!("{}: {}", p.field, p.message))
            .collect::<Vec<_>>()
            .join("; ")
    })
}

#[cfg(test)]
mod tests;
