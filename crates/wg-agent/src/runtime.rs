//! Starts the tasks that all modes of the agent have: signal handling, API client, metrics, admin endpoint, `wg-agent status`. In
//! full mode and policy mode it also starts the watches, the publication of annotations, and the checks for a bypassed firewall
//! and for the admission policy.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::Context;
use clustermesh_daemon::{Admin, Audience, CancellationToken, Liveness, Readiness, ReadinessItem, State, drain};
use tokio::{sync::watch, task::JoinSet};

use crate::{
    admission,
    lock::Lock,
    metrics::Metrics,
    publish::{self, DesiredAnnotations},
    source::{self, client::Connection, datapath, store::Store},
    status::{self, Dump, PassReporter},
};

/// How long the tasks may take to end.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// The parts that a running agent has in every mode.
pub(crate) struct Runtime {
    /// Cancelled when the `drain_time` after a signal is over.
    pub(crate) stop: CancellationToken,
    pub(crate) connection: Connection,
    pub(crate) metrics: Metrics,
    pub(crate) readiness: Readiness,
    /// Keeps `/readyz` unready until [`Self::pass_reporter`] adds its own line.
    starting: Option<ReadinessItem>,
    pub(crate) liveness: Liveness,
    pub(crate) dump: Dump,
    /// Tasks that end when `stop` is cancelled.
    pub(crate) tasks: JoinSet<()>,
}

/// A [`Runtime`] whose tasks do not run yet, and what its admin endpoint needs.
pub(crate) struct RuntimeBuilder {
    pub(crate) runtime: Runtime,
    admin: Admin,
    state: State,
}

/// Channels to and from the tasks of an agent in full or policy mode.
pub(crate) struct NodeChannels {
    /// The annotations that the Node should have.
    pub(crate) publish: watch::Sender<DesiredAnnotations>,
    /// Why packets may bypass the firewall table; `None` = no reason is known.
    pub(crate) datapath_problem: watch::Receiver<Option<datapath::DatapathProblem>>,
}

impl RuntimeBuilder {
    /// Builds the API client and registers metrics. After a signal `/readyz` is unready for `drain_time`; then
    /// `stop` is cancelled.
    pub(crate) async fn open(
        kubeconfig: Option<&Path>,
        admin: Admin,
        metrics_per_peer: bool,
        drain_time: Duration,
    ) -> anyhow::Result<Self> {
        let signal = drain::on_signal().context("cannot install the signal handlers")?;
        let connection = source::client::build(kubeconfig).await?;
        let mut registry = clustermesh_daemon::metrics::registry("wg_agent", env!("CARGO_PKG_VERSION"));
        let (stop, readiness) = (CancellationToken::new(), Readiness::new());
        tokio::spawn(stop_after_signal(signal, drain_time, readiness.clone(), stop.clone()));
        let runtime = Runtime {
            starting: Some(readiness.pending("starting")),
            stop,
            connection,
            metrics: Metrics::register(&mut registry, metrics_per_peer),
            readiness,
            liveness: Liveness::new(),
            dump: Dump::default(),
            tasks: JoinSet::new(),
        };
        let state_dump = runtime.dump.clone();
        let state = State {
            registry: Arc::new(registry),
            // `Everyone` is safe: the firewall table blocks the admin port for other members.
            metrics_for: Audience::Everyone,
            readiness: runtime.readiness.clone(),
            liveness: runtime.liveness.clone(),
            dump: Arc::new(move || state_dump.render()),
        };
        Ok(Self { runtime, admin, state })
    }

    /// Starts the admin endpoint and the socket of `wg-agent status`.
    pub(crate) fn serve(self, lock: &Lock) -> anyhow::Result<Runtime> {
        let Self {
            mut runtime,
            admin,
            state,
        } = self;
        let Runtime { stop, dump, tasks, .. } = &mut runtime;
        let served = admin.serve(state, stop.clone());
        tasks.spawn(async move {
            if let Err(error) = served.await {
                tracing::error!(%error, "the admin endpoint ended");
            }
        });
        let listener = lock.status_listener().context("cannot answer `wg-agent status`")?;
        tasks.spawn(status::socket::serve(listener, dump.clone(), stop.clone()));
        Ok(runtime)
    }

    /// Does what [`Self::serve`] does, and starts the watches, the publication and the checks for this Node. `keys` are the annotations
    /// that this mode writes.
    pub(crate) fn start(
        self,
        lock: &Lock,
        node: &str,
        keys: &'static [&'static str],
        store: &Store,
    ) -> anyhow::Result<(Runtime, NodeChannels)> {
        let mut runtime = self.serve(lock)?;
        let Runtime {
            stop,
            connection,
            metrics,
            readiness,
            dump,
            tasks,
            ..
        } = &mut runtime;
        let client = || connection.client.clone();
        tasks.spawn(admission::run(
            client(),
            node.to_owned(),
            readiness.clone(),
            dump.clone(),
            stop.clone(),
        ));
        source::start_watches(tasks, &connection.client, node, keys, store, stop);
        let (publish, wanted) = watch::channel(DesiredAnnotations::default());
        tasks.spawn(publish::run(
            client(),
            node.to_owned(),
            wanted,
            metrics.clone(),
            stop.clone(),
        ));
        let (problem_sender, datapath_problem) = watch::channel(datapath::initial());
        let check = datapath::run(client(), problem_sender, store.clone(), metrics.clone(), stop.clone());
        tasks.spawn(check);
        Ok((
            runtime,
            NodeChannels {
                publish,
                datapath_problem,
            },
        ))
    }
}

impl Runtime {
    /// Creates the reporter of passes. Until this is called, `/readyz` reports that the process is starting.
    pub(crate) fn pass_reporter(&mut self) -> PassReporter {
        let reporter = PassReporter::new(self.readiness.clone(), self.metrics.clone(), self.dump.clone());
        self.starting = None;
        reporter
    }

    /// Waits up to [`SHUTDOWN_TIMEOUT`] for all tasks to end.
    pub(crate) async fn shut_down(mut self) {
        drain::within(SHUTDOWN_TIMEOUT, async {
            while self.tasks.join_next().await.is_some() {}
        })
        .await;
    }
}

/// After a signal, makes the pod unready and cancels `stop` after `drain_time`. Meanwhile sandboxes connect to other gateways; only
/// gateway mode has a `drain_time` above 0.
async fn stop_after_signal(
    signal: CancellationToken,
    drain_time: Duration,
    readiness: Readiness,
    stop: CancellationToken,
) {
    signal.cancelled().await;
    let _ending = readiness.pending("ending after a signal");
    tokio::time::sleep(drain_time).await;
    stop.cancel();
}
