//! What a gateway has seen, and following it: every SandboxAccess, its own SandboxGateway, and of each namespace with a granted
//! Service its Services and EndpointSlices. What follows from that is decided elsewhere.

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

use super::seen::{AccessSeen, OwnSeen, ServiceSeen, SliceSeen};
use crate::{
    args::GatewayName,
    metrics::Metrics,
    source::watch::{Seen, Sink, follow as follow_kind},
};

/// A namespace is followed for so long after its last grant: one that comes back by then opens without a new list.
const LINGER: Duration = Duration::from_secs(600);
/// SandboxAccesses in one answer of a list. The largest have more than a megabyte, and a gateway's container has 256.
const PAGE: u32 = 8;
/// After a question without an answer.
const AGAIN: Duration = Duration::from_secs(1);
/// How long a question may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// An API server that starts refuses everything until it has read its roles. A namespace that could be read before stays open for
/// so long.
const STARTING: Duration = Duration::from_secs(30);

/// What was seen.
#[derive(Debug, Clone, Default)]
pub(super) struct World {
    accesses: Seen<AccessSeen>,
    own: Seen<OwnSeen>,
    namespaces: BTreeMap<String, Namespace>,
    /// Since when the API server has answered each time that it was asked ([`contact`]).
    answers_since: Option<Instant>,
    /// Why something cannot be followed at present.
    errors: BTreeMap<String, String>,
}

/// A namespace with granted Services.
#[derive(Debug, Clone, Default)]
struct Namespace {
    services: Seen<ServiceSeen>,
    slices: Seen<SliceSeen>,
    /// Since when it cannot be followed, and how.
    failing: Option<(Instant, Failure)>,
    /// The same, once that counts: nothing of the namespace is served.
    closed: Option<Failure>,
}

/// Why a namespace cannot be followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    /// The API server refuses to let this gateway read it.
    Refused,
    /// Requests fail otherwise.
    Failed,
}

impl Namespace {
    const fn is_read(&self) -> bool {
        matches!((&self.services, &self.slices), (Seen::Listed(_), Seen::Listed(_)))
    }
}

impl World {
    /// Whether it is known which sandboxes there are.
    pub(super) const fn listed(&self) -> bool {
        matches!(self.accesses, Seen::Listed(_))
    }

    /// Whether the API server has also answered for each namespace with a granted Service, if only with an error.
    pub(super) fn complete(&self) -> bool {
        let answered = |name: &String| {
            let of_it = format!(" of namespace {name}");
            let failed = self.errors.keys().any(|kind| kind.ends_with(&of_it));
            let namespace = self.namespaces.get(name);
            failed || namespace.is_some_and(Namespace::is_read)
        };
        self.listed() && self.wanted().iter().all(answered)
    }

    /// What is waited for until then.
    pub(super) fn waiting(&self) -> String {
        match self.accesses {
            Seen::Listed(_) => "granted Services have not been read yet: nothing is changed until the API server answers".to_owned(),
            Seen::Absent => {
                "this cluster has no CRD sandboxaccesses.kilo.squat.ai: install crds/ here; until then no sandbox is served".to_owned()
            }
            _ => "SandboxAccess has not been listed yet: nothing is changed until the API server answers".to_owned(),
        }
    }

    /// Watches that fail, and SandboxAccesses that cannot be read.
    pub(super) fn errors(&self) -> impl Iterator<Item = String> {
        let unreadable = self.accesses.known().filter_map(|(_, seen)| {
            let problem = seen.problem.as_ref()?;
            Some(format!("SandboxAccess {} {problem}", seen.access.name))
        });
        self.errors.values().cloned().chain(unreadable)
    }

    pub(super) fn accesses(&self) -> Vec<Access> {
        self.accesses.known().map(|(_, seen)| seen.access.clone()).collect()
    }

    pub(super) fn applied(&self) -> impl Iterator<Item = AppliedAccess> {
        self.accesses.known().map(|(_, seen)| seen.state.clone())
    }

    /// What an operator says of this gateway; else why nothing is known.
    pub(super) fn own(&self) -> Result<OwnSeen, String> {
        match &self.own {
            Seen::Listed(objects) => objects.values().next().cloned().ok_or_else(|| {
                "there is no SandboxGateway of this pod's name: make one, as deploy/gateway.yaml does".to_owned()
            }),
            Seen::Absent => Err("this cluster has no CRD sandboxgateways.kilo.squat.ai: install crds/ here".to_owned()),
            _ => Err("this pod's SandboxGateway has not been read yet".to_owned()),
        }
    }

    /// Every granted Service, as far as it is known. `home` is the namespace of the gateways.
    pub(super) fn services(&self, home: &str) -> BTreeMap<ObjectName, Service> {
        let granted = self.accesses.known().flat_map(|(_, seen)| &seen.access.grants);
        let names: BTreeSet<&ObjectName> = granted.map(|grant| &grant.service).collect();
        let mut endpoints: BTreeMap<(&str, &str), Vec<&SliceSeen>> = BTreeMap::new();
        for (name, namespace) in &self.namespaces {
            for (_, slice) in namespace.slices.known() {
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
                    "Services and EndpointSlices of namespace {} could not be followed for as long as --grant-timeout says, so what was \
                     read of it no longer counts; this gateway's /readyz has the error",
                    name.namespace
                ));
            }
            if namespace.closed == Some(Failure::Refused) {
                return Service::Unknown(format!(
                    "gateways may not read Services and EndpointSlices of namespace {0}, so nothing of it is served; who owns it lets them \
                     with: kubectl create rolebinding clustermesh-gateway --namespace {0} --clusterrole=clustermesh-gateway-reads \
                     --serviceaccount={home}:clustermesh-gateway",
                    name.namespace
                ));
            }
            let (Seen::Listed(services), Seen::Listed(_)) = (&namespace.services, &namespace.slices) else {
                return Service::Unknown(format!("namespace {} has not been read yet", name.namespace));
            };
            let Some(seen) = services.get(&name.name) else {
                return Service::Absent;
            };
            let slices = endpoints.get(&(&*name.namespace, &*name.name));
            Service::Seen(Facts {
                selector: seen.selector,
                external_name: seen.external_name,
                mirror: seen.mirror,
                sticky: seen.sticky,
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

    fn wanted(&self) -> BTreeSet<String> {
        let granted = self.accesses.known().flat_map(|(_, seen)| &seen.access.grants);
        // A name ends up in the path of a request.
        let names = granted
            .map(|grant| &grant.service.namespace)
            .filter(|name| is_label(name));
        names.cloned().collect()
    }
}

fn is_label(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !text.is_empty() && text.len() <= 63 && text.chars().all(plain) && !text.starts_with('-') && !text.ends_with('-')
}

/// Where it is kept; all clones are one.
#[derive(Clone)]
pub(super) struct Store {
    world: Arc<Mutex<World>>,
    bell: Arc<Notify>,
    wanted: watch::Sender<BTreeSet<String>>,
    metrics: Metrics,
    /// How long what was read of a namespace counts while it cannot be followed.
    timeout: Duration,
}

/// The namespaces that are to be followed.
pub(super) type Wanted = watch::Receiver<BTreeSet<String>>;

impl Store {
    pub(super) fn new(metrics: Metrics, timeout: Duration) -> (Self, Wanted) {
        let (wanted, receiver) = watch::channel(BTreeSet::new());
        let store = Self {
            world: Arc::default(),
            bell: Arc::default(),
            wanted,
            metrics,
            timeout,
        };
        (store, receiver)
    }

    pub(super) fn world(&self) -> World {
        self.lock().clone()
    }

    /// Waits until something has changed since this was last waited for.
    pub(super) async fn changed(&self) {
        self.bell.notified().await;
    }

    /// Notes whether the API server has answered.
    fn answers(&self, does: bool) {
        let since = &mut self.lock().answers_since;
        *since = does.then(|| since.unwrap_or_else(Instant::now));
    }

    fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut World) -> bool) {
        let mut world = self.lock();
        if !change(&mut world) {
            return;
        }
        let wanted = world.wanted();
        drop(world);
        self.wanted.send_if_modified(|now| {
            let changed = *now != wanted;
            *now = wanted;
            changed
        });
        self.bell.notify_one();
    }
}

type Place<V> = Box<dyn for<'a> Fn(&'a mut World) -> Option<&'a mut Seen<V>> + Send + Sync>;

/// Where one kind is put.
struct Shelf<V> {
    store: Store,
    /// For messages and as the key of the trouble.
    kind: String,
    /// The namespace, where it is one of granted Services.
    namespace: Option<String>,
    place: Place<V>,
}

impl<V> Shelf<V> {
    /// Notes how following the namespace fails, or that it does not; true = this changes what is served.
    fn note(&self, world: &mut World, failure: Option<Failure>) -> bool {
        let answers_since = world.answers_since;
        let namespace = self.namespace.as_ref().and_then(|name| world.namespaces.get_mut(name));
        let Some(namespace) = namespace else { return false };
        let since = namespace.failing.map_or_else(Instant::now, |(since, _)| since);
        namespace.failing = failure.map(|failure| (since, failure));
        let counts = |failure: &Failure| match failure {
            Failure::Refused => !namespace.is_read() || since.elapsed() >= STARTING,
            // While the API server answers nothing at all, the whole table closes, and connections may go on afterwards.
            Failure::Failed => answers_since.is_some_and(|answers| answers.max(since).elapsed() >= self.store.timeout),
        };
        let closed = failure.filter(counts);
        std::mem::replace(&mut namespace.closed, closed) != closed
    }
}

impl<V: Send> Sink<V> for Shelf<V> {
    fn change(&self, change: impl FnOnce(&mut Seen<V>) -> bool + Send) {
        self.store.change(|world| {
            let mended = world.errors.remove(&self.kind).is_some();
            let opened = mended && self.note(world, None);
            (self.place)(world).is_some_and(change) || mended || opened
        });
    }

    fn failed(&self, error: &watcher::Error) {
        self.store.metrics.failed("source");
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
        let message = format!("{} cannot be followed: {why}", self.kind);
        self.store.change(|world| {
            let closed = self.note(world, Some(failure));
            let news = world.errors.insert(self.kind.clone(), message.clone()) != Some(message);
            closed || news
        });
    }
}

/// Follows all of it until the token is cancelled.
pub(super) fn follow(
    tasks: &mut JoinSet<()>,
    client: &Client,
    gateway: &GatewayName,
    store: &Store,
    wanted: Wanted,
    stop: &CancellationToken,
) {
    let accesses = ApiResource::erase::<SandboxAccess>(&());
    tasks.spawn(follow_kind(
        Api::<DynamicObject>::all_with(client.clone(), &accesses),
        watcher::Config::default().page_size(PAGE),
        AccessSeen::new,
        Shelf {
            store: store.clone(),
            kind: "SandboxAccess".to_owned(),
            namespace: None,
            place: Box::new(|world| Some(&mut world.accesses)),
        },
        stop.clone(),
    ));
    tasks.spawn(follow_kind(
        Api::<SandboxGateway>::namespaced(client.clone(), &gateway.namespace),
        watcher::Config::default().fields(&format!("metadata.name={}", gateway.name)),
        OwnSeen::new,
        Shelf {
            store: store.clone(),
            kind: format!("SandboxGateway {gateway}"),
            namespace: None,
            place: Box::new(|world| Some(&mut world.own)),
        },
        stop.clone(),
    ));
    tasks.spawn(namespaces(client.clone(), store.clone(), wanted, stop.clone()));
}

/// A namespace that is followed.
struct Followed {
    stop: CancellationToken,
    tasks: JoinSet<()>,
    /// No Service of it is granted; until when it is followed nevertheless.
    until: Option<tokio::time::Instant>,
}

async fn namespaces(client: Client, store: Store, mut wanted: Wanted, stop: CancellationToken) {
    let mut running: BTreeMap<String, Followed> = BTreeMap::new();
    loop {
        let (granted, now) = (wanted.borrow_and_update().clone(), tokio::time::Instant::now());
        for (name, followed) in &mut running {
            followed.until = (!granted.contains(name)).then(|| followed.until.unwrap_or(now + LINGER));
        }
        let ended = running.extract_if(.., |_, followed| followed.until.is_some_and(|until| until <= now));
        for (name, mut followed) in ended.collect::<Vec<_>>() {
            // It has to be gone before it may be begun anew, or the old one would write into the new one's place.
            followed.stop.cancel();
            while followed.tasks.join_next().await.is_some() {}
            store.change(|world| {
                world
                    .errors
                    .retain(|kind, _| !kind.ends_with(&format!(" of namespace {name}")));
                world.namespaces.remove(&name).is_some()
            });
        }
        for name in granted {
            running
                .entry(name)
                .or_insert_with_key(|name| begin(&client, &store, name, stop.child_token()));
        }
        let next = running.values().filter_map(|followed| followed.until).min();
        tokio::select! {
            () = stop.cancelled() => break,
            changed = wanted.changed() => if changed.is_err() { break },
            () = tokio::time::sleep_until(next.unwrap_or(now)), if next.is_some() => {}
        }
    }
    for mut followed in running.into_values() {
        while followed.tasks.join_next().await.is_some() {}
    }
}

fn begin(client: &Client, store: &Store, name: &str, stop: CancellationToken) -> Followed {
    tracing::info!(namespace = name, "following Services that are granted to sandboxes");
    store.change(|world| world.namespaces.insert(name.to_owned(), Namespace::default()).is_none());
    let mut tasks = JoinSet::new();
    let (at, shelf) = (name.to_owned(), |kind: &str| format!("{kind} of namespace {name}"));
    tasks.spawn(follow_kind(
        Api::<v1::Service>::namespaced(client.clone(), name),
        watcher::Config::default(),
        ServiceSeen::new,
        Shelf {
            store: store.clone(),
            kind: shelf("Services"),
            namespace: Some(name.to_owned()),
            place: Box::new(move |world| world.namespaces.get_mut(&at).map(|namespace| &mut namespace.services)),
        },
        stop.clone(),
    ));
    let at = name.to_owned();
    tasks.spawn(follow_kind(
        Api::<EndpointSlice>::namespaced(client.clone(), name),
        watcher::Config::default(),
        SliceSeen::new,
        Shelf {
            store: store.clone(),
            kind: shelf("EndpointSlices"),
            namespace: Some(name.to_owned()),
            place: Box::new(move |world| world.namespaces.get_mut(&at).map(|namespace| &mut namespace.slices)),
        },
        stop.clone(),
    ));
    Followed {
        stop,
        tasks,
        until: None,
    }
}

/// Asks the API server now and then: what is granted stands only while it answers. A watch that says nothing proves nothing.
pub(super) async fn contact(
    client: Client,
    store: Store,
    heard: watch::Sender<Option<Instant>>,
    every: Duration,
    stop: CancellationToken,
) {
    let accesses: Api<SandboxAccess> = Api::all(client);
    let one = ListParams::default().limit(1);
    loop {
        let answer = tokio::time::timeout(PATIENCE, accesses.list_metadata(&one)).await;
        store.answers(matches!(answer, Ok(Ok(_))));
        let wait = match answer {
            Ok(Ok(_)) => {
                heard.send_replace(Some(Instant::now()));
                every
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "the API server does not say which sandboxes there are; grants stand until --grant-timeout");
                store.metrics.failed("source");
                every.min(AGAIN)
            }
            Err(_) => every.min(AGAIN),
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

#[cfg(test)]
mod tests;
