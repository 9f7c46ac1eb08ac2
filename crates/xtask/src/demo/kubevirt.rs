//! `cargo xtask demo --scenario kubevirt`: the workers of a tenant are pods of the hub, as with KubeVirt. They use the hub through the
//! tunnel, and each other by the hub's pod network; one moves to another node of the hub while packets flow.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clustermesh_lab::{LabPlan, Product, RunningPod, TrafficClient, Tunnel};

use super::{Demo, HUB, MEMBER, describe};

const WORKERS: [&str; 2] = ["tenant-a-1", "tenant-a-2"];
const MTU: u16 = 1400;
/// The UDP port of the echo server in a pod.
const ECHO_PORT: u16 = 9091;

const TOPOLOGY: &str = "
   tenant-a                tenant-a-1                               tenant-a-2
   pods 10.20.0.0/16       eth0 10.10.201.11                        eth0 10.10.201.12      <- addresses of hub pods
                                |                                        |
   mgmt                      mgmt-1 --- VXLAN, pods 10.10.0.0/16 --- mgmt-2
   172.30.1.0/24                |                                        |
   =============================+========================================+==== underlay 172.30.0.0/16

   API server of tenant-a: 10.11.0.101, a ClusterIP of mgmt.   Resolver of its workers: 10.11.0.10, the DNS of mgmt.
";

/// The hub, and a tenant whose workers are pods on the hub's two nodes.
pub(super) fn plan() -> LabPlan {
    LabPlan::clusters(&[(HUB, 2), (MEMBER, 2)])
        .with_vxlan(HUB)
        .with_workers_in_pods(MEMBER, HUB, &[1, 2])
}

impl Demo<'_> {
    /// Runs the scenario.
    pub(super) async fn kubevirt(&mut self) -> anyhow::Result<()> {
        println!("{TOPOLOGY}");
        let (hub, member) = (self.lab.cluster(HUB), self.lab.cluster(MEMBER));
        self.title("install: crds/ and deploy/, as README.md describes");
        let product = Product::install(self.lab, &[HUB, MEMBER], Tunnel::Shipped, &|line| println!("  {line}")).await?;
        let (hub_pods, pods) = (hub.run_web().await?, member.run_web().await?);

        self.title(
            "one ClusterMesh; endpointNetworks lets the workers' addresses, inside the hub's pod network, be endpoints",
        );
        let mesh = product.mesh(&[]);
        println!("{mesh}");
        let applied = Instant::now();
        product.mesh_up(&mesh).await?;
        println!("  Ready {:.1} s after kubectl apply", applied.elapsed().as_secs_f64());

        self.title("the hub and the tenant through the tunnel, both directions");
        self.check_pods(&pods, &hub_pods).await?;
        self.check_pods(&hub_pods, &pods).await?;

        self.title("the two workers, and their pods, by the hub's pod network; a capture at eth0 shows no WireGuard between them");
        self.check_siblings(&pods).await?;

        self.title("the API server and the resolver of a worker, both with addresses of the hub, without the tunnel");
        let from = TrafficClient::Host(WORKERS[0].to_owned());
        for words in [
            &["curl", "-sSk", "-m", "5", "https://10.11.0.101:6443/readyz"][..],
            &["busybox", "nslookup", "web.default.svc.cluster.local"],
        ] {
            let output = self.lab.run_at(&from, words).await?;
            let last = output.stdout.lines().rfind(|line| !line.is_empty()).unwrap_or_default();
            let outcome = if output.status.success() {
                Ok(last.to_owned())
            } else {
                Err(output.stderr.clone())
            };
            self.check(&format!("{from}: {}", words.join(" ")), outcome);
        }

        self.title("tenant-a-1 moves from mgmt-1 to mgmt-2 and keeps its address; a datagram every 10 ms");
        self.check_migration(&hub_pods[0], &pods[0]).await?;

        self.title("the MTU of the hub's pod network falls from 1450 to 1400; the tunnel's follows: 60 bytes less");
        self.lab.set_pod_mtu(HUB, MTU).await?;
        self.check_mtu(&hub_pods[0], &pods[0]).await?;

        println!(
            "
  shown: workers in the hub's pod network reach the hub's pods through the tunnel; they reach each other, their API server and
  the resolver without it; a live migration interrupts flows for a moment; the tunnel follows the MTU.
  Not shown: KubeVirt itself. The workers are network namespaces in the place of virtual machines."
        );
        Ok(())
    }

    async fn check_siblings(&mut self, pods: &[RunningPod]) -> anyhow::Result<()> {
        let worker = self.lab.node(WORKERS[0]);
        let capture = worker.capture("siblings", "ip").await?;
        let from = TrafficClient::Host(WORKERS[0].to_owned());
        let sibling = self.lab.node(WORKERS[1]).address();
        let answered = self.lab.ping(&from, sibling).await?;
        let outcome = answered
            .then(|| "answered".to_owned())
            .ok_or_else(|| "not answered".to_owned());
        self.check(&format!("ping {} -> {sibling}", worker.address()), outcome);
        let (client, server) = (TrafficClient::Pod(pods[0].clone()), &pods[1]);
        let url = format!("http://{}:8080", server.ip);
        let answer = self.lab.http_get_until_answered(&client, &url).await;
        self.check(&format!("{client} -> {url}"), describe(answer));
        let captured = capture.stop().await?;
        let between = captured.packets(&format!("host {sibling}")).await?.len();
        let outcome = match captured
            .packets(&format!("host {sibling} and udp port 51820"))
            .await?
            .len()
        {
            0 if between > 0 => Ok(format!("{between} packets, none of them WireGuard")),
            wireguard => Err(format!("{between} packets, {wireguard} of them WireGuard")),
        };
        self.check("between the workers", outcome);
        Ok(())
    }

    async fn check_migration(&mut self, from: &RunningPod, to: &RunningPod) -> anyhow::Result<()> {
        let probe = self.lab.probe_program()?;
        let node = self.lab.node(&to.node);
        let mut echo = node.pod_spawn("echo", to.ip, [&*probe, "udp-echo", &format!(":{ECHO_PORT}")])?;
        echo.wait_for_log("echoing on", Duration::from_secs(20)).await?;
        let watch = self
            .lab
            .watch_udp(&TrafficClient::Pod(from.clone()), (to.ip, ECHO_PORT).into())?;
        watch.wait_for_echo_after(0).await?;
        let unix_millis = || {
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map(|since| since.as_millis())
        };
        let began = unix_millis()?;
        self.lab.migrate(WORKERS[0], "mgmt-2").await?;
        // An echo in the first 100 ms after the move does not count: its packet may have been sent before the end of the move.
        let outcome = watch.wait_for_echo_after(unix_millis()? + 100).await;
        let outcome = outcome.map(|_| {
            let times = watch.echo_times();
            let gaps = times
                .windows(2)
                .filter(|pair| pair[1] > began)
                .map(|pair| pair[1] - pair[0]);
            format!("no echo for {} ms, the move included", gaps.max().unwrap_or_default())
        });
        self.check(
            &format!("{} -> {} during the move", from.ip, to.ip),
            outcome.map_err(|error| error.to_string()),
        );
        self.check_pods(std::slice::from_ref(from), std::slice::from_ref(to))
            .await
    }

    async fn check_mtu(&mut self, from: &RunningPod, to: &RunningPod) -> anyhow::Result<()> {
        let node = self.lab.node(WORKERS[0]);
        let tunnel = MTU - 60;
        let followed = clustermesh_lab::wait_until("the tunnel's MTU", Duration::from_secs(60), async || {
            let shown = node
                .exec(["cat", "/sys/class/net/kilo0/mtu"])
                .await
                .map_err(|error| error.to_string())?;
            let mtu = shown.stdout.trim().to_owned();
            if mtu == tunnel.to_string() { Ok(mtu) } else { Err(mtu) }
        });
        self.check("kilo0 of tenant-a-1", followed.await.map_err(|error| error.to_string()));
        let size = (tunnel - 28).to_string();
        let words = [
            "ping",
            "-n",
            "-c",
            "1",
            "-W",
            "3",
            "-M",
            "do",
            "-s",
            &size,
            &to.ip.to_string(),
        ];
        let output = self.lab.run_at(&TrafficClient::Pod(from.clone()), &words).await?;
        let outcome = if output.status.success() {
            Ok("answered".to_owned())
        } else {
            Err(output.stdout + &output.stderr)
        };
        self.check(
            &format!(
                "a packet of {tunnel} bytes that must not be fragmented (DF), {} -> {}",
                from.ip, to.ip
            ),
            outcome,
        );
        Ok(())
    }
}
