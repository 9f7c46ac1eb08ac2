//! A sandbox that enters a cluster through gateways, on real API servers: what the controller writes into both, by what gateways
//! say of themselves and what is seen of their pods. The test plays the gateways.

use std::collections::BTreeSet;

use serde_json::Value;

use super::*;
use reconcile::crd;

const PLACE: &str = "clustermesh-gateway";

/// A gateway's pod, its SandboxGateway, and what it published.
async fn gateway(world: &World, number: u8, ready: bool) {
    let mgmt = world.lab.cluster("mgmt");
    let name = format!("clustermesh-gateway-{number}");
    let uid = [
        "get",
        "pod",
        "-n",
        PLACE,
        &name,
        "--ignore-not-found",
        "-o",
        "jsonpath={.metadata.uid}",
    ];
    if mgmt.kubectl(uid).await.unwrap().stdout.is_empty() {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": PLACE, "labels": {"app.kubernetes.io/name": PLACE}},
            "spec": {"nodeName": "mgmt-1", "containers": [{"name": "gateway", "image": "none"}]},
        });
        let object = json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "SandboxGateway", "metadata": {"name": name, "namespace": PLACE}, "spec": {},
        });
        for object in [pod, object] {
            mgmt.apply(&object.to_string()).await.unwrap();
        }
    }
    let pod_uid = mgmt.kubectl(uid).await.unwrap().stdout;
    status(
        world,
        "sandboxgateway",
        &name,
        &json!({
            "publicKey": key(90, number), "wireguardIPs": [format!("100.64.1.{}", 240 + number)], "podUID": pod_uid,
            "endpoints": ["10.1.9.9:51820", format!("192.0.2.{number}:51821")],
        }),
    )
    .await;
    let ready = if ready { "True" } else { "False" };
    status(
        world,
        "pod",
        &name,
        &json!({"conditions": [{"type": "Ready", "status": ready}]}),
    )
    .await;
}

async fn status(world: &World, kind: &str, name: &str, status: &Value) {
    let patch = json!({"status": status}).to_string();
    let words = [
        "patch",
        kind,
        "-n",
        PLACE,
        name,
        "--subresource=status",
        "--type=merge",
        "-p",
        &patch,
    ];
    world.lab.cluster("mgmt").kubectl(words).await.unwrap();
}

async fn get(world: &World, cluster: &str, words: &[&str]) -> Value {
    let words = [&["get"], words, &["-o", "json"]].concat();
    let said = world.lab.cluster(cluster).kubectl(words).await.unwrap().stdout;
    serde_json::from_str(&said).unwrap()
}

/// The addresses and ports of the mirrored Service's endpoints.
async fn endpoints(world: &World) -> (Vec<String>, Vec<i64>) {
    let slices = get(
        world,
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

async fn until_endpoints(world: &World, want: &[&str]) -> Vec<i64> {
    wait_until(format!("the endpoints to be {want:?}"), SOON, async || {
        let (addresses, ports) = endpoints(world).await;
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
async fn a_sandbox_enters_through_gateways_where_there_are_any() {
    let world = World::start(&["mgmt", "notebooks"]).await;
    for (cluster, m) in [("mgmt", 1), ("notebooks", 2)] {
        world.node(cluster, m, 1).await;
    }
    sandbox::service(&world, "mgmt", "team-x", "postgres", 5432, ("10.1.2.9", "mgmt-1")).await;
    let mgmt = world.lab.cluster("mgmt");
    mgmt.apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": PLACE}}).to_string())
        .await
        .unwrap();
    for kind in ["sandboxaccesses", "sandboxgateways"] {
        mgmt.apply(&crd(kind)).await.unwrap();
    }
    world.established("mgmt", &["sandboxaccesses", "sandboxgateways"]).await;
    let controller = world.controller().await;
    let mut mesh = world.mesh();
    let entry = &mut mesh["spec"]["clusters"][1];
    entry["isolationProfile"] = json!("sandbox");
    entry["allowedNetworks"] = json!(["100.64.2.0/24"]);
    entry["egress"] = json!([{
        "service": {"cluster": "mgmt", "namespace": "team-x", "name": "postgres"},
        "ports": [{"port": 5432}], "as": {"namespace": "default", "name": "db"},
    }]);
    world.apply_mesh(&mesh).await;
    // Without a gateway it enters on the nodes.
    world.until_peers("mgmt", &["prod--notebooks--notebooks-1"], SOON).await;

    // Gateways come: nothing of the sandbox stays on the nodes.
    gateway(&world, 0, true).await;
    gateway(&world, 1, true).await;
    world.until_peers("mgmt", &[], SOON).await;
    let gone = wait_until("the policy of the sandbox to go", SOON, async || {
        let policies = sandbox::policies(&world, "mgmt").await;
        if policies.is_empty() {
            Ok(())
        } else {
            Err(format!("{:?}", policies.keys()))
        }
    });
    gone.await.unwrap();
    let access = get(&world, "mgmt", &["sandboxaccess", "prod--notebooks"]).await;
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
    assert_eq!(until_endpoints(&world, &["100.64.1.240", "100.64.1.241"]).await, [port]);
    let mirror = get(&world, "notebooks", &["service", "db"]).await;
    assert_eq!(mirror["spec"]["ports"][0]["port"], 5432);
    let peers = world.peers("notebooks").await;
    let allowed: BTreeSet<String> = peers.values().flat_map(|peer| peer.spec.allowed_ips.clone()).collect();
    assert_eq!(
        allowed,
        ["100.64.1.240/32", "100.64.1.241/32"].map(str::to_owned).into()
    );
    world.until_condition("EgressResolved", "True/Resolved", SOON).await;
    world.until_condition("Ready", "True/Meshed", SOON).await;

    // A gateway that is not Ready leaves the Service and keeps its Peer; one whose pod was replaced waits for its key.
    gateway(&world, 0, false).await;
    until_endpoints(&world, &["100.64.1.241"]).await;
    assert_eq!(world.peers("notebooks").await.len(), 2);
    gateway(&world, 0, true).await;
    until_endpoints(&world, &["100.64.1.240", "100.64.1.241"]).await;
    mgmt.kubectl([
        "delete",
        "pod",
        "-n",
        PLACE,
        "clustermesh-gateway-1",
        "--grace-period=0",
        "--force",
    ])
    .await
    .unwrap();
    until_endpoints(&world, &["100.64.1.240"]).await;
    gateway(&world, 1, true).await;
    until_endpoints(&world, &["100.64.1.240", "100.64.1.241"]).await;
    let now = get(&world, "mgmt", &["sandboxaccess", "prod--notebooks"]).await;
    assert_eq!(
        now["metadata"]["resourceVersion"],
        access["metadata"]["resourceVersion"]
    );

    // A restart changes nothing; a quarantine takes every grant; the end takes everything.
    let uid = access["metadata"]["uid"].clone();
    drop(controller);
    let _controller = world.controller().await;
    world.until_read(2).await;
    mesh["spec"]["clusters"][1]["quarantine"] = json!(true);
    world.apply_mesh(&mesh).await;
    let closed = wait_until("the grants to go", SOON, async || {
        let access = get(&world, "mgmt", &["sandboxaccess", "prod--notebooks"]).await;
        if access["spec"]["grants"].is_null() {
            Ok(access)
        } else {
            Err(access.to_string())
        }
    });
    assert_eq!(closed.await.unwrap()["metadata"]["uid"], uid);
    mesh["spec"]["clusters"][1]["quarantine"] = json!(false);
    world.apply_mesh(&mesh).await;
    assert_eq!(until_endpoints(&world, &["100.64.1.240", "100.64.1.241"]).await, [port]);
    world
        .hub()
        .kubectl(["delete", "cmesh", "-n", NAMESPACE, "prod"])
        .await
        .unwrap();
    world.until_peers("notebooks", &[], SOON).await;
    let left = mgmt
        .kubectl(["get", "sandboxaccesses", "-o", "name"])
        .await
        .unwrap()
        .stdout;
    assert_eq!(left, "");
}
