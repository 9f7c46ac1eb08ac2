//! The meshes as the loop takes them: those it serves as their values, those it refuses as paused ones that keep what they
//! hold: what they have written, and the networks that were accepted.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use clustermesh_api::{
    convert::{self, Finding},
    mesh::{ClusterEntry, ClusterMesh, KubeconfigSecretRef},
};
use clustermesh_core::mesh::{Addressing, Cluster, ClusterIdentity, Mesh, MeshId, ObjectName, PodNetwork};

use super::to_core;
use crate::{feed::Feed, hub::Hub, hub_writer::is_finalized};

/// One ClusterMesh.
pub(super) struct Known {
    /// The object; `None` = it does not even parse.
    pub(super) object: Option<Arc<ClusterMesh>>,
    /// Its values. Of a refused mesh: paused, with what it held when it was last served.
    pub(super) mesh: Mesh,
    /// Values that were taken, but not as they were written.
    pub(super) warnings: Vec<Finding>,
    /// Why it is not served: one word, and the message.
    pub(super) refused: Option<(&'static str, String)>,
    /// Entries that hold networks, but of which nobody can say any more where they are.
    pub(super) lost: BTreeSet<String>,
}

/// The meshes as they were when they were last served, with the UID of their object.
pub(super) type Served = BTreeMap<MeshId, (Option<String>, Mesh)>;

impl Known {
    /// Whether it carries our finalizer.
    pub(super) fn finalized(&self) -> bool {
        self.object.as_deref().is_some_and(is_finalized)
    }
}

/// All meshes; `served` remembers what they meant last.
pub(super) fn know(feed: &Feed<Arc<ClusterMesh>>, hub: &Hub, served: &mut Served) -> BTreeMap<MeshId, Known> {
    let objects = feed.read(|rows| rows.values().map(|row| Arc::clone(&row.value)).collect::<Vec<_>>());
    let mut known: BTreeMap<MeshId, Known> = objects
        .into_iter()
        .map(|object| one(object, hub, served))
        .map(|known| (known.mesh.id.clone(), known))
        .collect();
    for (ObjectName { namespace, name }, why) in feed.malformed() {
        let id = MeshId { namespace, name };
        known.entry(id.clone()).or_insert_with(|| Known {
            object: None,
            mesh: hollow(id),
            warnings: vec![],
            refused: Some(("SpecInvalid", why)),
            lost: BTreeSet::new(),
        });
    }
    served.retain(|id, _| known.contains_key(id));
    known
}

fn one(object: Arc<ClusterMesh>, hub: &Hub, served: &mut Served) -> Known {
    let deleting = object.metadata.deletion_timestamp.is_some();
    let (refused, warnings) = match to_core(&object) {
        Err(why) => (("SpecInvalid", why), vec![]),
        Ok((mut mesh, warnings)) => match hub.namespaces.refuses(&mesh).filter(|_| !deleting) {
            Some(refused) => (refused, warnings),
            None => {
                hub.namespaces.confine(&mut mesh);
                served.insert(mesh.id.clone(), (object.metadata.uid.clone(), mesh.clone()));
                return Known {
                    object: Some(object),
                    mesh,
                    warnings,
                    refused: None,
                    lost: BTreeSet::new(),
                };
            }
        },
    };
    let mut mesh = kept(&object, served);
    if !deleting {
        hub.namespaces.confine(&mut mesh);
    }
    let named = |entry: &String| mesh.clusters.iter().any(|cluster| cluster.name == *entry);
    let lost = mesh.accepted.keys().filter(|entry| !named(entry)).cloned().collect();
    Known {
        object: Some(object),
        mesh,
        warnings,
        refused: Some(refused),
        lost,
    }
}

/// A refused mesh with what it holds: as it was served last, else its accepted networks with what its entries say of the
/// clusters' identities. An accepted claim is nobody else's to take, and what is being deleted still has objects to remove.
fn kept(object: &ClusterMesh, served: &Served) -> Mesh {
    let id = MeshId {
        namespace: object.metadata.namespace.clone().unwrap_or_default(),
        name: object.metadata.name.clone().unwrap_or_default(),
    };
    let deleting = object.metadata.deletion_timestamp.is_some();
    let (paused, accepted) = (convert::mesh::is_paused(object) || !deleting, accepted(object));
    match served.get(&id) {
        Some((uid, mesh)) if *uid == object.metadata.uid => {
            return Mesh {
                paused,
                deleting,
                accepted,
                ..mesh.clone()
            };
        }
        _ => {}
    }
    let mut names = BTreeSet::new();
    let clusters: Vec<Cluster> = object
        .spec
        .clusters
        .iter()
        .filter(|entry| (deleting || accepted.contains_key(&entry.name)) && names.insert(&entry.name))
        .filter_map(|entry| {
            let identity = identity(&id.namespace, entry)?;
            Some(Cluster {
                name: entry.name.clone(),
                identity,
                profile: convert::mesh::profile(entry.isolation_profile),
                addressing: Addressing::Routed,
                allowed: accepted.get(&entry.name).cloned().unwrap_or_default(),
                anchored: None,
                carriers: BTreeMap::new(),
                anchors: 1,
                pod_network: PodNetwork::PerNode,
                exports: vec![],
                wireguard_port: entry.wireguard_port,
                persistent_keepalive: 0,
                endpoint_networks: vec![],
                egress: vec![],
                quarantine: false,
                confined_to: None,
                max_nodes: convert::mesh::MAX_NODES,
            })
        })
        .collect();
    let created = object.metadata.creation_timestamp.as_ref();
    Mesh {
        // What was never served takes over nothing of the predecessor's from a mesh that is.
        created: created
            .filter(|_| !clusters.is_empty())
            .map_or(i64::MAX, |time| time.0.as_second()),
        paused,
        deleting,
        clusters,
        accepted,
        ..hollow(id)
    }
}

fn identity(namespace: &str, entry: &ClusterEntry) -> Option<ClusterIdentity> {
    if entry.local {
        return Some(ClusterIdentity::Local);
    }
    entry
        .kubeconfig_secret_ref
        .as_ref()
        .map(|secret| of_secret(namespace, secret))
}

/// The cluster whose kubeconfig a Secret of this namespace holds.
pub(super) fn of_secret(namespace: &str, secret: &KubeconfigSecretRef) -> ClusterIdentity {
    ClusterIdentity::Secret {
        namespace: namespace.to_owned(),
        name: secret.name.clone(),
        key: secret.key.clone(),
        context: secret.context.clone().filter(|context| !context.is_empty()),
    }
}

/// `status.clusters[].acceptedNetworks`, as far as they are networks.
fn accepted<N: std::str::FromStr>(object: &ClusterMesh) -> BTreeMap<String, Vec<N>> {
    let rows = object.status.iter().flat_map(|status| &status.clusters);
    rows.map(|row| {
        let networks = row.accepted_networks.iter().filter_map(|text| text.parse().ok());
        (row.name.clone(), networks.collect::<Vec<_>>())
    })
    .filter(|(_, networks)| !networks.is_empty())
    .collect()
}

/// A mesh of which nothing is known but that it is there.
fn hollow(id: MeshId) -> Mesh {
    Mesh {
        id,
        created: i64::MAX,
        paused: true,
        deleting: false,
        adopt_hub: None,
        clusters: vec![],
        accepted: BTreeMap::new(),
    }
}

#[cfg(test)]
mod tests;
