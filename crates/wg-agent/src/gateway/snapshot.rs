//! Keeps a snapshot of the objects that a gateway needs: every SandboxAccess, the gateway's own SandboxGateway, and the Services
//! and EndpointSlices of each namespace with a granted Service.

mod watches;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use clustermesh_agent_core::gateway::{Access, ObservedService, Service};
use clustermesh_api::sandbox::AppliedAccess;
use clustermesh_core::mesh::ObjectName;
use tokio::sync::{Notify, watch};

use super::objects::{ParsedAccess, ParsedGateway, ParsedService, ParsedSlice};
use crate::{metrics::Metrics, source::watch::WatchedKind};

pub(super) use watches::{probe_api_server, start_watches};

/// The observed objects.
#[derive(Debug, Clone, Default)]
pub(super) struct GatewaySnapshot {
    accesses: WatchedKind<ParsedAccess>,
    own: WatchedKind<ParsedGateway>,
    namespaces: BTreeMap<String, Namespace>,
    /// Since when every request of [`probe_api_server`] has succeeded; `None` = the last one failed, or none was sent yet.
    answers_since: Option<Instant>,
    /// Errors of watches, by [`watches::SnapshotSink::kind`].
    errors: BTreeMap<String, String>,
}

/// A namespace with granted Services.
#[derive(Debug, Clone, Default)]
struct Namespace {
    services: WatchedKind<ParsedService>,
    slices: WatchedKind<ParsedSlice>,
    /// Since when a watch fails, and how.
    failing: Option<(Instant, Failure)>,
    /// The failure, once it has lasted so long that no Service of the namespace is served:
    /// - access denied: after [`watches::DENIAL_GRACE`], or at once if Services or EndpointSlices were never listed
    /// - another error: after [`Store::timeout`], if the API server has answered other requests all that time
    lasting_failure: Option<Failure>,
}

/// Why a namespace cannot be watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    /// The API server denies access (403).
    AccessDenied,
    /// Another error.
    Other,
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
    pub(super) const fn are_accesses_listed(&self) -> bool {
        matches!(self.accesses, WatchedKind::Listed(_))
    }

    /// Whether the SandboxAccesses are listed, and each namespace with a granted Service is listed or fails.
    pub(super) fn is_complete(&self) -> bool {
        let is_listed_or_fails = |name: &String| {
            let suffix = format!(" of namespace {name}");
            let fails = self.errors.keys().any(|kind| kind.ends_with(&suffix));
            let namespace = self.namespaces.get(name);
            fails || namespace.is_some_and(Namespace::is_listed)
        };
        self.are_accesses_listed() && self.granted_namespaces().iter().all(is_listed_or_fails)
    }

    /// A message that names the objects for which the gateway waits.
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
        self.accesses.objects().map(|(_, seen)| seen.applied.clone())
    }

    /// The spec of this pod's SandboxGateway, or why it is not known.
    pub(super) fn own(&self) -> Result<ParsedGateway, String> {
        match &self.own {
            WatchedKind::Listed(objects) => objects.values().next().cloned().ok_or_else(|| {
                "there is no SandboxGateway with this pod's name: make one, as deploy/gateway.yaml does".to_owned()
            }),
            WatchedKind::CrdMissing => {
                Err("this cluster has no CRD sandboxgateways.kilo.squat.ai: install crds/ here".to_owned())
            }
            _ => Err("this pod's SandboxGateway has not been read yet".to_owned()),
        }
    }

    /// Every granted Service. `home` is the namespace of the gateways.
    pub(super) fn services(&self, home: &str) -> BTreeMap<ObjectName, Service> {
        let granted = self.accesses.objects().flat_map(|(_, seen)| &seen.access.grants);
        let names: BTreeSet<&ObjectName> = granted.map(|grant| &grant.service).collect();
        let mut slices_by_service: BTreeMap<(&str, &str), Vec<&ParsedSlice>> = BTreeMap::new();
        for (name, namespace) in &self.namespaces {
            for (_, slice) in namespace.slices.objects() {
                slices_by_service.entry((name, &slice.service)).or_default().push(slice);
            }
        }
        let service = |name: &ObjectName| {
            let namespace = self.namespaces.get(&name.namespace);
            let Some(namespace) = namespace else {
                return Service::Unknown(format!("namespace {} has not been read yet", name.namespace));
            };
            if namespace.lasting_failure == Some(Failure::Other) {
                return Service::Unknown(format!(
                    "Services and EndpointSlices of namespace {} could not be watched for longer than --grant-timeout, so its Services \
                     are not served; this gateway's /readyz has the error",
                    name.namespace
                ));
            }
            if namespace.lasting_failure == Some(Failure::AccessDenied) {
                return Service::Unknown(format!(
                    "gateways may not read Services and EndpointSlices of namespace {0}, so its Services are not served; its owner can \
                     allow it with: kubectl create rolebinding clustermesh-gateway --namespace {0} --clusterrole=clustermesh-gateway-reads \
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
            let slices = slices_by_service.get(&(&*name.namespace, &*name.name));
            Service::Observed(ObservedService {
                has_selector: seen.has_selector,
                is_external_name: seen.is_external_name,
                is_mirror: seen.is_mirror,
                is_sticky: seen.is_sticky,
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
        // An invalid name must not become part of a request path.
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

/// A handle to the snapshot. All clones refer to the same snapshot.
#[derive(Clone)]
pub(super) struct Store {
    snapshot: Arc<Mutex<GatewaySnapshot>>,
    notify: Arc<Notify>,
    wanted: watch::Sender<BTreeSet<String>>,
    metrics: Metrics,
    /// How long the Services of a namespace are still served while its watches fail with an error other than 403 and the
    /// API server answers other requests.
    timeout: Duration,
}

/// The namespaces with a granted Service.
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

    /// Records whether the API server answers requests.
    fn set_answering(&self, is_answering: bool) {
        let since = &mut self.lock().answers_since;
        *since = is_answering.then(|| since.unwrap_or_else(Instant::now));
    }

    fn lock(&self) -> MutexGuard<'_, GatewaySnapshot> {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `change` with the snapshot. If `change` returns true, the snapshot has changed: updates the granted namespaces and
    /// wakes [`Self::changed`].
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

#[cfg(test)]
mod tests;
