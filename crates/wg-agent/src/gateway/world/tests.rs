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
