//! The requests that change a ClusterMesh, and the update of the feed from their responses. The requests write only finalizers and status.

use std::{sync::Arc, time::Duration};

use clustermesh_api::{
    mesh::{ClusterMesh, ClusterMeshStatus},
    names::FINALIZER,
};
use kube::{
    Api, Client, Error, Resource, ResourceExt,
    api::{DynamicObject, Patch, PatchParams},
};

use super::Outcome;
use crate::{events::Notice, feed::Feed};

/// Name of the controller in `managedFields`.
const MANAGER: &str = "clustermesh-controller";
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

fn api(client: &Client, object: &ClusterMesh) -> Api<ClusterMesh> {
    Api::namespaced(client.clone(), &object.namespace().unwrap_or_default())
}

async fn with_timeout<T>(request: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
        Ok(answer) => answer,
        Err(elapsed) => Err(Error::Service(Box::new(elapsed))),
    }
}

/// Adds our finalizer.
pub(super) async fn add_finalizer(client: &Client, object: &ClusterMesh) -> Result<ClusterMesh, Error> {
    let mut finalizers = object.metadata.finalizers.clone().unwrap_or_default();
    finalizers.push(FINALIZER.to_owned());
    set_finalizers(client, object, &finalizers).await
}

/// Removes our finalizer. Succeeds also if the ClusterMesh does not exist any more.
pub(super) async fn remove_finalizer(client: &Client, object: &ClusterMesh) -> Result<(), Error> {
    let mut finalizers = object.metadata.finalizers.clone().unwrap_or_default();
    finalizers.retain(|name| name != FINALIZER);
    match set_finalizers(client, object, &finalizers).await {
        Err(Error::Api(status)) if status.code == 404 => Ok(()),
        answer => answer.map(drop),
    }
}

/// Replaces the whole list of finalizers. The request contains the resourceVersion at which the list was read. Otherwise it could
/// remove a finalizer that another client has added since.
async fn set_finalizers(client: &Client, object: &ClusterMesh, finalizers: &[String]) -> Result<ClusterMesh, Error> {
    let patch = serde_json::json!({
        "metadata": { "finalizers": finalizers, "resourceVersion": object.metadata.resource_version },
    });
    let params = PatchParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PatchParams::default()
    };
    with_timeout(api(client, object).patch(&object.name_any(), &params, &Patch::Merge(&patch))).await
}

/// Writes the status by server-side apply, which removes fields that are no longer set.
pub(super) async fn apply_status(
    client: &Client,
    object: &ClusterMesh,
    status: &ClusterMeshStatus,
) -> Result<ClusterMesh, Error> {
    let patch = serde_json::json!({
        "apiVersion": ClusterMesh::api_version(&()),
        "kind": ClusterMesh::kind(&()),
        // The request fails if the ClusterMesh was created again or changed in the meantime, also by another replica.
        "metadata": {
            "name": object.name_any(),
            "uid": object.metadata.uid,
            "resourceVersion": object.metadata.resource_version,
        },
        "status": status,
    });
    let params = PatchParams::apply(MANAGER).force();
    with_timeout(api(client, object).patch_status(&object.name_any(), &params, &Patch::Apply(&patch))).await
}

/// Puts the object that the hub returned into the feed, so that the next pass does not have to wait for the watch.
pub(super) fn update_feed(feed: &Feed<Arc<ClusterMesh>>, object: &ClusterMesh) {
    let mut object = object.clone();
    object.metadata.managed_fields = None;
    let as_read = serde_json::to_value(&object).and_then(serde_json::from_value::<DynamicObject>);
    match as_read {
        Ok(object) => feed.put_written(object),
        Err(error) => tracing::debug!(%error, "the response to a write does not parse; the watch delivers the object"),
    }
}

/// Returns the outcome of a write that failed. `published` = the notices whose Events need no further write.
pub(super) fn classify_error(error: &Error, published: Vec<Notice>) -> Outcome {
    match error {
        Error::Api(status) => match status.code {
            404 | 409 => Outcome::Outdated,
            429 | 502..=504 => Outcome::Unavailable(published),
            code => Outcome::Refused(code),
        },
        _ => Outcome::Unavailable(published),
    }
}
