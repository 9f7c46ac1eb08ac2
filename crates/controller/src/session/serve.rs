//! Runs one connection of a session: the tasks that keep the feeds up to date (each feed: a local table of the objects of one kind),
//! and a probe of the API server.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use clustermesh_access::expiry::Expiry;
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, Client};
use tokio::{
    sync::watch,
    task::{AbortHandle, JoinSet},
};

use super::{Credentials, Interest, ProbeError, Shared, Writer, member_feeds::FeedTask, with_timeout};
use crate::{api_error, events::truncate, feed};

/// How often the API server is probed.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// The pause after the first failed probe.
const RETRY_INTERVAL: Duration = Duration::from_secs(3);
/// The API server is unresponsive after this many failures in a row. A single failure only shortens the next pause.
const MAX_FAILURES: u32 = 2;

/// Runs a connection. Returns if one of its tasks panicked, so that the caller connects again, or if the sender of `interest_receiver`
/// was dropped.
pub(super) async fn serve(
    shared: &Arc<Shared>,
    (client, expiry): (&Client, Option<Expiry>),
    writer: Writer,
    mut interest_receiver: watch::Receiver<Interest>,
) {
    let fence = writer.fence.clone();
    // Before the credentials are ready. Otherwise a pass in between would see the rows of the last connection as fresh.
    shared.feeds.read_again(feed::Cluster::MayDiffer);
    shared.update_connection(|connection| {
        connection.credentials = Credentials::Ready(client.clone(), expiry);
        connection.writer = Some(writer);
        connection.unresponsive = None;
        // The new client may reach another cluster, to which the old UID does not belong.
        connection.uid = None;
    });

    let mut tasks = JoinSet::new();
    // A leader takes the Lease in the member while it reads the member's objects. Otherwise the first write would wait for
    // this Lease.
    if let Some(fence) = fence.filter(|fence| fence.start_taking()) {
        let changed = Arc::clone(&shared.changed);
        tasks.spawn(async move {
            fence.take().await;
            changed.notify_one();
        });
    }
    for task in shared.feeds.permanent_tasks(client) {
        tasks.spawn(task.run());
    }
    let mut on_demand: BTreeMap<String, (u64, AbortHandle)> = BTreeMap::new();
    // The probe has its own task. Otherwise the set of feeds could not change while the probe waits for a response.
    let probing = (Arc::clone(shared), client.clone());
    tasks.spawn(async move { probe(&probing.0, &probing.1).await });
    interest_receiver.mark_changed();

    loop {
        tokio::select! {
            changed = interest_receiver.changed() => {
                if changed.is_err() {
                    return;
                }
                let interest = interest_receiver.borrow_and_update().clone();
                let needed: BTreeMap<String, FeedTask> = shared.feeds.on_demand_tasks(client, &interest);
                on_demand.retain(|feed_name, (feed_id, handle)| {
                    // A feed that was dropped and created again needs a new task, even if it watches the same objects.
                    let keep = needed.get(feed_name).is_some_and(|task| task.feed_id == *feed_id);
                    if !keep {
                        handle.abort();
                    }
                    keep
                });
                for (feed_name, task) in needed {
                    on_demand
                        .entry(feed_name)
                        .or_insert_with(|| (task.feed_id, tasks.spawn(task.run())));
                }
            }
            Some(ended) = tasks.join_next() => {
                if let Err(error) = ended && error.is_panic() {
                    tracing::error!(member = %shared.identity, %error, "a task of the connection panicked; connecting again");
                    return;
                }
            }
        }
    }
}

/// Probes the API server in a loop. When an unresponsive server answers again, reads all objects again, because the TCP connections of
/// the watches may be dead.
async fn probe(shared: &Shared, client: &Client) {
    let (mut failures, mut has_uid) = (0, false);
    loop {
        match with_timeout(client.apiserver_version()).await {
            Ok(version) => {
                recover(shared, &mut failures);
                update_version_and_uid(shared, client, version.git_version, &mut has_uid).await;
            }
            // For example a 403 for this path, or a 429. The server is running.
            Err(error) if error.is_answer => recover(shared, &mut failures),
            Err(ProbeError { why, .. }) => {
                failures += 1;
                if failures == MAX_FAILURES {
                    tracing::warn!(member = %shared.identity, %why, "the API server does not answer");
                    shared.update_connection(|connection| connection.unresponsive = Some(why));
                }
            }
        }
        let pause = if failures == 0 || failures >= MAX_FAILURES {
            PROBE_INTERVAL
        } else {
            RETRY_INTERVAL
        };
        tokio::time::sleep(pause).await;
    }
}

/// Resets the failures after a response. If the server was unresponsive, clears that state and reads all objects again.
fn recover(shared: &Shared, failures: &mut u32) {
    if std::mem::take(failures) < MAX_FAILURES {
        return;
    }
    tracing::info!(member = %shared.identity, "the API server answers again");
    shared.feeds.read_again(feed::Cluster::Same);
    shared.update_connection(|connection| connection.unresponsive = None);
}

/// Stores the version of the API server, and once for each connection the UID of the cluster.
async fn update_version_and_uid(shared: &Shared, client: &Client, version: String, has_uid: &mut bool) {
    let version = truncate(&api_error::sanitize(&version), 64);
    let mut uid = shared.connection().uid.clone();
    if !*has_uid {
        // If the ServiceAccount may not read kube-system, the UID stays unknown. Then an object is kept if its mesh may reference
        // this cluster by another Secret (`reconcile::planning::may_have_other_secret`).
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let answer = with_timeout(namespaces.get("kube-system")).await;
        *has_uid = answer.is_ok();
        uid = answer.map_or(uid, |namespace| namespace.metadata.uid);
    }
    let has_changed = {
        let connection = shared.connection();
        connection.version.as_ref() != Some(&version) || connection.uid != uid
    };
    if has_changed {
        shared.update_connection(|connection| {
            connection.version = Some(version);
            connection.uid = uid;
        });
    }
}
