//! Tests members whose API server does not answer, and changes of kubeconfigs and of their Secrets.

use std::collections::BTreeMap;

use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::test_env::{LATER, SOON, TestEnv};
use serde_json::json;

use crate::status_command::StatusCommand;

// threat: empty-list, slow-api-server
#[tokio::test]
async fn member_that_is_down_delays_nothing_and_catches_up() {
    let (env, mut controller) = TestEnv::start_meshed(&["mgmt", "tenant-a", "tenant-b"]).await;
    let before = env.peers("mgmt").await;
    let status = StatusCommand::new(&env, &["mgmt", "tenant-a"]);
    status.assert_healthy().await;
    let mut watch = status.watch();
    watch.until_shown("healthy").await;

    // Frozen API server: connections stay open, but no response arrives.
    let frozen = env.lab.cluster("tenant-b");
    frozen.freeze_api().unwrap();
    env.create_node("tenant-a", 2, 2).await;
    let all = [
        "prod--tenant-a--tenant-a-1",
        "prod--tenant-a--tenant-a-2",
        "prod--tenant-b--tenant-b-1",
    ];
    env.until_peers("mgmt", &all, SOON).await;
    let message = env.until_condition("Ready", "False/MemberStale", LATER).await;
    assert!(
        message.contains("tenant-b") && message.contains("does not answer"),
        "{message}"
    );
    let since = status.names_unreachable("tenant-b").await;
    watch.until_shown("clustermesh/prod tenant-b: MemberStale").await;
    watch.interrupt(1).await;
    env.create_node("tenant-a", 2, 3).await;
    let all = [&all[..2], &["prod--tenant-a--tenant-a-3", all[2]]].concat();
    let during = env.until_peers("mgmt", &all, SOON).await;
    // A request to the frozen server fails after 5 s at the earliest, so a shorter pass has not waited for one.
    let (passes, short) = passes(&env).await;
    assert!(
        passes > 0 && passes == short,
        "{short} of {passes} passes took less than 5 s"
    );
    assert_eq!(
        during["prod--tenant-b--tenant-b-1"],
        before["prod--tenant-b--tenant-b-1"]
    );
    // The controller has written the status meanwhile, with the new node, and the start time of the problem is unchanged.
    status.until_registered(5).await;
    assert_eq!(status.names_unreachable("tenant-b").await, since);

    // Thawed API server: the controller repeats the missed writes.
    frozen.thaw_api().unwrap();
    let names = [
        "prod--mgmt--mgmt-1",
        "prod--tenant-a--tenant-a-1",
        "prod--tenant-a--tenant-a-2",
        "prod--tenant-a--tenant-a-3",
    ];
    env.until_peers("tenant-b", &names, LATER).await;
    env.until_condition("Ready", "True/Meshed", LATER).await;
    status.assert_healthy().await;
    status.error_says_what_is_missing_or_which_flag_is_invalid().await;
    status.needs_only_the_documented_rights().await;
    status.names_controller_that_does_not_renew().await;

    // Killed API server: connections are refused.
    frozen.kill_api().unwrap();
    env.until_condition("Ready", "False/MemberStale", LATER).await;
    // A controller that starts meanwhile serves the other members.
    assert!(controller.terminate(SOON).await.unwrap().success());
    let _controller = env.start_controller().await;
    let message = env.until_condition("Ready", "False/MemberUnreachable", LATER).await;
    assert!(message.contains("tenant-b"), "{message}");
    env.remove_node("tenant-a", "tenant-a-3").await;
    env.until_peers(
        "mgmt",
        &[
            "prod--tenant-a--tenant-a-1",
            "prod--tenant-a--tenant-a-2",
            "prod--tenant-b--tenant-b-1",
        ],
        SOON,
    )
    .await;
    frozen.start_api().await.unwrap();
    env.until_peers("tenant-b", &names[..3], LATER).await;
    env.until_condition("Ready", "True/Meshed", LATER).await;
    let after = env.peers("mgmt").await;
    assert_eq!(
        after["prod--tenant-b--tenant-b-1"],
        before["prod--tenant-b--tenant-b-1"]
    );
}

/// Number of passes, and how many of them took less than 5 s.
async fn passes(env: &TestEnv) -> (u64, u64) {
    let metrics = env.page("/metrics").await;
    let value = |name: &str| {
        let line = metrics.lines().find(|line| line.contains(name)).unwrap_or_default();
        line.rsplit(' ').next().and_then(|value| value.parse().ok())
    };
    let [all, short] = ["reconcile_seconds_count", "reconcile_seconds_bucket{le=\"5.0\"}"].map(value);
    (all.expect(&metrics), short.expect(&metrics))
}

#[tokio::test]
async fn new_kubeconfig_rewrites_nothing_and_refused_field_is_named() {
    let (env, controller) = TestEnv::start_meshed(&["mgmt", "tenant-a"]).await;
    let before = env.versions().await;
    let pid = controller.pid();

    // A kubeconfig for the same account with another token.
    env.write_secret("tenant-a", &env.kubeconfig("tenant-a").await).await;
    env.create_node("tenant-a", 2, 2).await;
    env.until_peers(
        "mgmt",
        &["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-2"],
        SOON,
    )
    .await;
    let mut after = env.versions().await;
    after.remove("mgmt Peer/prod--tenant-a--tenant-a-2");
    let without_mesh = |versions: &BTreeMap<String, String>| {
        versions
            .iter()
            .filter(|(object, _)| *object != "mesh")
            .map(|(o, v)| (o.clone(), v.clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(without_mesh(&after), without_mesh(&before));

    // A kubeconfig that would execute a program is refused, with the name of the field. Existing objects remain.
    let good = env.kubeconfig("tenant-a").await;
    let field = "users[].user.exec";
    let hostile = good.replace("    token: ", "    exec: {apiVersion: v1, command: sh}\n    token: ");
    env.write_secret("tenant-a", &hostile).await;
    let message = env.until_condition("Ready", "False/MemberMissing", SOON).await;
    assert!(
        message.contains(field) && message.contains("clustermesh/tenant-a-kubeconfig"),
        "{message}"
    );
    env.hub()
        .kubectl(["delete", "secret", "-n", NAMESPACE, "tenant-a-kubeconfig"])
        .await
        .unwrap();
    wait_until("the missing Secret to be named", SOON, async || {
        match env.condition("Ready").await {
            Some((_, message)) if message.contains("does not exist") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
    env.until_peers(
        "mgmt",
        &["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-2"],
        SOON,
    )
    .await;
    env.write_secret("tenant-a", &good).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;
    assert_eq!(controller.pid(), pid);
}

#[tokio::test]
async fn member_with_renamed_secret_keeps_its_objects() {
    let (env, controller) = TestEnv::start_meshed(&["mgmt", "tenant-a"]).await;
    let before = env.versions().await;

    // The old Secret still exists. The controller keeps the session with the old kubeconfig until the new session has read the cluster.
    env.write_secret_as("renamed", &env.kubeconfig("tenant-a").await).await;
    let mut mesh = env.mesh();
    mesh["spec"]["clusters"][1]["kubeconfigSecretRef"]["name"] = json!("renamed");
    env.apply_mesh(&mesh).await;
    wait_until(
        "the session of the renamed Secret to have read the cluster",
        SOON,
        async || {
            // `silent` is null in each session whose API server answers. A session has read its cluster if it knows the
            // cluster's UID. The page names the renamed Secret once in the mesh, and a second time if its session exists.
            let state = env.page("/debug/state").await;
            let responsive = state.matches("\"silent\": null,\n").count();
            let named = state.matches("renamed key").count();
            let pending = state.matches("\"uid\": null").count();
            if responsive >= 2 && pending == 0 && named > 1 {
                Ok(())
            } else {
                Err(state)
            }
        },
    )
    .await
    .unwrap();
    // The Peers of these new nodes are the last writes in both directions: once they exist, all earlier writes have been sent.
    env.create_node("tenant-a", 2, 2).await;
    env.create_node("mgmt", 1, 2).await;
    env.until_peers(
        "mgmt",
        &["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-2"],
        SOON,
    )
    .await;
    env.until_peers("tenant-a", &["prod--mgmt--mgmt-1", "prod--mgmt--mgmt-2"], SOON)
        .await;
    let mut after = env.versions().await;
    after.retain(|object, _| before.contains_key(object) && object != "mesh");
    let mut before = before;
    before.remove("mesh");
    assert_eq!(after, before, "{}", controller.log());
}

#[tokio::test]
async fn lease_is_taken_before_the_member_is_read() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    let member = env.lab.cluster("tenant-a");
    // Without this binding, the controller may read no object of the member, and so plans no write.
    let words = ["delete", "clusterrolebinding", "clustermesh-member"];
    member.kubectl(words).await.unwrap();
    let _controller = env.start_controller().await;
    env.apply_mesh(&env.mesh()).await;
    wait_until("the Lease in the member", SOON, async || {
        let writes = member.audited_writes().unwrap();
        if writes.iter().any(|write| write.is_of_lease()) {
            Ok(())
        } else {
            Err(format!("{writes:?}"))
        }
    })
    .await
    .unwrap();
}
