//! `cargo xtask soak`: four real API servers (the hub and three tenants behind proxies) and two replicas of the controller, while nodes
//! change all the time and faults happen at random. The same seed draws the same faults in the same order; when they happen also depends
//! on the machine.
//!
//! Then the faults end, and this is checked:
//!
//! - `clustermeshctl plan`, which reads all clusters anew, finds nothing to change in any member, and the mesh is Ready.
//! - Every member holds a Peer with the key and the endpoint of each node of the other members, and no other Peer. This is compared with
//!   the Nodes themselves, without the planner.
//! - The controller then writes nothing more (30 s).
//! - The audit logs of all members contain only planned deletes. The delete of a Peer is a violation if, during the whole
//!   60 s before it, the Node existed and kept its key, and the entries of source and target were in the mesh. The delete of a
//!   PeerPolicy is a violation if both entries were in the mesh during that time. The time in which the mesh is paused does not
//!   count for the 60 s. So a missing Secret, an API server that is unreachable or sends wrong responses, a lost label, an edit
//!   by hand and a change of leader excuse no delete. Three nodes of each cluster are never removed and keep their keys.
//! - The audit logs contain no write of Peers or PeerPolicies while the mesh is paused, except in the first minute of a pause.
//!
//! Exit code 1 if one of these does not hold.
#![forbid(unsafe_code)]

mod clusters;
mod faults;
mod ledger;
mod outcome;
mod random;

use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use clap::Parser;
use clustermesh_api::names;
use clustermesh_tests::test_env::key;
use futures::{FutureExt, StreamExt, stream::FuturesUnordered};
use kube::ResourceExt;
use tokio::time::{Instant, sleep, sleep_until};

use clusters::{CLUSTERS, Clusters, NODES, STABLE_NODES};
use faults::{Fault, Resource};
use random::Random;

/// The pause between two changes of Nodes.
const CHURN_INTERVAL: Duration = Duration::from_millis(300);
/// At most so many faults at the same time.
const MAX_FAULTS: usize = 4;

/// The arguments of `cargo xtask soak`.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask soak", bin_name = "cargo xtask soak")]
struct Args {
    /// The seed from which the faults and the changes of Nodes are drawn. Default: the current time.
    #[arg(long)]
    seed: Option<u64>,
    /// How long faults happen. After that the members have ten minutes to become as planned.
    #[arg(long, default_value_t = 20)]
    minutes: u64,
}

fn main() -> ExitCode {
    // `run` panics if a check fails, because a panic makes the lab keep its logs. The thread turns the panic into exit code 1.
    match std::thread::spawn(run).join() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

#[tokio::main]
async fn run() {
    let args = Args::parse();
    let from_time = || {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs()
    };
    let seed = args.seed.unwrap_or_else(from_time);
    println!("soak: seed {seed}, {} minutes", args.minutes);
    let clusters = Clusters::start().await.expect("the clusters start");
    let deadline = Instant::now() + Duration::from_secs(args.minutes * 60);
    let (happened, churned) = tokio::join!(
        make_faults(&clusters, seed, deadline),
        change_nodes(&clusters, seed ^ 1, deadline)
    );
    println!("soak: the faults have ended");
    let (judged, violations) = outcome::check(&clusters).await;
    println!(
        "\nseed {seed}, {} minutes\n\n| happened | times |\n|---|---|",
        args.minutes
    );
    for (what, times) in happened.iter().chain(&churned) {
        println!("| {what} | {times} |");
    }
    println!(
        "| writes of Peers and PeerPolicies, of these deletes | {}, {} |",
        judged.writes, judged.deletes
    );
    println!("\n{} violations", violations.len());
    for violation in &violations {
        println!("- {violation}");
    }
    assert!(violations.is_empty(), "seed {seed}: {} violations", violations.len());
}

type Counts = BTreeMap<String, usize>;

/// Draws faults until the deadline, and waits until all of them have ended.
async fn make_faults(clusters: &Clusters, seed: u64, deadline: Instant) -> Counts {
    let mut random = Random::new(seed);
    let (mut running, mut in_use, mut counts) = (FuturesUnordered::new(), BTreeSet::<Resource>::new(), Counts::new());
    let mut next = Instant::now();
    let began = Instant::now();
    loop {
        let is_over = Instant::now() >= deadline;
        if is_over && running.is_empty() {
            return counts;
        }
        tokio::select! {
            Some((fault, result)) = running.next() => {
                let (fault, result): (Fault, anyhow::Result<()>) = (fault, result);
                in_use.remove(&fault.resource());
                let counted = match &result {
                    Ok(()) => fault.kind(),
                    Err(_) => format!("{} (could not begin)", fault.kind()),
                };
                *counts.entry(counted).or_default() += 1;
                let result = result.map_or_else(|error| format!(": {error:#}"), |()| String::new());
                println!("{:7.1} s  end of {fault}{result}", began.elapsed().as_secs_f64());
            }
            () = sleep_until(next), if !is_over => {
                let fault = Fault::draw(&mut random);
                let lasts = Duration::from_secs(2 + u64::try_from(random.below(14)).unwrap_or_default());
                let number = random.below(usize::MAX);
                next = Instant::now() + Duration::from_millis(1_000 + 1_000 * u64::try_from(random.below(5)).unwrap_or_default());
                if running.len() < MAX_FAULTS && in_use.insert(fault.resource()) {
                    println!("{:7.1} s  {fault} for {} s", began.elapsed().as_secs_f64(), lasts.as_secs());
                    running.push(fault.run(clusters, lasts, number).map(move |result| (fault, result)).boxed_local());
                }
            }
        }
    }
}

/// Changes Nodes until the deadline: endpoints of all, keys and existence of those that are not stable.
async fn change_nodes(clusters: &Clusters, seed: u64, deadline: Instant) -> Counts {
    let mut random = Random::new(seed);
    let mut counts = Counts::new();
    while Instant::now() < deadline {
        sleep(CHURN_INTERVAL).await;
        let position = random.below(CLUSTERS.len());
        let (cluster, m) = (CLUSTERS[position], u8::try_from(position + 1).unwrap_or_default());
        let n = 1 + u8::try_from(random.below(usize::from(NODES))).unwrap_or_default();
        let (action, number) = (random.below(8), random.below(20_000));
        let name = format!("{cluster}-{n}");
        let exists = match clusters.nodes(cluster).await {
            Ok(nodes) => nodes.iter().any(|node| node.name_any() == name),
            Err(_) => continue,
        };
        let (what, done) = match action {
            _ if !exists => ("Node added", clusters.add_node(cluster, n).await),
            0 if n > STABLE_NODES => ("Node removed", clusters.remove_node(cluster, &name).await),
            1 if n > STABLE_NODES => {
                // No two nodes draw the same key.
                let other = key(100 + m, n + NODES * u8::try_from(number % 30).unwrap_or_default());
                ("Node with another key", clusters.rekey(cluster, &name, &other).await)
            }
            _ => {
                let endpoint = format!("198.51.{m}.{n}:{}", 20_000 + number);
                let changed = clusters.annotate(cluster, &name, names::KILO_ENDPOINT, &endpoint);
                ("Node with another endpoint", changed.await)
            }
        };
        if done.is_ok() {
            *counts.entry(what.to_owned()).or_default() += 1;
        }
    }
    counts
}
