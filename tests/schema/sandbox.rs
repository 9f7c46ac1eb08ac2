//! Tests the CRDs SandboxAccess and SandboxGateway: which objects an API server accepts, and the messages
//! of refusals.

use crate::api_server::ApiServer;
use serde_json::{Value, json};

const ACCESSES: &str = "/apis/kilo.squat.ai/v1alpha1/sandboxaccesses";
const GATEWAYS: &str = "/apis/kilo.squat.ai/v1alpha1/namespaces/default/sandboxgateways";

fn access() -> Value {
    json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "SandboxAccess", "metadata": {"name": "prod--nb"},
        "spec": {
            "sandbox": "nb", "sandboxID": "0123abcd", "networks": ["100.80.16.0/20", "fd80::/64"],
            "nodes": [{"name": "nb-1", "publicKey": key(1), "wireguardIPs": ["100.80.16.1", "fd80::1"]}],
            "grants": [
                {"service": {"namespace": "team-x", "name": "postgres"}, "port": "pg", "gatewayPort": 20001},
                {"service": {"namespace": "team-x", "name": "dns"}, "port": "", "protocol": "UDP", "gatewayPort": 20001},
            ],
            "newConnectionsPerSecond": 500,
        },
    })
}

fn key(number: u16) -> String {
    format!("{number:0>43}=")
}

async fn refused(server: &ApiServer, path: &str, object: &Value) -> String {
    let (code, message) = server.dry_run(path, object).await.expect_err("a refusal");
    assert_eq!(code, 422, "{message}");
    message
}

#[tokio::test]
async fn malformed_sandboxaccess_is_refused_with_its_field() {
    let server = ApiServer::start().await;
    let mut stored = server.dry_run(ACCESSES, &access()).await.unwrap();
    let mut expected = access()["spec"].clone();
    expected["grants"][0]["protocol"] = json!("TCP");
    assert_eq!(stored["spec"].take(), expected);

    let network = "is not a network: write an address and a prefix length, such as 10.244.0.0/16 or fd00:10:244::/48";
    let address = "is not an address: write it without a prefix length, such as 100.80.16.1 or fd00:80::1";
    let cases = [
        (
            "/networks/0",
            json!("x"),
            format!("spec.networks[0]: Invalid value: \"x\": {network}"),
        ),
        (
            "/nodes/0/wireguardIPs/0",
            json!("100.80.16.1/32"),
            format!("spec.nodes[0].wireguardIPs[0]: Invalid value: \"100.80.16.1/32\": {address}"),
        ),
        (
            "/grants/1/protocol",
            json!("SCTP"),
            "a gateway translates only TCP and UDP: SCTP cannot be granted to a sandbox".to_owned(),
        ),
        (
            "/grants/1/protocol",
            json!("TCP"),
            "spec.grants[1]: Duplicate value".to_owned(),
        ),
        (
            "/grants/0/gatewayPort",
            json!(0),
            "spec.grants[0].gatewayPort".to_owned(),
        ),
        (
            "/nodes/0/publicKey",
            json!("short"),
            "spec.nodes[0].publicKey".to_owned(),
        ),
        ("/networks", json!([]), "spec.networks".to_owned()),
        (
            "/newConnectionsPerSecond",
            json!(0),
            "spec.newConnectionsPerSecond".to_owned(),
        ),
    ];
    for (path, value, expected) in cases {
        let mut object = access();
        *object["spec"].pointer_mut(path).unwrap() = value;
        let message = refused(&server, ACCESSES, &object).await;
        assert!(message.contains(&expected), "{path}: {message}");
    }
}

// threat: oversized-access
#[tokio::test]
async fn access_of_largest_sandbox_is_stored() {
    let server = ApiServer::start().await;
    let mut object = access();
    let nodes = (0..5000_u16).map(|i| {
        json!({
            // The longest name that the controller writes: `MAX_NODE_NAME` of the planner.
            "name": format!("{i:040}"), "publicKey": key(i), "wireguardIPs": [format!("100.80.{}.{}", 16 + i / 256, i % 256)],
        })
    });
    object["spec"]["nodes"] = nodes.collect();
    let grants = (0..2048_u16).map(|i| {
        json!({"service": {"namespace": "team-x", "name": format!("service-of-team-x-{i}")}, "port": "pg", "protocol": "TCP", "gatewayPort": 20_000 + i})
    });
    object["spec"]["grants"] = grants.collect();
    // Not a dry run, because that would not reach etcd, which limits an object to 1.5 MiB.
    let stored = server.post(ACCESSES, &object).await.unwrap();
    assert_eq!(stored["spec"]["nodes"].as_array().map(Vec::len), Some(5000));
}

#[tokio::test]
async fn gateway_endpoints_must_be_addresses_with_ports() {
    let server = ApiServer::start().await;
    let gateway = |endpoints: Value| {
        json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "SandboxGateway",
            "metadata": {"name": "clustermesh-gateway-0", "namespace": "default"},
            "spec": {"endpoints": endpoints, "nodePort": 51821},
        })
    };
    let good = json!(["203.0.113.7:31820", "[2001:db8::7]:51820"]);
    let stored = server.dry_run(GATEWAYS, &gateway(good.clone())).await.unwrap();
    assert_eq!(stored["spec"]["endpoints"], good);
    for bad in [
        "203.0.113.7",
        "gateway.example.org:51820",
        "2001:db8::7:51820",
        ":51820",
    ] {
        let message = refused(&server, GATEWAYS, &gateway(json!([bad]))).await;
        assert!(
            message.contains("is not an address with a port: write it as 203.0.113.7:51820"),
            "{message}"
        );
    }
}

/// If the JSONPath of a printer column has several results, the API server prints only the first. A column of Services would hide the
/// others.
#[tokio::test]
async fn sandboxaccess_columns_do_not_show_only_the_first_service() {
    let server = ApiServer::start().await;
    server.apply(&access().to_string()).await;
    let list = server.kubectl(&["get", "sandboxaccesses", "-o=wide"]).await;
    assert!(list.contains("prod--nb"), "{list}");
    assert_eq!(list.contains("postgres"), list.contains("dns"), "{list}");
}
