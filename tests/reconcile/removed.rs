//! Tests the cleanup of clusters that are removed from a mesh, and of a mesh that moves to another hub.

use std::collections::BTreeMap;

use clustermesh_api::{mesh::RemovedCluster, names, peer::Peer};
use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::test_env::{EVENTS, LATER, SOON, TestEnv};
use serde_json::json;

async fn start_three_clusters() -> (TestEnv, clustermesh_lab::Running) {
    TestEnv::start_meshed(&["mgmt", "tenant-a", "tenant-b"]).await
}

/// The mesh without its third entry, tenant-b.
fn without_tenant_b(env: &TestEnv) -> serde_json::Value {
    let mut mesh = env.mesh();
    mesh["spec"]["clusters"].as_array_mut().unwrap().remove(2);
    mesh
}

async fn delete(env: &TestEnv, what: [&str; 2]) {
    let words = ["delete", what[0], "-n", NAMESPACE, what[1], "--wait=false"];
    env.hub().kubectl(words).await.unwrap();
}

async fn annotate(env: &TestEnv, text: &str) {
    let words = ["annotate", "cmesh", "-n", NAMESPACE, "prod", text, "--overwrite"];
    env.hub().kubectl(words).await.unwrap();
}

/// Removes the finalizers. `clusterctl move` does this at its end, and a person may do it instead of waiting for the cleanup.
async fn strip_finalizers(env: &TestEnv) {
    let patch = "{\"metadata\":{\"finalizers\":null}}";
    let words = ["patch", "cmesh", "-n", NAMESPACE, "prod", "--type=merge", "-p", patch];
    env.hub().kubectl(words).await.unwrap();
}

async fn until_gone(env: &TestEnv) {
    wait_until("the mesh to be gone", SOON, async || match env.get_mesh().await {
        None => Ok(()),
        Some(mesh) => Err(format!("{:?}", mesh.status)),
    })
    .await
    .unwrap();
}

async fn until_removed_clusters(env: &TestEnv, check: impl Fn(&[RemovedCluster]) -> bool) {
    wait_until("the removed clusters in the status", LATER, async || {
        let rows = env.get_mesh().await.unwrap().status.unwrap().removed_clusters;
        if check(&rows) { Ok(()) } else { Err(format!("{rows:?}")) }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn mesh_is_cleaned_up_after_a_member_secret_is_deleted() {
    let (env, _controller) = start_three_clusters().await;
    delete(&env, ["secret", "tenant-b-kubeconfig"]).await;
    env.until_condition("Ready", "False/MemberMissing", SOON).await;
    env.apply_mesh(&without_tenant_b(&env)).await;
    env.until_peers("tenant-b", &[], SOON).await;
    env.until_peers("mgmt", &["prod--tenant-a--tenant-a-1"], SOON).await;
    until_removed_clusters(&env, <[_]>::is_empty).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;

    // When a namespace is deleted, its Secrets may be deleted before its mesh, and nothing can be created in the namespace any
    // more, not even an Event. No namespace controller runs here, so the test deletes the Secret and the mesh itself.
    let words = ["delete", "namespace", NAMESPACE, "--wait=false"];
    env.hub().kubectl(words).await.unwrap();
    delete(&env, ["secret", "tenant-a-kubeconfig"]).await;
    env.until_condition("Ready", "False/MemberMissing", SOON).await;
    delete(&env, ["cmesh", "prod"]).await;
    until_gone(&env).await;
    for cluster in ["mgmt", "tenant-a"] {
        env.until_peers(cluster, &[], SOON).await;
    }
}

#[tokio::test]
async fn removed_cluster_is_in_status_until_clean_or_given_up() {
    let (env, mut controller) = start_three_clusters().await;
    env.lab.cluster("tenant-b").kill_api().unwrap();
    env.apply_mesh(&without_tenant_b(&env)).await;
    let message = env.until_condition("Degraded", "True/ObjectsLeft", LATER).await;
    assert!(
        message.contains("\"tenant-b\"") && message.contains("force-cleanup=tenant-b"),
        "{message}"
    );
    // The controller still knows the remaining objects after a restart.
    assert!(controller.terminate(SOON).await.unwrap().success());
    controller = env.start_controller().await;
    env.lab.cluster("tenant-b").start_api().await.unwrap();
    env.until_peers("tenant-b", &[], LATER).await;
    until_removed_clusters(&env, <[_]>::is_empty).await;
    env.until_condition("Degraded", "False/AllServed", SOON).await;

    // After a restart without the kubeconfig of tenant-b, its objects can only be given up, by an annotation.
    env.apply_mesh(&env.mesh()).await;
    env.until_peers("tenant-b", &["prod--mgmt--mgmt-1", "prod--tenant-a--tenant-a-1"], SOON)
        .await;
    env.until_condition("Ready", "True/Meshed", SOON).await;
    // After a restart the controller knows a removed cluster only from the status, which is written after the Peers.
    wait_until("tenant-b in the status", SOON, async || {
        let rows = env.get_mesh().await.unwrap().status.unwrap().clusters;
        if rows.iter().any(|row| row.name == "tenant-b") {
            Ok(())
        } else {
            Err(format!("{rows:?}"))
        }
    })
    .await
    .unwrap();
    assert!(controller.terminate(SOON).await.unwrap().success());
    delete(&env, ["secret", "tenant-b-kubeconfig"]).await;
    env.apply_mesh(&without_tenant_b(&env)).await;
    let _controller = env.start_controller().await;
    until_removed_clusters(&env, |rows| {
        rows.len() == 1
            && rows[0]
                .message
                .contains("Secret clustermesh/tenant-b-kubeconfig does not exist")
    })
    .await;
    delete(&env, ["cmesh", "prod"]).await;
    env.until_peers("mgmt", &[], SOON).await;
    let message = env.until_condition("Ready", "False/Deleting", SOON).await;
    assert!(message.contains("force-cleanup=tenant-b"), "{message}");
    // The annotation for another cluster does not give up tenant-b.
    annotate(&env, "kilo-clustermesh.io/force-cleanup=tenant-a").await;
    until_removed_clusters(&env, |rows| rows.len() == 1).await;
    annotate(&env, "kilo-clustermesh.io/force-cleanup=tenant-b").await;
    until_gone(&env).await;
    assert_eq!(env.peers("tenant-b").await.len(), 2);
    let events = env.hub().kubectl(EVENTS).await.unwrap().stdout;
    let left =
        "objects of this mesh are left in cluster \"tenant-b\" (Secret clustermesh/tenant-b-kubeconfig key value)";
    assert!(
        events
            .lines()
            .any(|line| line.starts_with("ObjectsLeft") && line.contains(left)),
        "{events}"
    );
}

/// UIDs of the Peers in mgmt and tenant-a, by cluster and name.
async fn uids(env: &TestEnv) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for cluster in ["mgmt", "tenant-a"] {
        for (name, peer) in env.peers(cluster).await {
            all.insert(format!("{cluster}: {name}"), peer.metadata.uid.unwrap());
        }
    }
    all
}

/// Applies a second mesh of mgmt and tenant-a (no change if it exists), because the controller reads only clusters that a mesh
/// lists. The second mesh has other networks, and no Peers because its members are standard. Waits until the controller has read
/// both clusters and its state no longer contains the first mesh.
async fn read_clusters_for_second_mesh(env: &TestEnv) {
    let mut second = env.mesh();
    second["metadata"]["name"] = json!("second");
    let clusters = second["spec"]["clusters"].as_array_mut().unwrap();
    clusters.remove(2);
    for entry in clusters {
        entry["isolationProfile"] = json!("standard");
        entry["allowedNetworks"] = json!([format!(
            "10.20{}.0.0/16",
            if entry["local"] == json!(true) { 1 } else { 2 }
        )]);
    }
    env.apply_mesh(&second).await;
    wait_until("both clusters to be read", LATER, async || {
        let state = env.page("/debug/state").await;
        let fresh = state.matches("\"observation\": \"Fresh\"").count();
        let is_gone = !state.contains("clustermesh/prod");
        if fresh == 2 && is_gone { Ok(()) } else { Err(state) }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn mesh_that_moves_to_another_hub_deletes_nothing() {
    let (env, mut controller) = start_three_clusters().await;
    let before = uids(&env).await;
    assert_eq!(before.len(), 4);
    // `clusterctl move` first deletes the mesh and removes its finalizers later.
    annotate(&env, "clusterctl.cluster.x-k8s.io/delete-for-move=").await;
    delete(&env, ["cmesh", "prod"]).await;
    env.until_condition("Paused", "True/Paused", SOON).await;
    assert_eq!(uids(&env).await, before);
    strip_finalizers(&env).await;
    until_gone(&env).await;
    read_clusters_for_second_mesh(&env).await;
    assert_eq!(uids(&env).await, before);
    // A controller that starts after the deletion of the mesh deletes nothing, either.
    let old_hub = env.hub_id().await;
    assert!(controller.terminate(SOON).await.unwrap().success());
    controller = env.start_controller().await;
    read_clusters_for_second_mesh(&env).await;
    assert_eq!(uids(&env).await, before);
    delete(&env, ["cmesh", "second"]).await;
    assert!(controller.terminate(SOON).await.unwrap().success());

    let _controller = env.start_controller_for(NAMESPACE, &["--hub-id=second"]).await;
    let mut mesh = env.mesh();
    mesh["metadata"]["annotations"] = json!({names::ADOPT_HUB: old_hub});
    env.apply_mesh(&mesh).await;
    wait_until("the new hub to adopt the Peers", SOON, async || {
        let peers = env.peers("tenant-a").await;
        let hub = |peer: &Peer| peer.metadata.labels.as_ref().unwrap()[names::LABEL_HUB].clone();
        let hubs: Vec<String> = peers.values().map(hub).collect();
        if hubs.iter().all(|hub| hub == "second") {
            Ok(())
        } else {
            Err(format!("{hubs:?}"))
        }
    })
    .await
    .unwrap();
    env.until_condition("Ready", "True/Meshed", SOON).await;
    assert_eq!(uids(&env).await, before);
}

#[tokio::test]
async fn paused_mesh_that_loses_its_finalizer_deletes_nothing() {
    let (env, mut controller) = start_three_clusters().await;
    let before = uids(&env).await;
    annotate(&env, "cluster.x-k8s.io/paused=true").await;
    env.until_condition("Paused", "True/Paused", SOON).await;
    assert!(controller.terminate(SOON).await.unwrap().success());
    strip_finalizers(&env).await;
    delete(&env, ["cmesh", "prod"]).await;
    let _controller = env.start_controller().await;
    read_clusters_for_second_mesh(&env).await;
    assert_eq!(uids(&env).await, before);
}
