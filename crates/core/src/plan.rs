//! The plan: what every member should hold for all meshes. Pure and total: any input gives a plan, none panics.
//!
//! The rules are numbered as in the design (§4); each module below names those it carries.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    mesh::{ClusterIdentity, Mesh, MeshId, ObjectName},
    observe::Observations,
    ownership::Claimant,
};

mod anchor;
mod claims;
mod conflicts;
mod endpoint;
pub mod explain;
mod gateways;
mod link;
mod location;
mod mesh;
mod networks_in_use;
mod nodes;
mod peers;
mod result;
mod services;
mod settings;
mod target;

#[cfg(test)]
pub(crate) mod tests;

pub use result::{
    ClusterReport, EgressReport, Fact, MeshPlan, Plan, PlannedAccess, PlannedPeer, PlannedPolicy, PlannedService,
    PlannedSlice, Reason, Skipped, TargetPlan, Uncovered,
};
pub use settings::{INFRASTRUCTURE, InfrastructurePort, Settings, SettingsError};

/// For how long a node whose annotations vanished, or whose address clashes while kg renumbers, keeps its last Peer
/// (DESIGN §4 rule 9).
pub const HOLD: Duration = Duration::from_secs(300);

/// A shorter hold is not reported: a restart of kg takes seconds.
pub const HOLD_REPORT_DELAY: Duration = Duration::from_secs(30);

/// Peers a node of one target is tested with; more and the mesh is too large.
pub const MAX_PEERS_PER_TARGET: usize = 5_000;

/// How names of written objects are made. Core does not spell what users see.
pub trait Naming {
    /// Name of the Peer of `node`; `taken` = the readable name is someone else's already.
    fn peer(&self, mesh: &MeshId, cluster: &str, node: &str, taken: bool) -> String;
    /// Name of the PeerPolicy for what `cluster` may reach.
    fn policy(&self, mesh: &MeshId, cluster: &str, taken: bool) -> String;
    /// What tells a sandbox from the hub's others in its SandboxAccesses.
    fn sandbox(&self, identity: &ClusterIdentity) -> String;
    /// Name of the `index`-th EndpointSlice of one family of a mirrored Service.
    fn slice(&self, mesh: &MeshId, service: &ObjectName, v6: bool, index: usize) -> String;
}

/// Plans all meshes. Neither the order of `meshes` nor of anything observed has a part in the result.
#[must_use]
pub fn plan(meshes: &[Mesh], seen: &Observations, settings: &Settings, naming: &dyn Naming) -> Plan {
    let by_age = by_age(meshes);
    let accepted = claims::accept(&by_age);
    let mut plan = Plan {
        meshes: BTreeMap::new(),
        claimants: by_age.iter().map(|mesh| Claimant::from(*mesh)).collect(),
        hub: seen.hub.clone(),
    };
    let mut used: BTreeMap<ClusterIdentity, target::UsedNames> = BTreeMap::new();
    for mesh in &by_age {
        let claimants = &plan.claimants;
        let planner = mesh::MeshPlanner {
            mesh,
            all: &by_age,
            accepted: &accepted,
            seen,
            settings,
            naming,
            claimants,
            used: &used,
        };
        let planned = planner.plan();
        // Peers that are not written reserve no name.
        for (name, target) in planned.targets.iter().filter(|_| !planned.paused) {
            if let Some(identity) = planned.identities.get(name) {
                used.entry(target::canonical_identity(identity))
                    .or_default()
                    .add(target);
            }
        }
        plan.meshes.insert(mesh.id.clone(), planned);
    }
    conflicts::resolve_conflicts(&mut plan, seen);
    for mesh in &by_age {
        if let Some(planned) = plan.meshes.get_mut(&mesh.id) {
            conflicts::count_nodes_and_peers(planned);
            anchor::report(mesh, planned, seen);
        }
    }
    plan
}

/// Oldest first.
fn by_age(meshes: &[Mesh]) -> Vec<&Mesh> {
    let mut by_age: Vec<&Mesh> = meshes.iter().collect();
    by_age.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
    by_age
}
