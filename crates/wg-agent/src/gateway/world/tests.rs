use serde_json::json;

use super::*;

fn access(name: &str, spec: &serde_json::Value) -> (String, AccessSeen) {
    let object = json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "SandboxAccess", "metadata": {"name": name}, "spec": spec,
    });
    (
        name.to_owned(),
        AccessSeen::new(serde_json::from_value(object).unwrap()),
    )
}

#[test]
fn unreadable_sandbox_access_is_reported() {
    let readable = access(
        "m--a",
        &json!({"sandbox": "a", "networks": [], "nodes": [], "grants": []}),
    );
    let world = World {
        accesses: Seen::Listed([readable, access("m--b", &json!({"sandbox": 7}))].into()),
        ..World::default()
    };
    let errors: Vec<String> = world.errors().collect();
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(
        errors[0].starts_with("SandboxAccess m--b is not what the SandboxAccess CRD describes"),
        "{errors:?}"
    );
}

/// One grant in the namespace `team`.
fn granted() -> World {
    let grant =
        json!({"service": {"namespace": "team", "name": "db"}, "port": "sql", "protocol": "TCP", "gatewayPort": 20001});
    let spec = json!({"sandbox": "a", "networks": ["100.80.0.0/20"], "nodes": [], "grants": [grant]});
    World {
        accesses: Seen::Listed([access("m--a", &spec)].into()),
        ..World::default()
    }
}

fn read() -> Namespace {
    Namespace {
        services: Seen::Listed(BTreeMap::new()),
        slices: Seen::Listed(BTreeMap::new()),
        ..Namespace::default()
    }
}

#[test]
fn world_is_complete_once_granted_namespaces_answer() {
    assert!(!World::default().complete());
    let mut world = granted();
    assert!(!world.complete(), "not followed yet");
    world.namespaces.insert("team".to_owned(), Namespace::default());
    assert!(!world.complete(), "not listed yet");
    let mut failed = world.clone();
    failed
        .errors
        .insert("Services of namespace team".to_owned(), "x".to_owned());
    assert!(failed.complete(), "an error");
    world.namespaces.insert("team".to_owned(), read());
    assert!(world.complete(), "listed");
}

#[test]
fn namespace_that_cannot_be_followed_closes_in_time() {
    let registry = &mut clustermesh_daemon::metrics::registry("test", "0");
    let (store, _wanted) = Store::new(Metrics::register(registry, false), 2 * STARTING);
    let shelf = Shelf::<ServiceSeen> {
        store: store.clone(),
        kind: "Services of namespace team".to_owned(),
        namespace: Some("team".to_owned()),
        place: Box::new(|world| {
            world
                .namespaces
                .get_mut("team")
                .map(|namespace| &mut namespace.services)
        }),
    };
    let error = |code: u16| {
        let status = serde_json::from_value(json!({"code": code, "message": "no"})).unwrap();
        watcher::Error::WatchStartFailed(kube::Error::Api(status))
    };
    let fail = |namespace: Namespace, code| {
        store.change(|world| world.namespaces.insert("team".to_owned(), namespace).is_none());
        shelf.failed(&error(code));
        store.world().namespaces["team"].closed
    };
    let failing_for = |time, failure| Namespace {
        failing: Instant::now().checked_sub(time).map(|since| (since, failure)),
        ..read()
    };
    assert_eq!(fail(Namespace::default(), 403), Some(Failure::Refused), "never read");
    assert_eq!(fail(read(), 403), None, "refused just now");
    assert_eq!(
        fail(failing_for(STARTING, Failure::Refused), 403),
        Some(Failure::Refused)
    );
    shelf.change(|_| false);
    assert_eq!(store.world().namespaces["team"].closed, None, "answered again");
    assert_eq!(
        fail(failing_for(STARTING, Failure::Failed), 503),
        None,
        "failing for a while"
    );
    let long = || failing_for(2 * STARTING, Failure::Failed);
    assert_eq!(fail(long(), 503), None, "the API server does not answer at all");
    store.answers(true);
    assert_eq!(fail(long(), 503), None, "it has only just begun to answer");
    store.lock().answers_since = Instant::now().checked_sub(2 * STARTING);
    assert_eq!(fail(long(), 503), Some(Failure::Failed));
    store.answers(false);
    assert_eq!(fail(long(), 503), None, "nor now");
}

#[test]
fn services_of_a_namespace_that_fails_for_long_are_unknown() {
    let mut world = granted();
    let closed = Some(Failure::Failed);
    world
        .namespaces
        .insert("team".to_owned(), Namespace { closed, ..read() });
    let services = world.services("home");
    let service = services.values().next().unwrap();
    assert!(
        matches!(service, Service::Unknown(why) if why.contains("could not be followed")),
        "{service:?}"
    );
}
