//! `cargo xtask demo --scenario locations`: the nodes of one member are in a datacenter behind a NAT and in two clouds.

use std::time::Instant;

use clustermesh_lab::{LabPlan, NatKind, Product, RunningPod, TrafficClient, Tunnel};

use super::{Demo, HUB, MEMBER, describe};

const LAN: &str = "192.168.1.0/24";
/// The location of each node of the member.
const LOCATIONS: [(&str, &str); 4] = [
    ("tenant-a-1", "datacenter"),
    ("tenant-a-2", "datacenter"),
    ("tenant-a-3", "cloud-a"),
    ("tenant-a-4", "cloud-b"),
];

const TOPOLOGY: &str = "
   mgmt                tenant-a, one cluster: pods 10.20.0.0/16, Services 10.21.0.0/16
                       datacenter 192.168.1.0/24     cloud-a           cloud-b
   mgmt-1              tenant-a-1   tenant-a-2       tenant-a-3        tenant-a-4
      |                     |            |               |                 |
      |                    [NAT 172.30.2.2]              |                 |
      |                     |                            |                 |
   ===+=====================+============================+=================+===== underlay 172.30.0.0/16
";

/// The hub, and a tenant with nodes in three locations.
pub(super) fn plan() -> LabPlan {
    let nat = NatKind::EndpointIndependent { first_port: 40001 };
    LabPlan::clusters(&[(HUB, 1), (MEMBER, 4)]).with_nat_for(2, MEMBER, LAN, nat)
}

impl Demo<'_> {
    /// Runs the scenario.
    pub(super) async fn locations(&mut self) -> anyhow::Result<()> {
        println!("{TOPOLOGY}");
        let [hub, member] = [HUB, MEMBER].map(|name| self.lab.cluster(name));
        self.title("install: crds/ and deploy/, as README.md describes");
        let product = Product::install(self.lab, &[HUB, MEMBER], Tunnel::Shipped, &|line| println!("  {line}")).await?;
        for (node, location) in LOCATIONS {
            let label = format!("topology.kubernetes.io/region={location}");
            member.kubectl(["label", "node", node, &label]).await?;
        }
        let hub_pods = hub.run_web().await?;
        let pods = member.run_web_on_each_node().await?;

        self.title("without the mesh: the datacenter's own network works, the clouds are out of reach");
        let [one, two, in_cloud_a, ..] = &pods[..] else {
            anyhow::bail!("no web server on each node of {MEMBER}");
        };
        for (to, is_reached) in [(two, true), (in_cloud_a, false)] {
            let url = format!("http://{}:8080", to.ip);
            let answer = self.lab.http_get(&TrafficClient::Pod(one.clone()), &url).await?;
            let outcome = match answer {
                Ok(answer) if is_reached => describe(Ok(answer)),
                Err(error) if !is_reached => Ok(error),
                other => Err(format!("{other:?}")),
            };
            let expected = if is_reached { "" } else { " is not answered" };
            self.check(&format!("{} -> {}{expected}", one.node, to.node), outcome);
        }

        self.title("one ClusterMesh; the tenant's entry has `locations: Connected`");
        let member_line = format!("  - name: {MEMBER}\n");
        let mesh = product.mesh(&[]);
        let mesh = mesh.replace(&member_line, &format!("{member_line}    locations: Connected\n"));
        println!("{mesh}");
        let applied = Instant::now();
        product.mesh_up(&mesh).await?;
        println!("  Ready {:.1} s after kubectl apply", applied.elapsed().as_secs_f64());

        self.title("pods of every location reach those of every other, with their own address");
        for from in &pods {
            for to in pods.iter().filter(|to| to.node != from.node) {
                self.check_keeps_address(from, to).await;
            }
        }

        self.title("the routes of a node in the datacenter and of one in a cloud");
        for from in [one, in_cloud_a] {
            for to in pods.iter().filter(|to| to.node != from.node) {
                let node = self.lab.node(&from.node);
                let route = node.exec(["ip", "route", "get", &to.ip.to_string()]).await?;
                let route = route.stdout.lines().next().unwrap_or_default().to_owned();
                println!("  {} -> pod on {}: {route}", from.node, to.node);
            }
        }

        self.title("every location reaches the hub");
        for from in &pods {
            self.check_keeps_address(from, &hub_pods[0]).await;
        }

        self.title("kubectl exec, from the API server to the node of each pod");
        for pod in &pods {
            let output = member.try_kubectl(["exec", &pod.name, "--", "true"]).await?;
            let outcome = if output.status.success() {
                Ok("done".to_owned())
            } else {
                Err(output.stderr)
            };
            self.check(&pod.node, outcome);
        }

        self.title("the Peers of the tenant's own nodes in the tenant");
        let columns = "custom-columns=NAME:.metadata.name,\
                       LOCATION:.metadata.annotations.kilo-clustermesh\\.io/location,ALLOWED IPS:.spec.allowedIPs,\
                       ENDPOINT:.spec.endpoint.dnsOrIP.ip,PORT:.spec.endpoint.port";
        println!("{}", member.kubectl(["get", "peers", "-o", columns]).await?.stdout);
        println!(
            "  shown: the nodes of one cluster in three locations reach each other's pods, encrypted between the locations; \
             inside a location they use its own network. With `cargo xtask test mesh locations` also: Services, node addresses, \
             a node that is moved to another location."
        );
        Ok(())
    }

    async fn check_keeps_address(&mut self, from: &RunningPod, to: &RunningPod) {
        let client = TrafficClient::Pod(from.clone());
        let url = format!("http://{}:8080", to.ip);
        let outcome = match self.lab.http_get_until_answered(&client, &url).await {
            Ok(answer) if answer.client_ip == from.ip => describe(Ok(answer)),
            other => Err(describe(other).unwrap_or_else(|error| error)),
        };
        self.check(&format!("{} -> {}", from.node, to.node), outcome);
    }
}
