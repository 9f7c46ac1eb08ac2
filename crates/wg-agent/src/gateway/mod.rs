//! Runs `--mode=gateway`: the pod through which sandboxes enter this cluster. Its network namespace contains a
//! WireGuard device for the nodes of sandboxes, and a firewall table that forwards granted connections to the endpoints
//! of Services. `clustermesh_agent_core::gateway` derives both from the objects; this module has the loop and the pass.

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
    runtime::RuntimeBuilder,
    source::underlay,
    status::{Dump, Reported, Trouble, Troubles},
};

mod admin;
mod connections;
pub(crate) mod forwarding;
mod objects;
mod publish;
mod readiness_gate;
mod saved_endpoints;
mod snapshot;
mod table_manager;

use objects::ParsedGateway;
use publish::Identity;
use readiness_gate::ReadinessGate;
use saved_endpoints::SavedEndpoints;
use snapshot::{GatewaySnapshot, Store};
use table_manager::{Progress, TableManager};

/// Between two passes without any event: a safety net.
const RESYNC: Duration = Duration::from_secs(30);
/// How often the device's peers are polled.
const POLL_PEERS: Duration = Duration::from_secs(1);
/// Pause after a failed pass.
const RETRY: Duration = Duration::from_secs(2);
/// Changes of objects within this time are handled in one pass.
const SETTLE: Duration = Duration::from_millis(30);
/// A loop without a heartbeat for so long counts as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(120);
/// The grants are renewed so often within their timeout: an API server that is slow or away for a moment closes none.
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
    let builder = RuntimeBuilder::open(config.kubeconfig.as_deref(), admin, false, config.drain).await?;
    let metrics = builder.runtime.metrics.clone();
    let mut runtime = builder.serve(&lock)?;
    let (publish, wanted) = watch::channel(SandboxGatewayStatus::default());
    let mut gateway = Gateway {
        routing: Netlink::open(config.interface.clone())?,
        api_server: runtime.connection.server.address().map(|server| server.ip()),
        table_manager: TableManager::default(),
        device: None,
        saved_endpoints: SavedEndpoints::load(&config.key_file),
        gate: ReadinessGate::new(runtime.readiness.clone(), is_new),
        has_all_peers: false,
        troubles: runtime.troubles(),
        reported: Reported::default(),
        dump: runtime.dump.clone(),
        config: config.clone(),
        key,
        publish,
        metrics: metrics.clone(),
    };
    gateway
        .write_closed_table()
        .await
        .map_err(|trouble| anyhow::anyhow!(trouble.message))?;
    let (store, keep) = Store::new(metrics.clone(), config.grant_timeout);
    let client = runtime.connection.client.clone();
    snapshot::start_watches(
        &mut runtime.tasks,
        &client,
        &config.gateway,
        &store,
        keep,
        &runtime.stop,
    );
    let (contact, last_contact) = watch::channel(None);
    let every = config.grant_timeout / RENEWALS;
    runtime.tasks.spawn(snapshot::probe_api_server(
        client.clone(),
        store.clone(),
        contact,
        every,
        runtime.stop.clone(),
    ));
    let published = publish::run(client, config.gateway, wanted, metrics, runtime.stop.clone());
    runtime.tasks.spawn(published);
    run_loop(
        &mut gateway,
        &store,
        last_contact,
        &runtime.liveness.watch("gateway", STUCK_AFTER),
        &runtime.stop,
    )
    .await;
    runtime.shut_down().await;
    tracing::info!("wg-agent ends; with the kernel backend its grants stay open until their timeout");
    Ok(())
}

/// Notifications of changes to the pod's nftables by any program; `None` = not available.
struct NftablesEvents(Option<firewall::Watch>);

impl NftablesEvents {
    fn open() -> Self {
        let watch = firewall::Watch::open();
        let log = |error: &std::io::Error| {
            tracing::warn!(%error, "cannot subscribe to changes of nftables; polling the table every {RESYNC:?}");
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

async fn run_loop(
    gateway: &mut Gateway,
    store: &Store,
    mut last_contact: watch::Receiver<Option<Instant>>,
    heartbeat: &Heartbeat,
    stop: &CancellationToken,
) {
    let mut tables = NftablesEvents::open();
    let mut poll = tokio::time::interval(POLL_PEERS);
    poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while !stop.is_cancelled() {
        let began = Instant::now();
        let pass = gateway.pass(&store.snapshot()).await;
        let took = began.elapsed();
        let again = Instant::now() + pass.pause();
        heartbeat.beat();
        let settle = loop {
            tokio::select! {
                // The next step of a large table waits only for a renewal that is due.
                biased;
                () = stop.cancelled() => break Duration::ZERO,
                Ok(()) = last_contact.changed() => {
                    let answered = *last_contact.borrow_and_update();
                    if let Some(answered) = answered && !gateway.renew(answered).await {
                        break RETRY;
                    }
                    if !gateway.table_manager.has_written() {
                        break Duration::ZERO;
                    }
                }
                () = tokio::time::sleep_until(again.into()) => break Duration::ZERO,
                () = store.changed() => break SETTLE.max(took),
                _ = poll.tick() => gateway.poll_peers(),
                () = tables.changed() => {
                    if !gateway.table_manager.is_current() {
                        tracing::warn!("another program wrote to nftables of this pod: the table is written again");
                        gateway.metrics.count_repairs("firewall", 1);
                        // If the generation cannot be read, the agent's own transactions look like external ones.
                        break if generation::current().is_ok() { Duration::ZERO } else { RETRY };
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

/// Keeps the network namespace of one gateway pod as the objects describe.
struct Gateway {
    config: GatewayConfig,
    key: NodeKey,
    /// The API server's address in this process's configuration; `None` = configured by name.
    api_server: Option<IpAddr>,
    table_manager: TableManager,
    routing: Netlink,
    device: Option<Box<dyn Device>>,
    saved_endpoints: SavedEndpoints,
    gate: ReadinessGate,
    /// The device has all desired peers.
    has_all_peers: bool,
    publish: watch::Sender<SandboxGatewayStatus>,
    metrics: Metrics,
    troubles: Troubles,
    reported: Reported,
    dump: Dump,
}

/// The result of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PassResult {
    /// Everything is applied.
    Done,
    /// A large table is written in several steps, and the next one is due. It starts from the latest snapshot.
    Unfinished,
    /// Something failed.
    Failed,
}

impl PassResult {
    const fn pause(self) -> Duration {
        match self {
            Self::Done => RESYNC,
            Self::Unfinished => Duration::ZERO,
            Self::Failed => RETRY,
        }
    }
}

/// The pod's own network.
struct PodNetwork {
    mtu: u16,
    addresses: BTreeSet<IpAddr>,
}

impl Gateway {
    /// Writes a table without grants to a pod that has none, before the first connection. From its first moment the
    /// table uses conntrack, which would take replies of an older connection for new requests, and the table would drop
    /// them.
    async fn write_closed_table(&mut self) -> Result<(), Trouble> {
        if self.table_manager.table_exists() {
            return Ok(());
        }
        let pod_network = self.pod_network().await?;
        let inputs = self.inputs(&GatewaySnapshot::default(), &pod_network);
        self.write_table(&compile(&inputs)).await.map(drop)
    }

    /// Runs one reconcile pass.
    async fn pass(&mut self, snapshot: &GatewaySnapshot) -> PassResult {
        let mut troubles = Vec::new();
        match self.steps(snapshot, &mut troubles).await {
            Ok(true) => {}
            Ok(false) => return PassResult::Unfinished,
            Err(trouble) => troubles.push(trouble),
        }
        let is_done = troubles.iter().all(|trouble| trouble.harmless);
        let views: Vec<_> = troubles.iter().map(Trouble::view).collect();
        self.dump.set("troubles", json!(views));
        self.troubles.set(troubles);
        if is_done { PassResult::Done } else { PassResult::Failed }
    }

    /// False = the table needs a further step. Until then the status does not report the grants as applied.
    async fn steps(&mut self, snapshot: &GatewaySnapshot, troubles: &mut Vec<Trouble>) -> Result<bool, Trouble> {
        let pod_network = self.pod_network().await?;
        let inputs = self.inputs(snapshot, &pod_network);
        let compiled = compile(&inputs);
        // A new pod gets a closed table before it has a device. A restarted container finds the table and peers of the
        // one before, which stay until all objects are known and the table is renewed. Otherwise a table without the
        // endpoints of a namespace that is still being listed would end connections, and a table that is not renewed
        // would interrupt them.
        let is_known = snapshot.is_listed()
            && (self.table_manager.has_written() || snapshot.is_complete() && self.table_manager.can_open());
        if (is_known || !self.table_manager.table_exists()) && !self.write_table(&compiled).await? {
            return Ok(false);
        }
        self.ensure_device(self.config.mtu.unwrap_or(pod_network.mtu))?;
        troubles.extend(forwarding::ensure(&self.config.interface, &compiled.routes).await);
        if is_known {
            self.ensure_routes(&compiled).await?;
            self.ensure_peers(&compiled.peers)?;
            self.gate.begin(node_keys(&inputs, &compiled), Instant::now());
        } else {
            troubles.push(Trouble::new("objects", snapshot.pending_message()));
        }
        troubles.extend(snapshot.errors().map(|error| Trouble::harmless("objects", error)));
        troubles.extend(self.gate.trouble());
        troubles.extend(self.conntrack_trouble(compiled.served.len()));
        self.report(&compiled);
        // The status of a restarted container stays until it is known what is applied.
        if is_known {
            self.publish(snapshot, &compiled, &pod_network, troubles);
        }
        Ok(true)
    }

    /// A warning if all sandboxes together can fill the conntrack table, although each stays within its limit.
    fn conntrack_trouble(&self, sandboxes: usize) -> Option<Trouble> {
        let (limit, capacity) = (self.config.sandbox_connections, connections::capacity()?);
        let all = u64::from(limit).saturating_mul(sandboxes as u64);
        (all > capacity).then(|| {
            Trouble::harmless(
                "connections",
                format!(
                    "{sandboxes} sandboxes may have {limit} connections each, and the conntrack table of this pod has room for {capacity} \
                     (net.netfilter.nf_conntrack_max): lower --sandbox-connections, or let another set of gateways serve some of them \
                     (--serves)"
                ),
            )
        })
    }

    /// Renews the timeout of what is open. False = the table could not be written.
    async fn renew(&mut self, answered: Instant) -> bool {
        match self.table_manager.renew(answered + self.config.grant_timeout).await {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, "the table could not be renewed; it is written again");
                self.metrics.count_error("firewall");
                false
            }
        }
    }

    async fn pod_network(&self) -> Result<PodNetwork, Trouble> {
        let own: BTreeSet<IpAddr> = self.config.pod_ips.iter().copied().collect();
        let underlay = underlay::read(&own, &self.config.interface).await;
        let underlay = underlay.map_err(|error| Trouble::new("network", error))?;
        Ok(PodNetwork {
            // Large enough for the overhead of either family.
            mtu: (underlay.mtu - mtu::overhead(prefixes::Family::V6)).max(mtu::MINIMUM),
            addresses: underlay.addresses.into_keys().chain(own).collect(),
        })
    }

    fn inputs(&self, snapshot: &GatewaySnapshot, pod_network: &PodNetwork) -> Inputs {
        let config = &self.config;
        let own = pod_network.addresses.iter().copied().map(IpNet::from);
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
            accesses: snapshot.accesses(),
            services: snapshot.services(&config.gateway.namespace),
        }
    }

    /// Writes one step of the table; true = it was the last. If it cannot be written, all peers are removed, so that
    /// the old table serves no sandbox.
    async fn write_table(&mut self, compiled: &Compiled) -> Result<bool, Trouble> {
        match self.table_manager.converge(&compiled.table).await {
            Ok(Progress { changes, finished }) => {
                if changes > 0 {
                    self.metrics.count_changes("firewall", changes);
                    tracing::info!(
                        sandboxes = compiled.served.len(),
                        grants = compiled.table.open(),
                        finished,
                        "firewall table written"
                    );
                }
                if finished || self.table_manager.is_current() {
                    return Ok(finished);
                }
                let message = "the table is written in several steps, and another program changed nftables of this pod between two of \
                               them, or that cannot be determined; it is written again from the start";
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
                    tracing::warn!(%error, "the device failed and is opened again");
                    self.metrics.count_repairs("device", 1);
                    self.device = None;
                    self.has_all_peers = false;
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
        self.metrics.count_changes("routes", pass.done.len());
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
            self.saved_endpoints.set_endpoints(&mut changes);
            device.apply(&changes).map_err(trouble)?;
            self.metrics.count_changes("device", changes.len());
            for change in &changes {
                tracing::info!("{change}");
            }
        }
        self.has_all_peers = true;
        Ok(())
    }

    /// Polls the peers: notes which have connected, and saves their endpoints for the next start.
    fn poll_peers(&mut self) {
        let Some(device) = self.device.as_mut().filter(|_| self.has_all_peers) else {
            return;
        };
        // A pass reports errors of the device.
        if let Ok(observed) = device.observe() {
            self.saved_endpoints.save(&observed.peers);
            self.gate.observe(&observed.peers, Instant::now());
        }
    }

    /// Updates metrics and `/debug/state`.
    fn report(&mut self, compiled: &Compiled) {
        let mut reasons: BTreeMap<String, i64> = BTreeMap::new();
        for refused in &compiled.refused {
            *reasons.entry(refused.reason.as_str().to_owned()).or_default() += 1;
        }
        self.metrics.set_refused(&reasons);
        let refused: BTreeSet<String> = compiled.refused.iter().map(ToString::to_string).collect();
        self.dump.set("refused", json!(refused));
        self.reported.set(refused);
        self.dump.set("firewall", json!(self.table_manager.text()));
    }

    /// Publishes what is applied in the status of the SandboxGateway.
    fn publish(
        &self,
        snapshot: &GatewaySnapshot,
        compiled: &Compiled,
        pod_network: &PodNetwork,
        troubles: &mut Vec<Trouble>,
    ) {
        let endpoints = match snapshot.own() {
            Ok(own) => self.endpoints(&own, pod_network),
            Err(why) => {
                // There is no object for the status.
                troubles.push(Trouble::new("object", why));
                return;
            }
        };
        let identity = Identity {
            config: &self.config,
            public_key: self.key.public(),
            backend: self.device.as_ref().map_or("", |device| device.backend()),
        };
        let status = identity.status(snapshot.applied_accesses(), compiled, &endpoints, troubles);
        self.dump.set("gateway", json!(status));
        self.publish.send_if_modified(|published| {
            let changed = *published != status;
            *published = status;
            changed
        });
    }

    /// The endpoints at which sandboxes reach this pod, best first: the pod's addresses, those in its object, its
    /// node's.
    fn endpoints(&self, own: &ParsedGateway, pod_network: &PodNetwork) -> Vec<SocketAddr> {
        let pod = pod_network
            .addresses
            .iter()
            .filter(|ip| self.config.pod_ips.contains(ip));
        let pod = pod.map(|ip| SocketAddr::new(*ip, self.config.port));
        let node = own.node_port.into_iter().flat_map(|port| {
            let nodes = self.config.node_ips.iter();
            nodes.map(move |ip| SocketAddr::new(*ip, port))
        });
        pod.chain(own.endpoints.iter().copied()).chain(node).collect()
    }
}

/// The keys on the device, by the SandboxAccess of the nodes.
fn node_keys(inputs: &Inputs, compiled: &Compiled) -> readiness_gate::NodeKeys {
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
