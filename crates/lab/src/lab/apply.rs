//! Applies manifests to a cluster with the client of kube. The tests apply hundreds of manifests, and kubectl takes a quarter of a second of
//! processor time for each.

use std::collections::HashMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::{GroupVersionKind, TypeMeta};
use kube::discovery::{ApiCapabilities, ApiResource, Scope, pinned_kind};
use kube::runtime::conditions::is_crd_established;
use kube::runtime::wait::Condition;
use kube::{Api, Client, ResourceExt};

use super::TIMEOUT;
use super::cluster::{Cluster, get_request};
use crate::{Error, Result, wait_until};

impl Cluster<'_> {
    /// Applies the objects in a text of YAML or JSON documents, as `kubectl apply --server-side --force-conflicts` does. A field that another
    /// client has written stays if the manifest does not contain it, or no longer contains it.
    ///
    /// # Errors
    /// When the text cannot be parsed, an object has an unknown field, or the API server refuses an object.
    pub async fn apply(&self, manifest: &str) -> Result<()> {
        let cluster = &self.plan().name;
        // A document without content, such as a comment, is `None`.
        let objects: Vec<Option<DynamicObject>> = serde_saphyr::from_multiple(manifest)
            .map_err(|error| Error::Other(format!("parse a manifest for {cluster}: {error}")))?;
        let client = self.client().await?;
        let mut kinds = HashMap::new();
        for object in objects.into_iter().flatten() {
            let types = object.types.clone().unwrap_or_default();
            let doing = format!("apply {} {} to {cluster}", types.kind, object.name_any());
            if !kinds.contains_key(&types) {
                kinds.insert(types.clone(), kind(&client, &types, &doing).await?);
            }
            let (resource, capabilities) = &kinds[&types];
            let api: Api<DynamicObject> = match (&capabilities.scope, &object.metadata.namespace) {
                (Scope::Cluster, _) => Api::all_with(client.clone(), resource),
                (Scope::Namespaced, Some(namespace)) => Api::namespaced_with(client.clone(), namespace, resource),
                (Scope::Namespaced, None) => Api::default_namespaced_with(client.clone(), resource),
            };
            let parameters = PatchParams::apply("lab").force().validation_strict();
            api.patch(&object.name_any(), &parameters, &Patch::Apply(&object))
                .await
                .map_err(Error::kube(doing))?;
        }
        Ok(())
    }

    /// Waits until the API server serves a custom resource. `name` is that of its CRD, such as `peers.kilo.squat.ai`.
    ///
    /// # Errors
    /// After three minutes.
    pub async fn wait_for_crd(&self, name: &str) -> Result<()> {
        let client = self.client().await?;
        let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
        wait_until(format!("the CRD {name} in {}", self.plan().name), TIMEOUT, async || {
            let crd = crds.get_opt(name).await.map_err(|error| error.to_string())?;
            let crd = crd.filter(|crd| is_crd_established().matches_object(Some(crd)));
            let crd = crd.ok_or("not established")?;
            let version = crd
                .spec
                .versions
                .iter()
                .find(|version| version.served)
                .ok_or("no version is served")?;
            // The condition becomes true a moment before the resource is served.
            let path = format!("/apis/{}/{}/{}", crd.spec.group, version.name, crd.spec.names.plural);
            let served = client.request_text(get_request(&path)).await;
            served.map(drop).map_err(|error| error.to_string())
        })
        .await
    }
}

/// The resource of a kind, from the API server's discovery documents.
async fn kind(client: &Client, types: &TypeMeta, doing: &str) -> Result<(ApiResource, ApiCapabilities)> {
    let kind = GroupVersionKind::try_from(types).map_err(|error| Error::Other(format!("{doing}: {error}")))?;
    pinned_kind(client, &kind).await.map_err(Error::kube(doing))
}
