//! What is particular to the hub: its id, its own API's names, what its namespaces may, and the operator's settings. No watch and no write here.

use clustermesh_access::{kubeconfig::HubHosts, memory::Memory};
use clustermesh_core::{hub::HubNamespaces, plan::Settings};
use kube::Client;

/// The hub, as every session and the reconcile loop know it.
#[derive(Clone)]
pub(crate) struct Hub {
    /// The controller's own client.
    pub(crate) client: Client,
    /// `--hub-id`, or the UID of kube-system.
    pub(crate) id: String,
    /// Where its API is.
    pub(crate) hosts: HubHosts,
    /// What all members may take of this process's memory.
    pub(crate) memory: Memory,
    /// What meshes of each namespace may ask for.
    pub(crate) namespaces: HubNamespaces,
    /// What the operator set for all meshes.
    pub(crate) settings: Settings,
}
