//! Clusters that a mesh no longer names, until its objects there are removed or left behind by name. The list is kept in the
//! mesh's status, so that a restart does not lose it.

use std::collections::{BTreeMap, BTreeSet};

use clustermesh_api::{
    mesh::{ClusterMesh, KubeconfigSecretRef, RemovedCluster},
    names::FORCE_CLEANUP,
};
use clustermesh_core::{
    mesh::{ClusterIdentity, MeshId, Profile},
    observe::Observation,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{
    Pass, Reconciler, may_serve_elsewhere,
    meshes::{Known, of_secret},
    seconds,
};

/// The removed clusters of all meshes.
#[derive(Default)]
pub(super) struct RemovedClusters {
    meshes: BTreeMap<MeshId, OfMesh>,
}

#[derive(Default)]
struct OfMesh {
    /// UID of the ClusterMesh.
    uid: Option<String>,
    /// The clusters that it named in the last pass.
    named: BTreeMap<ClusterIdentity, Named>,
    removed: BTreeMap<ClusterIdentity, Removed>,
}

/// One cluster that the spec names.
#[derive(Clone)]
struct Named {
    /// The name of its entry.
    name: String,
    /// Its Nodes were read: before that nothing is written there.
    was_read: bool,
}

/// One cluster that the spec no longer names.
struct Removed {
    name: String,
    /// UID of its kube-system namespace.
    uid: Option<String>,
    since: Time,
}

impl RemovedClusters {
    /// Notes the entries that are gone since the last pass; at first those that the status of a mesh lists.
    pub(super) fn update(&mut self, known: &BTreeMap<MeshId, Known>) {
        self.meshes.retain(|id, _| known.contains_key(id));
        for (id, known) in known {
            let Some(object) = &known.object else { continue };
            let of_mesh = self.meshes.entry(id.clone()).or_default();
            if of_mesh.uid != object.metadata.uid {
                *of_mesh = OfMesh::of_status(object);
            }
            let mut before = std::mem::take(&mut of_mesh.named);
            for cluster in &known.mesh.clusters {
                let was_read = before.remove(&cluster.identity).is_some_and(|named| named.was_read);
                let name = cluster.name.clone();
                of_mesh.named.insert(cluster.identity.clone(), Named { name, was_read });
            }
            let uids = uids(object);
            for (identity, Named { name, .. }) in before.into_iter().filter(|(_, named)| named.was_read) {
                let uid = uids.get(&name).cloned();
                let since = now();
                of_mesh.removed.entry(identity).or_insert(Removed { name, uid, since });
            }
            let named = &of_mesh.named;
            let is_named = |identity: &ClusterIdentity| named.keys().any(|named| named.same_cluster(identity));
            of_mesh.removed.retain(|identity, _| !is_named(identity));
        }
    }

    /// The members that are still needed for these clusters.
    pub(super) fn identities(&self) -> impl Iterator<Item = &ClusterIdentity> {
        self.meshes.values().flat_map(|of_mesh| of_mesh.removed.keys())
    }

    /// Whether nothing of a mesh is left outside the clusters that it names.
    pub(super) fn is_empty(&self, mesh: &MeshId) -> bool {
        self.meshes.get(mesh).is_none_or(|of_mesh| of_mesh.removed.is_empty())
    }
}

impl OfMesh {
    fn of_status(object: &ClusterMesh) -> Self {
        let namespace = object.metadata.namespace.clone().unwrap_or_default();
        let identity = |secret: &Option<KubeconfigSecretRef>| {
            let secret = secret.as_ref();
            secret.map_or(ClusterIdentity::Local, |secret| of_secret(&namespace, secret))
        };
        let entries: BTreeSet<&String> = object.spec.clusters.iter().map(|entry| &entry.name).collect();
        let mut removed = BTreeMap::new();
        let status = object.status.as_ref();
        for row in status.into_iter().flat_map(|status| &status.clusters) {
            // A row of an earlier version does not say by which Secret its cluster was reached; the entry does.
            let is_known = row.kubeconfig_secret_ref.is_some() || !entries.contains(&row.name);
            if row.agents.is_some() && is_known {
                let identity = identity(&row.kubeconfig_secret_ref);
                let (name, uid, since) = (row.name.clone(), row.uid.clone(), now());
                removed.insert(identity, Removed { name, uid, since });
            }
        }
        for row in status.into_iter().flat_map(|status| &status.removed_clusters) {
            let identity = identity(&row.kubeconfig_secret_ref);
            let (name, uid, since) = (row.name.clone(), row.uid.clone(), row.since.clone());
            removed.insert(identity, Removed { name, uid, since });
        }
        Self {
            uid: object.metadata.uid.clone(),
            named: BTreeMap::new(),
            removed,
        }
    }
}

/// Clusters whose objects are left behind where they cannot be removed, as the annotation says.
pub(super) fn is_left_behind(object: &ClusterMesh, cluster: &str) -> bool {
    let annotations = object.metadata.annotations.as_ref();
    let Some(value) = annotations.and_then(|annotations| annotations.get(FORCE_CLEANUP)) else {
        return false;
    };
    match value.trim() {
        "false" => false,
        "true" | "" => object.metadata.deletion_timestamp.is_some(),
        names => names.split(',').any(|name| name.trim() == cluster),
    }
}

/// How to remove what is left in a cluster, or to leave it there.
pub(super) fn ways_out(cluster: &str) -> String {
    format!(
        "Its objects are removed when it answers; to leave them there, annotate the ClusterMesh with {FORCE_CLEANUP}={cluster}"
    )
}

impl Reconciler {
    /// Forgets the removed clusters where nothing of their mesh is left. Returns the rows for the status of each mesh.
    pub(super) fn sync_removed(&mut self, pass: &Pass) -> BTreeMap<MeshId, Vec<Row>> {
        let mut all = std::mem::take(&mut self.removed);
        let mut rows: BTreeMap<MeshId, Vec<Row>> = BTreeMap::new();
        for (id, of_mesh) in &mut all.meshes {
            let Some(known) = pass.known.get(id) else { continue };
            for (identity, named) in &mut of_mesh.named {
                let seen = pass.seen.members.get(identity);
                named.was_read |= seen.and_then(Observation::last).is_some();
            }
            of_mesh.removed.retain(|identity, removed| {
                let Some(row) = self.removed_row(pass, known, identity, removed) else {
                    return false;
                };
                rows.entry(id.clone()).or_default().push(row);
                true
            });
        }
        self.removed = all;
        rows
    }

    /// `None` = nothing is left there, or it is left behind.
    fn removed_row(&self, pass: &Pass, known: &Known, identity: &ClusterIdentity, removed: &Removed) -> Option<Row> {
        let id = &known.mesh.id;
        let Removed { name, uid, since } = removed;
        let object = known.object.as_deref()?;
        if is_left_behind(object, name) {
            tracing::warn!(mesh = %id, cluster = name, member = %identity, "objects are left behind, as the ClusterMesh says");
            return None;
        }
        // A kubeconfig that moved to another Secret. A sandbox may claim any UID.
        let renamed = known.mesh.clusters.iter().any(|entry| {
            let seen = pass.seen.members.get(&entry.identity).and_then(Observation::fresh);
            let theirs = seen.and_then(|seen| seen.uid.as_ref());
            entry.profile != Profile::Sandbox && uid.is_some() && theirs == uid.as_ref()
        });
        if renamed || self.is_clean(pass, identity, id) {
            tracing::info!(mesh = %id, cluster = name, member = %identity, renamed, "nothing of the mesh is left in a removed cluster");
            return None;
        }
        let observation = pass.seen.members.get(identity);
        let trouble = observation.and_then(Observation::trouble);
        let refused = self.members.get(identity).and_then(|member| member.writer.trouble(id));
        let theirs = observation
            .and_then(Observation::last)
            .and_then(|seen| seen.uid.as_deref());
        let trouble = match (refused, trouble) {
            (Some(why), _) => Some(why),
            (None, Some(why)) => Some(format!("{why}. {}", ways_out(name))),
            (None, None) if may_serve_elsewhere(&pass.plan, &pass.seen, id, identity, theirs) => Some(format!(
                "it may be the cluster of another entry that was not reached yet. {}",
                ways_out(name)
            )),
            (None, None) => None,
        };
        let message = match &trouble {
            Some(why) => why.clone(),
            None if known.mesh.paused => "the ClusterMesh is paused, and nothing is deleted".to_owned(),
            None => "its objects are being removed".to_owned(),
        };
        let secret = match identity {
            ClusterIdentity::Local => None,
            ClusterIdentity::Secret { name, key, context, .. } => Some(KubeconfigSecretRef {
                name: name.clone(),
                key: key.clone(),
                context: context.clone(),
            }),
        };
        let row = RemovedCluster {
            name: name.clone(),
            kubeconfig_secret_ref: secret,
            uid: uid.clone(),
            since: since.clone(),
            message,
        };
        Some(Row { row, trouble })
    }
}

/// What is reported of a removed cluster.
pub(crate) struct Row {
    pub(crate) row: RemovedCluster,
    /// Why its objects cannot be removed now.
    pub(crate) trouble: Option<String>,
}

fn uids(object: &ClusterMesh) -> BTreeMap<String, String> {
    let rows = object.status.iter().flat_map(|status| &status.clusters);
    rows.filter_map(|row| Some((row.name.clone(), row.uid.clone()?)))
        .collect()
}

fn now() -> Time {
    seconds(k8s_openapi::jiff::Timestamp::now())
}
