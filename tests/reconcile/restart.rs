//! Tests that a restarted controller does not mistake a kind that it has not listed yet for one without objects. Otherwise
//! it would delete what an earlier process derived from the objects of that kind.

use clustermesh_api::mesh::ClusterMesh;
use clustermesh_lab::wait_until;
use clustermesh_tests::test_env::{LATER, SOON, TestEnv};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, api::PostParams};
use serde_json::json;

use crate::{gateways, sandbox};

/// The number of additional EndpointSlices in the namespace of the granted Service, so that listing them takes a while.
const SLICES: usize = 3_000;

async fn create_slices(env: &TestEnv) {
    let slices: Api<EndpointSlice> = Api::namespaced(env.client("tenant-a").await, "team-x");
    let made = stream::iter(0..SLICES).map(|n| {
        let slice = json!({
            "metadata": {"name": format!("other-{n}"), "labels": {"kubernetes.io/service-name": "other"}},
            "addressType": "IPv4", "endpoints": [{"addresses": [format!("10.2.{}.{}", 100 + n / 250, n % 250 + 1)]}],
        });
        let (slices, slice) = (slices.clone(), serde_json::from_value(slice).unwrap());
        async move { slices.create(&PostParams::default(), &slice).await.map(drop) }
    });
    made.buffer_unordered(32).try_collect::<Vec<_>>().await.unwrap();
}

/// Waits until the controller has listed all EndpointSlices and watches them.
async fn until_slices_read(env: &TestEnv) {
    wait_until("all slices to be read", LATER, async || {
        let state = env.page("/debug/state").await;
        let state: serde_json::Value = serde_json::from_str(&state).map_err(|error| error.to_string())?;
        let member = &state["members"]["Secret clustermesh/tenant-a-kubeconfig key value"];
        let table = &member["tables"]["endpointSlices"]["team-x"];
        // One more: the EndpointSlice of the granted Service.
        if table["rows"] == SLICES + 1 && table["trust"] == "Live" {
            Ok(())
        } else {
            Err(table.to_string())
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn restart_with_three_thousand_slices_writes_nothing() {
    let env = TestEnv::start(&["mgmt", "tenant-a", "notebooks"]).await;
    for (m, name) in [(1, "mgmt"), (2, "tenant-a"), (3, "notebooks")] {
        env.create_node(name, m, 1).await;
    }
    let backend = ("10.2.1.9", "tenant-a-1");
    sandbox::create_service(&env, "tenant-a", "team-x", "postgres", 5432, backend).await;
    gateways::install(&env, "tenant-a", 2).await;
    create_slices(&env).await;
    let mut mesh = env.mesh();
    let grant = |name: &str| {
        json!([{
            "service": {"cluster": "tenant-a", "namespace": "team-x", "name": "postgres"},
            "as": {"namespace": "default", "name": name},
        }])
    };
    mesh["spec"]["clusters"][0]["egress"] = grant("db-here");
    let entry = &mut mesh["spec"]["clusters"][2];
    entry["isolationProfile"] = json!("sandbox");
    entry["allowedNetworks"] = json!(["100.64.3.0/24"]);
    entry["egress"] = grant("db");
    let mut controller = env.start_controller().await;
    env.apply_mesh(&mesh).await;
    env.until_condition("EgressResolved", "True/Resolved", LATER).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;
    until_slices_read(&env).await;
    assert!(controller.terminate(SOON).await.unwrap().success());
    drop(controller);
    let mut before = env.versions().await;
    let spec = |mesh: ClusterMesh| serde_json::to_value(mesh.spec).unwrap();
    let spec_before = spec(env.get_mesh().await.unwrap());

    let controller = env.start_controller().await;
    until_slices_read(&env).await;
    // The Peer of this new node is the last write: once it exists, all writes that the restart has caused have been sent.
    env.create_node("tenant-a", 2, 2).await;
    let peers = ["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-2"];
    env.until_peers("mgmt", &peers, SOON).await;
    let mut after = env.versions().await;
    after.remove("mgmt Peer/prod--tenant-a--tenant-a-2");
    for versions in [&mut before, &mut after] {
        // The status of the mesh counts the new node.
        versions.remove("mesh");
    }
    assert_eq!(after, before, "{}", controller.log());
    assert_eq!(spec(env.get_mesh().await.unwrap()), spec_before);
}
