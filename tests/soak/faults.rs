//! The faults of the soak. Each begins, lasts, and ends by itself; faults that use the same resource do not overlap.

use std::{collections::BTreeMap, fmt, time::Duration};

use clustermesh_api::names;
use clustermesh_tests::faulty::Fault as ProxyFault;
use kube::ResourceExt;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{
    clusters::{CLUSTERS, Clusters, HUB, MESH, NODES, STABLE_NODES, TENANTS},
    random::Random,
};

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// The leader gets SIGKILL, and starts again after a while.
    LeaderKilled,
    /// The leader gets SIGSTOP, and SIGCONT after a while.
    LeaderStopped,
    /// The leader gets SIGTERM, and starts again after a while.
    LeaderExits,
    /// The leader has no route to the hub's API server.
    LeaderCutOff,
    /// The API server is killed, and starts again.
    ApiKilled(&'static str),
    /// The API server gets SIGSTOP, and SIGCONT after a while.
    ApiStopped(&'static str),
    /// The proxy before the API server has a fault.
    Api(&'static str, ProxyFault),
    SecretRemoved(&'static str),
    SecretBroken(&'static str),
    /// The Secret gets another token.
    SecretRotated(&'static str),
    EntryRemoved(&'static str),
    Paused,
    /// A Peer loses the label with the name of its mesh. It is the Peer of a stable node, whose key does not change: if the key
    /// changed while the label was missing, the controller would keep this Peer, and its allowed IPs would be missing in the Peer
    /// with the new key (design rule 2).
    LabelLost(&'static str),
    /// A Peer loses all labels, so that it counts as foreign.
    LabelsLost(&'static str),
    PeerEdited(&'static str),
    PeerDeleted(&'static str),
    /// A foreign Peer has the name that the Peer of a new node would get.
    ForeignPeer(&'static str),
}

/// A resource that only one fault at a time may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Resource {
    Replicas,
    ApiServer(&'static str),
    Secret(&'static str),
    Mesh,
    Peers(&'static str),
}

impl Fault {
    /// Draws a fault. Always takes the same number of random numbers.
    pub(crate) fn draw(random: &mut Random) -> Self {
        let (cluster, tenant) = (random.choose(&CLUSTERS), random.choose(&TENANTS));
        let proxy_fault = random.choose(&ProxyFault::NAMED).1;
        // A killed API server takes seconds to start again. Until then, faults that need it cannot begin. So only two of the
        // 24 numbers kill an API server.
        match random.below(24) {
            0 => Self::LeaderKilled,
            1 => Self::LeaderStopped,
            2 => Self::LeaderExits,
            3 => Self::LeaderCutOff,
            4 => Self::ApiKilled(HUB),
            5 => Self::ApiKilled(tenant),
            6 => Self::ApiStopped(HUB),
            7 => Self::ApiStopped(tenant),
            8..=11 => Self::Api(tenant, proxy_fault),
            12 => Self::SecretRemoved(tenant),
            13 => Self::SecretBroken(tenant),
            14 => Self::SecretRotated(tenant),
            15 | 16 => Self::EntryRemoved(tenant),
            17 => Self::Paused,
            18 => Self::LabelLost(cluster),
            19 => Self::LabelsLost(cluster),
            20 => Self::PeerEdited(cluster),
            21 | 22 => Self::PeerDeleted(cluster),
            _ => Self::ForeignPeer(cluster),
        }
    }

    pub(crate) fn resource(self) -> Resource {
        match self {
            Self::LeaderKilled | Self::LeaderStopped | Self::LeaderExits | Self::LeaderCutOff => Resource::Replicas,
            Self::ApiKilled(cluster) | Self::ApiStopped(cluster) | Self::Api(cluster, _) => {
                Resource::ApiServer(cluster)
            }
            Self::SecretRemoved(tenant) | Self::SecretBroken(tenant) | Self::SecretRotated(tenant) => {
                Resource::Secret(tenant)
            }
            Self::EntryRemoved(_) | Self::Paused => Resource::Mesh,
            Self::LabelLost(cluster)
            | Self::LabelsLost(cluster)
            | Self::PeerEdited(cluster)
            | Self::PeerDeleted(cluster)
            | Self::ForeignPeer(cluster) => Resource::Peers(cluster),
        }
    }

    /// The kind of the fault, for the report.
    pub(crate) fn kind(self) -> String {
        let text = format!("{self:?}");
        match self {
            Self::Api(_, fault) => format!("Api {fault}"),
            _ => text.split('(').next().unwrap_or_default().to_owned(),
        }
    }

    /// Runs the fault: begins it, waits, and ends it. An error means that it could not begin, for example because another fault
    /// makes its API server unreachable.
    ///
    /// # Panics
    /// If it cannot be ended.
    pub(crate) async fn run(self, clusters: &Clusters, lasts: Duration, random: usize) -> anyhow::Result<()> {
        let lab = &clusters.env.lab;
        match self {
            Self::LeaderKilled | Self::LeaderExits => {
                let index = clusters.leader().await?;
                let mut replica = clusters.replicas[index].lock().await;
                if self == Self::LeaderKilled {
                    replica.running()?.signal(Signal::SIGKILL)?;
                }
                let running = replica.running.as_mut();
                let running = running.ok_or_else(|| anyhow::anyhow!("the replica does not run"))?;
                running.terminate(Duration::from_secs(90)).await?;
                drop(replica);
                sleep(lasts).await;
                clusters.start_replica(index).await?;
            }
            Self::LeaderStopped => {
                let index = clusters.leader().await?;
                clusters.replicas[index]
                    .lock()
                    .await
                    .running()?
                    .signal(Signal::SIGSTOP)?;
                sleep(lasts).await;
                clusters.replicas[index]
                    .lock()
                    .await
                    .running()?
                    .signal(Signal::SIGCONT)?;
            }
            Self::LeaderCutOff => {
                let index = clusters.leader().await?;
                let host = lab.node(clusters.replicas[index].lock().await.host);
                let hub = format!("{}/32", clusters.env.hub().plan().api_address());
                host.exec(["ip", "route", "add", "blackhole", &hub]).await?;
                sleep(lasts).await;
                let restored = host.exec(["ip", "route", "del", "blackhole", &hub]).await;
                restored.expect("the route is removed");
            }
            Self::ApiKilled(cluster) => {
                lab.cluster(cluster).kill_api()?;
                sleep(lasts).await;
                lab.cluster(cluster)
                    .start_api()
                    .await
                    .expect("the API server starts again");
            }
            Self::ApiStopped(cluster) => {
                lab.cluster(cluster).freeze_api()?;
                sleep(lasts).await;
                lab.cluster(cluster).thaw_api().expect("the API server continues");
            }
            Self::Api(tenant, fault) => {
                clusters.proxies[tenant].set(Some(fault));
                sleep(lasts).await;
                clusters.proxies[tenant].set(None);
            }
            Self::SecretRemoved(tenant) => {
                clusters.delete_secret(tenant).await?;
                sleep(lasts).await;
                write_secret(clusters, tenant).await;
            }
            Self::SecretBroken(tenant) => {
                clusters
                    .write_secret_value(tenant, "apiVersion: v1\nkind: Config\n")
                    .await?;
                sleep(lasts).await;
                write_secret(clusters, tenant).await;
            }
            Self::SecretRotated(tenant) => clusters.write_secret(tenant).await?,
            Self::EntryRemoved(tenant) => {
                let removed = clusters.set_entry(tenant, false).await;
                if removed.is_ok() {
                    sleep(lasts).await;
                }
                // The entry is added also after an error: the request that removes it may have been executed.
                let add = async || clusters.set_entry(tenant, true).await;
                clusters.until_done("add the entry again", add).await;
                removed?;
            }
            Self::Paused => {
                let paused = clusters.set_paused(true).await;
                if paused.is_ok() {
                    // `Ledger` permits the controller's writes in the first 60 s of a pause, because they may still be in
                    // flight. So the pause lasts longer.
                    sleep(Duration::from_secs(75)).await;
                }
                let resume = async || clusters.set_paused(false).await;
                clusters.until_done("resume the mesh", resume).await;
                paused?;
            }
            Self::LabelLost(cluster) => {
                let sources: Vec<&str> = CLUSTERS.into_iter().filter(|source| *source != cluster).collect();
                let source = sources[random % sources.len()];
                // The division by 8 makes the choice of the node independent of the choice of the source.
                let n = 1 + random / 8 % usize::from(STABLE_NODES);
                let peer = format!("{MESH}--{source}--{source}-{n}");
                let patch = label_removal_patch(&[names::LABEL_MESH]);
                clusters.patch_peer(cluster, &peer, &patch).await?;
            }
            Self::LabelsLost(cluster) => {
                let all = [
                    names::LABEL_MESH,
                    names::LABEL_MESH_NAMESPACE,
                    names::LABEL_HUB,
                    names::LABEL_SOURCE_CLUSTER,
                ];
                change_peer(clusters, cluster, random, &label_removal_patch(&all)).await?;
                sleep(lasts).await;
                delete_foreign_peers(clusters, cluster).await;
            }
            Self::PeerEdited(cluster) => {
                let patch = json!({"spec": {"endpoint": {"dnsOrIP": {"ip": "203.0.113.9"}, "port": 9}, "persistentKeepalive": 7}});
                change_peer(clusters, cluster, random, &patch).await?;
            }
            Self::PeerDeleted(cluster) => {
                if let Some(peer) = some_peer(clusters, cluster, random).await? {
                    clusters.delete_peer(cluster, &peer).await?;
                }
            }
            Self::ForeignPeer(cluster) => {
                let sources: Vec<&str> = CLUSTERS.into_iter().filter(|source| *source != cluster).collect();
                let source = sources[random % sources.len()];
                let n = NODES + 1;
                let name = format!("{MESH}--{source}--{source}-{n}");
                let created = clusters.create_foreign_peer(cluster, &name, n).await;
                if created.is_ok() && clusters.add_node(source, n).await.is_ok() {
                    sleep(lasts).await;
                }
                // The Peer is deleted also after an error: the request that creates it may have been executed.
                delete_foreign_peers(clusters, cluster).await;
                let remove = async || clusters.remove_node(source, &format!("{source}-{n}")).await;
                clusters.until_done("remove the new node", remove).await;
                created?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

fn label_removal_patch(names: &[&str]) -> Value {
    let labels: BTreeMap<&str, Option<String>> = names.iter().map(|name| (*name, None)).collect();
    json!({"metadata": {"labels": labels}})
}

async fn write_secret(clusters: &Clusters, tenant: &str) {
    let write = async || clusters.write_secret(tenant).await;
    clusters.until_done("write the Secret again", write).await;
}

async fn delete_foreign_peers(clusters: &Clusters, cluster: &str) {
    let delete = async || clusters.delete_foreign_peers(cluster).await;
    clusters.until_done("delete the foreign Peers", delete).await;
}

/// The name of one of the controller's Peers in a cluster.
async fn some_peer(clusters: &Clusters, cluster: &str, random: usize) -> anyhow::Result<Option<String>> {
    let peers = clusters.peers(cluster).await?;
    let ours = |peer: &&clustermesh_api::peer::Peer| peer.labels().contains_key(names::LABEL_HUB);
    let names: Vec<String> = peers.iter().filter(ours).map(ResourceExt::name_any).collect();
    Ok((!names.is_empty()).then(|| names[random % names.len()].clone()))
}

async fn change_peer(clusters: &Clusters, cluster: &str, random: usize, patch: &Value) -> anyhow::Result<()> {
    match some_peer(clusters, cluster, random).await? {
        Some(peer) => clusters.patch_peer(cluster, &peer, patch).await,
        None => Ok(()),
    }
}
