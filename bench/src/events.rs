//! `cargo xtask bench events`: measures on real API servers how fast the controller creates the Peers of a new mesh, how fast it follows
//! changed Nodes, and whether members that misbehave delay the others. The API servers have the Nodes, as agents would annotate them; no
//! agents and no kubelets run.

pub(crate) mod convergence;
mod objects;

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::Context;
use clustermesh_lab::Running;
use clustermesh_tests::{
    faulty::{Fault, FaultyApi},
    test_env::{LATER, TestEnv},
};
use futures::{StreamExt, TryStreamExt, stream};
use kube::{
    Client,
    api::{Patch, PatchParams},
    runtime::{WatchStreamExt, watcher},
};
use serde_json::json;
use xtask::{prereq, programs};

use crate::{cpu, report};
use objects::name;

/// Number of Nodes that are created at the same time.
const CONCURRENCY: usize = 16;
/// Port of the endpoint that the first event sets; each event has its own port.
const FIRST_PORT: u16 = 20_000;
/// The annotation that an event changes. With it, an operator sets the endpoint of a Node.
const ENDPOINT: &str = "kilo.squat.ai/force-endpoint";
/// The host of the proxies.
const PROXIES: Ipv4Addr = Ipv4Addr::new(172, 30, 1, 202);
/// The time from the beginning or end of the faults to the first counted event.
const SETTLE: Duration = Duration::from_secs(20);
/// Ports that events can use.
const PORTS: u32 = 31_000;

/// Arguments of `cargo xtask bench events`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Members of the mesh, each with a real API server; the first one is the hub.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(2..=60))]
    members: u8,
    /// Nodes of each member.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=1000))]
    nodes: u16,
    /// Changed Nodes per second.
    #[arg(long, default_value_t = 1)]
    rate: u16,
    /// How long Nodes change.
    #[arg(long, default_value_t = 60)]
    seconds: u16,
    /// How many times to measure how fast the controller creates all Peers, and how fast a plain client creates the same Peers.
    #[arg(long, default_value_t = 0)]
    creations: u8,
    /// Measures also while the last members misbehave, one member in each of these ways: slow, throttling, error, truncated,
    /// flapping, endless, conflict.
    #[arg(long, value_delimiter = ',')]
    faults: Vec<Fault>,
    /// How often to measure without the faults and with them, in turn.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    #[command(flatten)]
    prereq: prereq::Prereq,
}

/// When the Peer of each event was first seen, by member and port.
type Seen = Arc<Mutex<BTreeMap<(usize, u16), Instant>>>;

/// Runs the benchmark and prints the results.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.faults.len() + 2 <= usize::from(args.members),
        "--faults: of {} members, at least the hub and another one must work; give more --members",
        args.members
    );
    let events = u32::from(args.rate) * u32::from(args.seconds);
    anyhow::ensure!(
        (1..=PORTS).contains(&events.saturating_mul(u32::from(args.rounds) * 2)),
        "--rate times --seconds times --rounds must be from 1 to {}: each event has a port of its own",
        PORTS / 2
    );
    prereq::ensure(&args.prereq)?;
    build()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(measure(args))
}

/// Builds the programs of the lab, and the controller and this program as they are released.
fn build() -> anyhow::Result<()> {
    programs::build()?;
    let measured = programs::measured()?;
    std::fs::create_dir_all(&measured).with_context(|| format!("create {}", measured.display()))?;
    let measured_programs = ["clustermesh-controller", "clustermesh-bench"];
    let release = programs::build_release(&measured_programs)?;
    for program in measured_programs {
        let to = measured.join(program);
        std::fs::copy(release.join(program), &to).with_context(|| format!("write {}", to.display()))?;
    }
    Ok(())
}

/// The running API servers.
struct Bench {
    env: TestEnv,
    /// A client for each member, the hub first.
    clients: Vec<Client>,
    nodes: u16,
    proxies: Vec<(Fault, FaultyApi)>,
}

impl Bench {
    async fn start(args: &Args) -> anyhow::Result<Self> {
        let members = usize::from(args.members);
        let env = TestEnv::start_plan(objects::plan(members)).await;
        let names = (0..members).map(name);
        let clients = stream::iter(names).then(async |name| env.client(&name).await).collect();
        let mut bench = Self {
            clients: clients.await,
            env,
            nodes: args.nodes,
            proxies: Vec::new(),
        };
        bench.start_proxies(&args.faults).await?;
        eprintln!("bench: {} Nodes in each of {members} members", args.nodes);
        let all = (0..members).flat_map(|index| (0..args.nodes).map(move |n| (index, n)));
        let created = stream::iter(all).map(|(index, n)| objects::create_node(&bench.clients[index], index, n));
        created.buffer_unordered(CONCURRENCY).try_collect::<()>().await?;
        Ok(bench)
    }

    /// Puts a proxy before the API server of each of the last members.
    async fn start_proxies(&mut self, faults: &[Fault]) -> anyhow::Result<()> {
        self.env.lab.add_host("proxies", PROXIES).await?;
        let host = self.env.lab.node("proxies");
        for (fault, (port, index)) in faults.iter().zip((7001..).zip((0..self.clients.len()).rev())) {
            let member = self.env.lab.cluster(&name(index));
            let proxy = FaultyApi::start(&host, port, &member).await;
            let kubeconfig = proxy.kubeconfig(&self.env.kubeconfig(&name(index)).await);
            self.env.write_secret(&name(index), &kubeconfig).await;
            self.proxies.push((*fault, proxy));
        }
        Ok(())
    }

    /// The number of members that never misbehave. They are the first ones.
    fn healthy_count(&self) -> usize {
        self.clients.len() - self.proxies.len()
    }

    /// The number of Peers that each member must have.
    fn wanted_peers(&self) -> usize {
        usize::from(self.nodes) * (self.clients.len() - 1)
    }

    /// Changes the endpoints of Nodes of healthy members at the given rate. Returns member, port and time of each change.
    async fn change_nodes(&self, args: &Args, first_port: u16) -> anyhow::Result<Vec<(usize, u16, Instant)>> {
        let mut ticks = tokio::time::interval(Duration::from_secs(1) / u32::from(args.rate));
        let mut changed = Vec::new();
        for event in 0..args.rate * args.seconds {
            ticks.tick().await;
            let index = usize::from(event) % self.healthy_count();
            let n = event / u16::try_from(self.healthy_count())? % self.nodes;
            let port = first_port + event;
            let endpoint = format!("{}:{port}", objects::address(index, n));
            let patch = json!({"metadata": {"annotations": {ENDPOINT: endpoint}}});
            let at = Instant::now();
            objects::nodes(&self.clients[index])
                .patch(
                    &objects::node_name(index, n),
                    &PatchParams::default(),
                    &Patch::Merge(&patch),
                )
                .await?;
            changed.push((index, port, at));
        }
        Ok(changed)
    }

    /// Changes Nodes, and measures when the Peers in the other healthy members follow.
    async fn measure_events(&self, args: &Args, first_port: u16, controller: &Running) -> anyhow::Result<Events> {
        let seen = Seen::default();
        let mut watches = tokio::task::JoinSet::new();
        for (index, client) in self.clients.iter().enumerate().take(self.healthy_count()) {
            watches.spawn(watch_peers(index, client.clone(), Arc::clone(&seen)));
        }
        // Within this time the first lists of the watches are complete, too.
        tokio::time::sleep(SETTLE).await;
        let pid = controller.pid().context("the controller has ended")?.try_into()?;
        let (before, began) = (cpu::Cpu::now(&[pid])?, Instant::now());
        let changed = self.change_nodes(args, first_port).await?;
        tokio::time::sleep(Duration::from_secs(5)).await;
        let used = cpu::Cpu::now(&[pid])?.since(before);
        let seconds = began.elapsed().as_secs_f64();
        watches.abort_all();
        let seen = seen.lock().map_err(|_| anyhow::anyhow!("a watch panicked"))?;
        let times = changed.iter().flat_map(|(source, port, at)| {
            let targets = (0..self.healthy_count()).filter(move |target| target != source);
            let times = targets.filter_map(|target| seen.get(&(target, *port)));
            times.map(|time| time.duration_since(*at).as_secs_f64() * 1000.0)
        });
        Ok(Events {
            latencies: times.collect(),
            expected: changed.len() * (self.healthy_count() - 1),
            cpu: used.daemons / seconds,
            machine: used.machine / seconds,
            resident: cpu::resident(pid)?,
        })
    }
}

/// What one measurement of changed Nodes found.
struct Events {
    /// Milliseconds from each change to its Peer in each other healthy member. If a Peer was overwritten before the watch saw it,
    /// there is no value for it.
    latencies: Vec<f64>,
    expected: usize,
    /// CPU seconds of the controller in each second.
    cpu: f64,
    /// CPU seconds of the whole machine in each second.
    machine: f64,
    /// VmRSS of the controller.
    resident: u64,
}

impl Events {
    fn percentile(&self, percent: usize) -> Option<f64> {
        let mut sorted = self.latencies.clone();
        sorted.sort_by(f64::total_cmp);
        let index = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
        sorted.get(index).copied()
    }

    /// All events of several rounds: the sum of events, the means of CPU time, and the memory of the last round.
    fn all(rounds: &[Self]) -> Self {
        let mean = |cpu: fn(&Self) -> f64| rounds.iter().map(cpu).sum::<f64>() / rounds.len() as f64;
        Self {
            latencies: rounds.iter().flat_map(|round| round.latencies.clone()).collect(),
            expected: rounds.iter().map(|round| round.expected).sum(),
            cpu: mean(|round| round.cpu),
            machine: mean(|round| round.machine),
            resident: rounds.last().map_or(0, |round| round.resident),
        }
    }

    /// A row about all rounds, with the lowest and the highest value of single rounds.
    fn row(what: &str, rounds: &[Self]) -> String {
        let all = Self::all(rounds);
        let milliseconds = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.0}"));
        let spread = |percent: usize| {
            let mut values: Vec<f64> = rounds.iter().filter_map(|round| round.percentile(percent)).collect();
            values.sort_by(f64::total_cmp);
            let [low, high] = [values.first(), values.last()].map(|value| milliseconds(value.copied()));
            format!("{} [{low}-{high}]", milliseconds(all.percentile(percent)))
        };
        format!(
            "| {what} | {} | {} | {} | {} of {} | {:.0} % | {:.0} % | {} |",
            spread(50),
            spread(99),
            milliseconds(all.percentile(100)),
            all.latencies.len(),
            all.expected,
            all.cpu * 100.0,
            all.machine * 100.0,
            all.resident / 1_000_000
        )
    }
}

async fn measure(args: &Args) -> anyhow::Result<()> {
    let bench = Bench::start(args).await?;
    let mut creations = Vec::new();
    for _ in 0..args.creations {
        creations.push(bench.compare_creation().await?);
    }
    let controller = bench.env.start_controller().await;
    let created = bench.create_mesh_and_wait().await?;
    bench.env.until_condition("Ready", "True/Meshed", LATER * 4).await;
    let pid = controller.pid().context("the controller has ended")?.try_into()?;
    // After this pause the status is written, and nothing else is due.
    tokio::time::sleep(Duration::from_secs(10)).await;
    let (at_rest, began) = (cpu::Cpu::now(&[pid])?, Instant::now());
    tokio::time::sleep(Duration::from_secs(30)).await;
    let idle = cpu::Cpu::now(&[pid])?.since(at_rest).daemons / began.elapsed().as_secs_f64();
    let resident = cpu::resident(pid)?;

    println!("{}\n", report::Machine::here());
    println!(
        "{} members with {} Nodes each in one ClusterMesh; {} Peers in each were created in {:.1} s. The controller at rest: VmRSS {} MB, \
         at most {} MB so far, {:.1} % of a core.\n",
        args.members,
        args.nodes,
        bench.wanted_peers(),
        created.as_secs_f64(),
        resident / 1_000_000,
        cpu::peak_resident(pid)? / 1_000_000,
        idle * 100.0,
    );
    if !creations.is_empty() {
        println!("{}", convergence::Creation::HEADER);
        creations.iter().for_each(|creation| print!("{creation}"));
        println!();
    }
    println!(
        "{} changed endpoints a second for {} s, {} times; latencies in ms [of single rounds], CPU of one core, memory in MB:\n",
        args.rate, args.seconds, args.rounds
    );
    println!("| members | p50 | p99 | max | seen | controller's CPU | machine's CPU | VmRSS |");
    println!("|---|---|---|---|---|---|---|---|");
    let (mut undisturbed, mut disturbed) = (Vec::new(), Vec::new());
    let ports = args.rate * args.seconds;
    for round in 0..args.rounds {
        let first_port = FIRST_PORT + 2 * round * ports;
        undisturbed.push(bench.measure_events(args, first_port, &controller).await?);
        if bench.proxies.is_empty() {
            continue;
        }
        bench.proxies.iter().for_each(|(fault, proxy)| proxy.set(Some(*fault)));
        disturbed.push(bench.measure_events(args, first_port + ports, &controller).await?);
        bench.proxies.iter().for_each(|(_, proxy)| proxy.set(None));
    }
    println!("{}", Events::row("all work", &undisturbed));
    if !bench.proxies.is_empty() {
        let faults: Vec<String> = bench.proxies.iter().map(|(fault, _)| fault.to_string()).collect();
        println!(
            "{}",
            Events::row(&format!("one each: {}", faults.join(", ")), &disturbed)
        );
    }
    Ok(())
}

/// Records when Peers with ports of events appear in a member.
async fn watch_peers(index: usize, client: Client, seen: Seen) {
    let peers = objects::peers(&client);
    let mut changes = watcher(peers, watcher::Config::default()).applied_objects().boxed();
    while let Ok(Some(peer)) = changes.try_next().await {
        let port = peer.data["spec"]["endpoint"]["port"]
            .as_u64()
            .and_then(|port| u16::try_from(port).ok());
        let Some(port) = port.filter(|port| (FIRST_PORT..51_820).contains(port)) else {
            continue;
        };
        if let Ok(mut seen) = seen.lock() {
            seen.entry((index, port)).or_insert_with(Instant::now);
        }
    }
}
