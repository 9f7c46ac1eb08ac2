//! Tests a mesh without an entry for the hub, as a user's Helm chart may render it for the tenant clusters of one namespace.
//! The test's members are two whole clusters of one node each. The hub is only an API server and the controller; it has no
//! node and no agent.

use clustermesh_lab::{LabPlan, NAMESPACE, Product, Tunnel, wait_until};
use clustermesh_tests::test_env::{LATER, TestEnv};
use serde_json::{Value, json};

use crate::setup::{PATIENCE, assert_answers, expected_answer, json, pod, url};

#[tokio::test]
async fn mesh_without_hub_entry_connects_only_its_members() {
    let mut plan = LabPlan::clusters(&[("mgmt", 0), ("tenant-a", 1), ("tenant-b", 1)]);
    plan.clusters[0].controllers = false;
    let env = TestEnv::start_plan(plan).await;
    let (a, b) = (env.lab.cluster("tenant-a"), env.lab.cluster("tenant-b"));
    Product::install_agents(&env.lab, &["tenant-a", "tenant-b"], Tunnel::Userspace, &|_| {})
        .await
        .unwrap();
    let (webs_a, webs_b) = (a.run_web().await.unwrap(), b.run_web().await.unwrap());
    let _controller = env.start_controller().await;

    let entry = |name: &str, egress: Value| {
        let plan = env.lab.cluster(name).plan().clone();
        let networks = [
            plan.pod_cidr.to_string(),
            plan.wireguard_cidr.to_string(),
            plan.service_cidr.to_string(),
        ];
        json!({
            "name": name, "kubeconfigSecretRef": {"name": format!("{name}-kubeconfig")},
            "allowedNetworks": networks, "wireguardPort": 51820, "egress": egress,
        })
    };
    let service = json!({"cluster": "tenant-a", "namespace": "default", "name": "web"});
    let egress = json!([{"service": service, "as": {"namespace": "default", "name": "web-of-a"}}]);
    let mesh = json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh",
        "metadata": {"name": "prod", "namespace": NAMESPACE},
        "spec": {"clusters": [entry("tenant-a", json!([])), entry("tenant-b", egress)]},
    });
    env.apply_mesh(&mesh).await;
    let message = env.until_condition("Ready", "True/Meshed", LATER).await;
    assert_eq!(message, "2 nodes of 2 clusters are meshed");

    for (clients, servers) in [(&webs_a, &webs_b), (&webs_b, &webs_a)] {
        for (from, to) in clients.iter().zip(servers) {
            assert_answers(&env.lab, &pod(from), &url(to.ip, 8080), &[expected_answer(to, from.ip)]).await;
        }
    }
    let mirrored = b.cluster_ip("default", "web-of-a").await.unwrap();
    let want: Vec<_> = webs_a.iter().map(|to| expected_answer(to, webs_b[0].ip)).collect();
    assert_answers(&env.lab, &pod(&webs_b[0]), &url(mirrored, 80), &want).await;
    // A positive control: the same query finds objects in a member.
    assert_eq!(
        objects(&env, "tenant-a").await,
        ["Peer/prod--tenant-b--tenant-b-1", "PeerPolicy/prod--tenant-b"]
    );
    assert_eq!(objects(&env, "mgmt").await, Vec::<String>::new());

    let delete = ["-n", NAMESPACE, "delete", "clustermesh", "prod", "--timeout=60s"];
    env.hub().kubectl(delete).await.unwrap();
    for cluster in ["tenant-a", "tenant-b"] {
        wait_until(
            format!("{cluster} to have no Peers and PeerPolicies"),
            PATIENCE,
            async || {
                let left = objects(&env, cluster).await;
                if left.is_empty() {
                    Ok(())
                } else {
                    Err(format!("{left:?}"))
                }
            },
        )
        .await
        .unwrap();
    }
}

/// The Peers and PeerPolicies of a cluster, as `KIND/NAME`.
async fn objects(env: &TestEnv, cluster: &str) -> Vec<String> {
    let kinds = "peers.kilo.squat.ai,peerpolicies.kilo.squat.ai";
    let listed = json(&env.lab.cluster(cluster), &["get", kinds]).await;
    let items = listed["items"].as_array().unwrap().iter();
    let name = |item: &Value| [&item["kind"], &item["metadata"]["name"]].map(|text| text.as_str().unwrap().to_owned());
    items.map(|item| name(item).join("/")).collect()
}
