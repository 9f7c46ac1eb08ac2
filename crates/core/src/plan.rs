//! Plans all meshes: computes the desired Peers, PeerPolicies, SandboxAccesses and mirrored Services of every member.
//!
//! [`plan`] is a pure function that never fails or panics. Comments cite the planner's rules by the numbers in
//! docs/design/planner.md; most modules name the rules that they implement in their first sentence.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    mesh::{ClusterIdentity, Mesh, MeshId, ObjectName},
    observe::Observations,
    ownership::Claimant,
};

mod anchor;
mod claims;
mod conflicts;
mod discovered;
mod endpoint;
mod follow;
mod gateways;
mod link;
mod location;
mod members;
mod mesh;
mod networks_in_use;
mod nodes;
mod peers;
mod policies;
mod prefix_map;
mod result;
mod services;
mod settings;
mod target;

#[cfg(test)]
pub(crate) mod tests;

pub use follow::NotFollowed;
pub(crate) use follow::{Follower, MemberStepChanges};
pub use link::{Link, NotConnected, decide_by_entries};
pub use members::{MemberView, MeshMembers, members};
pub use result::{
    ClusterReport, EgressReport, Fact, MeshPlan, Plan, PlannedAccess, PlannedPeer, PlannedPolicy, PlannedService,
    PlannedSlice, Reason, Skipped, TargetPlan, Uncovered,
};
pub use settings::{INFRASTRUCTURE_PORTS, InfrastructurePort, Settings, SettingsError};

/// How long a held node keeps its last Peer. A node is held if its key or WireGuard address is missing, or if its WireGuard
/// address is a duplicate while kg assigns new addresses (rule 9).
pub const HOLD: Duration = Duration::from_secs(300);

/// Held nodes are reported only after this time, because a restart of kg takes just seconds.
pub const HOLD_REPORT_DELAY: Duration = Duration::from_secs(30);

/// The largest tested number of Peers in one target. If a target has more, the plan contains [`Fact::MeshTooLarge`].
pub const MAX_PEERS_PER_TARGET: usize = 5_000;

/// Builds the names of written objects. The implementation is in the API crate, which defines all names that users see.
pub trait Naming: Sync {
    /// Name of the Peer of `node`. `is_name_taken` = another owner's Peer has the name without a hash, so a hash is appended.
    fn peer(&self, mesh: &MeshId, cluster: &str, node: &str, is_name_taken: bool) -> String;
    /// Name of the PeerPolicy, or SandboxAccess, that limits `cluster`. `is_name_taken` as in [`Self::peer`].
    fn policy(&self, mesh: &MeshId, cluster: &str, is_name_taken: bool) -> String;
    /// The id of a sandbox or importer: all its SandboxAccesses from this hub have this id, also those of other meshes.
    fn sandbox_id(&self, identity: &ClusterIdentity) -> String;
    /// Name of the `index`-th EndpointSlice of a mirrored Service for one IP family.
    fn slice(&self, mesh: &MeshId, service: &ObjectName, v6: bool, index: usize) -> String;
}

/// Plans all meshes. The result does not depend on the order of `meshes` or of observed lists. Exception: the order of the
/// addresses and of the podCIDRs of a Node.
#[must_use]
pub fn plan(meshes: &[Mesh], seen: &Observations, settings: &Settings, naming: &dyn Naming) -> Plan {
    plan_and_keep(meshes, seen, settings, naming).0
}

/// What [`Follower`] needs, in addition to the plan, to follow a change.
type FollowerInputs = (claims::Accepted, BTreeMap<MeshId, Result<follow::Kept, NotFollowed>>);

fn plan_and_keep(
    meshes: &[Mesh],
    seen: &Observations,
    settings: &Settings,
    naming: &dyn Naming,
) -> (Plan, FollowerInputs) {
    let by_age = by_age(meshes);
    let accepted = claims::accept(&by_age);
    let mut plan = Plan {
        meshes: BTreeMap::new(),
        claimants: by_age.iter().map(|mesh| Claimant::from(*mesh)).collect(),
        hub: seen.hub.clone(),
    };
    // For each cluster, the number of entries that are not planned yet.
    let mut entries_left: BTreeMap<ClusterIdentity, usize> = BTreeMap::new();
    for cluster in by_age.iter().flat_map(|mesh| &mesh.clusters) {
        *entries_left
            .entry(target::canonical_identity(&cluster.identity))
            .or_default() += 1;
    }
    let mut kept = BTreeMap::new();
    let mut used: BTreeMap<ClusterIdentity, target::UsedNames> = BTreeMap::new();
    for mesh in &by_age {
        let claimants = &plan.claimants;
        let planner = mesh::MeshPlanner {
            mesh,
            all_meshes: &by_age,
            accepted: &accepted,
            seen,
            settings,
            naming,
            claimants,
            used: &used,
        };
        let (planned, kept_of_mesh) = planner.plan();
        kept.insert(mesh.id.clone(), kept_of_mesh);
        for cluster in &mesh.clusters {
            let identity = target::canonical_identity(&cluster.identity);
            let left = entries_left.entry(identity.clone()).or_default();
            *left = left.saturating_sub(1);
            // A paused mesh writes nothing, so it reserves no names.
            let target = planned
                .targets
                .get(&cluster.name)
                .filter(|_| *left > 0 && !planned.paused);
            if let Some(target) = target {
                used.entry(identity).or_default().add(target);
            }
        }
        plan.meshes.insert(mesh.id.clone(), planned);
    }
    conflicts::resolve_conflicts(&mut plan, seen);
    for mesh in &by_age {
        if let Some(planned) = plan.meshes.get_mut(&mesh.id) {
            let (counts, carriers) = rayon::join(
                || conflicts::count_nodes_and_gateways(planned),
                || anchor::carriers(mesh, planned),
            );
            conflicts::report(planned, counts);
            anchor::report(mesh, planned, seen, carriers);
        }
    }
    (plan, (accepted, kept))
}

/// Sorts meshes by age, oldest first.
fn by_age(meshes: &[Mesh]) -> Vec<&Mesh> {
    let mut by_age: Vec<&Mesh> = meshes.iter().collect();
    by_age.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
    by_age
}
