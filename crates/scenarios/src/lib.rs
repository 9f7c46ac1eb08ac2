//! Generates scenarios for property tests: meshes and the observed state of their members.
//!
//! Most networks, addresses and keys occur in only one cluster, because collisions prevent Peers. The rest of them, and all names and
//! labels, come from small pools that the clusters share, so that some of them collide. [`scenario`] generates any scenario; those of
//! [`sandboxed`] have a sandbox with a valid grant.
#![forbid(unsafe_code)]

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use clustermesh_core::{
    diff::{Step, diff},
    mesh::{ClusterIdentity, Mesh, MeshId, ObjectName},
    observe::{Claim, Observation, Observations, Owner},
    ownership::{self, Ownership},
    plan::{Naming, Plan, Settings, plan},
};
use proptest::{collection, option, prelude::*, sample::select};

mod applied;
mod member;
mod mesh;
mod sandbox;
mod values;

pub use applied::apply_plan;
pub use member::{gateway_name, member, node};
pub use sandbox::sandboxed;
pub use values::ip;

use member::NODE_NAMES;
use mesh::mesh;

/// Readable names of objects, like those of the API crate but without length limits.
#[derive(Debug, Clone, Copy)]
pub struct TestNaming;

impl Naming for TestNaming {
    fn peer(&self, mesh: &MeshId, cluster: &str, node: &str, is_name_taken: bool) -> String {
        let tail = if is_name_taken {
            format!("-{}", mesh.namespace)
        } else {
            String::new()
        };
        format!("{}--{cluster}--{node}{tail}", mesh.name)
    }

    fn policy(&self, mesh: &MeshId, cluster: &str, is_name_taken: bool) -> String {
        let tail = if is_name_taken {
            format!("-{}", mesh.namespace)
        } else {
            String::new()
        };
        format!("{}--{cluster}{tail}", mesh.name)
    }

    fn sandbox_id(&self, identity: &ClusterIdentity) -> String {
        identity.to_string()
    }

    fn slice(&self, mesh: &MeshId, service: &ObjectName, v6: bool, index: usize) -> String {
        format!(
            "{}-{}-{}-{}-{index}",
            service.name,
            mesh.namespace,
            mesh.name,
            if v6 { 6 } else { 4 }
        )
    }
}

/// The identity of the `n`-th of the three clusters. Cluster 0 is the hub.
pub fn identity(n: usize) -> ClusterIdentity {
    if n == 0 {
        return ClusterIdentity::Local;
    }
    let name = format!("s{n}");
    ClusterIdentity::Secret {
        namespace: "one".into(),
        name,
        key: "value".into(),
        context: None,
    }
}

/// One to three meshes of the clusters `c0`, `c1`, `c2`, and the observed state of these clusters.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// The meshes.
    pub meshes: Vec<Mesh>,
    /// The observed state.
    pub seen: Observations,
}

/// Generates a scenario: either an initial one, or one in which plans were written ([`after_writes`]) and some nodes no longer
/// publish a key, address or endpoint, as while kg restarts.
pub fn scenario() -> BoxedStrategy<Scenario> {
    let stopped = option::of(collection::vec((0usize..3, select(&NODE_NAMES[..])), 0..5));
    let scenario = (initial(), stopped).prop_map(|(scenario, stopped)| {
        let Some(stopped) = stopped else { return scenario };
        let mut scenario = after_writes(scenario);
        for (n, name) in stopped {
            let Some(Observation::Fresh(member)) = scenario.seen.members.get_mut(&identity(n)) else {
                continue;
            };
            if let Some(node) = member.nodes.get_mut(name) {
                (node.public_key, node.wireguard_ip) = (Claim::Absent, Claim::Absent);
                (node.kilo_endpoint, node.kilo_internal_ip, node.granularity) = (Claim::Absent, None, None);
            }
        }
        scenario
    });
    scenario.boxed()
}

/// The scenario after four plans were written. Several plans are needed until nothing changes: a later plan may use what an earlier
/// one freed, and a held Node may lose its Peer.
pub fn after_writes(scenario: Scenario) -> Scenario {
    (0..4).fold(scenario, |scenario, _| apply_plan(&scenario))
}

fn initial() -> impl Strategy<Value = Scenario> {
    let observed = |n| {
        prop_oneof![
            12 => member(n).prop_map(Observation::Fresh),
            1 => member(n).prop_map(|member| Observation::Stale(member, "watch broken".into())),
            1 => Just(Observation::Unreachable("refused".into())),
            1 => Just(Observation::Missing("no Secret".into())),
        ]
    };
    let members = (observed(0), observed(1), observed(2));
    (collection::vec(mesh(), 1..4), members).prop_map(|(mut meshes, (a, b, c))| {
        let mut ids = BTreeSet::new();
        meshes.retain(|mesh| ids.insert(mesh.id.clone()));
        let members = (0..).zip([a, b, c]).map(|(n, member)| (identity(n), member));
        let resolved = BTreeMap::from([("a.example".to_owned(), "192.0.2.7".parse().unwrap())]);
        Scenario {
            meshes,
            seen: Observations {
                members: members.collect(),
                hub: "hub".into(),
                resolved,
            },
        }
    })
}

/// The plan of a scenario.
pub fn planned(scenario: &Scenario) -> Plan {
    plan(&scenario.meshes, &scenario.seen, &Settings::default(), &TestNaming)
}

/// The writes that each member with a fresh observation still needs.
pub fn steps(plan: &Plan, scenario: &Scenario) -> BTreeMap<ClusterIdentity, Vec<Arc<Step>>> {
    let fresh = scenario
        .seen
        .members
        .iter()
        .filter_map(|(identity, member)| Some((identity, member.fresh()?)));
    fresh
        .map(|(identity, member)| (identity.clone(), diff(plan, identity, member)))
        .collect()
}

/// Which mesh of a plan owns the object with these ownership labels.
pub fn ownership_of<'a>(plan: &'a Plan, owner: &Owner) -> Ownership<'a> {
    ownership::of(owner, &plan.hub, &plan.claimants)
}
