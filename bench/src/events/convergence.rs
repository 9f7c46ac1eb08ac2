//! Measures how long the Peers of a new mesh take: written by the controller, and created by the same client alone.

use std::{
    fmt,
    time::{Duration, Instant},
};

use anyhow::Context;
use clustermesh_tests::test_env::LATER;
use futures::{StreamExt, TryStreamExt, future, stream};
use kube::{
    Client,
    api::{DeleteParams, DynamicObject, ListParams, PostParams},
};

use super::{Bench, objects};

/// Concurrent requests to each member, as of the controller.
const CONCURRENT_REQUESTS: usize = 8;

/// The times in which all Peers of a mesh were created.
pub(super) struct Creation {
    peers: usize,
    /// From the request that creates the ClusterMesh to the last Peer.
    controller: Duration,
    /// From the first request to the last response.
    alone: Duration,
}

impl fmt::Display for Creation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = |time: Duration| self.peers as f64 / time.as_secs_f64();
        for (what, time) in [("the client alone", self.alone), ("the controller", self.controller)] {
            writeln!(
                f,
                "| {what} | {} | {:.2} | {:.0} | {:.0} % |",
                self.peers,
                time.as_secs_f64(),
                rate(time),
                100.0 * rate(time) / rate(self.alone)
            )?;
        }
        Ok(())
    }
}

impl Bench {
    /// Creates the ClusterMesh. Returns the time until all members have all Peers.
    pub(super) async fn create_mesh_and_wait(&self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        objects::create_mesh(&self.clients[0], self.clients.len()).await?;
        let limit = Duration::from_secs(60) + Duration::from_millis(20) * u32::try_from(self.wanted_peers())?;
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
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Has the controller create all Peers of a new mesh, and then the client alone. Leaves neither a mesh nor Peers nor a controller.
    pub(super) async fn compare_creation(&self) -> anyhow::Result<Creation> {
        let mut running = self.env.start_controller().await;
        let controller = self.create_mesh_and_wait().await?;
        self.env.until_condition("Ready", "True/Meshed", LATER).await;
        running.terminate(LATER).await?;
        objects::delete_mesh(&self.clients[0]).await?;
        let mut lists = Vec::new();
        for client in &self.clients {
            lists.push(delete_peers(client).await?);
        }
        let began = Instant::now();
        let creates = self.clients.iter().zip(&lists).map(async |(client, peers)| {
            let api = objects::peers(client);
            let params = PostParams::default();
            let creates = stream::iter(peers).map(|peer| api.create(&params, peer));
            let all = creates.buffer_unordered(CONCURRENT_REQUESTS);
            all.map_ok(drop).try_collect::<()>().await
        });
        future::try_join_all(creates).await?;
        let alone = began.elapsed();
        for client in &self.clients {
            delete_peers(client).await?;
        }
        Ok(Creation {
            peers: lists.iter().map(Vec::len).sum(),
            controller,
            alone,
        })
    }
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
