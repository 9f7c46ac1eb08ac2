//! `cargo xtask demo`: connects two or three whole clusters into one mesh, and checks each step with real traffic.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::bail;
use clustermesh_lab::{Cluster, Kilo, Lab, LabPlan, Product, RunningPod, TrafficClient, Tunnel, down_all, wait_until};
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams},
};
use tokio::signal::unix::{SignalKind, signal};
use xtask::{prereq, programs};

mod equal_cidrs;
mod failover;
mod kilo;
mod kubevirt;
mod locations;
mod nat;
mod sandbox;

const HUB: &str = "mgmt";
const MEMBER: &str = "tenant-a";
/// The grant of the hub's Service `web` to tenant-a, where it is mirrored as `hub-web`.
const EGRESS: &str =
    "[{service: {cluster: mgmt, namespace: default, name: web}, as: {namespace: default, name: hub-web}}]";

/// Arguments of `cargo xtask demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The scenario to run.
    #[arg(long, value_enum, default_value = "mesh")]
    scenario: Scenario,
    /// Keep the clusters running at the end, and print how to access them.
    #[arg(long)]
    keep: bool,
    /// Remove the clusters of an earlier `--keep`.
    #[arg(long, conflicts_with = "keep")]
    down: bool,
    #[command(flatten)]
    prereq: prereq::Prereq,
}

/// A scenario of the demo.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Scenario {
    /// Connects two clusters into one mesh.
    Mesh,
    /// Adds a third cluster for untrusted code, which reaches only the Service that is granted to it.
    Sandbox,
    /// Connects two tenants, whose nodes are behind NATs, to each other and to the hub.
    Nat,
    /// Connects two tenants that have equal pod and Service networks to one hub.
    EqualCidrs,
    /// Connects the nodes of one tenant in a datacenter and two clouds.
    Locations,
    /// Connects a tenant whose workers are pods of the hub, and moves one of them to another node of the hub.
    #[value(name = "kubevirt")]
    KubeVirt,
    /// Kills the leader of the controller's replicas, and stops and starts the hub's API server, while packets flow.
    Failover,
    /// Connects the hub and two clusters that Kilo serves. KG_BIN must contain the path of Kilo's program kg.
    Kilo,
}

/// Runs the demo. At its end the clusters are removed, unless `--keep` is set. After Ctrl-C, SIGTERM or SIGKILL they are removed in any
/// case: the lab's supervisor process does it.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.down {
        println!("{} lab(s) taken down", down_all()?);
        return Ok(());
    }
    prereq::ensure(&args.prereq)?;
    let programs = programs::build()?;
    println!("programs: {}", programs.display());
    tokio::runtime::Runtime::new()?.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            done = run_scenario(args.scenario, args.keep) => done,
            _ = tokio::signal::ctrl_c() => bail!("interrupted; everything is taken down"),
            _ = terminate.recv() => bail!("terminated; everything is taken down"),
        }
    })
}

struct Demo<'a> {
    start: Instant,
    lab: &'a Lab,
    failed: Vec<String>,
}

async fn run_scenario(scenario: Scenario, keep: bool) -> anyhow::Result<()> {
    let start = Instant::now();
    let print_step = |line: &str| println!("[{:6.1} s] {line}", start.elapsed().as_secs_f64());
    let plan = match scenario {
        Scenario::Mesh => LabPlan::clusters(&[(HUB, 2), (MEMBER, 2)]),
        Scenario::Sandbox => sandbox::plan(),
        Scenario::Nat => nat::plan(),
        Scenario::EqualCidrs => equal_cidrs::plan(),
        Scenario::Locations => locations::plan(),
        Scenario::KubeVirt => kubevirt::plan(),
        Scenario::Failover => failover::plan(),
        Scenario::Kilo => {
            Kilo::program()?;
            kilo::plan()
        }
    };
    let mut lab = Lab::start_with(plan, &print_step).await?;
    let result = {
        let mut demo = Demo {
            start,
            lab: &lab,
            failed: Vec::new(),
        };
        let outcome = match scenario {
            Scenario::Mesh => demo.run().await,
            Scenario::Sandbox => demo.sandbox().await,
            Scenario::Nat => demo.nat().await,
            Scenario::EqualCidrs => demo.equal_cidrs().await,
            Scenario::Locations => demo.locations().await,
            Scenario::KubeVirt => demo.kubevirt().await,
            Scenario::Failover => demo.failover().await,
            Scenario::Kilo => demo.kilo().await,
        };
        outcome.and_then(|()| match demo.failed.as_slice() {
            [] => Ok(()),
            failed => bail!("{} check(s) failed:\n  {}", failed.len(), failed.join("\n  ")),
        })
    };
    if keep {
        lab.keep()?;
        println!(
            "\nEverything keeps running until `cargo xtask demo --down`.\n{}",
            lab.access_hint()
        );
    } else {
        lab.down()?;
        println!("\ntaken down; nothing is left");
    }
    result
}

impl<'a> Demo<'a> {
    fn title(&self, text: &str) {
        println!("\n=== [{:6.1} s] {text}", self.start.elapsed().as_secs_f64());
    }

    fn check(&mut self, what: &str, outcome: Result<String, String>) {
        match outcome {
            Ok(seen) => println!("  ok    {what}: {seen}"),
            Err(why) => {
                println!("  FAIL  {what}: {why}");
                self.failed.push(format!("{what}: {why}"));
            }
        }
    }

    async fn run(&mut self) -> anyhow::Result<()> {
        let (hub, member) = (self.lab.cluster(HUB), self.lab.cluster(MEMBER));
        self.title("install: crds/ and deploy/, as README.md describes");
        let product = Product::install(self.lab, &[HUB, MEMBER], Tunnel::Shipped, &|line| println!("  {line}")).await?;
        let (hub_pods, member_pods) = (hub.run_web().await?, member.run_web().await?);

        self.title("one ClusterMesh");
        let mesh = product.mesh(&[(MEMBER, EGRESS)]);
        println!("{mesh}");
        let applied = Instant::now();
        product.mesh_up(&mesh).await?;
        println!("  Ready {:.1} s after kubectl apply", applied.elapsed().as_secs_f64());

        self.title("pod -> pod across the clusters, HTTP and ping, both directions");
        let capture = self.lab.capture("demo", "ip").await?;
        self.check_pods(&hub_pods, &member_pods).await?;
        self.check_pods(&member_pods, &hub_pods).await?;

        self.title("pod -> remote Service by its mirrored name, balanced by the importing cluster's own kube-proxy");
        self.check_mirrored_service(&member, &member_pods).await?;

        self.title("pod -> remote ClusterIP through the anchor");
        let service = hub.cluster_ip("default", "web").await?;
        for client in &member_pods {
            let from = TrafficClient::Pod(client.clone());
            let answer = self
                .lab
                .http_get_until_answered(&from, &format!("http://{service}"))
                .await;
            self.check(&format!("{from} -> {service}"), describe(answer));
        }

        self.title("captured packets between nodes of different clusters during these steps");
        self.check_capture(capture).await?;

        self.title("a node joins tenant-a");
        let joined = self.join(&member, &hub_pods[0]).await?;
        self.title("the node leaves: power off, Node deleted");
        self.leave(&hub, &member, &joined).await?;

        self.title("the objects in both clusters");
        for cluster in [&hub, &member] {
            let kinds = if cluster.plan().name == HUB {
                "clustermesh,peers"
            } else {
                "peers,services"
            };
            println!("$ kubectl --context {} get {kinds} -A", cluster.plan().name);
            println!("{}", cluster.kubectl(["get", kinds, "-A"]).await?.stdout);
        }
        println!(
            "$ kubectl --context {HUB} -n clustermesh get events --field-selector involvedObject.kind=ClusterMesh"
        );
        let events = [
            "-n",
            "clustermesh",
            "get",
            "events",
            "--field-selector",
            "involvedObject.kind=ClusterMesh",
        ];
        println!("{}", hub.kubectl(events).await?.stdout);
        Ok(())
    }

    async fn check_pods(&mut self, clients: &[RunningPod], servers: &[RunningPod]) -> anyhow::Result<()> {
        for client in clients {
            for server in servers {
                let from = TrafficClient::Pod(client.clone());
                let answer = self
                    .lab
                    .http_get_until_answered(&from, &format!("http://{}:8080", server.ip))
                    .await;
                let outcome = match answer {
                    Ok(answer) if answer.pod == server.name && answer.client_ip == client.ip => {
                        if self.lab.ping(&from, server.ip).await? {
                            Ok(format!(
                                "answered by {}, which saw {}; ping ok",
                                answer.pod, answer.client_ip
                            ))
                        } else {
                            Err("NO PING".to_owned())
                        }
                    }
                    Ok(other) => Err(format!("answered by {}, which saw {}", other.pod, other.client_ip)),
                    Err(error) => Err(error.to_string()),
                };
                self.check(
                    &format!("{} on {} -> {} on {}", client.ip, client.node, server.ip, server.node),
                    outcome,
                );
            }
        }
        Ok(())
    }

    async fn check_mirrored_service(&mut self, member: &Cluster<'_>, clients: &[RunningPod]) -> anyhow::Result<()> {
        for client in clients {
            let mut seen: BTreeMap<String, usize> = BTreeMap::new();
            let mut error = None;
            for _ in 0..6 {
                // Uses the DNS name, as a program in the pod would.
                let url = "http://hub-web.default.svc.cluster.local";
                let words = ["exec", &client.name, "--", "/bin/probe", "get", url];
                let what = format!("{url} to answer {}", client.name);
                let answer = wait_until(what, Duration::from_secs(60), async || {
                    let output = member.try_kubectl(words).await.map_err(|error| error.to_string())?;
                    let answered = output
                        .stdout
                        .split_once("hello from ")
                        .map(|(_, rest)| rest.trim().to_owned());
                    answered.ok_or_else(|| format!("{}{}", output.stdout, output.stderr))
                })
                .await;
                match answer {
                    Ok(text) => {
                        *seen
                            .entry(text.split_once(" to ").map_or(text.clone(), |(who, _)| who.to_owned()))
                            .or_default() += 1
                    }
                    Err(failed) => error = Some(failed.to_string()),
                }
            }
            let seen: Vec<String> = seen.into_iter().map(|(who, times)| format!("{who} x{times}")).collect();
            self.check(
                &format!("{} on {} -> hub-web", client.ip, client.node),
                error.map_or(Ok(seen.join(", ")), Err),
            );
        }
        Ok(())
    }

    async fn check_capture(&mut self, capture: clustermesh_lab::Capture) -> anyhow::Result<()> {
        let captured = capture.stop().await?;
        let [hub, member] = [HUB, MEMBER].map(|name| self.lab.cluster(name).plan().clone());
        let nodes_or_wireguard = format!(
            "(net {0} and net {1}) or net {2} or net {3}",
            hub.underlay, member.underlay, hub.wireguard_cidr, member.wireguard_cidr
        );
        // Connections to API servers, such as the controller's to the member, use the underlay, not the mesh.
        let api = format!("host {} or host {}", hub.api_address(), member.api_address());
        let tunnel_packets = captured
            .packets(&format!("udp port 51820 and ({nodes_or_wireguard}) and not ({api})"))
            .await?
            .len();
        let pod_to_pod = format!(
            "((src net {0} and dst net {1}) or (src net {1} and dst net {0}))",
            hub.pod_cidr, member.pod_cidr
        );
        let unencrypted = captured
            .packets(&format!(
                "not udp port 51820 and not ({api}) and (({nodes_or_wireguard}) or {pod_to_pod})"
            ))
            .await?;
        let outcome = match (tunnel_packets, unencrypted.as_slice()) {
            (0, _) => Err("no WireGuard packet was captured".to_owned()),
            (_, []) => Ok(format!("{tunnel_packets} packets, all of them WireGuard")),
            (_, [first, ..]) => Err(format!("{} unencrypted packets, first: {first}", unencrypted.len())),
        };
        self.check("the underlay", outcome);
        Ok(())
    }

    async fn join(&mut self, member: &Cluster<'a>, server: &RunningPod) -> anyhow::Result<String> {
        let node = member.join_node().await?;
        let name = node.name().to_owned();
        let published_at = wait_until(
            format!("{name} to publish its key"),
            Duration::from_secs(90),
            async || {
                let words = [
                    "get",
                    "node",
                    &name,
                    "-o",
                    "jsonpath={.metadata.annotations.kilo\\.squat\\.ai/key}",
                ];
                let key = member
                    .try_kubectl(words)
                    .await
                    .map_err(|error| error.to_string())?
                    .stdout;
                if key.is_empty() {
                    Err("no annotation yet".to_owned())
                } else {
                    Ok(Instant::now())
                }
            },
        )
        .await?;
        let from = TrafficClient::Host(name.clone());
        let url = format!("http://{}:8080", server.ip);
        let answer = self.lab.http_get_until_answered(&from, &url).await;
        let after = published_at.elapsed();
        let outcome =
            describe(answer).map(|seen| format!("{seen}; {:.2} s after its annotations", after.as_secs_f64()));
        self.check(&format!("{name} -> {url}"), outcome);
        Ok(name)
    }

    async fn leave(&mut self, hub: &Cluster<'_>, member: &Cluster<'_>, name: &str) -> anyhow::Result<()> {
        self.lab.node(name).power_cut().await?;
        member.kubectl(["delete", "node", name]).await?;
        let deleted = Instant::now();
        let kind = GroupVersionKind::gvk("kilo.squat.ai", "v1alpha1", "Peer");
        let resource = ApiResource::from_gvk_with_plural(&kind, "peers");
        let peers: Api<DynamicObject> = Api::all_with(hub.client().await?, &resource);
        let deletion = wait_until(
            format!("the deletion of the Peers of {name}"),
            Duration::from_secs(60),
            async || {
                let list = peers
                    .list(&ListParams::default())
                    .await
                    .map_err(|error| error.to_string())?;
                let left: Vec<String> = list
                    .iter()
                    .map(ResourceExt::name_any)
                    .filter(|peer| peer.ends_with(name))
                    .collect();
                if left.is_empty() { Ok(()) } else { Err(left.join(", ")) }
            },
        )
        .await;
        let outcome = deletion.map(|()| format!("deleted {:.2} s after the Node", deleted.elapsed().as_secs_f64()));
        self.check(&format!("Peers of {name}"), outcome.map_err(|error| error.to_string()));
        Ok(())
    }
}

fn describe(answer: clustermesh_lab::Result<clustermesh_lab::Answer>) -> Result<String, String> {
    let answer = answer.map_err(|error| error.to_string())?;
    Ok(format!(
        "answered by {} on {}, which saw {}",
        answer.pod, answer.node, answer.client_ip
    ))
}
