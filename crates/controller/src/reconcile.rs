//! The loop: observe -> plan -> diff -> apply -> report. It holds the sessions and the writers; the three in the middle are
//! `clustermesh_core`'s.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use clustermesh_api::{convert, mesh::ClusterMesh, names::Names};
use clustermesh_core::{
    diff::{Action, Step, diff, diff_if_resumed},
    lanes::{self, Source},
    mesh::{ClusterIdentity, Mesh, MeshId, ObjectName},
    observe::{Member as SeenMember, Observation, Observations},
    plan::{Plan, plan},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio_util::task::TaskTracker;

use crate::{
    apply::{Claims, Target, Writer},
    feed::{Changed, Feed, Trust},
    held::Held,
    hub::Hub,
    hub_writer::HubWriter,
    lagging::Lagging,
    metrics::Metrics,
    resolve::{self, Resolver},
    session::{Interest, Session},
};

mod finalize;
mod links;
mod meshes;
mod removed;
mod status;

use links::Links;
use meshes::{Known, Served, know};
use removed::RemovedClusters;
pub(crate) use removed::Row as RemovedRow;
use status::seconds;

/// Without news, everything is looked at again after this.
const RESYNC: Duration = Duration::from_secs(30);
/// While something is on its way, after this.
const SOON: Duration = Duration::from_millis(500);

/// One member: what is seen of it, and what writes into it.
struct Member {
    session: Arc<Session>,
    writer: Writer,
}

/// What the loop shows of itself at `/debug/state`.
pub(crate) type Shown = Arc<Mutex<View>>;

/// The loop's last pass.
#[derive(Default)]
pub(crate) struct View {
    sessions: BTreeMap<String, Arc<Session>>,
    meshes: serde_json::Value,
}

impl View {
    /// As JSON, without secrets.
    pub(crate) fn dump(&self) -> serde_json::Value {
        let sessions: BTreeMap<_, _> = self
            .sessions
            .iter()
            .map(|(name, session)| (name, session.dump()))
            .collect();
        serde_json::json!({ "members": sessions, "meshes": self.meshes })
    }
}

/// The loop's memory.
pub(crate) struct Reconciler {
    hub: Arc<Hub>,
    meshes: Feed<Arc<ClusterMesh>>,
    members: BTreeMap<ClusterIdentity, Member>,
    held: Held,
    resolver: Resolver,
    hub_writer: HubWriter,
    metrics: Metrics,
    changed: Changed,
    /// Writes that are on their way; waited for at the end.
    pub(crate) tasks: TaskTracker,
    /// When each entry last came to hold all it should.
    synced: BTreeMap<(MeshId, String), Time>,
    /// Since when the report of a mesh waits for its writes.
    unreported: BTreeMap<MeshId, Instant>,
    /// What each mesh meant when it was last served.
    served: Served,
    /// Clusters that meshes no longer name, where objects of theirs may be left.
    removed: RemovedClusters,
    /// Broken links as they were last told.
    links: Links,
    /// Nodes whose agents enforce other PeerPolicies than stand.
    lagging: Lagging,
    gateways_lagging: Lagging,
    shown: Shown,
}

/// What one pass found, handed to the report.
struct Pass {
    known: BTreeMap<MeshId, Known>,
    seen: Observations,
    plan: Plan,
    steps: BTreeMap<ClusterIdentity, Vec<Step>>,
    /// How many objects of each source are not as planned, those of paused meshes among them.
    outstanding: BTreeMap<ClusterIdentity, BTreeMap<Source, usize>>,
    /// When the pass began to observe.
    observed: tokio::time::Instant,
}

impl Reconciler {
    pub(crate) fn new(
        hub: Arc<Hub>,
        meshes: Feed<Arc<ClusterMesh>>,
        hub_writer: HubWriter,
        metrics: Metrics,
        changed: Changed,
        shown: Shown,
    ) -> Self {
        Self {
            resolver: Resolver::start(Arc::clone(&changed)),
            hub,
            meshes,
            members: BTreeMap::new(),
            held: Held::default(),
            hub_writer,
            metrics,
            changed,
            tasks: TaskTracker::new(),
            synced: BTreeMap::new(),
            unreported: BTreeMap::new(),
            served: Served::new(),
            removed: RemovedClusters::default(),
            links: Links::default(),
            lagging: Lagging::default(),
            gateways_lagging: Lagging::default(),
            shown,
        }
    }

    /// One pass; after how long the next is due without news.
    pub(crate) async fn pass(&mut self) -> Duration {
        // A mesh that is missing from a list which is not whole would lose its Peers. What was listed once stays known while
        // the hub does not answer: members are served by it, but nothing is deleted.
        let trust = self.meshes.trust();
        let hub_is_fresh = trust == Trust::Live;
        let was_listed = self.meshes.listed() && matches!(trust, Trust::Broken(_) | Trust::Denied(_));
        if !hub_is_fresh && !was_listed {
            self.stop_writing();
            return SOON;
        }
        let (started, observed) = (Instant::now(), tokio::time::Instant::now());
        let known = know(&self.meshes, &self.hub, &mut self.served);
        self.removed.update(&known);
        self.sync_sessions(&known);

        let mut seen = self.observe();
        self.held.hand_back(&mut seen, started);
        let meshes: Vec<Mesh> = known.values().map(|known| known.mesh.clone()).collect();
        self.resolver.want(resolve::names(&meshes, &seen));
        let names = Names {
            hub: self.hub.id.clone(),
        };
        let settings = self.hub.settings.clone();
        let planned = tokio::task::spawn_blocking(move || {
            let plan = plan(&meshes, &seen, &settings, &names);
            let mut steps = changes(&plan, &seen, diff);
            if !hub_is_fresh {
                let all = steps.values_mut();
                all.for_each(|steps| steps.retain(|step| step.action != Action::Delete));
            }
            let outstanding = outstanding(&plan, &seen, &steps);
            (seen, plan, steps, outstanding)
        });
        let (seen, plan, steps, outstanding) = match planned.await {
            Ok(planned) => planned,
            Err(error) => {
                tracing::error!(%error, "the planner failed; nothing is written");
                return RESYNC;
            }
        };
        let hold = self.held.remember(&plan, &seen, started);
        self.metrics.planned(started.elapsed());

        let mut pass = Pass {
            known,
            seen,
            plan,
            steps,
            outstanding,
            observed,
        };
        finalize::hold_unfinalized(&mut pass);
        self.write(&pass);
        let settled = self.report_status(&pass);
        self.show(&pass);

        let in_time = |until: Instant| until.saturating_duration_since(Instant::now());
        let lagging = self.lagging.due(started).map(in_time);
        let gateways = self.gateways_lagging.due(started).map(in_time);
        // What is past belongs to a member that is not observed now.
        let silences = self.members.values().filter_map(|member| member.session.silence_due());
        let silence = silences.filter(|due| *due > started).min();
        let next = [
            hold,
            self.links.due().map(in_time),
            lagging,
            gateways,
            silence.map(in_time),
        ];
        let next = next.into_iter().flatten().min().unwrap_or(RESYNC).min(RESYNC);
        if settled {
            next.max(Duration::from_millis(50))
        } else {
            next.min(SOON)
        }
    }

    /// Begins the sessions that are needed, tells each what to read, and ends the others.
    fn sync_sessions(&mut self, known: &BTreeMap<MeshId, Known>) {
        let mut wanted = interests(known.values().map(|known| &known.mesh));
        for identity in self.removed.identities() {
            wanted.entry(identity.clone()).or_default();
        }
        let served = known.values().filter(|known| !known.mesh.deleting);
        let served: BTreeSet<&ClusterIdentity> = served
            .flat_map(|known| known.mesh.clusters.iter().map(|cluster| &cluster.identity))
            .collect();
        for (identity, interest) in &wanted {
            let member = self.members.entry(identity.clone()).or_insert_with(|| {
                tracing::info!(member = %identity, "session begins");
                Member {
                    session: Arc::new(Session::begin(
                        identity.clone(),
                        Arc::clone(&self.hub),
                        Arc::clone(&self.changed),
                    )),
                    writer: Writer::new(Arc::clone(&self.changed), self.metrics.clone()),
                }
            });
            member.session.want(interest);
            member.session.clean_up(!served.contains(identity));
        }
        self.members.retain(|identity, member| {
            let wanted = wanted.contains_key(identity);
            if !wanted {
                tracing::info!(member = %identity, "session ends: no mesh needs it any more");
                member.writer.clear();
            }
            wanted
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
            resolved: self.resolver.known(),
        }
    }

    /// Hands the steps to the writers.
    fn write(&self, pass: &Pass) {
        let claims = Arc::new(Claims {
            hub: pass.plan.hub.clone(),
            claimants: pass.plan.claimants.clone(),
        });
        let unseen = SeenMember::default();
        for (identity, member) in &self.members {
            let client = member.session.client().filter(|_| !member.session.silent());
            let (Some(client), Some(steps)) = (client, pass.steps.get(identity)) else {
                member.writer.clear();
                continue;
            };
            let seen = pass
                .seen
                .members
                .get(identity)
                .and_then(Observation::last)
                .unwrap_or(&unseen);
            let target = Target {
                client,
                tables: member.session.tables(),
                claims: Arc::clone(&claims),
            };
            let groups = lanes::by_source(steps.clone(), seen);
            member.writer.offer(groups, pass.observed, target, &self.tasks);
        }
    }

    /// Writes into members end with those that are in flight.
    pub(crate) fn stop_writing(&self) {
        self.members.values().for_each(|member| member.writer.clear());
    }
}

/// What to write into each member; nothing is deleted where the member was not freshly seen, nor for a mesh that may have
/// the same cluster under another name.
fn changes(
    plan: &Plan,
    seen: &Observations,
    diff: fn(&Plan, &ClusterIdentity, &SeenMember) -> Vec<Step>,
) -> BTreeMap<ClusterIdentity, Vec<Step>> {
    let mut changes: BTreeMap<ClusterIdentity, Vec<Step>> = BTreeMap::new();
    // Of two keys of one Secret, the one that can be seen and that a mesh names writes.
    let mut members: Vec<_> = seen.members.iter().collect();
    members.sort_by_key(|(identity, observation)| (observation.fresh().is_none(), !named(plan, identity)));
    for (identity, observation) in members {
        // One cluster behind two keys of its Secret is written once.
        if changes.keys().any(|written| written.same_cluster(identity)) {
            continue;
        }
        let Some(member) = observation.last() else { continue };
        let fresh = observation.fresh().is_some();
        let mut steps = diff(plan, identity, member);
        steps.retain(|step| {
            step.action != Action::Delete
                || (fresh && !may_serve_elsewhere(plan, seen, &step.mesh, identity, member.uid.as_deref()))
        });
        changes.insert(identity.clone(), steps);
    }
    changes
}

/// How many objects of each source are not as planned: the steps, and for paused meshes what they would be.
fn outstanding(
    plan: &Plan,
    seen: &Observations,
    steps: &BTreeMap<ClusterIdentity, Vec<Step>>,
) -> BTreeMap<ClusterIdentity, BTreeMap<Source, usize>> {
    let paused = |step: &Step| plan.meshes.get(&step.mesh).is_some_and(|mesh| mesh.paused);
    let resumed = if plan.meshes.values().any(|mesh| mesh.paused) {
        changes(plan, seen, diff_if_resumed)
    } else {
        BTreeMap::new()
    };
    let resumed = resumed
        .iter()
        .map(|(identity, steps)| (identity, steps.iter().filter(|step| paused(step)).collect::<Vec<_>>()));
    let steps = steps.iter().map(|(identity, steps)| (identity, steps.iter().collect()));
    let mut outstanding: BTreeMap<ClusterIdentity, BTreeMap<Source, usize>> = BTreeMap::new();
    for (identity, steps) in steps.chain(resumed) {
        let counts = outstanding.entry(identity.clone()).or_default();
        for step in steps {
            *counts.entry(lanes::source(step)).or_default() += 1;
        }
    }
    outstanding
}

/// Whether some mesh names this very identity.
fn named(plan: &Plan, identity: &ClusterIdentity) -> bool {
    plan.meshes
        .values()
        .any(|mesh| mesh.identities.values().any(|other| other == identity))
}

/// Whether `identity`, which `mesh` does not name, may be a cluster that it names by another Secret: what it wants there is
/// not in the plan for `identity`, so all of it looks unwanted. UIDs may only refuse: one that is not known is no proof that
/// two clusters differ.
fn may_serve_elsewhere(
    plan: &Plan,
    seen: &Observations,
    mesh: &MeshId,
    identity: &ClusterIdentity,
    uid: Option<&str>,
) -> bool {
    let Some(mesh) = plan.meshes.get(mesh).filter(|mesh| !mesh.deleting) else {
        return false;
    };
    let mut entries = mesh.identities.values();
    if entries.clone().any(|entry| entry.same_cluster(identity)) {
        return false;
    }
    entries.any(|entry| {
        let member = seen.members.get(entry).and_then(Observation::last);
        match (member.and_then(|member| member.uid.as_deref()), uid) {
            (Some(theirs), Some(ours)) => theirs == ours,
            _ => true,
        }
    })
}

/// What has to be read of each member.
fn interests<'a>(meshes: impl Iterator<Item = &'a Mesh>) -> BTreeMap<ClusterIdentity, Interest> {
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
                .pods
                .extend(cluster.exports.iter().map(|export| export.namespace.clone()));
            // Also where it will appear: a Service of that name that is not ours must be seen.
            let local = cluster.egress.iter().map(|grant| grant.local.clone());
            interest.services.extend(local.collect::<BTreeSet<ObjectName>>());
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

/// A feed of all ClusterMeshes.
pub(crate) fn mesh_feed(changed: Changed) -> Feed<Arc<ClusterMesh>> {
    Feed::new(changed, |object| {
        object
            .try_parse::<ClusterMesh>()
            .map(|mesh| Some(Arc::new(mesh)))
            .map_err(|error| error.to_string())
    })
}

/// Values that the spec's text means, or why it means none.
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
