//! What all modes start alike: signals, the API server, metrics, the admin endpoint, `wg-agent status`, the watches,
//! publication, the look at the CNI. What a mode makes of it is in `run`, `beside` and `gateway`.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::Context;
use clustermesh_daemon::{Admin, Audience, CancellationToken, Liveness, Pending, Readiness, State, drain};
use tokio::{sync::watch, task::JoinSet};

use crate::{
    admission,
    lock::Lock,
    metrics::Metrics,
    publish::{self, Wanted},
    source::{self, client::Connection, datapath, store::Store},
    status::{self, Dump, Troubles},
};

/// How long ending may take.
const DRAIN: Duration = Duration::from_secs(5);

/// What a mode runs on.
pub(crate) struct Running {
    /// Cancelled by a signal, or so long after it.
    pub(crate) stop: CancellationToken,
    pub(crate) connection: Connection,
    pub(crate) metrics: Metrics,
    pub(crate) readiness: Readiness,
    /// `/readyz` may be served before there are troubles to list, and must not say that all is well.
    starting: Option<Pending>,
    pub(crate) liveness: Liveness,
    pub(crate) dump: Dump,
    /// What ends with `stop`.
    pub(crate) tasks: JoinSet<()>,
}

/// What is open before anything is served.
pub(crate) struct Base {
    pub(crate) running: Running,
    admin: Admin,
    state: State,
}

/// The ends of what was started.
pub(crate) struct Ends {
    /// What the Node should say.
    pub(crate) publish: watch::Sender<Wanted>,
    /// Whether the CNI leads packets past us.
    pub(crate) bypassed: watch::Receiver<Option<datapath::Found>>,
}

impl Base {
    /// Opens it with this admin endpoint. After a signal `/readyz` says so for `lame`, and then it stops.
    pub(crate) async fn open(
        kubeconfig: Option<&Path>,
        admin: Admin,
        metrics_per_peer: bool,
        lame: Duration,
    ) -> anyhow::Result<Self> {
        let signal = drain::on_signal().context("cannot install the signal handlers")?;
        let connection = source::client::connect(kubeconfig).await?;
        let mut registry = clustermesh_daemon::metrics::registry("wg_agent", env!("CARGO_PKG_VERSION"));
        let (stop, readiness) = (CancellationToken::new(), Readiness::new());
        tokio::spawn(end_after(signal, lame, readiness.clone(), stop.clone()));
        let running = Running {
            starting: Some(readiness.pending("starting")),
            stop,
            connection,
            metrics: Metrics::register(&mut registry, metrics_per_peer),
            readiness,
            liveness: Liveness::new(),
            dump: Dump::default(),
            tasks: JoinSet::new(),
        };
        let shown = running.dump.clone();
        let state = State {
            registry: Arc::new(registry),
            // Its port is an infrastructure port: the firewall table closes it to every member.
            metrics_for: Audience::Everyone,
            readiness: running.readiness.clone(),
            liveness: running.liveness.clone(),
            dump: Arc::new(move || shown.get()),
        };
        Ok(Self { running, admin, state })
    }

    /// Starts the admin endpoint and what answers `wg-agent status`.
    pub(crate) fn serve(self, lock: &Lock) -> anyhow::Result<Running> {
        let Self {
            mut running,
            admin,
            state,
        } = self;
        let Running { stop, dump, tasks, .. } = &mut running;
        let served = admin.serve(state, stop.clone());
        tasks.spawn(async move {
            if let Err(error) = served.await {
                tracing::error!(%error, "the admin endpoint ended");
            }
        });
        let listener = lock.status_listener().context("cannot answer `wg-agent status`")?;
        tasks.spawn(status::ask::answer(listener, dump.clone(), stop.clone()));
        Ok(running)
    }

    /// Starts it for this Node, of whose annotations `keys` are this agent's.
    pub(crate) fn start(
        self,
        lock: &Lock,
        node: &str,
        keys: &'static [&'static str],
        store: &Store,
    ) -> anyhow::Result<(Running, Ends)> {
        let mut running = self.serve(lock)?;
        let Running {
            stop,
            connection,
            metrics,
            readiness,
            dump,
            tasks,
            ..
        } = &mut running;
        let client = || connection.client.clone();
        tasks.spawn(admission::run(
            client(),
            node.to_owned(),
            readiness.clone(),
            dump.clone(),
            stop.clone(),
        ));
        source::follow(tasks, &connection.client, node, keys, store, stop);
        let (publish, wanted) = watch::channel(Wanted::default());
        tasks.spawn(publish::run(
            client(),
            node.to_owned(),
            wanted,
            metrics.clone(),
            stop.clone(),
        ));
        let (bypass, bypassed) = watch::channel(datapath::at_first());
        let found = datapath::run(client(), bypass, store.clone(), metrics.clone(), stop.clone());
        tasks.spawn(found);
        Ok((running, Ends { publish, bypassed }))
    }
}

impl Running {
    /// What the first pass over the node begins with. Until then `/readyz` says that this process starts.
    pub(crate) fn troubles(&mut self) -> Troubles {
        let troubles = Troubles::new(self.readiness.clone(), self.metrics.clone());
        self.starting = None;
        troubles
    }

    /// Waits, for a while, until everything has ended.
    pub(crate) async fn end(mut self) {
        drain::within(DRAIN, async { while self.tasks.join_next().await.is_some() {} }).await;
    }
}

/// While it is not ready and still runs, whoever leads connections here leads them elsewhere.
async fn end_after(signal: CancellationToken, lame: Duration, readiness: Readiness, stop: CancellationToken) {
    signal.cancelled().await;
    let _ending = readiness.pending("ending after a signal");
    tokio::time::sleep(lame).await;
    stop.cancel();
}
