//! Watches the objects of the snapshot: always SandboxAccesses and the gateway's own SandboxGateway, and the Services and
//! EndpointSlices of each namespace with a granted Service.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use clustermesh_api::sandbox::{SandboxAccess, SandboxGateway};
use k8s_openapi::api::{core::v1, discovery::v1::EndpointSlice};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, ListParams},
    runtime::watcher,
};
use tokio::{sync::watch, task::JoinSet};
use tokio_util::sync::CancellationToken;

use super::{Failure, GatewaySnapshot, GrantedNamespaces, Namespace, Store};
use crate::{
    args::GatewayName,
    gateway::objects::{ParsedAccess, ParsedGateway, ParsedService, ParsedSlice},
    source::watch::{WatchSink, WatchedKind, watch_kind},
};

/// How long a namespace is watched after its last grant was removed. A new grant within this time needs no new list.
const KEEP_WATCHING: Duration = Duration::from_secs(600);
/// The number of SandboxAccesses in one page of a list. An object can be larger than a megabyte, and the
/// container of a gateway has 256 MB.
const PAGE: u32 = 8;
/// Timeout of the watches of a namespace, in seconds. It is short because the API server checks the account's rights only when a watch
/// begins, and the grants of a namespace close after access to it is denied.
const ACCESS_CHECK: u32 = 60;
/// The longest pause of [`probe_api_server`] after a request that failed or was not answered.
const RETRY: Duration = Duration::from_secs(1);
/// Timeout of one request of [`probe_api_server`].
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// If the API server denies access to a namespace that was listed before, the gateway continues to serve its Services for this
/// time. A starting API server denies all requests until it has read the RBAC roles.
pub(super) const DENIAL_GRACE: Duration = Duration::from_secs(30);

pub(super) type KindSelector<V> =
    Box<dyn for<'a> Fn(&'a mut GatewaySnapshot) -> Option<&'a mut WatchedKind<V>> + Send + Sync>;

/// Puts the objects of one watch into the snapshot.
pub(super) struct SnapshotSink<V> {
    pub(super) store: Store,
    /// The watched kind, such as `Services of namespace team`, for messages and as the key of [`GatewaySnapshot`]'s errors.
    pub(super) kind: String,
    /// The namespace of Services and EndpointSlices; `None` for other kinds.
    pub(super) namespace: Option<String>,
    pub(super) select: KindSelector<V>,
}

impl<V> SnapshotSink<V> {
    fn other_watch_of_namespace_fails(&self, snapshot: &GatewaySnapshot) -> bool {
        let Some(namespace) = &self.namespace else { return false };
        let suffix = namespace_suffix(namespace);
        let mut failing = snapshot.errors.keys();
        failing.any(|kind| *kind != self.kind && kind.ends_with(&suffix))
    }

    /// Records the failure to watch the namespace; `None` = it is watched. Returns whether [`Namespace::lasting_failure`] changed: then the
    /// gateway stops or resumes serving the Services of the namespace.
    fn set_failure(&self, snapshot: &mut GatewaySnapshot, failure: Option<Failure>) -> bool {
        let answers_since = snapshot.answers_since;
        let namespace = self
            .namespace
            .as_ref()
            .and_then(|name| snapshot.namespaces.get_mut(name));
        let Some(namespace) = namespace else { return false };
        let since = namespace.failing.map_or_else(Instant::now, |(since, _)| since);
        namespace.failing = failure.map(|failure| (since, failure));
        let is_lasting = |failure: &Failure| match failure {
            Failure::AccessDenied => !namespace.is_listed() || since.elapsed() >= DENIAL_GRACE,
            // The failure becomes lasting when every request of `probe_api_server` has succeeded for `--grant-timeout` since the watch
            // failed. If those requests fail, all grants close anyway after this time: the element of the set `alive` in the gateway's
            // nftables table expires. Open connections then continue when the gateway renews the element, unlike after a lasting
            // failure.
            Failure::Other => answers_since.is_some_and(|answers| answers.max(since).elapsed() >= self.store.timeout),
        };
        let lasting = failure.filter(is_lasting);
        std::mem::replace(&mut namespace.lasting_failure, lasting) != lasting
    }
}

impl<V: Send> WatchSink<V> for SnapshotSink<V> {
    fn change(&self, change: impl FnOnce(&mut WatchedKind<V>) -> bool + Send) {
        self.store.change(|snapshot| {
            let recovered = snapshot.errors.remove(&self.kind).is_some();
            if recovered && !self.other_watch_of_namespace_fails(snapshot) {
                self.set_failure(snapshot, None);
            }
            (self.select)(snapshot).is_some_and(change) || recovered
        });
    }

    fn failed(&self, error: &watcher::Error) {
        self.store.metrics.count_error("source");
        let (failure, why) = match error {
            watcher::Error::InitialListFailed(kube::Error::Api(status))
            | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => {
                let failure = if status.code == 403 {
                    Failure::AccessDenied
                } else {
                    Failure::Other
                };
                (failure, status.message.clone())
            }
            error => (Failure::Other, error.to_string()),
        };
        let message = format!("{} cannot be watched: {why}", self.kind);
        self.store.change(|snapshot| {
            let has_changed = self.set_failure(snapshot, Some(failure));
            let is_new = snapshot.errors.insert(self.kind.clone(), message.clone()) != Some(message);
            has_changed || is_new
        });
    }
}

/// The end of [`SnapshotSink::kind`] for a kind in a namespace.
fn namespace_suffix(namespace: &str) -> String {
    format!(" of namespace {namespace}")
}

/// Starts all watches. They end when `stop` is cancelled.
pub(in crate::gateway) fn start_watches(
    tasks: &mut JoinSet<()>,
    client: &Client,
    gateway: &GatewayName,
    store: &Store,
    wanted: GrantedNamespaces,
    stop: &CancellationToken,
) {
    let accesses = ApiResource::erase::<SandboxAccess>(&());
    tasks.spawn(watch_kind(
        Api::<DynamicObject>::all_with(client.clone(), &accesses),
        watcher::Config::default().page_size(PAGE),
        ParsedAccess::new,
        SnapshotSink {
            store: store.clone(),
            kind: "SandboxAccess".to_owned(),
            namespace: None,
            select: Box::new(|snapshot| Some(&mut snapshot.accesses)),
        },
        stop.clone(),
    ));
    tasks.spawn(watch_kind(
        Api::<SandboxGateway>::namespaced(client.clone(), &gateway.namespace),
        watcher::Config::default().fields(&format!("metadata.name={}", gateway.name)),
        ParsedGateway::new,
        SnapshotSink {
            store: store.clone(),
            kind: format!("SandboxGateway {gateway}"),
            namespace: None,
            select: Box::new(|snapshot| Some(&mut snapshot.own)),
        },
        stop.clone(),
    ));
    tasks.spawn(watch_namespaces(client.clone(), store.clone(), wanted, stop.clone()));
}

/// The watches of one namespace.
struct NamespaceWatch {
    stop: CancellationToken,
    tasks: JoinSet<()>,
    /// When to stop; `None` = a Service of the namespace is granted.
    until: Option<tokio::time::Instant>,
}

async fn watch_namespaces(client: Client, store: Store, mut wanted: GrantedNamespaces, stop: CancellationToken) {
    let mut running: BTreeMap<String, NamespaceWatch> = BTreeMap::new();
    loop {
        let (granted, now) = (wanted.borrow_and_update().clone(), tokio::time::Instant::now());
        for (name, namespace_watch) in &mut running {
            namespace_watch.until =
                (!granted.contains(name)).then(|| namespace_watch.until.unwrap_or(now + KEEP_WATCHING));
        }
        let ended = running.extract_if(.., |_, namespace_watch| {
            namespace_watch.until.is_some_and(|until| until <= now)
        });
        for (name, mut namespace_watch) in ended.collect::<Vec<_>>() {
            // Wait until the old watches have ended, because they and new ones would write to the same entry.
            namespace_watch.stop.cancel();
            while namespace_watch.tasks.join_next().await.is_some() {}
            store.change(|snapshot| {
                snapshot
                    .errors
                    .retain(|kind, _| !kind.ends_with(&namespace_suffix(&name)));
                snapshot.namespaces.remove(&name).is_some()
            });
        }
        for name in granted {
            running
                .entry(name)
                .or_insert_with_key(|name| watch_namespace(&client, &store, name, stop.child_token()));
        }
        let next = running
            .values()
            .filter_map(|namespace_watch| namespace_watch.until)
            .min();
        tokio::select! {
            () = stop.cancelled() => break,
            changed = wanted.changed() => if changed.is_err() { break },
            () = tokio::time::sleep_until(next.unwrap_or(now)), if next.is_some() => {}
        }
    }
    for mut namespace_watch in running.into_values() {
        while namespace_watch.tasks.join_next().await.is_some() {}
    }
}

fn watch_namespace(client: &Client, store: &Store, name: &str, stop: CancellationToken) -> NamespaceWatch {
    tracing::info!(namespace = name, "watching Services that are granted to sandboxes");
    store.change(|snapshot| {
        snapshot
            .namespaces
            .insert(name.to_owned(), Namespace::default())
            .is_none()
    });
    let mut tasks = JoinSet::new();
    let (namespace_name, kind_of) = (name.to_owned(), |kind: &str| {
        format!("{kind}{}", namespace_suffix(name))
    });
    tasks.spawn(watch_kind(
        Api::<v1::Service>::namespaced(client.clone(), name),
        watcher::Config::default().timeout(ACCESS_CHECK),
        ParsedService::new,
        SnapshotSink {
            store: store.clone(),
            kind: kind_of("Services"),
            namespace: Some(name.to_owned()),
            select: Box::new(move |snapshot| {
                snapshot
                    .namespaces
                    .get_mut(&namespace_name)
                    .map(|namespace| &mut namespace.services)
            }),
        },
        stop.clone(),
    ));
    let namespace_name = name.to_owned();
    tasks.spawn(watch_kind(
        Api::<EndpointSlice>::namespaced(client.clone(), name),
        watcher::Config::default().timeout(ACCESS_CHECK),
        ParsedSlice::new,
        SnapshotSink {
            store: store.clone(),
            kind: kind_of("EndpointSlices"),
            namespace: Some(name.to_owned()),
            select: Box::new(move |snapshot| {
                snapshot
                    .namespaces
                    .get_mut(&namespace_name)
                    .map(|namespace| &mut namespace.slices)
            }),
        },
        stop.clone(),
    ));
    NamespaceWatch {
        stop,
        tasks,
        until: None,
    }
}

/// Sends a request to the API server at an interval, because an idle watch does not show whether the API server is reachable. Grants are
/// renewed only while it answers.
pub(in crate::gateway) async fn probe_api_server(
    client: Client,
    store: Store,
    last_contact: watch::Sender<Option<Instant>>,
    every: Duration,
    stop: CancellationToken,
) {
    let accesses: Api<SandboxAccess> = Api::all(client);
    let one = ListParams::default().limit(1);
    loop {
        let answer = tokio::time::timeout(REQUEST_TIMEOUT, accesses.list_metadata(&one)).await;
        store.set_answering(matches!(answer, Ok(Ok(_))));
        let wait = match answer {
            Ok(Ok(_)) => {
                last_contact.send_replace(Some(Instant::now()));
                every
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot list SandboxAccess; grants stay open until --grant-timeout");
                store.metrics.count_error("source");
                every.min(RETRY)
            }
            Err(_) => every.min(RETRY),
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}
