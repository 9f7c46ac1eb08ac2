//! `cargo xtask demo --scenario nat`: the nodes of two tenants are behind NAT routers. They reach the hub, and each other at the
//! endpoints that the hub's nodes see.

use std::time::{Duration, Instant};

use clustermesh_lab::{Cluster, LabPlan, NatKind, Product, TrafficClient, Tunnel, wait_until};

use super::{Demo, HUB, MEMBER, describe};

const OTHER: &str = "tenant-b";
const PORTS_FROM_40001: NatKind = NatKind::EndpointIndependent { first_port: 40001 };
const PORTS_FROM_41001: NatKind = NatKind::EndpointIndependent { first_port: 41001 };

const TOPOLOGY: &str = "
   tenant-a  192.168.1.0/24          mgmt  172.30.1.0/24          tenant-b  100.64.1.0/24
   tenant-a-1   tenant-a-2           mgmt-1     mgmt-2            tenant-b-1   tenant-b-2
        |           |                  |           |                   |           |
       [NAT 172.30.2.2]                |           |                  [NAT 172.30.3.2]
   UDP 51820 -> 40001, 40002           |           |              UDP 51820 -> 40001, 40002
        |                              |           |                   |
   =====+==============================+===========+===================+==== underlay 172.30.0.0/16
";

/// The hub, and two tenants behind NATs: one in a private network, one in the shared address space of carrier-grade NATs.
pub(super) fn plan() -> LabPlan {
    LabPlan::clusters(&[(HUB, 2), (MEMBER, 2), (OTHER, 2)])
        .with_nat(MEMBER, "192.168.1.0/24", PORTS_FROM_40001)
        .with_nat(OTHER, "100.64.1.0/24", PORTS_FROM_40001)
}

impl Demo<'_> {
    /// Runs the scenario.
    pub(super) async fn nat(&mut self) -> anyhow::Result<()> {
        println!("{TOPOLOGY}");
        let [hub, member, other] = [HUB, MEMBER, OTHER].map(|name| self.lab.cluster(name));
        self.title("install: crds/ and deploy/, as README.md describes; one ClusterMesh");
        let product = Product::install(self.lab, &[HUB, MEMBER, OTHER], Tunnel::Shipped, &|line| {
            println!("  {line}")
        })
        .await?;
        let pods = [hub.run_web().await?, member.run_web().await?, other.run_web().await?];
        let applied = Instant::now();
        product.mesh_up(&product.mesh(&[])).await?;
        println!("  Ready {:.1} s after kubectl apply", applied.elapsed().as_secs_f64());
        let [hub_pods, member_pods, other_pods] = &pods;

        self.title(
            "each tenant and the hub, both directions: the nodes behind NATs send first, and keep their mapping",
        );
        for tenant_pods in [member_pods, other_pods] {
            self.check_pods(tenant_pods, hub_pods).await?;
            self.check_pods(hub_pods, tenant_pods).await?;
        }

        self.title("the endpoints that the hub's nodes see and publish");
        self.print_discovered(&hub).await?;

        self.title("tenant-a and tenant-b, both behind NATs, directly from node to node");
        self.check_pods(member_pods, other_pods).await?;
        self.check_pods(other_pods, member_pods).await?;

        self.title("the router of tenant-a restarts and maps its nodes to ports 41001 and 41002");
        self.lab.set_nat(MEMBER, PORTS_FROM_41001).await?;
        let changed = Instant::now();
        let from = TrafficClient::Pod(member_pods[0].clone());
        for target in [&hub_pods[0], &other_pods[0]] {
            let url = format!("http://{}:8080", target.ip);
            // Between the tenants this takes up to four minutes: the router of tenant-b drops packets from the new port, so the
            // node of tenant-b notices the change only when it renews the session, or when the session ends.
            let answer = wait_until(format!("an answer of {url}"), Duration::from_secs(300), async || {
                let answer = self.lab.http_get(&from, &url).await;
                answer.map_err(|error| error.to_string())?
            });
            let answer = describe(answer.await);
            let answer =
                answer.map(|seen| format!("{seen}; {:.1} s after the change", changed.elapsed().as_secs_f64()));
            self.check(&format!("{from} -> {url}"), answer);
        }

        self.title("the router of tenant-a now has another port for each destination (\"symmetric\")");
        self.lab.set_nat(MEMBER, NatKind::EndpointDependent).await?;
        let url = format!("http://{}:8080", hub_pods[0].ip);
        let answer = describe(self.lab.http_get_until_answered(&from, &url).await);
        self.check(&format!("{from} -> {url}"), answer);
        let condition = self.wait_for_degraded(&hub).await;
        self.check("condition Degraded of the ClusterMesh", condition);

        println!(
            "
  shown: nodes behind NATs reach public nodes, and each other if both NATs give a node one public port for all
  destinations; a changed mapping is followed; if one of two NATs maps each destination to another port, nodes
  behind the two do not connect, and the ClusterMesh names a node of each member and the remedy."
        );
        Ok(())
    }

    /// Waits until the hub's nodes publish endpoints of both tenants' NATs, and prints them.
    async fn print_discovered(&self, hub: &Cluster<'_>) -> anyhow::Result<()> {
        let path = "jsonpath={range .items[*]}  {.metadata.name} {.metadata.annotations.kilo\\.squat\\.ai/discovered-endpoints}{\"\\n\"}{end}";
        let routers = [MEMBER, OTHER].map(|name| self.lab.cluster(name).plan().nat_address().to_string());
        let published = wait_until(
            "the hub's nodes to publish the endpoints",
            Duration::from_secs(120),
            async || {
                let words = ["get", "nodes", "-o", path];
                let published = hub.try_kubectl(words).await.map_err(|error| error.to_string())?.stdout;
                if routers.iter().all(|router| published.contains(router)) {
                    Ok(published)
                } else {
                    Err(published)
                }
            },
        )
        .await?;
        println!("{}", published.trim_end());
        Ok(())
    }

    /// Waits until the condition Degraded of the ClusterMesh names nodes behind NATs. Returns its message.
    async fn wait_for_degraded(&self, hub: &Cluster<'_>) -> Result<String, String> {
        let path = "jsonpath={.status.conditions[?(@.type==\"Degraded\")].message}";
        wait_until(
            "the condition Degraded to name the NATs",
            Duration::from_secs(120),
            async || {
                let words = ["-n", "clustermesh", "get", "clustermesh", "demo", "-o", path];
                let message = hub.try_kubectl(words).await.map_err(|error| error.to_string())?.stdout;
                if message.contains("behind NATs") {
                    Ok(message)
                } else {
                    Err(message)
                }
            },
        )
        .await
        .map_err(|error| error.to_string())
    }
}
