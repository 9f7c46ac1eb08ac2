//! Runs `--mode=gateway`: the pod through which sandboxes enter this cluster. Its network namespace contains a WireGuard
//! device with the nodes of sandboxes as peers, and a firewall table that forwards granted connections to the endpoints of
//! Services. `clustermesh_agent_core::gateway` derives both from the objects. This module runs the loop; `pass` is one pass.

use std::time::{Duration, Instant};

use clustermesh_api::sandbox::SandboxGatewayStatus;
use clustermesh_daemon::{CancellationToken, Heartbeat};
use tokio::sync::watch;

use crate::{
    args::GatewayConfig,
    firewall::{self, generation},
    identity, lock, preflight,
    route::Netlink,
    run::bullet_list,
    runtime::RuntimeBuilder,
};

mod admin;
mod connections;
pub(crate) mod forwarding;
mod objects;
mod pass;
mod publish;
mod readiness_gate;
mod saved_endpoints;
mod snapshot;
mod table_manager;

use pass::{Gateway, Tunnel};
use readiness_gate::ReadinessGate;
use saved_endpoints::SavedEndpoints;
use snapshot::Store;
use table_manager::TableManager;

/// The time between two passes without any event, in case an event was lost.
const RESYNC: Duration = Duration::from_secs(30);
/// How often the device's peers are polled.
const POLL_PEERS: Duration = Duration::from_secs(1);
/// Pause after a failed pass or renewal, and if the generation of nftables cannot be read.
const RETRY: Duration = Duration::from_secs(2);
/// Changes of objects within this time, or the time that the last pass took if it is longer, are handled in one pass.
const SETTLE: Duration = Duration::from_millis(30);
/// A loop that has sent no heartbeat for this time counts as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(120);
/// How often the grants are renewed within their timeout, so that they stay open if the API server does not answer for a
/// moment.
const RENEWALS: u32 = 4;

/// Runs until a signal arrives, and then for the duration of `--drain`.
pub(crate) async fn run(config: GatewayConfig) -> anyhow::Result<()> {
    let lock = lock::take()?;
    let missing = preflight::check(config.backend);
    anyhow::ensure!(
        missing.is_empty(),
        "this pod is not ready for wg-agent --mode=gateway:\n{}",
        bullet_list(&missing)
    );
    let is_key_new = !config.key_file.exists();
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
    let (publish, status_to_publish) = watch::channel(SandboxGatewayStatus::default());
    let mut gateway = Gateway {
        api_server: runtime.connection.server.address().map(|server| server.ip()),
        table_manager: TableManager::default(),
        tunnel: Tunnel {
            routing: Netlink::open(config.interface.clone())?,
            device: None,
            has_desired_peers: false,
            saved_endpoints: SavedEndpoints::load(&config.key_file),
        },
        gate: ReadinessGate::new(runtime.readiness.clone(), is_key_new),
        report: runtime.pass_reporter(),
        config: config.clone(),
        key,
        publish,
    };
    gateway
        .write_closed_table()
        .await
        .map_err(|trouble| anyhow::anyhow!(trouble.message))?;
    let (store, granted_namespaces) = Store::new(metrics.clone(), config.grant_timeout);
    let client = runtime.connection.client.clone();
    snapshot::start_watches(
        &mut runtime.tasks,
        &client,
        &config.gateway,
        &store,
        granted_namespaces,
        &runtime.stop,
    );
    let (contact, last_contact) = watch::channel(None);
    let probe_interval = config.grant_timeout / RENEWALS;
    runtime.tasks.spawn(snapshot::probe_api_server(
        client.clone(),
        store.clone(),
        contact,
        probe_interval,
        runtime.stop.clone(),
    ));
    let publisher = publish::run(client, config.gateway, status_to_publish, metrics, runtime.stop.clone());
    runtime.tasks.spawn(publisher);
    run_loop(
        &mut gateway,
        &store,
        last_contact,
        &runtime.liveness.watch("gateway", STUCK_AFTER),
        &runtime.stop,
    )
    .await;
    runtime.shut_down().await;
    tracing::info!("wg-agent exits; with the kernel backend its grants stay open until their timeout");
    Ok(())
}

/// Notifications of changes to the pod's nftables by any program; `None` = not available.
struct NftablesEvents(Option<firewall::Watch>);

impl NftablesEvents {
    fn open() -> Self {
        let watch = firewall::Watch::open();
        let log = |error: &clustermesh_netlink::Error| {
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
    let mut nftables = NftablesEvents::open();
    let mut poll = tokio::time::interval(POLL_PEERS);
    poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while !stop.is_cancelled() {
        let began = Instant::now();
        let pass = gateway.pass(&store.snapshot()).await;
        let took = began.elapsed();
        let next_pass = Instant::now() + pass.pause();
        heartbeat.beat();
        let delay = loop {
            tokio::select! {
                // The first ready branch is taken. A large table is written in several passes without a pause between them, and a
                // due renewal of the grants must not wait for the last of these passes.
                biased;
                () = stop.cancelled() => break Duration::ZERO,
                Ok(()) = last_contact.changed() => {
                    let answered_at = *last_contact.borrow_and_update();
                    if let Some(answered_at) = answered_at && !gateway.renew(answered_at).await {
                        break RETRY;
                    }
                    // While the table is from an earlier process, or after a failed write, `pass` may write nothing until the API server
                    // answers. It has answered now, so the next pass starts at once.
                    if !gateway.table_manager.has_written() {
                        break Duration::ZERO;
                    }
                }
                () = tokio::time::sleep_until(next_pass.into()) => break Duration::ZERO,
                () = store.changed() => break SETTLE.max(took),
                _ = poll.tick() => gateway.poll_peers(),
                () = nftables.changed() => {
                    if !gateway.table_manager.is_current() {
                        tracing::warn!("another program changed nftables of this pod: the table is written again");
                        gateway.report.metrics.count_repairs("firewall", 1);
                        // If the generation cannot be read, the gateway's own transactions look like external changes. The
                        // pause keeps them from causing an endless loop.
                        break if generation::current().is_ok() { Duration::ZERO } else { RETRY };
                    }
                }
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(delay) => {}
        }
    }
}
