//! Tests a sandbox with a hostile administrator, on real API servers: whatever this administrator writes into the sandbox
//! changes nothing in other clusters except the sandbox's SandboxAccess and the mesh's status.

use std::{collections::BTreeMap, time::Duration};

use clustermesh_api::names;
use clustermesh_lab::wait_until;
use clustermesh_tests::test_env::{SOON, TestEnv, key};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use crate::gateways;

/// The controller retries a write after a second. So if no write happens within this time, it is not retrying any.
const QUIET: Duration = Duration::from_secs(5);
/// The sandbox's SandboxAccess, in the cluster of the granted Service. Outside the sandbox, only this object and the mesh's status
/// depend on the sandbox's nodes.
const ACCESS: &str = "tenant-a SandboxAccess/prod--notebooks";

/// The parts of the mirrored Service that its clients depend on: ports, selector, and the sockets of each EndpointSlice.
async fn mirrored(env: &TestEnv) -> Value {
    let cluster = env.lab.cluster("notebooks");
    let get = async |words: &[&str]| -> Value {
        let words = [&["get", "-n", "default", "-o", "json"], words].concat();
        serde_json::from_str(&cluster.kubectl(words).await.unwrap().stdout).unwrap()
    };
    let service = get(&["service", "db"]).await;
    let slices = get(&["endpointslices", "-l", "kubernetes.io/service-name=db"]).await;
    let slices = slices["items"].as_array().unwrap().iter();
    let sockets: Vec<Value> = slices
        .map(|slice| json!({"endpoints": slice["endpoints"][0]["addresses"], "ports": slice["ports"][0]["port"]}))
        .collect();
    let port = &service["spec"]["ports"][0];
    json!({"ports": [port["name"], port["port"], port["targetPort"]], "selector": service["spec"]["selector"], "slices": sockets})
}

/// Waits until the mirrored Service matches the grant.
async fn until_mirrored(env: &TestEnv) {
    let access = gateways::get(env, "tenant-a", &["sandboxaccess", "prod--notebooks"]).await;
    let port = &access["spec"]["grants"][0]["gatewayPort"];
    let want = json!({
        "ports": ["main", 5432, 5432], "selector": null,
        "slices": [{"endpoints": ["100.64.2.240"], "ports": port}],
    });
    wait_until("the mirrored Service", SOON, async || match mirrored(env).await {
        found if found == want => Ok(()),
        found => Err(found.to_string()),
    })
    .await
    .unwrap();
}

/// The resourceVersions of the controller's objects outside the sandbox, without [`ACCESS`] and the mesh, whose status reports
/// the sandbox's Nodes.
async fn versions_outside_sandbox(env: &TestEnv) -> BTreeMap<String, String> {
    let mut versions = env.versions().await;
    versions.retain(|object, _| !object.starts_with("notebooks ") && !object.starts_with(ACCESS) && object != "mesh");
    assert!(versions.len() > 5, "{versions:?}");
    versions
}

/// The number of writes into members since the controller started.
async fn writes(env: &TestEnv) -> u64 {
    let metrics = env.page("/metrics").await;
    let lines = metrics.lines().filter(|line| line.contains("_writes_total{"));
    lines
        .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
        .sum()
}

/// Waits until at least `want` writes have been made since the count was `before`, and no further write follows. Fails if there
/// were more than `most`. `most` exceeds `want`, because a plan that is made during a write repeats this write. The repeated write
/// counts although it changes nothing.
async fn until_written(env: &TestEnv, before: u64, want: u64, most: u64) {
    let found = wait_until(format!("{want} writes, and then none"), SOON, async || {
        let found = writes(env).await - before;
        // Equal counts before and after this time show that no refused or reverted write is being retried.
        tokio::time::sleep(QUIET).await;
        match writes(env).await - before {
            later if later >= want && (later == found || later > most) => Ok(later),
            later => Err(format!("{found}, then {later}")),
        }
    })
    .await
    .unwrap();
    assert!(found <= most, "{found} writes, but {want} are enough");
}

/// Needs a mesh `prod` of `mgmt`, `tenant-a` and `notebooks`, each with one node. `notebooks` is a sandbox that may
/// reach port 5432 of one endpoint on `tenant-a-1` as `default/db`.
// threat: sandbox-claims-identity
pub(crate) async fn hostile_sandbox_changes_only_its_access_and_the_status(env: &TestEnv) {
    until_mirrored(env).await;
    let before = versions_outside_sandbox(env).await;
    edited_mirrored_service_is_restored_with_few_writes(env).await;
    assert_eq!(versions_outside_sandbox(env).await, before);
    nodes_with_false_claims_are_skipped_or_limited(env).await;
    assert_eq!(versions_outside_sandbox(env).await, before);
}

// threat: sandbox-edits-mirror
async fn edited_mirrored_service_is_restored_with_few_writes(env: &TestEnv) {
    let sandbox = env.lab.cluster("notebooks");
    let slices = [
        "get",
        "endpointslices",
        "-l",
        "kubernetes.io/service-name=db",
        "-o",
        "name",
    ];
    let slice = sandbox.kubectl(slices).await.unwrap().stdout.trim().to_owned();
    let written = writes(env).await;
    assert!(written > 0, "the metric exists");
    let other_port =
        r#"{"spec": {"selector": {"app": "evil"}, "ports": [{"name": "main", "port": 6443, "targetPort": 10250}]}}"#;
    let other_endpoint = r#"{"endpoints": [{"addresses": ["10.1.1.8"], "conditions": {"ready": true}}], "ports": [{"name": "main", "port": 6443}]}"#;
    for (object, edit) in [("service/db", other_port), (&*slice, other_endpoint)] {
        sandbox
            .kubectl(["patch", object, "--type=merge", "-p", edit])
            .await
            .unwrap();
        until_mirrored(env).await;
    }
    until_written(env, written, 2, 4).await;
}

async fn nodes_with_false_claims_are_skipped_or_limited(env: &TestEnv) {
    let written = writes(env).await;
    let nodes: Api<Node> = Api::all(env.client("notebooks").await);
    let api = env.lab.cluster("tenant-a").plan().api_address();
    let long = "x".repeat(200_000);
    // Each Node has a key and an address of its own, except for the field with the false claim.
    let claims: [(u8, &str, Value); 9] = [
        (10, "key", json!({names::KILO_KEY: key(1, 1)})),
        (11, "key", json!({names::KILO_KEY: key(2, 1)})),
        (12, "address", json!({names::KILO_WIREGUARD_IP: "100.64.1.1/24"})),
        (13, "address", json!({names::KILO_WIREGUARD_IP: "100.64.2.1/24"})),
        (14, "range", json!({})),
        (15, "internal", json!({names::KILO_INTERNAL_IP: format!("{api}/32")})),
        (
            16,
            "endpoint",
            json!({names::KILO_ENDPOINT: format!("{api}:6443"), names::KILO_FORCE_ENDPOINT: "10.2.1.8:22"}),
        ),
        (17, "long", json!({names::KILO_CLUSTERMESH_ENDPOINT: long})),
        (18, "long", json!({names::KILO_KEY: long})),
    ];
    for (n, what, claim) in &claims {
        let mut node = json!({
            "metadata": {"name": format!("{what}-{n}"), "annotations": {
                names::KILO_KEY: key(3, *n),
                names::KILO_WIREGUARD_IP: format!("100.64.3.{n}/24"),
                names::KILO_ENDPOINT: format!("198.51.3.{n}:51820"),
                names::KILO_GRANULARITY: "full",
                names::NODE_AGENT: json!({"version": env!("CARGO_PKG_VERSION"), "mode": "full"}).to_string(),
            }},
            "spec": {"podCIDR": if *what == "range" { "0.0.0.0/0".to_owned() } else { format!("10.3.{n}.0/24") }},
        });
        for (annotation, value) in claim.as_object().unwrap() {
            node["metadata"]["annotations"][annotation] = value.clone();
        }
        let node = serde_json::from_value(node).unwrap();
        nodes.create(&PostParams::default(), &node).await.unwrap();
        let status = json!({"status": {
            "addresses": [{"type": "InternalIP", "address": api}, {"type": "ExternalIP", "address": api}],
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": null, "lastTransitionTime": null}],
        }});
        nodes
            .patch_status(&format!("{what}-{n}"), &PatchParams::default(), &Patch::Merge(&status))
            .await
            .unwrap();
    }

    // Nodes whose false claim is in a field that is ignored for a sandbox are registered like any other: with one
    // address and no endpoint.
    let like_others = [(14, "range"), (15, "internal"), (16, "endpoint"), (17, "long")];
    let mut registered: BTreeMap<String, Value> = like_others
        .map(|(n, what)| (format!("{what}-{n}"), json!([key(3, n), [format!("100.64.3.{n}")]])))
        .into();
    registered.insert("notebooks-1".to_owned(), json!([key(3, 1), ["100.64.3.1"]]));
    until_nodes(env, &registered).await;
    let want = [
        ("address-12", "WGIPOutOfRange"),
        ("address-13", "WGIPOutOfRange"),
        ("key-10", "PublicKeyDuplicate"),
        ("key-11", "PublicKeyDuplicate"),
        ("long-18", "PublicKeyInvalid"),
    ];
    let want: BTreeMap<String, String> = want.map(|(node, why)| (node.to_owned(), why.to_owned())).into();
    wait_until("the skipped nodes with their reasons", SOON, async || {
        let status = env.get_mesh().await.unwrap().status.unwrap();
        let skipped = status.clusters.into_iter().flat_map(|row| row.skipped);
        let skipped: BTreeMap<String, String> = skipped.map(|row| (row.node, row.reason)).collect();
        if skipped == want {
            Ok(())
        } else {
            Err(format!("{skipped:?}"))
        }
    })
    .await
    .unwrap();
    // The sandbox still has its Peers for the gateways.
    assert_eq!(env.peers("notebooks").await.len(), 2);
    // The SandboxAccess is written at least once, and not for every change of a Node.
    until_written(env, written, 1, 6).await;

    let words = ["delete", "nodes"].map(str::to_owned).into_iter();
    let words = words.chain(claims.iter().map(|(n, what, _)| format!("{what}-{n}")));
    env.lab.cluster("notebooks").kubectl(words).await.unwrap();
    registered.retain(|node, _| node == "notebooks-1");
    until_nodes(env, &registered).await;
    assert_eq!(env.peers("notebooks").await.len(), 2);
}

/// Waits until the SandboxAccess contains exactly these nodes of the sandbox, with key and addresses.
async fn until_nodes(env: &TestEnv, want: &BTreeMap<String, Value>) {
    wait_until("the nodes in the SandboxAccess", SOON, async || {
        let access = gateways::get(env, "tenant-a", &["sandboxaccess", "prod--notebooks"]).await;
        let nodes = access["spec"]["nodes"].as_array().cloned().unwrap_or_default();
        let name = |node: &Value| node["name"].as_str().unwrap().to_owned();
        let found: BTreeMap<String, Value> = nodes
            .iter()
            .map(|node| (name(node), json!([node["publicKey"], node["wireguardIPs"]])))
            .collect();
        if found == *want {
            Ok(())
        } else {
            Err(format!("{found:?}"))
        }
    })
    .await
    .unwrap();
}
