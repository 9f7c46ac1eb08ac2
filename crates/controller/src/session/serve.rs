//! One connection of a session: its feeds and its probe, from a client until something calls for a new beginning.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, Client};
use tokio::{
    sync::watch,
    task::{AbortHandle, JoinSet},
};

use super::{Failure, Interest, Shared, bounded, tables::Following};
use crate::{events::cut, trouble};

/// How often the API server is asked whether it is still there.
const PROBE: Duration = Duration::from_secs(10);
/// When it is asked again after it did not answer.
const AGAIN: Duration = Duration::from_secs(3);
/// It is silent when it did not answer so often in a row: one hiccup costs nothing.
const FAILURES: u32 = 2;

/// Serves one connection; returns when it should be begun anew.
pub(super) async fn serve(shared: &Arc<Shared>, client: &Client, mut wanted: watch::Receiver<Interest>) {
    shared.relink(|link| {
        link.client = Some(client.clone());
        link.missing = None;
        link.silent = None;
        // It may be another cluster now, and an old UID must not speak for it.
        link.uid = None;
    });
    shared.tables.begin();

    let (resume, resumed) = watch::channel(0);
    let mut tasks = JoinSet::new();
    for following in shared.tables.fixed(client) {
        tasks.spawn(following.run(resumed.clone()));
    }
    let mut extra: BTreeMap<String, (u64, AbortHandle)> = BTreeMap::new();
    // Beside the feeds: while it waits for an answer, what is to be followed may change, more than once.
    let probing = (Arc::clone(shared), client.clone());
    tasks.spawn(async move { probe(&probing.0, &probing.1, &resume).await });
    wanted.mark_changed();

    loop {
        tokio::select! {
            changed = wanted.changed() => {
                if changed.is_err() {
                    return;
                }
                let interest = wanted.borrow_and_update().clone();
                let followings: BTreeMap<String, Following> = shared.tables.extra(client, &interest);
                extra.retain(|what, (table, handle)| {
                    // A table that was dropped and requested again is a new one, even with the same objects.
                    let keep = followings.get(what).is_some_and(|following| following.table == *table);
                    if !keep {
                        handle.abort();
                    }
                    keep
                });
                for (what, following) in followings {
                    extra
                        .entry(what)
                        .or_insert_with(|| (following.table, tasks.spawn(following.run(resumed.clone()))));
                }
            }
            Some(ended) = tasks.join_next() => {
                if let Err(error) = ended && error.is_panic() {
                    tracing::error!(member = %shared.identity, %error, "a feed died; beginning the connection again");
                    return;
                }
            }
        }
    }
}

/// Asks the API server again and again whether it is there. When a silent one answers again, the feeds resume: their watches
/// may hang on dead connections.
async fn probe(shared: &Shared, client: &Client, resume: &watch::Sender<u64>) {
    let (mut failures, mut asked) = (0, false);
    loop {
        match bounded(client.apiserver_version()).await {
            Ok(version) => {
                recover(shared, resume, &mut failures);
                learn(shared, client, version.git_version, &mut asked).await;
            }
            // The path may be closed to the account, or the server busy: it is there.
            Err(failure) if failure.answered => recover(shared, resume, &mut failures),
            Err(Failure { why, .. }) => {
                failures += 1;
                if failures == FAILURES {
                    tracing::warn!(member = %shared.identity, %why, "the API server fell silent");
                    shared.relink(|link| link.silent = Some(why));
                }
            }
        }
        let pause = if failures == 0 || failures >= FAILURES {
            PROBE
        } else {
            AGAIN
        };
        tokio::time::sleep(pause).await;
    }
}

/// It answered.
fn recover(shared: &Shared, resume: &watch::Sender<u64>, failures: &mut u32) {
    if std::mem::take(failures) < FAILURES {
        return;
    }
    tracing::info!(member = %shared.identity, "the API server answers again");
    // Nothing that was read before counts as current until its watch stands again.
    shared.tables.begin();
    resume.send_modify(|times| *times += 1);
    shared.relink(|link| link.silent = None);
}

/// Notes what the server says of itself; asks for the cluster's UID once a connection.
async fn learn(shared: &Shared, client: &Client, version: String, asked: &mut bool) {
    let version = cut(&trouble::quoted(&version), 64);
    let mut uid = shared.link().uid.clone();
    if !*asked {
        // Without the right to read kube-system there is no UID, which only ever refuses anyway.
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let answer = bounded(namespaces.get("kube-system")).await;
        *asked = answer.is_ok();
        uid = answer.map_or(uid, |namespace| namespace.metadata.uid);
    }
    let news = {
        let link = shared.link();
        link.version.as_ref() != Some(&version) || link.uid != uid
    };
    if news {
        shared.relink(|link| {
            link.version = Some(version);
            link.uid = uid;
        });
    }
}
