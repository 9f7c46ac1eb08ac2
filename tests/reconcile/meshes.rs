//! Tests meshes that are deleted, paused, refused, or adopted from the predecessor.

use clustermesh_api::{names, peer::Peer};
use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::test_env::{EVENTS, LATER, SOON, TestEnv, key};
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use serde_json::json;

#[tokio::test]
async fn deleted_mesh_removes_objects_and_waits_for_members() {
    let env = TestEnv::start(&["mgmt", "tenant-a", "tenant-b"]).await;
    for (m, cluster) in [(1, "mgmt"), (2, "tenant-a"), (3, "tenant-b")] {
        env.create_node(cluster, m, 1).await;
    }
    // A Peer that a user has created, and that belongs to no mesh.
    let peers: Api<Peer> = Api::all(env.client("mgmt").await);
    let laptop: Peer = serde_json::from_value(json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": "laptop"},
        "spec": {"publicKey": key(9, 9), "allowedIPs": ["192.0.2.7/32"]},
    }))
    .unwrap();
    let laptop = peers.create(&PostParams::default(), &laptop).await.unwrap();
    let _controller = env.start_controller().await;
    env.apply_mesh(&env.mesh()).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;

    // When an entry is removed, the Peers in its cluster and its Peers in the others are deleted.
    let mut smaller = env.mesh();
    smaller["spec"]["clusters"].as_array_mut().unwrap().remove(2);
    env.apply_mesh(&smaller).await;
    env.until_peers("tenant-b", &[], SOON).await;
    env.until_peers("mgmt", &["laptop", "prod--tenant-a--tenant-a-1"], SOON)
        .await;
    env.apply_mesh(&env.mesh()).await;
    env.until_peers("tenant-b", &["prod--mgmt--mgmt-1", "prod--tenant-a--tenant-a-1"], SOON)
        .await;

    let stopped = env.lab.cluster("tenant-b");
    stopped.kill_api().unwrap();
    env.hub()
        .kubectl(["delete", "cmesh", "-n", NAMESPACE, "prod", "--wait=false"])
        .await
        .unwrap();
    env.until_peers("mgmt", &["laptop"], SOON).await;
    env.until_peers("tenant-a", &[], SOON).await;
    wait_until(
        "the condition to name the member that blocks the deletion",
        LATER,
        async || match env.condition("Ready").await {
            Some((state, message)) if state == "False/Deleting" && message.contains("force-cleanup=tenant-b") => Ok(()),
            other => Err(format!("{other:?}")),
        },
    )
    .await
    .unwrap();
    stopped.start_api().await.unwrap();
    wait_until("the mesh to be deleted", LATER, async || match env.get_mesh().await {
        None => Ok(()),
        Some(mesh) => Err(format!("{:?}", mesh.status)),
    })
    .await
    .unwrap();
    env.until_peers("tenant-b", &[], SOON).await;
    let policies = stopped
        .kubectl(["get", "peerpolicies", "-o", "name"])
        .await
        .unwrap()
        .stdout;
    assert_eq!(policies, "");
    assert_eq!(peers.get("laptop").await.unwrap(), laptop);
    peers.delete("laptop", &DeleteParams::default()).await.unwrap();
}

#[tokio::test]
async fn predecessor_peers_are_adopted_and_missing_crd_is_awaited() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    env.create_node("mgmt", 1, 1).await;
    env.create_node("tenant-a", 2, 1).await;
    let tenant = env.lab.cluster("tenant-a");
    tenant
        .kubectl(["delete", "crd", "peers.kilo.squat.ai", "peerpolicies.kilo.squat.ai"])
        .await
        .unwrap();
    // A Peer as the predecessor writes it: with only two labels, and with more allowed IPs than this controller writes.
    let peers: Api<Peer> = Api::all(env.client("mgmt").await);
    let old: Peer = serde_json::from_value(json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer",
        "metadata": {"name": "prod--tenant-a--tenant-a-1", "labels": {
            names::LABEL_MESH: "prod", names::LABEL_SOURCE_CLUSTER: "tenant-a",
        }},
        "spec": {
            "publicKey": key(2, 1), "persistentKeepalive": 5,
            "allowedIPs": ["10.2.1.0/24", "100.64.2.1/32", "198.51.2.1/32", "192.0.2.0/24"],
        },
    }))
    .unwrap();
    let old = peers.create(&PostParams::default(), &old).await.unwrap();
    let _controller = env.start_controller().await;
    env.apply_mesh(&env.mesh()).await;

    let adopted = wait_until("the Peer to have our labels", SOON, async || {
        let peer = peers.get("prod--tenant-a--tenant-a-1").await.unwrap();
        let labels = peer.metadata.labels.clone().unwrap();
        if labels.contains_key(names::LABEL_HUB) {
            Ok(peer)
        } else {
            Err(format!("{labels:?}"))
        }
    })
    .await
    .unwrap();
    assert_eq!(adopted.metadata.uid, old.metadata.uid);
    assert_eq!(
        adopted.spec.allowed_ips,
        ["10.2.1.0/24", "100.64.2.1/32", "198.51.2.1/32"]
    );

    let message = env.until_condition("Ready", "False/PeerCRDMissing", SOON).await;
    assert!(message.contains("tenant-a"), "{message}");
    env.install_peer_crds("tenant-a").await;
    env.until_peers("tenant-a", &["prod--mgmt--mgmt-1"], SOON).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;
}

// threat: hub-rights-borrowed
#[tokio::test]
async fn forbidden_or_invalid_mesh_is_refused_without_writes() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    env.create_node("mgmt", 1, 1).await;
    env.create_node("tenant-a", 2, 1).await;
    env.hub().kubectl(["create", "namespace", "elsewhere"]).await.unwrap();
    let _controller = env.start_controller().await;
    // No `--hub-namespace` names this namespace, and the mesh has an entry with `local: true`.
    let mut mesh = env.mesh();
    mesh["metadata"]["namespace"] = json!("elsewhere");
    env.apply_mesh(&mesh).await;
    let ready = |namespace| {
        let path = "jsonpath={.status.conditions[?(@.type==\"Ready\")].reason} {.metadata.finalizers}";
        ["get", "cmesh", "-n", namespace, "prod", "-o", path]
    };
    wait_until("the refusal", SOON, async || {
        let seen = env.hub().kubectl(ready("elsewhere")).await.unwrap().stdout;
        if seen == "LocalNotAllowed " { Ok(()) } else { Err(seen) }
    })
    .await
    .unwrap();
    env.until_peers("tenant-a", &[], SOON).await;
    // The refused mesh has no finalizer that would block its deletion.
    env.hub()
        .kubectl(["delete", "cmesh", "-n", "elsewhere", "prod", "--timeout=30s"])
        .await
        .unwrap();

    // The CRD accepts a network of any size; the controller refuses the mesh.
    let mut too_wide = env.mesh();
    too_wide["spec"]["clusters"][1]["allowedNetworks"] = json!(["0.0.0.0/1", "128.0.0.0/1"]);
    env.apply_mesh(&too_wide).await;
    let message = env.until_condition("Ready", "False/SpecInvalid", SOON).await;
    let field = "spec.clusters[1].allowedNetworks: 0.0.0.0/1 is wider than";
    assert!(message.contains(field), "{message}");
    for cluster in ["mgmt", "tenant-a"] {
        let peers: Vec<String> = env.peers(cluster).await.into_keys().collect();
        assert_eq!(peers, Vec::<String>::new(), "{cluster}");
    }
    // The next, valid spec gets its Peers at once.
    env.apply_mesh(&env.mesh()).await;
    env.until_peers("tenant-a", &["prod--mgmt--mgmt-1"], SOON).await;
}

#[tokio::test]
async fn paused_mesh_writes_nothing_and_cleanup_can_be_forced() {
    let (env, _controller) = TestEnv::start_meshed(&["mgmt", "tenant-a"]).await;

    let hub = env.hub();
    let annotate = async |text: &str| {
        hub.kubectl(["annotate", "cmesh", "-n", NAMESPACE, "prod", text, "--overwrite"])
            .await
            .unwrap();
    };
    annotate("cluster.x-k8s.io/paused=true").await;
    env.until_condition("Paused", "True/Paused", SOON).await;
    // The status counts the observed nodes (`agents`), and the Peers do not change.
    let writes_nothing_and_counts = async |nodes: i64| {
        wait_until(format!("{nodes} nodes to be counted"), SOON, async || {
            let mesh = env.get_mesh().await.unwrap();
            let agents = mesh.status.unwrap().clusters[1].agents;
            if agents.is_some_and(|agents| agents.total == nodes) {
                Ok(())
            } else {
                Err(format!("{agents:?}"))
            }
        })
        .await
        .unwrap();
        let peers: Vec<String> = env.peers("mgmt").await.into_keys().collect();
        assert_eq!(peers, ["prod--tenant-a--tenant-a-1"]);
    };
    env.create_node("tenant-a", 2, 2).await;
    writes_nothing_and_counts(2).await;
    env.remove_node("tenant-a", "tenant-a-1").await;
    writes_nothing_and_counts(1).await;
    annotate("cluster.x-k8s.io/paused=false").await;
    env.until_peers("mgmt", &["prod--tenant-a--tenant-a-2"], SOON).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;

    env.lab.cluster("tenant-a").kill_api().unwrap();
    hub.kubectl(["delete", "cmesh", "-n", NAMESPACE, "prod", "--wait=false"])
        .await
        .unwrap();
    env.until_peers("mgmt", &[], SOON).await;
    wait_until(
        "the condition to name the annotation that forces the deletion",
        LATER,
        async || match env.condition("Ready").await {
            Some((_, message)) if message.contains(&format!("{}=tenant-a", names::FORCE_CLEANUP)) => Ok(()),
            other => Err(format!("{other:?}")),
        },
    )
    .await
    .unwrap();
    annotate(&format!("{}=true", names::FORCE_CLEANUP)).await;
    wait_until("the mesh to be deleted", SOON, async || match env.get_mesh().await {
        None => Ok(()),
        Some(mesh) => Err(format!("{:?}", mesh.status)),
    })
    .await
    .unwrap();
    // The status is gone; the last Event says where objects are left.
    let events = env.hub().kubectl(EVENTS).await.unwrap().stdout;
    let left =
        "objects of this mesh are left in cluster \"tenant-a\" (Secret clustermesh/tenant-a-kubeconfig key value)";
    assert!(
        events
            .lines()
            .any(|line| line.starts_with("ObjectsLeft") && line.contains(left)),
        "{events}"
    );
}
