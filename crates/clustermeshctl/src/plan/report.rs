//! Renders the plan as JSON and YAML. Programs read this format: fields may be added, but never renamed.

use std::collections::BTreeMap;

use clustermesh_api::{
    convert,
    peer::Peer,
    policy::PeerPolicy,
    sandbox::{SandboxAccess, SandboxAccessSpec},
};
use clustermesh_core::{
    diff::Step,
    mesh::{MeshId, ObjectName},
    observe::Owner,
    plan::{MeshPlan, TargetPlan},
    status,
};
use k8s_openapi::{
    api::{core::v1::Service, discovery::v1::EndpointSlice},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{Resource, ResourceExt};
use serde::Serialize;

use super::PlanResult;
use crate::inputs::ReadCluster;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    meshes: Vec<MeshReport>,
}

#[derive(Debug, Serialize)]
struct MeshReport {
    namespace: String,
    name: String,
    conditions: Vec<Condition>,
    clusters: Vec<Cluster>,
    targets: Vec<Target>,
}

#[derive(Debug, Serialize)]
struct Condition {
    #[serde(rename = "type")]
    kind: &'static str,
    status: &'static str,
    reason: &'static str,
    message: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Cluster {
    name: String,
    registered_peers: usize,
    skipped: Vec<Skipped>,
    uncovered: Vec<Uncovered>,
}

/// A podCIDR of a registered node that its Peers leave out: it lies outside `allowedNetworks` or is anchored.
#[derive(Debug, Serialize)]
struct Uncovered {
    node: String,
    network: String,
}

#[derive(Debug, Serialize)]
struct Skipped {
    node: String,
    reason: String,
    message: String,
}

/// The desired objects of a mesh in one member, and the steps that create, update or delete objects there.
#[derive(Debug, Serialize)]
struct Target {
    cluster: String,
    peers: Vec<Peer>,
    policies: Vec<PeerPolicy>,
    accesses: Vec<SandboxAccess>,
    services: Vec<Mirror>,
    changes: Vec<Change>,
}

/// A mirrored Service, or one of its EndpointSlices.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Mirror {
    Service(Box<Service>),
    Slice(Box<EndpointSlice>),
}

#[derive(Debug, Serialize)]
struct Change {
    action: &'static str,
    kind: &'static str,
    name: String,
    fields: Vec<&'static str>,
}

impl From<&Step> for Change {
    fn from(step: &Step) -> Self {
        Self {
            action: step.action.as_str(),
            kind: step.item.kind(),
            name: step.item.name(),
            fields: step.fields.clone(),
        }
    }
}

impl From<&PlanResult> for Report {
    fn from(outcome: &PlanResult) -> Self {
        let meshes = outcome.plan.meshes.iter();
        Self {
            meshes: meshes.map(|(id, mesh)| MeshReport::new(outcome, id, mesh)).collect(),
        }
    }
}

impl MeshReport {
    fn new(outcome: &PlanResult, id: &MeshId, mesh: &MeshPlan) -> Self {
        // The empty arguments: `plan` attempts no write and no deletion, reads no tunnel reports, and lists pending writes in `changes`.
        let conditions = status::conditions(mesh, &BTreeMap::new(), &BTreeMap::new(), &[], &BTreeMap::new());
        Self {
            namespace: id.namespace.clone(),
            name: id.name.clone(),
            conditions: conditions
                .into_iter()
                .map(|condition| Condition {
                    kind: condition.kind,
                    status: if condition.status { "True" } else { "False" },
                    reason: condition.reason,
                    message: condition.message,
                })
                .collect(),
            clusters: mesh
                .clusters
                .iter()
                .map(|(name, cluster)| Cluster {
                    name: name.clone(),
                    registered_peers: cluster.registered,
                    skipped: cluster
                        .skipped
                        .iter()
                        .map(|skipped| Skipped {
                            node: skipped.node.clone(),
                            reason: skipped.reason.to_string(),
                            message: skipped.message.clone(),
                        })
                        .collect(),
                    uncovered: cluster
                        .uncovered
                        .iter()
                        .map(|uncovered| Uncovered {
                            node: uncovered.node.clone(),
                            network: uncovered.network.to_string(),
                        })
                        .collect(),
                })
                .collect(),
            targets: mesh
                .targets
                .iter()
                .map(|(cluster, target)| Target::new(outcome, id, mesh, cluster, target))
                .collect(),
        }
    }
}

impl Target {
    fn new(outcome: &PlanResult, id: &MeshId, mesh: &MeshPlan, cluster: &str, planned: &TargetPlan) -> Self {
        let builder = ObjectBuilder {
            id,
            hub: &outcome.plan.hub,
            cluster: outcome.cluster(mesh, cluster),
        };
        let changes = outcome.changes(id, mesh, cluster).unwrap_or_default();
        Self {
            cluster: cluster.to_owned(),
            peers: builder.peers(planned),
            policies: builder.policies(planned),
            accesses: builder.accesses(planned),
            services: builder.services(planned),
            changes: changes.into_iter().map(Change::from).collect(),
        }
    }
}

/// Builds objects as the controller writes them. An existing object keeps its resourceVersion and the metadata of other clients.
struct ObjectBuilder<'a> {
    id: &'a MeshId,
    hub: &'a str,
    /// `None` = no input was read for the cluster.
    cluster: Option<&'a ReadCluster>,
}

impl ObjectBuilder<'_> {
    fn owner(&self, source: &str) -> Owner {
        Owner {
            mesh: Some(self.id.name.clone()),
            mesh_namespace: Some(self.id.namespace.clone()),
            hub: Some(self.hub.to_owned()),
            source_cluster: Some(source.to_owned()),
        }
    }

    fn peers(&self, planned: &TargetPlan) -> Vec<Peer> {
        let existing = |name| self.cluster.and_then(|cluster| cluster.objects.peers.get(name));
        let peers = planned.peers.iter().map(|(name, peer)| {
            let owner = self.owner(&peer.source);
            match existing(name) {
                None => convert::peer::from_core(name, &peer.spec, &owner),
                Some(existing) => {
                    let mut written = without_managed_fields(existing);
                    convert::peer::update(&mut written, &peer.spec, &owner);
                    written
                }
            }
        });
        peers.collect()
    }

    fn policies(&self, planned: &TargetPlan) -> Vec<PeerPolicy> {
        let existing = |name| self.cluster.and_then(|cluster| cluster.objects.policies.get(name));
        let policies = planned.policies.iter().map(|(name, policy)| {
            let owner = self.owner(&policy.source);
            match existing(name) {
                None => convert::policy::from_core(name, &policy.source, &policy.spec, &owner),
                Some(existing) => {
                    let mut written = without_managed_fields(existing);
                    convert::policy::update(&mut written, &policy.source, &policy.spec, &owner);
                    written
                }
            }
        });
        policies.collect()
    }

    fn accesses(&self, planned: &TargetPlan) -> Vec<SandboxAccess> {
        let existing = |name| self.cluster.and_then(|cluster| cluster.objects.accesses.get(name));
        let accesses = planned.accesses.iter().map(|(name, access)| {
            let new = || SandboxAccess::new(name, SandboxAccessSpec::default());
            let mut written = existing(name).map_or_else(new, without_managed_fields);
            convert::sandbox::update(&mut written, &access.spec, &self.owner(&access.source));
            written
        });
        accesses.collect()
    }

    fn services(&self, planned: &TargetPlan) -> Vec<Mirror> {
        let mut mirrors = Vec::new();
        for (name, service) in &planned.services {
            let owner = self.owner(&service.source);
            let existing = self.cluster.and_then(|cluster| cluster.objects.services.get(name));
            let mut written = existing.map_or_else(
                || Service {
                    metadata: metadata(name),
                    ..Service::default()
                },
                without_managed_fields,
            );
            convert::service::update(&mut written, &service.mirror(), &owner);
            mirrors.push(Mirror::Service(Box::new(written)));
            for (slice_name, slice) in &service.slices {
                let slice_name = ObjectName {
                    namespace: name.namespace.clone(),
                    name: slice_name.clone(),
                };
                let existing = self.cluster.and_then(|cluster| cluster.objects.slices.get(&slice_name));
                let mut written = existing.map_or_else(
                    || EndpointSlice {
                        metadata: metadata(&slice_name),
                        ..EndpointSlice::default()
                    },
                    without_managed_fields,
                );
                convert::service::update_slice(&mut written, &name.name, slice, &owner);
                mirrors.push(Mirror::Slice(Box::new(written)));
            }
        }
        mirrors
    }
}

fn metadata(name: &ObjectName) -> ObjectMeta {
    ObjectMeta {
        namespace: Some(name.namespace.clone()),
        name: Some(name.name.clone()),
        ..ObjectMeta::default()
    }
}

/// Copies an object without `managedFields`, which only the API server writes.
fn without_managed_fields<T: Resource + Clone>(existing: &T) -> T {
    let mut object = existing.clone();
    object.managed_fields_mut().clear();
    object.meta_mut().managed_fields = None;
    object
}
