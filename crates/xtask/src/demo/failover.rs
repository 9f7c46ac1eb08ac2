//! `cargo xtask demo --scenario failover`: the controller's leader fails, the hub's API server is away, and the mesh moves to another hub,
//! while packets flow.

use std::time::{Duration, Instant};

use clustermesh_lab::{
    Cluster, LabPlan, MOVE_LABEL, NAMESPACE, Product, RunningPod, TrafficClient, Tunnel, clusterctl_move, wait_until,
};

use super::{Demo, HUB, MEMBER};

const OTHER: &str = "tenant-b";
const NEW_HUB: &str = "mgmt-new";
const ECHO_PORT: u16 = 7_007;
const PATIENCE: Duration = Duration::from_secs(60);

/// The hub with two nodes (for the two replicas of the controller), two tenants, and a hub to which the mesh moves.
pub(super) fn plan() -> LabPlan {
    LabPlan::clusters(&[(HUB, 2), (MEMBER, 1), (OTHER, 1), (NEW_HUB, 1)])
}

impl Demo<'_> {
    /// Runs the scenario.
    pub(super) async fn failover(&mut self) -> anyhow::Result<()> {
        let [hub, member, other] = [HUB, MEMBER, OTHER].map(|name| self.lab.cluster(name));
        self.title("install: crds/ and deploy/, as README.md describes");
        let names = [HUB, MEMBER, OTHER];
        let product = Product::install(self.lab, &names, Tunnel::Shipped, &|line| println!("  {line}")).await?;
        let (from, to) = (member.run_web().await?, other.run_web().await?);
        let mesh = tenants_only(&product.mesh(&[]));
        println!("{mesh}");
        hub.apply(&mesh).await?;
        until_ready(&hub).await?;

        self.title("two replicas of the controller, one of them the leader");
        let label = "-l=app.kubernetes.io/name=clustermesh-controller";
        println!(
            "{}",
            hub.kubectl(["-n", NAMESPACE, "get", "pods", "-o", "wide", label])
                .await?
                .stdout
        );
        println!("{}", hub.kubectl(["-n", NAMESPACE, "get", "lease"]).await?.stdout);

        let probe = self.lab.probe_program()?;
        let node = self.lab.node(&to[0].node);
        let mut echo = node.pod_spawn("echo", to[0].ip, [&*probe, "udp-echo", &format!(":{ECHO_PORT}")])?;
        echo.wait_for_log("echoing on", PATIENCE).await?;
        let client = TrafficClient::Pod(from[0].clone());
        let watch = self.lab.watch_udp(&client, (to[0].ip, ECHO_PORT).into())?;
        watch.wait_for_echo_after(0).await?;

        self.title("the leader is killed; meanwhile a Peer loses a label");
        let killed = self.kill_leader(&product).await?;
        let outcome = self.check_restored(&member, killed).await;
        self.check("the other replica writes the label again", outcome);
        let leader = product
            .controller_pod()
            .await
            .map(|pod| format!("{} on {}", pod.name, pod.node));
        self.check("the leader now", leader.map_err(|error| error.to_string()));

        self.title("the leader is deleted, as in an update");
        let leader = product.controller_pod().await?;
        let deleted = Instant::now();
        hub.kubectl(["-n", NAMESPACE, "delete", "pod", &leader.name, "--wait=false"])
            .await?;
        let outcome = new_leader(&product, &leader).await;
        let outcome = outcome.map(|pod| format!("{} after {:.1} s", pod.name, deleted.elapsed().as_secs_f64()));
        self.check("the leader now", outcome);

        self.title("the hub's API server is away; meanwhile a Peer loses a label in a tenant");
        hub.kill_api()?;
        // The leader may write for three seconds after the last renewal of the Lease in the hub. After that, it needs the Lease
        // in the tenant.
        tokio::time::sleep(Duration::from_secs(4)).await;
        let outcome = self.check_restored(&other, Instant::now()).await;
        self.check("the leader writes the label again", outcome);
        let args = ["-n", NAMESPACE, "get", "lease"];
        println!("  the Lease in the tenant:\n{}", other.kubectl(args).await?.stdout);
        hub.start_api().await?;
        let outcome = until_renewed(&hub).await.map(|()| "renewed".to_owned());
        self.check(
            "the Lease after the hub is back",
            outcome.map_err(|error| error.to_string()),
        );
        let outcome = until_ready(&hub).await.map(|()| "Ready".to_owned());
        self.check(
            "the mesh after the hub is back",
            outcome.map_err(|error| error.to_string()),
        );

        self.title("clusterctl moves the mesh to another hub; the old controller keeps running");
        let new_hub = self.lab.cluster(NEW_HUB);
        Product::install(self.lab, &[NEW_HUB], Tunnel::Shipped, &|line| println!("  {line}")).await?;
        let before = peers(&[&member, &other]).await?;
        move_mesh(&hub, &new_hub, &before).await?;
        let outcome = until_ready(&new_hub).await.map(|()| "Ready".to_owned());
        self.check("the mesh in the new hub", outcome.map_err(|error| error.to_string()));
        let after = peers(&[&member, &other]).await?;
        let same = |(old, new): (&[String; 3], &[String; 3])| old[..2] == new[..2] && old[2] != new[2];
        let outcome = if before.len() == after.len() && before.iter().zip(&after).all(same) {
            Ok(format!(
                "{} Peers kept their UIDs, and have the label of the new hub",
                after.len()
            ))
        } else {
            Err(format!("{before:?} became {after:?}"))
        };
        self.check("the Peers in the tenants", outcome);

        self.title("the flow from tenant-a to tenant-b, a datagram every 10 ms since the beginning");
        let times = watch.echo_times();
        let gaps = times.windows(2).map(|pair| (pair[1] - pair[0], pair[0] - times[0]));
        let (gap, since) = gaps.max().unwrap_or_default();
        let outcome = format!(
            "{} echoes, the longest time without one {gap} ms, {} s after the first",
            times.len(),
            since / 1000
        );
        self.check(&format!("{} -> {}", from[0].ip, to[0].ip), Ok(outcome));
        println!(
            "
  shown: a second replica takes over when the leader fails or exits; while the hub is away, the leader goes on in the members;
  a paused mesh moves to another hub and keeps its Peers; packets notice nothing. `cargo xtask test reconcile failover` also stops the leader and lets it continue, cuts it off from the
  hub, and checks in the audit logs that never two replicas write."
        );
        Ok(())
    }

    async fn kill_leader(&self, product: &Product<'_>) -> anyhow::Result<Instant> {
        let leader = product.controller_pod().await?;
        println!("  {} on {}", leader.name, leader.node);
        let node = self.lab.node(&leader.node);
        let killed = Instant::now();
        node.exec([
            "pkill",
            "-KILL",
            "-f",
            "^/clustermesh-controller|^clustermesh-controller",
        ])
        .await?;
        Ok(killed)
    }

    /// Removes a label of a Peer, and waits until it is there again. Returns the time since `since`.
    async fn check_restored(&self, cluster: &Cluster<'_>, since: Instant) -> Result<String, String> {
        let text = |error: clustermesh_lab::Error| error.to_string();
        let peers = cluster
            .kubectl(["get", "peers", "-o", "name"])
            .await
            .map_err(text)?
            .stdout;
        let peer = peers.lines().next().ok_or("no Peer")?;
        cluster
            .kubectl(["label", peer, "kilo-clustermesh.io/mesh-"])
            .await
            .map_err(text)?;
        wait_until(format!("{peer} in {}", cluster.plan().name), PATIENCE, async || {
            let label = "-o=jsonpath={.metadata.labels.kilo-clustermesh\\.io/mesh}";
            let label = cluster
                .kubectl(["get", peer, label])
                .await
                .map_err(|error| error.to_string())?;
            if label.stdout.is_empty() {
                Err("no label".to_owned())
            } else {
                Ok(())
            }
        })
        .await
        .map_err(text)?;
        Ok(format!(
            "{peer} in {}, after {:.1} s",
            cluster.plan().name,
            since.elapsed().as_secs_f64()
        ))
    }
}

/// Waits for a leader other than `old`.
async fn new_leader(product: &Product<'_>, old: &RunningPod) -> Result<RunningPod, String> {
    let leader = wait_until("another leader", PATIENCE, async || {
        match product.controller_pod().await.map_err(|error| error.to_string())? {
            leader if leader.name != old.name => Ok(leader),
            leader => Err(leader.name),
        }
    });
    leader.await.map_err(|error| error.to_string())
}

/// The mesh without the hub's own entry, which would mean another cluster after the move.
fn tenants_only(mesh: &str) -> String {
    let mut entries = mesh.split("  - name: ");
    let head = entries.next().unwrap_or_default();
    let tenants = entries.filter(|entry| !entry.contains("local: true"));
    let tenants: String = tenants.map(|entry| format!("  - name: {entry}")).collect();
    format!("{head}{tenants}")
}

/// Waits until a leader renews the Lease.
async fn until_renewed(hub: &Cluster<'_>) -> anyhow::Result<()> {
    let renewed = async || {
        let time = "-o=jsonpath={.spec.renewTime}";
        let words = ["-n", NAMESPACE, "get", "lease", "clustermesh-controller", time];
        hub.kubectl(words).await.map(|output| output.stdout)
    };
    let before = renewed().await?;
    wait_until("the Lease to be renewed", PATIENCE, async || match renewed().await {
        Ok(now) if now != before => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await?;
    Ok(())
}

async fn until_ready(hub: &Cluster<'_>) -> anyhow::Result<()> {
    let words = [
        "-n",
        NAMESPACE,
        "wait",
        "--for=condition=Ready",
        "clustermesh/demo",
        "--timeout=120s",
    ];
    hub.kubectl(words).await?;
    Ok(())
}

/// Name, UID and hub of each Peer of these clusters.
async fn peers(clusters: &[&Cluster<'_>]) -> anyhow::Result<Vec<[String; 3]>> {
    let mut all = Vec::new();
    for cluster in clusters {
        let columns = "-o=jsonpath={range .items[*]}{.metadata.name} {.metadata.uid} \
                       {.metadata.labels.kilo-clustermesh\\.io/hub}{\"\\n\"}{end}";
        let listed = cluster.kubectl(["get", "peers", columns]).await?.stdout;
        for line in listed.lines() {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            all.extend(<[String; 3]>::try_from(words));
        }
    }
    Ok(all)
}

/// Does what docs/operations/migration.md describes.
async fn move_mesh(from: &Cluster<'_>, to: &Cluster<'_>, peers: &[[String; 3]]) -> anyhow::Result<()> {
    let [_, _, old_hub] = peers.first().ok_or_else(|| anyhow::anyhow!("no Peer"))?;
    let adopt = format!("kilo-clustermesh.io/adopt-hub={old_hub}");
    let paused = "cluster.x-k8s.io/paused";
    let pause = format!("{paused}=true");
    from.kubectl(["-n", NAMESPACE, "annotate", "clustermesh", "demo", &adopt, &pause])
        .await?;
    let label = format!("{MOVE_LABEL}=");
    let secrets = [MEMBER, OTHER].map(|name| format!("secret/{name}-kubeconfig"));
    let words = [
        "-n",
        NAMESPACE,
        "label",
        "clustermesh/demo",
        &secrets[0],
        &secrets[1],
        &label,
    ];
    from.kubectl(words).await?;
    let moved = clusterctl_move(from, to, &|line| println!("  {line}")).await?;
    moved.stderr.lines().for_each(|line| println!("  {line}"));
    let resume = format!("{paused}-");
    to.kubectl(["-n", NAMESPACE, "annotate", "clustermesh", "demo", &resume])
        .await?;
    Ok(())
}
