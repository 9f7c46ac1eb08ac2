//! Tests that a quarantine and a revoked grant take effect at once where the API server answers, and are reported as
//! pending where it does not.

use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::test_env::{EVENTS, LATER, SOON, TestEnv};
use serde_json::json;

use crate::{gateways, hostile, sandbox};

// threat: closing-not-written
#[tokio::test]
async fn quarantine_is_pending_where_api_server_is_frozen() {
    let (env, _controller) = TestEnv::meshed(&["mgmt", "tenant-a", "tenant-b"]).await;
    let wide = ["mgmt", "tenant-a"].map(|cluster| (cluster, true));
    let open = async |cluster: &str| {
        let policies = sandbox::policies(&env, cluster).await;
        !policies["prod--tenant-b"].spec.allow.is_empty()
    };
    for (cluster, want) in wide {
        assert_eq!(open(cluster).await, want, "{cluster}");
    }

    // One API server is frozen when an annotation asks for the quarantine. The annotation also contains a name that is
    // no entry.
    let away = env.lab.cluster("tenant-a");
    away.freeze_api().unwrap();
    env.until_condition("Ready", "False/MemberStale", LATER).await;
    let annotate = async |change: &str| {
        let words = ["annotate", "--overwrite", "cmesh", "prod", "-n", NAMESPACE, change];
        env.hub().kubectl(words).await.unwrap();
    };
    annotate("kilo-clustermesh.io/quarantine=tenant-b,tenant-bb").await;
    let closed = async |cluster: &str, want: bool| {
        wait_until(format!("{cluster} to be closed: {want}"), SOON, async || {
            match open(cluster).await {
                open if open != want => Ok(()),
                open => Err(format!("open: {open}")),
            }
        })
        .await
        .unwrap();
    };
    closed("mgmt", true).await;
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

    // When it answers again, the quarantine is in effect there too, all objects still exist, and nothing is pending.
    away.thaw_api().unwrap();
    env.until_condition("PolicyEnforced", "True/Enforced", LATER).await;
    assert!(!open("tenant-a").await);
    let peers = env.peers("tenant-a").await;
    let names: Vec<&String> = peers.keys().collect();
    assert_eq!(names, ["prod--mgmt--mgmt-1", "prod--tenant-b--tenant-b-1"]);
    let message = env.until_condition("Degraded", "True/Quarantined", SOON).await;
    assert!(message.contains("\"tenant-b\""), "{message}");

    annotate("kilo-clustermesh.io/quarantine-").await;
    for cluster in ["mgmt", "tenant-a"] {
        closed(cluster, false).await;
    }
    env.until_condition("Degraded", "False/AllServed", SOON).await;
}

#[tokio::test]
async fn revoked_grant_is_pending_while_target_is_frozen() {
    let env = TestEnv::start(&["mgmt", "tenant-a", "notebooks"]).await;
    for (m, name) in [(1, "mgmt"), (2, "tenant-a"), (3, "notebooks")] {
        env.node(name, m, 1).await;
    }
    sandbox::service(&env, "tenant-a", "team-x", "postgres", 5432, ("10.2.1.9", "tenant-a-1")).await;
    gateways::install(&env, "tenant-a", 2).await;
    let _controller = env.controller().await;
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
    hostile::hostile_sandbox_changes_nothing_in_other_clusters(&env).await;

    let away = env.lab.cluster("tenant-a");
    away.freeze_api().unwrap();
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
    away.thaw_api().unwrap();
    env.until_condition("PolicyEnforced", "True/Enforced", LATER).await;
    env.until_peers("tenant-a", &["prod--mgmt--mgmt-1"], SOON).await;
}
