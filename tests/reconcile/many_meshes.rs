//! Tests 50 meshes that share the hub: each one writes only its own objects, and their number of writes stays bounded.

use std::collections::{BTreeMap, BTreeSet};

use clustermesh_api::{mesh::ClusterMesh, names};
use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::test_env::{LATER, TestEnv, key};
use kube::{Api, ResourceExt, api::ListParams};
use serde_json::{Value, json};

const MESHES: u8 = 50;
/// The number of meshes with tenant-a; the others have tenant-b. The former share one Secret, the latter have one each.
const OF_TENANT_A: u8 = 25;

/// Mesh `n` has node `n` of the hub and node `n` of a tenant.
fn mesh(n: u8) -> Value {
    let networks = |m: u8| json!([format!("10.{m}.{n}.0/24"), format!("100.64.{m}.{n}/32")]);
    let (tenant, m, secret) = tenant(n);
    json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh",
        "metadata": {"name": format!("mesh-{n:02}"), "namespace": NAMESPACE},
        "spec": {"clusters": [
            {"name": "mgmt", "local": true, "allowedNetworks": networks(1)},
            {"name": tenant, "kubeconfigSecretRef": {"name": secret}, "allowedNetworks": networks(m)},
        ]},
    })
}

fn tenant(n: u8) -> (&'static str, u8, String) {
    if n <= OF_TENANT_A {
        ("tenant-a", 2, "tenant-a-kubeconfig".to_owned())
    } else {
        ("tenant-b", 3, format!("tenant-b-{n}"))
    }
}

async fn list(env: &TestEnv) -> Vec<ClusterMesh> {
    let meshes: Api<ClusterMesh> = Api::namespaced(env.client("mgmt").await, NAMESPACE);
    meshes.list(&ListParams::default()).await.unwrap().items
}

/// The condition `Ready` as `REASON/MESSAGE`; empty if there is none.
fn ready(mesh: &ClusterMesh) -> String {
    let conditions = mesh.status.iter().flat_map(|status| &status.conditions);
    let ready = conditions.into_iter().find(|condition| condition.type_ == "Ready");
    ready.map_or_else(String::new, |ready| format!("{}/{}", ready.reason, ready.message))
}

async fn until_all_ready(env: &TestEnv) {
    wait_until("all meshes to be Ready", LATER, async || {
        let meshes = list(env).await;
        let others: Vec<String> = (meshes.iter())
            .filter(|mesh| {
                !ready(mesh).starts_with("Meshed/")
                    || mesh.status.as_ref().unwrap().observed_generation != mesh.metadata.generation
            })
            .map(|mesh| format!("{}: {}", mesh.name_any(), ready(mesh)))
            .collect();
        if others.is_empty() {
            Ok(())
        } else {
            Err(format!("{} of them: {:?}", others.len(), others.first()))
        }
    })
    .await
    .unwrap();
}

/// The writes since `before`, without Events. `before` is the number of earlier writes of each cluster.
fn writes(env: &TestEnv, before: &BTreeMap<&'static str, usize>) -> Vec<String> {
    let clusters = before.iter().flat_map(|(cluster, count)| {
        let all = env.lab.cluster(cluster).audit().unwrap();
        all.into_iter()
            .skip(*count)
            .map(move |write| format!("{cluster}: {write}"))
    });
    clusters.filter(|write| !write.contains(" events/")).collect()
}

fn counts(env: &TestEnv) -> BTreeMap<&'static str, usize> {
    ["mgmt", "tenant-a", "tenant-b"]
        .map(|name| (name, env.lab.cluster(name).audit().unwrap().len()))
        .into()
}

/// The names of the meshes to whose objects or status the writes belong. A write that names no mesh is returned whole.
fn meshes_of(writes: &[String]) -> BTreeSet<&str> {
    let position = |write: &'_ str| -> Option<usize> { write.find("mesh-") };
    writes
        .iter()
        .map(|write| position(write).map_or(&**write, |at| &write[at..at + "mesh-00".len()]))
        .collect()
}

#[tokio::test]
async fn fifty_meshes_share_a_hub_and_write_only_their_own() {
    let env = TestEnv::start(&["mgmt", "tenant-a", "tenant-b"]).await;
    let kubeconfig = env.kubeconfig("tenant-b").await;
    for n in 1..=MESHES {
        let (cluster, m, secret) = tenant(n);
        env.create_node("mgmt", 1, n).await;
        env.create_node(cluster, m, n).await;
        if cluster == "tenant-b" {
            env.write_secret_as(&secret, &kubeconfig).await;
        }
    }
    let _controller = env.start_controller().await;
    let all: Vec<String> = (1..=MESHES).map(|n| mesh(n).to_string()).collect();
    env.hub().apply(&all.join("\n---\n")).await.unwrap();
    until_all_ready(&env).await;
    let none = ["mgmt", "tenant-a", "tenant-b"].map(|name| (name, 0)).into();
    let first = writes(&env, &none);
    let of_kind = |kind: &str| first.iter().filter(|write| write.contains(kind)).count();
    println!(
        "{} writes for {MESHES} meshes, {} of them of the status",
        first.len(),
        of_kind("clustermeshes/status")
    );
    // For each mesh, the controller writes its finalizer, and a Peer and a PeerPolicy in both clusters. It writes the mesh's
    // status several times, because the status changes while the members are read.
    let meshes = usize::from(MESHES);
    assert_eq!(of_kind("create peers/"), 2 * meshes);
    assert_eq!(of_kind("create peerpolicies/"), 2 * meshes);
    assert!(of_kind("clustermeshes/status") <= 10 * meshes, "{first:?}");
    assert!(first.len() - of_kind("clustermeshes/status") <= 6 * meshes, "{first:?}");

    // One node's endpoint changes: its mesh alone is written.
    let before = counts(&env);
    env.annotate("tenant-a", "tenant-a-7", names::KILO_ENDPOINT, Some("198.51.2.7:777"))
        .await;
    let name = "mesh-07--tenant-a--tenant-a-7";
    wait_until("the new endpoint", LATER, async || {
        let peers = env.peers("mgmt").await;
        let port = peers[name].spec.endpoint.as_ref().map(|endpoint| endpoint.port);
        if port == Some(777) {
            Ok(())
        } else {
            Err(format!("{port:?}"))
        }
    })
    .await
    .unwrap();
    until_all_ready(&env).await;
    let written = writes(&env, &before);
    assert_eq!(meshes_of(&written), ["mesh-07"].into(), "{written:?}");

    released_network_wakes_only_the_waiting_mesh(&env).await;
    assert_eq!(env.peers("mgmt").await[name].spec.public_key, key(2, 7));
}

async fn released_network_wakes_only_the_waiting_mesh(env: &TestEnv) {
    let with_network = |n: u8| {
        let mut mesh = mesh(n);
        mesh["spec"]["clusters"][1]["allowedNetworks"]
            .as_array_mut()
            .unwrap()
            .push(json!("10.200.0.0/16"));
        mesh
    };
    env.apply_mesh(&with_network(11)).await;
    until_all_ready(env).await;
    env.apply_mesh(&with_network(30)).await;
    wait_until("the overlap", LATER, async || {
        let meshes = list(env).await;
        let overlapping = meshes.iter().filter(|mesh| ready(mesh).starts_with("NetworksOverlap/"));
        let names: Vec<String> = overlapping.map(ResourceExt::name_any).collect();
        if names == ["mesh-30"] {
            Ok(())
        } else {
            Err(format!("{names:?}"))
        }
    })
    .await
    .unwrap();
    let before = counts(env);
    env.apply_mesh(&mesh(11)).await;
    until_all_ready(env).await;
    let written = writes(env, &before);
    assert_eq!(meshes_of(&written), ["mesh-11", "mesh-30"].into(), "{written:?}");
}
