use kube::runtime::watcher;
use serde_json::json;

use super::{
    watches::{DENIAL_GRACE, SnapshotSink},
    *,
};
use crate::{gateway::objects::ParsedSlice, source::watch::WatchSink};

fn access(name: &str, spec: &serde_json::Value) -> (String, ParsedAccess) {
    let object = json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "SandboxAccess", "metadata": {"name": name}, "spec": spec,
    });
    (
        name.to_owned(),
        ParsedAccess::new(serde_json::from_value(object).unwrap()),
    )
}

#[test]
fn unreadable_sandbox_access_is_reported() {
    let readable = access(
        "m--a",
        &json!({"sandbox": "a", "networks": [], "nodes": [], "grants": []}),
    );
    let snapshot = GatewaySnapshot {
        accesses: WatchedKind::Listed([readable, access("m--b", &json!({"sandbox": 7}))].into()),
        ..GatewaySnapshot::default()
    };
    let errors: Vec<String> = snapshot.errors().collect();
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(
        errors[0].starts_with("SandboxAccess m--b is not what the SandboxAccess CRD describes"),
        "{errors:?}"
    );
}

/// One grant in the namespace `team`.
fn granted() -> GatewaySnapshot {
    let grant =
        json!({"service": {"namespace": "team", "name": "db"}, "port": "sql", "protocol": "TCP", "gatewayPort": 20001});
    let spec = json!({"sandbox": "a", "networks": ["100.80.0.0/20"], "nodes": [], "grants": [grant]});
    GatewaySnapshot {
        accesses: WatchedKind::Listed([access("m--a", &spec)].into()),
        ..GatewaySnapshot::default()
    }
}

fn listed_namespace() -> Namespace {
    Namespace {
        services: WatchedKind::Listed(BTreeMap::new()),
        slices: WatchedKind::Listed(BTreeMap::new()),
        ..Namespace::default()
    }
}

#[test]
fn snapshot_is_complete_when_namespaces_are_listed_or_fail() {
    assert!(!GatewaySnapshot::default().is_complete());
    let mut snapshot = granted();
    assert!(!snapshot.is_complete(), "not watched yet");
    snapshot.namespaces.insert("team".to_owned(), Namespace::default());
    assert!(!snapshot.is_complete(), "not listed yet");
    let mut failed = snapshot.clone();
    failed
        .errors
        .insert("Services of namespace team".to_owned(), "x".to_owned());
    assert!(failed.is_complete(), "an error");
    snapshot.namespaces.insert("team".to_owned(), listed_namespace());
    assert!(snapshot.is_complete(), "listed");
}

// threat: gateway-api-away
#[test]
fn lasting_watch_failure_depends_on_cause_and_duration() {
    let timeout = 2 * DENIAL_GRACE;
    let registry = &mut clustermesh_daemon::metrics::registry("test", "0");
    let (store, _wanted) = Store::new(Metrics::register(registry, false), timeout);
    let sink = SnapshotSink::<ParsedService> {
        store: store.clone(),
        kind: "Services of namespace team".to_owned(),
        namespace: Some("team".to_owned()),
        select: Box::new(|snapshot| {
            snapshot
                .namespaces
                .get_mut("team")
                .map(|namespace| &mut namespace.services)
        }),
    };
    let error = |code: u16| {
        let status = serde_json::from_value(json!({"code": code, "message": "no"})).unwrap();
        watcher::Error::WatchStartFailed(kube::Error::Api(status))
    };
    let lasting_failure_after = |namespace: Namespace, code| {
        store.change(|snapshot| snapshot.namespaces.insert("team".to_owned(), namespace).is_none());
        sink.failed(&error(code));
        store.snapshot().namespaces["team"].lasting_failure
    };
    let failing_for = |time, failure| Namespace {
        failing: Instant::now().checked_sub(time).map(|since| (since, failure)),
        ..listed_namespace()
    };
    assert_eq!(
        lasting_failure_after(Namespace::default(), 403),
        Some(Failure::AccessDenied),
        "never read"
    );
    assert_eq!(lasting_failure_after(listed_namespace(), 403), None, "denied just now");
    assert_eq!(
        lasting_failure_after(failing_for(DENIAL_GRACE, Failure::AccessDenied), 403),
        Some(Failure::AccessDenied)
    );
    sink.change(|_| false);
    assert_eq!(
        store.snapshot().namespaces["team"].lasting_failure,
        None,
        "answered again"
    );
    assert_eq!(
        lasting_failure_after(failing_for(DENIAL_GRACE, Failure::Other), 503),
        None,
        "failing for less than the timeout"
    );
    let failing_for_long = || failing_for(timeout, Failure::Other);
    assert_eq!(
        lasting_failure_after(failing_for_long(), 503),
        None,
        "the API server does not answer at all"
    );
    store.set_answering(true);
    assert_eq!(
        lasting_failure_after(failing_for_long(), 503),
        None,
        "the API server has been answering for less than the timeout"
    );
    store.lock().answers_since = Instant::now().checked_sub(timeout);
    assert_eq!(lasting_failure_after(failing_for_long(), 503), Some(Failure::Other));
    store.set_answering(false);
    assert_eq!(
        lasting_failure_after(failing_for_long(), 503),
        None,
        "the API server has stopped answering"
    );
}

// threat: gateway-api-away
#[test]
fn recovered_watch_does_not_clear_failure_of_other_watch() {
    let registry = &mut clustermesh_daemon::metrics::registry("test", "0");
    let (store, _wanted) = Store::new(Metrics::register(registry, false), DENIAL_GRACE);
    store.change(|snapshot| {
        snapshot
            .namespaces
            .insert("team".to_owned(), Namespace::default())
            .is_none()
    });
    fn sink<V: 'static>(store: &Store, kind: &str, part: fn(&mut Namespace) -> &mut WatchedKind<V>) -> SnapshotSink<V> {
        SnapshotSink {
            store: store.clone(),
            kind: format!("{kind} of namespace team"),
            namespace: Some("team".to_owned()),
            select: Box::new(move |snapshot| snapshot.namespaces.get_mut("team").map(part)),
        }
    }
    let services = sink::<ParsedService>(&store, "Services", |namespace| &mut namespace.services);
    let slices = sink::<ParsedSlice>(&store, "EndpointSlices", |namespace| &mut namespace.slices);
    let status = serde_json::from_value(json!({"code": 403, "message": "no"})).unwrap();
    let error = watcher::Error::WatchStartFailed(kube::Error::Api(status));
    services.failed(&error);
    slices.failed(&error);
    let lasting_failure = || store.snapshot().namespaces["team"].lasting_failure;
    services.change(|_| true);
    assert_eq!(
        lasting_failure(),
        Some(Failure::AccessDenied),
        "the slices are still denied"
    );
    slices.change(|_| true);
    assert_eq!(lasting_failure(), None);
}

#[test]
fn services_of_namespace_with_lasting_failure_are_unknown() {
    let mut snapshot = granted();
    let lasting_failure = Some(Failure::Other);
    snapshot.namespaces.insert(
        "team".to_owned(),
        Namespace {
            lasting_failure,
            ..listed_namespace()
        },
    );
    let services = snapshot.services("clustermesh-gateway");
    let service = services.values().next().unwrap();
    assert!(
        matches!(service, Service::Unknown(why) if why.contains("could not be watched")),
        "{service:?}"
    );
}
