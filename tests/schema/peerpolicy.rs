//! Tests the PeerPolicy CRD: which objects an API server accepts, and the messages of refusals.

use crate::api_server::ApiServer;
use serde_json::{Value, json};

const POLICIES: &str = "/apis/kilo.squat.ai/v1alpha1/peerpolicies";

fn policy() -> Value {
    json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "PeerPolicy", "metadata": {"name": "prod--tenant-a"},
        "spec": {
            "source": "tenant-a", "sources": ["10.20.0.0/16"], "networks": ["10.20.0.0/16"],
            "allow": [{"to": ["10.244.0.0/16"]}],
            "deny": [{"to": ["192.0.2.1/32"], "ports": [{"port": 6443}]}],
            "infrastructurePorts": [{"port": 10250}],
            "anchored": ["10.96.0.0/12"],
        },
    })
}

#[tokio::test]
async fn invalid_field_is_refused_with_its_path() {
    let server = ApiServer::start().await;
    // The valid policy is stored with the default `protocol`. Each case below makes one field invalid.
    let mut stored = server.dry_run(POLICIES, &policy()).await.unwrap();
    let mut expected = policy()["spec"].clone();
    for port in ["/deny/0/ports/0", "/infrastructurePorts/0"] {
        expected.pointer_mut(port).unwrap()["protocol"] = json!("TCP");
    }
    assert_eq!(stored["spec"].take(), expected);

    let cidr = "is not a network: write an address and a prefix length, such as 10.244.0.0/16 or fd00:10:244::/48";
    let cases = [
        ("/sources/0", json!("x"), format!("spec.sources[0]: Invalid value: \"x\": {cidr}")),
        ("/networks/0", json!("10.0.0.1"), format!("spec.networks[0]: Invalid value: \"10.0.0.1\": {cidr}")),
        ("/anchored/0", json!("x"), format!("spec.anchored[0]: Invalid value: \"x\": {cidr}")),
        ("/deny/0/to/0", json!("x"), format!("spec.deny[0].to[0]: Invalid value: \"x\": {cidr}")),
        ("/allow/0/to/0", json!("x"), format!("spec.allow[0].to[0]: Invalid value: \"x\": {cidr}")),
        (
            "/allow/0",
            json!({}),
            "[spec.allow[0].to: Required value, <nil>: Invalid value: null: some validation rules were not checked because the object was \
             invalid; correct the existing errors to complete validation]"
                .into(),
        ),
        (
            "/infrastructurePorts/0/port",
            json!(65536),
            "spec.infrastructurePorts[0].port: Invalid value: 65536: spec.infrastructurePorts[0].port in body should be less than or equal to 65535".into(),
        ),
    ];
    for (path, value, expected) in cases {
        let mut object = policy();
        *object["spec"].pointer_mut(path).unwrap() = value;
        let refused = server.dry_run(POLICIES, &object).await.expect_err(&expected);
        assert_eq!(
            refused,
            (
                422,
                format!("PeerPolicy.kilo.squat.ai \"prod--tenant-a\" is invalid: {expected}")
            )
        );
    }
}

#[tokio::test]
async fn policy_with_maximum_sources_and_rule_networks_is_accepted() {
    let server = ApiServer::start().await;
    let mut object = policy();
    // The limits of the schema: 8192 networks in `sources`, and 1024 in one entry of `allow`.
    let hosts: Vec<String> = (0..8192)
        .map(|i| format!("100.66.{}.{}/32", i / 256, i % 256))
        .collect();
    let rule: Vec<&String> = hosts.iter().take(1024).collect();
    object["spec"]["sources"] = json!(hosts);
    object["spec"]["allow"] = json!([{"to": rule}]);
    let stored = server.dry_run(POLICIES, &object).await.unwrap();
    assert_eq!(stored["spec"]["sources"], json!(hosts));
}
