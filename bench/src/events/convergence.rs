//! Measures how long it takes to create the Peers of a new mesh: with the controller, and with only the kube client that it uses.

use std::{
    fmt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context;
use clustermesh_lab::workspace_program;
use clustermesh_tests::test_env::LATER;
use futures::{StreamExt, TryStreamExt, future, stream};
use k8s_openapi::jiff::Timestamp;
use kube::{
    Client, Config,
    api::{DeleteParams, DynamicObject, ListParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde::{Deserialize, Serialize};

use super::{Bench, objects};
use crate::cpu;

/// Concurrent requests to each member. The controller creates Peers with the same limit.
const CONCURRENT_REQUESTS: usize = 8;

/// Arguments of `clustermesh-bench create`.
#[derive(Debug, clap::Args)]
pub(crate) struct CreateArgs {
    /// The objects to create, as JSON.
    file: PathBuf,
}

/// The Peers to create in one member.
#[derive(Serialize, Deserialize)]
struct Creates {
    /// A kubeconfig for the controller's account in the member.
    kubeconfig: String,
    peers: Vec<DynamicObject>,
}

/// How the Peers of a mesh were created.
pub(super) struct Creation {
    peers: usize,
    /// From the request that creates the ClusterMesh to the first Peer's request.
    start: Duration,
    /// From the first Peer's request until all members have all Peers.
    writing: Duration,
    /// CPU time of the controller meanwhile, and the number of its passes.
    cpu: f64,
    passes: f64,
    /// The client alone: from the first request to the last response.
    alone: Duration,
}

impl fmt::Display for Creation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [start, writing, alone] = [self.start, self.writing, self.alone].map(|time| time.as_secs_f64());
        writeln!(
            f,
            "| {} | {alone:.2} | {start:.2} | {writing:.2} | {:.2} | {:.0} | {:.0} % | {:.0} % |",
            self.peers,
            self.cpu,
            self.passes,
            100.0 * alone / writing,
            100.0 * alone / (start + writing),
        )
    }
}

impl Creation {
    /// The last two columns divide the time of the client alone by that of the controller: by the time from the first Peer to
    /// the last, and by the time from the start to the last Peer.
    pub(super) const HEADER: &str = "| Peers | the client alone, s | the controller: until the first, s | first to last, s | its CPU, s | passes \
        | client alone / first to last | client alone / (until the first + first to last) |\n|---|---|---|---|---|---|---|---|";
}

impl Bench {
    /// Creates the ClusterMesh. Returns the time until all members have all Peers.
    pub(super) async fn create_mesh_and_wait(&self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        objects::create_mesh(&self.clients[0], self.clients.len()).await?;
        let peers = self.wanted_peers() * self.clients.len();
        let limit = Duration::from_secs(60) + Duration::from_millis(10) * u32::try_from(peers)?;
        let waits = self.clients.iter().map(|client| self.until_created(client, limit));
        future::try_join_all(waits).await?;
        Ok(began.elapsed())
    }

    async fn until_created(&self, client: &Client, limit: Duration) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            // `remainingItemCount` makes the request cheap.
            let page = objects::peers(client).list(&ListParams::default().limit(1)).await?;
            let more = page.metadata.remaining_item_count.unwrap_or_default();
            let count = page.items.len() + usize::try_from(more)?;
            if count >= self.wanted_peers() {
                return Ok(());
            }
            anyhow::ensure!(began.elapsed() < limit, "only {count} Peers are written");
            // Seldom, because the API servers share the machine with the controller.
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Lets the controller create all Peers of a new mesh, deletes them, and then creates the same Peers with the client alone.
    /// Leaves neither a mesh nor Peers nor a controller.
    pub(super) async fn compare_creation(&self) -> anyhow::Result<Creation> {
        let mut running = self.env.start_controller().await;
        let pid = running.pid().context("the controller has ended")?.try_into()?;
        let passes_before = self.passes().await;
        let (before, began) = (cpu::Cpu::now(&[pid])?, Timestamp::now());
        self.create_mesh_and_wait().await?;
        let (used, passes) = (
            cpu::Cpu::now(&[pid])?.since(before),
            self.passes().await - passes_before,
        );
        let (first, last) = self.peer_requests(began)?;
        self.env.until_condition("Ready", "True/Meshed", LATER).await;
        running.terminate(LATER).await?;
        objects::delete_mesh(&self.clients[0]).await?;
        let mut lists = Vec::new();
        for (index, client) in self.clients.iter().enumerate() {
            lists.push(Creates {
                kubeconfig: self.env.kubeconfig(&objects::name(index)).await,
                peers: delete_peers(client).await?,
            });
        }
        let peers = lists.iter().map(|creates| creates.peers.len()).sum();
        let alone = self.create_alone(&lists).await?;
        for client in &self.clients {
            delete_peers(client).await?;
        }
        Ok(Creation {
            peers,
            start: first.duration_since(began).try_into()?,
            writing: last.duration_since(first).try_into()?,
            cpu: used.daemons,
            passes,
            alone,
        })
    }

    async fn passes(&self) -> f64 {
        self.env.metric("clustermesh_controller_reconciles_total").await
    }

    /// When the API servers received the first request since `began` that creates a Peer, and when they sent the last
    /// response to such a request.
    fn peer_requests(&self, began: Timestamp) -> anyhow::Result<(Timestamp, Timestamp)> {
        let mut times = Vec::new();
        for index in 0..self.clients.len() {
            for write in self.env.lab.cluster(&objects::name(index)).audited_writes()? {
                let at: Timestamp = write.received.parse()?;
                if at >= began && write.request.starts_with("create peers/") {
                    times.push((at, write.answered.parse::<Timestamp>()?));
                }
            }
        }
        let first = times.iter().map(|(received, _)| *received).min();
        let last = times.iter().map(|(_, answered)| *answered).max();
        first.zip(last).context("no API server has logged a new Peer")
    }

    /// Runs `clustermesh-bench create` on the controller's host and with the controller's account, so that the API servers get
    /// the same requests over the same network and log them in the same way.
    async fn create_alone(&self, lists: &[Creates]) -> anyhow::Result<Duration> {
        let file = self.env.lab.directory().join("create.json");
        std::fs::write(&file, serde_json::to_vec(lists)?)?;
        let program = workspace_program("clustermesh-bench")?;
        let words = [program.as_path(), Path::new("create"), &file];
        let output = self.env.controller_host().exec(words).await?;
        Ok(Duration::from_secs_f64(output.stdout.trim().parse()?))
    }
}

/// Creates the Peers in `file` with the kube client, and prints the seconds from the first request to the last response.
pub(crate) fn create(args: &CreateArgs) -> anyhow::Result<()> {
    let lists: Vec<Creates> = serde_json::from_slice(&std::fs::read(&args.file)?)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let took = runtime.block_on(async {
        let connect = lists.iter().map(|creates| connect(&creates.kubeconfig));
        let clients = future::try_join_all(connect).await?;
        let began = Instant::now();
        let mut members = tokio::task::JoinSet::new();
        for (client, creates) in clients.into_iter().zip(lists) {
            let api = objects::peers(&client);
            let creates = creates.peers.into_iter().map(move |peer| {
                let api = api.clone();
                async move { api.create(&PostParams::default(), &peer).await.map(drop) }
            });
            let all = stream::iter(creates).buffer_unordered(CONCURRENT_REQUESTS);
            members.spawn(all.try_collect::<()>());
        }
        while let Some(member) = members.join_next().await {
            member??;
        }
        anyhow::Ok(began.elapsed())
    })?;
    println!("{}", took.as_secs_f64());
    Ok(())
}

/// A client with open connections.
async fn connect(kubeconfig: &str) -> anyhow::Result<Client> {
    let config = Kubeconfig::from_yaml(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
    let client = Client::try_from(config)?;
    let peers = objects::peers(&client);
    let one = ListParams::default().limit(1);
    future::try_join_all((0..CONCURRENT_REQUESTS).map(|_| peers.list(&one))).await?;
    Ok(client)
}

/// Deletes all Peers and PeerPolicies. Returns the Peers without what the API server has added.
async fn delete_peers(client: &Client) -> anyhow::Result<Vec<DynamicObject>> {
    let api = objects::peers(client);
    let mut peers = api.list(&ListParams::default()).await?.items;
    let policies = objects::api(client, "kilo.squat.ai", "v1alpha1", "PeerPolicy", "peerpolicies");
    for api in [&api, &policies] {
        let all = ListParams::default();
        api.delete_collection(&DeleteParams::default(), &all)
            .await
            .context("delete the objects of the mesh")?;
    }
    for peer in &mut peers {
        let metadata = &mut peer.metadata;
        (metadata.uid, metadata.resource_version, metadata.managed_fields) = (None, None, None);
        (metadata.creation_timestamp, metadata.generation) = (None, None);
    }
    Ok(peers)
}
