//! The CustomResourceDefinitions, as they are installed. The types they come from are in [`crate::mesh`],
//! [`crate::policy`], [`crate::peer`] and [`crate::sandbox`]; writing files is `cargo xtask crds`.

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
    plain(ClusterMesh::crd())
}

/// The CRD of [`PeerPolicy`].
#[must_use]
pub fn peer_policy() -> CustomResourceDefinition {
    plain(PeerPolicy::crd())
}

/// The CRD of [`Peer`]: accepts and refuses what Kilo's own does.
#[must_use]
pub fn peer() -> CustomResourceDefinition {
    plain(Peer::crd())
}

/// The CRD of [`SandboxAccess`].
#[must_use]
pub fn sandbox_access() -> CustomResourceDefinition {
    plain(SandboxAccess::crd())
}

/// The CRD of [`SandboxGateway`].
#[must_use]
pub fn sandbox_gateway() -> CustomResourceDefinition {
    plain(SandboxGateway::crd())
}

/// All of them.
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

/// What the derive writes and an API server should not see: `nullable` (a null then survives pruning and defaulting,
/// where elsewhere in Kubernetes it means "not set"), unsigned formats, and defaults that say nothing and would be
/// stored in every object.
fn plain(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    for version in &mut crd.spec.versions {
        if let Some(schema) = version.schema.as_mut().and_then(|s| s.open_api_v3_schema.as_mut()) {
            let mut value = serde_json::to_value(&*schema).unwrap_or_default();
            tidy(&mut value);
            if let Ok(tidied) = serde_json::from_value(value) {
                *schema = tidied;
            }
        }
        // An empty list is not the same text as none, and Kilo's CRD has none.
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

fn tidy(value: &mut Value) {
    match value {
        Value::Object(map) => {
            // A property may itself be called `default` or `format`: only keywords (scalars where a schema would be an
            // object) are meant.
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
            map.values_mut().for_each(tidy);
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        _ => {}
    }
}
