//! The clusters, the replicas of the controller, and the changes that the soak makes to them. Every request has a timeout, because a
//! fault may have stopped its API server.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, bail};
use base64::{Engine, engine::general_purpose::STANDARD};
use clustermesh_api::{mesh::ClusterMesh, names, peer::Peer};
use clustermesh_lab::{NAMESPACE, Running};
use clustermesh_tests::{
    faulty::FaultyApi,
    test_env::{self, TestEnv},
};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Node, core::v1::Secret};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::sync::Mutex as AsyncMutex;

use crate::ledger::{Ledger, Scope, now};

pub(crate) const HUB: &str = "mgmt";
pub(crate) const TENANTS: [&str; 3] = ["tenant-a", "tenant-b", "tenant-c"];
pub(crate) const CLUSTERS: [&str; 4] = [HUB, "tenant-a", "tenant-b", "tenant-c"];
/// The name of the ClusterMesh, as in [`TestEnv::mesh`].
pub(crate) const MESH: &str = "prod";
/// The number of nodes in each cluster that are never removed and keep their keys. They have the numbers from 1. The other nodes
/// are removed and added again, and get other keys.
pub(crate) const STABLE_NODES: u8 = 3;
/// The number of all nodes in each cluster.
pub(crate) const NODES: u8 = 8;
/// The number of kubeconfigs for each tenant, each with another token. [`Clusters::write_secret`] uses them in turn.
const KUBECONFIGS: usize = 6;
/// The timeout of each request.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long [`Clusters::until_done`] tries.
const PATIENCE: Duration = Duration::from_secs(240);
/// An annotation of the foreign Peers, which shows people where these come from. No check reads it.
const FOREIGN: &str = "example.com/foreign";

/// One replica of the controller.
pub(crate) struct Replica {
    pub(crate) host: &'static str,
    words: Vec<String>,
    starts: usize,
    pub(crate) running: Option<Running>,
}

/// The spec of the mesh, as far as faults change it.
#[derive(Debug, Default)]
struct Spec {
    absent: BTreeSet<&'static str>,
    is_paused: bool,
}

pub(crate) struct Clusters {
    pub(crate) env: TestEnv,
    clients: BTreeMap<&'static str, Client>,
    pub(crate) proxies: BTreeMap<&'static str, FaultyApi>,
    kubeconfigs: BTreeMap<&'static str, Vec<String>>,
    written_secrets: AtomicUsize,
    pub(crate) replicas: [AsyncMutex<Replica>; 2],
    spec: AsyncMutex<Spec>,
    ledger: Mutex<Ledger>,
}

async fn in_time<T>(request: impl Future<Output = Result<T, kube::Error>>) -> anyhow::Result<T> {
    let answer = tokio::time::timeout(TIMEOUT, request).await;
    Ok(answer.context("no answer in time")??)
}

impl Clusters {
    /// Starts API servers with Nodes, a proxy in front of each tenant's API server, and two replicas of the controller. Returns
    /// when the mesh is Ready.
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let env = TestEnv::start(&CLUSTERS).await;
        env.lab.add_host("proxies", "172.30.1.202".parse()?).await?;
        env.lab.add_host("other-controller", "172.30.1.201".parse()?).await?;
        let (mut clients, mut proxies, mut kubeconfigs) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for (m, cluster) in (1..).zip(CLUSTERS) {
            clients.insert(cluster, env.client(cluster).await);
            for n in 1..=STABLE_NODES {
                env.create_node(cluster, m, n).await;
            }
        }
        for (port, tenant) in (7001..).zip(TENANTS) {
            let proxy = FaultyApi::start(&env.lab.node("proxies"), port, &env.lab.cluster(tenant)).await;
            let of_tenant: &mut Vec<String> = kubeconfigs.entry(tenant).or_default();
            for _ in 0..KUBECONFIGS {
                of_tenant.push(env.kubeconfig(tenant).await);
            }
            env.write_secret(tenant, &proxy.kubeconfig(&of_tenant[0])).await;
            proxies.insert(tenant, proxy);
        }
        let mut replicas = Vec::new();
        for (index, host) in ["controller", "other-controller"].into_iter().enumerate() {
            let name = format!("replica-{index}");
            let words = env.controller_command(HUB, &name, 8081, NAMESPACE).await;
            let mut replica = Replica {
                host,
                words,
                starts: 0,
                running: None,
            };
            replica.start(&env, index)?;
            replicas.push(AsyncMutex::new(replica));
        }
        let replicas = replicas.try_into().map_err(|_| anyhow::anyhow!("two replicas"))?;
        env.apply_mesh(&env.mesh()).await;
        env.until_condition("Ready", "True/Meshed", test_env::LATER).await;
        Ok(Self {
            env,
            clients,
            proxies,
            kubeconfigs,
            written_secrets: AtomicUsize::new(1),
            replicas,
            spec: AsyncMutex::default(),
            ledger: Mutex::new(Ledger::new(MESH)),
        })
    }

    fn client(&self, cluster: &str) -> Client {
        self.clients[cluster].clone()
    }

    pub(crate) fn ledger(&self) -> std::sync::MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The index of the replica that holds the Lease.
    pub(crate) async fn leader(&self) -> anyhow::Result<usize> {
        let leases: Api<Lease> = Api::namespaced(self.client(HUB), NAMESPACE);
        let lease = in_time(leases.get("clustermesh-controller")).await?;
        let holder = lease.spec.and_then(|spec| spec.holder_identity).unwrap_or_default();
        let found = (0..2).find(|index| holder.starts_with(&format!("replica-{index}-")));
        found.with_context(|| format!("the holder of the Lease is {holder:?}"))
    }

    /// Starts a replica that has ended.
    pub(crate) async fn start_replica(&self, index: usize) -> anyhow::Result<()> {
        self.replicas[index].lock().await.start(&self.env, index)
    }

    /// Repeats a change until it succeeds, because the API server may be away for a while.
    pub(crate) async fn until_done(&self, what: &str, change: impl AsyncFn() -> anyhow::Result<()>) {
        let began = tokio::time::Instant::now();
        while let Err(error) = change().await {
            assert!(began.elapsed() < PATIENCE, "{what}: {error:#}");
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    /// Writes the kubeconfig Secret of a tenant, each time with another token.
    pub(crate) async fn write_secret(&self, tenant: &str) -> anyhow::Result<()> {
        let kubeconfigs = &self.kubeconfigs[tenant];
        let turn = self.written_secrets.fetch_add(1, Ordering::Relaxed);
        self.write_secret_value(
            tenant,
            &self.proxies[tenant].kubeconfig(&kubeconfigs[turn % kubeconfigs.len()]),
        )
        .await
    }

    pub(crate) async fn write_secret_value(&self, tenant: &str, kubeconfig: &str) -> anyhow::Result<()> {
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": format!("{tenant}-kubeconfig")}, "data": {"value": STANDARD.encode(kubeconfig)},
        });
        let secrets: Api<Secret> = Api::namespaced(self.client(HUB), NAMESPACE);
        let params = PatchParams::apply("soak").force();
        in_time(secrets.patch(&format!("{tenant}-kubeconfig"), &params, &Patch::Apply(&secret))).await?;
        Ok(())
    }

    pub(crate) async fn delete_secret(&self, tenant: &str) -> anyhow::Result<()> {
        let secrets: Api<Secret> = Api::namespaced(self.client(HUB), NAMESPACE);
        in_time(secrets.delete(&format!("{tenant}-kubeconfig"), &DeleteParams::default())).await?;
        Ok(())
    }

    /// Removes the entry of a tenant from the mesh, or adds it again.
    pub(crate) async fn set_entry(&self, tenant: &'static str, is_present: bool) -> anyhow::Result<()> {
        let mut spec = self.spec.lock().await;
        let scope = Scope::Entry(tenant.to_owned());
        if is_present {
            spec.absent.remove(tenant);
        } else {
            spec.absent.insert(tenant);
            self.ledger().begin(scope.clone(), now());
        }
        self.write_spec(&spec).await?;
        if is_present {
            self.ledger().end(&scope, now());
        }
        Ok(())
    }

    pub(crate) async fn set_paused(&self, is_paused: bool) -> anyhow::Result<()> {
        let mut spec = self.spec.lock().await;
        spec.is_paused = is_paused;
        // The ledger counts only the time in which the mesh is certainly paused: from the end of the request that pauses it to
        // the begin of the request that resumes it.
        if !is_paused {
            self.ledger().end(&Scope::Pause, now());
        }
        self.write_spec(&spec).await?;
        if is_paused {
            self.ledger().begin(Scope::Pause, now());
        }
        Ok(())
    }

    async fn write_spec(&self, spec: &Spec) -> anyhow::Result<()> {
        let mesh = self.env.mesh();
        let is_present = |entry: &&Value| !spec.absent.iter().any(|absent| entry["name"] == **absent);
        let entries = mesh["spec"]["clusters"].as_array().context("entries")?;
        let entries: Vec<&Value> = entries.iter().filter(is_present).collect();
        let patch = json!({"spec": {"paused": spec.is_paused, "clusters": entries}});
        let meshes: Api<ClusterMesh> = Api::namespaced(self.client(HUB), NAMESPACE);
        in_time(meshes.patch(MESH, &PatchParams::default(), &Patch::Merge(&patch))).await?;
        Ok(())
    }

    pub(crate) async fn nodes(&self, cluster: &str) -> anyhow::Result<Vec<Node>> {
        let nodes: Api<Node> = Api::all(self.client(cluster));
        Ok(in_time(nodes.list(&ListParams::default())).await?.items)
    }

    pub(crate) async fn annotate(&self, cluster: &str, node: &str, name: &str, value: &str) -> anyhow::Result<()> {
        let nodes: Api<Node> = Api::all(self.client(cluster));
        let patch = json!({"metadata": {"annotations": {name: value}}});
        in_time(nodes.patch(node, &PatchParams::default(), &Patch::Merge(&patch))).await?;
        Ok(())
    }

    /// Gives a node another key.
    pub(crate) async fn rekey(&self, cluster: &str, node: &str, key: &str) -> anyhow::Result<()> {
        let scope = Scope::Node(node.to_owned());
        self.ledger().begin(scope.clone(), now());
        self.annotate(cluster, node, names::KILO_KEY, key).await?;
        self.ledger().end(&scope, now());
        Ok(())
    }

    pub(crate) async fn remove_node(&self, cluster: &str, node: &str) -> anyhow::Result<()> {
        self.ledger().begin(Scope::Node(node.to_owned()), now());
        let nodes: Api<Node> = Api::all(self.client(cluster));
        match in_time(nodes.delete(node, &DeleteParams::default())).await {
            Err(error) if is_not_found(&error) => Ok(()),
            other => other.map(drop),
        }
    }

    pub(crate) async fn add_node(&self, cluster: &str, n: u8) -> anyhow::Result<()> {
        let nodes: Api<Node> = Api::all(self.client(cluster));
        let position = CLUSTERS.iter().position(|name| *name == cluster).context("a cluster")?;
        let node = test_env::node(cluster, u8::try_from(position + 1)?, n);
        let name = format!("{cluster}-{n}");
        let status = json!({"status": node["status"]});
        in_time(nodes.create(&PostParams::default(), &serde_json::from_value(node)?)).await?;
        in_time(nodes.patch_status(&name, &PatchParams::default(), &Patch::Merge(&status))).await?;
        self.ledger().end(&Scope::Node(name), now());
        Ok(())
    }

    pub(crate) async fn peers(&self, cluster: &str) -> anyhow::Result<Vec<Peer>> {
        let peers: Api<Peer> = Api::all(self.client(cluster));
        Ok(in_time(peers.list(&ListParams::default())).await?.items)
    }

    pub(crate) async fn patch_peer(&self, cluster: &str, peer: &str, patch: &Value) -> anyhow::Result<()> {
        let peers: Api<Peer> = Api::all(self.client(cluster));
        in_time(peers.patch(peer, &PatchParams::default(), &Patch::Merge(patch))).await?;
        Ok(())
    }

    pub(crate) async fn delete_peer(&self, cluster: &str, peer: &str) -> anyhow::Result<()> {
        let peers: Api<Peer> = Api::all(self.client(cluster));
        match in_time(peers.delete(peer, &DeleteParams::default())).await {
            Err(error) if is_not_found(&error) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Creates a foreign Peer.
    pub(crate) async fn create_foreign_peer(&self, cluster: &str, name: &str, number: u8) -> anyhow::Result<()> {
        let peer = json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer",
            "metadata": {"name": name, "annotations": {FOREIGN: "true"}},
            "spec": {
                "publicKey": test_env::key(200, number), "allowedIPs": [format!("192.0.2.{number}/32")],
                "persistentKeepalive": 25,
            },
        });
        let peers: Api<Peer> = Api::all(self.client(cluster));
        in_time(peers.create(&PostParams::default(), &serde_json::from_value(peer)?)).await?;
        Ok(())
    }

    /// Deletes the Peers that the controller must not touch: foreign ones, and those that lost all labels.
    pub(crate) async fn delete_foreign_peers(&self, cluster: &str) -> anyhow::Result<()> {
        for peer in self.peers(cluster).await? {
            if !peer.labels().contains_key(names::LABEL_HUB) {
                self.delete_peer(cluster, &peer.name_any()).await?;
            }
        }
        Ok(())
    }

    /// Runs `clustermeshctl plan` with the hub's own kubeconfig. Fails if a member would change or was not read.
    pub(crate) async fn check_plan(&self) -> anyhow::Result<()> {
        let kubeconfig = self.env.lab.directory().join("soak.kubeconfig");
        std::fs::write(&kubeconfig, self.env.hub().inside_kubeconfig()?)?;
        let program = clustermesh_tests::program("clustermeshctl");
        let kubeconfig = kubeconfig.display().to_string();
        let words = [
            &*program,
            "plan",
            "--exit-code",
            "--kubeconfig",
            &kubeconfig,
            "--hub-namespace",
            NAMESPACE,
        ];
        let output = self.env.controller_host().try_exec(words).await?;
        if !output.status.success() || !output.stderr.is_empty() {
            bail!("{}: {}{}", output.status, output.stdout, output.stderr);
        }
        Ok(())
    }
}

impl Replica {
    /// Starts the process. Its name is `replica-INDEX-START`, so that each process has a log of its own.
    fn start(&mut self, env: &TestEnv, index: usize) -> anyhow::Result<()> {
        let name = format!("replica-{index}-{}", self.starts);
        self.starts += 1;
        let words = self.words.iter().map(|word| match word.starts_with("POD_NAME=") {
            true => format!("POD_NAME={name}"),
            false => word.clone(),
        });
        self.running = Some(env.lab.node(self.host).spawn(&name, words)?);
        Ok(())
    }

    pub(crate) fn running(&self) -> anyhow::Result<&Running> {
        self.running.as_ref().context("the replica does not run")
    }
}

fn is_not_found(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(kube::Error::Api(status)) if status.code == 404)
}
