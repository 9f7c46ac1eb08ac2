//! Generates the CustomResourceDefinitions from the types in [`crate::mesh`], [`crate::policy`], [`crate::peer`] and
//! [`crate::sandbox`]. `cargo xtask crds` writes them to files.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::Value;

use crate::{
    mesh::ClusterMesh,
    peer::Peer,
    policy::PeerPolicy,
    sandbox::{SandboxAccess, SandboxGateway},
};

/// The CRD of [`ClusterMesh`].
#[must_use]
pub fn cluster_mesh() -> CustomResourceDefinition {
    let mut crd = clean_crd(ClusterMesh::crd());
    // `clusterctl move` ignores objects whose CRD has no such label.
    let labels = crd.metadata.labels.get_or_insert_default();
    labels.insert("clusterctl.cluster.x-k8s.io".to_owned(), String::new());
    crd
}

/// The CRD of [`PeerPolicy`].
#[must_use]
pub fn peer_policy() -> CustomResourceDefinition {
    clean_crd(PeerPolicy::crd())
}

/// The CRD of [`Peer`]. It accepts and refuses the same objects as Kilo's own CRD.
#[must_use]
pub fn peer() -> CustomResourceDefinition {
    clean_crd(Peer::crd())
}

/// The CRD of [`SandboxAccess`].
#[must_use]
pub fn sandbox_access() -> CustomResourceDefinition {
    clean_crd(SandboxAccess::crd())
}

/// The CRD of [`SandboxGateway`].
#[must_use]
pub fn sandbox_gateway() -> CustomResourceDefinition {
    clean_crd(SandboxGateway::crd())
}

/// All CRDs.
#[must_use]
pub fn all() -> [CustomResourceDefinition; 5] {
    [
        cluster_mesh(),
        peer_policy(),
        peer(),
        sandbox_access(),
        sandbox_gateway(),
    ]
}

/// Removes parts of the derived schema: `nullable` (with it the API server would store a null instead of treating it as "not set"), and
/// the defaults `false`, null and empty list, which the API server would store in every object. Replaces unsigned formats, which
/// Kubernetes does not know, by `int64`. Also removes empty lists outside the schema.
fn clean_crd(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    for version in &mut crd.spec.versions {
        if let Some(schema) = version.schema.as_mut().and_then(|s| s.open_api_v3_schema.as_mut()) {
            let mut value = serde_json::to_value(&*schema).unwrap_or_default();
            clean_schema(&mut value);
            if let Ok(cleaned) = serde_json::from_value(value) {
                *schema = cleaned;
            }
        }
        // The derive writes empty lists, which Kilo's CRD does not have.
        if version.additional_printer_columns.as_ref().is_some_and(Vec::is_empty) {
            version.additional_printer_columns = None;
        }
        if version.selectable_fields.as_ref().is_some_and(Vec::is_empty) {
            version.selectable_fields = None;
        }
    }
    for list in [&mut crd.spec.names.categories, &mut crd.spec.names.short_names] {
        if list.as_ref().is_some_and(Vec::is_empty) {
            *list = None;
        }
    }
    crd
}

fn clean_schema(value: &mut Value) {
    match value {
        Value::Object(map) => {
            // `nullable`, `default` and `format` can also be names of properties. The value of a property is an object, which no check
            // below matches.
            if map.get("nullable").is_some_and(Value::is_boolean) {
                map.remove("nullable");
            }
            if map.get("default").is_some_and(|d| {
                matches!(d, Value::Bool(false) | Value::Null) || d.as_array().is_some_and(Vec::is_empty)
            }) {
                map.remove("default");
            }
            if map
                .get("format")
                .and_then(Value::as_str)
                .is_some_and(|f| f.starts_with("uint"))
            {
                map.insert("format".to_owned(), "int64".into());
            }
            map.values_mut().for_each(clean_schema);
        }
        Value::Array(items) => items.iter_mut().for_each(clean_schema),
        _ => {}
    }
}
