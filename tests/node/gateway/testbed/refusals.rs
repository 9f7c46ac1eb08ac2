//! Checks which parts of a SandboxAccess a gateway refuses, and which requests of a gateway's token the API server
//! refuses.

use std::collections::BTreeSet;

use clustermesh_tests::attacker::public;
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{GATEWAY, LOG_PORT, NAME, NAMESPACE, SQL_PORT, Sandbox, Testbed, grant, socket_addr};

// threat: granted-slice-redirected, gateway-forbidden-endpoint
pub(crate) async fn only_invalid_parts_are_refused(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    // A Service without a selector, and one whose only endpoint is outside the endpoint networks.
    testbed.write_service("by-hand", json!({})).await;
    testbed
        .write_service("elsewhere", json!({"selector": {"app": "elsewhere"}}))
        .await;
    testbed
        .write_endpoints("elsewhere", &[["192.0.2.7", "2001:db8::7"]])
        .await;
    let mut spec = a.access(&[
        grant("db", "sql", "TCP", SQL_PORT),
        grant("by-hand", "sql", "TCP", 20003),
        grant("elsewhere", "sql", "TCP", 20004),
        grant("none", "sql", "TCP", 20005),
        grant("db", "no-such-port", "TCP", 20006),
        json!({"service": {"namespace": "default", "name": "kubernetes"}, "port": "https", "gatewayPort": 20007}),
    ]);
    spec["networks"] = json!([a.networks[0], a.networks[1], "100.80.16.128/25", "10.10.0.0/24"]);
    let copied_key =
        json!({"name": "copied", "publicKey": public_key_of(&testbed.sandboxes[1]), "wireguardIPs": ["100.80.0.9"]});
    // The first address is outside the networks, the second belongs to another node.
    let invalid_addresses =
        json!({"name": "outside", "publicKey": key(91), "wireguardIPs": ["100.80.32.1", a.addresses[0]]});
    let invalid_key = json!({"name": "bad", "publicKey": "A".repeat(44), "wireguardIPs": ["100.80.0.10"]});
    for node in [copied_key, invalid_addresses, invalid_key] {
        spec["nodes"].as_array_mut().expect("nodes").push(node);
    }
    testbed.apply_access("m--a", spec).await;
    let status = testbed
        .wait_for_status("all invalid parts to be refused", |status| {
            status["refused"].as_array().is_some_and(|all| all.len() >= 11)
        })
        .await;
    let refused: BTreeSet<(String, String)> = (status["refused"].as_array().into_iter().flatten())
        .map(|part| (part["field"].to_string(), part["reason"].to_string()))
        .map(|(field, reason)| (field.trim_matches('"').to_owned(), reason.trim_matches('"').to_owned()))
        .collect();
    let expected = [
        ("spec.grants[1].service", "ServiceNotServed"),
        ("spec.grants[2].service", "EndpointForbidden"),
        ("spec.grants[3].service", "ServiceMissing"),
        ("spec.grants[4].service", "ServiceMissing"),
        ("spec.grants[5].service", "ServiceNotServed"),
        ("spec.networks[3]", "NetworkInvalid"),
        ("spec.nodes[2].wireguardIPs[0]", "AddressInvalid"),
        ("spec.nodes[2].wireguardIPs[1]", "AddressDuplicate"),
        ("spec.nodes[3].publicKey", "PublicKeyInvalid"),
        // These two are parts of m--b. The older m--a now also claims a range inside the first network of m--b, and the key of the
        // node of m--b (`copied_key`). The older SandboxAccess wins.
        ("spec.networks[0]", "NetworkOverlap"),
        ("spec.nodes[0].publicKey", "PublicKeyDuplicate"),
    ];
    let by_hand =
        (status["refused"].as_array().into_iter().flatten()).find(|part| part["field"] == "spec.grants[1].service");
    assert_eq!(by_hand.map(|part| &part["grant"]), Some(&json!("TCP/20003")));
    let expected: BTreeSet<_> = expected
        .map(|(field, reason)| (field.to_owned(), reason.to_owned()))
        .into();
    assert_eq!(refused, expected);
    assert!(a.tcp_reply(socket_addr(GATEWAY[0], SQL_PORT)).starts_with("db"));
    assert_eq!(a.try_tcp_reply(socket_addr(GATEWAY[0], 20004)), None);
    testbed
        .apply_access(
            "m--a",
            a.access(&[grant("db", "sql", "TCP", SQL_PORT), grant("db", "log", "UDP", LOG_PORT)]),
        )
        .await;
    testbed
        .wait_for_status("nothing to be refused", |status| status["refused"].is_null())
        .await;
}

/// If no network of a SandboxAccess is accepted, the gateway applies no part of it. The status of the SandboxGateway must not
/// list it as applied.
pub(crate) async fn refused_sandbox_access_is_not_applied(testbed: &Testbed) {
    let [a, _] = &testbed.sandboxes;
    let mut spec = a.access(&[grant("db", "sql", "TCP", SQL_PORT)]);
    spec["sandbox"] = json!("copy");
    testbed.write_access("m--copy", spec).await;
    let count_copy = |list: &Value| {
        let list = list.as_array().into_iter().flatten();
        list.filter(|part| part["name"] == "m--copy").count()
    };
    // Both networks of the copy are refused, because the older m--a has them.
    let status = testbed.wait_for_status("the copy to be refused", |status| count_copy(&status["refused"]) == 2);
    let status = status.await;
    assert_eq!(count_copy(&status["applied"]), 0, "{status}");
    let delete = ["delete", "sandboxaccesses.kilo.squat.ai", "m--copy"];
    testbed.cluster().kubectl(delete).await.expect("delete the copy");
    testbed
        .wait_for_status("nothing to be refused", |status| status["refused"].is_null())
        .await;
}

fn public_key_of(sandbox: &Sandbox) -> String {
    public(&sandbox.key).to_string()
}

fn key(number: u8) -> String {
    public(&x25519_dalek::StaticSecret::from([number; 32])).to_string()
}

/// With the token of a gateway, sends requests that no gateway needs. The API server must refuse each of them.
// threat: stolen-gateway-token
pub(crate) async fn stolen_gateway_token_gives_no_other_rights(testbed: &Testbed) {
    let stolen = testbed.gateway_client().await;
    let gateway_resource = kube::discovery::ApiResource::from_gvk_with_plural(
        &kube::api::GroupVersionKind::gvk("kilo.squat.ai", "v1alpha1", "SandboxGateway"),
        "sandboxgateways",
    );
    let gateways: Api<kube::api::DynamicObject> = Api::namespaced_with(stolen.clone(), NAMESPACE, &gateway_resource);
    let forged = Patch::Merge(json!({"status": {"publicKey": key(99)}}));
    let refused = gateways
        .patch_status("clustermesh-gateway-1", &PatchParams::default(), &forged)
        .await;
    let refused = refused
        .expect_err("the token must not write another gateway's status")
        .to_string();
    assert!(
        refused.contains("only the pod clustermesh-gateway/clustermesh-gateway-1 may write the status"),
        "{refused}"
    );
    let spec_change = gateways
        .patch(
            NAME,
            &PatchParams::default(),
            &Patch::Merge(json!({"spec": {"nodePort": 1}})),
        )
        .await;
    assert!(
        spec_change.is_err(),
        "the token must not change the spec of its own SandboxGateway"
    );
    let secrets: Api<k8s_openapi::api::core::v1::Secret> = Api::namespaced(stolen.clone(), NAMESPACE);
    assert!(
        secrets.list(&ListParams::default()).await.is_err(),
        "the token must not list Secrets"
    );
    let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(stolen.clone(), NAMESPACE);
    assert!(
        pods.list(&ListParams::default()).await.is_err(),
        "the token must not list Pods"
    );
    let elsewhere: Api<k8s_openapi::api::core::v1::Service> = Api::namespaced(stolen.clone(), "default");
    assert!(
        elsewhere.list(&ListParams::default()).await.is_err(),
        "the token must not list Services of a namespace without a RoleBinding"
    );
    let access_resource = kube::discovery::ApiResource::from_gvk_with_plural(
        &kube::api::GroupVersionKind::gvk("kilo.squat.ai", "v1alpha1", "SandboxAccess"),
        "sandboxaccesses",
    );
    let accesses: Api<kube::api::DynamicObject> = Api::all_with(stolen, &access_resource);
    let change = Patch::Merge(json!({"spec": {"grants": []}}));
    assert!(
        accesses.patch("m--a", &PatchParams::default(), &change).await.is_err(),
        "the token must not change a SandboxAccess"
    );
}
