//! The wiring of the agent's process: what is started, what wakes a pass, how it ends. What a pass does is in `reconcile`.

use std::time::{Duration, Instant, SystemTime};

use clustermesh_daemon::{Admin, CancellationToken, Heartbeat};
use tokio::sync::watch;

use crate::{
    args::Config,
    cache, device, firewall,
    heard::{Event, Heard},
    identity, lock, preflight, publish,
    reconcile::{Cache, Parts, RESOLV_CONF, Reconciler},
    route, source,
    source::store::Store,
    wiring::{Base, Ends},
};

/// A whole look at the node as a safety net, whatever was heard.
const RESYNC: Duration = Duration::from_secs(30);
/// Between looks at the peers.
const LOOK: Duration = Duration::from_secs(5);
/// What comes within this time is taken together.
const SETTLE: Duration = Duration::from_millis(30);
/// Before it takes up changes, the loop rests three times as long as its last pass took, this at most, so that objects that
/// change without end do not keep the processor busy. A changed PeerPolicy ends the rest.
const REST: Duration = Duration::from_secs(1);
/// Retries of a pass that failed.
const RETRY: [Duration; 4] = [
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(3),
    Duration::from_secs(10),
];
/// A loop that is silent for so long is stuck.
const STUCK: Duration = Duration::from_secs(120);
/// An API server that has not told everything by then counts as away, as one that cannot be reached does at once.
const FIRST_WORD: Duration = Duration::from_secs(3);

/// Runs until a signal.
pub async fn run(config: Config) -> anyhow::Result<()> {
    let lock = lock::take()?;
    let missing = preflight::check(config.backend);
    anyhow::ensure!(
        missing.is_empty(),
        "this node is not ready for wg-agent:\n{}\n\n{}",
        lines(&missing),
        preflight::host(&missing, &[]).everywhere()
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
    let mut base = Base::open(
        config.kubeconfig.as_deref(),
        admin,
        config.metrics_per_peer,
        Duration::ZERO,
    )
    .await?;
    let metrics = base.running.metrics.clone();

    let place = cache::Place {
        path: config.cache_file.clone(),
        node: config.node_name.clone(),
        max_age: config.cache_max_age,
    };
    let step = place.step();
    let cache::Found {
        saved,
        confirmed,
        live,
        trouble,
    } = cache::load(&place, cache::Stamp::of(SystemTime::now()));
    let _set_aside = trouble.map(|trouble| {
        tracing::warn!("{trouble}");
        metrics.failed("cache");
        base.running.readiness.remark(format!("cache: {trouble}"))
    });
    let known = saved.as_ref().map(|saved| saved.addresses.clone()).unwrap_or_default();

    let store = Store::new(metrics.clone(), saved);
    let (kept, keep) = watch::channel(cache::Kept {
        saved: None,
        confirmed,
        live: live.clone(),
    });
    base.running.tasks.spawn(cache::run(place, keep, metrics.clone()));
    let (mut running, Ends { publish, bypassed }) =
        base.start(&lock, &config.node_name, &publish::identity::KEYS, &store)?;
    let stop = running.stop.clone();
    let (silent, patience) = (store.clone(), stop.clone());
    running.tasks.spawn(async move {
        tokio::select! {
            () = patience.cancelled() => {}
            () = tokio::time::sleep(FIRST_WORD) => silent.remember(),
        }
    });
    let (names, wanted_names) = watch::channel(Default::default());
    let found = store.clone();
    running.tasks.spawn(source::lookup::run(
        wanted_names,
        known,
        move |addresses| found.set_addresses(addresses),
        stop.clone(),
    ));

    let interface = config.interface.clone();
    let heard = Heard::open(&interface, RESOLV_CONF.into());
    let (backend, opened) = (config.backend, interface.clone());
    let options = device::userspace::Options {
        offload: config.offload,
        ..Default::default()
    };
    let reconciler = Reconciler::new(Parts {
        bypassed,
        routing: route::Netlink::open(interface)?,
        firewall: firewall::Keeper::new(firewall::Nft::default())
            .remembering(firewall::Stamp::beside(&config.cache_file)),
        open: Box::new(move |configuration| device::open(backend, opened.as_str(), configuration, options)),
        key,
        server: running.connection.server.clone(),
        store: store.clone(),
        names,
        publish,
        kept,
        cache: Cache { confirmed, step },
        live,
        troubles: running.troubles(),
        metrics,
        dump: running.dump.clone(),
        config,
    });
    let heartbeat = running.liveness.watch("node", STUCK);
    turn(reconciler, &store, heard, &heartbeat, &stop).await;
    running.end().await;
    tracing::info!("wg-agent ends; what leaves in clear is still refused by routes and firewall until it is back");
    Ok(())
}

/// Passes until the token is cancelled. The device is dropped at the end: a kernel device carries on; of a userspace one the
/// interface stays. So do routes and firewall, and nothing for the mesh leaves in clear while nobody is here.
async fn turn<R: route::Routing, F: firewall::Backend>(
    mut reconciler: Reconciler<R, F>,
    store: &Store,
    mut heard: Heard,
    heartbeat: &Heartbeat,
    stop: &CancellationToken,
) {
    let mut failures = 0;
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while !stop.is_cancelled() {
        if !heard.of_routing() {
            reconciler.hear(Event::Anything);
        }
        let began = Instant::now();
        let well = reconciler.pass().await;
        let took = began.elapsed();
        let mut rest = Duration::ZERO;
        failures = if well { 0 } else { failures + 1 };
        let wait = match failures {
            0 => RESYNC,
            n => RETRY[(n - 1).min(RETRY.len() - 1)],
        };
        let again = Instant::now() + wait;
        let settle = loop {
            heartbeat.beat();
            tokio::select! {
                () = stop.cancelled() => break Duration::ZERO,
                () = store.changed() => {
                    rest = (took * 3).min(REST);
                    break SETTLE;
                }
                event = heard.changed() => {
                    // Our own writing is heard as well, and that of programs that write their own tables often.
                    if event == Event::Tables && reconciler.table_stands().await {
                        continue;
                    }
                    reconciler.hear(event);
                    break event.settle();
                }
                () = tokio::time::sleep_until(again.into()) => break Duration::ZERO,
                _ = look.tick() => {
                    reconciler.look();
                    if reconciler.ways_changed() {
                        break Duration::ZERO;
                    }
                }
            }
        };
        let settled = async {
            tokio::time::sleep(settle).await;
            tokio::select! {
                () = tokio::time::sleep(rest.saturating_sub(settle)) => {}
                () = store.policies_changed() => {}
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = settled => {}
        }
    }
    // What the next start should know of where the peers are.
    reconciler.look();
    drop(reconciler.into_device());
}

/// One a line.
pub(crate) fn lines<T: ToString>(all: &[T]) -> String {
    all.iter()
        .map(|one| format!("- {}", one.to_string()))
        .collect::<Vec<_>>()
        .join("\n")
}
