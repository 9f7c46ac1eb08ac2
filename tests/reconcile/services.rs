//! Tests that a mirrored Service is written for its grant, follows the endpoints, and is removed with the grant, and that a user's
//! Service of the same name is kept.

use clustermesh_api::names;
use clustermesh_lab::wait_until;
use clustermesh_tests::test_env::{SOON, TestEnv};
use serde_json::json;

/// A Service of a member, and its EndpointSlice.
pub(crate) const DB: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: db, namespace: default}
spec: {selector: {app: db}, ports: [{port: 5432, targetPort: 15432}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-1, namespace: default, labels: {kubernetes.io/service-name: db}}
addressType: IPv4
ports: [{name: "", port: 15432, protocol: TCP}]
endpoints: [{addresses: [10.2.1.7], conditions: {ready: true, serving: true, terminating: false}}]
"#;

// threat: foreign-object
#[tokio::test]
async fn mirrored_service_follows_grant_and_user_service_is_kept() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    env.create_node("mgmt", 1, 1).await;
    env.create_node("tenant-a", 2, 1).await;
    let tenant = env.lab.cluster("tenant-a");
    tenant.apply(DB).await.unwrap();
    let hub = env.hub();
    // A Service of a user already has the name of the second mirrored Service.
    hub.kubectl(["create", "service", "clusterip", "taken", "--tcp=80"])
        .await
        .unwrap();
    let service = |name| json!({"cluster": "tenant-a", "namespace": "default", "name": name});
    let mut mesh = env.mesh();
    mesh["spec"]["clusters"][0]["egress"] = json!([
        {"service": service("db"), "as": {"name": "remote-db"}},
        {"service": service("db"), "as": {"name": "taken"}},
    ]);
    let _controller = env.start_controller().await;
    env.apply_mesh(&mesh).await;

    let slices = [
        "get",
        "endpointslices",
        "-l",
        "kubernetes.io/service-name=remote-db",
        "-o",
        "jsonpath={.items[*].endpoints[*].addresses[*]} {.items[*].ports[*].port}",
    ];
    let until_mirrored = async |want: &str| {
        wait_until(format!("the mirrored endpoints to be {want:?}"), SOON, async || {
            let seen = hub.kubectl(slices).await.unwrap().stdout;
            if seen == want { Ok(()) } else { Err(seen) }
        })
        .await
        .unwrap();
    };
    until_mirrored("10.2.1.7 15432").await;
    let spec = hub
        .kubectl([
            "get",
            "service",
            "remote-db",
            "-o",
            "jsonpath={.spec.ports[0].port} {.spec.selector} {.metadata.labels}",
        ])
        .await;
    let spec = spec.unwrap().stdout;
    assert!(
        spec.starts_with("5432  {") && spec.contains(names::LABEL_MANAGED_BY),
        "{spec}"
    );
    let message = env.until_condition("EgressResolved", "False/Unresolved", SOON).await;
    assert!(
        message.contains("default/taken") && message.contains("already exists"),
        "{message}"
    );

    let moved = DB.replace("10.2.1.7", "10.2.1.8");
    tenant.apply(&moved).await.unwrap();
    until_mirrored("10.2.1.8 15432").await;

    mesh["spec"]["clusters"][0]["egress"] = json!([]);
    env.apply_mesh(&mesh).await;
    until_mirrored(" ").await;
    wait_until("the mirrored Service to be deleted", SOON, async || {
        let left = hub
            .kubectl(["get", "services", "-o", "jsonpath={.items[*].metadata.name}"])
            .await
            .unwrap()
            .stdout;
        if left.contains("remote-db") { Err(left) } else { Ok(()) }
    })
    .await
    .unwrap();
    let taken = hub
        .kubectl(["get", "service", "taken", "-o", "jsonpath={.spec.ports[0].port}"])
        .await
        .unwrap()
        .stdout;
    assert_eq!(taken, "80");
}
