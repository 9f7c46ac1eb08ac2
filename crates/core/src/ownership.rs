//! Finds the mesh that owns an object, from the object's labels. Objects without any of the controller's labels are never changed or
//! deleted.

use crate::{
    mesh::{Mesh, MeshId},
    observe::Owner,
};

/// A mesh that may own objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimant {
    /// The mesh.
    pub mesh: MeshId,
    /// The id of another hub, whose objects for this mesh are adopted.
    pub adopt_hub: Option<String>,
}

impl From<&Mesh> for Claimant {
    fn from(mesh: &Mesh) -> Self {
        Self {
            mesh: mesh.id.clone(),
            adopt_hub: mesh.adopt_hub.clone(),
        }
    }
}

/// The owner of an object, from the point of view of this hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership<'a> {
    /// The mesh with this id owns the object.
    Mesh(&'a MeshId),
    /// This hub wrote the object for a mesh that does not exist.
    Orphan,
    /// This hub wrote the object, and the mesh label was removed later. The object is not deleted. A mesh adopts a Peer or PeerPolicy
    /// if it plans an object of the same name (a Peer also with the same public key) and the remaining labels allow it
    /// ([`can_readopt`]).
    Unlabelled,
    /// Another hub, a person or another program wrote the object.
    Foreign,
}

/// Finds the owner of an object among `claimants`, which are sorted by age. The predecessor wrote neither the hub nor the
/// namespace label, so its objects belong to the oldest mesh, in any namespace, whose name is in the mesh label. If no mesh has
/// this name, they are foreign, because the predecessor in another hub may own them.
#[must_use]
pub fn of<'a>(owner: &Owner, hub: &str, claimants: &'a [Claimant]) -> Ownership<'a> {
    let Some(name) = &owner.mesh else {
        return match owner.hub.as_deref() {
            Some(id) if id == hub => Ownership::Unlabelled,
            _ => Ownership::Foreign,
        };
    };
    let found = claimants.iter().find(|claimant| {
        let hub_is_ours = owner
            .hub
            .as_deref()
            .is_none_or(|h| h == hub || Some(h) == claimant.adopt_hub.as_deref());
        let namespace_is_ours = match &owner.mesh_namespace {
            Some(namespace) => *namespace == claimant.mesh.namespace,
            None => true,
        };
        *name == claimant.mesh.name && hub_is_ours && namespace_is_ours
    });
    match found {
        Some(claimant) => Ownership::Mesh(&claimant.mesh),
        None if owner.hub.as_deref() == Some(hub) => Ownership::Orphan,
        None => Ownership::Foreign,
    }
}

/// Whether the labels of an [`Ownership::Unlabelled`] object allow `mesh` to adopt it: the labels for the mesh's namespace and for the
/// source are missing or match.
#[must_use]
pub fn can_readopt(owner: &Owner, mesh: &MeshId, source: &str) -> bool {
    let is_same_or_missing = |label: &Option<String>, ours: &str| label.as_deref().is_none_or(|label| label == ours);
    is_same_or_missing(&owner.mesh_namespace, &mesh.namespace) && is_same_or_missing(&owner.source_cluster, source)
}
