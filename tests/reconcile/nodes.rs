//! Tests that Peers follow their Nodes, and that an invalid Node affects no other Node.

use clustermesh_api::names;
use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::test_env::{EVENTS, SOON, TestEnv, key};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;

/// A changed endpoint does not make the controller plan all meshes anew. One of the changes may coincide with the plan that is made anew
/// once a minute.
async fn changed_endpoint_is_followed(env: &TestEnv) {
    let metric = "clustermesh_controller_full_plans_total";
    for port in 4501..4504 {
        let before = env.metric(metric).await;
        let endpoint = format!("203.0.113.9:{port}");
        env.annotate(
            "tenant-a",
            "tenant-a-2",
            names::KILO_CLUSTERMESH_ENDPOINT,
            Some(&endpoint),
        )
        .await;
        wait_until("the new endpoint in the Peer", SOON, async || {
            let peers = env.peers("mgmt").await;
            let endpoint = peers["prod--tenant-a--tenant-a-2"].spec.endpoint.clone().unwrap();
            (endpoint.port == port).then_some(()).ok_or(format!("{endpoint:?}"))
        })
        .await
        .unwrap();
        if env.metric(metric).await == before {
            return;
        }
    }
    panic!("each change of an endpoint planned all meshes anew");
}

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
    explicit_endpoint_stays_before_discovered_ones(&env).await;
    changed_endpoint_is_followed(&env).await;
    // The controller resolves host names. This one has only a loopback address.
    env.annotate(
        "tenant-a",
        "tenant-a-2",
        names::KILO_CLUSTERMESH_ENDPOINT,
        Some("localhost:51820"),
    )
    .await;
    env.until_peers("mgmt", &["prod--tenant-a--tenant-a-1"], SOON).await;
    let message = env.until_condition("Degraded", "True/NodesSkipped", SOON).await;
    assert!(message.contains("a loopback address"), "{message}");
    env.annotate(
        "tenant-a",
        "tenant-a-2",
        names::KILO_CLUSTERMESH_ENDPOINT,
        Some("nonsense"),
    )
    .await;
    env.until_peers("mgmt", &["prod--tenant-a--tenant-a-1"], SOON).await;
    let message = wait_until("the invalid endpoint in the status", SOON, async || {
        match env.condition("Degraded").await {
            Some((state, message)) if state == "True/NodesSkipped" && message.contains("EndpointInvalid") => {
                Ok(message)
            }
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
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

    later_pod_cidr_and_address_reach_the_peer(&env).await;
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

/// Nodes of mgmt report another endpoint for the key of tenant-a-2, whose Peer then has it as a further candidate.
async fn explicit_endpoint_stays_before_discovered_ones(env: &TestEnv) {
    let reported = json!({key(2, 2): {"IP": "203.0.113.200", "Port": 1234}}).to_string();
    env.annotate("mgmt", "mgmt-1", names::KILO_DISCOVERED_ENDPOINTS, Some(&reported))
        .await;
    let peer = wait_until("the reported endpoint in the Peer", SOON, async || {
        let mut peers = env.peers("mgmt").await;
        let peer = peers.remove("prod--tenant-a--tenant-a-2").unwrap();
        let candidates = peer.metadata.annotations.clone().unwrap_or_default();
        match candidates.values().any(|value| value.contains("203.0.113.200")) {
            true => Ok(peer),
            false => Err(format!("{candidates:?}")),
        }
    })
    .await
    .unwrap();
    assert_eq!(
        json!([
            peer.spec.endpoint,
            peer.metadata.annotations.unwrap()[names::PEER_ENDPOINTS]
        ]),
        json!([{"dnsOrIP": {"ip": "203.0.113.9"}, "port": 4500}, "203.0.113.9:4500,198.51.2.2:51820,203.0.113.200:1234"])
    );
}

/// A Node joins without a pod CIDR, which kube-controller-manager assigns later; the kubelet changes its address.
async fn later_pod_cidr_and_address_reach_the_peer(env: &TestEnv) {
    let without_pod_cidr = |node: &mut serde_json::Value| node["spec"] = json!({});
    env.create_changed_node("tenant-a", (2, 3), without_pod_cidr).await;
    let skipped = async || {
        let status = env.get_mesh().await.unwrap().status.unwrap();
        let rows = status.clusters.into_iter().flat_map(|row| row.skipped);
        rows.map(|row| format!("{} {}", row.node, row.reason))
            .collect::<Vec<_>>()
    };
    wait_until("the Node to be skipped", SOON, async || match skipped().await {
        rows if rows == ["tenant-a-3 NodeNoPodCIDR"] => Ok(()),
        rows => Err(format!("{rows:?}")),
    })
    .await
    .unwrap();
    let nodes: Api<Node> = Api::all(env.client("tenant-a").await);
    let spec = Patch::Merge(json!({"spec": {"podCIDR": "10.2.3.0/24", "podCIDRs": ["10.2.3.0/24"]}}));
    nodes.patch("tenant-a-3", &PatchParams::default(), &spec).await.unwrap();
    let until_allowed_ips = async |want: [&str; 3]| {
        wait_until(format!("the allowed IPs {want:?}"), SOON, async || {
            let peers = env.peers("mgmt").await;
            match peers
                .get("prod--tenant-a--tenant-a-3")
                .map(|peer| &peer.spec.allowed_ips)
            {
                Some(found) if *found == want => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await
        .unwrap();
    };
    until_allowed_ips(["10.2.3.0/24", "100.64.2.3/32", "198.51.2.3/32"]).await;
    let status = Patch::Merge(json!({"status": {"addresses": [{"type": "InternalIP", "address": "198.51.2.33"}]}}));
    let params = PatchParams::default();
    nodes.patch_status("tenant-a-3", &params, &status).await.unwrap();
    until_allowed_ips(["10.2.3.0/24", "100.64.2.3/32", "198.51.2.33/32"]).await;
    env.remove_node("tenant-a", "tenant-a-3").await;
    env.until_peers(
        "mgmt",
        &["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-2"],
        SOON,
    )
    .await;
}
