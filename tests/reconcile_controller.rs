//! Tests the real controller on real API servers: what it writes into members, when, and what it leaves unchanged.

#[path = "reconcile/closing.rs"]
mod closing;
#[path = "reconcile/flood.rs"]
mod flood;
#[path = "reconcile/gateways.rs"]
mod gateways;
#[path = "reconcile/hostile.rs"]
mod hostile;
#[path = "reconcile/kilo.rs"]
mod kilo;
#[path = "reconcile/members.rs"]
mod members;
#[path = "reconcile/meshes.rs"]
mod meshes;
#[path = "reconcile/profiles.rs"]
mod profiles;
mod reconcile;
#[path = "reconcile/removed.rs"]
mod removed;
#[path = "reconcile/restart.rs"]
mod restart;
#[path = "reconcile/sandbox.rs"]
mod sandbox;
#[path = "reconcile/status.rs"]
mod status;
#[path = "reconcile/writes.rs"]
mod writes;

use std::collections::BTreeMap;

use clustermesh_api::{annotations, names, peer::Peer};
use clustermesh_lab::{NAMESPACE, wait_until};
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use reconcile::{LATER, SOON, TestEnv, key};
use serde_json::json;

const EVENTS: [&str; 6] = [
    "get",
    "events",
    "-n",
    NAMESPACE,
    "--no-headers",
    "-o=custom-columns=R:.reason,S:.series.count,M:.message",
];

// threat: malformed-node
#[tokio::test]
async fn peers_follow_nodes_and_invalid_node_is_skipped_alone() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    env.node("mgmt", 1, 1).await;
    env.node("tenant-a", 2, 1).await;
    env.node("tenant-a", 2, 2).await;
    let mut controller = env.controller().await;
    env.apply_mesh(&env.mesh()).await;

    let peers = env
        .until_peers(
            "mgmt",
            &["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-2"],
            SOON,
        )
        .await;
    env.until_peers("tenant-a", &["prod--mgmt--mgmt-1"], SOON).await;
    let spec = serde_json::to_value(&peers["prod--tenant-a--tenant-a-2"].spec).unwrap();
    assert_eq!(
        spec,
        json!({
            "publicKey": key(2, 2),
            "allowedIPs": ["10.2.2.0/24", "100.64.2.2/32", "198.51.2.2/32"],
            "endpoint": {"dnsOrIP": {"ip": "198.51.2.2"}, "port": 51820},
        })
    );
    env.until_condition("Ready", "True/Meshed", SOON).await;
    let columns = env
        .hub()
        .kubectl(["get", "cmesh", "-n", NAMESPACE, "--no-headers"])
        .await
        .unwrap()
        .stdout;
    let columns: Vec<&str> = columns.split_whitespace().collect();
    assert_eq!(&columns[..5], ["prod", "True", "Meshed", "2/2", "3"]);

    // A Node publishes another endpoint, then an invalid one, then none. The Peer of the other Node does not change.
    let before = env.peers("mgmt").await;
    env.annotate(
        "tenant-a",
        "tenant-a-2",
        names::KILO_CLUSTERMESH_ENDPOINT,
        Some("203.0.113.9:4500"),
    )
    .await;
    let what = "the new endpoint in the Peer";
    wait_until(what, SOON, async || {
        let peers = env.peers("mgmt").await;
        let endpoint = peers["prod--tenant-a--tenant-a-2"].spec.endpoint.clone().unwrap();
        if endpoint.port == 4500 {
            Ok(())
        } else {
            Err(format!("{endpoint:?}"))
        }
    })
    .await
    .unwrap();
    env.annotate(
        "tenant-a",
        "tenant-a-2",
        names::KILO_CLUSTERMESH_ENDPOINT,
        Some("nonsense"),
    )
    .await;
    env.until_peers("mgmt", &["prod--tenant-a--tenant-a-1"], SOON).await;
    let message = env.until_condition("Degraded", "True/NodesSkipped", SOON).await;
    assert!(message.contains("tenant-a-2: NodeEndpointInvalid"), "{message}");
    let status = env.get_mesh().await.unwrap().status.unwrap();
    assert_eq!(
        (status.clusters[1].registered_peers, status.clusters[1].skipped_nodes),
        (1, 1)
    );
    assert_eq!(status.clusters[1].skipped[0].reason, "NodeEndpointInvalid");
    env.annotate("tenant-a", "tenant-a-2", names::KILO_CLUSTERMESH_ENDPOINT, None)
        .await;
    env.until_peers(
        "mgmt",
        &["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-2"],
        SOON,
    )
    .await;
    env.until_condition("Degraded", "False/AllServed", SOON).await;

    env.remove_node("tenant-a", "tenant-a-2").await;
    let after = env.until_peers("mgmt", &["prod--tenant-a--tenant-a-1"], SOON).await;
    assert_eq!(
        after["prod--tenant-a--tenant-a-1"],
        before["prod--tenant-a--tenant-a-1"]
    );

    // Each event was published once.
    let events = env.hub().kubectl(EVENTS).await.unwrap().stdout;
    let series_counts = |word: &str| {
        let lines = events.lines().filter(|line| line.starts_with(word));
        lines
            .map(|line| line.split_whitespace().nth(1).unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (series_counts("NodeEndpointInvalid"), series_counts("Meshed")),
        (vec!["<none>"], vec!["<none>"]),
        "{events}"
    );

    assert!(
        controller.terminate(SOON).await.unwrap().success(),
        "{}",
        controller.log()
    );
}

#[tokio::test]
async fn irrelevant_changes_and_restart_write_nothing() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    env.node("mgmt", 1, 1).await;
    env.node("tenant-a", 2, 1).await;
    let mut mesh = env.mesh();
    mesh["spec"]["clusters"][0]["egress"] =
        json!([{"service": {"cluster": "tenant-a", "namespace": "default", "name": "db"}}]);
    env.lab.cluster("tenant-a").apply(DB).await.unwrap();
    let mut controller = env.controller().await;
    env.apply_mesh(&mesh).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;
    env.until_condition("EgressResolved", "True/Resolved", SOON).await;

    // kg writes this annotation every 30 s on every node.
    let (before, plans) = (
        env.versions().await,
        env.metric("clustermesh_controller_reconciles_total").await,
    );
    for second in 0..20 {
        env.annotate(
            "tenant-a",
            "tenant-a-1",
            names::KILO_LAST_SEEN,
            Some(&format!("17000000{second:02}")),
        )
        .await;
    }
    // The watch delivers this relevant change after all of them.
    env.annotate(
        "tenant-a",
        "tenant-a-1",
        names::KILO_CLUSTERMESH_ENDPOINT,
        Some("203.0.113.1:1"),
    )
    .await;
    wait_until("the change behind the churn", SOON, async || {
        let peers = env.peers("mgmt").await;
        let port = peers["prod--tenant-a--tenant-a-1"]
            .spec
            .endpoint
            .as_ref()
            .map(|endpoint| endpoint.port);
        if port == Some(1) {
            Ok(())
        } else {
            Err(format!("{port:?}"))
        }
    })
    .await
    .unwrap();
    let more = env.metric("clustermesh_controller_reconciles_total").await - plans;
    assert!(more < 10.0, "{more} passes for one change among 20 heartbeats");
    // Only that Peer, and the mesh with the time of the write in its status, may have changed.
    let others = |mut versions: BTreeMap<String, String>| {
        versions.retain(|object, _| object != "mesh" && object != "mgmt Peer/prod--tenant-a--tenant-a-1");
        versions
    };
    assert_eq!(others(env.versions().await), others(before));

    // Restart the controller.
    let before = env.versions().await;
    assert!(
        controller.terminate(SOON).await.unwrap().success(),
        "{}",
        controller.log()
    );
    let controller = env.controller().await;
    env.until_read(2).await;
    // A pass that wrote something would be followed by another one. Both are over when this change has been written.
    env.node("tenant-a", 2, 9).await;
    env.until_peers(
        "mgmt",
        &["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-9"],
        SOON,
    )
    .await;
    let mut after = env.versions().await;
    after.remove("mgmt Peer/prod--tenant-a--tenant-a-9");
    let (mut before, mesh) = (before, after.remove("mesh"));
    assert!(mesh.is_some() && before.remove("mesh").is_some());
    assert_eq!(after, before, "{}", controller.log());
}

const DB: &str = r#"
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
async fn granted_service_is_mirrored_until_grant_is_removed() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    env.node("mgmt", 1, 1).await;
    env.node("tenant-a", 2, 1).await;
    let tenant = env.lab.cluster("tenant-a");
    tenant.apply(DB).await.unwrap();
    let hub = env.hub();
    // A foreign Service with the name that a grant asks for.
    hub.kubectl(["create", "service", "clusterip", "taken", "--tcp=80"])
        .await
        .unwrap();
    let service = |name| json!({"cluster": "tenant-a", "namespace": "default", "name": name});
    let mut mesh = env.mesh();
    mesh["spec"]["clusters"][0]["egress"] = json!([
        {"service": service("db"), "as": {"name": "remote-db"}},
        {"service": service("db"), "as": {"name": "taken"}},
    ]);
    let _controller = env.controller().await;
    env.apply_mesh(&mesh).await;

    let slices = [
        "get",
        "endpointslices",
        "-l",
        "kubernetes.io/service-name=remote-db",
        "-o",
        "jsonpath={.items[*].endpoints[*].addresses[*]} {.items[*].ports[*].port}",
    ];
    let mirrored = async |want: &str| {
        wait_until(format!("the mirrored endpoints to be {want:?}"), SOON, async || {
            let seen = hub.kubectl(slices).await.unwrap().stdout;
            if seen == want { Ok(()) } else { Err(seen) }
        })
        .await
        .unwrap();
    };
    mirrored("10.2.1.7 15432").await;
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
        message.contains("default/taken") && message.contains("not ours"),
        "{message}"
    );

    let moved = DB.replace("10.2.1.7", "10.2.1.8");
    tenant.apply(&moved).await.unwrap();
    mirrored("10.2.1.8 15432").await;

    mesh["spec"]["clusters"][0]["egress"] = json!([]);
    env.apply_mesh(&mesh).await;
    mirrored(" ").await;
    wait_until("the mirrored Service to go", SOON, async || {
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
