//! Watches the objects that a gateway needs, and keeps a snapshot of them: every SandboxAccess, its own SandboxGateway,
//! and the Services and EndpointSlices of each namespace with a granted Service.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use clustermesh_agent_core::gateway::{Access, Facts, Service};
use clustermesh_api::sandbox::{AppliedAccess, SandboxAccess, SandboxGateway};
use clustermesh_core::mesh::ObjectName;
use k8s_openapi::api::{core::v1, discovery::v1::EndpointSlice};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, ListParams},
    runtime::watcher,
};
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use super::objects::{ParsedAccess, ParsedGateway, ParsedService, ParsedSlice};
use crate::{
    args::GatewayName,
    metrics::Metrics,
    source::watch::{WatchSink, WatchedKind, watch_kind},
};

/// How long a namespace is still watched after its last grant. A new grant within this time needs no new list.
const KEEP_WATCHING: Duration = Duration::from_secs(600);
/// SandboxAccesses in one page of a list. The largest have more than a megabyte, and a gateway's container has 256 MB.
const PAGE: u32 = 8;
/// Pause after a request without an answer.
const RETRY: Duration = Duration::from_secs(1);
/// Timeout of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// A starting API server refuses everything until it has read its roles. This is how
/// long a namespace that was listed before stays open.
const REFUSAL_GRACE: Duration = Duration::from_secs(30);

/// The observed objects.
#[derive(Debug, Clone, Default)]
pub(super) struct GatewaySnapshot {
    accesses: WatchedKind<ParsedAccess>,
    own: WatchedKind<ParsedGateway>,
    namespaces: BTreeMap<String, Namespace>,
    /// Since when the API server has answered every request of [`probe_api_server`].
    answers_since: Option<Instant>,
    /// Errors of watches, by kind.
    errors: BTreeMap<String, String>,
}

/// A namespace with granted Services.
#[derive(Debug, Clone, Default)]
struct Namespace {
    services: WatchedKind<ParsedService>,
    slices: WatchedKind<ParsedSlice>,
    /// Since when the watches fail, and how.
    failing: Option<(Instant, Failure)>,
    /// The failure once it lasts long enough: then nothing of the namespace is served.
    closed: Option<Failure>,
}

/// Why a namespace cannot be watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    /// The API server denies access (403).
    Refused,
    /// Another error.
    Failed,
}

impl Namespace {
    const fn is_listed(&self) -> bool {
        matches!(
            (&self.services, &self.slices),
            (WatchedKind::Listed(_), WatchedKind::Listed(_))
        )
    }
}

impl GatewaySnapshot {
    /// Whether the SandboxAccesses are listed.
    pub(super) const fn is_listed(&self) -> bool {
        matches!(self.accesses, WatchedKind::Listed(_))
    }

    /// Whether each namespace with a granted Service is listed, too, or fails.
    pub(super) fn is_complete(&self) -> bool {
        let answered = |name: &String| {
            let suffix = format!(" of namespace {name}");
            let failed = self.errors.keys().any(|kind| kind.ends_with(&suffix));
            let namespace = self.namespaces.get(name);
            failed || namespace.is_some_and(Namespace::is_listed)
        };
        self.is_listed() && self.granted_namespaces().iter().all(answered)
    }

    /// What the gateway waits for, as a message.
    pub(super) fn pending_message(&self) -> String {
        match self.accesses {
            WatchedKind::Listed(_) => "granted Services have not been read yet: nothing is changed until the API server answers".to_owned(),
            WatchedKind::CrdMissing => {
                "this cluster has no CRD sandboxaccesses.kilo.squat.ai: install crds/ here; until then no sandbox is served".to_owned()
            }
            _ => "SandboxAccess has not been listed yet: nothing is changed until the API server answers".to_owned(),
        }
    }

    /// Errors of watches, and SandboxAccesses that cannot be parsed.
    pub(super) fn errors(&self) -> impl Iterator<Item = String> {
        let unreadable = self.accesses.objects().filter_map(|(_, seen)| {
            let problem = seen.problem.as_ref()?;
            Some(format!("SandboxAccess {} {problem}", seen.access.name))
        });
        self.errors.values().cloned().chain(unreadable)
    }

    pub(super) fn accesses(&self) -> Vec<Access> {
        self.accesses.objects().map(|(_, seen)| seen.access.clone()).collect()
    }

    pub(super) fn applied_accesses(&self) -> impl Iterator<Item = AppliedAccess> {
        self.accesses.objects().map(|(_, seen)| seen.state.clone())
    }

    /// The spec of this gateway's SandboxGateway; else why it is not known.
    pub(super) fn own(&self) -> Result<ParsedGateway, String> {
        match &self.own {
            WatchedKind::Listed(objects) => objects.values().next().cloned().ok_or_else(|| {
                "there is no SandboxGateway of this pod's name: make one, as deploy/gateway.yaml does".to_owned()
            }),
            WatchedKind::CrdMissing => {
                Err("this cluster has no CRD sandboxgateways.kilo.squat.ai: install crds/ here".to_owned())
            }
            _ => Err("this pod's SandboxGateway has not been read yet".to_owned()),
        }
    }

    /// Every granted Service, as far as it is known. `home` is the namespace of the gateways.
    pub(super) fn services(&self, home: &str) -> BTreeMap<ObjectName, Service> {
        let granted = self.accesses.objects().flat_map(|(_, seen)| &seen.access.grants);
        let names: BTreeSet<&ObjectName> = granted.map(|grant| &grant.service).collect();
        let mut endpoints: BTreeMap<(&str, &str), Vec<&ParsedSlice>> = BTreeMap::new();
        for (name, namespace) in &self.namespaces {
            for (_, slice) in namespace.slices.objects() {
                endpoints.entry((name, &slice.service)).or_default().push(slice);
            }
        }
        let service = |name: &ObjectName| {
            let namespace = self.namespaces.get(&name.namespace);
            let Some(namespace) = namespace else {
                return Service::Unknown(format!("namespace {} has not been read yet", name.namespace));
            };
            if namespace.closed == Some(Failure::Failed) {
                return Service::Unknown(format!(
                    "Services and EndpointSlices of namespace {} could not be watched for as long as --grant-timeout says, so what was \
                     read of it no longer counts; this gateway's /readyz has the error",
                    name.namespace
                ));
            }
            if namespace.closed == Some(Failure::Refused) {
                return Service::Unknown(format!(
                    "gateways may not read Services and EndpointSlices of namespace {0}, so nothing of it is served; its owner can allow that \
                     with: kubectl create rolebinding clustermesh-gateway --namespace {0} --clusterrole=clustermesh-gateway-reads \
                     --serviceaccount={home}:clustermesh-gateway",
                    name.namespace
                ));
            }
            let (WatchedKind::Listed(services), WatchedKind::Listed(_)) = (&namespace.services, &namespace.slices)
            else {
                return Service::Unknown(format!("namespace {} has not been read yet", name.namespace));
            };
            let Some(seen) = services.get(&name.name) else {
                return Service::Absent;
            };
            let slices = endpoints.get(&(&*name.namespace, &*name.name));
            Service::Seen(Facts {
                selector: seen.has_selector,
                external_name: seen.is_external_name,
                mirror: seen.is_mirror,
                sticky: seen.is_sticky,
                ports: seen.ports.clone(),
                endpoints: slices
                    .into_iter()
                    .flatten()
                    .flat_map(|slice| slice.endpoints.clone())
                    .collect(),
            })
        };
        names.into_iter().map(|name| (name.clone(), service(name))).collect()
    }

    fn granted_namespaces(&self) -> BTreeSet<String> {
        let granted = self.accesses.objects().flat_map(|(_, seen)| &seen.access.grants);
        // The name becomes part of a request's path.
        let names = granted
            .map(|grant| &grant.service.namespace)
            .filter(|name| is_dns_label(name));
        names.cloned().collect()
    }
}

fn is_dns_label(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !text.is_empty() && text.len() <= 63 && text.chars().all(plain) && !text.starts_with('-') && !text.ends_with('-')
}

/// The shared snapshot. Cheap to clone; all clones share it.
#[derive(Clone)]
pub(super) struct Store {
    snapshot: Arc<Mutex<GatewaySnapshot>>,
    notify: Arc<Notify>,
    wanted: watch::Sender<BTreeSet<String>>,
    metrics: Metrics,
    /// How long a namespace whose watches fail is still served.
    timeout: Duration,
}

/// The namespaces to watch.
pub(super) type GrantedNamespaces = watch::Receiver<BTreeSet<String>>;

impl Store {
    pub(super) fn new(metrics: Metrics, timeout: Duration) -> (Self, GrantedNamespaces) {
        let (wanted, receiver) = watch::channel(BTreeSet::new());
        let store = Self {
            snapshot: Arc::default(),
            notify: Arc::default(),
            wanted,
            metrics,
            timeout,
        };
        (store, receiver)
    }

    pub(super) fn snapshot(&self) -> GatewaySnapshot {
        self.lock().clone()
    }

    /// Waits until the snapshot has changed since the last call.
    pub(super) async fn changed(&self) {
        self.notify.notified().await;
    }

    /// Notes whether the API server answers requests.
    fn set_answering(&self, is_answering: bool) {
        let since = &mut self.lock().answers_since;
        *since = is_answering.then(|| since.unwrap_or_else(Instant::now));
    }

    fn lock(&self) -> MutexGuard<'_, GatewaySnapshot> {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut GatewaySnapshot) -> bool) {
        let mut snapshot = self.lock();
        if !change(&mut snapshot) {
            return;
        }
        let wanted = snapshot.granted_namespaces();
        drop(snapshot);
        self.wanted.send_if_modified(|now| {
            let changed = *now != wanted;
            *now = wanted;
            changed
        });
        self.notify.notify_one();
    }
}

type KindSelector<V> = Box<dyn for<'a> Fn(&'a mut GatewaySnapshot) -> Option<&'a mut WatchedKind<V>> + Send + Sync>;

/// Puts the objects of one watch into the snapshot.
struct SnapshotSink<V> {
    store: Store,
    /// For messages, and the key of the error.
    kind: String,
    /// The namespace, for Services and EndpointSlices.
    namespace: Option<String>,
    select: KindSelector<V>,
}

impl<V> SnapshotSink<V> {
    /// Notes how watching the namespace fails, or that it works; true = this changes what is served.
    fn set_failure(&self, snapshot: &mut GatewaySnapshot, failure: Option<Failure>) -> bool {
        let answers_since = snapshot.answers_since;
        let namespace = self
            .namespace
            .as_ref()
            .and_then(|name| snapshot.namespaces.get_mut(name));
        let Some(namespace) = namespace else { return false };
        let since = namespace.failing.map_or_else(Instant::now, |(since, _)| since);
        namespace.failing = failure.map(|failure| (since, failure));
        let counts = |failure: &Failure| match failure {
            Failure::Refused => !namespace.is_listed() || since.elapsed() >= REFUSAL_GRACE,
            // While the API server answers no requests at all, the timeout of the whole table counts instead, and
            // connections can continue later.
            Failure::Failed => answers_since.is_some_and(|answers| answers.max(since).elapsed() >= self.store.timeout),
        };
        let closed = failure.filter(counts);
        std::mem::replace(&mut namespace.closed, closed) != closed
    }
}

impl<V: Send> WatchSink<V> for SnapshotSink<V> {
    fn change(&self, change: impl FnOnce(&mut WatchedKind<V>) -> bool + Send) {
        self.store.change(|snapshot| {
            let recovered = snapshot.errors.remove(&self.kind).is_some();
            let opened = recovered && self.set_failure(snapshot, None);
            (self.select)(snapshot).is_some_and(change) || recovered || opened
        });
    }

    fn failed(&self, error: &watcher::Error) {
        self.store.metrics.count_error("source");
        let (failure, why) = match error {
            watcher::Error::InitialListFailed(kube::Error::Api(status))
            | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => {
                let failure = if status.code == 403 {
                    Failure::Refused
                } else {
                    Failure::Failed
                };
                (failure, status.message.clone())
            }
            error => (Failure::Failed, error.to_string()),
        };
        let message = format!("{} cannot be watched: {why}", self.kind);
        self.store.change(|snapshot| {
            let closed = self.set_failure(snapshot, Some(failure));
            let is_new = snapshot.errors.insert(self.kind.clone(), message.clone()) != Some(message);
            closed || is_new
        });
    }
}

/// Starts all watches until the token is cancelled.
pub(super) fn start_watches(
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
    /// If no Service of it is granted any more: when to stop.
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
            // The old watches must have ended before new ones begin, or both would write to the same place.
            namespace_watch.stop.cancel();
            while namespace_watch.tasks.join_next().await.is_some() {}
            store.change(|snapshot| {
                snapshot
                    .errors
                    .retain(|kind, _| !kind.ends_with(&format!(" of namespace {name}")));
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
    let (at, kind_of) = (name.to_owned(), |kind: &str| format!("{kind} of namespace {name}"));
    tasks.spawn(watch_kind(
        Api::<v1::Service>::namespaced(client.clone(), name),
        watcher::Config::default(),
        ParsedService::new,
        SnapshotSink {
            store: store.clone(),
            kind: kind_of("Services"),
            namespace: Some(name.to_owned()),
            select: Box::new(move |snapshot| {
                snapshot
                    .namespaces
                    .get_mut(&at)
                    .map(|namespace| &mut namespace.services)
            }),
        },
        stop.clone(),
    ));
    let at = name.to_owned();
    tasks.spawn(watch_kind(
        Api::<EndpointSlice>::namespaced(client.clone(), name),
        watcher::Config::default(),
        ParsedSlice::new,
        SnapshotSink {
            store: store.clone(),
            kind: kind_of("EndpointSlices"),
            namespace: Some(name.to_owned()),
            select: Box::new(move |snapshot| snapshot.namespaces.get_mut(&at).map(|namespace| &mut namespace.slices)),
        },
        stop.clone(),
    ));
    NamespaceWatch {
        stop,
        tasks,
        until: None,
    }
}

/// Sends a request to the API server at an interval. Grants are renewed only while it answers; an idle watch proves
/// nothing.
pub(super) async fn probe_api_server(
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

#[cfg(test)]
mod tests;
