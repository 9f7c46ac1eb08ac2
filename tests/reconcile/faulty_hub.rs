//! Tests a hub that answers slowly, does not answer, or refuses status writes. Its members still get each other's new nodes, and
//! nothing is deleted. The log and `/readyz` report the fault.

use std::time::Duration;

use clustermesh_lab::{Running, wait_until};
use clustermesh_tests::{
    faulty::{Fault, FaultyApi, Requests},
    test_env::{EVENTS, LATER, TestEnv},
};

use crate::writes::until_passes;

/// How long a slow hub takes to answer.
const SLOW: Fault = Fault::Slow(Duration::from_secs(4));
const CLUSTERS: [&str; 3] = ["mgmt", "tenant-a", "tenant-b"];

async fn until_page_contains(env: &TestEnv, controller: &Running, text: &str) {
    wait_until(format!("{text:?} in /readyz"), LATER, async || {
        match env.page("/readyz").await {
            page if page.starts_with("ok\n") && page.contains(text) => Ok(()),
            page => Err(format!(
                "{page}; {}",
                controller.log().lines().last().unwrap_or_default()
            )),
        }
    })
    .await
    .unwrap();
}

/// The deletes in all clusters, except of the Peers of the node that the test removes.
fn unexpected_deletes(env: &TestEnv) -> Vec<String> {
    let all = CLUSTERS.iter().flat_map(|name| env.lab.cluster(name).audit().unwrap());
    all.filter(|write| write.starts_with("delete") && !write.contains("prod--tenant-b--tenant-b-1"))
        .collect()
}

/// Creates a node of tenant-a, and waits until tenant-b has its Peer.
async fn new_node_reaches_other_member(env: &TestEnv, n: u8) {
    env.create_node("tenant-a", 2, n).await;
    let name = format!("prod--tenant-a--tenant-a-{n}");
    wait_until(format!("{name} in tenant-b"), LATER, async || {
        match env.peers("tenant-b").await {
            peers if peers.contains_key(&name) => Ok(()),
            peers => Err(format!("{:?}", peers.keys())),
        }
    })
    .await
    .unwrap();
}

// threat: slow-api-server
#[tokio::test]
async fn members_follow_while_the_hub_is_slow_or_refuses_writes() {
    let env = TestEnv::start(&CLUSTERS).await;
    for (m, name) in (1..).zip(CLUSTERS) {
        env.create_node(name, m, 1).await;
    }
    let host = env
        .lab
        .add_host("proxy", "172.30.1.201".parse().unwrap())
        .await
        .unwrap();
    let hub = FaultyApi::start(&host, 7001, &env.hub()).await;
    let kubeconfig = hub.kubeconfig(&env.kubeconfig("mgmt").await);
    env.apply_mesh(&env.mesh()).await;

    // A controller that starts while the hub is slow becomes the leader, and writes into all clusters.
    hub.set(Some(SLOW));
    let mut controller = env.spawn_controller_with_kubeconfig(&kubeconfig);
    env.until_condition("Ready", "True/Meshed", LATER).await;
    assert!(
        controller.log().contains("the hub answers slowly"),
        "{}",
        controller.log()
    );
    new_node_reaches_other_member(&env, 2).await;
    until_registered(&env, 4).await;

    refused_status_is_named(&env, &controller, &hub).await;

    // While the hub does not answer, the controller still writes into the members.
    hub.set(Some(Fault::Closed));
    until_page_contains(&env, &controller, "but: lease: the hub does not answer").await;
    new_node_reaches_other_member(&env, 5).await;
    hub.set(None);
    until_registered(&env, 7).await;
    wait_until("no remark in /readyz", LATER, async || {
        match env.page("/readyz").await {
            page if page == "ok\n" => Ok(()),
            page => Err(page),
        }
    })
    .await
    .unwrap();
    env.until_condition("Ready", "True/Meshed", LATER).await;
    assert_eq!(unexpected_deletes(&env), Vec::<String>::new());
    assert!(
        controller.terminate(LATER).await.unwrap().success(),
        "{}",
        controller.log()
    );
}

async fn until_registered(env: &TestEnv, nodes: i64) {
    wait_until(format!("{nodes} nodes in the status"), LATER, async || {
        let status = env.get_mesh().await.unwrap().status.unwrap_or_default();
        if status.registered_peers == Some(nodes) {
            Ok(())
        } else {
            Err(format!("{:?}", status.registered_peers))
        }
    })
    .await
    .unwrap();
}

/// The hub refuses each write of a status, but no other request: members get new nodes, and `/readyz` names the refusal.
async fn refused_status_is_named(env: &TestEnv, controller: &Running, hub: &FaultyApi) {
    hub.set(Some(Fault::Status(Requests::Status, 403)));
    new_node_reaches_other_member(env, 3).await;
    until_page_contains(
        env,
        controller,
        "the hub refuses the status of a ClusterMesh (403): apply deploy/controller.yaml",
    )
    .await;
    // A new problem, of a member without Nodes, is in an Event although the status cannot be written.
    env.remove_node("tenant-b", "tenant-b-1").await;
    env.until_peers("tenant-a", &["prod--mgmt--mgmt-1"], LATER).await;
    wait_until("an Event", LATER, async || {
        let events = env.hub().kubectl(EVENTS).await.unwrap().stdout;
        if events.lines().any(|line| line.starts_with("NoNodes")) {
            Ok(())
        } else {
            Err(events)
        }
    })
    .await
    .unwrap();
    env.create_node("tenant-b", 3, 1).await;
    hub.set(Some(Fault::Status(Requests::Status, 409)));
    until_passes(env, 4).await;
    until_page_contains(env, controller, "the hub refuses the status of a ClusterMesh (409)").await;
    hub.set(Some(Fault::Status(Requests::Status, 500)));
    new_node_reaches_other_member(env, 4).await;
    until_page_contains(env, controller, "the hub refuses the status of a ClusterMesh (500)").await;
    hub.set(None);
    until_registered(env, 6).await;
}
