//! `cargo xtask demo --scenario kilo`: connects two clusters that Kilo serves and a hub with wg-agent.

use std::time::Instant;

use clustermesh_lab::{Granularity, Kilo, LabPlan, Product, TrafficClient, Tunnel};

use super::{Demo, EGRESS, HUB, MEMBER, describe};

/// The member whose nodes are in two locations.
const LOCATIONS: &str = "tenant-b";

const TOPOLOGY: &str = "
   mgmt: wg-agent   tenant-a: Kilo, a tunnel       tenant-b: Kilo, a tunnel between the leaders
                    between every two nodes        of two locations
                                                   east                         west
   mgmt-1           tenant-a-1   tenant-a-2        tenant-b-1   tenant-b-2      tenant-b-3
      |                 |            |                 |            |               |
   ===+=================+============+=================+============+===============+===== underlay 172.30.0.0/16
";

/// The hub, and two members that Kilo serves.
pub(super) fn plan() -> LabPlan {
    LabPlan::clusters(&[(HUB, 1), (MEMBER, 2), (LOCATIONS, 3)])
}

impl Demo<'_> {
    /// Runs the scenario.
    pub(super) async fn kilo(&mut self) -> anyhow::Result<()> {
        println!("{TOPOLOGY}");
        let kilo = Kilo::new(self.lab)?;
        let members = [(MEMBER, Granularity::Full), (LOCATIONS, Granularity::Location)];
        self.title("install: Kilo in the members, clustermesh-controller and wg-agent in the hub");
        for (node, region) in [("tenant-b-1", "east"), ("tenant-b-2", "east"), ("tenant-b-3", "west")] {
            let label = format!("topology.kubernetes.io/region={region}");
            self.lab
                .cluster(LOCATIONS)
                .kubectl(["label", "node", node, &label])
                .await?;
        }
        for (name, granularity) in members {
            println!("  {name}: kg --mesh-granularity={}", granularity.as_str());
            kilo.install(&self.lab.cluster(name), granularity).await?;
        }
        let clusters = [HUB, MEMBER, LOCATIONS];
        let report = |line: &str| println!("  {line}");
        let product = Product::install_with_agents_in(self.lab, &clusters, &[HUB], Tunnel::Shipped, &report).await?;
        let mut pods = Vec::new();
        for name in clusters {
            pods.extend(self.lab.cluster(name).run_web_on_each_node().await?);
        }

        self.title("one ClusterMesh");
        let mesh = product.mesh_with_kilo(&[MEMBER, LOCATIONS], &[(MEMBER, EGRESS)]);
        println!("{mesh}");
        product.hub().apply(&mesh).await?;

        self.title("every pod reaches every pod of the other clusters");
        let applied = Instant::now();
        for from in &pods {
            for to in &pods {
                let [ours, theirs] = [from, to].map(|pod| self.lab.node(&pod.node).cluster().plan().name.clone());
                if ours == theirs {
                    continue;
                }
                let client = TrafficClient::Pod(from.clone());
                let url = format!("http://{}:8080", to.ip);
                let outcome = match self.lab.http_get_until_answered(&client, &url).await {
                    Ok(answer) if answer.pod == to.name => describe(Ok(answer)),
                    other => Err(describe(other).unwrap_or_else(|error| error)),
                };
                self.check(&format!("{} -> {}", from.node, to.node), outcome);
            }
        }
        println!("  {:.1} s after kubectl apply", applied.elapsed().as_secs_f64());

        self.title("a Service of the hub under its mirrored name in tenant-a");
        let member = self.lab.cluster(MEMBER);
        self.check_mirrored_service(&member, &member.web_pods().await?).await?;

        self.title("the Peers in each cluster, and what kg publishes");
        let columns =
            "custom-columns=NAME:.metadata.name,ALLOWED IPS:.spec.allowedIPs,ENDPOINT:.spec.endpoint.dnsOrIP.ip";
        let published = "custom-columns=NAME:.metadata.name,WIREGUARD:.metadata.annotations.kilo\\.squat\\.ai/wireguard-ip,\
                         GRANULARITY:.metadata.annotations.kilo\\.squat\\.ai/granularity";
        for name in clusters {
            println!("$ kubectl --context {name} get peers");
            let cluster = self.lab.cluster(name);
            println!("{}", cluster.kubectl(["get", "peers", "-o", columns]).await?.stdout);
            println!("$ kubectl --context {name} get nodes");
            println!("{}", cluster.kubectl(["get", "nodes", "-o", published]).await?.stdout);
        }
        println!(
            "  shown: clusters of kg and of wg-agent are one mesh. `cargo xtask test mesh kilo` also restarts kg, kills a leader, \
             moves a node to another location, and runs wg-agent in policy mode on nodes that kg serves."
        );
        Ok(())
    }
}
