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
fn namespace_read_before_survives_a_short_refusal() {
    let registry = &mut clustermesh_daemon::metrics::registry("test", "0");
    let (store, _wanted) = Store::new(Metrics::register(registry, false));
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
    let status = serde_json::from_value(json!({"code": 403, "message": "forbidden"})).unwrap();
    let error = watcher::Error::WatchStartFailed(kube::Error::Api(status));
    let fail = |namespace: Namespace| {
        store.change(|world| world.namespaces.insert("team".to_owned(), namespace).is_none());
        shelf.failed(&error);
        store.world().namespaces["team"].forbidden
    };
    assert!(fail(Namespace::default()), "never read");
    assert!(!fail(read()), "refused just now");
    let long = Instant::now().checked_sub(STARTING);
    assert!(
        fail(Namespace {
            refused: long,
            ..read()
        }),
        "refused for long"
    );
    shelf.change(|_| false);
    assert!(!store.world().namespaces["team"].forbidden, "answered again");
}
