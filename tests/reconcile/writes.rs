//! Tests when the controller writes: it writes nothing after a restart without changes, writes into members while the hub
//! is down, and reports a field manager that reverts its writes.

use std::collections::BTreeMap;

use clustermesh_api::{names, peer::Peer};
use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::test_env::{EVENTS, LATER, SOON, TestEnv};
use kube::{Api, api::PostParams};
use serde_json::json;

use crate::services::DB;

/// The writes of the controller in mgmt and tenant-a, from the audit logs of their API servers.
pub(crate) fn audit(env: &TestEnv) -> [Vec<String>; 2] {
    ["mgmt", "tenant-a"].map(|name| env.lab.cluster(name).audit().unwrap())
}

/// Causes `count` passes and waits for each: annotates the mesh, which changes no plan. Each pass compares its report with the
/// status.
pub(crate) async fn until_passes(env: &TestEnv, count: usize) {
    let metric = "clustermesh_controller_reconciles_total";
    for turn in 0..count {
        let before = env.metric(metric).await;
        let text = format!("example.com/turn={before}-{turn}");
        let words = ["annotate", "--overwrite", "cmesh", "-n", NAMESPACE, "prod", &text];
        env.hub().kubectl(words).await.unwrap();
        wait_until("a pass", LATER, async || match env.metric(metric).await - before {
            passes if passes >= 1.0 => Ok(()),
            passes => Err(format!("{passes}")),
        })
        .await
        .unwrap();
    }
}

#[tokio::test]
async fn restart_with_nothing_changed_writes_nothing() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    env.create_node("mgmt", 1, 1).await;
    env.create_node("tenant-a", 2, 1).await;
    // More nodes without a key than the status lists.
    let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(env.client("tenant-a").await);
    for n in 100..125 {
        let node = json!({"metadata": {"name": format!("bare-{n}")}, "spec": {"podCIDRs": [format!("10.2.{n}.0/24")]}});
        let node = serde_json::from_value(node).unwrap();
        nodes.create(&PostParams::default(), &node).await.unwrap();
    }
    let mut mesh = env.mesh();
    // The controller adjusts this value and publishes an Event.
    mesh["spec"]["clusters"][1]["allowedNetworks"][0] = json!("10.2.0.1/16");
    let mut controller = env.start_controller().await;
    env.apply_mesh(&mesh).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;
    env.until_condition("Degraded", "True/NodesSkipped", SOON).await;
    // One pass publishes at most twenty Events: one for Ready, one for the field, and 18 for nodes.
    wait_until("the Events of the field and the nodes", SOON, async || {
        let events = env.hub().kubectl(EVENTS).await.unwrap().stdout;
        let complete = events.contains("SpecAdjusted") && events.matches("is left out").count() == 18;
        if complete { Ok(()) } else { Err(events) }
    })
    .await
    .unwrap();
    let status = env.get_mesh().await.unwrap().status.unwrap();
    assert_eq!(
        (status.clusters[1].skipped_nodes, status.clusters[1].skipped.len()),
        (25, 20)
    );

    assert!(
        controller.terminate(SOON).await.unwrap().success(),
        "{}",
        controller.log()
    );
    let before = audit(&env);
    assert!(
        before[0]
            .iter()
            .any(|line| line.starts_with("patch clustermeshes/status")),
        "{before:?}"
    );
    let _controller = env.start_controller().await;
    env.until_read(2).await;
    until_passes(&env, 3).await;
    assert_eq!(audit(&env), before);
    // After this change has been written, all earlier writes have been sent, too.
    env.create_node("tenant-a", 2, 9).await;
    wait_until("the change in the status", SOON, async || {
        let status = env.get_mesh().await.unwrap().status.unwrap();
        if status.registered_peers == Some(3) {
            Ok(())
        } else {
            Err(format!("{:?}", status.registered_peers))
        }
    })
    .await
    .unwrap();
    let [hub, tenant] = audit(&env);
    let added = &hub[before[0].len()..];
    // The Node gets its addresses a moment after its creation, so its Peer may be written more than once.
    let is_peer = |line: &String| line.contains(" peers/ /prod--tenant-a--tenant-a-9 ");
    let status = format!("patch clustermeshes/status {NAMESPACE}/prod 200");
    assert!(added.iter().any(is_peer) && added.contains(&status), "{added:?}");
    assert!(added.iter().all(|line| is_peer(line) || *line == status), "{added:?}");
    assert_eq!(tenant, before[1]);
}

// threat: slow-api-server
#[tokio::test]
async fn members_get_new_objects_while_hub_is_down() {
    let (env, controller) = TestEnv::start_meshed(&["mgmt", "tenant-a", "tenant-b"]).await;

    env.hub().kill_api().unwrap();
    wait_until("the watch of the ClusterMeshes to fail", LATER, async || {
        let log = controller.log();
        let mut lines = log.lines();
        match lines.any(|line| line.contains("list or watch failed") && line.contains("clustermeshes")) {
            true => Ok(()),
            false => Err(log),
        }
    })
    .await
    .unwrap();
    env.create_node("tenant-a", 2, 2).await;
    env.remove_node("tenant-a", "tenant-a-1").await;
    // New objects are written. Nothing is deleted, because the hub may have changed the mesh meanwhile.
    let during = [
        "prod--mgmt--mgmt-1",
        "prod--tenant-a--tenant-a-1",
        "prod--tenant-a--tenant-a-2",
    ];
    env.until_peers("tenant-b", &during, SOON).await;
    env.create_node("tenant-a", 2, 3).await;
    let during = [&during[..], &["prod--tenant-a--tenant-a-3"]].concat();
    env.until_peers("tenant-b", &during, SOON).await;

    env.hub().start_api().await.unwrap();
    let after = [
        "prod--mgmt--mgmt-1",
        "prod--tenant-a--tenant-a-2",
        "prod--tenant-a--tenant-a-3",
    ];
    env.until_peers("tenant-b", &after, LATER).await;
    env.until_condition("Ready", "True/Meshed", LATER).await;
}

#[tokio::test]
async fn mesh_is_ready_only_while_objects_match_the_plan() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    env.create_node("mgmt", 1, 1).await;
    env.create_node("tenant-a", 2, 1).await;
    let _controller = env.start_controller().await;
    let mut mesh = env.mesh();
    mesh["spec"]["paused"] = json!(true);
    env.apply_mesh(&mesh).await;
    let message = env.until_condition("Ready", "False/Paused", SOON).await;
    assert_eq!(
        message,
        "4 objects are not as planned, and the mesh is paused; 2 of them in cluster \"mgmt\" for cluster \"tenant-a\""
    );
    assert_eq!(env.peers("mgmt").await, BTreeMap::new());
    mesh["spec"]["paused"] = json!(false);
    env.apply_mesh(&mesh).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;

    // Another field manager reverts each write.
    let peers: Api<Peer> = Api::all(env.client("mgmt").await);
    let name = "prod--tenant-a--tenant-a-1";
    let ours = peers.get(name).await.unwrap().spec;
    let theirs = json!({"spec": {"allowedIPs": ["10.2.1.0/24"]}});
    let params = kube::api::PatchParams {
        field_manager: Some("other-operator".to_owned()),
        ..Default::default()
    };
    let message = wait_until("the other field manager to be named", LATER, async || {
        if peers.get(name).await.unwrap().spec == ours {
            peers
                .patch(name, &params, &kube::api::Patch::Merge(&theirs))
                .await
                .unwrap();
        }
        match env.condition("Ready").await {
            Some((state, message)) if state == "False/WriteFailed" => Ok(message),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
    let want = format!("cluster \"mgmt\": Peer {name}: field manager \"other-operator\" changed it ");
    assert!(message.starts_with(&want), "{message}");
}

#[tokio::test]
async fn irrelevant_changes_and_restart_write_nothing() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    env.create_node("mgmt", 1, 1).await;
    env.create_node("tenant-a", 2, 1).await;
    let mut mesh = env.mesh();
    mesh["spec"]["clusters"][0]["egress"] =
        json!([{"service": {"cluster": "tenant-a", "namespace": "default", "name": "db"}}]);
    env.lab.cluster("tenant-a").apply(DB).await.unwrap();
    let mut controller = env.start_controller().await;
    env.apply_mesh(&mesh).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;
    env.until_condition("EgressResolved", "True/Resolved", SOON).await;

    let (before, passes) = (
        env.versions().await,
        env.metric("clustermesh_controller_reconciles_total").await,
    );
    // kg writes this annotation every 30 s on every node.
    for second in 0..20 {
        env.annotate(
            "tenant-a",
            "tenant-a-1",
            names::KILO_LAST_SEEN,
            Some(&format!("17000000{second:02}")),
        )
        .await;
    }
    // The watch delivers this relevant change after the irrelevant ones.
    env.annotate(
        "tenant-a",
        "tenant-a-1",
        names::KILO_CLUSTERMESH_ENDPOINT,
        Some("203.0.113.1:1"),
    )
    .await;
    wait_until("the relevant change", SOON, async || {
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
    let more = env.metric("clustermesh_controller_reconciles_total").await - passes;
    assert!(more < 10.0, "{more} passes for one change among 20 heartbeats");
    // Only this Peer and the mesh, whose status contains the time of the write, may have changed.
    let others = |mut versions: BTreeMap<String, String>| {
        versions.retain(|object, _| object != "mesh" && object != "mgmt Peer/prod--tenant-a--tenant-a-1");
        versions
    };
    assert_eq!(others(env.versions().await), others(before));

    let before = env.versions().await;
    assert!(
        controller.terminate(SOON).await.unwrap().success(),
        "{}",
        controller.log()
    );
    let controller = env.start_controller().await;
    env.until_read(2).await;
    // If the restart causes a write, that write is sent before the Peer of this new Node.
    env.create_node("tenant-a", 2, 9).await;
    env.until_peers(
        "mgmt",
        &["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-9"],
        SOON,
    )
    .await;
    let mut after = env.versions().await;
    after.remove("mgmt Peer/prod--tenant-a--tenant-a-9");
    // The new Node changes the status of the mesh.
    let (mut before, mesh) = (before, after.remove("mesh"));
    assert!(mesh.is_some() && before.remove("mesh").is_some());
    assert_eq!(after, before, "{}", controller.log());
}
