//! Tests that a quarantine takes effect at once where the API server answers, and that a quarantine and a revoked grant are
//! reported as pending where it does not.

use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::test_env::{EVENTS, LATER, SOON, TestEnv};
use serde_json::json;

use crate::{gateways, hostile, sandbox};

// threat: closing-not-written
#[tokio::test]
async fn quarantine_is_pending_where_api_server_is_frozen() {
    let (env, _controller) = TestEnv::start_meshed(&["mgmt", "tenant-a", "tenant-b"]).await;
    let is_open = async |cluster: &str| {
        let policies = sandbox::policies(&env, cluster).await;
        !policies["prod--tenant-b"].spec.allow.is_empty()
    };
    for cluster in ["mgmt", "tenant-a"] {
        assert!(is_open(cluster).await, "{cluster}");
    }

    // While one API server is frozen, an annotation requests the quarantine. It also names a cluster that is no entry of
    // the mesh.
    let frozen = env.lab.cluster("tenant-a");
    frozen.freeze_api().unwrap();
    env.until_condition("Ready", "False/MemberStale", LATER).await;
    let annotate = async |change: &str| {
        let words = ["annotate", "--overwrite", "cmesh", "prod", "-n", NAMESPACE, change];
        env.hub().kubectl(words).await.unwrap();
    };
    annotate("kilo-clustermesh.io/quarantine=tenant-b,tenant-bb").await;
    let wait_until_open_is = async |cluster: &str, want: bool| {
        wait_until(format!("{cluster} to be open: {want}"), SOON, async || {
            match is_open(cluster).await {
                open if open == want => Ok(()),
                open => Err(format!("open: {open}")),
            }
        })
        .await
        .unwrap();
    };
    wait_until_open_is("mgmt", false).await;
    let message = env
        .until_condition("PolicyEnforced", "False/QuarantinePending", SOON)
        .await;
    assert!(
        message.starts_with(
            "cluster \"tenant-b\" is quarantined, and this is not yet in effect in cluster \"tenant-a\": "
        ),
        "{message}"
    );
    assert!(!message.contains("\"mgmt\""), "{message}");
    let events = env.hub().kubectl(EVENTS).await.unwrap().stdout;
    assert!(
        events.contains("\"tenant-bb\" is not an entry of this mesh"),
        "{events}"
    );

    // When the API server answers again, the quarantine takes effect there too, and no Peer is deleted.
    frozen.thaw_api().unwrap();
    env.until_condition("PolicyEnforced", "True/Enforced", LATER).await;
    assert!(!is_open("tenant-a").await);
    let peers = env.peers("tenant-a").await;
    let names: Vec<&String> = peers.keys().collect();
    assert_eq!(names, ["prod--mgmt--mgmt-1", "prod--tenant-b--tenant-b-1"]);
    let message = env.until_condition("Degraded", "True/Quarantined", SOON).await;
    assert!(message.contains("\"tenant-b\""), "{message}");

    annotate("kilo-clustermesh.io/quarantine-").await;
    for cluster in ["mgmt", "tenant-a"] {
        wait_until_open_is(cluster, true).await;
    }
    env.until_condition("Degraded", "False/AllServed", SOON).await;
}

#[tokio::test]
async fn revoked_grant_is_pending_while_target_is_frozen() {
    let env = TestEnv::start(&["mgmt", "tenant-a", "notebooks"]).await;
    for (m, name) in [(1, "mgmt"), (2, "tenant-a"), (3, "notebooks")] {
        env.create_node(name, m, 1).await;
    }
    sandbox::create_service(&env, "tenant-a", "team-x", "postgres", 5432, ("10.2.1.9", "tenant-a-1")).await;
    gateways::install(&env, "tenant-a", 2).await;
    let _controller = env.start_controller().await;
    let mut mesh = env.mesh();
    let entry = &mut mesh["spec"]["clusters"][2];
    entry["isolationProfile"] = json!("sandbox");
    entry["allowedNetworks"] = json!(["100.64.3.0/24"]);
    entry["egress"] = json!([{
        "service": {"cluster": "tenant-a", "namespace": "team-x", "name": "postgres"},
        "ports": [{"port": 5432}], "as": {"namespace": "default", "name": "db"},
    }]);
    env.apply_mesh(&mesh).await;
    env.until_condition("EgressResolved", "True/Resolved", SOON).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;
    // A separate step, which is here because it needs a sandbox with a grant.
    hostile::hostile_sandbox_changes_only_its_access_and_the_status(&env).await;

    let frozen = env.lab.cluster("tenant-a");
    frozen.freeze_api().unwrap();
    env.until_condition("Ready", "False/MemberStale", LATER).await;
    mesh["spec"]["clusters"][2]["egress"] = json!([]);
    env.apply_mesh(&mesh).await;
    let message = env.until_condition("PolicyEnforced", "False/RevokePending", SOON).await;
    assert!(
        message.starts_with(
            "access was revoked from cluster \"notebooks\", and this is not yet in effect in cluster \"tenant-a\": "
        ),
        "{message}"
    );
    frozen.thaw_api().unwrap();
    env.until_condition("PolicyEnforced", "True/Enforced", LATER).await;
    env.until_peers("tenant-a", &["prod--mgmt--mgmt-1"], SOON).await;
}
