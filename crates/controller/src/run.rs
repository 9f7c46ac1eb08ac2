//! The wiring of the controller: from the command line to the loop, and how it ends. No rule lives here.

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
    events::EventPublisher,
    feed::{self, Changed, Feed, Source, Trust},
    hub::Hub,
    hub_writer::HubWriter,
    metrics::Metrics,
    reconcile::{Reconciler, Shown, mesh_feed},
};

/// Passes are at least this far apart.
const DEBOUNCE: Duration = Duration::from_millis(50);
/// After a pass the loop rests twice as long as it took, this at most, so that members whose objects change without end do not
/// keep the processor busy. A changed ClusterMesh, a quarantine for example, ends the rest.
const REST: Duration = Duration::from_secs(2);
/// A loop that has not turned for this long is wedged: no pass waits for a member or the hub.
const WEDGED: Duration = Duration::from_secs(180);
/// How often it is asked where the hub's API servers listen.
const LEARN: Duration = Duration::from_secs(60);
/// For writes that are on their way at the end.
const DRAIN: Duration = Duration::from_secs(15);

/// Runs the controller until `stop` is cancelled.
///
/// # Errors
/// The kubeconfig does not parse, there are too many infrastructure ports, or `--listen` cannot be bound. Clusters that do not answer are waited for.
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
    let settings = Settings::closing(&infrastructure_ports)?;
    let config = match kubeconfig {
        None => Config::incluster().context("not in a pod; give the hub's kubeconfig with --kubeconfig")?,
        Some(path) => clustermesh_access::own(Some(&path), context.as_deref())
            .await
            .with_context(|| format!("--kubeconfig {}", path.display()))?,
    };
    let own = std::env::var("POD_NAMESPACE").ok().filter(|name| !name.is_empty());
    let own = own.unwrap_or_else(|| config.default_namespace.clone());
    let namespaces = HubNamespaces::new(&hub_namespaces, &member_namespaces, &hub_networks, &own);
    let hosts = hub_hosts(&config);
    tracing::info!(version = env!("CARGO_PKG_VERSION"), hub = %config.cluster_url, %listen, ?namespaces, ?settings, "starting");
    let client = Client::try_from(config).context("no client for the hub")?;

    let metrics = Metrics::default();
    let mut metrics_registry = registry::registry("clustermesh_controller", env!("CARGO_PKG_VERSION"));
    metrics.register(&mut metrics_registry);
    let (readiness, liveness, shown) = (Readiness::new(), Liveness::new(), Shown::default());
    let first_plan = readiness.pending("first plan");
    let first_list = readiness.pending("first list of ClusterMeshes");
    let identity = readiness.pending("id of the hub");
    let dump = Arc::clone(&shown);
    let state = State {
        registry: Arc::new(metrics_registry),
        metrics_for: if open_metrics {
            Audience::Everyone
        } else {
            Audience::Loopback
        },
        readiness,
        liveness: liveness.clone(),
        dump: Arc::new(move || dump.lock().unwrap_or_else(PoisonError::into_inner).dump()),
    };
    let admin = Admin::bind(listen)?;
    let served = tokio::spawn(admin.serve(state, stop.clone()));

    let id = tokio::select! {
        id = hub_identity(&client, hub_id) => id,
        () = stop.cancelled() => return Ok(()),
    };
    drop(identity);
    tracing::info!(hub = %id, "objects of this hub carry this id");

    let (changed, asked) = (Changed::default(), Changed::default());
    let meshes: Feed<Arc<ClusterMesh>> = mesh_feed(Arc::clone(&asked));
    let followed = meshes.clone();
    let source = Source {
        api: Api::all_with(client.clone(), &ApiResource::erase::<ClusterMesh>(&())),
        what: "clustermeshes".to_owned(),
        whose: "the hub".to_owned(),
        labels: String::new(),
        fields: String::new(),
    };
    let following = tokio::spawn(async move {
        // A connection that died is noticed by the watch itself.
        let (_resume, resumed) = tokio::sync::watch::channel(0);
        feed::follow(&source, &followed, resumed).await;
    });
    // Before the first session begins, where the hub answers.
    learn_addresses(&client, &hosts).await;
    let (learning, learned) = (client.clone(), hosts.clone());
    let learning = tokio::spawn(async move {
        loop {
            tokio::time::sleep(LEARN).await;
            learn_addresses(&learning, &learned).await;
        }
    });

    let counted = metrics.clone();
    let memory = usize::try_from(memory_limit / 8 * 3).unwrap_or(usize::MAX);
    let memory = Memory::new(memory, move |member, over| {
        // That the member is not followed any more is logged once, with the reason; this may be many times a minute.
        tracing::debug!(member, limit = over.word(), %over, "not taken");
        counted.over_budget(member, over.word());
    });
    let hub = Arc::new(Hub {
        client: client.clone(),
        id,
        hosts,
        memory,
        namespaces,
        settings,
    });
    let events = EventPublisher::new(client.clone(), std::env::var("POD_NAME").ok());
    let hub_writer = HubWriter::start(client, meshes.clone(), events);
    let mut reconciler = Reconciler::new(hub, meshes.clone(), hub_writer, metrics, Arc::clone(&changed), shown);
    let heartbeat = liveness.watch("reconcile", WEDGED);
    let (mut first_list, mut first_plan) = (Some(first_list), Some(first_plan));
    let (mut rest, mut wait) = (Duration::ZERO, Duration::ZERO);
    loop {
        let news = async {
            tokio::time::sleep(rest).await;
            tokio::select! {
                () = changed.notified() => {}
                () = tokio::time::sleep(wait.saturating_sub(rest)) => {}
            }
        };
        tokio::select! {
            () = asked.notified() => {}
            () = news => {}
            () = stop.cancelled() => break,
        }
        if following.is_finished() {
            anyhow::bail!("the watch of ClusterMeshes died");
        }
        let started = Instant::now();
        wait = tokio::select! {
            wait = reconciler.pass() => wait,
            () = stop.cancelled() => break,
        };
        heartbeat.beat();
        if meshes.trust() == Trust::Live && first_list.take().is_some() {
            first_plan.take();
        }
        let took = started.elapsed();
        rest = (took * 2).min(REST);
        tokio::time::sleep(DEBOUNCE.saturating_sub(took)).await;
    }
    following.abort();
    learning.abort();
    reconciler.stop_writing();
    reconciler.tasks.close();
    drain::within(DRAIN, reconciler.tasks.wait()).await;
    drain::within(Duration::from_secs(2), served).await;
    tracing::info!("ended; members keep what they have");
    Ok(())
}

/// Learns where the hub's API servers listen, beside the names of the API: no member may be there. Where the hub does not say,
/// what was learned last holds.
async fn learn_addresses(client: &Client, hosts: &HubHosts) {
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), "default");
    let of_api = ListParams::default().labels(&format!("{}=kubernetes", names::LABEL_SERVICE_NAME));
    match tokio::time::timeout(Duration::from_secs(5), slices.list(&of_api)).await {
        Ok(Ok(slices)) => hosts.learn(convert::service::api_endpoints(&slices.items)),
        Ok(Err(error)) => tracing::warn!(%error, "cannot read the addresses of the hub's own API"),
        Err(_) => tracing::warn!("the hub's API server does not answer"),
    }
}

/// The hub's id: as given, else the UID of kube-system, asked for until it answers.
async fn hub_identity(client: &Client, given: Option<String>) -> String {
    if let Some(id) = given {
        return id;
    }
    let ask = || async {
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let asked = tokio::time::timeout(Duration::from_secs(10), namespaces.get("kube-system"));
        let namespace = asked.await.context("the hub's API server does not answer")??;
        namespace.metadata.uid.context("namespace kube-system has no UID")
    };
    let patient = ExponentialBuilder::new()
        .with_max_delay(Duration::from_secs(10))
        .with_jitter()
        .without_max_times();
    loop {
        let asked = ask.retry(patient).notify(|error, wait| {
            tracing::warn!(%error, ?wait, "cannot read namespace kube-system of the hub; give --hub-id to do without");
        });
        if let Ok(id) = asked.await {
            return id;
        }
    }
}
