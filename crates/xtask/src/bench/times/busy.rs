//! A sandbox of another mesh that changes the keys of its Nodes without end: what other tenants' changes are measured beside.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use clustermesh_api::names;
use clustermesh_lab::{NAMESPACE, wait_until};
use futures::{StreamExt, TryStreamExt, stream};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::task::JoinHandle;

use super::world::{HUB, STANDING, World};

pub(super) const CLUSTER: &str = "busy";
const MESH: &str = "busy";
/// Requests in flight, of a new Node each or of a new key.
const IN_FLIGHT: usize = 16;
/// Until the hub has every Peer. The controller writes 50 a second for a source.
const PATIENCE: Duration = Duration::from_secs(900);

/// How much it changes.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Load {
    /// Its Nodes.
    pub(in super::super) nodes: u16,
    /// Keys that are to be rewritten in a second, over all Nodes in turn.
    pub(in super::super) keys_per_second: u32,
}

/// What it changed while something else was measured.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub(super) struct Changed {
    pub(super) nodes: u16,
    /// Keys that its API server took in a second.
    pub(super) keys_per_second: f64,
    /// Writes of its Peers that the hub's API server took in a second.
    pub(super) peer_writes_per_second: f64,
}

/// Its Nodes, each with a Peer in the hub.
pub(super) struct Busy {
    nodes: Api<DynamicObject>,
    load: Load,
    keys: Arc<AtomicU32>,
}

impl Busy {
    /// Creates the Nodes and the mesh and waits until the hub has a Peer of each Node.
    pub(super) async fn start(world: &World<'_>, load: Load) -> anyhow::Result<Self> {
        let client = world.lab.cluster(CLUSTER).client().await?;
        let nodes = Api::all_with(client, &ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Node")));
        let busy = Self {
            nodes,
            load,
            keys: Arc::new(AtomicU32::new(0)),
        };
        stream::iter(0..load.nodes)
            .map(|n| busy.create(n))
            .buffer_unordered(IN_FLIGHT)
            .try_collect::<Vec<()>>()
            .await?;
        eprintln!("bench: {} Nodes of {CLUSTER} stand", load.nodes);
        let mesh: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh",
            "metadata": {"name": MESH, "namespace": NAMESPACE},
            "spec": {"clusters": [
                {"name": HUB, "local": true, "allowedNetworks": ["10.10.0.0/16", "100.66.1.0/24"]},
                {"name": CLUSTER, "kubeconfigSecretRef": {"name": format!("{CLUSTER}-kubeconfig")}, "isolationProfile": "sandbox",
                 "allowedNetworks": ["100.96.0.0/16"],
                 "egress": [{"service": {"cluster": HUB, "namespace": "default", "name": STANDING}}]},
            ]},
        }))?;
        world.meshes.create(&PostParams::default(), &mesh).await?;
        let peers = peers(world.lab.cluster(HUB).client().await?);
        let began = Instant::now();
        wait_until(format!("{} Peers of {CLUSTER}", load.nodes), PATIENCE, async || {
            tokio::time::sleep(Duration::from_secs(2)).await;
            let of_mesh = ListParams::default().labels(&format!("{}={MESH}", names::LABEL_MESH));
            let listed = peers.list_metadata(&of_mesh).await.map_err(|error| error.to_string())?;
            match listed.items.len() {
                found if found >= usize::from(load.nodes) => Ok(()),
                found => Err(format!("{found}")),
            }
        })
        .await?;
        eprintln!("bench: their Peers stand after {} s", began.elapsed().as_secs());
        Ok(busy)
    }

    fn key(&self) -> String {
        let number = self.keys.fetch_add(1, Ordering::Relaxed);
        let mut key = [9; 32];
        key[..4].copy_from_slice(&number.to_be_bytes());
        STANDARD.encode(key)
    }

    /// A Node as an agent publishes it, without one.
    async fn create(&self, n: u16) -> anyhow::Result<()> {
        let [high, low] = (n + 1).to_be_bytes();
        let agent = json!({"version": env!("CARGO_PKG_VERSION"), "backend": "userspace", "mode": "full", "mtu": 1420});
        let object = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name(n), "annotations": {
                names::KILO_KEY: self.key(),
                names::KILO_WIREGUARD_IP: format!("100.96.{high}.{low}/16"),
                names::KILO_ENDPOINT: format!("172.30.3.9:{}", 1024 + n),
                names::KILO_GRANULARITY: "full",
                names::NODE_AGENT: agent.to_string(),
            }},
            "status": {"conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": null, "lastTransitionTime": null}]},
        }))?;
        self.nodes.create(&PostParams::default(), &object).await?;
        Ok(())
    }

    /// Begins to rewrite keys.
    pub(super) async fn rotate(&self, world: &World<'_>) -> anyhow::Result<Rotation> {
        let busy = Self {
            nodes: self.nodes.clone(),
            load: self.load,
            keys: Arc::clone(&self.keys),
        };
        let (written, failed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let counted = [Arc::clone(&written), Arc::clone(&failed)];
        let began = (Instant::now(), peer_writes(&world.writes().await?));
        let task = tokio::spawn(async move {
            let mut tick = tokio::time::interval(Duration::from_secs(1) / busy.load.keys_per_second.max(1));
            tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
            let ticks = stream::unfold(tick, async |mut tick| {
                tick.tick().await;
                Some(((), tick))
            });
            let names = (0..busy.load.nodes).cycle().map(name);
            ticks
                .zip(stream::iter(names))
                .for_each_concurrent(IN_FLIGHT, async |((), name)| {
                    let patch = Patch::Merge(json!({"metadata": {"annotations": {names::KILO_KEY: busy.key()}}}));
                    let done = busy.nodes.patch_metadata(&name, &PatchParams::default(), &patch).await;
                    counted[usize::from(done.is_err())].fetch_add(1, Ordering::Relaxed);
                })
                .await;
        });
        Ok(Rotation {
            nodes: self.load.nodes,
            written,
            failed,
            began,
            task,
        })
    }
}

/// Keys are rewritten for as long as this is kept.
pub(super) struct Rotation {
    nodes: u16,
    written: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
    began: (Instant, u64),
    task: JoinHandle<()>,
}

impl Rotation {
    /// What was changed since it began.
    #[allow(clippy::cast_precision_loss, reason = "counts of some minutes")]
    pub(super) async fn changed(&self, world: &World<'_>) -> anyhow::Result<Changed> {
        let (began, before) = self.began;
        let seconds = began.elapsed().as_secs_f64();
        let peers = peer_writes(&world.writes().await?) - before;
        let failed = self.failed.load(Ordering::Relaxed);
        anyhow::ensure!(failed == 0, "{failed} writes of keys failed");
        anyhow::ensure!(!self.task.is_finished(), "the keys were not rewritten to the end");
        Ok(Changed {
            nodes: self.nodes,
            keys_per_second: self.written.load(Ordering::Relaxed) as f64 / seconds,
            peer_writes_per_second: peers as f64 / seconds,
        })
    }
}

impl Drop for Rotation {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn name(n: u16) -> String {
    format!("{CLUSTER}-{n}")
}

fn peers(client: Client) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("kilo.squat.ai", "v1alpha1", "Peer");
    Api::all_with(client, &ApiResource::from_gvk_with_plural(&kind, "peers"))
}

fn peer_writes(writes: &BTreeMap<String, u64>) -> u64 {
    let peers = writes.iter().filter(|(kind, _)| kind.ends_with(" peers"));
    peers.map(|(_, count)| count).sum()
}
