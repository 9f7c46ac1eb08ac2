//! Tracks clusters that were removed from the spec of a mesh, until the mesh's objects in them are deleted, the annotation
//! `force-cleanup` allows leaving the objects behind, or another entry proves to be the same cluster. The status of the mesh contains
//! the list, so that a restart does not lose it.

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
    Pass, Reconciler,
    meshes::{LoadedMesh, identity_of_secret},
    planning::may_have_other_secret,
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
    /// The clusters that the spec had in the last pass.
    current: BTreeMap<ClusterIdentity, CurrentCluster>,
    removed: BTreeMap<ClusterIdentity, FormerCluster>,
    /// Removed clusters in which objects were left behind, as named by [`describe_cluster`].
    given_up: BTreeSet<String>,
}

/// One cluster that the spec contains.
#[derive(Clone)]
struct CurrentCluster {
    /// The name of the entry.
    name: String,
    /// This process has read the Nodes of the cluster, or the status shows that an earlier one did. Before that nothing is written
    /// into the cluster.
    was_read: bool,
}

/// One cluster that was removed from the spec.
struct FormerCluster {
    /// The name of the removed entry.
    name: String,
    /// UID of the kube-system namespace of the cluster.
    uid: Option<String>,
    since: Time,
}

impl RemovedClusters {
    /// Adds the clusters that were removed from the specs since the last pass. For a mesh that this process loads for the first time,
    /// adds the clusters in the status that the spec does not contain.
    pub(super) fn update(&mut self, meshes: &BTreeMap<MeshId, LoadedMesh>) {
        self.meshes.retain(|id, _| meshes.contains_key(id));
        for (id, loaded) in meshes {
            let Some(object) = &loaded.object else { continue };
            let clusters = self.meshes.entry(id.clone()).or_default();
            if clusters.uid != object.metadata.uid {
                *clusters = MeshClusters::from_status(object);
            }
            let mut before = std::mem::take(&mut clusters.current);
            for cluster in &loaded.mesh.clusters {
                let was_read = before.remove(&cluster.identity).is_some_and(|current| current.was_read)
                    || clusters
                        .removed
                        .keys()
                        .any(|other| other.same_cluster(&cluster.identity));
                let name = cluster.name.clone();
                clusters
                    .current
                    .insert(cluster.identity.clone(), CurrentCluster { name, was_read });
            }
            let uids = uids(object);
            for (identity, CurrentCluster { name, .. }) in before.into_iter().filter(|(_, cluster)| cluster.was_read) {
                let uid = uids.get(&name).cloned();
                let since = now();
                clusters
                    .removed
                    .entry(identity)
                    .or_insert(FormerCluster { name, uid, since });
            }
            let current = &clusters.current;
            let is_current = |identity: &ClusterIdentity| current.keys().any(|other| other.same_cluster(identity));
            clusters.removed.retain(|identity, _| !is_current(identity));
        }
    }

    /// The identities of all removed clusters. They need a session until their objects are deleted.
    pub(super) fn identities(&self) -> impl Iterator<Item = &ClusterIdentity> {
        self.meshes.values().flat_map(|clusters| clusters.removed.keys())
    }

    /// The removed clusters of a mesh in which this process has left objects behind.
    pub(super) fn given_up(&self, mesh: &MeshId) -> impl Iterator<Item = String> {
        let clusters = self.meshes.get(mesh).into_iter();
        clusters.flat_map(|clusters| clusters.given_up.iter().cloned())
    }

    /// Whether a mesh has no removed clusters.
    pub(super) fn is_empty(&self, mesh: &MeshId) -> bool {
        self.meshes.get(mesh).is_none_or(|clusters| clusters.removed.is_empty())
    }
}

impl MeshClusters {
    /// Reads the removed clusters from the status that an earlier process wrote. The result may also contain clusters that are still in
    /// the spec; [`RemovedClusters::update`] then drops these.
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
            // `update` compares clusters by their Secret. A row without a Secret does not identify its cluster: the cluster is
            // the local one, or an earlier version of the controller wrote the row without its Secret. So the row's name
            // decides: if the spec has an entry with this name, the cluster was not removed.
            let may_be_removed = row.kubeconfig_secret_ref.is_some() || !entries.contains(&row.name);
            // A row without `agents` is of a cluster whose Nodes were never read, so no object is left in it.
            if row.agents.is_some() && may_be_removed {
                let identity = identity(&row.kubeconfig_secret_ref);
                let (name, uid, since) = (row.name.clone(), row.uid.clone(), now());
                removed.insert(identity, FormerCluster { name, uid, since });
            }
        }
        for row in status.into_iter().flat_map(|status| &status.removed_clusters) {
            let identity = identity(&row.kubeconfig_secret_ref);
            let (name, uid, since) = (row.name.clone(), row.uid.clone(), row.since.clone());
            removed.insert(identity, FormerCluster { name, uid, since });
        }
        Self {
            uid: object.metadata.uid.clone(),
            current: BTreeMap::new(),
            removed,
            given_up: BTreeSet::new(),
        }
    }
}

/// Whether the annotation `force-cleanup` allows leaving objects behind in a cluster: it names the entry, or it is `true` or empty and
/// the mesh is being deleted. Whether the objects could be deleted is not checked here.
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

/// Names a cluster: its entry, and where its kubeconfig is.
pub(super) fn describe_cluster(entry: &str, identity: &ClusterIdentity) -> String {
    format!("{entry:?} ({identity})")
}

/// A message for the status: why the objects in a cluster cannot be removed, and how they are removed or left behind.
pub(super) fn not_removed(cluster: &str, why: &str) -> String {
    format!(
        "{why}. Its objects are removed when this is mended; to leave them there, annotate the ClusterMesh with {FORCE_CLEANUP}={cluster}"
    )
}

impl Reconciler {
    /// Updates which clusters were read, and forgets the removed clusters that need no status row any more ([`Self::removed_row`]).
    /// Returns the rows of the others, by mesh.
    pub(super) fn sync_removed(&mut self, pass: &Pass) -> BTreeMap<MeshId, Vec<RemovedRow>> {
        let mut removed_clusters = std::mem::take(&mut self.meshes.removed);
        let mut rows: BTreeMap<MeshId, Vec<RemovedRow>> = BTreeMap::new();
        for (id, clusters) in &mut removed_clusters.meshes {
            let Some(loaded) = pass.meshes.get(id) else { continue };
            for (identity, cluster) in &mut clusters.current {
                let seen = pass.seen.members.get(identity);
                cluster.was_read |= seen.and_then(Observation::last).is_some();
            }
            let (former, given_up) = (&mut clusters.removed, &mut clusters.given_up);
            former.retain(|identity, removed| {
                let object = loaded.object.as_deref();
                if object.is_some_and(|object| may_be_left_behind(object, &removed.name)) {
                    if !self.is_clean(pass, identity, id) {
                        tracing::warn!(mesh = %id, cluster = removed.name, member = %identity, annotation = FORCE_CLEANUP, "objects are left behind, as the annotation allows");
                        given_up.insert(describe_cluster(&removed.name, identity));
                    }
                    return false;
                }
                let Some(row) = self.removed_row(pass, loaded, identity, removed) else {
                    return false;
                };
                rows.entry(id.clone()).or_default().push(row);
                true
            });
        }
        self.meshes.removed = removed_clusters;
        rows
    }

    /// Returns the status row of a removed cluster. `None` = no object is left in it, or another entry of the spec is the same cluster.
    fn removed_row(
        &self,
        pass: &Pass,
        loaded: &LoadedMesh,
        identity: &ClusterIdentity,
        removed: &FormerCluster,
    ) -> Option<RemovedRow> {
        let id = &loaded.mesh.id;
        let FormerCluster { name, uid, since } = removed;
        // Whether the spec contains the same cluster with another Secret. A sandbox may claim any UID, so its UID proves nothing.
        let has_other_entry = loaded.mesh.clusters.iter().any(|entry| {
            let seen = pass.seen.members.get(&entry.identity).and_then(Observation::fresh);
            let entry_uid = seen.and_then(|seen| seen.uid.as_ref());
            entry.profile != Profile::Sandbox && uid.is_some() && entry_uid == uid.as_ref()
        });
        if has_other_entry || self.is_clean(pass, identity, id) {
            tracing::info!(mesh = %id, cluster = name, member = %identity, renamed = has_other_entry, "a removed cluster has no object of the mesh, or another entry is the same cluster");
            return None;
        }
        let observation = pass.seen.members.get(identity);
        let not_fresh = observation.and_then(Observation::not_fresh_reason);
        let write_problem = self.members.get(identity).and_then(|member| member.write_problem(id));
        let seen_uid = observation
            .and_then(Observation::last)
            .and_then(|seen| seen.uid.as_deref());
        let problem = match write_problem.as_deref().or(not_fresh) {
            Some(why) => Some(not_removed(name, why)),
            None if may_have_other_secret(&pass.plan, &pass.seen, id, identity, seen_uid) => Some(format!(
                "it may be the same cluster as another entry: their UIDs (of the Namespace kube-system) are equal or not both \
                 known. Its objects are removed when both UIDs are known and differ; to leave them there, annotate the \
                 ClusterMesh with {FORCE_CLEANUP}={name}"
            )),
            None => None,
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

/// The report about a removed cluster.
pub(crate) struct RemovedRow {
    pub(crate) row: RemovedCluster,
    /// Why the objects in it cannot be removed now.
    pub(crate) problem: Option<String>,
}

/// Returns the UIDs of the clusters in the status, by the name of the entry.
fn uids(object: &ClusterMesh) -> BTreeMap<String, String> {
    let rows = object.status.iter().flat_map(|status| &status.clusters);
    rows.filter_map(|row| Some((row.name.clone(), row.uid.clone()?)))
        .collect()
}

fn now() -> Time {
    truncate_to_seconds(k8s_openapi::jiff::Timestamp::now())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use clustermesh_api::convert;
    use serde_json::json;

    use super::*;

    /// Returns a mesh of the hub, the member `b` and, if `with_member`, the member `a`. An earlier process has read `a`: its status row
    /// has `agents`.
    fn mesh(with_member: bool) -> BTreeMap<MeshId, LoadedMesh> {
        let secret = json!({"name": "a", "key": "value"});
        let mut clusters = vec![
            json!({"name": "hub", "local": true, "allowedNetworks": ["10.1.0.0/16"]}),
            json!({"name": "b", "kubeconfigSecretRef": {"name": "b", "key": "value"}, "allowedNetworks": ["10.3.0.0/16"]}),
        ];
        if with_member {
            clusters.push(json!({"name": "a", "kubeconfigSecretRef": secret, "allowedNetworks": ["10.2.0.0/16"]}));
        }
        let object: ClusterMesh = serde_json::from_value(json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh",
            "metadata": {"name": "prod", "namespace": "ns", "uid": "u"},
            "spec": {"clusters": clusters},
            "status": {"clusters": [{
                "name": "a", "kubeconfigSecretRef": secret, "agents": {}, "registeredPeers": 1, "skippedNodes": 0,
            }]},
        }))
        .expect("a ClusterMesh");
        let (mesh, warnings) = convert::mesh::to_core(&object).expect("a valid mesh");
        let id = mesh.id.clone();
        let loaded = LoadedMesh {
            object: Some(Arc::new(object)),
            mesh,
            warnings,
            refused: None,
            unlocatable: BTreeSet::new(),
        };
        [(id, loaded)].into()
    }

    #[test]
    fn removed_member_that_an_earlier_process_read_is_tracked() {
        let mut clusters = RemovedClusters::default();
        clusters.update(&mesh(true));
        assert_eq!(clusters.identities().count(), 0);
        // This process never reads the member: it does not answer.
        clusters.update(&mesh(true));
        clusters.update(&mesh(false));
        assert_eq!(clusters.identities().count(), 1, "its objects may still be there");
    }
}
