//! Runs full mode: starts the tasks, and runs the loop that decides when the next reconcile pass begins. A pass itself
//! is in `reconcile`.

use std::time::{Duration, Instant, SystemTime};

use clustermesh_daemon::{Admin, CancellationToken, Heartbeat};
use tokio::sync::watch;

use crate::{
    args::Config,
    cache, device, firewall, identity,
    kernel_events::{Event, KernelEvents},
    lock, preflight, publish,
    reconcile::{CacheWriter, ClusterView, Dependencies, Kernel, RESOLV_CONF, Reconciler},
    route,
    runtime::{NodeChannels, RuntimeBuilder},
    source,
    source::store::Store,
};

/// Time between two passes without any event; a safety net for lost events.
const RESYNC: Duration = Duration::from_secs(30);
/// How often peers are polled.
const POLL_PEERS: Duration = Duration::from_secs(5);
/// Object changes within this time are handled in one pass.
const SETTLE: Duration = Duration::from_millis(30);
/// After an object change the loop pauses three times as long as the last pass took, at most this long. So objects that
/// change all the time do not keep the CPU busy. A changed PeerPolicy ends the pause.
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// Time until the next pass after 1, 2, 3, and 4 or more failed passes in a row, unless an event starts it earlier.
const RETRY: [Duration; 4] = [
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(3),
    Duration::from_secs(10),
];
/// A loop that has sent no heartbeat for this time counts as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(120);
/// If the first lists take longer than this, the agent starts from its cache. If a list fails earlier, the agent does so at once,
/// unless the API server answered with 401, 403 or 404.
const FIRST_LISTS_TIMEOUT: Duration = Duration::from_secs(3);

/// Runs until a signal arrives.
pub async fn run(config: Config) -> anyhow::Result<()> {
    let lock = lock::take()?;
    let missing = preflight::check(config.backend);
    anyhow::ensure!(
        missing.is_empty(),
        "this node is not ready for wg-agent:\n{}\n\n{}",
        bullet_list(&missing),
        preflight::host_setup(&missing, &[]).for_all_systems()
    );
    let key = identity::key::load_or_create(&config.key_file)?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        node = config.node_name,
        interface = %config.interface,
        port = config.port,
        wireguard_cidr = %config.range.net(),
        backend = ?config.backend,
        mtu = ?config.mtu,
        bypass = ?config.bypass,
        key_file = %config.key_file.display(),
        cache_file = %config.cache_file.display(),
        cache_max_age = ?config.cache_max_age,
        public_key = %key.public(),
        listen = %config.listen,
        metrics_per_peer = config.metrics_per_peer,
        "wg-agent starts"
    );
    let admin = Admin::bind(config.listen)?;
    let drain_time = Duration::ZERO;
    let mut builder =
        RuntimeBuilder::open(config.kubeconfig.as_deref(), admin, config.metrics_per_peer, drain_time).await?;
    let metrics = builder.runtime.metrics.clone();

    let cache_file = cache::CacheFile {
        path: config.cache_file.clone(),
        node: config.node_name.clone(),
        max_age: config.cache_max_age,
    };
    let max_lag = cache_file.max_lag();
    let cache::LoadedCache {
        saved,
        confirmed,
        live,
        problem,
    } = cache::load(&cache_file, cache::UnixTime::of(SystemTime::now()));
    // `/readyz` shows the problem as a remark until this value is dropped.
    let _cache_remark = problem.map(|problem| {
        tracing::warn!("{problem}");
        metrics.count_error("cache");
        builder.runtime.readiness.remark(format!("cache: {problem}"))
    });
    let cached_addresses = saved.as_ref().map(|saved| saved.addresses.clone()).unwrap_or_default();

    let store = Store::new(metrics.clone(), saved);
    let (content, to_write) = watch::channel(cache::CacheContent {
        saved: None,
        confirmed,
        live,
    });
    builder.runtime.tasks.spawn(cache::run(cache_file, to_write, metrics));
    let (
        mut runtime,
        NodeChannels {
            publish,
            datapath_problem,
        },
    ) = builder.start(&lock, &config.node_name, &publish::identity::KEYS, &store)?;
    let stop = runtime.stop.clone();
    let (fallback_store, stopped) = (store.clone(), stop.clone());
    runtime.tasks.spawn(async move {
        tokio::select! {
            () = stopped.cancelled() => {}
            () = tokio::time::sleep(FIRST_LISTS_TIMEOUT) => fallback_store.use_cache(),
        }
    });
    let (host_names, wanted_names) = watch::channel(Default::default());
    let lookup_store = store.clone();
    runtime.tasks.spawn(source::lookup::run(
        wanted_names,
        cached_addresses,
        move |addresses| lookup_store.set_addresses(addresses),
        stop.clone(),
    ));

    let interface = config.interface.clone();
    let events = KernelEvents::open(&interface, RESOLV_CONF.into());
    let (backend, device_name) = (config.backend, interface.clone());
    let options = device::userspace::Options {
        offload: config.offload,
        ..Default::default()
    };
    let reconciler = Reconciler::new(Dependencies {
        cluster: ClusterView {
            server: runtime.connection.server.clone(),
            store: store.clone(),
            host_names,
            datapath_problem,
        },
        kernel: Kernel {
            routing: route::Netlink::open(interface)?,
            firewall: firewall::FirewallManager::new(firewall::Nft::default())
                .with_record(firewall::TableRecord::next_to_cache(&config.cache_file)),
            open: Box::new(move |configuration| device::open(backend, device_name.as_str(), configuration, options)),
        },
        cache: CacheWriter {
            content,
            confirmed,
            max_lag,
        },
        report: runtime.pass_reporter(),
        config,
        key,
        publish,
    });
    let heartbeat = runtime.liveness.watch("node", STUCK_AFTER);
    run_loop(reconciler, &store, events, &heartbeat, &stop).await;
    runtime.shut_down().await;
    tracing::info!("wg-agent ends; routes and firewall stay and keep packets for the mesh from leaving unencrypted");
    Ok(())
}

/// Runs passes until the token is cancelled.
///
/// The device is dropped at the end. A kernel device keeps working; a userspace device leaves its interface without
/// carrier. Routes and firewall stay too, so packets for the mesh never leave unencrypted while no agent runs.
async fn run_loop<R: route::Routing, F: firewall::Backend>(
    mut reconciler: Reconciler<R, F>,
    store: &Store,
    mut events: KernelEvents,
    heartbeat: &Heartbeat,
    stop: &CancellationToken,
) {
    let mut failures = 0;
    let mut poll = tokio::time::interval(POLL_PEERS);
    poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while !stop.is_cancelled() {
        // Without the subscription to routing changes, each pass reads the underlay and checks the device again.
        if !events.reports_routing() {
            reconciler.record_event(Event::Unknown);
        }
        let began = Instant::now();
        let is_complete = reconciler.pass().await;
        let took = began.elapsed();
        let mut pause = Duration::ZERO;
        failures = if is_complete { 0 } else { failures + 1 };
        let wait = match failures {
            0 => RESYNC,
            n => RETRY[(n - 1).min(RETRY.len() - 1)],
        };
        let next_pass = Instant::now() + wait;
        let settle = loop {
            heartbeat.beat();
            tokio::select! {
                () = stop.cancelled() => break Duration::ZERO,
                () = store.changed() => {
                    pause = (took * 3).min(MAX_PAUSE);
                    break SETTLE;
                }
                event = events.changed() => {
                    // The agent's own writes and writes to other programs' tables cause `Event::Nftables`, too.
                    if event == Event::Nftables && reconciler.firewall_matches_kernel().await {
                        continue;
                    }
                    reconciler.record_event(event);
                    break event.settle_time();
                }
                () = tokio::time::sleep_until(next_pass.into()) => break Duration::ZERO,
                _ = poll.tick() => {
                    reconciler.poll_peers();
                    if reconciler.packet_sizes_changed() {
                        break Duration::ZERO;
                    }
                }
            }
        };
        let settled = async {
            tokio::time::sleep(settle).await;
            tokio::select! {
                () = tokio::time::sleep(pause.saturating_sub(settle)) => {}
                () = store.policies_changed() => {}
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = settled => {}
        }
    }
    // Updates the peers' live endpoints in the cache for the next start.
    reconciler.poll_peers();
    drop(reconciler.into_device());
}

/// Renders a list with one entry per line.
pub(crate) fn bullet_list<T: ToString>(all: &[T]) -> String {
    all.iter()
        .map(|one| format!("- {}", one.to_string()))
        .collect::<Vec<_>>()
        .join("\n")
}
