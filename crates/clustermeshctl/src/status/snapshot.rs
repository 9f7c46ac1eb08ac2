//! Reads from the hub what `status` and `graph` show: the ClusterMeshes and the controller's Lease.

use std::time::Duration;

use clustermesh_api::mesh::ClusterMesh;
use k8s_openapi::{api::coordination::v1::Lease, jiff::Timestamp};
use kube::{Api, Client};

use super::replicas::Replicas;
use crate::{
    args::HubArgs,
    live::{list_kind_in, open_hub, with_timeout},
    problem::Problem,
};

/// The name of the controller's Lease.
const LEASE: &str = "clustermesh-controller";

/// A Lease whose renewal is older than this, by this machine's clock, is read again. The leader renews it every second.
const OLD_RENEWAL: Duration = Duration::from_secs(10);

/// Limits of the time between the two reads.
const MIN_WAIT: Duration = Duration::from_secs(4);
const MAX_WAIT: Duration = Duration::from_secs(60);

/// What the hub contained at one time.
#[derive(Debug)]
pub(crate) struct Snapshot {
    /// By this machine's clock.
    pub(crate) time: Timestamp,
    /// Sorted by namespace and name.
    pub(crate) meshes: Vec<ClusterMesh>,
    /// `None` = there is no Lease, or this account may not read it.
    pub(crate) controller: Option<Leader>,
    /// The controller's pods, for `--live`. `None` = not read, or this account may not read them.
    pub(crate) replicas: Option<Replicas>,
    /// Lines to print to stderr.
    pub(crate) notes: Vec<String>,
}

/// The replica of the controller that writes the status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Leader {
    /// `None` = no replica holds the Lease.
    pub(crate) holder: Option<String>,
    pub(crate) renewed: Option<Timestamp>,
    pub(crate) is_alive: bool,
}

/// The hub, from which snapshots are taken.
pub(crate) struct HubReader<'a> {
    args: &'a HubArgs,
    client: Client,
    url: String,
}

impl<'a> HubReader<'a> {
    /// # Errors
    /// The kubeconfig cannot be used.
    pub(crate) async fn open(args: &'a HubArgs) -> Result<Self, Vec<Problem>> {
        let opened = open_hub(args.kubeconfig.as_deref(), args.context.as_deref()).await;
        let (client, config) = opened.map_err(|why| vec![Problem::other(why)])?;
        Ok(Self {
            args,
            client,
            url: config.cluster_url.to_string(),
        })
    }

    /// Reads the hub.
    ///
    /// # Errors
    /// The ClusterMeshes cannot be listed, or there are none.
    pub(crate) async fn read(&self) -> Result<Snapshot, Vec<Problem>> {
        let mut notes = Vec::new();
        let namespace = self.args.namespace.as_deref();
        let listed = list_kind_in::<ClusterMesh>(&self.client, namespace, &mut notes).await;
        let error = |why: &str| vec![Problem::other(format!("the hub ({}): {why}", self.url))];
        let mut meshes = listed.map_err(|why| error(&why))?.ok_or_else(|| {
            error("it has no CRD clustermeshes.kilo.squat.ai: is it the hub? Name the hub's context with --context")
        })?;
        if meshes.is_empty() {
            let place = namespace.map_or_else(String::new, |namespace| format!(" in namespace {namespace}"));
            return Err(error(&format!("it has no ClusterMesh{place}")));
        }
        meshes.sort_by(|a, b| {
            let key = |mesh: &ClusterMesh| (mesh.metadata.namespace.clone(), mesh.metadata.name.clone());
            key(a).cmp(&key(b))
        });
        let controller = self.read_leader().await;
        Ok(Snapshot {
            time: Timestamp::now(),
            meshes,
            controller,
            replicas: None,
            notes: notes.into_iter().map(|note| format!("warning: {note}")).collect(),
        })
    }

    pub(super) async fn read_replicas(&self) -> Option<Replicas> {
        Replicas::read(&self.client, &self.args.controller_namespace).await
    }

    /// Reads who holds the Lease. If the last renewal seems old, the clocks of this machine and of the controller may differ, so the Lease
    /// is read twice: within the duration in the Lease, the leader renews it, or another replica takes it.
    async fn read_leader(&self) -> Option<Leader> {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), &self.args.controller_namespace);
        let read = async || with_timeout(leases.get_opt(LEASE)).await.ok().flatten()?.spec;
        let first = read().await?;
        let renewed = first.renew_time.as_ref().map(|time| time.0);
        let is_new = renewed.is_some_and(|time| time.duration_until(Timestamp::now()).unsigned_abs() < OLD_RENEWAL);
        // `holderIdentity` is the name of the pod and an id of its process.
        let replica = |holder: Option<String>| {
            let holder = holder?;
            let replica = holder.rsplit_once('_').map_or(&*holder, |(replica, _)| replica);
            Some(replica.to_owned()).filter(|replica| !replica.is_empty())
        };
        let holder = replica(first.holder_identity.clone());
        if is_new || holder.is_none() {
            let is_alive = holder.is_some();
            return Some(Leader {
                holder,
                renewed,
                is_alive,
            });
        }
        let seconds = first
            .lease_duration_seconds
            .and_then(|seconds| u64::try_from(seconds).ok());
        let wait = Duration::from_secs(seconds.unwrap_or_default());
        tokio::time::sleep(wait.clamp(MIN_WAIT, MAX_WAIT)).await;
        let second = read().await?;
        Some(Leader {
            is_alive: second.renew_time != first.renew_time,
            holder: replica(second.holder_identity),
            renewed: second.renew_time.map(|time| time.0),
        })
    }
}
