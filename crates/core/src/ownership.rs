//! Whose object it is. Nothing without our labels is ever changed or deleted.

use crate::{
    mesh::{Mesh, MeshId},
    observe::Owner,
};

/// What tells a mesh's objects from everyone else's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimant {
    /// The mesh.
    pub mesh: MeshId,
    /// Another hub whose objects of this mesh are taken over.
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

/// What the labels of an object say about this hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership<'a> {
    /// It belongs to this mesh.
    Mesh(&'a MeshId),
    /// This hub wrote it, for a mesh that is no more.
    Orphan,
    /// This hub wrote it, and its mesh label is gone. It is nobody's to delete; the mesh that plans this very object, by name
    /// and content, takes it back ([`may_return`]).
    Unlabelled,
    /// It is someone else's.
    Foreign,
}

/// Whose an object is, among `claimants` in order of age. The predecessor wrote neither hub nor namespace: its objects go
/// to the oldest mesh of that name, and to nobody when there is none (another hub's predecessor may own them).
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

/// Whether the labels that are left on an [`Ownership::Unlabelled`] object let it be of this mesh and this source.
#[must_use]
pub fn may_return(owner: &Owner, mesh: &MeshId, source: &str) -> bool {
    let fits = |label: &Option<String>, ours: &str| label.as_deref().is_none_or(|label| label == ours);
    fits(&owner.mesh_namespace, &mesh.namespace) && fits(&owner.source_cluster, source)
}
