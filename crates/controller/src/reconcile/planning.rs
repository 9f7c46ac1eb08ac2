//! Plans, and computes the steps of each member. Follows changes where possible ([`Planner`]), so that a changed Node costs little in a
//! large mesh.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use clustermesh_core::{
    diff::{Action, Step, diff_if_resumed},
    lanes::{self, Source},
    mesh::{ClusterIdentity, Mesh, MeshId},
    observe::{Member, Observation, Observations},
    plan::{Naming, NotFollowed, Plan, Settings},
    planner::{Planned, Planner, Steps},
};

/// All meshes are planned anew at least once in this time, so that an error in following changes would not last.
const MAX_FOLLOWING: Duration = Duration::from_secs(60);

/// The state of the planner between passes.
#[derive(Default)]
pub(super) struct Planning {
    planner: Planner,
    planned_anew: Option<Instant>,
}

impl Planning {
    /// Returns the plan, its steps, and why all meshes were planned anew; `None` = changes were followed.
    pub(super) fn plan(
        &mut self,
        meshes: &[Mesh],
        seen: &Arc<Observations>,
        settings: &Settings,
        naming: &dyn Naming,
    ) -> (Arc<Plan>, Steps, Option<NotFollowed>) {
        if self.planned_anew.is_none_or(|at| at.elapsed() > MAX_FOLLOWING) {
            self.planner.forget();
        }
        let Planned {
            plan,
            steps,
            not_followed,
        } = self.planner.plan(meshes, seen, settings, naming);
        if not_followed.is_some() {
            self.planned_anew = Some(Instant::now());
        }
        let steps = select_steps(&plan, seen, |identity, _| {
            steps.get(identity).cloned().unwrap_or_default()
        });
        (plan, steps, not_followed)
    }
}

/// Selects the steps for each member. Omits two kinds of delete steps: those in a member whose observation is not
/// fresh, and those for a mesh that may reference the member's cluster by another Secret.
pub(super) fn select_steps(
    plan: &Plan,
    seen: &Observations,
    diff: impl Fn(&ClusterIdentity, &Member) -> Vec<Arc<Step>>,
) -> Steps {
    let mut all = Steps::new();
    // Identities that differ only in the key of the Secret are one cluster, so only one of them gets steps. Identities whose
    // observation is fresh, and then identities that a mesh references, are preferred.
    let mut members: Vec<_> = seen.members.iter().collect();
    members.sort_by_key(|(identity, observation)| (observation.fresh().is_none(), !is_referenced(plan, identity)));
    for (identity, observation) in members {
        if all.keys().any(|written| written.same_cluster(identity)) {
            continue;
        }
        let Some(member) = observation.last() else { continue };
        let is_fresh = observation.fresh().is_some();
        let mut steps = diff(identity, member);
        steps.retain(|step| {
            step.action != Action::Delete
                || (is_fresh && !may_have_other_secret(plan, seen, &step.mesh, identity, member.uid.as_deref()))
        });
        all.insert(identity.clone(), steps);
    }
    all
}

/// Counts the objects of each source that differ from the plan. Each step counts as one object. For a paused mesh, the counted steps
/// are those that the diff would have if the mesh were resumed.
pub(super) fn count_outstanding(
    plan: &Plan,
    seen: &Observations,
    steps: &Steps,
) -> BTreeMap<ClusterIdentity, BTreeMap<Source, usize>> {
    let is_paused = |step: &&Arc<Step>| plan.meshes.get(&step.mesh).is_some_and(|mesh| mesh.paused);
    let resumed = if plan.meshes.values().any(|mesh| mesh.paused) {
        select_steps(plan, seen, |identity, member| diff_if_resumed(plan, identity, member))
    } else {
        Steps::new()
    };
    let resumed = resumed
        .iter()
        .map(|(identity, steps)| (identity, steps.iter().filter(is_paused).collect::<Vec<_>>()));
    let steps = steps.iter().map(|(identity, steps)| (identity, steps.iter().collect()));
    let mut outstanding: BTreeMap<ClusterIdentity, BTreeMap<Source, usize>> = BTreeMap::new();
    for (identity, steps) in steps.chain(resumed) {
        let counts = outstanding.entry(identity.clone()).or_default();
        for step in steps {
            *counts.entry(lanes::source_of(step)).or_default() += 1;
        }
    }
    outstanding
}

/// Whether a mesh references exactly this identity.
fn is_referenced(plan: &Plan, identity: &ClusterIdentity) -> bool {
    plan.meshes
        .values()
        .any(|mesh| mesh.identities.values().any(|other| other == identity))
}

/// Whether `mesh` does not reference `identity`, but may reference the same cluster by another Secret.
///
/// Then the plan for `identity` does not contain the objects that the mesh wants in that cluster, so the diff would delete all of them.
/// A mesh in deletion wants none. Two clusters count as different only if both UIDs are known and differ.
pub(super) fn may_have_other_secret(
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
            (Some(other_uid), Some(uid)) => other_uid == uid,
            _ => true,
        }
    })
}
