//! Converts ClusterMeshes to the planner's input.
//!
//! A refused mesh (its spec is invalid, or exceeds the permissions of its namespace) keeps its last valid content, or what
//! [`last_valid_mesh`] can restore of it after a restart. Its accepted networks stay reserved. Unless it is in deletion, it is paused, so
//! that its objects stay in the members. A ClusterMesh that this process could never parse is also refused, but without content.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use clustermesh_api::{
    convert::{self, Finding},
    mesh::{ClusterEntry, ClusterMesh, KubeconfigSecretRef},
};
use clustermesh_core::mesh::{Addressing, Cluster, ClusterIdentity, Locations, Mesh, MeshId, ObjectName, PodNetwork};

use super::to_core;
use crate::{feed::Feed, hub::Hub, hub_writer::has_finalizer};

/// One ClusterMesh.
pub(super) struct LoadedMesh {
    /// The object, in the last version that parses. `None` = this process has seen no such version.
    pub(super) object: Option<Arc<ClusterMesh>>,
    /// The planner's input. That of a refused mesh comes from [`last_valid_mesh`] (empty if there is no `object`). A refused mesh is
    /// paused, except that a mesh in deletion is paused only if its `object` is.
    pub(super) mesh: Mesh,
    /// Fields whose values were accepted in another form than written.
    pub(super) warnings: Vec<Finding>,
    /// Reason and message of the condition if the mesh is refused.
    pub(super) refused: Option<(&'static str, String)>,
    /// Names of the entries that have accepted networks in the status but are missing in `mesh`. It is unknown which clusters they are.
    /// Used only in a mesh in deletion; empty if the mesh is not refused.
    pub(super) unlocatable: BTreeSet<String>,
}

/// The last valid content of each mesh, with the UID of its object.
pub(super) type LastValidMeshes = BTreeMap<MeshId, (Option<String>, Mesh)>;

impl LoadedMesh {
    /// Whether the ClusterMesh has our finalizer.
    pub(super) fn has_finalizer(&self) -> bool {
        self.object.as_deref().is_some_and(has_finalizer)
    }
}

/// Converts all meshes of the feed and updates `last_valid`.
pub(super) fn load_meshes(
    feed: &Feed<Arc<ClusterMesh>>,
    hub: &Hub,
    last_valid: &mut LastValidMeshes,
) -> BTreeMap<MeshId, LoadedMesh> {
    let objects = feed.read(|rows| rows.values().map(|row| Arc::clone(&row.value)).collect::<Vec<_>>());
    let mut meshes: BTreeMap<MeshId, LoadedMesh> = objects
        .into_iter()
        .map(|object| load_mesh(object, hub, last_valid))
        .map(|loaded| (loaded.mesh.id.clone(), loaded))
        .collect();
    for (ObjectName { namespace, name }, why) in feed.malformed() {
        let id = MeshId { namespace, name };
        meshes.entry(id.clone()).or_insert_with(|| LoadedMesh {
            object: None,
            mesh: empty_mesh(id),
            warnings: vec![],
            refused: Some(("SpecInvalid", why)),
            unlocatable: BTreeSet::new(),
        });
    }
    last_valid.retain(|id, _| meshes.contains_key(id));
    meshes
}

fn load_mesh(object: Arc<ClusterMesh>, hub: &Hub, last_valid: &mut LastValidMeshes) -> LoadedMesh {
    let deleting = object.metadata.deletion_timestamp.is_some();
    let (refused, warnings) = match to_core(&object) {
        Err(why) => (("SpecInvalid", why), vec![]),
        Ok((mut mesh, warnings)) => match hub.namespaces.find_refusal(&mesh).filter(|_| !deleting) {
            Some(refused) => (refused, warnings),
            None => {
                // A valid mesh in deletion is not refused for its namespace, so it is reduced to what the namespace allows.
                hub.namespaces.reduce_to_allowed(&mut mesh);
                last_valid.insert(mesh.id.clone(), (object.metadata.uid.clone(), mesh.clone()));
                return LoadedMesh {
                    object: Some(object),
                    mesh,
                    warnings,
                    refused: None,
                    unlocatable: BTreeSet::new(),
                };
            }
        },
    };
    let mut mesh = last_valid_mesh(&object, last_valid);
    // A refused mesh in deletion is not reduced, because `unlocatable` is computed below from the accepted networks, and
    // `reduce_to_allowed` would remove the accepted networks of entries that are missing in `mesh`.
    if !deleting {
        hub.namespaces.reduce_to_allowed(&mut mesh);
    }
    let is_named = |entry: &String| mesh.clusters.iter().any(|cluster| cluster.name == *entry);
    let unlocatable = mesh.accepted.keys().filter(|entry| !is_named(entry)).cloned().collect();
    LoadedMesh {
        object: Some(object),
        mesh,
        warnings,
        refused: Some(refused),
        unlocatable,
    }
}

/// Returns a refused mesh with its last valid content. It is paused, except that a mesh in deletion is paused only if `object` says so.
///
/// If the last valid content is not known, as after a restart, the mesh is built from its spec and status: each entry keeps its
/// identity, and its networks are the accepted ones. Entries without accepted networks are left out, unless the mesh is in deletion.
///
/// A refused mesh stays in the planner's input because other meshes must not take over its accepted networks, and because a mesh in
/// deletion still has objects to remove.
fn last_valid_mesh(object: &ClusterMesh, last_valid: &LastValidMeshes) -> Mesh {
    let id = MeshId {
        namespace: object.metadata.namespace.clone().unwrap_or_default(),
        name: object.metadata.name.clone().unwrap_or_default(),
    };
    let deleting = object.metadata.deletion_timestamp.is_some();
    let (paused, accepted) = (convert::mesh::is_paused(object) || !deleting, accepted(object));
    match last_valid.get(&id) {
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
                previous_anchors: BTreeMap::new(),
                anchors: 1,
                pod_network: PodNetwork::PerNode,
                exports: vec![],
                wireguard_port: entry.wireguard_port,
                persistent_keepalive: 0,
                locations: Locations::Ignored,
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
        // The oldest mesh adopts the Peers of the predecessor. A mesh without entries counts as the newest, so that a valid mesh adopts
        // them.
        created: created
            .filter(|_| !clusters.is_empty())
            .map_or(i64::MAX, |time| time.0.as_second()),
        paused,
        deleting,
        clusters,
        accepted,
        ..empty_mesh(id)
    }
}

fn identity(namespace: &str, entry: &ClusterEntry) -> Option<ClusterIdentity> {
    if entry.local {
        return Some(ClusterIdentity::Local);
    }
    entry
        .kubeconfig_secret_ref
        .as_ref()
        .map(|secret| identity_of_secret(namespace, secret))
}

/// Returns the identity of the cluster whose kubeconfig is in a Secret of this namespace.
pub(super) fn identity_of_secret(namespace: &str, secret: &KubeconfigSecretRef) -> ClusterIdentity {
    ClusterIdentity::Secret {
        namespace: namespace.to_owned(),
        name: secret.name.clone(),
        key: secret.key.clone(),
        context: secret.context.clone().filter(|context| !context.is_empty()),
    }
}

/// Reads `status.clusters[].acceptedNetworks`. Ignores values that do not parse. `N` is the type of the networks in
/// [`Mesh::accepted`]; this crate does not depend on the crate that defines it.
fn accepted<N: std::str::FromStr>(object: &ClusterMesh) -> BTreeMap<String, Vec<N>> {
    let rows = object.status.iter().flat_map(|status| &status.clusters);
    rows.map(|row| {
        let networks = row.accepted_networks.iter().filter_map(|text| text.parse().ok());
        (row.name.clone(), networks.collect::<Vec<_>>())
    })
    .filter(|(_, networks)| !networks.is_empty())
    .collect()
}

/// Creates a paused mesh without entries.
fn empty_mesh(id: MeshId) -> Mesh {
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
