//! `cargo xtask bench churn`: measures how fast the controller follows Nodes that change all the time. Real API servers have the Nodes,
//! as agents would annotate them; no agents and no kubelets run.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::Context;
use clustermesh_lab::Running;
use clustermesh_tests::test_env::{LATER, TestEnv};
use futures::{StreamExt, TryStreamExt, stream};
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DynamicObject, GroupVersionKind},
    runtime::{WatchStreamExt, watcher},
};
use xtask::{prereq, programs};

use crate::{cpu, report};

const CLUSTERS: [&str; 3] = ["mgmt", "tenant-a", "tenant-b"];
/// Number of Nodes that are created at the same time.
const CONCURRENCY: usize = 16;
/// Port of the endpoint that the first event sets; each event has its own port.
const FIRST_PORT: u16 = 20_000;
/// The annotation that an event changes: the endpoint of a Node, which a person names.
const ENDPOINT: &str = "kilo.squat.ai/force-endpoint";

/// Arguments of `cargo xtask bench churn`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Nodes of each of the three clusters.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u8).range(1..=250))]
    nodes: u8,
    /// Changed Nodes per second.
    #[arg(long, default_value_t = 10)]
    rate: u16,
    /// How long Nodes change.
    #[arg(long, default_value_t = 60)]
    seconds: u16,
    #[command(flatten)]
    prereq: prereq::Prereq,
}

/// When the Peer of each event was first seen, by cluster and port.
type Seen = Arc<Mutex<BTreeMap<(&'static str, u16), Instant>>>;

/// Runs the benchmark and prints the results.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    prereq::ensure(&args.prereq)?;
    programs::build_optimised()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(measure(args))
}

async fn measure(args: &Args) -> anyhow::Result<()> {
    let events = u32::from(args.rate) * u32::from(args.seconds);
    anyhow::ensure!(
        (1..=40_000).contains(&events),
        "--rate times --seconds must be from 1 to 40,000: each event has a port of its own"
    );
    let env = TestEnv::start(&CLUSTERS).await;
    eprintln!("{} Nodes in each of {} clusters", args.nodes, CLUSTERS.len());
    let nodes = (1_u8..)
        .zip(CLUSTERS)
        .flat_map(|(m, name)| (1..=args.nodes).map(move |n| (name, m, n)));
    let created = stream::iter(nodes).map(|(name, m, n)| env.create_node(name, m, n));
    created.buffer_unordered(CONCURRENCY).for_each(|_| async {}).await;
    let controller = env.start_controller().await;
    let began = Instant::now();
    env.apply_mesh(&env.mesh()).await;
    let wanted = usize::from(args.nodes) * (CLUSTERS.len() - 1);
    for cluster in CLUSTERS {
        while env.peers(cluster).await.len() < wanted {
            anyhow::ensure!(began.elapsed() < LATER, "the Peers of {cluster} are not written");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    let written = began.elapsed();
    env.until_condition("Ready", "True/Meshed", LATER).await;

    let seen = Seen::default();
    let mut watches = tokio::task::JoinSet::new();
    for cluster in CLUSTERS {
        watches.spawn(watch_peers(cluster, env.client(cluster).await, Arc::clone(&seen)));
    }
    // Idle for a moment, so that the first plan's work is not counted.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = Usage::of(&env, &controller)?;
    let changed = change_nodes(&env, args).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let after = Usage::of(&env, &controller)?;
    watches.abort_all();
    let seen = seen.lock().map_err(|_| anyhow::anyhow!("a watch panicked"))?;
    print(args, written, &before, &after, &latencies(&changed, &seen));
    Ok(())
}

/// Changes the endpoints of Nodes at the given rate. Returns the cluster, port and time of each change.
async fn change_nodes(env: &TestEnv, args: &Args) -> Vec<(&'static str, u16, Instant)> {
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / u32::from(args.rate));
    let mut changed = Vec::new();
    for event in 0..args.rate * args.seconds {
        ticks.tick().await;
        let index = usize::from(event) % CLUSTERS.len();
        let cluster = CLUSTERS[index];
        let node = usize::from(event) / CLUSTERS.len() % usize::from(args.nodes) + 1;
        let port = FIRST_PORT + event;
        let endpoint = format!("198.51.{}.{node}:{port}", index + 1);
        let at = Instant::now();
        env.annotate(cluster, &format!("{cluster}-{node}"), ENDPOINT, Some(&endpoint))
            .await;
        changed.push((cluster, port, at));
    }
    changed
}

/// Records when Peers with ports of events appear in a cluster.
async fn watch_peers(cluster: &'static str, client: kube::Client, seen: Seen) {
    let kind = GroupVersionKind::gvk("kilo.squat.ai", "v1alpha1", "Peer");
    let resource = ApiResource::from_gvk_with_plural(&kind, "peers");
    let peers: Api<DynamicObject> = Api::all_with(client, &resource);
    let mut changes = watcher(peers, watcher::Config::default()).applied_objects().boxed();
    while let Ok(Some(peer)) = changes.try_next().await {
        let port = peer.data["spec"]["endpoint"]["port"]
            .as_u64()
            .and_then(|port| u16::try_from(port).ok());
        let Some(port) = port.filter(|port| *port >= FIRST_PORT && peer.name_any().starts_with("prod--")) else {
            continue;
        };
        if let Ok(mut seen) = seen.lock() {
            seen.entry((cluster, port)).or_insert_with(Instant::now);
        }
    }
}

/// Milliseconds from each change to its Peer in each other cluster. A Peer that was overwritten before the watch saw it is missing.
fn latencies(changed: &[(&'static str, u16, Instant)], seen: &BTreeMap<(&'static str, u16), Instant>) -> Vec<f64> {
    let of_event = |(source, port, at): &(&'static str, u16, Instant)| {
        let targets = CLUSTERS.into_iter().filter(|target| target != source);
        let times = targets.filter_map(|target| seen.get(&(target, *port)));
        times
            .map(|time| time.duration_since(*at).as_secs_f64() * 1000.0)
            .collect::<Vec<_>>()
    };
    let mut latencies: Vec<f64> = changed.iter().flat_map(of_event).collect();
    latencies.sort_by(f64::total_cmp);
    latencies
}

/// What the controller has used so far.
struct Usage {
    cpu: cpu::Cpu,
    resident: u64,
    /// The number of its writes, by verb and resource.
    writes: BTreeMap<String, usize>,
}

impl Usage {
    fn of(env: &TestEnv, controller: &Running) -> anyhow::Result<Self> {
        let pid = controller.pid().context("the controller has ended")?.try_into()?;
        let mut writes = BTreeMap::new();
        for cluster in CLUSTERS {
            for line in env.lab.cluster(cluster).audit()? {
                let words: Vec<&str> = line.split(' ').take(2).collect();
                *writes.entry(words.join(" ")).or_default() += 1;
            }
        }
        Ok(Self {
            cpu: cpu::Cpu::now(&[pid])?,
            resident: cpu::resident(pid)?,
            writes,
        })
    }
}

fn print(args: &Args, written: Duration, before: &Usage, after: &Usage, latencies: &[f64]) {
    let percentile = |percent: usize| {
        let index = (latencies.len() * percent / 100).min(latencies.len().saturating_sub(1));
        latencies
            .get(index)
            .map_or("-".to_owned(), |value| format!("{value:.0}"))
    };
    let events = usize::from(args.rate) * usize::from(args.seconds);
    let expected = events * (CLUSTERS.len() - 1);
    println!("{}\n", report::Machine::here());
    println!(
        "{} clusters with {} Nodes each in one ClusterMesh; all Peers written {:.1} s after it was applied. Then {} changed \
         endpoints a second for {} s.\n",
        CLUSTERS.len(),
        args.nodes,
        written.as_secs_f64(),
        args.rate,
        args.seconds,
    );
    println!("| measured | value |\n|---|---|");
    println!(
        "| Peers that were seen with their new endpoint | {} of {expected} |",
        latencies.len()
    );
    println!(
        "| from the change of the Node to the Peer, ms: p50 / p99 / max | {} / {} / {} |",
        percentile(50),
        percentile(99),
        percentile(100)
    );
    let cpu = after.cpu.since(before.cpu).daemons;
    println!(
        "| CPU of the controller, s for each 100 changes | {:.2} |",
        cpu * 100.0 / events as f64
    );
    println!(
        "| memory of the controller (VmRSS) before / after, MB | {} / {} |",
        before.resident / 1_000_000,
        after.resident / 1_000_000
    );
    for (what, count) in &after.writes {
        let new = count - before.writes.get(what).copied().unwrap_or_default();
        if new > 0 {
            println!("| writes: {what} | {new} |");
        }
    }
}
