//! Tests a sandbox that enters a cluster through gateways, on real API servers. What the controller writes into both
//! clusters depends on the status of SandboxGateways and of their pods, which the test writes in place of the gateways.

use std::collections::BTreeSet;

use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::test_env::{SOON, TestEnv, key};
use serde_json::{Value, json};

use crate::sandbox;

const GATEWAYS: &str = "clustermesh-gateway";

/// Creates two gateways (namespace, CRDs, pods and SandboxGateways) in the cluster `name`, whose number is `m`. The addresses of the
/// gateways are 100.64.m.240 and .241.
pub(crate) async fn install(env: &TestEnv, name: &str, m: u8) {
    let cluster = env.lab.cluster(name);
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": GATEWAYS}});
    cluster.apply(&namespace.to_string()).await.unwrap();
    env.install_crds(name, &["sandboxaccesses", "sandboxgateways"]).await;
    for number in [0, 1] {
        apply_gateway(env, (name, m), number, true).await;
    }
}

/// Creates a gateway's pod and SandboxGateway if they do not exist, and writes the status of both.
async fn apply_gateway(env: &TestEnv, (cluster, m): (&str, u8), number: u8, ready: bool) {
    let target = env.lab.cluster(cluster);
    let name = format!("clustermesh-gateway-{number}");
    let get_uid = [
        "get",
        "pod",
        "-n",
        GATEWAYS,
        &name,
        "--ignore-not-found",
        "-o",
        "jsonpath={.metadata.uid}",
    ];
    if target.kubectl(get_uid).await.unwrap().stdout.is_empty() {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": GATEWAYS, "labels": {"app.kubernetes.io/name": GATEWAYS}},
            "spec": {"nodeName": format!("{cluster}-1"), "containers": [{"name": "gateway", "image": "none"}]},
        });
        let object = json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "SandboxGateway", "metadata": {"name": name, "namespace": GATEWAYS}, "spec": {},
        });
        for object in [pod, object] {
            target.apply(&object.to_string()).await.unwrap();
        }
    }
    let pod_uid = target.kubectl(get_uid).await.unwrap().stdout;
    patch_status(
        (env, cluster),
        "sandboxgateway",
        &name,
        &json!({
            "publicKey": key(90 + m, number), "wireguardIPs": [format!("100.64.{m}.{}", 240 + number)], "podUID": pod_uid,
            "endpoints": [format!("10.{m}.9.9:51820"), format!("192.0.2.{number}:51821")],
        }),
    )
    .await;
    let ready = if ready { "True" } else { "False" };
    patch_status(
        (env, cluster),
        "pod",
        &name,
        &json!({"conditions": [{"type": "Ready", "status": ready}]}),
    )
    .await;
}

async fn patch_status((env, cluster): (&TestEnv, &str), kind: &str, name: &str, status: &Value) {
    let patch = json!({"status": status}).to_string();
    let words = [
        "patch",
        kind,
        "-n",
        GATEWAYS,
        name,
        "--subresource=status",
        "--type=merge",
        "-p",
        &patch,
    ];
    env.lab.cluster(cluster).kubectl(words).await.unwrap();
}

pub(crate) async fn get(env: &TestEnv, cluster: &str, words: &[&str]) -> Value {
    let words = [&["get"], words, &["-o", "json"]].concat();
    let printed = env.lab.cluster(cluster).kubectl(words).await.unwrap().stdout;
    serde_json::from_str(&printed).unwrap()
}

/// The addresses and ports in the EndpointSlices of the mirrored Service.
async fn endpoints(env: &TestEnv) -> (Vec<String>, Vec<i64>) {
    let slices = get(
        env,
        "notebooks",
        &["endpointslices", "-l", "kubernetes.io/service-name=db"],
    )
    .await;
    let (mut addresses, mut ports) = (Vec::new(), Vec::new());
    for slice in slices["items"].as_array().unwrap() {
        for endpoint in slice["endpoints"].as_array().into_iter().flatten() {
            addresses.push(endpoint["addresses"][0].as_str().unwrap().to_owned());
        }
        ports.extend(
            slice["ports"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|port| port["port"].as_i64()),
        );
    }
    (addresses, ports)
}

async fn until_endpoints(env: &TestEnv, want: &[&str]) -> Vec<i64> {
    wait_until(format!("the endpoints to be {want:?}"), SOON, async || {
        let (addresses, ports) = endpoints(env).await;
        if addresses == want {
            Ok(ports)
        } else {
            Err(format!("{addresses:?}"))
        }
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn mirrored_service_has_only_ready_gateways_as_endpoints() {
    let env = TestEnv::start(&["mgmt", "notebooks"]).await;
    for (cluster, m) in [("mgmt", 1), ("notebooks", 2)] {
        env.create_node(cluster, m, 1).await;
    }
    sandbox::create_service(&env, "mgmt", "team-x", "postgres", 5432, ("10.1.2.9", "mgmt-1")).await;
    let mgmt = env.lab.cluster("mgmt");
    let controller = env.start_controller().await;
    let mut mesh = env.mesh();
    let entry = &mut mesh["spec"]["clusters"][1];
    entry["isolationProfile"] = json!("sandbox");
    entry["allowedNetworks"] = json!(["100.64.2.0/24"]);
    entry["egress"] = json!([{
        "service": {"cluster": "mgmt", "namespace": "team-x", "name": "postgres"},
        "ports": [{"port": 5432}], "as": {"namespace": "default", "name": "db"},
    }]);
    env.apply_mesh(&mesh).await;
    // Without a gateway the sandbox cannot enter the cluster, and the condition names the remedy.
    let message = env.until_condition("Ready", "False/NoGateway", SOON).await;
    assert!(message.contains("deploy/gateway.yaml"), "{message}");
    assert_eq!(endpoints(&env).await.0, Vec::<String>::new());
    install(&env, "mgmt", 1).await;
    until_endpoints(&env, &["100.64.1.240", "100.64.1.241"]).await;
    assert!(env.peers("mgmt").await.is_empty() && sandbox::policies(&env, "mgmt").await.is_empty());
    let access = get(&env, "mgmt", &["sandboxaccess", "prod--notebooks"]).await;
    let spec = &access["spec"];
    assert_eq!(
        (&spec["sandbox"], &spec["networks"]),
        (&json!("notebooks"), &json!(["100.64.2.0/24"]))
    );
    assert_eq!(
        spec["nodes"],
        json!([{"name": "notebooks-1", "publicKey": key(2, 1), "wireguardIPs": ["100.64.2.1"]}])
    );
    let port = spec["grants"][0]["gatewayPort"].as_i64().unwrap();
    let service = json!({"namespace": "team-x", "name": "postgres"});
    assert_eq!(
        spec["grants"],
        json!([{"service": service, "port": "main", "protocol": "TCP", "gatewayPort": port}])
    );
    assert_eq!(until_endpoints(&env, &["100.64.1.240", "100.64.1.241"]).await, [port]);
    let mirror = get(&env, "notebooks", &["service", "db"]).await;
    assert_eq!(mirror["spec"]["ports"][0]["port"], 5432);
    let peers = env.peers("notebooks").await;
    let allowed: BTreeSet<String> = peers.values().flat_map(|peer| peer.spec.allowed_ips.clone()).collect();
    assert_eq!(
        allowed,
        ["100.64.1.240/32", "100.64.1.241/32"].map(str::to_owned).into()
    );
    env.until_condition("EgressResolved", "True/Resolved", SOON).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;

    // A gateway that is not Ready is no endpoint of the Service, but keeps its Peer. A gateway whose pod was replaced is
    // an endpoint again when its status contains the UID of the new pod.
    apply_gateway(&env, ("mgmt", 1), 0, false).await;
    until_endpoints(&env, &["100.64.1.241"]).await;
    assert_eq!(env.peers("notebooks").await.len(), 2);
    apply_gateway(&env, ("mgmt", 1), 0, true).await;
    until_endpoints(&env, &["100.64.1.240", "100.64.1.241"]).await;
    mgmt.kubectl([
        "delete",
        "pod",
        "-n",
        GATEWAYS,
        "clustermesh-gateway-1",
        "--grace-period=0",
        "--force",
    ])
    .await
    .unwrap();
    until_endpoints(&env, &["100.64.1.240"]).await;
    apply_gateway(&env, ("mgmt", 1), 1, true).await;
    until_endpoints(&env, &["100.64.1.240", "100.64.1.241"]).await;
    // The controller has not rewritten the SandboxAccess.
    let access_now = get(&env, "mgmt", &["sandboxaccess", "prod--notebooks"]).await;
    assert_eq!(
        access_now["metadata"]["resourceVersion"],
        access["metadata"]["resourceVersion"]
    );

    // The SandboxAccess survives a restart of the controller. A quarantine removes only its grants. The deletion of the mesh removes
    // the SandboxAccess and the gateways' Peers in the sandbox.
    let uid = access["metadata"]["uid"].clone();
    drop(controller);
    let _controller = env.start_controller().await;
    env.until_read(2).await;
    mesh["spec"]["clusters"][1]["quarantine"] = json!(true);
    env.apply_mesh(&mesh).await;
    let without_grants = wait_until("the grants to be removed", SOON, async || {
        let access = get(&env, "mgmt", &["sandboxaccess", "prod--notebooks"]).await;
        if access["spec"]["grants"].is_null() {
            Ok(access)
        } else {
            Err(access.to_string())
        }
    });
    assert_eq!(without_grants.await.unwrap()["metadata"]["uid"], uid);
    mesh["spec"]["clusters"][1]["quarantine"] = json!(false);
    env.apply_mesh(&mesh).await;
    assert_eq!(until_endpoints(&env, &["100.64.1.240", "100.64.1.241"]).await, [port]);
    env.hub()
        .kubectl(["delete", "cmesh", "-n", NAMESPACE, "prod"])
        .await
        .unwrap();
    env.until_peers("notebooks", &[], SOON).await;
    let left = mgmt
        .kubectl(["get", "sandboxaccesses", "-o", "name"])
        .await
        .unwrap()
        .stdout;
    assert_eq!(left, "");
}
