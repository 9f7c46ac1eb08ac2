//! `--mode=policy`: beside kg, which owns the tunnel. The wiring, the loop and the pass of that mode: PeerPolicies into the
//! firewall table, and one annotation that says so. No device, key, route, rule or kernel setting is touched here, and
//! nothing that kg writes.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::{Duration, Instant, SystemTime},
};

use clustermesh_agent_core::{
    compile::{Inputs, Node, Peer, beside},
    prefixes::overlap,
};
use clustermesh_api::{annotations::Agent, names::NODE_AGENT};
use clustermesh_core::key::PublicKey;
use clustermesh_daemon::{Admin, CancellationToken, Heartbeat};
use ipnet::IpNet;
use serde_json::json;
use tokio::sync::watch;

use crate::{
    args::PolicyConfig,
    device,
    firewall::{self, Backend, Keeper},
    lock,
    metrics::Metrics,
    preflight,
    publish::Wanted,
    reconcile::gate::{kg_lives, own_node, waiting},
    run::lines,
    source::{
        datapath::Found,
        objects::{NodeSeen, PeerSeen, revision},
        store::{Store, World},
    },
    status::{Dump, Said, Trouble, Troubles, view::NodeView},
    wiring::{Base, Ends},
};

/// A whole look at the table as a safety net, whatever was heard.
const RESYNC: Duration = Duration::from_secs(30);
/// What comes within this time is taken together.
const SETTLE: Duration = Duration::from_millis(30);
/// kube-proxy and kg write to nftables often, and our own writes are heard as well.
const SETTLE_KERNEL: Duration = Duration::from_millis(300);
/// After a pass that failed.
const RETRY: Duration = Duration::from_secs(2);
/// A loop that is silent for so long is stuck.
const STUCK: Duration = Duration::from_secs(120);

/// Runs until a signal. The table stays behind: what it closes is closed also while nobody is here.
pub(crate) async fn run(config: PolicyConfig) -> anyhow::Result<()> {
    let lock = lock::take()?;
    // As for a tunnel that is the kernel's: no TUN device is needed.
    let missing = preflight::check(device::Backend::Kernel);
    anyhow::ensure!(
        missing.is_empty(),
        "this node is not ready for wg-agent:\n{}",
        lines(&missing)
    );
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        node = config.node_name,
        interface = %config.interface,
        listen = %config.listen,
        "wg-agent starts in policy mode: kg owns the tunnel, this agent the firewall table"
    );
    let admin = Admin::bind(config.listen)?;
    let base = Base::open(config.kubeconfig.as_deref(), admin, false, Duration::ZERO).await?;
    let metrics = base.running.metrics.clone();
    let store = Store::new(metrics.clone(), None);
    let (mut running, Ends { publish, bypassed }) = base.start(&lock, &config.node_name, &[NODE_AGENT], &store)?;
    let beside = Beside {
        server: running.connection.server.address(),
        firewall: Keeper::new(firewall::Nft::default()),
        troubles: running.troubles(),
        said: Said::default(),
        meshed: BTreeSet::new(),
        config,
        publish,
        bypassed,
        metrics,
        dump: running.dump.clone(),
    };
    turn(beside, &store, &running.liveness.watch("node", STUCK), &running.stop).await;
    running.end().await;
    tracing::info!("wg-agent ends; its firewall table stays, `wg-agent cleanup --mode=policy` takes it away");
    Ok(())
}

async fn turn<F: Backend>(mut beside: Beside<F>, store: &Store, heartbeat: &Heartbeat, stop: &CancellationToken) {
    let mut tables = firewall::Watch::open()
        .inspect_err(
            |error| tracing::warn!(%error, "cannot hear of changes to nftables; looking every {} s", RESYNC.as_secs()),
        )
        .ok();
    while !stop.is_cancelled() {
        let well = beside.pass(&store.world()).await;
        let again = Instant::now() + if well { RESYNC } else { RETRY };
        heartbeat.beat();
        let heard = async {
            match &mut tables {
                Some(watch) => watch.changed().await.is_ok(),
                None => std::future::pending().await,
            }
        };
        let settle = tokio::select! {
            () = stop.cancelled() => Duration::ZERO,
            () = store.changed() => SETTLE,
            () = tokio::time::sleep_until(again.into()) => Duration::ZERO,
            alive = heard => {
                if !alive {
                    tables = firewall::Watch::open().ok();
                }
                SETTLE_KERNEL
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(settle) => {}
        }
    }
}

/// Keeps the table of one node.
struct Beside<F> {
    config: PolicyConfig,
    /// The API server as this process is told to reach it, where that is an address.
    server: Option<SocketAddr>,
    firewall: Keeper<F>,
    publish: watch::Sender<Wanted>,
    /// Whether the CNI leads packets past the table.
    bypassed: watch::Receiver<Option<Found>>,
    metrics: Metrics,
    troubles: Troubles,
    said: Said,
    dump: Dump,
    /// Ranges that were ever a mesh's while this process ran.
    meshed: BTreeSet<IpNet>,
}

impl<F: Backend> Beside<F> {
    /// Brings the table to what was seen. False = something is left to do; try again soon.
    async fn pass(&mut self, world: &World) -> bool {
        let mut troubles = Vec::new();
        if let Err(trouble) = self.steps(world, &mut troubles).await {
            troubles.push(trouble);
        }
        let well = troubles.iter().all(|trouble| trouble.harmless);
        self.dump.set(
            "troubles",
            json!(troubles.iter().map(Trouble::view).collect::<Vec<_>>()),
        );
        self.troubles.set(troubles);
        well
    }

    async fn steps(&mut self, world: &World, troubles: &mut Vec<Trouble>) -> Result<(), Trouble> {
        waiting(world)?;
        let bypassed = self.bypassed.borrow().clone();
        troubles.extend(bypassed.map(|message| Trouble::harmless("datapath", message)));
        troubles.extend(crate::conntrack::trouble().map(|message| Trouble::harmless("conntrack", message)));
        let own = own_node(world, &self.config.node_name)?;
        let inputs = inputs(world, &own, &self.config, self.server);
        let own_business = own_business(world);
        self.meshed
            .retain(|net| !own_business.iter().any(|other| overlap(net, other)));
        let compiled = beside(&inputs, &self.meshed);
        self.meshed.extend(&compiled.meshed);

        let mut reasons: BTreeMap<String, i64> = BTreeMap::new();
        let mut left_out = BTreeSet::new();
        for (name, seen) in world.policies.known() {
            if let Some(problem) = &seen.problem {
                *reasons.entry("Unreadable".to_owned()).or_default() += 1;
                left_out.insert(format!("PeerPolicy {name}: Unreadable: {problem}"));
            }
        }
        for refused in &compiled.refused {
            *reasons.entry(refused.reason.as_str().to_owned()).or_default() += 1;
            left_out.insert(refused.to_string());
        }
        self.metrics.refused(&reasons);
        self.dump.set("refused", json!(left_out));
        self.said.set(left_out);

        let done = self.firewall.converge(&compiled.firewall).await;
        if done.map_err(|error| Trouble::new("firewall", error))?.is_some() {
            self.metrics.applied("firewall", 1);
            tracing::info!("firewall table written");
        }
        let text = clustermesh_agent_core::firewall::render(&compiled.firewall);
        self.dump.set("firewall", json!(text.lines().collect::<Vec<_>>()));
        troubles.extend(self.owner(&own));
        self.publish(world, &own);
        Ok(())
    }

    /// Whether somebody owns the tunnel at all. The rules name the interface and wait for it.
    fn owner(&self, own: &NodeSeen) -> Option<Trouble> {
        let interface = &self.config.interface;
        let there = nix::net::if_::if_nametoindex(interface.as_str()).is_ok();
        if there {
            return None;
        }
        let kg = match kg_lives(own, SystemTime::now()) {
            Some(ago) => format!("kg checked in {ago} s ago, so its tunnel has another name"),
            None => "and no kg has checked in for this node".to_owned(),
        };
        let message = format!(
            "there is no interface {interface}, {kg}: nothing is enforced, since every rule names it. Name kg's interface with \
             --interface, start kg, or run wg-agent with --mode=full"
        );
        Some(Trouble::new("kg", message))
    }

    fn publish(&self, world: &World, own: &NodeSeen) {
        let agent = Agent {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            mode: "policy".to_owned(),
            datapath_bypassed: Found::annotation(self.bypassed.borrow().as_ref()),
            policy_revision: revision(world.policies.known().map(|(_, policy)| policy)),
            ..Agent::default()
        };
        self.dump.set("agent", json!(agent));
        let node = NodeView {
            name: self.config.node_name.clone(),
            ..NodeView::default()
        };
        self.dump.set("node", json!(node));
        let told = Wanted {
            identity: BTreeMap::new(),
            status: [(NODE_AGENT, Some(agent.to_string()))].into(),
            seen: own.own.clone().unwrap_or_default().published,
        };
        self.publish.send_if_modified(|wanted| {
            let changed = *wanted != told;
            *wanted = told;
            changed
        });
    }
}

/// Ranges of Peers that no mesh wrote: what a person gives to somebody else is no mesh's any more.
fn own_business(world: &World) -> BTreeSet<IpNet> {
    let others = world.peers.known().filter(|(_, seen)| !meshed(seen));
    others
        .filter_map(|(_, seen)| seen.spec.as_ref().ok())
        .flat_map(|spec| &spec.allowed_ips)
        .copied()
        .collect()
}

/// Peers that no mesh wrote, as kgctl's of a person's laptop, are kg's own business.
fn meshed(seen: &PeerSeen) -> bool {
    !seen.cluster.is_empty()
}

/// What the compiler works from; what belongs to kg's part of it stays empty.
fn inputs(world: &World, own: &NodeSeen, config: &PolicyConfig, server: Option<SocketAddr>) -> Inputs {
    let others = || world.nodes.known().filter(|(name, _)| *name != config.node_name);
    let nodes = world
        .nodes
        .known()
        .flat_map(|(_, node)| node.internal_ips.iter().chain(&node.wireguard_ip));
    let peers = world.peers.known().filter(|(_, seen)| meshed(seen));
    Inputs {
        node: Node {
            name: config.node_name.clone(),
            public_key: PublicKey::new([0; 32]),
            wireguard_ips: BTreeSet::new(),
            device: config.interface.clone(),
            listen_port: 0,
            mtu: 0,
            underlay: config.interface.clone(),
            underlay_addresses: BTreeSet::new(),
            addresses: own.internal_ips.iter().copied().collect(),
            pod_cidrs: own.pod_cidrs.clone(),
        },
        throw: BTreeSet::new(),
        narrow: Default::default(),
        api_servers: world
            .api_servers
            .known()
            .flat_map(|(_, sockets)| sockets)
            .chain(&server)
            .copied()
            .collect(),
        nodes: nodes.map(|ip| ip.to_canonical()).collect(),
        pods_elsewhere: others().flat_map(|(_, node)| &node.pod_cidrs).copied().collect(),
        peers: peers
            .map(|(name, seen)| Peer {
                name: name.to_owned(),
                revision: seen.revision,
                public_key: PublicKey::new([0; 32]),
                preshared_key: None,
                endpoint: None,
                candidates: Vec::new(),
                keepalive: None,
                allowed_ips: seen.spec.iter().flat_map(|spec| &spec.allowed_ips).copied().collect(),
            })
            .collect(),
        policies: world.policies.known().map(|(_, seen)| seen.policy.clone()).collect(),
    }
}
