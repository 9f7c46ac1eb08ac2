//! Applies a plan to a scenario: computes the state after all steps are written.

use std::sync::Arc;

use clustermesh_core::{
    diff::{Item, Step},
    observe::{Member, Observation, ObservedAccess, ObservedPeer, ObservedPolicy, Owner, Service, Slice},
};

use crate::{Scenario, planned, steps};

fn write(member: &mut Member, step: &Step) {
    let owner = Owner::clone(&step.owner);
    match step.item.clone() {
        Item::Peer(name, spec) => {
            let peers = member.peers.as_mut().expect("no Peer is written if its CRD is missing");
            match spec {
                Some(spec) => peers.insert(
                    name,
                    ObservedPeer {
                        owner,
                        spec: Ok(Arc::unwrap_or_clone(spec)),
                    },
                ),
                None => drop(peers.remove(&name)),
            }
        }
        Item::Policy(name, spec) => {
            let policies = member
                .policies
                .as_mut()
                .expect("no PeerPolicy is written if its CRD is missing");
            match spec {
                Some(spec) => drop(policies.insert(name, ObservedPolicy { owner, spec: Ok(*spec) })),
                None => drop(policies.remove(&name)),
            }
        }
        Item::Access(name, spec) => {
            let accesses = member
                .accesses
                .as_mut()
                .expect("no SandboxAccess is written if its CRD is missing");
            match spec {
                Some(spec) => drop(accesses.insert(
                    name,
                    ObservedAccess {
                        owner,
                        generation: 1,
                        spec: Ok(*spec),
                    },
                )),
                None => drop(accesses.remove(&name)),
            }
        }
        Item::Service(name, Some(mirror)) => {
            let service = Service {
                managed: Some(owner),
                selectorless: true,
                ports: mirror.ports,
                families: mirror.families,
                ..Service::default()
            };
            member.services.insert(name, service);
        }
        Item::Service(name, None) => drop(member.services.remove(&name)),
        Item::Slice(name, Some(slice)) => {
            let (service, slice) = *slice;
            let slice = Slice {
                managed: Some(owner),
                service,
                v6: slice.v6,
                ports: slice.ports,
                endpoints: slice.endpoints,
            };
            member.slices.insert(name, slice);
        }
        Item::Slice(name, None) => drop(member.slices.remove(&name)),
    }
}

/// Applies all steps. Also stores the accepted networks and the anchors in each mesh that is not being deleted, because the next
/// plan reads them from the mesh. The controller keeps them in the mesh's status.
pub fn apply_plan(scenario: &Scenario) -> Scenario {
    let plan = planned(scenario);
    let steps = steps(&plan, scenario);
    let mut after = scenario.clone();
    for (identity, steps) in steps {
        if let Some(Observation::Fresh(member)) = after.seen.members.get_mut(&identity) {
            steps.iter().for_each(|step| write(member, step));
        }
    }
    for mesh in after.meshes.iter_mut().filter(|mesh| !mesh.deleting) {
        let reports = &plan.meshes[&mesh.id].clusters;
        mesh.accepted = reports
            .iter()
            .map(|(name, report)| (name.clone(), report.accepted.clone()))
            .collect();
        for cluster in &mut mesh.clusters {
            let report = reports.get(&cluster.name);
            cluster.previous_anchors = report.map(|report| report.anchored.clone()).unwrap_or_default();
        }
    }
    after
}
