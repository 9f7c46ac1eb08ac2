//! `cargo xtask demo --scenario equal-cidrs`: two tenants with equal pod and Service networks use one hub, both with
//! `addressing: Masqueraded`.

use std::time::Instant;

use clustermesh_lab::{LabPlan, Product, TrafficClient, Tunnel};

use super::{Demo, EGRESS, HUB, MEMBER, describe};

const OTHER: &str = "tenant-b";

const TOPOLOGY: &str = "
   tenant-a                            mgmt                           tenant-b
   pods      10.20.0.0/16              pods      10.10.0.0/16         pods      10.20.0.0/16   <- equal
   Services  10.21.0.0/16              Services  10.11.0.0/16         Services  10.21.0.0/16   <- equal
   WireGuard 100.66.2.0/24             WireGuard 100.66.1.0/24        WireGuard 100.66.3.0/24
   tenant-a-1   tenant-a-2             mgmt-1     mgmt-2              tenant-b-1   tenant-b-2
        |           |                    |           |                     |           |
   =====+===========+====================+===========+=====================+===========+==== underlay 172.30.0.0/16
";

/// The hub, and two tenants with the same networks.
pub(super) fn plan() -> LabPlan {
    LabPlan::clusters(&[(HUB, 2), (MEMBER, 2), (OTHER, 2)]).with_ranges_of(OTHER, MEMBER)
}

impl Demo<'_> {
    /// Runs the scenario.
    pub(super) async fn equal_cidrs(&mut self) -> anyhow::Result<()> {
        println!("{TOPOLOGY}");
        let [hub, member, other] = [HUB, MEMBER, OTHER].map(|name| self.lab.cluster(name));
        self.title("install: crds/ and deploy/, as README.md describes");
        let product = Product::install(self.lab, &[HUB, MEMBER, OTHER], Tunnel::Shipped, &|line| {
            println!("  {line}")
        })
        .await?;
        let hub_pods = hub.run_web().await?;
        let tenants = [(&member, member.run_web().await?), (&other, other.run_web().await?)];

        self.title("one ClusterMesh; the tenants are Masqueraded");
        let mesh = product.mesh_masqueraded(&[MEMBER, OTHER], &[(MEMBER, EGRESS), (OTHER, EGRESS)]);
        println!("{mesh}");
        let applied = Instant::now();
        product.mesh_up(&mesh).await?;
        println!("  Ready {:.1} s after kubectl apply", applied.elapsed().as_secs_f64());

        self.title("each tenant uses the hub's pods; they see the WireGuard address of the client's node");
        for (_, pods) in &tenants {
            for client in pods {
                let from = TrafficClient::Pod(client.clone());
                let url = format!("http://{}:8080", hub_pods[0].ip);
                let answer = describe(self.lab.http_get_until_answered(&from, &url).await);
                self.check(&format!("{} on {} -> {url}", client.ip, client.node), answer);
            }
        }

        self.title("each tenant uses the hub's Service by its mirrored name");
        for (cluster, pods) in &tenants {
            self.check_mirrored_service(cluster, pods).await?;
        }

        self.title(
            "an address of the equal networks is a pod of the client's own cluster; the hub reaches no pod at it",
        );
        for (cluster, pods) in &tenants {
            let (from, to) = (TrafficClient::Pod(pods[0].clone()), &pods[1]);
            let url = format!("http://{}:8080", to.ip);
            let outcome = match self.lab.http_get_until_answered(&from, &url).await {
                Ok(answer) if answer.node == to.node => describe(Ok(answer)),
                other => Err(describe(other).unwrap_or_else(|error| error)),
            };
            self.check(&format!("{} -> {url}", cluster.plan().name), outcome);
        }
        let url = format!("http://{}:8080", tenants[0].1[0].ip);
        let answer = self
            .lab
            .http_get(&TrafficClient::Pod(hub_pods[0].clone()), &url)
            .await?;
        let outcome = match answer {
            Ok(answer) => Err(format!("answered by {}", answer.pod)),
            Err(error) => Ok(error),
        };
        self.check(&format!("{HUB} -> {url} is not answered"), outcome);

        self.title("the Peers of the tenants in the hub: only WireGuard addresses");
        let columns = "custom-columns=NAME:.metadata.name,ALLOWED IPS:.spec.allowedIPs";
        println!("{}", hub.kubectl(["get", "peers", "-o", columns]).await?.stdout);
        println!(
            "  shown: two tenants with equal networks use the pods and Services of one hub at the same time; each one's own
  traffic stays inside. Other members reach no pod of a masqueraded tenant; its Services only through
  gateways in it (`cargo xtask test mesh equal` shows that)."
        );
        Ok(())
    }
}
