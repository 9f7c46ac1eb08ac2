//! One connection of a session: its feeds and its probe, from a client until something calls for a new beginning.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, Client};
use tokio::{
    sync::watch,
    task::{AbortHandle, JoinSet},
    time::MissedTickBehavior,
};

use super::{Interest, Shared, bounded, tables::Following};

/// How often the API server is asked whether it is still there.
const PROBE: Duration = Duration::from_secs(10);

/// Serves one connection; returns when it should be begun anew (a silent server answers again: its watches may hang on
/// dead connections).
pub(super) async fn serve(shared: &Arc<Shared>, client: &Client, mut wanted: watch::Receiver<Interest>) {
    shared.relink(|link| {
        link.client = Some(client.clone());
        link.missing = None;
        link.silent = None;
        // It may be another cluster now, and an old UID must not speak for it.
        link.uid = None;
    });
    shared.tables.begin();

    let mut feeds = JoinSet::new();
    for following in shared.tables.fixed(client) {
        feeds.spawn(following.run());
    }
    let mut extra: BTreeMap<String, AbortHandle> = BTreeMap::new();
    let mut probe = tokio::time::interval(PROBE);
    probe.set_missed_tick_behavior(MissedTickBehavior::Delay);
    wanted.mark_changed();
    let (mut was_silent, mut asked) = (false, false);

    loop {
        tokio::select! {
            changed = wanted.changed() => {
                if changed.is_err() {
                    return;
                }
                let interest = wanted.borrow_and_update().clone();
                let followings: BTreeMap<String, Following> = shared.tables.extra(client, &interest);
                extra.retain(|what, handle| {
                    let keep = followings.contains_key(what);
                    if !keep {
                        handle.abort();
                    }
                    keep
                });
                for (what, following) in followings {
                    extra.entry(what).or_insert_with(|| feeds.spawn(following.run()));
                }
            }
            _ = probe.tick() => {
                match bounded(client.apiserver_version()).await {
                    Ok(version) => {
                        if was_silent {
                            return;
                        }
                        learn(shared, client, version.git_version, &mut asked).await;
                    }
                    Err(why) => {
                        if !was_silent {
                            tracing::warn!(member = %shared.identity, %why, "the API server fell silent");
                            shared.relink(|link| link.silent = Some(why));
                        }
                        was_silent = true;
                    }
                }
            }
            Some(ended) = feeds.join_next() => {
                if let Err(error) = ended && error.is_panic() {
                    tracing::error!(member = %shared.identity, %error, "a feed died; beginning the connection again");
                    return;
                }
            }
        }
    }
}

/// Notes what the server says of itself; asks for the cluster's UID once a connection.
async fn learn(shared: &Shared, client: &Client, version: String, asked: &mut bool) {
    let version: String = version.chars().take(64).collect();
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
