//! Starts the controller from its command line, runs the reconcile loop, and shuts it down.

use std::{
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use anyhow::Context;
use backon::{ExponentialBuilder, Retryable};
use clustermesh_access::{hub_hosts, kubeconfig::HubHosts, memory::Memory};
use clustermesh_api::{convert, mesh::ClusterMesh, names};
use clustermesh_core::{hub::HubNamespaces, plan::Settings};
use clustermesh_daemon::{Admin, Audience, CancellationToken, Liveness, Readiness, State, drain, metrics as registry};
use k8s_openapi::api::{core::v1::Namespace, discovery::v1::EndpointSlice};
use kube::{
    Api, Client, Config,
    api::{ApiResource, ListParams},
};

use crate::{
    args::Args,
    election::Election,
    feed::{self, Changed, Feed, Trust, WatchedResource},
    hub::Hub,
    hub_writer::HubWriter,
    metrics::Metrics,
    reconcile::{Reconciler, SharedDebugView, mesh_feed},
};

/// The minimum time between the starts of two passes.
const DEBOUNCE: Duration = Duration::from_millis(20);
/// The longest pause after a pass. The loop pauses twice as long as the pass took, so that members whose objects change all the
/// time do not keep the CPU busy. A changed ClusterMesh, for example with a new quarantine, ends the pause.
const MAX_PAUSE: Duration = Duration::from_secs(2);
/// The liveness probe fails if no pass finishes for this long. Then the loop is stuck, because no pass waits for a member or the hub.
const STUCK_AFTER: Duration = Duration::from_secs(180);
/// The time after which the addresses of the hub's API servers are read again.
const ADDRESS_REFRESH: Duration = Duration::from_secs(60);
/// How long shutdown waits for writes that are in flight.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(15);

/// Runs the controller until `stop` is cancelled.
///
/// # Errors
/// There is no usable kubeconfig, there are too many infrastructure ports, `--listen` cannot be bound, or the task that watches
/// ClusterMeshes ends. If a cluster does not answer, this is no error: the controller waits for it.
pub async fn run(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let Args {
        kubeconfig,
        context,
        hub_namespaces,
        member_namespaces,
        hub_networks,
        infrastructure_ports,
        hub_id,
        memory_limit,
        listen,
        open_metrics,
        log_format: _,
    } = args;
    let settings = Settings::with_infrastructure_ports(&infrastructure_ports)?;
    let config = match kubeconfig {
        None => Config::incluster().context("not in a pod; give the hub's kubeconfig with --kubeconfig")?,
        Some(path) => clustermesh_access::read_own_config(Some(&path), context.as_deref())
            .await
            .with_context(|| format!("--kubeconfig {}", path.display()))?,
    };
    let own_namespace = std::env::var("POD_NAMESPACE").ok().filter(|name| !name.is_empty());
    let own_namespace = own_namespace.unwrap_or_else(|| config.default_namespace.clone());
    let namespaces = HubNamespaces::new(&hub_namespaces, &member_namespaces, &hub_networks, &own_namespace);
    let hosts = hub_hosts(&config);
    tracing::info!(version = env!("CARGO_PKG_VERSION"), hub = %config.cluster_url, %listen, ?namespaces, ?settings, "starting");
    let client = clustermesh_daemon::client::build(&config).context("no client for the hub")?;

    let metrics = Metrics::default();
    let mut metrics_registry = registry::registry("clustermesh_controller", env!("CARGO_PKG_VERSION"));
    metrics.register(&mut metrics_registry);
    let (readiness, liveness, debug_view) = (Readiness::new(), Liveness::new(), SharedDebugView::default());
    let first_plan = readiness.pending("first plan");
    let first_list = readiness.pending("first list of ClusterMeshes");
    let hub_id_pending = readiness.pending("id of the hub");
    let dump = Arc::clone(&debug_view);
    let state = State {
        registry: Arc::new(metrics_registry),
        metrics_for: if open_metrics {
            Audience::Everyone
        } else {
            Audience::Loopback
        },
        readiness: readiness.clone(),
        liveness: liveness.clone(),
        dump: Arc::new(move || dump.lock().unwrap_or_else(PoisonError::into_inner).dump()),
    };
    let admin = Admin::bind(listen)?;
    let admin_task = tokio::spawn(admin.serve(state, stop.clone()));

    let id = tokio::select! {
        id = hub_identity(&client, hub_id) => id,
        () = stop.cancelled() => return Ok(()),
    };
    drop(hub_id_pending);
    tracing::info!(hub = %id, "hub identified; its objects in members have this id as a label");

    let pod_name = std::env::var("POD_NAME").ok().filter(|name| !name.is_empty());
    let replica = pod_name
        .clone()
        .unwrap_or_else(|| format!("process-{}", std::process::id()));
    let election = Election::start(&config, &own_namespace, &replica, readiness.clone())?;
    let mut leadership = election.subscribe();

    let (changed, meshes_changed) = (Changed::default(), Changed::default());
    let meshes: Feed<Arc<ClusterMesh>> = mesh_feed(Arc::clone(&meshes_changed));
    let followed = meshes.clone();
    let kind = ApiResource::erase::<ClusterMesh>(&());
    let resource = WatchedResource {
        api: Api::all_with(client.clone(), &kind),
        kind,
        description: "clustermeshes".to_owned(),
        cluster: "the hub".to_owned(),
        labels: String::new(),
        fields: String::new(),
    };
    let watch_task = tokio::spawn(async move {
        // Unlike a connection to a member, this one is not probed. A watch on a dead connection times out by itself.
        feed::follow(&resource, &followed).await;
    });
    // Must come before the first connection to a member: with these addresses, kubeconfigs that name the hub's API server are refused.
    // If the hub does not answer, the start continues after a timeout.
    refresh_hub_addresses(&client, &hosts).await;
    let (refresh_client, refreshed_hosts) = (client.clone(), hosts.clone());
    let refresh_task = tokio::spawn(async move {
        loop {
            tokio::time::sleep(ADDRESS_REFRESH).await;
            refresh_hub_addresses(&refresh_client, &refreshed_hosts).await;
        }
    });

    let budget_metrics = metrics.clone();
    // The data of all members together stays below twice this value (see [`Memory`]), so at least a quarter of `--memory-limit`
    // remains for other memory.
    let memory = usize::try_from(memory_limit / 8 * 3).unwrap_or(usize::MAX);
    let memory = Memory::new(memory, move |member, over| {
        // The level is debug because this may happen many times per minute. The feed logs once, with the reason, that it is not current.
        tracing::debug!(member, limit = over.label(), %over, "data of the member exceeds its budget");
        budget_metrics.count_over_budget(member, over.label());
    });
    let hub = Arc::new(Hub {
        client: client.clone(),
        election: Arc::clone(&election),
        id,
        hosts,
        memory,
        namespaces,
        settings,
    });
    let hub_writer = HubWriter::start(client, pod_name, meshes.clone(), Arc::clone(&election), readiness);
    let mut reconciler = Reconciler::new(
        hub,
        meshes.clone(),
        hub_writer,
        metrics,
        Arc::clone(&changed),
        debug_view,
    );
    let heartbeat = liveness.watch("reconcile", STUCK_AFTER);
    let (mut first_list, mut first_plan) = (Some(first_list), Some(first_plan));
    // The next pass is due `interval` after the last one, or after a change, but not before `pause` has passed. A changed
    // ClusterMesh makes it due at once.
    let (mut pause, mut interval) = (Duration::ZERO, Duration::ZERO);
    loop {
        let due = async {
            tokio::time::sleep(pause).await;
            tokio::select! {
                () = changed.notified() => {}
                () = tokio::time::sleep(interval.saturating_sub(pause)) => {}
            }
        };
        tokio::select! {
            () = meshes_changed.notified() => {}
            // Never fails, because `election` owns the sender.
            Ok(()) = leadership.changed() => {}
            () = due => {}
            () = stop.cancelled() => break,
        }
        if watch_task.is_finished() || election.has_ended() {
            anyhow::bail!("the task that watches ClusterMeshes, or the one that elects the leader, ended unexpectedly");
        }
        let started = Instant::now();
        interval = tokio::select! {
            interval = reconciler.pass() => interval,
            () = stop.cancelled() => break,
        };
        heartbeat.beat();
        // Dropping both makes the controller ready. A plan before the first list does not count.
        if meshes.trust() == Trust::Live {
            drop((first_list.take(), first_plan.take()));
        }
        let took = started.elapsed();
        pause = (took * 2).min(MAX_PAUSE);
        tokio::time::sleep(DEBOUNCE.saturating_sub(took)).await;
    }
    watch_task.abort();
    refresh_task.abort();
    reconciler.stop_writing();
    drain::within(DRAIN_TIMEOUT, election.resign()).await;
    reconciler.tasks.close();
    drain::within(DRAIN_TIMEOUT, reconciler.tasks.wait()).await;
    drain::within(Duration::from_secs(2), admin_task).await;
    tracing::info!("stopped; objects in the members stay as they are");
    Ok(())
}

/// Reads the addresses on which the hub's API servers listen, and stores them in `hosts`. Kubeconfigs of members that name one of them
/// are refused. If the hub does not answer, the last addresses stay valid.
async fn refresh_hub_addresses(client: &Client, hosts: &HubHosts) {
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), "default");
    let api_service = ListParams::default().labels(&format!("{}=kubernetes", names::LABEL_SERVICE_NAME));
    match tokio::time::timeout(Duration::from_secs(5), slices.list(&api_service)).await {
        Ok(Ok(slices)) => hosts.set_addresses(convert::service::api_endpoints(&slices.items)),
        Ok(Err(error)) => tracing::warn!(%error, "cannot read the addresses of the hub's API servers"),
        Err(_) => tracing::warn!("the hub's API server does not answer"),
    }
}

/// Returns the hub's id: `given`, else the UID of the namespace kube-system. Retries until the hub answers.
async fn hub_identity(client: &Client, given: Option<String>) -> String {
    if let Some(id) = given {
        return id;
    }
    let read_uid = || async {
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let request = tokio::time::timeout(Duration::from_secs(10), namespaces.get("kube-system"));
        let namespace = request.await.context("the hub's API server does not answer")??;
        namespace.metadata.uid.context("namespace kube-system has no UID")
    };
    let backoff = ExponentialBuilder::new()
        .with_max_delay(Duration::from_secs(10))
        .with_jitter()
        .without_max_times();
    loop {
        let retried = read_uid.retry(backoff).notify(|error, wait| {
            tracing::warn!(%error, ?wait, "cannot read namespace kube-system of the hub; set --hub-id if the controller may not read it");
        });
        if let Ok(id) = retried.await {
            return id;
        }
    }
}
