//! Tests that Peers follow their Nodes, and that an invalid Node affects no other Node.

use clustermesh_api::names;
use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::test_env::{EVENTS, SOON, TestEnv, key};
use serde_json::json;

// threat: malformed-node
#[tokio::test]
async fn peers_follow_nodes_and_only_invalid_node_is_skipped() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    env.create_node("mgmt", 1, 1).await;
    env.create_node("tenant-a", 2, 1).await;
    env.create_node("tenant-a", 2, 2).await;
    let mut controller = env.start_controller().await;
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

    // A Node gets an annotation with an endpoint, then an invalid value, then the annotation is removed. The Peer of the other Node
    // does not change.
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

    // These Events were not repeated: they have no series. The first column is the reason, the second one the count of the series.
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
