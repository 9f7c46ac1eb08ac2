//! Reads and writes the labels that identify the owner of an object: its mesh, hub and source cluster.

use std::collections::BTreeMap;

use clustermesh_core::observe::Owner;

use crate::names::{LABEL_HUB, LABEL_MESH, LABEL_MESH_NAMESPACE, LABEL_SOURCE_CLUSTER};

/// Reads the owner from an object's labels.
#[must_use]
pub fn owner(labels: Option<&BTreeMap<String, String>>) -> Owner {
    let get = |key| {
        labels
            .and_then(|l| l.get(key))
            .filter(|value| !value.is_empty())
            .cloned()
    };
    Owner {
        mesh: get(LABEL_MESH),
        mesh_namespace: get(LABEL_MESH_NAMESPACE),
        hub: get(LABEL_HUB),
        source_cluster: get(LABEL_SOURCE_CLUSTER),
    }
}

/// The labels for `owner`.
#[must_use]
pub fn labels(owner: &Owner) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    set_labels(&mut labels, owner);
    labels
}

/// Sets the ownership labels to those of `owner`, removes those that `owner` does not have, and keeps all other labels.
pub fn set_labels(labels: &mut BTreeMap<String, String>, owner: &Owner) {
    for (key, value) in [
        (LABEL_MESH, &owner.mesh),
        (LABEL_MESH_NAMESPACE, &owner.mesh_namespace),
        (LABEL_HUB, &owner.hub),
        (LABEL_SOURCE_CLUSTER, &owner.source_cluster),
    ] {
        match value {
            Some(value) => labels.insert(key.to_owned(), value.clone()),
            None => labels.remove(key),
        };
    }
}
