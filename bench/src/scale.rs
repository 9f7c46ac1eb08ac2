//! `cargo xtask bench scale`: measures what one agent at rest receives from the API server of a large cluster. The API server is
//! real. The benchmark creates the Nodes and writes each Node's status once in five minutes, as a kubelet does.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::Context;
use clustermesh_lab::{Running, wait_until};
use clustermesh_tests::{
    agent::agent_program,
    test_env::{LATER, TestEnv},
};
use futures::{StreamExt, TryStreamExt, stream};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use xtask::{prereq, programs};

use crate::report;

const CLUSTER: &str = "mgmt";
/// The node of the agent.
const ME: &str = "n0000";
/// How often a kubelet writes the status of its Node if nothing changes (`nodeStatusReportFrequency`).
const STATUS_PERIOD: Duration = Duration::from_secs(300);
/// Number of objects that are created at the same time.
const CONCURRENCY: usize = 8;
/// The number of images in a Node's status. With this number, a Node in JSON has about 30 kB.
const IMAGES: u16 = 85;

/// Arguments of `cargo xtask bench scale`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Nodes of the cluster.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    nodes: u16,
    /// How long traffic is counted.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Measure this program of wg-agent and build none.
    #[arg(long)]
    agent: Option<PathBuf>,
    #[command(flatten)]
    prereq: prereq::Prereq,
}

/// Runs the benchmark and prints the results.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    prereq::ensure(&args.prereq)?;
    if args.agent.is_none() {
        programs::build()?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(measure(args))
}

async fn measure(args: &Args) -> anyhow::Result<()> {
    let env = TestEnv::start(&[CLUSTER]).await;
    let client = env.client(CLUSTER).await;
    eprintln!("{} Nodes", args.nodes);
    let created = stream::iter(0..args.nodes).map(|n| create_node(&client, n));
    created.buffer_unordered(CONCURRENCY).try_collect::<()>().await?;
    let node = api(&client, "", "v1", "Node", "nodes").get(ME).await?;
    let size = serde_json::to_string(&node)?.len();

    let host = env.lab.add_host(ME, "172.30.1.11".parse()?).await?;
    let program = args
        .agent
        .as_ref()
        .map_or_else(|| agent_program().to_owned(), |path| path.display().to_string());
    host.exec([&program, "prepare"]).await?;
    let files = tempfile::tempdir()?;
    let started = Instant::now();
    let mut agent = start_agent(&env, &program, files.path())?;
    wait_until("the agent to be ready", LATER, async || {
        let words = [
            "curl",
            "-s",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            "http://127.0.0.1:9587/readyz",
        ];
        let answer = host.try_exec(words).await.map_err(|error| error.to_string())?;
        (answer.stdout == "200").then_some(()).ok_or(answer.stdout)
    })
    .await
    .with_context(|| agent.log())?;
    let at_start = received(&env).await?;
    let ready = started.elapsed();

    // Waits until the agent's first writes, and the events that they cause, are over.
    tokio::time::sleep(Duration::from_secs(20)).await;
    let before = received(&env).await?;
    let counted = Instant::now();
    let written = write_statuses(&client, args).await?;
    let bytes = received(&env).await? - before;
    let seconds = counted.elapsed().as_secs_f64();
    agent.terminate(LATER).await?;

    println!("{}", report::Machine::here());
    println!(
        "{} Nodes of {:.1} kB, {written} written in {seconds:.0} s; the agent received {:.2} kB/s ({bytes} bytes in all), and {:.1} MB \
         until it was ready after {:.1} s",
        args.nodes,
        size as f64 / 1000.0,
        bytes as f64 / seconds / 1000.0,
        at_start as f64 / 1e6,
        ready.as_secs_f64(),
    );
    Ok(())
}

fn start_agent(env: &TestEnv, program: &str, files: &std::path::Path) -> anyhow::Result<Running> {
    let kubeconfig = files.join("kubeconfig");
    std::fs::write(&kubeconfig, env.lab.cluster(CLUSTER).inside_kubeconfig()?)?;
    let interface = format!("ks{}", std::process::id());
    let words = [
        program.to_owned(),
        format!("--node-name={ME}"),
        format!("--kubeconfig={}", kubeconfig.display()),
        format!("--interface={interface}"),
        "--backend=userspace".to_owned(),
        "--wireguard-cidr=100.66.0.0/16".to_owned(),
        format!("--key-file={}", files.join("key").display()),
        format!("--cache-file={}", files.join("cache").display()),
    ];
    Ok(env.lab.node(ME).spawn("agent", words)?)
}

/// Bytes that the host of the agent has received, with all headers. It has no other connections than those to the API server.
async fn received(env: &TestEnv) -> anyhow::Result<u64> {
    let words = ["ip", "-s", "-j", "link", "show", "eth0"];
    let shown = env.lab.node(ME).exec(words).await?;
    let links: Value = serde_json::from_str(&shown.stdout)?;
    links[0]["stats64"]["rx"]["bytes"].as_u64().context("a counter")
}

fn api(client: &Client, group: &str, version: &str, kind: &str, plural: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk(group, version, kind);
    Api::all_with(client.clone(), &ApiResource::from_gvk_with_plural(&kind, plural))
}

fn conditions(heartbeat: u64) -> Value {
    let types = ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"];
    types
        .map(|condition| {
            json!({
                "type": condition, "status": if condition == "Ready" { "True" } else { "False" }, "reason": "KubeletHasNoProblem",
                "message": "kubelet is posting its status",
                "lastHeartbeatTime": format!("2026-01-01T{:02}:{:02}:{:02}Z", heartbeat / 3600 % 24, heartbeat / 60 % 60, heartbeat % 60),
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            })
        })
        .into_iter()
        .collect()
}

/// Creates a Node as a kubelet and an agent write it, and its CSINode.
async fn create_node(client: &Client, n: u16) -> anyhow::Result<()> {
    let name = format!("n{n:04}");
    let (high, low) = (n / 250, n % 250 + 1);
    let pods = format!("10.{}.{low}.0/24", high + 100);
    let nodes = api(client, "", "v1", "Node", "nodes");
    let mut node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"},
            "annotations": {"node.alpha.kubernetes.io/ttl": "0", "volumes.kubernetes.io/controller-managed-attach-detach": "true"},
        },
        "spec": {"podCIDR": pods, "podCIDRs": [pods]},
    });
    // The agent's own Node gets a WireGuard address, too, as if the agent had run before. Otherwise the agent would take a new
    // address and list all Nodes once more.
    node["metadata"]["annotations"]["kilo.squat.ai/wireguard-ip"] = json!(format!("100.66.{}.{low}/16", high + 100));
    let images: Vec<Value> = (0..IMAGES)
        .map(|image| {
            let digest: String = (0..8).map(|part| format!("{:08x}", (u32::from(image * 8 + part)).wrapping_mul(2_654_435_761))).collect();
            let image = format!("registry.example.org/platform/components/application-{image:03}");
            json!({"names": [format!("{image}@sha256:{digest}"), format!("{image}:v1.{n}.3"), format!("{image}:stable")], "sizeBytes": 123_456_789})
        })
        .collect();
    let address = if name == ME {
        "172.30.1.11".to_owned()
    } else {
        format!("172.31.{high}.{low}")
    };
    let status = json!({"status": {
        "addresses": [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}],
        "capacity": {"cpu": "8", "memory": "32Gi", "pods": "110"}, "allocatable": {"cpu": "8", "memory": "32Gi", "pods": "110"},
        "conditions": conditions(0), "images": images,
        "nodeInfo": {
            "architecture": "amd64", "bootID": "b", "containerRuntimeVersion": "containerd://2.1.4", "kernelVersion": "6.12.43+deb13-amd64",
            "kubeProxyVersion": "", "kubeletVersion": "v1.34.1", "machineID": "m", "operatingSystem": "linux",
            "osImage": "Debian GNU/Linux 13 (trixie)", "systemUUID": "u",
        },
    }});
    nodes
        .create(&PostParams::default(), &serde_json::from_value(node)?)
        .await?;
    let params = PatchParams::default();
    nodes.patch_status(&name, &params, &Patch::Merge(&status)).await?;
    let csi = json!({"apiVersion": "storage.k8s.io/v1", "kind": "CSINode", "metadata": {"name": name}, "spec": {"drivers": []}});
    let csi_nodes = api(client, "storage.k8s.io", "v1", "CSINode", "csinodes");
    csi_nodes
        .create(&PostParams::default(), &serde_json::from_value(csi)?)
        .await?;
    Ok(())
}

/// Writes the status of one Node after the other, for the time of the measurement. Returns the number of writes.
async fn write_statuses(client: &Client, args: &Args) -> anyhow::Result<u64> {
    let nodes = api(client, "", "v1", "Node", "nodes");
    let mut ticks = tokio::time::interval(STATUS_PERIOD / u32::from(args.nodes));
    let began = Instant::now();
    let mut written = 0;
    while began.elapsed() < Duration::from_secs(args.seconds) {
        ticks.tick().await;
        let name = format!("n{:04}", written % u64::from(args.nodes));
        let status = json!({"status": {"conditions": conditions(written + 1)}});
        let params = PatchParams::default();
        nodes.patch_status(&name, &params, &Patch::Merge(&status)).await?;
        written += 1;
    }
    Ok(written)
}
