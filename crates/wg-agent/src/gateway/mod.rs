//! `--mode=gateway`: the pod through which sandboxes enter this cluster. Its network namespace has one purpose: a WireGuard device
//! for the nodes of sandboxes, and a firewall table that leads what is granted to them to the endpoints of Services. What follows
//! from the objects is `clustermesh_agent_core::gateway`'s; here are the loop and the pass.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use clustermesh_agent_core::{
    device::{Peers, diff},
    gateway::{Access, Compiled, Inputs, Settings, compile},
    mtu, prefixes,
    routes::{Plan, desired},
};
use clustermesh_api::sandbox::SandboxGatewayStatus;
use clustermesh_daemon::{CancellationToken, Heartbeat};
use ipnet::IpNet;
use serde_json::json;
use tokio::sync::watch;

use crate::{
    args::GatewayConfig,
    device::{self, Configuration, Device, userspace::Options},
    firewall::{self, generation},
    identity::{self, key::NodeKey},
    lock,
    metrics::Metrics,
    preflight,
    route::{self, Netlink},
    run::lines,
    source::underlay,
    status::{Dump, Said, Trouble, Troubles},
    wiring::Base,
};

mod admin;
mod connections;
pub(crate) mod forwarding;
mod gate;
mod heard;
mod keeper;
mod publish;
mod seen;
mod world;

use gate::Gate;
use heard::Heard;
use keeper::{Keeper, Progress};
use publish::Identity;
use seen::OwnSeen;
use world::{Store, World};

/// A whole look as a safety net, whatever was heard.
const RESYNC: Duration = Duration::from_secs(30);
/// How often the device is asked where peers were heard from.
const LOOK: Duration = Duration::from_secs(1);
/// After a pass that failed.
const RETRY: Duration = Duration::from_secs(2);
/// What comes within this time is taken together.
const SETTLE: Duration = Duration::from_millis(30);
/// A loop that is silent for so long is stuck.
const STUCK: Duration = Duration::from_secs(120);
/// Parts of the timeout: an API server that is slow, or away for a moment, costs nobody a grant.
const RENEWALS: u32 = 4;

/// Runs until a signal, and for `--drain` beyond it.
pub(crate) async fn run(config: GatewayConfig) -> anyhow::Result<()> {
    let lock = lock::take()?;
    let missing = preflight::check(config.backend);
    anyhow::ensure!(
        missing.is_empty(),
        "this pod is not ready for wg-agent --mode=gateway:\n{}",
        lines(&missing)
    );
    let is_new = !config.key_file.exists();
    let key = identity::key::load_or_create(&config.key_file)?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        gateway = %config.gateway,
        interface = %config.interface,
        port = config.port,
        addresses = ?config.addresses,
        endpoint_networks = ?config.endpoint_networks,
        serves = ?config.serves,
        grant_timeout = ?config.grant_timeout,
        public_key = %key.public(),
        listen = %config.listen,
        "wg-agent starts as a gateway of sandboxes"
    );
    let admin = admin::bind(&config)?;
    let base = Base::open(config.kubeconfig.as_deref(), admin, false, config.drain).await?;
    let metrics = base.running.metrics.clone();
    let mut running = base.serve(&lock)?;
    let (publish, wanted) = watch::channel(SandboxGatewayStatus::default());
    let mut gateway = Gateway {
        routing: Netlink::open(config.interface.clone())?,
        api_server: running.connection.server.address().map(|server| server.ip()),
        keeper: Keeper::default(),
        device: None,
        heard: Heard::beside(&config.key_file),
        gate: Gate::new(running.readiness.clone(), is_new),
        peopled: false,
        troubles: running.troubles(),
        said: Said::default(),
        dump: running.dump.clone(),
        config: config.clone(),
        key,
        publish,
        metrics: metrics.clone(),
    };
    gateway
        .close()
        .await
        .map_err(|trouble| anyhow::anyhow!(trouble.message))?;
    let (store, keep) = Store::new(metrics.clone(), config.grant_timeout);
    let client = running.connection.client.clone();
    world::follow(
        &mut running.tasks,
        &client,
        &config.gateway,
        &store,
        keep,
        &running.stop,
    );
    let (contact, heard) = watch::channel(None);
    let every = config.grant_timeout / RENEWALS;
    running.tasks.spawn(world::contact(
        client.clone(),
        store.clone(),
        contact,
        every,
        running.stop.clone(),
    ));
    let published = publish::run(client, config.gateway, wanted, metrics, running.stop.clone());
    running.tasks.spawn(published);
    turn(
        &mut gateway,
        &store,
        heard,
        &running.liveness.watch("gateway", STUCK),
        &running.stop,
    )
    .await;
    running.end().await;
    tracing::info!(
        "wg-agent ends; what its table grants stands until the timeout, where the kernel carries the tunnel"
    );
    Ok(())
}

/// The nftables of the pod, as changed by any program.
struct Tables(Option<firewall::Watch>);

impl Tables {
    fn open() -> Self {
        let watch = firewall::Watch::open();
        let log = |error: &std::io::Error| {
            tracing::warn!(%error, "changes to nftables are not reported: the table is looked at every {RESYNC:?}");
        };
        Self(watch.inspect_err(log).ok())
    }

    /// Waits for the next change. Safe to cancel.
    async fn changed(&mut self) {
        match &mut self.0 {
            Some(watch) => {
                if let Err(error) = watch.changed().await {
                    tracing::warn!(%error, "the socket that reports changes to nftables is opened again");
                    *self = Self::open();
                }
            }
            None => std::future::pending().await,
        }
    }
}

async fn turn(
    gateway: &mut Gateway,
    store: &Store,
    mut heard: watch::Receiver<Option<Instant>>,
    heartbeat: &Heartbeat,
    stop: &CancellationToken,
) {
    let mut tables = Tables::open();
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while !stop.is_cancelled() {
        let began = Instant::now();
        let pass = gateway.pass(&store.world()).await;
        let took = began.elapsed();
        let again = Instant::now() + pass.pause();
        heartbeat.beat();
        let settle = loop {
            tokio::select! {
                // The next step of a large table waits for nothing but a renewal that is due.
                biased;
                () = stop.cancelled() => break Duration::ZERO,
                Ok(()) = heard.changed() => {
                    let answered = *heard.borrow_and_update();
                    if let Some(answered) = answered && !gateway.renew(answered).await {
                        break RETRY;
                    }
                    if !gateway.keeper.has_written() {
                        break Duration::ZERO;
                    }
                }
                () = tokio::time::sleep_until(again.into()) => break Duration::ZERO,
                () = store.changed() => break SETTLE.max(took),
                _ = look.tick() => gateway.look(),
                () = tables.changed() => {
                    if !gateway.keeper.is_current() {
                        tracing::warn!("another program wrote to nftables of this pod: the table is written again");
                        gateway.metrics.repaired("firewall", 1);
                        // Where the kernel does not tell the generation, each of our own transactions looks foreign.
                        break if generation::now().is_ok() { Duration::ZERO } else { RETRY };
                    }
                }
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(settle) => {}
        }
    }
}

/// Keeps one pod.
struct Gateway {
    config: GatewayConfig,
    key: NodeKey,
    /// The API server as this process is told to reach it.
    api_server: Option<IpAddr>,
    keeper: Keeper,
    routing: Netlink,
    device: Option<Box<dyn Device>>,
    heard: Heard,
    gate: Gate,
    /// The device has every peer that it should have.
    peopled: bool,
    publish: watch::Sender<SandboxGatewayStatus>,
    metrics: Metrics,
    troubles: Troubles,
    said: Said,
    dump: Dump,
}

/// What a pass came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// Everything is as it should be.
    Done,
    /// A large table is written in several steps, and the next one is due. What was seen meanwhile counts from there on.
    Unfinished,
    /// Something is left to do.
    Failed,
}

impl Pass {
    const fn pause(self) -> Duration {
        match self {
            Self::Done => RESYNC,
            Self::Unfinished => Duration::ZERO,
            Self::Failed => RETRY,
        }
    }
}

/// What the pod's own network is.
struct Outside {
    mtu: u16,
    addresses: BTreeSet<IpAddr>,
}

impl Gateway {
    /// Closes a pod that has no table yet, before anything is connected: the table tracks connections from its first moment on, and
    /// would take the answers of an older one for calls of others, and drop them.
    async fn close(&mut self) -> Result<(), Trouble> {
        if self.keeper.stands() {
            return Ok(());
        }
        let outside = self.outside().await?;
        let inputs = self.inputs(&World::default(), &outside);
        self.write_table(&compile(&inputs)).await.map(drop)
    }

    /// Brings the pod to what was seen.
    async fn pass(&mut self, world: &World) -> Pass {
        let mut troubles = Vec::new();
        match self.steps(world, &mut troubles).await {
            Ok(true) => {}
            Ok(false) => return Pass::Unfinished,
            Err(trouble) => troubles.push(trouble),
        }
        let well = troubles.iter().all(|trouble| trouble.harmless);
        let views: Vec<_> = troubles.iter().map(Trouble::view).collect();
        self.dump.set("troubles", json!(views));
        self.troubles.set(troubles);
        if well { Pass::Done } else { Pass::Failed }
    }

    /// False = the table needs a further step. Until then nothing is told to be in force.
    async fn steps(&mut self, world: &World, troubles: &mut Vec<Trouble>) -> Result<bool, Trouble> {
        let outside = self.outside().await?;
        let inputs = self.inputs(world, &outside);
        let compiled = compile(&inputs);
        // A pod that starts is closed before it has a device. A container that starts again finds table and peers of the one
        // before, which stand until it is known what has changed since: a table without the endpoints of a namespace that is still
        // being read would end its connections, and one that is not renewed yet would interrupt them.
        let known = world.listed() && (self.keeper.has_written() || world.complete() && self.keeper.is_renewed());
        if (known || !self.keeper.stands()) && !self.write_table(&compiled).await? {
            return Ok(false);
        }
        self.ensure_device(self.config.mtu.unwrap_or(outside.mtu))?;
        troubles.extend(forwarding::ensure(&self.config.interface, &compiled.routes).await);
        if known {
            self.ensure_routes(&compiled).await?;
            self.ensure_peers(&compiled.peers)?;
            self.gate.begin(nodes_of(&inputs, &compiled), Instant::now());
        } else {
            troubles.push(Trouble::new("objects", world.waiting()));
        }
        troubles.extend(world.errors().map(|error| Trouble::harmless("objects", error)));
        troubles.extend(self.gate.trouble());
        troubles.extend(self.table_is_small(compiled.served.len()));
        self.tell(&compiled);
        // Of a container that starts again, the status stands until it is known what is in force.
        if known {
            self.publish(world, &compiled, &outside, troubles);
        }
        Ok(true)
    }

    /// Whether sandboxes can fill the connection table together, although each keeps to its limit.
    fn table_is_small(&self, sandboxes: usize) -> Option<Trouble> {
        let (each, holds) = (self.config.sandbox_connections, connections::capacity()?);
        let all = u64::from(each).saturating_mul(sandboxes as u64);
        (all > holds).then(|| {
            Trouble::harmless(
                "connections",
                format!(
                    "{sandboxes} sandboxes may have {each} connections each, and the connection table of this pod holds {holds} \
                     (net.netfilter.nf_conntrack_max): lower --sandbox-connections, or let another set of gateways serve some of them \
                     (--serves)"
                ),
            )
        })
    }

    /// Keeps open what is open for another while. False = the table is not as it should be.
    async fn renew(&mut self, answered: Instant) -> bool {
        match self.keeper.renew(answered + self.config.grant_timeout).await {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, "the table could not be renewed; it is written again");
                self.metrics.failed("firewall");
                false
            }
        }
    }

    async fn outside(&self) -> Result<Outside, Trouble> {
        let own: BTreeSet<IpAddr> = self.config.pod_ips.iter().copied().collect();
        let underlay = underlay::read(&own, &self.config.interface).await;
        let underlay = underlay.map_err(|error| Trouble::new("network", error))?;
        Ok(Outside {
            // Whatever family sandboxes dial, it fits.
            mtu: (underlay.mtu - mtu::overhead(prefixes::Family::V6)).max(mtu::MINIMUM),
            addresses: underlay.addresses.into_keys().chain(own).collect(),
        })
    }

    fn inputs(&self, world: &World, outside: &Outside) -> Inputs {
        let config = &self.config;
        let own = outside.addresses.iter().copied().map(IpNet::from);
        let server = self.api_server.map(IpNet::from);
        Inputs {
            settings: Settings {
                interface: config.interface.clone(),
                listen_port: config.port,
                admin_port: config.listen.port(),
                addresses: config.addresses.clone(),
                endpoint_networks: config.endpoint_networks.clone(),
                reserved: own.chain(server).chain(config.gateway_cidrs.iter().copied()).collect(),
                serves: config.serves.clone(),
                new_connections: config.sandbox_new_flows,
                sandbox_connections: config.sandbox_connections,
                endpoint_connections: config.endpoint_connections,
            },
            accesses: world.accesses(),
            services: world.services(&config.gateway.namespace),
        }
    }

    /// Takes one step; true = it was the last. Where it cannot be written, nobody is let in by what stands.
    async fn write_table(&mut self, compiled: &Compiled) -> Result<bool, Trouble> {
        match self.keeper.converge(&compiled.table).await {
            Ok(Progress { changes, finished }) => {
                if changes > 0 {
                    self.metrics.applied("firewall", changes);
                    tracing::info!(
                        sandboxes = compiled.served.len(),
                        grants = compiled.table.open(),
                        finished,
                        "firewall table written"
                    );
                }
                if finished || self.keeper.is_current() {
                    return Ok(finished);
                }
                let message = "the table is written in several steps, and another program changed nftables of this pod between two of \
                               them, or the kernel does not tell; it is begun anew";
                Err(Trouble::new("firewall", message))
            }
            Err(error) => {
                if let Err(trouble) = self.ensure_peers(&Peers::new()) {
                    tracing::error!(
                        error = trouble.message,
                        "the peers could not be removed from the device"
                    );
                }
                Err(Trouble::new(
                    "firewall",
                    format!("{error}; until it is written, no sandbox has a peer here"),
                ))
            }
        }
    }

    fn ensure_device(&mut self, mtu: u16) -> Result<(), Trouble> {
        let trouble = |error: device::DeviceError| Trouble::new("device", error);
        let configuration = Configuration {
            private_key: self.key.secret().clone(),
            listen_port: self.config.port,
            fwmark: 0,
            mtu,
        };
        if let Some(device) = &mut self.device {
            match device.observe() {
                Ok(observed) => {
                    device.mend(&observed.altered).map_err(trouble)?;
                    return device.configure(&configuration).map_err(trouble);
                }
                Err(error) => {
                    tracing::warn!(%error, "the device is made again");
                    self.metrics.repaired("device", 1);
                    self.device = None;
                    self.peopled = false;
                }
            }
        }
        let name = self.config.interface.as_str();
        let (device, why) =
            device::open(self.config.backend, name, &configuration, Options::default()).map_err(trouble)?;
        tracing::info!(interface = name, backend = device.backend(), why, mtu, "device opened");
        self.device = Some(device);
        Ok(())
    }

    async fn ensure_routes(&mut self, compiled: &Compiled) -> Result<(), Trouble> {
        let routes = desired(&Plan {
            addresses: self.config.addresses.clone(),
            peers: compiled.routes.clone(),
            mesh: compiled.routes.clone(),
            ..Plan::default()
        });
        let pass = route::converge(&mut self.routing, &routes).await;
        let pass = pass.map_err(|error| Trouble::new("routes", error))?;
        self.metrics.applied("routes", pass.done.len());
        match pass.failed.first() {
            Some(error) => Err(Trouble::new("routes", error)),
            None => Ok(()),
        }
    }

    fn ensure_peers(&mut self, peers: &Peers) -> Result<(), Trouble> {
        let trouble = |error: device::DeviceError| Trouble::new("device", error);
        let Some(device) = &mut self.device else { return Ok(()) };
        let observed = device.observe().map_err(trouble)?;
        if let Some(mut changes) = diff(&observed.peers, peers) {
            self.heard.dial(&mut changes);
            device.apply(&changes).map_err(trouble)?;
            self.metrics.applied("device", changes.len());
            for change in &changes {
                tracing::info!("{change}");
            }
        }
        self.peopled = true;
        Ok(())
    }

    /// Notes which peers have connected, and keeps for the next start where they were heard from.
    fn look(&mut self) {
        let Some(device) = self.device.as_mut().filter(|_| self.peopled) else {
            return;
        };
        // What is wrong with the device a pass says.
        if let Ok(observed) = device.observe() {
            self.heard.keep(&observed.peers);
            self.gate.observe(&observed.peers, Instant::now());
        }
    }

    /// Metrics and `/debug/state`.
    fn tell(&mut self, compiled: &Compiled) {
        let mut reasons: BTreeMap<String, i64> = BTreeMap::new();
        for refused in &compiled.refused {
            *reasons.entry(refused.reason.as_str().to_owned()).or_default() += 1;
        }
        self.metrics.refused(&reasons);
        let refused: BTreeSet<String> = compiled.refused.iter().map(ToString::to_string).collect();
        self.dump.set("refused", json!(refused));
        self.said.set(refused);
        self.dump.set("firewall", json!(self.keeper.text()));
    }

    /// The status of the SandboxGateway: what is in force.
    fn publish(&self, world: &World, compiled: &Compiled, outside: &Outside, troubles: &mut Vec<Trouble>) {
        let endpoints = match world.own() {
            Ok(own) => self.endpoints(&own, outside),
            Err(why) => {
                // There is nowhere to say anything.
                troubles.push(Trouble::new("object", why));
                return;
            }
        };
        let identity = Identity {
            config: &self.config,
            public_key: self.key.public(),
            backend: self.device.as_ref().map_or("", |device| device.backend()),
        };
        let status = identity.status(world.applied(), compiled, &endpoints, troubles);
        self.dump.set("gateway", json!(status));
        self.publish.send_if_modified(|published| {
            let changed = *published != status;
            *published = status;
            changed
        });
    }

    /// Where sandboxes find this pod, best first: the pod itself, what its object names, its node.
    fn endpoints(&self, own: &OwnSeen, outside: &Outside) -> Vec<SocketAddr> {
        let pod = outside.addresses.iter().filter(|ip| self.config.pod_ips.contains(ip));
        let pod = pod.map(|ip| SocketAddr::new(*ip, self.config.port));
        let node = own.node_port.into_iter().flat_map(|port| {
            let nodes = self.config.node_ips.iter();
            nodes.map(move |ip| SocketAddr::new(*ip, port))
        });
        pod.chain(own.endpoints.iter().copied()).chain(node).collect()
    }
}

/// The keys in the device, by the SandboxAccess whose nodes have them.
fn nodes_of(inputs: &Inputs, compiled: &Compiled) -> gate::Nodes {
    let served = inputs
        .accesses
        .iter()
        .filter(|access| compiled.served.contains(&access.name));
    let keys = |access: &Access| {
        let keys = access.nodes.iter().filter_map(|node| node.public_key.as_ref().ok());
        keys.filter(|key| compiled.peers.contains_key(key)).copied().collect()
    };
    served.map(|access| (access.name.clone(), keys(access))).collect()
}
