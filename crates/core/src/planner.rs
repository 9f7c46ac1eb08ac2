//! Plans all meshes and computes the writes, pass after pass.

use std::{collections::BTreeMap, sync::Arc};

use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use crate::{
    diff::{Step, diff, update_steps},
    mesh::{ClusterIdentity, Mesh},
    observe::{Member, Observation, Observations},
    plan::{Follower, Naming, NotFollowed, Plan, Settings},
};

/// The steps of each observed member.
pub type Steps = BTreeMap<ClusterIdentity, Vec<Arc<Step>>>;

/// Plans all meshes as [`crate::plan::plan`] does, and computes the steps of all members as [`diff`] does, but applies changes of
/// Nodes, Peers and the freshness of members to the last plan: such a change costs little in a large mesh.
#[derive(Debug, Default)]
pub struct Planner {
    follower: Follower,
    steps: Steps,
}

/// The result of [`Planner::plan`].
#[derive(Debug)]
pub struct Planned<'p> {
    /// The plan of all meshes. Drop it before the next call: otherwise that call copies the plan.
    pub plan: Arc<Plan>,
    /// The steps of all observed members.
    pub steps: &'p Steps,
    /// Why all meshes were planned anew; `None` = the changes were applied to the last plan.
    pub not_followed: Option<NotFollowed>,
}

impl Planner {
    /// Applies the changes since the last call to the last plan. If that is not possible, plans all meshes anew.
    pub fn plan(
        &mut self,
        meshes: &[Mesh],
        seen: &Arc<Observations>,
        settings: &Settings,
        naming: &dyn Naming,
    ) -> Planned<'_> {
        let (plan, changed) = self.follower.plan(meshes, seen, settings, naming);
        let all_steps = || -> Steps {
            let members = seen.members.par_iter();
            let steps = |(identity, observation): (&ClusterIdentity, &Observation<Member>)| {
                Some((identity.clone(), diff(&plan, identity, observation.last()?)))
            };
            members.filter_map(steps).collect()
        };
        match &changed {
            Ok(changed) => {
                for (identity, changes) in changed {
                    let member = seen.members.get(identity).and_then(Observation::last);
                    if let Some((steps, member)) = self.steps.get_mut(identity).zip(member) {
                        update_steps(steps, &plan, identity, member, changes);
                    }
                }
                debug_assert_eq!(self.steps, all_steps());
            }
            Err(_) => self.steps = all_steps(),
        }
        Planned {
            plan,
            steps: &self.steps,
            not_followed: changed.err(),
        }
    }

    /// Plans all meshes anew the next time.
    pub fn forget(&mut self) {
        *self = Self::default();
    }
}
