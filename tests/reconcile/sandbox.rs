//! Tests a sandbox that is granted a Service of another cluster, on real API servers. The objects in the sandbox contain only the data
//! of that cluster that the grant needs, and none after its revocation. In a confined mesh, a grant needs the consent of the Service's
//! owner.

use std::collections::BTreeMap;

use clustermesh_api::policy::PeerPolicy;
use clustermesh_core::mesh::Protocol;
use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::test_env::{SOON, TestEnv, key};
use kube::{Api, ResourceExt, api::ListParams};
use serde_json::{Value, json};

use crate::gateways;

/// Creates a namespace with a Service that has a selector, and the EndpointSlice that Kubernetes would create, with one endpoint (address
/// and Node).
pub(crate) async fn create_service(
    env: &TestEnv,
    cluster: &str,
    namespace: &str,
    name: &str,
    port: u16,
    endpoint: (&str, &str),
) {
    let metadata = json!({"name": name, "namespace": namespace});
    let labels = json!({"kubernetes.io/service-name": name});
    let objects = [
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}),
        json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata,
            "spec": {"selector": {"app": name}, "ports": [{"name": "main", "port": port}, {"name": "not-granted", "port": 9187}]}}),
        json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": format!("{name}-1"), "namespace": namespace, "labels": labels},
            "ports": [{"name": "main", "port": port}, {"name": "not-granted", "port": 9187}],
            "endpoints": [{"addresses": [endpoint.0], "nodeName": endpoint.1, "conditions": {"ready": true}}]}),
    ];
    for object in objects {
        env.lab.cluster(cluster).apply(&object.to_string()).await.unwrap();
    }
}

/// The objects that `dump_objects` lists, as one text. Asserts that cluster-scoped kinds are among them.
async fn all_objects(env: &TestEnv, cluster: &str) -> String {
    let all = env.lab.cluster(cluster).dump_objects().await.unwrap();
    for kind in ["Namespace", "ClusterRoleBinding"] {
        assert!(all.contains(&format!("\"kind\": \"{kind}\"")), "no {kind} is listed");
    }
    all
}

pub(crate) async fn policies(env: &TestEnv, cluster: &str) -> BTreeMap<String, PeerPolicy> {
    let policies: Api<PeerPolicy> = Api::all(env.client(cluster).await);
    let policies = policies.list(&ListParams::default()).await.unwrap();
    policies
        .items
        .into_iter()
        .map(|policy| (policy.name_any(), policy))
        .collect()
}

const IPALLOCATOR_EVENT: &str = "
apiVersion: v1
kind: Event
metadata: {name: db.remark, namespace: default}
involvedObject: {apiVersion: v1, kind: Service, namespace: default, name: db}
reportingComponent: ipallocator-repair-controller
reportingInstance: ipallocator-repair-controller-1
reason: ClusterIPNotAllocated
type: Warning
";

// threat: sandbox-reads-target
#[tokio::test]
async fn sandbox_contains_only_data_of_its_grant() {
    let env = TestEnv::start(&["mgmt", "notebooks"]).await;
    env.create_node("mgmt", 1, 1).await;
    env.create_node("mgmt", 1, 2).await;
    env.create_node("notebooks", 2, 1).await;
    create_service(&env, "mgmt", "team-x", "postgres", 5432, ("10.1.2.9", "mgmt-2")).await;
    create_service(&env, "mgmt", "team-y", "payroll", 8443, ("10.1.1.8", "mgmt-1")).await;
    gateways::install(&env, "mgmt", 1).await;
    let additional_ports = ["--infrastructure-port", "8132/TCP", "--infrastructure-port", "53/udp"];
    let _controller = env.start_controller_for(NAMESPACE, &additional_ports).await;
    let mut mesh = env.mesh();
    let entry = &mut mesh["spec"]["clusters"][1];
    entry["isolationProfile"] = json!("sandbox");
    entry["allowedNetworks"] = json!(["100.64.2.0/24"]);
    entry["egress"] = json!([{
        "service": {"cluster": "mgmt", "namespace": "team-x", "name": "postgres"},
        "ports": [{"port": 5432}], "as": {"namespace": "default", "name": "db"},
    }]);
    env.apply_mesh(&mesh).await;

    env.until_condition("EgressResolved", "True/Resolved", SOON).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;

    // The cluster of the Service, mgmt, contains a SandboxAccess, but no Peer or PeerPolicy.
    let access = gateways::get(&env, "mgmt", &["sandboxaccess", "prod--notebooks"]).await;
    let spec = &access["spec"];
    assert_eq!(
        (
            &spec["networks"],
            &spec["nodes"][0]["publicKey"],
            &spec["nodes"][0]["wireguardIPs"]
        ),
        (&json!(["100.64.2.0/24"]), &json!(key(2, 1)), &json!(["100.64.2.1"]))
    );
    let granted = spec["grants"].as_array().unwrap();
    assert_eq!(granted.len(), 1);
    assert_eq!(
        granted[0]["service"],
        json!({"namespace": "team-x", "name": "postgres"})
    );
    assert_eq!(granted[0]["port"], "main");
    assert!(env.peers("mgmt").await.is_empty() && policies(&env, "mgmt").await.is_empty());

    // The sandbox contains Peers for the gateways, and a PeerPolicy that allows no connection from them.
    let peers = env.peers("notebooks").await;
    let specs: Vec<Value> = peers
        .values()
        .map(|peer| serde_json::to_value(&peer.spec).unwrap())
        .collect();
    let gateway = |number: u8| {
        json!({
            "publicKey": key(91, number), "allowedIPs": [format!("100.64.1.{}/32", 240 + number)], "persistentKeepalive": 25,
            "endpoint": {"dnsOrIP": {"ip": format!("192.0.2.{number}")}, "port": 51821},
        })
    };
    assert_eq!(specs, [gateway(0), gateway(1)]);
    let written = policies(&env, "notebooks").await;
    let policy = &written["prod--mgmt"].spec;
    assert!(policy.allow.is_empty(), "{policy:?}");
    // The policy has the ports of `--infrastructure-port` in addition to the ten default infrastructure ports.
    let ports: Vec<_> = (policy.infrastructure_ports.iter())
        .map(|infrastructure| (infrastructure.port, infrastructure.protocol))
        .collect();
    assert_eq!(ports.len(), 12, "{ports:?}");
    for port in [(8132, Protocol::Tcp), (53, Protocol::Udp), (10250, Protocol::Tcp)] {
        assert!(ports.contains(&port), "{port:?} in {ports:?}");
    }

    let seen = all_objects(&env, "notebooks").await;
    assert!(seen.contains("100.64.1.240") && seen.contains("\"db\""));
    let api = env.lab.cluster("mgmt").plan().api_address().to_string();
    let inside = env.lab.cluster("mgmt").inside_kubeconfig().unwrap();
    let credentials = inside.lines().filter_map(|line| {
        let (field, value) = line.trim().trim_start_matches("- ").split_once(": ")?;
        let is_secret = field.starts_with("client-") || field.starts_with("token");
        (is_secret && value.len() > 16).then(|| value.to_owned())
    });
    let data_of_mgmt = [
        "mgmt-1",
        "mgmt-2",
        "team-x",
        "team-y",
        "payroll",
        "not-granted",
        "port\": 9187",
        "10.1.1.",
        "10.1.2.",
        "10.1.0.0",
        "198.51.1.1",
        "198.51.1.2",
        "100.64.1.1\"",
        "100.64.1.1/",
        "100.64.1.2\"",
        "100.64.1.2/",
    ];
    let mut hidden: Vec<String> = data_of_mgmt.map(str::to_owned).into();
    hidden.extend([key(1, 1), key(1, 2), format!("\"{api}"), format!("{api}:")]);
    hidden.extend(credentials);
    for word in &hidden {
        assert!(!seen.contains(&**word), "{word} is in the sandbox");
    }

    // An API server may publish this Event about any new Service. The Event names the Service and outlives it, so `dump_objects` must
    // leave it out.
    env.lab.cluster("notebooks").apply(IPALLOCATOR_EVENT).await.unwrap();

    // After the revocation of the grant, neither cluster contains an object of it.
    mesh["spec"]["clusters"][1]["egress"] = json!([]);
    env.apply_mesh(&mesh).await;
    env.until_peers("notebooks", &[], SOON).await;
    wait_until("PeerPolicy and SandboxAccess to be deleted", SOON, async || {
        let left = policies(&env, "notebooks").await;
        let accesses = gateways::get(&env, "mgmt", &["sandboxaccesses"]).await;
        if left.is_empty() && accesses["items"] == json!([]) {
            Ok(())
        } else {
            Err(format!("{left:?}, {accesses}"))
        }
    })
    .await
    .unwrap();
    hidden.extend(["100.64.1.24", "192.0.2.", "\"db\"", "mgmt\""].map(str::to_owned));
    hidden.extend([key(91, 0), key(91, 1)]);
    wait_until("the sandbox without data of the grant", SOON, async || {
        let seen = all_objects(&env, "notebooks").await;
        match hidden.iter().find(|word| seen.contains(&***word)) {
            None => Ok(()),
            Some(word) => Err(format!("{word} is in the sandbox")),
        }
    })
    .await
    .unwrap();
    env.until_condition("Ready", "True/Meshed", SOON).await;
}

/// The mesh is confined: `--hub-namespace` allows its namespace only sandboxes, in the given networks.
// threat: grant-across-namespaces, unlisted-network
#[tokio::test]
async fn confined_mesh_gets_service_only_with_owners_consent() {
    let env = TestEnv::start(&["mgmt", "notebooks"]).await;
    env.create_node("mgmt", 1, 1).await;
    env.create_node("notebooks", 2, 1).await;
    create_service(&env, "mgmt", "team-x", "postgres", 5432, ("10.1.1.9", "mgmt-1")).await;
    gateways::install(&env, "mgmt", 1).await;
    let hub_network_flag = "--hub-network=10.1.0.0/16,100.64.1.0/24,198.51.1.0/24";
    let hub_namespace = format!("{NAMESPACE}=sandbox,100.64.2.0/24");
    let _controller = env.start_controller_for(&hub_namespace, &[hub_network_flag]).await;
    let mut mesh = env.mesh();
    let entry = &mut mesh["spec"]["clusters"][1];
    entry["isolationProfile"] = json!("sandbox");
    entry["allowedNetworks"] = json!(["128.0.0.0/8"]);
    entry["egress"] = json!([{
        "service": {"cluster": "mgmt", "namespace": "team-x", "name": "postgres"}, "as": {"namespace": "default", "name": "db"},
    }]);
    env.apply_mesh(&mesh).await;
    let message = env.until_condition("Ready", "False/NetworksNotAllowed", SOON).await;
    assert!(
        message.contains("\"notebooks\" has 128.0.0.0/8") && message.contains(&format!("{NAMESPACE}=sandbox,")),
        "{message}"
    );
    let accesses = async || gateways::get(&env, "mgmt", &["sandboxaccesses"]).await["items"].clone();
    assert_eq!(accesses().await, json!([]));

    mesh["spec"]["clusters"][1]["allowedNetworks"] = json!(["100.64.2.0/24"]);
    env.apply_mesh(&mesh).await;
    let message = env.until_condition("EgressResolved", "False/Unresolved", SOON).await;
    let remedy = format!("the annotation kilo-clustermesh.io/allowed-from: {NAMESPACE} on the Service");
    assert!(message.contains(&remedy), "{message}");
    let wait_for_grants = async |want: usize| {
        wait_until(format!("{want} grants"), SOON, async || {
            let accesses = accesses().await;
            match accesses[0]["spec"]["grants"].as_array().map_or(0, Vec::len) {
                found if found == want && accesses[0].is_object() => Ok(()),
                found => Err(format!("{found} in {accesses}")),
            }
        })
        .await
        .unwrap();
    };
    wait_for_grants(0).await;

    let annotate = async |change: &str| {
        let words = ["annotate", "--overwrite", "service", "postgres", "-n", "team-x", change];
        env.hub().kubectl(words).await.unwrap();
    };
    annotate(&format!("kilo-clustermesh.io/allowed-from=other, {NAMESPACE}")).await;
    env.until_condition("EgressResolved", "True/Resolved", SOON).await;
    // The egress entry names no ports, so it grants both ports of the Service.
    wait_for_grants(2).await;

    // The owner of the Service revokes its consent; the mesh does not change.
    annotate("kilo-clustermesh.io/allowed-from-").await;
    env.until_condition("EgressResolved", "False/Unresolved", SOON).await;
    wait_for_grants(0).await;
}
