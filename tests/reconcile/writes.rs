//! Tests when the controller writes: not after a restart, into members while the hub is down, and against another field
//! manager.

use super::*;

/// The writes of the controller's account in each cluster.
pub(crate) fn audit(world: &World) -> [Vec<String>; 2] {
    ["mgmt", "tenant-a"].map(|name| world.lab.cluster(name).audit().unwrap())
}

/// Makes changes of the mesh on which no plan depends. Each causes a pass, which compares its report with the status.
pub(crate) async fn until_passes(world: &World, count: usize) {
    let metric = "clustermesh_controller_reconciles_total";
    for turn in 0..count {
        let before = world.metric(metric).await;
        let text = format!("example.com/turn={before}-{turn}");
        let words = ["annotate", "--overwrite", "cmesh", "-n", NAMESPACE, "prod", &text];
        world.hub().kubectl(words).await.unwrap();
        wait_until("a pass", LATER, async || match world.metric(metric).await - before {
            passes if passes >= 1.0 => Ok(()),
            passes => Err(format!("{passes}")),
        })
        .await
        .unwrap();
    }
}

#[tokio::test]
async fn restart_with_nothing_changed_writes_nothing() {
    let world = World::start(&["mgmt", "tenant-a"]).await;
    world.node("mgmt", 1, 1).await;
    world.node("tenant-a", 2, 1).await;
    // More nodes without a key than the status lists.
    let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(world.client("tenant-a").await);
    for n in 100..125 {
        let node = json!({"metadata": {"name": format!("bare-{n}")}, "spec": {"podCIDRs": [format!("10.2.{n}.0/24")]}});
        let node = serde_json::from_value(node).unwrap();
        nodes.create(&PostParams::default(), &node).await.unwrap();
    }
    let mut mesh = world.mesh();
    // The controller adjusts this value and publishes an Event.
    mesh["spec"]["clusters"][1]["allowedNetworks"][0] = json!("10.2.0.1/16");
    let mut controller = world.controller().await;
    world.apply_mesh(&mesh).await;
    world.until_condition("Ready", "True/Meshed", SOON).await;
    world.until_condition("Degraded", "True/NodesSkipped", SOON).await;
    // One pass publishes at most twenty Events.
    wait_until("the Events of the field and the nodes", SOON, async || {
        let events = world.hub().kubectl(EVENTS).await.unwrap().stdout;
        let told = events.contains("SpecAdjusted") && events.matches("is left out").count() == 18;
        if told { Ok(()) } else { Err(events) }
    })
    .await
    .unwrap();
    let status = world.get_mesh().await.unwrap().status.unwrap();
    assert_eq!(
        (status.clusters[1].skipped_nodes, status.clusters[1].skipped.len()),
        (25, 20)
    );

    assert!(
        controller.terminate(SOON).await.unwrap().success(),
        "{}",
        controller.log()
    );
    let before = audit(&world);
    assert!(
        before[0]
            .iter()
            .any(|line| line.starts_with("patch clustermeshes/status")),
        "{before:?}"
    );
    let _controller = world.controller().await;
    world.until_read(2).await;
    until_passes(&world, 3).await;
    assert_eq!(audit(&world), before);
    // When this change is written, every earlier pending write has been written, too.
    world.node("tenant-a", 2, 9).await;
    wait_until("the change in the status", SOON, async || {
        let status = world.get_mesh().await.unwrap().status.unwrap();
        if status.registered_peers == Some(3) {
            Ok(())
        } else {
            Err(format!("{:?}", status.registered_peers))
        }
    })
    .await
    .unwrap();
    let [hub, tenant] = audit(&world);
    let news = &hub[before[0].len()..];
    // The Node gets its addresses a moment after its creation, so its Peer may be written more than once.
    let is_peer = |line: &String| line.contains(" peers/ /prod--tenant-a--tenant-a-9 ");
    let status = format!("patch clustermeshes/status {NAMESPACE}/prod 200");
    assert!(news.iter().any(is_peer) && news.contains(&status), "{news:?}");
    assert!(news.iter().all(|line| is_peer(line) || *line == status), "{news:?}");
    assert_eq!(tenant, before[1]);
}

// threat: slow-api-server
#[tokio::test]
async fn members_get_new_objects_while_hub_is_down() {
    let (world, controller) = World::meshed(&["mgmt", "tenant-a", "tenant-b"]).await;

    world.hub().kill_api().unwrap();
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
    world.node("tenant-a", 2, 2).await;
    world.remove_node("tenant-a", "tenant-a-1").await;
    // New objects are written. Nothing is deleted, because the hub may have changed the mesh meanwhile.
    let during = [
        "prod--mgmt--mgmt-1",
        "prod--tenant-a--tenant-a-1",
        "prod--tenant-a--tenant-a-2",
    ];
    world.until_peers("tenant-b", &during, SOON).await;
    world.node("tenant-a", 2, 3).await;
    let during = [&during[..], &["prod--tenant-a--tenant-a-3"]].concat();
    world.until_peers("tenant-b", &during, SOON).await;

    world.hub().start_api().await.unwrap();
    let after = [
        "prod--mgmt--mgmt-1",
        "prod--tenant-a--tenant-a-2",
        "prod--tenant-a--tenant-a-3",
    ];
    world.until_peers("tenant-b", &after, LATER).await;
    world.until_condition("Ready", "True/Meshed", LATER).await;
}

#[tokio::test]
async fn mesh_is_ready_only_while_its_objects_are_as_planned() {
    let world = World::start(&["mgmt", "tenant-a"]).await;
    world.node("mgmt", 1, 1).await;
    world.node("tenant-a", 2, 1).await;
    let _controller = world.controller().await;
    let mut mesh = world.mesh();
    mesh["spec"]["paused"] = json!(true);
    world.apply_mesh(&mesh).await;
    let message = world.until_condition("Ready", "False/Paused", SOON).await;
    assert_eq!(
        message,
        "4 objects are not as planned, and the mesh is paused; 2 of them in cluster \"mgmt\" for cluster \"tenant-a\""
    );
    assert_eq!(world.peers("mgmt").await, BTreeMap::new());
    mesh["spec"]["paused"] = json!(false);
    world.apply_mesh(&mesh).await;
    world.until_condition("Ready", "True/Meshed", SOON).await;

    // Another field manager reverts each write.
    let peers: Api<Peer> = Api::all(world.client("mgmt").await);
    let name = "prod--tenant-a--tenant-a-1";
    let ours = peers.get(name).await.unwrap().spec;
    let theirs = json!({"spec": {"allowedIPs": ["10.2.1.0/24"]}});
    let params = kube::api::PatchParams {
        field_manager: Some("other-operator".to_owned()),
        ..Default::default()
    };
    let message = wait_until("the other writer to be named", LATER, async || {
        if peers.get(name).await.unwrap().spec == ours {
            peers
                .patch(name, &params, &kube::api::Patch::Merge(&theirs))
                .await
                .unwrap();
        }
        match world.condition("Ready").await {
            Some((state, message)) if state == "False/WriteFailed" => Ok(message),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
    let want = format!("cluster \"mgmt\": Peer {name}: field manager \"other-operator\" changed it ");
    assert!(message.starts_with(&want), "{message}");
}
