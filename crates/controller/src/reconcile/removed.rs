//! Tracks clusters that were removed from a mesh's spec, until its objects there are deleted or its annotation
//! `force-cleanup` allows leaving them behind. The list is in the mesh's status, so that a restart does not lose it.

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
    Pass, Reconciler, may_be_named_by_other_secret,
    meshes::{LoadedMesh, identity_of_secret},
    truncate_to_seconds,
};

/// The removed clusters of all meshes.
#[derive(Default)]
pub(super) struct RemovedClusters {
    meshes: BTreeMap<MeshId, MeshClusters>,
}

/// The clusters of one mesh.
#[derive(Default)]
struct MeshClusters {
    /// UID of the ClusterMesh.
    uid: Option<String>,
    /// The clusters in the spec, as of the last pass.
    named: BTreeMap<ClusterIdentity, NamedCluster>,
    removed: BTreeMap<ClusterIdentity, UnnamedCluster>,
}

/// One cluster that the spec names.
#[derive(Clone)]
struct NamedCluster {
    /// The name of its entry.
    name: String,
    /// Its Nodes were read at least once. Before that nothing is written there, so nothing can be left there.
    was_read: bool,
}

/// One cluster that the spec no longer names.
struct UnnamedCluster {
    /// The name of its former entry.
    name: String,
    /// UID of its kube-system namespace.
    uid: Option<String>,
    since: Time,
}

impl RemovedClusters {
    /// Adds the clusters that were removed from the specs since the last pass. For a mesh that is seen for the first time, adds
    /// the clusters in its status.
    pub(super) fn update(&mut self, meshes: &BTreeMap<MeshId, LoadedMesh>) {
        self.meshes.retain(|id, _| meshes.contains_key(id));
        for (id, loaded) in meshes {
            let Some(object) = &loaded.object else { continue };
            let clusters = self.meshes.entry(id.clone()).or_default();
            if clusters.uid != object.metadata.uid {
                *clusters = MeshClusters::from_status(object);
            }
            let mut before = std::mem::take(&mut clusters.named);
            for cluster in &loaded.mesh.clusters {
                let was_read = before.remove(&cluster.identity).is_some_and(|named| named.was_read);
                let name = cluster.name.clone();
                clusters
                    .named
                    .insert(cluster.identity.clone(), NamedCluster { name, was_read });
            }
            let uids = uids(object);
            for (identity, NamedCluster { name, .. }) in before.into_iter().filter(|(_, named)| named.was_read) {
                let uid = uids.get(&name).cloned();
                let since = now();
                clusters
                    .removed
                    .entry(identity)
                    .or_insert(UnnamedCluster { name, uid, since });
            }
            let named = &clusters.named;
            let is_named = |identity: &ClusterIdentity| named.keys().any(|named| named.same_cluster(identity));
            clusters.removed.retain(|identity, _| !is_named(identity));
        }
    }

    /// The identities of all removed clusters. They still need a session.
    pub(super) fn identities(&self) -> impl Iterator<Item = &ClusterIdentity> {
        self.meshes.values().flat_map(|clusters| clusters.removed.keys())
    }

    /// Whether a mesh has no removed clusters.
    pub(super) fn is_empty(&self, mesh: &MeshId) -> bool {
        self.meshes.get(mesh).is_none_or(|clusters| clusters.removed.is_empty())
    }
}

impl MeshClusters {
    /// Reads the removed clusters from the status that an earlier process wrote. All clusters in the status count as removed at
    /// first; [`RemovedClusters::update`] drops those that the spec still names.
    fn from_status(object: &ClusterMesh) -> Self {
        let namespace = object.metadata.namespace.clone().unwrap_or_default();
        let identity = |secret: &Option<KubeconfigSecretRef>| {
            let secret = secret.as_ref();
            secret.map_or(ClusterIdentity::Local, |secret| identity_of_secret(&namespace, secret))
        };
        let entries: BTreeSet<&String> = object.spec.clusters.iter().map(|entry| &entry.name).collect();
        let mut removed = BTreeMap::new();
        let status = object.status.as_ref();
        for row in status.into_iter().flat_map(|status| &status.clusters) {
            // A row that an earlier version wrote does not contain the Secret. If the spec has an entry of that name, its Secret
            // is in the spec.
            let is_known = row.kubeconfig_secret_ref.is_some() || !entries.contains(&row.name);
            if row.agents.is_some() && is_known {
                let identity = identity(&row.kubeconfig_secret_ref);
                let (name, uid, since) = (row.name.clone(), row.uid.clone(), now());
                removed.insert(identity, UnnamedCluster { name, uid, since });
            }
        }
        for row in status.into_iter().flat_map(|status| &status.removed_clusters) {
            let identity = identity(&row.kubeconfig_secret_ref);
            let (name, uid, since) = (row.name.clone(), row.uid.clone(), row.since.clone());
            removed.insert(identity, UnnamedCluster { name, uid, since });
        }
        Self {
            uid: object.metadata.uid.clone(),
            named: BTreeMap::new(),
            removed,
        }
    }
}

/// Whether the annotation `force-cleanup` allows leaving objects behind in a cluster where they cannot be deleted.
pub(super) fn may_be_left_behind(object: &ClusterMesh, cluster: &str) -> bool {
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

/// A message for the status: how the objects in a cluster are removed, or left there.
pub(super) fn cleanup_hint(cluster: &str) -> String {
    format!(
        "Its objects are removed when it answers; to leave them there, annotate the ClusterMesh with {FORCE_CLEANUP}={cluster}"
    )
}

impl Reconciler {
    /// Forgets the removed clusters in which nothing of their mesh is left. Returns the rows for the status of each mesh.
    pub(super) fn sync_removed(&mut self, pass: &Pass) -> BTreeMap<MeshId, Vec<RemovedRow>> {
        let mut all = std::mem::take(&mut self.meshes.removed);
        let mut rows: BTreeMap<MeshId, Vec<RemovedRow>> = BTreeMap::new();
        for (id, clusters) in &mut all.meshes {
            let Some(loaded) = pass.meshes.get(id) else { continue };
            for (identity, named) in &mut clusters.named {
                let seen = pass.seen.members.get(identity);
                named.was_read |= seen.and_then(Observation::last).is_some();
            }
            clusters.removed.retain(|identity, removed| {
                let Some(row) = self.removed_row(pass, loaded, identity, removed) else {
                    return false;
                };
                rows.entry(id.clone()).or_default().push(row);
                true
            });
        }
        self.meshes.removed = all;
        rows
    }

    /// Returns the status row of a removed cluster. `None` = nothing is left there, or it may be left behind.
    fn removed_row(
        &self,
        pass: &Pass,
        loaded: &LoadedMesh,
        identity: &ClusterIdentity,
        removed: &UnnamedCluster,
    ) -> Option<RemovedRow> {
        let id = &loaded.mesh.id;
        let UnnamedCluster { name, uid, since } = removed;
        let object = loaded.object.as_deref()?;
        if may_be_left_behind(object, name) {
            tracing::warn!(mesh = %id, cluster = name, member = %identity, annotation = FORCE_CLEANUP, "objects are left behind, as the annotation allows");
            return None;
        }
        // The same cluster under another Secret of the spec. The UID of a sandbox is no proof: it may claim any.
        let renamed = loaded.mesh.clusters.iter().any(|entry| {
            let seen = pass.seen.members.get(&entry.identity).and_then(Observation::fresh);
            let theirs = seen.and_then(|seen| seen.uid.as_ref());
            entry.profile != Profile::Sandbox && uid.is_some() && theirs == uid.as_ref()
        });
        if renamed || self.is_clean(pass, identity, id) {
            tracing::info!(mesh = %id, cluster = name, member = %identity, renamed, "nothing of the mesh is left in a removed cluster");
            return None;
        }
        let observation = pass.seen.members.get(identity);
        let unreachable = observation.and_then(Observation::trouble);
        let refused = self.members.get(identity).and_then(|member| member.writer.problem(id));
        let theirs = observation
            .and_then(Observation::last)
            .and_then(|seen| seen.uid.as_deref());
        let problem = match (refused, unreachable) {
            (Some(why), _) => Some(why),
            (None, Some(why)) => Some(format!("{why}. {}", cleanup_hint(name))),
            (None, None) if may_be_named_by_other_secret(&pass.plan, &pass.seen, id, identity, theirs) => {
                Some(format!(
                    "it may be the cluster of another entry that was not reached yet. {}",
                    cleanup_hint(name)
                ))
            }
            (None, None) => None,
        };
        let message = match &problem {
            Some(why) => why.clone(),
            None if loaded.mesh.paused => "the ClusterMesh is paused, and nothing is deleted".to_owned(),
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
        Some(RemovedRow { row, problem })
    }
}

/// The report on a removed cluster.
pub(crate) struct RemovedRow {
    pub(crate) row: RemovedCluster,
    /// Why its objects cannot be removed now.
    pub(crate) problem: Option<String>,
}

fn uids(object: &ClusterMesh) -> BTreeMap<String, String> {
    let rows = object.status.iter().flat_map(|status| &status.clusters);
    rows.filter_map(|row| Some((row.name.clone(), row.uid.clone()?)))
        .collect()
}

fn now() -> Time {
    truncate_to_seconds(k8s_openapi::jiff::Timestamp::now())
}
