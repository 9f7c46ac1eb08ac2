//! The meshes as the loop takes them: those it serves as their values, those it refuses as hollow ones that keep what they
//! have written.

use std::{collections::BTreeMap, sync::Arc};

use clustermesh_api::{convert::Finding, mesh::ClusterMesh, names::FINALIZER};
use clustermesh_core::mesh::{Mesh, MeshId, ObjectName};

use super::to_core;
use crate::{feed::Feed, hub::Hub};

/// One ClusterMesh.
pub(super) struct Known {
    /// The object; `None` = it does not even parse.
    pub(super) object: Option<Arc<ClusterMesh>>,
    /// Its values. Of a refused mesh: paused, without entries, so that it claims nothing and loses nothing.
    pub(super) mesh: Mesh,
    /// Values that were taken, but not as they were written.
    pub(super) warnings: Vec<Finding>,
    /// Why it is not served: one word, and the message.
    pub(super) refused: Option<(&'static str, String)>,
}

impl Known {
    /// Whether it carries our finalizer.
    pub(super) fn finalized(&self) -> bool {
        let finalizers = self
            .object
            .as_ref()
            .and_then(|object| object.metadata.finalizers.as_ref());
        finalizers.is_some_and(|finalizers| finalizers.iter().any(|name| name == FINALIZER))
    }
}

/// All meshes.
pub(super) fn know(feed: &Feed<Arc<ClusterMesh>>, hub: &Hub) -> BTreeMap<MeshId, Known> {
    let objects = feed.read(|rows| rows.values().map(|row| Arc::clone(&row.value)).collect::<Vec<_>>());
    let mut known: BTreeMap<MeshId, Known> = objects
        .into_iter()
        .map(|object| one(object, hub))
        .map(|known| (known.mesh.id.clone(), known))
        .collect();
    for (ObjectName { namespace, name }, why) in feed.malformed() {
        let id = MeshId { namespace, name };
        known.entry(id.clone()).or_insert_with(|| Known {
            object: None,
            mesh: hollow(id, false),
            warnings: vec![],
            refused: Some(("SpecInvalid", why)),
        });
    }
    known
}

fn one(object: Arc<ClusterMesh>, hub: &Hub) -> Known {
    let id = MeshId {
        namespace: object.metadata.namespace.clone().unwrap_or_default(),
        name: object.metadata.name.clone().unwrap_or_default(),
    };
    let deleting = object.metadata.deletion_timestamp.is_some();
    match to_core(&object) {
        Err(why) => Known {
            object: Some(object),
            mesh: hollow(id, deleting),
            warnings: vec![],
            refused: Some(("SpecInvalid", why)),
        },
        Ok((mesh, warnings)) => match hub.namespaces.refuses(&mesh).filter(|_| !deleting) {
            Some(refused) => Known {
                object: Some(object),
                mesh: hollow(id, false),
                warnings,
                refused: Some(refused),
            },
            None => Known {
                object: Some(object),
                mesh,
                warnings,
                refused: None,
            },
        },
    }
}

/// A mesh of which nothing is known but that it is there.
fn hollow(id: MeshId, deleting: bool) -> Mesh {
    Mesh {
        id,
        created: i64::MAX,
        paused: !deleting,
        deleting,
        adopt_hub: None,
        clusters: vec![],
        accepted: BTreeMap::new(),
    }
}
