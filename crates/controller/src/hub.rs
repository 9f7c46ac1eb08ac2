//! Holds what is known of the hub from the start: client, id, API server addresses, permissions of namespaces, settings.

use clustermesh_access::{kubeconfig::HubHosts, memory::Memory};
use clustermesh_core::{hub::HubNamespaces, plan::Settings};
use kube::Client;

/// The hub, shared by every session and the reconcile loop.
#[derive(Clone)]
pub(crate) struct Hub {
    /// The controller's own client.
    pub(crate) client: Client,
    /// `--hub-id`, or the UID of kube-system.
    pub(crate) id: String,
    /// Names and addresses of its API servers. Kubeconfigs of members must not point at them.
    pub(crate) hosts: HubHosts,
    /// The memory budget for data of all members.
    pub(crate) memory: Memory,
    /// What ClusterMeshes of each namespace may contain.
    pub(crate) namespaces: HubNamespaces,
    /// Settings that the operator chose for all meshes.
    pub(crate) settings: Settings,
}
