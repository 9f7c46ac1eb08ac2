//! The data about the hub that the sessions of all members share: client, id, API server addresses, memory budget, permissions, settings.

use std::sync::Arc;

use clustermesh_access::{kubeconfig::HubHosts, memory::Memory};
use clustermesh_core::{hub::HubNamespaces, plan::Settings};
use kube::Client;

use crate::election::Election;

/// The hub. Every [`crate::session::Session`] and the reconcile loop have a clone of this value.
#[derive(Clone)]
pub(crate) struct Hub {
    /// The controller's own client.
    pub(crate) client: Client,
    /// Decides whether this replica may write.
    pub(crate) election: Arc<Election>,
    /// `--hub-id`, or the UID of kube-system.
    pub(crate) id: String,
    /// Names and addresses of the hub's API servers. The kubeconfig of a member must not name any of these.
    pub(crate) hosts: HubHosts,
    /// The memory budget for data of all members.
    pub(crate) memory: Memory,
    /// Permissions of ClusterMeshes, by their namespace.
    pub(crate) namespaces: HubNamespaces,
    /// Settings that the operator chose for all meshes.
    pub(crate) settings: Settings,
}
