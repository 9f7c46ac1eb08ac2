//! The loop: observe -> plan -> diff -> apply -> report. It holds the sessions and the writers; the three in the middle are
//! `clustermesh_core`'s.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use clustermesh_api::{
    convert,
    mesh::ClusterMesh,
    names::{FORCE_CLEANUP, Names},
};
use clustermesh_core::{
    diff::{Action, Step, diff},
    mesh::{ClusterIdentity, Mesh, MeshId, ObjectName},
    observe::{Member as Seen, Observation, Observations, Owner},
    ownership::{self, Ownership},
    plan::{MeshPlan, Plan, Settings, plan},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio_util::task::TaskTracker;

use crate::{
    apply::{Claims, Writer},
    events::Speaker,
    feed::{Changed, Feed, Trust},
    held::Held,
    hub::Hub,
    metrics::{Entry, Metrics},
    report::{Facts, Subject, report},
    resolve::{self, Resolver},
    session::{Interest, Session},
};

mod meshes;
mod write_back;

use meshes::{Known, know};

/// Without news, everything is looked at again after this.
const RESYNC: Duration = Duration::from_secs(30);
/// While something is on its way, after this.
const SOON: Duration = Duration::from_millis(500);
/// For so long the session of a removed entry is kept, so that its objects can still be removed.
const LEAVING: Duration = Duration::from_secs(3600);
/// For so long a report waits for writes that are on their way.
const PATIENCE: Duration = Duration::from_secs(10);

/// One member: what is seen of it, and what writes into it.
struct Member {
    session: Arc<Session>,
    writer: Writer,
    /// Since when no mesh names it any more.
    left: Option<Instant>,
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
    speaker: Speaker,
    metrics: Metrics,
    changed: Changed,
    /// Writes that are on their way; waited for at the end.
    pub(crate) tasks: TaskTracker,
    /// When each entry last came to hold all it should.
    synced: BTreeMap<(MeshId, String), Time>,
    /// Since when the report of a mesh waits for its writes.
    unreported: BTreeMap<MeshId, Instant>,
    shown: Shown,
}

/// What one pass found, handed to the report.
struct Pass {
    known: BTreeMap<MeshId, Known>,
    seen: Observations,
    plan: Plan,
    steps: BTreeMap<ClusterIdentity, Vec<Step>>,
    /// Meshes that could not be given the finalizer, so that nothing was written for them.
    unclaimed: BTreeSet<MeshId>,
}

impl Reconciler {
    pub(crate) fn new(
        hub: Arc<Hub>,
        meshes: Feed<Arc<ClusterMesh>>,
        speaker: Speaker,
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
            speaker,
            metrics,
            changed,
            tasks: TaskTracker::new(),
            synced: BTreeMap::new(),
            unreported: BTreeMap::new(),
            shown,
        }
    }

    /// One pass; after how long the next is due without news.
    pub(crate) async fn pass(&mut self) -> Duration {
        // What is not known to be current must not be written by: a mesh that is missing from a broken list would lose
        // its Peers.
        if self.meshes.trust() != Trust::Live {
            return SOON;
        }
        let started = Instant::now();
        let known = know(&self.meshes, &self.hub);
        self.attend(&known);

        let mut seen = self.observe();
        self.held.hand_back(&mut seen, started);
        let meshes: Vec<Mesh> = known.values().map(|known| known.mesh.clone()).collect();
        self.resolver.want(resolve::names(&meshes, &seen));
        let names = Names {
            hub: self.hub.id.clone(),
        };
        let planned = tokio::task::spawn_blocking(move || {
            let plan = plan(&meshes, &seen, &Settings::default(), &names);
            let steps = changes(&plan, &seen);
            (seen, plan, steps)
        });
        let (seen, plan, steps) = match planned.await {
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
            unclaimed: BTreeSet::new(),
        };
        self.claim(&mut pass).await;
        let waits = self.write(&mut pass);
        let settled = self.tell(&pass).await;
        self.let_go(&pass).await;
        self.leave(&pass);
        self.show(&pass);

        let next = [hold, waits.map(|until| until.saturating_duration_since(Instant::now()))];
        let next = next.into_iter().flatten().min().unwrap_or(RESYNC).min(RESYNC);
        if settled {
            next.max(Duration::from_millis(50))
        } else {
            next.min(SOON)
        }
    }

    /// Begins the sessions that are needed and tells each what to read.
    fn attend(&mut self, known: &BTreeMap<MeshId, Known>) {
        let wanted = interests(known.values().map(|known| &known.mesh));
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
                    left: None,
                }
            });
            member.left = None;
            member.session.want(interest);
        }
        for (identity, member) in &mut self.members {
            if !wanted.contains_key(identity) && member.left.is_none() {
                member.left = Some(Instant::now());
                member.session.want(&Interest::default());
            }
        }
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

    /// Sees to it that no mesh is served without its finalizer: what was written must not be left behind.
    async fn claim(&mut self, pass: &mut Pass) {
        for known in pass.known.values_mut() {
            let Some(object) = &known.object else { continue };
            let planned = pass
                .plan
                .meshes
                .get(&known.mesh.id)
                .is_some_and(|plan| !plan.paused && !plan.deleting);
            if planned && known.refused.is_none() && !known.finalized() {
                match write_back::add_finalizer(&self.hub.client, object).await {
                    Ok(object) => {
                        known.object = Some(Arc::new(object.clone()));
                        write_back::put(&self.meshes, &object);
                    }
                    Err(error) => {
                        tracing::warn!(mesh = %known.mesh.id, error = &error as &dyn std::error::Error, "no finalizer yet");
                        pass.unclaimed.insert(known.mesh.id.clone());
                    }
                }
            }
        }
        for steps in pass.steps.values_mut() {
            // An orphan's mesh is not there to hold anything.
            steps.retain(|step| {
                pass.known
                    .get(&step.mesh)
                    .map_or(step.action == Action::Delete, Known::finalized)
            });
        }
    }

    /// Hands the steps to the writers; until when the first of them has been told to wait.
    fn write(&mut self, pass: &mut Pass) -> Option<Instant> {
        let claims = Arc::new(Claims {
            hub: pass.plan.hub.clone(),
            claimants: pass.plan.claimants.clone(),
        });
        let mut waits = None;
        for (identity, steps) in &pass.steps {
            let Some(member) = self.members.get(identity) else {
                continue;
            };
            if member.session.silent() {
                continue;
            }
            let Some(client) = member.session.client() else {
                continue;
            };
            let until = member
                .writer
                .offer(steps.clone(), client, &member.session.tables(), &claims, &self.tasks);
            waits = [waits, until].into_iter().flatten().min();
        }
        waits
    }

    /// Reports on every mesh; `false` = some report waits.
    async fn tell(&mut self, pass: &Pass) -> bool {
        let now = Time(k8s_openapi::jiff::Timestamp::now());
        let mut settled = true;
        self.metrics.begin();
        for known in pass.known.values() {
            let id = &known.mesh.id;
            let (Some(plan), Some(object)) = (pass.plan.meshes.get(id), &known.object) else {
                continue;
            };
            let facts = self.facts(pass, id, plan, object, &now);
            self.count(pass, id, plan);
            if pass.unclaimed.contains(id) || self.waits(pass, id, plan) {
                settled = false;
                continue;
            }
            let unwritten = self.unwritten(pass, id, plan);
            let subject = Subject {
                object,
                mesh: &known.mesh,
                plan,
                refused: known.refused.as_ref(),
                warnings: &known.warnings,
                unwritten: &unwritten,
                facts: &facts,
            };
            let (status, sayings) = report(&subject, &now);
            if object.status.as_ref() != Some(&status) {
                match write_back::status(&self.hub.client, object, &status).await {
                    Ok(object) => write_back::put(&self.meshes, &object),
                    Err(error) => {
                        settled = false;
                        tracing::warn!(mesh = %id, error = &error as &dyn std::error::Error, "no status");
                        continue;
                    }
                }
            }
            self.speaker.speak(id, object, sayings).await;
        }
        let there: BTreeSet<MeshId> = pass.known.keys().cloned().collect();
        self.speaker.keep(&there);
        self.unreported.retain(|id, _| there.contains(id));
        self.synced.retain(|(id, _), _| there.contains(id));
        settled
    }

    /// Whether the report of a mesh should wait: a session has only just begun, or its writes are on their way.
    fn waits(&mut self, pass: &Pass, id: &MeshId, plan: &MeshPlan) -> bool {
        let members = || {
            plan.identities
                .values()
                .filter_map(|identity| self.members.get(identity))
        };
        let settling = members().any(|member| member.session.settling());
        let on_their_way = pass.steps.iter().any(|(identity, steps)| {
            let failed = self
                .members
                .get(identity)
                .is_some_and(|member| member.writer.trouble(id).is_some());
            !failed && steps.iter().any(|step| step.mesh == *id)
        });
        if !settling && !on_their_way {
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
                .steps
                .get(identity)
                .is_some_and(|steps| steps.iter().any(|step| step.mesh == *id));
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
            facts.insert(
                entry.clone(),
                Facts {
                    fresh,
                    uid: seen.and_then(|seen| seen.uid.clone()),
                    version: member.session.version(),
                    agents: seen.map(|_| member.session.tables().agents(env!("CARGO_PKG_VERSION"))),
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
                (None, Some(why)) => format!(
                    "{why}; its objects are removed when it answers. To let go of it now, remove the entry or annotate the \
                     ClusterMesh with {FORCE_CLEANUP}=true"
                ),
                (None, None) => continue,
            };
            unwritten.insert(entry.clone(), why);
        }
        unwritten
    }

    fn count(&self, pass: &Pass, id: &MeshId, plan: &MeshPlan) {
        for (cluster, report) in &plan.clusters {
            let state = plan
                .identities
                .get(cluster)
                .and_then(|i| pass.seen.members.get(i))
                .map_or("Missing", Observation::word);
            let entry = Entry {
                mesh: id.to_string(),
                cluster: cluster.clone(),
            };
            let skipped = report.skipped.iter().map(|skipped| skipped.reason.to_string());
            self.metrics.entry(&entry, report.registered, state, skipped);
        }
    }

    /// Releases meshes that are being deleted and have nothing left anywhere.
    async fn let_go(&mut self, pass: &Pass) {
        for known in pass
            .known
            .values()
            .filter(|known| known.mesh.deleting && known.finalized())
        {
            let id = &known.mesh.id;
            let Some(object) = &known.object else { continue };
            if known.mesh.paused {
                continue;
            }
            let forced = object
                .metadata
                .annotations
                .as_ref()
                .is_some_and(|a| a.get(FORCE_CLEANUP).is_some_and(|v| v != "false"));
            let entries: BTreeSet<&ClusterIdentity> =
                known.mesh.clusters.iter().map(|cluster| &cluster.identity).collect();
            let unseen = entries
                .iter()
                .any(|i| pass.seen.members.get(i).is_none_or(|seen| seen.fresh().is_none()));
            let left = self.members.iter().any(|(identity, member)| {
                let Some(seen) = pass.seen.members.get(identity).and_then(Observation::fresh) else {
                    return false;
                };
                let stuck = forced && member.writer.trouble(id).is_some();
                !stuck
                    && owners(seen)
                        .any(|o| ownership::of(o, &pass.plan.hub, &pass.plan.claimants) == Ownership::Mesh(id))
            });
            if left || (unseen && !forced) {
                continue;
            }
            match write_back::remove_finalizer(&self.hub.client, object).await {
                Ok(()) => tracing::info!(mesh = %id, forced, "let go: nothing of it is left"),
                Err(error) => tracing::warn!(mesh = %id, error = &error as &dyn std::error::Error, "finalizer stays"),
            }
        }
    }

    /// Ends the sessions of members that no mesh names, once nothing of ours is left there or hope is given up.
    fn leave(&mut self, pass: &Pass) {
        self.members.retain(|identity, member| {
            let Some(since) = member.left else { return true };
            let observation = pass.seen.members.get(identity);
            let clean = observation.and_then(Observation::fresh).is_some_and(|seen| {
                owners(seen).all(|o| ownership::of(o, &pass.plan.hub, &pass.plan.claimants) == Ownership::Foreign)
            });
            let hopeless = matches!(observation, Some(Observation::Missing(_)));
            let late = since.elapsed() > LEAVING;
            if clean || hopeless || late {
                tracing::info!(member = %identity, clean, "session ends: no mesh names it any more");
                return false;
            }
            true
        });
    }

    fn show(&self, pass: &Pass) {
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

/// What to write into each member; nothing is deleted where the member was not freshly seen.
fn changes(plan: &Plan, seen: &Observations) -> BTreeMap<ClusterIdentity, Vec<Step>> {
    let mut changes: BTreeMap<ClusterIdentity, Vec<Step>> = BTreeMap::new();
    for (identity, observation) in &seen.members {
        // One cluster behind two keys of its Secret is written once.
        if changes.keys().any(|written| written.same_cluster(identity)) {
            continue;
        }
        let Some(member) = observation.last() else { continue };
        let mut steps = diff(plan, identity, member);
        if observation.fresh().is_none() {
            steps.retain(|step| step.action != Action::Delete);
        }
        changes.insert(identity.clone(), steps);
    }
    changes
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

/// Whose the objects of a member are, as far as they say.
fn owners(seen: &Seen) -> impl Iterator<Item = &Owner> {
    let peers = seen.peers.iter().flatten().map(|(_, peer)| &peer.owner);
    let policies = seen.policies.iter().flatten().map(|(_, policy)| &policy.owner);
    let services = seen.services.values().filter_map(|service| service.managed.as_ref());
    let slices = seen.slices.values().filter_map(|slice| slice.managed.as_ref());
    peers.chain(policies).chain(services).chain(slices)
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
